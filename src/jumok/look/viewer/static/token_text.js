// Token texts: visible, short, and never cut within a grapheme.

const segmenter =
  typeof Intl !== "undefined" && Intl.Segmenter ? new Intl.Segmenter(undefined, { granularity: "grapheme" }) : null;

const SPECIAL_TOKEN = /^(<(?!0x)[^<>]+>|\[\/?[A-Z][A-Z_]*\d*\])$/; // as in token_marks.py: <s>, [CLS], <|end|>

/** Whether a token is a special one, by its text. */
export function isSpecialToken(text) {
  return SPECIAL_TOKEN.test(text.trim());
}

/** The labels of the queries of a decoder that attend to another text: the token read, and the one it produced. */
export function labelWithOutputs(texts, outputs) {
  return texts.map((text, n) => (outputs[n] ? `${truncateText(text, 16)} → ${truncateText(outputs[n], 16)}` : text));
}

/** Describe what followed a query of a decoder: the token that it predicted, or the next one of a given text. */
export function describeOutput({ outputs, generated }, row) {
  const output = outputs?.[row];
  return output ? `${row + 1 >= generated.rows ? "predicted" : "next token"}: ${truncateText(output, 40)}` : null;
}

/** Split a text into graphemes: a syllable, an emoji with its skin tone, a letter with its marks. */
export function splitGraphemes(text) {
  return segmenter ? Array.from(segmenter.segment(text), (part) => part.segment) : Array.from(text);
}

// Control characters are replaced: a single override reverses the text of a whole line.
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ufeff]/g;
const VISIBLE_BLANKS = { "\n": "⏎", "\r": "⏎", "\t": "⇥", " ": "␣", "\u00a0": "␣", "\u3000": "␣" };

// Conjoining Hangul letters, and how they are written in isolation.
const ISOLATED_JAMO = {
  4352: "ㄱㄲㄴㄷㄸㄹㅁㅂㅃㅅㅆㅇㅈㅉㅊㅋㅌㅍㅎ",
  4449: "ㅏㅐㅑㅒㅓㅔㅕㅖㅗㅘㅙㅚㅛㅜㅝㅞㅟㅠㅡㅢㅣ",
  4520: "ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ",
};

function isolatedJamo(letter) {
  const code = letter.codePointAt(0),
    [first, letters] = Object.entries(ISOLATED_JAMO).findLast(([start]) => code >= start);
  return letters[code - first] ?? letter;
}

/** Return a token on one line, with visible blanks; at most `maxLength` characters. */
export function truncateText(text, maxLength = 24) {
  if (text === "") return "∅";
  let clean = text.replace(/[\n\r\t]/g, (blank) => VISIBLE_BLANKS[blank]);
  clean = clean.replace(CONTROLS, "�").replace(/^[\u1100-\u11ff]$/, isolatedJamo);
  if (/^[ \u00a0\u3000]+$/.test(clean)) clean = clean.replace(/[ \u00a0\u3000]/g, "␣");
  else
    clean = clean
      .replace(/^[▁Ġ ](?=\S)/, "·")
      .replace(/Ċ/g, "⏎")
      .trim(); // how tokenizers write blanks
  if (clean.length <= maxLength) return clean;
  const parts = splitGraphemes(clean.slice(0, 64 * maxLength)); // a token may be a whole document
  return parts.length <= maxLength ? clean : `${parts.slice(0, maxLength - 1).join("")}…`;
}

/** Return a part of a text with its line breaks and blanks, without control characters. */
export function replaceControls(text) {
  return text.replace(/\r\n?/g, "\n").replace(CONTROLS, (letter) => (/[\n\t]/.test(letter) ? letter : "�"));
}

/** Whether a text is read from right to left, as its first letter with a direction. */
export function isRightToLeft(text) {
  const first = text.match(/\p{L}/u);
  return first !== null && /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]|[\ud802\ud803\ud83a\ud83b]/u.test(first[0]);
}

/** Truncates texts to a width in pixels, and caches measurements. */
export class Ruler {
  constructor() {
    this.context = document.createElement("canvas").getContext("2d");
    this.widths = new Map();
    this.fits = new Map();
    this.font = "";
  }

  use(font) {
    if (font === this.font) return;
    this.font = this.context.font = font;
    this.widths.clear();
    this.fits.clear();
  }

  width(text) {
    let result = this.widths.get(text);
    if (result === undefined) {
      if (this.widths.size > 20_000) this.widths.clear();
      result = this.context.measureText(text).width;
      this.widths.set(text, result);
    }
    return result;
  }

  fit(text, width) {
    if (this.width(text) <= width) return text;
    const key = `${Math.round(width)} ${text}`;
    let result = this.fits.get(key);
    if (result === undefined) {
      if (this.fits.size > 20_000) this.fits.clear();
      const parts = splitGraphemes(text);
      let length = parts.length - 1;
      while (length > 0 && this.width(`${parts.slice(0, length).join("")}…`) > width) length -= 1;
      result = length ? `${parts.slice(0, length).join("")}…` : "…";
      this.fits.set(key, result);
    }
    return result;
  }
}

/**
 * Join tokens to a text: for each, whether a blank precedes it, and the text without its marker. Subword markers are
 * supported (▁ and Ġ begin a word, ## continues one); plain words get blanks.
 */
export function joinTokens(tokens) {
  const hasWordStarts = tokens.some((token) => /^[▁Ġ ]\S/.test(token));
  const hasContinuations = tokens.some((token) => token.startsWith("##"));
  return tokens.map((token, n) => {
    if (hasWordStarts) return { blank: /^[▁Ġ ]/.test(token), text: token.replace(/^[▁Ġ ]/, "") };
    if (hasContinuations) return { blank: n > 0 && !token.startsWith("##"), text: token.replace(/^##/, "") };
    return { blank: n > 0, text: token };
  });
}

/** Remove the common beginning and end of layer names; unchanged if nothing would be left of one. */
export function shortNames(names) {
  const parts = names.map((name) => name.split("."));
  const minParts = Math.min(...parts.map((part) => part.length));
  let front = 0,
    back = 0;
  while (front < minParts - 1 && parts.every((part) => part[front] === parts[0][front])) front += 1;
  while (back < minParts - 1 - front && parts.every((part) => part.at(-1 - back) === parts[0].at(-1 - back))) back += 1;
  if (names.length < 2) return names;
  // A number alone says little: keep the word before it.
  const isNumber = parts.every((part) => part.length - front - back === 1 && /^\d+$/.test(part[front]));
  const from = isNumber && front > 0 ? front - 1 : front;
  return parts.map((part) => part.slice(from, part.length - back).join(" "));
}
