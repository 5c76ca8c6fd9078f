// A heat map of any size. A short input shows its words on both axes; a long one is panned and zoomed like a street
// map, with the tiles of the current zoom, and words where they fit.

import { AXIS_NAMES, LABEL_ANGLE, paintMap } from "./map_painter.js";
import { formatCount } from "./colours.js";
import { clamp, createElement, createPixels, encodePng, sizeCanvas } from "./dom.js";
import { Ruler, truncateText } from "./token_text.js";
import { keyOf, TileGrid } from "./tiles.js";

const MAX_FIT_SIZE = 46; // pixels of a row or column, when all of a short map is shown
const MAX_ZOOM_SIZE = 72; // pixels of a row or column at the highest zoom
const APPROACH_ZOOM = 8; // when a token is selected in the text
const MAX_CLICK_MOVEMENT = 4; // pixels that a pointer may move during a click

let numViews = 0;

export class MapView {
  /** `events`: hover(place or null), pin(row), moved(view). `appearance` is shared: colours, curve, inks. */
  constructor({ store, appearance, events }) {
    Object.assign(this, { store, appearance, events });
    numViews += 1;
    this.owner = `map ${numViews}`;
    this.ruler = new Ruler();
    const aria = { label: "Attention map" };
    this.canvas = createElement("canvas", { class: "jm-canvas", role: "img", tabindex: "0", aria });
    this.el = createElement("div", { class: "jm-map" }, [this.canvas]);
    this.pointers = new Map();
    this.hover = null;
    this.pinned = null;
    this.content = null;
    this.view = { x: 0, y: 0, sx: 1, sy: 1 };
    this.differences = new Map();
    this.frames = 0; // number of painted frames, for benchmarks
    this.resizeObserver = new ResizeObserver(() => this.resize());
    this.resizeObserver.observe(this.el);
    this.listen();
  }

  /**
   * `content`: { data, baseline, layer, head, withoutSinks, shape, finestZoom, rows, cols, spans, sinks, label };
   * baseline: the data to subtract, or null.
   */
  show(content) {
    const before = this.content,
      { rows, cols, shape } = content;
    this.content = content;
    this.grid = new TileGrid(shape);
    this.hover = null;
    if (before?.rows !== rows || before.cols !== cols || `${before.shape}` !== `${shape}`) this.fitNext = true;
    this.canvas.setAttribute("aria-label", content.label);
    this.resize();
  }

  resize() {
    const { width, height } = this.el.getBoundingClientRect();
    if (!this.content || width < 40 || height < 40) return;
    const isWhole = !this.size || this.fitNext || this.isWhole();
    this.size = { width, height };
    this.measure();
    if (isWhole) this.fit();
    else this.clamp();
    this.fitNext = false;
    this.refresh();
  }

  // Space for the words along the axes; the same at every zoom, so that nothing moves.
  measure() {
    const { width, height } = this.size,
      { rows, cols, shape } = this.content;
    this.ruler.use(this.appearance.font);
    const measureWidest = (texts) => {
      let most = 0;
      for (let n = 0; n < Math.min(texts.length, 3000); n += 1)
        most = Math.max(most, this.ruler.width(truncateText(texts[n])));
      return most;
    };
    const measureNumber = (length) => this.ruler.width(formatCount(length)) + 6;
    const rowWidth = rows ? Math.min(measureWidest(rows), Math.max(56, 0.24 * width), 190) : 0;
    this.left = Math.max(rowWidth, measureNumber(shape[0]), this.ruler.width(AXIS_NAMES.rows)) + 14;
    this.wordWidth = cols ? Math.min(measureWidest(cols), Math.max(56, 0.24 * height), 150) : 0;
    const { spans } = this.content,
      spanMargin = spans.rows.length ? 22 : 0;
    this.bottom = spans.cols.length ? 26 : 12;
    this.setMargins(30, 12 + spanMargin);
    // Upright words if they fit into the columns of the whole map, otherwise rotated ones, which need more space.
    this.isUpright = this.wordWidth + 10 <= this.fitScale().sx;
    if (cols && !this.isUpright) {
      const overhang = Math.min(this.wordWidth * Math.cos(LABEL_ANGLE) + 4, 0.18 * width, 96);
      this.setMargins(this.wordWidth * Math.sin(LABEL_ANGLE) + 22, Math.max(overhang, spanMargin));
    }
    this.minScale = this.fitScale();
    this.maxZoom = Math.max(MAX_ZOOM_SIZE / Math.max(this.minScale.sx, this.minScale.sy), 1);
  }

  setMargins(top, right) {
    Object.assign(this, { top, right });
  }

  // The scale at which the whole map is visible.
  fitScale() {
    const [rows, cols] = this.content.shape,
      sx = Math.min((this.size.width - this.left - this.right) / cols, MAX_FIT_SIZE),
      sy = Math.min((this.size.height - this.top - this.bottom) / rows, MAX_FIT_SIZE),
      least = Math.min(sx, sy);
    // Square cells, unless the map is so long that its other side would be too thin.
    return Math.max(rows / cols, cols / rows) <= 3 ? { sx: least, sy: least } : { sx, sy };
  }

  // The part of the canvas with cells: no larger than the map at this zoom.
  plot() {
    const { width, height } = this.size,
      { shape } = this.content;
    const wide = width - this.left - this.right,
      tall = height - this.top - this.bottom;
    const w = Math.min(wide, shape[1] * this.view.sx),
      h = Math.min(tall, shape[0] * this.view.sy);
    return { x: this.left + Math.max(0, (wide - w) / 2), y: this.top + Math.max(0, (tall - h) * 0.4), w, h };
  }

  isWhole() {
    return this.minScale && this.view.sx <= this.minScale.sx * 1.001;
  }

  fit() {
    if (!this.size) return;
    this.view = { x: 0, y: 0, ...this.minScale };
    this.moved();
  }

  clamp() {
    const { view, content } = this;
    const scale = clamp(view.sx / this.minScale.sx, 1, this.maxZoom);
    view.sx = this.minScale.sx * scale;
    view.sy = this.minScale.sy * scale;
    const plot = this.plot();
    view.x = clamp(view.x, 0, Math.max(0, content.shape[1] - plot.w / view.sx));
    view.y = clamp(view.y, 0, Math.max(0, content.shape[0] - plot.h / view.sy));
  }

  /** Zoom by a factor around a point of the canvas. */
  zoom(factor, at = null) {
    if (!this.size) return;
    const before = this.plot();
    const px = at ? at.x : before.x + before.w / 2,
      py = at ? at.y : before.y + before.h / 2;
    const col = this.view.x + (px - before.x) / this.view.sx,
      row = this.view.y + (py - before.y) / this.view.sy;
    this.view.sx *= factor;
    this.view.sy *= factor;
    this.clamp();
    const after = this.plot();
    this.view.x = col - (px - after.x) / this.view.sx;
    this.view.y = row - (py - after.y) / this.view.sy;
    this.moved();
  }

  /** Zoom with an animation, unless the user prefers reduced motion. */
  zoomSmoothly(factor, at = null) {
    if (globalThis.matchMedia?.("(prefers-reduced-motion: reduce)").matches) return this.zoom(factor, at);
    let last = 0;
    const start = performance.now();
    const step = (now) => {
      const part = clamp((now - start) / 170, 0, 1), // a frame may have begun before `start`
        eased = 1 - (1 - part) ** 3;
      this.zoom(factor ** (eased - last), at);
      last = eased;
      if (part < 1 && this.el.isConnected) requestAnimationFrame(step);
    };
    return requestAnimationFrame(step);
  }

  pan(dx, dy) {
    this.view.x -= dx / this.view.sx;
    this.view.y -= dy / this.view.sy;
    this.moved();
  }

  moved() {
    this.clamp();
    this.events.moved?.({ ...this.view });
    this.refresh();
  }

  /** Adopt the position and zoom of another map. */
  follow(view) {
    if (!this.size) return;
    Object.assign(this.view, view);
    this.clamp();
    this.refresh();
  }

  /** Scroll a cell into view. */
  reveal(row, col) {
    const { view } = this,
      plot = this.plot(),
      wide = plot.w / view.sx,
      tall = plot.h / view.sy;
    if (col !== null && (col < view.x || col + 1 > view.x + wide)) view.x = col + 0.5 - wide / 2;
    if (row !== null && (row < view.y || row + 1 > view.y + tall)) view.y = row + 0.5 - tall / 2;
    this.moved();
  }

  /** Scroll a cell into view. If the whole map is visible, zoom in, so that words fit on the axes. */
  approach(row, col) {
    const { view, content } = this,
      plot = this.plot();
    if (!this.size) return;
    const middle = (place, start, pixels, scale) => (place === null ? start + pixels / scale / 2 : place + 0.5),
      y = middle(row, view.y, plot.h, view.sy),
      // A row of a causal map ends at its diagonal.
      x = middle(col ?? (row === null ? null : Math.min(row, content.shape[1] - 1)), view.x, plot.w, view.sx);
    if (this.isWhole()) this.view = { ...view, sx: view.sx * APPROACH_ZOOM, sy: view.sy * APPROACH_ZOOM };
    this.clamp();
    const after = this.plot();
    this.view.x = x - after.w / this.view.sx / 2;
    this.view.y = y - after.h / this.view.sy / 2;
    this.moved();
  }

  refresh() {
    if (this.waiting || !this.size) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      if (!this.el.isConnected) return;
      paintMap(this, sizeCanvas(this.canvas, this.size.width, this.size.height), globalThis.devicePixelRatio || 1);
      this.requestTiles();
      this.frames += 1;
      this.canvas.style.touchAction = this.isWhole() ? "pan-y" : "none"; // a whole map scrolls with the page
      this.canvas.classList.toggle("jm-grab", !this.isWhole());
    });
  }

  // ---------------------------------------------------------------- tiles

  zoomLevel() {
    const scale = Math.sqrt(this.view.sx * this.view.sy);
    return Math.min(this.grid.coarsest, Math.max(this.content.finestZoom, Math.ceil(Math.log2(1 / scale) - 0.01)));
  }

  request(zoom, i, j, data = this.content.data) {
    return this.grid.request({ ...this.content, data }, zoom, i, j);
  }

  tile(zoom, i, j) {
    const key = keyOf(this.request(zoom, i, j)),
      tile = this.store.get(key);
    if (this.content.baseline === null || !tile) return tile;
    const other = this.store.get(keyOf(this.request(zoom, i, j, this.content.baseline)));
    if (!other) return undefined;
    let difference = this.differences.get(key);
    if (!difference || difference.minuend !== tile || difference.subtrahend !== other) {
      const values = tile.values.map((value, n) => value - other.values[n]);
      difference = { rows: tile.rows, cols: tile.cols, values, minuend: tile, subtrahend: other };
      if (this.differences.size > 64) this.differences.clear();
      this.differences.set(key, difference);
    }
    return difference;
  }

  // Iterate over the visible tiles of a zoom.
  *visibleTiles(zoom) {
    const { view } = this,
      plot = this.plot(),
      epsilon = 1e-6;
    const top = this.grid.rows.at(zoom, view.y),
      bottom = this.grid.rows.at(zoom, view.y + plot.h / view.sy - epsilon);
    const left = this.grid.cols.at(zoom, view.x),
      right = this.grid.cols.at(zoom, view.x + plot.w / view.sx - epsilon);
    for (let i = top; i <= bottom; i += 1) for (let j = left; j <= right; j += 1) yield [i, j];
  }

  // Request the visible tiles, nearest to the centre first, and the coarsest zoom, which substitutes for missing tiles.
  requestTiles() {
    const { view, grid, content } = this,
      plot = this.plot(),
      zoom = this.zoomLevel(),
      row = view.y + plot.h / view.sy / 2,
      col = view.x + plot.w / view.sx / 2,
      tall = grid.rows.span(zoom),
      wide = grid.cols.span(zoom);
    const distance = (i, j) =>
      Math.hypot(
        (grid.rows.start(zoom, i) + tall / 2 - row) / tall,
        (grid.cols.start(zoom, j) + wide / 2 - col) / wide,
      );
    const createEntries = (level, [i, j], priority) =>
      [content.data, content.baseline]
        .filter((data) => data !== null)
        .map((data) => ({ request: this.request(level, i, j, data), priority, onLoad: () => this.refresh() }));
    this.store.request(this.owner, [
      ...[...this.visibleTiles(zoom)].flatMap((tile) => createEntries(zoom, tile, 1 + distance(...tile))),
      ...[...grid.indices(grid.coarsest)].flatMap((tile) => createEntries(grid.coarsest, tile, 0)),
    ]);
  }

  abortRequests() {
    this.store.request(this.owner, []);
  }

  // Return the image of a tile in the current colours. The number of tiles that are coloured in a frame is limited.
  tileImage(tile, width) {
    const { appearance } = this,
      zoom = this.grid.cols.cell(this.zoomLevel()),
      version = `${appearance.version} ${zoom}`;
    if (tile.version === version && tile.image) return tile.image;
    if (performance.now() > this.paintUntil && !this.saving) {
      this.refresh();
      return tile.image;
    }
    const { values } = tile,
      { to } = this.content.baseline === null ? appearance.curveAt(zoom) : appearance.divergingCurve,
      { colours, divergingColours } = appearance;
    tile.image = createPixels(tile.cols, tile.rows, (pixels) => {
      for (let n = 0; n < values.length; n += 1) {
        if (this.content.baseline === null) pixels[n] = colours[Math.round(to(values[n] / width) * 255)];
        else {
          const change = Math.sign(values[n]) * to(Math.abs(values[n]) / width);
          pixels[n] = divergingColours[Math.round(127.5 + 127.5 * change)];
        }
      }
    });
    tile.version = version;
    return tile.image;
  }

  /** Return the cell at a row and column, with its weight; undefined while it is loading. */
  cellAt(row, col) {
    const zoom = this.zoomLevel(),
      i = this.grid.rows.at(zoom, row),
      j = this.grid.cols.at(zoom, col);
    const tile = this.tile(zoom, i, j);
    if (!tile) return undefined;
    const top = this.grid.rows.start(zoom, i),
      left = this.grid.cols.start(zoom, j);
    const tall = this.grid.rows.cell(zoom),
      wide = this.grid.cols.cell(zoom);
    const y = Math.min(tile.rows - 1, Math.floor((row - top) / tall)),
      x = Math.min(tile.cols - 1, Math.floor((col - left) / wide));
    return {
      weight: tile.values[y * tile.cols + x],
      rows: [top + y * tall, top + (y + 1) * tall],
      cols: [left + x * wide, left + (x + 1) * wide],
      single: tall === 1 && wide === 1,
    };
  }

  /** Fetch the mean weights of the cells of a row, for each key: of the finest cells that the host has. */
  async fetchPooledRow(row) {
    const { grid, content } = this,
      zoom = Math.min(content.finestZoom, grid.coarsest),
      i = grid.rows.at(zoom, row),
      width = grid.cols.cell(zoom),
      values = new Float32Array(content.shape[1]);
    for (let j = 0; j < grid.cols.numTiles(zoom); j += 1) {
      const tile = await this.store.fetchOne(this.request(zoom, i, j)),
        y = Math.min(tile.rows - 1, Math.floor((row - grid.rows.start(zoom, i)) / grid.rows.cell(zoom))),
        left = grid.cols.start(zoom, j);
      for (let x = 0; x < tile.cols; x += 1)
        values.fill(tile.values[y * tile.cols + x] / width, left + x * width, left + (x + 1) * width);
    }
    return { values, width };
  }

  // ---------------------------------------------------------------- saving

  /** Save the map as an image, without the hovered cell, `dots` pixels per CSS pixel; `drawBelow` draws the legend. */
  async save(dots, extra, drawBelow) {
    const { width, height } = this.size,
      plot = this.plot();
    const tall = Math.min(height, plot.y + plot.h + this.bottom + 2) + extra;
    const canvas = createElement("canvas", { width: Math.round(width * dots), height: Math.round(tall * dots) });
    const context = canvas.getContext("2d"),
      hover = this.hover;
    context.scale(dots, dots);
    context.fillStyle = this.appearance.inks.page;
    context.fillRect(0, 0, width, tall);
    this.hover = null;
    this.saving = true;
    paintMap(this, context, dots);
    this.hover = hover;
    this.saving = false;
    drawBelow(context, plot.x, tall - extra, plot.w);
    return encodePng(canvas);
  }

  // ---------------------------------------------------------------- pointer

  pointOf(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  // The row and column at a point: of a cell, or of a word on one of the axes.
  locate({ x, y }) {
    const { view, content } = this,
      plot = this.plot();
    const within = (value, first, length) => value >= first && value < first + length;
    const inX = within(x, plot.x, plot.w),
      inY = within(y, plot.y, plot.h);
    const col = Math.min(content.shape[1] - 1, Math.floor(view.x + (x - plot.x) / view.sx));
    const row = Math.min(content.shape[0] - 1, Math.floor(view.y + (y - plot.y) / view.sy));
    if (inX && inY) return { row, col };
    if (inY && x < plot.x && x > plot.x - this.left) return { row, col: null };
    if (inX && y < plot.y && y > plot.y - this.top) return { row: null, col };
    return null;
  }

  handlePointer(point) {
    const place = point && this.locate(point);
    this.hover = place;
    this.events.hover(
      place && {
        ...place,
        point,
        cell: place.row !== null && place.col !== null ? this.cellAt(place.row, place.col) : null,
      },
    );
    this.refresh();
  }

  listen() {
    const { canvas } = this;
    let press = null,
      gap = 0;
    const release = (event) => {
      this.pointers.delete(event.pointerId);
      gap = 0;
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.size) return;
      const at = this.pointOf(event);
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, at);
      press = this.pointers.size === 1 ? { at, moved: false, minimap: this.within(at, this.minimap) } : null;
      if (press?.minimap) this.moveTo(at);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.size) return;
      const at = this.pointOf(event),
        before = this.pointers.get(event.pointerId);
      if (!before) return void this.handlePointer(at);
      this.pointers.set(event.pointerId, at);
      if (this.pointers.size === 2) {
        const [a, b] = [...this.pointers.values()],
          now = Math.hypot(a.x - b.x, a.y - b.y);
        if (gap) this.zoom(now / gap, { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 });
        gap = now;
        return;
      }
      if (!press) return;
      if (press.minimap) return void this.moveTo(at);
      if (Math.hypot(at.x - press.at.x, at.y - press.at.y) > MAX_CLICK_MOVEMENT) press.moved = true;
      if (press.moved) {
        this.hover = null;
        this.events.hover(null);
        this.pan(at.x - before.x, at.y - before.y);
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      release(event);
      const click = press && !press.moved && !press.minimap && this.locate(press.at);
      press = null;
      if (click && click.row !== null) this.events.pin(click.row);
    });
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => this.handlePointer(null));
    canvas.addEventListener("dblclick", (event) => this.zoomSmoothly(event.shiftKey ? 0.4 : 2.5, this.pointOf(event)));
    canvas.addEventListener(
      "wheel",
      (event) => {
        // On a page that scrolls, the wheel scrolls the page until the map is clicked.
        const isClicked = document.activeElement === canvas;
        if (!this.size || (this.appearance.sharesWheel && !event.ctrlKey && !event.metaKey && !isClicked)) return;
        event.preventDefault();
        const distance = clamp(event.deltaY * (event.deltaMode === 1 ? 18 : 1), -400, 400),
          point = this.pointOf(event);
        this.zoom(Math.exp(-distance * (event.ctrlKey ? 0.008 : 0.0022)), point);
        this.handlePointer(point);
      },
      { passive: false },
    );
  }

  within(at, box) {
    return box && at.x >= box.x && at.y >= box.y && at.x <= box.x + box.w && at.y <= box.y + box.h;
  }

  moveTo(at) {
    const { minimap: box, content, view } = this,
      plot = this.plot();
    if (!box) return;
    view.x = ((at.x - box.x) / box.w) * content.shape[1] - plot.w / view.sx / 2;
    view.y = ((at.y - box.y) / box.h) * content.shape[0] - plot.h / view.sy / 2;
    this.moved();
  }

  close() {
    this.resizeObserver.disconnect();
    cancelAnimationFrame(this.waiting);
    this.abortRequests();
  }
}
