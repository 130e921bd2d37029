// Calls of the server: the key, and errors as the server words them.

const STORED = "jaxpage.key";
let key = null;
try {
  key = sessionStorage.getItem(STORED);
} catch { /* storage is switched off */ }

/** Use a key from now on; `keep`: after a reload of this tab too. */
export function setKey(value, keep) {
  key = value;
  try {
    if (keep) sessionStorage.setItem(STORED, value);
    else sessionStorage.removeItem(STORED);
  } catch { /* then it is in memory only */ }
}

/** What the server said instead of an answer, or why it said nothing (then `status` is 0). */
export class ServerError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

/** A response with status 200. `path` is relative to the page. Throws ServerError, or what `signal` says. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers,
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** OpenAI's error object as a ServerError. */
export function serverError(error, status = 0, retryAfter = null) {
  const message = typeof error === "string" ? error : error?.message;
  return new ServerError(message || `The server answered with status ${status}.`, {
    status: status || Number(error?.code) || 0,
    param: error?.param ?? null,
    retryAfter,
  });
}

async function refusal(response) {
  let error = null;
  try {
    const body = await response.json();
    error = body.error ?? body.detail ?? body;
  } catch { /* no JSON: a proxy's page, say */ }
  return serverError(error, response.status, response.headers.get("Retry-After"));
}
