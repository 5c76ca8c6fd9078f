// A document: sentences with a bar for their weight, and shaded words. The whole text is on the page, to be searched
// and copied; words are shaded when they are nearly visible, so that long texts open fast.

import { formatCount, formatWeight, pluralize } from "./colours.js";
import { createToggles } from "./controls.js";
import { clamp, countWhile, createElement, iconButton } from "./dom.js";
import { Minimap } from "./minimap.js";
import { DocumentWeights } from "./document_weights.js";
import { describePinned, describeSentence, describeWord, createPrediction } from "./descriptions.js";
import { truncateText, replaceControls } from "./token_text.js";
import { View } from "./view.js";

const SECTION_SIZE = 400; // words
const LINE_HEIGHT_PX = 29; // of a line of text
const WEIGHT_SCOPES = { document: "Within the document", sentence: "Within its sentence" };

export class DocumentView extends View {
  static title = "Document";
  static keys = [
    ["← →", "previous, next hop"],
    ["↑ ↓", "previous, next sentence"],
    ["n p", "next, previous sentence by weight"],
    ["Shift + ← →", "move by word"],
    ["Enter, Esc", "pin, unpin the word"],
    ["s", "weights relative to the document or to the sentence"],
    ["Page ↑ ↓, Home, End", "scroll"],
  ];
  static hint = "Hover a word to see its weight, click to pin it. Click the minimap to scroll.";
  static medium = "document";
  static hasLayers = false;
  static chip = "hop";
  static pin = "pinnedWord";
  static hasPanel = true;

  static describe({ document: { words, sentence_offsets: offsets, num_hops: numHops } }, layer, { hop }) {
    return [
      pluralize(words.length, "word"),
      ...(offsets.length > 2 ? [pluralize(offsets.length - 1, "sentence")] : []),
      ...(numHops > 1 ? [hop === null ? `mean of ${numHops} hops` : `hop ${hop} of ${numHops}`] : []),
    ];
  }

  static listChips({ document: { num_hops: numHops } }) {
    const hops = Array.from({ length: numHops }, (_, hop) => hop);
    return numHops > 1 ? [...hops, null] : hops;
  }

  /** `events`: set(change of state: pinnedWord, weightScope), tooltip(lines or null, x, y), announce(text). */
  constructor(shared) {
    super(shared);
    this.blocks = []; // sentences, or parts of long ones
    this.visible = new Set(); // sections that are visible, or nearly
    this.version = 0;
    this.cursor = null; // the word selected by keys
    this.rank = null; // the rank of the sentence that was selected by rank
    this.prediction = createElement("div", { class: "jm-prediction-row" });
    this.scopes = createElement("div", { class: "jm-tabs", role: "group", aria: { label: "Weights" } });
    this.rankLabel = createElement("span", { class: "jm-muted jm-number" });
    this.rankPager = createElement("div", { class: "jm-pager" }, [
      this.rankLabel,
      iconButton("left", "Previous sentence by weight (p)", () => this.moveByRank(-1)),
      iconButton("right", "Next sentence by weight (n)", () => this.moveByRank(1)),
    ]);
    this.textBox = createElement("div", {
      class: "jm-document-text",
      role: "region",
      tabindex: "0",
      aria: { label: "Text" },
      onpointerover: (event) => this.handlePointer(event),
      onpointerleave: () => this.events.tooltip(null),
      onclick: (event) => this.handleClick(event),
      onscroll: () => this.handleScroll(),
      onwheel: () => this.cancelScroll(),
      onpointerdown: () => this.cancelScroll(),
    });
    this.minimap = new Minimap({ appearance: this.appearance, seek: (part) => this.seek(part) });
    this.el = createElement("div", { class: "jm-document" }, [
      createElement("div", { class: "jm-bar" }, [
        this.prediction,
        createElement("div", { class: "jm-bar jm-options" }, [this.scopes, this.rankPager]),
      ]),
      createElement("div", { class: "jm-document-body" }, [this.textBox, this.minimap.el]),
    ]);
    this.resizeObserver = new ResizeObserver(() => this.paintMinimap());
    this.resizeObserver.observe(this.textBox);
    this.visibility = new IntersectionObserver((changes) => this.handleVisibility(changes), {
      root: this.textBox,
      rootMargin: "300px 0px",
    });
  }

  /** `state`: `hop`, null for the mean; `pinnedWord`; `weightScope`, what weights are relative to. */
  show({ item, state: { hop, pinnedWord, weightScope } }) {
    if (this.data !== item.document) this.open(item.document);
    const isNewlyPinned = pinnedWord !== null && pinnedWord !== this.pinnedWord;
    Object.assign(this, { hop, pinnedWord, weightScope });
    this.updateControls();
    this.refresh();
    if (isNewlyPinned) this.reveal(pinnedWord);
  }

  // ---------------------------------------------------------------- layout

  open(data) {
    this.data = data;
    this.text = new DocumentWeights(data);
    this.cursor = this.rank = this.currentSentence = null;
    this.visibility.disconnect();
    this.visible.clear();
    this.textBox.classList.toggle("jm-single", this.text.numSentences === 1);
    const wide = Math.min(640, (this.textBox.clientWidth || 760) - 130);
    this.blocks = this.text.blocks().map((block) => this.block(block, wide));
    this.sections = groupSections(this.blocks);
    this.textBox.replaceChildren(...this.sections.map((section) => section.el));
    this.textBox.scrollTop = 0;
    this.prediction.replaceChildren(...createPrediction(this.text));
    this.prediction.hidden = !this.prediction.childElementCount;
    // The first sections are shaded immediately, the others when they are nearly visible.
    this.sections.slice(0, 2).forEach((section) => this.visible.add(section));
    this.sections.forEach((section) => this.visibility.observe(section.el));
  }

  block({ sentence, first, last }, wide) {
    const { words, separators, offsets } = this.text;
    const gaps = [separators[first].trimStart(), ...separators.slice(first + 1, last)].map(replaceControls);
    const line = createElement("p", { class: "jm-line", dir: "auto" });
    line.textContent = gaps.map((space, n) => space + replaceControls(words[first + n])).join("");
    const isStart = first === offsets[sentence],
      isParagraph = first > 0 && /\n\s*\n/.test(separators[first]),
      className = isParagraph ? "jm-sentence jm-gap" : "jm-sentence",
      gauge = createElement("span", isStart ? { class: "jm-sentence-weight", role: "img" } : {});
    const el = createElement("div", { class: className, data: { sentence } }, [gauge, line]);
    // An estimate of its height, for the scroll bar, until it has been laid out.
    const letters = line.textContent.replace(/[^\u1100-\uffdc]/g, "").length + line.textContent.length;
    const tall = (isParagraph ? 18 : 6) + LINE_HEIGHT_PX * Math.ceil((letters * 8) / wide);
    return { el, gauge, line, gaps, sentence, first, last, tall, spans: null, version: 0 };
  }

  handleVisibility(changes) {
    for (const { target, isIntersecting } of changes) {
      const section = this.sections[Number(target.dataset.section)];
      if (isIntersecting) this.visible.add(section);
      else this.visible.delete(section);
    }
    this.shade();
  }

  /** Shade the text again. */
  refresh() {
    if (!this.text) return;
    this.statistics = this.text.at(this.hop);
    this.documentCurve = this.appearance.curveTo(this.statistics.most, "linear"); // small weights stay pale
    this.curve = this.weightScope === "sentence" ? this.appearance.curveTo(1, "linear") : this.documentCurve;
    this.version += 1;
    this.shade();
    this.paintMinimap();
  }

  shade() {
    if (!this.statistics) return;
    for (const { blocks } of this.visible)
      for (const block of blocks) if (block.version !== this.version) this.paint(block);
  }

  paint(block) {
    const { appearance, statistics, weightScope } = this,
      { first, sentence } = block;
    block.version = this.version;
    block.spans ??= this.fill(block);
    const divisor = weightScope === "sentence" ? statistics.maxima[sentence] || 1 : 1;
    block.spans.forEach((span, k) => {
      appearance.shade(span, this.curve.to(statistics.words[first + k] / divisor), 1);
      span.classList.toggle("jm-is-pinned", first + k === this.pinnedWord);
      span.classList.toggle("jm-cursor", first + k === this.cursor);
    });
    if (block.gauge.className) this.paintGauge(block);
  }

  fill({ line, gaps, first }) {
    const { words } = this.text;
    const spans = gaps.map((_, k) =>
      createElement("span", {
        class: gaps[k] || !k ? "jm-document-word" : "jm-document-word jm-tight",
        text: replaceControls(words[first + k]),
        data: { word: first + k },
      }),
    );
    line.replaceChildren(...spans.flatMap((span, k) => (gaps[k] ? [gaps[k], span] : [span])));
    return spans;
  }

  paintGauge({ gauge, sentence }) {
    const { weight, rank, part } = this.text.sentenceInfo(sentence, this.hop),
      position = `rank ${formatCount(rank)} of ${formatCount(this.text.numSentences)}`;
    const name = `Sentence ${formatCount(sentence + 1)}`;
    gauge.setAttribute("aria-label", `${name}: weight ${formatWeight(weight)}, ${position}`);
    gauge.replaceChildren(
      createElement("span", { class: "jm-number", text: formatWeight(weight, 2) }),
      createElement("span", { class: "jm-level" }, [createElement("span", { css: { width: `${100 * part}%` } })]),
    );
  }

  // The controls above the text.
  updateControls() {
    const { numSentences } = this.text,
      { set } = this.events;
    this.scopes.hidden = this.rankPager.hidden = numSentences === 1;
    const describe = (scope) => `Shade words by their weight ${WEIGHT_SCOPES[scope].toLowerCase()} (s)`,
      select = (weightScope) => set({ weightScope });
    this.scopes.replaceChildren(...createToggles("scope", WEIGHT_SCOPES, this.weightScope, select, describe));
    const position = `${formatCount(this.rank + 1)} of ${formatCount(numSentences)} by weight`;
    this.rankLabel.textContent = this.rank === null ? "Sentences by weight" : position;
  }

  legend() {
    if (!this.statistics) return null;
    const { curve, text, statistics } = this,
      list = this.appearance.tints,
      percent = (value) => `${Number((100 * value).toPrecision(2))} %`,
      strongest = `“${truncateText(text.words[statistics.best], 24)}”`;
    if (this.weightScope === "sentence")
      return { curve, list, format: percent, title: "relative to the highest weight in the sentence" };
    return { curve, list, title: `weight, relative to the highest weight, ${strongest}` };
  }

  // ---------------------------------------------------------------- minimap

  paintMinimap() {
    const { scrollTop, scrollHeight, clientHeight: tall } = this.textBox;
    this.minimap.el.hidden = !this.statistics || scrollHeight <= tall + 2 || tall < 20;
    if (this.minimap.el.hidden) return;
    const range = [this.wordAt(scrollTop), this.wordAt(scrollTop + tall)];
    const { statistics, documentCurve: curve, version, pinnedWord } = this;
    this.minimap.paint({ weights: statistics.words, curve, version, pinnedWord, range, height: tall });
  }

  // The word at a height: exact between blocks, estimated within.
  wordAt(y) {
    const number = countWhile(this.blocks.length, (n) => offsetTop(this.blocks[n]) <= y),
      block = this.blocks[Math.max(0, number - 1)],
      { el, first, last } = block;
    return first + (last - first) * clamp((y - offsetTop(block)) / (el.offsetHeight || 1), 0, 1);
  }

  /** Scroll to a position, 0 to 1. */
  seek(part) {
    const n = Math.min(this.text.length - 1, Math.floor(part * this.text.length)),
      block = this.blockOf(n),
      { first, last, el } = block;
    const place = () => offsetTop(block) + (el.offsetHeight * (n - first)) / (last - first);
    this.scrollTo(() => place() - this.textBox.clientHeight / 2);
  }

  handleScroll() {
    this.events.tooltip(null);
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      if (this.el.isConnected) this.paintMinimap();
    });
  }

  // ---------------------------------------------------------------- navigation

  blockOf(n) {
    return this.blocks[countWhile(this.blocks.length, (k) => this.blocks[k].first <= n) - 1];
  }

  // The target is laid out only now and may be taller than estimated: repeat for some frames.
  scrollTo(place) {
    let times = 6;
    const go = () => {
      this.textBox.scrollTop = place();
      times -= 1;
      if (times) this.scrollFrame = requestAnimationFrame(go);
    };
    this.cancelScroll();
    go();
  }

  // The user scrolls: stop scrolling to a target.
  cancelScroll() {
    cancelAnimationFrame(this.scrollFrame);
  }

  /** Scroll a word into view, if it is not visible. */
  reveal(n) {
    const block = this.blockOf(n),
      span = this.spanOf(n),
      { textBox } = this;
    const at = () => span.getBoundingClientRect().top - textBox.getBoundingClientRect().top;
    const fits = () => block.el.offsetParent && at() >= 4 && at() + LINE_HEIGHT_PX <= textBox.clientHeight;
    if (!fits()) this.scrollTo(() => textBox.scrollTop + (fits() ? 0 : at() - textBox.clientHeight / 3));
  }

  spanOf(n) {
    const block = this.blockOf(n);
    if (block.version !== this.version) this.paint(block);
    return block.spans[n - block.first];
  }

  /** Scroll to a sentence, highlight it, and announce its weight. */
  moveToSentence(sentence) {
    const block = this.blockOf(this.text.offsets[sentence]),
      { el } = block,
      { weight } = this.text.sentenceInfo(sentence, this.hop),
      { textBox } = this;
    textBox.querySelector(".jm-current-sentence")?.classList.remove("jm-current-sentence");
    el.classList.add("jm-current-sentence");
    this.currentSentence = sentence;
    this.scrollTo(() => offsetTop(block) - Math.max(12, (textBox.clientHeight - el.offsetHeight) / 3));
    const [first, last] = [this.text.offsets[sentence], this.text.offsets[sentence + 1]];
    const text = this.text.words.slice(first, Math.min(last, first + 40)).join(" ");
    this.events.announce(`Sentence ${formatCount(sentence + 1)}, weight ${formatWeight(weight)}: ${text}`);
  }

  /** Move to the next sentence in the order of weights. */
  moveByRank(by) {
    const { numSentences } = this.text;
    if (numSentences === 1) return;
    this.rank = this.rank === null ? 0 : clamp(this.rank + by, 0, numSentences - 1);
    this.updateControls();
    this.moveToSentence(this.statistics.order[this.rank]);
  }

  handleKey(key, shiftKey, button) {
    const { textBox, text } = this;
    if (shiftKey && (key === "ArrowLeft" || key === "ArrowRight")) return this.moveByWord(key === "ArrowLeft" ? -1 : 1);
    if (key === "ArrowUp" || key === "ArrowDown") return this.moveBySentence(key === "ArrowUp" ? -1 : 1);
    if (key === "n") return (this.moveByRank(1), true);
    if (key === "p") return (this.moveByRank(-1), true);
    if (key === "s" && text.numSentences > 1)
      return (this.events.set({ weightScope: this.weightScope === "sentence" ? "document" : "sentence" }), true);
    if (key === "Enter" && !button && this.cursor !== null) return (this.pin(this.cursor), true);
    const page = { PageUp: -0.9, PageDown: 0.9 }[key];
    if (page || key === "Home" || key === "End") this.cancelScroll();
    if (page) return (textBox.scrollBy({ top: page * textBox.clientHeight }), true);
    if (key === "Home") return (textBox.scrollTo({ top: 0 }), true);
    if (key === "End") return (textBox.scrollTo({ top: textBox.scrollHeight }), true);
    return false;
  }

  // Move from word to word, and announce each.
  moveByWord(by) {
    const begin = Math.ceil(this.wordAt(this.textBox.scrollTop));
    const next = this.cursor === null ? (this.pinnedWord ?? begin) : this.cursor + by;
    this.highlight(clamp(next, 0, this.text.length - 1));
    this.reveal(this.cursor);
    const { left, bottom } = this.spanOf(this.cursor).getBoundingClientRect();
    this.events.tooltip(this.tooltipLines(this.cursor), left, bottom - 10);
    const { weight, rank } = this.text.wordInfo(this.cursor, this.hop);
    const word = truncateText(this.text.words[this.cursor], 60);
    this.events.announce(`${word}: ${formatWeight(weight)}, rank ${formatCount(rank)}`);
    return true;
  }

  highlight(n) {
    if (this.cursor !== null) this.spanOf(this.cursor).classList.remove("jm-cursor");
    this.cursor = n;
    if (n !== null) this.spanOf(n).classList.add("jm-cursor");
  }

  // Move from sentence to sentence; with a single sentence, by lines.
  moveBySentence(by) {
    const { textBox, text } = this,
      { scrollTop, clientHeight } = textBox;
    const at = this.currentSentence === null ? null : this.blockOf(text.offsets[this.currentSentence]);
    const isVisible = at && offsetTop(at) < scrollTop + clientHeight && offsetTop(at) + at.el.offsetHeight > scrollTop;
    if (text.numSentences === 1) return (textBox.scrollBy({ top: by * 2 * LINE_HEIGHT_PX }), true);
    const first = text.owners[Math.min(text.length - 1, Math.floor(this.wordAt(scrollTop + 4)))];
    const next = isVisible ? this.currentSentence + by : first;
    this.moveToSentence(clamp(next, 0, text.numSentences - 1));
    return true;
  }

  // ---------------------------------------------------------------- pointer

  handlePointer(event) {
    const span = event.target.closest(".jm-document-word"),
      gauge = event.target.closest(".jm-sentence-weight");
    const lines = span
      ? this.tooltipLines(Number(span.dataset.word))
      : gauge && describeSentence(this.text, Number(gauge.parentElement.dataset.sentence), this.hop);
    this.events.tooltip(lines, event.clientX, event.clientY);
  }

  handleClick(event) {
    const span = event.target.closest(".jm-document-word");
    if (!span || String(globalThis.getSelection() ?? "")) return; // selecting text is not a click on a word
    this.highlight(null);
    this.pin(Number(span.dataset.word));
  }

  pin(n) {
    this.events.set({ pinnedWord: this.pinnedWord === n ? null : n });
  }

  tooltipLines(n) {
    return describeWord(this.text, n, this.hop, this.weightScope);
  }

  /** The content of the panel for a word. */
  describePinned(n) {
    return describePinned(this.text, n, this.hop);
  }

  close() {
    this.resizeObserver.disconnect();
    this.visibility.disconnect();
    cancelAnimationFrame(this.waiting);
    this.cancelScroll();
  }
}

// Groups of sentences: invisible groups are not laid out, and a few large parts are cheaper to observe than many.
function groupSections(blocks) {
  const sections = [];
  let words = Infinity;
  for (const block of blocks) {
    if (words >= SECTION_SIZE) {
      sections.push({ blocks: [], tall: 0 });
      words = 0;
    }
    words += block.last - block.first;
    sections.at(-1).blocks.push(block);
    sections.at(-1).tall += block.tall;
  }
  sections.forEach((section, n) => {
    section.el = createElement(
      "div",
      { class: "jm-section", data: { section: n }, css: { "contain-intrinsic-height": `auto ${section.tall}px` } },
      section.blocks.map((block) => block.el),
    );
  });
  return sections;
}

// The distance from the top of the text.
function offsetTop({ el }) {
  return el.parentElement.offsetTop + el.offsetTop;
}
