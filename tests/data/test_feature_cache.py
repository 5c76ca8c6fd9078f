"""What is kept of what was made; files with features and spectra have tests of their own."""

from jumok.data.caches.feature_cache import digest_sources


def test_what_code_makes_up_is_told_by_the_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, source in (("made_one", "PITCH = 88\n"), ("made_two", "PITCH = 85\n")):
        (tmp_path / f"{name}.py").write_text(source)
    assert digest_sources("made_one") == digest_sources("made_one") != digest_sources("made_two")
