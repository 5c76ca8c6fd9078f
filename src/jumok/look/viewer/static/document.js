// A document: its sentences with a bar for their weight, their words shaded. All of the text is on the page, to be
// searched and copied; words are shaded when they come near, so that a book opens as fast as a letter.

import { count, curveOf, told } from "./colours.js";
import { iconButton, make } from "./dom.js";
import { Overview } from "./overview.js";
import { Passage } from "./passage.js";
import { ofPinned, ofSentence, ofWord, verdictOf } from "./telling.js";
import { shown, written } from "./text.js";

const A_SECTION = 400; // words
const LINE_TALL = 29; // pixels of a line of text
const SHARES = { document: "within the document", sentence: "within its sentence" };

export class DocumentView {
  /** `events`: set(change of state: spot, share), tip(lines or null, x, y), say(text). */
  constructor({ look, events }) {
    Object.assign(this, { look, events });
    this.blocks = []; // the sentences
    this.near = new Set(); // sections of them that are in sight, or nearly
    this.version = 0;
    this.cursor = null; // the word that keys have gone to
    this.jumped = null; // the rank of the sentence that was jumped to
    this.verdict = make("div", { class: "jm-verdict" });
    this.shares = make("div", { class: "jm-tabs", role: "group", aria: { label: "Weights" } });
    this.jumpLabel = make("span", { class: "jm-soft jm-number" });
    this.jumps = make("div", { class: "jm-pager" }, [
      this.jumpLabel,
      iconButton("left", "The next stronger sentence (p)", () => this.jump(-1)),
      iconButton("right", "The next strongest sentence (n)", () => this.jump(1)),
    ]);
    this.passage = make("div", {
      class: "jm-passage",
      role: "region",
      tabindex: "0",
      aria: { label: "The text" },
      onpointerover: (event) => this.point(event),
      onpointerleave: () => this.events.tip(null),
      onclick: (event) => this.clicked(event),
      onscroll: () => this.scrolled(),
      onwheel: () => this.still(),
      onpointerdown: () => this.still(),
    });
    this.strip = new Overview({ look, seek: (part) => this.seek(part) });
    this.el = make("div", { class: "jm-document" }, [
      make("div", { class: "jm-bar" }, [
        this.verdict,
        make("div", { class: "jm-bar jm-ways" }, [this.shares, this.jumps]),
      ]),
      make("div", { class: "jm-paper" }, [this.passage, this.strip.el]),
    ]);
    this.watch = new ResizeObserver(() => this.paintStrip());
    this.watch.observe(this.passage);
    this.sight = new IntersectionObserver((changes) => this.came(changes), {
      root: this.passage,
      rootMargin: "300px 0px",
    });
  }

  /** `given` as in the manifest; `hop`, null for the mean; `spot`, the pinned word; `share`, in what weights are told. */
  show(given, { hop, spot, share }) {
    if (this.given !== given) this.open(given);
    const spotted = spot !== null && spot !== this.spot;
    Object.assign(this, { hop, spot, share });
    this.dress();
    this.refresh();
    if (spotted) this.reveal(spot);
  }

  // ---------------------------------------------------------------- the page

  open(given) {
    this.given = given;
    this.text = new Passage(given);
    this.cursor = this.jumped = this.here = null;
    this.sight.disconnect();
    this.near.clear();
    this.passage.classList.toggle("jm-single", this.text.sentences === 1);
    const wide = Math.min(640, (this.passage.clientWidth || 760) - 130);
    this.blocks = this.text.blocks().map((block) => this.block(block, wide));
    this.sections = sectionsOf(this.blocks);
    this.passage.replaceChildren(...this.sections.map((section) => section.el));
    this.passage.scrollTop = 0;
    this.verdict.replaceChildren(...verdictOf(this.text));
    this.verdict.hidden = !this.verdict.childElementCount;
    // What is in sight first is shaded at once, the rest once it is near.
    this.sections.slice(0, 2).forEach((section) => this.near.add(section));
    this.sections.forEach((section) => this.sight.observe(section.el));
  }

  block({ sentence, first, last }, wide) {
    const { words, before, edges } = this.text;
    const gaps = [before[first].trimStart(), ...before.slice(first + 1, last)].map(written);
    const line = make("p", { class: "jm-line", dir: "auto" });
    line.textContent = gaps.map((space, n) => space + written(words[first + n])).join("");
    const gauge = first === edges[sentence] ? make("span", { class: "jm-gauge", role: "img" }) : make("span");
    const paragraph = first > 0 && /\n\s*\n/.test(before[first]);
    const el = make("div", { class: paragraph ? "jm-sentence jm-gap" : "jm-sentence", data: { sentence } }, [
      gauge,
      line,
    ]);
    // A guess at its height, for the scroll bar, until it has been laid out.
    const letters = line.textContent.replace(/[^\u1100-\uffdc]/g, "").length + line.textContent.length;
    const tall = (paragraph ? 18 : 6) + LINE_TALL * Math.ceil((letters * 8) / wide);
    return { el, gauge, line, gaps, sentence, first, last, tall, spans: null, version: 0 };
  }

  came(changes) {
    for (const { target, isIntersecting } of changes) {
      const section = this.sections[Number(target.dataset.section)];
      if (isIntersecting) this.near.add(section);
      else this.near.delete(section);
    }
    this.shade();
  }

  /** As it is to be seen now. */
  refresh() {
    if (!this.text) return;
    this.now = this.text.at(this.hop);
    const { wish, less } = this.look;
    this.kind = wish === "auto" ? "linear" : wish; // what counts little stays pale
    const curve = (most) => curveOf(this.kind, Math.max(most, 1e-12) * less * 1e-3, Math.max(most, 1e-12) * less);
    this.plain = curve(this.now.most);
    this.curve = this.share === "sentence" ? curve(1) : this.plain;
    this.version += 1;
    this.shade();
    this.paintStrip();
  }

  shade() {
    if (!this.now) return;
    for (const { blocks } of this.near)
      for (const block of blocks) if (block.version !== this.version) this.paint(block);
  }

  paint(block) {
    const { look, now, share } = this,
      { first, sentence } = block;
    block.version = this.version;
    block.spans ??= this.fill(block);
    const by = share === "sentence" ? now.tops[sentence] || 1 : 1;
    block.spans.forEach((span, k) => {
      const place = Math.round(this.curve.to(now.words[first + k] / by) * 255),
        tint = look.tints[place];
      span.style.backgroundColor = place > 1 ? `rgb(${tint})` : "";
      span.style.color = place > 1 ? look.inkOn(tint) : "";
      span.classList.toggle("jm-is-pinned", first + k === this.spot);
      span.classList.toggle("jm-at", first + k === this.cursor);
    });
    if (block.gauge.className) this.gauge(block);
  }

  fill({ line, gaps, first }) {
    const { words } = this.text;
    const spans = gaps.map((_, k) =>
      make("span", {
        class: gaps[k] || !k ? "jm-w" : "jm-w jm-tight",
        text: written(words[first + k]),
        data: { word: first + k },
      }),
    );
    line.replaceChildren(...spans.flatMap((span, k) => (gaps[k] ? [gaps[k], span] : [span])));
    return spans;
  }

  gauge({ gauge, sentence }) {
    const { sentences } = this.text,
      { weight, rank, part } = this.text.sentence(sentence, this.hop);
    gauge.setAttribute(
      "aria-label",
      `Sentence ${count(sentence + 1)}: weight ${told(weight)}, rank ${count(rank)} of ${count(sentences)}`,
    );
    gauge.replaceChildren(
      make("span", { class: "jm-number", text: told(weight, 2) }),
      make("span", { class: "jm-level" }, [make("span", { css: { width: `${100 * part}%` } })]),
    );
  }

  // The choices above the text.
  dress() {
    const { sentences } = this.text,
      { set } = this.events;
    this.shares.hidden = this.jumps.hidden = sentences === 1;
    this.shares.replaceChildren(
      ...Object.entries(SHARES).map(([share, text]) =>
        make("button", {
          type: "button",
          class: share === this.share ? "jm-choice jm-on" : "jm-choice",
          title: `Shade words by their weight ${text} (s)`,
          aria: { pressed: `${share === this.share}` },
          data: { share },
          text: text[0].toUpperCase() + text.slice(1),
          onclick: () => set({ share }),
        }),
      ),
    );
    this.jumpLabel.textContent =
      this.jumped === null ? "Strongest sentences" : `${count(this.jumped + 1)} of ${count(sentences)} by weight`;
  }

  /** What the legend shows. */
  legend() {
    if (!this.now) return null;
    const { curve, look, share, text, now } = this,
      percent = (value) => `${Number((100 * value).toPrecision(2))} %`;
    const strongest = `“${shown(text.words[now.best], 24)}”`;
    return {
      curve,
      list: look.tints,
      log: this.kind === "log" && share === "document",
      tell: share === "sentence" ? percent : undefined,
      title:
        share === "sentence"
          ? "of the weight of the strongest word in its sentence"
          : `weight, relative to the strongest word, ${strongest}`,
    };
  }

  // ---------------------------------------------------------------- all of it at a glance

  paintStrip() {
    const { scrollTop, scrollHeight, clientHeight: tall } = this.passage;
    this.strip.el.hidden = !this.now || scrollHeight <= tall + 2 || tall < 20;
    if (this.strip.el.hidden) return;
    const sight = [this.wordAt(scrollTop), this.wordAt(scrollTop + tall)];
    this.strip.paint({ weights: this.now.words, curve: this.plain, version: this.version, spot: this.spot, sight, tall });
  }

  // The word that is about so far down: exact between blocks, a guess within.
  wordAt(y) {
    let low = 0,
      high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (topOf(this.blocks[middle]) <= y) low = middle;
      else high = middle - 1;
    }
    const { el, first, last } = this.blocks[low],
      part = (y - topOf(this.blocks[low])) / (el.offsetHeight || 1);
    return first + (last - first) * Math.max(0, Math.min(1, part));
  }

  /** To a part of the whole, 0 to 1. */
  seek(part) {
    const n = Math.min(this.text.length - 1, Math.floor(part * this.text.length)),
      block = this.blockOf(n),
      { first, last, el } = block;
    this.aim(() => topOf(block) + (el.offsetHeight * (n - first)) / (last - first) - this.passage.clientHeight / 2);
  }

  scrolled() {
    this.events.tip(null);
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      if (this.el.isConnected) this.paintStrip();
    });
  }

  // ---------------------------------------------------------------- going there

  blockOf(n) {
    let low = 0,
      high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.blocks[middle].first <= n) low = middle;
      else high = middle - 1;
    }
    return this.blocks[low];
  }

  // What lies there is laid out only now, and may be taller than guessed: so aim again, for some frames.
  aim(place) {
    let times = 6;
    const go = () => {
      this.passage.scrollTop = place();
      times -= 1;
      if (times) this.aiming = requestAnimationFrame(go);
    };
    this.still();
    go();
  }

  // Whoever scrolls goes where they like.
  still() {
    cancelAnimationFrame(this.aiming);
  }

  /** Have a word in sight; where it is, all stays as it is. */
  reveal(n) {
    const block = this.blockOf(n),
      span = this.spanOf(n),
      { passage } = this;
    const at = () => span.getBoundingClientRect().top - passage.getBoundingClientRect().top;
    const fits = () => block.el.offsetParent && at() >= 4 && at() + LINE_TALL <= passage.clientHeight;
    if (!fits()) this.aim(() => (fits() ? passage.scrollTop : passage.scrollTop + at() - passage.clientHeight / 3));
  }

  spanOf(n) {
    const block = this.blockOf(n);
    if (block.version !== this.version) this.paint(block);
    return block.spans[n - block.first];
  }

  /** To a sentence, which is marked; it is said how much it counts. */
  go(sentence) {
    const block = this.blockOf(this.text.edges[sentence]),
      { el } = block,
      { weight } = this.text.sentence(sentence, this.hop),
      { passage } = this;
    passage.querySelector(".jm-here")?.classList.remove("jm-here");
    el.classList.add("jm-here");
    this.here = sentence;
    this.aim(() => topOf(block) - Math.max(12, (passage.clientHeight - el.offsetHeight) / 3));
    const [first, last] = [this.text.edges[sentence], this.text.edges[sentence + 1]];
    const text = this.text.words.slice(first, Math.min(last, first + 40)).join(" ");
    this.events.say(`Sentence ${count(sentence + 1)}, weight ${told(weight)}: ${text}`);
  }

  /** To the next one in the order of weights. */
  jump(by) {
    const { sentences } = this.text;
    if (sentences === 1) return;
    this.jumped = this.jumped === null ? 0 : Math.max(0, Math.min(sentences - 1, this.jumped + by));
    this.dress();
    this.go(this.now.order[this.jumped]);
  }

  /** Keys that mean something here; false for all others. */
  keyed(key, shiftKey, button) {
    const { passage, text } = this;
    if (shiftKey && (key === "ArrowLeft" || key === "ArrowRight")) return this.step(key === "ArrowLeft" ? -1 : 1);
    if (key === "ArrowUp" || key === "ArrowDown") return this.walk(key === "ArrowUp" ? -1 : 1);
    if (key === "n") return (this.jump(1), true);
    if (key === "p") return (this.jump(-1), true);
    if (key === "s" && text.sentences > 1)
      return (this.events.set({ share: this.share === "sentence" ? "document" : "sentence" }), true);
    if (key === "Enter" && !button && this.cursor !== null) return (this.pin(this.cursor), true);
    const page = { PageUp: -0.9, PageDown: 0.9 }[key];
    if (page || key === "Home" || key === "End") this.still();
    if (page) return (passage.scrollBy({ top: page * passage.clientHeight }), true);
    if (key === "Home" || key === "End") return ((passage.scrollTop = key === "Home" ? 0 : passage.scrollHeight), true);
    return false;
  }

  // From word to word; what is there is said.
  step(by) {
    const begin = Math.ceil(this.wordAt(this.passage.scrollTop));
    const next = this.cursor === null ? (this.spot ?? begin) : this.cursor + by;
    this.mark(Math.max(0, Math.min(this.text.length - 1, next)));
    this.reveal(this.cursor);
    const { left, bottom } = this.spanOf(this.cursor).getBoundingClientRect();
    this.events.tip(this.lines(this.cursor), left, bottom - 10);
    const { weight, rank } = this.text.word(this.cursor, this.hop);
    this.events.say(`${shown(this.text.words[this.cursor], 60)}: ${told(weight)}, rank ${count(rank)}`);
    return true;
  }

  mark(n) {
    if (this.cursor !== null) this.spanOf(this.cursor).classList.remove("jm-at");
    this.cursor = n;
    if (n !== null) this.spanOf(n).classList.add("jm-at");
  }

  // From sentence to sentence; within one that is taller than the page, by lines.
  walk(by) {
    const { passage, text } = this,
      { scrollTop, clientHeight } = passage;
    const at = this.here === null ? null : this.blockOf(text.edges[this.here]);
    const inSight = at && topOf(at) < scrollTop + clientHeight && topOf(at) + at.el.offsetHeight > scrollTop;
    if (text.sentences === 1) return (passage.scrollBy({ top: by * 2 * LINE_TALL }), true);
    const first = text.owners[Math.min(text.length - 1, Math.floor(this.wordAt(scrollTop + 4)))];
    const next = inSight ? this.here + by : first;
    this.go(Math.max(0, Math.min(text.sentences - 1, next)));
    return true;
  }

  // ---------------------------------------------------------------- pointing

  point(event) {
    const span = event.target.closest(".jm-w"),
      gauge = event.target.closest(".jm-gauge");
    const lines = span
      ? this.lines(Number(span.dataset.word))
      : gauge && ofSentence(this.text, Number(gauge.parentElement.dataset.sentence), this.hop);
    this.events.tip(lines, event.clientX, event.clientY);
  }

  clicked(event) {
    const span = event.target.closest(".jm-w");
    if (!span || String(globalThis.getSelection() ?? "")) return; // whoever marks text does not point at a word
    this.mark(null);
    this.pin(Number(span.dataset.word));
  }

  pin(n) {
    this.events.set({ spot: this.spot === n ? null : n });
  }

  lines(n) {
    return ofWord(this.text, n, this.hop, this.share);
  }

  /** What the panel tells of a word. */
  tellOf(n) {
    return ofPinned(this.text, n, this.hop);
  }

  close() {
    this.watch.disconnect();
    this.sight.disconnect();
    cancelAnimationFrame(this.waiting);
    this.still();
  }
}

// Some sentences together: what is out of sight is not laid out, and a few large parts are less to watch than many.
function sectionsOf(blocks) {
  const sections = [];
  let words = Infinity;
  for (const block of blocks) {
    if (words >= A_SECTION) {
      sections.push({ blocks: [], tall: 0 });
      words = 0;
    }
    words += block.last - block.first;
    sections.at(-1).blocks.push(block);
    sections.at(-1).tall += block.tall;
  }
  sections.forEach((section, n) => {
    section.el = make(
      "div",
      { class: "jm-section", data: { section: n }, css: { "contain-intrinsic-height": `auto ${section.tall}px` } },
      section.blocks.map((block) => block.el),
    );
  });
  return sections;
}

// From the top of the text.
function topOf({ el }) {
  return el.parentElement.offsetTop + el.offsetTop;
}
