// One model at work on the page: its form, its answer, and where it looked.

import { make, word } from "../../look/static/dom.js";
import { remote } from "../../look/static/remote.js";
import { render } from "../../look/static/viewer.js";
import { linkTo } from "./link.js";
import { askJson, askStream } from "./server.js";
import { TASKS } from "./tasks.js";
import { Trouble } from "./trouble.js";

const LONG_LINK = 2000; // letters; beyond it some programs cut an address off

export class Desk {
  /** `model` as /models tells it; `events`: refused(error) asks for the token, ran(link) keeps the address. */
  constructor(model, events) {
    Object.assign(this, { model, events });
    this.task = TASKS[model.task];
    const say = (text) => this.say(text);
    this.fields = this.task.fields(model.about, { changed: () => this.run(), say });
    this.options = this.task.options(model.about);
    this.turn = null; // what ends the request that is under way
    this.build();
  }

  build() {
    const { task, fields, options } = this,
      { examples = [], maps = true } = this.model.about;
    this.button = make("button", { class: "pg-button pg-main", type: "submit", text: task.verb });
    this.stopButton = make("button", { class: "pg-button", type: "button", text: "Stop", hidden: true });
    this.stopButton.addEventListener("click", () => this.stop("Stopped."));
    this.wantsLook = make("input", { type: "checkbox", name: "look" });
    this.wantsLook.checked = maps;
    this.wantsLook.disabled = !maps;
    this.shareButton = make("button", { class: "pg-button", type: "button", text: "Copy link" });
    this.shareButton.addEventListener("click", () => this.share());
    this.shared = make("div", { class: "pg-soft", role: "status" });
    this.form = make("form", { class: "pg-ask", aria: { label: task.verb } }, [
      ...fields.map((field) => field.el),
      make("div", { class: "pg-row pg-buttons" }, [
        this.button,
        this.stopButton,
        this.shareButton,
        make("label", { class: "pg-check" }, [
          this.wantsLook,
          make("span", { text: maps ? "show where it looked" : "it has no attention that could be shown" }),
        ]),
      ]),
      this.shared,
      options.length ? this.more(options) : null,
      examples.length ? this.examples(examples) : null,
    ]);
    this.form.noValidate = true;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      }
    });
    this.answer = make("div", { class: "pg-answer" });
    this.waiting = make("p", { class: "pg-soft pg-hint", text: "The answer will stand here." });
    this.trouble = new Trouble(() => this.run());
    this.live = make("div", { class: "pg-unseen", role: "status", aria: { live: "polite" } });
    this.output = make("section", { class: "pg-out", aria: { label: "Answer" } }, [
      this.trouble.el,
      this.waiting,
      this.answer,
      this.live,
    ]);
    this.lookTitle = make("h2", { text: "Where the model looked" });
    this.lookNote = make("p", { class: "pg-soft", role: "status" });
    this.lookTrouble = new Trouble(() => this.look());
    this.place = make("div", { id: "viewer" });
    this.looked = make("section", { class: "pg-looked", hidden: true, aria: { label: "Where the model looked" } }, [
      make("div", { class: "pg-row pg-between" }, [this.lookTitle, this.lookNote]),
      this.lookTrouble.el,
      this.place,
    ]);
    this.el = make("div", { class: "pg-desk" }, [this.form, this.output, this.looked]);
  }

  more(options) {
    const boxes = options.map((field) => field.el);
    return make("details", { class: "pg-options" }, [
      make("summary", { text: "Options" }),
      make("div", { class: "pg-row" }, boxes),
    ]);
  }

  examples(all) {
    const button = (example, n) =>
      make(
        "button",
        {
          type: "button",
          class: example.image ? "pg-example pg-thumb" : "pg-example",
          aria: example.image ? { label: `Example ${n + 1}` } : {},
          onclick: () => (this.fill(example), this.run()),
        },
        [
          example.image
            ? make("img", { src: `data:image/jpeg;base64,${example.image}`, alt: "", width: "64", height: "64" })
            : word(example.text),
        ],
      );
    return make("div", { class: "pg-examples", role: "group", aria: { label: "Examples" } }, [
      make("span", { class: "pg-soft", text: "Try" }),
      ...all.map(button),
    ]);
  }

  // ---------------------------------------------------------------- what is asked

  get all() {
    return [...this.fields, ...this.options];
  }

  get asked() {
    const given = this.all.map(({ name, value }) => [name, value]).filter(([, value]) => value !== undefined);
    return { model: this.model.name, ...Object.fromEntries(given) };
  }

  fill(values) {
    for (const field of this.all) field.fill(values[field.name]);
  }

  /** Whether all that is needed is there. */
  get isFilled() {
    return this.fields.every((field) => field.optional || field.value !== undefined);
  }

  /** Model and input as an address; a picture has no room in one. */
  get link() {
    const { model } = this.asked,
      known = this.all.filter((field) => field.isShared !== false).map(({ name, value }) => [name, value]);
    return linkTo(model, Object.fromEntries(known));
  }

  async share() {
    this.events.ran(this.link);
    const left = this.all.find((field) => field.isShared === false && field.value !== undefined),
      words = ["Link copied.", ...(left ? [`It is without the ${left.what}: that cannot be in a link.`] : [])];
    if (this.link.length > LONG_LINK) words.push("It is long, and some programs cut long links off.");
    try {
      await navigator.clipboard.writeText(location.href);
      this.shared.replaceChildren(words.join(" "));
    } catch {
      // Where a page may not write to the clipboard, one can still do it by hand.
      const box = make("input", { class: "pg-input", readonly: true, aria: { label: "Link" } });
      box.value = location.href;
      this.shared.replaceChildren(["Copy this link.", ...words.slice(1)].join(" "), box);
      box.select();
    }
  }

  // ---------------------------------------------------------------- what is answered

  close() {
    this.stop();
    for (const field of this.all) field.close?.();
  }

  stop(told = "") {
    this.turn?.abort();
    this.turn = null;
    this.trouble.clear();
    this.lookTrouble.clear();
    this.closeViewer();
    this.busy(false);
    if (told) this.say(told);
  }

  busy(is) {
    this.stopButton.hidden = !is;
    this.output.setAttribute("aria-busy", `${is}`);
    this.output.classList.toggle("pg-busy", is);
  }

  say(text) {
    this.live.textContent = text;
  }

  async run() {
    for (const field of this.all) await field.ready; // a file may still be read
    if (this.all.some((field) => field.missing())) return;
    this.stop();
    const turn = new AbortController(),
      { asked, task } = this;
    this.turn = turn;
    this.events.ran(this.link);
    this.shared.replaceChildren();
    this.waiting.hidden = true;
    this.clear();
    this.looked.hidden = true;
    this.busy(true);
    this.say("Working");
    this.output.scrollIntoView({ block: "nearest", behavior: "smooth" }); // on a phone it is below the form
    try {
      const answer = await this.askedOf(asked, turn.signal);
      if (turn.signal.aborted) return;
      this.show(task.show(answer, asked, this.model.about, this.answer));
      this.say(task.said(answer));
      this.busy(false);
      if (this.wantsLook.checked) await this.look(turn);
    } catch (error) {
      if (turn.signal.aborted) return;
      this.busy(false);
      this.say("");
      this.clear();
      this.trouble.show(error);
      this.events.refused(error);
    }
  }

  /** What is there already stays where it is: a sound goes on. */
  show(parts) {
    const all = parts.filter((part) => part !== null),
      { answer } = this;
    for (const old of [...answer.children]) if (!all.includes(old)) old.remove();
    all.forEach((part, n) => {
      if (answer.children[n] !== part) answer.insertBefore(part, answer.children[n] ?? null);
    });
  }

  clear() {
    for (const { src } of this.answer.querySelectorAll("audio")) URL.revokeObjectURL(src);
    this.answer.replaceChildren();
  }

  askedOf(asked, signal) {
    const { task } = this.model,
      { heard } = this.task;
    if (!heard) return askJson(task, asked, signal);
    return askStream(`${task}/stream`, asked, signal, (event, data) => {
      if (!signal.aborted) heard(this.answer, data);
    });
  }

  // ---------------------------------------------------------------- where it looked

  async look(turn = this.turn) {
    this.lookTrouble.clear();
    this.looked.hidden = false;
    this.lookNote.textContent = "Looking again …";
    try {
      const { look, seconds, prediction } = await askJson(`attend/${this.model.task}`, this.asked, turn.signal);
      const host = await remote(look.replace(/\/$/, ""));
      if (turn.signal.aborted) return;
      this.closeViewer();
      this.closeViewer = render({ model: host, el: this.place });
      const minutes = Math.round(seconds / 60),
        several = prediction.parts?.length > 1;
      this.lookNote.replaceChildren(
        several ? `This is the first of ${prediction.parts.length} parts. ` : "",
        make("a", { href: look, target: "_blank", rel: "noopener", text: "Open it alone" }),
        minutes ? ` (kept ${minutes} minutes)` : "",
      );
    } catch (error) {
      if (turn.signal.aborted) return;
      this.lookNote.textContent = "";
      this.lookTrouble.show(error);
    }
  }

  closeViewer = () => {};
}
