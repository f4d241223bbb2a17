// The field in which a message is written, and the buttons that send and stop.

import { html, useState } from "../lib/ui.js";

/**
 * @param {object} props
 * @param {boolean} props.writes whether an answer is being written
 * @param {boolean} props.ready whether there is a model to ask
 * @param {boolean} props.continues whether the model continues a text instead of answering
 * @param {(text: string) => boolean} props.onSend false where it could not be sent
 * @param {() => void} props.onStop
 */
export function Composer({ writes, ready, continues, onSend, onStop }) {
  const [text, setText] = useState("");
  const send = (event) => {
    event.preventDefault();
    if (text.trim() && ready && !writes && onSend(text)) {
      setText("");
    }
  };
  const press = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      send(event);
    } else if (event.key === "Escape" && writes) {
      onStop();
    }
  };
  return html`
    <form class="composer" onSubmit=${send}>
      <label class="hidden" for="message">${continues ? "Text to continue" : "Message"}</label>
      <textarea
        id="message"
        rows="2"
        placeholder=${continues ? "A text to continue" : "Write a message"}
        aria-describedby="message-keys"
        value=${text}
        onInput=${(event) => setText(event.currentTarget.value)}
        onKeyDown=${press}
      ></textarea>
      ${writes
        ? html`<button type="button" class="danger" onClick=${onStop}>Stop</button>`
        : html`<button class="primary" disabled=${!ready || !text.trim()}>Send</button>`}
      <p id="message-keys" class="note keys">
        Enter sends, Shift+Enter begins a line, Escape stops an answer.
      </p>
    </form>
  `;
}
