// An error message with a button to try again, which counts down if the server asks to wait.

import { createElement, createWord } from "../../look/viewer/static/dom.js";

export class ErrorMessage {
  constructor(retry) {
    this.message = createElement("p");
    this.button = createElement("button", { class: "pg-button", type: "button", onclick: retry });
    this.el = createElement("div", { class: "pg-error", role: "alert", hidden: true }, [this.message, this.button]);
  }

  show({ message, status, retryAfter }) {
    this.clear();
    const suffix = status >= 400 ? ` (${status})` : "";
    this.message.replaceChildren(createWord(message), createElement("span", { class: "pg-muted", text: suffix }));
    this.el.hidden = false;
    this.button.hidden = !(status === 0 || status >= 500);
    if (retryAfter) this.countDown(Date.now() + 1000 * retryAfter);
    else this.updateButton(0);
  }

  updateButton(seconds) {
    this.button.disabled = seconds > 0;
    this.button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
  }

  countDown(end) {
    const tick = () => {
      const remaining = Math.ceil((end - Date.now()) / 1000);
      this.updateButton(Math.max(0, remaining));
      if (remaining <= 0) clearInterval(this.timer);
    };
    tick();
    this.timer = setInterval(tick, 250);
  }

  clear() {
    clearInterval(this.timer);
    this.el.hidden = true;
  }
}
