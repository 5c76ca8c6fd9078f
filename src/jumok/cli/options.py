"""Arguments and options that several commands share, and the groups that ``--help`` lists them in."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer
from typer.core import TyperCommand

# Groups of options in --help.
INPUT_OUTPUT = "Input and output"
DATA = "Data"
TEXT_GENERATION = "Text generation (translate, caption)"
CLASSIFICATION = "Classification"
SPEECH = "Speech (speak)"
ALIGNMENT = "Alignment"
SCORING = "Scoring"
VIEW = "View"
NETWORK = "Network"
BATCHING = "Batching"
LIMITS = "Limits"
CTRANSLATE2 = "CTranslate2"
COMPUTATION = "Computation"

RunArgument: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
BeamSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1, help="Beam size. 1 means greedy search. Defaults to the recipe's value.", rich_help_panel=TEXT_GENERATION
    ),
]
StyleAudioOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Use the speaking style of this recording.", rich_help_panel=SPEECH)
]
StyleWeightsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN=WEIGHT,…", help="Weights of the style tokens, for example 3=0.4,5=0.3.", rich_help_panel=SPEECH
    ),
]
SplitOption: TypeAlias = Annotated[Literal["test", "valid"], typer.Option(help="Data split.", rich_help_panel=DATA)]
OnErrorOption: TypeAlias = Annotated[
    Literal["stop", "skip"],
    typer.Option(
        help="What to do with invalid input: stop, or skip it and write an empty line.", rich_help_panel=INPUT_OUTPUT
    ),
]
DeviceOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Device: auto, cpu, cuda, cuda:1, … auto uses a GPU if there is one.", rich_help_panel=COMPUTATION
    ),
]


class GroupedCommand(TyperCommand):
    """A command whose ``--help`` lists the options by group.

    The group of an option is its ``rich_help_panel``, which Typer itself shows only with Rich markup. Groups
    appear in the order of their first options, after the options without a group.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and one section for each group of options."""
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for title in ("Arguments", "Options"):
            sections[title] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                title = "Arguments"
            else:
                title = getattr(parameter, "rich_help_panel", None) or "Options"
            sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
