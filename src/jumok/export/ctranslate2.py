"""Export of a Transformer to CTranslate2: the same translations, several times as fast.

CTranslate2 supports every :class:`~jumok.models.transformer.Transformer`: pre-norm and post-norm, tied and
separate embeddings, all activations. Two things are precomputed:

- **positions**: a table of the first 4096 position encodings, which jumok computes by a formula;
- **forbidden tokens**: a translation never contains ``<pad>``, ``<unk>`` or ``<s>``. In jumok the search
  excludes them. Here the output layer gets a bias for these three tokens, so that users of the folder need no
  extra code.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from jumok.attention.heads import MultiHead
from jumok.batches.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from jumok.data.readers.text_files import import_optional
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.errors import InputError, JumokError
from jumok.export.export_folder import (
    check_finite,
    check_replaceable,
    create_export_folder,
    find_tokenizer_files,
)
from jumok.models.transformer import Transformer, TransformerEncoderLayer, TransformerInputLayer
from jumok.run import Run

MAX_POSITIONS = 4096  # maximum number of tokens of a sentence
FLOAT_TYPES = ("float32", "float16", "bfloat16")
QUANTIZATIONS = (*FLOAT_TYPES, "int16", "int8", *(f"int8_{name}" for name in FLOAT_TYPES))
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH"}
FORBIDDEN_BIAS = -1e4  # bias of a forbidden token; it is finite in float16
NUM_COMPARED = 200  # sentences of the comparison with PyTorch


def import_ctranslate2() -> Any:
    """Import ``ctranslate2``, or raise an error with the command to install it."""
    return import_optional("ctranslate2", "export")


def check_supported(run: Run) -> None:
    """Raise an error if CTranslate2 does not support the model of this run."""
    task, model_type = run.recipe.task, getattr(getattr(run.recipe, "model", None), "type", "model")
    if (task, model_type) != ("translate", "transformer"):
        raise InputError(
            f"CTranslate2 supports Transformers for translation, and {run.folder} has a {model_type} model "
            f"for the task {task}; try --format onnx or --engine onnx, or use --engine torch"
        )


def export_ctranslate2(
    run: Run, output_folder: str | Path, quantization: str | None = None, *, compare: bool = True
) -> str:
    """Write a folder for ``ctranslate2.Translator(folder)``, with its tokenizers and a README.

    The folder is written atomically. It replaces an earlier export, but no other folder.

    Args:
        run: the run of a Transformer for translation.
        output_folder: the new folder.
        quantization: one of QUANTIZATIONS. None: float32.
        compare: compare the translations of some validation data with those of PyTorch.

    Returns:
        The result of the comparison, as text. It is also in the README.
    """
    from jumok.tasks import load_predictor

    check_supported(run)
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise InputError(f"--quantization {quantization}: it is one of {', '.join(QUANTIZATIONS)}")
    output_folder = Path(output_folder)
    check_replaceable(output_folder)
    import_ctranslate2()
    predictor: Any = load_predictor(run, "cpu")
    with create_export_folder(output_folder) as new:
        write_model(predictor.model, predictor.tokenizers, new, quantization)
        predictor.tokenizers.save(new)
        comparison = _compare_translations(predictor, new) if compare else "It was not compared with PyTorch."
        (new / "README.md").write_text(_format_readme(run, quantization, comparison), encoding="utf-8")
    return comparison


# ----------------------------------------------------------------------------------------- comparison


def _compare_translations(torch_predictor: Any, folder: Path) -> str:
    from jumok.inference.ctranslate2_engine import CTranslate2TranslationPredictor
    from jumok.tasks.translate import metrics as translate_metrics
    from jumok.tasks.translate.predictor import TranslationOptions

    run = torch_predictor.run
    try:
        examples = torch_predictor.load_split("valid").examples[:NUM_COMPARED]
        bleu = translate_metrics.build_bleu(run)
    except (JumokError, OSError) as error:
        return f"It was not compared with PyTorch: {error}"
    sources = [example.source for example in examples]
    references = [example.target for example in examples]
    predictors = (torch_predictor, CTranslate2TranslationPredictor(run, folder, "cpu", "default"))

    def translate(predictor: Any, beam_size: int | None) -> list[str]:
        predictions = predictor.predict(sources, TranslationOptions(beam_size=beam_size))
        return [prediction.translation for prediction in predictions]

    greedy = [translate(predictor, 1) for predictor in predictors]
    torch_bleu, ctranslate2_bleu = (
        bleu.score(translate(predictor, None), references).value for predictor in predictors
    )
    num_identical = sum(x == y for x, y in zip(*greedy, strict=True))
    beam_size = torch_predictor.decode_config.beam_size
    return (
        f"{num_identical} of {len(examples)} validation sentences have the same greedy translation as in PyTorch. "
        f"BLEU with beam size {beam_size}: {ctranslate2_bleu:.2f}, in PyTorch {torch_bleu:.2f} "
        f"({ctranslate2_bleu - torch_bleu:+.2f})."
    )


# -------------------------------------------------------------------------------------- model


def write_model(model: Transformer, tokenizers: TokenizerPair, folder: Path, quantization: str | None = None) -> None:
    """Write the model and its vocabularies in the format of CTranslate2 to an existing folder."""
    check_finite(model)
    config, specs = model.config, import_ctranslate2().specs
    spec = specs.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_heads,
        pre_norm=config.norm == "pre",
        activation=getattr(specs.Activation, ACTIVATIONS[config.activation]),
    )
    spec.encoder.embeddings[0].weight = _to_numpy(model.source_embedding.weight)
    spec.decoder.embeddings.weight = _to_numpy(model.target_embedding.weight)
    spec.decoder.projection.weight = _to_numpy(model.output.weight)
    spec.decoder.projection.bias = np.zeros(len(model.output.weight), np.float32)
    spec.decoder.projection.bias[[PAD, UNK, BOS]] = FORBIDDEN_BIAS
    _fill_layers(spec.encoder, model.source_input_layer, model.encoder)
    _fill_layers(spec.decoder, model.target_input_layer, model.decoder)
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


def _fill_layers(spec: Any, input_layer: TransformerInputLayer, layers: Iterable[Any]) -> None:
    """Fill the layers of the encoder or the decoder, and their positions and norms."""
    spec.position_encodings.encodings = _to_numpy(input_layer.position.embed(torch.arange(MAX_POSITIONS)))
    sublayer_specs: list[Any] = []
    norms: list[nn.LayerNorm] = []
    for layer_spec, layer in zip(spec.layer, layers, strict=True):
        feed_forward = layer.feed_forward
        if isinstance(layer, TransformerEncoderLayer):
            attentions = [(layer_spec.self_attention, layer.attention)]
            norms.append(feed_forward.attention_residual.norm)
        else:
            attentions = [
                (layer_spec.self_attention, layer.self_attention),
                (layer_spec.attention, layer.cross_attention),
            ]
            norms += [layer.self_attention_residual.norm, feed_forward.attention_residual.norm]
        for attention_spec, attention in attentions:
            _fill_attention(attention_spec, attention)
            sublayer_specs.append(attention_spec)
        _fill_linear(layer_spec.ffn.linear_0, feed_forward.widen)
        _fill_linear(layer_spec.ffn.linear_1, feed_forward.narrow)
        sublayer_specs.append(layer_spec.ffn)
        norms.append(feed_forward.residual.norm)
    if input_layer.norm is not None:  # pre-norm: a norm after a sublayer in jumok is before the next one here
        sublayer_specs, norms = [*sublayer_specs, spec], [input_layer.norm, *norms]  # the last one is the final norm
    for sublayer_spec, norm in zip(sublayer_specs, norms, strict=True):
        sublayer_spec.layer_norm.gamma, sublayer_spec.layer_norm.beta = _to_numpy(norm.weight), _to_numpy(norm.bias)


def _fill_attention(spec: Any, attention: MultiHead) -> None:
    if attention.key_width is None:
        layers = [attention.project, attention.merge]  # queries, keys and values in one matrix
    else:
        layers = [attention.project_query, attention.project_source, attention.merge]
    for layer_spec, layer in zip(spec.linear, layers, strict=True):
        _fill_linear(layer_spec, layer)


def _fill_linear(spec: Any, linear: nn.Linear) -> None:
    spec.weight, spec.bias = _to_numpy(linear.weight), _to_numpy(linear.bias)


def _to_numpy(weight: Tensor) -> NDArray[np.float32]:
    """Copy a weight, because specs are quantized in place."""
    return weight.detach().cpu().float().numpy().copy()


# ------------------------------------------------------------------------------------- README

README_TEMPLATE = """# {name}, for CTranslate2

A Transformer for translation, exported by `jumok export` with weights in {dtype}. To use this folder, run
`pip install ctranslate2 tokenizers`, then:

```python
import ctranslate2, tokenizers

source, target = map(tokenizers.Tokenizer.from_file, ("{source}", "{target}"))
results = ctranslate2.Translator(".").translate_batch(
    [source.encode("this is an example sentence").tokens], beam_size={beam_size}, length_penalty={length_penalty:g}
)
print(target.decode([target.token_to_id(token) for token in results[0].hypotheses[0]]))
```

{comparison}

{preprocessing}A text and its translation can have up to {max_positions} tokens. CTranslate2 ranks hypotheses
by log-probability / length^penalty, and jumok by log-probability / ((5 + length) / 6)^penalty, so the order
of hypotheses can differ. `jumok run` and `jumok serve` with `--engine ctranslate2` use the ranking of jumok.
"""

PREPROCESSING_NOTE = """The model was trained with `data.preprocessing: {}`. The code above does not apply it;
`jumok run` and `jumok serve` do.

"""


def _format_readme(run: Run, quantization: str | None, comparison: str) -> str:
    recipe, preprocessing = run.recipe, run.recipe.data.preprocessing
    source, target = find_tokenizer_files(run)
    return README_TEMPLATE.format(
        name=run.folder.resolve().name,
        dtype=quantization or "float32",
        source=source,
        target=target,
        beam_size=recipe.decode.beam_size,
        length_penalty=recipe.decode.length_penalty,
        comparison=comparison,
        preprocessing="" if preprocessing == "none" else PREPROCESSING_NOTE.format(preprocessing),
        max_positions=MAX_POSITIONS,
    )
