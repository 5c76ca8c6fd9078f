// The client of the server's HTTP API: JSON requests, with the bearer token if one is set.

const TOKEN_KEY = "jumok-token"; // in sessionStorage: one tab, until it is closed
const baseUrl = document.body.dataset.base; // where the app is mounted

/** An error response, or no response (`status` 0). `retryAfter` is the time to wait in seconds, or null. */
export class ServerError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

export function storedToken() {
  return sessionStorage.getItem(TOKEN_KEY) ?? "";
}

export function storeToken(token) {
  if (token) sessionStorage.setItem(TOKEN_KEY, token);
  else sessionStorage.removeItem(TOKEN_KEY);
}

/** Send a request: a POST if there is a body, else a GET. Throws a ServerError unless the status is 2xx. */
export async function fetchFromServer(path, body, signal) {
  const headers = {};
  // fetch takes header values as Latin-1 characters, so each byte of the UTF-8 token becomes one character.
  const token = String.fromCharCode(...new TextEncoder().encode(storedToken()));
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  let response;
  try {
    response = await fetch(`${baseUrl}/${path}`, {
      ...{ method, headers, body: JSON.stringify(body), signal, cache: "no-store" },
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError(0, "The server cannot be reached. It may have stopped, or this device may be offline.");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw new ServerError(
    response.status,
    error ?? `the server returned status ${response.status}`,
    Number(response.headers.get("Retry-After")) || null,
  );
}

export async function fetchJson(path, body, signal) {
  return (await fetchFromServer(path, body, signal)).json();
}

/** Read server-sent events: `onPartial(event, data)` gets partial results, and the final result is returned. */
export async function fetchStream(path, body, signal, onPartial) {
  const response = await fetchFromServer(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError(0, "The connection ended before the answer was complete.");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = /^event: (.*)$/m.exec(block)?.[1],
        data = JSON.parse(/^data: (.*)$/m.exec(block)?.[1] ?? "null");
      if (event === "done") return data;
      if (event === "error") throw new ServerError(0, data.error);
      onPartial(event, data);
    }
  }
}
