// What a scene has to show, told by its manifest alone.

import { count } from "./colours.js";

const VIEWS = {
  ...{ document: "Document", picture: "Image", speech: "Speech", map: "Map", arcs: "Arcs" },
  ...{ text: "Text", heads: "Heads" },
};

/** The views of a layer of a scene, with their names. */
export function viewsOf({ document: text, picture, speech }, layer) {
  const has = { document: Boolean(text), picture: isOver(picture, layer), speech: isSpoken(speech, layer) };
  return Object.entries(VIEWS).filter(([name]) => has[name] ?? true);
}

/** The view that it opens with, and its layer and head: what the model read, saw or said, where that is known. */
export function openingOf({ document: text, picture, speech, layers }) {
  if (text) return { view: "document", layer: 0, head: layers[0].heads[0] };
  const view = picture ? "picture" : "speech",
    layer = layers.findLastIndex((one) => shows(view, { picture, speech }, one));
  if (layer < 0) return { view: "map", layer: 0, head: layers[0].heads[0] };
  return { view, layer, head: layers[layer].mean ? null : layers[layer].heads[0] };
}

/** Whether a view has something to show of a layer. */
export function shows(view, { picture, speech }, layer) {
  return view === "picture" ? isOver(picture, layer) : view === "speech" ? isSpoken(speech, layer) : true;
}

// Whether the keys of a layer are the places of a picture.
function isOver(picture, { shape, kind }) {
  return Boolean(picture) && !/causal|channel/.test(kind) && shape[1] === picture.first + picture.grid[0] * picture.grid[1];
}

// Whether the queries of a layer are the steps that speak.
function isSpoken(speech, { shape, kind }) {
  return Boolean(speech) && kind !== "channel" && shape[0] === Math.ceil(speech.shape[1] / speech.step);
}

/** How much looks at how much, in words. */
export function sizesOf(view, { picture, speech }, { kind, shape }) {
  const what = `${kind} attention`;
  if (view === "speech") {
    const seconds = (speech.shape[1] * speech.seconds).toFixed(2);
    return [what, several(shape[1], "symbol"), `${several(shape[0], "step")} in ${seconds} s`];
  }
  if (kind === "channel") return [what, `${count(shape[0])} × ${count(shape[1])} channels`];
  if (view !== "picture") return [what, `${count(shape[0])} × ${count(shape[1])} tokens`];
  const places = picture.grid.map(count).join(" × ");
  return shape[0] === shape[1] ? [what, `${places} patches`] : [what, several(shape[0], "word"), `${places} places`];
}

/** How long a document is, in words. */
export function measuresOf({ words, sentences, hops }, hop) {
  return [
    several(words.length, "word"),
    ...(sentences.length > 2 ? [several(sentences.length - 1, "sentence")] : []),
    ...(hops > 1 ? [hop === null ? `mean of ${hops} hops` : `hop ${hop} of ${hops}`] : []),
  ];
}

function several(number, name) {
  return `${count(number)} ${number === 1 ? name : `${name}s`}`;
}

/** The manifest with another scene, itself told by a manifest, in a place of it. */
export function withScene(manifest, place, told) {
  const texts = [...manifest.texts],
    named = new Map(texts.map((words, n) => [JSON.stringify(words), n]));
  const at = told.texts.map((words) => named.get(JSON.stringify(words)) ?? texts.push(words) - 1),
    moved = (n) => (n === null ? null : at[n]);
  const [scene] = told.scenes,
    layers = scene.layers.map((layer) => ({ ...layer, rows: moved(layer.rows), cols: moved(layer.cols) }));
  const scenes = manifest.scenes.map((one, n) => (n === place ? { ...scene, label: one.label, layers } : one));
  return { ...manifest, texts, scenes };
}
