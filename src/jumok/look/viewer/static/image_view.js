// Images with the weights of words, or of their own patches. Hover a word to see its patches, hover a patch to see its
// words.

import { Caption } from "./caption.js";
import { formatCount, formatWeight, pluralize } from "./colours.js";
import { createField, createRanking, createSlider, createToggles } from "./controls.js";
import { ARROWS, createElement, createWord } from "./dom.js";
import { ImageFrame } from "./image_frame.js";
import { OTHER_QUERY, PatchLayout, PatchWeights, findPeak, splitRows } from "./image_weights.js";
import { overlayColours } from "./overlay.js";
import { CaptionThumbnails } from "./thumbnails.js";
import { isSpecialToken, joinTokens, truncateText } from "./token_text.js";
import { View } from "./view.js";

const NUM_RANKED_WORDS = 5; // words that are listed for a patch
const MAX_THUMBNAILS = 100;
const MAX_IMAGE_COLUMNS = 3; // images side by side
const SCALE_MODES = { own: "Scale per word", all: "Shared scale" };

export class ImageView extends View {
  static title = "Image";
  static keys = [
    ["← →, Home, End", "move by word"],
    ["Shift + arrows", "move by patch"],
    ["Enter, Esc", "pin the word, show the mean of all words"],
    ["↑ ↓", "previous, next layer"],
  ];
  static hint =
    "Hover a word to see its patches, hover a patch to see its words; click a word to pin it, a patch to hold it.";
  static medium = "image";
  static hasColours = false; // the colours of the overlay are fixed

  static describe({ image_layers: imageLayers }, { kind, image_layer: index }) {
    const { grids, word_rows: wordRows, has_patch_queries: hasPatchQueries, has_text: hasText } = imageLayers[index],
      numWords = wordRows.reduce((sum, [start, stop]) => sum + stop - start, 0);
    const words = hasPatchQueries && !hasText ? [] : [pluralize(numWords, "word")],
      sizes = grids.map(({ shape }) => shape.map(formatCount).join(" × "));
    return [`${kind} attention`, ...words, `${[...new Set(sizes)].slice(0, 4).join(", ")} patches`];
  }

  /**
   * `events`: weights(rows, cols) returns a promise of weights, row(n) and received() of those of one query and of the
   * mean; pin(row); tooltip(lines or null, x, y); announce(text); changed(), when the legend changes.
   */
  constructor(shared) {
    super(shared);
    const { appearance } = shared;
    this.hoveredWord = null; // the word under the pointer
    this.cursor = null; // the word selected by keys
    this.patch = null; // the patch under the pointer, or selected by keys
    this.held = null; // the clicked patch whose words stay shaded
    this.scale = "own";
    this.gridName = null; // the grids that are shown, by name; null are all
    this.names = [];
    this.frames = [];
    this.lead = createElement("p", { class: "jm-lead jm-current" });
    this.frameBox = createElement("div", { class: "jm-frames" });
    const range = { min: 0, max: 1, step: 0.05, value: 0.7 };
    this.strength = createSlider("Strength of the overlay", range, () => this.refresh());
    this.scales = createElement("div", { class: "jm-tabs", role: "group", aria: { label: "Scale of the weights" } });
    this.grids = createElement("div", { class: "jm-tabs", role: "group", aria: { label: "Patches" } });
    const pointer = (n, event) => this.handleWordPointer(n, event),
      pin = (n) => this.pin(n);
    this.caption = new Caption({ pointer, pin, moveTo: (n) => this.setCursor(n) });
    this.thumbnails = new CaptionThumbnails({ appearance, events: { pointer, pin } });
    this.el = createElement("div", { class: "jm-image" }, [
      createElement("div", { class: "jm-bar" }, [
        this.lead,
        createElement("div", { class: "jm-bar jm-options" }, [
          this.grids,
          this.scales,
          createField("Overlay", this.strength),
        ]),
      ]),
      this.caption.el,
      this.frameBox,
      this.thumbnails.el,
    ]);
    this.handleOutside = ({ target }) => {
      if (this.activePatch === null || this.frames.some(({ frame }) => frame.contains(target))) return;
      this.held = null;
      this.handleLeave();
    };
    document.addEventListener("pointerdown", this.handleOutside);
  }

  async show(content) {
    const { content: before } = this,
      { image } = content.item;
    const isNew = this.image !== image,
      layerKey = (shown) => `${shown.shape} ${shown.item.layers[shown.layer].image_layer}`;
    if (isNew || before.rows !== content.rows || layerKey(before) !== layerKey(content)) {
      this.loaded = null; // otherwise the old weights stay until the new ones are loaded
      const index = content.item.layers[content.layer].image_layer;
      const layout = new PatchLayout(content.item.image_layers[index], content.shape);
      Object.assign(this, { content, image, layout });
      this.opened = this.open(image, isNew);
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

  async open({ files }, isNew) {
    this.hoveredWord = this.cursor = this.patch = this.held = null;
    if (!this.layout.names.includes(this.gridName)) this.gridName = null;
    this.updateControls();
    if (isNew) this.createFrames(files.length);
    for (const { el, image } of this.frames) el.hidden = !this.layout.images.includes(image);
    await Promise.all(this.frames.map((frame) => frame.open(files[frame.image])));
    const shown = this.shownFrames;
    const columns = Math.min(shown.length, MAX_IMAGE_COLUMNS),
      sum = shown.reduce((total, { ratio }) => total + ratio, 0);
    this.frameBox.style.setProperty("--columns", `${columns}`);
    for (const { el, ratio } of shown) // in one row, all have the same height
      el.style.setProperty("--share", `${shown.length > MAX_IMAGE_COLUMNS ? 1 / columns : ratio / sum}`);
    const words = this.words();
    this.names = words.map(({ name }) => name);
    this.caption.fill(words, this.layout.hasText ? "Words that see the images" : undefined);
    this.thumbnails.fill(
      words.filter(({ hasThumbnail }) => hasThumbnail),
      shown.map(({ ratio }) => ratio),
    );
    this.el.style.setProperty("--thumbnail-height", `${words.length ? this.thumbnails.size[1] : 0}px`);
  }

  createFrames(count) {
    for (const frame of this.frames) frame.close();
    const events = {
      pointer: (image, x, y, event) => this.handlePointer(image, x, y, event),
      click: (image, x, y) => this.handleClick(image, x, y),
      leave: () => this.handleLeave(),
      resized: () => this.repaintOverlays(),
    };
    this.frames = Array.from(
      { length: count },
      (_, n) => new ImageFrame(n, count > 1 ? `Input image ${n + 1}` : "Input image", events),
    );
    this.frameBox.replaceChildren(...this.frames.map(({ el }) => el));
  }

  get shownFrames() {
    return this.frames.filter(({ image }) => this.layout.images.includes(image));
  }

  /** The overlay of the first image. */
  get overlay() {
    return this.frames[0].overlay;
  }

  // The words: their names, and how they are written in the line of text.
  words() {
    const { rows, generated } = this.content,
      { layout } = this,
      isGenerated = (row) => row >= generated.rows;
    const tokens = layout.wordRows.map((row) => (rows ? rows[row] : `token ${formatCount(row)}`)),
      joined = layout.hasText ? joinTokens(tokens) : tokens.map((text) => ({ text, blank: true })),
      hasGenerated = layout.hasText && layout.wordRows.some(isGenerated);
    let numThumbnails = 0;
    return tokens.map((token, n) => {
      const isSpecial = layout.hasText && isSpecialToken(token),
        row = layout.wordRows[n];
      const wanted = !layout.isSelf && !isSpecial && (!hasGenerated || isGenerated(row)),
        hasThumbnail = wanted && numThumbnails < MAX_THUMBNAILS;
      if (hasThumbnail) numThumbnails += 1;
      const name = truncateText(layout.hasText ? joined[n].text : token, 40);
      return { n, name, blank: joined[n].blank, isSpecial, isGenerated: isGenerated(row), hasThumbnail };
    });
  }

  // The weights: of words all at once, as any word may be hovered; of patches those of one.
  async load() {
    const { content, pinned, layout } = this,
      { isSelf, shape } = layout,
      other = pinned !== null && (isSelf || !layout.wordRows.includes(pinned)) ? pinned : null;
    const key = `${content.layer} ${content.head} ${other}`;
    if (this.loaded?.key === key) return;
    const { weights, received, row } = this.events;
    const spans = isSelf ? [] : layout.wordSpans,
      answers = await Promise.all([
        isSelf && other === null ? received() : null,
        other === null ? null : row(other),
        ...spans.map((rows) => weights(rows, [0, shape[1]])),
      ]);
    if (this.content !== content || this.pinned !== pinned) return;
    const [mean, query, ...words] = answers.map((answer) => answer?.values ?? null),
      rows = words.flatMap((values) => splitRows(values, shape[1]));
    this.loaded = new PatchWeights(layout, { rows, mean: mean ?? (isSelf ? query : null), other: query, key });
  }

  get pinnedWord() {
    const n = this.pinned === null ? -1 : this.layout.wordRows.indexOf(this.pinned);
    return n < 0 ? null : n;
  }

  /** What is shown: a word, another query, or null, the mean of all. */
  get selected() {
    const other = this.pinned !== null && (this.layout.isSelf || this.pinnedWord === null) ? OTHER_QUERY : null;
    if (this.layout.isSelf) return other;
    return this.hoveredWord ?? this.cursor ?? this.pinnedWord ?? other;
  }

  /** The weights of a word, or of another selection, on all patches. */
  weights(selection) {
    return this.loaded.entry(selection).weights;
  }

  curve(selection) {
    const { highest } = this.loaded.entry(selection);
    return this.appearance.curveTo((this.scale === "all" ? this.loaded.most : highest) || 1, "linear");
  }

  overlayOf(selection) {
    const { layout, appearance, gridName: grids } = this,
      { weights, scaled } = this.loaded.entry(selection);
    const isMixed = grids === null && layout.names.length > 1;
    return {
      weights: isMixed ? scaled : weights,
      curve: isMixed || grids === null ? this.curve(selection) : this.curveOfGrid(weights),
      layout,
      grids,
      appearance,
      strength: Number(this.strength.value),
    };
  }

  // The scale of the grids of one name, up to their own maximum.
  curveOfGrid(weights) {
    const shown = this.layout.grids.filter(({ name }) => name === this.gridName),
      values = shown.flatMap(({ first, last }) => [...weights.subarray(first, last)]);
    return this.appearance.curveTo(values.reduce((most, value) => Math.max(most, value), 0) || 1, "linear");
  }

  // ---------------------------------------------------------------- page

  updateControls() {
    this.scales.hidden = this.layout.isSelf;
    this.grids.hidden = this.layout.names.length < 2;
    const update = (box, change) => {
      Object.assign(this, change);
      this.updateControls();
      box.querySelector(".jm-on")?.focus({ preventScroll: true });
      this.refresh();
    };
    this.scales.replaceChildren(
      ...createToggles("scale", SCALE_MODES, this.scale, (scale) => update(this.scales, { scale })),
    );
    const all = "all patches",
      choices = Object.fromEntries([all, ...this.layout.names].map((name) => [name, name]));
    this.grids.replaceChildren(
      ...createToggles("grids", choices, this.gridName ?? all, (name) =>
        update(this.grids, { gridName: name === all ? null : name, patch: null, held: null }),
      ),
    );
  }

  /** Paint everything again, after a change of weights or appearance. */
  refresh() {
    if (!this.content) return;
    const frames = this.shownFrames;
    if (this.loaded && frames.every(({ isShown }) => isShown))
      this.thumbnails.paint(frames, (n) => this.overlayOf(n));
    this.paint();
  }

  // Paint what changes with the pointer.
  paint() {
    this.repaintOverlays();
    this.highlight();
    this.showSelected();
    this.events.changed();
  }

  repaintOverlays() {
    if (!this.content) return;
    const { layout, pinned, loaded } = this,
      overlay = loaded && this.overlayOf(this.selected),
      query = pinned === null ? -1 : layout.patchOf(pinned);
    const canBeQuery = layout.isSelf || this.selected === OTHER_QUERY;
    for (const frame of this.shownFrames) {
      const isHere = canBeQuery && query >= 0 && layout.gridOf(query).image === frame.image;
      frame.paint(overlay, isHere && layout.cell(query, ...frame.size), this.appearance.inks);
    }
  }

  /** The patch whose words are shaded. */
  get activePatch() {
    return this.patch ?? this.held;
  }

  highlight() {
    const shade = this.createShading(),
      { selected, pinnedWord: pinned, cursor } = this,
      state = { selected, pinned, cursor };
    this.caption.highlight(state, shade);
    this.thumbnails.highlight(state, shade);
    this.highlightPatch();
  }

  // Words are shaded by their weights on the active patch, relative to the highest. They stay pale if no weight is
  // above chance.
  createShading() {
    const { appearance, activePatch: patch, loaded, layout } = this,
      isShaded = patch !== null && loaded && !layout.isSelf,
      weights = this.names.map((_, n) => (isShaded ? this.weights(n)[patch] : 0)),
      top = Math.max(2 / (layout.hasText ? layout.shape[1] : layout.numPatches), ...weights);
    return (element, n) => appearance.shade(element, weights[n] / top, 7);
  }

  highlightPatch() {
    const { activePatch: patch, layout } = this;
    for (const frame of this.frames) {
      const isHere = patch !== null && layout.gridOf(patch).image === frame.image;
      frame.highlight(isHere ? layout.cell(patch, 100, 100) : null);
    }
  }

  showSelected() {
    const { selected, layout, loaded } = this,
      areShown = this.shownFrames.every(({ isShown }) => isShown);
    if (!loaded || !areShown) {
      const status = loaded ? "This browser cannot show the image." : "Loading …";
      this.lead.textContent = this.errorMessage || status;
      return;
    }
    const { weights, shares } = loaded.entry(selected),
      best = findPeak(weights),
      name = this.nameOf(selected),
      most = `maximum ${formatWeight(weights[best])} at ${layout.describePatch(best)}`; // cut off at its end
    const total = formatShare([...shares.values()].reduce((sum, share) => sum + share, 0)),
      several = layout.images.length > 1,
      share = !layout.hasText ? "" : `${total} on the ${several ? "images" : "image"}, `;
    for (const frame of this.shownFrames) {
      frame.overlay.setAttribute("aria-label", `Attention, ${name}: ${share}${most}`);
      frame.share.hidden = !several;
      frame.share.textContent = `Image ${frame.image + 1}: ${formatShare(shares.get(frame.image))} of the attention`;
    }
    this.lead.replaceChildren(
      createWord(name, { class: selected !== null && this.isPinned(selected) ? "jm-pinned" : "jm-selected" }),
      createElement("span", { class: "jm-muted jm-number", text: `  ${share}${most}` }),
    );
  }

  isPinned(selection) {
    return selection === OTHER_QUERY || selection === this.pinnedWord;
  }

  nameOf(selection) {
    const { layout, pinned } = this;
    if (selection === OTHER_QUERY) {
      const word = this.pinnedWord,
        patch = layout.patchOf(pinned);
      if (word !== null) return this.names[word];
      return patch < 0 ? this.content.rows?.[pinned] ?? `token ${pinned}` : `Patch at ${layout.describePatch(patch)}`;
    }
    if (selection === null) return layout.isSelf ? "Mean of all patches" : `Mean of ${pluralize(this.names.length, "word")}`;
    return this.names[selection];
  }

  legend() {
    if (!this.loaded) return null;
    const { curve } = this.overlayOf(this.selected),
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

  /** Pin a word. */
  pin(n) {
    this.patch = this.held = this.cursor = null;
    this.events.tooltip(null);
    this.events.pin(this.layout.wordRows[n]);
  }

  patchAt(image, x, y) {
    return this.layout.at(image, x, y, ...this.frames[image].size, this.gridName);
  }

  handlePointer(image, x, y, event) {
    if (!this.loaded) return;
    const patch = this.patchAt(image, x, y);
    if (patch !== this.patch) {
      this.patch = patch;
      this.highlight();
    }
    this.events.tooltip(patch === null ? null : this.tooltipLines(patch), event.clientX, event.clientY);
  }

  // A clicked patch becomes the query, or its words stay shaded.
  handleClick(image, x, y) {
    const patch = this.patchAt(image, x, y);
    if (patch !== null && this.layout.isSelf) {
      this.events.pin(this.layout.keyOf(patch));
      return;
    }
    this.held = patch === this.held ? null : patch;
    this.highlight();
  }

  handleLeave() {
    this.patch = null;
    this.highlight();
    this.events.tooltip(null);
  }

  // The words with the highest weights on a patch, and the selected one.
  rankWords(patch) {
    const ranked = this.loaded.rankWords(patch, NUM_RANKED_WORDS, this.selected);
    return ranked.map(({ n, value }) => ({ n, value, text: this.names[n] }));
  }

  tooltipLines(patch) {
    const title = createElement("div", { class: "jm-muted jm-number", text: this.layout.describePatch(patch) });
    if (!this.layout.isSelf) return [title, createRanking(this.rankWords(patch), this.selected, this.appearance.inks)];
    const weight = formatWeight(this.weights(this.selected)[patch], 4);
    return [title, createElement("div", { class: "jm-weight", text: weight })];
  }

  // ---------------------------------------------------------------- keys

  handleKey(key, shiftKey) {
    const by = ARROWS[key];
    if (!this.loaded) return false;
    if (by && shiftKey) return this.moveByPatch(...by);
    const next = this.layout.isSelf ? null : this.caption.next(key, this.cursor ?? this.pinnedWord);
    if (next !== null) return this.moveToWord(next);
    if (key === "Escape" && (this.cursor !== null || this.activePatch !== null)) {
      this.held = null;
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
    const peak = `maximum ${formatWeight(weights[best])} at ${this.layout.describePatch(best)}`;
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
    const { activePatch: patch, layout } = this;
    this.patch = patch === null ? findPeak(this.weights(this.selected)) : layout.moveFrom(patch, down, right);
    this.highlight();
    const { cell } = this.frames[layout.gridOf(this.patch).image],
      { right: x, bottom: y } = cell.getBoundingClientRect();
    this.events.tooltip(this.tooltipLines(this.patch), x - 8, y - 8);
    const words = layout.isSelf
      ? formatWeight(this.weights(this.selected)[this.patch])
      : this.rankWords(this.patch)
          .map(({ text, value }) => `${text} ${formatWeight(value)}`)
          .join(", ");
    this.events.announce(`${layout.describePatch(this.patch)}: ${words}`);
    return true;
  }

  /** Save an image of all words. */
  async save() {
    return this.thumbnails.save(this.shownFrames, (n) => this.overlayOf(n), this.selected);
  }

  close() {
    for (const frame of this.frames) frame.close();
    document.removeEventListener("pointerdown", this.handleOutside);
  }
}

function formatShare(share) {
  return `${Number((100 * share).toPrecision(share < 0.1 ? 2 : 3))} %`;
}
