// Form fields: texts, numbers, files. A field has `el`, `value` (undefined if it is empty or has its default),
// `fill(value)` for the values of a link or an example, and `reportMissing()`, which points out a required value.

import { createElement } from "../../look/viewer/static/dom.js";

let numFields = 0; // for unique ids

function createFieldId() {
  numFields += 1;
  return `field-${numFields}`;
}

export class TextField {
  /** `multiline`: a text area; `optional`: the text may be empty. */
  constructor(name, label, { multiline = true, optional = false, hint = "", placeholder = "" } = {}) {
    Object.assign(this, { name, optional });
    const id = createFieldId();
    this.input = createElement(multiline ? "textarea" : "input", {
      ...{ id, name, class: "pg-input", dir: "auto", placeholder, autocomplete: "off", spellcheck: "true" },
      ...(multiline ? { rows: "4" } : { type: "text", enterkeyhint: "go" }),
      ...(hint ? { aria: { describedby: `${id}-hint` } } : {}),
    });
    this.el = createElement("div", { class: "pg-field" }, [
      createElement("label", { for: id, text: label }),
      this.input,
      hint ? createElement("p", { class: "pg-muted", id: `${id}-hint`, text: hint }) : null,
    ]);
  }

  get value() {
    return this.input.value.trim() ? this.input.value : undefined;
  }

  fill(value) {
    this.input.value = value ?? "";
  }

  reportMissing() {
    if (this.optional || this.value !== undefined) return false;
    this.input.focus();
    return true;
  }
}

export class NumberField {
  constructor(name, label, defaultValue, max = 100) {
    Object.assign(this, { name, defaultValue });
    const id = createFieldId();
    this.input = createElement("input", {
      ...{ id, name, type: "number", class: "pg-input pg-number", min: "1", max: `${max}` },
    });
    this.input.value = `${defaultValue}`;
    this.el = createElement("div", { class: "pg-field pg-inline" }, [
      createElement("label", { for: id, text: label }),
      this.input,
    ]);
  }

  get value() {
    const number = this.input.valueAsNumber;
    return Number.isNaN(number) || number === this.defaultValue ? undefined : number;
  }

  fill(value) {
    const number = Number(value);
    this.input.value = `${Number.isInteger(number) && number > 0 ? number : this.defaultValue}`;
  }

  reportMissing() {
    if (this.input.checkValidity()) return false;
    this.input.closest("details").open = true;
    this.input.reportValidity();
    return true;
  }
}

/** The weights of the style tokens, one slider each. */
export class StyleField {
  constructor(name, label, defaultWeights) {
    Object.assign(this, { name, defaultWeights, optional: true });
    this.sliders = defaultWeights.map((weight, index) => {
      const label = `Token ${index + 1}`,
        input = createElement("input", { type: "range", min: "0", max: "1", step: "0.01", aria: { label } });
      input.value = `${weight}`;
      input.addEventListener("input", () => (this.isChanged = true));
      return input;
    });
    const reset = createElement("button", {
      ...{ type: "button", class: "pg-button", text: "Reset", onclick: () => this.fill() },
    });
    this.el = createElement("fieldset", { class: "pg-style" }, [
      createElement("legend", { text: label }),
      ...this.sliders.map((input, index) =>
        createElement("label", {}, [createElement("span", { text: `${index + 1}` }), input]),
      ),
      reset,
    ]);
  }

  get value() {
    return this.isChanged ? this.sliders.map((input) => input.valueAsNumber) : undefined;
  }

  fill(value) {
    const weights = value?.toString().split(",").map(Number) ?? [];
    this.isChanged = weights.length === this.defaultWeights.length && weights.every(Number.isFinite);
    this.sliders.forEach((input, index) => {
      input.value = `${(this.isChanged ? weights : this.defaultWeights)[index]}`;
    });
  }

  reportMissing() {
    return false;
  }
}

/** An audio file. */
export class AudioField {
  constructor(name, label) {
    Object.assign(this, { name, optional: true, isShared: false, contentName: "recording" });
    const id = createFieldId();
    this.input = createElement("input", {
      ...{ id, name, type: "file", class: "pg-input", accept: "audio/*,.wav,.flac,.ogg" },
    });
    this.input.addEventListener("change", () => (this.ready = this.read()));
    this.el = createElement("div", { class: "pg-field" }, [
      createElement("label", { for: id, text: label }),
      this.input,
    ]);
  }

  async read() {
    const [file] = this.input.files;
    this.data = file ? await encodeBase64(file) : undefined;
  }

  get value() {
    return this.data;
  }

  fill() {}

  reportMissing() {
    return false;
  }
}

/** Encode the bytes of a file as base64. */
export function encodeBase64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
