// The range of the weights of a map, which sets the end of its scale.

import { TileGrid, keyOf } from "./tiles.js";

export class WeightRange {
  /** `changed()` is called when the range is known, or another one. */
  constructor({ store, changed }) {
    Object.assign(this, { store, changed });
    this.value = undefined; // { most, change, width, keys }: `most` is of cells of `width` keys
  }

  reset() {
    this.value = undefined;
  }

  /** Measure maps of the same shape, from their coarsest tiles. Those are loaded first anyway. */
  measure(sources, shape) {
    const grid = new TileGrid(shape),
      zoom = grid.coarsest,
      width = grid.cols.cell(zoom);
    const finish = () => this.finish(entries, sources.length, width, shape[1]);
    const entries = sources.flatMap((source) =>
      [...grid.indices(zoom)].map(([i, j]) => ({
        request: grid.request(source, zoom, i, j),
        priority: 0,
        onLoad: finish,
      })),
    );
    this.store.request("range", entries);
    finish();
  }

  finish(entries, numSources, width, keys) {
    const tiles = entries.map(({ request }) => this.store.get(keyOf(request)));
    if (tiles.some((tile) => !tile)) return;
    const most = Math.max(...tiles.map((tile) => tile.most)) / width,
      half = tiles.length / 2;
    let change = 0;
    for (let n = 0; numSources === 2 && n < half; n += 1)
      tiles[n].values.forEach((value, k) => (change = Math.max(change, Math.abs(value - tiles[n + half].values[k]))));
    const next = { most, change: change / width, width, keys };
    if (JSON.stringify(next) === JSON.stringify(this.value)) return;
    this.value = next;
    this.changed();
  }
}
