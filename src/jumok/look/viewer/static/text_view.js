// The text, each token shaded by the weight it receives from all queries, or from the pinned one.

import { formatCount, createCurve, formatWeight } from "./colours.js";
import { sizeCanvas, iconButton, createElement } from "./dom.js";
import { joinTokens, truncateText } from "./token_text.js";

const PAGE_SIZE = 1200; // tokens per page

export class TextView {
  /** `events`: received() and row(n) return promises of the weights on all keys; pin(row or null); tooltip(token or null, event). */
  constructor({ appearance, events }) {
    Object.assign(this, { appearance, events });
    this.first = { rows: 0, cols: 0 };
    this.pinned = null;
    this.heading = createElement("p", { class: "jm-lead" });
    this.strip = createElement("canvas", { class: "jm-strip", onclick: (event) => this.moveTo(event) });
    this.queries = createElement("div", { class: "jm-text", role: "group", aria: { label: "Queries" } });
    this.keys = createElement("div", { class: "jm-text", role: "group", aria: { label: "Keys" } });
    this.pages = createElement("div", { class: "jm-pager" });
    this.queryBlock = createElement("section", {}, [createElement("h3", { class: "jm-heading", text: "Queries" }), this.queries]);
    this.keyHeading = createElement("h3", { class: "jm-heading", text: "Keys" });
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
    const { content } = this;
    this.heading.replaceChildren();
    if (!this.values) {
      this.heading.append(this.errorMessage || "Loading …");
      return;
    }
    let most = 0;
    for (const value of this.values) most = Math.max(most, value);
    // From half of the uniform weight: a text without high weights stays pale.
    this.curve = createCurve("log", 0.5 / this.values.length, Math.max(4 / this.values.length, most));
    if (this.pinned === null)
      this.heading.append(
        "Each token is shaded by the mean weight it receives over all queries. ",
        createElement("span", { class: "jm-muted", text: `Maximum: ${formatWeight(most)}` }),
      );
    else {
      const name = content.rows ? truncateText(content.rows[this.pinned], 40) : formatCount(this.pinned);
      this.heading.append(
        "Attention of ",
        createElement("bdi", { dir: "auto", class: "jm-pinned", text: name }),
        ". ",
        createElement("span", { class: "jm-muted", text: `Maximum: ${formatWeight(most)}` }),
      );
    }
    this.queryBlock.hidden = this.isSelf;
    this.keyHeading.hidden = this.isSelf;
    if (!this.isSelf) this.fillText(this.queries, "rows");
    this.fillText(this.keys, "cols");
    this.paintStrip();
  }

  fillText(box, axis) {
    const length = this.content.shape[axis === "rows" ? 0 : 1],
      texts = this.content[axis];
    const first = Math.min(this.first[axis], Math.max(0, length - 1)),
      last = Math.min(length, first + PAGE_SIZE);
    const tokens = Array.from({ length: last - first }, (_, n) => (texts ? texts[first + n] : formatCount(first + n)));
    const parts = [];
    joinTokens(tokens).forEach(({ blank, text }, n) => {
      const place = first + n,
        canPin = axis === "rows" || this.isSelf;
      if (blank && parts.length) parts.push(" ");
      const value = axis === "cols" ? this.values[place] : null;
      const token = createElement(canPin ? "button" : "span", {
        class: "jm-token",
        dir: "auto",
        text: truncateText(text, 200),
        type: canPin ? "button" : null,
        tabindex: canPin ? "-1" : null,
        data: { place, axis },
        onpointerenter: (event) => this.events.tooltip({ token: tokens[n], place, value }, event),
        onpointerleave: () => this.events.tooltip(null),
        onclick: canPin ? () => this.events.pin(place) : null,
      });
      if (value !== null) {
        const tint = this.appearance.tints[Math.round(this.curve.to(value) * 255)];
        token.style.backgroundColor = `rgb(${tint})`;
        token.style.color = this.appearance.inkOn(tint);
      }
      if (canPin && place === this.pinned) token.classList.add("jm-is-pinned");
      parts.push(token);
      if (/\n/.test(tokens[n])) parts.push(createElement("br"));
    });
    box.replaceChildren(...parts);
    if (axis === "cols") this.updatePager(first, last, length);
  }

  updatePager(first, last, length) {
    this.pages.replaceChildren();
    if (length <= PAGE_SIZE) return;
    const move = (by) => () => {
      const next = Math.max(0, Math.min(length - 1, first + by));
      this.first = this.isSelf ? { rows: next, cols: next } : { ...this.first, cols: next };
      this.paint();
    };
    this.pages.append(
      iconButton("left", "Previous tokens", move(-PAGE_SIZE)),
      createElement("span", { class: "jm-number", text: `${formatCount(first)} to ${formatCount(last - 1)} of ${formatCount(length)}` }),
      iconButton("right", "Next tokens", move(PAGE_SIZE)),
    );
  }

  // All of a long text in one line: the highest weight of each section.
  paintStrip() {
    const width = this.strip.parentElement.clientWidth,
      height = 26;
    this.strip.hidden = !this.values || this.values.length <= 200;
    if (this.strip.hidden || width < 20) return;
    const context = sizeCanvas(this.strip, width, height),
      { length } = this.values;
    for (let x = 0; x < width; x += 1) {
      const from = Math.floor((x / width) * length),
        to = Math.max(from + 1, Math.floor(((x + 1) / width) * length));
      let most = 0;
      for (let n = from; n < to; n += 1) most = Math.max(most, this.values[n]);
      context.fillStyle = `rgb(${this.appearance.tints[Math.round(this.curve.to(most) * 255)]})`;
      context.fillRect(x, 0, 1, height);
    }
    if (length > PAGE_SIZE) {
      context.strokeStyle = this.appearance.inks.pin;
      context.lineWidth = 2;
      context.strokeRect((this.first.cols / length) * width + 1, 1, Math.max(4, (PAGE_SIZE / length) * width), height - 2);
    }
  }

  moveTo(event) {
    const { length } = this.values,
      fraction = event.offsetX / this.strip.clientWidth;
    const first = Math.max(0, Math.min(length - 1, Math.round(fraction * length - PAGE_SIZE / 2)));
    this.first = this.isSelf ? { rows: first, cols: first } : { ...this.first, cols: first };
    this.paint();
  }

  refresh() {
    this.paint();
  }

  close() {
    this.resizeObserver.disconnect();
  }
}
