"""How fast does a voice learn, and how fast does it speak?

    python bench/speech.py [--section training|synthesis|all] [--quick] [--out file.json]

training     Tacotron with style tokens, of the sizes of the recipe tacotron/arctic and in its batches, beside
             the same network whose decoder is the usual Python loop (frame_loop.py)
synthesis    from symbols to a waveform on the CPU, with one thread and with two: one sentence, and four at a
             time; and its parts, the network and Griffin-Lim

Before anything is measured, both decoders get the same weights, and must say the same in float32: mels to
1e-4, the loss and the length of its gradient to a thousandth, with the same dropout. Both learn from the same
utterances by the step of `jumok train`: a batch from the host to the device, loss, gradients, clipping, Adam
(fused), by autocast in bfloat16 on CUDA. Ours is as `jumok train` has it there, with batches that are alike
and steps as CUDA graphs. frames/s counts real frames, never padding.

Sounds are random, and as long as real ones: SYMBOLS and PACE are those of 250 recordings of CMU Arctic, as
the recipe trims them. How fast a voice speaks does not depend on what it says, so it need not be trained: it
is kept from stopping, and cut when a reader would have come to the end. Without a GPU, training is small.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report as r
import torch
from frame_loop import FrameLoop, with_frame_loop
from report import Report, Row, Run, ratio
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import Plan

from jumok import recipe
from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import EOS, SPECIAL_TOKENS, Tokens
from jumok.data.audio import AudioProcessor
from jumok.data.batching.speech import SpeechBatcher
from jumok.models.layers.style_tokens import StyleConfig
from jumok.models.tacotron import Tacotron, TacotronConfig
from jumok.training.config import TrainConfig
from jumok.training.distributed import DistributedRanks
from jumok.training.learner import Learner
from jumok.training.prefetch import StepBatches, pin_memory

RECIPE = "tacotron/arctic"
ALPHABET = 36  # symbols, special ones included
# Mean and deviation of the symbols of a text (with the end), and of the logarithm of frames a symbol.
SYMBOLS, PACE = (48.9, 14.7), (1.537, 0.136)
FEWEST, MOST = 12, 82  # symbols
SHORT = (9.0, 2.0)  # the symbols of a text, for a look only
EQUAL, ALIKE = 1e-4, 1e-3  # how far mels may be apart, and the share that losses and gradients may
ASKED = 3.0  # times as fast as the loop
COMPILING, LAUNCHING = 45, 5  # seconds, on a GPU: a way is left out where fewer are left
THREADS = (1, 2)
TIMES = 5  # that speaking is measured
AT_ONCE = (1, 4)
COUNTED = 4  # steps of a decoder, and twice as many, whose kernels are counted

SMALL = TacotronConfig(
    n_mels=6,
    embedding_width=8,
    encoder_width=4,
    conv_bank_size=3,
    highway_layers=1,
    prenet_widths=(8, 6),
    decoder_width=8,
    postnet_layers=2,
    postnet_width=6,
    attention_width=7,
    location_filters=3,
    location_kernel_size=5,
    forward_attention=True,
    guided_attention_loss=1.0,
    style=StyleConfig(num_tokens=3, num_heads=2, width=4, conv_channels=(2, 3)),
)


@dataclass(frozen=True)
class Sizes:
    """What is measured with."""

    model: TacotronConfig
    train: TrainConfig
    frames: int  # of a batch
    utterances: int  # of which batches are made
    symbols: tuple[float, float] = SYMBOLS


def sizes(plan: Plan) -> Sizes:
    known = recipe.load(RECIPE)
    train = dataclasses.replace(known.train, schedule="constant", warmup_steps=0)
    if plan.quick:
        return Sizes(SMALL, train, 150, 12, SHORT)
    return Sizes(known.model, train, *((train.batch_tokens, 1024) if plan.on_gpu else (1200, 64)))


def utterances(sizes: Sizes, *, fixed_shapes: bool) -> SpeechBatcher:
    """Drawn; the same each time."""
    chance = np.random.default_rng(0)
    fewest = FEWEST if sizes.symbols == SYMBOLS else 2
    symbols = np.clip(np.rint(chance.normal(*sizes.symbols, sizes.utterances)), fewest, MOST).astype(int)
    frames = np.rint(symbols * chance.lognormal(*PACE, sizes.utterances)).astype(int)
    texts = [[*chance.integers(len(SPECIAL_TOKENS), ALPHABET, many - 1).tolist(), EOS] for many in symbols.tolist()]
    spectra = [chance.random((many, sizes.model.n_mels), np.float32) for many in frames.tolist()]
    places = [np.arange(long) * many // long for long, many in zip(frames, symbols, strict=True)]
    return SpeechBatcher(
        texts, spectra, max_frames=sizes.frames, seed=1, fixed_shapes=fixed_shapes, frame_symbols=places
    )


def network(config: TacotronConfig) -> Tacotron:
    torch.manual_seed(0)
    return Tacotron(config, ALPHABET)


# --------------------------------------------------------------------------------------- is it the same?


def check(plan: Plan, ours: Tacotron, batch: SpeechBatch) -> dict[str, float]:
    """How far both decoders are apart in float32; an error if it is too far."""
    batch = batch.to(plan.device)
    moved = copy.deepcopy(ours).to(plan.device)
    torch.manual_seed(1)
    with torch.no_grad():  # else no bias and no refinement would do anything
        for parameter in moved.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    both = moved, with_frame_loop(moved)
    exactly = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        mels = [model.eval().predict_teacher_forced(batch) for model in both]
        losses, norms = [], []
        for model in both:
            torch.manual_seed(2)  # what is dropped
            total = model.train().loss(batch).total
            total.backward()
            losses.append(float(total.detach()))
            found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norms.append(float(nn.utils.get_total_norm(found)))
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = exactly
    told = {"mels": float((mels[0] - mels[1]).abs().max())}
    for name, (one, other) in (("loss", losses), ("gradient", norms)):
        told[name] = abs(one - other) / abs(other)
    if not (told["mels"] <= EQUAL and max(told["loss"], told["gradient"], key=r.nan_last) <= ALIKE):
        raise RuntimeError(f"the decoders do not say the same: they differ by {told}")
    return told


class _Operations(TorchDispatchMode):
    """Counts what PyTorch is asked to compute."""

    MAKE_NOTHING = ("empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func._schema.name.partition("::")[2] not in self.MAKE_NOTHING
        return func(*args, **(kwargs or {}))


def launches(plan: Plan, model: Tacotron) -> float:
    """The kernels of a step of the decoder, forward and backward; on a CPU, operations instead of kernels.

    Those of so many steps more, by their number.
    """
    model = copy.deepcopy(model).to(plan.device).train()
    step = model.config.reduction_factor

    def count(steps: int) -> int:
        mels = [
            torch.rand(steps * step, model.config.n_mels),
            torch.rand(steps * step - 1, model.config.n_mels),
        ]
        batch = SpeechBatch.from_sequences([[*range(4, 20), EOS], [4, EOS]], mels).to(plan.device)

        def run() -> None:
            with plan.autocast():
                total = model.loss(batch).total
            total.backward()

        if not plan.on_gpu:
            with _Operations() as counted:
                run()
            return counted.count
        run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())

    return (count(2 * COUNTED) - count(COUNTED)) / COUNTED


# ---------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Way:
    name: str
    make: Callable[[], Run]  # a round over all batches, which gives the losses
    needs: int = LAUNCHING


def training(report: Report, plan: Plan) -> None:
    size = sizes(plan)
    ours = network(size.model)
    batches = {static: utterances(size, fixed_shapes=static) for static in (False, True)}
    # The same utterances for all: some batches, from short to long ones.
    every = sorted(batches[True].batches(0), key=lambda index: int(batches[True].lengths[index].max()))
    chosen = [every[int((at + 0.5) * len(every) / plan.batches)] for at in range(plan.batches)]
    lengths = [batches[False].lengths[index] for index in chosen]
    case = f"{sum(map(len, chosen))} utterances in {len(chosen)} batches of {size.frames:,} frames"
    row = report.row("training", case, dtype=str(plan.dtype), config=dataclasses.asdict(size.model))
    row["frames"] = int(sum(each.sum() for each in lengths))
    row["steps"] = int(sum(-(-each.max() // size.model.reduction_factor) for each in lengths))
    row["real"] = {
        name: row["frames"] / sum(batches[static].collate(index).mels.shape[:2].numel() for index in chosen)
        for name, static in (("static shapes", True), ("as long as the longest", False))
    }
    row["weights"] = {
        name: sum(parameter.numel() for parameter in model.parameters())
        for name, model in (("ours", ours), ("loop", with_frame_loop(ours)))
    }
    report.note(row, differs=check(plan, ours, batches[False].collate(chosen[0][:8])))

    def learned(model: Callable[[], Tacotron], graphs: bool) -> Callable[[], Run]:
        data = batches[graphs and plan.on_gpu]
        settings = dataclasses.replace(size.train, cuda_graphs="auto" if graphs else False)
        return lambda: learning(plan, model(), settings, [data.collate(index) for index in chosen])

    ways = [
        Way("ours", learned(lambda: copy.deepcopy(ours), graphs=True)),
        Way("loop", learned(lambda: with_frame_loop(ours), graphs=False)),
    ]
    if plan.on_gpu:
        ways.append(Way("ours, launched", learned(lambda: copy.deepcopy(ours), graphs=False)))
        ways.append(Way("loop, graph", learned(lambda: with_frame_loop(ours), graphs=True)))
    if plan.compile:
        step = torch.compile(FrameLoop.step, dynamic=True)  # batches have many lengths
        ways.append(Way("loop, compiled", learned(lambda: with_frame_loop(ours, step), graphs=False), COMPILING))
    for way in ways:
        measure(report, row, way)
    for name, model in (("ours", ours), ("loop", with_frame_loop(ours))):
        try:
            row.setdefault("launches", {})[name] = launches(plan, model)
        except Exception as error:  # not every machine lets one count
            report.note(row, errors={"error": r.short(error)})
    report.save()


def learning(plan: Plan, model: nn.Module, settings: TrainConfig, batches: Sequence[SpeechBatch]) -> Run:
    """A round of the steps of `jumok train`."""
    learner = Learner(model, settings, DistributedRanks(device=plan.device), None)
    made = [pin_memory(batch) if plan.on_gpu else batch for batch in batches]
    works = [StepBatches(0, at, (0, at + 1), [(batch, 1)]) for at, batch in enumerate(made)]
    number = 0

    def run() -> list[torch.Tensor]:
        nonlocal number
        losses = []
        for work in works:
            number += 1
            told = learner.step(work, number)
            losses.append(told[0] / told[1])
        if learner.capture_error:
            raise RuntimeError(f"steps could not be recorded: {learner.capture_error}")
        return losses

    return run


def measure(report: Report, row: Row, way: Way) -> None:
    """Make one way and measure it, and leave nothing of it behind."""
    if report.device.type == "cuda" and report.left < way.needs:
        told = f"skipped, it may take {way.needs} s and {report.left:.0f} are left"
        return report.failed(row, way.name, told)
    losses: list[float] = []
    try:
        made = way.make()

        def run() -> None:
            found = made()
            if not losses:  # the first round
                losses.extend(float(x) for x in found)

        found = report.measure(row, way.name, run, hide_launches=False)
    except Exception as error:
        return report.failed(row, way.name, r.short(error))
    if losses:
        found["start"] = losses[0]
    if "ms" in found:
        found["frames_s"] = row["frames"] / found["ms"] * 1e3
    torch._dynamo.reset()
    r.tidy(report.device)
    return report.save()


def training_tables(rows: list[Row]) -> None:
    for row in rows:
        ways = row["ways"]
        peers = [name for name in ("loop", "loop, compiled", "loop, graph") if name in ways]
        row["ratios"] = {
            f"{name} / {peer}": ratio(r.get(ways, name), r.get(ways, peer))
            for name in ways
            for peer in peers
            if name.startswith("ours")
        }
        lines = []
        for name, way in ways.items():
            figures = [way.get(what) for what in ("frames_s", "ms", "host_ms")]
            a_step = ratio(1e3 * way["ms"] if "ms" in way else None, row["steps"])
            more = [way.get(what) for what in ("mib", "first_s", "start")]
            lines.append([name, *figures, a_step, *more, *(ratio(r.get(ways, p), way.get("ms")) for p in peers)])
        marks = "abc"[: len(peers)]
        head = ["way", "frames/s", "ms", "launch", "µs a step", "MiB", "first s", "loss"]
        r.table(f"Training, {row['case']}, a round", [*head, *(f"× {m}" for m in marks)] if lines else head, lines)
        told = ", ".join(f"{mark}: {peer}" for mark, peer in zip(marks, peers, strict=True))
        print(f"  times as fast as {told}; at least {ASKED:g} times a are asked for")
        if "launches" in row:
            told = ", ".join(f"{name} {count:.0f}" for name, count in row["launches"].items())
            print(f"  kernels (on a CPU operations) of a step of the decoder, and back: {told}")
        told = ", ".join(f"{name} {x:.0e}" for name, x in row["differs"].items())
        print(f"  with equal weights both differ by: {told}")
        told = ", ".join(f"{name} {share:.0%}" for name, share in row["real"].items())
        print(f"  real frames of all that are computed: {told}")


# --------------------------------------------------------------------------------------------- synthesis


def synthesis(report: Report, plan: Plan) -> None:
    """On the CPU, whatever the device."""
    known = recipe.load(RECIPE)
    config = dataclasses.replace(SMALL, n_mels=known.audio.n_mels) if plan.quick else known.model
    model, sound = network(config).eval(), AudioProcessor(known.audio)
    nn.init.zeros_(model.decoder.stop_projection.weight)
    nn.init.constant_(model.decoder.stop_projection.bias, -1.0)  # it never says that this was the last frame
    before, turns = torch.get_num_threads(), 2 if plan.quick else known.decode.griffin_lim_iterations
    symbols = round(SHORT[0] if plan.quick else SYMBOLS[0])
    frames = round(symbols * float(np.exp(PACE[0])))

    def say(many: int) -> list[Any]:
        text = Tokens.pad([[*[4 + n % 30 for n in range(symbols - 1)], EOS]] * many)
        with torch.inference_mode():
            return list(model.synthesize(text, max_frames=frames).mels.numpy())

    def hear(mels: list[Any]) -> list[Any]:
        return [
            sound.reconstruct_waveform(each, num_iterations=turns, magnitude_power=known.decode.magnitude_power)
            for each in mels
        ]

    try:
        for threads, many in itertools.product((1,) if plan.quick else THREADS, AT_ONCE):
            torch.set_num_threads(threads)
            case = f"{many} × {symbols} symbols, {frames} frames"
            row = report.row("synthesis", case, "1 thread" if threads == 1 else f"{threads} threads")
            row |= {"seconds": many * frames * known.audio.frame_seconds, "threads": threads, "turns": turns}
            row["load"] = os.getloadavg()[0]
            speak(report, row, functools.partial(say, many), hear, 3 if plan.quick else TIMES)
    finally:
        torch.set_num_threads(before)


def speak(report: Report, row: Row, say: Callable[[], list[Any]], hear: Callable[[list[Any]], Any], times: int) -> None:
    """Measure both parts, one after the other, so many times; on the clock, and of all cores together."""
    parts = ("ours", "the network", "Griffin-Lim")
    if report.left <= 0:
        return report.failed(row, parts[0], "skipped, the time was up")
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    for turn in range(times + 1):
        if report.left <= 0 and turn > 1:
            break
        clocks = [_clocks()]
        said = say()
        clocks.append(_clocks())
        hear(said)
        clocks.append(_clocks())
        if turn:  # the first one makes things ready
            for name, (begin, end) in zip(parts, ((0, 2), (0, 1), (1, 2)), strict=True):
                wall, cpu = (y - x for x, y in zip(clocks[begin], clocks[end], strict=True))
                taken[name].append((wall, cpu))
    for name, found in taken.items():
        way = row["ways"][name] = r._spread([1e3 * clock for clock, _ in found])
        way["cpu_ms"] = 1e3 * statistics.median(cpu for _, cpu in found)
        way["times_real"] = row["seconds"] / way["ms"] * 1e3
        told = f"{r.number(way['times_real'])} seconds of sound a second"
        report.say(f"synthesis  {row['case']}, {row['pass']}  {name}: {told}")
    return report.save()


def _clocks() -> tuple[float, float]:
    """Of the wall, and of the work of all cores."""
    return time.perf_counter(), time.process_time()


def synthesis_tables(rows: list[Row]) -> None:
    lines = []
    for row in rows:
        for name, way in row["ways"].items():
            figures = [way.get(what) for what in ("ms", "low", "high", "cpu_ms", "times_real")]
            lines.append([row["case"], str(row["threads"]), name, row["seconds"], *figures])
    if not lines:
        return
    head = ["what", "threads", "part", "s of sound", "ms", "low", "high", "CPU ms", "× real"]
    r.table("Synthesis on the CPU, in ms, and seconds of sound a second", head, lines)
    print(f"  Griffin-Lim takes {rows[0]['turns']} turns; more than 1 second of sound a second is asked for")
    loads = [row["load"] for row in rows]
    print(f"  processes at work before each, ours among them: {min(loads):.1f} to {max(loads):.1f}")
    print("  CPU ms: of all cores together, about what it takes where nobody else works")


# ---------------------------------------------------------------------------------------------------- main

SECTIONS: dict[str, tuple[Callable[..., None], Callable[[list[Row]], None]]] = {
    "training": (training, training_tables),
    "synthesis": (synthesis, synthesis_tables),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--section", choices=[*SECTIONS, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a look only: smaller, less often")
    parser.add_argument("--out", type=Path, help="the JSON file; runs/bench/… unless --quick")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--compile", action=flag, help="torch.compile; if not told, on a GPU only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=540, help="what does not fit into them is left out")
    chosen = parser.parse_args(arguments)

    device = torch.device(chosen.device)
    compiles = device.type == "cuda" if chosen.compile is None else chosen.compile
    plan = Plan(device, chosen.quick, compiles)
    report = Report("speech", device, seconds=chosen.seconds, repeats=3 if plan.quick else 10)
    report.begin(chosen.out, quick=chosen.quick, section=chosen.section)

    names = list(SECTIONS) if chosen.section == "all" else [chosen.section]
    for name in names:
        report.run(SECTIONS, name, plan)
    for name in names:
        report.show(SECTIONS, name)
    report.end()


if __name__ == "__main__":
    main()
