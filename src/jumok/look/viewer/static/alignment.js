// The alignment of the steps of speech to the symbols of its text. A long one is pooled to fewer cells.

export class Alignment {
  /** `answer`: the whole map in few cells; `shape`: the numbers of steps and symbols. */
  constructor(answer, [steps, symbols]) {
    Object.assign(this, { answer, steps, symbols, most: answer.most });
  }

  weight(step, symbol) {
    const { rows, cols, values } = this.answer;
    return values[Math.floor((step * rows) / this.steps) * cols + Math.floor((symbol * cols) / this.symbols)];
  }

  /** The weights of a step on all symbols. */
  at(step) {
    return Array.from({ length: this.symbols }, (_, n) => this.weight(step, n));
  }

  /** The weights on a symbol in all cells of time. */
  profile(symbol) {
    const { rows } = this.answer;
    return Array.from({ length: rows }, (_, cell) => this.weight(Math.floor((cell * this.steps) / rows), symbol));
  }

  /** The symbols with the highest weights of a step: [{ n, value }]. */
  rankSymbols(step, count) {
    return this.at(step)
      .map((value, n) => ({ n, value }))
      .sort((a, b) => b.value - a.value)
      .slice(0, count);
  }

  /** When a symbol has the highest weight: the first such step, the one after the last, and their number; or null. */
  findSpan(symbol) {
    const steps = [];
    for (let step = 0; step < this.steps; step += 1) {
      const own = this.weight(step, symbol);
      if (own > 0 && this.at(step).every((other) => other <= own)) steps.push(step);
    }
    return steps.length ? { from: steps[0], to: steps.at(-1) + 1, numSteps: steps.length } : null;
  }
}

/** Return the answer with time along its rows, of a map whose keys are spans of time. */
export function transposeAnswer({ rows, cols, values, most }) {
  const transposed = new Float32Array(values.length);
  for (let row = 0; row < rows; row += 1)
    for (let col = 0; col < cols; col += 1) transposed[col * rows + row] = values[row * cols + col];
  return { rows: cols, cols: rows, values: transposed, most };
}

/** Return the shortest span of weights with at least half of their total: { from, to, total }; null if it is 0. */
export function findHalf(weights) {
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  if (!(total > 0)) return null;
  let best = { from: 0, to: weights.length, total };
  for (let from = 0, to = 0, sum = 0; from < weights.length; from += 1) {
    for (; to < weights.length && sum < total / 2; to += 1) sum += weights[to];
    if (sum < total / 2) break;
    if (to - from < best.to - best.from) best = { from, to, total };
    sum -= weights[from];
  }
  return best;
}
