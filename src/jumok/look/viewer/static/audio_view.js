// A recording that a model hears: its spectrogram, and below it the words × seconds of their attention. Hover a word to
// see when it listened, hover a time to see the words that listened to it; click to play from there. If the queries are
// times too, hover a time to see the times that it attends to.

import { Alignment, findHalf, transposeAnswer } from "./alignment.js";
import { formatCount, formatWeight, pluralize } from "./colours.js";
import { createRanking } from "./controls.js";
import { createElement } from "./dom.js";
import { SpectrogramView } from "./spectrogram_view.js";

const NUM_WORDS_AT_TIME = 4; // listed for a time
const MIN_MISSING_SHARE = 0.005; // of the weight, from which on it is mentioned that it is elsewhere

export class AudioView extends SpectrogramView {
  static title = "Recording";
  static keys = [
    ["Space", "play, pause"],
    ["← →, Home, End", "move by word; for attention over time, by frame"],
    ["Shift + ← →", "move by time"],
    ["Enter", "play from the time, or from where the word listened"],
    ["Esc", "clear the selection"],
    ["↑ ↓", "previous, next layer"],
  ];
  static hint = "Hover a word to see when it listened, hover a time to see its words; click to play from there.";
  static medium = "audio";
  static symbols = "Words of the output";
  static mapTitle = "Attention of each query over time, downwards";
  static isUpwards = false;

  static describe({ audio }, { name, kind, shape: [rows, frames] }) {
    const isSelf = name in audio.query_frames;
    return [
      `${kind} attention`,
      ...(isSelf ? [] : [pluralize(rows, "word")]),
      `${pluralize(frames, "frame")} in ${audio.duration.toFixed(2)} s`,
    ];
  }

  /** `events` as in spectrogram_view.js. */
  constructor(shared) {
    super(shared);
    this.note.hidden = true;
  }

  // ---------------------------------------------------------------- data

  get layerName() {
    const { item, layer } = this.content;
    return item.layers[layer].name;
  }

  /** Whether the queries are the frames, too. */
  get isSelf() {
    return this.layerName in this.medium.query_frames;
  }

  createTimeline() {
    const [numSymbols, numSteps] = this.content.shape,
      { key_frames: keyFrames, duration } = this.medium,
      { start, step } = keyFrames[this.layerName];
    return { numSteps, numSymbols, start, step, length: duration, sound: duration };
  }

  createMap(answer) {
    const [rows, cols] = this.content.shape;
    return new Alignment(transposeAnswer(answer), [cols, rows]);
  }

  get symbolTexts() {
    return this.content.rows;
  }

  get hasCaption() {
    return !this.isSelf && this.content.rows !== null;
  }

  fillSymbols() {
    super.fillSymbols();
    const { rows: first } = this.content.generated;
    this.symbols.buttons.forEach((button, n) => button.classList.toggle("jm-generated", n >= first));
  }

  // The query that plays is selected if the queries are times.
  get selected() {
    const selected = super.selected;
    return selected === null && this.isSelf ? this.row : selected;
  }

  // ---------------------------------------------------------------- page

  get maxColumns() {
    return this.isSelf ? 1 : undefined; // times need no other label than those beside them
  }

  // The frames of the spectrogram are centred at multiples of their distance.
  melSpan(frames) {
    const { frame_seconds: seconds } = this.medium;
    return [-0.5 * seconds, (frames - 0.5) * seconds];
  }

  describePlots() {
    const { numSteps, numSymbols, length } = this.timeline,
      queries = this.isSelf ? pluralize(numSymbols, "frame") : pluralize(numSymbols, "word");
    return `Spectrogram of ${length.toFixed(2)} seconds, and the attention of ${queries} to ${pluralize(numSteps, "frame")}`;
  }

  /** Describe when a query listened: the shortest span with half of its weight, its peak, and the share of its weight. */
  describeSpan(symbol) {
    const profile = this.map.profile(symbol),
      half = findHalf(profile);
    if (!half) return "no weight on the recording";
    const { start, step, numSteps, length } = this.timeline,
      at = (cell) => Math.min(length, Math.max(0, start + (cell / profile.length) * numSteps * step)),
      peak = profile.indexOf(Math.max(...profile)),
      share = half.total < 1 - MIN_MISSING_SHARE ? ` · ${(100 * half.total).toFixed(0)} % of its weight is on the recording` : "";
    return `half of it from ${at(half.from).toFixed(2)} to ${at(half.to).toFixed(2)} s · peak at ${at(peak + 0.5).toFixed(2)} s${share}`;
  }

  // The start of the span that describeSpan names.
  startOf(symbol) {
    const profile = this.map.profile(symbol),
      half = findHalf(profile),
      { numSteps } = this.timeline;
    return half ? this.secondsOf((half.from / profile.length) * numSteps) : 0;
  }

  showCurrent(selected, row) {
    if (selected !== null || row !== null) return super.showCurrent(selected, row);
    const play = this.player.ready ? "; click to play from there" : "",
      text = this.isSelf
        ? "Hover a time to see the times that it attends to; click to pin it."
        : `Hover a word to see when it listened, or a time to see its words${play}.`;
    return this.lead.replaceChildren(createElement("span", { class: "jm-muted", text }));
  }

  // ---------------------------------------------------------------- pointer

  handlePointer(event) {
    if (!this.map || !this.box) return;
    const { step = null, below = null, symbol = below } = this.placeAt(event),
      hovered = symbol === null && step !== null && this.isSelf ? step : symbol;
    this.select({ pointedStep: step, hovered });
    this.events.tooltip(step === null ? null : this.tooltipLines(step), event.clientX, event.clientY);
  }

  handleClick(event) {
    if (!this.isSelf) return super.handleClick(event);
    const { part, step, below = null, symbol = below } = this.map && this.box ? this.placeAt(event) : {};
    if (part !== undefined) this.player.seek(part * this.timeline.length);
    const query = symbol ?? step;
    if (query !== undefined) this.select({ pinnedSymbol: this.pinnedSymbol === query ? null : query });
    return undefined;
  }

  tooltipLines(step) {
    const time = `${this.middleOf(step).toFixed(2)} s, frame ${formatCount(step)}`,
      title = createElement("div", { class: "jm-muted jm-number", text: time });
    if (this.isSelf) {
      const weight = this.selected === null ? 0 : this.map.weight(step, this.selected),
        text = `${formatWeight(weight)} from ${this.names[this.selected]}`;
      return [title, createElement("div", { class: "jm-weight", text })];
    }
    const best = this.map.rankSymbols(step, NUM_WORDS_AT_TIME);
    const { selected } = this;
    if (selected !== null && !best.some(({ n }) => n === selected))
      best.push({ n: selected, value: this.map.weight(step, selected) });
    const words = best.map(({ n, value }) => ({ n, value, text: this.names[n] }));
    return [title, createRanking(words, selected, this.appearance.inks)];
  }

  // ---------------------------------------------------------------- keys

  handleKey(key, shiftKey, button) {
    if (!this.map || key === " " || key === "Escape") return super.handleKey(key, false, button);
    const inText = button && this.symbols.el.contains(button);
    if (key === "Enter" && (!button || inText) && this.pointedStep === null && this.selected !== null)
      return (this.player.playFrom(this.isSelf ? this.secondsOf(this.selected) : this.startOf(this.selected)), true);
    if (shiftKey || key === "Enter") return inText ? this.moveByTime(key) : super.handleKey(key, false, button);
    const next = this.isSelf ? this.nextQuery(key) : this.symbols.next(key, this.selected);
    return next === null ? false : this.moveToSymbol(next);
  }

  moveByTime(key) {
    return super.handleKey(key, false, null);
  }

  nextQuery(key) {
    const last = this.timeline.numSymbols - 1,
      by = { ArrowLeft: -1, ArrowRight: 1 }[key],
      { selected } = this;
    if (key === "Home" || key === "End") return key === "Home" ? 0 : last;
    if (!by) return null;
    return selected === null ? (by > 0 ? 0 : last) : Math.min(last, Math.max(0, selected + by));
  }

  moveToSymbol(n) {
    if (this.hasCaption) return super.moveToSymbol(n);
    this.select({ cursor: n, hovered: null, pointedStep: null });
    this.events.tooltip(null);
    this.events.announce(`${this.names[n]} ${this.describeSpan(n)}`);
    return true;
  }
}
