// Arcs: queries on one side, keys on the other, a curve for each weight that counts. Two rows of words where
// they fit side by side, two columns where they do not. All of it is SVG, and can be saved as such.

import { count, told } from "./colours.js";
import { draw, iconButton, make } from "./dom.js";
import { isRightToLeft, Ruler, shown } from "./text.js";

const MOST_WORDS = 160; // a side, at once
const MOST_ARCS = 1500;
const LINE = 24; // pixels from word to word in a column

export class ArcView {
  /** `events`: hover(place or null), pin(row), wants(rows, cols) → promise of weights. */
  constructor({ look, events }) {
    Object.assign(this, { look, events });
    this.ruler = new Ruler();
    this.first = { rows: 0, cols: 0 };
    this.least = 0.04;
    this.pinned = null;
    this.pager = make("div", { class: "jm-pager" });
    this.threshold = make("input", {
      type: "range",
      min: "0",
      max: "0.5",
      step: "0.005",
      value: `${this.least}`,
      aria: { label: "Weakest arc shown" },
      oninput: () => {
        this.least = Number(this.threshold.value);
        this.paint();
      },
    });
    this.said = make("output", { class: "jm-number" });
    this.stage = make("div", { class: "jm-arcs-stage" });
    this.el = make("div", { class: "jm-arcs" }, [
      make("div", { class: "jm-bar" }, [
        make("label", { class: "jm-field" }, [make("span", { text: "Arcs from" }), this.threshold, this.said]),
        this.pager,
      ]),
      this.stage,
    ]);
    this.watch = new ResizeObserver(() => this.paint());
    this.watch.observe(this.stage);
  }

  async show(content) {
    const { shape } = content;
    if (!this.content || `${this.content.shape}` !== `${shape}`) this.first = { rows: 0, cols: 0 };
    this.content = content;
    this.hover = null;
    const pick = (length, first) => [
      Math.min(first, Math.max(0, length - MOST_WORDS)),
      Math.min(length, first + MOST_WORDS),
    ];
    this.rows = pick(shape[0], this.first.rows);
    this.cols = pick(shape[1], this.first.cols);
    this.page();
    try {
      const answer = await this.events.wants(this.rows, this.cols);
      if (this.content !== content || !answer) return;
      this.weights = answer;
      this.trouble = "";
    } catch (error) {
      if (this.content !== content) return;
      this.weights = null;
      this.trouble = error.message;
    }
    this.paint();
  }

  /** Have a query among the words that are shown. */
  reveal(row) {
    if (row >= this.rows[0] && row < this.rows[1]) return;
    const near = (length) => Math.max(0, Math.min(length - MOST_WORDS, row - MOST_WORDS / 2));
    this.first = { rows: near(this.content.shape[0]), cols: near(this.content.shape[1]) };
    this.show(this.content);
  }

  page() {
    this.pager.replaceChildren();
    for (const [axis, name] of [
      ["rows", "Queries"],
      ["cols", "Keys"],
    ]) {
      const length = this.content.shape[axis === "rows" ? 0 : 1],
        [first, last] = this[axis];
      if (length <= MOST_WORDS) continue;
      const go = (by) => () => {
        this.first[axis] = Math.max(0, Math.min(length - MOST_WORDS, first + by));
        this.show(this.content);
      };
      this.pager.append(
        make("span", { class: "jm-soft", text: name }),
        iconButton("left", `Earlier ${name.toLowerCase()}`, go(-MOST_WORDS / 2)),
        make("span", { class: "jm-number", text: `${count(first)} to ${count(last - 1)} of ${count(length)}` }),
        iconButton("right", `Later ${name.toLowerCase()}`, go(MOST_WORDS / 2)),
      );
    }
  }

  at(row, col) {
    return this.weights.values[(row - this.rows[0]) * this.weights.cols + (col - this.cols[0])];
  }

  paint() {
    if (!this.content || !this.stage.clientWidth) return;
    this.said.textContent = told(this.least);
    if (!this.weights) {
      this.stage.replaceChildren(make("p", { class: "jm-note", text: this.trouble || "One moment …" }));
      return;
    }
    if (this.weights.rows !== this.rows[1] - this.rows[0] || this.weights.cols !== this.cols[1] - this.cols[0]) return;
    const { inks, font } = this.look;
    this.ruler.use(font);
    const names = (texts, [first, last]) =>
      Array.from({ length: last - first }, (_, n) => (texts ? shown(texts[first + n]) : count(first + n)));
    const whole = (texts, place) => (texts ? shown(texts[place], 200) : count(place));
    const from = names(this.content.rows, this.rows),
      to = names(this.content.cols, this.cols);
    const wide = this.stage.clientWidth;
    const run = (words) => words.reduce((sum, text) => sum + Math.max(24, this.ruler.width(text) + 22), 0);
    const flat = Math.max(run(from), run(to)) <= wide - 40;
    const places = flat ? this.alongRows(from, to, wide) : this.alongColumns(from, to, wide);
    const arcs = draw("g", { fill: "none", "stroke-linecap": "round" });
    const words = draw("g", { class: "jm-words" });
    this.lines = [];
    for (const [row, col, weight] of this.strongest()) {
      const a = places.from[row - this.rows[0]],
        b = places.to[col - this.cols[0]];
      const line = draw("path", {
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
        const word = this.word(side, this[side][0] + n, text, list[n], flat);
        word.append(draw("title", { text: whole(this.content[side], this[side][0] + n) }));
        words.append(word);
      });
    }
    const headings = ["Queries", "Keys"].map((text, n) =>
      draw("text", { ...places.heads[n], class: "jm-heading", fill: inks.soft, text }),
    );
    const label = `Arcs from ${from.length} queries to ${to.length} keys`;
    this.svg = draw(
      "svg",
      {
        width: places.width,
        height: places.height,
        viewBox: `0 0 ${places.width} ${places.height}`,
        role: "img",
        aria: { label },
        "font-family": this.look.family,
        "font-size": "13",
      },
      [...headings, arcs, words],
    );
    this.stage.replaceChildren(this.svg);
    this.light();
  }

  strongest() {
    const found = [],
      { values, cols } = this.weights,
      least = Math.max(this.least, 1e-9);
    for (let n = 0; n < values.length; n += 1) {
      if (values[n] >= least) found.push([this.rows[0] + Math.floor(n / cols), this.cols[0] + (n % cols), values[n]]);
    }
    found.sort((a, b) => b[2] - a[2]);
    return found.slice(0, MOST_ARCS).reverse(); // the strongest on top
  }

  alongRows(from, to, width) {
    const lay = (words, y) => {
      const sizes = words.map((text) => Math.max(24, this.ruler.width(text) + 22));
      let x = (width - sizes.reduce((sum, size) => sum + size, 0)) / 2;
      return sizes.map((size) => {
        x += size;
        return { x: x - size / 2, y, size };
      });
    };
    const tall = Math.max(150, Math.min(420, this.stage.clientHeight - 110)),
      top = 44,
      bottom = top + tall;
    return {
      from: lay(from, top),
      to: lay(to, bottom),
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
    const lay = (words, x) => words.map((_, n) => ({ x, y: top + n * LINE, size: most }));
    return {
      from: lay(from, left),
      to: lay(to, right),
      width,
      height: top + LINE * Math.max(from.length, to.length),
      heads: [
        { x: left - 8, y: 14, "text-anchor": "end" },
        { x: right + 8, y: 14, "text-anchor": "start" },
      ],
      curve: (a, b) => `M${a.x + 4} ${a.y}C${a.x + gap * 0.5} ${a.y} ${b.x - gap * 0.5} ${b.y} ${b.x - 4} ${b.y}`,
    };
  }

  word(side, place, text, { x, y, size }, flat) {
    const { inks } = this.look,
      query = side === "rows";
    const short = this.ruler.fit(text, flat ? size : size - 12),
      wide = this.ruler.width(short) + 12;
    const left = flat ? x - wide / 2 : query ? x - wide - 2 : x + 2;
    const box = draw("rect", { x: left, y: y - 11, width: wide, height: 22, rx: 5, fill: "transparent" });
    // text-anchor would turn with the direction of the text: the middle is the middle in both.
    const label = draw("text", {
      x: left + wide / 2,
      y: y + 4.5,
      "text-anchor": "middle",
      fill: inks.ink,
      direction: isRightToLeft(short) ? "rtl" : null,
      text: short,
    });
    const group = draw(
      "g",
      {
        class: "jm-word",
        data: { side, place },
        onpointerenter: () => this.point(query ? { row: place, col: null } : { row: null, col: place }),
        onpointerleave: () => this.point(null),
        onclick: () => query && this.events.pin(place),
      },
      [box, label],
    );
    this.words[side].push({ place, box, label });
    return group;
  }

  point(place) {
    this.hover = place;
    this.light();
    this.events.hover(null);
  }

  // What is hovered, or else pinned, stands out; the other end of each of its arcs is tinted by the weight.
  light() {
    if (!this.words || !this.weights) return;
    const { inks, list } = this.look,
      curve = this.look.curveAt(1);
    const chosen = this.hover ?? (this.pinned === null ? null : { row: this.pinned, col: null });
    for (const { line, row, col, weight } of this.lines) {
      const on = !chosen || row === chosen.row || col === chosen.col;
      line.setAttribute("stroke-opacity", on ? Math.min(1, 0.12 + 0.88 * weight + (chosen ? 0.12 : 0)) : 0.035);
      line.setAttribute("stroke", chosen && on && !this.hover ? inks.pin : inks.accent);
    }
    for (const side of ["rows", "cols"]) {
      for (const { place, box, label } of this.words[side]) {
        const self = chosen && (side === "rows" ? chosen.row : chosen.col) === place;
        const weight = chosen && this.other(side, place, chosen);
        const tint = weight > 0 ? list[Math.round(curve.to(weight) * 255)] : null;
        box.setAttribute("fill", self ? (this.hover ? inks.accent : inks.pin) : tint ? `rgb(${tint})` : "transparent");
        label.setAttribute("fill", self ? inks.page : tint ? this.look.inkOn(tint) : inks.ink);
      }
    }
  }

  other(side, place, chosen) {
    const known = (value, [first, last]) => value !== null && value >= first && value < last;
    if (side === "cols" && known(chosen.row, this.rows)) return this.at(chosen.row, place);
    if (side === "rows" && known(chosen.col, this.cols)) return this.at(place, chosen.col);
    return null;
  }

  refresh() {
    this.paint();
  }

  save() {
    const copy = this.svg.cloneNode(true);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.prepend(draw("rect", { width: "100%", height: "100%", fill: this.look.inks.page }));
    return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
  }

  close() {
    this.watch.disconnect();
  }
}
