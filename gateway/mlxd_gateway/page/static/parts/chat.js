// The chat: turns, an answer while it is written, and its end, by itself or because it is stopped.

import { follow } from "../lib/api.js";
import { count, figure } from "../lib/format.js";
import { grow, messagesOf, openCalls, toolsOf, turn } from "../lib/chat.js";
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { Composer } from "./composer.js";
import { DEFAULTS, Settings } from "./settings.js";
import { Turns } from "./turns.js";

/** @param {any} props `hidden` keeps a conversation while another view is open */
export function ChatView({ models, hidden }) {
  const [settings, setSettings] = useState(DEFAULTS);
  const [turns, setTurns] = useState([]);
  const [problem, setProblem] = useState("");
  const writing = useRef(null);
  const said = useRef(null);
  const follows = useRef(true);
  const last = turns[turns.length - 1];
  const writes = last?.state === "writing";
  const model = chosenOf(models, settings.model);

  useEffect(() => () => writing.current?.abort(), []);
  useEffect(() => {
    if (follows.current) {
      said.current.scrollTop = said.current.scrollHeight;
    }
  }, [turns, hidden]);

  /** Ask for an answer to these turns; false where the settings do not allow to. */
  const answer = (asked) => {
    try {
      void write(requestOf(model, settings, asked), asked);
      setProblem("");
      return true;
    } catch (error) {
      setProblem(`Tools: ${error.message}`);
      return false;
    }
  };

  /** Have the answer to a request grow behind what was asked. */
  const write = async (request, asked) => {
    const stop = new AbortController();
    writing.current = stop;
    let grown = turn("assistant");
    let firstMs = 0;
    const show = (change) => {
      grown = { ...grown, ...change };
      setTurns([...asked, grown]);
    };
    show({});
    try {
      const options = { body: request.body, signal: stop.signal };
      for await (const event of follow(request.path, options)) {
        show(grow(grown, event));
        firstMs ||= grown.text || grown.reasoning ? performance.now() : 0;
      }
      show({ state: "done", note: endNote(grown, (performance.now() - firstMs) / 1000) });
    } catch (error) {
      show(stop.signal.aborted ? { state: "stopped" } : { state: "failed", note: error.message });
    }
  };

  const send = (text, pictures) => answer([...turns, turn("user", text, pictures)]);
  const answerCall = (index, id, result) => {
    const calls = turns[index].calls.map((call) => (call.id === id ? { ...call, result } : call));
    const now = turns.map((each, at) => (at === index ? { ...each, calls } : each));
    setTurns(now);
    if (openCalls(now).length === 0) {
      answer(now);
    }
  };
  const again = () => answer(turns.slice(0, -1));

  return html`
    <div class="chat" hidden=${hidden}>
      <${Settings} ...${{ models, settings, model, problem }} onChange=${setSettings} />
      <section class="panel talk" aria-label="Conversation and message">
        <div
          ref=${said}
          class="scroll"
          tabindex="0"
          role="region"
          aria-label="What was said"
          onScroll=${({ currentTarget: box }) => {
            follows.current = box.scrollTop + box.clientHeight >= box.scrollHeight - 24;
          }}
        >
          ${turns.length === 0 &&
          html`<p class="note empty">
            ${model ? `Say something to ${model.name}.` : "There is no model yet."}
            ${model && model.state !== "ready" && " It is loaded for the first answer."}
          </p>`}
          <${Turns} turns=${turns} onResult=${answerCall} />
          <p class="hidden" role="status">${endOf(last)}</p>
        </div>
        ${turns.length > 0 && !writes &&
        html`<div class="row after">
          ${last.role === "assistant" && html`<button onClick=${again}>Regenerate</button>`}
          <button onClick=${() => setTurns([])}>Clear</button>
        </div>`}
        <${Composer}
          writes=${writes}
          ready=${Boolean(model) && openCalls(turns).length === 0}
          continues=${model?.chats === false}
          sees=${Boolean(model?.chats && model.sees)}
          shown=${turns.flatMap(({ pictures }) => pictures)}
          onSend=${send}
          onStop=${() => writing.current?.abort()}
        />
      </section>
    </div>
  `;
}

/** @returns the model that was chosen; else one that is loaded and chats, or the first */
function chosenOf(models, name) {
  const loaded = models.filter(({ state }) => state === "ready");
  return (
    models.find((model) => model.name === name) ??
    loaded.find(({ chats }) => chats) ??
    models.find(({ chats }) => chats) ??
    loaded[0] ??
    models[0] ??
    null
  );
}

/** @returns {string} how many tokens an answer has, how fast they came, and whether it was cut */
function endNote({ tokens, note }, seconds) {
  const speed = tokens > 1 && seconds > 0 ? `, ${figure((tokens - 1) / seconds)} per second` : "";
  return [note, tokens > 0 && `${count(tokens)} tokens${speed}`].filter(Boolean).join(" · ");
}

/** @returns {{path: string, body: object}} what is sent for an answer to these turns */
function requestOf(model, settings, turns) {
  const common = {
    model: model.name,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(settings.most) || undefined,
    temperature: settings.temperature === "" ? undefined : Number(settings.temperature),
  };
  if (!model.chats) {
    return { path: "/v1/completions", body: { ...common, prompt: turns[turns.length - 1].text } };
  }
  const tools = toolsOf(settings.tools);
  const body = { ...common, messages: messagesOf(turns, settings.system) };
  return {
    path: "/v1/chat/completions",
    body: tools.length > 0 ? { ...body, tools } : body,
  };
}

/** @returns {string} an answer that is over, for a screen reader; growing ones would be a babble */
function endOf(last) {
  switch (last?.state) {
    case "writing":
      return "The model is answering.";
    case "done":
      return `The model has answered: ${last.text}`;
    case "stopped":
      return "The answer was stopped.";
    default:
      return "";
  }
}
