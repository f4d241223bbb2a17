// Memory: of each device by model, of each worker by account.

import { bytes } from "../lib/format.js";
import { html } from "../lib/ui.js";
import { ACCOUNTS, Bar, Legend } from "./bars.js";

const COLOURS = 7;
const OTHER = 8;
/** What the audit of a worker may be off by. */
const AUDIT_NBYTES = 64 * 1024;

/** @param {{status: any}} props null before the first one */
export function Memory({ status }) {
  const workers = (status?.workers ?? []).filter((worker) => worker.alive);
  const largest = Math.max(...workers.map(held), 1);
  return html`
    <section class="panel memory" aria-labelledby="memory-title">
      <div class="panel-head">
        <h2 id="memory-title">Memory</h2>
        ${status &&
        html`<span class="note">
          ${bytes(status.host.available_nbytes)} of ${bytes(status.host.total_nbytes)} free here
        </span>`}
      </div>
      ${status === null && html`<p class="note">Asking for the status.</p>`}
      ${status?.devices.map(
        (device) => html`<${Device} key=${device.name} device=${device} workers=${workers} />`,
      )}
      ${workers.length > 0 && html`<h3>By account</h3>`}
      ${workers.map(
        (worker) => html`<${Worker} key=${worker.pid} worker=${worker} whole=${largest} />`,
      )}
      ${status !== null && workers.length === 0 && html`<p class="note">No model is loaded.</p>`}
    </section>
  `;
}

/** One device: what of its budget each model holds there. */
function Device({ device, workers }) {
  const there = workers
    .map((worker, index) => ({
      name: worker.model,
      nbytes: worker.devices[device.name] ?? 0,
      colour: (index % COLOURS) + 1,
    }))
    .filter((part) => part.nbytes > 0);
  const known = there.reduce((sum, part) => sum + part.nbytes, 0);
  const rest = Math.max(device.held_nbytes - known, 0);
  const parts = rest > 0 ? [...there, { name: "processes", nbytes: rest, colour: OTHER }] : there;
  const state = device.lost ? "out of reach" : device.pressed ? "under pressure" : "";
  return html`
    <div class="device">
      <div class="bar-head">
        <h3>${device.name} <span class="about">${device.product}</span></h3>
        <span>
          ${state && html`<span class="tag warn">${state}</span> `}
          <b>${bytes(device.held_nbytes)}</b> of ${bytes(device.budget_nbytes)}
        </span>
      </div>
      <${Bar}
        label=${`Memory of ${device.name}`}
        parts=${parts}
        whole=${device.budget_nbytes}
        mark=${device.reserved_nbytes}
      />
      <p class="about">
        ${device.reserved_nbytes > 0 && html`<span class="mark-key" aria-hidden="true"></span>`}
        ${bytes(device.reserved_nbytes)} promised to models${" · "}
        ${bytes(device.usable_nbytes)} usable beside other programs
      </p>
      ${there.length > 1 && html`<${Legend} parts=${parts} />`}
    </div>
  `;
}

/** One worker: what its arrays are for. */
function Worker({ worker, whole }) {
  const parts = accountsOf(worker);
  return html`
    <div class="worker">
      <div class="bar-head">
        <h4>${worker.model}</h4>
        <span><b>${bytes(held(worker))}</b></span>
      </div>
      <${Bar} label=${`Memory of ${worker.model}`} parts=${parts} whole=${whole} />
      <${Legend} parts=${parts} />
    </div>
  `;
}

/** @returns {import("./bars.js").Part[]} the accounts of a worker that hold something */
function accountsOf(worker) {
  const nbytes = {
    ...worker.accounts,
    pool: worker.pool_nbytes,
    unaccounted: worker.unaccounted_nbytes > AUDIT_NBYTES ? worker.unaccounted_nbytes : 0,
  };
  return ACCOUNTS.map((name, index) => ({ name, nbytes: nbytes[name] ?? 0, colour: index + 1 }))
    .filter((part) => part.nbytes > 0);
}

/** @returns {number} bytes in a worker's accounts, with MLX's pool */
function held(worker) {
  return accountsOf(worker).reduce((sum, part) => sum + part.nbytes, 0);
}
