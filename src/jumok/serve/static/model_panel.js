// The panel of one model: its form, its response, and its attention.

import { createElement, createWord } from "../../look/viewer/static/dom.js";
import { remote } from "../../look/viewer/static/remote.js";
import { render } from "../../look/viewer/static/viewer.js";
import { fetchJson, fetchStream } from "./api_client.js";
import { ErrorMessage } from "./error_message.js";
import { buildLink } from "./share_link.js";
import { TASKS } from "./tasks.js";

const LONG_LINK_CHARS = 2000; // some programs truncate longer links

export class ModelPanel {
  /** `model` is an item of /models. `events`: onError(error), and onRun(link) when a request is sent or shared. */
  constructor(model, events) {
    Object.assign(this, { model, events });
    this.task = TASKS[model.task];
    this.fields = this.task.fields(model.metadata, { onChange: () => this.run() });
    this.options = this.task.options(model.metadata);
    this.controller = null; // aborts the running request
    this.build();
  }

  build() {
    const { task, fields, options } = this,
      { examples = [], has_attention_maps: hasAttention = true } = this.model.metadata;
    this.button = createElement("button", { class: "pg-button pg-primary", type: "submit", text: task.action });
    this.stopButton = createElement("button", { class: "pg-button", type: "button", text: "Stop", hidden: true });
    this.stopButton.addEventListener("click", () => this.stop("Stopped."));
    this.attentionCheckbox = createElement("input", { type: "checkbox", name: "attention" });
    this.attentionCheckbox.checked = hasAttention;
    this.attentionCheckbox.disabled = !hasAttention;
    this.shareButton = createElement("button", { class: "pg-button", type: "button", text: "Copy link" });
    this.shareButton.addEventListener("click", () => this.share());
    this.shareNote = createElement("div", { class: "pg-muted", role: "status" });
    this.form = createElement("form", { class: "pg-form", aria: { label: task.action } }, [
      ...fields.map((field) => field.el),
      createElement("div", { class: "pg-row pg-buttons" }, [
        this.button,
        this.stopButton,
        this.shareButton,
        createElement("label", { class: "pg-check" }, [
          this.attentionCheckbox,
          createElement("span", { text: hasAttention ? "show attention" : "this model has no attention to show" }),
        ]),
      ]),
      this.shareNote,
      options.length ? this.createOptions(options) : null,
      examples.length ? this.createExamples(examples) : null,
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
    this.response = createElement("div", { class: "pg-response" });
    this.placeholder = createElement("p", { class: "pg-muted", text: "The answer appears here." });
    this.error = new ErrorMessage(() => this.run());
    this.status = createElement("div", { class: "pg-visually-hidden", role: "status", aria: { live: "polite" } });
    this.output = createElement("section", { class: "pg-output", aria: { label: "Answer" } }, [
      this.error.el,
      this.placeholder,
      this.response,
      this.status,
    ]);
    this.attentionNote = createElement("p", { class: "pg-muted", role: "status" });
    this.attentionError = new ErrorMessage(() => this.showAttention());
    this.viewer = createElement("div", { id: "viewer" });
    this.attention = createElement("section", { class: "pg-attention", hidden: true, aria: { label: "Attention" } }, [
      createElement("div", { class: "pg-row pg-between" }, [
        createElement("h2", { text: "Attention" }),
        this.attentionNote,
      ]),
      this.attentionError.el,
      this.viewer,
    ]);
    this.el = createElement("div", { class: "pg-panel" }, [this.form, this.output, this.attention]);
  }

  createOptions(options) {
    return createElement("details", { class: "pg-options" }, [
      createElement("summary", { text: "Options" }),
      createElement(
        "div",
        { class: "pg-row" },
        options.map((field) => field.el),
      ),
    ]);
  }

  createExamples(examples) {
    const createButton = (example, index) =>
      createElement(
        "button",
        {
          type: "button",
          class: example.image ? "pg-example pg-thumbnail" : "pg-example",
          aria: example.image ? { label: `Example ${index + 1}` } : {},
          onclick: () => (this.fill(example), this.run()),
        },
        [
          example.image
            ? createElement("img", {
                ...{ src: `data:image/jpeg;base64,${example.image}`, alt: "", width: "64", height: "64" },
              })
            : createWord(example.text),
        ],
      );
    return createElement("div", { class: "pg-examples", role: "group", aria: { label: "Examples" } }, [
      createElement("span", { class: "pg-muted", text: "Examples" }),
      ...examples.map(createButton),
    ]);
  }

  // ---------------------------------------------------------------- request

  get allFields() {
    return [...this.fields, ...this.options];
  }

  get request() {
    const values = this.allFields.map(({ name, value }) => [name, value]).filter(([, value]) => value !== undefined);
    return { model: this.model.name, ...Object.fromEntries(values) };
  }

  fill(values) {
    for (const field of this.allFields) field.fill(values[field.name]);
  }

  /** Whether all required fields have a value. */
  get isComplete() {
    return this.fields.every((field) => field.optional || field.value !== undefined);
  }

  /** The link to this model and input, without files, which are too large. */
  get link() {
    const shared = this.allFields.filter((field) => field.isShared !== false).map(({ name, value }) => [name, value]);
    return buildLink(this.model.name, Object.fromEntries(shared));
  }

  async share() {
    this.events.onRun(this.link);
    const omitted = this.allFields.find((field) => field.isShared === false && field.value !== undefined),
      notes = omitted ? [`It does not contain the ${omitted.contentName}, which is too large for a link.`] : [];
    if (this.link.length > LONG_LINK_CHARS) notes.push("It is long, and some programs truncate long links.");
    try {
      await navigator.clipboard.writeText(location.href);
      this.shareNote.replaceChildren(["Link copied.", ...notes].join(" "));
    } catch {
      // The page may not write to the clipboard, so the user copies the link from a text box.
      const box = createElement("input", { class: "pg-input", readonly: true, aria: { label: "Link" } });
      box.value = location.href;
      this.shareNote.replaceChildren(["Copy this link.", ...notes].join(" "), box);
      box.select();
    }
  }

  // ---------------------------------------------------------------- response

  close() {
    this.stop();
    for (const field of this.allFields) field.close?.();
  }

  stop(announcement = "") {
    this.controller?.abort();
    this.controller = null;
    this.error.clear();
    this.attentionError.clear();
    this.closeViewer();
    this.setBusy(false);
    if (announcement) this.announce(announcement);
  }

  setBusy(isBusy) {
    this.stopButton.hidden = !isBusy;
    this.output.setAttribute("aria-busy", `${isBusy}`);
    this.output.classList.toggle("pg-busy", isBusy);
  }

  /** Tell screen readers. */
  announce(text) {
    this.status.textContent = text;
  }

  async run() {
    for (const field of this.allFields) await field.ready; // a file may still be loading
    if (this.allFields.some((field) => field.reportMissing())) return;
    this.stop();
    const controller = new AbortController(),
      { request, task } = this;
    this.controller = controller;
    this.events.onRun(this.link);
    this.shareNote.replaceChildren();
    this.placeholder.hidden = true;
    this.clearResponse();
    this.attention.hidden = true;
    this.setBusy(true);
    this.announce("Working");
    this.output.scrollIntoView({ block: "nearest", behavior: "smooth" }); // on a phone it is below the form
    try {
      const response = await this.fetchResponse(request, controller.signal);
      if (controller.signal.aborted) return;
      this.showResponse(task.render(response, request, this.model.metadata, this.response));
      this.announce(task.announcement(response));
      this.setBusy(false);
      if (this.attentionCheckbox.checked) await this.showAttention(controller);
    } catch (error) {
      if (controller.signal.aborted) return;
      this.setBusy(false);
      this.announce("");
      this.clearResponse();
      this.error.show(error);
      this.events.onError(error);
    }
  }

  /** Show these elements. Those that are already shown are not moved, so that audio keeps playing. */
  showResponse(parts) {
    const elements = parts.filter((part) => part !== null),
      { response } = this;
    for (const old of [...response.children]) if (!elements.includes(old)) old.remove();
    elements.forEach((element, index) => {
      if (response.children[index] !== element) response.insertBefore(element, response.children[index] ?? null);
    });
  }

  clearResponse() {
    for (const { src } of this.response.querySelectorAll("audio")) URL.revokeObjectURL(src);
    this.response.replaceChildren();
  }

  fetchResponse(request, signal) {
    const { task } = this.model,
      { renderPartial } = this.task;
    if (!renderPartial) return fetchJson(task, request, signal);
    return fetchStream(`${task}/stream`, request, signal, (event, data) => {
      if (!signal.aborted) renderPartial(this.response, data);
    });
  }

  // ---------------------------------------------------------------- attention

  async showAttention(controller = this.controller) {
    this.attentionError.clear();
    this.attention.hidden = false;
    this.attentionNote.textContent = "Loading attention …";
    try {
      const {
        attention_url: url,
        expires_in_seconds: seconds,
        prediction,
      } = await fetchJson(`attend/${this.model.task}`, this.request, controller.signal);
      const host = await remote(url.replace(/\/$/, ""));
      if (controller.signal.aborted) return;
      this.closeViewer();
      this.closeViewer = render({ model: host, el: this.viewer });
      const minutes = Math.round(seconds / 60),
        numSegments = prediction.segments?.length ?? 1;
      this.attentionNote.replaceChildren(
        numSegments > 1 ? `This is the first of ${numSegments} segments. ` : "",
        createElement("a", { href: url, target: "_blank", rel: "noopener", text: "Open in a new tab" }),
        minutes ? ` (expires in ${minutes} minutes)` : "",
      );
    } catch (error) {
      if (controller.signal.aborted) return;
      this.attentionNote.textContent = "";
      this.attentionError.show(error);
    }
  }

  closeViewer = () => {};
}
