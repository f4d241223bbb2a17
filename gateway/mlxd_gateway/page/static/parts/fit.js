// Whether and how a model would fit, term by term, before anything is loaded.

import { ask } from "../lib/api.js";
import { bytes, count } from "../lib/format.js";
import { html, useEffect, useState } from "../lib/ui.js";
import { Bar } from "./bars.js";

const WEIGHTS = [
  ["auto", "automatic"], ["stored", "as stored"], ["float32", "float32"],
  ["bfloat16", "bfloat16"], ["float16", "float16"], ["q8", "8 bits"], ["q4", "4 bits"],
  ["mixed_4_8", "4 and 8 bits"], ["mxfp8", "mxfp8"], ["mxfp4", "mxfp4"], ["nvfp4", "nvfp4"],
];
const KV_FORMATS = [
  ["", "automatic"], ["model", "as the model computes"], ["q8", "8 bits"], ["q4", "4 bits"],
];

/** @returns {string} the model that the address names, `#fit/NAME`; empty: none, or not as a URL */
function modelInAddress() {
  try {
    return decodeURIComponent(location.hash.split("/").slice(1).join("/"));
  } catch {
    return "";
  }
}

/** @param {any} props */
export function FitView({ models, loads }) {
  const [form, setForm] = useState({
    model: modelInAddress(), context: "", rows: "", weights: "auto", kv: "",
  });
  const [report, setReport] = useState(null);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const change = (name) => (event) => setForm({ ...form, [name]: event.currentTarget.value });
  const [linked] = useState(form.model);
  const known = models.some(({ name }) => name === linked);

  const check = async (event) => {
    event?.preventDefault();
    setBusy(true);
    setProblem("");
    try {
      setReport(await ask("api/fit", { body: optionsOf(form) }));
    } catch (error) {
      setReport(null);
      setProblem(error.message);
    }
    setBusy(false);
  };
  // A link may name anything, and come from anywhere: only a model of the list is asked about.
  useEffect(() => {
    if (known && form.model === linked) {
      void check();
    }
  }, [known]);

  return html`
    <div class="fit">
      <form class="panel" onSubmit=${check} aria-labelledby="fit-title">
        <h2 id="fit-title">Would it fit?</h2>
        <label>
          Model, <code>ORG/NAME</code> or a folder on the server
          <input required list="known" value=${form.model} onInput=${change("model")} />
        </label>
        <datalist id="known">
          ${models.map((model) => html`<option key=${model.name} value=${model.name} />`)}
        </datalist>
        <div class="pair">
          <${Whole} label="Context, tokens" value=${form.context} onInput=${change("context")} />
          <${Whole} label="Rows at once" value=${form.rows} onInput=${change("rows")} />
        </div>
        <${Choice} ...${{ label: "Weights", choices: WEIGHTS, value: form.weights }}
          onChange=${change("weights")} />
        <${Choice} ...${{ label: "Keys and values", choices: KV_FORMATS, value: form.kv }}
          onChange=${change("kv")} />
        <div class="row">
          <button class="primary" disabled=${busy}>Check</button>
          <button
            type="button"
            disabled=${busy || !report?.fits_ever}
            onClick=${() => {
              location.hash = "overview";
              void loads.load(optionsOf(form));
            }}
          >
            Load with these options
          </button>
        </div>
        ${problem && html`<p class="error" role="alert">${problem}</p>`}
      </form>
      ${report && html`<${Report} report=${report} />`}
    </div>
  `;
}

/** @returns {any} the request that a form stands for */
function optionsOf(form) {
  return {
    model: form.model.trim(),
    context_length: form.context === "" ? null : Number(form.context),
    rows_max: form.rows === "" ? null : Number(form.rows),
    weights: form.weights,
    kv_format: form.kv || null,
  };
}

/** A field for a whole number, or for nothing. */
function Whole({ label, value, onInput }) {
  return html`
    <label>
      ${label}
      <input type="number" min="1" step="1" placeholder="automatic" ...${{ value, onInput }} />
    </label>
  `;
}

/** A list to choose from. */
function Choice({ label, choices, value, onChange }) {
  return html`
    <label>
      ${label}
      <select value=${value} onChange=${onChange}>
        ${choices.map(([key, text]) => html`<option key=${key} value=${key}>${text}</option>`)}
      </select>
    </label>
  `;
}

/** The answer. */
function Report({ report }) {
  const terms = report.terms.filter((term) => term.nbytes > 0);
  const whole = Math.max(report.budget_nbytes, report.need_nbytes);
  const parts = terms.map((term, index) => ({
    name: term.name, nbytes: term.nbytes, colour: (index % 8) + 1,
  }));
  return html`
    <section class="panel report" aria-labelledby="report-title" aria-live="polite">
      <h2 id="report-title">${report.model}</h2>
      <p class=${`verdict ${report.fits_now ? "good" : report.fits_ever ? "fair" : "bad"}`}>
        ${verdictOf(report)}
      </p>
      <p>
        Needs <b>${bytes(report.need_nbytes)}</b> of ${bytes(report.budget_nbytes)} on${" "}
        ${report.device}, where ${bytes(report.available_nbytes)} are free now: context${" "}
        ${count(report.context_length)}, ${count(report.rows_max)} rows, weights ${report.weights}.
      </p>
      <${Bar} label=${`Fit of ${report.model}`} parts=${parts} whole=${whole} />
      <table>
        <thead>
          <tr><th scope="col">Term</th><th scope="col" class="number">Memory</th>
            <th scope="col">Why</th></tr>
        </thead>
        <tbody>
          ${terms.map(
            (term, index) => html`<tr key=${term.name}>
              <th scope="row">
                <span class=${`swatch c${(index % 8) + 1}`} aria-hidden="true"></span>
                ${term.name}
              </th>
              <td class="number">${bytes(term.nbytes)}</td>
              <td class="note">${term.note}</td>
            </tr>`,
          )}
        </tbody>
      </table>
      ${report.suggestions.length > 0 &&
      html`<h3>What would help</h3>
        <ul class="plain">
          ${report.suggestions.map((text) => html`<li key=${text}>${text}</li>`)}
        </ul>`}
    </section>
  `;
}

/** @returns {string} the answer in one sentence */
function verdictOf(report) {
  if (!report.fits_ever) {
    return "It does not fit this server, whatever else is unloaded.";
  }
  if (report.would_evict.length > 0) {
    return `It fits; ${report.would_evict.join(", ")} would be unloaded for it.`;
  }
  return report.fits_now ? "It fits." : "It fits, but not now: what is loaded is in use.";
}
