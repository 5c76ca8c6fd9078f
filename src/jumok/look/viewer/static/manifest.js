// The manifest: how exact the weights of a file are, and the exchange of one of its items.

import { formatWeight } from "./colours.js";

/** Describe the rounding of the weights of a layer in a saved file (see viewer/html_file.py). */
export function describeRounding(manifest, item, layer) {
  const { detailed_heads: detailed } = layer,
    error = describeError(manifest, layer, isComputed(item, layer));
  if (layer.mean_of && detailed)
    return isDetailed(item, layer, null) ? error : `This file contains an overview of 64 × 64 cells of this mean. ${error}`;
  const heads = detailed?.length ? `${detailed.length === 1 ? "head" : "heads"} ${detailed.join(", ")}` : "no head";
  const selection = detailed
    ? `This file contains an overview of 64 × 64 cells of all heads, and of this layer ${heads} in detail. `
    : "";
  return selection + error;
}

function describeError({ rounding, score_error: scoreError }, { shape: [, numKeys] }, isFromScores) {
  if (isFromScores) {
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

/**
 * List the heads whose mean is shown, as { layer, head, share }: `head` itself, or if it is null all heads; of a mean
 * in a saved file, heads of other layers.
 */
export function listHeads({ heads, averaged }, number, head) {
  if (averaged) return averaged.map(([layer, part, share]) => ({ layer, head: part, share }));
  const shown = head === null ? heads : [head];
  return shown.map((part) => ({ layer: number, head: part, share: 1 / shown.length }));
}

/** Whether a file has more than an overview of a head of a layer; null: the mean of all heads. */
export function isDetailed({ layers }, layer, head) {
  return listHeads(layer, layers.indexOf(layer), head).every(
    (part) => layers[part.layer].detailed_heads?.includes(part.head) ?? true,
  );
}

/** Whether a head of a layer has sinks, and all of its weights are there; null: the mean of all heads. */
export function canHideSinks(item, layer, head) {
  return layer.sinks.length > 0 && layer.finest_zoom === 0 && isDetailed(item, layer, head);
}

/** Whether a file has queries and keys of a layer, or of those whose mean it is, instead of weights. */
export function isComputed({ layers }, { averaged, scores }) {
  return averaged ? averaged.some(([layer]) => layers[layer].scores) : Boolean(scores);
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
