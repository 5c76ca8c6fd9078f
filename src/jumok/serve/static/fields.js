// What one fills in: texts, numbers. A field has `el`, `value` (undefined: nothing), `fill(value)` and `missing()`.

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
