// What one fills in: texts, numbers, files. A field has `el`, `value` (undefined: nothing), `fill(value)`, which takes
// what a link or an example has, and `missing()`, which tells what is needed and not there.

import { make } from "../../look/static/dom.js";

let fields = 0; // each has a number, for its label

export class TextField {
  /** `long`: several lines; `optional`: it may be empty. */
  constructor(name, label, { long = true, optional = false, hint = "", placeholder = "" } = {}) {
    Object.assign(this, { name, optional });
    fields += 1;
    const id = `field-${fields}`;
    this.input = make(long ? "textarea" : "input", {
      ...{ id, name, class: "pg-input", dir: "auto", placeholder, autocomplete: "off", spellcheck: "true" },
      ...(long ? { rows: "4" } : { type: "text", enterkeyhint: "go" }),
      ...(hint ? { aria: { describedby: `${id}-hint` } } : {}),
    });
    this.el = make("div", { class: "pg-field" }, [
      make("label", { for: id, text: label }),
      this.input,
      hint ? make("p", { class: "pg-soft", id: `${id}-hint`, text: hint }) : null,
    ]);
  }

  get value() {
    return this.input.value.trim() ? this.input.value : undefined;
  }

  fill(value) {
    this.input.value = value ?? "";
  }

  missing() {
    if (this.optional || this.value !== undefined) return false;
    this.input.focus();
    return true;
  }

  focus() {
    this.input.focus({ preventScroll: true });
  }
}

export class NumberField {
  constructor(name, label, usual, most = 100) {
    Object.assign(this, { name, usual });
    fields += 1;
    const id = `field-${fields}`;
    this.input = make("input", { id, name, type: "number", class: "pg-input pg-number", min: "1", max: `${most}` });
    this.input.value = `${usual}`;
    this.el = make("div", { class: "pg-field pg-inline" }, [make("label", { for: id, text: label }), this.input]);
  }

  get value() {
    const number = this.input.valueAsNumber;
    return Number.isNaN(number) || number === this.usual ? undefined : number;
  }

  fill(value) {
    const number = Number(value);
    this.input.value = `${Number.isInteger(number) && number > 0 ? number : this.usual}`;
  }

  missing() {
    if (this.input.checkValidity()) return false;
    this.input.closest("details").open = true;
    this.input.reportValidity();
    return true;
  }
}

/** How much of each style token; `usual` has as many numbers as there are tokens. */
export class StyleField {
  constructor(name, label, usual) {
    Object.assign(this, { name, usual, optional: true });
    this.sliders = usual.map((weight, n) => {
      const label = `Token ${n + 1}`,
        input = make("input", { type: "range", min: "0", max: "1", step: "0.01", aria: { label } });
      input.value = `${weight}`;
      input.addEventListener("input", () => (this.isMoved = true));
      return input;
    });
    const reset = make("button", { type: "button", class: "pg-button", text: "As usual", onclick: () => this.fill() });
    this.el = make("fieldset", { class: "pg-style" }, [
      make("legend", { text: label }),
      ...this.sliders.map((input, n) => make("label", {}, [make("span", { text: `${n + 1}` }), input])),
      reset,
    ]);
  }

  get value() {
    return this.isMoved ? this.sliders.map((input) => input.valueAsNumber) : undefined;
  }

  fill(value) {
    const weights = value?.toString().split(",").map(Number) ?? [];
    this.isMoved = weights.length === this.usual.length && weights.every(Number.isFinite);
    this.sliders.forEach((input, n) => (input.value = `${(this.isMoved ? weights : this.usual)[n]}`));
  }

  missing() {
    return false;
  }
}

/** A recording. */
export class SoundField {
  constructor(name, label, most) {
    Object.assign(this, { name, most, optional: true, isShared: false, what: "recording" });
    fields += 1;
    const id = `field-${fields}`;
    this.input = make("input", { id, name, type: "file", class: "pg-input", accept: "audio/*,.wav,.flac,.ogg" });
    this.input.addEventListener("change", () => (this.ready = this.read()));
    this.el = make("div", { class: "pg-field" }, [make("label", { for: id, text: label }), this.input]);
  }

  async read() {
    const [file] = this.input.files;
    this.data = file ? await coded(file) : undefined;
  }

  get value() {
    return this.data;
  }

  fill() {}

  missing() {
    return false;
  }
}

/** The bytes of a file in base64. */
export function coded(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
