"""A Transformer as a CTranslate2 folder: the same translations, several times as fast.

All that a :class:`~jumok.models.transformer.Transformer` can be, CTranslate2 has: norms before or after each
sublayer, embeddings that are one or not, any of the activations. Two things are written down for it:

- **positions**: a table of the first 4096, since ours follow from a formula that it does not have;
- **words that must not be said**: a translation never holds ``<pad>``, ``<unk>`` or ``<s>``. Here a search
  takes care of that; there the output layer gets a bias for these three, so that whoever uses the folder need
  not think of it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from jumok.attention.heads import MultiHead
from jumok.batch import BOS, EOS, PAD, SPECIAL, UNK
from jumok.data.text import Tokenizers
from jumok.errors import InputError, JumokError, MissingExtra
from jumok.exchange.folders import check_replaceable, exported
from jumok.models.layers import FeedForward
from jumok.models.transformer import Entry, Transformer
from jumok.run import Run

__all__ = ["POSITIONS", "QUANTIZATIONS", "Agreement", "check", "export", "library", "write"]

POSITIONS = 4096  # tokens that a sentence may have there
FLOATS = ("float32", "float16", "bfloat16")
QUANTIZATIONS = (*FLOATS, "int16", "int8", *(f"int8_{name}" for name in FLOATS))
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH"}
UNSAID = -1e4  # the bias of a word that must not be said: never the best, and a number in float16 too
COMPARED = 200  # sentences


@functools.cache
def library() -> Any:
    """The ``ctranslate2`` package, or an error that names the command to install it."""
    try:
        return importlib.import_module("ctranslate2")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f'CTranslate2 needs {error.name}, which is not installed: pip install "jumok[export]"'
        ) from error


def check(run: Run) -> None:
    """Raise if CTranslate2 does not have the model of this run."""
    task, kind = run.recipe.task, getattr(getattr(run.recipe, "model", None), "kind", "model")
    if (task, kind) != ("translate", "transformer"):
        raise InputError(
            f"CTranslate2 runs Transformers that translate, and {run.folder} holds a {kind} of the task "
            f"{task}: --to onnx and --engine onnx may take it, --engine torch takes everything"
        )


def export(run: Run, out: str | Path, quantization: str | None = None, *, compare: bool = True) -> str:
    """Write a folder that ``ctranslate2.Translator(folder)`` loads, with its tokenizers and a README.

    It appears whole or not at all, and takes the place of an earlier export only.

    Args:
        run: of a Transformer that translates.
        out: the folder to be made.
        quantization: one of QUANTIZATIONS; None is float32.
        compare: translate some of the validation data by this and by PyTorch. The README has the figures.

    Returns:
        How they compare, in words.
    """
    from jumok.tasks import translate

    check(run)
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise InputError(f"--quantization {quantization}: it is one of {', '.join(QUANTIZATIONS)}")
    out = Path(out)
    check_replaceable(out)
    library()
    translator = translate.load(run, "cpu")
    with exported(out) as new:
        write(translator.model, translator.tokenizers, new, quantization)
        translator.tokenizers.save(new)
        told = _compared(translator, new) if compare else "It was not compared with its source."
        (new / "README.md").write_text(_readme(run, quantization, told), encoding="utf-8")
    return told


# ----------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Agreement:
    """How translations by CTranslate2 compare with those by PyTorch."""

    sentences: int
    same: int  # greedy translations that are equal
    beam: int
    bleu: tuple[float, float]  # with this beam: by PyTorch, by CTranslate2

    def __str__(self) -> str:
        theirs, ours = self.bleu
        return (
            f"Of {self.sentences} sentences of the validation data, {self.same} have the same greedy "
            f"translation as by PyTorch. BLEU with beam {self.beam}: {ours:.2f}, and by PyTorch {theirs:.2f} "
            f"({ours - theirs:+.2f})."
        )


def _compared(translator: Any, folder: Path) -> str:
    from jumok.tasks import evaluation
    from jumok.tasks.by_ctranslate2 import ByCTranslate2
    from jumok.tasks.translator import Search

    run = translator.run
    try:
        pairs = translator.texts.valid().examples[:COMPARED]
        metric = evaluation.bleu_of(run)
    except (JumokError, OSError) as error:
        return f"It was not compared with its source: {error}"
    both = (translator, ByCTranslate2(run, folder, "cpu", "default"))
    sources, references = [one.source for one in pairs], [one.target for one in pairs]
    greedy, searched = (
        [[said.text for said in one.predict(sources, Search(beam=beam))] for one in both]
        for beam in (1, None)
    )
    first, second = (metric.score(said, references).value for said in searched)
    same = sum(x == y for x, y in zip(*greedy, strict=True))
    return str(Agreement(len(pairs), same, translator.decode.beam, (first, second)))


# -------------------------------------------------------------------------------------- the model


def write(model: Transformer, tokenizers: Tokenizers, folder: Path, quantization: str | None = None) -> None:
    """The model and its vocabularies, as CTranslate2 reads them, into a folder that is there."""
    for name, weight in model.named_parameters():  # in C++ a NaN may be lost on its way, and go unseen
        if not weight.isfinite().all():
            raise InputError(f"{name} holds NaN or infinity: the training has diverged; use earlier weights")
    config, specs = model.config, library().specs
    spec = specs.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.heads,
        pre_norm=config.norm == "pre",
        activation=getattr(specs.Activation, ACTIVATIONS[config.activation]),
    )
    _encoder(spec.encoder, model)
    _decoder(spec.decoder, model)
    spec.register_source_vocabulary(tokenizers.source.pieces(range(tokenizers.source.size)))
    spec.register_target_vocabulary(tokenizers.target.pieces(range(tokenizers.target.size)))
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = (
        SPECIAL[number] for number in (BOS, EOS, UNK)
    )
    spec.config.decoder_start_token = SPECIAL[BOS]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.eps
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))


def _encoder(spec: Any, model: Transformer) -> None:
    spec.embeddings[0].weight = _plain(model.source_embedding.weight)
    spec.position_encodings.encodings = _positions(model.source_entry)
    sublayers, norms = [], []
    for theirs, ours in zip(spec.layer, model.encoder, strict=True):
        _attention(theirs.self_attention, ours.attention)
        _feed_forward(theirs.ffn, ours.feed_forward)
        sublayers += [theirs.self_attention, theirs.ffn]
        norms += [ours.feed_forward.join_attention.norm, ours.feed_forward.join.norm]
    _norms(spec, model.source_entry, sublayers, norms)


def _decoder(spec: Any, model: Transformer) -> None:
    spec.embeddings.weight = _plain(model.target_embedding.weight)
    spec.position_encodings.encodings = _positions(model.target_entry)
    spec.projection.weight = _plain(model.output.weight)
    spec.projection.bias = np.zeros(len(model.output.weight), np.float32)
    spec.projection.bias[[PAD, UNK, BOS]] = UNSAID
    sublayers, norms = [], []
    for theirs, ours in zip(spec.layer, model.decoder, strict=True):
        _attention(theirs.self_attention, ours.attention)
        _attention(theirs.attention, ours.source_attention)
        _feed_forward(theirs.ffn, ours.feed_forward)
        sublayers += [theirs.self_attention, theirs.attention, theirs.ffn]
        norms += [ours.join.norm, ours.feed_forward.join_attention.norm, ours.feed_forward.join.norm]
    _norms(spec, model.target_entry, sublayers, norms)


def _norms(spec: Any, entry: Entry, sublayers: list[Any], norms: Sequence[nn.LayerNorm]) -> None:
    """Ours follow a sublayer. With norms "pre", what is a norm behind one is that before the next, there."""
    if entry.norm is not None:
        sublayers, norms = [*sublayers, spec], [entry.norm, *norms]  # the last one: of all that comes out
    for theirs, ours in zip(sublayers, norms, strict=True):
        theirs.layer_norm.gamma, theirs.layer_norm.beta = _plain(ours.weight), _plain(ours.bias)


def _attention(spec: Any, ours: MultiHead) -> None:
    if ours.key_width is None:
        layers = [ours.project, ours.merge]  # queries, keys and values in one product
    else:
        layers = [ours.project_query, ours.project_source, ours.merge]
    for theirs, layer in zip(spec.linear, layers, strict=True):
        _linear(theirs, layer)


def _feed_forward(spec: Any, ours: FeedForward) -> None:
    _linear(spec.linear_0, ours.widen)
    _linear(spec.linear_1, ours.narrow)


def _linear(spec: Any, ours: nn.Linear) -> None:
    spec.weight, spec.bias = _plain(ours.weight), _plain(ours.bias)


def _positions(entry: Entry) -> NDArray[np.float32]:
    return _plain(entry.position.vectors(torch.arange(POSITIONS)))


def _plain(weight: Tensor) -> NDArray[np.float32]:
    """A copy: a spec is quantized in place."""
    return weight.detach().cpu().float().numpy().copy()


# ------------------------------------------------------------------------------------- the README

README = """# {name}, for CTranslate2

A Transformer that translates, written by `jumok export`, its weights in {kind}. In this folder, after
`pip install ctranslate2 tokenizers`:

```python
import ctranslate2, tokenizers

source, target = map(tokenizers.Tokenizer.from_file, ("{source}", "{target}"))
said = ctranslate2.Translator(".").translate_batch(
    [source.encode("{example}").tokens], beam_size={beam}, length_penalty={penalty:g}
)
print(target.decode([target.token_to_id(token) for token in said[0].hypotheses[0]]))
```

{told}

{prepared}A text may have {positions} tokens, and so may its translation. CTranslate2 ranks what a beam
found by log-probability / length^penalty, and jumok by log-probability / ((5 + length) / 6)^penalty: another
translation may come first. `jumok run` and `jumok serve`, with `--engine ctranslate2`, rank as jumok does.
"""

PREPARED = """Texts go in as `data.prepare: {}` makes them, and come out so: the lines above leave that to
you; `jumok run` and `jumok serve` do it.

"""


def _readme(run: Run, quantization: str | None, told: str) -> str:
    recipe = run.recipe
    joint = not (run.folder / "tokenizer.source.json").exists()
    return README.format(
        name=run.folder.resolve().name,
        kind=quantization or "float32",
        source="tokenizer.json" if joint else "tokenizer.source.json",
        target="tokenizer.json" if joint else "tokenizer.target.json",
        example="this is an example sentence",
        beam=recipe.decode.beam,
        penalty=recipe.decode.length_penalty,
        told=told,
        prepared="" if recipe.data.prepare == "none" else PREPARED.format(recipe.data.prepare),
        positions=POSITIONS,
    )
