// A worker's own lines, as it writes them.

import { follow } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/ui.js";

const LINES_MAX = 2000;
const AGAIN_MS = 3000;

/** @param {any} props */
export function LogView({ models }) {
  const [chosen, setChosen] = useState("");
  const [lines, setLines] = useState([]);
  const [said, setSaid] = useState("");
  const [wanted, setWanted] = useState("");
  const box = useRef(null);
  const follows = useRef(true);
  const held = models.filter(({ state }) => state !== "unloaded");
  const model = chosen || held[0]?.name || models[0]?.name || "";
  const runs = held.some(({ name, state }) => name === model && state !== "failed");

  useEffect(() => {
    const leaving = new AbortController();
    let timer = 0;
    const read = async () => {
      let first = true;
      try {
        const path = `api/logs?model=${encodeURIComponent(model)}`;
        for await (const { name, data } of follow(path, { signal: leaving.signal })) {
          if (name === "lines") {
            const missed = data.missed ? [`… ${data.missed} lines were missed …`] : [];
            setSaid(`Process ${data.pid}`);
            const isFirst = first;
            first = false;
            setLines((before) =>
              [...(isFirst ? [] : before), ...missed, ...data.lines].slice(-LINES_MAX));
          }
        }
        setSaid("The worker has ended.");
      } catch (error) {
        if (leaving.signal.aborted) {
          return;
        }
        setSaid(error.message);
        if (error.status === 0) {
          timer = setTimeout(read, AGAIN_MS);
        }
      }
    };
    setLines([]);
    setSaid("");
    if (model) {
      void read();
    }
    return () => {
      leaving.abort();
      clearTimeout(timer);
    };
  }, [model, runs]);

  useEffect(() => {
    if (follows.current) {
      box.current.scrollTop = box.current.scrollHeight;
    }
  }, [lines, wanted]);

  const shown = wanted ? lines.filter((line) => line.includes(wanted)) : lines;
  return html`
    <section class="panel log" aria-labelledby="log-title">
      <div class="panel-head">
        <h2 id="log-title">Log</h2>
        <select
          aria-label="Model"
          value=${model}
          onChange=${(event) => setChosen(event.currentTarget.value)}
        >
          ${models.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
        <input
          type="search"
          placeholder="Filter"
          aria-label="Show lines with this text"
          value=${wanted}
          onInput=${(event) => setWanted(event.currentTarget.value)}
        />
        <span class="note" role="status">${said}</span>
      </div>
      <pre
        ref=${box}
        tabindex="0"
        role="log"
        aria-live="off"
        aria-label=${`Log of ${model}`}
        onScroll=${({ currentTarget: pre }) => {
          follows.current = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 8;
        }}
      >${shown.join("\n")}</pre>
    </section>
  `;
}
