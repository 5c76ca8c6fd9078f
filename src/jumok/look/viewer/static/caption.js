// A caption as a line of words, each of which can be pointed at, gone to and pinned.

import { make } from "./dom.js";
import { isRightToLeft } from "./text.js";

export class Caption {
  /** `events`: point(word or null, event), go(word or null) by keys, pin(word). */
  constructor(events, label = "Words of the caption") {
    this.events = events;
    this.buttons = [];
    this.el = make("div", { class: "jm-text jm-caption", role: "group", aria: { label } });
  }

  fill(words) {
    const { point, go, pin } = this.events;
    this.isBackwards = isRightToLeft(words.join(" "));
    this.buttons = words.map((text, n) =>
      make("button", {
        type: "button",
        class: "jm-token",
        dir: "auto",
        text,
        data: { place: n, axis: "rows" },
        onpointerenter: (event) => point(n, event),
        onpointerleave: (event) => point(null, event),
        onfocus: ({ target }) => target.matches(":focus-visible") && go(n),
        onblur: () => this.cursor === n && go(null),
        onclick: () => pin(n),
      }),
    );
    this.el.hidden = !words.length;
    this.el.dir = this.isBackwards ? "rtl" : "ltr";
    this.el.replaceChildren(...this.buttons.flatMap((button, n) => (n ? [" ", button] : [button])));
  }

  /** `tint(element, n)` shades a word. */
  mark({ chosen, pinned, cursor }, tint) {
    this.cursor = cursor;
    this.buttons.forEach((button, n) => {
      button.classList.toggle("jm-is-pinned", n === pinned);
      button.classList.toggle("jm-at", n === chosen && n !== pinned);
      button.setAttribute("aria-pressed", `${n === pinned}`);
      button.tabIndex = n === (cursor ?? pinned ?? 0) ? 0 : -1; // one of them can be tabbed to
      tint(button, n);
    });
  }

  focus(n) {
    this.buttons[n].focus();
  }

  /** A long one scrolls until a word is seen, and nothing around it moves. */
  reveal(n) {
    const button = this.buttons[n],
      { offsetTop: top, clientHeight: tall, scrollTop } = this.el;
    if (!button || this.el.scrollHeight <= tall) return;
    const above = button.offsetTop - top;
    if (above < scrollTop || above + button.offsetHeight > scrollTop + tall) this.el.scrollTop = above - 4;
  }

  /** The word that a key goes to from another (null: from none), or null. */
  next(key, from) {
    const last = this.buttons.length - 1,
      step = { ArrowLeft: -1, ArrowRight: 1 }[key] * (this.isBackwards ? -1 : 1);
    if (last < 0) return null;
    if (key === "Home" || key === "End") return key === "Home" ? 0 : last;
    if (!step) return null;
    return from === null ? (step > 0 ? 0 : last) : Math.max(0, Math.min(last, from + step));
  }
}
