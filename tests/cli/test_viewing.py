"""`jumok look` with a language model, as users type it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from jumok import InputError
from jumok.cli.app import app

sys.path.insert(0, str(Path(__file__).parents[1] / "look"))
from tiny_models import VOCAB_SIZE, build_model

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 for 64 tokens, in a Hugging Face folder."""
    path = tmp_path_factory.mktemp("hf") / "gpt2"
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    build_model("gpt2").save_pretrained(path)
    return path


def _look(*words: Any) -> Any:
    return CliRunner().invoke(app, ["look", *map(str, words)])


@pytest.mark.parametrize("name", ["map.html", "map.png", "map.svg"])
def test_generated_text_is_written_to_a_file(gpt2: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "prompt.txt").write_text("w5 w6 w7\n")
    result = _look(gpt2, tmp_path / "prompt.txt", "--generate", 4, "--device", "cpu", "--out", tmp_path / name)
    assert result.exit_code == 0, result.exception
    content = (tmp_path / name).read_bytes()
    if name == "map.html":
        assert b'"first_generated":[3,3]' in content
    if name == "map.svg":
        _look(gpt2, tmp_path / "prompt.txt", "--device", "cpu", "--out", tmp_path / "plain.svg")
        assert b"#bfe8d5" in content  # behind the generated words
        assert b"#bfe8d5" not in (tmp_path / "plain.svg").read_bytes()


def test_invalid_inputs_are_rejected(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    for words, reason in (
        ((gpt2, "empty.txt"), "the text is empty"),
        ((gpt2, "photo.png"), "photo.png is a file of type image, and .*--image photo.png"),
        ((gpt2, "missing.txt"), "there is no file missing.txt"),
        ((gpt2, "missing.png"), "there is no file missing.png"),
        ((gpt2, "folder/missing.md"), "there is no file folder/missing.md"),
        ((gpt2, tmp_path / "folder"), "folder is a folder"),
        (("empty.txt", "w1"), "empty.txt is a file; expected the folder of a model"),
        ((gpt2, "w1 " * 63, "--generate", 2), "63 tokens, --generate 2 makes 65.* 64 at most.*--generate 1"),
        ((gpt2, "w1", "--chat"), "no chat template"),
        (("folder", "w1"), "neither a recipe.yaml"),
        (("folder/missing", "w1"), "there is no run folder/missing"),
    ):
        with pytest.raises(InputError, match=reason):
            raise _look(*words, "--device", "cpu", "--out", "map.html").exception
    assert not Path("map.html").exists()
    result = _look(gpt2, "w1", "--generate", 0)
    assert result.exit_code == 2
    assert "greater than or equal to 1" in result.output


def test_help_groups_the_options_of_language_models() -> None:
    group = _look("--help").output.split("Language models (Hugging Face):")[1].split("\n\n")[0]
    assert "--generate N" in group
    assert "--chat" in group
