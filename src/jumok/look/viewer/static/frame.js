// The frame around the views: title, choices, scale, what is pinned, what is said. It holds no state of its own.

import { CURVES, SCALES, told } from "./colours.js";
import { icon, iconButton, make, word } from "./dom.js";
import { Legend } from "./look.js";
import { PinPanel } from "./panel.js";
import { shown } from "./text.js";

const KEYS = [
  ["← →", "previous, next head"],
  ["↑ ↓", "previous, next layer"],
  ["Shift + arrows", "move over the map, cell by cell"],
  ["Enter, Esc", "pin the row of that cell, unpin it"],
  ["+ − 0", "zoom in, zoom out, all of it"],
  ["1, 2, …", "the views"],
  ["c", "before, after, both, difference"],
  ["n", "numbers in the cells"],
  ["t", "light or dark"],
  ["?", "this list"],
];
const PICTURE_KEYS = [
  ["← →, Home, End", "from word to word"],
  ["Shift + arrows", "from place to place"],
  ["Enter, Esc", "pin that word; back to the mean of all words"],
  ["h, Shift + h", "next, previous head"],
  ["↑ ↓", "previous, next layer"],
  ["1, 2, …", "the views"],
  ["c", "before, after"],
  ["t", "light or dark"],
  ["?", "this list"],
];
const DOCUMENT_KEYS = [
  ["← →", "previous, next hop"],
  ["↑ ↓", "previous, next sentence"],
  ["n p", "the strongest sentences, one after the other, and back"],
  ["Shift + ← →", "from word to word"],
  ["Enter, Esc", "pin that word, unpin it"],
  ["s", "weights within the document or within the sentence"],
  ["Page ↑ ↓, Home, End", "scroll"],
  ["1, 2, …", "the views"],
  ["c", "before, after"],
  ["t", "light or dark"],
  ["?", "this list"],
];
const SPEECH_KEYS = [
  ["Space", "play, pause"],
  ["← →, Home, End", "from step to step in time"],
  ["Enter", "play from there"],
  ["Shift + ← →", "from symbol to symbol"],
  ["Esc", "back to all of it"],
  ["h, Shift + h", "next, previous head"],
  ["↑ ↓", "previous, next layer"],
  ["1, 2, …", "the views"],
  ["c", "before, after"],
  ["t", "light or dark"],
  ["?", "this list"],
];

const OF_VIEWS = {
  map: [KEYS, "On the map: drag to move, wheel or pinch to zoom, click to pin a row."],
  document: [
    DOCUMENT_KEYS,
    "In the text: point at a word for its weight, click to pin it; the strip at the side goes anywhere.",
  ],
  picture: [PICTURE_KEYS, "Point at a word to see its places, at a place to see its words; click a word to pin it."],
  speech: [
    SPEECH_KEYS,
    "Point at a symbol to see its frames, at a time to see its symbols; click a place to hear it from there.",
  ],
};

export class Frame {
  /** `actions`: set(change of state), step("layer" or "head", by), zoom(factor, 0 for all), digits(), theme(), save(), unpin(). */
  constructor(full, actions) {
    this.actions = actions;
    this.tabs = make("div", { class: "jm-tabs", role: "tablist", aria: { label: "Views" } });
    this.layerBox = make("select", {
      class: "jm-select",
      aria: { label: "Layer" },
      onchange: () => actions.set({ layer: Number(this.layerBox.value) }),
    });
    this.headBox = make("div", { class: "jm-chips", role: "radiogroup" });
    this.headName = make("span", { class: "jm-soft" });
    this.sides = make("div", { class: "jm-tabs jm-sides", role: "group", aria: { label: "Compare" } });
    this.title = make("h2", { class: "jm-title" });
    this.subtitle = make("p", { class: "jm-subtitle" });
    this.digitsButton = iconButton("digits", "Numbers in the cells (n)", () => actions.digits());
    this.saveButton = iconButton("save", "Save this picture", () => actions.save());
    this.themeButton = iconButton("moon", "Light or dark (t)", () => actions.theme());
    this.stage = make("div", { class: "jm-stage" });
    this.zooms = make("div", { class: "jm-zooms" }, [
      iconButton("plus", "Zoom in (+)", () => actions.zoom(2)),
      iconButton("minus", "Zoom out (−)", () => actions.zoom(0.5)),
      iconButton("fit", "All of it (0)", () => actions.zoom(0)),
    ]);
    this.legend = new Legend();
    const options = (all) => Object.entries(all).map(([value, text]) => make("option", { value, text }));
    this.curveBox = make(
      "select",
      {
        class: "jm-select",
        aria: { label: "Curve of the scale" },
        onchange: () => actions.set({ curve: this.curveBox.value }),
      },
      options({ auto: "Automatic", ...CURVES }),
    );
    this.scaleBox = make(
      "select",
      { class: "jm-select", aria: { label: "Colours" }, onchange: () => actions.set({ scale: this.scaleBox.value }) },
      options(SCALES),
    );
    this.contrast = make("input", {
      type: "range",
      min: "-1",
      max: "3",
      step: "0.1",
      value: "0",
      aria: { label: "Contrast" },
      oninput: () => actions.set({ contrast: Number(this.contrast.value) }),
    });
    this.colours = make("label", { class: "jm-field" }, [make("span", { text: "Colours" }), this.scaleBox]);
    this.settings = make("div", { class: "jm-settings" }, [
      make("label", { class: "jm-field" }, [make("span", { text: "Scale" }), this.curveBox]),
      this.colours,
      make("label", { class: "jm-field" }, [make("span", { text: "Contrast" }), this.contrast]),
    ]);
    this.tip = make("div", { class: "jm-tip", role: "tooltip", hidden: true });
    this.live = make("div", { class: "jm-unseen", aria: { live: "polite" } });
    this.note = make("p", { class: "jm-trouble", role: "status", hidden: true });
    this.panel = new PinPanel({ close: () => actions.unpin() });
    this.keys = make("dl");
    this.hint = make("p", { class: "jm-soft" });
    this.help = make("dialog", { class: "jm-help", aria: { label: "Keys" } }, [
      make("div", { class: "jm-bar" }, [
        make("h3", { text: "Keys" }),
        iconButton("close", "Close", () => this.help.close()),
      ]),
      this.keys,
      this.hint,
    ]);
    this.root = make(
      "div",
      { class: full ? "jumok jm-full" : "jumok", tabindex: "-1", data: { lmSuppressShortcuts: "true" } },
      [
        make("header", { class: "jm-header" }, [
          make("div", { class: "jm-titles" }, [this.title, this.subtitle]),
          make("div", { class: "jm-tools" }, [
            this.sides,
            this.digitsButton,
            this.saveButton,
            this.themeButton,
            iconButton("help", "Keys (?)", () => this.help.showModal()),
          ]),
        ]),
        make("nav", { class: "jm-nav", aria: { label: "What to show" } }, [
          this.tabs,
          make("div", { class: "jm-picks" }, [
            make("div", { class: "jm-step" }, [
              iconButton("left", "Previous layer (↑)", () => actions.step("layer", -1)),
              this.layerBox,
              iconButton("right", "Next layer (↓)", () => actions.step("layer", 1)),
            ]),
            make("div", { class: "jm-step jm-head-step" }, [this.headName, this.headBox]),
          ]),
        ]),
        this.note,
        make("div", { class: "jm-main" }, [this.stage, this.panel.el]),
        make("footer", { class: "jm-footer" }, [this.legend.el, this.settings]),
        this.tip,
        this.live,
        this.help,
      ],
    );
  }

  /** Buttons and boxes as the state has them. */
  dress({ title, about, layers, chips, state, views, sides, side }) {
    const { actions } = this;
    this.title.replaceChildren(word(title));
    this.subtitle.replaceChildren(
      ...about.flatMap((text, n) => [
        ...(n ? [make("span", { class: "jm-dot", text: "·" })] : []),
        make("span", { class: "jm-number", text }),
      ]),
    );
    this.tabs.replaceChildren(
      ...views.map(([view, text], n) =>
        choice(text, state.view === view, () => actions.set({ view }), {
          role: "tab",
          aria: { selected: `${state.view === view}` },
          title: `${text} (${n + 1})`,
          data: { view },
        }),
      ),
    );
    this.layerBox.replaceChildren(
      ...layers.map(({ number, name }) =>
        make("option", { value: `${number}`, text: name, selected: number === state.layer }),
      ),
    );
    this.layerBox.parentElement.hidden = layers.length < 2;
    const { name, all } = chips; // heads, or the hops of a document
    this.headName.textContent = `${name[0].toUpperCase()}${name.slice(1)}`;
    this.headBox.setAttribute("aria-label", this.headName.textContent);
    this.headBox.replaceChildren(
      ...all.map((one) =>
        choice(one === null ? "mean" : `${one}`, one === state[name], () => actions.set({ [name]: one }), {
          role: "radio",
          aria: {
            checked: `${one === state[name]}`,
            label: one === null ? `Mean of all ${name}s` : `${this.headName.textContent} ${one}`,
          },
          data: { [name]: `${one}` },
        }),
      ),
    );
    this.headBox.parentElement.hidden = all.length < 2;
    const [box, on] = [this.headBox, this.headBox.querySelector(".jm-on")].map((one) => one?.getBoundingClientRect());
    // Not scrollIntoView, which in a frame scrolls the page around it as well.
    if (on) this.headBox.scrollLeft += Math.min(0, on.left - box.left) + Math.max(0, on.right - box.right);
    this.sides.hidden = !sides.length;
    this.sides.replaceChildren(
      ...sides.map(([one, text]) =>
        choice(text, side === one, () => actions.set({ side: one }), {
          aria: { pressed: `${side === one}` },
          data: { side: `${one}` },
        }),
      ),
    );
    this.saveButton.hidden = !["map", "arcs", "picture", "speech"].includes(state.view);
    this.digitsButton.hidden = state.view !== "map";
    const [keys, hint] = OF_VIEWS[state.view] ?? OF_VIEWS.map;
    this.keys.replaceChildren(
      ...keys.flatMap(([key, text]) => [make("dt", {}, [make("kbd", { text: key })]), make("dd", { text })]),
    );
    this.hint.textContent = hint;
  }

  /** What depends on how things look. */
  paint(theme, digits) {
    this.themeButton.replaceChildren(icon(theme === "dark" ? "sun" : "moon"));
    this.digitsButton.setAttribute("aria-pressed", `${digits}`);
  }

  /** Beside the pointer: a token, its place and its weight; null: no more. */
  tell(what, event) {
    if (!what) {
      this.tip.hidden = true;
      return;
    }
    const lines = [
      make("div", { class: "jm-pair" }, [
        word(shown(what.token, 60)),
        make("span", { class: "jm-soft", text: `  ${what.place.toLocaleString("en-US")}` }),
      ]),
    ];
    if (what.value !== null) lines.push(make("div", { class: "jm-weight", text: told(what.value, 4) }));
    this.tipAt(lines, event.clientX, event.clientY);
  }

  tipAt(lines, x, y) {
    const box = this.root.getBoundingClientRect();
    this.tip.replaceChildren(...lines);
    this.tip.hidden = false;
    const { offsetWidth: wide, offsetHeight: tall } = this.tip;
    const left = x - box.left + 16 + wide > box.width - 8 ? x - box.left - 16 - wide : x - box.left + 16;
    const top = y - box.top + 18 + tall > box.height - 4 ? y - box.top - 14 - tall : y - box.top + 18;
    this.tip.style.transform = `translate(${Math.max(4, Math.round(left))}px, ${Math.max(4, Math.round(top))}px)`;
  }

  /** To those who listen rather than look. */
  say(text) {
    this.live.textContent = text;
  }
}

function choice(text, on, onclick, given) {
  return make("button", { type: "button", class: on ? "jm-choice jm-on" : "jm-choice", onclick, ...given }, [
    word(text),
  ]);
}
