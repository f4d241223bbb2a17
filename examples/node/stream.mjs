// Streams a completion from mlxd, from its .proto files alone.
//
//   npm ci
//   node stream.mjs [ADDRESS] [MODEL] [PROMPT]
//
// The text goes to stdout as it comes, what it cost to stderr as one line of JSON. A stream that
// ends without `finish`, or with a gap in its offsets, has failed: the exit code says so.

import { credentials, loadPackageDefinition, status } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { fileURLToPath } from "node:url";

const [address = "127.0.0.1:8555", model = "", prompt = "Once upon a time"] = process.argv.slice(2);

const definition = loadSync("mlxd/v1/inference.proto", {
  includeDirs: [fileURLToPath(new URL("../../proto", import.meta.url))],
  keepCase: true, // the names of the .proto files
  longs: String, // a seed has 64 bits, a JavaScript number 53
  enums: String,
  oneofs: true,
  defaults: true, // a field that is absent reads as its zero, a message as null
});
const { InferenceService } = loadPackageDefinition(definition).mlxd.v1;
const client = new InferenceService(address, credentials.createInsecure());

const stream = client.Generate({
  model,
  text: prompt,
  sampling: { temperature: 0.7, seed: "42" },
  max_tokens: 48,
});

let interrupted = false;
process.on("SIGINT", () => {
  interrupted = true;
  stream.cancel(); // the server stops within a step
});

let nextOffset = 0;
let finish = null;
let usage = null;
try {
  for await (const message of stream) {
    if (message.offset !== nextOffset) {
      throw new Error(`broken stream: token ${nextOffset} was due, ${message.offset} came`);
    }
    nextOffset += message.token_ids.length;
    process.stdout.write(message.text);
    if (message.finish) {
      ({ finish, usage } = message);
    }
  }
  if (!finish) {
    throw new Error(`broken stream: it ended after ${nextOffset} tokens without a finish`);
  }
  process.stdout.write("\n");
  console.error(JSON.stringify({ finish: finish.reason, usage }));
} catch (error) {
  if (interrupted) {
    process.exitCode = 130;
  } else {
    const ofServer = error.code !== undefined;
    console.error(ofServer ? `${status[error.code]}: ${error.details}` : error.message);
    process.exitCode = 1;
  }
} finally {
  client.close();
}
