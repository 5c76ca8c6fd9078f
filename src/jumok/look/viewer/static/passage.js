// A text with the weights of its words: what the document view knows, without any of what it draws.

import { decode } from "./tiles.js";

const A_BLOCK = 2000; // words that are laid out together at most: a sentence may be a whole book

/** A document as the manifest tells it. A hop is a number; null is the mean of all of them. */
export class Passage {
  constructor({ words, before, sentences, weights, within, said, truth }) {
    Object.assign(this, { words, before, edges: sentences, said, truth });
    const { rows, cols, values } = unpacked(weights);
    this.hops = Array.from({ length: rows }, (_, hop) => values.subarray(hop * cols, (hop + 1) * cols));
    this.within = within && unpacked(within).values;
    this.owners = new Uint32Array(cols); // the sentence of each word
    for (let s = 0; s < this.sentences; s += 1) this.owners.fill(s, sentences[s], sentences[s + 1]);
    this.made = new Map();
  }

  get length() {
    return this.words.length;
  }

  get sentences() {
    return this.edges.length - 1;
  }

  /** Of a hop: the weights of words and sentences, the strongest word of each sentence and of all, and orders. */
  at(hop) {
    if (!this.made.has(hop)) this.made.set(hop, this.weigh(hop === null ? mean(this.hops) : this.hops[hop]));
    return this.made.get(hop);
  }

  weigh(words) {
    const sums = new Float32Array(this.sentences),
      tops = new Float32Array(this.sentences);
    let best = 0;
    words.forEach((weight, n) => {
      const s = this.owners[n];
      sums[s] += weight;
      if (weight > tops[s]) tops[s] = weight;
      if (weight > words[best]) best = n;
    });
    const sentences = this.within ?? sums;
    const order = Array.from(sentences.keys()).sort((a, b) => sentences[b] - sentences[a]); // the strongest first
    const sorted = { words: Float32Array.from(words).sort(), sentences: Float32Array.from(sentences).sort() };
    return { words, sentences, sums, tops, best, most: words[best], order, sorted };
  }

  /** All that is to be told of a word. Those with equal weights share a rank. */
  word(n, hop) {
    const { words, sums, sorted } = this.at(hop),
      s = this.owners[n];
    const share = sums[s] > 0 ? words[n] / sums[s] : 0;
    return { weight: words[n], rank: rankIn(sorted.words, words[n]), share, sentence: this.sentence(s, hop) };
  }

  sentence(s, hop) {
    const { sentences, sorted } = this.at(hop);
    return {
      number: s,
      weight: sentences[s],
      rank: rankIn(sorted.sentences, sentences[s]),
      part: sentences[s] / (sorted.sentences.at(-1) || 1),
      words: this.edges[s + 1] - this.edges[s],
    };
  }

  /** The pieces that are laid out one below the other: sentences, or parts of one that has too many words. */
  blocks() {
    const found = [];
    for (let s = 0; s < this.sentences; s += 1) {
      for (let first = this.edges[s]; first < this.edges[s + 1]; ) {
        const last = this.cut(first, this.edges[s + 1]);
        found.push({ sentence: s, first, last });
        first = last;
      }
    }
    return found;
  }

  // Where a line ends anyway, if it does so soon enough.
  cut(first, end) {
    if (end - first <= A_BLOCK) return end;
    for (let n = first + A_BLOCK; n > first + A_BLOCK / 2; n -= 1) if (this.before[n].includes("\n")) return n;
    return first + A_BLOCK;
  }
}

function unpacked(text) {
  return decode(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

function mean(hops) {
  if (hops.length === 1) return hops[0];
  const sum = new Float64Array(hops[0].length);
  for (const hop of hops) for (let n = 0; n < sum.length; n += 1) sum[n] += hop[n];
  return Float32Array.from(sum, (value) => value / hops.length);
}

// 1 for the strongest; `sorted` rises.
function rankIn(sorted, weight) {
  let low = 0,
    high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= weight) low = middle + 1;
    else high = middle;
  }
  return sorted.length - low + 1;
}
