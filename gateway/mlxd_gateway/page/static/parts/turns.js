// What was said, as text: an answer of a model never becomes markup.

import { html, useState } from "../lib/ui.js";
import { piecesOf } from "../lib/chat.js";
import { Shown } from "./pictures.js";

/** @param {{turns: import("../lib/chat.js").Turn[], onResult: Function}} props */
export function Turns({ turns, onResult }) {
  return html`
    <ol class="turns" aria-label="Conversation">
      ${turns.map(
        (turn, index) => html`
          <li key=${index} class=${`turn ${turn.role}`}>
            <h3>${turn.role === "user" ? "You" : "Model"}</h3>
            ${turn.reasoning && html`<${Reasoning} turn=${turn} />`}
            <${Shown} pictures=${turn.pictures} />
            ${turn.role === "user"
              ? turn.text && html`<p class="text">${turn.text}</p>`
              : html`<${Pieces} text=${turn.text} />`}
            ${turn.calls.map(
              (call) => html`<${ToolCall}
                key=${call.id}
                call=${call}
                waits=${turn.state === "done" && index === turns.length - 1}
                onResult=${(result) => onResult(index, call.id, result)}
              />`,
            )}
            ${turn.state === "writing" && !turn.text &&
            html`<p class="note waiting">${turn.note || "waiting"}</p>`}
            ${turn.state === "stopped" && html`<p class="note">Stopped.</p>`}
            ${turn.state === "failed" && html`<p class="error" role="alert">${turn.note}</p>`}
            ${turn.state === "done" && turn.note && html`<p class="note">${turn.note}</p>`}
          </li>
        `,
      )}
    </ol>
  `;
}

/** Text and code, apart. */
function Pieces({ text }) {
  return piecesOf(text).map(({ code, language, text: piece }, index) =>
    code
      ? html`<pre key=${index} class="code" tabindex="0" aria-label=${`Code ${language}`}>
<code>${piece}</code></pre>`
      : html`<p key=${index} class="text">${piece}</p>`,
  );
}

/** What a model thought, open while it does. */
function Reasoning({ turn }) {
  const thinks = turn.state === "writing" && !turn.text && turn.calls.length === 0;
  return html`
    <details class="reasoning" open=${thinks}>
      <summary>${thinks ? "Thinking" : "Reasoning"}</summary>
      <p class="text">${turn.reasoning}</p>
    </details>
  `;
}

/** A tool that a model calls, and the field for what it answers. */
function ToolCall({ call, waits, onResult }) {
  const [result, setResult] = useState("");
  const submit = (event) => {
    event.preventDefault();
    onResult(result);
  };
  return html`
    <div class="call">
      <p class="call-head"><span class="tag">tool</span> <code>${call.name}</code></p>
      <pre class="code" tabindex="0" aria-label=${`Arguments of ${call.name}`}><code>${
        prettyOf(call.args)
      }</code></pre>
      ${call.result !== null && html`<p class="text result">${call.result || "(empty)"}</p>`}
      ${call.result === null && waits &&
      html`
        <form class="row" onSubmit=${submit}>
          <input
            aria-label=${`Result of ${call.name}`}
            placeholder="Its result"
            value=${result}
            onInput=${(event) => setResult(event.currentTarget.value)}
          />
          <button>Answer</button>
        </form>
      `}
    </div>
  `;
}

/** @returns {string} JSON with line breaks; what is no JSON as it is */
function prettyOf(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
