// The tokens of a style: how much of each there is as bars, one for a head, and a slider for each to have it otherwise.

import { told } from "./colours.js";
import { make, word } from "./dom.js";
import { shown } from "./text.js";

const MOVABLE =
  "Move a slider, and it is said anew with as much of that token, in all heads alike. A name gives that token alone.";
const FIXED =
  "As it was said. No model stands behind this view, so the sliders stay where they are; on the page of jumok look " +
  "and in a notebook they can be moved.";

export class StylePanel {
  /** `events`: wish(weights), when sliders were moved; reset(), to have it as it was; play(). */
  constructor(events) {
    this.events = events;
    this.about = make("p", { class: "jm-soft" });
    this.list = make("ul", { class: "jm-tokens" });
    this.note = make("p", { class: "jm-soft jm-style-note" });
    this.status = make("p", { class: "jm-soft", role: "status" });
    this.atOnce = make("input", { type: "checkbox", checked: true });
    this.back = make("button", { type: "button", class: "jm-choice", text: "As it was", onclick: () => this.reset() });
    this.ways = make("label", { class: "jm-field" }, [this.atOnce, make("span", { text: "Play what is said anew" })]);
    this.el = make("section", { class: "jm-style", aria: { label: "Style tokens" } }, [
      make("div", { class: "jm-bar" }, [make("h3", { class: "jm-heading", text: "Style tokens" }), this.back]),
      this.about,
      this.list,
      this.ways,
      this.status,
      this.note,
    ]);
  }

  /** A style as in the manifest; `isAnew`: whether it was said so because sliders had been moved. */
  show(style, isAnew) {
    this.el.hidden = !style;
    if (!style) return;
    const { names, weights, live } = style,
      heads = weights.length;
    if (`${this.names}` !== `${names}` || this.live !== live || this.heads !== heads) this.make(style);
    const mean = names.map((_, n) => weights.reduce((sum, head) => sum + head[n], 0) / heads),
      low = Math.min(0, ...weights.flat()),
      span = Math.max(...weights.flat(), 0) - low || 1;
    this.about.textContent =
      heads > 1 ? `How much of each is in it, by ${heads} heads` : "How much of each is in it";
    this.rows.forEach(({ bars, box }, n) => {
      const each = weights.map((head) => head[n]);
      const byHead = heads > 1 ? `; by head ${each.map((weight) => told(weight)).join(", ")}` : "";
      box.setAttribute("aria-label", `${names[n]}: ${told(mean[n])}${byHead}`);
      bars.forEach((bar, h) => {
        bar.title = `${heads > 1 ? `head ${h}: ` : ""}${signed(each[h])}`;
        bar.style.left = `${(100 * (Math.min(each[h], 0) - low)) / span}%`;
        bar.style.width = `${(100 * Math.abs(each[h])) / span}%`;
      });
    });
    if (!this.waits) this.values(mean);
    this.back.hidden = !isAnew;
    this.ways.hidden = !live;
    this.note.textContent = live ? MOVABLE : FIXED;
  }

  make({ names, weights, scale, live }) {
    Object.assign(this, { names, live, heads: weights.length });
    this.rows = names.map((name, n) => {
      const text = shown(name, 24),
        bars = weights.map(() => make("span", { class: "jm-token-bar" })),
        box = make("span", { class: "jm-token-bars", role: "img" }, bars),
        number = make("output", { class: "jm-number" });
      const slider = make("input", {
        type: "range",
        ...{ min: `${-scale}`, max: `${scale}`, step: `${scale / 100}`, disabled: !live },
        aria: { label: `How much of ${text}` },
        oninput: () => {
          this.now[n] = Number(slider.value);
          this.tell(n);
        },
        onchange: () => this.moved(),
        onkeydown: (event) => event.key === " " && (event.preventDefault(), this.events.play()),
      });
      const title = live
        ? make("button", {
            type: "button",
            class: "jm-link",
            title: "Only this token",
            aria: { label: `Only ${text}` },
            onclick: () => this.only(n),
          }, [word(text)])
        : word(text);
      const el = make("li", { class: "jm-style-token", data: { token: n } }, [title, box, slider, number]);
      return { el, bars, box, slider, number };
    });
    this.scale = scale;
    this.list.replaceChildren(...this.rows.map(({ el }) => el));
  }

  values(all) {
    this.now = [...all]; // a slider has steps, the style that was heard has none
    this.rows.forEach(({ slider }, n) => {
      slider.value = `${all[n]}`;
      this.tell(n);
    });
  }

  tell(n) {
    this.rows[n].number.textContent = signed(this.now[n]);
  }

  only(n) {
    this.values(this.names.map((_, k) => (k === n ? Math.min(1, this.scale) : 0)));
    this.moved();
  }

  moved() {
    this.events.wish([...this.now]);
  }

  reset() {
    this.say("");
    this.events.reset();
  }

  /** While it is said anew sliders stay where they were put; they may be moved on. */
  wait(waits) {
    this.waits = waits;
    this.el.setAttribute("aria-busy", `${waits}`);
    this.say(waits ? "It is being said anew …" : "");
  }

  say(text) {
    this.status.textContent = text;
  }
}

function signed(value) {
  return `${value < -0.0005 ? "−" : ""}${Math.abs(value).toFixed(2)}`;
}
