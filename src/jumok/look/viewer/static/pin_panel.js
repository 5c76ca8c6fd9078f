// The highest weights of a pinned query, as a list.

import { formatCount, formatWeight } from "./colours.js";
import { createMeter } from "./controls.js";
import { iconButton, createElement, createWord } from "./dom.js";
import { truncateText } from "./token_text.js";

const MAX_LINES = 14,
  MAX_HOPS = 64;

export class PinPanel {
  constructor({ close }) {
    this.heading = createElement("h3", { class: "jm-panel-title" });
    this.lead = createElement("p", { class: "jm-muted" });
    this.list = createElement("ol", { class: "jm-rank" });
    this.el = createElement("aside", { class: "jm-panel", hidden: true, aria: { label: "Pinned query" } }, [
      createElement("div", { class: "jm-bar" }, [this.heading, iconButton("close", "Unpin (Esc)", close)]),
      this.lead,
      this.list,
    ]);
  }

  hide() {
    this.el.hidden = true;
  }

  setQuery(content, pinned) {
    if (content.rows) this.setHeading(content.rows[pinned], pinned);
    else this.setHeading(`Row ${formatCount(pinned)}`, null);
  }

  setHeading(text, place) {
    this.el.hidden = false;
    const number = place === null ? "" : ` ${formatCount(place)}`;
    this.heading.replaceChildren(
      createWord(truncateText(text, 60)),
      createElement("span", { class: "jm-muted jm-number", text: number }),
    );
  }

  showMessage(content, pinned, text) {
    this.setQuery(content, pinned);
    this.lead.textContent = text;
    this.list.replaceChildren();
  }

  /** `rows`: the weights of the pinned query, of one or two items of data. */
  show({ content, pinned, rows, labels, appearance }) {
    this.setQuery(content, pinned);
    const best = rankWeights(rows, MAX_LINES),
      most = Math.max(...best.flatMap((n) => rows.map((row) => row[n])), 1e-12),
      sum = best.reduce((total, n) => total + rows.at(-1)[n], 0),
      part = rows.length === 1 && rows[0].length > MAX_LINES ? ` · these have ${(100 * sum).toFixed(1)} %` : "",
      { accent, muted } = appearance.inks;
    this.lead.textContent = `Entropy ${rows.map((row) => entropy(row).toFixed(2)).join(" → ")} bits${part}`;
    this.list.replaceChildren(
      ...best.map((n) =>
        createLine({
          place: n,
          name: createWord(content.cols ? truncateText(content.cols[n], 40) : formatCount(n), { class: "jm-key" }),
          number: content.cols ? formatCount(n) : "",
          meters: rows.map((row, k) =>
            rows.length === 1
              ? createMeter(row[n] / most, accent)
              : createMeter(row[n] / most, k ? accent : muted, labels[k]),
          ),
          values: rows.map((row) => row[n]),
        }),
      ),
    );
  }

  /** A word of a document: `lines` of { text, value, and a hop or a place }, of which the highest are listed. */
  showWord({ title, place, lead, heading, lines }, selectedHop, selectHop, appearance) {
    this.setHeading(title, place);
    this.lead.replaceChildren(
      ...lead.map((text) => createElement("div", { class: "jm-number", text })),
      createElement("div", { class: "jm-heading jm-spaced", text: heading }),
    );
    const isHops = lines[0].hop !== undefined,
      best = [...lines].sort((a, b) => b.value - a.value).slice(0, isHops ? MAX_HOPS : MAX_LINES),
      most = best[0].value || 1;
    const createHopButton = ({ hop, text }) => {
      const className = hop === selectedHop ? "jm-link jm-on" : "jm-link";
      return createElement("button", { type: "button", class: className, text, onclick: () => selectHop(hop) });
    };
    this.list.replaceChildren(
      ...best.map((line) =>
        createLine({
          place: line.place ?? line.hop,
          name: isHops ? createHopButton(line) : createWord(line.text, { class: "jm-key" }),
          number: isHops ? "" : formatCount(line.place),
          meters: [createMeter(line.value / most, appearance.inks.accent)],
          values: [line.value],
        }),
      ),
    );
  }
}

function createLine({ place, name, number, meters, values }) {
  return createElement("li", { data: { place } }, [
    name,
    createElement("span", { class: "jm-number jm-muted", text: number }),
    createElement("span", { class: "jm-meters" }, meters),
    createElement(
      "span",
      { class: "jm-number jm-values" },
      values.map((value) => createElement("span", { text: formatWeight(value) })),
    ),
  ]);
}

function rankWeights(rows, count) {
  const order = Array.from(rows[0].keys());
  const size = (n) => Math.max(...rows.map((row) => row[n]));
  if (order.length <= 5000) return order.sort((a, b) => size(b) - size(a)).slice(0, count);
  // Long rows: one pass that keeps the highest so far.
  const best = [];
  for (const n of order) {
    const value = size(n);
    if (best.length === count && value <= best.at(-1)[1]) continue;
    const at = best.findIndex(([, other]) => value > other);
    best.splice(at < 0 ? best.length : at, 0, [n, value]);
    best.length = Math.min(best.length, count);
  }
  return best.map(([n]) => n);
}

function entropy(row) {
  let sum = 0;
  for (const weight of row) if (weight > 0) sum -= weight * Math.log2(weight);
  return Math.max(0, sum);
}
