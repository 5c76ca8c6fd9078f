// The model of a viewer with a server: manifest and tiles.

/** Return the model that `render` takes, for the viewer that is mounted at `base`. */
export async function remote(base) {
  async function fetchChecked(path, options) {
    const answer = await fetch(`${base}${path}`, options);
    if (!answer.ok)
      throw new Error((await answer.json().catch(() => ({}))).error ?? `the server returned ${answer.status}.`);
    return answer;
  }

  async function tiles(request, signal) {
    const query = new URLSearchParams({ ...request, head: request.head ?? "mean" });
    return (await fetchChecked(`/tiles?${query}`, { signal })).arrayBuffer();
  }

  async function resynthesize(payload) {
    const headers = { "Content-Type": "application/json" };
    return (await fetchChecked("/resynthesize", { method: "POST", headers, body: JSON.stringify(payload) })).json();
  }

  const manifest = await (await fetchChecked("/manifest.json")).json();
  return { get: (name) => ({ manifest })[name], tiles, resynthesize };
}
