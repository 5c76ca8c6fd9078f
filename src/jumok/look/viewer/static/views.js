// The views, in the order of their tabs. What a view declares is in view.js.

import { ArcView } from "./arcs_view.js";
import { AudioView } from "./audio_view.js";
import { DocumentView } from "./document_view.js";
import { HeadView } from "./heads_view.js";
import { ImageView } from "./image_view.js";
import { MapsView } from "./maps_view.js";
import { SpeechView } from "./speech_view.js";
import { TextView } from "./text_view.js";

export const VIEWS = {
  document: DocumentView,
  image: ImageView,
  speech: SpeechView,
  audio: AudioView,
  map: MapsView,
  arcs: ArcView,
  text: TextView,
  heads: HeadView,
};

/** List the names of the views that can show a layer. */
export function listViews(item, layer) {
  return Object.keys(VIEWS).filter((name) => VIEWS[name].canShow(item, layer));
}

/** Choose the initial view, layer and head: those of the document, image, speech or recording, if there is one. */
export function chooseInitialView(item) {
  const { layers } = item,
    open = (view, layer) => ({ view, layer, head: layers[layer].has_mean ? null : layers[layer].heads[0] });
  for (const [name, { medium, hasLayers }] of Object.entries(VIEWS)) {
    const layer = medium ? layers.findLastIndex(({ media }) => media.includes(medium)) : -1;
    if (layer >= 0) return hasLayers ? open(name, layer) : { view: name, layer: 0, head: layers[0].heads[0] };
  }
  if (layers.at(-1).first_generated.some((first) => first !== null)) return open("text", layers.length - 1);
  const first = Math.max(0, layers.findIndex(({ detailed_heads: heads }) => heads?.length)); // in a saved file
  return { view: "map", layer: first, head: layers[first].detailed_heads?.[0] ?? layers[first].heads[0] };
}
