// Style tokens: their weights as bars, one for each head, and a slider for each.

import { formatWeight } from "./colours.js";
import { createChoice, createSlider } from "./controls.js";
import { createElement, createWord } from "./dom.js";
import { truncateText } from "./token_text.js";

const ENABLED_NOTE =
  "Move a slider to synthesise the speech with that weight for the token, in all heads. " +
  "Click a name to use that token alone.";
const DISABLED_NOTE =
  "Weights of the recorded synthesis. Sliders work with “jumok look” and in notebooks, where a model is available.";

export class StylePanel {
  /** `events`: resynthesize(weights), when sliders were moved; reset(), to restore the recorded synthesis; play(). */
  constructor(events) {
    this.events = events;
    this.about = createElement("p", { class: "jm-muted" });
    this.list = createElement("ul", { class: "jm-tokens" });
    this.note = createElement("p", { class: "jm-muted jm-style-note" });
    this.status = createElement("p", { class: "jm-muted", role: "status" });
    this.autoplay = createElement("input", { type: "checkbox", checked: true });
    this.resetButton = createChoice("Reset", false, () => this.reset());
    const text = createElement("span", { text: "Play after synthesis" });
    this.autoplayBox = createElement("label", { class: "jm-field" }, [this.autoplay, text]);
    this.el = createElement("section", { class: "jm-style", aria: { label: "Style tokens" } }, [
      createElement("div", { class: "jm-bar" }, [
        createElement("h3", { class: "jm-heading", text: "Style tokens" }),
        this.resetButton,
      ]),
      this.about,
      this.list,
      this.autoplayBox,
      this.status,
      this.note,
    ]);
  }

  /** A style as in the manifest; `isResynthesized`: whether sliders were moved for it. */
  show(style, isResynthesized) {
    this.el.hidden = !style;
    if (!style) return;
    const { names, weights, can_resynthesize: enabled } = style,
      heads = weights.length;
    if (`${this.names}` !== `${names}` || this.enabled !== enabled || this.heads !== heads) this.buildRows(style);
    const mean = names.map((_, n) => weights.reduce((sum, head) => sum + head[n], 0) / heads),
      low = Math.min(0, ...weights.flat()),
      span = Math.max(...weights.flat(), 0) - low || 1;
    this.about.textContent = heads > 1 ? `Style token weights of ${heads} heads` : "Style token weights";
    this.rows.forEach(({ bars, box }, n) => {
      const each = weights.map((head) => head[n]);
      const byHead = heads > 1 ? `; by head ${each.map((weight) => formatWeight(weight)).join(", ")}` : "";
      box.setAttribute("aria-label", `${names[n]}: ${formatWeight(mean[n])}${byHead}`);
      bars.forEach((bar, h) => {
        bar.title = `${heads > 1 ? `head ${h}: ` : ""}${formatSigned(each[h])}`;
        bar.style.left = `${(100 * (Math.min(each[h], 0) - low)) / span}%`;
        bar.style.width = `${(100 * Math.abs(each[h])) / span}%`;
      });
    });
    if (!this.isWaiting) this.setValues(mean);
    this.resetButton.hidden = !isResynthesized;
    this.autoplayBox.hidden = !enabled;
    this.note.textContent = enabled ? ENABLED_NOTE : DISABLED_NOTE;
  }

  buildRows({ names, weights, slider_limit: limit, can_resynthesize: enabled }) {
    Object.assign(this, { names, enabled, heads: weights.length });
    this.rows = names.map((name, n) => {
      const text = truncateText(name, 24),
        bars = weights.map(() => createElement("span", { class: "jm-token-bar" })),
        box = createElement("span", { class: "jm-token-bars", role: "img" }, bars),
        number = createElement("output", { class: "jm-number" });
      const range = { min: -limit, max: limit, step: limit / 100, value: 0 };
      const slider = createSlider(`Weight of ${text}`, range, (value) => {
        this.current[n] = value;
        this.showValue(n);
      });
      slider.disabled = !enabled;
      slider.addEventListener("change", () => this.handleChange());
      slider.addEventListener("keydown", (event) => {
        if (event.key !== " ") return;
        event.preventDefault();
        this.events.play();
      });
      const onclick = () => this.selectOnly(n),
        attributes = { title: "Only this token", aria: { label: `Only ${text}` }, onclick },
        title = enabled
          ? createElement("button", { type: "button", class: "jm-link", ...attributes }, [createWord(text)])
          : createWord(text);
      const el = createElement("li", { class: "jm-style-token", data: { token: n } }, [title, box, slider, number]);
      return { el, bars, box, slider, number };
    });
    this.limit = limit;
    this.list.replaceChildren(...this.rows.map(({ el }) => el));
  }

  setValues(all) {
    this.current = [...all]; // exact weights, while sliders have steps
    this.rows.forEach(({ slider }, n) => {
      slider.value = `${all[n]}`;
      this.showValue(n);
    });
  }

  showValue(n) {
    this.rows[n].number.textContent = formatSigned(this.current[n]);
  }

  selectOnly(n) {
    this.setValues(this.names.map((_, k) => (k === n ? Math.min(1, this.limit) : 0)));
    this.handleChange();
  }

  handleChange() {
    this.events.resynthesize([...this.current]);
  }

  reset() {
    this.showStatus("");
    this.events.reset();
  }

  /** During a synthesis sliders stay where they are; they may be moved again. */
  wait(isWaiting) {
    this.isWaiting = isWaiting;
    this.el.setAttribute("aria-busy", `${isWaiting}`);
    this.showStatus(isWaiting ? "Synthesising …" : "");
  }

  showStatus(text) {
    this.status.textContent = text;
  }
}

function formatSigned(value) {
  return `${value < -0.0005 ? "−" : ""}${Math.abs(value).toFixed(2)}`;
}
