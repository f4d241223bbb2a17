// Requests to the server that sent this page, with the key that its reader has entered.

import { readEvents } from "./events.js";

const KEY = "mlxd.key";

/** A refusal, or a failure on the way. `status` 0: nobody answered. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @returns {string} the key of this tab's session; empty: none */
export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** @param {string} key kept until the tab is closed; empty forgets it */
export function storeKey(key) {
  if (key) {
    sessionStorage.setItem(KEY, key);
  } else {
    sessionStorage.removeItem(KEY);
  }
}

/**
 * Send a request.
 * @param {string} path
 * @param {{body?: object, signal?: AbortSignal}} [options] with a body it is a POST
 * @returns {Promise<Response>} one that was not refused
 */
async function send(path, { body, signal } = {}) {
  const headers = new Headers();
  const key = storedKey();
  if (key) {
    headers.set("Authorization", `Bearer ${key}`);
  }
  const init = { headers, signal, cache: /** @type {const} */ ("no-store") };
  if (body !== undefined) {
    headers.set("Content-Type", "application/json");
    Object.assign(init, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (signal?.aborted) {
      throw error;
    }
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) {
    throw new ApiError(response.status, await problemOf(response));
  }
  return response;
}

/**
 * @param {Response} response
 * @returns {Promise<string>} what the server says is wrong
 */
async function problemOf(response) {
  try {
    const { error } = await response.json();
    return error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/**
 * Ask for JSON.
 * @param {string} path
 * @param {{body?: object, signal?: AbortSignal}} [options]
 * @returns {Promise<any>}
 */
export async function ask(path, options) {
  return (await send(path, options)).json();
}

/**
 * Yield the events of an answer up to its end. An event `error` is thrown, and so is an answer that
 * ends without saying so.
 * @param {string} path
 * @param {{body?: object, signal?: AbortSignal}} [options]
 * @returns {AsyncGenerator<import("./events.js").Event>}
 */
export async function* follow(path, options) {
  const response = await send(path, options);
  try {
    for await (const event of readEvents(response)) {
      if (event.data?.error) {
        throw new ApiError(502, event.data.error.message);
      }
      if (event.name === "end") {
        return;
      }
      yield event;
    }
    throw new ApiError(0, "The connection broke off.");
  } catch (error) {
    if (error instanceof ApiError || options?.signal?.aborted) {
      throw error;
    }
    throw new ApiError(0, "The connection broke off.");
  }
}
