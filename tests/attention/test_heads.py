"""Multi-head attention: PyTorch's own module, heads by hand, and calls without a cache as oracles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from jumok import masks, scores
from jumok.attention.heads import MultiHead
from jumok.attention.kv_cache import KVCache
from jumok.errors import InputError

B, Q, K, H, D, SOURCE = 2, 5, 7, 3, 11, 13  # all different and prime
WIDTH = H * D
LENGTHS = [3, 7]


@pytest.fixture(autouse=True)
def _small_and_exact() -> Iterator[None]:
    """Float64, and one thread: the sizes are tiny, and threads that wait for a busy core cost seconds."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------ beside nn.MultiheadAttention


def pair(key_width: int | None = None, bias: bool = True) -> tuple[MultiHead, nn.MultiheadAttention]:
    """Ours and PyTorch's, with the same random weights."""
    peer = nn.MultiheadAttention(WIDTH, H, bias=bias, kdim=key_width, vdim=key_width, batch_first=True)
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MultiHead(WIDTH, H, key_width=key_width, bias=bias)
    ours.load_state_dict(from_peer(peer, lambda parameter: parameter.detach()))
    return ours, peer


def from_peer(peer: nn.MultiheadAttention, look) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """What ``look`` finds at the peer's parameters (their values or gradients), under our names."""
    found = {"merge.weight": look(peer.out_proj.weight)}
    if peer.in_proj_weight is not None:
        found["project.weight"] = look(peer.in_proj_weight)
    else:
        found["project_query.weight"] = look(peer.q_proj_weight)
        found["project_source.weight"] = torch.cat([look(peer.k_proj_weight), look(peer.v_proj_weight)])
    if peer.in_proj_bias is not None:
        found["merge.bias"], bias = look(peer.out_proj.bias), look(peer.in_proj_bias)
        if peer.in_proj_weight is not None:
            found["project.bias"] = bias
        else:
            found["project_query.bias"], found["project_source.bias"] = bias[:WIDTH], bias[WIDTH:]
    return found


def check_same(ours: MultiHead, peer: nn.MultiheadAttention, out: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Outputs, and the gradients of inputs and weights."""
    torch.testing.assert_close(out, expected)
    towards = torch.randn_like(out)
    mine = torch.autograd.grad(out, [*inputs, *ours.parameters()], towards)
    theirs = torch.autograd.grad(expected, [*inputs, *peer.parameters()], towards, retain_graph=True)
    by_parameter = dict(zip(map(id, peer.parameters()), theirs[len(inputs) :], strict=True))
    expected_gradients = from_peer(peer, lambda parameter: by_parameter[id(parameter)])
    for a, b in zip(mine[: len(inputs)], theirs[: len(inputs)], strict=True):
        torch.testing.assert_close(a, b)
    for (name, _), gradient in zip(ours.named_parameters(), mine[len(inputs) :], strict=True):
        torch.testing.assert_close(gradient, expected_gradients[name])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_self_attention_is_that_of_torch(bias: bool, causal: bool, padded: bool) -> None:
    ours, peer = pair(bias=bias)
    x = torch.randn(B, K, WIDTH, requires_grad=True)
    mask, arguments = None, {}
    if causal:
        mask = masks.causal()
        arguments["attn_mask"] = ~torch.ones(K, K, dtype=torch.bool).tril()
    if padded:
        mask = masks.padding(LENGTHS) & mask if mask is not None else masks.padding(LENGTHS)
        arguments["key_padding_mask"] = torch.arange(K) >= torch.tensor(LENGTHS)[:, None]
    expected, _ = peer(x, x, x, need_weights=False, **arguments)
    check_same(ours, peer, ours(x, mask=mask), expected, x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_is_that_of_torch(bias: bool, padded: bool) -> None:
    ours, peer = pair(SOURCE, bias)
    x = torch.randn(B, Q, WIDTH, requires_grad=True)
    source = torch.randn(B, K, SOURCE, requires_grad=True)
    dropped = torch.arange(K) >= torch.tensor(LENGTHS)[:, None] if padded else None
    expected, _ = peer(x, source, source, need_weights=False, key_padding_mask=dropped)
    mask = masks.padding(LENGTHS) if padded else None
    check_same(ours, peer, ours(x, source, mask=mask), expected, x, source)
    # The same, with the keys and values computed beforehand.
    check_same(ours, peer, ours(x, ours.prepare(source), mask=mask), expected, x, source)
    if padded:  # a prepared source that was told its lengths needs no mask
        check_same(ours, peer, ours(x, ours.prepare(source, LENGTHS)), expected, x, source)


# ------------------------------------------------------------------------------- heads, by hand


def by_hand(mha: MultiHead, x: Tensor, source: Tensor | None = None) -> Tensor:
    """One head after the other, from the weights and the formula alone."""
    d, group = mha.head_width, mha.num_heads // mha.num_key_heads
    if source is None:
        queries, keys, values = mha.project(x).split(
            [mha.num_heads * d, mha.num_key_heads * d, mha.num_key_heads * d], dim=-1
        )
    else:
        queries, (keys, values) = mha.project_query(x), mha.project_source(source).chunk(2, dim=-1)
    outs = []
    for head in range(mha.num_heads):
        own, shared = slice(head * d, (head + 1) * d), slice(head // group * d, (head // group + 1) * d)
        query, key, value = queries[..., own], keys[..., shared], values[..., shared]
        score = query @ key.transpose(1, 2) / d**0.5 if mha.score is None else mha.score(query, key)
        outs.append(score.softmax(-1) @ value)
    merged: Tensor = mha.merge(torch.cat(outs, dim=-1))
    return merged


@pytest.mark.parametrize("key_heads", [None, 1, 2, 3, 6])
def test_grouped_queries_are_heads_that_share_their_keys(key_heads: int | None) -> None:
    x, source = torch.randn(B, Q, WIDTH), torch.randn(B, K, SOURCE)
    cross = MultiHead(WIDTH, 6, num_key_heads=key_heads, head_width=D, key_width=SOURCE)
    torch.testing.assert_close(cross(x, source), by_hand(cross, x, source))
    alone = MultiHead(WIDTH, 6, num_key_heads=key_heads, head_width=D)
    torch.testing.assert_close(alone(x), by_hand(alone, x))
    _, cache = alone.step(x, KVCache())
    assert cache.key.shape == cache.value.shape == (B, key_heads or 6, Q, D)  # held once, not for every head


def test_grouped_queries_are_all_heads_with_repeated_weights() -> None:
    grouped, full = MultiHead(WIDTH, 6, num_key_heads=2, head_width=D), MultiHead(WIDTH, 6, head_width=D)
    weights = grouped.state_dict()
    for name in ("project.weight", "project.bias"):
        query, key, value = weights[name].unflatten(0, (-1, D)).split([6, 2, 2])
        repeated = [query, key.repeat_interleave(3, dim=0), value.repeat_interleave(3, dim=0)]
        weights[name] = torch.cat(repeated).flatten(0, 1)
    full.load_state_dict(weights)
    x, mask = torch.randn(B, Q, WIDTH), masks.causal() & masks.padding([2, 5])
    torch.testing.assert_close(grouped(x, mask=mask), full(x, mask=mask))


@pytest.mark.parametrize("score", [scores.Dot, scores.General, scores.Additive])
def test_any_score_between_vectors_of_a_head(score: type[scores.Score]) -> None:
    sizes = {scores.Dot: (), scores.General: (D, D), scores.Additive: (D, D, 5)}[score]
    mha = MultiHead(WIDTH, H, score=score(*sizes))
    x = torch.randn(B, Q, WIDTH)
    torch.testing.assert_close(mha(x), by_hand(mha, x))
    assert len(list(mha.parameters())) == 4 + len(list(score(*sizes).parameters()))


def test_packed_documents_do_not_see_each_other() -> None:
    mha = MultiHead(WIDTH, H)
    one, two = torch.randn(1, 3, WIDTH), torch.randn(1, 4, WIDTH)
    packed = mha(torch.cat([one, two], dim=1), mask=masks.documents([0, 0, 0, 1, 1, 1, 1]) & masks.causal())
    alone = [mha(x, mask=masks.causal()) for x in (one, two)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


def test_dropout_is_for_training_only() -> None:
    mha = MultiHead(WIDTH, H, dropout=0.5)
    x = torch.randn(B, Q, WIDTH)
    assert not torch.equal(mha(x), mha(x))
    mha.eval()
    assert torch.equal(mha(x), mha(x))
    torch.testing.assert_close(mha(x), by_hand(mha, x))


@pytest.mark.parametrize(("batch", "queries"), [(0, Q), (B, 0)])
def test_nothing_in_nothing_out(batch: int, queries: int) -> None:
    mha = MultiHead(WIDTH, H)
    x = torch.randn(batch, queries, WIDTH)
    assert mha(x).shape == (batch, queries, WIDTH)
    assert mha.step(x, KVCache())[0].shape == (batch, queries, WIDTH)


def test_every_projection_starts_by_its_own_width() -> None:
    for mha in (MultiHead(WIDTH, H), MultiHead(WIDTH, H, key_width=WIDTH)):
        layers = [layer for layer in mha.children() if isinstance(layer, nn.Linear)]
        bound = (6 / (WIDTH + WIDTH)) ** 0.5  # Glorot's
        for matrix in torch.cat([layer.weight for layer in layers]).split(WIDTH):
            assert 0.95 * bound < matrix.abs().max() <= bound
        assert all((layer.bias == 0).all() for layer in layers)


# ---------------------------------------------------------------------------------- with a cache


def in_chunks(mha: MultiHead, x: Tensor, sizes: list[int]) -> Tensor:
    cache, outs = KVCache(), []
    for part in x.split(sizes, dim=1):
        out, cache = mha.step(part, cache)
        outs.append(out)
    assert cache.lengths == (x.shape[1],) * len(x)
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("sizes", [[1] * 7, [7], [5, 1, 1], [2, 3, 1, 3, 2], [1, 4], [3, 11, 1]])
@pytest.mark.parametrize("key_heads", [1, 3])
@pytest.mark.parametrize("grad", [False, True])
def test_step_by_step_is_the_whole_at_once(sizes: list[int], key_heads: int, grad: bool) -> None:
    mha = MultiHead(WIDTH, H, num_key_heads=key_heads)
    x = torch.randn(B, sum(sizes), WIDTH, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        whole, parts = mha(x, mask=masks.causal()), in_chunks(mha, x, sizes)
        torch.testing.assert_close(parts, whole)
        if grad:
            towards = torch.randn_like(whole)
            expected = torch.autograd.grad(whole, [x, *mha.parameters()], towards)
            torch.testing.assert_close(torch.autograd.grad(parts, [x, *mha.parameters()], towards), expected)


def alone(mha: MultiHead, *tokens: Tensor) -> Tensor:
    """One row by itself, uncached: ``(T, width)`` parts in, their results joined."""
    whole: Tensor = mha(torch.cat(tokens)[None], mask=masks.causal())
    return whole[0]


@pytest.mark.parametrize("grad", [False, True])
def test_ragged_rows_are_each_row_by_itself(grad: bool) -> None:
    """Prompts of different lengths, one step, a chunk in which rows differ again, one more step."""
    mha = MultiHead(WIDTH, 6, num_key_heads=2, head_width=D)
    counts = [[2, 7, 4], [1, 1, 1], [3, 0, 2], [1, 1, 1]]
    chunks = [torch.randn(3, max(n), WIDTH) for n in counts]
    for chunk, lengths in zip(chunks, counts, strict=True):
        for row, n in enumerate(lengths):
            chunk[row, n:] = torch.nan  # padding: must not reach any real token
    with torch.set_grad_enabled(grad):
        cache, outs = KVCache(), []
        for chunk, lengths in zip(chunks, counts, strict=True):
            out, cache = mha.step(chunk, cache, lengths=None if min(lengths) == chunk.shape[1] else lengths)
            outs.append(out)
        assert cache.lengths == (7, 9, 8)
        for row in range(3):
            real = [slice(0, lengths[row]) for lengths in counts]
            expected = alone(mha, *(chunk[row, part] for chunk, part in zip(chunks, real, strict=True)))
            got = torch.cat([out[row, part] for out, part in zip(outs, real, strict=True)])
            torch.testing.assert_close(got, expected)


def test_gradients_through_ragged_steps_are_those_of_each_row_by_itself() -> None:
    mha = MultiHead(WIDTH, H)
    prompt, more = torch.randn(2, 5, WIDTH, requires_grad=True), torch.randn(2, 3, WIDTH, requires_grad=True)
    lengths = [2, 5]
    out, cache = mha.step(prompt, KVCache(), lengths=lengths)
    out_more, _ = mha.step(more, cache)
    ours = sum(out[b, :n].square().sum() for b, n in enumerate(lengths)) + out_more.square().sum()
    theirs = sum(alone(mha, prompt[b, :n], more[b]).square().sum() for b, n in enumerate(lengths))
    wanted = [prompt, more, *mha.parameters()]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted))


@torch.no_grad()
@pytest.mark.parametrize("lengths", [None, [4, 2, 5]])
def test_reordered_beams_go_on_from_the_right_past(lengths: list[int] | None) -> None:
    mha = MultiHead(WIDTH, H)
    prompt, step, last = (torch.randn(3, n, WIDTH) for n in (5, 1, 1))
    _, cache = mha.step(prompt, KVCache(), lengths=lengths)
    _, cache = mha.step(step, cache)
    index = [2, 0, 0]
    out, cache = mha.step(last, cache.reorder(index))
    for row, origin in enumerate(index):
        n = 5 if lengths is None else lengths[origin]
        expected = alone(mha, prompt[origin, :n], step[origin], last[row])
        torch.testing.assert_close(out[row], expected[-1:])


@torch.no_grad()
def test_two_continuations_of_one_past() -> None:
    mha = MultiHead(WIDTH, H)
    prompt, *ends = (torch.randn(1, n, WIDTH) for n in (4, 1, 1, 1, 1))
    _, trunk = mha.step(prompt[:, :3], KVCache())
    _, trunk = mha.step(prompt[:, 3:], trunk)
    _, left = mha.step(ends[0], trunk)
    _, right = mha.step(ends[1], trunk)
    for past, first, then in ((left, ends[0], ends[2]), (right, ends[1], ends[3])):
        out, _ = mha.step(then, past)
        torch.testing.assert_close(out[0], alone(mha, prompt[0], first[0], then[0])[-1:])


@torch.no_grad()
def test_a_mask_that_is_given_takes_the_place_of_the_causal_one() -> None:
    mha = MultiHead(WIDTH, H)
    x = torch.randn(B, K, WIDTH)
    near = masks.window(2, 0)
    whole = mha(x, mask=near)
    first, cache = mha.step(x[:, :4], KVCache(), mask=near)
    rest, _ = mha.step(x[:, 4:], cache, mask=near)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole)
    prefix, _ = mha.step(x, KVCache(), mask=masks.padding(LENGTHS))  # a prefix that sees all of itself
    torch.testing.assert_close(prefix, mha(x, mask=masks.padding(LENGTHS)))


@torch.no_grad()
def test_one_mask_serves_all_layers_of_a_step() -> None:
    layers = [MultiHead(WIDTH, H) for _ in range(2)]
    prompt, step = torch.randn(B, K, WIDTH), torch.randn(B, 1, WIDTH)
    caches = [layer.step(prompt, KVCache(), lengths=LENGTHS)[1] for layer in layers]
    mask = caches[0].build_causal_mask(1)
    for layer, cache in zip(layers, caches, strict=True):
        assert torch.equal(layer.step(step, cache, mask=mask)[0], layer.step(step, cache)[0])


@torch.no_grad()
def test_a_prepared_source_follows_the_beams() -> None:
    mha = MultiHead(WIDTH, H, key_width=SOURCE)
    x, source = torch.randn(3, 1, WIDTH), torch.randn(B, K, SOURCE)
    beams = mha.prepare(source, LENGTHS).reorder([0, 1, 1])
    for row, origin in enumerate([0, 1, 1]):
        expected = mha(x[row : row + 1], source[origin : origin + 1, : LENGTHS[origin]])
        torch.testing.assert_close(mha(x, beams)[row : row + 1], expected)


@torch.no_grad()
def test_a_prepared_source_has_zeros_for_padding() -> None:
    mha = MultiHead(WIDTH, H, key_width=SOURCE)
    source = torch.randn(B, K, SOURCE)
    for row, length in enumerate(LENGTHS):
        source[row, length:] = torch.nan
    prepared = mha.prepare(source, LENGTHS)
    for row, length in enumerate(LENGTHS):
        assert not prepared.key[row, :, length:].any()
        assert not prepared.value[row, :, length:].any()
    assert mha(torch.randn(B, 1, WIDTH), prepared).isfinite().all()


def test_nothing_is_kept_on_the_module() -> None:
    mha = MultiHead(WIDTH, H)
    before = dict(mha.__dict__), list(mha.state_dict())
    x = torch.randn(B, Q, WIDTH)
    mha(x, mask=masks.causal())
    mha.step(x, KVCache())
    assert (dict(mha.__dict__), list(mha.state_dict())) == before


# ------------------------------------------------------------------------------------------ errors


zeros = torch.zeros


def cross(heads: int = 4) -> MultiHead:
    return MultiHead(12, heads, key_width=7)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: MultiHead(10, 3), r"width=10, num_heads=3.*head_width"),
        (lambda: MultiHead(12, 6, num_key_heads=4), "num_heads=6, num_key_heads=4.*multiple"),
        (lambda: MultiHead(12, 0), "num_heads=0"),
        (lambda: MultiHead(12, 4, num_key_heads=0), "num_key_heads=0"),
        (lambda: MultiHead(12, 4, head_width=0), "head_width=0"),
        (lambda: MultiHead(12, 4, dropout=1.0), r"dropout=1\.0"),
        (lambda: MultiHead(12, 4)(zeros(2, 5, 11)), r"x has shape \(2, 5, 11\).*\(batch, length, 12\)"),
        (lambda: MultiHead(12, 4)(zeros(5, 12)), r"x has shape \(5, 12\).*x\[None\]"),
        (lambda: MultiHead(12, 4)(zeros(2, 5, 12), zeros(2, 5, 7)), "does self-attention.*key_width=7"),
        (
            lambda: cross()(zeros(2, 5, 12), zeros(2, 5, 9)),
            r"source has shape \(2, 5, 9\).*length, 7.*key_width",
        ),
        (lambda: cross()(zeros(2, 5, 11), zeros(2, 5, 7)), r"x has shape \(2, 5, 11\)"),
        (lambda: cross()(zeros(2, 5, 12)), r"does cross-attention.*mha\(x, source\)"),
        (lambda: cross().step(zeros(2, 5, 12), KVCache()), "does cross-attention"),
        (lambda: cross()(zeros(2, 5, 12), KVCache()), "empty"),
        (
            lambda: cross()(zeros(2, 5, 12), cross(heads=3).prepare(zeros(2, 5, 7))),
            "computed by another module",
        ),
        (lambda: MultiHead(12, 4)(zeros(2, 5, 12), cross().prepare(zeros(2, 5, 7))), "another module"),
        (lambda: cross()(zeros(2, 5, 12), zeros(3, 5, 7)), "leading dimensions do not fit"),
    ],
)
def test_errors_say_what_came_and_what_was_expected(wrong, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        wrong()


# --------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("lengths", [None, [2, 5, 4]])
def test_steps_on_the_gpu_are_those_of_the_cpu(lengths: list[int] | None) -> None:
    mha = MultiHead(64, 4, num_key_heads=2).float()
    parts = [torch.randn(3, n, 64, dtype=torch.float32) for n in (5, 1, 2)]

    def run(device: str) -> list[Tensor]:
        mha.to(device)
        out, cache = mha.step(parts[0].to(device), KVCache(), lengths=lengths)
        outs = [out] if lengths is None else []
        for part in parts[1:]:
            out, cache = mha.step(part.to(device), cache)
            outs.append(out)
        return [out.cpu() for out in outs]

    for ours, expected in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@torch.no_grad()
def test_equal_rows_never_wait_for_the_gpu() -> None:
    mha = MultiHead(64, 4).to("cuda", torch.bfloat16)
    prompt, step = (torch.randn(3, n, 64, device="cuda", dtype=torch.bfloat16) for n in (5, 1))
    try:
        torch.cuda.set_sync_debug_mode("error")
        _, cache = mha.step(prompt, KVCache())
        for _ in range(5):
            _, cache = mha.step(step, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths == (10, 10, 10)
