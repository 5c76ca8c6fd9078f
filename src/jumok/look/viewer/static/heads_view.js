// All layers and heads as small maps, which are loaded when they become visible.

import { createElement, createPixels, sizeCanvas } from "./dom.js";
import { buildRequest, keyOf, THUMBNAIL_SIZE } from "./tiles.js";
import { View } from "./view.js";

const SIZE = 76; // pixels

export class HeadView extends View {
  static title = "Heads";
  static hint = "Click a map to open it.";
  static hasScale = false;

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
  show({ data, layers, layer, head }) {
    this.data = data;
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
    const source = { data: this.data, layer, head },
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

  // Each map has its own scale, with square roots, so that patterns are visible.
  paint(canvas, { rows, cols, values, most }) {
    const { colours } = this.appearance,
      top = most || 1;
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
    return { text: "Each map has its own scale, from 0 to its maximum." };
  }

  deactivate() {
    this.store.request("heads", []);
  }

  close() {
    this.visibility.disconnect();
    this.deactivate();
  }
}
