// Painting of a map: its tiles, the words along its axes, and the minimap.

import { formatCount } from "./colours.js";
import { clamp } from "./dom.js";
import { isRightToLeft, isSpecialToken, truncateText } from "./token_text.js";

const MIN_WORD_SIZE = 12; // minimum size in pixels of a token with a word
export const LABEL_ANGLE = (52 * Math.PI) / 180;
export const AXIS_NAMES = { rows: "queries ↓", cols: "keys →" };

/** Paint a map in its current state. */
export function paintMap(map, context, dots) {
  const { view, appearance } = map,
    plot = map.plot(),
    inks = appearance.inks;
  map.paintUntil = performance.now() + 7;
  const snap = (value) => Math.round(value * dots) / dots;
  const X = (col) => snap(plot.x + (col - view.x) * view.sx),
    Y = (row) => snap(plot.y + (row - view.y) * view.sy);
  context.save();
  context.beginPath();
  context.rect(snap(plot.x), snap(plot.y), snap(plot.w), snap(plot.h));
  context.clip();
  context.fillStyle = inks.empty;
  context.fillRect(plot.x, plot.y, plot.w, plot.h);
  paintTiles(map, context, X, Y);
  if (map.content.withoutSinks) paintHatching(map, context, X, plot);
  if (Math.min(view.sx, view.sy) >= 9) paintLines(map, context, X, Y, plot, dots);
  if (appearance.digits && Math.min(view.sx, view.sy) >= 28) paintDigits(map, context, X, Y, plot);
  if (map.pinned !== null)
    paintFrame(context, plot.x + 1, Y(map.pinned), plot.w - 2, Math.max(2, view.sy), inks.pin, 2);
  if (map.hover && map.hover.row !== null && map.hover.col !== null) {
    const cell = map.cellAt(map.hover.row, map.hover.col);
    const [top, bottom] = cell ? cell.rows : [map.hover.row, map.hover.row + 1];
    const [left, right] = cell ? cell.cols : [map.hover.col, map.hover.col + 1];
    context.fillStyle = inks.band;
    context.fillRect(plot.x, Y(top), X(left) - plot.x, Y(bottom) - Y(top));
    context.fillRect(X(left), plot.y, X(right) - X(left), Y(top) - plot.y);
    paintFrame(context, X(left), Y(top), X(right) - X(left), Y(bottom) - Y(top), inks.ink, 1.5, inks.page);
  }
  context.restore();
  context.strokeStyle = inks.line;
  context.lineWidth = 1;
  context.strokeRect(snap(plot.x) - 0.5, snap(plot.y) - 0.5, snap(plot.w) + 1, snap(plot.h) + 1);
  paintGenerated(map, context, X, Y, plot);
  paintSpans(map, context, X, Y, plot);
  paintRowWords(map, context, Y, plot);
  paintColumnWords(map, context, X, plot);
  paintAxisNames(context, appearance, plot);
  paintMinimap(map, context, plot);
}

function paintTiles(map, context, X, Y) {
  const zoom = map.zoomLevel(),
    last = map.grid.coarsest;
  const visible = [...map.visibleTiles(zoom)];
  const isComplete = visible.every(([i, j]) => map.tile(zoom, i, j)?.image);
  // Until all tiles are loaded, coarser ones are visible.
  for (let level = isComplete ? zoom : last; level >= zoom; level -= 1) {
    const size = Math.sqrt(map.view.sx * map.view.sy) * 2 ** level;
    context.imageSmoothingEnabled = size < 2.5;
    context.imageSmoothingQuality = size < 1 ? "medium" : "low";
    for (const [i, j] of level === zoom ? visible : map.visibleTiles(level))
      paintTile(map, context, X, Y, level, i, j);
  }
}

function paintTile(map, context, X, Y, level, i, j) {
  const { rows, cols } = map.grid,
    tile = map.tile(level, i, j),
    image = tile && map.tileImage(tile, cols.cell(level));
  if (!image) return;
  const x = X(cols.start(level, j)),
    y = Y(rows.start(level, i));
  context.drawImage(image, x, y, X(cols.end(level, j)) - x, Y(rows.end(level, i)) - y);
}

function paintLines(map, context, X, Y, plot, dots) {
  const { view } = map;
  context.fillStyle = map.appearance.inks.page;
  const lineWidth = Math.max(1 / dots, Math.min(1, view.sx / 22));
  for (let col = Math.ceil(view.x); col <= view.x + plot.w / view.sx; col += 1)
    context.fillRect(X(col) - lineWidth / 2, plot.y, lineWidth, plot.h);
  for (let row = Math.ceil(view.y); row <= view.y + plot.h / view.sy; row += 1)
    context.fillRect(plot.x, Y(row) - lineWidth / 2, plot.w, lineWidth);
}

function paintDigits(map, context, X, Y, plot) {
  const { view, appearance } = map;
  const curve = appearance.curveAt(map.grid.cols.cell(map.zoomLevel())),
    diverging = appearance.divergingCurve;
  context.font = appearance.smallFont;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let row = Math.floor(view.y); row < view.y + plot.h / view.sy; row += 1) {
    for (let col = Math.floor(view.x); col < view.x + plot.w / view.sx; col += 1) {
      const cell = map.cellAt(row, col);
      if (!cell?.single) continue;
      const change = Math.sign(cell.weight) * diverging.to(Math.abs(cell.weight)),
        colour =
          map.content.baseline === null
            ? appearance.list[Math.round(curve.to(cell.weight) * 255)]
            : appearance.divergingList[Math.round(127.5 + 127.5 * change)];
      context.fillStyle = appearance.inkOn(colour);
      const text = cell.weight.toFixed(2).replace(/^(-?)0\./, "$1.");
      context.fillText(text, (X(col) + X(col + 1)) / 2, (Y(row) + Y(row + 1)) / 2);
    }
  }
}

// A bar along each axis, beside the generated tokens.
function paintGenerated(map, context, X, Y, plot) {
  const { rows, cols } = map.content.generated,
    left = Math.max(plot.x, X(cols)),
    top = Math.max(plot.y, Y(rows));
  context.fillStyle = map.appearance.inks.generated;
  context.fillRect(left, plot.y - 4, Math.max(0, plot.x + plot.w - left), 3);
  context.fillRect(plot.x - 4, top, 3, Math.max(0, plot.y + plot.h - top));
}

// Bars with names at the right and below the map, as for the turns of a chat.
function paintSpans(map, context, X, Y, plot) {
  const { spans } = map.content,
    { inks, smallFont } = map.appearance;
  context.font = smallFont;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const axis of ["rows", "cols"]) {
    const [place, first, last] = axis === "rows" ? [Y, plot.y, plot.y + plot.h] : [X, plot.x, plot.x + plot.w];
    spans[axis].forEach(([start, stop, name], n) => {
      const from = Math.max(first, place(start)) + 1,
        size = Math.min(last, place(stop)) - 1 - from;
      if (size <= 0) return;
      context.fillStyle = n % 2 ? inks.muted : inks.accent;
      context.save();
      if (axis === "rows") {
        context.translate(plot.x + plot.w, from);
        context.transform(0, 1, 1, 0, 0, 0); // along the axis, and away from the map
      } else context.translate(from, plot.y + plot.h);
      context.fillRect(0, 3, size, 3);
      if (context.measureText(name).width < size) {
        context.translate(size / 2, 14);
        if (axis === "rows") context.scale(1, -1); // otherwise letters would be mirrored
        context.fillText(name, 0, 0);
      }
      context.restore();
    });
  }
}

// Columns whose weights are left out.
function paintHatching(map, context, X, plot) {
  context.strokeStyle = map.appearance.inks.strong;
  context.lineWidth = 1;
  for (const col of map.content.sinks) {
    const [left, right] = [X(col), X(col + 1)];
    if (right - left < 3 || right < plot.x || left > plot.x + plot.w) continue;
    context.save();
    context.beginPath();
    context.rect(left, plot.y, right - left, plot.h);
    context.clip();
    context.beginPath();
    for (let y = plot.y; y < plot.y + plot.h + right - left; y += 6) {
      context.moveTo(left, y);
      context.lineTo(right, y - (right - left));
    }
    context.stroke();
    context.restore();
  }
}

function paintFrame(context, x, y, w, h, ink, line, halo = null) {
  const stroke = (colour, width) => {
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.strokeRect(x - line / 2 + 0.5, y - line / 2 + 0.5, w + line - 1, h + line - 1);
  };
  if (halo) stroke(halo, line + 2); // so that it is visible on dark cells
  stroke(ink, line);
}

// Choose which rows or columns get a word or a number, given the pixels of one and the size of a number.
function chooseLabels(scale, maxWidth) {
  if (scale >= MIN_WORD_SIZE) return { step: 1, words: true };
  let step = 1;
  while (step * scale < maxWidth) step *= /^2/.test(`${step}`) ? 2.5 : 2; // 1, 2, 5, 10, 20, 50, …
  return { step, words: false };
}

function paintRowWords(map, context, Y, plot) {
  const { view, appearance, content } = map,
    { rows, shape } = content,
    { inks } = appearance;
  const last = Math.min(shape[0], Math.ceil(view.y + plot.h / view.sy)),
    maxWidth = map.left - 14;
  const { step, words } = chooseLabels(view.sy, 34);
  context.textBaseline = "middle";
  for (let row = Math.ceil(view.y / step) * step - (step === 1 ? 1 : 0); row < last; row += step) {
    const y = (Y(row) + Y(row + 1)) / 2;
    if (row < 0 || y < plot.y - 1 || y > plot.y + plot.h + 1) continue;
    // Hovered and pinned tokens have a tag, which must not cover a number.
    if (
      [map.pinned, map.hover?.row ?? null].some(
        (tag) => tag !== null && (tag === row || (!words && Math.abs((tag - row) * view.sy) < 18)),
      )
    )
      continue;
    const text = words && rows && truncateText(rows[row]),
      { font, ink } = styleWord(appearance, rows?.[row], view.sy * 0.95);
    if (text) paintWord(map, context, text, plot.x - 8, y, maxWidth, "right", ink, font);
    else paintNumber(map, context, row, plot.x - 8, y, "right");
  }
  for (const [row, ink] of [
    [map.hover?.row ?? null, inks.accent],
    [map.pinned, inks.pin],
  ]) {
    if (row === null || row === undefined) continue;
    const y = clamp((Y(row) + Y(row + 1)) / 2, plot.y, plot.y + plot.h);
    if (row !== map.hover?.row && (row + 1 < view.y || row > view.y + plot.h / view.sy)) continue;
    paintTag(map, context, rows ? truncateText(rows[row]) : formatCount(row), plot.x - 8, y, maxWidth, "right", ink);
  }
}

function paintColumnWords(map, context, X, plot) {
  const { view, appearance, content } = map,
    { cols, shape } = content,
    inks = appearance.inks;
  const last = Math.min(shape[1], Math.ceil(view.x + plot.w / view.sx));
  const { step, words } = chooseLabels(view.sx, 64);
  const isUpright = map.isUpright && view.sx >= map.wordWidth + 10,
    tag = map.hover?.col ?? null;
  const clearance = tag === null ? 0 : map.ruler.width(cols ? truncateText(cols[tag]) : formatCount(tag)) / 2 + 30;
  context.textBaseline = "middle";
  for (let col = Math.ceil(view.x / step) * step - (step === 1 ? 1 : 0); col < last; col += step) {
    const x = (X(col) + X(col + 1)) / 2;
    if (col < 0 || x < plot.x - 1 || x > plot.x + plot.w + 1) continue;
    if (tag !== null && (tag === col || (!(words && cols) && Math.abs((tag - col) * view.sx) < clearance))) continue;
    const text = words && cols && truncateText(cols[col]),
      { font, ink } = styleWord(appearance, cols?.[col], isUpright ? 13 : view.sx * 0.8);
    if (text && isUpright) paintWord(map, context, text, x, plot.y - 14, view.sx - 4, "center", ink, font);
    else if (text) paintRotated(map, context, text, x, plot.y - 7, ink, font);
    else if (!words || col % Math.max(1, Math.ceil(64 / view.sx)) === 0)
      paintNumber(map, context, col, x, plot.y - 12, "center");
  }
  if (tag === null) return;
  const x = clamp((X(tag) + X(tag + 1)) / 2, plot.x, plot.x + plot.w),
    text = cols ? truncateText(cols[tag]) : formatCount(tag),
    font = appearance.fontFor(view.sx * 0.8, 650);
  if (words && cols && !isUpright) paintRotated(map, context, text, x, plot.y - 7, inks.accent, font);
  else paintTag(map, context, text, x, plot.y - 14, 170, "center", inks.accent);
}

// Special tokens are small, as in the text.
function styleWord(appearance, text, height) {
  const isSpecial = text !== undefined && isSpecialToken(text);
  return {
    font: isSpecial ? `italic ${appearance.fontFor(0.8 * height)}` : appearance.fontFor(height),
    ink: isSpecial ? appearance.inks.muted : appearance.inks.ink,
  };
}

// The names of the axes, in the corner between the words of the rows and those of the columns.
function paintAxisNames(context, { smallFont, inks }, plot) {
  context.font = smallFont;
  context.fillStyle = inks.muted;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText(AXIS_NAMES.cols, plot.x - 8, plot.y - 24);
  context.fillText(AXIS_NAMES.rows, plot.x - 8, plot.y - 12);
}

function paintNumber(map, context, number, x, y, align) {
  context.font = map.appearance.smallFont;
  context.fillStyle = map.appearance.inks.muted;
  context.textAlign = align;
  const text = formatCount(number),
    half = context.measureText(text).width / 2; // a centred number stays within the canvas
  context.fillText(text, align === "center" ? clamp(x, half, map.size.width - half) : x, y);
}

function paintWord(map, context, text, x, y, maxWidth, align, ink, font) {
  map.ruler.use(map.appearance.font);
  context.font = font;
  context.fillStyle = ink;
  context.textAlign = align;
  context.direction = isRightToLeft(text) ? "rtl" : "ltr";
  context.fillText(map.ruler.fit(text, maxWidth), x, y);
  context.direction = "ltr";
}

function paintRotated(map, context, text, x, y, ink, font) {
  context.save();
  context.translate(x, y);
  context.rotate(-LABEL_ANGLE);
  paintWord(map, context, text, 0, 0, map.wordWidth + 1, "left", ink, font);
  context.restore();
}

// A word with a background, for hovered and pinned tokens.
function paintTag(map, context, text, x, y, maxWidth, align, ink) {
  map.ruler.use(map.appearance.font);
  const fitted = map.ruler.fit(text, maxWidth),
    wide = map.ruler.width(fitted) + 10;
  const left = align === "right" ? x - wide + 5 : clamp(x - wide / 2, 2, map.size.width - wide - 2);
  context.fillStyle = ink;
  context.beginPath();
  context.roundRect(left, y - 10, wide, 20, 4);
  context.fill();
  const { inks, font } = map.appearance;
  paintWord(map, context, fitted, left + wide / 2, y + 0.5, maxWidth, "center", inks.page, font);
}

// The position in a large map, shown when a small part of it fills the view.
function paintMinimap(map, context, plot) {
  const { view, content, appearance } = map;
  map.minimap = null;
  const visibleShare = (plot.w * plot.h) / (content.shape[0] * content.shape[1] * view.sx * view.sy);
  if (visibleShare > 0.3 || plot.w < 260 || plot.h < 220 || map.saving || Math.max(...content.shape) < 64) return;
  const maxSide = 108,
    most = Math.max(content.shape[0] * map.minScale.sy, content.shape[1] * map.minScale.sx);
  const w = Math.max(16, (maxSide * content.shape[1] * map.minScale.sx) / most),
    h = Math.max(16, (maxSide * content.shape[0] * map.minScale.sy) / most);
  const x = plot.x + plot.w - w - 10,
    y = plot.y + plot.h - h - 10;
  map.minimap = { x, y, w, h };
  context.save();
  context.shadowColor = "rgb(0 0 0 / 25%)";
  context.shadowBlur = 8;
  context.fillStyle = appearance.inks.page;
  context.fillRect(x - 3, y - 3, w + 6, h + 6);
  context.restore();
  context.strokeStyle = appearance.inks.strong;
  context.lineWidth = 1;
  context.strokeRect(x - 3.5, y - 3.5, w + 7, h + 7);
  context.imageSmoothingEnabled = true;
  const X = (col) => x + (col * w) / content.shape[1],
    Y = (row) => y + (row * h) / content.shape[0];
  for (const [i, j] of map.grid.indices(map.grid.coarsest)) paintTile(map, context, X, Y, map.grid.coarsest, i, j);
  context.strokeStyle = appearance.inks.pin;
  context.lineWidth = 1.5;
  const wide = Math.max(4, X(plot.w / view.sx) - x),
    tall = Math.max(4, Y(plot.h / view.sy) - y);
  context.strokeRect(Math.min(x + w - wide, X(view.x)), Math.min(y + h - tall, Y(view.y)), wide, tall);
}
