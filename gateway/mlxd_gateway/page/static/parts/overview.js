// What is in memory, what it is doing, and what could be loaded.

import { html } from "../lib/ui.js";
import { Memory } from "./memory.js";
import { Models } from "./models.js";
import { Plots } from "./plots.js";

/** @param {any} props */
export function Overview({ status, models, rights, loads, history }) {
  return html`
    <div class="overview">
      <${Models} ...${{ models, rights, loads, status }} />
      ${rights.observe && html`<${Memory} status=${status} />`}
      ${rights.observe && html`<${Plots} ...${{ history, now: status?.now ?? 0 }} />`}
    </div>
  `;
}
