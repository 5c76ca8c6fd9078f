// Starts the viewer in a saved file: all weights are in the file, compressed, and nothing is fetched.

import { render } from "./viewer.js";
import { SavedWeights } from "./saved_weights.js";

const element = document.getElementById("viewer");
const readJson = (name) => JSON.parse(document.getElementById(name).textContent);
const manifest = readJson("manifest"),
  weights = new SavedWeights(manifest, readJson("index"), document.getElementById("weights").textContent);
const tiles = (request) => weights.answer(request);

render({ model: { get: (name) => ({ manifest, full: true })[name], tiles }, el: element });
if (window === window.top) element.firstElementChild.focus(); // in a frame, focus would scroll the page around it
