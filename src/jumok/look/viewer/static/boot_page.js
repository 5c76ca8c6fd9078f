// On a page of its own, with a server behind it.

import { remote } from "./remote.js";
import { render } from "./viewer.js";

const place = document.getElementById("viewer");

try {
  const model = await remote(place.dataset.base); // where the app is mounted
  const { title } = model.get("manifest");
  document.title = title ? `${title} · jumok` : "jumok";
  render({ model: { ...model, get: (name) => (name === "full" ? true : model.get(name)) }, el: place });
  place.firstElementChild.focus();
} catch (error) {
  place.textContent = `The viewer could not start: ${error.message}`;
}
