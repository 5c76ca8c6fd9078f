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

from jumok.data.wordpiece import WordPieces
from jumok.errors import InputError
from jumok.exchange.folders import exported, write_json
from jumok.files import check_links, read_json
from jumok.models.bert import Bert, BertConfig, Classifier, Pretraining, Spans, Tagger
from jumok.training.weights import read, weights, write

__all__ = ["Loaded", "export_bert", "load_bert"]

# What ours is called there: the parts that come once, those of each layer, and the heads.
ONCE = {
    "word_embedding": "embeddings.word_embeddings",
    "segment_embedding": "embeddings.token_type_embeddings",
    "position.table": "embeddings.position_embeddings",
    "entry.norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
}
OF_A_LAYER = {
    "attention.merge": "attention.output.dense",
    "feed_forward.join_attention.norm": "attention.output.LayerNorm",
    "feed_forward.widen": "intermediate.dense",
    "feed_forward.narrow": "output.dense",
    "feed_forward.join.norm": "output.LayerNorm",
}
PROJECTED = ("attention.self.query", "attention.self.key", "attention.self.value")  # attention.project
OF_WORDS = {"words": "cls.predictions", "words.transform": "cls.predictions.transform.dense",
            "words.norm": "cls.predictions.transform.LayerNorm"}  # fmt: skip
NEXT, CLASSES, SPANS = "cls.seq_relationship", "classifier", "qa_outputs"
# The output layer of the words has the embedding's weights and another name for its bias.
TIED = {"cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias"}  # fmt: skip
COUNTED = ("embeddings.position_ids", "embeddings.token_type_ids")  # 0, 1, 2 … and zeros, once written along
NAMES_OF_NORMS = {".gamma": ".weight", ".beta": ".bias"}  # in folders that come from TensorFlow
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new", "relu": "relu", "silu": "swish", "swish": "swish",
}  # fmt: skip
HEADS = (
    "BertForPreTraining", "BertForMaskedLM", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering",
)  # fmt: skip
SHOWN = 20  # names in a message


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model from a Hugging Face folder, ready to use."""

    model: nn.Module  # a Bert, or one with a head: Pretraining, Classifier, Tagger, Spans
    tokenizer: WordPieces | None  # None: the folder has none
    labels: tuple[str, ...] = ()  # the names of a Classifier's or Tagger's classes, if the folder tells


# ----------------------------------------------------------------------------------------- reading


def load_bert(folder: str | Path, device: str = "auto") -> Loaded:
    """The model in a Hugging Face folder with BERT's architecture, with the head that it has, in float32.

    >>> loaded = load_bert("bert-base-uncased")  # doctest: +SKIP
    >>> type(loaded.model).__name__, loaded.tokenizer.size  # doctest: +SKIP
    ('Pretraining', 30522)
    """
    folder = Path(folder)
    if folder.is_dir():
        check_links(folder)
    settings = _settings(folder)
    tensors = _renamed(_tensors(folder), folder)
    with torch.device("meta"):  # no weights are drawn that these would take the place of
        model = _model(settings, tensors, folder)
    _fill(model, tensors, folder)
    tokenizer = None
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        tokenizer = WordPieces.load(folder)
        _check_vocabulary(tokenizer, model, str(folder))
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        model = model.to(place)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {error}") from None
    return Loaded(model.eval(), tokenizer, _labels(settings, model))


def _settings(folder: Path) -> dict[str, Any]:
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
    other = [name for name in found.get("architectures") or () if name not in ("BertModel", *HEADS)]
    if other:
        raise InputError(f"{path} names {', '.join(other)}; read are BertModel, {', '.join(HEADS)}")
    return found


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in one file or in several with an index."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return read(whole)
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
        found |= read(folder / file)
    lost, extra = sorted(where.keys() - found.keys()), sorted(found.keys() - where.keys())
    if lost or extra:
        raise InputError(f"{index} and its files differ: {_told(missing=lost, surplus=extra)}")
    return found


def _renamed(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors by the names that they have today in a model without a head: see ``ONCE``."""
    found: dict[str, Tensor] = {}
    for old, tensor in tensors.items():
        name = old.removeprefix("bert.")
        for before, after in NAMES_OF_NORMS.items():
            if "LayerNorm" in name:
                name = name.removesuffix(before) + after if name.endswith(before) else name
        if name in found:
            raise InputError(f"{folder} has {name} twice, as {old} and under another name")
        if name not in COUNTED:
            found[name] = tensor
    for copy, original in TIED.items():
        if copy in found:
            tensor = found.pop(copy)
            if not torch.equal(found.setdefault(original, tensor), tensor):
                raise InputError(
                    f"{folder} has an output layer of its own, {copy} unlike {original}; read are models in "
                    "which the two are one (tie_word_embeddings), as BERT has it"
                )
    return found


def _model(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> nn.Module:
    """A model as the folder describes it, with the heads it names and those it has tensors for."""
    named = set(settings.get("architectures") or ())

    def has(*beginnings: str) -> bool:
        return any(name.startswith(beginnings) for name in tensors)

    words = has("cls.predictions.") or bool(named & {"BertForPreTraining", "BertForMaskedLM"})
    next = has(f"{NEXT}.") or bool(named & {"BertForPreTraining", "BertForNextSentencePrediction"})
    classifier = "BertForSequenceClassification" in named
    tagger = "BertForTokenClassification" in named
    if has(f"{CLASSES}.") and not tagger:  # unnamed, it is one for whole texts if there is a pooled output
        classifier = classifier or has("pooler.")
        tagger = not classifier
    spans = has(f"{SPANS}.") or "BertForQuestionAnswering" in named
    if sum((words or next, classifier, tagger, spans)) > 1:
        raise InputError(f"{folder} has several heads, and they are not those of pretraining; one is read")
    config, vocabulary = _config(settings, folder, pooler=has("pooler.") or next or classifier)
    dropout = settings.get("classifier_dropout")
    if words or next:
        return Pretraining(config, vocabulary, words=words, next=next)
    if spans:
        return Spans(config, vocabulary)
    if not (classifier or tagger):
        return Bert(config, vocabulary)
    output = tensors.get(f"{CLASSES}.weight")
    classes = len(settings.get("id2label") or "01") if output is None else len(output)
    return (Classifier if classifier else Tagger)(config, vocabulary, classes, dropout=dropout)


def _config(settings: Mapping[str, Any], folder: Path, pooler: bool) -> tuple[BertConfig, int]:
    """Sizes and vocabulary; what config.json does not say is as in the published base model."""
    activation = settings.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise InputError(f"{folder}: hidden_act={activation!r}; known are {', '.join(ACTIVATIONS)}")
    try:
        config = BertConfig(
            width=settings.get("hidden_size", 768),
            layers=settings.get("num_hidden_layers", 12),
            heads=settings.get("num_attention_heads", 12),
            feed_forward=settings.get("intermediate_size", 3072),
            positions=settings.get("max_position_embeddings", 512),
            segments=settings.get("type_vocab_size", 2),
            activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
            dropout=settings.get("hidden_dropout_prob", 0.1),
            attention_dropout=settings.get("attention_probs_dropout_prob", 0.1),
            eps=settings.get("layer_norm_eps", 1e-12),
            pooler=pooler,
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"{folder / 'config.json'} does not fit: {error}") from None
    return config, settings.get("vocab_size", 30522)


def _fill(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the tensors into the model: all into all of it."""
    theirs = {name: _names(name, model) for name in weights(model)}
    wanted = {name for names in theirs.values() for name in names}
    surplus = sorted(tensors.keys() - wanted)
    if isinstance(model, Tagger | Spans):  # which do without, though some folders have one
        surplus = [name for name in surplus if not name.startswith("pooler.")]
    wrong = _told(missing=sorted(wanted - tensors.keys()), surplus=surplus)
    if wrong:
        raise InputError(f"{folder} does not hold a whole {type(model).__name__} and nothing else: {wrong}")
    shapes, found = [], {}
    for name, own in weights(model).items():
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
        raise InputError(f"{folder}: its weights do not fit its config.json: {_some(shapes)}")
    model.load_state_dict(found, strict=False, assign=True)
    if isinstance(model, Pretraining) and model.words is not None:
        model.words.weight = model.bert.word_embedding.weight


def _labels(settings: Mapping[str, Any], model: nn.Module) -> tuple[str, ...]:
    if not isinstance(model, Classifier | Tagger):
        return ()
    named: dict[str, str] = settings.get("id2label") or {}
    labels = tuple(named.get(str(number), "") for number in range(model.output.out_features))
    return labels if all(labels) else ()


def _check_vocabulary(tokenizer: WordPieces, model: nn.Module, where: str) -> None:
    words = _bert(model).word_embedding.num_embeddings
    if tokenizer.size > words:
        raise InputError(
            f"{where}: the tokenizer has {tokenizer.size} words, and the model {words}; they are "
            "of different models"
        )


# ----------------------------------------------------------------------------------------- writing


def export_bert(
    model: nn.Module, tokenizer: WordPieces | None, folder: str | Path, *, labels: Sequence[str] = ()
) -> Path:
    """Write a folder that ``transformers`` loads, by ``AutoModel…`` and ``AutoTokenizer.from_pretrained``.

    It appears whole or not at all, and takes the place of an earlier export only.

    Args:
        model: a :class:`~jumok.models.bert.Bert`, with a head or without.
        tokenizer: the one that it was trained with.
        folder: to be made.
        labels: the names of the classes, in order.
    """
    folder, bert = Path(folder), _bert(model)
    if tokenizer is not None:
        _check_vocabulary(tokenizer, model, "export_bert")
    if isinstance(model, Classifier) and model.averages:
        raise InputError(
            "this model decides by the mean of a text's hidden states (model.pooling: mean), and "
            "BertForSequenceClassification by the first token alone; train one with model.pooling=first, or "
            "export its encoder: export_bert(model.bert, …)"
        )
    if isinstance(model, Classifier | Tagger) and labels and len(labels) != model.output.out_features:
        raise InputError(f"{len(labels)} labels came for a model of {model.output.out_features} classes")
    with exported(folder) as new:
        write_json(new / "config.json", _written_config(model, tokenizer, labels))
        write(_written(model), new / "model.safetensors")
        if tokenizer is not None:
            tokenizer.save(new)
            write_json(new / "tokenizer_config.json", _written_tokenizer(tokenizer, bert.config.positions))
    return folder


def _written(model: nn.Module) -> dict[str, Tensor]:
    """Their name and value of each tensor."""
    prefix = "" if isinstance(model, Bert) else "bert."
    found: dict[str, Tensor] = {}
    for name, own in weights(model).items():
        names = _names(name, model)
        for theirs, part in zip(names, own.chunk(len(names)), strict=True):
            head = theirs.startswith(("cls.", f"{CLASSES}.", f"{SPANS}."))
            found[theirs if head else prefix + theirs] = part.detach().cpu().contiguous()
    if _architecture(model) == "BertForMaskedLM":  # which has no place for one
        found = {name: x for name, x in found.items() if not name.startswith("bert.pooler.")}
    return found


def _architecture(model: nn.Module) -> str:
    if isinstance(model, Pretraining):
        words, next = model.words is not None, model.next is not None
        if words and next:
            return "BertForPreTraining"
        return "BertForMaskedLM" if words else "BertForNextSentencePrediction"
    named: dict[type[nn.Module], str] = {
        Bert: "BertModel",
        Classifier: "BertForSequenceClassification",
        Tagger: "BertForTokenClassification",
        Spans: "BertForQuestionAnswering",
    }
    return named[type(model)]


def _written_config(model: nn.Module, tokenizer: WordPieces | None, labels: Sequence[str]) -> dict[str, Any]:
    bert = _bert(model)
    ours = bert.config
    found: dict[str, Any] = {
        "model_type": "bert",
        "architectures": [_architecture(model)],
        "dtype": str(bert.word_embedding.weight.dtype).removeprefix("torch."),
        "vocab_size": bert.word_embedding.num_embeddings,
        "hidden_size": ours.width,
        "num_hidden_layers": ours.layers,
        "num_attention_heads": ours.heads,
        "intermediate_size": ours.feed_forward,
        "hidden_act": "silu" if ours.activation == "swish" else ours.activation,
        "hidden_dropout_prob": ours.dropout,
        "attention_probs_dropout_prob": ours.attention_dropout,
        "max_position_embeddings": ours.positions,
        "type_vocab_size": ours.segments,
        "initializer_range": 0.02,
        "layer_norm_eps": ours.eps,
        "pad_token_id": 0 if tokenizer is None else tokenizer.pad,
        "tie_word_embeddings": True,
    }
    if isinstance(model, Classifier | Tagger):
        names = labels or [f"LABEL_{number}" for number in range(model.output.out_features)]
        found["id2label"] = {str(number): name for number, name in enumerate(names)}
        found["label2id"] = {name: number for number, name in enumerate(names)}
        found["classifier_dropout"] = model.dropout.p
        if isinstance(model, Classifier):
            several = model.output.out_features > 1
            found["problem_type"] = "single_label_classification" if several else "regression"
    return found


def _written_tokenizer(tokenizer: WordPieces, longest: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # by tokenizer.json, and by nothing that it may not say
        **{f"{what}_token": name for what, name in tokenizer.names.items()},
        "model_max_length": longest,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }


# ------------------------------------------------------------------------------------------- names


def _bert(model: nn.Module) -> Bert:
    if isinstance(model, Bert):
        return model
    if isinstance(model, Pretraining | Classifier | Tagger | Spans):
        return model.bert
    raise InputError(f"a BERT is expected, with a head or without; this is a {type(model).__name__}")


def _names(ours: str, model: nn.Module) -> tuple[str, ...]:
    """What the tensors are called there that make up a weight of ours, one below the other."""
    part, _, kind = ours.removeprefix("bert.").rpartition(".")  # kind: weight or bias
    heads = {**OF_WORDS, "next": NEXT, "output": SPANS if isinstance(model, Spans) else CLASSES}
    if part in ONCE or part in heads:
        return (f"{(ONCE | heads)[part]}.{kind}",)
    _, number, inner = part.split(".", 2)
    theirs = PROJECTED if inner == "attention.project" else (OF_A_LAYER[inner],)
    return tuple(f"encoder.layer.{number}.{name}.{kind}" for name in theirs)


def _told(missing: Sequence[str], surplus: Sequence[str]) -> str:
    parts = [f"missing are {_some(missing)}"] if missing else []
    parts += [f"of no use are {_some(surplus)}"] if surplus else []
    return "; ".join(parts)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
