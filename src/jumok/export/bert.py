"""BERT from Hugging Face folders and to them: same hidden states, same logits.

The two models differ in names alone, and in that our queries, keys and values are one product::

    ours                                     theirs
    word_embedding.weight                    embeddings.word_embeddings.weight
    layers.0.attention.project.weight        encoder.layer.0.attention.self.query.weight,
                                             ….key.weight, ….value.weight, one below the other

Every tensor of a folder has its place in the model, and every weight of the model its tensors in the folder;
what is left over on either side is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError
from jumok.export.export_folder import create_export_folder, write_json
from jumok.files import check_symlinks, read_json
from jumok.models.bert import (
    Bert,
    BertClassifier,
    BertConfig,
    BertPretrainingModel,
    BertSpanExtractor,
    BertTagger,
)
from jumok.training.weights import get_weights, read_safetensors, write_safetensors

__all__ = ["LoadedBert", "export_bert", "load_bert"]

# What ours is called there: the parts that come once, those of each layer, and the heads.
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
# The output layer of the words has the embedding's weights and another name for its bias.
TIED_TENSORS = {"cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias"}  # fmt: skip
IGNORED_BUFFERS = (
    "embeddings.position_ids",
    "embeddings.token_type_ids",
)  # 0, 1, 2 … and zeros, once written along
LEGACY_NORM_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}  # in folders that come from TensorFlow
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new", "relu": "relu", "silu": "swish", "swish": "swish",
}  # fmt: skip
HEAD_ARCHITECTURES = (
    "BertForPreTraining", "BertForMaskedLM", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering",
)  # fmt: skip
MAX_NAMES_SHOWN = 20  # names in a message


@dataclass(frozen=True, eq=False)
class LoadedBert:
    """A model from a Hugging Face folder, ready to use."""

    model: nn.Module  # a Bert, or one with a head: Pretraining, Classifier, Tagger, Spans
    tokenizer: WordPieceTokenizer | None  # None: the folder has none
    labels: tuple[str, ...] = ()  # the names of a Classifier's or Tagger's classes, if the folder tells


# ----------------------------------------------------------------------------------------- reading


def load_bert(folder: str | Path, device: str = "auto") -> LoadedBert:
    """The model in a Hugging Face folder with BERT's architecture, with the head that it has, in float32.

    >>> loaded = load_bert("bert-base-uncased")  # doctest: +SKIP
    >>> type(loaded.model).__name__, loaded.tokenizer.size  # doctest: +SKIP
    ('Pretraining', 30522)
    """
    folder = Path(folder)
    if folder.is_dir():
        check_symlinks(folder)
    settings = _read_config(folder)
    tensors = _normalize_names(_read_tensors(folder), folder)
    with torch.device("meta"):  # no weights are drawn that these would take the place of
        model = _build_model(settings, tensors, folder)
    _load_tensors(model, tensors, folder)
    tokenizer = None
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        tokenizer = WordPieceTokenizer.load(folder)
        _check_vocabulary(tokenizer, model, str(folder))
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        model = model.to(place)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {error}") from None
    return LoadedBert(model.eval(), tokenizer, _get_labels(settings, model))


def _read_config(folder: Path) -> dict[str, Any]:
    """What config.json says, if it is a BERT's."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} is no Hugging Face folder: it has no config.json")
    found: dict[str, Any] = read_json(path, dict)
    kind = found.get("model_type")
    if kind != "bert":
        raise InputError(f"{path} has model_type {kind!r}; models with BERT's architecture are read, 'bert'")
    for key, usual in (("position_embedding_type", "absolute"), ("is_decoder", False),
                       ("add_cross_attention", False), ("quantization_config", None)):  # fmt: skip
        if found.get(key, usual) != usual:
            raise InputError(f"{path} has {key}={found[key]!r}, which changes the model; {usual!r} is read")
    other = [
        name for name in found.get("architectures") or () if name not in ("BertModel", *HEAD_ARCHITECTURES)
    ]
    if other:
        raise InputError(
            f"{path} names {', '.join(other)}; read are BertModel, {', '.join(HEAD_ARCHITECTURES)}"
        )
    return found


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in one file or in several with an index."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return read_safetensors(whole)
    if not index.is_file():
        if any(folder.glob("pytorch_model*.bin")):
            raise InputError(
                f"{folder} has its weights in pytorch_model.bin, a pickle, which may run any code when it is "
                f"read. Convert it first, which reads nothing but tensors: jumok convert {folder} --out NEW"
            )
        raise InputError(f"{folder} has no weights: there is no model.safetensors")
    where = read_json(index, dict).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise InputError(f"{index} is no index of tensors: expected weight_map with a file for each tensor")
    outside = [name for name in where.values() if Path(name).name != name]
    if outside:
        raise InputError(f"{index} names files outside of its folder: {outside[0]}")
    found: dict[str, Tensor] = {}
    for file in sorted(set(where.values())):
        found |= read_safetensors(folder / file)
    lost, extra = sorted(where.keys() - found.keys()), sorted(found.keys() - where.keys())
    if lost or extra:
        raise InputError(f"{index} and its files differ: {_format_mismatch(missing=lost, surplus=extra)}")
    return found


def _normalize_names(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors by the names that they have today in a model without a head: see ``MODEL_NAMES``."""
    found: dict[str, Tensor] = {}
    for old, tensor in tensors.items():
        name = old.removeprefix("bert.")
        for before, after in LEGACY_NORM_SUFFIXES.items():
            if "LayerNorm" in name:
                name = name.removesuffix(before) + after if name.endswith(before) else name
        if name in found:
            raise InputError(f"{folder} has {name} twice, as {old} and under another name")
        if name not in IGNORED_BUFFERS:
            found[name] = tensor
    for copy, original in TIED_TENSORS.items():
        if copy in found:
            tensor = found.pop(copy)
            if not torch.equal(found.setdefault(original, tensor), tensor):
                raise InputError(
                    f"{folder} has an output layer of its own, {copy} unlike {original}; read are models in "
                    "which the two are one (tie_word_embeddings), as BERT has it"
                )
    return found


def _build_model(hf_config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> nn.Module:
    """A model as the folder describes it, with the heads it names and those it has tensors for."""
    named = set(hf_config.get("architectures") or ())

    def has(*beginnings: str) -> bool:
        return any(name.startswith(beginnings) for name in tensors)

    words = has("cls.predictions.") or bool(named & {"BertForPreTraining", "BertForMaskedLM"})
    next = has(f"{NSP_HEAD}.") or bool(named & {"BertForPreTraining", "BertForNextSentencePrediction"})
    classifier = "BertForSequenceClassification" in named
    tagger = "BertForTokenClassification" in named
    if (
        has(f"{CLASSIFIER_HEAD}.") and not tagger
    ):  # unnamed, it is one for whole texts if there is a pooled output
        classifier = classifier or has("pooler.")
        tagger = not classifier
    spans = has(f"{QA_HEAD}.") or "BertForQuestionAnswering" in named
    if sum((words or next, classifier, tagger, spans)) > 1:
        raise InputError(f"{folder} has several heads, and they are not those of pretraining; one is read")
    config, vocabulary = _build_config(hf_config, folder, pooler=has("pooler.") or next or classifier)
    dropout = hf_config.get("classifier_dropout")
    if words or next:
        return BertPretrainingModel(config, vocabulary, with_mlm_head=words, with_nsp_head=next)
    if spans:
        return BertSpanExtractor(config, vocabulary)
    if not (classifier or tagger):
        return Bert(config, vocabulary)
    output = tensors.get(f"{CLASSIFIER_HEAD}.weight")
    classes = len(hf_config.get("id2label") or "01") if output is None else len(output)
    return (BertClassifier if classifier else BertTagger)(config, vocabulary, classes, dropout=dropout)


def _build_config(hf_config: Mapping[str, Any], folder: Path, pooler: bool) -> tuple[BertConfig, int]:
    """Sizes and vocabulary; what config.json does not say is as in the published base model."""
    activation = hf_config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise InputError(f"{folder}: hidden_act={activation!r}; known are {', '.join(ACTIVATIONS)}")
    try:
        config = BertConfig(
            width=hf_config.get("hidden_size", 768),
            num_layers=hf_config.get("num_hidden_layers", 12),
            num_heads=hf_config.get("num_attention_heads", 12),
            feed_forward_width=hf_config.get("intermediate_size", 3072),
            max_positions=hf_config.get("max_position_embeddings", 512),
            num_segments=hf_config.get("type_vocab_size", 2),
            activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
            dropout=hf_config.get("hidden_dropout_prob", 0.1),
            attention_dropout=hf_config.get("attention_probs_dropout_prob", 0.1),
            layer_norm_eps=hf_config.get("layer_norm_eps", 1e-12),
            pooler=pooler,
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"{folder / 'config.json'} does not fit: {error}") from None
    return config, hf_config.get("vocab_size", 30522)


def _load_tensors(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the tensors into the model: all into all of it."""
    theirs = {name: _get_hf_names(name, model) for name in get_weights(model)}
    wanted = {name for names in theirs.values() for name in names}
    surplus = sorted(tensors.keys() - wanted)
    if isinstance(model, BertTagger | BertSpanExtractor):  # which do without, though some folders have one
        surplus = [name for name in surplus if not name.startswith("pooler.")]
    wrong = _format_mismatch(missing=sorted(wanted - tensors.keys()), surplus=surplus)
    if wrong:
        raise InputError(f"{folder} does not hold a whole {type(model).__name__} and nothing else: {wrong}")
    shapes, found = [], {}
    for name, own in get_weights(model).items():
        parts = [tensors[part] for part in theirs[name]]
        expected = (len(own) // len(parts), *own.shape[1:])
        shapes += [
            f"{part} is {tuple(x.shape)}, {expected} is expected"
            for part, x in zip(theirs[name], parts, strict=True)
            if x.shape != expected
        ]
        if not shapes:
            found[name] = torch.cat(parts).float()
    if shapes:
        raise InputError(f"{folder}: its weights do not fit its config.json: {_format_names(shapes)}")
    model.load_state_dict(found, strict=False, assign=True)
    if isinstance(model, BertPretrainingModel) and model.mlm_head is not None:
        model.mlm_head.weight = model.bert.word_embedding.weight


def _get_labels(hf_config: Mapping[str, Any], model: nn.Module) -> tuple[str, ...]:
    if not isinstance(model, BertClassifier | BertTagger):
        return ()
    named: dict[str, str] = hf_config.get("id2label") or {}
    labels = tuple(named.get(str(number), "") for number in range(model.output.out_features))
    return labels if all(labels) else ()


def _check_vocabulary(tokenizer: WordPieceTokenizer, model: nn.Module, source: str) -> None:
    words = _get_encoder(model).word_embedding.num_embeddings
    if tokenizer.vocab_size > words:
        raise InputError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} words, and the model {words}; they are "
            "of different models"
        )


# ----------------------------------------------------------------------------------------- writing


def export_bert(
    model: nn.Module, tokenizer: WordPieceTokenizer | None, folder: str | Path, *, labels: Sequence[str] = ()
) -> Path:
    """Write a folder that ``transformers`` loads, by ``AutoModel…`` and ``AutoTokenizer.from_pretrained``.

    It appears whole or not at all, and takes the place of an earlier export only.

    Args:
        model: a :class:`~jumok.models.bert.Bert`, with a head or without.
        tokenizer: the one that it was trained with.
        folder: to be made.
        labels: the names of the classes, in order.
    """
    folder, bert = Path(folder), _get_encoder(model)
    if tokenizer is not None:
        _check_vocabulary(tokenizer, model, "export_bert")
    if isinstance(model, BertClassifier) and model.uses_mean_pooling:
        raise InputError(
            "this model decides by the mean of a text's hidden states (model.pooling: mean), and "
            "BertForSequenceClassification by the first token alone; train one with model.pooling=first, or "
            "export its encoder: export_bert(model.bert, …)"
        )
    if isinstance(model, BertClassifier | BertTagger) and labels and len(labels) != model.output.out_features:
        raise InputError(f"{len(labels)} labels came for a model of {model.output.out_features} classes")
    with create_export_folder(folder) as new:
        write_json(new / "config.json", _build_hf_config(model, tokenizer, labels))
        write_safetensors(_export_tensors(model), new / "model.safetensors")
        if tokenizer is not None:
            tokenizer.save(new)
            write_json(
                new / "tokenizer_config.json", _build_tokenizer_config(tokenizer, bert.config.max_positions)
            )
    return folder


def _export_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Their name and value of each tensor."""
    prefix = "" if isinstance(model, Bert) else "bert."
    found: dict[str, Tensor] = {}
    for name, own in get_weights(model).items():
        names = _get_hf_names(name, model)
        for theirs, part in zip(names, own.chunk(len(names)), strict=True):
            head = theirs.startswith(("cls.", f"{CLASSIFIER_HEAD}.", f"{QA_HEAD}."))
            found[theirs if head else prefix + theirs] = part.detach().cpu().contiguous()
    if _get_architecture(model) == "BertForMaskedLM":  # which has no place for one
        found = {name: x for name, x in found.items() if not name.startswith("bert.pooler.")}
    return found


def _get_architecture(model: nn.Module) -> str:
    if isinstance(model, BertPretrainingModel):
        words, next = model.mlm_head is not None, model.nsp_head is not None
        if words and next:
            return "BertForPreTraining"
        return "BertForMaskedLM" if words else "BertForNextSentencePrediction"
    named: dict[type[nn.Module], str] = {
        Bert: "BertModel",
        BertClassifier: "BertForSequenceClassification",
        BertTagger: "BertForTokenClassification",
        BertSpanExtractor: "BertForQuestionAnswering",
    }
    return named[type(model)]


def _build_hf_config(
    model: nn.Module, tokenizer: WordPieceTokenizer | None, labels: Sequence[str]
) -> dict[str, Any]:
    bert = _get_encoder(model)
    ours = bert.config
    found: dict[str, Any] = {
        "model_type": "bert",
        "architectures": [_get_architecture(model)],
        "dtype": str(bert.word_embedding.weight.dtype).removeprefix("torch."),
        "vocab_size": bert.word_embedding.num_embeddings,
        "hidden_size": ours.width,
        "num_hidden_layers": ours.num_layers,
        "num_attention_heads": ours.num_heads,
        "intermediate_size": ours.feed_forward_width,
        "hidden_act": "silu" if ours.activation == "swish" else ours.activation,
        "hidden_dropout_prob": ours.dropout,
        "attention_probs_dropout_prob": ours.attention_dropout,
        "max_position_embeddings": ours.max_positions,
        "type_vocab_size": ours.num_segments,
        "initializer_range": 0.02,
        "layer_norm_eps": ours.layer_norm_eps,
        "pad_token_id": 0 if tokenizer is None else tokenizer.pad_id,
        "tie_word_embeddings": True,
    }
    if isinstance(model, BertClassifier | BertTagger):
        names = labels or [f"LABEL_{number}" for number in range(model.output.out_features)]
        found["id2label"] = {str(number): name for number, name in enumerate(names)}
        found["label2id"] = {name: number for number, name in enumerate(names)}
        found["classifier_dropout"] = model.dropout.p
        if isinstance(model, BertClassifier):
            several = model.output.out_features > 1
            found["problem_type"] = "single_label_classification" if several else "regression"
    return found


def _build_tokenizer_config(tokenizer: WordPieceTokenizer, max_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # by tokenizer.json, and by nothing that it may not say
        **{f"{what}_token": name for what, name in tokenizer.special_tokens.items()},
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
    raise InputError(f"a BERT is expected, with a head or without; this is a {type(model).__name__}")


def _get_hf_names(weight_name: str, model: nn.Module) -> tuple[str, ...]:
    """What the tensors are called there that make up a weight of ours, one below the other."""
    part, _, kind = weight_name.removeprefix("bert.").rpartition(".")  # kind: weight or bias
    heads = {
        **MLM_HEAD_NAMES,
        "nsp_head": NSP_HEAD,
        "output": QA_HEAD if isinstance(model, BertSpanExtractor) else CLASSIFIER_HEAD,
    }
    if part in MODEL_NAMES or part in heads:
        return (f"{(MODEL_NAMES | heads)[part]}.{kind}",)
    _, number, inner = part.split(".", 2)
    theirs = QKV_NAMES if inner == "attention.project" else (LAYER_NAMES[inner],)
    return tuple(f"encoder.layer.{number}.{name}.{kind}" for name in theirs)


def _format_mismatch(missing: Sequence[str], surplus: Sequence[str]) -> str:
    parts = [f"missing are {_format_names(missing)}"] if missing else []
    parts += [f"of no use are {_format_names(surplus)}"] if surplus else []
    return "; ".join(parts)


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
