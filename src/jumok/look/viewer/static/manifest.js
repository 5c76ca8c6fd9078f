// What a manifest offers to show.

import { formatCount, formatWeight, pluralize } from "./colours.js";

const VIEW_NAMES = ["document", "image", "speech", "map", "arcs", "text", "heads"];

/** List the views of a layer. */
export function listViews(item, layer) {
  return VIEW_NAMES.filter((view) => (view === "document" ? item.document : canShow(view, item, layer)));
}

/** Choose the initial view, layer and head: the document, image or speech, if there is one. */
export function chooseInitialView({ document, image, speech, layers }) {
  const view = image ? "image" : "speech",
    layer = document ? -1 : layers.findLastIndex((candidate) => canShow(view, { image, speech }, candidate));
  if (layer < 0 && layers.at(-1).first_generated.some((first) => first !== null))
    return { view: "text", layer: layers.length - 1, head: layers.at(-1).has_mean ? null : layers.at(-1).heads[0] };
  if (layer < 0) return { view: document ? "document" : "map", layer: 0, head: layers[0].heads[0] };
  return { view, layer, head: layers[layer].has_mean ? null : layers[layer].heads[0] };
}

/** Whether a view can show a layer: the keys of an image are its patches, the queries of speech are its steps. */
export function canShow(view, { image, speech }, { shape: [numQueries, numKeys], kind }) {
  if (view === "image")
    return (
      Boolean(image) &&
      !/causal|channel/.test(kind) &&
      numKeys === image.num_prefix_keys + image.grid[0] * image.grid[1]
    );
  if (view === "speech")
    return Boolean(speech) && kind !== "channel" && numQueries === Math.ceil(speech.shape[1] / speech.frames_per_step);
  return true;
}

/** Describe the kind and size of a layer. */
export function describeLayer(view, { image, speech }, { kind, shape }) {
  const name = `${kind} attention`;
  if (view === "speech") {
    const seconds = (speech.shape[1] * speech.frame_seconds).toFixed(2);
    return [name, pluralize(shape[1], "symbol"), `${pluralize(shape[0], "step")} in ${seconds} s`];
  }
  if (kind === "channel") return [name, `${formatCount(shape[0])} × ${formatCount(shape[1])} channels`];
  if (view !== "image") return [name, `${formatCount(shape[0])} × ${formatCount(shape[1])} tokens`];
  const patches = image.grid.map(formatCount).join(" × ");
  return [name, ...(shape[0] === shape[1] ? [] : [pluralize(shape[0], "word")]), `${patches} patches`];
}

/** Describe the rounding of a saved file (see viewer/html_file.py): `rounding` is the share of the mean weight. */
export function describeRounding(rounding, numKeys) {
  if (!rounding) return "";
  const describe = (times) => {
    const step = rounding / Math.sqrt(times),
      percent = (100 * (step + (step * step) / 4)).toPrecision(2);
    return `${formatWeight(times / numKeys, 2)} to within ${Number(percent)} %`;
  };
  const examples = [1, 16, 64].filter((times) => times < numKeys).map(describe);
  return `This file contains rounded weights. Square roots of weights are rounded, so large weights are more exact: ${examples.join(", ")}. Weights of 0 are exact. The live viewer shows exact weights.`;
}

/** Describe the length of a document. */
export function describeDocument({ words, sentence_offsets, num_hops }, hop) {
  return [
    pluralize(words.length, "word"),
    ...(sentence_offsets.length > 2 ? [pluralize(sentence_offsets.length - 1, "sentence")] : []),
    ...(num_hops > 1 ? [hop === null ? `mean of ${num_hops} hops` : `hop ${hop} of ${num_hops}`] : []),
  ];
}

/** Replace one item of the manifest by the item of another manifest. */
export function replaceData(manifest, index, update) {
  const texts = [...manifest.texts],
    known = new Map(texts.map((words, n) => [JSON.stringify(words), n]));
  const indices = update.texts.map((words) => known.get(JSON.stringify(words)) ?? texts.push(words) - 1),
    translate = (n) => (n === null ? null : indices[n]);
  const [item] = update.data,
    layers = item.layers.map((layer) => ({
      ...layer,
      row_labels: translate(layer.row_labels),
      col_labels: translate(layer.col_labels),
    }));
  const data = manifest.data.map((old, n) => (n === index ? { ...item, label: old.label, layers } : old));
  return { ...manifest, texts, data };
}
