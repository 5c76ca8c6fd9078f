// All layers and heads as small maps, which are loaded when they become visible.

import { sizeCanvas, createElement } from "./dom.js";
import { keyOf, THUMBNAIL_SIZE } from "./tiles.js";

const SIZE = 76; // pixels

export class HeadView {
  /** `events`: open(layer, head). */
  constructor({ store, appearance, events }) {
    Object.assign(this, { store, appearance, events });
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

  /** `layers` as in the manifest, with `short` names; `selected` { layer, head } is highlighted. */
  show({ data, layers, selected }) {
    Object.assign(this, { data, layers });
    this.visibility.disconnect();
    this.visible.clear();
    this.maps.clear();
    const maxHeads = Math.max(...layers.map((layer) => layer.heads.length));
    this.el.style.setProperty("--heads", `${maxHeads}`);
    const head = createElement("div", { class: "jm-heads-row jm-heads-top", aria: { hidden: "true" } }, [
      createElement("span", { class: "jm-heads-name" }),
      ...Array.from({ length: maxHeads }, (_, n) => createElement("span", { class: "jm-muted", text: `${n}` })),
    ]);
    const rows = layers.map((layer, index) =>
      createElement("div", { class: "jm-heads-row", role: "group", aria: { label: layer.name } }, [
        createElement("span", { class: "jm-heads-name", title: layer.name, text: layer.short }),
        ...layer.heads.map((n) => this.createThumbnail(layer, index, n, selected)),
      ]),
    );
    this.el.replaceChildren(head, ...rows);
  }

  createThumbnail(layer, index, head, selected) {
    const canvas = createElement("canvas");
    const button = createElement(
      "button",
      {
        type: "button",
        class: "jm-head-map",
        title: `${layer.name}, head ${head}`,
        css: { "grid-column": `${head + 2}` },
        aria: {
          label: `${layer.name}, head ${head}: open`,
          current: `${selected.layer === index && selected.head === head}`,
        },
        data: { layer: index, head },
        onclick: () => this.events.open(index, head),
      },
      [canvas],
    );
    const [rows, cols] = layer.shape;
    const request = {
      data: this.data,
      layer: index,
      head,
      quantity: "pooled_map",
      size: THUMBNAIL_SIZE,
      rows: [0, rows],
      cols: [0, cols],
    };
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
    const image = createElement("canvas", { width: cols, height: rows });
    const data = new ImageData(cols, rows),
      pixels = new Uint32Array(data.data.buffer);
    for (let n = 0; n < values.length; n += 1)
      pixels[n] = this.appearance.colours[Math.round(255 * Math.sqrt(Math.max(0, values[n]) / (most || 1)))];
    image.getContext("2d").putImageData(data, 0, 0);
    const context = sizeCanvas(canvas, SIZE, SIZE);
    context.imageSmoothingEnabled = Math.max(rows, cols) > SIZE / 2;
    context.drawImage(image, 0, 0, SIZE, SIZE);
  }

  refresh() {
    this.requestTiles();
  }

  close() {
    this.visibility.disconnect();
    this.store.request("heads", []);
  }
}
