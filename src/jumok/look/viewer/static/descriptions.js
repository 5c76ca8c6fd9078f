// Descriptions of the words and sentences of a document: in the tooltip, in the panel, above the text.

import { formatCount, formatWeight, pluralize } from "./colours.js";
import { createElement, createWord } from "./dom.js";
import { truncateText } from "./token_text.js";

const MAX_CLASSES = 4;

/** The tooltip of a word: its weight, its rank, and the weight of its sentence. */
export function describeWord(text, n, hop, weightScope) {
  const { weight, rank, share: sentenceShare, sentence } = text.wordInfo(n, hop),
    isPerSentence = weightScope === "sentence";
  return [
    createElement("div", { class: "jm-pair" }, [createWord(truncateText(text.words[n], 60))]),
    createElement("div", { class: "jm-weight", text: formatWeight(isPerSentence ? sentenceShare : weight, 4) }),
    ...(isPerSentence ? [createNote(`of its sentence, ${formatWeight(weight)} of the document`)] : []),
    createNote(`rank ${formatCount(rank)} of ${formatCount(text.length)} words`),
    ...(text.numSentences > 1 ? [createNote(describeSentenceWeight(sentence, text))] : []),
  ];
}

export function describeSentence(text, s, hop) {
  const { weight, rank, words } = text.sentenceInfo(s, hop);
  return [
    createElement("div", { class: "jm-pair", text: `Sentence ${formatCount(s + 1)}` }),
    createElement("div", { class: "jm-weight", text: formatWeight(weight, 4) }),
    createNote(`rank ${formatCount(rank)} of ${formatCount(text.numSentences)} sentences`),
    createNote(pluralize(words, "word")),
  ];
}

/** The panel of a word: its weight in each hop; with a single hop, the other words of its sentence. */
export function describePinned(text, n, hop) {
  const { weight, rank, sentence } = text.wordInfo(n, hop),
    { hops, offsets, numSentences, words } = text,
    lead = [`Weight ${formatWeight(weight)}, rank ${formatCount(rank)} of ${formatCount(text.length)}`];
  if (numSentences > 1) lead.push(describeSentenceWeight(sentence, text).replace(/^s/, "S"));
  const info = { title: words[n], place: n, lead };
  if (hops.length > 1) {
    const lines = hops.map((weights, k) => ({ text: `hop ${k}`, hop: k, value: weights[n] }));
    return { ...info, heading: "Weight in each hop", lines };
  }
  const first = offsets[sentence.number],
    weights = text.at(hop).words.subarray(first, offsets[sentence.number + 1]);
  const lines = Array.from(weights, (value, k) => ({
    text: truncateText(words[first + k], 40),
    place: first + k,
    value,
  }));
  return { ...info, heading: numSentences > 1 ? "Highest weights in the sentence" : "Highest weights", lines };
}

function describeSentenceWeight({ number, weight, rank }, text) {
  const position = `rank ${formatCount(rank)} of ${formatCount(text.numSentences)}`;
  return `sentence ${formatCount(number + 1)}: ${formatWeight(weight)}, ${position}`;
}

function createNote(text) {
  return createElement("div", { class: "jm-muted jm-number", text });
}

/** The predicted classes, and the label if it is known, as elements. */
export function createPrediction({ probabilities, label: truth }) {
  const parts = probabilities.slice(0, MAX_CLASSES).map(([label, probability], n) =>
    createElement("span", { class: n ? "jm-class" : "jm-class jm-prediction" }, [
      createWord(truncateText(label, 40)),
      createElement("span", { class: "jm-number", text: formatPercent(probability) }),
      createElement("span", { class: "jm-meter", aria: { hidden: "true" } }, [
        createElement("span", { css: { width: `${100 * probability}%` } }),
      ]),
    ]),
  );
  if (probabilities.length > MAX_CLASSES)
    parts.push(createElement("span", { class: "jm-muted", text: `and ${probabilities.length - MAX_CLASSES} more` }));
  if (truth === null) return parts;
  const probability = probabilities.find(([label]) => label === truth)?.[1],
    percent = probability === undefined ? "" : ` (${formatPercent(probability)})`,
    name = createWord(truncateText(truth, 40)),
    createLabel = (kind, ...children) => createElement("span", { class: `jm-label ${kind}` }, children);
  if (!probabilities.length) parts.push(createLabel("", "Label: ", name));
  else if (probabilities[0][0] === truth) parts.push(createLabel("jm-correct", "✓ correct"));
  else
    parts.push(
      createLabel("jm-wrong", "✗ wrong, label: ", name, createElement("span", { class: "jm-number", text: percent })),
    );
  return parts;
}

export function formatPercent(probability) {
  if (probability > 0.9995 && probability < 1) return "> 99.9 %";
  if (probability < 0.0005 && probability > 0) return "< 0.1 %";
  return `${(100 * probability).toFixed(1)} %`;
}
