// Controls and small charts that several views share.

import { formatCount, formatWeight } from "./colours.js";
import { createElement, createWord, iconButton } from "./dom.js";

/** A button of a group, of which one is selected. */
export function createChoice(text, isSelected, onclick, attributes = {}) {
  const className = isSelected ? "jm-choice jm-on" : "jm-choice";
  return createElement("button", { type: "button", class: className, onclick, ...attributes }, [createWord(text)]);
}

/** The buttons of a group as toggles: `choices` maps values to texts, `select` gets the selected value. */
export function createToggles(name, choices, selected, select, describe = () => undefined) {
  return Object.entries(choices).map(([value, text]) =>
    createChoice(text, value === selected, () => select(value), {
      title: describe(value),
      aria: { pressed: `${value === selected}` },
      data: { [name]: value },
    }),
  );
}

export function createField(text, ...children) {
  return createElement("label", { class: "jm-field" }, [createElement("span", { text }), ...children]);
}

/** A slider. `change` gets its value as a number. */
export function createSlider(label, { min, max, step, value }, change) {
  const oninput = (event) => change(Number(event.target.value));
  const attributes = { min: `${min}`, max: `${max}`, step: `${step}`, value: `${value}` };
  return createElement("input", { type: "range", ...attributes, aria: { label }, oninput });
}

/** A drop-down list. `choices` maps values to texts; `change` gets the selected value. */
export function createSelect(label, choices, change) {
  return createElement(
    "select",
    { class: "jm-select", aria: { label }, onchange: (event) => change(event.target.value) },
    Object.entries(choices).map(([value, text]) => createElement("option", { value, text })),
  );
}

/** The buttons for the previous and the next part of a text, and the range between them. */
export function createPager(name, [first, last], length, move) {
  const text = `${formatCount(first)} to ${formatCount(last - 1)} of ${formatCount(length)}`;
  return [
    iconButton("left", `Previous ${name}`, () => move(-1)),
    createElement("span", { class: "jm-number", text }),
    iconButton("right", `Next ${name}`, () => move(1)),
  ];
}

/** A bar of which a part, 0 to 1, is filled. */
export function createMeter(part, colour, title) {
  const css = { width: `${Math.max(0.5, 100 * part)}%`, "background-color": colour };
  return createElement("span", { class: "jm-meter", title }, [createElement("span", { css })]);
}

/** The highest weights of a tooltip: `ranked` as { n, text, value }, highest first. */
export function createRanking(ranked, selected, inks) {
  const top = ranked[0].value || 1;
  return createElement(
    "div",
    { class: "jm-ranking" },
    ranked.flatMap(({ n, text, value }) => [
      createWord(text, { class: n === selected ? "jm-pinned" : "" }),
      createMeter(value / top, inks.accent),
      createElement("span", { class: "jm-number", text: formatWeight(value) }),
    ]),
  );
}
