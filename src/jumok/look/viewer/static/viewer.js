// The viewer: one ES module for notebooks, pages and saved files. `render({ model, el })` follows anywidget;
// `model.get("manifest")` describes the data, and the host provides tiles (see tiles.js).

import {
  describeDocument,
  describeRounding,
  chooseInitialView,
  canShow,
  describeLayer,
  listViews,
  replaceData,
} from "./manifest.js";
import { Appearance } from "./appearance.js";
import { ArcView } from "./arcs_view.js";
import { clamp, download } from "./dom.js";
import { DocumentView } from "./document_view.js";
import { HeadView } from "./heads_view.js";
import { ImageView } from "./image_view.js";
import { ViewerLayout } from "./layout.js";
import { MapsView } from "./maps_view.js";
import { SpeechView } from "./speech_view.js";
import { TextView } from "./text_view.js";
import { buildRequest, getHost, Store } from "./tiles.js";
import { shortNames } from "./token_text.js";
import { WeightRange } from "./weight_range.js";

// A change of these needs new content, or another appearance.
const CONTENT_KEYS = ["view", "comparison", "layer", "head", "pinned", "hop", "pinnedWord", "weightScope"];
const APPEARANCE_KEYS = ["theme", "scale", "curve", "contrast", "digits"];
const SCALED_VIEWS = ["document", "image", "speech", "map", "arcs"]; // whose scale can be set
const COMPARISONS = { both: "Both", difference: "Difference" };
const THEME_ATTRIBUTES = ["class", "theme", "data-jp-theme-light", "data-vscode-theme-kind", "data-theme"];
const INITIAL_STATE = {
  comparison: 0,
  weightScope: "document", // weights of words relative to the document, or to their "sentence"
  theme: null,
  scale: "blue",
  curve: "auto",
  contrast: 0,
  digits: false,
};

class Viewer {
  constructor(model, el) {
    Object.assign(this, { model, el });
    const full = Boolean(model.get("full")); // whether the viewer fills the window: there is no page to scroll
    this.store = new Store(getHost(model), {
      parallel: typeof model.tiles === "function" ? 6 : 2,
      onError: (error) => this.showError(error),
    });
    this.layout = new ViewerLayout(full, {
      set: (change) => this.set(change),
      step: (name, by) => this.step(name, by),
      toggleDigits: () => this.toggleDigits(),
      toggleTheme: () => this.toggleTheme(),
      save: () => this.save(),
      unpin: () => this.unpin(),
    });
    el.replaceChildren(this.layout.root);
    this.appearance = new Appearance(this.layout.root, full);
    this.range = new WeightRange({ store: this.store, changed: () => this.restyle() });
    this.state = INITIAL_STATE;
    this.views = this.createViews();
    this.maps = this.views.map.maps;
    this.openManifest();
    this.listen();
  }

  // ---------------------------------------------------------------- data

  openManifest() {
    this.setManifest((this.originalManifest = this.model.get("manifest")), {
      ...chooseInitialView(this.originalManifest.data[0]),
      pinned: null,
      hop: null, // of a document; null is the mean of all
      pinnedWord: null, // of a document
    });
  }

  setManifest(manifest, change = {}) {
    this.manifest = manifest;
    this.range.reset();
    this.state = this.validate({ ...this.state, ...change });
    this.restyle();
    this.update();
  }

  get dataIndex() {
    return typeof this.state.comparison === "number" ? this.state.comparison : this.manifest.data.length - 1;
  }

  /** The item of the manifest that is shown. */
  get item() {
    return this.manifest.data[this.dataIndex];
  }

  get layer() {
    return this.item.layers[this.state.layer];
  }

  /** The items that are compared, if the current layer has the same shape in both; otherwise the item that is shown. */
  get comparableIndices() {
    const shapes = this.manifest.data.map(({ layers }) => `${layers[this.state.layer]?.shape}`);
    return shapes.length === 2 && shapes[0] === shapes[1] ? [0, 1] : [this.dataIndex];
  }

  /** The current head of an item, for requests. The host knows a new synthesis by its own number. */
  source(index = this.dataIndex) {
    const { layer, head } = this.state;
    return { data: this.manifest.data[index].number ?? index, layer, head };
  }

  /** The content of a view; the weights of `baseline`, if it is not null, are subtracted. */
  content(index = this.dataIndex, baseline = null) {
    const item = this.manifest.data[index],
      info = item.layers[this.state.layer],
      texts = (n) => (n === null ? null : this.manifest.texts[n]),
      head = this.state.head === null ? "mean of all heads" : `head ${this.state.head}`;
    return {
      ...this.source(index),
      baseline: baseline === null ? null : this.source(baseline).data,
      item,
      state: this.state,
      shape: info.shape,
      finestZoom: info.finest_zoom,
      rounding: this.manifest.rounding,
      rows: texts(info.row_labels),
      cols: texts(info.col_labels),
      generated: { rows: info.first_generated[0] ?? Infinity, cols: info.first_generated[1] ?? Infinity },
      label: `Attention of ${info.name}, ${head}: ${info.shape[0]} queries by ${info.shape[1]} keys`,
    };
  }

  // The maps that are compared: both side by side, or their difference.
  compared() {
    const { comparison } = this.state;
    if (comparison === "both") return [this.content(0), this.content(1)];
    return [comparison === "difference" ? this.content(1, 0) : this.content()];
  }

  fetch(quantity, rows, cols, size, index) {
    return this.store.fetchOne(buildRequest(this.source(index), quantity, rows, cols, size));
  }

  fetchWhole(quantity, size) {
    const [rows, cols] = this.layer.shape;
    return this.fetch(quantity, [0, rows], [0, cols], size);
  }

  /** Fetch the weights of a query. */
  row(number, index = this.dataIndex) {
    const { shape } = this.manifest.data[index].layers[this.state.layer];
    return this.fetch("weights", [number, number + 1], [0, shape[1]], undefined, index);
  }

  // ---------------------------------------------------------------- views

  createViews() {
    const { store, appearance, layout } = this;
    const events = {
      set: (change) => this.set(change),
      pin: (row) => this.pin(row),
      open: (layer, head) => this.set({ layer, head, view: "map" }),
      tooltip: (lines, x, y) => layout.showTooltip(lines, x, y),
      announce: (text) => layout.announce(text),
      changed: () => this.updateLegend(),
      row: (number) => this.row(number),
      received: () => this.fetchWhole("received_weight"),
      weights: (rows, cols) => this.fetch("weights", rows, cols),
      whole: (quantity, size) => this.fetchWhole(quantity, size),
      drawLegend: (context, x, y, width) => layout.legend.drawBelow(context, appearance, x, y, width),
      resynthesize: (weights) => this.resynthesize(weights),
      reset: () => this.resetSynthesis(),
    };
    const shared = { store, appearance, events };
    return {
      document: new DocumentView(shared),
      image: new ImageView(shared),
      speech: new SpeechView(shared),
      map: new MapsView(shared),
      arcs: new ArcView(shared),
      text: new TextView(shared),
      heads: new HeadView(shared),
    };
  }

  // ---------------------------------------------------------------- state

  set(change) {
    const before = this.state;
    this.state = this.validate({ ...before, ...change });
    const isChanged = (key) => before[key] !== this.state[key];
    if (APPEARANCE_KEYS.some(isChanged)) this.restyle();
    if (CONTENT_KEYS.some(isChanged)) this.update();
    if (isChanged("hop")) this.layout.announce(this.hopName());
    if (isChanged("layer") || isChanged("head")) this.layout.announce(this.content().label);
  }

  // Reset what does not exist.
  validate(state) {
    const items = this.manifest.data,
      item = items[typeof state.comparison === "number" ? state.comparison : items.length - 1],
      layer = clamp(state.layer, 0, item.layers.length - 1),
      { heads, has_mean: hasMean, shape } = item.layers[layer],
      limit = (value, length) => (value !== null && value >= length ? null : value),
      hasHead = state.head === null ? hasMean : heads.includes(state.head);
    const valid = {
      ...state,
      layer,
      head: hasHead ? state.head : heads[Math.min(heads.length - 1, state.head ?? 0)],
      pinned: limit(state.pinned, shape[0]),
      view: listViews(item, item.layers[layer]).includes(state.view) ? state.view : "map",
      hop: limit(state.hop, item.document?.num_hops ?? 0),
      pinnedWord: limit(state.pinnedWord, item.document?.words.length ?? 0),
    };
    const canCompare = typeof state.comparison === "number" || this.comparisons(valid).includes(state.comparison);
    if (valid.view === "map" && !canCompare) valid.comparison = 1;
    return valid;
  }

  // The options for the comparison of two items.
  comparisons(state = this.state) {
    const shapes = this.manifest.data.map(({ layers }) => layers[state.layer]?.shape);
    if (shapes.length < 2) return [];
    if (state.view !== "map" || !shapes[0] || !shapes[1]) return [0, 1];
    return [0, 1, "both", ...(`${shapes[0]}` === `${shapes[1]}` ? ["difference"] : [])];
  }

  update() {
    const { state, layout } = this,
      view = this.views[state.view],
      focus = document.activeElement,
      hadFocus = layout.root.contains(focus),
      group = focus?.closest?.(".jm-tabs, .jm-chips");
    this.updateControls();
    if (state.view !== "document")
      this.range.measure(this.comparableIndices.map((index) => this.source(index)), this.layer.shape);
    if (layout.content.firstElementChild !== view.el) layout.content.replaceChildren(view.el);
    for (const other of Object.values(this.views)) {
      other.pinned = state.pinned;
      if (other !== view) other.deactivate?.();
    }
    const content = { ...this.content(), compared: this.compared(), layers: this.namedLayers() };
    Promise.resolve(view.show(content)).then(
      () => this.updateLegend(),
      (error) => this.showError(error),
    );
    this.showPinned();
    this.updateLegend();
    layout.showTooltip(null);
    // If the focused element is gone, focus its replacement, so that keys continue to work.
    if (hadFocus && !layout.root.contains(document.activeElement))
      (group?.querySelector(".jm-on") ?? layout.root).focus({ preventScroll: true });
  }

  namedLayers() {
    const { layers } = this.item,
      short = shortNames(layers.map(({ name }) => name));
    return layers.map((layer, number) => ({ ...layer, number, short: short[number] }));
  }

  // The layers that the current view can show.
  availableLayers() {
    return this.namedLayers().filter((layer) => canShow(this.state.view, this.item, layer));
  }

  availableViews() {
    return listViews(this.item, this.layer);
  }

  // Update the layout from the state.
  updateControls() {
    const { state, manifest, item, layer } = this,
      isDocument = state.view === "document";
    this.layout.updateControls({
      state,
      title: manifest.title || (isDocument ? "Document" : layer.name),
      subtitle: isDocument
        ? describeDocument(item.document, state.hop)
        : [...(manifest.title ? [layer.name] : []), ...describeLayer(state.view, item, layer)],
      layers: isDocument ? [] : this.availableLayers(),
      chips: { name: this.chipName, values: this.chips() },
      views: this.availableViews(),
      comparisons: this.comparisons().map((value) => [value, manifest.data[value]?.label ?? COMPARISONS[value]]),
      comparison: state.view === "map" ? state.comparison : this.dataIndex,
      note: isDocument ? "" : describeRounding(manifest.rounding, layer.shape[1]),
    });
  }

  hopName() {
    return this.state.hop === null ? "Mean of all hops" : `Hop ${this.state.hop}`;
  }

  get chipName() {
    return this.state.view === "document" ? "hop" : "head";
  }

  // The heads of a layer, or the hops of a document, and their mean.
  chips() {
    const { heads, has_mean: hasMean } = this.layer;
    if (this.chipName === "head") return hasMean ? [...heads, null] : heads;
    const hops = Array.from({ length: this.item.document.num_hops }, (_, hop) => hop);
    return hops.length > 1 ? [...hops, null] : hops;
  }

  step(name, by) {
    const isLayer = name === "layer",
      key = isLayer ? "layer" : this.chipName,
      values = isLayer ? this.availableLayers().map(({ number }) => number) : this.chips();
    this.set({ [key]: values[clamp(values.indexOf(this.state[key]) + by, 0, values.length - 1)] });
  }

  // ---------------------------------------------------------------- speech synthesis

  async resynthesize(weights) {
    const { dataIndex, originalManifest } = this,
      update = await this.store.host.resynthesize({ data: dataIndex, weights });
    if (this.originalManifest === originalManifest) this.setManifest(replaceData(this.manifest, dataIndex, update));
  }

  resetSynthesis() {
    const { texts, data } = this.originalManifest;
    this.setManifest(replaceData(this.manifest, this.dataIndex, { texts, data: [data[this.dataIndex]] }));
  }

  // ---------------------------------------------------------------- appearance

  restyle() {
    this.appearance.apply({ ...this.state, range: this.range.value });
    this.layout.updateAppearance(this.appearance.theme, this.state.digits);
    this.views[this.state.view].refresh();
    this.updateLegend();
  }

  updateLegend() {
    const { view } = this.state;
    this.layout.settings.hidden = !SCALED_VIEWS.includes(view);
    this.layout.colours.hidden = view === "image"; // the colours of the overlay are fixed
    this.layout.legend.show(this.appearance, this.views[view].legend());
    this.layout.generatedLegend.hidden = this.layer.first_generated.every((first) => first === null);
  }

  toggleTheme() {
    this.set({ theme: this.appearance.theme === "dark" ? "light" : "dark" });
  }

  toggleDigits() {
    this.set({ digits: !this.state.digits });
  }

  // ---------------------------------------------------------------- pinned queries, messages

  pin(row) {
    this.set({ pinned: this.state.pinned === row ? null : row });
  }

  unpin() {
    this.set(this.state.view === "document" ? { pinnedWord: null } : { pinned: null });
  }

  async showPinned() {
    const { pinned, view, pinnedWord, hop } = this.state,
      { panel } = this.layout,
      { appearance } = this,
      content = this.content();
    if (view === "document" && pinnedWord !== null) {
      const word = this.views.document.describePinned(pinnedWord);
      return panel.showWord(word, hop, (selected) => this.set({ hop: selected }), appearance);
    }
    if (pinned === null || !["map", "arcs", "text"].includes(view)) return panel.hide();
    const indices = this.comparableIndices,
      labels = indices.map((index) => this.manifest.data[index].label);
    try {
      const answers = await Promise.all(indices.map((index) => this.row(pinned, index)));
      if (this.state.pinned !== pinned) return undefined;
      return panel.show({ content, pinned, rows: answers.map(({ values }) => values), labels, appearance });
    } catch (error) {
      return error.name === "AbortError" ? undefined : panel.showMessage(content, pinned, error.message);
    }
  }

  showError(error) {
    const { errorNote } = this.layout;
    errorNote.hidden = false;
    errorNote.textContent = `Some tiles failed to load: ${error.message} Retrying.`;
    clearTimeout(this.errorTimer);
    this.errorTimer = setTimeout(() => {
      errorNote.hidden = true;
      this.views.map.refresh();
      this.store.startNext();
      if (this.state.view === "speech" && !this.views.speech.map) this.update();
    }, 2000);
  }

  async save() {
    const { head, view } = this.state,
      layer = this.layer.name.replace(/[^\p{L}\p{N}]+/gu, "-"),
      blob = await this.views[view].save();
    download(`${layer}-${head === null ? "mean" : `head-${head}`}.${/svg/.test(blob.type) ? "svg" : "png"}`, blob);
  }

  // ---------------------------------------------------------------- keys and theme

  listen() {
    this.layout.root.addEventListener("keydown", (event) => {
      if (event.target.closest("select, input, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey)
        return;
      if (!this.handleKey(event)) return;
      event.preventDefault();
      event.stopPropagation();
    });
    const handleTheme = () => this.appearance.detectedTheme !== this.appearance.detectTheme() && this.restyle(),
      darkQuery = globalThis.matchMedia("(prefers-color-scheme: dark)"),
      themeObserver = new MutationObserver(handleTheme), // notebooks set their theme on the body
      handleManifest = () => {
        this.store.cache.clear();
        this.openManifest();
      };
    darkQuery.addEventListener("change", handleTheme);
    for (const element of [document.body, document.documentElement])
      themeObserver.observe(element, { attributes: true, attributeFilter: THEME_ATTRIBUTES });
    this.model.on?.("change:manifest", handleManifest);
    this.stopListening = () => {
      darkQuery.removeEventListener("change", handleTheme);
      themeObserver.disconnect();
      this.model.off?.("change:manifest", handleManifest);
    };
  }

  /** Handle a key; returns false if it has no function. */
  handleKey({ key, shiftKey, target }) {
    const { state } = this,
      by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key],
      button = target.closest("button");
    if (this.views[state.view].handleKey?.(key, shiftKey, button)) return true;
    const actions = {
      t: () => this.toggleTheme(),
      n: () => this.toggleDigits(),
      "?": () => this.layout.help.showModal(),
    };
    if (["image", "speech"].includes(state.view))
      actions.h = actions.H = () => this.step("head", shiftKey ? -1 : 1);
    if (by && !shiftKey) actions[key] = () => (by[1] ? this.step("head", by[1]) : this.step("layer", by[0]));
    if ((state.view === "document" ? state.pinnedWord : state.pinned) !== null) actions.Escape = () => this.unpin();
    const view = this.availableViews()[key - 1];
    if (view) actions[key] = () => this.set({ view });
    const comparisons = this.comparisons();
    if (comparisons.length)
      actions.c = () =>
        this.set({ comparison: comparisons[(comparisons.indexOf(state.comparison) + 1) % comparisons.length] });
    actions[key]?.();
    return key in actions;
  }

  close() {
    this.store.close();
    clearTimeout(this.errorTimer);
    this.stopListening();
    for (const view of Object.values(this.views)) view.close?.();
    this.el.replaceChildren();
  }
}

/** The entry point of anywidget. Returns a function that removes the viewer. */
export function render({ model, el }) {
  const viewer = new Viewer(model, el);
  el.jumok = viewer; // for the console and for measurements
  return () => viewer.close();
}

export default { render };
