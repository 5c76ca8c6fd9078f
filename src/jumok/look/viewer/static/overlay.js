// Weights over an image: interpolated to pixels, light where they are high and dark where they are low. Only lightness
// encodes the weight, so it works for every type of colour vision.

import { createElement } from "./dom.js";
import { regionBox } from "./image_weights.js";

const MAP_PIXELS = 240; // pixels of the interpolated map along its longer side: more would look the same

/** The opacity of the overlay for a position on the scale, 0 to 1. */
function overlayOpacity(position, strength) {
  return strength * (0.88 - 0.46 * position);
}

/** The colours of the overlay on middle grey, for the legend. */
export function overlayColours(appearance, strength) {
  return appearance.overlayScale.map((colour, n) => {
    const share = overlayOpacity(n / 255, strength);
    return colour.map((value) => Math.round(value * share + 140 * (1 - share)));
  });
}

/**
 * Paint the weights of all patches of an image over it, at `width` by `height` pixels. `weights` are those of all patches
 * of `layout`; `curve` maps a weight to its position on the scale; `grids` selects grids by name, null are all;
 * `maxPixels` limits the longer side of the interpolated map.
 */
export function paintOverlay(context, overlay) {
  const { layout, image, grids = null, width, height, appearance, strength } = overlay,
    shown = layout.gridsOf(image).filter(({ name }) => grids === null || name === grids),
    box = shown.length ? uniteBoxes(shown.map((grid) => regionBox(grid, width, height))) : null;
  context.save();
  context.beginPath(); // what the model did not see is as dark as weight 0
  context.rect(0, 0, width, height);
  if (box) context.rect(box.x, box.y, box.w, box.h);
  context.fillStyle = `rgb(${appearance.overlayScale[0].join(" ")} / ${overlayOpacity(0, strength)})`;
  context.fill("evenodd");
  if (box) {
    context.beginPath();
    context.rect(0, 0, width, height);
    context.clip();
    context.imageSmoothingEnabled = true;
    context.imageSmoothingQuality = "high";
    context.drawImage(renderWeights(shown, box, overlay), box.x, box.y, box.w, box.h);
  }
  context.restore();
}

/** Render the sum of the weights of grids to a canvas that covers `box`. */
function renderWeights(grids, box, { weights, curve, appearance, strength, width, height, maxPixels = MAP_PIXELS }) {
  const size = maxPixels / Math.max(box.w, box.h),
    [across, down] = [box.w, box.h].map((length) => Math.max(1, Math.round(length * size)));
  const fit = (count, name) => Math.max(count, ...(grids.length === 1 ? [grids[0][name]] : [])),
    [numAcross, numDown] = [fit(across, "cols"), fit(down, "rows")],
    total = new Float32Array(numAcross * numDown);
  for (const grid of grids) {
    const { x, y, w, h } = regionBox(grid, width, height),
      toPixels = (from, length, count) => Math.round((from / length) * count);
    const left = toPixels(x - box.x, box.w, numAcross),
      top = toPixels(y - box.y, box.h, numDown),
      wide = Math.max(1, toPixels(x - box.x + w, box.w, numAcross) - left),
      tall = Math.max(1, toPixels(y - box.y + h, box.h, numDown) - top);
    const part = interpolateWeights(weights.subarray(grid.first, grid.last), grid.rows, grid.cols, tall, wide);
    for (let row = 0; row < tall; row += 1)
      for (let col = 0; col < wide; col += 1)
        total[(top + row) * numAcross + left + col] += part[row * wide + col];
  }
  const data = new ImageData(numAcross, numDown);
  for (let n = 0; n < total.length; n += 1) {
    const position = curve.to(total[n]);
    data.data.set(appearance.overlayScale[Math.round(position * 255)], 4 * n);
    data.data[4 * n + 3] = Math.round(255 * overlayOpacity(position, strength));
  }
  const canvas = createElement("canvas", { width: numAcross, height: numDown });
  canvas.getContext("2d").putImageData(data, 0, 0);
  return canvas;
}

function uniteBoxes(boxes) {
  const x = Math.min(...boxes.map((box) => box.x)),
    y = Math.min(...boxes.map((box) => box.y)),
    right = Math.max(...boxes.map((box) => box.x + box.w)),
    bottom = Math.max(...boxes.map((box) => box.y + box.h));
  return { x, y, w: right - x, h: bottom - y };
}

/** Interpolate values on a grid to (down, across) pixels: cubic in both directions, exact in the centre of a cell. */
export function interpolateWeights(values, rows, cols, down, across) {
  const lines = new Float32Array(rows * across),
    image = new Float32Array(down * across);
  const along = interpolationWeights(cols, across),
    upright = interpolationWeights(rows, down);
  for (let row = 0; row < rows; row += 1) {
    along.forEach(({ at, share }, x) => {
      let sum = 0;
      for (let k = 0; k < 4; k += 1) sum += share[k] * values[row * cols + at[k]];
      lines[row * across + x] = sum;
    });
  }
  upright.forEach(({ at, share }, y) => {
    for (let x = 0; x < across; x += 1) {
      let sum = 0;
      for (let k = 0; k < 4; k += 1) sum += share[k] * lines[at[k] * across + x];
      image[y * across + x] = Math.max(0, sum); // cubic interpolation may undershoot
    }
  });
  return image;
}

// For each pixel the four cells around it, with their Catmull-Rom weights; the outermost cells are repeated.
function interpolationWeights(cells, pixels) {
  return Array.from({ length: pixels }, (_, pixel) => {
    const place = ((pixel + 0.5) * cells) / pixels - 0.5,
      n = Math.floor(place),
      t = place - n;
    return {
      at: [-1, 0, 1, 2].map((k) => Math.min(cells - 1, Math.max(0, n + k))),
      share: [
        (-t + 2 * t ** 2 - t ** 3) / 2,
        (2 - 5 * t ** 2 + 3 * t ** 3) / 2,
        (t + 4 * t ** 2 - 3 * t ** 3) / 2,
        (t ** 3 - t ** 2) / 2,
      ],
    };
  });
}
