// The text itself, each token tinted: by the weight it receives from all queries, or from the one that is pinned.

import { count, curveOf, told } from "./colours.js";
import { canvasOf, iconButton, make } from "./dom.js";
import { joined, shown } from "./text.js";

const A_PAGE = 1200; // tokens at once

export class ReadingView {
  /** `events`: received() and row(n), promises of the weights on all keys; pin(row or null); tell(text or null, event). */
  constructor({ look, events }) {
    Object.assign(this, { look, events });
    this.first = { rows: 0, cols: 0 };
    this.pinned = null;
    this.heading = make("p", { class: "jm-lead" });
    this.strip = make("canvas", { class: "jm-strip", onclick: (event) => this.jump(event) });
    this.queries = make("div", { class: "jm-text", role: "group", aria: { label: "Queries" } });
    this.keys = make("div", { class: "jm-text", role: "group", aria: { label: "Keys" } });
    this.pages = make("div", { class: "jm-pager" });
    this.queryBlock = make("section", {}, [make("h3", { class: "jm-heading", text: "Queries" }), this.queries]);
    this.keyHeading = make("h3", { class: "jm-heading", text: "Keys" });
    this.el = make("div", { class: "jm-reading" }, [
      make("div", { class: "jm-bar" }, [this.heading, this.pages]),
      this.strip,
      this.queryBlock,
      make("section", {}, [this.keyHeading, this.keys]),
    ]);
    this.watch = new ResizeObserver(() => this.paintStrip());
    this.watch.observe(this.strip.parentElement);
  }

  async show(content) {
    if (!this.content || this.content.cols !== content.cols) this.first = { rows: 0, cols: 0 };
    this.content = content;
    const pinned = this.pinned;
    try {
      const answer = pinned === null ? await this.events.received() : await this.events.row(pinned);
      if (this.content !== content || this.pinned !== pinned || !answer) return;
      this.values = answer.values;
      this.trouble = "";
    } catch (error) {
      if (this.content !== content) return;
      this.values = null;
      this.trouble = error.message;
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
      this.heading.append(this.trouble || "One moment …");
      return;
    }
    let most = 0;
    for (const value of this.values) most = Math.max(most, value);
    // From half of what each would get if all got the same: a text without a favourite stays pale.
    this.curve = curveOf("log", 0.5 / this.values.length, Math.max(4 / this.values.length, most));
    if (this.pinned === null)
      this.heading.append(
        "Tinted by the weight that each token receives, the mean over all queries. ",
        make("span", { class: "jm-soft", text: `Most: ${told(most)}` }),
      );
    else {
      const name = content.rows ? shown(content.rows[this.pinned], 40) : count(this.pinned);
      this.heading.append(
        "Where ",
        make("bdi", { dir: "auto", class: "jm-pinned", text: name }),
        " looks. ",
        make("span", { class: "jm-soft", text: `Most: ${told(most)}` }),
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
      last = Math.min(length, first + A_PAGE);
    const tokens = Array.from({ length: last - first }, (_, n) => (texts ? texts[first + n] : count(first + n)));
    const parts = [];
    joined(tokens).forEach(({ blank, text }, n) => {
      const place = first + n,
        canPin = axis === "rows" || this.isSelf;
      if (blank && parts.length) parts.push(" ");
      const value = axis === "cols" ? this.values[place] : null;
      const token = make(canPin ? "button" : "span", {
        class: "jm-token",
        dir: "auto",
        text: shown(text, 200),
        type: canPin ? "button" : null,
        tabindex: canPin ? "-1" : null,
        data: { place, axis },
        onpointerenter: (event) => this.events.tell({ token: tokens[n], place, value }, event),
        onpointerleave: () => this.events.tell(null),
        onclick: canPin ? () => this.events.pin(place) : null,
      });
      if (value !== null) {
        const tint = this.look.tints[Math.round(this.curve.to(value) * 255)];
        token.style.backgroundColor = `rgb(${tint})`;
        token.style.color = this.look.inkOn(tint);
      }
      if (canPin && place === this.pinned) token.classList.add("jm-is-pinned");
      parts.push(token);
      if (/\n/.test(tokens[n])) parts.push(make("br"));
    });
    box.replaceChildren(...parts);
    if (axis === "cols") this.page(first, last, length);
  }

  page(first, last, length) {
    this.pages.replaceChildren();
    if (length <= A_PAGE) return;
    const go = (by) => () => {
      const next = Math.max(0, Math.min(length - 1, first + by));
      this.first = this.isSelf ? { rows: next, cols: next } : { ...this.first, cols: next };
      this.paint();
    };
    this.pages.append(
      iconButton("left", "Earlier tokens", go(-A_PAGE)),
      make("span", { class: "jm-number", text: `${count(first)} to ${count(last - 1)} of ${count(length)}` }),
      iconButton("right", "Later tokens", go(A_PAGE)),
    );
  }

  // All of a long text in one line: the most that a token of each stretch gets.
  paintStrip() {
    const wide = this.strip.parentElement.clientWidth,
      tall = 26;
    this.strip.hidden = !this.values || this.values.length <= 200;
    if (this.strip.hidden || wide < 20) return;
    const context = canvasOf(this.strip, wide, tall),
      { length } = this.values;
    for (let x = 0; x < wide; x += 1) {
      const from = Math.floor((x / wide) * length),
        to = Math.max(from + 1, Math.floor(((x + 1) / wide) * length));
      let most = 0;
      for (let n = from; n < to; n += 1) most = Math.max(most, this.values[n]);
      context.fillStyle = `rgb(${this.look.tints[Math.round(this.curve.to(most) * 255)]})`;
      context.fillRect(x, 0, 1, tall);
    }
    if (length > A_PAGE) {
      context.strokeStyle = this.look.inks.pin;
      context.lineWidth = 2;
      context.strokeRect((this.first.cols / length) * wide + 1, 1, Math.max(4, (A_PAGE / length) * wide), tall - 2);
    }
  }

  jump(event) {
    const { length } = this.values,
      part = event.offsetX / this.strip.clientWidth;
    const first = Math.max(0, Math.min(length - 1, Math.round(part * length - A_PAGE / 2)));
    this.first = this.isSelf ? { rows: first, cols: first } : { ...this.first, cols: first };
    this.paint();
  }

  refresh() {
    this.paint();
  }

  close() {
    this.watch.disconnect();
  }
}
