// The page at the root of a server: its models to choose from, and one of them at work.

import { make, word } from "../../look/static/dom.js";
import { Desk } from "./desk.js";
import { linkTo, readLink } from "./link.js";
import { askJson, keepToken, tokenKept } from "./server.js";
import { TASKS } from "./tasks.js";
import { Trouble } from "./trouble.js";

class Page {
  constructor(el) {
    this.el = el;
    this.models = [];
    this.desk = null;
    this.nav = make("nav", { class: "pg-models", aria: { label: "Models" } });
    this.place = make("div");
    this.tokenBox = make("input", {
      ...{ id: "token", class: "pg-input", type: "password", name: "token", autocomplete: "off" },
    });
    this.tokenNote = make("p", { class: "pg-soft", role: "status" });
    this.tokenForm = make("form", { class: "pg-token", hidden: true, aria: { label: "Token" } }, [
      make("label", { for: "token", text: "This server wants a token" }),
      make("div", { class: "pg-row" }, [
        this.tokenBox,
        make("button", { class: "pg-button pg-main", type: "submit", text: "Use it" }),
      ]),
      this.tokenNote,
      make("p", { class: "pg-soft", text: "It is kept in this tab until you close it, and sent to this server only." }),
    ]);
    this.tokenForm.addEventListener("submit", (event) => {
      event.preventDefault();
      keepToken(this.tokenBox.value.trim());
      this.tokenBox.value = "";
      this.start();
    });
    this.trouble = new Trouble(() => this.start());
    el.replaceChildren(this.nav, this.tokenForm, this.trouble.el, this.place);
    addEventListener("hashchange", () => this.open());
  }

  async start() {
    this.trouble.clear();
    try {
      this.models = await askJson("models");
      this.tokenForm.hidden = true;
      this.nav.replaceChildren(...this.models.map((model) => this.chip(model)));
      this.nav.hidden = false;
      this.open();
    } catch (error) {
      if (!this.refused(error)) this.trouble.show(error);
    }
  }

  /** Ask for the token, if that is what was missing. */
  refused({ status }) {
    if (status !== 401) return false;
    this.tokenNote.textContent = tokenKept() ? "The token that was sent is not the right one." : "";
    this.tokenForm.hidden = false;
    this.tokenBox.focus();
    return true;
  }

  chip(model) {
    const { name, task } = model;
    return make("button", { type: "button", class: "pg-model", data: { name }, onclick: () => this.turnTo(model) }, [
      word(name),
      make("span", { class: "pg-soft", text: TASKS[task]?.does ?? task }),
    ]);
  }

  /** What the address says: a model, and perhaps an input, which is run. */
  open() {
    const link = readLink(),
      model = link?.model ? this.models.find(({ name }) => name === link.model) : this.models[0];
    if (!model) {
      if (!this.desk) this.choose(this.models[0]);
      this.trouble.show({ message: `There is no model ${link.model} on this server.` });
      return;
    }
    this.choose(model);
    if (!link || !this.desk?.all) return;
    this.desk.fill(link.values);
    if (this.desk.isFilled) this.desk.run();
  }

  /** By hand: the address follows, and nothing is run. */
  turnTo(model) {
    this.choose(model);
    this.keep(linkTo(model.name, {}));
  }

  choose(model) {
    this.trouble.clear();
    if (this.desk?.model.name !== model.name) {
      this.desk?.close();
      if (TASKS[model.task])
        this.desk = new Desk(model, { refused: (error) => this.refused(error), ran: (link) => this.keep(link) });
      else {
        const told = `There is no form for the task ${model.task}; the API has it: see openapi.json.`;
        this.desk = { model, el: make("p", { class: "pg-soft", text: told }), close() {} };
      }
      this.place.replaceChildren(this.desk.el);
    }
    for (const chip of this.nav.children) {
      const chosen = chip.dataset.name === model.name;
      chip.setAttribute("aria-current", `${chosen}`);
      if (chosen) chip.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    document.title = `${model.name} · jumok`;
  }

  /** The input in the address, so that going back and handing on work; nothing is run by that. */
  keep(link) {
    if (location.hash !== link) history.pushState(null, "", link);
  }
}

const page = new Page(document.getElementById("page"));
page.start();
