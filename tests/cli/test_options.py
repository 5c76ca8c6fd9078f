"""The help texts, and defaults and choices that repeat those of the package."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from jumok.cli.app import COMMANDS, app
from jumok.cli.conversion import export
from jumok.cli.inference import align, predict
from jumok.cli.serving import serve
from jumok.export.formats import FORMAT_NAMES
from jumok.inference.batch_inference import ENGINES
from jumok.inference.engines import ENGINE_NAMES
from jumok.metrics.symmetrization import SYMMETRIZATIONS


def show_help(*words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    return result.output


def test_all_commands_are_listed() -> None:
    text = show_help()
    for name in (*COMMANDS, "data"):
        assert f"\n  {name} " in text
        assert "Usage" in show_help(name)
    assert "Usage" in show_help("data", "get")


def test_options_are_grouped_in_order() -> None:
    text = show_help("run")
    titles = [
        "Arguments:",
        "Options:",
        "Input and output:",
        "Text generation (translate, caption):",
        "Speech (speak):",
        "Computation:",
    ]
    assert [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")] == titles
    sections = dict(zip(titles, (part for part in text.split("\n\n") if part.split("\n")[0] in titles), strict=True))
    assert "--beam-size" in sections["Text generation (translate, caption):"]
    assert "--style-audio" in sections["Speech (speak):"]
    assert "--engine" in sections["Computation:"]


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command is not predict])
def test_every_option_has_a_help_text(name: str) -> None:
    for parameter in get_type_hints(COMMANDS[name], include_extras=True).items():
        if parameter[0] != "return":
            assert get_args(parameter[1])[1].help, parameter[0]


def test_limits_of_the_server_have_the_defaults_of_the_package() -> None:
    pytest.importorskip("fastapi")
    from jumok.serve.limits import ServerLimits
    from jumok.tasks.api import RequestLimits

    limits: dict[str, Any] = {**vars(RequestLimits()), **vars(ServerLimits())}
    limits |= {"max_batch_delay_ms": 1000 * limits["max_batch_delay"], "timeout": limits["request_timeout"]}
    parameters = inspect.signature(serve).parameters
    names = [name for name in parameters if name.startswith("max_") or name.endswith("timeout")]
    assert len(names) == 12
    assert {name: parameters[name].default for name in names} == {name: limits[name] for name in names}


@pytest.mark.parametrize(
    ("command", "name", "choices"),
    [
        (predict, "engine", ENGINES),
        (serve, "engine", ENGINE_NAMES),
        (export, "format_name", FORMAT_NAMES),
        (align, "symmetrization", SYMMETRIZATIONS),
    ],
)
def test_choices_are_those_of_the_package(command: Any, name: str, choices: Any) -> None:
    literal = get_type_hints(command)[name]
    literal = get_args(literal)[0] if type(None) in get_args(literal) else literal
    assert sorted(get_args(literal)) == sorted(choices)
