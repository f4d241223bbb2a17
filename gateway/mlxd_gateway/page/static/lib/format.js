// Numbers for people. Pure.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/**
 * Bytes in the largest unit of which there is at least one.
 * @param {number} nbytes
 * @returns {string}
 */
export function bytes(nbytes) {
  let value = Math.abs(nbytes);
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : 1;
  return `${nbytes < 0 ? "−" : ""}${value.toFixed(digits)} ${UNITS[unit]}`;
}

/**
 * A count with a separator for thousands.
 * @param {number} value
 * @returns {string}
 */
export function count(value) {
  return Math.round(value).toLocaleString("en-GB");
}

/**
 * A rate or another figure of about three digits.
 * @param {number | null | undefined} value
 * @returns {string} a dash where there is none
 */
export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) {
    return "–";
  }
  return value >= 100 || value === 0 ? count(value) : value.toFixed(value >= 10 ? 0 : 1);
}

/**
 * A duration, from milliseconds to days.
 * @param {number | null | undefined} seconds
 * @returns {string} a dash where there is none
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) {
    return "–";
  }
  if (seconds === 0) {
    return "0 s";
  }
  if (seconds < 1) {
    return `${Math.round(seconds * 1000)} ms`;
  }
  if (seconds < 60) {
    return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  }
  if (seconds < 3600) {
    return `${Math.floor(seconds / 60)} min`;
  }
  const hours = Math.floor(seconds / 3600);
  const minutes = Math.floor((seconds % 3600) / 60);
  return hours < 48 ? `${hours} h ${minutes} min` : `${Math.floor(hours / 24)} d`;
}

/**
 * A share of a whole.
 * @param {number} part
 * @param {number} whole
 * @returns {number} between 0 and 1; 0 where the whole is 0
 */
export function share(part, whole) {
  return whole > 0 ? Math.min(Math.max(part / whole, 0), 1) : 0;
}

/**
 * A share as people read it.
 * @param {number} fraction
 * @returns {string}
 */
export function percent(fraction) {
  return `${Math.round(fraction * 100)} %`;
}
