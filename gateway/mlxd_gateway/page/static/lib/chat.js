// A conversation: what was said, and how an answer grows by its events. Pure.

import { contentOf } from "./images.js";

/**
 * @typedef {object} Call a tool call of an answer
 * @property {string} id
 * @property {string} name
 * @property {string} args JSON
 * @property {string | null} result what the reader has answered; null: nothing yet
 */

/**
 * @typedef {object} Turn
 * @property {"user" | "assistant"} role
 * @property {string} text
 * @property {import("./images.js").Picture[]} pictures of a user's message, shown before its text
 * @property {string} reasoning
 * @property {Call[]} calls
 * @property {"" | "writing" | "done" | "stopped" | "failed"} state of an answer
 * @property {number} tokens of an answer that is done; 0 before
 * @property {string} note why it ended, or what it waits for
 */

/**
 * @param {"user" | "assistant"} role
 * @param {string} [text]
 * @param {import("./images.js").Picture[]} [pictures]
 * @returns {Turn}
 */
export function turn(role, text = "", pictures = []) {
  const state = role === "assistant" ? "writing" : "";
  return { role, text, pictures, reasoning: "", calls: [], state, tokens: 0, note: "" };
}

/**
 * @param {Turn} answer
 * @param {import("./events.js").Event} event of either of OpenAI's APIs
 * @returns {Turn} the answer with what the event adds
 */
export function grow(answer, event) {
  if (event.name === "comment") {
    return answer.text || answer.reasoning ? answer : { ...answer, note: event.data };
  }
  const choice = event.data.choices?.[0];
  const grown = { ...answer, tokens: event.data.usage?.completion_tokens ?? answer.tokens };
  if (choice) {
    const delta = choice.delta ?? {};
    grown.text += delta.content ?? choice.text ?? "";
    grown.reasoning += delta.reasoning_content ?? "";
    grown.calls = [...grown.calls, ...(delta.tool_calls ?? []).map(callOf)];
    grown.note = choice.finish_reason === "length" ? "Cut at the limit of tokens" : "";
  }
  return grown;
}

/**
 * @param {any} sent a tool call as OpenAI's API has it
 * @returns {Call}
 */
function callOf(sent) {
  return { id: sent.id, name: sent.function.name, args: sent.function.arguments, result: null };
}

/**
 * @param {Turn[]} turns
 * @param {string} system empty: none
 * @returns {object[]} the messages of OpenAI's API; an answer that failed with nothing is none
 */
export function messagesOf(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, text, pictures, calls } of turns) {
    if (role === "user") {
      messages.push({ role, content: contentOf(text, pictures) });
    } else if (text || calls.length > 0) {
      const sent = calls.map(({ id, name, args }) => ({
        id, type: "function", function: { name, arguments: args },
      }));
      messages.push({ role, content: text, ...(sent.length > 0 ? { tool_calls: sent } : {}) });
      for (const { id, result } of calls) {
        messages.push({ role: "tool", tool_call_id: id, content: result ?? "" });
      }
    }
  }
  return messages;
}

/**
 * @param {Turn[]} turns
 * @returns {Call[]} those of the last answer that wait for a result
 */
export function openCalls(turns) {
  const last = turns[turns.length - 1];
  return last?.role === "assistant" && last.state === "done"
    ? last.calls.filter((call) => call.result === null)
    : [];
}

/**
 * Read the definitions of tools.
 * @param {string} text JSON: a list, of OpenAI's tools or of bare functions; empty: none
 * @returns {object[]}
 * @throws {Error} it is no such list
 */
export function toolsOf(text) {
  if (!text.trim()) {
    return [];
  }
  const list = JSON.parse(text);
  if (!Array.isArray(list)) {
    throw new Error("Tools are a list.");
  }
  const whole = (tool) => (tool.type === "function" ? tool : { type: "function", function: tool });
  return list.map(whole);
}

/**
 * Cut a text at its fences.
 * @param {string} text
 * @returns {{code: boolean, language: string, text: string}[]} in order; an open fence is code too
 */
export function piecesOf(text) {
  const pieces = [];
  let piece = { code: false, language: "", text: "" };
  for (const line of text.split("\n")) {
    const fence = /^\s*```(\S*)\s*$/.exec(line);
    if (fence) {
      pieces.push(piece);
      piece = { code: !piece.code, language: piece.code ? "" : fence[1], text: "" };
    } else {
      piece.text += `${line}\n`;
    }
  }
  pieces.push(piece);
  return pieces
    .map((each) => ({ ...each, text: each.text.replace(/\n$/, "") }))
    .filter((each) => each.code || each.text.trim());
}
