// On a page with a server behind it: tiles are fetched, and given up when they are no longer wanted.

import { render } from "./viewer.js";

const place = document.getElementById("viewer");
const base = place.dataset.base; // where the app is mounted

async function fetched(path, given) {
  const answer = await fetch(`${base}${path}`, given);
  if (!answer.ok)
    throw new Error((await answer.json().catch(() => ({}))).error ?? `the server answered ${answer.status}.`);
  return answer;
}

async function tiles({ scene, layer, head, rows, cols, size, what }, signal) {
  const query = new URLSearchParams({ scene, layer, head: head ?? "mean", rows, cols, size, what });
  return (await fetched(`/tiles?${query}`, { signal })).arrayBuffer();
}

async function retell(wish) {
  const headers = { "Content-Type": "application/json" };
  return (await fetched("/retold", { method: "POST", headers, body: JSON.stringify(wish) })).json();
}

try {
  const manifest = await (await fetched("/manifest.json")).json();
  document.title = manifest.title ? `${manifest.title} · jumok` : "jumok";
  render({ model: { get: (name) => ({ manifest, full: true })[name], tiles, retell }, el: place });
  place.firstElementChild.focus();
} catch (error) {
  place.textContent = `The viewer could not start: ${error.message}`;
}
