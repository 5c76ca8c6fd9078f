// What the server is asked: JSON over HTTP, with the token where one is needed. What it refuses is told as it tells it.

const TOKEN = "jumok-token"; // kept for this tab, until it is closed
const here = document.body.dataset.base; // where the app is mounted

/** The server said no; `retry`: after so many seconds it may say yes. */
export class Refusal extends Error {
  constructor(status, text, retry = null) {
    super(text);
    Object.assign(this, { status, retry });
  }
}

export function tokenKept() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

export function keepToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

/** The answer to a request; with a body it is a POST. */
export async function askServer(path, body, signal) {
  const headers = {};
  // As UTF-8: a header is made of bytes, which fetch wants as characters.
  const token = String.fromCharCode(...new TextEncoder().encode(tokenKept()));
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const asked = { method: body === undefined ? "GET" : "POST", headers, body: JSON.stringify(body), signal };
  let answer;
  try {
    answer = await fetch(`${here}/${path}`, { ...asked, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refusal(0, "The server cannot be reached: it does not run, or this device is not connected to it.");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Refusal(
    answer.status,
    told.error ?? `the server answered ${answer.status}`,
    Number(answer.headers.get("Retry-After")) || null,
  );
}

export async function askJson(path, body, signal) {
  return (await askServer(path, body, signal)).json();
}

/** The same while it is made: `heard(event, data)`, a text so far, or a part; what comes back is the whole answer. */
export async function askStream(path, body, signal, heard) {
  const answer = await askServer(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refusal(0, "The connection ended before the answer was whole.");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const name = /^event: (.*)$/m.exec(block)?.[1],
        data = JSON.parse(/^data: (.*)$/m.exec(block)?.[1] ?? "null");
      if (name === "done") return data;
      if (name === "error") throw new Refusal(0, data.error);
      heard(name, data);
    }
  }
}
