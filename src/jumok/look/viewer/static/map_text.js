// The text beside a map whose words do not fit on its axes: the queries, and the keys below them.

import { createCurve, formatCount, formatWeight } from "./colours.js";
import { createElement, createWord } from "./dom.js";
import { Minimap } from "./minimap.js";
import { TokenFlow } from "./token_flow.js";
import { describeOutput, truncateText } from "./token_text.js";

const MIN_TOKENS = 200; // of a map that has its text beside it
const HOVER_MILLISECONDS = 60; // after which the weights of the query under a resting pointer are fetched

export class MapText {
  /**
   * `events`: row(n) and pooledRow(n) return promises of the weights of a query, exact or of its cells; pin(row);
   * reveal(row or null, column or null); tooltip(lines or null, x, y).
   */
  constructor({ appearance, events }) {
    Object.assign(this, { appearance, events });
    this.lead = createElement("p", { class: "jm-muted jm-map-text-lead" });
    this.queries = this.createPane("Queries", {
      point: (row) => this.pointAt(row),
      select: (row) => {
        events.reveal(row, null);
        events.pin(row);
      },
    });
    this.keys = this.createPane("Keys", {
      point: (col, event) => this.describeKey(col, event),
      select: (col) => events.reveal(null, col),
    });
    this.el = createElement("section", { class: "jm-map-text", hidden: true, aria: { label: "Text of the map" } }, [
      this.queries.el,
      this.lead,
      this.keys.el,
    ]);
    this.resizeObserver = new ResizeObserver(() => this.paintMinimaps());
    this.resizeObserver.observe(this.el);
    this.shown = null; // the query whose weights are shown
  }

  createPane(title, events) {
    const pane = {};
    pane.flow = new TokenFlow({
      appearance: this.appearance,
      label: title,
      events: { ...events, scrolled: () => this.paintMinimap(pane) },
    });
    pane.minimap = new Minimap({ appearance: this.appearance, seek: (part) => pane.flow.seek(part) });
    pane.el = createElement("div", { class: "jm-map-text-pane" }, [
      createElement("h3", { class: "jm-heading", text: title }),
      createElement("div", { class: "jm-map-text-body" }, [pane.flow.el, pane.minimap.el]),
    ]);
    return pane;
  }

  /** Whether the words of a map need a place beside it. */
  static isUseful({ rows, cols, shape }) {
    return rows !== null && cols !== null && Math.max(...shape) > MIN_TOKENS;
  }

  show(content, pinned) {
    const isSame = this.content && ["data", "layer", "head", "withoutSinks"].every((name) => this.content[name] === content[name]);
    this.content = content;
    this.el.hidden = false;
    this.queries.flow.show(content.producedRows ?? content.rows, content.generated.rows, content.spans.rows);
    this.keys.flow.show(content.cols, content.generated.cols, content.spans.cols);
    this.mark("pinned", pinned === null ? null : [pinned, pinned + 1], null);
    if (!isSame || this.pinned !== pinned) {
      this.pinned = pinned;
      this.shown = null;
      this.showRow(pinned);
      if (pinned !== null) this.queries.flow.reveal(pinned);
    }
  }

  hide() {
    this.el.hidden = true;
    clearTimeout(this.timer);
  }

  mark(name, rows, cols) {
    this.queries.flow.mark(name, rows);
    this.keys.flow.mark(name, cols);
  }

  /** Show the tokens of a cell of the map, or those of a row or column; null: none. */
  follow(place) {
    if (this.el.hidden) return;
    const cell = place?.cell,
      range = (name) => cell?.[`${name}s`] ?? (place?.[name] === null || !place ? null : [place[name], place[name] + 1]),
      [rows, cols] = [range("row"), range("col")];
    this.mark("pointed", rows, cols);
    if (rows) this.queries.flow.reveal(rows[0]);
    if (cols) this.keys.flow.reveal(cols[0]);
  }

  // Show what the query under the pointer attends to, unless another one is pinned.
  pointAt(row) {
    clearTimeout(this.timer);
    if (this.pinned !== null) return;
    this.queries.flow.mark("pointed", row === null ? null : [row, row + 1]);
    if (row !== null) this.timer = setTimeout(() => this.showRow(row), HOVER_MILLISECONDS);
  }

  async showRow(row) {
    const { content } = this;
    this.shown = row;
    if (row === null) {
      this.shade(null);
      return void this.lead.replaceChildren("Point at a query to see what it attended to. Click it to pin it.");
    }
    const exact = await this.events.row(row).catch(() => null),
      answer = exact ?? (await this.events.pooledRow(row).catch(() => null));
    if (this.content !== content || this.shown !== row) return undefined;
    this.shade(answer?.values ?? null);
    if (!answer) return void this.lead.replaceChildren("The weights of this query failed to load.");
    const query = createWord(truncateText(content.rows[row], 24), { class: "jm-pinned" }),
      output = content.producedRows ? null : describeOutput(content, row),
      best = findLargest(answer.values, exact ? 2 : 1);
    if (exact) this.lead.replaceChildren(query, ` ${formatCount(row)} attended most to `, ...this.nameKeys(best));
    else this.lead.replaceChildren(query, ` ${formatCount(row)}: its part of the map attended most to keys ${describeKeyCell(answer, best[0])}`);
    if (output) this.lead.append(` · ${output}`);
    // The first token often gets much weight from all queries.
    return this.keys.flow.reveal(best[0] === 0 ? best.at(-1) : best[0]);
  }

  nameKeys(keys) {
    const name = (n) => createWord(truncateText(this.content.cols[n], 24), { class: "jm-selected" });
    return keys.flatMap((n, k) => [
      k ? ", " : "",
      name(n),
      ` ${formatCount(n)} (${formatWeight(this.values[n], 2)})`,
    ]);
  }

  shade(values) {
    this.values = values;
    const most = values ? values.reduce((top, value) => Math.max(top, value), 0) : 1;
    // From the uniform weight on: a long text without high weights stays pale.
    this.curve = values ? createCurve("log", 1 / values.length, Math.max(8 / values.length, most)) : null;
    this.version = (this.version ?? 0) + 1;
    this.keys.flow.shade(values, this.curve);
    this.paintMinimaps();
  }

  describeKey(col, { clientX, clientY }) {
    if (col === null || !this.values) return this.events.tooltip(null);
    return this.events.tooltip(
      [
        createElement("div", { class: "jm-pair" }, [
          createWord(truncateText(this.content.cols[col], 60)),
          createElement("span", { class: "jm-muted", text: `  ${formatCount(col)}` }),
        ]),
        createElement("div", { class: "jm-weight", text: formatWeight(this.values[col]) }),
      ],
      clientX,
      clientY,
    );
  }

  paintMinimaps() {
    for (const pane of [this.queries, this.keys]) this.paintMinimap(pane);
  }

  paintMinimap(pane) {
    if (!pane || this.el.hidden || pane.waiting) return;
    pane.waiting = requestAnimationFrame(() => {
      pane.waiting = 0;
      const height = pane.flow.el.clientHeight,
        length = pane.flow.tokens?.length ?? 0,
        hasValues = pane === this.keys && this.values;
      if (this.el.hidden || height < 20 || !length) return;
      pane.minimap.paint({
        weights: hasValues ? this.values : (pane.blank = pane.blank?.length === length ? pane.blank : new Float32Array(length)),
        curve: this.curve ?? createCurve("linear", 0, 1),
        version: `${this.version} ${this.appearance.version}`,
        range: pane.flow.visibleRange(),
        pinnedWord: pane === this.queries ? (this.pinned ?? null) : null,
        height,
      });
    });
  }

  refresh() {
    for (const { flow } of [this.queries, this.keys]) flow.refresh();
    this.paintMinimaps();
  }

  close() {
    clearTimeout(this.timer);
    this.resizeObserver.disconnect();
    for (const { flow, waiting } of [this.queries, this.keys]) {
      flow.close();
      cancelAnimationFrame(waiting);
    }
  }
}

// The keys of a cell, which begins at `first`, and their weight.
function describeKeyCell({ values, width }, first) {
  const last = Math.min(first + width, values.length) - 1;
  return `${formatCount(first)} to ${formatCount(last)} (${formatWeight(values[first] * width, 2)})`;
}

// The positions of the largest values, largest first.
function findLargest(values, count) {
  const best = [];
  values.forEach((value, n) => {
    if (best.length === count && value <= values[best.at(-1)]) return;
    best.splice(best.filter((k) => values[k] >= value).length, 0, n);
    best.length = Math.min(best.length, count);
  });
  return best;
}
