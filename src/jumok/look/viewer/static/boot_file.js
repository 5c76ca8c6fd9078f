// In a saved file: all numbers are in the file, compressed, and nothing is fetched.

import { render } from "./viewer.js";
import { Axis, decode, keyOf, TILE } from "./tiles.js";

const place = document.getElementById("viewer");
const read = (name) => JSON.parse(document.getElementById(name).textContent);
const manifest = read("manifest"),
  index = read("index");
const bytes = Uint8Array.from(atob(document.getElementById("numbers").textContent.trim()), (letter) =>
  letter.charCodeAt(0),
);

async function stored(key) {
  const at = index[key];
  if (!at) return null;
  const stream = new Blob([bytes.subarray(at[0], at[0] + at[1])])
    .stream()
    .pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// Single weights are put together from the tiles of the finest zoom, where the file has it.
async function weights(request) {
  const layer = manifest.scenes[request.scene].layers[request.layer];
  if (layer.finest > 0)
    throw new Error("This file holds pooled maps of this long input, no single tokens; the live viewer has them.");
  const { rows, cols } = request,
    down = new Axis(layer.shape[0]),
    along = new Axis(layer.shape[1]);
  const wide = cols[1] - cols[0],
    answer = new ArrayBuffer(16 + 4 * wide * (rows[1] - rows[0]));
  const header = new DataView(answer);
  [rows[1] - rows[0], wide, 1].forEach((value, n) => header.setUint32(4 * n, value, true));
  header.setFloat32(12, 1, true);
  const values = new Float32Array(answer, 16);
  for (let i = down.at(0, rows[0]); i <= down.at(0, rows[1] - 1); i += 1) {
    for (let j = along.at(0, cols[0]); j <= along.at(0, cols[1] - 1); j += 1) {
      const top = down.start(0, i),
        left = along.start(0, j);
      const key = keyOf({
        ...request,
        what: "map",
        size: TILE,
        rows: [top, down.end(0, i)],
        cols: [left, along.end(0, j)],
      });
      const tile = decode(await stored(key));
      for (let row = Math.max(rows[0], top); row < Math.min(rows[1], top + tile.rows); row += 1) {
        for (let col = Math.max(cols[0], left); col < Math.min(cols[1], left + tile.cols); col += 1) {
          values[(row - rows[0]) * wide + col - cols[0]] = tile.values[(row - top) * tile.cols + col - left];
        }
      }
    }
  }
  return answer;
}

async function tiles(request) {
  if (request.what === "weights") return weights(request);
  const found = await stored(keyOf(request));
  if (!found) throw new Error(`This file does not hold ${keyOf(request)}.`);
  return found;
}

render({ model: { get: (name) => ({ manifest, full: true })[name], tiles }, el: place });
if (window === window.top) place.firstElementChild.focus(); // in a frame, the page around it would jump here
