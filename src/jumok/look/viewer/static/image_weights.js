// Attention over an image: the data of the image view.

import { formatCount } from "./colours.js";
import { clamp } from "./dom.js";

/** The grid of patches that are the keys of a layer; `shape` is (queries, keys). */
export class ImageGrid {
  constructor(image, shape) {
    Object.assign(this, { image, shape });
    this.numPatches = image.grid[0] * image.grid[1];
    this.isSelf = shape[0] === image.num_prefix_keys + this.numPatches; // the queries are the patches, too
  }

  /** The key index of a patch. */
  keyOf(patch) {
    return this.image.num_prefix_keys + patch;
  }

  /** The weights on patches, of the weights on all keys. */
  patchWeights(values, row = 0) {
    const first = row * this.shape[1] + this.image.num_prefix_keys;
    return values.subarray(first, first + this.numPatches);
  }

  describePatch(patch) {
    const cols = this.image.grid[1];
    return `row ${formatCount(Math.floor(patch / cols) + 1)}, column ${formatCount((patch % cols) + 1)}`;
  }

  /** Move one patch down or right, within the grid. */
  moveFrom(patch, down, right) {
    const [rows, cols] = this.image.grid;
    return clamp(Math.floor(patch / cols) + down, 0, rows - 1) * cols + clamp((patch % cols) + right, 0, cols - 1);
  }

  /** The rectangle of a patch within the box { x, y, w, h } of the grid. */
  cell(patch, { x, y, w, h }) {
    const [rows, cols] = this.image.grid,
      [wide, tall] = [w / cols, h / rows];
    return { x: x + (patch % cols) * wide, y: y + Math.floor(patch / cols) * tall, w: wide, h: tall };
  }

  /** The patch at a point of that box, or null. */
  at(left, top, { x, y, w, h }) {
    const [rows, cols] = this.image.grid,
      col = Math.floor(((left - x) / w) * cols),
      row = Math.floor(((top - y) / h) * rows);
    return row >= 0 && row < rows && col >= 0 && col < cols ? row * cols + col : null;
  }
}

/** The weights of all words of a caption, or of a single query. */
export class CaptionWeights {
  /** `values` on all keys, row by row: of every word or, if `single`, of one query. */
  constructor(grid, values, { key, single = false }) {
    Object.assign(this, { grid, values, key, single });
    const rows = single ? 1 : grid.shape[0];
    this.most = 0;
    this.mean = new Float32Array(grid.numPatches);
    for (let row = 0; row < rows; row += 1) {
      grid.patchWeights(values, row).forEach((weight, n) => {
        this.mean[n] += weight / rows;
        this.most = Math.max(this.most, weight);
      });
    }
  }

  /** The weights of a word on all patches; null is the mean of all. */
  weights(n) {
    return n === null || this.single ? this.mean : this.grid.patchWeights(this.values, n);
  }

  /** The `most` words with the highest weights on a patch, and one more if it is not among them. */
  rankWords(words, patch, most, another) {
    const all = Array.from({ length: words }, (_, n) => ({ n, value: this.weights(n)[patch] }));
    const best = [...all].sort((a, b) => b.value - a.value).slice(0, most);
    return another === null || best.some(({ n }) => n === another) ? best : [...best, all[another]];
  }
}

/** The patch with the highest weight. */
export function findPeak(weights) {
  let best = 0;
  for (let n = 0; n < weights.length; n += 1) if (weights[n] > weights[best]) best = n;
  return best;
}
