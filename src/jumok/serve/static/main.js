// The web page at the root of a server: the list of its models, and the panel of the selected one.

import { createElement, createWord } from "../../look/viewer/static/dom.js";
import { fetchJson, storedToken, storeToken } from "./api_client.js";
import { ErrorMessage } from "./error_message.js";
import { ModelPanel } from "./model_panel.js";
import { buildLink, readLink } from "./share_link.js";
import { TASKS } from "./tasks.js";

class Page {
  constructor(el) {
    this.el = el;
    this.models = [];
    this.panel = null;
    this.nav = createElement("nav", { class: "pg-models", aria: { label: "Models" } });
    this.container = createElement("div");
    this.tokenInput = createElement("input", {
      ...{ id: "token", class: "pg-input", type: "password", name: "token", autocomplete: "off" },
    });
    this.tokenNote = createElement("p", { class: "pg-muted", role: "status" });
    this.tokenForm = createElement("form", { class: "pg-token", hidden: true, aria: { label: "Token" } }, [
      createElement("label", { for: "token", text: "This server requires a token" }),
      createElement("div", { class: "pg-row" }, [
        this.tokenInput,
        createElement("button", { class: "pg-button pg-primary", type: "submit", text: "Continue" }),
      ]),
      this.tokenNote,
      createElement("p", {
        class: "pg-muted",
        text: "The token is stored until you close this tab. It is sent only to this server.",
      }),
    ]);
    this.tokenForm.addEventListener("submit", (event) => {
      event.preventDefault();
      storeToken(this.tokenInput.value.trim());
      this.tokenInput.value = "";
      this.start();
    });
    this.error = new ErrorMessage(() => this.start());
    el.replaceChildren(this.nav, this.tokenForm, this.error.el, this.container);
    addEventListener("hashchange", () => this.openLink());
  }

  async start() {
    this.error.clear();
    try {
      this.models = await fetchJson("models");
      this.tokenForm.hidden = true;
      this.nav.replaceChildren(...this.models.map((model) => this.createModelButton(model)));
      this.nav.hidden = false;
      this.openLink();
    } catch (error) {
      if (!this.requestToken(error)) this.error.show(error);
    }
  }

  /** Ask for the token, if the error is that it is missing or wrong. */
  requestToken({ status }) {
    if (status !== 401) return false;
    this.tokenNote.textContent = storedToken() ? "The token is wrong." : "";
    this.tokenForm.hidden = false;
    this.tokenInput.focus();
    return true;
  }

  createModelButton(model) {
    const { name, task } = model;
    const onclick = () => this.switchTo(model);
    return createElement("button", { type: "button", class: "pg-model", data: { name }, onclick }, [
      createWord(name),
      createElement("span", { class: "pg-muted", text: TASKS[task]?.description ?? task }),
    ]);
  }

  /** Open the model of the current URL. If the URL has an input, run it. */
  openLink() {
    const link = readLink(),
      model = link?.model ? this.models.find(({ name }) => name === link.model) : this.models[0];
    if (!model) {
      if (!this.panel) this.select(this.models[0]);
      this.error.show({ message: `There is no model ${link.model} on this server.` });
      return;
    }
    this.select(model);
    if (!link || !this.panel?.allFields) return;
    this.panel.fill(link.values);
    if (this.panel.isComplete) this.panel.run();
  }

  /** Select a model and update the URL. Nothing is run. */
  switchTo(model) {
    this.select(model);
    this.updateUrl(buildLink(model.name, {}));
  }

  select(model) {
    this.error.clear();
    if (this.panel?.model.name !== model.name) {
      this.panel?.close();
      if (TASKS[model.task])
        this.panel = new ModelPanel(model, {
          onError: (error) => this.requestToken(error),
          onRun: (link) => this.updateUrl(link),
        });
      else {
        const text = `There is no form for the task ${model.task}. Use the API: see openapi.json.`;
        this.panel = { model, el: createElement("p", { class: "pg-muted", text }), close() {} };
      }
      this.container.replaceChildren(this.panel.el);
    }
    for (const button of this.nav.children) {
      const isSelected = button.dataset.name === model.name;
      button.setAttribute("aria-current", `${isSelected}`);
      if (isSelected) button.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    document.title = `${model.name} · jumok`;
  }

  /** Put the input into the URL, so that it can be shared and the back button works. Nothing is run. */
  updateUrl(link) {
    if (location.hash !== link) history.pushState(null, "", link);
  }
}

const page = new Page(document.getElementById("page"));
page.start();
