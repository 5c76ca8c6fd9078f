// The text, each token shaded by the weight it receives from all queries, or from the pinned one.

import { createCurve, findSectionMaxima, formatCount, formatWeight } from "./colours.js";
import { createPager } from "./controls.js";
import { clamp, createElement, createWord, sizeCanvas } from "./dom.js";
import { describeOutput, isSpecialToken, joinTokens, truncateText } from "./token_text.js";
import { View } from "./view.js";

const PAGE_SIZE = 1200; // tokens per page

export class TextView extends View {
  static title = "Text";
  static hasPanel = true;
  static hasScale = false;

  /** `events`: received() and row(n) return promises of weights on all keys; pin(row); tooltip(lines or null, x, y). */
  constructor(shared) {
    super(shared);
    this.first = { rows: 0, cols: 0 };
    this.hovered = null; // the query under the pointer
    this.heading = createElement("p", { class: "jm-lead" });
    this.strip = createElement("canvas", { class: "jm-strip", onclick: (event) => this.moveTo(event) });
    this.queries = createElement("div", { class: "jm-text", role: "group", aria: { label: "Queries" } });
    this.keys = createElement("div", { class: "jm-text", role: "group", aria: { label: "Keys" } });
    this.pages = createElement("div", { class: "jm-pager" });
    const createHeading = (text) => createElement("h3", { class: "jm-heading", text });
    this.queryBlock = createElement("section", {}, [createHeading("Queries"), this.queries]);
    this.keyHeading = createHeading("Keys");
    this.el = createElement("div", { class: "jm-text-view" }, [
      createElement("div", { class: "jm-bar" }, [this.heading, this.pages]),
      this.strip,
      this.queryBlock,
      createElement("section", {}, [this.keyHeading, this.keys]),
    ]);
    this.resizeObserver = new ResizeObserver(() => this.paintStrip());
    this.resizeObserver.observe(this.strip.parentElement);
  }

  async show(content) {
    if (!this.content || this.content.cols !== content.cols) this.first = { rows: 0, cols: 0 };
    this.content = content;
    const pinned = this.pinned;
    try {
      const answer = pinned === null ? await this.events.received() : await this.events.row(pinned);
      if (this.content !== content || this.pinned !== pinned || !answer) return;
      this.values = answer.values;
      this.errorMessage = "";
    } catch (error) {
      if (this.content !== content) return;
      this.values = null;
      this.errorMessage = error.message;
    }
    this.paint();
  }

  get isSelf() {
    return this.content.rows === this.content.cols;
  }

  paint() {
    if (!this.content) return;
    this.heading.replaceChildren();
    if (!this.values) {
      this.heading.append(this.errorMessage || "Loading …");
      return;
    }
    this.hovered = null;
    this.describe(this.pinned, this.values);
    this.queryBlock.hidden = this.isSelf;
    this.keyHeading.hidden = this.isSelf;
    if (!this.isSelf) this.fillText(this.queries, "rows");
    this.fillText(this.keys, "cols");
    this.paintStrip();
  }

  /** Set the scale and the heading for the weights of a query, or of all queries (null). */
  describe(row, values) {
    const { rows } = this.content,
      text = `Maximum: ${formatWeight(findMaximum(values))}`,
      note = createElement("span", { class: "jm-muted", text });
    this.curve = createShading(values);
    if (row === null)
      this.heading.replaceChildren("Each token is shaded by the mean weight it receives over all queries. ", note);
    else {
      const name = rows ? truncateText(rows[row], 40) : formatCount(row);
      this.heading.replaceChildren("Attention of ", createWord(name, { class: "jm-pinned" }), ". ", note);
    }
  }

  fillText(box, axis) {
    const length = this.content.shape[axis === "rows" ? 0 : 1],
      { producedRows, spans } = this.content,
      texts = axis === "rows" ? (producedRows ?? this.content.rows) : this.content.cols,
      turns = new Map(spans[axis].map(([start, , name]) => [start, name]));
    const first = Math.min(this.first[axis], length - 1),
      last = Math.min(length, first + PAGE_SIZE);
    const tokens = Array.from({ length: last - first }, (_, n) => (texts ? texts[first + n] : formatCount(first + n)));
    const parts = [];
    joinTokens(tokens).forEach(({ blank, text }, n) => {
      const span = this.imageSpan(axis, first + n);
      if (span) {
        if (first + n === Math.max(first, span.start)) parts.push(" ", this.createImageToken(span, axis), " ");
        return;
      }
      const place = first + n,
        canPin = axis === "rows" || this.isSelf;
      if (blank && parts.length) parts.push(" ");
      if (turns.has(place)) parts.push(createElement("span", { class: "jm-turn", text: turns.get(place) }));
      const value = axis === "cols" ? this.values[place] : null;
      const token = createElement(canPin ? "button" : "span", {
        class: "jm-token",
        dir: "auto",
        text: truncateText(text, 200),
        type: canPin ? "button" : null,
        tabindex: canPin ? "-1" : null,
        data: { place, axis },
        onpointerenter: ({ clientX, clientY }) =>
          this.handleHover(canPin ? place : null, this.describeToken(tokens[n], place, value, canPin), clientX, clientY),
        onpointerleave: () => this.handleHover(null, null),
        onclick: canPin ? () => this.events.pin(place) : null,
      });
      if (value !== null) this.appearance.shade(token, this.curve.to(value));
      if (place >= this.content.generated[axis]) token.classList.add("jm-generated");
      if (isSpecialToken(text)) token.classList.add("jm-special");
      if (canPin && place === this.pinned) token.classList.add("jm-is-pinned");
      parts.push(token);
      if (/\n/.test(tokens[n])) parts.push(createElement("br"));
    });
    box.replaceChildren(...parts);
    if (axis === "cols") this.updatePager(first, last, length);
  }

  // The span of the patches of an image that a token belongs to, between the tokens of a text.
  imageSpan(axis, place) {
    const { item, layer } = this.content,
      placement = item.image_layers?.[item.layers[layer].image_layer];
    if (!placement?.has_text || (axis === "rows" && !placement.has_patch_queries)) return null;
    const [image, start, stop] = placement.spans.find(([, from, to]) => place >= from && place < to) ?? [];
    return start === undefined ? null : { image, start, stop };
  }

  // All patches of an image as one item, with their total weight.
  createImageToken({ image, start, stop }, axis) {
    const text = `image ${image + 1}: ${formatCount(stop - start)} tokens`,
      total = () => this.values.subarray(start, stop).reduce((sum, weight) => sum + weight, 0);
    const element = createElement("span", { class: "jm-token jm-special jm-image-token", text, data: { start, stop } });
    if (axis === "cols") {
      this.appearance.shade(element, this.curve.to(total()));
      element.title = `total weight: ${formatWeight(total(), 4)}`;
    }
    return element;
  }

  describeToken(token, place, value, isQuery) {
    const output = isQuery && !this.content.producedRows ? describeOutput(this.content, place) : null;
    return [
      ...describeToken(token, place, value, this.pinned),
      output && createElement("div", { class: "jm-muted", text: output }),
    ];
  }

  /** Show what the query under the pointer attends to, unless another one is pinned. */
  async handleHover(row, lines, x, y) {
    this.events.tooltip(lines, x, y);
    if (this.pinned !== null || this.hovered === row) return;
    this.hovered = row;
    const { content } = this,
      answer = row === null ? null : await this.events.row(row).catch(() => null);
    if (this.content !== content || this.pinned !== null || this.hovered !== row) return;
    const values = answer?.values ?? this.values;
    if (!values) return;
    this.describe(row, values);
    for (const key of this.keys.querySelectorAll(".jm-token")) {
      const { place, start, stop } = key.dataset,
        total = start && values.subarray(start, stop).reduce((sum, weight) => sum + weight, 0);
      this.appearance.shade(key, this.curve.to(start ? total : values[place]));
      if (start) key.title = `total weight: ${formatWeight(total, 4)}`;
    }
    this.events.changed();
  }

  updatePager(first, last, length) {
    this.pages.replaceChildren();
    if (length <= PAGE_SIZE) return;
    const move = (by) => this.openPage(clamp(first + by * PAGE_SIZE, 0, length - 1));
    this.pages.append(...createPager("tokens", [first, last], length, move));
  }

  /** Show the tokens from a position on. */
  openPage(first) {
    this.first = this.isSelf ? { rows: first, cols: first } : { ...this.first, cols: first };
    this.paint();
  }

  legend() {
    const name = (this.pinned ?? this.hovered) === null ? "mean weight received" : "attention weight",
      title = `${name}${this.appearance.weightNote} · scale of this text`;
    return this.curve ? { curve: this.curve, list: this.appearance.tints, title } : null;
  }

  // All of a long text in one line: the highest weight of each section.
  paintStrip() {
    const width = this.strip.parentElement.clientWidth,
      height = 26;
    this.strip.hidden = !this.values || this.values.length <= 200;
    if (this.strip.hidden || width < 20) return;
    const context = sizeCanvas(this.strip, width, height),
      { length } = this.values;
    findSectionMaxima(this.values, width).forEach((weight, x) => {
      context.fillStyle = `rgb(${this.appearance.tints[Math.round(this.curve.to(weight) * 255)]})`;
      context.fillRect(x, 0, 1, height);
    });
    if (length > PAGE_SIZE) {
      context.strokeStyle = this.appearance.inks.pin;
      context.lineWidth = 2;
      const wide = Math.max(4, (PAGE_SIZE / length) * width);
      context.strokeRect((this.first.cols / length) * width + 1, 1, wide, height - 2);
    }
  }

  moveTo(event) {
    const { length } = this.values,
      fraction = event.offsetX / this.strip.clientWidth;
    this.openPage(clamp(Math.round(fraction * length - PAGE_SIZE / 2), 0, length - 1));
  }

  refresh() {
    this.paint();
  }

  close() {
    this.resizeObserver.disconnect();
  }
}

function findMaximum(values) {
  return values.reduce((most, value) => Math.max(most, value), 0);
}

// From half of the uniform weight: a text without high weights stays pale.
function createShading(values) {
  return createCurve("log", 0.5 / values.length, Math.max(4 / values.length, findMaximum(values)));
}

function describeToken(token, place, value, pinned) {
  const weight = value === null ? null : createElement("div", { class: "jm-weight", text: formatWeight(value, 4) });
  return [
    createElement("div", { class: "jm-pair" }, [
      createWord(truncateText(token, 60)),
      createElement("span", { class: "jm-muted", text: `  ${formatCount(place)}` }),
    ]),
    weight,
    weight && pinned === null ? createElement("div", { class: "jm-muted", text: "mean weight received" }) : null,
  ];
}
