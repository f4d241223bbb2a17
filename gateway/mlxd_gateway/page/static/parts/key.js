// The field for a key, where the server asks for one.

import { html, useEffect, useRef, useState } from "../lib/ui.js";

/**
 * @param {{problem: string, onKey: (key: string) => void}} props
 *   `problem`: what is wrong with the last key; empty: there was none
 */
export function KeyForm({ problem, onKey }) {
  const [key, setKey] = useState("");
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    if (key.trim()) {
      onKey(key.trim());
    }
  };
  return html`
    <main class="alone">
      <h1>mlxd</h1>
      <form class="panel key" onSubmit=${submit}>
        <label for="key">Key or token of this server</label>
        <input
          id="key"
          ref=${field}
          type="password"
          autocomplete="off"
          spellcheck="false"
          required
          value=${key}
          aria-describedby="key-note"
          aria-invalid=${problem ? "true" : null}
          onInput=${(event) => setKey(event.currentTarget.value)}
        />
        ${problem && html`<p class="error" role="alert">${problem}</p>`}
        <p id="key-note" class="note">
          It stays in this tab until that is closed. Keys are made with${" "}
          <code>mlxd keys add</code>.
        </p>
        <button class="primary">Continue</button>
      </form>
    </main>
  `;
}
