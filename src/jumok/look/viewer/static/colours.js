// The colour scales, defined in the OKLab space.
//
// A scale passes through a few colours and is resampled to 256 steps of equal length in OKLab, so that equal steps of
// weight look equally far apart. Lightness is monotonic, so scales work in grey and for every type of colour vision.
// "Blue" has one hue; "Dusk" goes from blue to yellow, a pair that almost all types of colour blindness distinguish (as
// in cividis). On a light page a higher weight is darker, on a dark page it is lighter: 0 always has the colour of the
// page.

const STEPS = 256;

// Stops as [lightness, chroma, hue in degrees].
const STOPS = {
  blue: {
    light: [[0.987, 0.006, 240], [0.86, 0.075, 236], [0.68, 0.135, 244], [0.48, 0.155, 258], [0.26, 0.11, 268]],
    dark: [[0.215, 0.012, 262], [0.34, 0.085, 264], [0.52, 0.14, 254], [0.74, 0.125, 235], [0.97, 0.03, 220]],
  },
  dusk: {
    light: [[0.985, 0.03, 100], [0.86, 0.13, 92], [0.68, 0.085, 75], [0.48, 0.05, 280], [0.27, 0.12, 268]],
    dark: [[0.215, 0.02, 262], [0.36, 0.1, 266], [0.55, 0.035, 270], [0.75, 0.095, 85], [0.96, 0.14, 103]],
  },
  grey: {
    light: [[0.99, 0, 0], [0.18, 0, 0]],
    dark: [[0.215, 0.006, 262], [0.98, 0, 0]],
  },
  // For the overlay of an image, in any theme: from dark to light.
  overlay: { dark: [[0.2, 0.025, 262], [0.58, 0.05, 85], [0.92, 0.12, 96]] },
};
// For differences: lower in orange, higher in blue, no change in the colour of the page.
const DIVERGING_STOPS = {
  light: {
    lower: [[0.985, 0, 60], [0.8, 0.1, 62], [0.44, 0.13, 48]],
    higher: [[0.985, 0, 245], [0.8, 0.085, 240], [0.42, 0.15, 262]],
  },
  dark: {
    lower: [[0.215, 0.006, 262], [0.5, 0.11, 50], [0.9, 0.09, 75]],
    higher: [[0.215, 0.006, 262], [0.5, 0.13, 256], [0.9, 0.07, 225]],
  },
};

export const SCALES = { blue: "Blue", dusk: "Dusk", grey: "Grey" };
export const CURVES = { linear: "Linear", root: "Square root", log: "Logarithmic" };

/** 256 colours `[red, green, blue]` from weight 0 to the maximum. */
export function getScale(name, theme) {
  return resample(STOPS[name][theme], STEPS);
}

/** 256 colours from lower, over no change (127.5), to higher. */
export function getDivergingScale(theme) {
  const lower = resample(DIVERGING_STOPS[theme].lower, STEPS / 2),
    higher = resample(DIVERGING_STOPS[theme].higher, STEPS / 2);
  return [...lower.reverse(), ...higher];
}

/** Pack colours to pixels of an ImageData (little-endian, as on all machines that run browsers). */
export function packColours(colours) {
  return Uint32Array.from(colours, ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
}

export function toCss([r, g, b]) {
  return `rgb(${r} ${g} ${b})`;
}

/** Whether dark text is more readable than light text on a colour. */
export function needsDarkInk([r, g, b]) {
  return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) > 0.22;
}

function resample(stops, numColours) {
  const points = [];
  for (let n = 0; n <= 400; n += 1) points.push(interpolate(stops, n / 400));
  const length = [0];
  for (let n = 1; n < points.length; n += 1) {
    length.push(length[n - 1] + Math.hypot(...points[n].map((value, k) => value - points[n - 1][k])));
  }
  const colours = [];
  for (let n = 0, at = 0; n < numColours; n += 1) {
    const target = (n / (numColours - 1)) * length.at(-1);
    while (at < points.length - 2 && length[at + 1] < target) at += 1;
    const fraction = (target - length[at]) / (length[at + 1] - length[at] || 1);
    colours.push(toRgb(points[at].map((value, k) => value + fraction * (points[at + 1][k] - value))));
  }
  return colours;
}

// A point on the Catmull-Rom curve through the stops, in OKLab.
function interpolate(stops, at) {
  const points = stops.map(([l, c, h]) => [l, c * Math.cos((h * Math.PI) / 180), c * Math.sin((h * Math.PI) / 180)]);
  const position = at * (points.length - 1),
    n = Math.min(points.length - 2, Math.floor(position)),
    t = position - n;
  const [a, b, c, d] = [-1, 0, 1, 2].map((k) => points[Math.min(points.length - 1, Math.max(0, n + k))]);
  return b.map((_, k) => {
    const slope = (c[k] - a[k]) / 2,
      next = (d[k] - b[k]) / 2;
    return (
      (2 * t ** 3 - 3 * t ** 2 + 1) * b[k] +
      (t ** 3 - 2 * t ** 2 + t) * slope +
      (3 * t ** 2 - 2 * t ** 3) * c[k] +
      (t ** 3 - t ** 2) * next
    );
  });
}

// Convert OKLab to sRGB (Ottosson); the chroma of colours outside the gamut is reduced.
function toRgb([light, a, b]) {
  for (let chroma = 1; ; chroma -= 0.02) {
    const l = (light + 0.3963377774 * a * chroma + 0.2158037573 * b * chroma) ** 3;
    const m = (light - 0.1055613458 * a * chroma - 0.0638541728 * b * chroma) ** 3;
    const s = (light - 0.0894841775 * a * chroma - 1.291485548 * b * chroma) ** 3;
    const rgb = [
      4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
      -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
      -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    ];
    if (chroma <= 0 || rgb.every((value) => value > -0.002 && value < 1.002)) {
      return rgb.map((value) => Math.round(255 * gamma(Math.min(1, Math.max(0, value)))));
    }
  }
}

function gamma(value) {
  return value <= 0.0031308 ? 12.92 * value : 1.055 * value ** (1 / 2.4) - 0.055;
}

function linear(byte) {
  const value = byte / 255;
  return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
}

/** The mapping from a weight to its position on the scale, 0 to 1, and back. `low` is used by the logarithm only. */
export function createCurve(kind, low, top) {
  if (kind === "log") {
    const first = Math.log(low),
      span = Math.log(top) - first || 1;
    return {
      isLog: true,
      to: (weight) => (weight <= low ? 0 : weight >= top ? 1 : (Math.log(weight) - first) / span),
      from: (position) => Math.exp(first + position * span),
    };
  }
  if (kind === "root") {
    return {
      to: (weight) => Math.min(1, Math.sqrt(Math.max(0, weight) / top)),
      from: (position) => position * position * top,
    };
  }
  return { to: (weight) => Math.min(1, Math.max(0, weight / top)), from: (position) => position * top };
}

/** The highest weight of each of `count` sections of a text. */
export function findSectionMaxima(weights, count) {
  return Array.from({ length: count }, (_, n) => {
    const first = Math.floor((n / count) * weights.length),
      last = Math.max(first + 1, Math.floor(((n + 1) / count) * weights.length));
    return weights.subarray(first, last).reduce((most, weight) => Math.max(most, weight), 0);
  });
}

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** Format a weight: 0.831, 0.0042, 3.1×10⁻⁶. */
export function formatWeight(weight, digits = 3) {
  if (!Number.isFinite(weight)) return "–";
  if (weight === 0) return "0";
  const size = Math.abs(weight);
  if (size >= 0.00095) return `${Number(weight.toPrecision(digits))}`;
  const [mantissa, power] = weight.toExponential(Math.max(0, digits - 2)).split("e-");
  return `${mantissa}×10⁻${[...power].map((digit) => SUPERSCRIPTS[Number(digit)]).join("")}`;
}

/** Format a count: 65,536. */
export function formatCount(number) {
  return number.toLocaleString("en-US");
}

/** Format a count of things: 1 word, 2 words. */
export function pluralize(number, name) {
  return `${formatCount(number)} ${number === 1 ? name : `${name}s`}`;
}
