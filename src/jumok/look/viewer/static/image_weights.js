// Attention over images: the data of the image view.

import { formatCount } from "./colours.js";
import { clamp } from "./dom.js";

/**
 * The patches of one or several images, which lie in grids: the keys of a layer, or some of them. A patch has a number,
 * counted through all grids. `layer` is an entry of the manifest (see ImageMedium.layer_to_json), `shape` is (queries,
 * keys).
 */
export class PatchLayout {
  constructor(layer, shape) {
    const { grids, spans, word_rows: wordRows, has_patch_queries: hasPatchQueries } = layer;
    Object.assign(this, { shape, spans, hasText: layer.has_text });
    this.isSelf = hasPatchQueries && !this.hasText; // the queries are the patches
    this.wordSpans = wordRows;
    this.wordRows = wordRows.flatMap(([start, stop]) => Array.from({ length: stop - start }, (_, n) => start + n));
    let first = 0;
    this.grids = grids.map((grid) => {
      const [rows, cols] = grid.shape,
        [left, top, right, bottom] = grid.region,
        entry = { ...grid, rows, cols, first, last: (first += rows * cols) };
      return { ...entry, cellArea: ((right - left) * (bottom - top)) / (rows * cols) };
    });
    this.numPatches = first;
    this.images = [...new Set(this.grids.map(({ image }) => image))].sort((a, b) => a - b);
    this.names = [...new Set(this.grids.map(({ name }) => name))];
    this.keys = Int32Array.from(this.grids.flatMap((grid) => listKeys(grid)));
    // A patch of an overview is larger than one of a tile: to compare them, weights are spread over areas.
    this.scales = new Float32Array(this.numPatches);
    for (const grid of this.grids) {
      const finest = Math.min(...this.gridsOf(grid.image).map(({ cellArea }) => cellArea));
      this.scales.fill(finest / grid.cellArea, grid.first, grid.last);
    }
  }

  gridsOf(image) {
    return this.grids.filter((grid) => grid.image === image);
  }

  gridOf(patch) {
    return this.grids.find(({ last }) => patch < last);
  }

  /** The key index of a patch; -1 if the model did not keep it. */
  keyOf(patch) {
    return this.keys[patch];
  }

  /** The patch of a key, or -1. */
  patchOf(key) {
    return this.keys.indexOf(key);
  }

  /** The weights of one query on all patches, of its weights on all keys. */
  patchWeights(values) {
    return Float32Array.from(this.keys, (key) => (key < 0 ? 0 : values[key]));
  }

  /** The share of the weights of one query that each image gets, by the number of the image. */
  shares(values) {
    const shares = new Map(this.images.map((image) => [image, 0]));
    for (const [image, start, stop] of this.spans)
      for (let key = start; key < stop; key += 1) shares.set(image, (shares.get(image) ?? 0) + values[key]);
    return shares;
  }

  describePatch(patch) {
    const { cols, first, image, name } = this.gridOf(patch),
      n = patch - first;
    const place = `row ${formatCount(Math.floor(n / cols) + 1)}, column ${formatCount((n % cols) + 1)}`,
      where = [this.images.length > 1 ? `image ${image + 1}` : "", this.names.length > 1 ? name : ""];
    return [place, ...where.filter(Boolean)].join(", ");
  }

  /** Move one patch down or right, within the grid. */
  moveFrom(patch, down, right) {
    const { rows, cols, first } = this.gridOf(patch),
      n = patch - first;
    return first + clamp(Math.floor(n / cols) + down, 0, rows - 1) * cols + clamp((n % cols) + right, 0, cols - 1);
  }

  /** The rectangle of a patch in an image of this size. */
  cell(patch, width, height) {
    const grid = this.gridOf(patch),
      { x, y, w, h } = regionBox(grid, width, height),
      [wide, tall] = [w / grid.cols, h / grid.rows],
      n = patch - grid.first;
    return { x: x + (n % grid.cols) * wide, y: y + Math.floor(n / grid.cols) * tall, w: wide, h: tall };
  }

  /** The smallest patch at a point of an image of this size, or null; `name` selects grids. */
  at(image, left, top, width, height, name = null) {
    const hits = this.gridsOf(image)
      .filter((grid) => name === null || grid.name === name)
      .map((grid) => ({ grid, patch: findPatch(grid, left, top, regionBox(grid, width, height)) }))
      .filter(({ patch }) => patch !== null && this.keys[patch] >= 0);
    hits.sort((a, b) => a.grid.cellArea - b.grid.cellArea);
    return hits[0]?.patch ?? null;
  }
}

/** The box of a grid in an image of this size: the model may have seen a part of the image, or a padded one. */
export function regionBox({ region: [left, top, right, bottom] }, width, height) {
  return { x: left * width, y: top * height, w: (right - left) * width, h: (bottom - top) * height };
}

function listKeys({ keys, rows, cols }) {
  return Array.isArray(keys) ? keys : Array.from({ length: rows * cols }, (_, n) => keys + n);
}

function findPatch({ rows, cols, first }, left, top, { x, y, w, h }) {
  const col = Math.floor(((left - x) / w) * cols),
    row = Math.floor(((top - y) / h) * rows);
  return row >= 0 && row < rows && col >= 0 && col < cols ? first + row * cols + col : null;
}

export const OTHER_QUERY = -1; // a selected query that is not a word

/** The weights of words on patches, and those of one other query. */
export class PatchWeights {
  /**
   * `rows` are the weights of the words on all keys; `mean` those of the mean over the queries, or null: over the
   * words; `other` those of a query that is not a word, or null.
   */
  constructor(layout, { rows, mean = null, other = null, key }) {
    Object.assign(this, { layout, key });
    const averaged = mean ?? averageRows(rows, layout.shape[1]);
    this.words = rows.map((values) => this.read(values));
    this.mean = this.read(averaged);
    this.other = other && this.read(other);
    this.most = Math.max(...[this.mean, ...this.words].map(({ highest }) => highest));
  }

  read(values) {
    const weights = this.layout.patchWeights(values),
      scaled = weights.map((weight, n) => weight * this.layout.scales[n]);
    return { weights, scaled, shares: this.layout.shares(values), highest: findHighest(scaled) };
  }

  /** The entry of a word, of the other query, or of the mean (null). */
  entry(selection) {
    if (selection === OTHER_QUERY) return this.other ?? this.mean;
    return selection === null ? this.mean : this.words[selection];
  }

  /** The `most` words with the highest weights on a patch, and one more if it is not among them. */
  rankWords(patch, most, another) {
    const all = this.words.map(({ weights }, n) => ({ n, value: weights[patch] })),
      best = [...all].sort((a, b) => b.value - a.value).slice(0, most);
    return !all[another] || best.some(({ n }) => n === another) ? best : [...best, all[another]];
  }
}

/** Split the weights of consecutive queries. */
export function splitRows(values, numKeys) {
  return Array.from({ length: values.length / numKeys }, (_, n) => values.subarray(n * numKeys, (n + 1) * numKeys));
}

function averageRows(rows, numKeys) {
  const mean = new Float32Array(numKeys);
  for (const values of rows) values.forEach((weight, key) => (mean[key] += weight / rows.length));
  return mean;
}

function findHighest(weights) {
  let highest = 0;
  for (const weight of weights) if (weight > highest) highest = weight;
  return highest;
}

/** The patch with the highest weight. */
export function findPeak(weights) {
  let best = 0;
  for (let n = 0; n < weights.length; n += 1) if (weights[n] > weights[best]) best = n;
  return best;
}
