// Starts the viewer on its own page, with a server.

import { remote } from "./remote.js";
import { render } from "./viewer.js";

const element = document.getElementById("viewer");

try {
  const model = await remote(element.dataset.base); // where the app is mounted
  const { title } = model.get("manifest");
  document.title = title ? `${title} · jumok` : "jumok";
  render({ model: { ...model, get: (name) => (name === "full" ? true : model.get(name)) }, el: element });
  element.firstElementChild.focus();
} catch (error) {
  element.textContent = `The viewer could not start: ${error.message}`;
}
