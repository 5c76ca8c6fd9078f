// An image: selected, dropped, pasted or taken with a phone. It is sent only to this server.

import { createElement, decodeBase64 } from "../../look/viewer/static/dom.js";
import { encodeBase64 } from "./fields.js";

const MEDIA_TYPES = ["image/png", "image/jpeg", "image/webp"]; // that the server accepts
const MAX_SIDE = 2048; // pixels of the longer side of a resized image

export class ImageField {
  /** `onChange()` is called when another image is selected. */
  constructor(name, label, { maxBytes, maxPixels, onChange }) {
    Object.assign(this, { name, maxBytes, maxPixels, onChange });
    this.optional = false;
    this.isShared = false; // too large for a link
    this.contentName = "image";
    this.data = undefined; // base64
    const createFileInput = (attributes) => {
      const onchange = () => input.files[0] && this.load(input.files[0]).then(() => (input.value = ""));
      const input = createElement("input", { type: "file", class: "pg-visually-hidden", ...attributes, onchange });
      return input;
    };
    this.input = createFileInput({ name, accept: MEDIA_TYPES.join(","), aria: { label } });
    this.camera = createFileInput({ accept: "image/*", capture: "environment", aria: { label: "Take a photo" } });
    this.image = createElement("img", { class: "pg-image", alt: "The selected image", hidden: true });
    this.note = createElement("p", { class: "pg-muted", role: "status" });
    this.prompt = createElement("span", { class: "pg-drop-prompt" }, [
      createElement("strong", { text: "Select an image" }),
      createElement("span", { class: "pg-muted", text: "or drop it here, or paste it" }),
    ]);
    this.dropZone = createElement("label", { class: "pg-drop" }, [this.input, this.image, this.prompt]);
    this.el = createElement("div", { class: "pg-field" }, [
      this.dropZone,
      createElement("label", { class: "pg-button pg-camera" }, [
        this.camera,
        createElement("span", { text: "Take a photo" }),
      ]),
      this.note,
    ]);
    this.dropZone.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.dropZone.classList.add("pg-dragover");
    });
    for (const end of ["dragleave", "drop"])
      this.dropZone.addEventListener(end, () => this.dropZone.classList.remove("pg-dragover"));
    this.dropZone.addEventListener("drop", (event) => this.handleTransfer(event, event.dataTransfer));
    this.handlePaste = (event) => this.handleTransfer(event, event.clipboardData);
    document.addEventListener("paste", this.handlePaste);
  }

  handleTransfer(event, data) {
    const file = [...(data?.files ?? [])].find((candidate) => candidate.type.startsWith("image/"));
    if (file || event.type === "drop") event.preventDefault(); // the browser would open the dropped file
    if (file) this.load(file);
    else if (event.type === "drop") this.showNote("The dropped file is not an image.");
  }

  /** Use a file unchanged if the server accepts it. Otherwise resize it and tell the user. */
  async load(file) {
    this.showNote("");
    let resized = null;
    try {
      const bitmap = await createImageBitmap(file);
      const { width, height } = bitmap;
      if (!MEDIA_TYPES.includes(file.type) || file.size > this.maxBytes || width * height > this.maxPixels) {
        resized = await resizeImage(bitmap);
        const size = `${resized.width} × ${resized.height} pixels`;
        this.showNote(`The server does not accept the original. It is sent as a JPEG of ${size}.`);
      } else if (file.name) this.showNote(`${file.name}, ${width} × ${height} pixels`);
      bitmap.close();
    } catch {
      // The server may be able to read it, and returns the reason if not.
      this.showNote("This browser cannot read the image. It is sent unchanged.");
    }
    const blob = resized?.blob ?? file;
    this.setImage(await encodeBase64(blob), blob);
    this.onChange();
  }

  setImage(data, blob) {
    this.data = data;
    URL.revokeObjectURL(this.image.src);
    this.image.src = URL.createObjectURL(blob);
    this.image.hidden = false;
    this.prompt.hidden = true;
    this.dropZone.classList.add("pg-filled");
  }

  showNote(text) {
    this.note.textContent = text;
  }

  get value() {
    return this.data;
  }

  /** Show the image of an example: `data` is base64. */
  fill(data) {
    if (!data) return;
    this.showNote("");
    this.setImage(data, new Blob([decodeBase64(data)]));
  }

  reportMissing() {
    if (this.data !== undefined) return false;
    this.showNote("Select an image first.");
    this.input.focus();
    return true;
  }

  close() {
    document.removeEventListener("paste", this.handlePaste);
    URL.revokeObjectURL(this.image.src);
  }
}

async function resizeImage(bitmap) {
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // the server also puts transparent images on white
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  return { blob, width: canvas.width, height: canvas.height };
}
