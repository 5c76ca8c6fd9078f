// Sound over time: a spectrogram, a map of weights on the same time axis below it, the symbols or words of the map, and
// playback. What extends this view provides the map: its steps are spans of time, its symbols are anything.

import { Caption } from "./caption.js";
import { formatCount, formatWeight } from "./colours.js";
import { createRanking } from "./controls.js";
import {
  clamp,
  createElement,
  createWord,
  decodeBase64,
  encodePng,
  icon,
  iconButton,
  sizeCanvas,
} from "./dom.js";
import { AudioPlayer } from "./audio_player.js";
import { alignmentImage, melImage, paintMarkers, paintSpeech, layoutSpectrogram } from "./spectrogram_painter.js";
import { ALIGNMENT_SIZE } from "./tiles.js";
import { Ruler, truncateText } from "./token_text.js";
import { View } from "./view.js";

const MAX_SYMBOLS = 600; // shown as text
const NUM_RANKED_SYMBOLS = 4; // listed for a step

export class SpectrogramView extends View {
  static symbols = "Symbols of the text"; // the name of the symbols
  static mapTitle = "Alignment (text from bottom to top)";
  static isUpwards = true; // whether the first symbol is at the bottom of the map

  /**
   * `events`: whole("pooled_map", size) returns a promise of the whole map in few cells; tooltip(lines or null, x, y);
   * announce(text); changed(), when the legend changes. `side`: elements beside the plots.
   */
  constructor(shared, side = []) {
    super(shared);
    this.ruler = new Ruler();
    this.clearSelection();
    this.player = new AudioPlayer({
      timeChanged: () => this.paintMarkers(),
      changed: () => this.updateControls(),
      failed: (text) => (this.lead.textContent = text),
    });
    this.button = iconButton("play", "Play (space)", () => this.player.toggle());
    this.clock = createElement("span", { class: "jm-number jm-muted jm-clock" });
    this.lead = createElement("p", { class: "jm-lead jm-current" });
    this.symbols = new Caption(
      {
        pointer: (n, event) => event.pointerType !== "touch" && this.select({ hovered: n }),
        pin: (n) => this.select({ pinnedSymbol: this.pinnedSymbol === n ? null : n, hovered: null, cursor: null }),
        moveTo: (n) => this.select({ cursor: n, hovered: null }),
      },
      this.constructor.symbols,
    );
    this.canvas = createElement("canvas", { role: "img" });
    this.overlay = createElement("canvas", { class: "jm-overlay", aria: { hidden: "true" } });
    this.note = createElement("p", { class: "jm-muted jm-speech-note" });
    this.plot = createElement(
      "div",
      {
        class: "jm-plot",
        onpointermove: (event) => this.handlePointer(event),
        onpointerdown: (event) => this.handlePointer(event),
        onpointerleave: (event) => event.pointerType === "mouse" && this.handleLeave(),
        onpointerup: (event) => event.pointerType === "touch" && this.handleLeave(),
        onpointercancel: () => this.handleLeave(),
        onclick: (event) => this.handleClick(event),
      },
      [this.canvas, this.overlay],
    );
    this.el = createElement("div", { class: "jm-speech" }, [
      createElement("div", { class: "jm-speech-main" }, [
        createElement("div", { class: "jm-player" }, [this.button, this.clock, this.lead]),
        this.symbols.el,
        this.plot,
        this.note,
      ]),
      ...side,
    ]);
    this.resizeObserver = new ResizeObserver(() => this.paint());
    this.resizeObserver.observe(this.plot);
  }

  clearSelection() {
    this.hovered = this.cursor = this.pinnedSymbol = null; // symbols: under the pointer, selected by keys, clicked
    this.pointedStep = null; // under the pointer, or selected by keys
  }

  show(content) {
    const medium = content.item[this.constructor.medium];
    if (this.medium !== medium) {
      this.clearSelection();
      this.mel = decodeBase64(medium.mel);
      this.player.load(medium.wav);
    }
    if (this.medium !== medium || `${this.content.shape}` !== `${content.shape}`) this.map = null;
    Object.assign(this, { content, medium });
    this.timeline = this.createTimeline();
    this.fillSymbols();
    this.updateControls();
    this.loading = this.load(content);
    return this.loading;
  }

  fillSymbols() {
    const { symbolTexts: texts } = this,
      { numSymbols } = this.timeline,
      names = Array.from({ length: numSymbols }, (_, n) => (texts ? truncateText(texts[n], 12) : formatCount(n)));
    if (`${names}` !== `${this.names}`) this.symbols.fill(this.hasCaption ? names.slice(0, MAX_SYMBOLS) : []);
    this.names = names;
  }

  async load(content) {
    const answer = await this.events.whole("pooled_map", ALIGNMENT_SIZE);
    if (this.content !== content || !answer) return;
    this.map = this.createMap(answer);
    this.refresh();
  }

  retry() {
    return this.map ? undefined : this.load(this.content);
  }

  // ---------------------------------------------------------------- data

  /**
   * Return { numSteps, numSymbols, start, step, length, sound }: the start of the first step and the duration of each,
   * the length of the time axis, and the time when the sound ends, in seconds.
   */
  createTimeline() {
    throw new Error("not implemented");
  }

  /** Return the map (see alignment.js) of an answer. */
  createMap() {
    throw new Error("not implemented");
  }

  /** The texts of the symbols, or null: they are numbered. */
  get symbolTexts() {
    return this.content.cols;
  }

  /** Whether the symbols are shown as a text. */
  get hasCaption() {
    return this.symbolTexts !== null;
  }

  get selected() {
    return this.hovered ?? this.cursor ?? this.pinnedSymbol;
  }

  /** The current step: under the pointer, or playing. */
  get row() {
    return this.pointedStep ?? (this.player.playing ? this.rowAt(this.player.time) : null);
  }

  rowAt(seconds) {
    const { numSteps, start, step } = this.timeline;
    return clamp(Math.floor((seconds - start) / step), 0, numSteps - 1);
  }

  /** When a step begins. */
  secondsOf(row) {
    const { start, step, length } = this.timeline;
    return clamp(start + row * step, 0, length);
  }

  /** The middle of a step. */
  middleOf(row) {
    return this.secondsOf(row + 0.5);
  }

  curve() {
    return this.appearance.curveTo(this.map?.most || 1, "root");
  }

  legend() {
    return this.map && { curve: this.curve(), list: this.appearance.list, title: "attention weight" };
  }

  // ---------------------------------------------------------------- page

  updateControls() {
    const { playing, ready } = this.player,
      label = playing ? "Pause (space)" : "Play (space)";
    this.button.hidden = this.clock.hidden = !ready;
    this.button.title = label;
    this.button.setAttribute("aria-label", label);
    this.button.replaceChildren(icon(playing ? "pause" : "play"));
    this.plot.classList.toggle("jm-playable", ready);
    this.paintMarkers();
  }

  refresh() {
    if (!this.map) return;
    const { appearance } = this;
    this.highlighted = null; // colours may have changed
    this.images = {
      mel: melImage(this.mel, this.medium.shape, appearance.spectrogramColours),
      map: alignmentImage(this.map.answer, this.curve(), appearance.colours, this.constructor.isUpwards),
    };
    this.canvas.setAttribute("aria-label", this.describePlots());
    this.paint();
    this.events.changed();
  }

  describePlots() {
    const { numSteps, numSymbols, length } = this.timeline,
      about = `Spectrogram of ${length.toFixed(2)} seconds`;
    return `${about}, and the alignment of its ${formatCount(numSteps)} steps to ${formatCount(numSymbols)} symbols`;
  }

  paint() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!this.map || !this.images || width < 60 || height < 60) return;
    const { appearance, names, timeline, medium } = this,
      { isUpwards, mapTitle } = this.constructor,
      [bands, frames] = medium.shape;
    this.ruler.use(appearance.font);
    const widest = Math.max(...names.slice(0, 400).concat(names.slice(-1)).map((text) => this.ruler.width(text)));
    this.box = layoutSpectrogram(width, height, Math.min(110, Math.max(14, widest)) + 16, names.length, this.maxColumns);
    paintSpeech(sizeCanvas(this.canvas, width, height), this.box, {
      ...this.images,
      appearance,
      ruler: this.ruler,
      words: names,
      length: timeline.length,
      bands,
      melSpan: this.melSpan(frames).map((seconds) => seconds / timeline.length),
      mapSpan: this.mapSpan,
      mapTitle,
      isUpwards,
    });
    this.paintMarkers();
  }

  /** The number of columns of symbols beside the map, if there are many; undefined: the usual one. */
  get maxColumns() {
    return undefined;
  }

  /** When the frames of the spectrogram begin and end, in seconds. */
  melSpan(frames) {
    return [0, frames * this.medium.frame_seconds];
  }

  /** The start and the end of the steps as fractions of the time axis. */
  get mapSpan() {
    const { start, step, numSteps, length } = this.timeline;
    return [start / length, (start + numSteps * step) / length];
  }

  // Paint what moves, and describe it.
  paintMarkers() {
    if (!this.content) return;
    const { ready, playing, time } = this.player,
      { length, sound: total } = this.timeline;
    if (ready) this.clock.textContent = `${Math.min(time, total).toFixed(2)} / ${total.toFixed(2)} s`;
    if (!this.map || !this.box) return;
    const { selected, row, pinnedSymbol, cursor } = this,
      selection = `${selected} ${row} ${pinnedSymbol} ${cursor}`;
    if (selection !== this.highlighted) {
      this.highlighted = selection;
      this.symbols.highlight({ selected, pinned: pinnedSymbol, cursor }, this.createShading(row));
      this.showCurrent(selected, row);
      if (playing && row !== null) this.symbols.reveal(this.map.rankSymbols(row, 1)[0].n);
    }
    paintMarkers(sizeCanvas(this.overlay, this.plot.clientWidth, this.plot.clientHeight), this.box, {
      symbol: selected,
      profile: selected === null ? [] : this.map.profile(selected),
      words: this.names,
      pointed: this.pointedStep === null ? null : this.middleOf(this.pointedStep) / length,
      played: ready && (playing || time > 0) ? Math.min(1, time / length) : null,
      mapSpan: this.mapSpan,
      isUpwards: this.constructor.isUpwards,
      appearance: this.appearance,
      ruler: this.ruler,
    });
  }

  // Symbols are shaded by their weights in the current step.
  createShading(row) {
    const weights = row === null ? null : this.map.at(row),
      top = weights ? Math.max(...weights) || 1 : 1;
    return (element, n) => this.appearance.shade(element, weights ? weights[n] / top : 0, 15);
  }

  showCurrent(selected, row) {
    if (selected !== null)
      return this.lead.replaceChildren(
        createWord(this.names[selected], { class: selected === this.pinnedSymbol ? "jm-pinned" : "jm-selected" }),
        createElement("span", { class: "jm-muted jm-number", text: `  ${this.describeSpan(selected)}` }),
      );
    if (row !== null) {
      const [best] = this.map.rankSymbols(row, 1);
      return this.lead.replaceChildren(
        createElement("span", { class: "jm-number", text: `${this.secondsOf(row).toFixed(2)} s  ` }),
        createWord(this.names[best.n], { class: "jm-selected" }),
        createElement("span", { class: "jm-muted jm-number", text: `  ${formatWeight(best.value)}` }),
      );
    }
    const play = this.player.ready ? "; click to play from there" : "",
      text = `Hover a symbol or a time${play}.`;
    return this.lead.replaceChildren(createElement("span", { class: "jm-muted", text }));
  }

  describeSpan(symbol) {
    const span = this.map.findSpan(symbol);
    if (!span) return "never has the highest weight";
    const [from, to] = [span.from, span.to].map((row) => this.secondsOf(row).toFixed(2)),
      gaps = span.numSteps < span.to - span.from ? ", with interruptions" : "";
    return `highest weight from ${from} to ${to} s${gaps}`;
  }

  // ---------------------------------------------------------------- pointer

  select(change) {
    Object.assign(this, change);
    this.paintMarkers();
  }

  // The step under the pointer, with the symbol if it is in the map; or the symbol beside the plots.
  placeAt({ clientX, clientY }) {
    const { left, top } = this.plot.getBoundingClientRect(),
      { box } = this,
      { numSymbols, length } = this.timeline;
    const x = clientX - left,
      y = clientY - top,
      part = (x - box.x) / box.w;
    const down = (y - box.y) / box.h,
      symbol = Math.floor((this.constructor.isUpwards ? 1 - down : down) * numSymbols),
      isInMap = down > 0 && down < 1;
    if (part >= 0 && part < 1 && y >= box.mel.y && y <= box.y + box.h)
      return { step: this.rowAt(part * length), part, below: isInMap ? symbol : null };
    return x < box.x && isInMap ? { symbol } : {};
  }

  handlePointer(event) {
    if (!this.map || !this.box) return;
    const { step = null, symbol = null } = this.placeAt(event);
    this.select({ pointedStep: step, hovered: symbol });
    this.events.tooltip(step === null ? null : this.tooltipLines(step), event.clientX, event.clientY);
  }

  handleClick(event) {
    const { part, symbol } = this.map && this.box ? this.placeAt(event) : {};
    if (part !== undefined) {
      this.handleLeave(); // playback is described now
      this.player.playFrom(part * this.timeline.length);
    }
    if (symbol !== undefined) this.select({ pinnedSymbol: this.pinnedSymbol === symbol ? null : symbol });
  }

  handleLeave() {
    this.select({ pointedStep: null, hovered: null });
    this.events.tooltip(null);
  }

  tooltipLines(row) {
    const text = `${this.secondsOf(row).toFixed(2)} s, step ${formatCount(row)}`,
      best = this.map.rankSymbols(row, NUM_RANKED_SYMBOLS).map(({ n, value }) => ({ n, value, text: this.names[n] }));
    return [
      createElement("div", { class: "jm-muted jm-number", text }),
      createRanking(best, this.selected, this.appearance.inks),
    ];
  }

  // ---------------------------------------------------------------- keys

  handleKey(key, shiftKey, button) {
    const inText = button && this.symbols.el.contains(button);
    if (key === " " && (!button || inText)) return (this.player.toggle(), true);
    if (!this.map) return false;
    if (key !== "Escape" && (shiftKey || inText)) {
      const next = this.symbols.next(key, this.selected);
      return next === null ? false : this.moveToSymbol(next);
    }
    const last = this.timeline.numSteps - 1,
      by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const { pointedStep } = this;
    if (by) return this.moveToStep(pointedStep === null ? (by > 0 ? 0 : last) : clamp(pointedStep + by, 0, last));
    if (key === "Home" || key === "End") return this.moveToStep(key === "Home" ? 0 : last);
    if (key === "Enter" && pointedStep !== null && !button)
      return (this.player.playFrom(this.secondsOf(pointedStep)), true);
    if (key === "Escape" && (pointedStep !== null || this.selected !== null)) {
      if (inText) this.el.closest(".jumok").focus({ preventScroll: true });
      this.clearSelection();
      this.handleLeave();
      return true;
    }
    return false;
  }

  // Move from step to step, and announce the symbol with the highest weight.
  moveToStep(row) {
    this.select({ pointedStep: row, hovered: null });
    this.events.tooltip(null);
    const [{ n, value }] = this.map.rankSymbols(row, 1);
    this.events.announce(`${this.secondsOf(row).toFixed(2)} seconds: ${this.names[n]} ${formatWeight(value)}`);
    return true;
  }

  moveToSymbol(n) {
    this.select({ cursor: n, hovered: null, pointedStep: null });
    this.symbols.focus(n);
    this.events.tooltip(null);
    this.events.announce(`${this.names[n]} ${this.describeSpan(n)}`);
    return true;
  }

  /** Save the plots as an image. */
  save() {
    const { width, height } = this.canvas,
      whole = createElement("canvas", { width, height }),
      context = whole.getContext("2d");
    context.fillStyle = this.appearance.inks.page;
    context.fillRect(0, 0, width, height);
    context.drawImage(this.canvas, 0, 0);
    return encodePng(whole);
  }

  deactivate() {
    this.player.stop();
  }

  close() {
    this.resizeObserver.disconnect();
    this.player.close();
  }
}
