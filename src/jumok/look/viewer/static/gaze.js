// Where words looked in a picture: the numbers behind the picture view.

import { count } from "./colours.js";

/** The places of a picture that are the keys of what looks at it; `shape` is (queries, keys). */
export class Ground {
  constructor(picture, shape) {
    Object.assign(this, { picture, shape });
    this.places = picture.grid[0] * picture.grid[1];
    this.isSelf = shape[0] === picture.first + this.places; // its queries are its own patches
  }

  /** The key that a place is. */
  keyOf(place) {
    return this.picture.first + place;
  }

  /** Of the weights on all keys, those on places. */
  of(values, row = 0) {
    const first = row * this.shape[1] + this.picture.first;
    return values.subarray(first, first + this.places);
  }

  named(place) {
    const cols = this.picture.grid[1];
    return `row ${count(Math.floor(place / cols) + 1)}, column ${count((place % cols) + 1)}`;
  }

  /** One step from a place, or where it is at an edge. */
  beside(place, down, right) {
    const [rows, cols] = this.picture.grid;
    const row = Math.max(0, Math.min(rows - 1, Math.floor(place / cols) + down)),
      col = Math.max(0, Math.min(cols - 1, (place % cols) + right));
    return row * cols + col;
  }

  /** A cell of the grid, in a box { x, y, w, h } that holds all of them. */
  cell(place, { x, y, w, h }) {
    const [rows, cols] = this.picture.grid;
    return {
      x: x + (place % cols) * (w / cols),
      y: y + Math.floor(place / cols) * (h / rows),
      w: w / cols,
      h: h / rows,
    };
  }

  /** The place at a point of that box, or null. */
  at(left, top, { x, y, w, h }) {
    const [rows, cols] = this.picture.grid,
      col = Math.floor(((left - x) / w) * cols),
      row = Math.floor(((top - y) / h) * rows);
    return row >= 0 && row < rows && col >= 0 && col < cols ? row * cols + col : null;
  }
}

/** The weights of all words of a caption, or of what is looked at as a whole. */
export class Gaze {
  /** `values` on all keys, row by row: those of every word, or, `single`, of the one that is shown. */
  constructor(ground, values, { of, single = false }) {
    Object.assign(this, { ground, values, of, single });
    const rows = single ? 1 : ground.shape[0];
    this.most = 0;
    this.mean = new Float32Array(ground.places);
    for (let row = 0; row < rows; row += 1) {
      ground.of(values, row).forEach((weight, n) => {
        this.mean[n] += weight / rows;
        this.most = Math.max(this.most, weight);
      });
    }
  }

  /** The weights of a word on all places; null is the mean of all. */
  weights(n) {
    return n === null || this.single ? this.mean : this.ground.of(this.values, n);
  }

  /** The first `most` of so many words by how much they look at a place, and one more if it is not among them. */
  ranked(words, place, most, another) {
    const all = Array.from({ length: words }, (_, n) => ({ n, value: this.weights(n)[place] }));
    const best = [...all].sort((a, b) => b.value - a.value).slice(0, most);
    return another === null || best.some(({ n }) => n === another) ? best : [...best, all[another]];
  }
}

/** The strongest place. */
export function peakOf(weights) {
  let best = 0;
  for (let n = 0; n < weights.length; n += 1) if (weights[n] > weights[best]) best = n;
  return best;
}
