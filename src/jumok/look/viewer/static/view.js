// What the viewer needs to know about a view, and the methods that it calls. To add a view, extend this class in a file
// of its own and list it in views.js.

import { formatCount } from "./colours.js";

export class View {
  static title = ""; // of its tab
  static keys = [
    ["← →", "previous, next head"],
    ["↑ ↓", "previous, next layer"],
    ["Esc", "unpin the query"],
  ]; // its keyboard shortcuts, and their functions
  static hint = "Click a query to pin it."; // how to use it with a pointer
  static medium = null; // what it shows weights on (see viewer/medium.py), or null: any layer
  static hasLayers = true; // whether it shows the weights of one layer and head
  static chip = "head"; // what the numbered buttons select
  static pin = "pinned"; // the state that is pinned: a query
  static hasPanel = false; // whether the panel lists the weights of what is pinned
  static hasScale = true; // whether the scale of its colours can be set …
  static hasRange = false; // whether this scale can be that of all maps
  static hasColours = true; // … and these colours
  static hasDigits = false; // whether it can show weights in cells

  /** Whether it can show a layer of an item of the manifest. */
  static canShow(item, layer) {
    return this.medium === null || layer.media.includes(this.medium);
  }

  /** Describe a layer for the subtitle, in several parts. */
  static describe(item, { kind, shape }) {
    return [`${kind} attention`, `${shape.map(formatCount).join(" × ")} ${kind === "channel" ? "channels" : "tokens"}`];
  }

  /** The values of the numbered buttons; null is their mean. */
  static listChips(item, { heads, has_mean: hasMean }) {
    return hasMean ? [...heads, null] : heads;
  }

  constructor({ store, appearance, events }) {
    Object.assign(this, { store, appearance, events });
    this.pinned = null; // the pinned query, which the viewer sets
  }

  /** Show content (see `content` in viewer.js). May return a promise. */
  show() {}

  /** Paint again, after a change of the appearance. */
  refresh() {}

  /** Load again what failed to load. May return a promise. */
  retry() {
    this.refresh();
  }

  /** The content of the legend: { curve, list, title }, { text }, or null. */
  legend() {
    return null;
  }

  /** Handle a key; returns false if it has no function here. `button`: the button that has the focus, or null. */
  handleKey() {
    return false;
  }

  /** Another view is shown. */
  deactivate() {}

  /** The viewer is removed. */
  close() {}
}
