"""What all feature caches share; each kind of cache has its own tests."""

from jumok.data.caches.feature_cache import digest_sources


def test_digest_sources_depends_on_the_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, source in (("made_one", "PITCH = 88\n"), ("made_two", "PITCH = 85\n")):
        (tmp_path / f"{name}.py").write_text(source)
    assert digest_sources("made_one") == digest_sources("made_one") != digest_sources("made_two")
