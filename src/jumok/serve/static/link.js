// The address: model and input stand behind its #, which browsers keep to themselves. No server sees them.

/** { model, values } as the address has them, or null. */
export function readLink() {
  const found = new URLSearchParams(location.hash.slice(1));
  if (![...found.keys()].length) return null;
  const model = found.get("model");
  found.delete("model");
  return { model, values: Object.fromEntries(found) };
}

export function linkTo(model, values) {
  const known = Object.entries(values).filter(([, value]) => value !== undefined);
  return `#${new URLSearchParams({ model, ...Object.fromEntries(known) })}`;
}
