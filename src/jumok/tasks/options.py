"""Options of ``predict``. Each task has its own class with the options that it supports."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from jumok.errors import InputError


@dataclass(frozen=True)
class PredictOptions:
    """Options that every task has."""

    unsupported_hint: ClassVar[str] = "this task has no such option"

    n_best: int = 1  # number of predictions per input, best first

    @classmethod
    def from_command_line(cls, **values: Any) -> Self:
        """Build options from the options of a command that were given; None means not given.

        An option that the task does not have is an error.
        """
        values = {name: value for name, value in values.items() if value is not None}
        supported = {field.name for field in fields(cls)}
        unsupported = [f"--{name.replace('_', '-')}" for name in values if name not in supported]
        if unsupported:
            raise InputError(f"{', '.join(unsupported)}: {cls.unsupported_hint}")
        return cls(**values)


@dataclass(frozen=True)
class NBestOptions(PredictOptions):
    """Options of a task that chooses among answers: classification, tagging and question answering."""

    unsupported_hint = "this model does not generate text or speech; it supports --n-best"


@dataclass(frozen=True)
class GenerationOptions(PredictOptions):
    """Options of a task that generates text."""

    unsupported_hint = "this model generates text; a style is for models that speak"

    beam_size: int | None = None  # None: the value of the recipe
    sample: bool = False  # sample instead of searching
    temperature: float = 1.0
    top_k: int = 0  # sample from the k most likely tokens; 0: from all
    top_p: float = 1.0  # sample from the most likely tokens with this total probability
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1 or self.temperature <= 0:
            raise InputError(
                f"--top-p {self.top_p} and --temperature {self.temperature} are invalid; expected --top-p above 0 and "
                "at most 1, and --temperature above 0"
            )
        if self.sample and (self.beam_size is not None or self.n_best > 1):
            raise InputError("--sample draws one text; it cannot be combined with --beam-size or --n-best")
        if self.beam_size is not None and self.n_best > self.beam_size:
            raise InputError(
                f"--n-best {self.n_best} needs a beam of at least {self.n_best}, not --beam-size {self.beam_size}"
            )
