// A caption as a line of words that can be hovered, selected by keys and pinned.

import { clamp, createElement } from "./dom.js";
import { isRightToLeft } from "./token_text.js";

export class Caption {
  /** `events`: pointer(word or null, event), moveTo(word or null) by keys, pin(word). */
  constructor(events, label = "Words of the caption") {
    this.events = events;
    this.buttons = [];
    this.el = createElement("div", { class: "jm-text jm-caption", role: "group", aria: { label } });
  }

  /** `words`: texts, or { name, blank, isSpecial, isGenerated }; `blank` is whether a blank precedes the word. */
  fill(words, label = null) {
    const { pointer, moveTo, pin } = this.events,
      entries = words.map((word) => (typeof word === "string" ? { name: word, blank: true } : word));
    if (label !== null) this.el.setAttribute("aria-label", label);
    this.isReversed = isRightToLeft(entries.map(({ name }) => name).join(" "));
    this.buttons = entries.map(({ name: text, isSpecial, isGenerated }, n) =>
      createElement("button", {
        type: "button",
        class: `jm-token${isSpecial ? " jm-special" : ""}${isGenerated ? " jm-generated" : ""}`,
        dir: "auto",
        text,
        data: { place: n, axis: "rows" },
        onpointerenter: (event) => pointer(n, event),
        onpointerleave: (event) => pointer(null, event),
        onfocus: ({ target }) => target.matches(":focus-visible") && moveTo(n),
        onblur: () => this.cursor === n && moveTo(null),
        onclick: () => pin(n),
      }),
    );
    this.el.hidden = !words.length;
    this.el.dir = this.isReversed ? "rtl" : "ltr";
    this.el.replaceChildren(...this.buttons.flatMap((button, n) => (n && entries[n].blank ? [" ", button] : [button])));
  }

  /** `shade(element, n)` shades a word. */
  highlight({ selected, pinned, cursor }, shade) {
    this.cursor = cursor;
    this.buttons.forEach((button, n) => {
      button.classList.toggle("jm-is-pinned", n === pinned);
      button.classList.toggle("jm-cursor", n === selected && n !== pinned);
      button.setAttribute("aria-pressed", `${n === pinned}`);
      button.tabIndex = n === (cursor ?? pinned ?? 0) ? 0 : -1; // one of them can be focused with Tab
      shade(button, n);
    });
  }

  focus(n) {
    this.buttons[n].focus();
  }

  /** Scroll a long caption to a word, without moving the page. */
  reveal(n) {
    const button = this.buttons[n],
      { offsetTop: top, clientHeight: height, scrollTop } = this.el;
    if (!button || this.el.scrollHeight <= height) return;
    const above = button.offsetTop - top;
    if (above < scrollTop || above + button.offsetHeight > scrollTop + height) this.el.scrollTop = above - 4;
  }

  /** The word that a key moves to from another (null: from none), or null. */
  next(key, from) {
    const last = this.buttons.length - 1,
      step = { ArrowLeft: -1, ArrowRight: 1 }[key] * (this.isReversed ? -1 : 1);
    if (last < 0) return null;
    if (key === "Home" || key === "End") return key === "Home" ? 0 : last;
    if (!step) return null;
    return from === null ? (step > 0 ? 0 : last) : clamp(from + step, 0, last);
  }
}
