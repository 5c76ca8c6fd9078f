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

/**
 * Choose the initial view, layer and head: those of the document, image, speech or recording, if there is one, or else
 * the opening (viewer/opening.py); generated tokens are first shown as a text.
 */
export function chooseInitialView(item) {
  const { layers } = item,
    open = (view, layer) => ({ view, layer, head: layers[layer].has_mean ? null : layers[layer].heads[0] });
  for (const [name, { medium, hasLayers }] of Object.entries(VIEWS)) {
    const layer = medium ? layers.findLastIndex(({ media, mean_of: meanOf }) => media.includes(medium) && !meanOf) : -1;
    if (item.opening && layers[item.opening.layer].media.includes(medium))
      return { view: name, layer: item.opening.layer, head: item.opening.head };
    if (layer >= 0) return hasLayers ? open(name, layer) : { view: name, layer: 0, head: layers[0].heads[0] };
  }
  const { layer, head } = item.opening ?? { layer: 0, head: layers[0].heads[0] };
  return { view: layers[layer].first_generated.some((first) => first !== null) ? "text" : "map", layer, head };
}
