// The `openai` package of npm, unmodified, against a live server: run by `make clients-all`.
//   node tests/serve/clients/node_client.mjs BASE_URL    (from a directory that has the package)
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const { default: OpenAI } = createRequire(process.cwd() + "/")("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "x", maxRetries: 0 });
const models = await client.models.list();
const model = models.data[0].id;
const messages = [{ role: "user", content: "How fast are you?" }];

const chat = await client.chat.completions.create({ model, messages, max_tokens: 20 });
assert.equal(chat.choices[0].message.content.length, 20);
assert.equal(chat.choices[0].finish_reason, "length");
assert.equal(chat.usage.completion_tokens, 20);

let text = "", usage = null;
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 32, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  if (chunk.choices.length) text += chunk.choices[0].delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text.length, 32);
assert.equal(usage.completion_tokens, 32);

const tools = [{ type: "function", function: { name: "add", parameters: {
  type: "object", properties: { a: { type: "integer", minimum: 1 } }, required: ["a"], additionalProperties: false,
} } }];
const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 200 });
assert.ok(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).a >= 1);

const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 16 });
assert.equal(response.output_text.length, 16);
const vectors = await client.embeddings.create({ model, input: ["a", "b"] });
assert.equal(vectors.data.length, 2);
await assert.rejects(client.chat.completions.create({ model: "another", messages }), (error) => error.status === 404);
console.log("openai of npm: chat, stream, tools, responses, embeddings, errors");
