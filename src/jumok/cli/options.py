"""Arguments and options that several commands share, and the groups in which ``--help`` lists the options."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer
from typer.core import TyperCommand

# typer.Option for each group of options in --help.
io_option = partial(typer.Option, rich_help_panel="Input and output")
data_option = partial(typer.Option, rich_help_panel="Data")
generation_option = partial(typer.Option, rich_help_panel="Text generation (translate, caption)")
language_model_option = partial(typer.Option, rich_help_panel="Language models (Hugging Face)")
classification_option = partial(typer.Option, rich_help_panel="Classification")
speech_option = partial(typer.Option, rich_help_panel="Speech (speak)")
alignment_option = partial(typer.Option, rich_help_panel="Alignment")
scoring_option = partial(typer.Option, rich_help_panel="Scoring")
view_option = partial(typer.Option, rich_help_panel="View")
network_option = partial(typer.Option, rich_help_panel="Network")
batching_option = partial(typer.Option, rich_help_panel="Batching")
limit_option = partial(typer.Option, rich_help_panel="Limits")
ctranslate2_option = partial(typer.Option, rich_help_panel="CTranslate2")
computation_option = partial(typer.Option, rich_help_panel="Computation")

RunArgument: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
BeamSizeOption: TypeAlias = Annotated[
    int | None, generation_option(min=1, help="Beam size. 1 means greedy search. Defaults to the recipe's value.")
]
StyleAudioOption: TypeAlias = Annotated[
    str | None, speech_option(metavar="FILE", help="Use the speaking style of this recording.")
]
StyleWeightsOption: TypeAlias = Annotated[
    str | None, speech_option(metavar="TOKEN=WEIGHT,…", help="Weights of the style tokens, for example 3=0.4,5=0.3.")
]
SplitOption: TypeAlias = Annotated[Literal["test", "valid"], data_option(help="Data split.")]
OnErrorOption: TypeAlias = Annotated[
    Literal["stop", "skip"], io_option(help="What to do with invalid input: stop, or skip it and write an empty line.")
]
DeviceOption: TypeAlias = Annotated[
    str, computation_option(help="Device: auto, cpu, cuda, cuda:1, … auto uses a GPU if there is one.")
]


class GroupedCommand(TyperCommand):
    """A command whose ``--help`` lists the options by group.

    The group of an option is its ``rich_help_panel``, which Typer itself shows only in boxes. Groups appear in the
    order of their first options, after the options without a group.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and one section for each group of options."""
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list, {"Arguments": [], "Options": []})
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                title = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
                sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
