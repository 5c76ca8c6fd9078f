// What went wrong, as the server told it; and when it may be tried again, the seconds until then.

import { make, word } from "../../look/static/dom.js";

export class Trouble {
  constructor(again) {
    this.words = make("p");
    this.button = make("button", { class: "pg-button", type: "button", onclick: again });
    this.el = make("div", { class: "pg-trouble", role: "alert", hidden: true }, [this.words, this.button]);
  }

  show({ message, status, retry }) {
    this.clear();
    const number = status >= 400 ? ` (${status})` : "";
    this.words.replaceChildren(word(message), make("span", { class: "pg-soft", text: number }));
    this.el.hidden = false;
    this.button.hidden = !(status === 0 || status >= 500);
    if (retry) this.countDown(Date.now() + 1000 * retry);
    else this.offer(0);
  }

  offer(seconds) {
    this.button.disabled = seconds > 0;
    this.button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
  }

  countDown(end) {
    const tick = () => {
      const left = Math.ceil((end - Date.now()) / 1000);
      this.offer(Math.max(0, left));
      if (left <= 0) clearInterval(this.clock);
    };
    tick();
    this.clock = setInterval(tick, 250);
  }

  clear() {
    clearInterval(this.clock);
    this.el.hidden = true;
  }
}
