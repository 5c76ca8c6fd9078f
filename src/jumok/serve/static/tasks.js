// The tasks: the form fields of their requests, and how their responses are shown.

import { AudioField, NumberField, StyleField, TextField } from "./fields.js";
import { ImageField } from "./image_field.js";
import {
  renderAnswers,
  renderCaption,
  renderClasses,
  renderEntities,
  renderFilledMasks,
  renderPartialText,
  renderSegment,
  renderSpeech,
  renderTranslation,
} from "./results.js";

const createBestField = (defaultValue = 1) => new NumberField("n_best", "Number of predictions", defaultValue);
const createBeamField = (metadata) => new NumberField("beam_size", "Beam size", metadata.beam_size);

// `metadata` is that of /models. `fields(metadata, events)` are required unless they are `optional`, and
// `options(metadata)` are not. `renderPartial(container, data)` shows an event of a stream,
// `render(response, request, metadata, container)` returns the elements of the response, and
// `announcement(response)` is the text for screen readers.
export const TASKS = {
  translate: {
    action: "Translate",
    description: "translates",
    fields: () => [new TextField("text", "Text")],
    options: (metadata) => [createBeamField(metadata), createBestField()],
    renderPartial: renderPartialText,
    render: renderTranslation,
    announcement: (response) => response.translation,
  },
  classify: {
    action: "Classify",
    description: "classifies texts",
    fields: (metadata) =>
      metadata.text_pairs
        ? [new TextField("text", "First text"), new TextField("text_pair", "Second text")]
        : [new TextField("text", "Text")],
    options: () => [],
    render: renderClasses,
    announcement: (response) => response.label ?? `${response.value}`,
  },
  tag: {
    action: "Find entities",
    description: "finds entities",
    fields: () => [new TextField("text", "Text")],
    options: () => [],
    render: renderEntities,
    announcement: ({ entities }) => entities.map(({ text, type }) => `${text}: ${type}`).join(", ") || "no entities",
  },
  answer: {
    action: "Answer",
    description: "answers questions",
    fields: () => [
      new TextField("context", "Text that contains the answer"),
      new TextField("question", "Question", { multiline: false }),
    ],
    options: () => [createBestField()],
    render: renderAnswers,
    announcement: ({ answer }) => answer || "no answer",
  },
  "fill-mask": {
    action: "Fill masks",
    description: "fills masked words",
    fields: ({ mask_token: mask = "[MASK]" }) => [
      new TextField("text", "Text", { hint: `Write ${mask} in place of each word to predict.` }),
      new TextField("text_pair", "Second text (optional): does it follow the first?", {
        optional: true,
        multiline: false,
      }),
    ],
    options: () => [createBestField(5)],
    render: renderFilledMasks,
    announcement: (response) => response.filled_text,
  },
  caption: {
    action: "Describe",
    description: "describes images",
    fields: ({ max_image_bytes: maxBytes, max_image_pixels: maxPixels }, { onChange }) => [
      new ImageField("image", "Image", { maxBytes, maxPixels, onChange }),
    ],
    options: (metadata) => [createBeamField(metadata), createBestField()],
    render: renderCaption,
    announcement: (response) => response.caption,
  },
  speak: {
    action: "Speak",
    description: "speaks",
    fields: () => [new TextField("text", "Text")],
    options: ({ default_style_weights: weights = [] }) =>
      weights.length
        ? [
            new StyleField("style_weights", "Style tokens", weights),
            new AudioField("style_audio", "or the style of a recording"),
          ]
        : [],
    renderPartial: renderSegment,
    render: renderSpeech,
    announcement: ({ duration_seconds: duration }) => `${duration.toFixed(1)} seconds of speech`,
  },
};
