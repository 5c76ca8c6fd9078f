// Speech: its spectrogram with the alignment under it, its sound, and the style tokens it was said with. Point at a
// symbol to see its frames, at a time to see its symbols; click a place to hear it from there.

import { Alignment } from "./alignment.js";
import { Caption } from "./caption.js";
import { count, curveOf, told } from "./colours.js";
import { canvasOf, icon, iconButton, make, word } from "./dom.js";
import { bytesOf, Sound } from "./sound.js";
import { alignmentImage, melImage, paintOn, paintSpeech, placesOf } from "./spectrum.js";
import { StylePanel } from "./style.js";
import { Ruler, shown } from "./text.js";

const MOST_SYMBOLS = 600; // in the line of text
const TOLD_SYMBOLS = 4; // of a time

export class SpeechView {
  /**
   * `events`: strip(), a promise of the whole map in few cells; retell(weights), a promise of what is then shown;
   * reset(), back to how it was; tip(lines or null, x, y); say(text); changed(), when the legend is another.
   */
  constructor({ look, events }) {
    Object.assign(this, { look, events });
    this.ruler = new Ruler();
    this.forget();
    this.sound = new Sound({
      moved: () => this.paintOver(),
      changed: () => this.dress(),
      failed: (text) => (this.lead.textContent = text),
    });
    this.button = iconButton("play", "Play (space)", () => this.sound.toggle());
    this.clock = make("span", { class: "jm-number jm-soft jm-clock" });
    this.lead = make("p", { class: "jm-lead jm-now" });
    this.symbols = new Caption(
      {
        point: (n, event) => event.pointerType !== "touch" && this.choose({ pointed: n }),
        pin: (n) => this.choose({ held: this.held === n ? null : n, pointed: null, cursor: null }),
        go: (n) => this.choose({ cursor: n, pointed: null }),
      },
      "Symbols of the text",
    );
    this.canvas = make("canvas", { role: "img" });
    this.veil = make("canvas", { class: "jm-veil", aria: { hidden: "true" } });
    this.note = make("p", { class: "jm-soft jm-health" });
    this.plot = make(
      "div",
      {
        class: "jm-plot",
        onpointermove: (event) => this.point(event),
        onpointerdown: (event) => this.point(event),
        onpointerleave: (event) => event.pointerType === "mouse" && this.leave(),
        onpointerup: (event) => event.pointerType === "touch" && this.leave(),
        onpointercancel: () => this.leave(),
        onclick: (event) => this.clicked(event),
      },
      [this.canvas, this.veil],
    );
    this.style = new StylePanel({
      wish: (weights) => this.retell(weights),
      reset: () => events.reset(),
      play: () => this.sound.toggle(),
    });
    this.el = make("div", { class: "jm-speech" }, [
      make("div", { class: "jm-speech-main" }, [
        make("div", { class: "jm-player" }, [this.button, this.clock, this.lead]),
        this.symbols.el,
        this.plot,
        this.note,
      ]),
      this.style.el,
    ]);
    this.watch = new ResizeObserver(() => this.paint());
    this.watch.observe(this.plot);
  }

  forget() {
    this.pointed = this.cursor = this.held = null; // symbols: under the pointer, gone to by keys, clicked
    this.at = null; // a step in time: under the pointer, or gone to by keys
  }

  /** `scene` as in the manifest. */
  show(content, scene) {
    const { speech, style } = scene;
    this.told = scene;
    this.style.show(style, scene.number !== undefined);
    if (this.speech !== speech) {
      this.forget();
      this.mel = bytesOf(speech.mel);
      this.note.replaceChildren(word(speech.note));
      this.note.hidden = !speech.note;
      this.sound.load(speech.wave);
    }
    if (this.speech !== speech || `${this.content.shape}` !== `${content.shape}`) this.map = null;
    Object.assign(this, { content, speech });
    const { cols, shape } = content,
      names = Array.from({ length: shape[1] }, (_, n) => (cols ? shown(cols[n], 12) : count(n)));
    if (`${names}` !== `${this.names}`) this.symbols.fill(cols ? names.slice(0, MOST_SYMBOLS) : []);
    this.names = names;
    this.dress();
    this.shown = this.load(content);
    return this.shown;
  }

  async load(content) {
    const answer = await this.events.strip();
    if (this.content !== content || !answer) return;
    this.map = new Alignment(answer, content.shape);
    this.refresh();
  }

  // ---------------------------------------------------------------- what there is

  /** All of the time, in seconds: that of the steps, the last of which may have fewer frames. */
  get length() {
    return this.content.shape[0] * this.speech.step * this.speech.seconds;
  }

  get chosen() {
    return this.pointed ?? this.cursor ?? this.held;
  }

  /** The step that is looked at: pointed at, or heard. */
  get row() {
    return this.at ?? (this.sound.playing ? this.rowAt(this.sound.time) : null);
  }

  rowAt(seconds) {
    const [steps] = this.content.shape;
    return Math.max(0, Math.min(steps - 1, Math.floor((seconds / this.length) * steps)));
  }

  secondsOf(row) {
    return (row / this.content.shape[0]) * this.length;
  }

  curve() {
    const { wish, less } = this.look,
      top = Math.max(1e-9, (this.map?.most || 1) * less);
    return curveOf(wish === "auto" ? "root" : wish, top * 1e-3, top);
  }

  legend() {
    const { list, wish } = this.look;
    return this.map && { curve: this.curve(), list, log: wish === "log", title: "attention weight" };
  }

  // ---------------------------------------------------------------- the page

  dress() {
    const { playing, ready } = this.sound,
      label = playing ? "Pause (space)" : "Play (space)";
    this.button.hidden = this.clock.hidden = !ready;
    this.button.title = label;
    this.button.setAttribute("aria-label", label);
    this.button.replaceChildren(icon(playing ? "pause" : "play"));
    this.plot.classList.toggle("jm-playable", ready);
    this.paintOver();
  }

  refresh() {
    if (!this.map) return;
    const [bands, frames] = this.speech.shape,
      { look, content } = this;
    this.marked = null; // colours may be others
    this.images = {
      mel: melImage(this.mel, [bands, frames], look.glowColours),
      map: alignmentImage(this.map.answer, this.curve(), look.colours),
    };
    const [steps, symbols] = content.shape.map(count),
      about = `Spectrogram of ${this.length.toFixed(2)} seconds`;
    this.canvas.setAttribute("aria-label", `${about}, and the alignment of its ${steps} steps to ${symbols} symbols`);
    this.paint();
    this.events.changed();
  }

  paint() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!this.map || !this.images || width < 60 || height < 60) return;
    const { look, names } = this,
      [bands, frames] = this.speech.shape;
    this.ruler.use(look.font);
    const widest = Math.max(...names.slice(0, 400).map((text) => this.ruler.width(text)));
    this.box = placesOf(width, height, Math.min(110, Math.max(14, widest)) + 16, names.length);
    paintSpeech(canvasOf(this.canvas, width, height), this.box, {
      ...{ ...this.images, look, ruler: this.ruler, words: names, length: this.length, bands },
      part: Math.min(1, (frames * this.speech.seconds) / this.length),
    });
    this.paintOver();
  }

  // What moves: lines, and what is told of them.
  paintOver() {
    if (!this.content) return;
    const { ready, playing, time } = this.sound,
      total = this.speech.shape[1] * this.speech.seconds;
    if (ready) this.clock.textContent = `${Math.min(time, total).toFixed(2)} / ${total.toFixed(2)} s`;
    if (!this.map || !this.box) return;
    const { chosen, row } = this;
    const now = `${chosen} ${row} ${this.held} ${this.cursor}`;
    if (now !== this.marked) {
      this.marked = now;
      this.symbols.mark({ chosen, pinned: this.held, cursor: this.cursor }, this.tinting(row));
      this.tellNow(chosen, row);
      if (playing && row !== null) this.symbols.reveal(this.map.ranked(row, 1)[0].n);
    }
    paintOn(canvasOf(this.veil, this.plot.clientWidth, this.plot.clientHeight), this.box, {
      symbol: chosen,
      profile: chosen === null ? [] : this.map.profile(chosen),
      words: this.names,
      pointed: this.at === null ? null : (this.at + 0.5) / this.content.shape[0],
      heard: ready && (playing || time > 0) ? Math.min(1, time / this.length) : null,
      ...{ look: this.look, ruler: this.ruler },
    });
  }

  // Symbols are shaded by how much the step that is pointed at, or heard, looks at each.
  tinting(row) {
    const { look } = this;
    if (row === null)
      return (el) => {
        el.style.backgroundColor = el.style.color = "";
      };
    const here = this.map.at(row),
      top = Math.max(...here) || 1;
    return (el, n) => {
      const shade = Math.round((here[n] / top) * 255),
        colour = look.tints[shade];
      el.style.backgroundColor = shade > 15 ? `rgb(${colour})` : "";
      el.style.color = shade > 15 ? look.inkOn(colour) : "";
    };
  }

  tellNow(chosen, row) {
    if (chosen !== null)
      return this.lead.replaceChildren(
        word(this.names[chosen], { class: chosen === this.held ? "jm-pinned" : "jm-shown" }),
        make("span", { class: "jm-soft jm-number", text: `  ${this.when(chosen)}` }),
      );
    if (row !== null) {
      const [best] = this.map.ranked(row, 1);
      return this.lead.replaceChildren(
        make("span", { class: "jm-number", text: `${this.secondsOf(row).toFixed(2)} s  ` }),
        word(this.names[best.n], { class: "jm-shown" }),
        make("span", { class: "jm-soft jm-number", text: `  ${told(best.value)}` }),
      );
    }
    const play = this.sound.ready ? "; click to play from there" : "",
      text = `Point at a symbol or at a time${play}.`;
    return this.lead.replaceChildren(make("span", { class: "jm-soft", text }));
  }

  when(symbol) {
    const found = this.map.spoken(symbol);
    if (!found) return "is at no time looked at most";
    const [from, to] = [found.from, found.to].map((row) => this.secondsOf(row).toFixed(2)),
      gaps = found.many < found.to - found.from ? ", with others between" : "";
    return `looked at most from ${from} to ${to} s${gaps}`;
  }

  // ---------------------------------------------------------------- pointing

  choose(change) {
    Object.assign(this, change);
    this.paintOver();
  }

  // What lies under the pointer: a step in time, or beside the plots a symbol.
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

  point(event) {
    if (!this.map || !this.box) return;
    const { step = null, symbol = null } = this.placeAt(event);
    this.choose({ at: step, pointed: symbol });
    this.events.tip(step === null ? null : this.lines(step), event.clientX, event.clientY);
  }

  clicked(event) {
    const { part, symbol } = this.map && this.box ? this.placeAt(event) : {};
    if (part !== undefined) {
      this.leave(); // what is heard is told now
      this.sound.from(part * this.length);
    }
    if (symbol !== undefined) this.choose({ held: this.held === symbol ? null : symbol });
  }

  leave() {
    this.choose({ at: null, pointed: null });
    this.events.tip(null);
  }

  lines(row) {
    const best = this.map.ranked(row, TOLD_SYMBOLS),
      top = best[0].value || 1;
    return [
      make("div", { class: "jm-soft jm-number", text: `${this.secondsOf(row).toFixed(2)} s, step ${count(row)}` }),
      make(
        "div",
        { class: "jm-looked" },
        best.flatMap(({ n, value }) => [
          word(this.names[n], { class: n === this.chosen ? "jm-pinned" : "" }),
          make("span", { class: "jm-meter" }, [
            make("span", { css: { width: `${(100 * value) / top}%`, "background-color": this.look.inks.accent } }),
          ]),
          make("span", { class: "jm-number", text: told(value) }),
        ]),
      ),
    ];
  }

  // ---------------------------------------------------------------- keys

  /** Keys that mean something here; false for all others. */
  keyed(key, shiftKey, button) {
    const inText = button && this.symbols.el.contains(button);
    if (key === " " && (!button || inText)) return (this.sound.toggle(), true);
    if (!this.map) return false;
    if (key !== "Escape" && (shiftKey || inText)) {
      const next = this.symbols.next(key, this.chosen);
      return next === null ? false : this.walk(next);
    }
    const last = this.content.shape[0] - 1,
      by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (by) return this.go(this.at === null ? (by > 0 ? 0 : last) : Math.max(0, Math.min(last, this.at + by)));
    if (key === "Home" || key === "End") return this.go(key === "Home" ? 0 : last);
    if (key === "Enter" && this.at !== null && !button) return (this.sound.from(this.secondsOf(this.at)), true);
    if (key === "Escape" && (this.at !== null || this.chosen !== null)) {
      if (inText) this.el.closest(".jumok").focus({ preventScroll: true });
      this.forget();
      this.leave();
      return true;
    }
    return false;
  }

  // From step to step; what is looked at then is said.
  go(row) {
    this.choose({ at: row, pointed: null });
    this.events.tip(null);
    const [best] = this.map.ranked(row, 1);
    this.events.say(`${this.secondsOf(row).toFixed(2)} seconds: ${this.names[best.n]} ${told(best.value)}`);
    return true;
  }

  walk(n) {
    this.choose({ cursor: n, pointed: null, at: null });
    this.symbols.focus(n);
    this.events.tip(null);
    this.events.say(`${this.names[n]} ${this.when(n)}`);
    return true;
  }

  // ---------------------------------------------------------------- other styles

  // One at a time, and of wishes that came meanwhile the last.
  async retell(weights) {
    this.wish = weights;
    if (this.style.waits) return;
    this.style.wait(true);
    let trouble = "";
    try {
      while (this.wish) {
        const wish = this.wish;
        this.wish = null;
        await this.events.retell(wish);
        await this.shown;
      }
    } catch (error) {
      this.wish = null;
      trouble = error.message;
    }
    this.style.wait(false);
    this.style.show(this.told.style, this.told.number !== undefined); // the sliders as it is heard
    this.style.say(trouble && `It could not be said so: ${trouble}`);
    if (!trouble && this.style.atOnce.checked) this.sound.from(0);
  }

  /** A PNG of what is drawn. */
  save() {
    const { width, height } = this.canvas,
      whole = make("canvas", { width, height }),
      context = whole.getContext("2d");
    context.fillStyle = this.look.inks.page;
    context.fillRect(0, 0, width, height);
    context.drawImage(this.canvas, 0, 0);
    return new Promise((resolve) => whole.toBlob(resolve));
  }

  /** Another view is shown. */
  away() {
    this.sound.stop();
  }

  close() {
    this.watch.disconnect();
    this.sound.close();
  }
}
