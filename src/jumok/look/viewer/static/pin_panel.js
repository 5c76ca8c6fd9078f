// The highest weights of a pinned query, as a list.

import { formatCount, formatWeight } from "./colours.js";
import { iconButton, createElement, createWord } from "./dom.js";
import { truncateText } from "./token_text.js";

const MAX_LINES = 14;

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
    this.heading.replaceChildren(
      createWord(truncateText(text, 60)),
      ...(place === null ? [] : [createElement("span", { class: "jm-muted jm-number", text: ` ${formatCount(place)}` })]),
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
      most = Math.max(...best.map((n) => Math.max(...rows.map((row) => row[n]))), 1e-12);
    const sum = best.reduce((total, n) => total + rows.at(-1)[n], 0);
    const part = rows.length === 1 && rows[0].length > MAX_LINES ? ` · these have ${(100 * sum).toFixed(1)} %` : "";
    this.lead.textContent = `Entropy ${rows.map((row) => entropy(row).toFixed(2)).join(" → ")} bits${part}`;
    this.list.replaceChildren(
      ...best.map((n) =>
        createElement("li", { data: { place: n } }, [
          createWord(content.cols ? truncateText(content.cols[n], 40) : formatCount(n), { class: "jm-key" }),
          createElement("span", { class: "jm-number jm-muted", text: content.cols ? formatCount(n) : "" }),
          createElement(
            "span",
            { class: "jm-meters" },
            rows.map((row, k) =>
              createMeter(
                row[n] / most,
                rows.length > 1 && k === 0 ? appearance.inks.muted : appearance.inks.accent,
                rows.length > 1 ? labels[k] : "",
              ),
            ),
          ),
          createElement(
            "span",
            { class: "jm-number jm-values" },
            rows.map((row) => createElement("span", { text: formatWeight(row[n]) })),
          ),
        ]),
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
    const best = [...lines].sort((a, b) => b.value - a.value).slice(0, Math.max(MAX_LINES, lines[0].hop === 0 ? 64 : 0)),
      most = best[0].value || 1;
    this.list.replaceChildren(
      ...best.map((line) =>
        createElement("li", { data: { place: line.place ?? line.hop } }, [
          line.hop === undefined
            ? createWord(line.text, { class: "jm-key" })
            : createElement("button", {
                type: "button",
                class: line.hop === selectedHop ? "jm-link jm-on" : "jm-link",
                text: line.text,
                onclick: () => selectHop(line.hop),
              }),
          createElement("span", { class: "jm-number jm-muted", text: line.place === undefined ? "" : formatCount(line.place) }),
          createElement("span", { class: "jm-meters" }, [createMeter(line.value / most, appearance.inks.accent, "")]),
          createElement("span", { class: "jm-number jm-values", text: formatWeight(line.value) }),
        ]),
      ),
    );
  }
}

function createMeter(part, colour, label) {
  return createElement("span", { class: "jm-meter", title: label }, [
    createElement("span", { css: { width: `${Math.max(0.5, 100 * part)}%`, "background-color": colour } }),
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
