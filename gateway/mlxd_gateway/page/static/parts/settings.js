// What a chat is asked with: the model, what it is told first, how it draws, its tools.

import { html } from "../lib/ui.js";

/** What a conversation begins with. */
export const DEFAULTS = { model: "", system: "", temperature: "", most: "512", tools: "" };

/** @param {any} props */
export function Settings({ models, settings, model, onChange, problem }) {
  const change = (name) => (event) =>
    onChange({ ...settings, [name]: event.currentTarget.value });
  const talks = model?.chats ?? true;
  return html`
    <form class="panel settings" aria-labelledby="chat-title" onSubmit=${stay}>
      <h2 id="chat-title">Chat</h2>
      <label>
        Model
        <select value=${model?.name ?? ""} onChange=${change("model")}>
          ${models.map(
            ({ name, state }) => html`<option key=${name} value=${name}>
              ${name}${state === "ready" ? "" : ` (${state})`}
            </option>`,
          )}
        </select>
      </label>
      ${!talks &&
      html`<p class="note">
        It has no chat template: it continues a text instead of answering.
      </p>`}
      <details>
        <summary>Options</summary>
        ${talks &&
        html`<label>
          System prompt
          <textarea rows="3" value=${settings.system} onInput=${change("system")}></textarea>
        </label>`}
        <div class="pair">
          <label>
            Temperature
            <input type="number" min="0" max="2" step="0.1" placeholder="the model's"
              value=${settings.temperature} onInput=${change("temperature")} />
          </label>
          <label>
            Max tokens
            <input type="number" min="1" step="1" value=${settings.most}
              onInput=${change("most")} />
          </label>
        </div>
        ${talks &&
        html`<label>
          Tools, as JSON
          <textarea
            class="code-field"
            rows="5"
            spellcheck="false"
            placeholder='[{"name": "weather", "parameters": {"type": "object"}}]'
            value=${settings.tools}
            aria-invalid=${problem ? "true" : null}
            onInput=${change("tools")}
          ></textarea>
        </label>`}
        ${problem && html`<p class="error" role="alert">${problem}</p>`}
      </details>
    </form>
  `;
}

/** A form that is sent nowhere. */
function stay(event) {
  event.preventDefault();
}
