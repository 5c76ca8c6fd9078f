// Weights without attention sinks, as viewer/sink_filter.py computes them.

const MIN_REST = 1e-6; // weight beside the sinks, below which nothing is left: the row becomes 0

/** Remove the keys `sinks` from a whole map { rows, cols, values }, and scale the rest of each row to its old sum. */
export function removeSinks({ rows, cols, values }, sinks) {
  const result = Float32Array.from(values);
  for (let first = 0; first < result.length; first += cols) {
    const row = result.subarray(first, first + cols),
      sum = row.reduce((total, weight) => total + weight, 0);
    let rest = sum;
    for (const key of sinks) {
      rest -= row[key];
      row[key] = 0;
    }
    const scale = rest > MIN_REST ? sum / rest : 0;
    for (let n = 0; n < cols; n += 1) row[n] *= scale;
  }
  return { rows, cols, values: result };
}

/** Describe the sinks of a layer: their texts, the most frequent first. */
export function describeSinks(sinks, texts, maxTexts = 4) {
  if (!texts) return sinks.length === 1 ? "the first token" : `${sinks.length} tokens`;
  const names = [...new Set(sinks.map((key) => texts[key]))];
  return names.length > maxTexts ? `${names.slice(0, maxTexts).join(" ")} …` : names.join(" ");
}
