// All of a text in a thin strip beside it, as editors have: where the weight is, and what is in sight.

import { canvasOf, make } from "./dom.js";

const WIDE = 14; // pixels

export class Overview {
  /** `seek(part)`: go to a part of the whole, 0 to 1. */
  constructor({ look, seek }) {
    this.look = look;
    const follow = (event) => seek(Math.max(0, Math.min(1, event.offsetY / this.el.clientHeight)));
    this.el = make("canvas", {
      class: "jm-overview",
      role: "img",
      aria: { label: "Where in the text the weight is: click to go there" },
      onpointerdown: (event) => (this.el.setPointerCapture(event.pointerId), follow(event)),
      onpointermove: (event) => event.buttons && follow(event),
    });
  }

  /** `weights` of all words, `version` of how they are shaded; `sight`, the first word in sight and the last. */
  paint({ weights, curve, version, sight, spot, tall }) {
    const key = `${version} ${tall}`,
      y = (n) => (n / weights.length) * tall,
      { inks } = this.look;
    if (this.key !== key) this.column = this.columnOf(weights, curve, tall);
    this.key = key;
    const context = canvasOf(this.el, WIDE, tall);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.column, 3, 0, WIDE - 6, tall);
    const [top, bottom] = sight.map(y);
    context.strokeStyle = inks.soft;
    context.lineWidth = 1.5;
    context.beginPath();
    context.roundRect(1, Math.min(top, tall - 8) + 1, WIDE - 2, Math.max(6, bottom - top - 2), 3);
    context.stroke();
    if (spot === null) return;
    context.fillStyle = inks.pin;
    context.fillRect(0, Math.max(0, Math.min(tall - 3, y(spot) - 1)), WIDE, 3);
  }

  // One pixel wide: the strongest word of each stretch.
  columnOf(weights, curve, tall) {
    const image = make("canvas", { width: 1, height: tall }),
      context = image.getContext("2d");
    for (let y = 0; y < tall; y += 1) {
      const from = Math.floor((y / tall) * weights.length),
        to = Math.max(from + 1, Math.floor(((y + 1) / tall) * weights.length));
      let most = 0;
      for (let n = from; n < to; n += 1) if (weights[n] > most) most = weights[n];
      const place = Math.round(curve.to(most) * 255);
      context.fillStyle = place > 1 ? `rgb(${this.look.list[place]})` : this.look.inks.empty;
      context.fillRect(0, y, 1, 1);
    }
    return image;
  }
}
