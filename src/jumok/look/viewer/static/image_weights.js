// Where words looked in a image: the numbers behind the image view.

import { formatCount } from "./colours.js";

/** The places of a image that are the keys of what looks at it; `shape` is (queries, keys). */
export class ImageGrid {
  constructor(image, shape) {
    Object.assign(this, { image, shape });
    this.numPatches = image.grid[0] * image.grid[1];
    this.isSelf = shape[0] === image.num_prefix_keys + this.numPatches; // its queries are its own patches
  }

  /** The key that a patch is. */
  keyOf(patch) {
    return this.image.num_prefix_keys + patch;
  }

  /** Of the weights on all keys, those on places. */
  patchWeights(values, row = 0) {
    const first = row * this.shape[1] + this.image.num_prefix_keys;
    return values.subarray(first, first + this.numPatches);
  }

  describePatch(patch) {
    const cols = this.image.grid[1];
    return `row ${formatCount(Math.floor(patch / cols) + 1)}, column ${formatCount((patch % cols) + 1)}`;
  }

  /** One step from a patch, or where it is at an edge. */
  moveFrom(patch, down, right) {
    const [rows, cols] = this.image.grid;
    const row = Math.max(0, Math.min(rows - 1, Math.floor(patch / cols) + down)),
      col = Math.max(0, Math.min(cols - 1, (patch % cols) + right));
    return row * cols + col;
  }

  /** A cell of the grid, in a box { x, y, w, h } that holds all of them. */
  cell(patch, { x, y, w, h }) {
    const [rows, cols] = this.image.grid;
    return {
      x: x + (patch % cols) * (w / cols),
      y: y + Math.floor(patch / cols) * (h / rows),
      w: w / cols,
      h: h / rows,
    };
  }

  /** The patch at a point of that box, or null. */
  at(left, top, { x, y, w, h }) {
    const [rows, cols] = this.image.grid,
      col = Math.floor(((left - x) / w) * cols),
      row = Math.floor(((top - y) / h) * rows);
    return row >= 0 && row < rows && col >= 0 && col < cols ? row * cols + col : null;
  }
}

/** The weights of all words of a caption, or of what is looked at as a whole. */
export class CaptionWeights {
  /** `values` on all keys, row by row: those of every word, or, `single`, of the one that is shown. */
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

  /** The weights of a word on all places; null is the mean of all. */
  weights(n) {
    return n === null || this.single ? this.mean : this.grid.patchWeights(this.values, n);
  }

  /** The first `most` of so many words by how much they appearance at a patch, and one more if it is not among them. */
  rankWords(words, patch, most, another) {
    const all = Array.from({ length: words }, (_, n) => ({ n, value: this.weights(n)[patch] }));
    const best = [...all].sort((a, b) => b.value - a.value).slice(0, most);
    return another === null || best.some(({ n }) => n === another) ? best : [...best, all[another]];
  }
}

/** The strongest patch. */
export function findPeak(weights) {
  let best = 0;
  for (let n = 0; n < weights.length; n += 1) if (weights[n] > weights[best]) best = n;
  return best;
}
