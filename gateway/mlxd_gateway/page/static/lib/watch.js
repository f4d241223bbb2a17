// The watch: status and models as they change, begun again whenever it breaks off.

import { ApiError, ask, follow } from "./api.js";

const RETRY_S = [0.5, 1, 2, 4];
const POLL_S = 3;
/** The server says something at least every five seconds. */
const SILENCE_S = 20;

/**
 * Watch until the signal aborts.
 *
 * @param {object} options
 * @param {boolean} options.observes whether the key may see the status; else models alone come
 * @param {(status: any) => void} options.onStatus
 * @param {(models: any[]) => void} options.onModels
 * @param {(state: "live" | "lost") => void} options.onConnection
 * @param {(error: ApiError) => void} options.onRefused the key is none any more; the watch is over
 * @param {AbortSignal} options.signal
 */
export async function watch({ observes, onStatus, onModels, onConnection, onRefused, signal }) {
  let failures = 0;
  const come = () => {
    failures = 0;
    onConnection("live");
  };
  while (!signal.aborted) {
    try {
      if (observes) {
        await followOnce(come, { onStatus, onModels, signal });
      } else {
        onModels(await ask("api/models", { signal }));
        come();
        await pause(POLL_S, signal);
        continue;
      }
    } catch (error) {
      if (signal.aborted) {
        return;
      }
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        onRefused(error);
        return;
      }
    }
    onConnection("lost");
    await pause(RETRY_S[Math.min(failures, RETRY_S.length - 1)], signal);
    failures += 1;
  }
}

/**
 * Follow one stream to its end.
 * @param {() => void} come called for each event
 * @param {{onStatus: (s: any) => void, onModels: (m: any[]) => void, signal: AbortSignal}} options
 */
async function followOnce(come, { onStatus, onModels, signal }) {
  const silence = new AbortController();
  const both = AbortSignal.any([signal, silence.signal]);
  let timer = setTimeout(() => silence.abort(), SILENCE_S * 1000);
  try {
    for await (const { name, data } of follow("api/watch", { signal: both })) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_S * 1000);
      if (name === "status") {
        come();
        onStatus(data);
      } else if (name === "models") {
        onModels(data);
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

/**
 * @param {number} seconds
 * @param {AbortSignal} signal
 * @returns {Promise<void>} resolved after that time, or when the signal aborts
 */
function pause(seconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, seconds * 1000);
    function done() {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    }
    signal.addEventListener("abort", done);
  });
}
