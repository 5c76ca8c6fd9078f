// Helpers for the page. Text is always set as text: neither this file nor any other parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element: `createElement("button", { text: "Fit", aria: { label: "…" }, onclick }, children)`. */
export function createElement(tag, attributes = {}, children = []) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function createSvg(tag, attributes = {}, children = []) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "aria")
      for (const [key, text] of Object.entries(value)) element.setAttribute(`aria-${key}`, text);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "css") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const STROKES = {
  left: "M10 3 5 8l5 5",
  right: "m6 3 5 5-5 5",
  plus: "M8 3v10M3 8h10",
  minus: "M3 8h10",
  fit: "M2.5 6V2.5H6M10 2.5h3.5V6M13.5 10v3.5H10M6 13.5H2.5V10",
  moon: "M13 9.6A5.6 5.6 0 0 1 6.4 3a5.6 5.6 0 1 0 6.6 6.6Z",
  sun:
    "M8 1.5v1.6M8 12.9v1.6M1.5 8h1.6M12.9 8h1.6M3.4 3.4l1.1 1.1M11.5 11.5l1.1 1.1M3.4 12.6l1.1-1.1M11.5 4.5l1.1-1.1" +
    "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6Z",
  save: "M8 2v8M4.8 7 8 10.2 11.2 7M2.5 13.5h11",
  close: "m4 4 8 8M12 4l-8 8",
  play: "M5 3.2v9.6L12.6 8Z",
  pause: "M5.5 3.5v9M10.5 3.5v9",
  help: "M5.6 6a2.4 2.4 0 1 1 3.5 2.1C8.4 8.5 8 9 8 9.8M8 12.4v.1",
  text: "M2.5 4h11M2.5 7h11M2.5 10h11M2.5 13h7",
  digits: "M3.5 5.5 5 4.5v7M8.5 6a1.6 1.6 0 1 1 2.8 1l-3 4.5h3.4",
};

/** Create an icon, 16 units wide, in the colour of the surrounding text. */
export function icon(name) {
  return createSvg("svg", { viewBox: "0 0 16 16", class: "jm-icon", aria: { hidden: "true" } }, [
    createSvg("path", { d: STROKES[name] }),
  ]);
}

/** Create a text of the data, isolated from the direction of the surrounding text. */
export function createWord(text, attributes = {}) {
  return createElement("bdi", { dir: "auto", ...attributes, text });
}

/** Create a button with an icon and a label. */
export function iconButton(name, label, onclick, attributes = {}) {
  return createElement(
    "button",
    { type: "button", class: "jm-button jm-square", title: label, aria: { label }, onclick, ...attributes },
    [icon(name)],
  );
}

/** The direction of an arrow key: down and right. */
export const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

/** Return how many of the indices 0, 1, … have a property. Those that have it come first. */
export function countWhile(length, hasProperty) {
  let low = 0,
    high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (hasProperty(middle)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Size a canvas in CSS pixels for this screen. Returns its context, cleared. */
export function sizeCanvas(canvas, width, height) {
  const ratio = globalThis.devicePixelRatio || 1;
  const pixelWidth = Math.max(1, Math.round(width * ratio)),
    pixelHeight = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Create a canvas of these pixels; `paint` fills them, packed as in colours.js. */
export function createPixels(width, height, paint) {
  const canvas = createElement("canvas", { width, height }),
    data = new ImageData(width, height);
  paint(new Uint32Array(data.data.buffer));
  canvas.getContext("2d").putImageData(data, 0, 0);
  return canvas;
}

/** Encode a canvas as a PNG file. */
export function encodePng(canvas) {
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/** Decode base64 to bytes. */
export function decodeBase64(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

/** Let the user download a file. */
export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  createElement("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
