// All layers and heads as small maps. Each is asked for when it comes into sight.

import { canvasOf, make } from "./dom.js";
import { keyOf, THUMB } from "./tiles.js";

const SIDE = 76; // pixels

export class HeadView {
  /** `events`: open(layer, head). */
  constructor({ store, look, events }) {
    Object.assign(this, { store, look, events });
    this.el = make("div", { class: "jm-heads" });
    this.maps = new Map(); // element → what it shows
    this.near = new Set();
    this.watch = new IntersectionObserver(
      (changes) => {
        for (const { target, isIntersecting } of changes) {
          if (isIntersecting) this.near.add(target);
          else this.near.delete(target);
        }
        this.ask();
      },
      { rootMargin: "120px" },
    );
  }

  /** `layers` as in the manifest, with `short` names; `chosen` { layer, head } is marked. */
  show({ scene, layers, chosen }) {
    Object.assign(this, { scene, layers });
    this.watch.disconnect();
    this.near.clear();
    this.maps.clear();
    const most = Math.max(...layers.map((layer) => layer.heads.length));
    this.el.style.setProperty("--heads", `${most}`);
    const head = make("div", { class: "jm-heads-row jm-heads-top", aria: { hidden: "true" } }, [
      make("span", { class: "jm-heads-name" }),
      ...Array.from({ length: most }, (_, n) => make("span", { class: "jm-soft", text: `${n}` })),
    ]);
    const rows = layers.map((layer, number) =>
      make("div", { class: "jm-heads-row", role: "group", aria: { label: layer.name } }, [
        make("span", { class: "jm-heads-name", title: layer.name, text: layer.short }),
        ...layer.heads.map((n) => this.small(layer, number, n, chosen)),
      ]),
    );
    this.el.replaceChildren(head, ...rows);
  }

  small(layer, number, head, chosen) {
    const canvas = make("canvas");
    const button = make(
      "button",
      {
        type: "button",
        class: "jm-small",
        title: `${layer.name}, head ${head}`,
        css: { "grid-column": `${head + 2}` },
        aria: {
          label: `${layer.name}, head ${head}: open`,
          current: `${chosen.layer === number && chosen.head === head}`,
        },
        data: { layer: number, head },
        onclick: () => this.events.open(number, head),
      },
      [canvas],
    );
    const [rows, cols] = layer.shape;
    const request = {
      scene: this.scene,
      layer: number,
      head,
      what: "map",
      size: THUMB,
      rows: [0, rows],
      cols: [0, cols],
    };
    this.maps.set(button, { canvas, request });
    this.watch.observe(button);
    return button;
  }

  ask() {
    const wishes = [];
    let urgency = 10;
    for (const [button, { canvas, request }] of this.maps) {
      if (!this.near.has(button)) continue;
      urgency += 0.01;
      wishes.push({ request, urgency, arrived: (answer) => this.paint(canvas, answer) });
      const known = this.store.get(keyOf(request));
      if (known) this.paint(canvas, known);
    }
    this.store.want("heads", wishes);
  }

  // Each on a scale of its own, by square roots: here it is patterns that one looks for.
  paint(canvas, { rows, cols, values, most }) {
    const image = make("canvas", { width: cols, height: rows });
    const data = new ImageData(cols, rows),
      pixels = new Uint32Array(data.data.buffer);
    for (let n = 0; n < values.length; n += 1)
      pixels[n] = this.look.colours[Math.round(255 * Math.sqrt(Math.max(0, values[n]) / (most || 1)))];
    image.getContext("2d").putImageData(data, 0, 0);
    const context = canvasOf(canvas, SIDE, SIDE);
    context.imageSmoothingEnabled = Math.max(rows, cols) > SIDE / 2;
    context.drawImage(image, 0, 0, SIDE, SIDE);
  }

  refresh() {
    this.ask();
  }

  close() {
    this.watch.disconnect();
    this.store.want("heads", []);
  }
}
