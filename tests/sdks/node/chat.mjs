// OpenAI's package for Node against a gateway: every kind of call, one JSON object on stdout.
// Usage: node chat.mjs URL
import OpenAI from "openai";

const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 8 } },
  required: ["city"],
  additionalProperties: false,
};
const tool = {
  type: "function",
  function: { name: "weather", description: "Tells it.", parameters: schema, strict: true },
};
const client = new OpenAI({
  baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0, timeout: 600_000,
});
const common = { model: "chatty", temperature: 0 };
const seen = {};

const models = [];
for await (const model of client.models.list()) models.push(model.id);
seen.models = models;

// A tool over two turns, streamed and not.
const messages = [{ role: "user", content: "How is the weather in Bern?" }];
const first = await client.chat.completions
  .stream({
    ...common, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false,
  })
  .finalChatCompletion();
const { message } = first.choices[0];
const [call] = message.tool_calls;
seen.call = { name: call.function.name, arguments: JSON.parse(call.function.arguments) };
messages.push(message, { role: "tool", tool_call_id: call.id, content: "rain" });
const second = await client.chat.completions.create({ ...common, messages, max_tokens: 8 });
seen.answer = second.choices[0].message.content;
seen.usage = second.usage.completion_tokens;

// Text and a held format.
const pieces = [];
const asked = { model: "demo", prompt: "Once upon", max_tokens: 8, temperature: 0 };
for await (const piece of await client.completions.create({ ...asked, stream: true })) {
  pieces.push(piece.choices[0].text);
}
const whole = await client.completions.create(asked);
seen.same = pieces.join("") === whole.choices[0].text && pieces.length > 1;
const held = await client.chat.completions.create({
  ...common,
  messages: [{ role: "user", content: "Once" }],
  response_format: { type: "json_schema", json_schema: { name: "place", schema, strict: true } },
});
seen.held = JSON.parse(held.choices[0].message.content);

// Responses: a second one goes on from the first.
const one = await client.responses.create({ ...common, input: "Once", max_output_tokens: 4 });
const two = await client.responses.create({
  ...common, input: "And then?", previous_response_id: one.id, max_output_tokens: 4,
});
seen.grown = two.usage.input_tokens > one.usage.input_tokens;

const embedded = await client.embeddings.create({ model: "demo", input: ["a king", "a queen"] });
seen.vectors = embedded.data.map((each) => each.embedding.length);

// What is wrong is the package's own error, with the field.
seen.errors = [];
for (const wrong of [{ model: "none" }, { temperature: 200 }]) {
  try {
    await client.chat.completions.create({ ...common, messages, ...wrong });
  } catch (error) {
    seen.errors.push([error.constructor.name, error.status, error.param]);
  }
}

// Left in the middle.
const left = await client.completions.create({
  model: "demo", prompt: "Once", max_tokens: 900, stream: true,
});
for await (const _ of left) break;
seen.aborted = left.controller.signal.aborted;

console.log(JSON.stringify(seen));
