// Server-sent events as OpenAI's API streams them.

import { ServerError, serverError } from "./api.js";

/**
 * The objects of a stream of `data:` lines, until `[DONE]`. Throws ServerError for an error within the stream, and if it
 * breaks off.
 */
export async function* chunks(stream) {
  for await (const data of events(stream)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw serverError(chunk.error);
    yield chunk;
  }
  throw new ServerError("The answer broke off: the server closed the connection.");
}

/** The data of each event. */
export async function* events(stream) {
  let data = [];
  for await (const line of lines(stream)) {
    if (line === "") {
      if (data.length) yield data.join("\n");
      data = [];
    } else if (line.startsWith("data:")) {
      data.push(line.slice(line[5] === " " ? 6 : 5));
    } // anything else is a comment, or a field that OpenAI's API does not use
  }
}

async function* lines(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      // A carriage return at the end may be half of a line's end.
      const found = rest.split(/\r\n|\n|\r(?!$)/);
      rest = found.pop();
      yield* found;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The answer broke off: the connection was lost.");
  }
}
