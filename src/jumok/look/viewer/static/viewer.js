// The viewer: one ES module for a notebook, a page and a saved file. `render({ model, el })` as anywidget has it;
// `model.get("manifest")` tells what there is, and the host brings the numbers (see tiles.js).

import { measuresOf, openingOf, shows, sizesOf, viewsOf, withScene } from "./about.js";
import { ArcView } from "./arcs.js";
import { told } from "./colours.js";
import { download, make, word } from "./dom.js";
import { DocumentView } from "./document.js";
import { Frame } from "./frame.js";
import { HeadView } from "./heads.js";
import { Look } from "./look.js";
import { describe, MapView } from "./map.js";
import { PictureView } from "./picture.js";
import { ReadingView } from "./reading.js";
import { SpeechView } from "./speech.js";
import { shortNames } from "./text.js";
import { Axis, hostOf, keyOf, Store, STRIP, TILE } from "./tiles.js";

const SHOWN = ["view", "side", "layer", "head", "pinned", "hop", "spot", "share"]; // what a change of needs new contents
const SIDES = { both: "Both", difference: "Difference" };

class Viewer {
  constructor(model, el) {
    this.model = model;
    this.host = el;
    this.manifest = this.given = model.get("manifest");
    this.full = Boolean(model.get("full")); // the window is ours: no page to scroll around us
    this.store = new Store(hostOf(model), {
      parallel: typeof model.tiles === "function" ? 6 : 2,
      failed: (error) => this.trouble(error),
    });
    this.state = {
      ...openingOf(this.manifest.scenes[0]),
      side: 0,
      pinned: null,
      hop: null, // of a document; null is the mean of all
      spot: null, // the pinned word of a document
      share: "document", // and its weights in the whole of it, or in their "sentence"
      theme: null,
      scale: "blue",
      curve: "auto",
      contrast: 0,
      digits: false,
    };
    this.frame = new Frame(this.full, this.actions());
    el.replaceChildren(this.frame.root);
    this.look = new Look(this.frame.root, this.full);
    this.makeViews();
    this.listen();
    this.restyle();
    this.update();
    this.ready = true;
  }

  // ---------------------------------------------------------------- what there is

  layers(scene) {
    return this.manifest.scenes[scene].layers;
  }

  get scene() {
    return typeof this.state.side === "number" ? this.state.side : this.manifest.scenes.length - 1;
  }

  /** How the host calls a scene: one that was said anew has a number of its own. */
  numberOf(scene) {
    return this.manifest.scenes[scene]?.number ?? scene;
  }

  get layer() {
    return this.layers(this.scene)[this.state.layer];
  }

  /** What a view shows, in the form that all of them take. */
  content(scene = this.scene, against = null) {
    const info = this.layers(scene)[this.state.layer],
      { texts } = this.manifest,
      { layer, head } = this.state;
    const named = head === null ? "mean of all heads" : `head ${head}`;
    return {
      scene: this.numberOf(scene),
      against: against === null ? null : this.numberOf(against),
      layer,
      head,
      shape: info.shape,
      finest: info.finest,
      rows: info.rows === null ? null : texts[info.rows],
      cols: info.cols === null ? null : texts[info.cols],
      label: `Attention of ${info.name}, ${named}: ${info.shape[0]} queries by ${info.shape[1]} keys`,
    };
  }

  request(what, rows, cols, scene = this.scene, size = TILE) {
    const { layer, head } = this.state;
    return { scene: this.numberOf(scene), layer, head, what, rows, cols, size };
  }

  received() {
    const [rows, cols] = this.layer.shape;
    return this.store.one(this.request("received", [0, rows], [0, cols]));
  }

  row(number, scene = this.scene) {
    return this.store.one(
      this.request("weights", [number, number + 1], [0, this.layers(scene)[this.state.layer].shape[1]], scene),
    );
  }

  get document() {
    return this.manifest.scenes[this.scene].document ?? null;
  }

  available() {
    return viewsOf(this.manifest.scenes[this.scene], this.layer).map(([view]) => view);
  }

  // ---------------------------------------------------------------- the frame around the views

  // What the frame's buttons and boxes do.
  actions() {
    return {
      set: (change) => this.set(change),
      step: (name, by) => this.step(name, by),
      zoom: (factor) => this.maps.forEach((map) => (factor ? map.glide(factor) : map.fit())),
      digits: () => this.set({ digits: !this.state.digits }),
      theme: () => this.toggleTheme(),
      save: () => this.save(),
      unpin: () => this.set(this.state.view === "document" ? { spot: null } : { pinned: null }),
    };
  }

  makeViews() {
    const { store, look } = this,
      pin = (row) => this.pin(row),
      tell = (what, event) => this.frame.tell(what, event);
    const row = (number) => this.row(number),
      tip = (lines, x, y) => (lines ? this.frame.tipAt(lines, x, y) : this.frame.tell(null)),
      say = (text) => this.frame.say(text);
    const received = () => this.received(),
      whole = (what, size) =>
        this.store.one(this.request(what, [0, this.layer.shape[0]], [0, this.layer.shape[1]], this.scene, size));
    const map = (n) =>
      new MapView({
        store,
        look,
        events: { pin, hover: (place) => this.hovered(n, place), moved: (view) => this.moved(n, view) },
      });
    this.maps = [map(0), map(1)];
    this.captions = [0, 1].map(() => make("figcaption", { class: "jm-caption-line" }));
    this.figures = this.maps.map((view, n) => make("figure", { class: "jm-figure" }, [this.captions[n], view.el]));
    this.mapBox = make("div", { class: "jm-maps" }, [...this.figures, this.frame.zooms]);
    this.views = {
      document: new DocumentView({
        look,
        events: { set: (change) => this.set(change), tip, say },
      }),
      picture: new PictureView({
        look,
        events: { pin, row, received, tip, say, all: () => whole("weights"), changed: () => this.relegend() },
      }),
      map: { el: this.mapBox },
      arcs: new ArcView({
        look,
        events: { pin, hover: () => {}, wants: (rows, cols) => this.store.one(this.request("weights", rows, cols)) },
      }),
      text: new ReadingView({ look, events: { pin, tell, row, received } }),
      heads: new HeadView({ store, look, events: { open: (layer, head) => this.set({ layer, head, view: "map" }) } }),
      speech: new SpeechView({
        look,
        events: {
          ...{ tip, say, strip: () => whole("map", STRIP), changed: () => this.relegend() },
          retell: (weights) => this.retell(weights),
          reset: () => this.put(withScene(this.manifest, this.scene, this.asGiven(this.scene))),
        },
      }),
    };
  }

  // ---------------------------------------------------------------- state

  set(change) {
    const before = this.state;
    this.state = { ...before, ...change };
    const last = this.layers(this.scene).length - 1;
    this.state.layer = Math.max(0, Math.min(last, this.state.layer));
    const { heads, mean, shape } = this.layer;
    if (!(this.state.head === null ? mean : heads.includes(this.state.head)))
      this.state.head = heads[Math.min(heads.length - 1, this.state.head ?? 0)];
    if (this.state.pinned !== null && this.state.pinned >= shape[0]) this.state.pinned = null;
    if (!this.available().includes(this.state.view)) this.state.view = "map";
    if (this.state.view === "map" && typeof this.state.side !== "number" && !this.sides().includes(this.state.side))
      this.state.side = 1;
    if (this.state.hop !== null && this.state.hop >= (this.document?.hops ?? 0)) this.state.hop = null;
    if (this.state.spot !== null && this.state.spot >= (this.document?.words.length ?? 0)) this.state.spot = null;
    if (["theme", "scale", "curve", "contrast", "digits"].some((name) => before[name] !== this.state[name]))
      this.restyle();
    if (SHOWN.some((name) => before[name] !== this.state[name])) this.update();
    if (before.hop !== this.state.hop) this.frame.say(this.hopName());
    if (before.layer !== this.state.layer || before.head !== this.state.head) this.frame.say(this.content().label);
  }

  update() {
    const { state } = this,
      focus = document.activeElement,
      had = this.frame.root.contains(focus),
      group = focus?.closest?.(".jm-tabs, .jm-chips");
    this.dress();
    if (state.view !== "document") this.measure();
    const view = this.views[state.view];
    if (this.frame.stage.firstElementChild !== view.el) this.frame.stage.replaceChildren(view.el);
    for (const item of Object.values(this.views)) {
      item.pinned = state.pinned;
      if (item !== view) item.away?.();
    }
    if (state.view === "document") this.views.document.show(this.document, state);
    if (state.view === "map") this.updateMaps();
    else this.maps.forEach((map) => map.store.want(map.owner, []));
    if (state.view === "arcs")
      this.views.arcs.show(this.content()).then(() => state.pinned !== null && this.views.arcs.reveal(state.pinned));
    if (state.view === "text") this.views.text.show(this.content()).then(() => this.relegend());
    if (state.view === "heads") this.views.heads.show({ scene: this.numberOf(this.scene), layers: this.named(), chosen: state });
    else this.store.want("heads", []);
    const scene = this.manifest.scenes[this.scene];
    if (state.view === "picture") this.views.picture.show(this.content(), scene.picture);
    if (state.view === "speech")
      this.views.speech.show(this.content(), scene).catch((error) => this.trouble(error));
    this.showPin();
    this.relegend();
    this.frame.tell(null);
    // What had the focus may be gone: it goes to what took its place, so that the keys go on working.
    if (had && !this.frame.root.contains(document.activeElement))
      (group?.querySelector(".jm-on") ?? this.frame.root).focus({ preventScroll: true });
  }

  updateMaps() {
    const { side } = this.state,
      both = side === "both",
      labels = this.manifest.scenes.map((scene) => scene.label);
    const [first, second] = this.maps;
    for (const map of this.maps) map.pinned = this.state.pinned;
    this.figures[1].hidden = !both;
    this.mapBox.classList.toggle("jm-two", both);
    this.captions.forEach((caption, n) => {
      caption.hidden = !both;
      caption.textContent = labels[n] ?? "";
    });
    first.show(both ? this.content(0) : side === "difference" ? this.content(1, 0) : this.content());
    if (both) second.show(this.content(1));
    else second.store.want(second.owner, []);
    second.linked = first.linked = both && `${this.content(0).shape}` === `${this.content(1).shape}`;
  }

  named() {
    const short = shortNames(this.layers(this.scene).map((layer) => layer.name));
    return this.layers(this.scene).map((layer, number) => ({ ...layer, number, short: short[number] }));
  }

  // The frame, as the state has it.
  dress() {
    const { state, manifest } = this,
      both = manifest.scenes.length === 2;
    const { name } = this.layer,
      reads = state.view === "document",
      scene = manifest.scenes[this.scene];
    const about = reads ? measuresOf(this.document, state.hop) : sizesOf(state.view, scene, this.layer);
    this.frame.dress({
      title: manifest.title || (reads ? "Document" : name),
      about: [...(manifest.title && !reads ? [name] : []), ...about],
      layers: reads ? [] : this.seen(),
      chips: { name: reads ? "hop" : "head", all: this.chips() },
      state,
      views: viewsOf(scene, this.layer),
      sides: both ? this.sides().map((side) => [side, manifest.scenes[side]?.label ?? SIDES[side]]) : [],
      side: state.view === "map" ? state.side : this.scene,
    });
  }

  // The layers that the view has something to show of.
  seen() {
    return this.named().filter((layer) => shows(this.state.view, this.manifest.scenes[this.scene], layer));
  }

  hopName() {
    return this.state.hop === null ? "Mean of all hops" : `Hop ${this.state.hop}`;
  }

  // The heads of a layer, or the hops of a document, and their mean.
  chips() {
    const { heads, mean } = this.layer,
      read = this.state.view === "document";
    const all = read ? Array.from({ length: this.document.hops }, (_, hop) => hop) : heads;
    return (read ? all.length > 1 : mean) ? [...all, null] : all;
  }

  // What one may look at where two scenes are compared.
  sides() {
    if (this.state.view !== "map" || !this.layers(0)[this.state.layer] || !this.layers(1)[this.state.layer])
      return [0, 1];
    return [0, 1, "both", ...(this.comparable() ? ["difference"] : [])];
  }

  comparable() {
    const [a, b] = [0, 1].map((scene) => this.layers(scene)[this.state.layer]);
    return Boolean(a && b) && `${a.shape}` === `${b.shape}`;
  }

  step(name, by) {
    if (name === "layer") {
      const seen = this.seen(),
        next = seen.findIndex((one) => one.number === this.state.layer) + by;
      return this.set({ layer: seen[Math.max(0, Math.min(seen.length - 1, next))].number });
    }
    const every = this.chips(),
      which = this.state.view === "document" ? "hop" : "head",
      at = every.indexOf(this.state[which]);
    return this.set({ [which]: every[Math.max(0, Math.min(every.length - 1, at + by))] });
  }

  // ---------------------------------------------------------------- what is said anew

  async retell(weights) {
    const { scene, given } = this,
      told = await this.store.host.retell({ scene, weights });
    if (this.given === given) this.put(withScene(this.manifest, scene, told));
  }

  // A scene of the manifest as it came.
  asGiven(scene) {
    return { texts: this.given.texts, scenes: [this.given.scenes[scene]] };
  }

  put(manifest) {
    this.manifest = manifest;
    this.range = undefined;
    this.set({}); // what there is no more of
    this.update();
  }

  // ---------------------------------------------------------------- colours and scale

  // The largest weight at the coarsest zoom sets where the scale ends. Those tiles are shown first anyway.
  measure() {
    const shape = this.layer.shape,
      rows = new Axis(shape[0]),
      cols = new Axis(shape[1]),
      zoom = Math.max(rows.coarsest, cols.coarsest);
    const scenes = this.manifest.scenes
      .map((_, n) => n)
      .filter((n) => this.layers(n)[this.state.layer] && `${this.layers(n)[this.state.layer].shape}` === `${shape}`);
    const wishes = [];
    for (const scene of scenes) {
      for (let i = 0; i < rows.count(zoom); i += 1) {
        for (let j = 0; j < cols.count(zoom); j += 1) {
          const top = rows.start(zoom, i),
            left = cols.start(zoom, j);
          wishes.push({
            request: this.request("map", [top, rows.end(zoom, i)], [left, cols.end(zoom, j)], scene),
            urgency: 0,
            arrived: () => this.measured(wishes, cols.cell(zoom)),
          });
        }
      }
    }
    this.store.want("measure", wishes);
    this.measured(wishes, cols.cell(zoom));
  }

  measured(wishes, width) {
    const found = wishes.map(({ request }) => this.store.get(keyOf(request)));
    if (found.some((tile) => !tile)) return;
    const most = Math.max(...found.map((tile) => tile.most)) / width;
    let change = 0;
    const half = found.length / 2;
    if (this.manifest.scenes.length === 2 && Number.isInteger(half)) {
      for (let n = 0; n < half; n += 1)
        found[n].values.forEach((value, k) => (change = Math.max(change, Math.abs(value - found[n + half].values[k]))));
    }
    const next = { most, change: change / width, width, keys: this.layer.shape[1] };
    if (JSON.stringify(next) === JSON.stringify(this.range)) return;
    this.range = next;
    this.restyle();
  }

  restyle() {
    const { theme, scale, curve, contrast, digits } = this.state;
    this.look.apply({ theme, scale, curve, contrast, digits, range: this.range });
    this.frame.paint(this.look.theme, digits);
    this.maps.forEach((map) => map.refresh());
    for (const [name, view] of Object.entries(this.views))
      if (name !== "map" && name === this.state.view && this.ready) view.refresh();
    this.relegend();
  }

  relegend() {
    const { view, side } = this.state,
      { look } = this,
      text = this.views.text;
    this.frame.settings.hidden = !["document", "picture", "speech", "map", "arcs"].includes(view);
    this.frame.colours.hidden = view === "picture"; // those of a picture go with any picture
    if (view === "map" && side === "difference")
      this.frame.legend.show(look, { curve: look.apart, list: look.apartList, title: "change of weight", apart: true });
    else if (["document", "picture", "speech"].includes(view)) this.frame.legend.show(look, this.views[view].legend());
    else if (view === "text")
      this.frame.legend.show(
        look,
        text.curve && {
          curve: text.curve,
          list: look.tints,
          log: true,
          title: text.pinned === null ? "mean weight received" : "attention weight",
        },
      );
    else if (view === "heads") this.frame.legend.say("Each small map has a scale of its own, from none to its most.");
    else if (view === "map" || view === "arcs") {
      const map = this.maps[0],
        width = view === "map" && map.size ? map.cols.cell(map.zoomLevel()) : 1;
      this.zoomShown = map.size ? map.zoomLevel() : null;
      this.frame.legend.show(
        look,
        this.range && {
          curve: look.curveAt(width),
          list: look.list,
          log: look.curveKind === "log",
          title: width > 1 ? "weight, mean over the pairs of a cell" : "attention weight",
        },
      );
    } else this.frame.legend.say("");
  }

  toggleTheme() {
    this.set({ theme: this.look.theme === "dark" ? "light" : "dark" });
  }

  // ---------------------------------------------------------------- pointing, pinning, telling

  pin(row) {
    this.set({ pinned: this.state.pinned === row ? null : row });
  }

  async showPin() {
    const { pinned, view, spot, hop } = this.state,
      content = this.content();
    if (view === "document" && spot !== null)
      return this.frame.panel.word(
        this.views.document.tellOf(spot),
        hop,
        (one) => this.set({ hop: one }),
        this.look,
      );
    if (pinned === null || !["map", "arcs", "text"].includes(view)) return this.frame.panel.hide();
    const scenes = this.manifest.scenes.length === 2 && this.comparable() ? [0, 1] : [this.scene];
    try {
      const rows = await Promise.all(scenes.map((scene) => this.row(pinned, scene)));
      if (this.state.pinned === pinned)
        this.frame.panel.show({
          content,
          pinned,
          rows: rows.map((row) => row.values),
          labels: scenes.map((n) => this.manifest.scenes[n].label),
          look: this.look,
        });
    } catch (error) {
      if (error.name !== "AbortError") this.frame.panel.say(content, pinned, error.message);
    }
    return undefined;
  }

  moved(n, view) {
    this.maps?.forEach((other, m) => m !== n && other.linked && other.follow(view));
    if (this.maps && n === 0 && this.maps[0].zoomLevel() !== this.zoomShown) this.relegend();
  }

  hovered(n, place) {
    clearTimeout(this.resting);
    const map = this.maps[n],
      about = place && describe(place, map.content);
    if (!about) return this.frame.tell(null);
    const lines = [
      make("div", { class: "jm-pair" }, [
        word(about.from),
        make("span", { class: "jm-arrow", text: " → " }),
        word(about.to),
      ]),
    ];
    const weight = make("div", { class: "jm-weight", text: about.weight });
    lines.push(weight);
    if (!about.single) lines.push(make("div", { class: "jm-soft", text: "of a row’s weight, on average" }));
    const box = map.el.getBoundingClientRect();
    this.frame.tipAt(lines, box.left + place.at.x, box.top + place.at.y);
    if (about.single && map.content.against === null) {
      // The tile is rounded to three digits: ask for this one weight as it is, once the pointer rests.
      this.resting = setTimeout(() => {
        this.store
          .one({
            ...this.request("weights", [place.row, place.row + 1], [place.col, place.col + 1]),
            scene: map.content.scene,
          })
          .then(
            (answer) => (weight.textContent = told(answer.values[0], 5)),
            () => {},
          );
      }, 120);
    }
    return undefined;
  }

  trouble(error) {
    this.frame.note.hidden = false;
    this.frame.note.textContent = `Some numbers did not come: ${error.message} It is tried again in a moment.`;
    clearTimeout(this.calm);
    this.calm = setTimeout(() => {
      this.frame.note.hidden = true;
      this.maps.forEach((map) => map.refresh());
      this.store.pump();
      if (this.state.view === "speech" && !this.views.speech.map) this.update();
    }, 2000);
  }

  async save() {
    const name = `${this.layer.name.replace(/[^\p{L}\p{N}]+/gu, "-")}-${this.state.head === null ? "mean" : `head-${this.state.head}`}`;
    if (this.state.view === "arcs") return download(`${name}.svg`, this.views.arcs.save());
    if (["picture", "speech"].includes(this.state.view))
      return download(`${name}.png`, await this.views[this.state.view].save());
    const blob = await this.maps[0].save(3, 46, (context, x, y, width) =>
      this.frame.legend.draw(context, this.look, x, y, width),
    );
    return download(`${name}.png`, blob);
  }

  // ---------------------------------------------------------------- keys and theme

  listen() {
    this.onKey = (event) => {
      if (event.target.closest("select, input, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey)
        return;
      if (!this.keyed(event)) return;
      event.preventDefault();
      event.stopPropagation();
    };
    this.frame.root.addEventListener("keydown", this.onKey);
    this.dark = globalThis.matchMedia("(prefers-color-scheme: dark)");
    this.onTheme = () => this.look.seen !== this.look.around() && this.restyle();
    this.dark.addEventListener("change", this.onTheme);
    this.around = new MutationObserver(this.onTheme); // notebooks tell their theme on the page's body
    for (const place of [document.body, document.documentElement])
      this.around.observe(place, {
        attributes: true,
        attributeFilter: ["class", "theme", "data-jp-theme-light", "data-vscode-theme-kind", "data-theme"],
      });
    this.onManifest = () => {
      this.manifest = this.given = this.model.get("manifest");
      this.store.kept.clear();
      this.range = undefined;
      this.set({ ...openingOf(this.manifest.scenes[0]), pinned: null, spot: null, hop: null });
      this.update();
    };
    this.model.on?.("change:manifest", this.onManifest);
  }

  keyed(event) {
    const { key, shiftKey } = event,
      by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
    const button = event.target.closest("button");
    if (this.state.view === "document" && this.views.document.keyed(key, shiftKey, button)) return true;
    if (["picture", "speech"].includes(this.state.view)) {
      if (this.views[this.state.view].keyed(key, shiftKey, button)) return true;
      if (key === "h" || key === "H") return (this.step("head", shiftKey ? -1 : 1), true);
    }
    if (by && shiftKey) return this.move(...by);
    if (by) return (by[1] ? this.step("head", by[1]) : this.step("layer", by[0]), true);
    if (key === "Enter" && button) return false;
    if (key === "Escape" && this.state.view === "document" && this.state.spot !== null)
      return (this.set({ spot: null }), true);
    if (key === "Enter" && this.maps[0].hover) return (this.pin(this.maps[0].hover.row), true);
    if (key === "Escape" && this.state.pinned !== null) return (this.set({ pinned: null }), true);
    if (key === "+" || key === "=") return (this.maps.forEach((map) => map.glide(2)), true);
    if (key === "-") return (this.maps.forEach((map) => map.glide(0.5)), true);
    if (key === "0") return (this.maps.forEach((map) => map.fit()), true);
    if (/^[1-7]$/.test(key) && this.available()[key - 1]) return (this.set({ view: this.available()[key - 1] }), true);
    if (key === "t") return (this.toggleTheme(), true);
    if (key === "n") return (this.set({ digits: !this.state.digits }), true);
    if (key === "?") return (this.frame.help.showModal(), true);
    if (key === "c" && this.manifest.scenes.length === 2) {
      const all = this.sides();
      return (this.set({ side: all[(all.indexOf(this.state.side) + 1) % all.length] }), true);
    }
    return false;
  }

  // From cell to cell by keys, for those who do not point; what is there is said.
  move(down, right) {
    if (this.state.view !== "map") return false;
    const map = this.maps[0],
      [rows, cols] = map.content.shape,
      at = map.hover ?? { row: -down, col: -right };
    const row = Math.max(0, Math.min(rows - 1, (at.row ?? 0) + down)),
      col = Math.max(0, Math.min(cols - 1, (at.col ?? 0) + right));
    map.hover = { row, col };
    map.reveal(row, col);
    const cell = map.cellAt(row, col),
      found = cell && describe({ row, col, cell }, map.content);
    if (found) this.frame.say(`${found.from} to ${found.to}: ${found.weight}`);
    return true;
  }

  close() {
    this.store.close();
    clearTimeout(this.calm);
    clearTimeout(this.resting);
    this.dark.removeEventListener("change", this.onTheme);
    this.around.disconnect();
    this.model.off?.("change:manifest", this.onManifest);
    for (const view of [...this.maps, ...Object.values(this.views)]) view.close?.();
    this.host.replaceChildren();
  }
}

/** As anywidget calls it; what comes back takes everything away again. */
export function render({ model, el }) {
  const viewer = new Viewer(model, el);
  el.jumok = viewer; // for those who look from a console, and for measuring
  return () => viewer.close();
}

export default { render };
