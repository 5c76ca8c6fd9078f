// A scene with a server behind it: what there is, and numbers, which are given up when they are no longer wanted.

/** What `render` takes as its model, of a page of the viewer that is mounted there. */
export async function remote(base) {
  async function fetched(path, given) {
    const answer = await fetch(`${base}${path}`, given);
    if (!answer.ok)
      throw new Error((await answer.json().catch(() => ({}))).error ?? `the server answered ${answer.status}.`);
    return answer;
  }

  async function tiles({ scene, layer, head, rows, cols, size, what }, signal) {
    const query = new URLSearchParams({ scene, layer, head: head ?? "mean", rows, cols, size, what });
    return (await fetched(`/tiles?${query}`, { signal })).arrayBuffer();
  }

  async function retell(wish) {
    const headers = { "Content-Type": "application/json" };
    return (await fetched("/retold", { method: "POST", headers, body: JSON.stringify(wish) })).json();
  }

  const manifest = await (await fetched("/manifest.json")).json();
  return { get: (name) => ({ manifest })[name], tiles, retell };
}
