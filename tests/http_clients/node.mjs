// OpenAI's package for Node against the URL given: what it offers, and every error.
import assert from "node:assert/strict";
import OpenAI from "openai";

const url = process.argv[2];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Mia has 12 stamps and buys 30 more. How many has she now?" }];
const asked = { model: "target:exact", messages, max_tokens: 40 };

const ids = [];
for await (const model of client.models.list()) ids.push(model.id);
assert.ok(ids.includes("target") && ids.includes("target:exact"));

const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
assert.equal(whole.usage.completion_tokens, 40);
assert.equal(whole.choices[0].finish_reason, "length");

let streamed = "", usage, done = 0;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
  done += chunk.choices[0]?.finish_reason === "length";
}
assert.equal(streamed, text);
assert.deepEqual([usage.completion_tokens, done], [40, 1]);

const drawn = await client.chat.completions.create({ ...asked, temperature: 1, n: 2 });
const again = await client.chat.completions.create({ ...asked, temperature: 1, seed: drawn.choices[1].seed });
assert.equal(again.choices[0].message.content, drawn.choices[1].message.content);

const stop = text.slice(10, 14);
const stopped = await client.chat.completions.create({ ...asked, stop: [stop] });
assert.equal(stopped.choices[0].message.content, text.slice(0, text.indexOf(stop)));
assert.equal(stopped.choices[0].stop_reason, stop);

const scored = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
const entries = scored.choices[0].logprobs.content;
assert.equal(entries.length, 40);
assert.equal(Buffer.from(entries.flatMap((e) => e.bytes)).toString(), text);
assert.ok(entries.every((e) => e.top_logprobs.length === 2));

const predicted = await client.chat.completions.create({ ...asked, prediction: { type: "content", content: text } });
assert.equal(predicted.choices[0].message.content, text);
assert.ok(predicted.usage.completion_tokens_details.accepted_prediction_tokens > 20);

const plain = await client.completions.create({ model: "target", prompt: ["The cat", "def f("], max_tokens: 5, echo: true, logprobs: 1 });
assert.equal(plain.choices.length, 2);
assert.equal(plain.choices[0].logprobs.token_logprobs[0], null);

const response = await client.responses.create({ model: "target:exact", input: messages, max_output_tokens: 40 });
assert.equal(response.output_text, text);
let told = "";
for await (const event of await client.responses.create({ model: "target:exact", input: messages, max_output_tokens: 40, stream: true })) {
  if (event.type === "response.output_text.delta") told += event.delta;
}
assert.equal(told, text);

const refused = async (kind, changes) =>
  assert.rejects(client.chat.completions.create({ ...asked, ...changes }), (error) => error instanceof kind && error.message.length > 20);
await refused(OpenAI.NotFoundError, { model: "gpt" });
await refused(OpenAI.BadRequestError, { stop: ["a", "b", "c", "d", "e"] });
await refused(OpenAI.BadRequestError, { response_format: { type: "json_object" } });
await refused(OpenAI.BadRequestError, { stream: true, temperature: -1 });

const leaving = await client.chat.completions.create({ ...asked, max_tokens: 400, ignore_eos: true, stream: true });
for await (const _ of leaving) break;
console.log("node: passed");
