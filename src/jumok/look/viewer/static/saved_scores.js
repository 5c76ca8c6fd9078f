// Maps that a saved file computes from rounded queries and keys (see viewer/score_factors.py).

/** Decode queries or keys: { length, planes }, a plane of float32 for each channel, of which the first is a bias. */
export function decodeSide(buffer) {
  const header = new DataView(buffer),
    [length, numChannels, numWide] = [0, 4, 8].map((at) => header.getUint32(at, true)),
    steps = [header.getFloat32(12, true), header.getFloat32(16, true)],
    codes = new Int8Array(buffer, 20);
  const planes = Array.from({ length: numChannels }, (_, channel) => {
    const plane = new Float32Array(length),
      step = steps[Math.min(channel, 1)],
      low = channel * length,
      high = (numChannels + channel) * length;
    for (let n = 0; n < length; n += 1)
      plane[n] = step * (codes[low + n] + (channel < numWide ? 256 * codes[high + n] : 0));
    return plane;
  });
  return { length, planes };
}

/** Decode which queries see which keys: a byte for each pair, row by row. */
export function decodeVisible(buffer, numPairs) {
  const bits = new Uint8Array(buffer),
    visible = new Uint8Array(numPairs);
  for (let n = 0; n < numPairs; n += 1) visible[n] = (bits[n >> 3] >> (n & 7)) & 1;
  return visible;
}

/**
 * Compute all weights of a head: { rows, cols, values }. `visible` and `rowSums` may be null; `rowSums` are the weights
 * of a row that its keys have together, if they are less than 1.
 */
export function computeWeights({ queries, keys, visible, softcap, rowSums }) {
  const { length: rows, planes: queryPlanes } = queries,
    { length: cols, planes: keyPlanes } = keys,
    values = new Float32Array(rows * cols);
  for (let row = 0; row < rows; row += 1) {
    const line = values.subarray(row * cols, (row + 1) * cols),
      isVisible = visible?.subarray(row * cols, (row + 1) * cols) ?? null,
      first = isVisible ? isVisible.indexOf(1) : 0,
      end = isVisible ? isVisible.lastIndexOf(1) + 1 : cols;
    if (end <= 0) continue; // no visible key
    addScores(line, queryPlanes, keyPlanes, row, first, end);
    if (softcap) for (let n = first; n < end; n += 1) line[n] = softcap * Math.tanh(line[n] / softcap);
    applySoftmax(line, isVisible, first, end, rowSums ? rowSums[row] : 1);
  }
  return { rows, cols, values };
}

function addScores(line, queryPlanes, keyPlanes, row, first, end) {
  const keyBias = keyPlanes[0],
    rowBias = queryPlanes[0][row];
  for (let n = first; n < end; n += 1) line[n] = keyBias[n] + rowBias;
  // Several channels at a time, so that the scores are read and written less often.
  const query = (channel) => (channel < queryPlanes.length ? queryPlanes[channel][row] : 0),
    key = (channel) => keyPlanes[Math.min(channel, keyPlanes.length - 1)];
  for (let channel = 1; channel < queryPlanes.length; channel += 8) {
    const [a, b, c, d, e, f, g, h] = [0, 1, 2, 3, 4, 5, 6, 7].map((n) => query(channel + n)),
      [p, q, r, s, t, u, v, w] = [0, 1, 2, 3, 4, 5, 6, 7].map((n) => key(channel + n));
    for (let n = first; n < end; n += 1)
      line[n] +=
        a * p[n] + b * q[n] + c * r[n] + d * s[n] + (e * t[n] + f * u[n] + g * v[n] + h * w[n]);
  }
}

function applySoftmax(line, isVisible, first, end, rowSum) {
  let most = -Infinity,
    sum = 0;
  for (let n = first; n < end; n += 1) if ((!isVisible || isVisible[n]) && line[n] > most) most = line[n];
  for (let n = first; n < end; n += 1) {
    line[n] = !isVisible || isVisible[n] ? Math.exp(line[n] - most) : 0;
    sum += line[n];
  }
  const scale = rowSum / sum;
  for (let n = first; n < end; n += 1) line[n] *= scale;
}
