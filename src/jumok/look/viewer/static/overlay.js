// Weights over an image: interpolated to pixels, light where they are high and dark where they are low. Only lightness
// encodes the weight, so it works for every type of colour vision.

import { createElement } from "./dom.js";

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

/** The box of the grid in an image of this size: the model may have seen a part of the image, or a padded one. */
export function regionBox({ region: [left, top, right, bottom] }, width, height) {
  return { x: left * width, y: top * height, w: (right - left) * width, h: (bottom - top) * height };
}

/**
 * Paint the weights of all patches over an image of `width` by `height` pixels. `curve` maps a weight to its position
 * on the scale; `maxPixels` limits the longer side of the interpolated map.
 */
export function paintOverlay(context, overlay) {
  const { weights, image, curve, appearance, strength, width, height, maxPixels = MAP_PIXELS } = overlay,
    [rows, cols] = image.grid,
    box = regionBox(image, width, height),
    size = maxPixels / Math.max(box.w, box.h);
  const across = Math.max(cols, Math.round(box.w * size)),
    down = Math.max(rows, Math.round(box.h * size));
  const pixelWeights = interpolateWeights(weights, rows, cols, down, across),
    data = new ImageData(across, down);
  for (let n = 0; n < pixelWeights.length; n += 1) {
    const position = curve.to(pixelWeights[n]);
    data.data.set(appearance.overlayScale[Math.round(position * 255)], 4 * n);
    data.data[4 * n + 3] = Math.round(255 * overlayOpacity(position, strength));
  }
  const canvas = createElement("canvas", { width: across, height: down });
  canvas.getContext("2d").putImageData(data, 0, 0);
  context.save();
  context.beginPath(); // what the model did not see is as dark as weight 0
  context.rect(0, 0, width, height);
  context.rect(box.x, box.y, box.w, box.h);
  context.fillStyle = `rgb(${appearance.overlayScale[0].join(" ")} / ${overlayOpacity(0, strength)})`;
  context.fill("evenodd");
  context.beginPath();
  context.rect(0, 0, width, height);
  context.clip();
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.drawImage(canvas, box.x, box.y, box.w, box.h);
  context.restore();
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
