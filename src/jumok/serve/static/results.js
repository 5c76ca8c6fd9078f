// Answers, to be read: bars for what is likely, marks in the text for what was found. Texts are set as texts.

import { make, word } from "../../look/static/dom.js";
import { percentOf } from "../../look/static/telling.js";

const HUES = 8; // colours of entities; a ninth kind has that of the first

/** Places in an answer count Unicode characters, as Python does; those of JavaScript are halves of some. */
function parted(text, spans) {
  const letters = [...text],
    parts = [];
  let at = 0;
  for (const { begin, end, dress } of spans) {
    if (begin < at) continue; // within the one before
    parts.push(letters.slice(at, begin).join(""), dress(letters.slice(begin, end).join("")));
    at = end;
  }
  return [...parts, letters.slice(at).join("")];
}

/** Rows of { name, share } with a bar each, the first the best unless they are `even`; `pick(n)` makes them buttons. */
function bars(rows, { label, pick = null, even = false } = {}) {
  const row = ({ name, share }, n) => {
    const track = make("span", { class: "pg-track", aria: { hidden: "true" } }, [
      make("span", { class: "pg-fill", css: { width: `${Math.max(0, Math.min(1, share)) * 100}%` } }),
    ]);
    const cells = [word(name || "(no answer)", { class: "pg-bar-name" }), track, number(percentOf(share))];
    if (!pick) return make("li", { class: "pg-bar" }, cells);
    const button = make("button", { type: "button", class: "pg-bar", aria: { pressed: `${n === 0}` } }, cells);
    button.addEventListener("click", () => {
      for (const other of button.closest("ol").querySelectorAll("button"))
        other.setAttribute("aria-pressed", `${other === button}`);
      pick(n);
    });
    return make("li", {}, [button]);
  };
  return make("ol", { class: even ? "pg-bars pg-even" : "pg-bars", aria: { label } }, rows.map(row));
}

function number(text) {
  return make("span", { class: "pg-number-text", text });
}

/** Large, and Korean is not broken within its words. */
export function saidLarge(parts, more = "") {
  const korean = parts.some((part) => /[\uac00-\ud7a3]/.test(part.textContent ?? part));
  return make("p", { class: `pg-said${korean ? " pg-korean" : ""}${more}`, dir: "auto" }, parts);
}

function said(text) {
  return saidLarge([word(text)]);
}

/** A list of what was nearly said, with scores. */
function listed(all, name) {
  if (all.length < 2) return null;
  const row = (one) =>
    make("li", {}, [
      word(one[name] || "(nothing)"),
      number(one.score.toFixed(2).replace("-0.00", "0.00").replace("-", "−")),
    ]);
  return make("div", {}, [
    make("h3", { text: "The best, with their scores" }),
    make("ol", { class: "pg-list" }, all.map(row)),
  ]);
}

function cutOff(answer) {
  return answer.finished ? null : make("p", { class: "pg-soft", text: "It was cut off at the length limit." });
}

/** A text so far. */
export function heardText(place, { text }) {
  place.replaceChildren(saidLarge([word(text)], " pg-half"));
}

export function showTranslation(answer) {
  return [said(answer.text || "(nothing)"), cutOff(answer), listed([answer, ...answer.others], "text")];
}

export function showCaption(answer) {
  return [said(answer.caption || "(nothing)"), cutOff(answer), listed([answer, ...answer.others], "caption")];
}

export function showClasses(answer) {
  if (answer.value !== null) return [said(`${Number(answer.value.toPrecision(4))}`)];
  const rows = answer.classes.map(({ label, probability }) => ({ name: label, share: probability }));
  return [said(answer.label), bars(rows, { label: "Classes and how likely they are" })];
}

export function showEntities(answer, asked, about) {
  const { entities } = answer,
    names = [...(about.labels ?? []), ...entities.map((one) => one.kind)];
  const kinds = [...new Set(names.map((name) => name.replace(/^[BI]-/, "")).filter((name) => name !== "O"))];
  const spans = entities.map(({ begin, end, kind, probability }) => ({
    begin,
    end,
    dress: (text) =>
      make("mark", { class: `pg-mark pg-kind-${kinds.indexOf(kind) % HUES}`, title: percentOf(probability) }, [
        word(text),
        make("span", { class: "pg-kind", text: kind }),
      ]),
  }));
  const rows = entities.map(({ text, kind, probability }) => ({ name: `${text} · ${kind}`, share: probability }));
  return [
    make("p", { class: "pg-text", dir: "auto" }, parted(asked.text, spans)),
    rows.length
      ? bars(rows, { label: "Entities and how sure the model is", even: true })
      : make("p", { class: "pg-soft", text: "No entities were found." }),
  ];
}

function marked(text) {
  return make("mark", { class: "pg-mark pg-kind-0" }, [word(text)]);
}

export function showAnswers(answer, asked) {
  const all = [answer, ...answer.others];
  const text = make("p", { class: "pg-text", dir: "auto" });
  const mark = ({ begin, end }) =>
    text.replaceChildren(
      ...parted(
        asked.context,
        end > begin ? [{ begin, end, dress: marked }] : [],
      ),
    );
  mark(answer);
  const rows = all.map(({ text: name, probability }) => ({ name, share: probability }));
  const pick = all.length > 1 ? (n) => mark(all[n]) : null;
  return [said(answer.text || "The text has no answer."), bars(rows, { label: "Answers", pick }), text];
}

export function showWords(answer, asked, about) {
  const parts = asked.text.split(about.mask ?? "[MASK]"),
    best = answer.masks.map(([first]) => first?.word ?? "");
  const filled = parts.flatMap((part, n) =>
    n ? [marked(best[n - 1] ?? ""), part] : [part],
  );
  const lists = answer.masks.map((words, n) =>
    make("div", {}, [
      answer.masks.length > 1 ? make("h3", { text: `Word ${n + 1}` }) : null,
      bars(
        words.map((one) => ({ name: one.word, share: one.probability })),
        { label: `Words for mask ${n + 1}` },
      ),
    ]),
  );
  const next =
    answer.next === null
      ? null
      : make("div", {}, [
          make("h3", { text: "Does the second text follow the first?" }),
          bars([{ name: "it follows", share: answer.next }], { label: "How likely it is that it follows" }),
        ]);
  return [saidLarge(filled), ...lists, next];
}

/** A sound to listen to. */
function player(audio, label) {
  const bytes = Uint8Array.from(atob(audio), (letter) => letter.charCodeAt(0)),
    address = URL.createObjectURL(new Blob([bytes], { type: "audio/wav" }));
  return make("audio", { controls: true, preload: "auto", src: address, aria: { label } });
}

/** The parts of a speech, one after the other, as they come. */
export function heardPart(place, { text, audio }) {
  const list = place.querySelector("ol") ?? make("ol", { class: "pg-parts", aria: { label: "Parts" } });
  if (!list.isConnected) place.replaceChildren(list);
  list.append(make("li", {}, [word(text), player(audio, text)]));
}

/** The whole of it, above the parts that were heard: nobody who listens to one of them is interrupted. */
export function showSpeech(answer, asked, about, place) {
  const whole = player(answer.audio, "The whole text"),
    parts = place.querySelector("ol");
  return [
    whole,
    make("div", { class: "pg-row" }, [
      make("span", { class: "pg-soft", text: `${answer.seconds.toFixed(1)} s at ${answer.rate} samples a second` }),
      make("a", { href: whole.src, download: "speech.wav", text: "Save as speech.wav" }),
    ]),
    answer.finished ? null : make("p", { class: "pg-soft", text: "Some of it was cut off: it would not have ended." }),
    answer.left_out.length
      ? make("p", { class: "pg-soft", text: `Left out, for the voice does not know it: ${answer.left_out.join(" ")}` })
      : null,
    answer.parts.length > 1 ? parts : null,
  ];
}
