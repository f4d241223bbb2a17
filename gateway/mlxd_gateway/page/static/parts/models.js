// The models: their states, and what may be done about each.

import { bytes, count, duration, percent, share } from "../lib/format.js";
import { unlisted } from "../lib/loads.js";
import { html, useRef, useState } from "../lib/ui.js";

const FILTER_FROM = 8;
const RANKS = {
  ready: 0, loading: 0, draining: 0, unloading: 0, queued: 0, failed: 1, unloaded: 2, unknown: 3,
};
const COLUMNS = [
  ["Model", ""], ["State", ""], ["Memory", "number"], ["Context", "number wide"],
  ["Streams", "number wide"], ["Actions", "actions"],
];
const HELD = ["ready", "draining"];
const MOVING = ["queued", "loading", "unloading"];

/** @param {any} props `models` null: the list has not come yet */
export function Models({ models, rights, loads, status }) {
  const [wanted, setWanted] = useState("");
  const shown = (models ?? [])
    .filter((model) => matches(model, wanted))
    .sort((a, b) => RANKS[a.state] - RANKS[b.state] || a.name.localeCompare(b.name));
  const filters = (models ?? []).length >= FILTER_FROM;
  return html`
    <section class="panel models" aria-labelledby="models-title">
      <div class="panel-head">
        <h2 id="models-title">Models</h2>
        ${filters &&
        html`<input
          type="search"
          placeholder="Filter"
          aria-label="Filter models by name"
          value=${wanted}
          onInput=${(event) => setWanted(event.currentTarget.value)}
        />`}
      </div>
      <p class="hidden" role="status">${loads.news}</p>
      ${unlisted(loads, models ?? []).map(
        ([name, { error }]) => html`<p key=${name} class="error">${name}: ${error}</p>`,
      )}
      ${models === null && html`<p class="note">Asking for the models.</p>`}
      ${models?.length === 0 &&
      html`<p class="note">No models yet: <code>mlxd pull ORG/NAME</code> fetches one.</p>`}
      ${shown.length > 0 &&
      html`
        <table role="table">
          <thead role="rowgroup">
            <tr role="row">
              ${COLUMNS.filter(([name]) => name !== "Actions" || rights.manage).map(
                ([name, kind]) =>
                  html`<th key=${name} role="columnheader" scope="col" class=${kind}>${name}</th>`,
              )}
            </tr>
          </thead>
          <tbody role="rowgroup">
            ${shown.map(
              (model) =>
                html`<${Row} key=${model.name} ...${{ model, rights, loads, now: status?.now }} />`,
            )}
          </tbody>
        </table>
      `}
    </section>
  `;
}

/** @returns {boolean} whether a model has what is wanted in one of its names */
function matches(model, wanted) {
  const text = [model.name, ...model.aliases, model.architecture].join(" ").toLowerCase();
  return text.includes(wanted.trim().toLowerCase());
}

/** One model. */
function Row({ model, rights, loads, now }) {
  const own = loads.byName[model.name] ?? { model: null, error: "", busy: false };
  const latest = own.model ?? model;
  const held = HELD.includes(latest.state);
  const about = [model.architecture, ...model.aliases.map((alias) => `also ${alias}`)];
  return html`
    <tr role="row" class=${held ? "held" : ""}>
      <th role="rowheader" scope="row">
        <span class="name">${model.name}</span>
        <span class="about">${about.filter(Boolean).join(" · ")}</span>
      </th>
      <td role="cell">
        <${State} ...${{ model: latest, now, error: own.error, busy: own.busy }} />
      </td>
      <td role="cell" class="number">
        ${held
          ? html`${bytes(latest.resident_nbytes)}<span class="about">${latest.weights}</span>`
          : html`<span class="stored">${bytes(latest.stored_nbytes)}</span>
              <span class="about">on disk</span>`}
      </td>
      <td role="cell" class="number wide">
        ${count(latest.context_length || latest.context_length_max)}
        ${held && html`<span class="about">of ${count(latest.context_length_max)}</span>`}
      </td>
      <td role="cell" class="number wide">
        ${held
          ? html`${latest.streams}<span class="about">${latest.rows_max} rows</span>`
          : "–"}
      </td>
      ${rights.manage &&
      html`<td role="cell" class="actions">
        <${Actions} ...${{ model: latest, loads, busy: own.busy }} />
      </td>`}
    </tr>
  `;
}

/** What a model is doing; a load with how far it has come. */
function State({ model, now, error, busy }) {
  const loads = model.state === "loading" || model.state === "queued";
  const done = share(model.read_nbytes, model.total_nbytes);
  const text = busy && model.state === "unloaded" ? "requested" : model.state;
  return html`
    <span class=${`state ${model.state}`}>
      <span class="dot" aria-hidden="true"></span>${text}
      ${model.pinned && html`<span class="tag">pinned</span>`}
    </span>
    ${loads &&
    html`
      <progress
        max="1"
        value=${model.total_nbytes ? done : null}
        aria-label=${`Loading ${model.name}`}
      ></progress>
      <span class="about">
        ${model.stage || "waiting"} ${model.total_nbytes ? percent(done) : ""}
      </span>
    `}
    ${model.state === "ready" && !model.pinned && model.expires && now &&
    html`<span class="about">unloads in ${duration(Math.max(model.expires - now, 0))}</span>`}
    ${(error || model.error) && html`<span class="error">${error || model.error}</span>`}
  `;
}

/** What may be done about a model in its state. */
function Actions({ model, loads, busy }) {
  const { name } = model;
  if (HELD.includes(model.state)) {
    return html`
      <button
        aria-pressed=${model.pinned ? "true" : "false"}
        aria-label=${`Pin ${name}`}
        title="A pinned model is never evicted"
        disabled=${busy}
        onClick=${() => loads.load({ model: name, pinned: !model.pinned })}
      >
        ${model.pinned ? "Unpin" : "Pin"}
      </button>
      <${Unload} ...${{ model, loads, busy }} />
    `;
  }
  const moves = busy || MOVING.includes(model.state);
  return html`
    <a class="button" href=${`#fit/${encodeURIComponent(name)}`} aria-label=${`Fit of ${name}`}>
      Fit
    </a>
    <button
      class="primary"
      aria-label=${`Load ${name}`}
      disabled=${moves}
      onClick=${() => loads.load({ model: name })}
    >
      Load
    </button>
  `;
}

/** Unloads at once where nobody is served, and asks first where somebody is. */
function Unload({ model, loads, busy }) {
  const dialog = useRef(null);
  const end = (options) => {
    dialog.current.close();
    void loads.unload(model.name, options);
  };
  const ask = () => {
    if (model.streams === 0) {
      void loads.unload(model.name, {});
    } else {
      dialog.current.showModal();
    }
  };
  const title = `unload-${model.name}`;
  return html`
    <button aria-label=${`Unload ${model.name}`} disabled=${busy} onClick=${ask}>Unload</button>
    <dialog ref=${dialog} aria-labelledby=${title}>
      <h3 id=${title}>Unload ${model.name}?</h3>
      <p>${model.streams} ${model.streams === 1 ? "stream is" : "streams are"} in progress.</p>
      <div class="row">
        <button onClick=${() => dialog.current.close()}>Keep it</button>
        <button onClick=${() => end({})}>Give them 30 s</button>
        <button class="danger" onClick=${() => end({ force: true })}>End them now</button>
      </div>
    </dialog>
  `;
}
