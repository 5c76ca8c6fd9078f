// Starts the viewer in a saved file: all tiles are in the file, compressed, and nothing is fetched.

import { render } from "./viewer.js";
import { decode, keyOf, TileGrid } from "./tiles.js";

const element = document.getElementById("viewer");
const readJson = (name) => JSON.parse(document.getElementById(name).textContent);
const manifest = readJson("manifest"),
  index = readJson("index");
const bytes = Uint8Array.from(atob(document.getElementById("tiles").textContent.trim()), (letter) =>
  letter.charCodeAt(0),
);

async function readStored(key) {
  const span = index[key];
  if (!span) return null;
  const stream = new Blob([bytes.subarray(span[0], span[0] + span[1])])
    .stream()
    .pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// Single weights are assembled from the tiles of zoom 0, if the file contains it.
async function readWeights(request) {
  const layer = manifest.data[request.data].layers[request.layer];
  if (layer.finest_zoom > 0)
    throw new Error("This file contains pooled maps only. Single weights are available in the live viewer.");
  const { rows, cols } = request,
    grid = new TileGrid(layer.shape);
  const width = cols[1] - cols[0],
    answer = new ArrayBuffer(16 + 4 * width * (rows[1] - rows[0]));
  const header = new DataView(answer);
  [rows[1] - rows[0], width, 1].forEach((value, n) => header.setUint32(4 * n, value, true));
  header.setFloat32(12, 1, true);
  const values = new Float32Array(answer, 16);
  for (let i = grid.rows.at(0, rows[0]); i <= grid.rows.at(0, rows[1] - 1); i += 1) {
    for (let j = grid.cols.at(0, cols[0]); j <= grid.cols.at(0, cols[1] - 1); j += 1) {
      const top = grid.rows.start(0, i),
        left = grid.cols.start(0, j),
        tile = decode(await readStored(keyOf(grid.request(request, 0, i, j))));
      for (let row = Math.max(rows[0], top); row < Math.min(rows[1], top + tile.rows); row += 1) {
        for (let col = Math.max(cols[0], left); col < Math.min(cols[1], left + tile.cols); col += 1) {
          values[(row - rows[0]) * width + col - cols[0]] = tile.values[(row - top) * tile.cols + col - left];
        }
      }
    }
  }
  return answer;
}

async function tiles(request) {
  if (request.quantity === "weights") return readWeights(request);
  const tile = await readStored(keyOf(request));
  if (!tile) throw new Error(`This file does not contain ${keyOf(request)}.`);
  return tile;
}

render({ model: { get: (name) => ({ manifest, full: true })[name], tiles }, el: element });
if (window === window.top) element.firstElementChild.focus(); // in a frame, focus would scroll the page around it
