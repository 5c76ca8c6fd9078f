// A text of any number of tokens that scrolls: only the part around the visible one is in the page.

import { clamp, countWhile, createElement } from "./dom.js";
import { isSpecialToken, joinTokens, truncateText } from "./token_text.js";

const MIN_SECTION = 120, // tokens of a section, which ends with the first line break after them …
  MAX_SECTION = 240; // … or here
const MARGIN = 600; // pixels above and below the visible part that are in the page too
const TOKEN_HEIGHT = 1.9; // estimated pixels of the height of a section per token, before one is measured

export class TokenFlow {
  /** `events`: point(token or null, event), select(token), scrolled(). */
  constructor({ appearance, label, events }) {
    Object.assign(this, { appearance, events });
    this.el = createElement("div", {
      class: "jm-flow",
      role: "group",
      tabindex: "0",
      aria: { label },
      onscroll: () => events.scrolled(),
      onpointerover: (event) => events.point(tokenOf(event), event),
      onpointerleave: (event) => events.point(null, event),
      onclick: (event) => {
        const token = tokenOf(event);
        if (token !== null) events.select(token);
      },
    });
    this.sections = [];
    this.marked = { pointed: null, pinned: null }; // [first, end) of tokens
    this.visibility = new IntersectionObserver((changes) => this.update(changes), {
      root: this.el,
      rootMargin: `${MARGIN}px 0px`,
    });
  }

  /**
   * Show a text; `firstGenerated` is Infinity if the model did not write any of it. `spans` are its turns, as
   * [start, stop, name].
   */
  show(tokens, firstGenerated, spans = []) {
    if (tokens === this.tokens) return;
    const turns = new Map(spans.map(([start, , name]) => [start, name]));
    Object.assign(this, { tokens, firstGenerated, turns, words: joinTokens(tokens), values: null });
    this.visibility.disconnect();
    this.sections = divide(tokens).map(([first, end], number) => ({
      first,
      end,
      spans: null,
      el: createElement("div", { class: "jm-flow-section", data: { number } }),
    }));
    this.heightPerToken = TOKEN_HEIGHT;
    for (const section of this.sections) this.reserve(section);
    this.el.replaceChildren(...this.sections.map(({ el }) => el));
    this.el.scrollTop = 0;
    for (const { el } of this.sections) this.visibility.observe(el);
  }

  update(changes) {
    for (const { target, isIntersecting } of changes) {
      const section = this.sections[target.dataset.number];
      if (isIntersecting) this.fill(section);
      else this.empty(section);
    }
    this.events.scrolled();
  }

  fill(section) {
    if (section.spans) return;
    const parts = [];
    section.spans = [];
    for (let n = section.first; n < section.end; n += 1) {
      const { blank, text } = this.words[n];
      if (blank && parts.length) parts.push(" ");
      if (this.turns.has(n)) parts.push(createElement("span", { class: "jm-turn", text: this.turns.get(n) }));
      const span = createElement("span", { class: "jm-token", dir: "auto", text: truncateText(text, 80), data: { n } });
      if (n >= this.firstGenerated) span.classList.add("jm-generated");
      if (isSpecialToken(this.tokens[n])) span.classList.add("jm-special");
      section.spans.push(span);
      parts.push(span);
      if (/[\nĊ]/.test(this.tokens[n]) && n < section.end - 1) parts.push(createElement("br"));
    }
    section.el.replaceChildren(...parts);
    section.el.style.height = "";
    this.style(section);
  }

  // A section that is not in the page keeps its height.
  empty(section) {
    if (!section.spans) return;
    const height = section.el.offsetHeight;
    if (height) this.heightPerToken = 0.7 * this.heightPerToken + (0.3 * height) / section.spans.length;
    section.spans = null;
    section.el.replaceChildren();
    section.el.style.height = `${height}px`;
  }

  reserve(section) {
    section.el.style.height = `${Math.round((section.end - section.first) * this.heightPerToken)}px`;
  }

  /** Shade the tokens by their values on a curve; null: not at all. */
  shade(values, curve) {
    Object.assign(this, { values, curve });
    this.refresh();
  }

  /** Mark tokens [first, end): those under the "pointed" cell of the map, or the "pinned" one. Null: none. */
  mark(name, range) {
    if (`${this.marked[name]}` === `${range}`) return;
    this.marked[name] = range;
    this.refresh();
  }

  refresh() {
    for (const section of this.sections) if (section.spans) this.style(section);
  }

  style({ first, spans }) {
    const within = (range, n) => range !== null && n >= range[0] && n < range[1];
    spans.forEach((span, k) => {
      this.appearance.shade(span, this.values ? this.curve.to(this.values[first + k]) : 0, 4);
      span.classList.toggle("jm-is-pointed", within(this.marked.pointed, first + k));
      span.classList.toggle("jm-is-pinned", within(this.marked.pinned, first + k));
    });
  }

  /** Scroll to a token, unless it is visible. */
  reveal(token) {
    if (!this.sections.length || !this.el.clientHeight) return;
    const section = this.sections[countWhile(this.sections.length, (n) => this.sections[n].end <= token)];
    const neighbour = this.sections[section.el.dataset.number - 1];
    if (neighbour) this.fill(neighbour);
    this.fill(section);
    const box = this.el.getBoundingClientRect(),
      { top, bottom } = section.spans[token - section.first].getBoundingClientRect();
    if (top < box.top || bottom > box.bottom) this.el.scrollTop += top - box.top - box.height / 3;
  }

  /** Scroll to a part of the text, 0 to 1. */
  seek(part) {
    this.reveal(clamp(Math.floor(part * this.tokens.length), 0, this.tokens.length - 1));
  }

  /** The first visible token, and the one after the last. */
  visibleRange() {
    const { scrollTop, clientHeight } = this.el,
      at = (y) => {
        const k = Math.min(countWhile(this.sections.length, (n) => offsetEnd(this.sections[n]) <= y), this.sections.length - 1),
          { el, first, end } = this.sections[k];
        return first + clamp((y - el.offsetTop) / Math.max(1, el.offsetHeight), 0, 1) * (end - first);
      };
    return this.sections.length ? [at(scrollTop), at(scrollTop + clientHeight)] : [0, 0];
  }

  close() {
    this.visibility.disconnect();
  }
}

const offsetEnd = ({ el }) => el.offsetTop + el.offsetHeight;

function tokenOf({ target }) {
  const n = target.dataset?.n;
  return n === undefined ? null : Number(n);
}

// The sections of a text, as [first, end).
function divide(tokens) {
  const sections = [];
  for (let first = 0; first < tokens.length; ) {
    let end = Math.min(first + MIN_SECTION, tokens.length);
    while (end < tokens.length && end < first + MAX_SECTION && !/[\nĊ]/.test(tokens[end - 1])) end += 1;
    sections.push([first, end]);
    first = end;
  }
  return sections;
}
