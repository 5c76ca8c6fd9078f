// One image with the weights of its patches, and a frame around one of them.

import { createElement, sizeCanvas } from "./dom.js";
import { paintOverlay } from "./overlay.js";

export class ImageFrame {
  /** `events`: pointer(image, x, y, event), click(image, x, y), leave(event), in pixels of the frame; resized(). */
  constructor(image, alt, events) {
    Object.assign(this, { image, events });
    const forward = (name) => (event) => {
      const { left, top } = this.frame.getBoundingClientRect();
      events[name](image, event.clientX - left, event.clientY - top, event);
    };
    this.photo = createElement("img", { class: "jm-photo", alt, draggable: "false" });
    this.overlay = createElement("canvas", { class: "jm-overlay", role: "img" });
    this.cell = createElement("div", { class: "jm-cell", hidden: true });
    this.frame = createElement(
      "div",
      {
        class: "jm-frame",
        data: { image },
        onpointermove: forward("pointer"),
        onpointerdown: forward("pointer"),
        onpointerleave: (event) => event.pointerType === "mouse" && events.leave(), // a touch always leaves
        onpointercancel: () => events.leave(),
        onclick: forward("click"),
      },
      [this.photo, this.overlay, this.cell],
    );
    this.share = createElement("figcaption", { class: "jm-image-share jm-muted jm-number" });
    this.el = createElement("figure", { class: "jm-image-figure" }, [this.frame, this.share]);
    this.resizeObserver = new ResizeObserver(() => events.resized());
    this.resizeObserver.observe(this.frame);
  }

  /** Load an image file; resolves also if the browser cannot show it: then it has no width. */
  async open(file) {
    if (this.photo.src !== file) {
      this.photo.src = file;
      await this.photo.decode().catch(() => {});
    }
    this.ratio = this.photo.naturalWidth / this.photo.naturalHeight || 1;
    this.el.style.setProperty("--ratio", `${this.ratio}`);
  }

  get isShown() {
    return this.photo.naturalWidth > 0;
  }

  get size() {
    return [this.frame.clientWidth, this.frame.clientHeight];
  }

  /** Paint an overlay (see paintOverlay), or none, and mark a patch that is a query. */
  paint(overlay, queryBox, inks) {
    const [width, height] = this.size;
    if (!width || !height) return;
    const context = sizeCanvas(this.overlay, width, height);
    if (overlay) paintOverlay(context, { ...overlay, image: this.image, width, height });
    if (!queryBox) return;
    const { x, y, w, h } = queryBox;
    context.strokeStyle = inks.pin;
    context.lineWidth = 2;
    context.strokeRect(x, y, w, h);
  }

  /** Frame a patch, in percent of the image, or none. */
  highlight(box) {
    this.cell.hidden = !box;
    if (!box) return;
    for (const [name, value] of Object.entries({ left: box.x, top: box.y, width: box.w, height: box.h }))
      this.cell.style.setProperty(name, `${value}%`);
  }

  close() {
    this.resizeObserver.disconnect();
  }
}
