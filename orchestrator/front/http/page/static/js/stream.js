// Requests to the server, and its streams of server-sent events.

/** A refusal by the server, or a stream that ended with an error. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Sends a request and returns the response. Throws `ServerError` with the server's own message. */
export async function request(path, { method = "GET", body, key, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.");
  }
  if (!response.ok) {
    const document = await response.json().catch(() => ({}));
    const message = document.error?.message ?? `The server answered with ${response.status}.`;
    throw new ServerError(message, response.status);
  }
  return response;
}

/** Splits text that arrives in pieces into the data of its server-sent events. */
export class EventSplitter {
  #rest = "";

  /** Returns the data of the events that `text` completes. */
  push(text) {
    const blocks = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = blocks.pop();
    return blocks.map(dataOf).filter((data) => data !== "");
  }
}

function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

/** Yields the JSON documents of a streamed response. Throws `ServerError` if it ends early. */
export async function* readFrames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const splitter = new EventSplitter();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection to the server was lost.");
      });
      if (done) throw new ServerError("The stream ended before the generation did.");
      for (const data of splitter.push(value)) {
        if (data === "[DONE]") return;
        const frame = JSON.parse(data);
        if (frame.error) throw new ServerError(frame.error.message);
        yield frame;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
