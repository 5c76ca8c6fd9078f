// The map view: one map, or two side by side that move together.

import { formatCount, formatWeight } from "./colours.js";
import { ARROWS, clamp, createElement, createWord, iconButton } from "./dom.js";
import { MapText } from "./map_text.js";
import { MapView } from "./map_view.js";
import { buildRequest, TILE_SIZE } from "./tiles.js";
import { describeOutput, truncateText } from "./token_text.js";
import { View } from "./view.js";

const REST_MILLISECONDS = 120; // after which the exact weight under a resting pointer is fetched

export class MapsView extends View {
  static title = "Map";
  static keys = [
    ["← →", "previous, next head"],
    ["↑ ↓", "previous, next layer"],
    ["Shift + arrows", "move by cell"],
    ["Enter, Esc", "pin, unpin the row"],
    ["+ − 0", "zoom in, zoom out, fit to view"],
    ["n", "show weights in cells"],
    ["x", "show the text beside a long map"],
  ];
  static hint = "Drag to pan, scroll or pinch to zoom, click to pin a row.";
  static hasPanel = true;
  static hasDigits = true;
  static hasRange = true;

  /** `events`: pin(row); tooltip(lines or null, x, y); announce(text); changed(), when the legend changes. */
  constructor({ store, appearance, events }) {
    super({ store, appearance, events });
    this.maps = [0, 1].map(
      (n) =>
        new MapView({
          store,
          appearance,
          events: {
            pin: events.pin,
            hover: (place) => this.handleHover(this.maps[n], place),
            moved: (view) => this.handleMove(n, view),
          },
        }),
    );
    this.captions = this.maps.map(() => createElement("figcaption", { class: "jm-caption-line" }));
    this.figures = this.maps.map((map, n) =>
      createElement("figure", { class: "jm-figure" }, [this.captions[n], map.el]),
    );
    this.text = new MapText({
      appearance,
      events: {
        ...events,
        pooledRow: (row) => this.maps[0].fetchPooledRow(row),
        reveal: (row, col) => this.maps[0].approach(row, col),
      },
    });
    this.textButton = iconButton("text", "Show the text (x)", () => this.toggleText());
    this.showsText = true;
    this.box = createElement("div", { class: "jm-maps" }, [
      ...this.figures,
      createElement("div", { class: "jm-zooms" }, [
        iconButton("plus", "Zoom in (+)", () => this.zoom(2)),
        iconButton("minus", "Zoom out (−)", () => this.zoom(0.5)),
        iconButton("fit", "Fit to view (0)", () => this.fit()),
        this.textButton,
      ]),
    ]);
    this.el = createElement("div", { class: "jm-map-layout" }, [this.box, this.text.el]);
  }

  show({ compared }) {
    const [first, second] = compared;
    for (const map of this.maps) map.pinned = this.pinned;
    this.figures[1].hidden = !second;
    this.box.classList.toggle("jm-two", Boolean(second));
    this.captions.forEach((caption, n) => {
      caption.hidden = !second;
      caption.textContent = second ? compared[n].item.label : "";
    });
    this.areLinked = Boolean(second) && `${first.shape}` === `${second.shape}`;
    this.maps[0].show(first);
    if (second) this.maps[1].show(second);
    else this.maps[1].abortRequests();
    this.updateText();
  }

  updateText() {
    const { content } = this.maps[0],
      canShow = this.figures[1].hidden && content.baseline === null && MapText.isUseful(content);
    this.textButton.hidden = !canShow;
    this.textButton.setAttribute("aria-pressed", `${this.showsText}`);
    this.el.classList.toggle("jm-with-text", canShow && this.showsText);
    if (canShow && this.showsText) this.text.show(content, this.pinned);
    else this.text.hide();
  }

  toggleText() {
    this.showsText = !this.showsText;
    this.updateText();
  }

  refresh() {
    for (const map of this.maps) map.refresh();
    this.text.refresh();
  }

  legend() {
    const [map] = this.maps,
      { appearance } = this,
      isDifference = (map.content?.baseline ?? null) !== null;
    this.zoomLevel = map.size ? map.zoomLevel() : null;
    if (!isDifference) return appearance.mapLegend(map.size ? map.grid.cols.cell(this.zoomLevel) : 1);
    const { divergingCurve: curve, divergingList: list } = appearance;
    return { curve, list, title: `difference in weight${appearance.weightNote}`, diverging: true };
  }

  zoom(factor) {
    for (const map of this.maps) map.zoomSmoothly(factor);
  }

  fit() {
    for (const map of this.maps) map.fit();
  }

  handleMove(n, view) {
    if (this.areLinked) this.maps[1 - n].follow(view);
    if (n === 0 && this.maps[0].zoomLevel() !== this.zoomLevel) this.events.changed();
  }

  handleHover(map, place) {
    clearTimeout(this.exactTimer);
    if (map === this.maps[0]) this.text.follow(place);
    const { rounding } = map.content, // null, or that of a saved file: its numbers have two digits
      cell = place && describeCell(place, map.content);
    if (!cell) return this.events.tooltip(null);
    const weight = createElement("div", { class: "jm-weight", text: cell.weight });
    const lines = [
      createElement("div", { class: "jm-pair" }, [
        createWord(cell.from),
        createElement("span", { class: "jm-arrow", text: " → " }),
        createWord(cell.to),
      ]),
      weight,
      cell.single ? null : createElement("div", { class: "jm-muted", text: describeMean(place.cell, map.content) }),
      cell.output && createElement("div", { class: "jm-muted", text: cell.output }),
    ];
    const { left, top } = map.el.getBoundingClientRect();
    this.events.tooltip(lines, left + place.point.x, top + place.point.y);
    if (!cell.single || map.content.baseline !== null || rounding) return undefined;
    // Tiles are rounded to three digits: fetch the exact weight once the pointer rests.
    const { row, col } = place,
      request = buildRequest(map.content, "weights", [row, row + 1], [col, col + 1]);
    this.exactTimer = setTimeout(async () => {
      const answer = await this.store.fetchOne(request).catch(() => null);
      if (answer) weight.textContent = formatWeight(answer.values[0], 5);
    }, REST_MILLISECONDS);
    return undefined;
  }

  /** Save the first map as an image. */
  save() {
    return this.maps[0].save(3, 46, this.events.drawLegend);
  }

  handleKey(key, shiftKey, button) {
    const by = ARROWS[key],
      { hover } = this.maps[0];
    if (by && shiftKey) this.moveByCell(...by);
    else if (key === "Enter" && hover && !button) this.events.pin(hover.row);
    else if (key === "+" || key === "=") this.zoom(2);
    else if (key === "-") this.zoom(0.5);
    else if (key === "0") this.fit();
    else if (key === "x" && !this.textButton.hidden) this.toggleText();
    else return false;
    return true;
  }

  // Move from cell to cell, and announce each.
  moveByCell(down, right) {
    const [map] = this.maps,
      [rows, cols] = map.content.shape,
      from = map.hover ?? { row: -down, col: -right },
      row = clamp((from.row ?? 0) + down, 0, rows - 1),
      col = clamp((from.col ?? 0) + right, 0, cols - 1);
    map.hover = { row, col };
    map.reveal(row, col);
    const cell = describeCell({ row, col, cell: map.cellAt(row, col) }, map.content);
    const output = cell?.output ? `, ${cell.output}` : "";
    if (cell) this.events.announce(`${cell.from} to ${cell.to}: ${cell.weight}${output}`);
  }

  deactivate() {
    for (const map of this.maps) map.abortRequests();
  }

  close() {
    clearTimeout(this.exactTimer);
    for (const map of this.maps) map.close();
    this.text.close();
  }
}

// What the weight of a cell of several tokens is.
function describeMean({ rows: [first, end] }, { maxRows, isOverview }) {
  if (isOverview) return "mean share of a row’s weight, from an overview of 64 × 64 cells";
  const sampled = maxRows === null ? Infinity : Math.max(1, Math.floor(maxRows / TILE_SIZE)),
    sample = end - first > sampled ? `, of ${sampled} of ${formatCount(end - first)} queries` : "";
  return `mean share of a row’s weight${sample}`;
}

// The query, the key and the weight of a hovered cell; null while it is loading.
function describeCell({ row, col, cell }, content) {
  if (!cell) return null;
  const { rows, cols, rounding, producedRows } = content;
  const name = (texts, n) => (texts ? truncateText(texts[n], 40) : formatCount(n));
  if (cell.single)
    return {
      from: name(rows, row),
      to: name(cols, col),
      weight: formatWeight(cell.weight, rounding ? 2 : 4),
      output: producedRows ? null : describeOutput(content, row),
      single: true,
    };
  const range = ([first, last]) =>
    last - first === 1 ? formatCount(first) : `${formatCount(first)} to ${formatCount(last - 1)}`;
  return {
    from: `rows ${range(cell.rows)}`,
    to: `columns ${range(cell.cols)}`,
    weight: formatWeight(cell.weight),
    output: null,
    single: false,
  };
}
