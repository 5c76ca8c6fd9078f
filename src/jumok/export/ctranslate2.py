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
from jumok.batches.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.errors import InputError, JumokError, MissingExtra
from jumok.export.export_folder import check_replaceable, create_export_folder
from jumok.models.transformer import FeedForward, Transformer, TransformerInputLayer
from jumok.run import Run

__all__ = [
    "MAX_POSITIONS",
    "QUANTIZATIONS",
    "TranslationAgreement",
    "check_supported",
    "export_ctranslate2",
    "import_ctranslate2",
    "write_model",
]

MAX_POSITIONS = 4096  # tokens that a sentence may have there
FLOAT_TYPES = ("float32", "float16", "bfloat16")
QUANTIZATIONS = (*FLOAT_TYPES, "int16", "int8", *(f"int8_{name}" for name in FLOAT_TYPES))
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH"}
FORBIDDEN_BIAS = -1e4  # the bias of a word that must not be said: never the best, and a number in float16 too
NUM_COMPARED = 200  # sentences


@functools.cache
def import_ctranslate2() -> Any:
    """The ``ctranslate2`` package, or an error that names the command to install it."""
    try:
        return importlib.import_module("ctranslate2")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f'CTranslate2 needs {error.name}, which is not installed: pip install "jumok[export]"'
        ) from error


def check_supported(run: Run) -> None:
    """Raise if CTranslate2 does not have the model of this run."""
    task, kind = run.recipe.task, getattr(getattr(run.recipe, "model", None), "kind", "model")
    if (task, kind) != ("translate", "transformer"):
        raise InputError(
            f"CTranslate2 runs Transformers that translate, and {run.folder} holds a {kind} of the task "
            f"{task}: --to onnx and --engine onnx may take it, --engine torch takes everything"
        )


def export_ctranslate2(
    run: Run, output_folder: str | Path, quantization: str | None = None, *, compare: bool = True
) -> str:
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
    from jumok.tasks.translate import task as translate_task

    check_supported(run)
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise InputError(f"--quantization {quantization}: it is one of {', '.join(QUANTIZATIONS)}")
    output_folder = Path(output_folder)
    check_replaceable(output_folder)
    import_ctranslate2()
    translator = translate_task.load(run, "cpu")
    with create_export_folder(output_folder) as new:
        write_model(translator.model, translator.tokenizers, new, quantization)
        translator.tokenizers.save(new)
        told = _compare_translations(translator, new) if compare else "It was not compared with its source."
        (new / "README.md").write_text(_format_readme(run, quantization, told), encoding="utf-8")
    return told


# ----------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class TranslationAgreement:
    """How translations by CTranslate2 compare with those by PyTorch."""

    num_sentences: int
    num_identical: int  # greedy translations that are equal
    beam_size: int
    bleu: tuple[float, float]  # with this beam: by PyTorch, by CTranslate2

    def __str__(self) -> str:
        theirs, ours = self.bleu
        return (
            f"Of {self.num_sentences} sentences of the validation data, {self.num_identical} have the same greedy "
            f"translation as by PyTorch. BLEU with beam {self.beam_size}: {ours:.2f}, and by PyTorch {theirs:.2f} "
            f"({ours - theirs:+.2f})."
        )


def _compare_translations(translator: Any, folder: Path) -> str:
    from jumok.inference.ctranslate2_engine import CTranslate2TranslationPredictor
    from jumok.tasks.translate import metrics as translate_metrics
    from jumok.tasks.translate.predictor import TranslationOptions

    run = translator.run
    try:
        pairs = translator.texts.valid().examples[:NUM_COMPARED]
        metric = translate_metrics.build_bleu(run)
    except (JumokError, OSError) as error:
        return f"It was not compared with its source: {error}"
    both = (translator, CTranslate2TranslationPredictor(run, folder, "cpu", "default"))
    sources, references = [one.source for one in pairs], [one.target for one in pairs]
    greedy, searched = (
        [
            [said.translation for said in one.predict(sources, TranslationOptions(beam_size=beam))]
            for one in both
        ]
        for beam in (1, None)
    )
    first, second = (metric.score(said, references).value for said in searched)
    same = sum(x == y for x, y in zip(*greedy, strict=True))
    return str(TranslationAgreement(len(pairs), same, translator.decode.beam, (first, second)))


# -------------------------------------------------------------------------------------- the model


def write_model(
    model: Transformer, tokenizers: TokenizerPair, folder: Path, quantization: str | None = None
) -> None:
    """The model and its vocabularies, as CTranslate2 reads them, into a folder that is there."""
    for name, weight in model.named_parameters():  # in C++ a NaN may be lost on its way, and go unseen
        if not weight.isfinite().all():
            raise InputError(f"{name} holds NaN or infinity: the training has diverged; use earlier weights")
    config, specs = model.config, import_ctranslate2().specs
    spec = specs.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_heads,
        pre_norm=config.norm == "pre",
        activation=getattr(specs.Activation, ACTIVATIONS[config.activation]),
    )
    _fill_encoder(spec.encoder, model)
    _fill_decoder(spec.decoder, model)
    spec.register_source_vocabulary(tokenizers.source.ids_to_tokens(range(tokenizers.source.vocab_size)))
    spec.register_target_vocabulary(tokenizers.target.ids_to_tokens(range(tokenizers.target.vocab_size)))
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = (
        SPECIAL_TOKENS[number] for number in (BOS, EOS, UNK)
    )
    spec.config.decoder_start_token = SPECIAL_TOKENS[BOS]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))


def _fill_encoder(spec: Any, model: Transformer) -> None:
    spec.embeddings[0].weight = _to_numpy(model.source_embedding.weight)
    spec.position_encodings.encodings = _compute_positions(model.source_input_layer)
    sublayers, norms = [], []
    for theirs, ours in zip(spec.layer, model.encoder, strict=True):
        _fill_attention(theirs.self_attention, ours.attention)
        _fill_feed_forward(theirs.ffn, ours.feed_forward)
        sublayers += [theirs.self_attention, theirs.ffn]
        norms += [ours.feed_forward.attention_residual.norm, ours.feed_forward.residual.norm]
    _fill_norms(spec, model.source_input_layer, sublayers, norms)


def _fill_decoder(spec: Any, model: Transformer) -> None:
    spec.embeddings.weight = _to_numpy(model.target_embedding.weight)
    spec.position_encodings.encodings = _compute_positions(model.target_input_layer)
    spec.projection.weight = _to_numpy(model.output.weight)
    spec.projection.bias = np.zeros(len(model.output.weight), np.float32)
    spec.projection.bias[[PAD, UNK, BOS]] = FORBIDDEN_BIAS
    sublayers, norms = [], []
    for theirs, ours in zip(spec.layer, model.decoder, strict=True):
        _fill_attention(theirs.self_attention, ours.self_attention)
        _fill_attention(theirs.attention, ours.cross_attention)
        _fill_feed_forward(theirs.ffn, ours.feed_forward)
        sublayers += [theirs.self_attention, theirs.attention, theirs.ffn]
        norms += [
            ours.self_attention_residual.norm,
            ours.feed_forward.attention_residual.norm,
            ours.feed_forward.residual.norm,
        ]
    _fill_norms(spec, model.target_input_layer, sublayers, norms)


def _fill_norms(
    spec: Any, entry: TransformerInputLayer, sublayers: list[Any], norms: Sequence[nn.LayerNorm]
) -> None:
    """Ours follow a sublayer. With norms "pre", what is a norm behind one is that before the next, there."""
    if entry.norm is not None:
        sublayers, norms = [*sublayers, spec], [entry.norm, *norms]  # the last one: of all that comes out
    for theirs, ours in zip(sublayers, norms, strict=True):
        theirs.layer_norm.gamma, theirs.layer_norm.beta = _to_numpy(ours.weight), _to_numpy(ours.bias)


def _fill_attention(spec: Any, attention: MultiHead) -> None:
    if attention.key_width is None:
        layers = [attention.project, attention.merge]  # queries, keys and values in one product
    else:
        layers = [attention.project_query, attention.project_source, attention.merge]
    for theirs, layer in zip(spec.linear, layers, strict=True):
        _fill_linear(theirs, layer)


def _fill_feed_forward(spec: Any, feed_forward: FeedForward) -> None:
    _fill_linear(spec.linear_0, feed_forward.widen)
    _fill_linear(spec.linear_1, feed_forward.narrow)


def _fill_linear(spec: Any, linear: nn.Linear) -> None:
    spec.weight, spec.bias = _to_numpy(linear.weight), _to_numpy(linear.bias)


def _compute_positions(entry: TransformerInputLayer) -> NDArray[np.float32]:
    return _to_numpy(entry.position.embed(torch.arange(MAX_POSITIONS)))


def _to_numpy(weight: Tensor) -> NDArray[np.float32]:
    """A copy: a spec is quantized in place."""
    return weight.detach().cpu().float().numpy().copy()


# ------------------------------------------------------------------------------------- the README

README_TEMPLATE = """# {name}, for CTranslate2

A Transformer that translates, written by `jumok export_ctranslate2`, its weights in {kind}. In this folder, after
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

PREPROCESSING_NOTE = """Texts go in as `data.prepare: {}` makes them, and come out so: the lines above leave that to
you; `jumok run` and `jumok serve` do it.

"""


def _format_readme(run: Run, quantization: str | None, comparison: str) -> str:
    recipe = run.recipe
    joint = not (run.folder / "tokenizer.source.json").exists()
    return README_TEMPLATE.format(
        name=run.folder.resolve().name,
        kind=quantization or "float32",
        source="tokenizer.json" if joint else "tokenizer.source.json",
        target="tokenizer.json" if joint else "tokenizer.target.json",
        example="this is an example sentence",
        beam=recipe.decode.beam,
        penalty=recipe.decode.length_penalty,
        told=comparison,
        prepared="" if recipe.data.prepare == "none" else PREPROCESSING_NOTE.format(recipe.data.prepare),
        positions=MAX_POSITIONS,
    )
