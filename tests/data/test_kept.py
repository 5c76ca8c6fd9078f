"""What is kept of what was made; files with features and spectra have tests of their own."""

from jumok.data.kept import code


def test_what_code_makes_up_is_told_by_the_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, source in (("made_one", "PITCH = 88\n"), ("made_two", "PITCH = 85\n")):
        (tmp_path / f"{name}.py").write_text(source)
    assert code("made_one") == code("made_one") != code("made_two")
