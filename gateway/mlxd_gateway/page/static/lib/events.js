// Server-sent events from a response's body: EventSource cannot send a key.

/** @typedef {{name: string, data: any}} Event an event; a comment has the name "comment" */

/**
 * Yield the events of a response as they come, comments too.
 * @param {Response} response
 * @returns {AsyncGenerator<Event>}
 */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event !== null) {
          yield event;
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/**
 * Parse what stands between two empty lines.
 * @param {string} block
 * @returns {Event | null} null for one that holds nothing; "end" is the mark of an end, of any API
 */
export function parseEvent(block) {
  let name = "";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith(":")) {
      return { name: "comment", data: line.slice(1).trim() };
    }
    if (line.startsWith("event: ")) {
      name = line.slice(7);
    } else if (line.startsWith("data: ")) {
      data += line.slice(6);
    }
  }
  if (data === "[DONE]") {
    return { name: "end", data: null };
  }
  return data === "" ? null : { name, data: JSON.parse(data) };
}
