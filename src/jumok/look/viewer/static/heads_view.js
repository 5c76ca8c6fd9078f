// All layers and heads as small maps, which are loaded when they become visible.

import { createElement, createPixels, sizeCanvas } from "./dom.js";
import { canHideSinks } from "./manifest.js";
import { buildRequest, keyOf, THUMBNAIL_SIZE } from "./tiles.js";
import { View } from "./view.js";

const SIZE = 76; // pixels

export class HeadView extends View {
  static title = "Heads";
  static hint = "Click a map to open it.";
  static hasScale = false;
  static hasRange = true;

  /** `events`: open(layer, head). */
  constructor(shared) {
    super(shared);
    this.el = createElement("div", { class: "jm-heads" });
    this.maps = new Map(); // element → its canvas and request
    this.visible = new Set();
    this.visibility = new IntersectionObserver(
      (changes) => {
        for (const { target, isIntersecting } of changes) {
          if (isIntersecting) this.visible.add(target);
          else this.visible.delete(target);
        }
        this.requestTiles();
      },
      { rootMargin: "120px" },
    );
  }

  /** `layers` as in the manifest, with `short` names; the current `layer` and `head` are highlighted. */
  show({ data, item, layers: allLayers, layer, head, withoutSinks }) {
    const layers = allLayers.filter(({ mean_of: meanOf }) => !meanOf);
    Object.assign(this, { data, item, withoutSinks });
    this.visibility.disconnect();
    this.visible.clear();
    this.maps.clear();
    const maxHeads = Math.max(...layers.map((layer) => layer.heads.length));
    this.el.style.setProperty("--heads", `${maxHeads}`);
    const numbers = createElement("div", { class: "jm-heads-row jm-heads-top", aria: { hidden: "true" } }, [
      createElement("span", { class: "jm-heads-name" }),
      ...Array.from({ length: maxHeads }, (_, n) => createElement("span", { class: "jm-muted", text: `${n}` })),
    ]);
    const rows = layers.map((info) =>
      createElement("div", { class: "jm-heads-row", role: "group", aria: { label: info.name } }, [
        createElement("span", { class: "jm-heads-name", title: info.name, text: info.short }),
        ...info.heads.map((n) => this.createThumbnail(info, n, info.number === layer && n === head)),
      ]),
    );
    this.el.replaceChildren(numbers, ...rows);
  }

  createThumbnail({ name, number: layer, shape: [rows, cols] }, head, isSelected) {
    const canvas = createElement("canvas"),
      label = `${name}, head ${head}`;
    const button = createElement(
      "button",
      {
        type: "button",
        class: "jm-head-map",
        title: label,
        css: { "grid-column": `${head + 2}` },
        aria: { label: `${label}: open`, current: `${isSelected}` },
        data: { layer, head },
        onclick: () => this.events.open(layer, head),
      },
      [canvas],
    );
    const withoutSinks = this.withoutSinks && canHideSinks(this.item, this.item.layers[layer], head),
      source = { data: this.data, layer, head, withoutSinks },
      request = buildRequest(source, "pooled_map", [0, rows], [0, cols], THUMBNAIL_SIZE);
    this.maps.set(button, { canvas, request });
    this.visibility.observe(button);
    return button;
  }

  requestTiles() {
    const entries = [];
    let priority = 10;
    for (const [button, { canvas, request }] of this.maps) {
      if (!this.visible.has(button)) continue;
      priority += 0.01;
      entries.push({ request, priority, onLoad: (answer) => this.paint(canvas, answer) });
      const cached = this.store.get(keyOf(request));
      if (cached) this.paint(canvas, cached);
    }
    this.store.request("heads", entries);
  }

  // Square roots, so that patterns are visible. Each map has its own scale, or all share one.
  paint(canvas, { rows, cols, values, most }) {
    const { colours } = this.appearance,
      top = this.appearance.isShared ? 1 : most || 1;
    const image = createPixels(cols, rows, (pixels) => {
      for (let n = 0; n < values.length; n += 1)
        pixels[n] = colours[Math.round(255 * Math.sqrt(Math.max(0, values[n]) / top))];
    });
    const context = sizeCanvas(canvas, SIZE, SIZE);
    context.imageSmoothingEnabled = Math.max(rows, cols) > SIZE / 2;
    context.drawImage(image, 0, 0, SIZE, SIZE);
  }

  refresh() {
    this.requestTiles();
  }

  legend() {
    const { isShared, weightNote } = this.appearance,
      scale = isShared ? "One scale for all maps, from 0 to 1." : "Each map has its own scale, from 0 to its maximum.";
    return { text: `Queries ↓ attend to keys →. ${scale}${weightNote && ` Weights${weightNote}.`}` };
  }

  deactivate() {
    this.store.request("heads", []);
  }

  close() {
    this.visibility.disconnect();
    this.deactivate();
  }
}
