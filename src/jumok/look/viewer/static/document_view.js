// A document: sentences with a bar for their weight, and shaded words. The whole text is on the page, to be searched and
// copied; words are shaded when they are nearly visible, so that long texts open fast.

import { formatCount, createCurve, formatWeight } from "./colours.js";
import { iconButton, createElement } from "./dom.js";
import { Minimap } from "./minimap.js";
import { DocumentWeights } from "./document_weights.js";
import { describePinned, describeSentence, describeWord, createPrediction } from "./descriptions.js";
import { truncateText, replaceControls } from "./token_text.js";

const SECTION_SIZE = 400; // words
const LINE_HEIGHT_PX = 29; // of a line of text
const WEIGHT_SCOPES = { document: "within the document", sentence: "within its sentence" };

export class DocumentView {
  /** `events`: set(change of state: pinnedWord, weightScope), tooltip(lines or null, x, y), announce(text). */
  constructor({ appearance, events }) {
    Object.assign(this, { appearance, events });
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
    this.minimap = new Minimap({ appearance, seek: (part) => this.seek(part) });
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

  /** `data` as in the manifest; `hop`, null for the mean; `pinnedWord`; `weightScope`, what weights are relative to. */
  show(data, { hop, pinnedWord, weightScope }) {
    if (this.data !== data) this.open(data);
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
    const gauge = first === offsets[sentence] ? createElement("span", { class: "jm-sentence-weight", role: "img" }) : createElement("span");
    const paragraph = first > 0 && /\n\s*\n/.test(separators[first]);
    const el = createElement("div", { class: paragraph ? "jm-sentence jm-gap" : "jm-sentence", data: { sentence } }, [
      gauge,
      line,
    ]);
    // An estimate of its height, for the scroll bar, until it has been laid out.
    const letters = line.textContent.replace(/[^\u1100-\uffdc]/g, "").length + line.textContent.length;
    const tall = (paragraph ? 18 : 6) + LINE_HEIGHT_PX * Math.ceil((letters * 8) / wide);
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
    const { curveSetting, contrastFactor } = this.appearance;
    this.kind = curveSetting === "auto" ? "linear" : curveSetting; // small weights stay pale
    const curve = (most) => createCurve(this.kind, Math.max(most, 1e-12) * contrastFactor * 1e-3, Math.max(most, 1e-12) * contrastFactor);
    this.documentCurve = curve(this.statistics.most);
    this.curve = this.weightScope === "sentence" ? curve(1) : this.documentCurve;
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
      const place = Math.round(this.curve.to(statistics.words[first + k] / divisor) * 255),
        tint = appearance.tints[place];
      span.style.backgroundColor = place > 1 ? `rgb(${tint})` : "";
      span.style.color = place > 1 ? appearance.inkOn(tint) : "";
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
    const { numSentences } = this.text,
      { weight, rank, part } = this.text.sentenceInfo(sentence, this.hop);
    gauge.setAttribute(
      "aria-label",
      `Sentence ${formatCount(sentence + 1)}: weight ${formatWeight(weight)}, rank ${formatCount(rank)} of ${formatCount(numSentences)}`,
    );
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
    this.scopes.replaceChildren(
      ...Object.entries(WEIGHT_SCOPES).map(([scope, text]) =>
        createElement("button", {
          type: "button",
          class: scope === this.weightScope ? "jm-choice jm-on" : "jm-choice",
          title: `Shade words by their weight ${text} (s)`,
          aria: { pressed: `${scope === this.weightScope}` },
          data: { scope },
          text: text[0].toUpperCase() + text.slice(1),
          onclick: () => set({ weightScope: scope }),
        }),
      ),
    );
    this.rankLabel.textContent =
      this.rank === null ? "Sentences by weight" : `${formatCount(this.rank + 1)} of ${formatCount(numSentences)} by weight`;
  }

  /** The content of the legend. */
  legend() {
    if (!this.statistics) return null;
    const { curve, appearance, weightScope, text, statistics } = this,
      percent = (value) => `${Number((100 * value).toPrecision(2))} %`;
    const strongest = `“${truncateText(text.words[statistics.best], 24)}”`;
    return {
      curve,
      list: appearance.tints,
      log: this.kind === "log" && weightScope === "document",
      format: weightScope === "sentence" ? percent : undefined,
      title:
        weightScope === "sentence"
          ? "relative to the highest weight in the sentence"
          : `weight, relative to the highest weight, ${strongest}`,
    };
  }

  // ---------------------------------------------------------------- minimap

  paintMinimap() {
    const { scrollTop, scrollHeight, clientHeight: tall } = this.textBox;
    this.minimap.el.hidden = !this.statistics || scrollHeight <= tall + 2 || tall < 20;
    if (this.minimap.el.hidden) return;
    const range = [this.wordAt(scrollTop), this.wordAt(scrollTop + tall)];
    this.minimap.paint({ weights: this.statistics.words, curve: this.documentCurve, version: this.version, pinnedWord: this.pinnedWord, range, height: tall });
  }

  // The word at a height: exact between blocks, estimated within.
  wordAt(y) {
    let low = 0,
      high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (offsetTop(this.blocks[middle]) <= y) low = middle;
      else high = middle - 1;
    }
    const { el, first, last } = this.blocks[low],
      part = (y - offsetTop(this.blocks[low])) / (el.offsetHeight || 1);
    return first + (last - first) * Math.max(0, Math.min(1, part));
  }

  /** Scroll to a position, 0 to 1. */
  seek(part) {
    const n = Math.min(this.text.length - 1, Math.floor(part * this.text.length)),
      block = this.blockOf(n),
      { first, last, el } = block;
    this.scrollTo(() => offsetTop(block) + (el.offsetHeight * (n - first)) / (last - first) - this.textBox.clientHeight / 2);
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
    let low = 0,
      high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.blocks[middle].first <= n) low = middle;
      else high = middle - 1;
    }
    return this.blocks[low];
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
    if (!fits()) this.scrollTo(() => (fits() ? textBox.scrollTop : textBox.scrollTop + at() - textBox.clientHeight / 3));
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
    this.rank = this.rank === null ? 0 : Math.max(0, Math.min(numSentences - 1, this.rank + by));
    this.updateControls();
    this.moveToSentence(this.statistics.order[this.rank]);
  }

  /** Handle a key; returns false if it has no function here. */
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
    if (key === "Home" || key === "End") return ((textBox.scrollTop = key === "Home" ? 0 : textBox.scrollHeight), true);
    return false;
  }

  // Move from word to word, and announce each.
  moveByWord(by) {
    const begin = Math.ceil(this.wordAt(this.textBox.scrollTop));
    const next = this.cursor === null ? (this.pinnedWord ?? begin) : this.cursor + by;
    this.highlight(Math.max(0, Math.min(this.text.length - 1, next)));
    this.reveal(this.cursor);
    const { left, bottom } = this.spanOf(this.cursor).getBoundingClientRect();
    this.events.tooltip(this.tooltipLines(this.cursor), left, bottom - 10);
    const { weight, rank } = this.text.wordInfo(this.cursor, this.hop);
    this.events.announce(`${truncateText(this.text.words[this.cursor], 60)}: ${formatWeight(weight)}, rank ${formatCount(rank)}`);
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
    const inSight = at && offsetTop(at) < scrollTop + clientHeight && offsetTop(at) + at.el.offsetHeight > scrollTop;
    if (text.numSentences === 1) return (textBox.scrollBy({ top: by * 2 * LINE_HEIGHT_PX }), true);
    const first = text.owners[Math.min(text.length - 1, Math.floor(this.wordAt(scrollTop + 4)))];
    const next = inSight ? this.currentSentence + by : first;
    this.moveToSentence(Math.max(0, Math.min(text.numSentences - 1, next)));
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
