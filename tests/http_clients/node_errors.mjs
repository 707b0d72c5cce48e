// Every error that OpenAI's package for Node knows, from the URL and API key given; the third
// argument says whether the server is draining.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, apiKey, draining] = process.argv.slice(2);
const client = (key) => new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];

async function refused(kind, status, changes = {}, key = apiKey) {
  for (const stream of [false, true]) {
    const asked = { model: "target", messages, max_tokens: 2, stream, ...changes };
    await assert.rejects(client(key).chat.completions.create(asked), (error) => {
      assert.ok(error instanceof kind, `${error.constructor.name} instead of ${kind.name}`);
      assert.equal(error.status, status);
      assert.ok(error.type && error.message.length > 20, error.message);
      if (status === 429) assert.ok(Number(error.headers.get("retry-after")) >= 1);
      return true;
    });
  }
}

if (draining) {
  await refused(OpenAI.InternalServerError, 503);
} else {
  await refused(OpenAI.AuthenticationError, 401, {}, "fsk_wrong");
  await refused(OpenAI.APIError, 413, { messages: [{ role: "user", content: "x".repeat(4 << 20) }] });
  await refused(OpenAI.BadRequestError, 400, { temperature: -1 });
  await refused(OpenAI.NotFoundError, 404, { model: "gpt" });
  const asked = { model: "target", messages, max_tokens: 2 };
  await client(apiKey).chat.completions.create(asked);
  for (let count = 0; count < 20; count++) await client(apiKey).chat.completions.create(asked).catch(() => {});
  await refused(OpenAI.RateLimitError, 429);
}
console.log("node errors: passed");
