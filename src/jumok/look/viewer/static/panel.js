// What a pinned query looks at, in words and numbers.

import { count, told } from "./colours.js";
import { iconButton, make, word } from "./dom.js";
import { shown } from "./text.js";

const LINES = 14;

export class PinPanel {
  constructor({ close }) {
    this.heading = make("h3", { class: "jm-panel-title" });
    this.lead = make("p", { class: "jm-soft" });
    this.list = make("ol", { class: "jm-rank" });
    this.el = make("aside", { class: "jm-panel", hidden: true, aria: { label: "What is pinned" } }, [
      make("div", { class: "jm-bar" }, [this.heading, iconButton("close", "Unpin (Esc)", close)]),
      this.lead,
      this.list,
    ]);
  }

  hide() {
    this.el.hidden = true;
  }

  name(content, pinned) {
    if (content.rows) this.call(content.rows[pinned], pinned);
    else this.call(`Row ${count(pinned)}`, null);
  }

  call(text, place) {
    this.el.hidden = false;
    this.heading.replaceChildren(
      word(shown(text, 60)),
      ...(place === null ? [] : [make("span", { class: "jm-soft jm-number", text: ` ${count(place)}` })]),
    );
  }

  say(content, pinned, text) {
    this.name(content, pinned);
    this.lead.textContent = text;
    this.list.replaceChildren();
  }

  /** `rows`: the weights of the pinned query, of one scene or of two. */
  show({ content, pinned, rows, labels, look }) {
    this.name(content, pinned);
    const best = strongest(rows, LINES),
      most = Math.max(...best.map((n) => Math.max(...rows.map((row) => row[n]))), 1e-12);
    const sum = best.reduce((total, n) => total + rows.at(-1)[n], 0);
    const part = rows.length === 1 && rows[0].length > LINES ? ` · these hold ${(100 * sum).toFixed(1)} %` : "";
    this.lead.textContent = `Entropy ${rows.map((row) => entropy(row).toFixed(2)).join(" → ")} bits${part}`;
    this.list.replaceChildren(
      ...best.map((n) =>
        make("li", { data: { place: n } }, [
          word(content.cols ? shown(content.cols[n], 40) : count(n), { class: "jm-key" }),
          make("span", { class: "jm-number jm-soft", text: content.cols ? count(n) : "" }),
          make(
            "span",
            { class: "jm-meters" },
            rows.map((row, k) =>
              meter(
                row[n] / most,
                rows.length > 1 && k === 0 ? look.inks.soft : look.inks.accent,
                rows.length > 1 ? labels[k] : "",
              ),
            ),
          ),
          make(
            "span",
            { class: "jm-number jm-values" },
            rows.map((row) => make("span", { text: told(row[n]) })),
          ),
        ]),
      ),
    );
  }

  /** A word of a document: `lines` of { text, value, and a hop or a place }, the strongest of which are listed. */
  word({ title, place, lead, heading, lines }, chosen, pick, look) {
    this.call(title, place);
    this.lead.replaceChildren(
      ...lead.map((text) => make("div", { class: "jm-number", text })),
      make("div", { class: "jm-heading jm-over", text: heading }),
    );
    const best = [...lines].sort((a, b) => b.value - a.value).slice(0, Math.max(LINES, lines[0].hop === 0 ? 64 : 0)),
      most = best[0].value || 1;
    this.list.replaceChildren(
      ...best.map((line) =>
        make("li", { data: { place: line.place ?? line.hop } }, [
          line.hop === undefined
            ? word(line.text, { class: "jm-key" })
            : make("button", {
                type: "button",
                class: line.hop === chosen ? "jm-link jm-on" : "jm-link",
                text: line.text,
                onclick: () => pick(line.hop),
              }),
          make("span", { class: "jm-number jm-soft", text: line.place === undefined ? "" : count(line.place) }),
          make("span", { class: "jm-meters" }, [meter(line.value / most, look.inks.accent, "")]),
          make("span", { class: "jm-number jm-values", text: told(line.value) }),
        ]),
      ),
    );
  }
}

function meter(part, colour, label) {
  return make("span", { class: "jm-meter", title: label }, [
    make("span", { css: { width: `${Math.max(0.5, 100 * part)}%`, "background-color": colour } }),
  ]);
}

function strongest(rows, most) {
  const order = Array.from(rows[0].keys());
  const size = (n) => Math.max(...rows.map((row) => row[n]));
  if (order.length <= 5000) return order.sort((a, b) => size(b) - size(a)).slice(0, most);
  // Long rows: one pass, keeping the best so far.
  const best = [];
  for (const n of order) {
    const value = size(n);
    if (best.length === most && value <= best.at(-1)[1]) continue;
    const at = best.findIndex(([, other]) => value > other);
    best.splice(at < 0 ? best.length : at, 0, [n, value]);
    best.length = Math.min(best.length, most);
  }
  return best.map(([n]) => n);
}

function entropy(row) {
  let sum = 0;
  for (const weight of row) if (weight > 0) sum -= weight * Math.log2(weight);
  return Math.max(0, sum);
}
