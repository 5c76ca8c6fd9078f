// A thumbnail of the images for each word of a caption, with the weights of that word.

import { createElement, encodePng, sizeCanvas } from "./dom.js";
import { paintOverlay } from "./overlay.js";
import { Ruler, truncateText } from "./token_text.js";

const THUMBNAIL_AREA = 9600; // pixels of a thumbnail, whatever its aspect ratio
const THUMBNAIL_MAP_PIXELS = 96; // pixels of its interpolated map
const IMAGE_GAP = 3; // pixels between two images

export class CaptionThumbnails {
  /** `events`: pointer(word or null, event), pin(word). */
  constructor({ appearance, events }) {
    Object.assign(this, { appearance, events });
    this.thumbnails = [];
    const aria = { label: "Attention of each word" };
    this.el = createElement("div", { class: "jm-thumbnails", role: "group", aria });
  }

  /** `words`: { n, name }; `ratios`: the width of each image divided by its height. */
  fill(words, ratios) {
    const ratio = ratios.reduce((sum, value) => sum + value, 0) || 1,
      width = Math.sqrt(THUMBNAIL_AREA * ratio),
      shrink = Math.min(1, 260 / width, 170 / (width / ratio));
    this.size = [Math.round(width * shrink), Math.round((width / ratio) * shrink)];
    this.shares = ratios.map((value) => value / ratio);
    this.words = words;
    this.el.style.setProperty("--thumbnail", `${Math.max(76, this.size[0])}px`);
    this.thumbnails = words.map(({ n, name: text }) => {
      const canvas = createElement("canvas", { aria: { hidden: "true" } }),
        name = createElement("span", { class: "jm-thumbnail-word", dir: "auto", text });
      const el = createElement(
        "button",
        {
          type: "button",
          class: "jm-thumbnail",
          tabindex: "-1", // the words of the caption have the same function
          title: text,
          data: { word: n },
          aria: { label: `${text}: attention`, pressed: "false" },
          onpointerenter: (event) => this.events.pointer(n, event),
          onpointerleave: (event) => this.events.pointer(null, event),
          onclick: () => this.events.pin(n),
        },
        [canvas, name],
      );
      return { n, el, canvas, name };
    });
    this.el.replaceChildren(...this.thumbnails.map(({ el }) => el));
  }

  /** `overlay(n)`: the arguments of paintOverlay for a word, except the image and the size. */
  paint(frames, overlay) {
    const [width, height] = this.size;
    for (const { n, canvas } of this.thumbnails) {
      const context = sizeCanvas(canvas, width, height);
      this.paintImages(context, frames, [width, height], { ...overlay(n), maxPixels: THUMBNAIL_MAP_PIXELS });
    }
  }

  // Paint all images side by side, with an overlay or without.
  paintImages(context, frames, [width, height], overlay = null) {
    const gap = frames.length > 1 ? IMAGE_GAP : 0;
    let left = 0;
    context.save();
    frames.forEach(({ photo, image }, n) => {
      const wide = this.shares[n] * width - (gap * (frames.length - 1)) / frames.length;
      context.drawImage(photo, 0, 0, wide, height);
      if (overlay) paintOverlay(context, { ...overlay, image, width: wide, height });
      left = wide + gap;
      context.translate(left, 0);
    });
    context.restore();
  }

  /** `shade(element, n)` shades the name of a word. */
  highlight({ selected, pinned }, shade) {
    for (const { n, el, name } of this.thumbnails) {
      el.classList.toggle("jm-cursor", n === selected && n !== pinned);
      el.classList.toggle("jm-is-pinned", n === pinned);
      el.setAttribute("aria-pressed", `${n === pinned}`);
      shade(name, n);
    }
  }

  /** Save the images and all thumbnails with their words as one image; without thumbnails, what is `selected`. */
  save(frames, overlay, selected) {
    const [width, height] = this.size.map((length) => 2 * length),
      cell = Math.max(width, 150),
      gap = 14,
      line = 30,
      panels = this.words.length ? this.words : [{ n: selected, name: "" }],
      numPanels = panels.length + 1;
    const cols = Math.min(numPanels, Math.max(2, Math.round(Math.sqrt((1.7 * numPanels * (height + line)) / cell)))),
      rows = Math.ceil(numPanels / cols),
      size = { width: cols * (cell + gap) + gap, height: rows * (height + line + gap) + gap };
    const canvas = createElement("canvas", size),
      context = canvas.getContext("2d"),
      ruler = new Ruler();
    context.fillStyle = this.appearance.inks.page;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.font = `17px ${this.appearance.family}`;
    context.textAlign = "center";
    ruler.use(context.font);
    for (let n = 0; n < numPanels; n += 1) {
      context.save();
      const left = gap + (n % cols) * (cell + gap) + (cell - width) / 2,
        top = gap + Math.floor(n / cols) * (height + line + gap);
      context.translate(left, top);
      if (n) {
        context.fillStyle = this.appearance.inks.ink;
        const { name } = panels[n - 1];
        if (name) context.fillText(ruler.fit(truncateText(name, 60), cell), width / 2, line - 9);
      }
      context.translate(0, line);
      this.paintImages(context, frames, [width, height], n ? overlay(panels[n - 1].n) : null);
      context.restore();
    }
    return encodePng(canvas);
  }
}
