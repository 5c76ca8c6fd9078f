// The weights of a saved file: blocks of text that are decoded when they are needed (see viewer/html_file.py).

import { isDetailed, listHeads } from "./manifest.js";
import { computeWeights, decodeSide, decodeVisible } from "./saved_scores.js";
import { removeSinks } from "./sinks.js";
import { decode, keyOf, THUMBNAIL_SIZE } from "./tiles.js";

const MAX_CACHED_CELLS = 1 << 23; // of decoded maps: 32 MiB

// The digits of base 119: all ASCII characters except those that HTML or tools that work by line would change.
const UNSAFE = [0, 10, 11, 12, 13, 28, 29, 30, 60];
const DIGIT_VALUES = new Uint8Array(128);
let numDigits = 0;
for (let code = 0; code < 128; code += 1) if (!UNSAFE.includes(code)) DIGIT_VALUES[code] = numDigits++;

/** Decode text to bytes: seven digits are six bytes (see viewer/ascii_coding.py). */
export function decodeText(text, start, length) {
  const bytes = new Uint8Array(length + 6);
  for (let n = 0, at = start; n < length; n += 6, at += 7) {
    let number = 0; // of 48 bits, which a double holds exactly
    for (let k = 0; k < 7; k += 1) number = number * 119 + DIGIT_VALUES[text.charCodeAt(at + k)];
    const high = Math.floor(number / 0x1000000),
      low = number - high * 0x1000000;
    bytes[n] = high >> 16;
    bytes[n + 1] = high >> 8;
    bytes[n + 2] = high;
    bytes[n + 3] = low >> 16;
    bytes[n + 4] = low >> 8;
    bytes[n + 5] = low;
  }
  return bytes.subarray(0, length);
}

/** Sum the columns of each cell and average its rows, as ArrayWeightSource.pooled_map does in Python. */
export function pool({ values, cols: width }, [top, bottom], [left, right], size) {
  const rows = Math.min(bottom - top, size),
    cols = Math.min(right - left, size),
    pooled = new Float32Array(rows * cols);
  const edges = (length, count) =>
    Int32Array.from({ length: count + 1 }, (_, n) => Math.floor((n * length) / count));
  const rowEdges = edges(bottom - top, rows),
    colEdges = edges(right - left, cols);
  for (let i = 0; i < rows; i += 1) {
    const scale = 1 / (rowEdges[i + 1] - rowEdges[i]);
    for (let row = rowEdges[i]; row < rowEdges[i + 1]; row += 1) {
      const from = (top + row) * width + left;
      for (let j = 0; j < cols; j += 1) {
        let sum = 0;
        for (let col = colEdges[j]; col < colEdges[j + 1]; col += 1) sum += values[from + col];
        pooled[i * cols + j] += sum * scale;
      }
    }
  }
  return { rows, cols, values: pooled };
}

// The answer to a request, from the whole map of a head.
function computePart(whole, { quantity, rows: rowSpan, cols: colSpan, size }) {
  if (quantity === "weights") return pool(whole, rowSpan, colSpan, Infinity);
  if (quantity === "pooled_map") return pool(whole, rowSpan, colSpan, size);
  const { rows, cols, values } = pool(whole, [0, whole.rows], colSpan, Infinity),
    received = new Float32Array(cols);
  for (let n = 0; n < values.length; n += 1) received[n % cols] += values[n] / rows;
  return { rows: 1, cols, values: received };
}

// The mean of the maps of heads, each with its `share`. One at a time: together they would need much memory.
async function average(heads, load) {
  let mean = null;
  for (const head of heads) {
    const { rows, cols, values } = await load(head);
    mean ??= { rows, cols, values: new Float32Array(values.length) };
    for (let n = 0; n < values.length; n += 1) mean.values[n] += head.share * values[n];
  }
  return mean;
}

export class SavedWeights {
  constructor(manifest, index, text) {
    Object.assign(this, { manifest, index, text });
    this.cache = new Map(); // key → promise of a decoded map, in the order of last use
  }

  /** Answer a request, as a server does, with unrounded numbers. */
  async answer(request) {
    const { rows, cols, values } = await this.compute(request),
      answer = new ArrayBuffer(16 + 4 * rows * cols),
      header = new DataView(answer);
    [rows, cols, 1].forEach((value, n) => header.setUint32(4 * n, value, true));
    header.setFloat32(12, 1, true);
    new Float32Array(answer, 16).set(values);
    return answer;
  }

  layer({ data, layer }) {
    return this.manifest.data[data].layers[layer];
  }

  listHeads(request) {
    return listHeads(this.layer(request), request.layer, request.head);
  }

  async compute(request) {
    const heads = this.listHeads(request),
      info = this.layer(request);
    if (heads.every((head) => keyOf({ ...request, ...head }) in this.index))
      return average(heads, (head) => this.read(keyOf({ ...request, ...head })));
    if (!isDetailed(this.manifest.data[request.data], info, request.head)) return this.computeFromThumbnail(request, info);
    if (info.finest_zoom > 0) {
      if (request.quantity === "weights")
        throw new Error("This file contains pooled maps only. Single weights are available in the live viewer.");
      throw new Error(`This file does not contain ${keyOf(request)}.`);
    }
    return computePart(await this.readWhole(request), request);
  }

  // A part of a map of which the file has the thumbnail only.
  async computeFromThumbnail(request, { shape }) {
    if (request.quantity === "weights")
      throw new Error("This file contains an overview of this head only. Single weights are available in the live viewer.");
    const all = { rows: [0, shape[0]], cols: [0, shape[1]], size: THUMBNAIL_SIZE, quantity: "pooled_map" },
      thumbnail = await average(this.listHeads(request), (head) => this.read(keyOf({ ...request, ...all, ...head })));
    const count = ([first, last], size) => Math.min(last - first, size),
      isTotal = request.quantity === "received_weight",
      rows = isTotal ? 1 : count(request.rows, request.size),
      cols = isTotal ? count(request.cols, Infinity) : count(request.cols, request.size),
      values = new Float32Array(rows * cols);
    // The middle of each cell lies in a cell of the thumbnail, whose weight its keys share.
    const locate = (n, number, [first, last], length, cells) =>
      Math.min(cells - 1, Math.floor(((first + ((n + 0.5) * (last - first)) / number) / length) * cells));
    const share = (thumbnail.cols / shape[1]) * ((request.cols[1] - request.cols[0]) / cols);
    for (let j = 0; j < cols; j += 1) {
      const col = locate(j, cols, request.cols, shape[1], thumbnail.cols);
      if (isTotal)
        for (let row = 0; row < thumbnail.rows; row += 1)
          values[j] += (thumbnail.values[row * thumbnail.cols + col] * share) / thumbnail.rows;
      else
        for (let i = 0; i < rows; i += 1) {
          const row = locate(i, rows, request.rows, shape[0], thumbnail.rows);
          values[i * cols + j] = thumbnail.values[row * thumbnail.cols + col] * share;
        }
    }
    return { rows, cols, values };
  }

  /** Return a promise of all weights of a head or a mean. */
  readWhole(request) {
    const { shape } = this.layer(request),
      all = { rows: [0, shape[0]], cols: [0, shape[1]], size: 64, quantity: "weights" };
    return this.read(keyOf({ ...request, ...all }), (key) => this.loadWhole({ ...request, ...all }, key));
  }

  // The weights of a head are in the file, or computed from queries and keys.
  async loadWhole(request, key) {
    const { shape, scores, sinks } = this.layer(request),
      heads = this.listHeads(request);
    // The rows of a mean without sinks are those of the mean, scaled.
    if (request.without_sinks) return removeSinks(await this.readWhole({ ...request, without_sinks: 0 }), sinks);
    if (heads.length > 1 || heads[0].layer !== request.layer || heads[0].head !== request.head)
      return average(heads, (head) => this.readWhole({ ...request, ...head }));
    return scores ? this.computeFromScores(request, shape, scores) : this.unpack(key);
  }

  async computeFromScores({ data, layer, head }, shape, { group_size: groupSize, visible, softcap }) {
    const group = Math.floor(head / groupSize),
      rowSums = `row_sums/${data}/${layer}/${head}`;
    return computeWeights({
      queries: decodeSide(await this.inflate(`queries/${data}/${layer}/${head}`)),
      keys: await this.read(`keys/${data}/${layer}/${group}`, async (key) => decodeSide(await this.inflate(key))),
      visible: visible && (await this.read(visible, async (key) => this.readVisible(key, shape))).values,
      softcap,
      rowSums: rowSums in this.index ? (await this.unpack(rowSums)).values : null,
    });
  }

  async readVisible(key, [rows, cols]) {
    return { values: decodeVisible(await this.inflate(key), rows * cols) };
  }

  /** Return a promise of a decoded map, or of what `load` returns. */
  read(key, load = (name) => this.unpack(name)) {
    const cached = this.cache.get(key),
      map = cached ?? load(key);
    this.cache.delete(key);
    this.cache.set(key, map);
    if (!cached)
      map.then(({ values }) => {
        map.numCells = values?.length ?? 0;
        this.evict();
      });
    return map;
  }

  async unpack(key) {
    return decode(await this.inflate(key));
  }

  async inflate(key) {
    const [start, length] = this.index[key],
      stream = new Blob([decodeText(this.text, start, length)]).stream();
    return new Response(stream.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  }

  evict() {
    let numCells = 0;
    for (const [key, map] of [...this.cache].reverse()) {
      numCells += map.numCells ?? 0;
      if (numCells > MAX_CACHED_CELLS) this.cache.delete(key);
    }
  }
}
