"""Moses tokenization, as in papers on Multi30k."""

import pytest

from jumok.data.readers import text_files
from jumok.data.tokenizers import moses
from jumok.errors import MissingExtra

pytest.importorskip("sacremoses")


@pytest.mark.parametrize(
    ("language", "line", "tokens"),
    [
        ("en", " Two dogs' owner said: “Sit!” ", "two dogs &apos; owner said : &quot; sit ! &quot;"),
        ("en", "It's 3.5 m, isn't it?", "it &apos;s 3.5 m , isn &apos;t it ?"),
        ("de", "Ein Mann – z.B. Karl – läuft.", "ein mann - z.b. karl - läuft ."),
        ("fr", "L’homme dit : « non » & part.", "l&apos; homme dit : &quot; non &quot; &amp; part ."),
        ("en", "", ""),
    ],
)
def test_tokenize(language: str, line: str, tokens: str) -> None:
    assert moses.tokenize(line, language) == tokens


def test_detokenize() -> None:
    tokens = moses.tokenize("A man's T-shirt says: “Hi!” & more (or less).", "en")
    assert moses.detokenize(tokens, "en") == 'a man\'s t-shirt says: "hi!" & more (or less).'
    assert moses.detokenize("l&apos; homme", "fr") == "l'homme"


def test_missing_sacremoses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_import_error(module: str) -> object:
        raise ImportError(f"No module named {module!r}")

    moses._get_tools.cache_clear()
    monkeypatch.setattr(text_files.importlib, "import_module", raise_import_error)
    with pytest.raises(MissingExtra, match=r'sacremoses is needed for this: pip install "jumok\[train\]"'):
        moses.tokenize("x", "en")
