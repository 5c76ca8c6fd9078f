// The viewer: one ES module for notebooks, pages and saved files. `render({ model, el })` follows anywidget;
// `model.get("manifest")` describes the data, and the host provides tiles (see tiles.js).

import { describeDocument, chooseInitialView, canShow, describeLayer, listViews, replaceData } from "./manifest.js";
import { ArcView } from "./arcs_view.js";
import { formatWeight } from "./colours.js";
import { download, createElement, createWord } from "./dom.js";
import { DocumentView } from "./document_view.js";
import { ViewerLayout } from "./layout.js";
import { HeadView } from "./heads_view.js";
import { Appearance } from "./appearance.js";
import { describeCell, MapView } from "./map_view.js";
import { ImageView } from "./image_view.js";
import { TextView } from "./text_view.js";
import { SpeechView } from "./speech_view.js";
import { shortNames } from "./token_text.js";
import { Axis, getHost, keyOf, Store, ALIGNMENT_SIZE, TILE_SIZE } from "./tiles.js";

const CONTENT_STATE = ["view", "comparison", "layer", "head", "pinned", "hop", "pinnedWord", "weightScope"]; // a change of these needs new content
const COMPARISONS = { both: "Both", difference: "Difference" };

class Viewer {
  constructor(model, el) {
    this.model = model;
    this.host = el;
    this.manifest = this.originalManifest = model.get("manifest");
    this.full = Boolean(model.get("full")); // whether the viewer fills the window: there is no page to scroll
    this.store = new Store(getHost(model), {
      parallel: typeof model.tiles === "function" ? 6 : 2,
      onError: (error) => this.showError(error),
    });
    this.state = {
      ...chooseInitialView(this.manifest.data[0]),
      comparison: 0,
      pinned: null,
      hop: null, // of a document; null is the mean of all
      pinnedWord: null, // of a document
      weightScope: "document", // weights of words relative to the document, or to their "sentence"
      theme: null,
      scale: "blue",
      curve: "auto",
      contrast: 0,
      digits: false,
    };
    this.layout = new ViewerLayout(this.full, this.actions());
    el.replaceChildren(this.layout.root);
    this.appearance = new Appearance(this.layout.root, this.full);
    this.createViews();
    this.listen();
    this.restyle();
    this.update();
    this.ready = true;
  }

  // ---------------------------------------------------------------- data

  layers(index) {
    return this.manifest.data[index].layers;
  }

  get dataIndex() {
    return typeof this.state.comparison === "number" ? this.state.comparison : this.manifest.data.length - 1;
  }

  /** The number by which the host knows an item: a new synthesis has its own number. */
  numberOf(index) {
    return this.manifest.data[index]?.number ?? index;
  }

  get layer() {
    return this.layers(this.dataIndex)[this.state.layer];
  }

  /** The content of a view, in the form that all views take. */
  content(index = this.dataIndex, baseline = null) {
    const info = this.layers(index)[this.state.layer],
      { texts } = this.manifest,
      { layer, head } = this.state;
    const named = head === null ? "mean of all heads" : `head ${head}`;
    return {
      data: this.numberOf(index),
      baseline: baseline === null ? null : this.numberOf(baseline),
      layer,
      head,
      shape: info.shape,
      finestZoom: info.finest_zoom,
      rows: info.row_labels === null ? null : texts[info.row_labels],
      cols: info.col_labels === null ? null : texts[info.col_labels],
      label: `Attention of ${info.name}, ${named}: ${info.shape[0]} queries by ${info.shape[1]} keys`,
    };
  }

  request(quantity, rows, cols, index = this.dataIndex, size = TILE_SIZE) {
    const { layer, head } = this.state;
    return { data: this.numberOf(index), layer, head, quantity, rows, cols, size };
  }

  received() {
    const [rows, cols] = this.layer.shape;
    return this.store.fetchOne(this.request("received_weight", [0, rows], [0, cols]));
  }

  row(number, index = this.dataIndex) {
    return this.store.fetchOne(
      this.request("weights", [number, number + 1], [0, this.layers(index)[this.state.layer].shape[1]], index),
    );
  }

  get document() {
    return this.manifest.data[this.dataIndex].document ?? null;
  }

  available() {
    return listViews(this.manifest.data[this.dataIndex], this.layer).map(([view]) => view);
  }

  // ---------------------------------------------------------------- layout

  // The actions of the layout's controls.
  actions() {
    return {
      set: (change) => this.set(change),
      step: (name, by) => this.step(name, by),
      zoom: (factor) => this.maps.forEach((map) => (factor ? map.glide(factor) : map.fit())),
      digits: () => this.set({ digits: !this.state.digits }),
      theme: () => this.toggleTheme(),
      save: () => this.save(),
      unpin: () => this.set(this.state.view === "document" ? { pinnedWord: null } : { pinned: null }),
    };
  }

  createViews() {
    const { store, appearance } = this,
      pin = (row) => this.pin(row),
      showToken = (token, event) => this.layout.showTokenTooltip(token, event);
    const row = (number) => this.row(number),
      tooltip = (lines, x, y) => (lines ? this.layout.showTooltip(lines, x, y) : this.layout.showTokenTooltip(null)),
      announce = (text) => this.layout.announce(text);
    const received = () => this.received(),
      whole = (quantity, size) =>
        this.store.fetchOne(this.request(quantity, [0, this.layer.shape[0]], [0, this.layer.shape[1]], this.dataIndex, size));
    const map = (n) =>
      new MapView({
        store,
        appearance,
        events: { pin, hover: (place) => this.handleHover(n, place), moved: (view) => this.moved(n, view) },
      });
    this.maps = [map(0), map(1)];
    this.captions = [0, 1].map(() => createElement("figcaption", { class: "jm-caption-line" }));
    this.figures = this.maps.map((view, n) => createElement("figure", { class: "jm-figure" }, [this.captions[n], view.el]));
    this.mapBox = createElement("div", { class: "jm-maps" }, [...this.figures, this.layout.zooms]);
    this.views = {
      document: new DocumentView({
        appearance,
        events: { set: (change) => this.set(change), tooltip, announce },
      }),
      image: new ImageView({
        appearance,
        events: { pin, row, received, tooltip, announce, all: () => whole("weights"), changed: () => this.updateLegend() },
      }),
      map: { el: this.mapBox },
      arcs: new ArcView({
        appearance,
        events: { pin, hover: () => {}, weights: (rows, cols) => this.store.fetchOne(this.request("weights", rows, cols)) },
      }),
      text: new TextView({ appearance, events: { pin, tooltip: showToken, row, received } }),
      heads: new HeadView({ store, appearance, events: { open: (layer, head) => this.set({ layer, head, view: "map" }) } }),
      speech: new SpeechView({
        appearance,
        events: {
          ...{ tooltip, announce, alignment: () => whole("pooled_map", ALIGNMENT_SIZE), changed: () => this.updateLegend() },
          resynthesize: (weights) => this.resynthesize(weights),
          reset: () => this.setManifest(replaceData(this.manifest, this.dataIndex, this.originalOf(this.dataIndex))),
        },
      }),
    };
  }

  // ---------------------------------------------------------------- state

  set(change) {
    const before = this.state;
    this.state = { ...before, ...change };
    const last = this.layers(this.dataIndex).length - 1;
    this.state.layer = Math.max(0, Math.min(last, this.state.layer));
    const { heads, has_mean: hasMean, shape } = this.layer;
    if (!(this.state.head === null ? hasMean : heads.includes(this.state.head)))
      this.state.head = heads[Math.min(heads.length - 1, this.state.head ?? 0)];
    if (this.state.pinned !== null && this.state.pinned >= shape[0]) this.state.pinned = null;
    if (!this.available().includes(this.state.view)) this.state.view = "map";
    if (this.state.view === "map" && typeof this.state.comparison !== "number" && !this.comparisons().includes(this.state.comparison))
      this.state.comparison = 1;
    if (this.state.hop !== null && this.state.hop >= (this.document?.num_hops ?? 0)) this.state.hop = null;
    if (this.state.pinnedWord !== null && this.state.pinnedWord >= (this.document?.words.length ?? 0)) this.state.pinnedWord = null;
    if (["theme", "scale", "curve", "contrast", "digits"].some((name) => before[name] !== this.state[name]))
      this.restyle();
    if (CONTENT_STATE.some((name) => before[name] !== this.state[name])) this.update();
    if (before.hop !== this.state.hop) this.layout.announce(this.hopName());
    if (before.layer !== this.state.layer || before.head !== this.state.head) this.layout.announce(this.content().label);
  }

  update() {
    const { state } = this,
      focus = document.activeElement,
      had = this.layout.root.contains(focus),
      group = focus?.closest?.(".jm-tabs, .jm-chips");
    this.updateControls();
    if (state.view !== "document") this.measure();
    const view = this.views[state.view];
    if (this.layout.content.firstElementChild !== view.el) this.layout.content.replaceChildren(view.el);
    for (const item of Object.values(this.views)) {
      item.pinned = state.pinned;
      if (item !== view) item.deactivate?.();
    }
    if (state.view === "document") this.views.document.show(this.document, state);
    if (state.view === "map") this.updateMaps();
    else this.maps.forEach((map) => map.store.request(map.owner, []));
    if (state.view === "arcs")
      this.views.arcs.show(this.content()).then(() => state.pinned !== null && this.views.arcs.reveal(state.pinned));
    if (state.view === "text") this.views.text.show(this.content()).then(() => this.updateLegend());
    if (state.view === "heads") this.views.heads.show({ data: this.numberOf(this.dataIndex), layers: this.namedLayers(), selected: state });
    else this.store.request("heads", []);
    const data = this.manifest.data[this.dataIndex];
    if (state.view === "image") this.views.image.show(this.content(), data.image);
    if (state.view === "speech")
      this.views.speech.show(this.content(), data).catch((error) => this.showError(error));
    this.showPin();
    this.updateLegend();
    this.layout.showTokenTooltip(null);
    // If the focused element is gone, focus its replacement, so that keys continue to work.
    if (had && !this.layout.root.contains(document.activeElement))
      (group?.querySelector(".jm-on") ?? this.layout.root).focus({ preventScroll: true });
  }

  updateMaps() {
    const { comparison } = this.state,
      both = comparison === "both",
      labels = this.manifest.data.map((item) => item.label);
    const [first, second] = this.maps;
    for (const map of this.maps) map.pinned = this.state.pinned;
    this.figures[1].hidden = !both;
    this.mapBox.classList.toggle("jm-two", both);
    this.captions.forEach((caption, n) => {
      caption.hidden = !both;
      caption.textContent = labels[n] ?? "";
    });
    first.show(both ? this.content(0) : comparison === "difference" ? this.content(1, 0) : this.content());
    if (both) second.show(this.content(1));
    else second.store.request(second.owner, []);
    second.linked = first.linked = both && `${this.content(0).shape}` === `${this.content(1).shape}`;
  }

  namedLayers() {
    const short = shortNames(this.layers(this.dataIndex).map((layer) => layer.name));
    return this.layers(this.dataIndex).map((layer, number) => ({ ...layer, number, short: short[number] }));
  }

  // Update the layout from the state.
  updateControls() {
    const { state, manifest } = this,
      isComparison = manifest.data.length === 2;
    const { name } = this.layer,
      isDocument = state.view === "document",
      data = manifest.data[this.dataIndex];
    const sizes = isDocument ? describeDocument(this.document, state.hop) : describeLayer(state.view, data, this.layer);
    this.layout.updateControls({
      title: manifest.title || (isDocument ? "Document" : name),
      subtitle: [...(manifest.title && !isDocument ? [name] : []), ...sizes],
      layers: isDocument ? [] : this.shownLayers(),
      chips: { name: isDocument ? "hop" : "head", all: this.chips() },
      state,
      views: listViews(data, this.layer),
      comparisons: isComparison
        ? this.comparisons().map((value) => [value, manifest.data[value]?.label ?? COMPARISONS[value]])
        : [],
      comparison: state.view === "map" ? state.comparison : this.dataIndex,
    });
  }

  // The layers that the current view can show.
  shownLayers() {
    return this.namedLayers().filter((layer) => canShow(this.state.view, this.manifest.data[this.dataIndex], layer));
  }

  hopName() {
    return this.state.hop === null ? "Mean of all hops" : `Hop ${this.state.hop}`;
  }

  // The heads of a layer, or the hops of a document, and their mean.
  chips() {
    const { heads, has_mean: hasMean } = this.layer,
      isDocument = this.state.view === "document";
    const all = isDocument ? Array.from({ length: this.document.num_hops }, (_, hop) => hop) : heads;
    return (isDocument ? all.length > 1 : hasMean) ? [...all, null] : all;
  }

  // The options for the comparison of two items.
  comparisons() {
    if (this.state.view !== "map" || !this.layers(0)[this.state.layer] || !this.layers(1)[this.state.layer])
      return [0, 1];
    return [0, 1, "both", ...(this.comparable() ? ["difference"] : [])];
  }

  comparable() {
    const [a, b] = [0, 1].map((index) => this.layers(index)[this.state.layer]);
    return Boolean(a && b) && `${a.shape}` === `${b.shape}`;
  }

  step(name, by) {
    if (name === "layer") {
      const layers = this.shownLayers(),
        next = layers.findIndex((layer) => layer.number === this.state.layer) + by;
      return this.set({ layer: layers[Math.max(0, Math.min(layers.length - 1, next))].number });
    }
    const values = this.chips(),
      which = this.state.view === "document" ? "hop" : "head",
      at = values.indexOf(this.state[which]);
    return this.set({ [which]: values[Math.max(0, Math.min(values.length - 1, at + by))] });
  }

  // ---------------------------------------------------------------- speech synthesis

  async resynthesize(weights) {
    const { dataIndex, originalManifest } = this,
      update = await this.store.host.resynthesize({ data: dataIndex, weights });
    if (this.originalManifest === originalManifest) this.setManifest(replaceData(this.manifest, dataIndex, update));
  }

  // An item of the original manifest.
  originalOf(index) {
    return { texts: this.originalManifest.texts, data: [this.originalManifest.data[index]] };
  }

  setManifest(manifest) {
    this.manifest = manifest;
    this.range = undefined;
    this.set({}); // reset what no longer exists
    this.update();
  }

  // ---------------------------------------------------------------- colours and scale

  // The maximum weight at the coarsest zoom sets the end of the scale. Those tiles are loaded first anyway.
  measure() {
    const shape = this.layer.shape,
      rows = new Axis(shape[0]),
      cols = new Axis(shape[1]),
      zoom = Math.max(rows.coarsest, cols.coarsest);
    const indices = this.manifest.data
      .map((_, n) => n)
      .filter((n) => this.layers(n)[this.state.layer] && `${this.layers(n)[this.state.layer].shape}` === `${shape}`);
    const entries = [];
    for (const index of indices) {
      for (let i = 0; i < rows.numTiles(zoom); i += 1) {
        for (let j = 0; j < cols.numTiles(zoom); j += 1) {
          const top = rows.start(zoom, i),
            left = cols.start(zoom, j);
          entries.push({
            request: this.request("pooled_map", [top, rows.end(zoom, i)], [left, cols.end(zoom, j)], index),
            priority: 0,
            onLoad: () => this.measured(entries, cols.cell(zoom)),
          });
        }
      }
    }
    this.store.request("measure", entries);
    this.measured(entries, cols.cell(zoom));
  }

  measured(entries, width) {
    const tiles = entries.map(({ request }) => this.store.get(keyOf(request)));
    if (tiles.some((tile) => !tile)) return;
    const most = Math.max(...tiles.map((tile) => tile.most)) / width;
    let change = 0;
    const half = tiles.length / 2;
    if (this.manifest.data.length === 2 && Number.isInteger(half)) {
      for (let n = 0; n < half; n += 1)
        tiles[n].values.forEach((value, k) => (change = Math.max(change, Math.abs(value - tiles[n + half].values[k]))));
    }
    const next = { most, change: change / width, width, keys: this.layer.shape[1] };
    if (JSON.stringify(next) === JSON.stringify(this.range)) return;
    this.range = next;
    this.restyle();
  }

  restyle() {
    const { theme, scale, curve, contrast, digits } = this.state;
    this.appearance.apply({ theme, scale, curve, contrast, digits, range: this.range });
    this.layout.paint(this.appearance.theme, digits);
    this.maps.forEach((map) => map.refresh());
    for (const [name, view] of Object.entries(this.views))
      if (name !== "map" && name === this.state.view && this.ready) view.refresh();
    this.updateLegend();
  }

  updateLegend() {
    const { view, comparison } = this.state,
      { appearance } = this,
      text = this.views.text;
    this.layout.settings.hidden = !["document", "image", "speech", "map", "arcs"].includes(view);
    this.layout.colours.hidden = view === "image"; // the colours of the overlay are fixed
    if (view === "map" && comparison === "difference")
      this.layout.legend.show(appearance, { curve: appearance.divergingCurve, list: appearance.divergingList, title: "difference in weight", diverging: true });
    else if (["document", "image", "speech"].includes(view)) this.layout.legend.show(appearance, this.views[view].legend());
    else if (view === "text")
      this.layout.legend.show(
        appearance,
        text.curve && {
          curve: text.curve,
          list: appearance.tints,
          log: true,
          title: text.pinned === null ? "mean weight received" : "attention weight",
        },
      );
    else if (view === "heads") this.layout.legend.showText("Each map has its own scale, from 0 to its maximum.");
    else if (view === "map" || view === "arcs") {
      const map = this.maps[0],
        width = view === "map" && map.size ? map.cols.cell(map.zoomLevel()) : 1;
      this.zoomShown = map.size ? map.zoomLevel() : null;
      this.layout.legend.show(
        appearance,
        this.range && {
          curve: appearance.curveAt(width),
          list: appearance.list,
          log: appearance.curveKind === "log",
          title: width > 1 ? "mean weight over the pairs of a cell" : "attention weight",
        },
      );
    } else this.layout.legend.showText("");
  }

  toggleTheme() {
    this.set({ theme: this.appearance.theme === "dark" ? "light" : "dark" });
  }

  // ---------------------------------------------------------------- pointer, pins, messages

  pin(row) {
    this.set({ pinned: this.state.pinned === row ? null : row });
  }

  async showPin() {
    const { pinned, view, pinnedWord, hop } = this.state,
      content = this.content();
    if (view === "document" && pinnedWord !== null)
      return this.layout.panel.showWord(
        this.views.document.describePinned(pinnedWord),
        hop,
        (selected) => this.set({ hop: selected }),
        this.appearance,
      );
    if (pinned === null || !["map", "arcs", "text"].includes(view)) return this.layout.panel.hide();
    const indices = this.manifest.data.length === 2 && this.comparable() ? [0, 1] : [this.dataIndex];
    try {
      const rows = await Promise.all(indices.map((index) => this.row(pinned, index)));
      if (this.state.pinned === pinned)
        this.layout.panel.show({
          content,
          pinned,
          rows: rows.map((row) => row.values),
          labels: indices.map((n) => this.manifest.data[n].label),
          appearance: this.appearance,
        });
    } catch (error) {
      if (error.name !== "AbortError") this.layout.panel.showMessage(content, pinned, error.message);
    }
    return undefined;
  }

  moved(n, view) {
    this.maps?.forEach((other, m) => m !== n && other.linked && other.follow(view));
    if (this.maps && n === 0 && this.maps[0].zoomLevel() !== this.zoomShown) this.updateLegend();
  }

  handleHover(n, place) {
    clearTimeout(this.exactTimer);
    const map = this.maps[n],
      info = place && describeCell(place, map.content);
    if (!info) return this.layout.showTokenTooltip(null);
    const lines = [
      createElement("div", { class: "jm-pair" }, [
        createWord(info.from),
        createElement("span", { class: "jm-arrow", text: " → " }),
        createWord(info.to),
      ]),
    ];
    const weight = createElement("div", { class: "jm-weight", text: info.weight });
    lines.push(weight);
    if (!info.single) lines.push(createElement("div", { class: "jm-muted", text: "mean share of a row’s weight" }));
    const box = map.el.getBoundingClientRect();
    this.layout.showTooltip(lines, box.left + place.point.x, box.top + place.point.y);
    if (info.single && map.content.baseline === null) {
      // Tiles are rounded to three digits: fetch the exact weight once the pointer rests.
      this.exactTimer = setTimeout(() => {
        this.store
          .fetchOne({
            ...this.request("weights", [place.row, place.row + 1], [place.col, place.col + 1]),
            data: map.content.data,
          })
          .then(
            (answer) => (weight.textContent = formatWeight(answer.values[0], 5)),
            () => {},
          );
      }, 120);
    }
    return undefined;
  }

  showError(error) {
    this.layout.errorNote.hidden = false;
    this.layout.errorNote.textContent = `Some tiles failed to load: ${error.message} Retrying.`;
    clearTimeout(this.errorTimer);
    this.errorTimer = setTimeout(() => {
      this.layout.errorNote.hidden = true;
      this.maps.forEach((map) => map.refresh());
      this.store.startNext();
      if (this.state.view === "speech" && !this.views.speech.map) this.update();
    }, 2000);
  }

  async save() {
    const name = `${this.layer.name.replace(/[^\p{L}\p{N}]+/gu, "-")}-${this.state.head === null ? "mean" : `head-${this.state.head}`}`;
    if (this.state.view === "arcs") return download(`${name}.svg`, this.views.arcs.save());
    if (["image", "speech"].includes(this.state.view))
      return download(`${name}.png`, await this.views[this.state.view].save());
    const blob = await this.maps[0].save(3, 46, (context, x, y, width) =>
      this.layout.legend.drawBelow(context, this.appearance, x, y, width),
    );
    return download(`${name}.png`, blob);
  }

  // ---------------------------------------------------------------- keys and theme

  listen() {
    this.onKey = (event) => {
      if (event.target.closest("select, input, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey)
        return;
      if (!this.handleKey(event)) return;
      event.preventDefault();
      event.stopPropagation();
    };
    this.layout.root.addEventListener("keydown", this.onKey);
    this.darkQuery = globalThis.matchMedia("(prefers-color-scheme: dark)");
    this.onTheme = () => this.appearance.detectedTheme !== this.appearance.detectTheme() && this.restyle();
    this.darkQuery.addEventListener("change", this.onTheme);
    this.themeObserver = new MutationObserver(this.onTheme); // notebooks set their theme on the body
    for (const place of [document.body, document.documentElement])
      this.themeObserver.observe(place, {
        attributes: true,
        attributeFilter: ["class", "theme", "data-jp-theme-light", "data-vscode-theme-kind", "data-theme"],
      });
    this.onManifest = () => {
      this.manifest = this.originalManifest = this.model.get("manifest");
      this.store.cache.clear();
      this.range = undefined;
      this.set({ ...chooseInitialView(this.manifest.data[0]), pinned: null, pinnedWord: null, hop: null });
      this.update();
    };
    this.model.on?.("change:manifest", this.onManifest);
  }

  handleKey(event) {
    const { key, shiftKey } = event,
      by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
    const button = event.target.closest("button");
    if (this.state.view === "document" && this.views.document.handleKey(key, shiftKey, button)) return true;
    if (["image", "speech"].includes(this.state.view)) {
      if (this.views[this.state.view].handleKey(key, shiftKey, button)) return true;
      if (key === "h" || key === "H") return (this.step("head", shiftKey ? -1 : 1), true);
    }
    if (by && shiftKey) return this.moveByCell(...by);
    if (by) return (by[1] ? this.step("head", by[1]) : this.step("layer", by[0]), true);
    if (key === "Enter" && button) return false;
    if (key === "Escape" && this.state.view === "document" && this.state.pinnedWord !== null)
      return (this.set({ pinnedWord: null }), true);
    if (key === "Enter" && this.maps[0].hover) return (this.pin(this.maps[0].hover.row), true);
    if (key === "Escape" && this.state.pinned !== null) return (this.set({ pinned: null }), true);
    if (key === "+" || key === "=") return (this.maps.forEach((map) => map.glide(2)), true);
    if (key === "-") return (this.maps.forEach((map) => map.glide(0.5)), true);
    if (key === "0") return (this.maps.forEach((map) => map.fit()), true);
    if (/^[1-7]$/.test(key) && this.available()[key - 1]) return (this.set({ view: this.available()[key - 1] }), true);
    if (key === "t") return (this.toggleTheme(), true);
    if (key === "n") return (this.set({ digits: !this.state.digits }), true);
    if (key === "?") return (this.layout.help.showModal(), true);
    if (key === "c" && this.manifest.data.length === 2) {
      const all = this.comparisons();
      return (this.set({ comparison: all[(all.indexOf(this.state.comparison) + 1) % all.length] }), true);
    }
    return false;
  }

  // Move from cell to cell with the keyboard, and announce each.
  moveByCell(down, right) {
    if (this.state.view !== "map") return false;
    const map = this.maps[0],
      [rows, cols] = map.content.shape,
      at = map.hover ?? { row: -down, col: -right };
    const row = Math.max(0, Math.min(rows - 1, (at.row ?? 0) + down)),
      col = Math.max(0, Math.min(cols - 1, (at.col ?? 0) + right));
    map.hover = { row, col };
    map.reveal(row, col);
    const cell = map.cellAt(row, col),
      info = cell && describeCell({ row, col, cell }, map.content);
    if (info) this.layout.announce(`${info.from} to ${info.to}: ${info.weight}`);
    return true;
  }

  close() {
    this.store.close();
    clearTimeout(this.errorTimer);
    clearTimeout(this.exactTimer);
    this.darkQuery.removeEventListener("change", this.onTheme);
    this.themeObserver.disconnect();
    this.model.off?.("change:manifest", this.onManifest);
    for (const view of [...this.maps, ...Object.values(this.views)]) view.close?.();
    this.host.replaceChildren();
  }
}

/** The entry point of anywidget. Returns a function that removes the viewer. */
export function render({ model, el }) {
  const viewer = new Viewer(model, el);
  el.jumok = viewer; // for the console and for measurements
  return () => viewer.close();
}

export default { render };
