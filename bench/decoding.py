"""How fast are translations found? Ours and transformers' ``generate``, side by side in one run.

    python bench/decoding.py [RUN] [--section same|speed|all] [--quick] [--out file.json]

RUN is what `jumok train transformer/multi30k-en-de` made, and its test sentences are translated. Without one,
the model has that recipe's shape and random weights, and sentences are drawn; that measures speed alone. The
model is exported to a Marian folder, which transformers loads. All ways get the same token ids in the same
batches, of sentences of like length.

same     whether they say the same: the share of sentences that are equal to the token, and BLEU of each
speed    sentences and tokens (</s> counts) a second, for batches of several sizes

Settings are equal: at most 2·n + 20 words for a batch whose longest source has n (with random weights just n,
and all sentences go on that far), no sampling, nothing barred (but ours never says <pad> or <s>), and a beam
of 5 that stops when 5 hypotheses are finished, there by early_stopping=True. Length penalties differ by
design, Wu's here and a power of the length there, and are 0 for both, where they mean the same. One rule does
differ: a sentence at the limit may still end here, and is judged with one word more there.
"""

from __future__ import annotations

import argparse
import copy
import functools
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
from jumok import decoding
from jumok.batches.tokens import BOS, EOS, PAD, UNK, Tokens
from jumok.errors import JumokError
from jumok.export.marian import export_marian
from jumok.models.transformer import Transformer, TransformerConfig

RECIPE = "transformer/multi30k-en-de"
Said = list[tuple[int, ...]]  # ids of each sentence, without special ones
Decode = Callable[[Tokens, int, int], Said]  # source, size of the beam, most words
SEARCHES = {"greedy": 1, "beam 5": 5}
BATCHES = 4  # of each size are measured, from the shortest sentences to the longest
PEER = "transformers"
WAYS = ("ours", "graphed", PEER, "ctranslate2")


@dataclass(frozen=True)
class Plan:
    """Where and how much to measure."""

    device: torch.device
    quick: bool
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]  # of batches
    whole: int  # size of batches for the comparison of all sentences


@dataclass(frozen=True)
class Work:
    """A model on the host, what it has to translate, and what tells how well it did."""

    model: Transformer
    sources: list[list[int]]  # ids without </s>, sorted by length
    # The most words that may be said, by the length of the longest source in a batch.
    longest: Callable[[int], int] = decoding.default_max_length
    bleu: Callable[[Said], float] | None = None

    def batches(self, size: int, most: int | None = None) -> list[Tokens]:
        """All sentences in batches of like length, or ``most`` of these, evenly spaced."""
        ended = [[*ids, EOS] for ids in self.sources]
        count = -(-len(ended) // size)
        edges = [len(ended) * number // count for number in range(count + 1)]
        if most is not None and most < count:
            chosen = [(2 * number + 1) * count // (2 * most) for number in range(most)]
        else:
            chosen = list(range(count))
        return [Tokens.pad(ended[edges[n] : edges[n + 1]]) for n in chosen]


# ---------------------------------------------------------------------------------------- what is translated


def random_work(config: TransformerConfig, text: Text) -> Work:
    """Random weights, and sentences of random words."""
    torch.manual_seed(0)
    model = Transformer(config, text.vocabulary, text.vocabulary).eval()
    with torch.no_grad():
        model.output.weight[[PAD, UNK, BOS, EOS]] = 0  # never the likeliest: all go on to the limit
    return Work(model, sorted(text.draw(1)[0][0], key=len), longest=lambda length: length)


def work_of_recipe(plan: Plan) -> Work:
    if plan.quick:
        layers = {"encoder_layers": 1, "decoder_layers": 2}
        small = TransformerConfig(width=16, num_heads=2, feed_forward_width=32, tie_embeddings="all", **layers)
        return random_work(small, Text(11, 3, 7, 97))
    from jumok import recipe

    told = recipe.load(RECIPE)
    return random_work(told.model, Text(1000 if plan.device.type == "cuda" else 64, 6, 32, told.tokenizer.vocab_size))


def work_of_run(folder: Path, report: Report) -> Work:
    """The model of a run and its test sentences; where there are none, drawn ones."""
    translator = jumok.load(folder, "cpu")
    if not isinstance(translator.model, Transformer):
        raise SystemExit(f"{folder} is no Transformer: only that can be exported to transformers")
    try:
        examples = translator.data.test_split().examples
        prepared = [translator.data.preprocess(one.source, "source") for one in examples]
    except (JumokError, OSError) as error:
        report.say(f"no test sentences, they are drawn instead: {r.short(error)[:60]} …")
        vocabulary = translator.tokenizers.source.vocab_size
        return Work(translator.model, sorted(Text(1000, 6, 32, vocabulary).draw(1)[0][0], key=len))
    ids = translator.tokenizers.source.encode(prepared)
    order = sorted((n for n in range(len(ids)) if ids[n]), key=lambda n: len(ids[n]))
    references = [translator.data.preprocess(examples[n].target, "target") for n in order]

    def bleu(said: Said) -> float:
        from jumok.metrics.translation import Bleu, choose_bleu_tokenization

        data = translator.run.recipe.data
        metric = Bleu(choose_bleu_tokenization(str(data.target)) if data.preprocessing == "none" else "none")
        texts = [" ".join(translator.tokenizers.target.decode(one).split()) for one in said]
        return metric.score(texts, references).value

    return Work(translator.model, [ids[n] for n in order], bleu=bleu)


# ------------------------------------------------------------------------------------------------ the ways


def our_decode(model: Any) -> Decode:
    def decode(source: Tokens, size: int, longest: int) -> Said:
        if size == 1:
            return [one.ids for one in decoding.greedy_search(model, source, max_length=longest, allow_unk=True)]
        found = decoding.beam_search(model, source, beam_size=size, max_length=longest, allow_unk=True)
        return [best.ids for (best,) in found]

    return decode


def marian_decode(model: Any) -> Decode:
    def decode(source: Tokens, size: int, longest: int) -> Said:
        how: dict[str, Any] = {"early_stopping": True, "length_penalty": 0.0} if size > 1 else {}
        found = model.generate(
            input_ids=source.ids,
            attention_mask=source.valid_mask.long(),
            num_beams=size,
            do_sample=False,
            max_length=longest + 2,  # <s> and </s>
            **how,
        )
        return [words(row[1:], longest) for row in found.tolist()]

    return decode


def ctranslate2_decode(translator: Any) -> Decode:
    def decode(source: Tokens, size: int, longest: int) -> Said:
        rows = [ids[:n] for ids, n in zip(source.ids.tolist(), source.lengths, strict=True)]
        found = translator.translate_batch(
            [[str(number) for number in ids] for ids in rows],
            beam_size=size,
            length_penalty=0.0,
            max_decoding_length=longest + 1,
        )
        return [words([int(word) for word in one.hypotheses[0]], longest) for one in found]

    return decode


def words(ids: Sequence[int], longest: int) -> tuple[int, ...]:
    """What was said before the </s>."""
    end = ids.index(EOS) if EOS in ids else longest
    return tuple(ids[: min(end, longest)])


def decoders(report: Report, plan: Plan, work: Work, exported: Path, dtype: torch.dtype) -> dict[str, Decode]:
    """The ways that there are here, in one dtype; what cannot be made is told."""

    def model() -> Transformer:
        return copy.deepcopy(work.model).to(plan.device, dtype).eval()

    def graphed() -> Decode:
        from jumok.models.cuda_graph_decoder import CudaGraphDecoder

        return our_decode(CudaGraphDecoder(model()))

    def ctranslate2() -> Decode:
        folder = exported.with_name(f"ctranslate2-{name_of(dtype)}")
        return ctranslate2_decode(load_ctranslate2(load_marian(exported), folder, plan.device, dtype))

    ways: dict[str, Callable[[], Decode]] = {
        "ours": lambda: our_decode(model()),
        "graphed": graphed,
        PEER: lambda: marian_decode(load_marian(exported, dtype).to(plan.device).eval()),
        "ctranslate2": ctranslate2,
    }
    made: dict[str, Decode] = {}
    row = report.row("ways", name_of(dtype), "loading")
    for name, make in ways.items():
        try:
            made[name] = make()
        except Exception as error:
            report.failed(row, name, r.short(error))
    return made


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.inference_mode()
def translated(plan: Plan, work: Work, decode: Decode, batches: Sequence[Tokens], size: int) -> Said:
    """All sentences of some batches."""
    said: Said = []
    for batch in batches:
        said += decode(batch.to(plan.device), size, work.longest(max(batch.lengths)))
    return said


# ---------------------------------------------------------------------------------------------- the sections


def same(report: Report, plan: Plan, work: Work, made: dict[str, Decode], dtype: str) -> None:
    batches = work.batches(plan.whole)
    for search, size in SEARCHES.items():
        row = report.row("same", search, dtype, sentences=len(work.sources))
        said: dict[str, Said] = {}
        for name, decode in made.items():
            try:
                said[name] = translated(plan, work, decode, batches, size)
                way: r.Way = {"tokens": sum(len(one) + 1 for one in said[name])}
                row["ways"][name] = way
            except Exception as error:
                report.failed(row, name, r.short(error))
                continue
            try:
                way |= {} if work.bleu is None else {"bleu": work.bleu(said[name])}
            except JumokError as error:
                report.say(f"no BLEU: {r.short(error)}")
        for name in said.keys() - {PEER} if PEER in said else ():
            row["ways"][name] |= agreement(said[name], said[PEER])
        told = (f"{name} {way['equal']:.1%}" for name, way in row["ways"].items() if "equal" in way)
        report.say(f"same  {search}  {dtype}  as {PEER}: {', '.join(told)}")
        report.save()


def agreement(ours: Said, theirs: Said) -> dict[str, Any]:
    """The share of equal sentences, and the first that are not."""
    differ = [n for n, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
    found: dict[str, Any] = {"equal": 1 - len(differ) / len(ours)}
    if differ:
        one, other = ours[differ[0]], theirs[differ[0]]
        at = next((n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
        at = min(len(one), len(other)) if at is None else at  # one is the beginning of the other
        found["first"] = {"sentence": differ[0], "word": at, "says": one[at:][:5], PEER: other[at:][:5]}
    return found


def same_tables(rows: list[Row]) -> None:
    lines, notes = [], []
    for row in rows:
        for name, way in row["ways"].items():
            equal = way.get("equal")
            told = "–" if equal is None else f"{equal:.2%}"
            bleu = f"{way['bleu']:.2f}" if "bleu" in way else "–"
            tokens = f"{way['tokens']:,}" if "tokens" in way else "–"
            lines.append([row["case"], row["pass"], name, tokens, bleu, told])
            if "first" in way:
                first = way["first"]
                ours, theirs = (" ".join(map(str, first[who][:4])) for who in ("says", PEER))
                where = f"sentence {first['sentence']}, word {first['word']}"
                notes.append(f"  {row['case']}, {row['pass']}, {name}, {where}: {ours} … {PEER}: {theirs} …")
    head = ["search", "dtype", "way", "tokens", "BLEU", f"as {PEER}"]
    r.table("The same? Sentences that are equal to the token, and BLEU", head, lines)
    print(*notes, sep="\n", end="\n" if notes else "")


def speed(report: Report, plan: Plan, work: Work, made: dict[str, Decode], dtype: str) -> None:
    for search, size in SEARCHES.items():
        for rows in plan.sizes:
            batches = work.batches(rows, BATCHES)
            row = report.row("speed", f"{search}, batch {rows}", dtype)
            row["sentences"] = sum(len(batch.lengths) for batch in batches)
            for name, decode in made.items():
                measure(report, row, name, functools.partial(translated, plan, work, decode, batches, size))


def measure(report: Report, row: Row, name: str, translate: Callable[[], Said]) -> None:
    last: list[Said] = []

    def run() -> None:
        last[:] = [translate()]

    found = report.measure(row, name, run, hide_launches=False)
    if "ms" in found:
        found["sentences_s"] = row["sentences"] / found["ms"] * 1e3
        found["tokens_s"] = sum(len(one) + 1 for one in last[0]) / found["ms"] * 1e3
    report.save()


def speed_tables(rows: list[Row]) -> None:
    names = [name for name in WAYS if any("ms" in row["ways"].get(name, {}) for row in rows)]
    lines = []
    for row in rows:
        ways = row["ways"]
        times = {name: ratio(r.get(ways, name), r.get(ways, PEER)) for name in names if name != PEER}
        row["ratios"] = times
        rates = [r.get(ways, name, "sentences_s") for name in names]
        faster = [None if not x else 1 / x for x in times.values()]
        lines.append([row["case"], row["pass"], *rates, r.get(ways, "ours", "tokens_s"), *faster])
    head = ["case", "dtype", *names, "tokens/s", *(f"× {name}" for name in names if name != PEER)]
    r.table(f"Speed: sentences a second, tokens/s of ours, times as fast as {PEER}", head, lines)


# ------------------------------------------------------------------------------------------------------ main

SECTIONS = {"same": (same, same_tables), "speed": (speed, speed_tables)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder; without one, random weights")
    parser.add_argument("--section", choices=[*SECTIONS, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a look only: smaller, less often")
    parser.add_argument("--out", type=Path, help="the JSON file; runs/bench/… unless --quick")
    parser.add_argument("--dtypes", nargs="+", help="such as float32 bfloat16 float16")
    parser.add_argument("--sizes", nargs="+", type=int, help="of batches; on a GPU 1, 32, 128 and 500")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=540, help="what does not fit into them is left out")
    chosen = parser.parse_args(arguments)

    device = torch.device(chosen.device)
    on_gpu = device.type == "cuda"
    sizes = (128, 500, 32, 1) if on_gpu else (3,) if chosen.quick else (1, 32)
    dtypes = chosen.dtypes or (["bfloat16", "float32"] if on_gpu else ["float32"])
    plan = Plan(
        device,
        chosen.quick,
        tuple(getattr(torch, name) for name in dtypes),
        tuple(chosen.sizes or sizes),
        whole=128 if on_gpu else 5 if chosen.quick else 32,
    )
    report = Report("decoding", device, seconds=chosen.seconds, repeats=1 if plan.quick else 2)
    report.begin(chosen.out, quick=chosen.quick, section=chosen.section)
    work = work_of_recipe(plan) if chosen.run is None else work_of_run(chosen.run, report)
    model = "random weights, of the recipe's shape" if chosen.run is None else "trained"
    report.head |= {"model": model, "config": asdict(work.model.config), "sentences": len(work.sources)}
    config, vocabulary = work.model.config, work.model.target_embedding.num_embeddings
    shape = f"{config.encoder_layers}+{config.decoder_layers} layers of {config.width}, {vocabulary} words"
    report.say(f"{model}: {shape}; {len(work.sources)} sentences")

    with tempfile.TemporaryDirectory() as folder:
        exported = export_marian(work.model, Path(folder, "marian"))
        made = {name_of(dtype): decoders(report, plan, work, exported, dtype) for dtype in plan.dtypes}
        names = list(SECTIONS) if chosen.section == "all" else [chosen.section]
        for name in names:
            for dtype, ways in made.items():
                report.run(SECTIONS, name, plan, work, ways, dtype, which=dtype)
    r.failures([row for row in report.rows if row["section"] == "ways"])
    for name in names:
        report.show(SECTIONS, name)
    report.end()


if __name__ == "__main__":
    main()
