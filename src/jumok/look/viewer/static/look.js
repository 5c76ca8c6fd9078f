// How everything looks now: theme, inks, fonts, colours and the curve from weight to colour; and the legend.

import { css, curveOf, packed, scaleApart, scaleOf, told, wantsDarkInk } from "./colours.js";
import { canvasOf, make } from "./dom.js";

/** Shared by all views; `version` changes with anything that tiles have to be coloured anew for. */
export class Look {
  constructor(root, full) {
    this.root = root;
    this.shy = !full; // whether the wheel belongs to the page around us
    this.version = 0;
    this.made = new Map();
  }

  /** What the page around us wants: a notebook says it, or the system does. */
  around() {
    const { body, documentElement: page } = document;
    const said =
      body.dataset.jpThemeLight ?? body.dataset.vscodeThemeKind ?? page.getAttribute("theme") ?? body.dataset.theme;
    if (said !== undefined && said !== null)
      return said === "false" || /dark|high-contrast$/.test(said) ? "dark" : "light";
    if (body.classList.contains("dark") || page.classList.contains("dark")) return "dark"; // marimo
    return globalThis.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }

  apply({ theme, scale, curve, contrast, digits, range }) {
    this.seen = this.around();
    this.theme = theme ?? this.seen;
    this.root.dataset.theme = this.theme;
    const style = getComputedStyle(this.root),
      ink = (name) => style.getPropertyValue(`--${name}`).trim();
    this.inks = Object.fromEntries(
      ["ink", "soft", "line", "strong", "page", "accent", "pin", "band", "empty"].map((name) => [name, ink(name)]),
    );
    this.family = style.fontFamily;
    this.font = `13px ${this.family}`;
    this.smallFont = `11px ${this.family}`;
    this.digits = digits;
    this.list = this.make(`${scale} ${this.theme}`, () => scaleOf(scale, this.theme));
    this.colours = packed(this.list);
    this.tints = this.make(`tints ${scale} ${this.theme}`, () =>
      this.list.map((_, n) => this.list[Math.round(0.62 * n)]),
    ); // behind a text: never so dark
    this.apartList = this.make(`apart ${this.theme}`, () => scaleApart(this.theme));
    this.apartColours = packed(this.apartList);
    this.glow = this.make("dusk dark", () => scaleOf("dusk", "dark"));
    this.glowColours = packed(this.glow);
    this.lamp = this.make("lamp", () => scaleOf("lamp", "dark")); // over pictures, which no theme changes
    this.setRange(curve, contrast, range ?? { most: 1, change: 1, width: 1, keys: 1 });
    this.version += 1;
  }

  make(name, from) {
    if (!this.made.has(name)) this.made.set(name, from());
    return this.made.get(name);
  }

  setRange(kind, contrast, range) {
    this.wish = kind; // as it was chosen
    this.curveKind = kind === "auto" ? curveFor(range.keys) : kind;
    this.less = 10 ** -contrast;
    this.known = range;
    this.curve = this.curveAt(range.width);
    this.apart = curveOf("root", 0, Math.max(range.change, 1e-9) * this.less);
  }

  /** The curve for cells of so many keys. One that covers many is paler than the strongest pair in it, so the scale ends higher the closer one comes. */
  curveAt(width) {
    const { most, width: widest, keys } = this.known,
      closer = (widest / width) ** 0.75;
    const top = Math.min(1, Math.max(most, 1e-9) * closer);
    if (this.curveKind === "log") {
      const end = Math.min(1, top * (widest > 1 ? 4 : 1)) * this.less;
      return curveOf("log", Math.min(0.2 / keys, end / 100), end);
    }
    return curveOf(this.curveKind, 0, (top > 0.5 ? 1 : top) * this.less);
  }

  /** The font of a word that has so many pixels from line to line. */
  fontFor(room, weight = 400) {
    return `${weight} ${Math.max(9, Math.min(13, room))}px ${this.family}`;
  }

  inkOn(colour) {
    return wantsDarkInk(colour) ? "#16191f" : "#ffffff";
  }
}

/** Few keys: as it is. More: roots, so that small weights show. Very many: decades. */
function curveFor(keys) {
  return keys <= 64 ? "linear" : keys <= 192 ? "root" : "log";
}

/** A bar that tells how much a colour is. */
export class Legend {
  constructor() {
    this.canvas = make("canvas", { class: "jm-legend-bar", role: "img" });
    this.title = make("span", { class: "jm-soft" });
    this.el = make("div", { class: "jm-legend" }, [this.canvas, this.title]);
  }

  say(text) {
    this.what = null;
    this.canvas.hidden = true;
    this.title.textContent = text;
  }

  show(look, what) {
    if (!what) return this.say("");
    this.what = what;
    this.canvas.hidden = false;
    this.title.textContent = what.title;
    const ticks = this.ticks();
    this.canvas.setAttribute("aria-label", `Legend: ${what.title} from ${ticks[0][1]} to ${ticks.at(-1)[1]}`);
    return this.bar(canvasOf(this.canvas, 210, 30), look, 1, 2, 208);
  }

  // Places on the bar, 0 to 1, and what stands there.
  ticks() {
    const { curve, log, apart, tell = (value) => told(value, 2) } = this.what;
    if (apart)
      return [
        [0, `−${told(curve.from(1), 2)}`],
        [0.5, "0"],
        [1, `+${told(curve.from(1), 2)}`],
      ];
    if (!log) return [0, 0.5, 1].map((place) => [place, tell(curve.from(place))]);
    const low = Math.ceil(Math.log10(curve.from(0)) - 0.01),
      high = Math.floor(Math.log10(curve.from(1)) + 0.01),
      all = [];
    const step = Math.max(1, Math.ceil((high - low) / 3));
    for (let power = high; power >= low; power -= step)
      all.unshift([
        curve.to(10 ** power),
        power > -4 ? `${10 ** power}`.replace(/^(0\.0+1).*$/, "$1") : told(10 ** power, 1).replace("1×", ""),
      ]);
    return all.length > 1 ? all : [0, 1].map((place) => [place, told(curve.from(place), 2)]);
  }

  bar(context, look, x, y, width) {
    const { list } = this.what;
    for (let n = 0; n < width; n += 1) {
      context.fillStyle = css(list[Math.round((n / (width - 1)) * 255)]);
      context.fillRect(x + n, y, 1.5, 9);
    }
    context.strokeStyle = look.inks.line;
    context.lineWidth = 1;
    context.strokeRect(x - 0.5, y - 0.5, width + 1.5, 10);
    context.font = look.smallFont;
    context.fillStyle = look.inks.soft;
    context.textBaseline = "alphabetic";
    for (const [place, text] of this.ticks()) {
      const half = context.measureText(text).width / 2; // none sticks out
      context.textAlign = "center";
      context.fillText(text, Math.max(x + half, Math.min(x + width - half, x + place * width)), y + 22);
    }
  }

  /** Below a picture that is saved. */
  draw(context, look, x, y, width) {
    if (!this.what) return;
    const wide = Math.min(208, Math.max(90, width - 30));
    this.bar(context, look, x + width / 2 - wide / 2, y + 8, wide);
    context.fillText(this.what.title, x + width / 2, y + 42);
  }
}
