"""Decoding speed of our searches, compared with transformers' ``generate`` in one process.

    python bench/decoding.py [RUN] [--section same|speed|host|all] [--quick] [--out file.json]

RUN is a run of `jumok train transformer/multi30k-en-de`; its test sentences are translated. Without RUN, the
model has the shape of that recipe and random weights, and the sentences are random, which measures speed only.
The model is exported to a Marian folder, which transformers loads. All decoders get the same token ids in the
same batches of sentences of similar length.

same     the share of sentences whose tokens are equal to those of transformers, and the BLEU of each decoder
speed    sentences and tokens (including </s>) per second, for several batch sizes
host     host time: tiny widths on a CPU, so that Python and dispatch are all that is measured. The model has
         the number of layers of the recipe and random weights. Decoders take turns, on one thread

Settings are equal: at most 2·n + 20 tokens for a batch whose longest source has n (with random weights n, and
all sentences reach it), no sampling, no forbidden tokens (but ours never generates <pad> or <s>), and a beam
of 5 that stops when 5 hypotheses have finished (early_stopping=True in transformers). Length penalties are
defined differently (Wu's here, a power of the length there), and are 0 for both, where they are equal. One
rule differs: a sentence at the limit may still end with </s> here, and gets one more token there.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report as r
import torch
from peer_models import load_ctranslate2, load_marian
from random_text import Text
from report import Report, Row, ratio

import jumok
from jumok import decoding, recipe
from jumok.batches.tokens import BOS, EOS, PAD, UNK, Tokens
from jumok.errors import JumokError
from jumok.export.marian import export_marian
from jumok.models.transformer import Transformer, TransformerConfig

RECIPE = "transformer/multi30k-en-de"
Translations = list[tuple[int, ...]]  # ids of each sentence, without special tokens
Decode = Callable[[Tokens, int, int], Translations]  # source, beam size, maximum number of tokens
SEARCHES = {"greedy": 1, "beam 5": 5}
NUM_BATCHES = 4  # of each size that are measured, from the shortest sentences to the longest
PEER = "transformers"
IMPLEMENTATIONS = ("ours", "graphed", PEER, "ctranslate2")
HOST_VOCABULARY, HOST_BATCH_SIZES = 499, (1, 8, 32)


@dataclass(frozen=True)
class Settings:
    """Where and how much to measure."""

    device: torch.device
    quick: bool
    dtypes: tuple[torch.dtype, ...]
    batch_sizes: tuple[int, ...]
    comparison_batch_size: int  # for the comparison of all sentences


@dataclass(frozen=True)
class Workload:
    """A model on the host, the sentences to translate, and how to score the translations."""

    model: Transformer
    sources: list[list[int]]  # ids without </s>, sorted by length
    # The maximum number of tokens, by the length of the longest source of a batch:
    max_length: Callable[[int], int] = decoding.default_max_length
    bleu: Callable[[Translations], float] | None = None

    def batches(self, size: int, max_batches: int | None = None) -> list[Tokens]:
        """All sentences in batches of similar length, or ``max_batches`` of these, evenly spaced."""
        sentences = [[*ids, EOS] for ids in self.sources]
        count = -(-len(sentences) // size)
        edges = [len(sentences) * number // count for number in range(count + 1)]
        if max_batches is not None and max_batches < count:
            chosen = [(2 * number + 1) * count // (2 * max_batches) for number in range(max_batches)]
        else:
            chosen = list(range(count))
        return [Tokens.pad(sentences[edges[n] : edges[n + 1]]) for n in chosen]


# ------------------------------------------------------------------------------------------- workloads


def build_random_workload(config: TransformerConfig, text: Text) -> Workload:
    """Random weights, and sentences of random words."""
    torch.manual_seed(0)
    model = Transformer(config, text.vocab_size, text.vocab_size).eval()
    with torch.no_grad():
        model.output.weight[[PAD, UNK, BOS, EOS]] = 0  # never the most probable: all reach the limit
    return Workload(model, sorted(text.draw(1)[0][0], key=len), max_length=lambda length: length)


def build_recipe_workload(settings: Settings) -> Workload:
    if settings.quick:
        return build_random_workload(build_tiny_config(1, 2), Text(11, 3, 7, 97))
    num_sentences = 1000 if settings.device.type == "cuda" else 64
    loaded = recipe.load(RECIPE)
    return build_random_workload(loaded.model, Text(num_sentences, 6, 32, loaded.tokenizer.vocab_size))


def build_tiny_config(encoder_layers: int, decoder_layers: int) -> TransformerConfig:
    return TransformerConfig(
        width=16,
        num_heads=2,
        feed_forward_width=32,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        tie_embeddings="all",
    )


def load_run_workload(folder: Path, report: Report) -> Workload:
    """The model of a run and its test sentences, or random sentences if there are none."""
    translator = jumok.load(folder, "cpu")
    if not isinstance(translator.model, Transformer):
        raise SystemExit(f"{folder} is not a Transformer, and only that can be exported to transformers")
    try:
        examples = translator.data.test_split().examples
        prepared = [translator.data.preprocess(example.source, "source") for example in examples]
    except (JumokError, OSError) as error:
        report.log(f"no test sentences, random ones are used instead: {r.short(error)[:60]} …")
        vocabulary = translator.tokenizers.source.vocab_size
        return Workload(translator.model, sorted(Text(1000, 6, 32, vocabulary).draw(1)[0][0], key=len))
    ids = translator.tokenizers.source.encode(prepared)
    order = sorted((n for n in range(len(ids)) if ids[n]), key=lambda n: len(ids[n]))
    references = [translator.data.preprocess(examples[n].target, "target") for n in order]

    def bleu(translations: Translations) -> float:
        from jumok.metrics.translation import Bleu, choose_bleu_tokenization

        data = translator.run.recipe.data
        metric = Bleu(choose_bleu_tokenization(str(data.target)) if data.preprocessing == "none" else "none")
        texts = [" ".join(translator.tokenizers.target.decode(ids).split()) for ids in translations]
        return metric.score(texts, references).value

    return Workload(translator.model, [ids[n] for n in order], bleu=bleu)


# -------------------------------------------------------------------------------------------- decoders


def build_our_decode(model: Any) -> Decode:
    def decode(source: Tokens, beam_size: int, max_length: int) -> Translations:
        if beam_size == 1:
            hypotheses = decoding.greedy_search(model, source, max_length=max_length, allow_unk=True)
            return [hypothesis.ids for hypothesis in hypotheses]
        beams = decoding.beam_search(model, source, beam_size=beam_size, max_length=max_length, allow_unk=True)
        return [best.ids for (best,) in beams]

    return decode


def build_marian_decode(model: Any) -> Decode:
    def decode(source: Tokens, beam_size: int, max_length: int) -> Translations:
        options: dict[str, Any] = {"early_stopping": True, "length_penalty": 0.0} if beam_size > 1 else {}
        sequences = model.generate(
            input_ids=source.ids,
            attention_mask=source.valid_mask.long(),
            num_beams=beam_size,
            do_sample=False,
            max_length=max_length + 2,  # <s> and </s>
            **options,
        )
        return [strip_special_tokens(row[1:], max_length) for row in sequences.tolist()]

    return decode


def build_ctranslate2_decode(translator: Any) -> Decode:
    def decode(source: Tokens, beam_size: int, max_length: int) -> Translations:
        rows = [ids[:n] for ids, n in zip(source.ids.tolist(), source.lengths, strict=True)]
        results = translator.translate_batch(
            [[str(token_id) for token_id in ids] for ids in rows],
            beam_size=beam_size,
            length_penalty=0.0,
            max_decoding_length=max_length + 1,
        )
        return [strip_special_tokens([int(token) for token in x.hypotheses[0]], max_length) for x in results]

    return decode


def strip_special_tokens(ids: Sequence[int], max_length: int) -> tuple[int, ...]:
    """Return the tokens before </s>."""
    end = ids.index(EOS) if EOS in ids else max_length
    return tuple(ids[: min(end, max_length)])


def build_decoders(
    report: Report, settings: Settings, workload: Workload, exported: Path, dtype: torch.dtype
) -> dict[str, Decode]:
    """Return the decoders that are available, in one dtype. The report says which are not, and why."""

    def copy_model() -> Transformer:
        return copy.deepcopy(workload.model).to(settings.device, dtype).eval()

    def build_graphed() -> Decode:
        from jumok.models.cuda_graph_decoder import CudaGraphDecoder

        return build_our_decode(CudaGraphDecoder(copy_model()))

    def build_ctranslate2() -> Decode:
        folder = exported.with_name(f"ctranslate2-{get_dtype_name(dtype)}")
        return build_ctranslate2_decode(load_ctranslate2(load_marian(exported), folder, settings.device, dtype))

    builders: dict[str, Callable[[], Decode]] = {
        "ours": lambda: build_our_decode(copy_model()),
        "graphed": build_graphed,
        PEER: lambda: build_marian_decode(load_marian(exported, dtype).to(settings.device).eval()),
        "ctranslate2": build_ctranslate2,
    }
    decoders: dict[str, Decode] = {}
    row = report.row("implementations", get_dtype_name(dtype), "loading")
    for name, build in builders.items():
        try:
            decoders[name] = build()
        except Exception as error:
            report.failed(row, name, r.short(error))
    return decoders


def get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.inference_mode()
def translate_batches(
    device: torch.device, workload: Workload, decode: Decode, batches: Sequence[Tokens], beam_size: int
) -> Translations:
    """Translate all sentences of some batches."""
    translations: Translations = []
    for batch in batches:
        translations += decode(batch.to(device), beam_size, workload.max_length(max(batch.lengths)))
    return translations


# ---------------------------------------------------------------------------------------------- the sections


def same(report: Report, settings: Settings, workload: Workload, decoders: dict[str, Decode], dtype: str) -> None:
    batches = workload.batches(settings.comparison_batch_size)
    for search, beam_size in SEARCHES.items():
        row = report.row("same", search, dtype, sentences=len(workload.sources))
        translations: dict[str, Translations] = {}
        for name, decode in decoders.items():
            try:
                translations[name] = translate_batches(settings.device, workload, decode, batches, beam_size)
                result: r.Measurement = {"tokens": sum(len(ids) + 1 for ids in translations[name])}
                row["implementations"][name] = result
            except Exception as error:
                report.failed(row, name, r.short(error))
                continue
            try:
                result |= {} if workload.bleu is None else {"bleu": workload.bleu(translations[name])}
            except JumokError as error:
                report.log(f"no BLEU: {r.short(error)}")
        for name in translations.keys() - {PEER} if PEER in translations else ():
            row["implementations"][name] |= compare_translations(translations[name], translations[PEER])
        shares = (
            f"{name} {result['equal']:.1%}" for name, result in row["implementations"].items() if "equal" in result
        )
        report.log(f"same  {search}  {dtype}  equal to {PEER}: {', '.join(shares)}")
        report.save()


def compare_translations(ours: Translations, theirs: Translations) -> dict[str, Any]:
    """Return the share of equal sentences, and the first difference."""
    differ = [n for n, (own, other) in enumerate(zip(ours, theirs, strict=True)) if own != other]
    result: dict[str, Any] = {"equal": 1 - len(differ) / len(ours)}
    if differ:
        own, other = ours[differ[0]], theirs[differ[0]]
        position = next((n for n, (x, y) in enumerate(zip(own, other, strict=False)) if x != y), None)
        position = min(len(own), len(other)) if position is None else position  # one is a prefix of the other
        first = {"sentence": differ[0], "word": position}
        result["first"] = {**first, "ours": own[position:][:5], PEER: other[position:][:5]}
    return result


def same_tables(rows: list[Row]) -> None:
    lines, notes = [], []
    for row in rows:
        for name, result in row["implementations"].items():
            equal = f"{result['equal']:.2%}" if "equal" in result else "–"
            bleu = f"{result['bleu']:.2f}" if "bleu" in result else "–"
            tokens = f"{result['tokens']:,}" if "tokens" in result else "–"
            lines.append([row["case"], row["pass"], name, tokens, bleu, equal])
            if "first" in result:
                first = result["first"]
                ours, theirs = (" ".join(map(str, first[key][:4])) for key in ("ours", PEER))
                where = f"sentence {first['sentence']}, word {first['word']}"
                notes.append(f"  {row['case']}, {row['pass']}, {name}, {where}: {ours} … {PEER}: {theirs} …")
    head = ["search", "dtype", "implementation", "tokens", "BLEU", f"equal to {PEER}"]
    r.table("Sentences whose tokens are all equal, and BLEU", head, lines)
    print(*notes, sep="\n", end="\n" if notes else "")


def speed(report: Report, settings: Settings, workload: Workload, decoders: dict[str, Decode], dtype: str) -> None:
    for search, beam_size in SEARCHES.items():
        for batch_size in settings.batch_sizes:
            batches = workload.batches(batch_size, NUM_BATCHES)
            row = report.row("speed", f"{search}, batch {batch_size}", dtype)
            row["sentences"] = sum(len(batch.lengths) for batch in batches)
            for name, decode in decoders.items():
                translate = functools.partial(translate_batches, settings.device, workload, decode, batches, beam_size)
                measure(report, row, name, translate)


def measure(report: Report, row: Row, name: str, translate: Callable[[], Translations]) -> None:
    last: list[Translations] = []

    def run() -> None:
        last[:] = [translate()]

    result = report.measure(row, name, run, hide_launches=False)
    if "ms" in result:
        result["sentences_s"] = row["sentences"] / result["ms"] * 1e3
        result["tokens_s"] = sum(len(ids) + 1 for ids in last[0]) / result["ms"] * 1e3
    report.save()


def speed_tables(rows: list[Row]) -> None:
    names = [name for name in IMPLEMENTATIONS if any("ms" in row["implementations"].get(name, {}) for row in rows)]
    lines = []
    for row in rows:
        results = row["implementations"]
        times = {name: ratio(r.get(results, name), r.get(results, PEER)) for name in names if name != PEER}
        row["ratios"] = times
        rates = [r.get(results, name, "sentences_s") for name in names]
        faster = [None if not x else 1 / x for x in times.values()]
        lines.append([row["case"], row["pass"], *rates, r.get(results, "ours", "tokens_s"), *faster])
    head = ["case", "dtype", *names, "tokens/s", *(f"× {name}" for name in names if name != PEER)]
    r.table(f"Speed: sentences a second, tokens/s of ours, times as fast as {PEER}", head, lines)


def host(report: Report, settings: Settings) -> None:
    """Measure the least milliseconds of a decoding step on one CPU thread, with tiny widths."""
    layers = recipe.load(RECIPE).model
    config = build_tiny_config(layers.encoder_layers, layers.decoder_layers)
    text = Text(5, 3, 7, HOST_VOCABULARY) if settings.quick else Text(64, 6, 32, HOST_VOCABULARY)
    workload, cpu, threads = build_random_workload(config, text), torch.device("cpu"), torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        marian = load_marian(export_marian(workload.model, Path(folder, "marian"))).eval()
    decoders = {"ours": build_our_decode(workload.model), PEER: build_marian_decode(marian)}
    torch.set_num_threads(1)
    for (search, beam_size), batch_size in itertools.product(SEARCHES.items(), HOST_BATCH_SIZES):
        batches = workload.batches(batch_size, NUM_BATCHES)
        steps = sum(max(batch.lengths) for batch in batches)
        row = report.row("host", f"{search}, batch {batch_size}", "float32", steps=steps, load=os.getloadavg()[0])
        runs = {
            name: functools.partial(translate_batches, cpu, workload, decode, batches, beam_size)
            for name, decode in decoders.items()
        }
        equal = [ours == theirs for ours, theirs in zip(runs["ours"](), runs[PEER](), strict=True)]
        least = r.least_in_turns(runs, repeats=1 if settings.quick else 10, calls=1)
        row["implementations"] = {name: {"ms": ms, "step_ms": ms / steps} for name, ms in least.items()}
        report.note(row, ratios={"ours": ratio(least["ours"], least[PEER])}, equal=sum(equal) / len(equal))
    torch.set_num_threads(threads)


def host_tables(rows: list[Row]) -> None:
    lines = [
        [
            row["case"],
            *(r.get(row["implementations"], name, "step_ms") for name in ("ours", PEER)),
            1 / row["ratios"]["ours"],
        ]
        for row in rows
    ]
    title = f"Host time: ms per step on one CPU thread with tiny widths, and times as fast as {PEER}"
    r.table(title, ["case", "ours", PEER, "× ours"], lines)


# ------------------------------------------------------------------------------------------------------ main

SECTIONS = {"same": (same, same_tables), "speed": (speed, speed_tables), "host": (host, host_tables)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = r.build_parser(__doc__, [*SECTIONS])
    parser.add_argument("run", nargs="?", type=Path, help="folder of a run; default: random weights")
    parser.add_argument("--dtypes", nargs="+", help="such as float32 bfloat16 float16")
    parser.add_argument("--sizes", nargs="+", type=int, help="batch sizes; default on a GPU: 1, 32, 128 and 500")
    options = parser.parse_args(arguments)

    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    batch_sizes = (128, 500, 32, 1) if on_gpu else (3,) if options.quick else (1, 32)
    dtypes = options.dtypes or (["bfloat16", "float32"] if on_gpu else ["float32"])
    settings = Settings(
        device,
        options.quick,
        tuple(getattr(torch, name) for name in dtypes),
        tuple(options.sizes or batch_sizes),
        comparison_batch_size=128 if on_gpu else 5 if options.quick else 32,
    )
    report = Report("decoding", device, seconds=options.seconds, repeats=1 if settings.quick else 2)
    report.begin(options.out, quick=options.quick, section=options.section)
    names = r.list_sections(options, SECTIONS)
    if names != ["host"]:
        measure_models(report, settings, options.run, [name for name in names if name != "host"])
    if "host" in names:
        report.run(SECTIONS, "host", settings)
    r.print_failures([row for row in report.rows if row["section"] == "implementations"])
    for name in names:
        report.show(SECTIONS, name)
    report.end()


def measure_models(report: Report, settings: Settings, run: Path | None, names: Sequence[str]) -> None:
    """Measure sections with the model of a run or a recipe, in its own size."""
    workload = build_recipe_workload(settings) if run is None else load_run_workload(run, report)
    model = "random weights, of the recipe's shape" if run is None else "trained"
    report.head |= {"model": model, "config": asdict(workload.model.config), "sentences": len(workload.sources)}
    config, vocabulary = workload.model.config, workload.model.target_embedding.num_embeddings
    shape = f"{config.encoder_layers}+{config.decoder_layers} layers of {config.width}, {vocabulary} words"
    report.log(f"{model}: {shape}; {len(workload.sources)} sentences")
    with tempfile.TemporaryDirectory() as folder:
        exported = export_marian(workload.model, Path(folder, "marian"))
        decoders = {
            get_dtype_name(dtype): build_decoders(report, settings, workload, exported, dtype)
            for dtype in settings.dtypes
        }
        for name in names:
            for dtype, available in decoders.items():
                report.run(SECTIONS, name, settings, workload, available, dtype, which=dtype)


if __name__ == "__main__":
    main()
