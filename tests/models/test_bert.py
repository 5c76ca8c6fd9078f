"""BERT beside the one of ``transformers``, each layout beside the other, and losses by hand."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from jumok.batches.text import AnswerBatch, ClassificationBatch, PretrainingBatch, TaggingBatch, TextBatch
from jumok.batches.tokens import IGNORE, Tokens
from jumok.errors import InputError
from jumok.export.bert import load_bert
from jumok.models.bert import (
    Bert,
    BertClassifier,
    BertConfig,
    BertPretrainingModel,
    BertSpanExtractor,
    BertTagger,
)

pytestmark = pytest.mark.long


WORDS = 23
SMALL = BertConfig(
    width=14,
    num_layers=3,
    num_heads=2,
    feed_forward_width=19,
    max_positions=13,
    dropout=0.0,
    attention_dropout=0.0,
)
IDS = [[2, 5, 6, 7, 3], [2, 8, 3], [2, 9, 10, 3, 11, 12, 13, 14, 15, 16, 3]]
SEGMENTS = [[0, 0, 0, 1, 1], [0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]]


def shaken(model: Any, by: float = 0.3) -> Any:
    """With other biases and norms than those it begins with, which are 0 and 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn_like(parameter)
    return model


def small(kind: Any = Bert, *args: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    return shaken(kind(dataclasses.replace(SMALL, **changes), WORDS, *args)).double().eval()


# ------------------------------------------------------------------------------ as in transformers


def pair(tmp_path: Any, kind: str = "BertModel", seed: int = 0, pooler: bool = True, **more: Any) -> Any:
    """A random model of theirs, and ours from its folder."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(**{
        "vocab_size": WORDS, "hidden_size": 14, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 19, "max_position_embeddings": 13, **more,
    })  # fmt: skip
    options = {} if pooler else {"add_pooling_layer": False}
    theirs = shaken(getattr(transformers, kind)(config, **options), 0.2).eval()
    theirs.save_pretrained(tmp_path)
    return theirs, load_bert(tmp_path, "cpu").model


def inputs(rows: int, length: int, seed: int, padding: str) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, length), generator=chance)
    segments = torch.randint(2, (rows, length), generator=chance)
    real = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=chance)
    if padding == "left":
        real = real.flip(1)
    if padding == "anywhere":
        real = torch.rand(rows, length, generator=chance) < 0.6
        real[:, int(chance.initial_seed() % length)] = True  # a row of nothing real has no meaning
    mask = torch.ones_like(ids) if padding == "none" else real.long()
    return {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}


def near(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
@pytest.mark.parametrize("pooler", [True, False])
def test_outputs_equal_transformers(tmp_path: Any, activation: str, pooler: bool) -> None:
    theirs, ours = pair(tmp_path, pooler=pooler, hidden_act=activation)
    for seed, padding in enumerate(["none", "right", "left", "anywhere"] * 3):
        given = inputs(4, 2 + seed, seed, padding)
        outputs, expected = ours(**given), theirs(**given)
        real = given["attention_mask"].bool()
        near(outputs.hidden[real], expected.last_hidden_state[real])
        if pooler:
            near(outputs.pooled, expected.pooler_output)
        else:
            assert outputs.pooled is None


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 3]),
    of_each=st.integers(1, 7),
    layers=st.integers(1, 3),
    wide=st.integers(1, 23),
    segments=st.integers(2, 4),
    eps=st.sampled_from([1e-12, 1e-5]),
    rows=st.integers(1, 5),
    length=st.integers(1, 13),
    seed=st.integers(0, 999),
    padding=st.sampled_from(["none", "right", "left", "anywhere"]),
)
def test_any_sizes(
    tmp_path_factory: Any, heads: int, of_each: int, layers: int, wide: int, segments: int, eps: float,
    rows: int, length: int, seed: int, padding: str,
) -> None:  # fmt: skip
    theirs, ours = pair(
        tmp_path_factory.mktemp("folder"), seed=seed, hidden_size=heads * of_each, num_attention_heads=heads,
        num_hidden_layers=layers, intermediate_size=wide, type_vocab_size=segments, layer_norm_eps=eps,
    )  # fmt: skip
    given = inputs(rows, length, seed, padding)
    with torch.inference_mode():
        outputs, expected = ours(**given), theirs(**given)
    real = given["attention_mask"].bool()
    near(outputs.hidden[real], expected.last_hidden_state[real])
    near(outputs.pooled, expected.pooler_output)


def test_segments_and_mask_are_optional(tmp_path: Any) -> None:
    theirs, ours = pair(tmp_path)
    ids = inputs(3, 7, 1, "none")["input_ids"]
    near(ours(ids).hidden, theirs(ids).last_hidden_state)


@pytest.mark.parametrize(
    ("kind", "logits"),
    [
        (
            "BertForPreTraining",
            {"word_logits": "prediction_logits", "next_sentence_logits": "seq_relationship_logits"},
        ),
        ("BertForMaskedLM", {"word_logits": "logits"}),
        ("BertForNextSentencePrediction", {"next_sentence_logits": "logits"}),
        ("BertForSequenceClassification", {"logits": "logits"}),
        ("BertForTokenClassification", {"logits": "logits"}),
        ("BertForQuestionAnswering", {"start_logits": "start_logits", "end_logits": "end_logits"}),
    ],
)
def test_head_logits_equal_transformers(tmp_path: Any, kind: str, logits: dict[str, str]) -> None:
    more = {"num_labels": 5} if "Classification" in kind else {}
    theirs, ours = pair(tmp_path, kind, **more)
    for seed, padding in enumerate(["none", "right", "left", "anywhere"]):
        given = inputs(3, 11, seed, padding)
        outputs, expected, real = ours(**given), theirs(**given), given["attention_mask"].bool()
        assert outputs.hidden.shape == (3, 11, 14)
        for own, other in logits.items():
            one, two = getattr(outputs, own), getattr(expected, other)
            at_tokens = one.shape[:2] == real.shape
            near(one[real] if at_tokens else one, two[real] if at_tokens else two)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("BertForSequenceClassification", 4),
        ("BertForSequenceClassification", 1),
        ("BertForTokenClassification", 4),
    ],
)
def test_fine_tuning_losses_equal_transformers(tmp_path: Any, kind: str, more: int) -> None:
    theirs, ours = pair(tmp_path, kind, num_labels=more)
    texts = TextBatch.from_sequences(IDS, SEGMENTS)
    if "Token" in kind:
        labels = [[IGNORE, 1, IGNORE, 2, IGNORE], [IGNORE, 0, IGNORE], [IGNORE, 3, *[1] * 8, IGNORE]]
        batch: Any = TaggingBatch.from_sequences(IDS, SEGMENTS, labels=labels)
    else:
        batch = ClassificationBatch.from_sequences(IDS, SEGMENTS, labels=[0.5, 2.0, -1.0] if more == 1 else [3, 0, 2])
    expected = theirs(
        texts.tokens.ids, token_type_ids=texts.segments, attention_mask=texts.tokens.valid_mask.long(),
        labels=batch.labels,
    ).loss  # fmt: skip
    outputs = ours.loss(batch)
    near(outputs.total / outputs.count, expected)


def test_span_and_pretraining_losses_equal_transformers(tmp_path: Any) -> None:
    theirs, ours = pair(tmp_path / "spans", "BertForQuestionAnswering")
    batch = AnswerBatch.from_sequences([IDS[2]], [SEGMENTS[2]], answer_mask=[[True] * 11], starts=[4], ends=[7])
    expected = theirs(batch.tokens.ids, token_type_ids=batch.segments,
                    start_positions=batch.starts, end_positions=batch.ends).loss  # fmt: skip
    near(ours.loss(batch).total, expected)

    theirs, ours = pair(tmp_path / "pretraining", "BertForPreTraining")
    masked = masked_batch(packed=False)
    labels = torch.full((3, 11), IGNORE)
    labels.view(-1)[masked.masked_indices] = masked.labels
    expected = theirs(
        masked.tokens.ids, token_type_ids=masked.segments, attention_mask=masked.tokens.valid_mask.long(),
        labels=labels, next_sentence_label=masked.next_sentence_labels,
    ).loss  # fmt: skip
    loss = ours.loss(masked)
    near(loss.total / loss.count, expected)
    near((loss.parts["masked_lm"] + loss.parts["next_sentence"]) / loss.count, expected)


# -------------------------------------------------------------------------------- padded and packed


def masked_batch(packed: bool) -> PretrainingBatch:
    # The second token of the first text, and two of the third.
    places = [1, 10, 14] if packed else [1, 24, 28]
    return PretrainingBatch.from_sequences(
        IDS, SEGMENTS, packed=packed, masked_indices=places, labels=[9, 17, 4], next_sentence_labels=[0, 1, 1]
    )


def batches(packed: bool) -> list[tuple[Any, Any]]:
    """Each kind of model with a batch of its own."""
    tags = [[IGNORE, 1, 0, IGNORE, IGNORE], [IGNORE, 2, IGNORE], [IGNORE, 0, *[1] * 8, IGNORE]]
    allowed = [[True, False, False, True, False], [True, False, False], [*[False] * 4, *[True] * 6, False]]
    of = {"segments": SEGMENTS, "packed": packed}
    return [
        (small(BertPretrainingModel), masked_batch(packed)),
        (small(BertClassifier, 4), ClassificationBatch.from_sequences(IDS, labels=[3, 0, 2], **of)),
        (small(BertClassifier, 1), ClassificationBatch.from_sequences(IDS, labels=[0.5, 2.0, -1.0], **of)),
        (
            small(BertClassifier, 4, pooling="mean"),
            ClassificationBatch.from_sequences(IDS, labels=[3, 0, 2], **of),
        ),
        (small(BertTagger, 3), TaggingBatch.from_sequences(IDS, labels=tags, **of)),
        (
            small(BertSpanExtractor),
            AnswerBatch.from_sequences(IDS, answer_mask=allowed, starts=[3, 0, 5], ends=[3, 0, 9], **of),
        ),
    ]


@pytest.mark.parametrize("number", range(6))
def test_packed_and_padded_batches_have_equal_losses(number: int) -> None:
    found = []
    for packed in (False, True):
        model, batch = batches(packed)[number]
        loss = model.loss(batch)
        loss.total.backward()
        assert loss.count == batch.count > 0
        found.append([loss.total.detach(), *loss.parts.values(), *(x.grad for x in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("number", range(6))
def test_ignored_labels_and_padding_do_not_matter(number: int) -> None:
    model, batch = batches(packed=True)[number]
    longer = TextBatch.from_sequences([*IDS, [1, 1], [1]], packed=True)
    fill = torch.tensor([float("nan") if number == 2 else IGNORE])
    more: dict[str, Tensor] = {}
    for name, x in batch._select_fields(torch.Tensor).items():
        if x.dim() == 1:
            label = torch.zeros(1, dtype=x.dtype) if name == "masked_indices" else fill.to(x.dtype)
            more[name] = torch.cat([x, label])
        else:
            empty = torch.full((1, 3), IGNORE if name == "labels" else 0, dtype=x.dtype)
            more[name] = torch.cat([x, empty], dim=1)
    filled = dataclasses.replace(batch, tokens=longer.tokens, **more)
    found = []
    for one in (batch, filled):
        model.zero_grad()
        loss = model.loss(one)
        loss.total.backward()
        found.append([loss.total.detach(), *(x.grad for x in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("number", range(6))
def test_gradients_reach_every_weight(number: int) -> None:
    model, batch = batches(packed=True)[number]
    model.train()
    model.loss(batch).total.backward()
    still = [name for name, x in model.named_parameters() if x.grad is None or not x.grad.any()]
    # A key's bias adds the same to all scores of a query: its gradient is 0 but for rounding.
    assert [name for name in still if "project.bias" not in name] == []


def test_graph_key_and_device_of_a_batch() -> None:
    batch = masked_batch(packed=True)
    there = batch.to("meta")
    assert all(x.is_meta for x in (there.masked_indices, there.tokens.ids, there.segments, there.next_sentence_labels))
    assert batch.graph_key == there.graph_key is not None
    fewer = dataclasses.replace(batch, masked_indices=batch.masked_indices[:2], labels=batch.labels[:2])
    assert fewer.graph_key != batch.graph_key
    assert masked_batch(packed=False).graph_key is None
    assert masked_batch(packed=False).with_static_shapes().graph_key is not None


def test_padding_is_not_computed() -> None:
    model = small()
    seen: list[int] = []
    model.layers[0].feed_forward.widen.register_forward_hook(lambda _, args, out: seen.append(out.shape[:-1].numel()))
    texts = TextBatch.from_sequences(IDS)
    model(texts.tokens.ids, attention_mask=texts.tokens.valid_mask.long())
    model(texts.tokens.ids)
    assert seen == [5 + 3 + 11, 3 * 11]


def test_the_mlm_head_runs_at_masked_positions_only() -> None:
    model = small(BertPretrainingModel)
    seen: list[Any] = []
    model.mlm_head.transform.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    model.loss(masked_batch(packed=True))
    assert seen == [(3, 14)]
    words, following = model.logits(masked_batch(packed=True))
    assert (words.shape, following.shape) == ((3, WORDS), (3, 2))


# ------------------------------------------------------------------------------------ losses by hand


def untrained(model: nn.Module) -> nn.Module:
    """All logits are 0."""
    for name, x in model.named_parameters():
        if not name.startswith("bert."):
            nn.init.zeros_(x)
    if isinstance(model, BertPretrainingModel):
        nn.init.zeros_(model.bert.word_embedding.weight)
    return model


@torch.no_grad()
def test_losses_of_a_uniform_model() -> None:
    loss = untrained(small(BertPretrainingModel)).loss(masked_batch(packed=True))
    # Three hidden words at log 23 each; the mean of "next?", log 2, as if it were told for each of the three.
    assert loss.count == 3
    assert float(loss.parts["masked_lm"]) == pytest.approx(3 * math.log(WORDS))
    assert float(loss.parts["next_sentence"]) == pytest.approx(3 * math.log(2))
    assert float(loss.total) == pytest.approx(3 * math.log(WORDS) + 3 * math.log(2))

    two = PretrainingBatch.from_sequences(
        IDS[:2],
        packed=True,
        masked_indices=[1, 2, 3],
        labels=[4, 5, IGNORE],
        next_sentence_labels=[1, IGNORE],
    )
    loss = untrained(small(BertPretrainingModel)).loss(two)
    assert loss.count == 2
    assert float(loss.parts["next_sentence"]) == pytest.approx(2 * math.log(2))  # of one text, for two words

    loss = untrained(small(BertClassifier, 1)).loss(
        ClassificationBatch.from_sequences(IDS, labels=[1.0, -2.0, float("nan")])
    )
    assert (float(loss.total), loss.count) == (pytest.approx(5.0), 2)

    # Of the first text three places may hold a beginning or an end, of the second only one.
    spans = AnswerBatch.from_sequences(
        IDS[:2], answer_mask=[[1, 0, 1, 1, 0], [1, 0, 0]], starts=[2, 0], ends=[3, 0], packed=True
    )
    assert float(untrained(small(BertSpanExtractor)).loss(spans).total) == pytest.approx(math.log(3))


@torch.no_grad()
def test_initial_weights_are_those_of_the_original() -> None:
    torch.manual_seed(0)
    model = BertPretrainingModel(dataclasses.replace(SMALL, width=64, feed_forward_width=128), 3001)
    for name, x in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert set(x.unique().tolist()) == {float(name.endswith("weight"))}, name
        else:
            assert float(x.abs().max()) <= 0.04, name
    words = model.bert.word_embedding.weight
    assert float(words.std()) == pytest.approx(0.02 * 0.8796, rel=0.01)  # of a normal cut off at ±2 σ
    assert getattr(model.mlm_head, "weight", None) is words


# -------------------------------------------------------------------------------------------- errors


def test_texts_longer_than_the_position_table_raise() -> None:
    model = small()
    for call in (
        lambda: model(torch.zeros(2, 14, dtype=torch.long)),
        lambda: model(torch.zeros(2, 14, dtype=torch.long), attention_mask=torch.eye(14)[[0, 0]].long()),
        lambda: model.encode(Tokens.pack([[5] * 3, [5] * 14]), torch.zeros(1, 17, dtype=torch.long)),
        lambda: model.encode(Tokens.pad([[5] * 3, [5] * 14]), torch.zeros(2, 14, dtype=torch.long)),
    ):
        with pytest.raises(InputError, match=r"no vector for position 13, only for 0 … 12; shorten .* windows"):
            call()


def test_padding_may_exceed_the_position_table() -> None:
    model = small()
    wide = Tokens.pad([[5] * 3, [5] * 13], min_length=16)
    found = model.encode(wide, torch.zeros_like(wide.ids))[0, :3]
    torch.testing.assert_close(found, model(torch.full((1, 3), 5)).hidden[0])


def test_mismatched_arguments_raise() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"input_ids\[None\]"):
        small()(ids[0])
    with pytest.raises(ValueError, match="attention_mask has shape"):
        small()(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="input_ids holds numbers from 0 to 23; expected 0 to 22"):
        small()(ids + torch.tensor([0, 0, WORDS, 0, 0]))
    with pytest.raises(ValueError, match=r"token_type_ids holds numbers from 0 to 2; .* 0 to 1"):
        small()(ids, ids + 2 * torch.eye(5, dtype=torch.long)[:2])
    with pytest.raises(ValueError, match=r"attention_mask holds numbers from -10000\.0"):  # an additive one
        small()(ids, attention_mask=torch.tensor([[0.0, 0, 0, 0, -1e4]] * 2))
    with pytest.raises(ValueError, match="pooler=False"):
        small(BertClassifier, 2, pooler=False)
    with pytest.raises(ValueError, match="is not divisible"):
        BertConfig(width=10, num_heads=4)
    with pytest.raises(ValueError, match="no masked-LM head"):
        BertPretrainingModel(SMALL, WORDS, with_mlm_head=False).loss(masked_batch(packed=True))


def test_mean_pooling_ignores_padding() -> None:
    model = small(BertClassifier, 2, pooling="mean")
    assert model.bert.pooler is None
    longest = max(map(len, IDS))
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in IDS])
    outputs = model(ids, attention_mask=torch.tensor([[int(at < len(x)) for at in range(longest)] for x in IDS]))
    for row, text_ids in enumerate(IDS):
        alone = model.bert(torch.tensor([text_ids])).hidden[0]  # (L, D)
        mean = sum(alone.unbind()) / len(text_ids)
        torch.testing.assert_close(outputs.pooled[row], mean)
        torch.testing.assert_close(outputs.logits[row], model.output(mean))
    for packed in (False, True):
        batch = ClassificationBatch.from_sequences(IDS, packed=packed, labels=[0, 1, 0])
        torch.testing.assert_close(model.logits(batch), outputs.logits)


def test_weights_from_another_model() -> None:
    old = small(BertTagger, 3)  # without a pooler
    torch.manual_seed(1)
    new = BertClassifier(dataclasses.replace(SMALL, dropout=0.3), WORDS, 2).double().eval()
    assert new.bert.copy_weights_from(old.bert) == ["pooler.weight", "pooler.bias"]
    ids = torch.tensor([IDS[0]])
    torch.testing.assert_close(new(ids).hidden, old(ids).hidden)
    with pytest.raises(ValueError, match=r"num_layers=3.*cannot start from one with .*num_layers=2"):
        new.bert.copy_weights_from(small(num_layers=2))
