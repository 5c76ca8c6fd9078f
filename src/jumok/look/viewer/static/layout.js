// The layout around the views: title, selectors, legend, panel, messages. It has no state of its own.

import { CURVES, SCALES } from "./colours.js";
import { createChoice, createField, createSelect, createSlider } from "./controls.js";
import { icon, iconButton, createElement, createWord } from "./dom.js";
import { Legend } from "./appearance.js";
import { PinPanel } from "./pin_panel.js";

const COMMON_KEYS = [
  ["1, 2, …", "switch view"],
  ["h, Shift + h", "next, previous head or hop"],
  ["c", "switch comparison"],
  ["f", "leave out sinks, or not"],
  ["r", "scale of this map, or of all maps"],
  ["t", "toggle theme"],
  ["?", "show keyboard shortcuts"],
];
export class ViewerLayout {
  /** `actions`: set(change of state), step("layer" or "head", by), toggleDigits(), toggleTheme(), save(), unpin(). */
  constructor(full, actions) {
    this.actions = actions;
    this.tabs = createElement("div", { class: "jm-tabs", role: "tablist", aria: { label: "Views" } });
    this.layerBox = createSelect("Layer", {}, (value) => actions.set({ layer: Number(value) }));
    this.headBox = createElement("div", { class: "jm-chips", role: "radiogroup" });
    this.headName = createElement("span", { class: "jm-muted" });
    const compare = { role: "group", aria: { label: "Compare" } };
    this.comparisons = createElement("div", { class: "jm-tabs jm-comparisons", ...compare });
    this.title = createElement("h2", { class: "jm-title" });
    this.subtitle = createElement("p", { class: "jm-subtitle" });
    this.digitsButton = iconButton("digits", "Show weights in cells (n)", () => actions.toggleDigits());
    this.saveButton = iconButton("save", "Save as image", () => actions.save());
    this.themeButton = iconButton("moon", "Toggle theme (t)", () => actions.toggleTheme());
    this.content = createElement("div", { class: "jm-content" });
    this.legend = new Legend();
    this.generatedLegend = createElement("span", { class: "jm-generated", text: "generated", hidden: true });
    const curves = { auto: "Automatic", ...CURVES },
      range = { min: -1, max: 3, step: 0.1, value: 0 };
    this.colours = createField("Colours", createSelect("Colours", SCALES, (scale) => actions.set({ scale })));
    this.sinksBox = createElement("input", {
      type: "checkbox",
      onchange: (event) => actions.set({ withoutSinks: event.target.checked }),
    });
    this.sinks = createField("Without sinks", this.sinksBox);
    const ranges = { map: "This map", all: "All maps, 0 to 1" };
    this.rangeBox = createSelect("Range of the scale", ranges, (value) => actions.set({ isShared: value === "all" }));
    this.range = createField("Range", this.rangeBox);
    this.settings = createElement("div", { class: "jm-settings" }, [
      createField("Scale", createSelect("Curve of the scale", curves, (curve) => actions.set({ curve }))),
      this.colours,
      createField("Contrast", createSlider("Contrast", range, (contrast) => actions.set({ contrast }))),
    ]);
    this.tooltip = createElement("div", { class: "jm-tooltip", role: "tooltip", hidden: true });
    this.liveRegion = createElement("div", { class: "jm-visually-hidden", aria: { live: "polite" } });
    this.errorNote = createElement("p", { class: "jm-error", role: "status", hidden: true });
    this.panel = new PinPanel({ close: () => actions.unpin() });
    this.keys = createElement("dl");
    this.hint = createElement("p", { class: "jm-muted" });
    this.note = createElement("p", { class: "jm-file-note" });
    this.help = createElement("dialog", { class: "jm-help", aria: { label: "Keyboard shortcuts" } }, [
      createElement("div", { class: "jm-bar" }, [
        createElement("h3", { text: "Keyboard shortcuts" }),
        iconButton("close", "Close", () => this.help.close()),
      ]),
      this.keys,
      this.hint,
      this.note,
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
        createElement("footer", { class: "jm-footer" }, [
          this.legend.el,
          this.generatedLegend,
          createElement("div", { class: "jm-settings" }, [this.sinks, this.range, this.settings]),
        ]),
        this.tooltip,
        this.liveRegion,
        this.help,
      ],
    );
  }

  /** Update the controls from the state; `View` is the class of the current view. */
  updateControls({ View, title, subtitle, layers, chips, state, views, comparisons, comparison, note, sinks }) {
    const { actions } = this;
    this.title.replaceChildren(createWord(title));
    this.subtitle.replaceChildren(
      ...subtitle.flatMap((text, n) => [
        ...(n ? [createElement("span", { class: "jm-dot", text: "·" })] : []),
        createElement("span", { class: "jm-number", text }),
      ]),
    );
    this.tabs.replaceChildren(
      ...views.map(([view, viewTitle], n) =>
        createChoice(viewTitle, state.view === view, () => actions.set({ view }), {
          role: "tab",
          aria: { selected: `${state.view === view}` },
          title: `${viewTitle} (${n + 1})`,
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
    const name = View.chip,
      heading = `${name[0].toUpperCase()}${name.slice(1)}`;
    this.headName.textContent = heading;
    this.headBox.setAttribute("aria-label", heading);
    this.headBox.replaceChildren(
      ...chips.map((value) => {
        const isSelected = value === state[name],
          label = value === null ? `Mean of all ${name}s` : `${heading} ${value}`;
        return createChoice(value === null ? "mean" : `${value}`, isSelected, () => actions.set({ [name]: value }), {
          role: "radio",
          aria: { checked: `${isSelected}`, label },
          data: { [name]: `${value}` },
        });
      }),
    );
    this.headBox.parentElement.hidden = chips.length < 2;
    const box = this.headBox.getBoundingClientRect(),
      selected = this.headBox.querySelector(".jm-on")?.getBoundingClientRect() ?? box;
    // Not scrollIntoView, which in a frame also scrolls the page around it.
    this.headBox.scrollLeft += Math.min(0, selected.left - box.left) + Math.max(0, selected.right - box.right);
    this.comparisons.hidden = !comparisons.length;
    this.comparisons.replaceChildren(
      ...comparisons.map(([value, text]) =>
        createChoice(text, comparison === value, () => actions.set({ comparison: value }), {
          aria: { pressed: `${comparison === value}` },
          data: { comparison: `${value}` },
        }),
      ),
    );
    this.saveButton.hidden = !("save" in View.prototype);
    this.digitsButton.hidden = !View.hasDigits;
    this.settings.hidden = !View.hasScale;
    this.range.hidden = !View.hasRange;
    this.sinks.hidden = sinks === null;
    this.sinks.title = `Leave out ${sinks}, which often attract most of the weight, and scale the rest of each row up (f)`;
    this.sinksBox.checked = state.withoutSinks;
    this.rangeBox.value = state.isShared ? "all" : "map";
    this.colours.hidden = !View.hasColours;
    this.keys.replaceChildren(
      ...[...View.keys, ...COMMON_KEYS].flatMap(([key, text]) => [
        createElement("dt", {}, [createElement("kbd", { text: key })]),
        createElement("dd", { text }),
      ]),
    );
    this.hint.textContent = View.hint;
    this.note.textContent = note;
  }

  updateAppearance(theme, digits) {
    this.themeButton.replaceChildren(icon(theme === "dark" ? "sun" : "moon"));
    this.digitsButton.setAttribute("aria-pressed", `${digits}`);
  }

  /** Show elements in a tooltip beside a point of the window; null hides it. */
  showTooltip(lines, x, y) {
    this.tooltip.hidden = !lines;
    if (!lines) return;
    const box = this.root.getBoundingClientRect();
    this.tooltip.replaceChildren(...lines.filter((line) => line !== null));
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
