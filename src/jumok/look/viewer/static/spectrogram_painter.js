// A spectrogram, the alignment below it, and their common time axis, painted on a canvas.

import { clamp, createPixels } from "./dom.js";

const TICK_STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600];
const LABEL_HEIGHT = 11; // pixels from label to label
const MAX_COLUMNS = 3; // of symbols beside each other, if there are many
const COLUMN_WIDTH = 13;

/**
 * Lay out a canvas of this size: the alignment, and `mel` above it; symbols are at the left, in as many columns as
 * needed, up to `maxColumns`.
 */
export function layoutSpectrogram(width, height, left, symbols, maxColumns = MAX_COLUMNS) {
  const room = height - 66,
    mel = Math.round(room * 0.42),
    tall = (room - mel) / symbols,
    columns = clamp(Math.ceil(LABEL_HEIGHT / tall), 1, maxColumns),
    x = left + (columns - 1) * COLUMN_WIDTH;
  return { x, y: mel + 42, w: width - x - 14, h: room - mel, mel: { y: 18, h: mel }, columns };
}

/** The spectrogram as an image, low bands at the bottom; `shades` band by band. */
export function melImage(shades, [bands, frames], colours) {
  return createPixels(frames, bands, (pixels) => {
    for (let band = 0; band < bands; band += 1)
      for (let n = 0; n < frames; n += 1) pixels[(bands - 1 - band) * frames + n] = colours[shades[band * frames + n]];
  });
}

/** The alignment as an image: time to the right, text from bottom to top, or from top to bottom. */
export function alignmentImage({ rows, cols, values }, curve, colours, isUpwards) {
  return createPixels(rows, cols, (pixels) => {
    for (let row = 0; row < rows; row += 1)
      for (let col = 0; col < cols; col += 1)
        pixels[(isUpwards ? cols - 1 - col : col) * rows + row] = colours[Math.round(curve.to(values[row * cols + col]) * 255)];
  });
}

/** The middle of a symbol in the map, as a fraction of its height from the top. */
function symbolMiddle(n, count, isUpwards) {
  return isUpwards ? 1 - (n + 0.5) / count : (n + 0.5) / count;
}

/** Paint an image at a span of the width of a box, without what is outside the box. */
function paintImage(context, image, { x, y, w, h }, [from, to]) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.drawImage(image, x + from * w, y, (to - from) * w, h);
  context.restore();
}

/** Paint everything that does not move. `melSpan`, `mapSpan`: the fractions of the time where each begins and ends. */
export function paintSpeech(context, box, content) {
  const { mel, map, melSpan, mapSpan, mapTitle, isUpwards, words, length, bands, appearance, ruler } = content,
    { inks, smallFont } = appearance,
    melBox = { ...box, ...box.mel };
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.fillStyle = inks.empty;
  context.fillRect(box.x, box.mel.y, box.w, box.mel.h);
  paintImage(context, mel, melBox, melSpan);
  context.imageSmoothingEnabled = map.width > box.w || map.height > box.h; // many steps are averaged, not skipped
  context.fillRect(box.x, box.y, box.w, box.h);
  paintImage(context, map, box, mapSpan);
  context.strokeStyle = inks.line;
  context.lineWidth = 1;
  for (const { y, h } of [box, box.mel]) context.strokeRect(box.x - 0.5, y - 0.5, box.w + 1, h + 1);
  context.font = smallFont;
  context.fillStyle = inks.muted;
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillText(`Mel spectrogram, ${bands} bands`, box.x, box.mel.y - 6);
  context.fillText(mapTitle, box.x, box.y - 6);
  const tall = (box.h / words.length) * box.columns,
    every = Math.max(1, Math.ceil(LABEL_HEIGHT / tall));
  context.font = appearance.fontFor(tall * every);
  for (let n = 0; n < words.length; n += every)
    paintLabel(context, box, words, n, {
      ink: inks.ink,
      ruler,
      isUpwards,
      aside: (box.columns - 1 - ((n / every) % box.columns)) * COLUMN_WIDTH,
    });
  paintTime(context, box, length, appearance);
}

function paintLabel(context, box, words, n, { ink, ruler, isUpwards, aside = 0 }) {
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.fillStyle = ink;
  const y = box.y + symbolMiddle(n, words.length, isUpwards) * box.h;
  context.fillText(ruler.fit(words[n], box.x - 14 - aside), box.x - 7 - aside, y);
}

function paintTime(context, box, length, appearance) {
  const step = TICK_STEPS.find((value) => (value / length) * box.w >= 58) ?? 1800;
  context.font = appearance.smallFont;
  context.textBaseline = "alphabetic";
  context.textAlign = "center";
  for (let n = 0; n * step <= length * (1 + 1e-9); n += 1) {
    const x = box.x + ((n * step) / length) * box.w;
    context.fillStyle = appearance.inks.strong;
    context.fillRect(Math.round(x), box.y + box.h + 1, 1, 4);
    context.fillStyle = appearance.inks.muted;
    const text = `${Number((n * step).toFixed(2))} s`;
    context.fillText(text, Math.min(box.x + box.w - context.measureText(text).width / 2 + 10, x), box.y + box.h + 17);
  }
}

/** Paint what moves: the frames of a symbol, the time under the pointer, the time of playback. */
export function paintMarkers(context, box, content) {
  const { profile, symbol, words, pointed, played, mapSpan, isUpwards, appearance, ruler } = content,
    { inks } = appearance;
  if (symbol !== null) {
    const most = Math.max(...profile) || 1,
      [start, end] = mapSpan,
      edge = (n) => clamp(start + ((end - start) * n) / profile.length, 0, 1) * box.w;
    context.fillStyle = inks.page;
    profile.forEach((weight, n) => {
      context.globalAlpha = 0.78 * (1 - Math.sqrt(weight / most)); // all other frames are dimmed
      const [from, to] = [n, n + 1].map((m) => Math.round(box.x + edge(m))); // without gaps
      context.fillRect(from, box.mel.y, to - from, box.mel.h);
    });
    context.globalAlpha = 0.78; // what is no frame, at both ends
    context.fillRect(box.x, box.mel.y, Math.round(edge(0)), box.mel.h);
    const last = Math.round(edge(profile.length));
    context.fillRect(box.x + last, box.mel.y, box.w - last, box.mel.h);
    context.globalAlpha = 1;
    const tall = box.h / words.length,
      middle = box.y + symbolMiddle(symbol, words.length, isUpwards) * box.h;
    context.fillRect(0, Math.max(box.y - 9, middle - 9), box.x - 2, 18); // covers the labels there
    context.font = appearance.fontFor(13, 650);
    paintLabel(context, box, words, symbol, { ink: inks.pin, ruler, isUpwards });
    context.strokeStyle = inks.pin;
    context.lineWidth = 1.5;
    context.strokeRect(box.x - 1, middle - tall / 2 - 0.5, box.w + 2, Math.max(2, tall) + 1);
  }
  if (pointed !== null) paintTimeLine(context, box, pointed, inks.accent, 1);
  if (played !== null) paintTimeLine(context, box, played, inks.pin, 2);
}

// A vertical line through both plots, with a light border so that it is visible on any colour.
function paintTimeLine(context, box, part, colour, width) {
  const x = box.x + part * box.w;
  for (const [style, wide] of [
    ["rgb(255 255 255 / 55%)", width + 2],
    [colour, width],
  ]) {
    context.strokeStyle = style;
    context.lineWidth = wide;
    context.beginPath();
    context.moveTo(x, box.mel.y);
    context.lineTo(x, box.mel.y + box.mel.h);
    context.moveTo(x, box.y);
    context.lineTo(x, box.y + box.h);
    context.stroke();
  }
}
