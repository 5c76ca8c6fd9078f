"""Look into a model in a local Hugging Face folder: an encoder, a decoder, or both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from jumok.errors import InputError, MissingExtra
from jumok.files import check_links
from jumok.look.scene import Scene
from jumok.look.watch import watch
from jumok.look.without import Out, before_and_after

__all__ = ["is_folder", "look_into"]


def is_folder(path: Path) -> bool:
    """Whether this looks like a folder that ``save_pretrained`` wrote."""
    return (path / "config.json").is_file()


def look_into(
    folder: Path,
    text: str,
    target: str | None = None,
    *,
    without: Out | None = None,
    device: str = "auto",
) -> list[Scene]:
    """Where the model in ``folder`` attends while it reads ``text``; and once more ``without`` some of it.

    A model that makes one text of another also says ``target``, or, without one, what it would answer itself.
    Nothing is fetched, and no code from the folder is run.
    """
    model, tokenizer = _loaded(folder, device)
    encoded = tokenizer(text, return_tensors="pt").to(model.device)
    _check_length(model, encoded["input_ids"].shape[1])
    title = text
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            said = _said(model, tokenizer, encoded, target)
            encoded = {**encoded, "decoder_input_ids": said, "use_cache": False}
            title = f"{text}  →  {tokenizer.decode(said[0], skip_special_tokens=True)}"
        elif target is not None:
            raise InputError(f"{folder} holds a model of one text, and --target was given as a second one")

        def look() -> Scene:
            with watch(model, tokenizer) as seen:
                model(**encoded)
            return Scene.of(seen, title=title)

        return before_and_after(model, without, look)


def _loaded(folder: Path, device: str) -> tuple[Any, Any]:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{folder} is a Hugging Face folder, and transformers is not installed: pip install transformers"
        ) from error
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    check_links(folder)
    place = _place(device)
    # Unless it is told not to trust the folder, transformers asks on standard input whether to run its code.
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        _check_reads_text(folder, config)
        both = bool(getattr(config, "is_encoder_decoder", False))
        kind = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModel
        with _quietly():  # what is missing is told of below, if it is of use
            model, told = kind.from_pretrained(folder, output_loading_info=True, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{folder} cannot be looked into: {' '.join(str(error).split())}") from error
    missing = sorted(name for name in told["missing_keys"] if "pooler" not in name)  # of no attention
    if missing:
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        warnings.warn(f"{folder} lacks {len(missing)} weights, which are random now: {some}", stacklevel=3)
    return model.eval().to(place), tokenizer


def _check_reads_text(folder: Path, config: Any) -> None:
    if not hasattr(config.get_text_config(), "vocab_size"):
        raise InputError(
            f"{folder} holds a model ({config.model_type}) that reads no text, and jumok look gives it one; "
            "in Python, jumok.watch shows where it attends, whatever it reads"
        )


def _place(device: str) -> torch.device:
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        return torch.empty(0, device=place).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


@contextmanager
def _quietly() -> Iterator[None]:
    """While it lasts, transformers says what is an error, and nothing else."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_length(model: Any, tokens: int) -> None:
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and tokens > most:
        raise InputError(f"the text has {tokens} tokens, and this model takes {most} at most; shorten it")


def _said(model: Any, tokenizer: Any, encoded: Any, target: str | None) -> torch.Tensor:
    """What the decoder reads, ``(1, T)``: the beginning, and all it says but the end."""
    if target is None:
        said: torch.Tensor = model.generate(**encoded, do_sample=False, num_beams=1)
        return said[:, :-1] if said.shape[1] > 1 else said
    labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(model.device)
    begin = torch.full_like(labels[:, :1], model.config.decoder_start_token_id)
    return torch.cat([begin, labels[:, :-1]], dim=1)
