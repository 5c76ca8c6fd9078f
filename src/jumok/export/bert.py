"""Import and export of BERT in the format of Hugging Face, with identical hidden states and logits.

The models differ only in the names of their weights, and jumok projects queries, keys and values in one
matrix::

    jumok                                    Hugging Face
    word_embedding.weight                    embeddings.word_embeddings.weight
    layers.0.attention.project.weight        encoder.layer.0.attention.self.query.weight,
                                             ….key.weight, ….value.weight, concatenated

Every tensor of a folder must correspond to a weight of the model, and vice versa. Otherwise an error names
the tensors that are missing or unexpected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.devices import move_to_device
from jumok.errors import InputError
from jumok.export.export_folder import create_export_folder
from jumok.files import check_symlinks, read_json, write_json
from jumok.models.bert import Bert, BertClassifier, BertConfig, BertPretrainingModel, BertSpanExtractor, BertTagger
from jumok.training.weights import get_weights, read_safetensors, write_safetensors

# Names of Hugging Face: of the modules of the model, of the modules of each layer, and of the heads.
MODEL_NAMES = {
    "word_embedding": "embeddings.word_embeddings",
    "segment_embedding": "embeddings.token_type_embeddings",
    "position.table": "embeddings.position_embeddings",
    "input_layer.norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
}
LAYER_NAMES = {
    "attention.merge": "attention.output.dense",
    "feed_forward.attention_residual.norm": "attention.output.LayerNorm",
    "feed_forward.widen": "intermediate.dense",
    "feed_forward.narrow": "output.dense",
    "feed_forward.residual.norm": "output.LayerNorm",
}
QKV_NAMES = ("attention.self.query", "attention.self.key", "attention.self.value")  # attention.project
MLM_HEAD_NAMES = {"mlm_head": "cls.predictions", "mlm_head.transform": "cls.predictions.transform.dense",
            "mlm_head.norm": "cls.predictions.transform.LayerNorm"}  # fmt: skip
NSP_HEAD, CLASSIFIER_HEAD, QA_HEAD = "cls.seq_relationship", "classifier", "qa_outputs"
# The output layer of the MLM head shares the weights of the word embedding, and its bias has two names.
TIED_TENSORS = {"cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias"}  # fmt: skip
IGNORED_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # constants in old folders
LEGACY_NORM_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}  # in folders converted from TensorFlow
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new", "relu": "relu", "silu": "swish", "swish": "swish",
}  # fmt: skip
CONFIG_FIELDS = {  # keys of config.json, fields of BertConfig, and the values of BERT base
    "hidden_size": ("width", 768),
    "num_hidden_layers": ("num_layers", 12),
    "num_attention_heads": ("num_heads", 12),
    "intermediate_size": ("feed_forward_width", 3072),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "max_position_embeddings": ("max_positions", 512),
    "type_vocab_size": ("num_segments", 2),
    "layer_norm_eps": ("layer_norm_eps", 1e-12),
}
HEAD_ARCHITECTURES = (
    "BertForPreTraining", "BertForMaskedLM", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering",
)  # fmt: skip
MAX_NAMES_SHOWN = 20  # in an error message


@dataclass(frozen=True, eq=False)
class LoadedBert:
    """A model from a Hugging Face folder."""

    model: nn.Module  # a Bert, or a BERT with a head
    tokenizer: WordPieceTokenizer | None  # None: the folder has none
    labels: tuple[str, ...] = ()  # names of the classes, if the folder has them


# ----------------------------------------------------------------------------------------- import


def load_bert(folder: str | Path, device: str = "auto") -> LoadedBert:
    """Load a BERT from a Hugging Face folder in float32, with its head.

    >>> loaded = load_bert("bert-base-uncased")  # doctest: +SKIP
    >>> type(loaded.model).__name__, loaded.tokenizer.vocab_size  # doctest: +SKIP
    ('BertPretrainingModel', 30522)
    """
    folder = Path(folder)
    if folder.is_dir():
        check_symlinks(folder)
    hf_config = _read_config(folder)
    tensors = _normalize_names(_read_tensors(folder), folder)
    with torch.device("meta"):  # without random weights
        model = _build_model(hf_config, tensors, folder)
    _load_tensors(model, tensors, folder)
    tokenizer = None
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        tokenizer = WordPieceTokenizer.load(folder)
        _check_vocabulary(tokenizer, model, str(folder))
    return LoadedBert(move_to_device(model, device), tokenizer, _get_labels(hf_config, model))


def _read_config(folder: Path) -> dict[str, Any]:
    """Read config.json and check that it describes a BERT."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} is not a Hugging Face folder: it has no config.json")
    hf_config: dict[str, Any] = read_json(path, dict)
    model_type = hf_config.get("model_type")
    if model_type != "bert":
        raise InputError(f"{path} has model_type {model_type!r}; only 'bert' is supported")
    for key, supported in (("position_embedding_type", "absolute"), ("is_decoder", False),
                           ("add_cross_attention", False), ("quantization_config", None)):  # fmt: skip
        if hf_config.get(key, supported) != supported:
            raise InputError(f"{path} has {key}={hf_config[key]!r}; only {supported!r} is supported")
    architectures = hf_config.get("architectures") or ()
    unsupported = [name for name in architectures if name not in ("BertModel", *HEAD_ARCHITECTURES)]
    if unsupported:
        raise InputError(
            f"{path} has the architecture {', '.join(unsupported)}; supported are BertModel, "
            f"{', '.join(HEAD_ARCHITECTURES)}"
        )
    return hf_config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, from one file or from several with an index."""
    single_file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single_file.is_file():
        return read_safetensors(single_file)
    if not index.is_file():
        if any(folder.glob("pytorch_model*.bin")):
            raise InputError(
                f"{folder} has its weights in pytorch_model.bin, a pickle, which can execute code when it is "
                f"loaded. Convert it first, which reads tensors only: jumok convert {folder} --out NEW"
            )
        raise InputError(f"{folder} has no weights: there is no model.safetensors")
    weight_map = read_json(index, dict).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InputError(f"{index} is not an index: expected weight_map with the file of each tensor")
    outside = [name for name in weight_map.values() if Path(name).name != name]
    if outside:
        raise InputError(f"{index} names a file outside of its folder: {outside[0]}")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        tensors |= read_safetensors(folder / file)
    missing = sorted(weight_map.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - weight_map.keys())
    if missing or unexpected:
        raise InputError(f"{index} does not match its files: {_format_mismatch(missing=missing, surplus=unexpected)}")
    return tensors


def _normalize_names(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return the tensors by their current names in a model without a head. See ``MODEL_NAMES``."""
    normalized: dict[str, Tensor] = {}
    for original_name, tensor in tensors.items():
        name = original_name.removeprefix("bert.")
        for legacy_suffix, suffix in LEGACY_NORM_SUFFIXES.items():
            if "LayerNorm" in name and name.endswith(legacy_suffix):
                name = name.removesuffix(legacy_suffix) + suffix
        if name in normalized:
            raise InputError(f"{folder} has {name} twice, as {original_name} and under another name")
        if name not in IGNORED_BUFFERS:
            normalized[name] = tensor
    for copy, original in TIED_TENSORS.items():
        if copy in normalized:
            tensor = normalized.pop(copy)
            if not torch.equal(normalized.setdefault(original, tensor), tensor):
                raise InputError(
                    f"{folder} has an output layer of its own: {copy} differs from {original}; only models "
                    "with tied embeddings (tie_word_embeddings) are supported"
                )
    return normalized


def _build_model(hf_config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> nn.Module:
    """Build the model of a folder, with the heads that its config names or that have tensors."""
    architectures = set(hf_config.get("architectures") or ())

    def has(*prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in tensors)

    has_mlm = has("cls.predictions.") or bool(architectures & {"BertForPreTraining", "BertForMaskedLM"})
    has_nsp = has(f"{NSP_HEAD}.") or bool(architectures & {"BertForPreTraining", "BertForNextSentencePrediction"})
    is_classifier = "BertForSequenceClassification" in architectures
    is_tagger = "BertForTokenClassification" in architectures
    if has(f"{CLASSIFIER_HEAD}.") and not is_tagger:
        # Without an architecture, a pooler shows that the head classifies whole texts.
        is_classifier = is_classifier or has("pooler.")
        is_tagger = not is_classifier
    has_spans = has(f"{QA_HEAD}.") or "BertForQuestionAnswering" in architectures
    if sum((has_mlm or has_nsp, is_classifier, is_tagger, has_spans)) > 1:
        raise InputError(f"{folder} has several heads that do not belong together; only one is supported")
    config, vocab_size = _build_config(hf_config, folder, pooler=has("pooler.") or has_nsp or is_classifier)
    if has_mlm or has_nsp:
        return BertPretrainingModel(config, vocab_size, with_mlm_head=has_mlm, with_nsp_head=has_nsp)
    if has_spans:
        return BertSpanExtractor(config, vocab_size)
    if not (is_classifier or is_tagger):
        return Bert(config, vocab_size)
    head_weight = tensors.get(f"{CLASSIFIER_HEAD}.weight")
    num_classes = len(hf_config.get("id2label") or "01") if head_weight is None else len(head_weight)
    model_class = BertClassifier if is_classifier else BertTagger
    return model_class(config, vocab_size, num_classes, dropout=hf_config.get("classifier_dropout"))


def _build_config(hf_config: Mapping[str, Any], folder: Path, pooler: bool) -> tuple[BertConfig, int]:
    """Return the config and the vocabulary size. Missing values are those of BERT base."""
    activation = hf_config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise InputError(f"{folder}: hidden_act={activation!r}; supported are {', '.join(ACTIVATIONS)}")
    try:
        fields: dict[str, Any] = {field: hf_config.get(key, base) for key, (field, base) in CONFIG_FIELDS.items()}
        config = BertConfig(activation=ACTIVATIONS[activation], pooler=pooler, **fields)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InputError(f"{folder / 'config.json'} is not valid: {error}") from None
    return config, hf_config.get("vocab_size", 30522)


def _load_tensors(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy the tensors into the model. The names must match exactly."""
    parts_by_weight = _split_weights(model)
    expected = {hf_name: part.shape for parts in parts_by_weight.values() for hf_name, part in parts.items()}
    surplus = sorted(tensors.keys() - expected.keys())
    if isinstance(model, BertTagger | BertSpanExtractor):  # they do not use the pooler of some folders
        surplus = [name for name in surplus if not name.startswith("pooler.")]
    mismatch = _format_mismatch(missing=sorted(expected.keys() - tensors.keys()), surplus=surplus)
    if mismatch:
        raise InputError(f"{folder} does not match a {type(model).__name__}: {mismatch}")
    wrong_shapes = [
        f"{name} has shape {tuple(tensors[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if wrong_shapes:
        raise InputError(f"{folder}: the weights do not match config.json: {_format_names(wrong_shapes)}")
    weights = {name: torch.cat([tensors[part] for part in parts]).float() for name, parts in parts_by_weight.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    if isinstance(model, BertPretrainingModel) and model.mlm_head is not None:
        model.mlm_head.weight = model.bert.word_embedding.weight


def _get_labels(hf_config: Mapping[str, Any], model: nn.Module) -> tuple[str, ...]:
    if not isinstance(model, BertClassifier | BertTagger):
        return ()
    id_to_label: dict[str, str] = hf_config.get("id2label") or {}
    labels = tuple(id_to_label.get(str(number), "") for number in range(model.output.out_features))
    return labels if all(labels) else ()


def _check_vocabulary(tokenizer: WordPieceTokenizer, model: nn.Module, source: str) -> None:
    num_embeddings = _get_encoder(model).word_embedding.num_embeddings
    if tokenizer.vocab_size > num_embeddings:
        raise InputError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} words, and the model {num_embeddings}; they "
            "belong to different models"
        )


# ----------------------------------------------------------------------------------------- export


def export_bert(
    model: nn.Module, tokenizer: WordPieceTokenizer | None, folder: str | Path, *, labels: Sequence[str] = ()
) -> Path:
    """Write a folder that ``AutoModel…`` and ``AutoTokenizer.from_pretrained`` of ``transformers`` load.

    The folder is written atomically. It replaces an earlier export, but no other folder.

    Args:
        model: a :class:`~jumok.models.bert.Bert`, with or without a head.
        tokenizer: the tokenizer of the model.
        folder: the new folder.
        labels: the names of the classes, in order.
    """
    folder, bert = Path(folder), _get_encoder(model)
    if tokenizer is not None:
        _check_vocabulary(tokenizer, model, "export_bert")
    if isinstance(model, BertClassifier) and model.uses_mean_pooling:
        raise InputError(
            "this model classifies the mean of the hidden states (model.pooling: mean), but "
            "BertForSequenceClassification uses the first token only; train with model.pooling=first, or "
            "export the encoder: export_bert(model.bert, …)"
        )
    if isinstance(model, BertClassifier | BertTagger) and labels and len(labels) != model.output.out_features:
        raise InputError(f"{len(labels)} labels given for a model with {model.output.out_features} classes")
    with create_export_folder(folder) as new:
        write_json(new / "config.json", _build_hf_config(model, tokenizer, labels))
        write_safetensors(_export_tensors(model), new / "model.safetensors")
        if tokenizer is not None:
            tokenizer.save(new)
            write_json(new / "tokenizer_config.json", _build_tokenizer_config(tokenizer, bert.config.max_positions))
    return folder


def _export_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors by their names in Hugging Face."""
    prefix = "" if isinstance(model, Bert) else "bert."
    tensors: dict[str, Tensor] = {}
    for parts in _split_weights(model).values():
        for name, part in parts.items():
            is_head = name.startswith(("cls.", f"{CLASSIFIER_HEAD}.", f"{QA_HEAD}."))
            tensors[name if is_head else prefix + name] = part.detach().cpu().contiguous()
    if _get_architecture(model) == "BertForMaskedLM":  # it has no pooler
        tensors = {name: x for name, x in tensors.items() if not name.startswith("bert.pooler.")}
    return tensors


def _get_architecture(model: nn.Module) -> str:
    if isinstance(model, BertPretrainingModel):
        has_mlm, has_nsp = model.mlm_head is not None, model.nsp_head is not None
        if has_mlm and has_nsp:
            return "BertForPreTraining"
        return "BertForMaskedLM" if has_mlm else "BertForNextSentencePrediction"
    architectures: dict[type[nn.Module], str] = {
        Bert: "BertModel",
        BertClassifier: "BertForSequenceClassification",
        BertTagger: "BertForTokenClassification",
        BertSpanExtractor: "BertForQuestionAnswering",
    }
    return architectures[type(model)]


def _build_hf_config(model: nn.Module, tokenizer: WordPieceTokenizer | None, labels: Sequence[str]) -> dict[str, Any]:
    bert = _get_encoder(model)
    config = bert.config
    hf_config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": [_get_architecture(model)],
        "dtype": str(bert.word_embedding.weight.dtype).removeprefix("torch."),
        "vocab_size": bert.word_embedding.num_embeddings,
        **{key: getattr(config, field) for key, (field, _) in CONFIG_FIELDS.items()},
        "hidden_act": "silu" if config.activation == "swish" else config.activation,
        "initializer_range": 0.02,
        "pad_token_id": 0 if tokenizer is None else tokenizer.pad_id,
        "tie_word_embeddings": True,
    }
    if isinstance(model, BertClassifier | BertTagger):
        names = labels or [f"LABEL_{number}" for number in range(model.output.out_features)]
        hf_config["id2label"] = {str(number): name for number, name in enumerate(names)}
        hf_config["label2id"] = {name: number for number, name in enumerate(names)}
        hf_config["classifier_dropout"] = model.dropout.p
        if isinstance(model, BertClassifier):
            has_several = model.output.out_features > 1
            hf_config["problem_type"] = "single_label_classification" if has_several else "regression"
    return hf_config


def _build_tokenizer_config(tokenizer: WordPieceTokenizer, max_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json only
        **{f"{role}_token": token for role, token in tokenizer.special_tokens.items()},
        "model_max_length": max_length,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }


# ------------------------------------------------------------------------------------------- names


def _get_encoder(model: nn.Module) -> Bert:
    if isinstance(model, Bert):
        return model
    if isinstance(model, BertPretrainingModel | BertClassifier | BertTagger | BertSpanExtractor):
        return model.bert
    raise InputError(f"expected a BERT, with or without a head, got a {type(model).__name__}")


def _split_weights(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return, for each weight by its name here, the tensors of Hugging Face that it is the concatenation of."""
    parts_by_weight = {}
    for name, weight in get_weights(model).items():
        hf_names = _get_hf_names(name, model)
        parts_by_weight[name] = dict(zip(hf_names, weight.chunk(len(hf_names)), strict=True))
    return parts_by_weight


def _get_hf_names(weight_name: str, model: nn.Module) -> tuple[str, ...]:
    """Return the names in Hugging Face of the tensors that a weight is the concatenation of."""
    module_name, _, suffix = weight_name.removeprefix("bert.").rpartition(".")  # suffix: weight or bias
    heads = {
        **MLM_HEAD_NAMES,
        "nsp_head": NSP_HEAD,
        "output": QA_HEAD if isinstance(model, BertSpanExtractor) else CLASSIFIER_HEAD,
    }
    if module_name in MODEL_NAMES or module_name in heads:
        return (f"{(MODEL_NAMES | heads)[module_name]}.{suffix}",)
    _, layer, name_in_layer = module_name.split(".", 2)
    hf_names = QKV_NAMES if name_in_layer == "attention.project" else (LAYER_NAMES[name_in_layer],)
    return tuple(f"encoder.layer.{layer}.{name}.{suffix}" for name in hf_names)


def _format_mismatch(missing: Sequence[str], surplus: Sequence[str]) -> str:
    parts = [f"missing: {_format_names(missing)}"] if missing else []
    parts += [f"unexpected: {_format_names(surplus)}"] if surplus else []
    return "; ".join(parts)


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
