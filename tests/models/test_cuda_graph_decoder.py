"""Steps over memory of a fixed size beside the steps of the model itself."""

import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jumok import decoding
from jumok.batches.tokens import BOS, EOS, Tokens, round_up_size
from jumok.decoding import constraints
from jumok.models import cuda_graph_decoder
from jumok.models.cuda_graph_decoder import CudaGraphDecoder, CudaGraphSize
from jumok.models.transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.long


SOURCE, TARGET = 23, 29  # words
SOURCES = [[5, 6, 7, EOS], [8, EOS], [9, 10, 11, 12, 13, 14, 15, EOS], [16, 17, EOS], [18, 19, EOS]]


def small(norm: Any = "post") -> Transformer:
    config = TransformerConfig(
        width=14,
        num_heads=2,
        feed_forward_width=19,
        encoder_layers=1,
        decoder_layers=3,
        norm=norm,
        tie_embeddings="none",
    )
    model = Transformer(config, SOURCE, TARGET).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which begin at 0 and 1
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest sizes so small that a few words and sentences go beyond them."""
    for name, size in {"MIN_SOURCES": 2, "MIN_SOURCE_LENGTH": 2, "MIN_TARGET_LENGTH": 2}.items():
        monkeypatch.setattr(cuda_graph_decoder, name, size)


def test_sizes_by_hand() -> None:
    assert [round_up_size(n, 8) for n in (0, 1, 8, 9, 12, 13, 16, 17, 24, 25, 127, 128, 129, 193)] == [
        8, 8, 8, 12, 12, 16, 16, 24, 24, 32, 128, 128, 192, 256,
    ]  # fmt: skip
    assert [round_up_size(n, 1) for n in range(1, 10)] == [1, 2, 3, 4, 6, 6, 8, 8, 12]


# --------------------------------------------------------------------------------- beside the model


class Both:
    """The model and its fixed twin, which take every step together."""

    def __init__(self, model: Transformer, fast: CudaGraphDecoder, source: Tokens, **close: float) -> None:
        self.model, self.fast, self.close = model, fast, close
        self.states = model.start(source), fast.start(source)

    def step(self, ids: list[int]) -> Tensor:
        device = self.model.output.weight.device
        (want, plain), (got, fixed) = (
            one.step(state, torch.tensor(ids, dtype=torch.long, device=device))
            for one, state in zip((self.model, self.fast), self.states, strict=True)
        )
        torch.testing.assert_close(got, want, **self.close)
        self.states = plain, fixed
        return want

    def reorder(self, index: list[int], sources: Any = None) -> None:
        device = self.model.output.weight.device
        rows = torch.tensor(index, dtype=torch.long, device=device)
        plain, fixed = (state.reorder(rows, sources) for state in self.states)
        self.states = plain, fixed


def words(count: int, dice: random.Random) -> list[int]:
    return [dice.randrange(4, TARGET) for _ in range(count)]


def within(sources: Sequence[int], dice: random.Random) -> list[int]:
    """Any five rows of each source, of which there are five."""
    return [5 * n + dice.randrange(5) for n in sources for _ in range(5)]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_greedy_steps_equal_the_model(norm: str, mode: Callable[[], Any]) -> None:
    model, dice = small(norm), random.Random(0)
    fast = CudaGraphDecoder(model)
    with mode():
        for begin in (0, 1):  # the second search finds the memory of the first
            both = Both(model, fast, Tokens.pad(SOURCES[begin:]))
            count = len(SOURCES) - begin
            both.step([BOS] * count)
            for _ in range(8):  # beyond 2, 3 and 4 places
                logits = both.step(words(count, dice))
    assert not logits.isnan().any()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("seed", range(20))
def test_searches_equal_the_model(seed: int) -> None:
    """Beams that are made, swapped, dropped; rows that go anywhere; all beyond the smallest sizes."""
    model, dice = small(), random.Random(seed)
    fast = CudaGraphDecoder(model, max_graphs=3)
    for _ in range(2):
        chosen = [dice.choice(SOURCES) for _ in range(dice.randint(1, 5))]
        with torch.inference_mode():
            both = Both(model, fast, Tokens.pad(chosen))
            sources, beams = len(chosen), 1
            for _ in range(9):
                move = dice.choice(["stay", "within", "within", "drop", "widen", "anywhere"])
                if move == "drop":
                    kept = sorted(dice.sample(range(sources), dice.randint(1, sources)))
                elif move == "anywhere" and beams > 1:
                    kept = [dice.randrange(sources) for _ in range(dice.randint(1, 4))]
                else:
                    kept = list(range(sources))
                wider = dice.randint(1, 4) if move == "widen" else beams
                index = [beams * n + dice.randrange(beams) for n in kept for _ in range(wider)]
                if move == "anywhere":
                    index = [dice.randrange(sources * beams) for _ in range(dice.randint(1, 6))]
                    both.reorder(index)
                    sources, beams = len(index), 1
                elif move != "stay":
                    both.reorder(index, kept)
                    sources, beams = len(kept), wider
                both.step(words(sources * beams, dice))


def test_several_reorderings_before_a_step_and_before_the_first() -> None:
    model = small()
    with torch.no_grad():
        both = Both(model, CudaGraphDecoder(model), Tokens.pad(SOURCES[:2]))
        both.reorder([0, 0, 0, 1, 1, 1], range(2))
        both.step([BOS] * 6)
        both.step([4, 5, 6, 7, 8, 9])
        both.reorder([2, 0, 1, 4, 4, 3], range(2))
        both.reorder([1, 1, 0, 5, 3, 3], range(2))
        both.step([4, 5, 6, 7, 8, 9])
        both.reorder([5, 3, 4, 1, 0, 0], [1, 0])
        both.step([4, 5, 6, 7, 8, 9])


def test_empty_batches_and_sources() -> None:
    model = small()
    with torch.no_grad():
        both = Both(model, CudaGraphDecoder(model), Tokens.pad([[], [5, 6], []]))
        both.step([BOS] * 3)
        both.reorder([2, 0], [2, 0])
        both.step([5, 6])
        both.reorder([], [])
        assert both.step([]).shape == (0, TARGET)
        both = Both(model, CudaGraphDecoder(model), Tokens.pad(SOURCES))
        both.reorder([])
        assert both.step([]).shape == (0, TARGET)


@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "bfloat16"])
def test_in_bfloat16(cast: bool) -> None:
    model, dice = small().float(), random.Random(0)
    if not cast:
        model.bfloat16()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        both = Both(model, CudaGraphDecoder(model), Tokens.pad(SOURCES), rtol=0.05, atol=0.1)
        both.step([BOS] * 5)
        both.reorder([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], range(5))
        for _ in range(3):
            both.step(words(10, dice))
            both.reorder([1, 1, 2, 3, 5, 5, 6, 6, 9, 8], range(5))
        assert both.states[1].buffers.past_key_values.dtype == torch.bfloat16


# --------------------------------------------------------------------------- a recording, on any device


class Tape(TorchDispatchMode):
    """Every operation with the very tensors it read and wrote, as a CUDA graph has them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(function), "the host looks at a number of the device"
        out = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Again, on the same tensors: whatever the host worked out while it was recorded is as it was."""
        for function, args, kwargs, out in self.operations:
            returns = function._schema.returns
            aliases = [one.alias_info is not None for one in returns]
            if any(aliases) and not function._schema.is_mutable:
                continue  # a view, and what it is a view of is where it was
            new = function(*args, **kwargs)
            if not any(aliases):
                for kept, found in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if isinstance(kept, Tensor):
                        kept.copy_(found)


class Taped(CudaGraphDecoder):
    """Records and replays as on a GPU: the first step of a size runs, the second is recorded."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self.tapes: dict[int, tuple[Tape, Tensor]] = {}
        self.replayed = 0

    def _run_step(self, buffers: cuda_graph_decoder.CudaGraphBuffers) -> Tensor:
        if not buffers.is_warmed_up:
            buffers.is_warmed_up = True
            return buffers.run_step(self.model)
        if id(buffers) not in self.tapes:
            changing = (buffers.position, buffers.past_key_values, buffers.beam_bias)
            before = [x.clone() for x in changing]
            with Tape() as tape:
                given = buffers.run_step(self.model)
            self.tapes[id(buffers)] = tape, given
            for x, old in zip((*changing, given), (*before, torch.tensor(torch.nan)), strict=True):
                x.copy_(old)  # a recording computes nothing
        tape, given = self.tapes[id(buffers)]
        tape.replay()
        self.replayed += 1
        return given


def test_every_step_runs_the_same_operations() -> None:
    model, dice = small(), random.Random(0)
    fast = Taped(model)
    with torch.no_grad():
        for chosen in (SOURCES, SOURCES[2:4], SOURCES[1:]):
            both, count = Both(model, fast, Tokens.pad(chosen)), len(chosen)
            for _ in range(4):
                both.step(words(count, dice))
            both.reorder([n for n in range(count) for _ in range(5)], range(count))
            for _ in range(5):
                both.step(words(5 * count, dice))
                both.reorder(within(range(count), dice), range(count))
    assert fast.replayed == 3 * 9 - 2


# ------------------------------------------------------------------------------------- in a search


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("every", [1, 8])
def test_searches_return_the_same(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    monkeypatch.setattr(constraints, "get_sync_interval", lambda _: every)
    model = small()
    with torch.no_grad():
        model.output.weight[EOS] += 0.5  # so that sentences end at different steps
    fast = CudaGraphDecoder(model)
    for chosen in (SOURCES, SOURCES[1:3], SOURCES[::-1]):
        source = Tokens.pad(chosen)
        searches: list[Callable[[Any], list[decoding.Hypothesis]]] = [
            lambda one, source=source: decoding.greedy_search(one, source),
            lambda one, source=source: decoding.sample(
                one, source, generator=torch.Generator().manual_seed(3), max_length=9
            ),
            *(
                lambda one, source=source, size=size: [
                    *itertools.chain(*decoding.beam_search(one, source, beam_size=size, n_best=size, max_length=11))
                ]
                for size in (1, 2, 5)
            ),
        ]
        for search in searches:
            want, got = search(model), search(fast)
            assert [one.ids for one in got] == [one.ids for one in want]
            assert [one.logprob for one in got] == pytest.approx([one.logprob for one in want])
            assert {len(one.ids) for one in want} != {0}


def test_reordering_beams_moves_no_key() -> None:
    model = small()
    fast = CudaGraphDecoder(model)
    state = fast.start(Tokens.pad(SOURCES)).reorder(torch.arange(5).repeat_interleave(2), range(5))
    for _ in range(3):
        _, state = fast.step(state, torch.full((10,), 7))
        before = state.buffers.past_key_values.clone()
        state = state.reorder(torch.tensor([1, 0, 3, 3, 5, 4, 6, 6, 9, 8]), range(5))
        assert torch.equal(state.buffers.past_key_values, before)
    # The beams of source 0 changed places three times; those of source 1 both went on from the second.
    seen = (state.buffers.beam_bias == 0).int()
    assert seen[0, 0, :4].tolist() == [[0, 1], [1, 0], [0, 1], [0, 0]]
    assert seen[1, 0, :4].tolist() == [[0, 1], [0, 1], [0, 1], [0, 0]]


# --------------------------------------------------------------------------------------- the memory


def test_sizes_change_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph_decoder, "MIN_SOURCES", 2)
    model = small()
    fast = CudaGraphDecoder(model)
    sizes = []
    state = fast.start(Tokens.pad([[5, EOS]] * 16))
    for left in (16, 13, 9, 5, 4, 3, 2, 1):
        state = state.reorder(torch.arange(left), range(left))
        _, state = fast.step(state, torch.full((left,), 7))
        sizes.append(state.buffers.size.num_sources)
    assert sizes == [16, 16, 16, 16, 4, 4, 4, 2]  # a quarter or less is worth a change
    assert state.buffers.size == CudaGraphSize(2, 1, 32, 32)
    state = state.reorder(torch.zeros(5, dtype=torch.long), [0])
    assert state.buffers.size == CudaGraphSize(2, 5, 32, 32)


def live(refs: list["weakref.ref[Any]"]) -> int:
    return sum(ref() is not None for ref in refs)


@pytest.mark.usefixtures("tiny")
def test_memory_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    class Counted(cuda_graph_decoder.CudaGraphBuffers):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(cuda_graph_decoder, "CudaGraphBuffers", Counted)
    model, dice = small(), random.Random(0)
    fast = CudaGraphDecoder(model, max_graphs=4)
    for _ in range(30):
        source = Tokens.pad([dice.choice(SOURCES) for _ in range(dice.randint(1, 9))])
        decoding.beam_search(fast, source, beam_size=2, max_length=5)
        assert live(made) <= 4
    assert len(made) > 8  # some were dropped
    count = len(made)
    for _ in range(5):
        decoding.greedy_search(fast, Tokens.pad(SOURCES), max_length=3)
    known = len(made)
    assert known - count <= 4
    decoding.greedy_search(fast, Tokens.pad(SOURCES), max_length=3)
    assert len(made) == known  # the same batch needs nothing new
    tight = CudaGraphDecoder(model, max_bytes=1)
    decoding.beam_search(tight, Tokens.pad(SOURCES), beam_size=3, max_length=5)
    assert live(made[known:]) == 1  # what is in use, and no more
    del fast, tight
    assert live(made) == 0


def test_logits_are_the_callers_own() -> None:
    fast = CudaGraphDecoder(small())
    state = fast.start(Tokens.pad(SOURCES))
    first, state = fast.step(state, torch.full((5,), BOS))
    kept = first.clone()
    fast.step(state, torch.full((5,), 9))
    assert torch.equal(first, kept)


def test_old_state_of_other_sentences_does_not_matter() -> None:
    model = small()
    fast = CudaGraphDecoder(model)
    state = fast.start(Tokens.pad(SOURCES))
    for _ in range(3):
        _, state = fast.step(state, torch.full((5,), BOS))
    for kept in (state.buffers.past_key_values, state.buffers.source_key_values):
        kept.fill_(torch.nan)
    with torch.no_grad():
        both = Both(model, fast, Tokens.pad(SOURCES[:3]))
        assert both.states[1].buffers is state.buffers
        both.step([BOS] * 3)
        both.step([5, 6, 7])


def test_weights_may_change_and_change_device() -> None:
    model = small()
    fast = CudaGraphDecoder(model)
    with torch.no_grad():
        Both(model, fast, Tokens.pad(SOURCES)).step([BOS] * 5)
        first = set(map(id, fast._buffers_by_key.values()))
        for parameter in model.parameters():
            parameter.mul_(0.9)
        Both(model, fast, Tokens.pad(SOURCES)).step([BOS] * 5)
        assert set(map(id, fast._buffers_by_key.values())) == first
        kept = [*fast._buffers_by_key.values()]
        model.float()
        Both(model, fast, Tokens.pad(SOURCES), rtol=1e-4, atol=1e-5).step([BOS] * 5)
        assert not any(one is old for one in fast._buffers_by_key.values() for old in kept)


# ------------------------------------------------------------------------------------ what is refused


def spent(fast: CudaGraphDecoder) -> Iterator[Callable[[], Any]]:
    ids, rows = torch.full((5,), BOS), torch.arange(5)
    source = Tokens.pad(SOURCES)
    start = fast.start(source)
    _, after = fast.step(start, ids)
    yield lambda: fast.step(start, ids)
    yield lambda: start.reorder(rows, range(5))
    moved = after.reorder(rows, range(5))
    yield lambda: fast.step(after, ids)
    yield lambda: after.reorder(rows)
    fewer = moved.reorder(rows[:2], range(2))
    yield lambda: fast.step(moved, ids)
    fast.start(source)
    yield lambda: fast.step(fewer, ids[:2])
    other = CudaGraphDecoder(fast.model).start(source)
    yield lambda: fast.step(other, ids)


def test_a_state_can_be_used_once() -> None:
    for use in spent(CudaGraphDecoder(small())):
        with pytest.raises(ValueError, match="no longer valid"):
            use()


def test_a_rejected_call_does_not_consume_the_state() -> None:
    model = small()
    fast = CudaGraphDecoder(model)
    state = fast.start(Tokens.pad(SOURCES))
    with pytest.raises(ValueError, match=r"shape \(4,\); expected one id for each of the 5 rows"):
        fast.step(state, torch.full((4,), BOS))
    with pytest.raises(ValueError, match="3 rows and there are 2 sources"):
        state.reorder(torch.arange(3), [0, 1])
    with pytest.raises(ValueError, match="padded"):
        fast.start(Tokens.pack(SOURCES))
    fast.step(state, torch.full((5,), BOS))


def test_training_mode_raises() -> None:
    fast = CudaGraphDecoder(small().train())
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        fast.start(Tokens.pad(SOURCES))


# -------------------------------------------------------------------------------------------- CUDA


def on_cuda(dtype: torch.dtype) -> Transformer:
    config = TransformerConfig(width=64, num_heads=4, feed_forward_width=96, encoder_layers=2, decoder_layers=3)
    return Transformer(config, SOURCE, TARGET).to("cuda", dtype).eval()


def batches() -> list[list[list[int]]]:
    dice = random.Random(5)
    long = [[dice.randrange(4, SOURCE) for _ in range(dice.randint(1, 40))] + [EOS] for _ in range(19)]
    return [SOURCES, SOURCES[1:4], long, SOURCES]


@pytest.mark.gpu
@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_equal_the_model(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cast: bool) -> None:
    monkeypatch.setattr(cuda_graph_decoder, "MIN_TARGET_LENGTH", 8)
    exact = dtype == torch.float32 and not cast
    close = {"rtol": 1e-3, "atol": 1e-3} if exact else {"rtol": 0.05, "atol": 0.1}
    model, dice = on_cuda(dtype), random.Random(0)
    fast = CudaGraphDecoder(model)
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled=cast):
        for chosen in batches():
            both = Both(model, fast, Tokens.pad(chosen).to("cuda"), **close)
            count = len(chosen)
            both.step([BOS] * count)
            both.reorder([n for n in range(count) for _ in range(5)], range(count))
            for _ in range(6):
                both.step(words(5 * count, dice))
                both.reorder(within(range(count), dice), range(count))
            kept = [0, count - 1]
            both.reorder(within(kept, dice), kept)
            for _ in range(6):  # beyond 8 places
                both.step(words(10, dice))
            both.reorder([9, 2, 2])
            for _ in range(4):
                both.step(words(3, dice))
    recorded = [held.graph is not None for held in fast._buffers_by_key.values()]
    assert sum(recorded) > 4


@pytest.mark.gpu
def test_recorded_searches_return_the_same() -> None:
    model = on_cuda(torch.float32)
    with torch.no_grad():
        model.output.weight[EOS] *= 1.5
    fast, unrecorded = CudaGraphDecoder(model), CudaGraphDecoder(model, use_graphs=False)
    same, sentences = 0, 0
    for chosen in batches() * 2:
        source = Tokens.pad(chosen).to("cuda")
        for search in (
            lambda one, source=source: [x.ids for x in decoding.greedy_search(one, source)],
            lambda one, source=source: [x[0].ids for x in decoding.beam_search(one, source)],
        ):
            found = search(fast)
            assert found == search(unrecorded)
            same += sum(ours == theirs for ours, theirs in zip(found, search(model), strict=True))
            sentences += len(found)
    # Other kernels round differently, so that two words that are as good as equal may change places.
    assert same >= 0.95 * sentences
    assert any(held.graph is not None for held in fast._buffers_by_key.values())
    assert all(held.graph is None for held in unrecorded._buffers_by_key.values())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_steps_and_reordering_do_not_synchronize() -> None:
    model = on_cuda(torch.bfloat16)
    fast = CudaGraphDecoder(model)
    for strict in (False, True):  # the first time, graphs are recorded
        for beams in (1, 5):
            state = fast.start(Tokens.pad(SOURCES).to("cuda"))
            ids = torch.full((5,), BOS, device="cuda")
            wide = torch.arange(5, device="cuda").repeat_interleave(beams)
            fewer = torch.arange(5 * beams, device="cuda")[: 2 * beams]
            same = torch.arange(5 * beams, device="cuda")
            torch.cuda.set_sync_debug_mode("error" if strict else "default")
            try:
                _, state = fast.step(state, ids)
                state, ids = state.reorder(wide, range(5)), ids[wide]
                for _ in range(3):
                    _, state = fast.step(state, ids)
                    state = state.reorder(same, range(5))
                state, ids = state.reorder(fewer, [0, 1]), ids[fewer]
                for _ in range(3):
                    _, state = fast.step(state, ids)
                state = state.reorder(torch.ones(3, dtype=torch.long, device="cuda"))
                for _ in range(3):
                    _, state = fast.step(state, ids.new_full((3,), 7))
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_on_the_device_does_not_grow() -> None:
    model = on_cuda(torch.bfloat16)
    fast, dice = CudaGraphDecoder(model, max_graphs=3), random.Random(0)

    def search() -> None:
        for chosen in batches():
            decoding.beam_search(fast, Tokens.pad(chosen).to("cuda"), beam_size=dice.randint(2, 5), max_length=12)

    peaks = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(10):
            search()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    some = 1 << 24  # sizes differ from search to search
    assert peaks[2][0] <= peaks[0][0] + some
    assert peaks[2][1] <= peaks[0][1] + 4 * some
