// Arcs: queries on one side, keys on the other, a curve for each weight above a threshold. Words are in two rows if
// they fit, otherwise in two columns. The drawing is SVG and can be saved as such.

import { formatCount, formatWeight } from "./colours.js";
import { createField, createPager, createSlider } from "./controls.js";
import { clamp, createElement, createSvg } from "./dom.js";
import { isRightToLeft, Ruler, truncateText } from "./token_text.js";
import { View } from "./view.js";

const MAX_WORDS = 160; // shown at once, on each side
const MAX_ARCS = 1500;
const LINE_HEIGHT = 24; // pixels from word to word in a column

export class ArcView extends View {
  static title = "Arcs";
  static hasPanel = true;
  static hasRange = true;

  /** `events`: pin(row); weights(rows, cols) returns a promise of weights. */
  constructor(shared) {
    super(shared);
    this.ruler = new Ruler();
    this.first = { rows: 0, cols: 0 };
    this.least = 0.04;
    this.pager = createElement("div", { class: "jm-pager" });
    const range = { min: 0, max: 0.5, step: 0.005, value: this.least };
    this.threshold = createSlider("Minimum weight of an arc", range, (value) => {
      this.least = value;
      this.paint();
    });
    this.thresholdText = createElement("output", { class: "jm-number" });
    this.canvasBox = createElement("div", { class: "jm-arcs-content" });
    this.el = createElement("div", { class: "jm-arcs" }, [
      createElement("div", { class: "jm-bar" }, [
        createField("Minimum weight", this.threshold, this.thresholdText),
        this.pager,
      ]),
      this.canvasBox,
    ]);
    this.resizeObserver = new ResizeObserver(() => this.paint());
    this.resizeObserver.observe(this.canvasBox);
  }

  async show(content) {
    if (`${this.content?.shape}` !== `${content.shape}`) this.first = { rows: 0, cols: 0 };
    this.content = content;
    await this.load();
    if (this.content === content && this.pinned !== null) await this.reveal(this.pinned);
  }

  async load() {
    const { content } = this,
      { shape } = content;
    this.hover = null;
    const choose = (length, first) => [
      Math.min(first, Math.max(0, length - MAX_WORDS)),
      Math.min(length, first + MAX_WORDS),
    ];
    this.rows = choose(shape[0], this.first.rows);
    this.cols = choose(shape[1], this.first.cols);
    this.updatePager();
    try {
      const answer = await this.events.weights(this.rows, this.cols);
      if (this.content !== content || !answer) return;
      this.weights = answer;
      this.errorMessage = "";
    } catch (error) {
      if (this.content !== content) return;
      this.weights = null;
      this.errorMessage = error.message;
    }
    this.paint();
  }

  /** Show the page of words that contains a query. */
  async reveal(row) {
    if (row >= this.rows[0] && row < this.rows[1]) return;
    const centre = (length) => Math.max(0, Math.min(length - MAX_WORDS, row - MAX_WORDS / 2)),
      [rows, cols] = this.content.shape.map(centre);
    this.first = { rows, cols };
    await this.load();
  }

  updatePager() {
    this.pager.replaceChildren();
    for (const [axis, name, length] of [
      ["rows", "Queries", this.content.shape[0]],
      ["cols", "Keys", this.content.shape[1]],
    ]) {
      const [first] = this[axis];
      if (length <= MAX_WORDS) continue;
      const move = (by) => {
        this.first[axis] = clamp(first + (by * MAX_WORDS) / 2, 0, length - MAX_WORDS);
        this.load();
      };
      this.pager.append(
        createElement("span", { class: "jm-muted", text: name }),
        ...createPager(name.toLowerCase(), this[axis], length, move),
      );
    }
  }

  legend() {
    return this.appearance.mapLegend();
  }

  weightAt(row, col) {
    return this.weights.values[(row - this.rows[0]) * this.weights.cols + (col - this.cols[0])];
  }

  paint() {
    if (!this.content || !this.canvasBox.clientWidth) return;
    this.thresholdText.textContent = formatWeight(this.least);
    if (!this.weights) {
      const text = this.errorMessage || "Loading …";
      this.canvasBox.replaceChildren(createElement("p", { class: "jm-note", text }));
      return;
    }
    if (this.weights.rows !== this.rows[1] - this.rows[0] || this.weights.cols !== this.cols[1] - this.cols[0]) return;
    const { inks, font } = this.appearance;
    this.ruler.use(font);
    const names = (texts, [first, last]) =>
      Array.from({ length: last - first }, (_, n) => (texts ? truncateText(texts[first + n]) : formatCount(first + n)));
    const fullText = (texts, place) => (texts ? truncateText(texts[place], 200) : formatCount(place));
    const from = names(this.content.rows, this.rows),
      to = names(this.content.cols, this.cols);
    const wide = this.canvasBox.clientWidth;
    const isFlat = [from, to].every((words) => this.measureWords(words).reduce((a, b) => a + b) <= wide - 40);
    const places = isFlat ? this.alongRows(from, to, wide) : this.alongColumns(from, to, wide);
    const arcs = createSvg("g", { fill: "none", "stroke-linecap": "round" });
    const words = createSvg("g", { class: "jm-words" });
    this.lines = [];
    for (const [row, col, weight] of this.strongestArcs()) {
      const a = places.from[row - this.rows[0]],
        b = places.to[col - this.cols[0]];
      const line = createSvg("path", {
        d: places.curve(a, b),
        stroke: inks.accent,
        "stroke-width": 0.75 + 5 * weight,
        "stroke-opacity": 0.1 + 0.85 * weight,
      });
      arcs.append(line);
      this.lines.push({ line, row, col, weight });
    }
    this.words = { rows: [], cols: [] };
    for (const [side, texts, list] of [
      ["rows", from, places.from],
      ["cols", to, places.to],
    ]) {
      texts.forEach((text, n) => {
        const token = this.createToken(side, this[side][0] + n, text, list[n], isFlat);
        token.append(createSvg("title", { text: fullText(this.content[side], this[side][0] + n) }));
        words.append(token);
      });
    }
    const headings = ["Queries", `Keys${this.appearance.weightNote && `, weights${this.appearance.weightNote}`}`].map((text, n) =>
      createSvg("text", { ...places.heads[n], class: "jm-heading", fill: inks.muted, text }),
    );
    const label = `Arcs from ${from.length} queries to ${to.length} keys`;
    this.svg = createSvg(
      "svg",
      {
        width: places.width,
        height: places.height,
        viewBox: `0 0 ${places.width} ${places.height}`,
        role: "img",
        aria: { label },
        "font-family": this.appearance.family,
        "font-size": "13",
      },
      [...headings, arcs, words],
    );
    this.canvasBox.replaceChildren(this.svg);
    this.highlight();
  }

  strongestArcs() {
    const arcs = [],
      { values, cols } = this.weights,
      least = Math.max(this.least, 1e-9);
    values.forEach((value, n) => {
      if (value >= least) arcs.push([this.rows[0] + Math.floor(n / cols), this.cols[0] + (n % cols), value]);
    });
    arcs.sort((a, b) => b[2] - a[2]);
    return arcs.slice(0, MAX_ARCS).reverse(); // the highest on top
  }

  measureWords(words) {
    return words.map((text) => Math.max(24, this.ruler.width(text) + 22));
  }

  alongRows(from, to, width) {
    const place = (words, y) => {
      const sizes = this.measureWords(words);
      let x = (width - sizes.reduce((sum, size) => sum + size, 0)) / 2;
      return sizes.map((size) => {
        x += size;
        return { x: x - size / 2, y, size };
      });
    };
    const tall = clamp(this.canvasBox.clientHeight - 110, 150, 420),
      top = 44,
      bottom = top + tall;
    return {
      from: place(from, top),
      to: place(to, bottom),
      width,
      height: bottom + 44,
      heads: [
        { x: width / 2, y: 16, "text-anchor": "middle" },
        { x: width / 2, y: bottom + 38, "text-anchor": "middle" },
      ],
      curve: (a, b) => `M${a.x} ${a.y + 15}C${a.x} ${a.y + tall * 0.55} ${b.x} ${b.y - tall * 0.55} ${b.x} ${b.y - 15}`,
    };
  }

  alongColumns(from, to, width) {
    const most = Math.min(0.34 * width, 190),
      gap = Math.min(380, width - 2 * most - 24);
    const left = (width - gap) / 2,
      right = left + gap,
      top = 36;
    const place = (words, x) => words.map((_, n) => ({ x, y: top + n * LINE_HEIGHT, size: most }));
    return {
      from: place(from, left),
      to: place(to, right),
      width,
      height: top + LINE_HEIGHT * Math.max(from.length, to.length),
      heads: [
        { x: left - 8, y: 14, "text-anchor": "end" },
        { x: right + 8, y: 14, "text-anchor": "start" },
      ],
      curve: (a, b) => `M${a.x + 4} ${a.y}C${a.x + gap * 0.5} ${a.y} ${b.x - gap * 0.5} ${b.y} ${b.x - 4} ${b.y}`,
    };
  }

  createToken(side, place, text, { x, y, size }, isFlat) {
    const { inks } = this.appearance,
      query = side === "rows";
    const short = this.ruler.fit(text, isFlat ? size : size - 12),
      wide = this.ruler.width(short) + 12;
    const left = isFlat ? x - wide / 2 : query ? x - wide - 2 : x + 2;
    const box = createSvg("rect", { x: left, y: y - 11, width: wide, height: 22, rx: 5, fill: "transparent" });
    // text-anchor depends on the direction of the text: "middle" is the same in both.
    const label = createSvg("text", {
      x: left + wide / 2,
      y: y + 4.5,
      "text-anchor": "middle",
      fill: inks.ink,
      direction: isRightToLeft(short) ? "rtl" : null,
      text: short,
    });
    const group = createSvg(
      "g",
      {
        class: "jm-word",
        data: { side, place },
        onpointerenter: () => this.handlePointer(query ? { row: place, col: null } : { row: null, col: place }),
        onpointerleave: () => this.handlePointer(null),
        onclick: () => query && this.events.pin(place),
      },
      [box, label],
    );
    this.words[side].push({ place, box, label });
    return group;
  }

  handlePointer(place) {
    this.hover = place;
    this.highlight();
  }

  // Highlight the hovered or pinned word; the other end of each of its arcs is shaded by the weight.
  highlight() {
    if (!this.words || !this.weights) return;
    const { inks, list } = this.appearance,
      curve = this.appearance.curveAt(1);
    const selected = this.hover ?? (this.pinned === null ? null : { row: this.pinned, col: null });
    for (const { line, row, col, weight } of this.lines) {
      const on = !selected || row === selected.row || col === selected.col;
      line.setAttribute("stroke-opacity", on ? Math.min(1, 0.12 + 0.88 * weight + (selected ? 0.12 : 0)) : 0.035);
      line.setAttribute("stroke", selected && on && !this.hover ? inks.pin : inks.accent);
    }
    for (const side of ["rows", "cols"]) {
      for (const { place, box, label } of this.words[side]) {
        const self = selected && (side === "rows" ? selected.row : selected.col) === place;
        const weight = selected && this.weightTo(side, place, selected);
        const tint = weight > 0 ? list[Math.round(curve.to(weight) * 255)] : null;
        box.setAttribute("fill", self ? (this.hover ? inks.accent : inks.pin) : tint ? `rgb(${tint})` : "transparent");
        label.setAttribute("fill", self ? inks.page : tint ? this.appearance.inkOn(tint) : inks.ink);
      }
    }
  }

  weightTo(side, place, selected) {
    const isShown = (value, [first, last]) => value !== null && value >= first && value < last;
    if (side === "cols" && isShown(selected.row, this.rows)) return this.weightAt(selected.row, place);
    if (side === "rows" && isShown(selected.col, this.cols)) return this.weightAt(place, selected.col);
    return null;
  }

  refresh() {
    this.paint();
  }

  save() {
    const copy = this.svg.cloneNode(true);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.prepend(createSvg("rect", { width: "100%", height: "100%", fill: this.appearance.inks.page }));
    return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
  }

  close() {
    this.resizeObserver.disconnect();
  }
}
