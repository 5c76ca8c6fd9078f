// How much each step of speech looks at each symbol of its text. A long one is pooled to fewer cells.

export class Alignment {
  /** `answer`: the whole map in few cells; `shape`: how many steps and symbols there are. */
  constructor(answer, [steps, symbols]) {
    Object.assign(this, { answer, steps, symbols, most: answer.most });
  }

  weight(step, symbol) {
    const { rows, cols, values } = this.answer;
    return values[Math.floor((step * rows) / this.steps) * cols + Math.floor((symbol * cols) / this.symbols)];
  }

  /** Of a step, all symbols. */
  at(step) {
    return Array.from({ length: this.symbols }, (_, n) => this.weight(step, n));
  }

  /** Of a symbol, all cells of time. */
  profile(symbol) {
    const { rows } = this.answer;
    return Array.from({ length: rows }, (_, cell) => this.weight(Math.floor((cell * this.steps) / rows), symbol));
  }

  /** The symbols that a step looks at most: [{ n, value }]. */
  ranked(step, most) {
    return this.at(step)
      .map((value, n) => ({ n, value }))
      .sort((a, b) => b.value - a.value)
      .slice(0, most);
  }

  /** When a symbol is looked at most of all: the first such step, the one after the last, how many; or null. */
  spoken(symbol) {
    const found = [];
    for (let step = 0; step < this.steps; step += 1) {
      const own = this.weight(step, symbol);
      if (own > 0 && this.at(step).every((other) => other <= own)) found.push(step);
    }
    return found.length ? { from: found[0], to: found.at(-1) + 1, many: found.length } : null;
  }
}
