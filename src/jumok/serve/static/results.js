// Elements for responses: bars for probabilities, marks in the input text. All texts are inserted as text, not HTML.

import { createElement, createWord, decodeBase64 } from "../../look/viewer/static/dom.js";
import { formatPercent } from "../../look/viewer/static/descriptions.js";

const NUM_ENTITY_COLOURS = 8; // a ninth entity type has the colour of the first

/** Split a text at spans, which are rendered by `render`. Offsets count Unicode characters, as in Python. */
function splitAtSpans(text, spans) {
  const characters = [...text],
    parts = [];
  let position = 0;
  for (const { start, end, render } of spans) {
    if (start < position) continue; // overlaps the previous span
    parts.push(characters.slice(position, start).join(""), render(characters.slice(start, end).join("")));
    position = end;
  }
  return [...parts, characters.slice(position).join("")];
}

/** Rows of { name, probability } with bars. `onSelect(index)` makes them buttons; `isRanked`: the first is the best. */
function createBars(rows, { label, onSelect = null, isRanked = true } = {}) {
  const createRow = ({ name, probability }, index) => {
    const track = createElement("span", { class: "pg-track", aria: { hidden: "true" } }, [
      createElement("span", { class: "pg-fill", css: { width: `${Math.max(0, Math.min(1, probability)) * 100}%` } }),
    ]);
    const nameCell = createWord(name || "(no answer)", { class: "pg-bar-name" }),
      cells = [nameCell, track, createNumber(formatPercent(probability))];
    if (!onSelect) return createElement("li", { class: "pg-bar" }, cells);
    const aria = { pressed: `${index === 0}` },
      button = createElement("button", { type: "button", class: "pg-bar", aria }, cells);
    button.addEventListener("click", () => {
      for (const other of button.closest("ol").querySelectorAll("button"))
        other.setAttribute("aria-pressed", `${other === button}`);
      onSelect(index);
    });
    return createElement("li", {}, [button]);
  };
  const listClass = isRanked ? "pg-bars" : "pg-bars pg-unranked";
  return createElement("ol", { class: listClass, aria: { label } }, rows.map(createRow));
}

function createNumber(text) {
  return createElement("span", { class: "pg-number-text", text });
}

/** A large text. Korean text is not broken within words. */
function renderLarge(parts, extraClass = "") {
  const isKorean = parts.some((part) => /[\uac00-\ud7a3]/.test(part.textContent ?? part));
  return createElement("p", { class: `pg-prediction${isKorean ? " pg-korean" : ""}${extraClass}`, dir: "auto" }, parts);
}

function renderLargeText(text) {
  return renderLarge([createWord(text)]);
}

/** An n-best list with scores. */
function renderAlternatives(predictions, textKey) {
  if (predictions.length < 2) return null;
  const createRow = (prediction) =>
    createElement("li", {}, [
      createWord(prediction[textKey] || "(empty)"),
      createNumber(prediction.score.toFixed(2).replace("-0.00", "0.00").replace("-", "−")),
    ]);
  return createElement("div", {}, [
    createElement("h3", { text: "Best predictions and their scores" }),
    createElement("ol", { class: "pg-list" }, predictions.map(createRow)),
  ]);
}

function renderUnfinished(response) {
  return response.finished ? null : createElement("p", { class: "pg-muted", text: "Cut off at the length limit." });
}

/** The text of a streamed response so far. */
export function renderPartialText(container, { text }) {
  container.replaceChildren(renderLarge([createWord(text)], " pg-partial"));
}

function renderGeneratedText(response, textKey) {
  return [
    renderLargeText(response[textKey] || "(empty)"),
    renderUnfinished(response),
    renderAlternatives([response, ...response.alternatives], textKey),
  ];
}

export function renderTranslation(response) {
  return renderGeneratedText(response, "translation");
}

export function renderCaption(response) {
  return renderGeneratedText(response, "caption");
}

export function renderClasses(response) {
  if (response.value !== null) return [renderLargeText(`${Number(response.value.toPrecision(4))}`)];
  const rows = response.classes.map(({ label, probability }) => ({ name: label, probability }));
  return [renderLargeText(response.label), createBars(rows, { label: "Classes and their probabilities" })];
}

export function renderEntities(response, request, metadata) {
  const { entities } = response,
    labels = [...(metadata.labels ?? []), ...entities.map(({ type }) => type)];
  const types = [...new Set(labels.map((label) => label.replace(/^[BI]-/, "")).filter((label) => label !== "O"))];
  const spans = entities.map(({ start, end, type, probability }) => ({
    start,
    end,
    render: (text) => {
      const colour = types.indexOf(type) % NUM_ENTITY_COLOURS;
      return createElement("mark", { class: `pg-mark pg-type-${colour}`, title: formatPercent(probability) }, [
        createWord(text),
        createElement("span", { class: "pg-type", text: type }),
      ]);
    },
  }));
  const rows = entities.map(({ text, type, probability }) => ({ name: `${text} · ${type}`, probability }));
  return [
    createElement("p", { class: "pg-text", dir: "auto" }, splitAtSpans(request.text, spans)),
    rows.length
      ? createBars(rows, { label: "Entities and their probabilities", isRanked: false })
      : createElement("p", { class: "pg-muted", text: "No entities were found." }),
  ];
}

function createMark(text) {
  return createElement("mark", { class: "pg-mark pg-type-0" }, [createWord(text)]);
}

export function renderAnswers(response, request) {
  const answers = [response, ...response.alternatives];
  const context = createElement("p", { class: "pg-text", dir: "auto" });
  const markAnswer = ({ start, end }) => {
    const spans = end > start ? [{ start, end, render: createMark }] : [];
    context.replaceChildren(...splitAtSpans(request.context, spans));
  };
  markAnswer(response);
  const rows = answers.map(({ answer, probability }) => ({ name: answer, probability }));
  const onSelect = answers.length > 1 ? (index) => markAnswer(answers[index]) : null;
  return [
    renderLargeText(response.answer || "The text has no answer."),
    createBars(rows, { label: "Answers", onSelect }),
    context,
  ];
}

export function renderFilledMasks(response, request, metadata) {
  const parts = request.text.split(metadata.mask_token ?? "[MASK]"),
    { mask_predictions: masks, next_sentence_probability: nextProbability } = response,
    bestWords = masks.map(([first]) => first?.word ?? "");
  const filledText = parts.flatMap((part, index) =>
    index ? [createMark(bestWords[index - 1] ?? ""), part] : [part],
  );
  const lists = masks.map((words, index) =>
    createElement("div", {}, [
      masks.length > 1 ? createElement("h3", { text: `Word ${index + 1}` }) : null,
      createBars(
        words.map((candidate) => ({ name: candidate.word, probability: candidate.probability })),
        { label: `Words for mask ${index + 1}` },
      ),
    ]),
  );
  const next =
    nextProbability === null
      ? null
      : createElement("div", {}, [
          createElement("h3", { text: "Does the second text follow the first?" }),
          createBars([{ name: "follows", probability: nextProbability }], { label: "Next sentence probability" }),
        ]);
  return [renderLarge(filledText), ...lists, next];
}

function createPlayer(audio, label) {
  const url = URL.createObjectURL(new Blob([decodeBase64(audio)], { type: "audio/wav" }));
  return createElement("audio", { controls: true, preload: "auto", src: url, aria: { label } });
}

/** Append a segment of streamed speech. */
export function renderSegment(container, { text, audio }) {
  const list =
    container.querySelector("ol") ?? createElement("ol", { class: "pg-segments", aria: { label: "Segments" } });
  if (!list.isConnected) container.replaceChildren(list);
  list.append(createElement("li", {}, [createWord(text), createPlayer(audio, text)]));
}

/** The complete speech above its segments. The list of segments is kept, so that their playback continues. */
export function renderSpeech(response, request, metadata, container) {
  const player = createPlayer(response.audio, "The whole text"),
    segments = container.querySelector("ol"),
    { duration_seconds: duration, sample_rate: sampleRate, unknown_characters: unknown } = response;
  return [
    player,
    createElement("div", { class: "pg-row" }, [
      createElement("span", { class: "pg-muted", text: `${duration.toFixed(1)} s at ${sampleRate} Hz` }),
      createElement("a", { href: player.src, download: "speech.wav", text: "Save as speech.wav" }),
    ]),
    renderUnfinished(response),
    unknown.length
      ? createElement("p", { class: "pg-muted", text: `Skipped unknown characters: ${unknown.join(" ")}` })
      : null,
    response.segments.length > 1 ? segments : null,
  ];
}
