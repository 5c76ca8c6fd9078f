// Links to a model and an input. Both are in the fragment of the URL (after #), which browsers do not send.

/** The { model, values } of the current URL, or null. */
export function readLink() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  if (![...parameters.keys()].length) return null;
  const model = parameters.get("model");
  parameters.delete("model");
  return { model, values: Object.fromEntries(parameters) };
}

export function buildLink(model, values) {
  const defined = Object.entries(values).filter(([, value]) => value !== undefined);
  return `#${new URLSearchParams({ model, ...Object.fromEntries(defined) })}`;
}
