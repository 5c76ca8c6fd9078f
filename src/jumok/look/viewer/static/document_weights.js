// A text with the weights of its words: the data of the document view.

import { countWhile, decodeBase64 } from "./dom.js";
import { decode } from "./tiles.js";

const BLOCK_SIZE = 2000; // maximum number of words that are laid out together: a sentence may be very long

/** A document as in the manifest. A hop is a number; null is the mean of all hops. */
export class DocumentWeights {
  constructor({ words, separators, sentence_offsets, weights, sentence_weights, class_probabilities, label }) {
    Object.assign(this, { words, separators, offsets: sentence_offsets, probabilities: class_probabilities, label });
    const { rows, cols, values } = unpack(weights);
    this.hops = Array.from({ length: rows }, (_, hop) => values.subarray(hop * cols, (hop + 1) * cols));
    this.sentenceWeights = sentence_weights && unpack(sentence_weights).values;
    this.owners = new Uint32Array(cols); // the sentence of each word
    for (let s = 0; s < this.numSentences; s += 1) this.owners.fill(s, this.offsets[s], this.offsets[s + 1]);
    this.cache = new Map();
  }

  get length() {
    return this.words.length;
  }

  get numSentences() {
    return this.offsets.length - 1;
  }

  /** Statistics of a hop: the weights of words and sentences, the maximum of each sentence and of all, and orders. */
  at(hop) {
    const { cache, hops } = this;
    if (!cache.has(hop)) cache.set(hop, this.computeStatistics(hop === null ? computeMean(hops) : hops[hop]));
    return cache.get(hop);
  }

  computeStatistics(words) {
    const sums = new Float32Array(this.numSentences),
      maxima = new Float32Array(this.numSentences);
    let best = 0;
    words.forEach((weight, n) => {
      const s = this.owners[n];
      sums[s] += weight;
      if (weight > maxima[s]) maxima[s] = weight;
      if (weight > words[best]) best = n;
    });
    const sentences = this.sentenceWeights ?? sums;
    const order = Array.from(sentences.keys()).sort((a, b) => sentences[b] - sentences[a]); // the highest first
    const sorted = { words: Float32Array.from(words).sort(), sentences: Float32Array.from(sentences).sort() };
    return { words, sentences, sums, maxima, best, most: words[best], order, sorted };
  }

  /** The weight and rank of a word. Words with equal weights share a rank. */
  wordInfo(n, hop) {
    const { words, sums, sorted } = this.at(hop),
      s = this.owners[n];
    const share = sums[s] > 0 ? words[n] / sums[s] : 0;
    return { weight: words[n], rank: getRank(sorted.words, words[n]), share, sentence: this.sentenceInfo(s, hop) };
  }

  sentenceInfo(s, hop) {
    const { sentences, sorted } = this.at(hop);
    return {
      number: s,
      weight: sentences[s],
      rank: getRank(sorted.sentences, sentences[s]),
      part: sentences[s] / (sorted.sentences.at(-1) || 1),
      words: this.offsets[s + 1] - this.offsets[s],
    };
  }

  /** The blocks that are laid out one below the other: sentences, or parts of a very long one. */
  blocks() {
    const blocks = [];
    for (let s = 0; s < this.numSentences; s += 1) {
      for (let first = this.offsets[s]; first < this.offsets[s + 1]; ) {
        const last = this.findBlockEnd(first, this.offsets[s + 1]);
        blocks.push({ sentence: s, first, last });
        first = last;
      }
    }
    return blocks;
  }

  // At a line break, if there is one near the limit.
  findBlockEnd(first, end) {
    if (end - first <= BLOCK_SIZE) return end;
    for (let n = first + BLOCK_SIZE; n > first + BLOCK_SIZE / 2; n -= 1)
      if (this.separators[n].includes("\n")) return n;
    return first + BLOCK_SIZE;
  }
}

function unpack(text) {
  return decode(decodeBase64(text).buffer);
}

function computeMean(hops) {
  if (hops.length === 1) return hops[0];
  const sum = new Float64Array(hops[0].length);
  for (const hop of hops) for (let n = 0; n < sum.length; n += 1) sum[n] += hop[n];
  return Float32Array.from(sum, (value) => value / hops.length);
}

// 1 for the highest; `sorted` is ascending.
function getRank(sorted, weight) {
  return sorted.length - countWhile(sorted.length, (n) => sorted[n] <= weight) + 1;
}
