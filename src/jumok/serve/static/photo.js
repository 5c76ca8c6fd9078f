// A picture: chosen, dropped, pasted or taken with a phone. It goes to our server and nowhere else.

import { make } from "../../look/static/dom.js";
import { coded } from "./fields.js";

const KINDS = ["image/png", "image/jpeg", "image/webp"]; // that the server reads
const LONGEST = 2048; // pixels along a side of one that has to be made smaller

export class PictureField {
  /** `changed()` is called when there is another picture; `say(text)` is for those who listen. */
  constructor(name, label, { most, pixels, changed, say }) {
    Object.assign(this, { name, most, pixels, changed, say });
    this.optional = false;
    this.isShared = false; // there is no room for it in a link
    this.what = "picture";
    this.data = undefined; // base64
    const take = (input) => input.files[0] && this.take(input.files[0]).then(() => (input.value = ""));
    const chooser = (more) => {
      const input = make("input", { type: "file", class: "pg-unseen", ...more, onchange: () => take(input) });
      return input;
    };
    this.input = chooser({ name, accept: KINDS.join(","), aria: { label } });
    this.camera = chooser({ accept: "image/*", capture: "environment", aria: { label: "Take a photo" } });
    this.image = make("img", { class: "pg-photo", alt: "The picture that was chosen", hidden: true });
    this.note = make("p", { class: "pg-soft", role: "status" });
    this.words = make("span", { class: "pg-drop-words" }, [
      make("strong", { text: "Choose a picture" }),
      make("span", { class: "pg-soft", text: "or drop it here, or paste it" }),
    ]);
    this.zone = make("label", { class: "pg-drop" }, [this.input, this.image, this.words]);
    this.el = make("div", { class: "pg-field" }, [
      this.zone,
      make("label", { class: "pg-button pg-camera" }, [this.camera, make("span", { text: "Take a photo" })]),
      this.note,
    ]);
    this.zone.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.zone.classList.add("pg-over");
    });
    for (const end of ["dragleave", "drop"])
      this.zone.addEventListener(end, () => this.zone.classList.remove("pg-over"));
    this.zone.addEventListener("drop", (event) => this.given(event, event.dataTransfer));
    this.pasted = (event) => this.given(event, event.clipboardData);
    document.addEventListener("paste", this.pasted);
  }

  given(event, data) {
    const file = [...(data?.files ?? [])].find((one) => one.type.startsWith("image/"));
    if (file || event.type === "drop") event.preventDefault(); // a browser would open what is dropped
    if (file) this.take(file);
    else if (event.type === "drop") this.tell("What was dropped is no picture.");
  }

  /** As it is, where the server takes it; else drawn anew, and that is told. */
  async take(file) {
    this.tell("");
    let made = null;
    try {
      const picture = await createImageBitmap(file);
      const { width, height } = picture;
      if (!KINDS.includes(file.type) || file.size > this.most || width * height > this.pixels) {
        made = await smaller(picture);
        this.tell(`The server does not take it as it is; sent is a JPEG of ${made.width} × ${made.height} pixels.`);
      } else if (file.name) this.tell(`${file.name}, ${width} × ${height} pixels`);
      picture.close();
    } catch {
      this.tell("Your browser cannot read this picture; the server may."); // and tells why, if not
    }
    await this.put(made?.blob ?? file);
  }

  async put(blob) {
    this.data = await coded(blob);
    URL.revokeObjectURL(this.image.src);
    this.image.src = URL.createObjectURL(blob);
    this.image.hidden = false;
    this.words.hidden = true;
    this.zone.classList.add("pg-has");
    this.changed();
  }

  tell(text) {
    this.note.textContent = text;
  }

  get value() {
    return this.data;
  }

  /** From an example: base64. */
  fill(data) {
    if (!data) return;
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    this.tell("");
    this.data = data;
    URL.revokeObjectURL(this.image.src);
    this.image.src = URL.createObjectURL(new Blob([bytes]));
    this.image.hidden = false;
    this.words.hidden = true;
    this.zone.classList.add("pg-has");
  }

  missing() {
    if (this.data !== undefined) return false;
    this.tell("A picture is needed first.");
    this.input.focus();
    return true;
  }

  focus() {
    this.input.focus({ preventScroll: true });
  }

  close() {
    document.removeEventListener("paste", this.pasted);
    URL.revokeObjectURL(this.image.src);
  }
}

async function smaller(picture) {
  const by = Math.min(1, LONGEST / Math.max(picture.width, picture.height));
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * by));
  canvas.height = Math.max(1, Math.round(picture.height * by));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // as the server puts what can be seen through
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  return { blob, width: canvas.width, height: canvas.height };
}
