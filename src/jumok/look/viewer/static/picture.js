// A picture under the weights of what was said of it: the words of its caption, or the patches of the picture itself.
// Point at a word to see its places, at a place to see its words.

import { Caption } from "./caption.js";
import { count, curveOf, told } from "./colours.js";
import { canvasOf, make, word } from "./dom.js";
import { Gaze, Ground, peakOf } from "./gaze.js";
import { boxOf, coloursOf, paintOver } from "./overlay.js";
import { Strip } from "./strip.js";
import { shown } from "./text.js";

const MOST_SAID = 400;
const TOLD = 5; // words that are told of a place
const SCALES_OF = { own: "Each word its own", all: "One for all words" };

export class PictureView {
  /**
   * `events`: all() a promise of all weights, row(n) and received() of those of one query and of the mean of all;
   * pin(row); tip(lines or null, x, y); say(text); changed(), when the legend is another.
   */
  constructor({ look, events }) {
    Object.assign(this, { look, events });
    this.pinned = null;
    this.pointed = null; // the word under the pointer
    this.cursor = null; // the word that keys have gone to
    this.place = null; // the place under the pointer, or that keys have gone to
    this.scale = "own";
    this.names = [];
    this.lead = make("p", { class: "jm-lead jm-now" });
    this.image = make("img", { class: "jm-photo", alt: "The picture that the model looked at", draggable: "false" });
    this.veil = make("canvas", { class: "jm-veil", role: "img" });
    this.cell = make("div", { class: "jm-cell", hidden: true });
    this.frame = make(
      "div",
      {
        class: "jm-frame",
        onpointermove: (event) => this.point(event),
        onpointerdown: (event) => this.point(event),
        onpointerleave: (event) => event.pointerType === "mouse" && this.leave(), // a finger always leaves
        onpointercancel: () => this.leave(),
        onclick: (event) => this.clicked(event),
      },
      [this.image, this.veil, this.cell],
    );
    this.strength = make("input", {
      type: "range",
      min: "0",
      max: "1",
      step: "0.05",
      value: "0.7",
      aria: { label: "Strength of the overlay" },
      oninput: () => this.refresh(),
    });
    this.scales = make("div", { class: "jm-tabs", role: "group", aria: { label: "Scale of the weights" } });
    const point = (n, event) => this.pointAt(n, event),
      pin = (n) => this.pin(n);
    this.caption = new Caption({ point, pin, go: (n) => this.goTo(n) });
    this.strip = new Strip({ look, events: { point, pin } });
    this.el = make("div", { class: "jm-picture" }, [
      make("div", { class: "jm-bar" }, [
        this.lead,
        make("div", { class: "jm-bar jm-ways" }, [
          this.scales,
          make("label", { class: "jm-field" }, [make("span", { text: "Overlay" }), this.strength]),
        ]),
      ]),
      this.caption.el,
      this.frame,
      this.strip.el,
    ]);
    this.watch = new ResizeObserver(() => this.paintVeil());
    this.watch.observe(this.frame);
    this.elsewhere = (event) => !this.frame.contains(event.target) && this.place !== null && this.leave();
    document.addEventListener("pointerdown", this.elsewhere);
  }

  async show(content, picture) {
    const { content: before } = this;
    if (this.picture !== picture || before.rows !== content.rows || `${before.shape}` !== `${content.shape}`) {
      this.loaded = null; // else what was shown stays until the new numbers are there
      Object.assign(this, { content, picture, ground: new Ground(picture, content.shape) });
      this.opened = this.open(picture);
    }
    this.content = content;
    try {
      await this.opened;
      await this.load();
      this.trouble = "";
    } catch (error) {
      if (this.content !== content) return;
      this.loaded = null;
      this.trouble = error.message;
    }
    if (this.content === content) this.refresh();
  }

  // ---------------------------------------------------------------- what there is

  async open(picture) {
    this.pointed = this.cursor = this.place = null;
    this.dress();
    if (this.image.src !== picture.source) {
      this.image.src = picture.source;
      await this.image.decode().catch(() => {}); // then it has no width, and that is told
    }
    const ratio = this.image.naturalWidth / this.image.naturalHeight || 1;
    this.frame.style.setProperty("--ratio", `${ratio}`);
    this.names = this.words();
    this.caption.fill(this.names);
    this.strip.fill(this.ground.isSelf ? [] : this.names, ratio);
    this.el.style.setProperty("--shot-tall", `${this.ground.isSelf ? 0 : this.strip.size[1]}px`);
  }

  // Of a picture that looks at itself, the words are the keys before its patches, like [CLS].
  words() {
    const { rows, shape } = this.content,
      length = this.ground.isSelf ? this.picture.first : Math.min(shape[0], MOST_SAID);
    return Array.from({ length }, (_, n) => (rows ? shown(rows[n], 40) : `token ${count(n)}`));
  }

  // The weights: of a caption all at once, for any word may be pointed at; of patches those of one.
  async load() {
    const { content, pinned, ground } = this,
      single = ground.isSelf;
    const of = `${content.layer} ${content.head} ${single ? pinned : ""}`;
    if (this.loaded?.of === of) return;
    const { all, received, row } = this.events,
      { values } = await (!single ? all() : pinned === null ? received() : row(pinned));
    if (this.content === content && this.pinned === pinned) this.loaded = new Gaze(ground, values, { of, single });
  }

  /** The word whose places are shown; null is the mean of all. */
  get chosen() {
    return this.ground.isSelf ? this.pinned : (this.pointed ?? this.cursor ?? this.pinned);
  }

  weights(n) {
    return this.loaded.weights(n);
  }

  curve(weights) {
    const { wish, less } = this.look,
      top = Math.max(1e-9, (this.scale === "all" ? this.loaded.most : Math.max(...weights)) * less);
    return curveOf(wish === "auto" ? "linear" : wish, top * 1e-3, top);
  }

  about(n) {
    const weights = this.weights(n);
    const { picture, look } = this;
    return { weights, picture, look, curve: this.curve(weights), strength: Number(this.strength.value) };
  }

  // ---------------------------------------------------------------- the page

  dress() {
    this.scales.hidden = this.ground.isSelf;
    this.scales.replaceChildren(
      ...Object.entries(SCALES_OF).map(([scale, text]) =>
        make("button", {
          type: "button",
          class: scale === this.scale ? "jm-choice jm-on" : "jm-choice",
          aria: { pressed: `${scale === this.scale}` },
          data: { scale },
          text,
          onclick: () => {
            this.scale = scale;
            this.dress();
            this.scales.querySelector(".jm-on").focus({ preventScroll: true });
            this.refresh();
          },
        }),
      ),
    );
  }

  /** As it is to be seen now: after other weights, another look. */
  refresh() {
    if (!this.content) return;
    if (this.loaded && this.image.naturalWidth) this.strip.paint(this.image, (n) => this.about(n));
    this.paint();
  }

  // What changes while one points.
  paint() {
    this.paintVeil();
    this.mark();
    this.tellChosen();
    this.events.changed();
  }

  paintVeil() {
    const { clientWidth: wide, clientHeight: tall } = this.frame;
    if (!this.content || !wide || !tall) return;
    const context = canvasOf(this.veil, wide, tall);
    if (this.loaded) paintOver(context, { ...this.about(this.chosen), wide, tall });
    if (this.ground.isSelf && this.pinned !== null && this.pinned >= this.picture.first) {
      const { x, y, w, h } = this.ground.cell(this.pinned - this.picture.first, boxOf(this.picture, wide, tall));
      context.strokeStyle = this.look.inks.pin;
      context.lineWidth = 2;
      context.strokeRect(x, y, w, h);
    }
  }

  mark() {
    const tint = this.tinting();
    this.caption.mark(this, tint);
    this.strip.mark(this, tint);
    this.markPlace();
  }

  // Words are shaded by how much each looked at the place that is pointed at, the strongest most. At a place that
  // none looked at more than by chance all stay pale.
  tinting() {
    const { look, place, loaded } = this;
    if (place === null || !loaded || this.ground.isSelf)
      return (el) => {
        el.style.backgroundColor = el.style.color = "";
      };
    const here = this.names.map((_, n) => this.weights(n)[place]),
      top = Math.max(2 / this.ground.places, ...here);
    return (el, n) => {
      const shade = Math.round((here[n] / top) * 255),
        colour = look.tints[shade];
      el.style.backgroundColor = shade > 7 ? `rgb(${colour})` : "";
      el.style.color = shade > 7 ? look.inkOn(colour) : "";
    };
  }

  markPlace() {
    this.cell.hidden = this.place === null;
    if (this.place === null) return;
    const { x, y, w, h } = this.ground.cell(this.place, boxOf(this.picture, 100, 100));
    for (const [name, value] of Object.entries({ left: x, top: y, width: w, height: h }))
      this.cell.style.setProperty(name, `${value}%`);
  }

  tellChosen() {
    const { chosen } = this;
    if (!this.loaded || !this.image.naturalWidth) {
      const waits = this.loaded ? "This browser cannot show the picture." : "One moment …";
      this.lead.textContent = this.trouble || waits;
      return;
    }
    const weights = this.weights(chosen),
      best = peakOf(weights),
      name = this.nameOf(chosen);
    const most = `most at ${this.ground.named(best)}: ${told(weights[best])}`;
    this.veil.setAttribute("aria-label", `Where the model looked, ${name}: ${most}`);
    this.lead.replaceChildren(
      word(name, { class: chosen !== null && chosen === this.pinned ? "jm-pinned" : "jm-shown" }),
      make("span", { class: "jm-soft jm-number", text: `  ${most}` }),
    );
  }

  nameOf(n) {
    if (n === null && this.ground.isSelf) return "Mean of all patches";
    if (n === null) return `Mean of ${count(this.content.shape[0])} words`;
    return this.names[n] ?? `Patch at ${this.ground.named(n - this.picture.first)}`;
  }

  /** What the legend shows. */
  legend() {
    if (!this.loaded) return null;
    const curve = this.curve(this.weights(this.chosen)),
      list = coloursOf(this.look, Number(this.strength.value));
    return { curve, list, log: this.look.wish === "log", title: "attention weight of a place" };
  }

  // ---------------------------------------------------------------- pointing

  pointAt(n, event) {
    if (event.pointerType === "touch") return; // a tap pins
    this.pointed = n;
    if (n !== null) this.cursor = this.place = null;
    this.paint();
  }

  pin(n) {
    this.place = this.cursor = null;
    this.events.tip(null);
    this.events.pin(n);
  }

  placeAt({ clientX, clientY }) {
    const { left, top, width, height } = this.frame.getBoundingClientRect();
    return this.ground.at(clientX - left, clientY - top, boxOf(this.picture, width, height));
  }

  point(event) {
    if (!this.loaded) return;
    const place = this.placeAt(event);
    if (place !== this.place) {
      this.place = place;
      this.mark();
    }
    this.events.tip(place === null ? null : this.lines(place), event.clientX, event.clientY);
  }

  // A patch that is clicked is the query whose places are shown.
  clicked(event) {
    const place = this.ground.isSelf ? this.placeAt(event) : null;
    if (place !== null) this.events.pin(this.ground.keyOf(place));
  }

  leave() {
    this.place = null;
    this.mark();
    this.events.tip(null);
  }

  // The words that looked most at a place, and the one that is chosen.
  ranked(place) {
    const found = this.loaded.ranked(this.names.length, place, TOLD, this.chosen);
    return found.map(({ n, value }) => ({ n, value, text: this.names[n] }));
  }

  lines(place) {
    const title = make("div", { class: "jm-soft jm-number", text: this.ground.named(place) });
    const { mean } = this.loaded;
    if (this.ground.isSelf) return [title, make("div", { class: "jm-weight", text: told(mean[place], 4) })];
    const best = this.ranked(place),
      top = best[0].value || 1;
    return [
      title,
      make(
        "div",
        { class: "jm-looked" },
        best.flatMap(({ n, text, value }) => [
          word(text, { class: n === this.chosen ? "jm-pinned" : "" }),
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
  keyed(key, shiftKey) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
    if (!this.loaded) return false;
    if (by && shiftKey) return this.move(...by);
    const next = this.ground.isSelf ? null : this.caption.next(key, this.cursor ?? this.pinned);
    if (next !== null) return this.walk(next);
    if (key === "Escape" && (this.cursor !== null || this.place !== null)) {
      this.leave();
      this.goTo(null);
      if (this.pinned !== null) this.events.pin(this.pinned);
      return true;
    }
    return false;
  }

  walk(n) {
    this.place = null;
    this.events.tip(null);
    this.goTo(n);
    this.caption.focus(n);
    const weights = this.weights(n),
      best = peakOf(weights);
    this.events.say(`${this.names[n]}: most at ${this.ground.named(best)}, ${told(weights[best])}`);
    return true;
  }

  goTo(n) {
    this.cursor = n;
    this.pointed = null;
    this.paint();
  }

  // From place to place; what is there is said.
  move(down, right) {
    const { place, ground } = this;
    this.place = place === null ? peakOf(this.weights(this.chosen)) : ground.beside(place, down, right);
    this.mark();
    const { right: x, bottom: y } = this.cell.getBoundingClientRect();
    this.events.tip(this.lines(this.place), x - 8, y - 8);
    const words = this.ground.isSelf
      ? told(this.weights(null)[this.place])
      : this.ranked(this.place)
          .map(({ text, value }) => `${text} ${told(value)}`)
          .join(", ");
    this.events.say(`${this.ground.named(this.place)}: ${words}`);
    return true;
  }

  /** A PNG of all words. */
  async save() {
    return this.strip.save(this.image, (n) => this.about(n));
  }

  close() {
    this.watch.disconnect();
    document.removeEventListener("pointerdown", this.elsewhere);
  }
}
