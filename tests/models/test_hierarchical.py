"""The hierarchical attention network: by hand, beside loops written from the paper, against itself."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

import jumok
from jumok.batches.text import DocumentBatch
from jumok.batches.tokens import IGNORE, PAD, Tokens
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig, HierarchicalLevel
from jumok.models.layers import ragged_layout
from jumok.training.prefetch import map_tensors

pytestmark = pytest.mark.long


WORDS, CLASSES = 23, 5
SMALL = HierarchicalConfig(embedding_width=7, width=3, attention_width=11, dropout=0.0)
DOCUMENTS = [
    [[4, 9, 5], [7]],
    [[10, 6, 8, 8, 21, 4, 5]],
    [[5, 5], [20, 13, 11, 4], [9], [6, 7]],
]
LABELS = (2, 0, 4)
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def small(classes: int = CLASSES, **changes: Any) -> HierarchicalAttentionNetwork:
    torch.manual_seed(0)
    model = HierarchicalAttentionNetwork(dataclasses.replace(SMALL, **changes), WORDS, classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)  # biases too, that begin at 0
    return model.double().eval()


def batch_of(documents: Any = DOCUMENTS, labels: Any = LABELS, **more: Any) -> DocumentBatch:
    sentences = [sentence for document in documents for sentence in document]
    numbers = iter(range(len(sentences)))
    nested = [[next(numbers) for _ in document] for document in documents]
    return DocumentBatch.from_sequences(sentences, sentence_indices=nested, labels=labels, **more)


def gradients(model: nn.Module, batch: DocumentBatch) -> dict[str, Tensor]:
    model.zero_grad()
    model.loss(batch).total.backward()  # type: ignore[operator]
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


# ---------------------------------------------------------------------------------- from the paper


def gru(rnn: nn.Module, xs: list[Tensor], suffix: str) -> list[Tensor]:
    """h_t = (1 − z) ∘ n + z ∘ h, step by step."""
    w, u, b, c = (getattr(rnn, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    h, states = torch.zeros(u.shape[1], dtype=torch.double), []
    for x in xs:
        of_input, of_state = (w @ x + b).chunk(3), (u @ h + c).chunk(3)
        r, z = (torch.sigmoid(of_input[i] + of_state[i]) for i in range(2))
        n = torch.tanh(of_input[2] + r * of_state[2])
        h = (1 - z) * n + z * h
        states.append(h)
    return states


def level_of(level: HierarchicalLevel, xs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The vector of one sequence, and the weights of what it is made of."""
    there, back = gru(level.rnn, xs, ""), gru(level.rnn, xs[::-1], "_reverse")[::-1]
    states = [torch.cat(both) for both in zip(there, back, strict=True)]
    scores = [(level.query * torch.tanh(level.key.weight @ h + level.key.bias)).sum().exp() for h in states]
    alphas = [score / sum(scores) for score in scores]
    return sum(a * h for a, h in zip(alphas, states, strict=True)), alphas  # type: ignore[return-value]


def naive(
    model: HierarchicalAttentionNetwork, labels: Any
) -> tuple[Tensor, Any, list[list[Tensor]], list[list[Tensor]]]:
    logits, of_words, of_sentences = [], [], []
    for document in DOCUMENTS:
        vectors = []
        for sentence in document:
            vector, alphas = level_of(model.word_level, [model.embedding.weight[word] for word in sentence])
            vectors.append(vector)
            of_words.append(alphas)
        vector, alphas = level_of(model.sentence_level, vectors)
        of_sentences.append(alphas)
        logits.append(model.output.weight @ vector + model.output.bias)
    total: Any = 0.0
    for one, label in zip(logits, labels, strict=True):
        if label != IGNORE and not math.isnan(label):
            total = total + ((one[0] - label) ** 2 if len(one) == 1 else -one.log_softmax(0)[label])
    return torch.stack(logits), total, of_words, of_sentences


LAYOUTS = ["padded", "packed", "alike"]


def laid(layout: str, documents: Any = DOCUMENTS, labels: Any = LABELS) -> DocumentBatch:
    batch = batch_of(documents, labels, packed=layout == "packed")
    return batch.with_static_shapes() if layout == "alike" else batch


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("worth", [1, 1000], ids=["shelves", "one shelf"])
def test_it_is_what_the_paper_says(layout: str, worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_layout, "MIN_SAVED_POSITIONS", worth)
    model, labels = small(), (2, IGNORE, 4)
    batch = laid(layout, labels=labels)
    logits, total, of_words, of_sentences = naive(model, labels)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(batch), logits, **EXACT)
    loss = model.loss(batch)
    torch.testing.assert_close(loss.total, total, **EXACT)
    torch.testing.assert_close(loss.parts["nll"], total.detach(), **EXACT)
    assert loss.count == 2
    ours = gradients(model, batch)
    model.zero_grad()
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, **EXACT)
    words, sentences = model.compute_attention_maps(batch)
    assert words.weights.shape == (7, 1, 1, 7)
    assert sentences.weights.shape == (3, 1, 1, 4)
    for shown, expected in ((words, of_words), (sentences, of_sentences)):
        for row, alphas in zip(shown.weights[:, 0, 0], expected, strict=True):
            torch.testing.assert_close(row[: len(alphas)], torch.stack(alphas).detach(), **EXACT)
            assert (row[len(alphas) :] == 0).all()


def test_with_one_class_it_says_numbers() -> None:
    model, labels = small(classes=1), (0.5, float("nan"), -3.0)
    batch = batch_of(labels=labels)
    logits, total, *_ = naive(model, labels)
    torch.testing.assert_close(model.logits(batch), logits, **EXACT)
    loss = model.loss(batch)
    torch.testing.assert_close(loss.total, total, **EXACT)
    assert (loss.count, [*loss.parts]) == (2, ["error"])
    assert all(x.isfinite().all() for x in gradients(model, batch).values())


# ----------------------------------------------------------------------------------------- by hand


def test_a_level_by_hand() -> None:
    """A GRU that forgets all and says tanh(x); keys are 1 or 0, and a query weighs those as 3 to 1."""
    level = HierarchicalLevel(1, 1, 2)
    with torch.no_grad():
        for name, parameter in level.rnn.named_parameters():
            parameter.zero_()
            if name.startswith("weight_ih"):
                parameter[2] = 1.0  # n = tanh(x)
            elif name.startswith("bias_ih"):
                parameter[1] = -100.0  # z = 0
        level.key.weight.copy_(torch.eye(2) * 100)
        level.query.copy_(torch.tensor([math.log(3), 0.0]))
    vectors = torch.tensor([[0.0], [100.0]])  # word 0, whose state is (0, 0), and word 1: (1, 1)

    def look_up(ids: Tensor) -> Tensor:
        return vectors[ids]

    tokens = Tokens.pad([[1, 0], [0], [0, 1, 0]])
    for given_tokens in (tokens, tokens.with_static_shapes(), Tokens.pack([[1, 0], [0], [0, 1, 0]])):
        expected = torch.tensor([[0.75, 0.25, 0.0], [1.0, 0.0, 0.0], [0.2, 0.6, 0.2]])
        torch.testing.assert_close(level.weights(look_up, given_tokens), expected)
        torch.testing.assert_close(level(look_up, given_tokens), torch.tensor([[0.75] * 2, [0.0] * 2, [0.6] * 2]))


# ------------------------------------------------------------------------------- padding and layouts

NUMBERS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=10)
@given(lengths=NUMBERS, wider=st.integers(0, 3), worth=st.sampled_from([1, 10]))
def test_a_document_is_read_as_if_it_were_alone(layout: str, lengths: list[list[int]], wider: int, worth: int) -> None:
    model = small()
    with torch.no_grad():
        model.embedding.weight[PAD] = torch.nan  # no text has it
    documents = [[torch.randint(1, WORDS, (n,)).tolist() for n in document] for document in lengths]
    labels = [n % CLASSES for n in range(len(documents))]
    batch = laid("packed" if layout == "packed" else "padded", documents, labels)
    if layout != "packed":
        sentences = [sentence for document in documents for sentence in document]
        tokens = Tokens.pad(sentences, min_length=max(map(len, sentences)) + wider)
        batch = dataclasses.replace(batch, tokens=tokens)
    batch = batch.with_static_shapes() if layout == "alike" else batch
    alone = [batch_of([one], [label]) for one, label in zip(documents, labels, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_layout, "MIN_SAVED_POSITIONS", worth)
        torch.testing.assert_close(model.logits(batch), torch.cat([model.logits(x) for x in alone]), **EXACT)
        torch.testing.assert_close(model.loss(batch).total, sum(model.loss(x).total for x in alone), **EXACT)
        assert all(x.isfinite().all() for x in gradients(model, batch).values())
        for shown in model.compute_attention_maps(batch):
            torch.testing.assert_close(shown.weights.sum(-1), torch.ones_like(shown.weights[..., 0]), **EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pool_of_sentences_has_any_order(layout: str) -> None:
    model, batch = small(), laid(layout)
    sentences = [sentence for document in DOCUMENTS for sentence in document]
    order = [3, 0, 6, 1, 5, 2, 4]
    numbers = [[order.index(n) for n in run] for run in ([0, 1], [2], [3, 4, 5, 6])]
    shuffled = DocumentBatch.from_sequences(
        [sentences[n] for n in order], sentence_indices=numbers, labels=LABELS, packed=layout == "packed"
    )
    shuffled = shuffled.with_static_shapes() if layout == "alike" else shuffled
    torch.testing.assert_close(model.logits(shuffled), model.logits(batch), **EXACT)


def test_what_fills_up_does_not_count() -> None:
    model = small()
    plain = model.loss(batch_of()).total
    filled = batch_of([*DOCUMENTS, [[PAD]], [[PAD]]], (*LABELS, IGNORE, IGNORE))
    packed = batch_of([*DOCUMENTS, [[PAD]], [[PAD]]], (*LABELS, IGNORE, IGNORE), packed=True)
    shorter = dataclasses.replace(packed, labels=packed.labels[:3])  # there may be more texts than labels
    for batch in (filled, filled.with_static_shapes(), packed, shorter):
        torch.testing.assert_close(model.loss(batch).total, plain, **EXACT)
        assert len(model.logits(batch)) == len(batch.labels) == len(model.compute_attention_maps(batch)[1].weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_no_words_is_nothing(layout: str) -> None:
    """A sentence of no words is a vector of zeros, and so is a document of no sentences."""
    model = small()
    batch = laid(layout, [[[4, 9], [], [5]], [], [[]]], [1, 2, 3])
    logits = model.logits(batch)
    torch.testing.assert_close(logits[1], model.output.bias.detach(), **EXACT)
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], model.logits(batch_of([[[4, 9], [5]]], [1]))[0])
    assert all(x.isfinite().all() for x in gradients(model, batch).values())
    words, sentences = model.compute_attention_maps(batch)
    assert words.weights.sum(-1).flatten().tolist() == pytest.approx([1, 0, 1, 0])
    assert sentences.weights.sum(-1).flatten().tolist() == pytest.approx([1, 0, 1])
    nothing = laid(layout, [[], []], [1, 2])
    torch.testing.assert_close(model.logits(nothing), model.output.bias.detach().expand(2, -1), **EXACT)
    assert model.loss(nothing).total.isfinite()


def test_alike_batches_need_nothing_of_the_host() -> None:
    """What a graph replays: the tensors of another batch, with the lengths of the one that it was made of."""
    model = small()
    mine = laid("alike")
    others = laid("alike", [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]], (1, IGNORE, 3))
    assert mine.graph_key == others.graph_key
    new: list[Tensor] = []
    map_tensors(others, lambda x: new.append(x) or x)  # type: ignore[func-returns-value]
    copied = iter(new)
    replayed = map_tensors(mine, lambda _: next(copied))
    assert replayed.tokens.lengths == mine.tokens.lengths != others.tokens.lengths
    torch.testing.assert_close(model.loss(replayed).total, model.loss(others).total, **EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_number_is_waited_for(layout: str) -> None:
    """On a device that has none, to ask for one is an error."""
    model = small().train().to("meta")
    loss = model.loss(laid(layout).to("meta"))
    loss.total.backward()
    assert loss.total.is_meta
    with pytest.raises(RuntimeError, match="meta"):
        loss.total.item()


def test_documents_of_any_length() -> None:
    model = small().float()
    long = [[4 + n % 19] * (1 + n % 3) for n in range(5000)]
    batch = batch_of([long, [[4]], [[9] * 3000]], packed=True)
    with torch.no_grad():
        logits = model.logits(batch)
        torch.testing.assert_close(logits[1:2], model.logits(batch_of([[[4]]], [0])))
        assert logits.isfinite().all()
        assert model.compute_attention_maps(batch)[1].weights.shape == (3, 1, 1, 5000)


# ------------------------------------------------------------------------------------- to be seen


def test_watch_sees_where_it_looks() -> None:
    model = small()
    batch = batch_of()
    expected = model.logits(batch)
    with jumok.watch(model) as seen:
        assert torch.equal(model.logits(batch), expected)
    assert (
        [one.name for one in seen]
        == [one.name for one in model.compute_attention_maps(batch)]
        == ["word_level", "sentence_level"]
    )
    assert {"word_level", "sentence_level"} < {name for name, _ in model.named_modules()}
    longest_first = [2, 4, 0, 3, 6, 1, 5]
    shown = model.compute_attention_maps(batch)[0].weights[longest_first]
    torch.testing.assert_close(seen[0].weights().flatten(), shown.flatten(), **EXACT)
    assert not shown.requires_grad


# ------------------------------------------------------------------------------------ in training


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_autocast_it_says_about_the_same(layout: str) -> None:
    model = small().float()
    batch = laid(layout)
    exact = model.loss(batch)
    slopes = gradients(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.loss(batch)
        with torch.no_grad():
            assert model.logits(batch).dtype == torch.bfloat16
    assert rough.total.dtype == torch.float32
    assert rough.total.item() == pytest.approx(exact.total.item(), rel=0.02)
    model.zero_grad()
    rough.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - slopes[name]).norm() / (slopes[name].norm() + 1e-3) < 0.1, name


def test_it_learns_which_word_decides_and_looks_at_it() -> None:
    """Words 4 to 8 are the classes; one of them stands in some sentence among others."""
    torch.manual_seed(0)
    model = HierarchicalAttentionNetwork(
        HierarchicalConfig(embedding_width=16, width=8, attention_width=16, dropout=0.1), WORDS, CLASSES
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def drawn(count: int) -> tuple[DocumentBatch, Tensor, Tensor]:
        documents, labels, which, places, begin = [], torch.randint(CLASSES, (count,)), [], [], 0
        for label in labels.tolist():
            lengths = torch.randint(2, 6, (int(torch.randint(2, 6, ())),)).tolist()
            document = [torch.randint(9, WORDS, (n,)).tolist() for n in lengths]
            sentence = int(torch.randint(len(lengths), ()))
            place = int(torch.randint(lengths[sentence], ()))
            document[sentence][place] = 4 + label
            which.append(sentence)
            places.append((begin + sentence, place))
            begin += len(lengths)
            documents.append(document)
        return batch_of(documents, labels, packed=True), torch.tensor(which), torch.tensor(places)

    for _ in range(100):
        batch, *_ = drawn(32)
        optimizer.zero_grad()
        loss = model.loss(batch)
        (loss.total / loss.count).backward()
        optimizer.step()
    model.eval()
    batch, which, places = drawn(200)
    assert (model.logits(batch).argmax(-1) == batch.labels).float().mean() > 0.97
    words, sentences = (shown.weights[:, 0, 0] for shown in model.compute_attention_maps(batch))
    # By chance it would be a third of them. What a sentence says is known to its neighbours' states, too.
    assert (sentences.argmax(-1) == which).float().mean() > 0.7
    assert (words.argmax(-1)[places[:, 0]] == places[:, 1]).float().mean() > 0.8


def test_dropout_is_for_training_only() -> None:
    model = small(dropout=0.5)
    batch = batch_of(packed=True)
    assert torch.equal(model.logits(batch), model.logits(batch))
    model.train()
    dropped: list[torch.Size] = []
    model.dropout.register_forward_hook(lambda _, given, out: dropped.append(out.shape))
    assert not torch.equal(model.logits(batch), model.logits(batch))
    words, sentences, documents = dropped[:3]
    assert (words, documents) == ((20, 7), (3, 6))  # without padding
    assert sentences == (len(batch.tokens.lengths), 6)


# ------------------------------------------------------------------------------------- what is wrong


def test_a_config_that_makes_no_sense() -> None:
    adapter = TypeAdapter(HierarchicalConfig)
    assert adapter.validate_python({"type": "hierarchical", "width": 50}).width == 50
    with pytest.raises(ValidationError, match="widht"):
        adapter.validate_python({"widht": 50})
    for wrong in (
        {"width": 0},
        {"embedding_width": -1},
        {"attention_width": 0},
        {"dropout": 1.0},
        {"word_dropout": -0.1},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            HierarchicalConfig(**wrong)  # type: ignore[arg-type]
