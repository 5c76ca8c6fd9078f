// Numbers from the host: asked for nearest first, given up when no longer wanted, kept while there is room.
//
// A host answers `tiles(request, signal)` with a promise of an ArrayBuffer, whatever lies behind it: a server, a
// saved file, a notebook's kernel. A request is { scene, layer, head, rows: [a, b], cols: [a, b], size, what };
// head null is the mean over the heads; what is "map", "weights" or "received". The page's Python side
// (appearance/tiles.py) says what these mean and how the numbers are packed. Where speech can be said anew, a host also
// answers `retell({ scene, weights })` with a promise of a manifest (appearance/stage.py).

export const TILE_SIZE = 256;
export const THUMBNAIL_SIZE = 64; // cells a side of a small map
export const ALIGNMENT_SIZE = 512; // and of an alignment of speech

/** How the numbers are asked for: the host's own way, or messages to a notebook's kernel. */
export function getHost(model) {
  if (typeof model.tiles !== "function") return createMessageHost(model);
  return Object.assign((request, signal) => model.tiles(request, signal), { resynthesize: model.resynthesize });
}

let numMessages = 0; // numbers are never used twice: several views may share one model

function createMessageHost(model) {
  const waiting = new Map();
  const onMessage = (message, buffers) => {
    const request = waiting.get(message?.id);
    if (!request) return;
    waiting.delete(message.id);
    if (message.error) request.reject(new Error(message.error));
    else if (message.manifest) request.resolve(message.manifest);
    else {
      const view = buffers[0]; // a DataView into a larger buffer, or the buffer
      request.resolve(
        view instanceof ArrayBuffer ? view : view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength),
      );
    }
  };
  model.on("msg:custom", onMessage);
  const send = (content, signal) =>
    new Promise((resolve, reject) => {
      numMessages += 1;
      const id = `${numMessages}.${Math.random()}`;
      waiting.set(id, { resolve, reject });
      signal?.addEventListener("abort", () => {
        waiting.delete(id);
        reject(new DOMException("aborted", "AbortError"));
      });
      model.send({ id, ...content });
    });
  return Object.assign((request, signal) => send({ request }, signal), {
    resynthesize: (payload) => send({ resynthesize: payload }),
    close: () => model.off?.("msg:custom", onMessage),
  });
}

/** The name of an answer; saved files use the same. */
export function keyOf({ data, layer, head, rows, cols, size, quantity }) {
  return `${quantity}/${data}/${layer}/${head ?? "mean"}/${rows[0]}-${rows[1]}/${cols[0]}-${cols[1]}/${size}`;
}

const HALF_TO_FLOAT = Float32Array.from({ length: 65536 }, (_, bits) => {
  const power = (bits >> 10) & 31,
    rest = bits & 1023;
  const size =
    power === 0 ? rest * 2 ** -24 : power === 31 ? (rest ? NaN : Infinity) : (1 + rest / 1024) * 2 ** (power - 15);
  return bits & 32768 ? -size : size;
});

/** From the packed form to { rows, cols, values, most }. */
export function decode(buffer) {
  const header = new DataView(buffer, 0, 16);
  const rows = header.getUint32(0, true),
    cols = header.getUint32(4, true),
    scale = header.getFloat32(12, true);
  let values;
  if (header.getUint32(8, true) === 1) values = new Float32Array(buffer, 16, rows * cols);
  else {
    const codes = new Uint16Array(buffer, 16, rows * cols);
    values = new Float32Array(codes.length);
    for (let n = 0; n < codes.length; n += 1) values[n] = HALF_TO_FLOAT[codes[n]] * scale;
  }
  let most = 0;
  for (let n = 0; n < values.length; n += 1) if (values[n] > most) most = values[n];
  return { rows, cols, values, most };
}

/**
 * The tiles along an axis at a zoom. All span alike, the last one ends where the axis does and may overlap the one
 * before; at zoom 0, where a cell is a token, it has fewer cells instead.
 */
export class Axis {
  constructor(length) {
    this.length = length;
    this.coarsest = length < TILE_SIZE ? 0 : Math.floor(Math.log2(length / TILE_SIZE));
  }

  /** Tokens that a cell covers. */
  cell(zoom) {
    return 2 ** Math.min(zoom, this.coarsest);
  }

  span(zoom) {
    return Math.min(TILE_SIZE * this.cell(zoom), this.length);
  }

  numTiles(zoom) {
    return Math.ceil(this.length / this.span(zoom));
  }

  start(zoom, n) {
    const first = n * this.span(zoom);
    return this.cell(zoom) === 1 ? first : Math.min(first, this.length - this.span(zoom));
  }

  end(zoom, n) {
    return Math.min(this.start(zoom, n) + this.span(zoom), this.length);
  }

  /** Which tile shows a token. */
  at(zoom, token) {
    return Math.min(this.numTiles(zoom) - 1, Math.max(0, Math.floor(token / this.span(zoom))));
  }
}

/** Answers, kept; and the requests for those that are missing. */
export class Store {
  constructor(host, { parallel = 4, capacity = 256, onError = () => {} } = {}) {
    Object.assign(this, { host, parallel, capacity, onError });
    this.cache = new Map(); // in the order of their last use
    this.pending = new Map(); // owner → Map(key → wish)
    this.inFlight = new Map(); // key → AbortController
    this.retryAt = new Map(); // key → when it may be tried again
  }

  get(key) {
    const answer = this.cache.get(key);
    if (answer) {
      this.cache.delete(key);
      this.cache.set(key, answer);
    }
    return answer;
  }

  /** All that an owner wants now: [{ request, urgency, arrived }], the least urgency first. What it no longer wants is given up. */
  request(owner, entries) {
    const missing = new Map();
    for (const entry of entries) {
      const key = keyOf(entry.request);
      if (!this.cache.has(key)) missing.set(key, entry);
    }
    if (missing.size) this.pending.set(owner, missing);
    else this.pending.delete(owner);
    for (const [key, control] of this.inFlight) {
      if (![...this.pending.values()].some((keys) => keys.has(key))) {
        this.inFlight.delete(key);
        control.abort();
      }
    }
    this.startNext();
  }

  /** One answer, soon, whoever else waits. */
  async fetchOne(request, signal) {
    const key = keyOf(request);
    const cached = this.get(key);
    if (cached) return cached;
    const answer = decode(await this.host(request, signal));
    if (answer.values.length <= 1 << 18) this.store(key, answer);
    return answer;
  }

  startNext() {
    while (this.inFlight.size < this.parallel) {
      let best = null,
        bestKey = "";
      for (const keys of this.pending.values()) {
        for (const [key, entry] of keys) {
          if (this.inFlight.has(key) || this.retryAt.get(key) > performance.now()) continue;
          if (!best || entry.priority < best.priority) [best, bestKey] = [entry, key];
        }
      }
      if (!best) return;
      this.fetch(bestKey, best.request);
    }
  }

  async fetch(key, request) {
    const control = new AbortController();
    this.inFlight.set(key, control);
    try {
      const answer = decode(await this.host(request, control.signal));
      this.store(key, answer);
      this.retryAt.delete(key);
      for (const [owner, keys] of this.pending) {
        const entry = keys.get(key);
        if (!entry) continue;
        keys.delete(key);
        if (!keys.size) this.pending.delete(owner);
        entry.onLoad?.(answer);
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        this.retryAt.set(key, performance.now() + 1500);
        this.onError(error);
      }
    } finally {
      if (this.inFlight.get(key) === control) this.inFlight.delete(key);
      this.startNext();
    }
  }

  store(key, answer) {
    this.cache.set(key, answer);
    for (const old of this.cache.keys()) {
      if (this.cache.size <= this.capacity) break;
      this.cache.delete(old);
    }
  }

  close() {
    this.host.close?.();
    this.pending.clear();
    for (const control of this.inFlight.values()) control.abort();
    this.inFlight.clear();
  }
}
