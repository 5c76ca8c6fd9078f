// A thin strip beside a text, as in editors: the weights of the whole text, and the visible part.

import { findSectionMaxima } from "./colours.js";
import { clamp, createElement, sizeCanvas } from "./dom.js";

const WIDTH = 14; // pixels

export class Minimap {
  /** `seek(part)`: scroll to a position, 0 to 1. */
  constructor({ appearance, seek }) {
    this.appearance = appearance;
    const follow = (event) => seek(clamp(event.offsetY / this.el.clientHeight, 0, 1));
    this.el = createElement("canvas", {
      class: "jm-minimap",
      role: "img",
      aria: { label: "Minimap of the weights: click to scroll" },
      onpointerdown: (event) => (this.el.setPointerCapture(event.pointerId), follow(event)),
      onpointermove: (event) => event.buttons && follow(event),
    });
  }

  /** `weights` of all words, `version` of their shading; `range`, the first and the last visible word. */
  paint({ weights, curve, version, range, pinnedWord, height }) {
    const key = `${version} ${height}`,
      y = (n) => (n / weights.length) * height,
      { inks } = this.appearance;
    if (this.key !== key) this.column = this.paintColumn(weights, curve, height);
    this.key = key;
    const context = sizeCanvas(this.el, WIDTH, height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.column, 3, 0, WIDTH - 6, height);
    const [top, bottom] = range.map(y);
    context.strokeStyle = inks.muted;
    context.lineWidth = 1.5;
    context.beginPath();
    context.roundRect(1, Math.min(top, height - 8) + 1, WIDTH - 2, Math.max(6, bottom - top - 2), 3);
    context.stroke();
    if (pinnedWord === null) return;
    context.fillStyle = inks.pin;
    context.fillRect(0, clamp(y(pinnedWord) - 1, 0, height - 3), WIDTH, 3);
  }

  // One pixel wide: the highest weight of each section.
  paintColumn(weights, curve, height) {
    const image = createElement("canvas", { width: 1, height: height }),
      context = image.getContext("2d");
    findSectionMaxima(weights, height).forEach((weight, y) => {
      const shade = Math.round(curve.to(weight) * 255);
      context.fillStyle = shade > 1 ? `rgb(${this.appearance.list[shade]})` : this.appearance.inks.empty;
      context.fillRect(0, y, 1, 1);
    });
    return image;
  }
}
