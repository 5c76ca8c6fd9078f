// Speech: spectrogram, alignment, audio, and style tokens. Hover a symbol to see its frames, hover a time to see its
// symbols; click to play from there.

import { Alignment } from "./alignment.js";
import { Caption } from "./caption.js";
import { formatCount, formatWeight, pluralize } from "./colours.js";
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
import { StylePanel } from "./style_panel.js";
import { ALIGNMENT_SIZE } from "./tiles.js";
import { Ruler, truncateText } from "./token_text.js";
import { View } from "./view.js";

const MAX_SYMBOLS = 600; // shown as text
const NUM_RANKED_SYMBOLS = 4; // listed for a step

export class SpeechView extends View {
  static title = "Speech";
  static keys = [
    ["Space", "play, pause"],
    ["← →, Home, End", "move by step"],
    ["Enter", "play from the step"],
    ["Shift + ← →", "move by symbol"],
    ["Esc", "clear the selection"],
    ["↑ ↓", "previous, next layer"],
  ];
  static hint = "Hover a symbol to see its frames, hover a time to see its symbols; click to play from there.";
  static medium = "speech";

  static describe({ speech }, { kind, shape: [steps, symbols] }) {
    const seconds = (speech.shape[1] * speech.frame_seconds).toFixed(2);
    return [`${kind} attention`, pluralize(symbols, "symbol"), `${pluralize(steps, "step")} in ${seconds} s`];
  }

  /**
   * `events`: whole("pooled_map", size) returns a promise of the whole map in few cells; resynthesize(weights) a
   * promise; reset() restores the recorded synthesis; tooltip(lines or null, x, y); announce(text); changed(), when the
   * legend changes.
   */
  constructor(shared) {
    super(shared);
    const { events } = shared;
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
      "Symbols of the text",
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
    this.style = new StylePanel({
      resynthesize: (weights) => this.resynthesize(weights),
      reset: () => events.reset(),
      play: () => this.player.toggle(),
    });
    this.el = createElement("div", { class: "jm-speech" }, [
      createElement("div", { class: "jm-speech-main" }, [
        createElement("div", { class: "jm-player" }, [this.button, this.clock, this.lead]),
        this.symbols.el,
        this.plot,
        this.note,
      ]),
      this.style.el,
    ]);
    this.resizeObserver = new ResizeObserver(() => this.paint());
    this.resizeObserver.observe(this.plot);
  }

  clearSelection() {
    this.hovered = this.cursor = this.pinnedSymbol = null; // symbols: under the pointer, selected by keys, clicked
    this.pointedStep = null; // under the pointer, or selected by keys
  }

  show(content) {
    const { speech, style, number } = content.item;
    this.data = content.item;
    this.style.show(style, number !== undefined);
    if (this.speech !== speech) {
      this.clearSelection();
      this.mel = decodeBase64(speech.mel);
      this.note.replaceChildren(createWord(speech.note));
      this.note.hidden = !speech.note;
      this.player.load(speech.wav);
    }
    if (this.speech !== speech || `${this.content.shape}` !== `${content.shape}`) this.map = null;
    Object.assign(this, { content, speech });
    const { cols, shape } = content,
      names = Array.from({ length: shape[1] }, (_, n) => (cols ? truncateText(cols[n], 12) : formatCount(n)));
    if (`${names}` !== `${this.names}`) this.symbols.fill(cols ? names.slice(0, MAX_SYMBOLS) : []);
    this.names = names;
    this.updateControls();
    this.loading = this.load(content);
    return this.loading;
  }

  async load(content) {
    const answer = await this.events.whole("pooled_map", ALIGNMENT_SIZE);
    if (this.content !== content || !answer) return;
    this.map = new Alignment(answer, content.shape);
    this.refresh();
  }

  retry() {
    return this.map ? undefined : this.load(this.content);
  }

  // ---------------------------------------------------------------- data

  /** The duration of all steps in seconds; the last step may have fewer frames. */
  get length() {
    return this.content.shape[0] * this.speech.frames_per_step * this.speech.frame_seconds;
  }

  get selected() {
    return this.hovered ?? this.cursor ?? this.pinnedSymbol;
  }

  /** The current step: under the pointer, or playing. */
  get row() {
    return this.pointedStep ?? (this.player.playing ? this.rowAt(this.player.time) : null);
  }

  rowAt(seconds) {
    const [steps] = this.content.shape;
    return clamp(Math.floor((seconds / this.length) * steps), 0, steps - 1);
  }

  secondsOf(row) {
    return (row / this.content.shape[0]) * this.length;
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
    const [bands, frames] = this.speech.shape,
      { appearance, content } = this;
    this.highlighted = null; // colours may have changed
    this.images = {
      mel: melImage(this.mel, [bands, frames], appearance.spectrogramColours),
      map: alignmentImage(this.map.answer, this.curve(), appearance.colours),
    };
    const [steps, symbols] = content.shape.map(formatCount),
      about = `Spectrogram of ${this.length.toFixed(2)} seconds`;
    this.canvas.setAttribute("aria-label", `${about}, and the alignment of its ${steps} steps to ${symbols} symbols`);
    this.paint();
    this.events.changed();
  }

  paint() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!this.map || !this.images || width < 60 || height < 60) return;
    const { appearance, names } = this,
      [bands, frames] = this.speech.shape;
    this.ruler.use(appearance.font);
    const widest = Math.max(...names.slice(0, 400).map((text) => this.ruler.width(text)));
    this.box = layoutSpectrogram(width, height, Math.min(110, Math.max(14, widest)) + 16, names.length);
    paintSpeech(sizeCanvas(this.canvas, width, height), this.box, {
      ...this.images,
      appearance,
      ruler: this.ruler,
      words: names,
      length: this.length,
      bands,
      part: Math.min(1, (frames * this.speech.frame_seconds) / this.length),
    });
    this.paintMarkers();
  }

  // Paint what moves, and describe it.
  paintMarkers() {
    if (!this.content) return;
    const { ready, playing, time } = this.player,
      total = this.speech.shape[1] * this.speech.frame_seconds;
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
      pointed: this.pointedStep === null ? null : (this.pointedStep + 0.5) / this.content.shape[0],
      played: ready && (playing || time > 0) ? Math.min(1, time / this.length) : null,
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

  // The step under the pointer, or the symbol beside the plots.
  placeAt({ clientX, clientY }) {
    const { left, top } = this.plot.getBoundingClientRect(),
      { box } = this,
      [steps, symbols] = this.content.shape;
    const x = clientX - left,
      y = clientY - top,
      part = (x - box.x) / box.w;
    if (part >= 0 && part < 1 && y >= box.mel.y && y <= box.y + box.h) return { step: Math.floor(part * steps), part };
    const up = (box.y + box.h - y) / box.h;
    return x < box.x && up >= 0 && up < 1 ? { symbol: Math.floor(up * symbols) } : {};
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
      this.player.playFrom(part * this.length);
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
    const last = this.content.shape[0] - 1,
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

  // ---------------------------------------------------------------- synthesis

  // One synthesis at a time; of requests that came meanwhile, the last one is used.
  async resynthesize(weights) {
    this.requested = weights;
    if (this.style.isWaiting) return;
    this.style.wait(true);
    let message = "";
    try {
      while (this.requested) {
        const weights = this.requested;
        this.requested = null;
        await this.events.resynthesize(weights);
        await this.loading;
      }
    } catch (error) {
      this.requested = null;
      message = error.message;
    }
    this.style.wait(false);
    this.style.show(this.data.style, this.data.number !== undefined); // sliders as in the current audio
    this.style.showStatus(message && `Synthesis failed: ${message}`);
    if (!message && this.style.autoplay.checked) this.player.playFrom(0);
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
