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
    this.el = make("aside", { class: "jm-panel", hidden: true, aria: { label: "The pinned row" } }, [
      make("div", { class: "jm-bar" }, [this.heading, iconButton("close", "Unpin (Esc)", close)]),
      this.lead,
      this.list,
    ]);
  }

  hide() {
    this.el.hidden = true;
  }

  name(content, pinned) {
    this.el.hidden = false;
    const text = content.rows ? shown(content.rows[pinned], 60) : `Row ${count(pinned)}`;
    this.heading.replaceChildren(
      word(text),
      ...(content.rows ? [make("span", { class: "jm-soft jm-number", text: ` ${count(pinned)}` })] : []),
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
