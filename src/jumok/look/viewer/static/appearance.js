// The current appearance: theme, inks, fonts, colours and the curve from weight to colour; and the legend.

import { toCss, createCurve, packColours, getDivergingScale, getScale, formatWeight, needsDarkInk } from "./colours.js";
import { sizeCanvas, createElement } from "./dom.js";

const UNKNOWN_RANGE = { most: 1, change: 1, width: 1, keys: 1 };

/** Shared by all views; `version` changes when tiles have to be coloured again. */
export class Appearance {
  constructor(root, full) {
    this.root = root;
    this.sharesWheel = !full; // whether the wheel scrolls the surrounding page
    this.version = 0;
    this.cache = new Map();
  }

  /** The theme of the surrounding page: that of a notebook, or of the system. */
  detectTheme() {
    const { body, documentElement: page } = document;
    const declared =
      body.dataset.jpThemeLight ?? body.dataset.vscodeThemeKind ?? page.getAttribute("theme") ?? body.dataset.theme;
    if (declared !== undefined && declared !== null)
      return declared === "false" || /dark|high-contrast$/.test(declared) ? "dark" : "light";
    if (body.classList.contains("dark") || page.classList.contains("dark")) return "dark"; // marimo
    return globalThis.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }

  apply({ theme, scale, curve, contrast, digits, range, isShared, withoutSinks }) {
    this.detectedTheme = this.detectTheme();
    this.theme = theme ?? this.detectedTheme;
    this.root.dataset.theme = this.theme;
    const style = getComputedStyle(this.root),
      ink = (name) => style.getPropertyValue(`--${name}`).trim();
    this.inks = Object.fromEntries(
      ["ink", "muted", "line", "strong", "page", "accent", "pin", "generated", "band", "empty"].map((name) => [name, ink(name)]),
    );
    this.family = style.fontFamily;
    this.font = `13px ${this.family}`;
    this.smallFont = `11px ${this.family}`;
    this.digits = digits;
    this.list = this.memoize(`${scale} ${this.theme}`, () => getScale(scale, this.theme));
    this.colours = packColours(this.list);
    this.tints = this.memoize(`tints ${scale} ${this.theme}`, () =>
      this.list.map((_, n) => this.list[Math.round(0.62 * n)]),
    ); // behind text, never the darkest shades
    this.divergingList = this.memoize(`diverging ${this.theme}`, () => getDivergingScale(this.theme));
    this.divergingColours = packColours(this.divergingList);
    this.spectrogramScale = this.memoize("dusk dark", () => getScale("dusk", "dark"));
    this.spectrogramColours = packColours(this.spectrogramScale);
    this.overlayScale = this.memoize("overlay", () => getScale("overlay", "dark")); // for images, in any theme
    this.curveSetting = curve; // as selected
    this.contrastFactor = 10 ** -contrast;
    this.isShared = isShared; // whether all maps share a scale, from 0 to 1
    this.range = isShared && range ? { ...UNKNOWN_RANGE, keys: range.keys } : range;
    this.weightNote = withoutSinks ? " without sinks, renormalised" : "";
    this.version += 1;
  }

  memoize(name, compute) {
    if (!this.cache.has(name)) this.cache.set(name, compute());
    return this.cache.get(name);
  }

  /**
   * The curve for cells of `width` keys of a map. A cell that covers many is paler than its largest weight, so the
   * scale ends higher when zoomed in.
   */
  curveAt(width) {
    const { most, width: maxWidth, keys } = this.range ?? UNKNOWN_RANGE,
      top = Math.min(1, Math.max(most, 1e-9) * (maxWidth / width) ** 0.75),
      kind = this.curveSetting === "auto" ? chooseCurve(keys) : this.curveSetting;
    if (kind === "log") {
      const end = Math.min(1, top * (maxWidth > 1 ? 4 : 1)) * this.contrastFactor;
      return createCurve("log", Math.min(0.2 / keys, end / 100), end);
    }
    return createCurve(kind, 0, (top > 0.5 ? 1 : top) * this.contrastFactor);
  }

  get divergingCurve() {
    const { change } = this.range ?? UNKNOWN_RANGE;
    return createCurve("root", 0, Math.max(change, 1e-9) * this.contrastFactor);
  }

  /** The curve from 0 to `most`, of the kind `automatic` unless another kind is selected. */
  curveTo(most, automatic) {
    const top = Math.max(most, 1e-12) * this.contrastFactor;
    return createCurve(this.curveSetting === "auto" ? automatic : this.curveSetting, top * 1e-3, top);
  }

  /** The legend of the cells of a map that are `width` keys wide; null until the range is known. */
  mapLegend(width = 1) {
    const name = width > 1 ? "mean weight over the pairs of a cell" : "attention weight",
      scale = this.isShared ? "one scale for all maps" : "scale of this map";
    return this.range ? { curve: this.curveAt(width), list: this.list, title: `${name}${this.weightNote} · ${scale}` } : null;
  }

  /** Shade an element by a position on the scale, 0 to 1. Positions up to `least` / 255 are not shaded. */
  shade(element, position, least = -1) {
    const step = Math.round(position * 255),
      tint = this.tints[step];
    element.style.backgroundColor = step > least ? `rgb(${tint})` : "";
    element.style.color = step > least ? this.inkOn(tint) : "";
  }

  /** The font of a word in a line of this height. */
  fontFor(height, weight = 400) {
    return `${weight} ${Math.max(9, Math.min(13, height))}px ${this.family}`;
  }

  inkOn(colour) {
    return needsDarkInk(colour) ? "#16191f" : "#ffffff";
  }
}

/** Few keys: linear. More: square roots, so that small weights are visible. Very many: logarithmic. */
function chooseCurve(keys) {
  return keys <= 64 ? "linear" : keys <= 192 ? "root" : "log";
}

/** A colour bar with its scale. */
export class Legend {
  constructor() {
    this.canvas = createElement("canvas", { class: "jm-legend-bar", role: "img" });
    this.title = createElement("span", { class: "jm-muted" });
    this.el = createElement("div", { class: "jm-legend" }, [this.canvas, this.title]);
  }

  showText(text) {
    this.content = null;
    this.canvas.hidden = true;
    this.title.textContent = text;
  }

  show(appearance, content) {
    if (!content || content.text) return this.showText(content?.text ?? "");
    this.content = content;
    this.canvas.hidden = false;
    this.title.textContent = content.title;
    const ticks = this.ticks();
    this.canvas.setAttribute("aria-label", `Legend: ${content.title} from ${ticks[0][1]} to ${ticks.at(-1)[1]}`);
    return this.bar(sizeCanvas(this.canvas, 210, 30), appearance, 1, 2, 208);
  }

  // Positions on the bar, 0 to 1, and their labels.
  ticks() {
    const { curve, diverging, format } = this.content,
      write = format ?? ((value) => formatWeight(value, 2));
    if (diverging) {
      const most = formatWeight(curve.from(1), 2);
      return [[0, `−${most}`], [0.5, "0"], [1, `+${most}`]];
    }
    if (!curve.isLog || format) return [0, 0.5, 1].map((place) => [place, write(curve.from(place))]);
    const low = Math.ceil(Math.log10(curve.from(0)) - 0.01),
      high = Math.floor(Math.log10(curve.from(1)) + 0.01),
      all = [];
    const step = Math.max(1, Math.ceil((high - low) / 3));
    for (let power = high; power >= low; power -= step)
      all.unshift([
        curve.to(10 ** power),
        power > -4 ? `${10 ** power}`.replace(/^(0\.0+1).*$/, "$1") : formatWeight(10 ** power, 1).replace("1×", ""),
      ]);
    return all.length > 1 ? all : [0, 1].map((place) => [place, formatWeight(curve.from(place), 2)]);
  }

  bar(context, appearance, x, y, width) {
    const { list } = this.content;
    for (let n = 0; n < width; n += 1) {
      context.fillStyle = toCss(list[Math.round((n / (width - 1)) * 255)]);
      context.fillRect(x + n, y, 1.5, 9);
    }
    context.strokeStyle = appearance.inks.line;
    context.lineWidth = 1;
    context.strokeRect(x - 0.5, y - 0.5, width + 1.5, 10);
    context.font = appearance.smallFont;
    context.fillStyle = appearance.inks.muted;
    context.textBaseline = "alphabetic";
    for (const [place, text] of this.ticks()) {
      const half = context.measureText(text).width / 2; // labels stay within the bar
      context.textAlign = "center";
      context.fillText(text, Math.max(x + half, Math.min(x + width - half, x + place * width)), y + 22);
    }
  }

  /** Draw the legend below a saved image. */
  drawBelow(context, appearance, x, y, width) {
    if (!this.content) return;
    const barWidth = Math.min(208, Math.max(90, width - 30));
    this.bar(context, appearance, x + width / 2 - barWidth / 2, y + 8, barWidth);
    context.fillText(this.content.title, x + width / 2, y + 42);
  }
}
