// The layout around the views: title, selectors, legend, panel, messages. It has no state of its own.

import { CURVES, SCALES, formatWeight } from "./colours.js";
import { icon, iconButton, createElement, createWord } from "./dom.js";
import { Legend } from "./appearance.js";
import { PinPanel } from "./pin_panel.js";
import { truncateText } from "./token_text.js";

const MAP_KEYS = [
  ["← →", "previous, next head"],
  ["↑ ↓", "previous, next layer"],
  ["Shift + arrows", "move by cell"],
  ["Enter, Esc", "pin, unpin the row"],
  ["+ − 0", "zoom in, zoom out, fit to view"],
  ["1, 2, …", "switch view"],
  ["c", "switch comparison"],
  ["n", "show weights in cells"],
  ["t", "toggle theme"],
  ["?", "show keyboard shortcuts"],
];
const IMAGE_KEYS = [
  ["← →, Home, End", "move by word"],
  ["Shift + arrows", "move by patch"],
  ["Enter, Esc", "pin the word, show the mean of all words"],
  ["h, Shift + h", "next, previous head"],
  ["↑ ↓", "previous, next layer"],
  ["1, 2, …", "switch view"],
  ["c", "switch comparison"],
  ["t", "toggle theme"],
  ["?", "show keyboard shortcuts"],
];
const DOCUMENT_KEYS = [
  ["← →", "previous, next hop"],
  ["↑ ↓", "previous, next sentence"],
  ["n p", "next, previous sentence by weight"],
  ["Shift + ← →", "move by word"],
  ["Enter, Esc", "pin, unpin the word"],
  ["s", "weights relative to the document or to the sentence"],
  ["Page ↑ ↓, Home, End", "scroll"],
  ["1, 2, …", "switch view"],
  ["c", "switch comparison"],
  ["t", "toggle theme"],
  ["?", "show keyboard shortcuts"],
];
const SPEECH_KEYS = [
  ["Space", "play, pause"],
  ["← →, Home, End", "move by step"],
  ["Enter", "play from the step"],
  ["Shift + ← →", "move by symbol"],
  ["Esc", "clear the selection"],
  ["h, Shift + h", "next, previous head"],
  ["↑ ↓", "previous, next layer"],
  ["1, 2, …", "switch view"],
  ["c", "switch comparison"],
  ["t", "toggle theme"],
  ["?", "show keyboard shortcuts"],
];

const VIEW_HELP = {
  map: [MAP_KEYS, "Drag to pan, scroll or pinch to zoom, click to pin a row."],
  document: [
    DOCUMENT_KEYS,
    "Hover a word to see its weight, click to pin it. Click the minimap to scroll.",
  ],
  image: [IMAGE_KEYS, "Hover a word to see its patches, hover a patch to see its words; click a word to pin it."],
  speech: [
    SPEECH_KEYS,
    "Hover a symbol to see its frames, hover a time to see its symbols; click to play from there.",
  ],
};

export class ViewerLayout {
  /** `actions`: set(change of state), step("layer" or "head", by), zoom(factor, 0 to fit), digits(), theme(), save(), unpin(). */
  constructor(full, actions) {
    this.actions = actions;
    this.tabs = createElement("div", { class: "jm-tabs", role: "tablist", aria: { label: "Views" } });
    this.layerBox = createElement("select", {
      class: "jm-select",
      aria: { label: "Layer" },
      onchange: () => actions.set({ layer: Number(this.layerBox.value) }),
    });
    this.headBox = createElement("div", { class: "jm-chips", role: "radiogroup" });
    this.headName = createElement("span", { class: "jm-muted" });
    this.comparisons = createElement("div", { class: "jm-tabs jm-comparisons", role: "group", aria: { label: "Compare" } });
    this.title = createElement("h2", { class: "jm-title" });
    this.subtitle = createElement("p", { class: "jm-subtitle" });
    this.digitsButton = iconButton("digits", "Show weights in cells (n)", () => actions.digits());
    this.saveButton = iconButton("save", "Save as image", () => actions.save());
    this.themeButton = iconButton("moon", "Toggle theme (t)", () => actions.theme());
    this.content = createElement("div", { class: "jm-content" });
    this.zooms = createElement("div", { class: "jm-zooms" }, [
      iconButton("plus", "Zoom in (+)", () => actions.zoom(2)),
      iconButton("minus", "Zoom out (−)", () => actions.zoom(0.5)),
      iconButton("fit", "Fit to view (0)", () => actions.zoom(0)),
    ]);
    this.legend = new Legend();
    const options = (all) => Object.entries(all).map(([value, text]) => createElement("option", { value, text }));
    this.curveBox = createElement(
      "select",
      {
        class: "jm-select",
        aria: { label: "Curve of the scale" },
        onchange: () => actions.set({ curve: this.curveBox.value }),
      },
      options({ auto: "Automatic", ...CURVES }),
    );
    this.scaleBox = createElement(
      "select",
      { class: "jm-select", aria: { label: "Colours" }, onchange: () => actions.set({ scale: this.scaleBox.value }) },
      options(SCALES),
    );
    this.contrast = createElement("input", {
      type: "range",
      min: "-1",
      max: "3",
      step: "0.1",
      value: "0",
      aria: { label: "Contrast" },
      oninput: () => actions.set({ contrast: Number(this.contrast.value) }),
    });
    this.colours = createElement("label", { class: "jm-field" }, [createElement("span", { text: "Colours" }), this.scaleBox]);
    this.settings = createElement("div", { class: "jm-settings" }, [
      createElement("label", { class: "jm-field" }, [createElement("span", { text: "Scale" }), this.curveBox]),
      this.colours,
      createElement("label", { class: "jm-field" }, [createElement("span", { text: "Contrast" }), this.contrast]),
    ]);
    this.tooltip = createElement("div", { class: "jm-tooltip", role: "tooltip", hidden: true });
    this.liveRegion = createElement("div", { class: "jm-visually-hidden", aria: { live: "polite" } });
    this.errorNote = createElement("p", { class: "jm-error", role: "status", hidden: true });
    this.panel = new PinPanel({ close: () => actions.unpin() });
    this.keys = createElement("dl");
    this.hint = createElement("p", { class: "jm-muted" });
    this.help = createElement("dialog", { class: "jm-help", aria: { label: "Keyboard shortcuts" } }, [
      createElement("div", { class: "jm-bar" }, [
        createElement("h3", { text: "Keyboard shortcuts" }),
        iconButton("close", "Close", () => this.help.close()),
      ]),
      this.keys,
      this.hint,
    ]);
    this.root = createElement(
      "div",
      { class: full ? "jumok jm-full" : "jumok", tabindex: "-1", data: { lmSuppressShortcuts: "true" } },
      [
        createElement("header", { class: "jm-header" }, [
          createElement("div", { class: "jm-titles" }, [this.title, this.subtitle]),
          createElement("div", { class: "jm-tools" }, [
            this.comparisons,
            this.digitsButton,
            this.saveButton,
            this.themeButton,
            iconButton("help", "Keyboard shortcuts (?)", () => this.help.showModal()),
          ]),
        ]),
        createElement("nav", { class: "jm-nav", aria: { label: "Layer and head" } }, [
          this.tabs,
          createElement("div", { class: "jm-selectors" }, [
            createElement("div", { class: "jm-step" }, [
              iconButton("left", "Previous layer (↑)", () => actions.step("layer", -1)),
              this.layerBox,
              iconButton("right", "Next layer (↓)", () => actions.step("layer", 1)),
            ]),
            createElement("div", { class: "jm-step jm-head-step" }, [this.headName, this.headBox]),
          ]),
        ]),
        this.errorNote,
        createElement("div", { class: "jm-main" }, [this.content, this.panel.el]),
        createElement("footer", { class: "jm-footer" }, [this.legend.el, this.settings]),
        this.tooltip,
        this.liveRegion,
        this.help,
      ],
    );
  }

  /** Update the controls from the state. */
  updateControls({ title, subtitle, layers, chips, state, views, comparisons, comparison }) {
    const { actions } = this;
    this.title.replaceChildren(createWord(title));
    this.subtitle.replaceChildren(
      ...subtitle.flatMap((text, n) => [
        ...(n ? [createElement("span", { class: "jm-dot", text: "·" })] : []),
        createElement("span", { class: "jm-number", text }),
      ]),
    );
    this.tabs.replaceChildren(
      ...views.map(([view, text], n) =>
        createChoice(text, state.view === view, () => actions.set({ view }), {
          role: "tab",
          aria: { selected: `${state.view === view}` },
          title: `${text} (${n + 1})`,
          data: { view },
        }),
      ),
    );
    this.layerBox.replaceChildren(
      ...layers.map(({ number, name }) =>
        createElement("option", { value: `${number}`, text: name, selected: number === state.layer }),
      ),
    );
    this.layerBox.parentElement.hidden = layers.length < 2;
    const { name, all } = chips; // heads, or the hops of a document
    this.headName.textContent = `${name[0].toUpperCase()}${name.slice(1)}`;
    this.headBox.setAttribute("aria-label", this.headName.textContent);
    this.headBox.replaceChildren(
      ...all.map((value) =>
        createChoice(value === null ? "mean" : `${value}`, value === state[name], () => actions.set({ [name]: value }), {
          role: "radio",
          aria: {
            checked: `${value === state[name]}`,
            label: value === null ? `Mean of all ${name}s` : `${this.headName.textContent} ${value}`,
          },
          data: { [name]: `${value}` },
        }),
      ),
    );
    this.headBox.parentElement.hidden = all.length < 2;
    const [box, on] = [this.headBox, this.headBox.querySelector(".jm-on")].map((element) => element?.getBoundingClientRect());
    // Not scrollIntoView, which in a frame also scrolls the page around it.
    if (on) this.headBox.scrollLeft += Math.min(0, on.left - box.left) + Math.max(0, on.right - box.right);
    this.comparisons.hidden = !comparisons.length;
    this.comparisons.replaceChildren(
      ...comparisons.map(([value, text]) =>
        createChoice(text, comparison === value, () => actions.set({ comparison: value }), {
          aria: { pressed: `${comparison === value}` },
          data: { comparison: `${value}` },
        }),
      ),
    );
    this.saveButton.hidden = !["map", "arcs", "image", "speech"].includes(state.view);
    this.digitsButton.hidden = state.view !== "map";
    const [keys, hint] = VIEW_HELP[state.view] ?? VIEW_HELP.map;
    this.keys.replaceChildren(
      ...keys.flatMap(([key, text]) => [createElement("dt", {}, [createElement("kbd", { text: key })]), createElement("dd", { text })]),
    );
    this.hint.textContent = hint;
  }

  /** Update what depends on the appearance. */
  paint(theme, digits) {
    this.themeButton.replaceChildren(icon(theme === "dark" ? "sun" : "moon"));
    this.digitsButton.setAttribute("aria-pressed", `${digits}`);
  }

  /** Show the tooltip of a token: its position and its weight; null hides it. */
  showTokenTooltip(token, event) {
    if (!token) {
      this.tooltip.hidden = true;
      return;
    }
    const lines = [
      createElement("div", { class: "jm-pair" }, [
        createWord(truncateText(token.token, 60)),
        createElement("span", { class: "jm-muted", text: `  ${token.place.toLocaleString("en-US")}` }),
      ]),
    ];
    if (token.value !== null) lines.push(createElement("div", { class: "jm-weight", text: formatWeight(token.value, 4) }));
    this.showTooltip(lines, event.clientX, event.clientY);
  }

  showTooltip(lines, x, y) {
    const box = this.root.getBoundingClientRect();
    this.tooltip.replaceChildren(...lines);
    this.tooltip.hidden = false;
    const { offsetWidth: wide, offsetHeight: tall } = this.tooltip;
    const left = x - box.left + 16 + wide > box.width - 8 ? x - box.left - 16 - wide : x - box.left + 16;
    const top = y - box.top + 18 + tall > box.height - 4 ? y - box.top - 14 - tall : y - box.top + 18;
    this.tooltip.style.transform = `translate(${Math.max(4, Math.round(left))}px, ${Math.max(4, Math.round(top))}px)`;
  }

  /** Announce a text to screen readers. */
  announce(text) {
    this.liveRegion.textContent = text;
  }
}

function createChoice(text, isOn, onclick, attributes) {
  return createElement("button", { type: "button", class: isOn ? "jm-choice jm-on" : "jm-choice", onclick, ...attributes }, [
    createWord(text),
  ]);
}
