// The tasks: what each one asks for, and how its answer is shown.

import { NumberField, SoundField, StyleField, TextField } from "./fields.js";
import { PictureField } from "./photo.js";
import {
  heardPart,
  heardText,
  showAnswers,
  showCaption,
  showClasses,
  showEntities,
  showSpeech,
  showTranslation,
  showWords,
} from "./results.js";

const nBest = (usual = 1) => new NumberField("n_best", "How many to list", usual);
const beam = (about) => new NumberField("beam", "Beam", about.beam);

// `fields(about, events)` are filled in, `options(about)` too, if one likes; `heard(place, what)` shows what comes
// while an answer is made, `show(answer, asked, about, place)` the answer; `said(answer)` is for those who listen.
export const TASKS = {
  translate: {
    verb: "Translate",
    does: "translates",
    fields: () => [new TextField("text", "Text")],
    options: (about) => [beam(about), nBest()],
    heard: heardText,
    show: showTranslation,
    said: (answer) => answer.text,
  },
  classify: {
    verb: "Classify",
    does: "labels texts",
    fields: ({ pairs }) =>
      pairs
        ? [new TextField("text", "First text"), new TextField("pair", "Second text")]
        : [new TextField("text", "Text")],
    options: () => [],
    show: showClasses,
    said: (answer) => answer.label ?? `${answer.value}`,
  },
  tag: {
    verb: "Find entities",
    does: "finds entities",
    fields: () => [new TextField("text", "Text")],
    options: () => [],
    show: showEntities,
    said: ({ entities }) => entities.map(({ text, kind }) => `${text}: ${kind}`).join(", ") || "no entities",
  },
  answer: {
    verb: "Answer",
    does: "answers questions",
    fields: () => [
      new TextField("context", "Text that has the answer"),
      new TextField("question", "Question", { long: false }),
    ],
    options: () => [nBest()],
    show: showAnswers,
    said: (answer) => answer.text || "no answer",
  },
  fill: {
    verb: "Fill in",
    does: "fills in hidden words",
    fields: ({ mask = "[MASK]" }) => [
      new TextField("text", "Text", { hint: `Write ${mask} where a word is hidden.` }),
      new TextField("pair", "Second text, if you like: does it follow the first?", { optional: true, long: false }),
    ],
    options: () => [nBest(5)],
    show: showWords,
    said: (answer) => answer.filled,
  },
  caption: {
    verb: "Describe",
    does: "describes pictures",
    fields: (about, events) => [
      new PictureField("image", "Picture", { most: about.max_bytes, pixels: about.max_pixels, ...events }),
    ],
    options: (about) => [beam(about), nBest()],
    show: showCaption,
    said: (answer) => answer.caption,
  },
  speak: {
    verb: "Speak",
    does: "speaks",
    fields: () => [new TextField("text", "Text")],
    options: ({ tokens = [], max_sound: most }) =>
      tokens.length
        ? [
            new StyleField("tokens", "Style tokens", tokens),
            new SoundField("style_from", "or the style of a recording", most),
          ]
        : [],
    heard: heardPart,
    show: showSpeech,
    said: ({ seconds }) => `${seconds.toFixed(1)} seconds of speech`,
  },
};
