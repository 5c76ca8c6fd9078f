// What is told of a document's words and sentences: beside the pointer, in the panel, above the text.

import { count, told } from "./colours.js";
import { make, word } from "./dom.js";
import { shown } from "./text.js";

const MOST_CLASSES = 4;

/** Beside the pointer: a word's weight, its rank, and what its sentence counts. `share` as in the view. */
export function ofWord(text, n, hop, share) {
  const { weight, rank, share: inIt, sentence } = text.word(n, hop),
    own = share === "sentence";
  return [
    make("div", { class: "jm-pair" }, [word(shown(text.words[n], 60))]),
    make("div", { class: "jm-weight", text: told(own ? inIt : weight, 4) }),
    ...(own ? [softly(`of its sentence, ${told(weight)} of the document`)] : []),
    softly(`rank ${count(rank)} of ${count(text.length)} words`),
    ...(text.sentences > 1 ? [softly(countsFor(sentence, text))] : []),
  ];
}

export function ofSentence(text, s, hop) {
  const { weight, rank, words } = text.sentence(s, hop);
  return [
    make("div", { class: "jm-pair", text: `Sentence ${count(s + 1)}` }),
    make("div", { class: "jm-weight", text: told(weight, 4) }),
    softly(`rank ${count(rank)} of ${count(text.sentences)} sentences`),
    softly(`${count(words)} ${words === 1 ? "word" : "words"}`),
  ];
}

/** In the panel: how much each hop looks at a word; of a single hop, what else counts in its sentence. */
export function ofPinned(text, n, hop) {
  const { weight, rank, sentence } = text.word(n, hop),
    { hops, edges, sentences, words } = text,
    lead = [`Weight ${told(weight)}, rank ${count(rank)} of ${count(text.length)}`];
  if (sentences > 1) lead.push(countsFor(sentence, text).replace(/^s/, "S"));
  const about = { title: words[n], place: n, lead };
  if (hops.length > 1) {
    const lines = hops.map((weights, k) => ({ text: `hop ${k}`, hop: k, value: weights[n] }));
    return { ...about, heading: "How much each hop looks at it", lines };
  }
  const first = edges[sentence.number],
    weights = text.at(hop).words.subarray(first, edges[sentence.number + 1]);
  const lines = Array.from(weights, (value, k) => ({ text: shown(words[first + k], 40), place: first + k, value }));
  return { ...about, heading: sentences > 1 ? "What counts most in its sentence" : "What counts most", lines };
}

function countsFor({ number, weight, rank }, text) {
  return `sentence ${count(number + 1)}: ${told(weight)}, rank ${count(rank)} of ${count(text.sentences)}`;
}

function softly(text) {
  return make("div", { class: "jm-soft jm-number", text });
}

/** What the model said, and what is true where that is known, as elements. */
export function verdictOf({ said, truth }) {
  const parts = said.slice(0, MOST_CLASSES).map(([label, chance], n) =>
    make("span", { class: n ? "jm-class" : "jm-class jm-said" }, [
      word(shown(label, 40)),
      make("span", { class: "jm-number", text: percentOf(chance) }),
      make("span", { class: "jm-meter", aria: { hidden: "true" } }, [
        make("span", { css: { width: `${100 * chance}%` } }),
      ]),
    ]),
  );
  if (said.length > MOST_CLASSES)
    parts.push(make("span", { class: "jm-soft", text: `and ${said.length - MOST_CLASSES} more` }));
  if (truth === null) return parts;
  const right = said.length ? said[0][0] === truth : null,
    chance = said.find(([label]) => label === truth)?.[1];
  const tone = right === null ? "jm-truth" : right ? "jm-truth jm-right" : "jm-truth jm-wrong";
  parts.push(
    make("span", { class: tone }, [
      make("span", { text: right ? "✓ right" : right === null ? "It is " : "✗ wrong: it is " }),
      ...(right ? [] : [word(shown(truth, 40))]),
      make("span", { class: "jm-number", text: right || chance === undefined ? "" : ` (${percentOf(chance)})` }),
    ]),
  );
  return parts;
}

export function percentOf(chance) {
  if (chance > 0.9995 && chance < 1) return "> 99.9 %";
  if (chance < 0.0005 && chance > 0) return "< 0.1 %";
  return `${(100 * chance).toFixed(1)} %`;
}
