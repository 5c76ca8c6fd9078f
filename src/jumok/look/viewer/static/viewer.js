// The viewer: one ES module for notebooks, pages and saved files. `render({ model, el })` follows anywidget;
// `model.get("manifest")` describes the data, and the host provides tiles (see tiles.js).

import { Appearance } from "./appearance.js";
import { ARROWS, clamp, download } from "./dom.js";
import { ViewerLayout } from "./layout.js";
import { canHideSinks, describeRounding, isComputed, isDetailed, replaceData } from "./manifest.js";
import { describeSinks } from "./sinks.js";
import { buildRequest, getHost, Store } from "./tiles.js";
import { labelWithOutputs, shortNames } from "./token_text.js";
import { chooseInitialView, listViews, VIEWS } from "./views.js";
import { WeightRange } from "./weight_range.js";

// A change of these needs new content, or another appearance.
const CONTENT_KEYS = ["view", "comparison", "layer", "head", "pinned", "hop", "pinnedWord", "weightScope", "withoutSinks"];
const APPEARANCE_KEYS = ["theme", "scale", "curve", "contrast", "digits", "isShared"];
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
  isShared: false, // whether all maps share a scale
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
      withoutSinks: this.originalManifest.data[0].hides_sinks,
      pinned: null,
      hop: null, // of a document; null is the mean of all
      pinnedWord: null, // of a document
    });
  }

  setManifest(manifest, change = {}) {
    this.manifest = manifest;
    this.labelCache = new Map();
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
    return { data: this.manifest.data[index].number ?? index, layer, head, withoutSinks: this.hidesSinks };
  }

  /** Whether the current layer is shown without attention sinks. */
  get hidesSinks() {
    return this.state.withoutSinks && this.canHideSinks;
  }

  get canHideSinks() {
    return this.View.hasLayers && canHideSinks(this.item, this.layer, this.state.head);
  }

  /** The labels of the queries, and with them what each produced if they attend to another text. */
  rowLabels({ kind, row_labels: labels, row_outputs: outputs }) {
    const { texts } = this.manifest;
    if (labels === null || outputs === null || kind !== "cross") return { rows: labels === null ? null : texts[labels] };
    const key = `${labels} ${outputs}`;
    if (!this.labelCache.has(key)) this.labelCache.set(key, labelWithOutputs(texts[labels], texts[outputs]));
    return { rows: this.labelCache.get(key), producedRows: texts[outputs] };
  }

  /** The content of a view; the weights of `baseline`, if it is not null, are subtracted. */
  content(index = this.dataIndex, baseline = null) {
    const item = this.manifest.data[index],
      info = item.layers[this.state.layer],
      texts = (n) => (n === null ? null : this.manifest.texts[n]),
      head = this.describeHead(info);
    return {
      ...this.source(index),
      baseline: baseline === null ? null : this.source(baseline).data,
      item,
      state: this.state,
      shape: info.shape,
      finestZoom: isDetailed(item, info, this.state.head) ? info.finest_zoom : Infinity,
      isOverview: !isDetailed(item, info, this.state.head),
      maxRows: this.state.head === null ? info.max_mean_rows : info.max_rows,
      rounding: isComputed(item, info) ? this.manifest.score_error > 0.005 : this.manifest.rounding,
      producedRows: null,
      ...this.rowLabels(info),
      cols: texts(info.col_labels),
      outputs: texts(info.row_outputs),
      spans: { rows: info.spans[0], cols: info.spans[1] },
      sinks: info.sinks,
      generated: { rows: info.first_generated[0] ?? Infinity, cols: info.first_generated[1] ?? Infinity },
      label: `Attention of ${info.name}${head}: ${info.shape[0]} queries by ${info.shape[1]} keys`,
    };
  }

  describeHead({ mean_of: meanOf }) {
    if (meanOf) return "";
    return this.state.head === null ? ", mean of all heads" : `, head ${this.state.head}`;
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
    return Object.fromEntries(Object.entries(VIEWS).map(([name, View]) => [name, new View(shared)]));
  }

  get view() {
    return this.views[this.state.view];
  }

  /** The class of the current view, which declares what the viewer needs to know about it (see view.js). */
  get View() {
    return VIEWS[this.state.view];
  }

  // ---------------------------------------------------------------- state

  set(change) {
    const { state: before, hidesSinks: hidSinks } = this;
    this.state = this.validate({ ...before, ...change });
    const isChanged = (key) => before[key] !== this.state[key];
    if (APPEARANCE_KEYS.some(isChanged) || hidSinks !== this.hidesSinks) this.restyle();
    if (CONTENT_KEYS.some(isChanged)) this.update();
    if (isChanged("hop")) this.layout.announce(this.hopName());
    if (isChanged("layer") || isChanged("head")) this.layout.announce(this.content().label);
    if (isChanged("withoutSinks")) this.layout.announce(this.hidesSinks ? "Sinks left out" : "All weights");
  }

  // Reset what does not exist.
  validate(state) {
    const items = this.manifest.data,
      item = items[typeof state.comparison === "number" ? state.comparison : items.length - 1],
      layer = clamp(state.layer, 0, item.layers.length - 1),
      { heads, has_mean: hasMean, mean_of: meanOf, shape } = item.layers[layer],
      limit = (value, length) => (value !== null && value >= length ? null : value),
      hasHead = state.head === null ? hasMean : heads.includes(state.head);
    const valid = {
      ...state,
      layer,
      head: meanOf ? null : hasHead ? state.head : heads[Math.min(heads.length - 1, state.head ?? 0)],
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
    const { state, layout, view } = this,
      focus = document.activeElement,
      hadFocus = layout.root.contains(focus),
      group = focus?.closest?.(".jm-tabs, .jm-chips");
    this.updateControls();
    if (this.View.hasLayers)
      this.range.measure(this.comparableIndices.map((index) => this.source(index)), this.layer.shape);
    if (layout.content.firstElementChild !== view.el) layout.content.replaceChildren(view.el);
    for (const other of Object.values(this.views)) {
      other.pinned = state.pinned;
      if (other !== view) other.deactivate();
    }
    this.finish(view.show({ ...this.content(), compared: this.compared(), layers: this.namedLayers() }));
    this.showPinned();
    this.updateLegend();
    layout.showTooltip(null);
    // If the focused element is gone, focus its replacement, so that keys continue to work.
    if (hadFocus && !layout.root.contains(document.activeElement))
      (group?.querySelector(".jm-on") ?? layout.root).focus({ preventScroll: true });
  }

  // Update the legend when a view has loaded its weights.
  finish(loading) {
    Promise.resolve(loading).then(
      () => this.updateLegend(),
      (error) => this.showError(error),
    );
  }

  namedLayers() {
    const { layers } = this.item,
      short = shortNames(layers.filter(({ mean_of: meanOf }) => !meanOf).map(({ name }) => name)); // means come last
    return layers.map((layer, number) => ({ ...layer, number, short: short[number] ?? layer.name }));
  }

  // The layers that the current view can show.
  availableLayers() {
    return this.View.hasLayers ? this.namedLayers().filter((layer) => this.View.canShow(this.item, layer)) : [];
  }

  availableViews() {
    return listViews(this.item, this.layer);
  }

  // Update the layout from the state.
  updateControls() {
    const { state, manifest, item, layer, View } = this,
      layerName = View.hasLayers ? [layer.name] : [];
    this.layout.updateControls({
      View,
      state,
      title: manifest.title || (layerName[0] ?? View.title),
      subtitle: [
        ...(manifest.title ? layerName : []),
        ...View.describe(item, layer, state),
        ...(View.hasLayers ? this.describeChoice() : []),
      ],
      sinks: this.canHideSinks ? describeSinks(layer.sinks, manifest.texts[layer.col_labels]) : null,
      layers: this.availableLayers(),
      chips: this.chips(),
      views: this.availableViews().map((name) => [name, VIEWS[name].title]),
      comparisons: this.comparisons().map((value) => [value, manifest.data[value]?.label ?? COMPARISONS[value]]),
      comparison: state.view === "map" ? state.comparison : this.dataIndex,
      note: View.hasLayers ? describeRounding(manifest, item, layer) : "",
    });
  }

  // Why this layer was opened, and what was left out of it.
  describeChoice() {
    const { state, item, layer } = this,
      { opening } = item,
      isOpening = opening && opening.layer === state.layer && opening.head === state.head;
    return [
      isOpening ? opening.reason : "",
      this.hidesSinks ? `without ${describeSinks(layer.sinks, this.manifest.texts[layer.col_labels])}` : "",
    ].filter(Boolean);
  }

  hopName() {
    return this.state.hop === null ? "Mean of all hops" : `Hop ${this.state.hop}`;
  }

  chips() {
    return this.View.listChips(this.item, this.layer);
  }

  step(name, by) {
    const isLayer = name === "layer",
      key = isLayer ? "layer" : this.View.chip,
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
    this.appearance.apply({ ...this.state, range: this.range.value, withoutSinks: this.hidesSinks });
    this.layout.updateAppearance(this.appearance.theme, this.state.digits);
    this.view.refresh();
    this.updateLegend();
  }

  updateLegend() {
    this.layout.legend.show(this.appearance, this.view.legend());
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
    this.set({ [this.View.pin]: null });
  }

  async showPinned() {
    const { View, view, appearance } = this,
      pinned = this.state[View.pin],
      { panel } = this.layout,
      content = this.content();
    if (pinned === null || !View.hasPanel) return panel.hide();
    if (View.pin === "pinnedWord")
      return panel.showWord(view.describePinned(pinned), this.state.hop, (hop) => this.set({ hop }), appearance);
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
      this.finish(this.view.retry());
      this.store.startNext();
    }, 2000);
  }

  async save() {
    const { head } = this.state,
      layer = this.layer.name.replace(/[^\p{L}\p{N}]+/gu, "-"),
      blob = await this.view.save();
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
      by = ARROWS[key],
      button = target.closest("button");
    if (this.view.handleKey(key, shiftKey, button)) return true;
    const actions = {
      t: () => this.toggleTheme(),
      n: () => this.toggleDigits(),
      r: () => this.set({ isShared: !state.isShared }),
      "?": () => this.layout.help.showModal(),
    };
    if (this.canHideSinks) actions.f = () => this.set({ withoutSinks: !state.withoutSinks });
    actions.h = actions.H = () => this.step("head", shiftKey ? -1 : 1);
    if (by && !shiftKey) actions[key] = () => (by[1] ? this.step("head", by[1]) : this.step("layer", by[0]));
    if (state[this.View.pin] !== null) actions.Escape = () => this.unpin();
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
    for (const view of Object.values(this.views)) view.close();
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
