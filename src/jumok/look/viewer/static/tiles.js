// Tiles from the host: requested by priority, aborted when no longer needed, cached.
//
// A host implements `tiles(request, signal)`, which returns a promise of an ArrayBuffer: a server, a saved file or the
// kernel of a notebook. A request is { data, layer, head, rows: [a, b], cols: [a, b], size, quantity }; head null is
// the mean over the heads; quantity is "pooled_map", "weights" or "received_weight"; without_sinks is 1 for weights
// without attention sinks, otherwise 0. See viewer/tiles.py for their
// meaning and for the packed format. If speech can be synthesised, a host also implements
// `resynthesize({ data, weights })`, which returns a promise of a manifest (viewer/viewer_session.py).

export const TILE_SIZE = 256;
export const THUMBNAIL_SIZE = 64; // cells a side of a small map
export const ALIGNMENT_SIZE = 512; // cells a side of a speech alignment

/** Return the host of a model: its own functions, or messages to the kernel of a notebook. */
export function getHost(model) {
  if (typeof model.tiles !== "function") return createMessageHost(model);
  return Object.assign((request, signal) => model.tiles(request, signal), { resynthesize: model.resynthesize });
}

let numMessages = 0; // for ids that are never reused: several views may share one model

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

/** `source`: { data, layer, head, withoutSinks }. */
export function buildRequest({ data, layer, head, withoutSinks = false }, quantity, rows, cols, size = TILE_SIZE) {
  return { data, layer, head, quantity, rows, cols, size, without_sinks: Number(withoutSinks) };
}

/** Return the key of a request; saved files use the same. */
export function keyOf({ data, layer, head, rows, cols, size, quantity, without_sinks: withoutSinks }) {
  const end = withoutSinks ? "/without_sinks" : "";
  return `${quantity}/${data}/${layer}/${head ?? "mean"}/${rows[0]}-${rows[1]}/${cols[0]}-${cols[1]}/${size}${end}`;
}

const HALF_TO_FLOAT = Float32Array.from({ length: 65536 }, (_, bits) => {
  const power = (bits >> 10) & 31,
    rest = bits & 1023;
  const size =
    power === 0 ? rest * 2 ** -24 : power === 31 ? (rest ? NaN : Infinity) : (1 + rest / 1024) * 2 ** (power - 15);
  return bits & 32768 ? -size : size;
});

// Square roots as multiples of a step, in one or two planes of bytes.
function decodeRoots(buffer, length, step) {
  const small = new DataView(buffer).getFloat32(16, true),
    low = new Uint8Array(buffer, 20, length),
    high = buffer.byteLength >= 20 + 2 * length ? new Uint8Array(buffer, 20 + length, length) : null,
    values = new Float32Array(length),
    table = Float32Array.from({ length: high ? 65536 : 256 }, (_, code) => ((code - 1) * step) ** 2);
  table[0] = 0;
  table[1] = small;
  for (let n = 0; n < length; n += 1) values[n] = table[high ? low[n] | (high[n] << 8) : low[n]];
  return values;
}

/** Decode the packed format to { rows, cols, values, most }. */
export function decode(buffer) {
  const header = new DataView(buffer, 0, 16);
  const rows = header.getUint32(0, true),
    cols = header.getUint32(4, true),
    scale = header.getFloat32(12, true);
  const kind = header.getUint32(8, true);
  let values;
  if (kind === 1) values = new Float32Array(buffer, 16, rows * cols);
  else if (kind === 2) values = decodeRoots(buffer, rows * cols, scale);
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
 * The tiles along an axis at a zoom. All have the same span; the last one ends where the axis does and may overlap the
 * one before. At zoom 0, where a cell is a token, it has fewer cells instead.
 */
export class Axis {
  constructor(length) {
    this.length = length;
    this.coarsest = length < TILE_SIZE ? 0 : Math.floor(Math.log2(length / TILE_SIZE));
  }

  /** The number of tokens that a cell covers. */
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

  /** The tile that shows a token. */
  at(zoom, token) {
    return Math.min(this.numTiles(zoom) - 1, Math.max(0, Math.floor(token / this.span(zoom))));
  }
}

/** The tiles of a map of these numbers of rows and columns. */
export class TileGrid {
  constructor([numRows, numCols]) {
    this.rows = new Axis(numRows);
    this.cols = new Axis(numCols);
    this.coarsest = Math.max(this.rows.coarsest, this.cols.coarsest);
  }

  /** The request for tile (i, j) of a zoom. `source`: { data, layer, head, withoutSinks }. */
  request(source, zoom, i, j) {
    const { rows, cols } = this;
    return buildRequest(
      source,
      "pooled_map",
      [rows.start(zoom, i), rows.end(zoom, i)],
      [cols.start(zoom, j), cols.end(zoom, j)],
    );
  }

  /** All tiles of a zoom, as (i, j). */
  *indices(zoom) {
    for (let i = 0; i < this.rows.numTiles(zoom); i += 1)
      for (let j = 0; j < this.cols.numTiles(zoom); j += 1) yield [i, j];
  }
}

/** A cache of answers, and the queue of requests for missing ones. */
export class Store {
  constructor(host, { parallel = 4, capacity = 256, onError = () => {} } = {}) {
    Object.assign(this, { host, parallel, capacity, onError });
    this.cache = new Map(); // in the order of last use
    this.pending = new Map(); // owner → Map(key → entry)
    this.inFlight = new Map(); // key → AbortController
    this.retryAt = new Map(); // key → time of the next attempt
  }

  get(key) {
    const answer = this.cache.get(key);
    if (answer) {
      this.cache.delete(key);
      this.cache.set(key, answer);
    }
    return answer;
  }

  /**
   * Request all tiles that an owner needs now: [{ request, priority, onLoad }], lowest priority first. Its other
   * requests are aborted.
   */
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

  /** Fetch one answer immediately. */
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
