// Numbers from the host: asked for nearest first, given up when no longer wanted, kept while there is room.
//
// A host answers `tiles(request, signal)` with a promise of an ArrayBuffer, whatever lies behind it: a server, a
// saved file, a notebook's kernel. A request is { scene, layer, head, rows: [a, b], cols: [a, b], size, what };
// head null is the mean over the heads; what is "map", "weights" or "received". The page's Python side
// (look/tiles.py) says what these mean and how the numbers are packed. Where speech can be said anew, a host also
// answers `retell({ scene, weights })` with a promise of a manifest (look/stage.py).

export const TILE = 256;
export const THUMB = 64; // cells a side of a small map
export const STRIP = 512; // and of an alignment of speech

/** How the numbers are asked for: the host's own way, or messages to a notebook's kernel. */
export function hostOf(model) {
  if (typeof model.tiles !== "function") return overMessages(model);
  return Object.assign((request, signal) => model.tiles(request, signal), { retell: model.retell });
}

let messages = 0; // numbers are never used twice: several views may share one model

function overMessages(model) {
  const waiting = new Map();
  const heard = (message, buffers) => {
    const waits = waiting.get(message?.id);
    if (!waits) return;
    waiting.delete(message.id);
    if (message.error) waits.reject(new Error(message.error));
    else if (message.manifest) waits.resolve(message.manifest);
    else {
      const view = buffers[0]; // a DataView into a larger buffer, or the buffer
      waits.resolve(
        view instanceof ArrayBuffer ? view : view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength),
      );
    }
  };
  model.on("msg:custom", heard);
  const send = (content, signal) =>
    new Promise((resolve, reject) => {
      messages += 1;
      const id = `${messages}.${Math.random()}`;
      waiting.set(id, { resolve, reject });
      signal?.addEventListener("abort", () => {
        waiting.delete(id);
        reject(new DOMException("given up", "AbortError"));
      });
      model.send({ id, ...content });
    });
  return Object.assign((request, signal) => send({ request }, signal), {
    retell: (wish) => send({ retell: wish }),
    close: () => model.off?.("msg:custom", heard),
  });
}

/** The name of an answer; saved files use the same. */
export function keyOf({ scene, layer, head, rows, cols, size, what }) {
  return `${what}/${scene}/${layer}/${head ?? "mean"}/${rows[0]}-${rows[1]}/${cols[0]}-${cols[1]}/${size}`;
}

const halves = Float32Array.from({ length: 65536 }, (_, bits) => {
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
    for (let n = 0; n < codes.length; n += 1) values[n] = halves[codes[n]] * scale;
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
    this.coarsest = length < TILE ? 0 : Math.floor(Math.log2(length / TILE));
  }

  /** Tokens that a cell covers. */
  cell(zoom) {
    return 2 ** Math.min(zoom, this.coarsest);
  }

  span(zoom) {
    return Math.min(TILE * this.cell(zoom), this.length);
  }

  count(zoom) {
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
    return Math.min(this.count(zoom) - 1, Math.max(0, Math.floor(token / this.span(zoom))));
  }
}

/** Answers, kept; and the requests for those that are missing. */
export class Store {
  constructor(host, { parallel = 4, keep = 256, failed = () => {} } = {}) {
    Object.assign(this, { host, parallel, keep, failed });
    this.kept = new Map(); // in the order of their last use
    this.wanted = new Map(); // owner → Map(key → wish)
    this.asked = new Map(); // key → AbortController
    this.broken = new Map(); // key → when it may be tried again
  }

  get(key) {
    const found = this.kept.get(key);
    if (found) {
      this.kept.delete(key);
      this.kept.set(key, found);
    }
    return found;
  }

  /** All that an owner wants now: [{ request, urgency, arrived }], the least urgency first. What it no longer wants is given up. */
  want(owner, wishes) {
    const missing = new Map();
    for (const wish of wishes) {
      const key = keyOf(wish.request);
      if (!this.kept.has(key)) missing.set(key, wish);
    }
    if (missing.size) this.wanted.set(owner, missing);
    else this.wanted.delete(owner);
    for (const [key, control] of this.asked) {
      if (![...this.wanted.values()].some((keys) => keys.has(key))) {
        this.asked.delete(key);
        control.abort();
      }
    }
    this.pump();
  }

  /** One answer, soon, whoever else waits. */
  async one(request, signal) {
    const key = keyOf(request);
    const found = this.get(key);
    if (found) return found;
    const answer = decode(await this.host(request, signal));
    if (answer.values.length <= 1 << 18) this.store(key, answer);
    return answer;
  }

  pump() {
    while (this.asked.size < this.parallel) {
      let best = null,
        bestKey = "";
      for (const keys of this.wanted.values()) {
        for (const [key, wish] of keys) {
          if (this.asked.has(key) || this.broken.get(key) > performance.now()) continue;
          if (!best || wish.urgency < best.urgency) [best, bestKey] = [wish, key];
        }
      }
      if (!best) return;
      this.fetch(bestKey, best.request);
    }
  }

  async fetch(key, request) {
    const control = new AbortController();
    this.asked.set(key, control);
    try {
      const answer = decode(await this.host(request, control.signal));
      this.store(key, answer);
      this.broken.delete(key);
      for (const [owner, keys] of this.wanted) {
        const wish = keys.get(key);
        if (!wish) continue;
        keys.delete(key);
        if (!keys.size) this.wanted.delete(owner);
        wish.arrived?.(answer);
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        this.broken.set(key, performance.now() + 1500);
        this.failed(error);
      }
    } finally {
      if (this.asked.get(key) === control) this.asked.delete(key);
      this.pump();
    }
  }

  store(key, answer) {
    this.kept.set(key, answer);
    for (const old of this.kept.keys()) {
      if (this.kept.size <= this.keep) break;
      this.kept.delete(old);
    }
  }

  close() {
    this.host.close?.();
    this.wanted.clear();
    for (const control of this.asked.values()) control.abort();
    this.asked.clear();
  }
}
