// An image with the weights of its caption's words, or of its own patches. Hover a word to see its patches, hover a
// patch to see its words.

import { Caption } from "./caption.js";
import { formatCount, formatWeight, pluralize } from "./colours.js";
import { createField, createRanking, createSlider, createToggles } from "./controls.js";
import { ARROWS, createElement, createWord, sizeCanvas } from "./dom.js";
import { CaptionWeights, ImageGrid, findPeak } from "./image_weights.js";
import { regionBox, overlayColours, paintOverlay } from "./overlay.js";
import { CaptionThumbnails } from "./thumbnails.js";
import { truncateText } from "./token_text.js";
import { View } from "./view.js";

const MAX_WORDS_SHOWN = 400;
const NUM_RANKED_WORDS = 5; // words that are listed for a patch
const SCALE_MODES = { own: "Scale per word", all: "Shared scale" };

export class ImageView extends View {
  static title = "Image";
  static keys = [
    ["← →, Home, End", "move by word"],
    ["Shift + arrows", "move by patch"],
    ["Enter, Esc", "pin the word, show the mean of all words"],
    ["↑ ↓", "previous, next layer"],
  ];
  static hint = "Hover a word to see its patches, hover a patch to see its words; click a word to pin it.";
  static medium = "image";
  static hasColours = false; // the colours of the overlay are fixed

  static describe({ image }, { kind, shape }) {
    const words = shape[0] === shape[1] ? [] : [pluralize(shape[0], "word")];
    return [`${kind} attention`, ...words, `${image.grid.map(formatCount).join(" × ")} patches`];
  }

  /**
   * `events`: whole("weights") returns a promise of all weights, row(n) and received() of those of one query and of the
   * mean; pin(row); tooltip(lines or null, x, y); announce(text); changed(), when the legend changes.
   */
  constructor(shared) {
    super(shared);
    const { appearance } = shared;
    this.hoveredWord = null; // the word under the pointer
    this.cursor = null; // the word selected by keys
    this.patch = null; // the patch under the pointer, or selected by keys
    this.scale = "own";
    this.names = [];
    this.lead = createElement("p", { class: "jm-lead jm-current" });
    this.photo = createElement("img", { class: "jm-photo", alt: "Input image", draggable: "false" });
    this.overlay = createElement("canvas", { class: "jm-overlay", role: "img" });
    this.cell = createElement("div", { class: "jm-cell", hidden: true });
    this.frame = createElement(
      "div",
      {
        class: "jm-frame",
        onpointermove: (event) => this.handlePointer(event),
        onpointerdown: (event) => this.handlePointer(event),
        onpointerleave: (event) => event.pointerType === "mouse" && this.handleLeave(), // a touch always leaves
        onpointercancel: () => this.handleLeave(),
        onclick: (event) => this.handleClick(event),
      },
      [this.photo, this.overlay, this.cell],
    );
    const range = { min: 0, max: 1, step: 0.05, value: 0.7 };
    this.strength = createSlider("Strength of the overlay", range, () => this.refresh());
    this.scales = createElement("div", { class: "jm-tabs", role: "group", aria: { label: "Scale of the weights" } });
    const pointer = (n, event) => this.handleWordPointer(n, event),
      pin = (n) => this.pin(n);
    this.caption = new Caption({ pointer, pin, moveTo: (n) => this.setCursor(n) });
    this.thumbnails = new CaptionThumbnails({ appearance, events: { pointer, pin } });
    this.el = createElement("div", { class: "jm-image" }, [
      createElement("div", { class: "jm-bar" }, [
        this.lead,
        createElement("div", { class: "jm-bar jm-options" }, [
          this.scales,
          createField("Overlay", this.strength),
        ]),
      ]),
      this.caption.el,
      this.frame,
      this.thumbnails.el,
    ]);
    this.resizeObserver = new ResizeObserver(() => this.repaintOverlay());
    this.resizeObserver.observe(this.frame);
    this.handleOutside = (event) => !this.frame.contains(event.target) && this.patch !== null && this.handleLeave();
    document.addEventListener("pointerdown", this.handleOutside);
  }

  async show(content) {
    const { content: before } = this,
      { image } = content.item;
    if (this.data !== image || before.rows !== content.rows || `${before.shape}` !== `${content.shape}`) {
      this.loaded = null; // otherwise the old weights stay until the new ones are loaded
      Object.assign(this, { content, data: image, grid: new ImageGrid(image, content.shape) });
      this.opened = this.open(image);
    }
    this.content = content;
    try {
      await this.opened;
      await this.load();
      this.errorMessage = "";
    } catch (error) {
      if (this.content !== content) return;
      this.loaded = null;
      this.errorMessage = error.message;
    }
    if (this.content === content) this.refresh();
  }

  // ---------------------------------------------------------------- data

  async open(image) {
    this.hoveredWord = this.cursor = this.patch = null;
    this.updateControls();
    if (this.photo.src !== image.source) {
      this.photo.src = image.source;
      await this.photo.decode().catch(() => {}); // then it has no width, which is reported
    }
    const ratio = this.photo.naturalWidth / this.photo.naturalHeight || 1;
    this.frame.style.setProperty("--ratio", `${ratio}`);
    this.names = this.words();
    this.caption.fill(this.names);
    this.thumbnails.fill(this.grid.isSelf ? [] : this.names, ratio);
    this.el.style.setProperty("--thumbnail-height", `${this.grid.isSelf ? 0 : this.thumbnails.size[1]}px`);
  }

  // For self-attention over patches, the words are the keys before the patches, like [CLS].
  words() {
    const { rows, shape } = this.content,
      length = this.grid.isSelf ? this.data.num_prefix_keys : Math.min(shape[0], MAX_WORDS_SHOWN);
    return Array.from({ length }, (_, n) => (rows ? truncateText(rows[n], 40) : `token ${formatCount(n)}`));
  }

  // The weights: of a caption all at once, as any word may be hovered; of patches those of one.
  async load() {
    const { content, pinned, grid } = this,
      single = grid.isSelf;
    const key = `${content.layer} ${content.head} ${single ? pinned : ""}`;
    if (this.loaded?.key === key) return;
    const { whole, received, row } = this.events,
      { values } = await (!single ? whole("weights") : pinned === null ? received() : row(pinned));
    if (this.content !== content || this.pinned !== pinned) return;
    this.loaded = new CaptionWeights(grid, values, { key, single });
  }

  /** The word whose weights are shown; null is the mean of all. */
  get selected() {
    return this.grid.isSelf ? this.pinned : (this.hoveredWord ?? this.cursor ?? this.pinned);
  }

  weights(n) {
    return this.loaded.weights(n);
  }

  curve(weights) {
    return this.appearance.curveTo(this.scale === "all" ? this.loaded.most : Math.max(...weights), "linear");
  }

  overlayOf(n) {
    const weights = this.weights(n);
    const { data: image, appearance } = this;
    return { weights, image, appearance, curve: this.curve(weights), strength: Number(this.strength.value) };
  }

  // ---------------------------------------------------------------- page

  updateControls() {
    this.scales.hidden = this.grid.isSelf;
    const select = (scale) => {
      this.scale = scale;
      this.updateControls();
      this.scales.querySelector(".jm-on").focus({ preventScroll: true });
      this.refresh();
    };
    this.scales.replaceChildren(...createToggles("scale", SCALE_MODES, this.scale, select));
  }

  /** Paint everything again, after a change of weights or appearance. */
  refresh() {
    if (!this.content) return;
    if (this.loaded && this.photo.naturalWidth) this.thumbnails.paint(this.photo, (n) => this.overlayOf(n));
    this.paint();
  }

  // Paint what changes with the pointer.
  paint() {
    this.repaintOverlay();
    this.highlight();
    this.showSelected();
    this.events.changed();
  }

  repaintOverlay() {
    const { clientWidth: width, clientHeight: height } = this.frame;
    if (!this.content || !width || !height) return;
    const context = sizeCanvas(this.overlay, width, height);
    if (this.loaded) paintOverlay(context, { ...this.overlayOf(this.selected), width, height });
    if (this.grid.isSelf && this.pinned !== null && this.pinned >= this.data.num_prefix_keys) {
      const box = regionBox(this.data, width, height),
        { x, y, w, h } = this.grid.cell(this.pinned - this.data.num_prefix_keys, box);
      context.strokeStyle = this.appearance.inks.pin;
      context.lineWidth = 2;
      context.strokeRect(x, y, w, h);
    }
  }

  highlight() {
    const shade = this.createShading();
    this.caption.highlight(this, shade);
    this.thumbnails.highlight(this, shade);
    this.highlightPatch();
  }

  // Words are shaded by their weights on the hovered patch, relative to the highest. They stay pale if no weight is
  // above chance.
  createShading() {
    const { appearance, patch, loaded } = this,
      isShaded = patch !== null && loaded && !this.grid.isSelf,
      weights = this.names.map((_, n) => (isShaded ? this.weights(n)[patch] : 0)),
      top = Math.max(2 / this.grid.numPatches, ...weights);
    return (element, n) => appearance.shade(element, weights[n] / top, 7);
  }

  highlightPatch() {
    this.cell.hidden = this.patch === null;
    if (this.patch === null) return;
    const { x, y, w, h } = this.grid.cell(this.patch, regionBox(this.data, 100, 100));
    for (const [name, value] of Object.entries({ left: x, top: y, width: w, height: h }))
      this.cell.style.setProperty(name, `${value}%`);
  }

  showSelected() {
    const { selected } = this;
    if (!this.loaded || !this.photo.naturalWidth) {
      const status = this.loaded ? "This browser cannot show the image." : "Loading …";
      this.lead.textContent = this.errorMessage || status;
      return;
    }
    const weights = this.weights(selected),
      best = findPeak(weights),
      name = this.nameOf(selected);
    const most = `maximum at ${this.grid.describePatch(best)}: ${formatWeight(weights[best])}`;
    this.overlay.setAttribute("aria-label", `Attention, ${name}: ${most}`);
    this.lead.replaceChildren(
      createWord(name, { class: selected !== null && selected === this.pinned ? "jm-pinned" : "jm-selected" }),
      createElement("span", { class: "jm-muted jm-number", text: `  ${most}` }),
    );
  }

  nameOf(n) {
    if (n === null && this.grid.isSelf) return "Mean of all patches";
    if (n === null) return `Mean of ${pluralize(this.content.shape[0], "word")}`;
    return this.names[n] ?? `Patch at ${this.grid.describePatch(n - this.data.num_prefix_keys)}`;
  }

  legend() {
    if (!this.loaded) return null;
    const curve = this.curve(this.weights(this.selected)),
      list = overlayColours(this.appearance, Number(this.strength.value));
    return { curve, list, title: "attention weight of a patch" };
  }

  // ---------------------------------------------------------------- pointer

  handleWordPointer(n, event) {
    if (event.pointerType === "touch") return; // a tap pins
    this.hoveredWord = n;
    if (n !== null) this.cursor = this.patch = null;
    this.paint();
  }

  pin(n) {
    this.patch = this.cursor = null;
    this.events.tooltip(null);
    this.events.pin(n);
  }

  patchAt({ clientX, clientY }) {
    const { left, top, width, height } = this.frame.getBoundingClientRect();
    return this.grid.at(clientX - left, clientY - top, regionBox(this.data, width, height));
  }

  handlePointer(event) {
    if (!this.loaded) return;
    const patch = this.patchAt(event);
    if (patch !== this.patch) {
      this.patch = patch;
      this.highlight();
    }
    this.events.tooltip(patch === null ? null : this.tooltipLines(patch), event.clientX, event.clientY);
  }

  // A clicked patch becomes the query.
  handleClick(event) {
    const patch = this.grid.isSelf ? this.patchAt(event) : null;
    if (patch !== null) this.events.pin(this.grid.keyOf(patch));
  }

  handleLeave() {
    this.patch = null;
    this.highlight();
    this.events.tooltip(null);
  }

  // The words with the highest weights on a patch, and the selected one.
  rankWords(patch) {
    const ranked = this.loaded.rankWords(this.names.length, patch, NUM_RANKED_WORDS, this.selected);
    return ranked.map(({ n, value }) => ({ n, value, text: this.names[n] }));
  }

  tooltipLines(patch) {
    const title = createElement("div", { class: "jm-muted jm-number", text: this.grid.describePatch(patch) }),
      mean = formatWeight(this.loaded.mean[patch], 4);
    return [
      title,
      this.grid.isSelf
        ? createElement("div", { class: "jm-weight", text: mean })
        : createRanking(this.rankWords(patch), this.selected, this.appearance.inks),
    ];
  }

  // ---------------------------------------------------------------- keys

  handleKey(key, shiftKey) {
    const by = ARROWS[key];
    if (!this.loaded) return false;
    if (by && shiftKey) return this.moveByPatch(...by);
    const next = this.grid.isSelf ? null : this.caption.next(key, this.cursor ?? this.pinned);
    if (next !== null) return this.moveToWord(next);
    if (key === "Escape" && (this.cursor !== null || this.patch !== null)) {
      this.handleLeave();
      this.setCursor(null);
      if (this.pinned !== null) this.events.pin(this.pinned);
      return true;
    }
    return false;
  }

  moveToWord(n) {
    this.patch = null;
    this.events.tooltip(null);
    this.setCursor(n);
    this.caption.focus(n);
    const weights = this.weights(n),
      best = findPeak(weights);
    const peak = `maximum at ${this.grid.describePatch(best)}, ${formatWeight(weights[best])}`;
    this.events.announce(`${this.names[n]}: ${peak}`);
    return true;
  }

  setCursor(n) {
    this.cursor = n;
    this.hoveredWord = null;
    this.paint();
  }

  // Move from patch to patch, and announce each.
  moveByPatch(down, right) {
    const { patch, grid } = this;
    this.patch = patch === null ? findPeak(this.weights(this.selected)) : grid.moveFrom(patch, down, right);
    this.highlight();
    const { right: x, bottom: y } = this.cell.getBoundingClientRect();
    this.events.tooltip(this.tooltipLines(this.patch), x - 8, y - 8);
    const words = this.grid.isSelf
      ? formatWeight(this.weights(null)[this.patch])
      : this.rankWords(this.patch)
          .map(({ text, value }) => `${text} ${formatWeight(value)}`)
          .join(", ");
    this.events.announce(`${this.grid.describePatch(this.patch)}: ${words}`);
    return true;
  }

  /** Save an image of all words. */
  async save() {
    return this.thumbnails.save(this.photo, (n) => this.overlayOf(n));
  }

  close() {
    this.resizeObserver.disconnect();
    document.removeEventListener("pointerdown", this.handleOutside);
  }
}
