// The field in which a message is written, the images that go with it, and the buttons.

import { filesOf, problemOf, readPicture } from "../lib/images.js";
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { Chooser, Waiting } from "./pictures.js";

/**
 * @param {object} props
 * @param {boolean} props.writes whether an answer is being written
 * @param {boolean} props.ready whether there is a model to ask
 * @param {boolean} props.continues whether the model continues a text instead of answering
 * @param {boolean} props.sees whether the model sees images
 * @param {import("../lib/images.js").Picture[]} props.shown in the conversation so far
 * @param {(text: string, pictures: object[]) => boolean} props.onSend false where it was not sent
 * @param {() => void} props.onStop
 */
export function Composer({ writes, ready, continues, sees, shown, onSend, onStop }) {
  const [text, setText] = useState("");
  const [pictures, setPictures] = useState([]);
  const [said, setSaid] = useState({ problem: "", note: "" });
  const now = useRef(pictures);
  now.current = pictures;
  const isWhole = text.trim() !== "" || pictures.length > 0;
  useEffect(() => setSaid({ problem: "", note: "" }), [sees]); // which a problem may be about

  const send = (event) => {
    event.preventDefault();
    if (pictures.length > 0 && !sees) {
      setSaid({ problem: "This model does not see images: remove them.", note: "" });
    } else if (isWhole && ready && !writes && onSend(text, pictures)) {
      setText("");
      setPictures([]);
      setSaid({ problem: "", note: "" });
    }
  };
  const add = async (files) => {
    const problem = sees
      ? problemOf(files, [...shown, ...pictures])
      : "This model does not see images.";
    if (problem) {
      setSaid({ problem, note: "" });
      return;
    }
    try {
      const read = await Promise.all(files.map(readPicture));
      // Others may have been added while these were read.
      const late = problemOf(files, [...shown, ...now.current]);
      const names = read.map(({ name }) => name).join(", ");
      if (!late) {
        setPictures([...now.current, ...read]);
      }
      setSaid({ problem: late, note: late ? "" : `Added ${names}.` });
    } catch (error) {
      setSaid({ problem: error.message, note: "" });
    }
  };
  const remove = (index) => {
    setSaid({ problem: "", note: `Removed ${pictures[index].name}.` });
    setPictures(pictures.filter((_, at) => at !== index));
    document.getElementById("message").focus();
  };
  /** Take the files that are pasted or dropped; text goes where it always goes. */
  const take = (event, transfer) => {
    const files = filesOf(transfer);
    if (files.length > 0) {
      event.preventDefault();
      void add(files);
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
    <form
      class="composer"
      onSubmit=${send}
      onDragOver=${(event) => event.preventDefault()}
      onDrop=${(event) => take(event, event.dataTransfer)}
    >
      <${Waiting} pictures=${pictures} onRemove=${remove} />
      ${said.problem && html`<p class="error wide" role="alert">${said.problem}</p>`}
      <p class="hidden" aria-live="polite">${said.note}</p>
      <label class="hidden" for="message">${continues ? "Text to continue" : "Message"}</label>
      <textarea
        id="message"
        rows="2"
        placeholder=${continues ? "A text to continue" : "Write a message"}
        aria-describedby="message-keys"
        value=${text}
        onInput=${(event) => setText(event.currentTarget.value)}
        onKeyDown=${press}
        onPaste=${(event) => take(event, event.clipboardData)}
      ></textarea>
      <div class="row">
        ${sees && html`<${Chooser} onFiles=${add} />`}
        ${writes
          ? html`<button type="button" class="danger" onClick=${onStop}>Stop</button>`
          : html`<button class="primary" disabled=${!ready || !isWhole}>Send</button>`}
      </div>
      <p id="message-keys" class="note keys">
        Enter sends, Shift+Enter begins a line, Escape stops an answer.
        ${sees && " Images can be pasted or dropped here."}
      </p>
    </form>
  `;
}
