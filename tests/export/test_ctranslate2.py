"""Exported folders, loaded by ``ctranslate2``: equal translations, and a README whose code works."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

sys.path.append(str(Path(__file__).parents[1] / "tasks"))

import number_translation
import translation_runs
from typer.testing import CliRunner

from jumok import decoding
from jumok.batches.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK, Seq2SeqBatch, Tokens
from jumok.cli import app as cli_app
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerPair
from jumok.errors import InputError, MissingExtra
from jumok.export import ctranslate2 as exchange
from jumok.export import formats as export_formats
from jumok.models.transformer import Transformer, TransformerConfig
from jumok.run import Run

pytestmark = pytest.mark.long


pytest.importorskip("ctranslate2")

SOURCE, TARGET = 23, 29  # words
SMALL = TransformerConfig(width=14, num_heads=2, feed_forward_width=19, encoder_layers=2, decoder_layers=3)
SOURCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, UNK], list(range(4, 23)), [UNK]]


def build_model(seed: int = 0, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    config = dataclasses.replace(SMALL, **changes)
    model = Transformer(config, TARGET if config.tie_embeddings == "all" else SOURCE, TARGET).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also biases and norms, which are initialized with 0 and 1
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def build_tokenizer(count: int) -> Tokenizer:
    vocabulary = {word: n for n, word in enumerate((*SPECIAL_TOKENS, *(f"w{n}" for n in range(4, count))))}
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")))


def open_translator(model: Transformer, folder: Path, quantization: str | None = None) -> Any:
    """Export a model and open it with CTranslate2."""
    target = build_tokenizer(TARGET)
    source = target if model.config.tie_embeddings == "all" else build_tokenizer(SOURCE)
    folder.mkdir()
    exchange.write_model(model, TokenizerPair(source, target), folder, quantization)
    return exchange.import_ctranslate2().Translator(str(folder), intra_threads=1)


def get_pieces(ids: list[int]) -> list[str]:
    return build_tokenizer(TARGET).ids_to_tokens(ids)


# ------------------------------------------------------------------------------------- equal translations


CONFIG_CHANGES = [
    *({"norm": norm, "tie_embeddings": tie} for norm in ("pre", "post") for tie in ("none", "target", "all")),
    {"activation": "gelu", "norm": "pre"},
    {"activation": "swish"},
    {"width": 15, "num_heads": 3, "tie_embeddings": "none"},  # an odd width has one more sine than cosines
    {"encoder_layers": 1, "decoder_layers": 1, "num_heads": 1, "norm": "pre"},
]
for_each_config = pytest.mark.parametrize(
    "changes", CONFIG_CHANGES, ids=lambda changes: "-".join(map(str, changes.values()))
)


@for_each_config
def test_greedy_search_is_equal(changes: dict[str, Any], tmp_path: Path) -> None:
    ids = set()
    for seed in range(3):  # random models often repeat tokens
        model = build_model(seed, **changes)
        bleu = decoding.greedy_search(model, Tokens.pad([[*item, EOS] for item in SOURCES]), max_length=31)
        results = open_translator(model, tmp_path / str(seed)).translate_batch(
            [get_pieces(item) for item in SOURCES], beam_size=1, max_decoding_length=31, min_decoding_length=0
        )
        assert [item.hypotheses[0] for item in results] == [get_pieces(list(item.ids)) for item in bleu]
        ids |= {item.ids for item in bleu}
    assert len(ids) >= 3


@for_each_config
def test_probabilities_are_equal_without_forbidden_tokens(changes: dict[str, Any], tmp_path: Path) -> None:
    model = build_model(**changes)
    targets = [[4, 5], [6, 7, 8, 9, 10], [11], [12, 13, 14], [15], [16, 17]]
    batch = Seq2SeqBatch.from_sequences(SOURCES, targets)
    state, steps = model.start(batch.source), []
    with torch.inference_mode():
        for position in range(batch.target.ids.shape[1]):
            logits, state = model.step(state, batch.target.ids[:, position])
            logits[:, [PAD, UNK, BOS]] = -torch.inf
            steps.append(logits.log_softmax(-1))
    logp = torch.stack(steps, 1)
    results = open_translator(model, tmp_path / "there").score_batch(
        [get_pieces(item) for item in SOURCES], [get_pieces(item) for item in targets]
    )
    for row, (item, ids) in enumerate(zip(results, targets, strict=True)):
        expected = [logp[row, n, word].item() for n, word in enumerate([*ids, EOS])]
        assert item.log_probs == pytest.approx(expected, abs=1e-4, rel=1e-5)


def test_forbidden_tokens_are_never_generated(tmp_path: Path) -> None:
    model = build_model(tie_embeddings="none")
    with torch.no_grad():  # without the bias, these tokens would always win
        for n in (PAD, UNK, BOS):
            model.output.weight[n] = model.output.weight[7] * 3
    [results] = open_translator(model, tmp_path / "there").translate_batch(
        [get_pieces([5, 6, 7])], beam_size=4, num_hypotheses=4, max_decoding_length=11
    )
    assert results.hypotheses
    assert not {token for ids in results.hypotheses for token in ids} & {"<pad>", "<unk>", "<s>"}


def test_quantization_does_not_change_the_model(tmp_path: Path) -> None:
    model = build_model(width=64, num_heads=4, feed_forward_width=128)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    full, _ = open_translator(model, tmp_path / "whole"), open_translator(model, tmp_path / "int8", "int8")
    assert full.compute_type == "float32"
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    # All weights except the positions are four times smaller.
    table = 4 * exchange.MAX_POSITIONS * 64
    sizes = [(tmp_path / name / "model.bin").stat().st_size - table for name in ("whole", "int8")]
    assert 3 < sizes[0] / sizes[1] < 4


# -------------------------------------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def run() -> Run:
    return number_translation.train_run()


def test_the_code_of_the_readme_works(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    result = CliRunner().invoke(
        cli_app.app, ["export", str(run.folder), str(folder), "--format", "ctranslate2", "--quantization", "int8"]
    )
    assert result.exit_code == 0, result.output
    readme = (folder / "README.md").read_text(encoding="utf-8")
    match = re.search(r"(\d+) of (\d+) validation sentences .* beam size 5: ([\d.]+), in PyTorch ([\d.]+) ", readme)
    assert match is not None
    assert match[0] in result.output
    num_identical, sentences, bleu, torch_bleu = map(float, match.groups())
    assert 0.9 * sentences <= num_identical <= sentences
    assert torch_bleu > 50
    assert abs(bleu - torch_bleu) <= 2  # there are few sentences
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "jumok.json",
        "model.bin",
        "shared_vocabulary.json",
        "tokenizer.json",
    ]
    [code] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    code = code.replace("this is an example sentence", "three nine one")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert run.stdout == "drei neun eins\n"


def test_the_code_of_the_docs_works(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    exchange.export_ctranslate2(run, tmp_path / "there", compare=False)
    monkeypatch.chdir(tmp_path / "there")
    Path("runs").mkdir()
    Path("runs/transformer").symlink_to(run.folder)
    blocks = [item for item in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ctranslate2" in item]
    assert len(blocks) == 2
    for code in blocks:
        names: dict[str, Any] = {}
        exec(code.replace("this is an example sentence", "three nine one"), names)
    assert capsys.readouterr().out == "drei neun eins\n"
    assert names["translator"].translate("three nine one").translation == "drei neun eins"


def test_two_vocabularies_without_comparison(tmp_path: Path) -> None:
    run = translation_runs.train_run(
        tmp_path / "run",
        "transformer",
        "tokenizer.shared_vocabulary=false",
        "model.tie_embeddings=target",
        "model.norm=pre",
    )
    match = export_formats.export_run(run, tmp_path / "there", "ctranslate2", compare=False)
    assert match == "It was not compared with PyTorch."
    readme = (tmp_path / "there" / "README.md").read_text(encoding="utf-8")
    assert '("tokenizer.source.json", "tokenizer.target.json")' in readme
    assert match in readme
    assert (tmp_path / "there" / "tokenizer.target.json").is_file()
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert config["add_source_eos"] is True


def test_missing_data_is_reported(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    for path in (tmp_path / "run" / "data").glob("*.jsonl"):
        path.unlink()
    match = exchange.export_ctranslate2(Run.open(tmp_path / "run"), tmp_path / "there")
    assert "not compared" in match
    assert "missing" in match
    assert match in (tmp_path / "there" / "README.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------- errors


def test_unsupported_models_are_rejected(tmp_path: Path) -> None:
    run = Run.create_or_resume(tmp_path / "run", translation_runs.small_recipe("bahdanau"))
    with pytest.raises(InputError, match=r"a seq2seq model for the task translate; try --format onnx"):
        exchange.export_ctranslate2(run, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_nan_is_rejected(tmp_path: Path) -> None:
    model = build_model()
    with torch.no_grad():
        model.decoder[1].feed_forward.widen.weight[3, 5] = torch.nan
    with pytest.raises(InputError, match=r"decoder.1.feed_forward.widen.weight contains NaN"):
        open_translator(model, tmp_path / "there")


def test_invalid_options_name_the_valid_ones(run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--quantization int4: it is one of float32, .*int8"):
        export_formats.export_run(run, tmp_path / "there", "ctranslate2", quantization="int4")
    with pytest.raises(InputError, match=r"--quantization int8 needs --format ctranslate2"):
        export_formats.export_run(run, tmp_path / "there", "hf", quantization="int8")
    with pytest.raises(InputError, match=r"--format tflite: it is one of hf, ctranslate2, onnx"):
        export_formats.export_run(run, tmp_path / "there", "tflite")


def test_a_missing_package_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[export\]"'):
        exchange.export_ctranslate2(run, tmp_path / "there")
    assert not (tmp_path / "there").exists()
