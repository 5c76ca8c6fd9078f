"""The folder of a Hugging Face model: a local one, or a snapshot in the cache of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from jumok.errors import InputError, MissingExtra
from jumok.files import read_json

TOKENIZER_FILE_PATTERNS = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken", "*.bpe")
# Weights only as safetensors, which cannot execute code, and no code.
DOWNLOADED_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.tiktoken", "*.bpe", "*.safetensors")
SKIPPED_PATTERNS = ("*/*", "consolidated*", "adapter_*")  # the same weights in another format; parts of a model
HUB_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")


def is_huggingface_folder(path: Path) -> bool:
    """Return whether this looks like a folder written by ``save_pretrained``."""
    return (path / "config.json").is_file()


def is_hub_name(model: str | Path) -> bool:
    """Return whether this is not a local path and can be a name on the Hugging Face hub.

    If ``runs`` is a local folder, ``runs/transformer`` is a path.

    >>> is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("./Qwen3"), is_hub_name("/models/Qwen3")
    (True, False, False)
    """
    path = Path(model)
    if HUB_NAME_PATTERN.fullmatch(str(model)) is None or path.exists():
        return False
    return path.parent == Path() or not path.parent.exists()


def find_model_folder(model: str | Path) -> Path:
    """Return the local folder of a model: the path itself, or the snapshot of a name on the hub.

    A snapshot comes from the cache of ``huggingface_hub``, which downloads what is missing. It has a
    configuration, a tokenizer and weights in safetensors.

    >>> find_model_folder("Qwen/Qwen3-0.6B")  # doctest: +SKIP
    PosixPath('/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca')
    """
    if not is_hub_name(model):
        return Path(model)
    name = str(model)
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"there is no folder {name}, and downloading it from the Hugging Face hub needs huggingface_hub, which "
            "is not installed: pip install transformers"
        ) from error
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=list(DOWNLOADED_PATTERNS), ignore_patterns=list(SKIPPED_PATTERNS)
            )
        )
    except errors.IncompleteSnapshotError as error:  # its message lists the files
        raise InputError(f"{' '.join(str(error).split())} {_explain_download(name)}") from error
    except errors.LocalEntryNotFoundError as error:
        raise InputError(
            f"there is no folder {name}, the cache of the Hugging Face hub ({huggingface_hub.constants.HF_HUB_CACHE}) "
            "has no such model, and the hub cannot be reached. Missing: config.json, the tokenizer and the weights "
            f"(safetensors). {_explain_download(name)}"
        ) from error
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name} is a gated model: accept its terms on https://huggingface.co/{name}, and log in with "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"there is no folder {name}, and the Hugging Face hub has no public model of this name; correct the "
            "name, or log in with `hf auth login` if the model is private"
        ) from error
    except Exception as error:
        raise InputError(f"{name} cannot be downloaded from the Hugging Face hub: {str(error)[:300]}") from error
    check_weights(folder, name)
    missing = _list_missing_files(folder)
    if missing:
        raise InputError(
            f"{name} is incomplete in the cache of the Hugging Face hub, {folder}. Missing: {', '.join(missing)}. "
            f"{_explain_download(name)}"
        )
    return folder


def check_weights(folder: Path, name: str | None = None) -> None:
    """Check that the weights are not only there as pickles, which can execute code; ``name`` is that on the hub."""
    if any(folder.glob("*.safetensors*")):
        return
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles:
        raise InputError(
            f"{folder} has its weights only as a pickle ({pickles[0]}), which can execute code, and jumok look "
            f"reads safetensors: convert them with `jumok convert {folder} --out NEW`, and look at NEW"
        )
    if name is not None and is_huggingface_folder(folder):
        raise InputError(
            f"{name} has no weights in safetensors. If it has a pytorch_model.bin, download it with `hf download "
            f"{name} --local-dir OLD`, convert it with `jumok convert OLD --out NEW`, and look at NEW. If the "
            f"download was interrupted: {_explain_download(name)}"
        )


def has_tokenizer(folder: Path) -> bool:
    """Return whether there are files of a tokenizer."""
    return any(path for pattern in TOKENIZER_FILE_PATTERNS for path in folder.glob(pattern))


def has_feature_extractor(folder: Path) -> bool:
    """Return whether there is the configuration of a feature extractor, as of a model of audio or images."""
    return any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))


def _list_missing_files(folder: Path) -> list[str]:
    missing = [] if is_huggingface_folder(folder) else ["config.json"]
    if not has_tokenizer(folder) and not has_feature_extractor(folder):
        missing.append("a tokenizer (tokenizer.json, vocab.txt or the like)")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_files = sorted(set(read_json(index, dict).get("weight_map", {}).values()))
    else:
        weight_files = [] if any(folder.glob("*.safetensors")) else ["model.safetensors"]
    return missing + [file for file in weight_files if not (folder / file).is_file()]


def _explain_download(name: str) -> str:
    return (
        f"Download it with `hf download {name}` where there is a network and HF_HUB_OFFLINE is not set, or give a "
        "local folder."
    )
