// The plots: tokens a second, streams, first-token times. Each says its last values in words too.

import uPlot from "../vendor/uPlot.js";
import { duration, figure } from "../lib/format.js";
import { html, useEffect, useLayoutEffect, useRef } from "../lib/ui.js";

const SPAN_S = 300;
const HEIGHT = 140;

const PLOTS = [
  {
    title: "Tokens per second",
    note: "10 s mean, counted as streams end",
    show: figure,
    series: [["generated", "generated", 1], ["prompt", "prompt", 2]],
  },
  {
    title: "Streams",
    note: "now",
    show: (value) => (value === null ? "–" : String(value)),
    steps: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
    series: [["running", "running", 1], ["waiting", "waiting", 3]],
  },
  {
    title: "Time to first token",
    note: "of the last 30 s",
    show: duration,
    series: [["median", "median", 1], ["slow", "95th percentile", 3]],
  },
];

/** @param {{history: import("../lib/history.js").History, now: number}} props */
export function Plots({ history, now }) {
  return html`
    <section class="plots" aria-label="Activity">
      ${PLOTS.map((plot) => html`<${Plot} key=${plot.title} ...${{ plot, history, now }} />`)}
    </section>
  `;
}

/** One plot. */
function Plot({ plot, history, now }) {
  const box = useRef(null);
  const drawn = useRef(null);
  const last = history.points[history.points.length - 1];
  const values = plot.series.map(([key, label]) => [label, plot.show(last?.[key] ?? null)]);

  useLayoutEffect(() => {
    drawn.current = new uPlot(optionsOf(plot, box.current), [[], ...plot.series.map(() => [])],
      box.current);
    const fit = new ResizeObserver(() =>
      drawn.current.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    fit.observe(box.current);
    const recolour = () => drawn.current.redraw(false);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("mlxd-theme", recolour);
    dark.addEventListener("change", recolour);
    return () => {
      fit.disconnect();
      removeEventListener("mlxd-theme", recolour);
      dark.removeEventListener("change", recolour);
      drawn.current.destroy();
    };
  }, []);

  useEffect(() => {
    if (now > 0) {
      drawn.current.batch(() => {
        drawn.current.setData(history.columns(...plot.series.map(([key]) => key)), false);
        drawn.current.setScale("x", { min: now - SPAN_S, max: now });
      });
    }
  }, [now]);

  const words = values.map(([label, value]) => `${label} ${value}`).join(", ");
  return html`
    <figure class="panel plot">
      <figcaption>
        <h2>${plot.title}</h2>
        <span class="note">${plot.note}</span>
        <ul class="legend">
          ${values.map(
            ([label, value], index) => html`<li key=${label}>
              <span class=${`swatch c${plot.series[index][2]}`} aria-hidden="true"></span>
              ${label} <b>${value}</b>
            </li>`,
          )}
        </ul>
      </figcaption>
      <div
        ref=${box}
        class="canvas"
        role="img"
        aria-label=${`${plot.title} over the last five minutes; now ${words}`}
      ></div>
    </figure>
  `;
}

/** @returns {any} uPlot's options for a plot in an element, whose colours the style sheet has */
function optionsOf(plot, element) {
  const axis = {
    stroke: () => colourOf(element, "--text-2"),
    grid: { stroke: () => colourOf(element, "--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  return {
    width: element.clientWidth || 300,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    scales: { y: { range: (_, __, high) => [0, Math.max(high * 1.15, minimumOf(plot))] } },
    axes: [
      { ...axis, size: 24, space: 70, values: (_, ticks) => ticks.map(clockOf) },
      {
        ...axis,
        size: 52,
        space: 30,
        values: (_, ticks) => ticks.map(plot.show),
        ...(plot.steps ? { incrs: plot.steps } : {}),
      },
    ],
    series: [
      {},
      ...plot.series.map(([, label, colour]) => ({
        label,
        stroke: () => colourOf(element, `--c${colour}`),
        width: 1.5,
        spanGaps: false,
        points: { show: false },
      })),
    ],
  };
}

/** @returns {string} a time of day, by the reader's clock */
function clockOf(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

/** @returns {number} what the axis reaches at least */
function minimumOf(plot) {
  return plot.show === duration ? 0.1 : 4;
}

/** @returns {string} what a variable of the style sheet is in the theme that is on */
function colourOf(element, variable) {
  element.style.color = `var(${variable})`;
  const colour = getComputedStyle(element).color;
  element.style.color = "";
  return colour;
}
