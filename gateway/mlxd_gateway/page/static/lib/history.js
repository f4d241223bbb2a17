// What the plots show: rates and quantiles, from the differences of a server's counters. Pure.

const KEPT = 600;
/** A server counts a stream's tokens when it ends: rates are means of so many seconds. */
const RATE_S = 10;
/** First tokens of so many seconds make one point's quantiles. */
const FIRSTS_S = 30;

/**
 * @typedef {object} Point one moment
 * @property {number} time seconds since 1970
 * @property {number | null} generated tokens a second, of streams that have ended
 * @property {number | null} prompt tokens a second that were computed for them
 * @property {number} running streams
 * @property {number} waiting streams
 * @property {number | null} median of first-token times, seconds
 * @property {number | null} slow the same times' 95th percentile
 */

/**
 * @typedef {object} Sample the counters of one moment, of all models together
 * @property {number} time
 * @property {number} generated
 * @property {number} prompt
 * @property {number[]} bounds of first-token times
 * @property {number[]} counts below each of them, and above the last
 */

/** The points of a server since this page was opened. */
export class History {
  /** Nothing was seen yet. */
  constructor() {
    /** @type {Point[]} */
    this.points = [];
    /** @type {Sample[]} */
    this.samples = [];
    this.start = 0;
  }

  /**
   * Add one status. Earlier points stay; no rate spans two starts of a server.
   * @param {any} status
   */
  add(status) {
    if (status.start !== this.start) {
      this.samples = [];
      this.start = status.start;
    }
    const now = sum(status);
    this.samples.push(now);
    while (this.samples.length > 2 && this.samples[1].time <= now.time - FIRSTS_S) {
      this.samples.shift();
    }
    const old = this.samples.filter((each) => each.time <= now.time - RATE_S);
    const before = old[old.length - 1] ?? this.samples[0];
    const came = difference(this.samples[0].counts, now.counts);
    this.points.push({
      time: now.time,
      generated: rate(now.generated - before.generated, now.time - before.time),
      prompt: rate(now.prompt - before.prompt, now.time - before.time),
      running: total(status.workers, "running"),
      waiting: total(status.workers, "waiting"),
      median: quantile(now.bounds, came, 0.5),
      slow: quantile(now.bounds, came, 0.95),
    });
    if (this.points.length > KEPT) {
      this.points.shift();
    }
  }

  /**
   * Return columns for a plot, times first.
   * @param {...("generated" | "prompt" | "running" | "waiting" | "median" | "slow")} names
   * @returns {(number | null)[][]}
   */
  columns(...names) {
    return ["time", ...names].map((name) => this.points.map((point) => point[name]));
  }
}

/**
 * @param {any} status
 * @returns {Sample}
 */
function sum(status) {
  const sample = {
    time: status.now,
    generated: 0,
    prompt: 0,
    bounds: /** @type {number[]} */ ([]),
    counts: /** @type {number[]} */ ([]),
  };
  for (const { generated, prompt, cached, first } of Object.values(status.counts)) {
    sample.generated += generated;
    sample.prompt += prompt - cached;
    if (first !== null) {
      sample.bounds = first.bounds;
      sample.counts = first.counts.map((each, index) => each + (sample.counts[index] ?? 0));
    }
  }
  return sample;
}

/**
 * @param {number[]} before
 * @param {number[]} now
 * @returns {number[]} what has come between two moments, by bound
 */
function difference(before, now) {
  return now.map((each, index) => Math.max(each - (before[index] ?? 0), 0));
}

/**
 * @param {number} gain
 * @param {number} seconds
 * @returns {number | null} a counter's rate; null where no time has passed
 */
function rate(gain, seconds) {
  return seconds > 0 ? Math.max(gain, 0) / seconds : null;
}

/**
 * @param {any[]} workers
 * @param {"running" | "waiting"} name
 * @returns {number}
 */
function total(workers, name) {
  return workers.reduce((sofar, worker) => sofar + worker[name], 0);
}

/**
 * Estimate a quantile from counts by bound, evenly spread within each.
 * @param {number[]} bounds ascending
 * @param {number[]} counts one more than bounds, not cumulative
 * @param {number} q between 0 and 1
 * @returns {number | null} null where nothing was counted; at most the last bound
 */
export function quantile(bounds, counts, q) {
  const all = counts.reduce((sofar, each) => sofar + each, 0);
  if (all === 0) {
    return null;
  }
  let below = 0;
  for (let index = 0; index < bounds.length; index += 1) {
    if (below + counts[index] >= q * all && counts[index] > 0) {
      const low = index === 0 ? 0 : bounds[index - 1];
      return low + ((q * all - below) / counts[index]) * (bounds[index] - low);
    }
    below += counts[index];
  }
  return bounds[bounds.length - 1];
}
