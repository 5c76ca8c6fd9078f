"""Exported folders, loaded by ``ctranslate2``: the same words, and a README whose lines run."""

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

pytest.importorskip("ctranslate2")

SOURCE, TARGET = 23, 29  # words
SMALL = TransformerConfig(width=14, num_heads=2, feed_forward_width=19, encoder_layers=2, decoder_layers=3)
SOURCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, UNK], list(range(4, 23)), [UNK]]


def small(seed: int = 0, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    config = dataclasses.replace(SMALL, **changes)
    model = Transformer(config, TARGET if config.tie_embeddings == "all" else SOURCE, TARGET).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which begin at 0 and 1
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def words(count: int) -> Tokenizer:
    vocabulary = {word: n for n, word in enumerate((*SPECIAL_TOKENS, *(f"w{n}" for n in range(4, count))))}
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")))


def opened(model: Transformer, folder: Path, quantization: str | None = None) -> Any:
    """What CTranslate2 makes of a model."""
    target = words(TARGET)
    source = target if model.config.tie_embeddings == "all" else words(SOURCE)
    folder.mkdir()
    exchange.write_model(model, TokenizerPair(source, target), folder, quantization)
    return exchange.import_ctranslate2().Translator(str(folder), intra_threads=1)


def pieces(ids: list[int]) -> list[str]:
    return words(TARGET).ids_to_tokens(ids)


# ------------------------------------------------------------------------------------- the same words


KINDS = [
    *({"norm": norm, "tie_embeddings": tie} for norm in ("pre", "post") for tie in ("none", "target", "all")),
    {"activation": "gelu", "norm": "pre"},
    {"activation": "swish"},
    {"width": 15, "num_heads": 3, "tie_embeddings": "none"},  # the last wave has a sine and no cosine
    {"encoder_layers": 1, "decoder_layers": 1, "num_heads": 1, "norm": "pre"},
]
of_each_kind = pytest.mark.parametrize("changes", KINDS, ids=lambda changes: "-".join(map(str, changes.values())))


@of_each_kind
def test_greedy_search_says_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    said = set()
    for seed in range(3):  # such models like to repeat themselves
        model = small(seed, **changes)
        ours = decoding.greedy_search(model, Tokens.pad([[*one, EOS] for one in SOURCES]), max_length=31)
        found = opened(model, tmp_path / str(seed)).translate_batch(
            [pieces(one) for one in SOURCES], beam_size=1, max_decoding_length=31, min_decoding_length=0
        )
        assert [one.hypotheses[0] for one in found] == [pieces(list(one.ids)) for one in ours]
        said |= {one.ids for one in ours}
    assert len(said) >= 3


@of_each_kind
def test_the_probabilities_are_the_same_but_for_words_that_are_never_said(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = small(**changes)
    targets = [[4, 5], [6, 7, 8, 9, 10], [11], [12, 13, 14], [15], [16, 17]]
    batch = Seq2SeqBatch.from_sequences(SOURCES, targets)
    state, steps = model.start(batch.source), []
    with torch.inference_mode():
        for place in range(batch.target.ids.shape[1]):
            logits, state = model.step(state, batch.target.ids[:, place])
            logits[:, [PAD, UNK, BOS]] = -torch.inf
            steps.append(logits.log_softmax(-1))
    logp = torch.stack(steps, 1)
    found = opened(model, tmp_path / "there").score_batch(
        [pieces(one) for one in SOURCES], [pieces(one) for one in targets]
    )
    for row, (one, said) in enumerate(zip(found, targets, strict=True)):
        expected = [logp[row, n, word].item() for n, word in enumerate([*said, EOS])]
        assert one.log_probs == pytest.approx(expected, abs=1e-4, rel=1e-5)


def test_what_must_not_be_said_is_not_said(tmp_path: Path) -> None:
    model = small(tie_embeddings="none")
    with torch.no_grad():  # such a model would say nothing else
        for n in (PAD, UNK, BOS):
            model.output.weight[n] = model.output.weight[7] * 3
    [found] = opened(model, tmp_path / "there").translate_batch(
        [pieces([5, 6, 7])], beam_size=4, num_hypotheses=4, max_decoding_length=11
    )
    assert found.hypotheses
    assert not {token for said in found.hypotheses for token in said} & {"<pad>", "<unk>", "<s>"}


def test_weights_in_eight_bits_leave_the_model_as_it_was(tmp_path: Path) -> None:
    model = small(width=64, num_heads=4, feed_forward_width=128)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    whole, _ = opened(model, tmp_path / "whole"), opened(model, tmp_path / "int8", "int8")
    assert whole.compute_type == "float32"
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    # But for the positions, which stay as they are, a quarter.
    table = 4 * exchange.MAX_POSITIONS * 64
    sizes = [(tmp_path / name / "model.bin").stat().st_size - table for name in ("whole", "int8")]
    assert 3 < sizes[0] / sizes[1] < 4


# -------------------------------------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def numbers() -> Run:
    return number_translation.train_run()


def test_an_exported_folder_has_a_readme_whose_lines_run(numbers: Run, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    done = CliRunner().invoke(
        cli_app.app, ["export", str(numbers.folder), str(folder), "--format", "ctranslate2", "--quantization", "int8"]
    )
    assert done.exit_code == 0, done.output
    readme = (folder / "README.md").read_text(encoding="utf-8")
    told = re.search(r"(\d+) of (\d+) validation sentences .* beam size 5: ([\d.]+), in PyTorch ([\d.]+) ", readme)
    assert told is not None
    assert told[0] in done.output
    same, sentences, ours, theirs = map(float, told.groups())
    assert 0.9 * sentences <= same <= sentences
    assert theirs > 50
    assert abs(ours - theirs) <= 2  # of few sentences
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


def test_the_lines_of_the_docs_run(
    numbers: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    exchange.export_ctranslate2(numbers, tmp_path / "there", compare=False)
    monkeypatch.chdir(tmp_path / "there")
    Path("runs").mkdir()
    Path("runs/transformer").symlink_to(numbers.folder)
    blocks = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ctranslate2" in one]
    assert len(blocks) == 2
    for code in blocks:
        names: dict[str, Any] = {}
        exec(code.replace("this is an example sentence", "three nine one"), names)
    assert capsys.readouterr().out == "drei neun eins\n"
    assert names["translator"].translate("three nine one").translation == "drei neun eins"


def test_two_vocabularies_and_a_run_without_its_data(tmp_path: Path) -> None:
    run = translation_runs.train_run(
        tmp_path / "run",
        "transformer",
        "tokenizer.shared_vocabulary=false",
        "model.tie_embeddings=target",
        "model.norm=pre",
    )
    told = export_formats.export_run(run, tmp_path / "there", "ctranslate2", compare=False)
    assert told == "It was not compared with PyTorch."
    readme = (tmp_path / "there" / "README.md").read_text(encoding="utf-8")
    assert '("tokenizer.source.json", "tokenizer.target.json")' in readme
    assert told in readme
    assert (tmp_path / "there" / "tokenizer.target.json").is_file()
    moved = json.loads((tmp_path / "there" / "config.json").read_text())
    assert moved["add_source_eos"] is True


def test_data_that_is_gone_is_told(numbers: Run, tmp_path: Path) -> None:
    shutil.copytree(numbers.folder, tmp_path / "run")
    for path in (tmp_path / "run" / "data").glob("*.jsonl"):
        path.unlink()
    told = exchange.export_ctranslate2(Run.open(tmp_path / "run"), tmp_path / "there")
    assert "not compared" in told
    assert "missing" in told
    assert told in (tmp_path / "there" / "README.md").read_text(encoding="utf-8")


def test_an_earlier_export_is_replaced_and_nothing_else(numbers: Run, tmp_path: Path) -> None:
    exchange.export_ctranslate2(numbers, tmp_path / "there", compare=False)
    (tmp_path / "there" / "left over").write_text("")
    exchange.export_ctranslate2(numbers, tmp_path / "there", "float16", compare=False)
    assert not (tmp_path / "there" / "left over").exists()
    assert "float16" in (tmp_path / "there" / "README.md").read_text(encoding="utf-8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not an earlier export"):
        exchange.export_ctranslate2(numbers, tmp_path / "mine")


# ------------------------------------------------------------------------------------------- refused


def test_what_ctranslate2_does_not_have_is_refused(tmp_path: Path) -> None:
    run = Run.create_or_resume(tmp_path / "run", translation_runs.small_recipe("bahdanau"))
    with pytest.raises(InputError, match=r"a seq2seq model for the task translate; try --format onnx"):
        exchange.export_ctranslate2(run, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = small()
    with torch.no_grad():
        model.decoder[1].feed_forward.widen.weight[3, 5] = torch.nan
    with pytest.raises(InputError, match=r"decoder.1.feed_forward.widen.weight contains NaN"):
        opened(model, tmp_path / "there")


def test_wrong_words_are_told(numbers: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--quantization int4: it is one of float32, .*int8"):
        export_formats.export_run(numbers, tmp_path / "there", "ctranslate2", quantization="int4")
    with pytest.raises(InputError, match=r"--quantization int8 needs --format ctranslate2"):
        export_formats.export_run(numbers, tmp_path / "there", "hf", quantization="int8")
    with pytest.raises(InputError, match=r"--format tflite: it is one of hf, ctranslate2, onnx"):
        export_formats.export_run(numbers, tmp_path / "there", "tflite")


def test_a_missing_package_is_named(numbers: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[export\]"'):
        exchange.export_ctranslate2(numbers, tmp_path / "there")
    assert not (tmp_path / "there").exists()
