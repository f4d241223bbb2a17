// Images that a message shows: those that wait for it, and those of one that was sent.

import { TYPES } from "../lib/images.js";
import { html, useRef } from "../lib/ui.js";

/**
 * The images that the next message shows, each with a button that takes it back.
 * @param {{pictures: import("../lib/images.js").Picture[], onRemove: Function}} props
 */
export function Waiting({ pictures, onRemove }) {
  return (
    pictures.length > 0 &&
    html`<ul class="pictures" aria-label="Images of the next message">
      ${pictures.map(
        ({ name, url }, index) => html`
          <li key=${index}>
            <img src=${url} alt=${name} />
            <button type="button" aria-label=${`Remove ${name}`} onClick=${() => onRemove(index)}>
              ×
            </button>
          </li>
        `,
      )}
    </ul>`
  );
}

/**
 * The images of a message.
 * @param {{pictures: import("../lib/images.js").Picture[]}} props
 */
export function Shown({ pictures }) {
  return (
    pictures.length > 0 &&
    html`<p class="pictures">
      ${pictures.map(({ name, url }, index) => html`<img key=${index} src=${url} alt=${name} />`)}
    </p>`
  );
}

/**
 * The button that chooses files.
 * @param {{onFiles: (files: File[]) => void}} props
 */
export function Chooser({ onFiles }) {
  const field = useRef(null);
  const choose = ({ currentTarget }) => {
    onFiles([...currentTarget.files]);
    currentTarget.value = ""; // so that the same file can be chosen again
  };
  return html`
    <button type="button" onClick=${() => field.current.click()}>Add images</button>
    <input
      ref=${field}
      type="file"
      hidden
      multiple
      accept=${TYPES.join(",")}
      aria-label="Images to add"
      onChange=${choose}
    />
  `;
}
