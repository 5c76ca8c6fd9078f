// The manifest: how exact the weights of a file are, and the exchange of one of its items.

import { formatWeight } from "./colours.js";

/** Describe the rounding of the weights of a layer in a saved file (see viewer/html_file.py). */
export function describeRounding(manifest, layer) {
  const { detailed_heads: detailed } = layer,
    heads = detailed?.length ? `${detailed.length === 1 ? "head" : "heads"} ${detailed.join(", ")}` : "no head";
  const selection = detailed
    ? `This file contains an overview of 64 × 64 cells of all heads, and of this layer ${heads} in detail. `
    : "";
  return selection + describeError(manifest, layer);
}

function describeError({ rounding, score_error: scoreError }, { shape: [, numKeys], scores }) {
  if (scores) {
    const percent = Number((100 * scoreError).toPrecision(2));
    return `The weights of this layer are computed from rounded queries and keys. Of the weights that are at least as large as the mean (${formatWeight(1 / numKeys, 2)}), 99 % are exact to within ${percent} %. Hidden keys have exactly 0. The live viewer shows exact weights.`;
  }
  if (!rounding) return "";
  const describe = (times) => {
    const step = rounding / Math.sqrt(times),
      percent = (100 * (step + (step * step) / 4)).toPrecision(2);
    return `${formatWeight(times / numKeys, 2)} to within ${Number(percent)} %`;
  };
  const examples = [1, 16, 64].filter((times) => times < numKeys).map(describe);
  return `This file contains rounded weights. Square roots of weights are rounded, so large weights are more exact: ${examples.join(", ")}. Weights of 0 are exact. The live viewer shows exact weights.`;
}

/** Whether a file has more than an overview of a head; null: the mean of all heads. */
export function isDetailed({ heads, detailed_heads: detailed }, head) {
  return !detailed || (head === null ? heads : [head]).every((number) => detailed.includes(number));
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
