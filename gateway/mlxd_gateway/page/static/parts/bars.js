// A bar made of parts, and the list that says the same in words.

import { bytes, share } from "../lib/format.js";
import { html } from "../lib/ui.js";

/** The accounts of a worker's memory, in the order of their colours. */
export const ACCOUNTS = ["weights", "kv", "prefix", "draft", "workspace", "pool", "unaccounted"];

/**
 * @typedef {object} Part
 * @property {string} name
 * @property {number} nbytes
 * @property {number} colour 1 to 8, one of the palette's
 */

/**
 * @param {object} props
 * @param {string} props.label what the bar is of
 * @param {Part[]} props.parts what is drawn
 * @param {number} props.whole bytes of the whole width
 * @param {number} [props.mark] bytes at which a line is drawn
 */
export function Bar({ label, parts, whole, mark }) {
  const words = parts.map((part) => `${part.name} ${bytes(part.nbytes)}`).join(", ");
  const text = `${label}: ${words || "nothing"}, of ${bytes(whole)}`;
  return html`
    <div class="bar" role="img" aria-label=${text}>
      ${parts.map(
        (part) => html`<span
          key=${part.name}
          class=${`part c${part.colour}`}
          title=${`${part.name}: ${bytes(part.nbytes)}`}
          style=${{ width: `${100 * share(part.nbytes, whole)}%` }}
        ></span>`,
      )}
      ${mark !== undefined && mark > 0 &&
      html`<span class="mark" style=${{ left: `${100 * share(mark, whole)}%` }}></span>`}
    </div>
  `;
}

/** @param {{parts: Part[]}} props */
export function Legend({ parts }) {
  return html`
    <ul class="legend">
      ${parts.map(
        (part) => html`<li key=${part.name}>
          <span class=${`swatch c${part.colour}`} aria-hidden="true"></span>
          ${part.name} <b>${bytes(part.nbytes)}</b>
        </li>`,
      )}
    </ul>
  `;
}
