"""Training speed and synthesis speed of Tacotron.

    python bench/speech.py [--section training|synthesis|all] [--quick] [--out file.json]

training     Tacotron with style tokens, with the sizes and batches of the recipe tacotron/arctic, compared with
             the same network whose decoder is the usual Python loop (frame_loop.py)
synthesis    from symbols to a waveform on the CPU, with one thread and with two, for one sentence and for four
             at a time; and its parts, the network and Griffin-Lim

Before measuring, both decoders get the same weights, and their outputs must be equal in float32: mels to 1e-4,
the loss and the norm of its gradient to 0.1 %, with the same dropout. Both train on the same utterances with the
steps of `jumok train`: a batch from the host to the device, loss, gradients, clipping, Adam (fused), by autocast
in bfloat16 on CUDA. Ours has static shapes and CUDA graphs there, as in `jumok train`. frames/s counts real
frames, never padding.

Inputs are random. Their lengths follow NUM_SYMBOLS and LOG_FRAMES_PER_SYMBOL, measured on 250 recordings of CMU
Arctic that were trimmed as in the recipe. Synthesis speed does not depend on the weights, so the network is not
trained: it never stops by itself, and is stopped after the usual number of frames. Without a GPU, training is
small.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import report as r
import torch
from frame_loop import FrameLoop, with_frame_loop
from report import Report, Row, Settings, ratio
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import Implementation, TrainingRun, build_learner_round, count_weights, measure_implementation

from jumok import recipe
from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import EOS, SPECIAL_TOKENS, Tokens
from jumok.data.audio import AudioProcessor
from jumok.data.batching.speech import SpeechBatcher
from jumok.models.layers.style_tokens import StyleConfig
from jumok.models.tacotron import Tacotron, TacotronConfig
from jumok.training.config import TrainConfig

RECIPE = "tacotron/arctic"
NUM_CLASSES = 36  # symbols, including special ones
# Mean and deviation of the number of symbols of a text (with </s>), and of the logarithm of frames per symbol.
NUM_SYMBOLS, LOG_FRAMES_PER_SYMBOL = (48.9, 14.7), (1.537, 0.136)
MIN_SYMBOLS, MAX_SYMBOLS = 12, 82
QUICK_NUM_SYMBOLS = (9.0, 2.0)
MAX_MEL_DIFFERENCE, MAX_RELATIVE_DIFFERENCE = 1e-4, 1e-3  # of mels; of losses and gradients
THREADS = (1, 2)
NUM_TURNS = 5
SYNTHESIS_BATCH_SIZES = (1, 4)
NUM_COUNTED_STEPS = 4  # kernels of so many decoder steps, and of twice as many, are counted

SMALL_CONFIG = TacotronConfig(
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
    """Sizes of the model and of the data."""

    model: TacotronConfig
    train: TrainConfig
    frames: int  # of a batch
    utterances: int
    num_symbols: tuple[float, float] = NUM_SYMBOLS


def get_sizes(settings: Settings) -> Sizes:
    loaded = recipe.load(RECIPE)
    train = dataclasses.replace(loaded.train, schedule="constant", warmup_steps=0)
    if settings.quick:
        return Sizes(SMALL_CONFIG, train, 150, 12, QUICK_NUM_SYMBOLS)
    return Sizes(loaded.model, train, *((train.batch_tokens, 1024) if settings.on_gpu else (1200, 64)))


def draw_utterances(sizes: Sizes, *, fixed_shapes: bool) -> SpeechBatcher:
    """Draw random utterances, the same ones in every call."""
    rng = np.random.default_rng(0)
    fewest = MIN_SYMBOLS if sizes.num_symbols == NUM_SYMBOLS else 2
    symbols = np.clip(np.rint(rng.normal(*sizes.num_symbols, sizes.utterances)), fewest, MAX_SYMBOLS).astype(int)
    frames = np.rint(symbols * rng.lognormal(*LOG_FRAMES_PER_SYMBOL, sizes.utterances)).astype(int)
    texts = [[*rng.integers(len(SPECIAL_TOKENS), NUM_CLASSES, count - 1).tolist(), EOS] for count in symbols.tolist()]
    mels = [rng.random((count, sizes.model.n_mels), np.float32) for count in frames.tolist()]
    frame_symbols = [np.arange(n) * count // n for n, count in zip(frames, symbols, strict=True)]
    return SpeechBatcher(
        texts, mels, max_frames=sizes.frames, seed=1, fixed_shapes=fixed_shapes, frame_symbols=frame_symbols
    )


def build_network(config: TacotronConfig) -> Tacotron:
    torch.manual_seed(0)
    return Tacotron(config, NUM_CLASSES)


# ------------------------------------------------------------------------------------- equality of outputs


def check(settings: Settings, ours: Tacotron, batch: SpeechBatch) -> dict[str, float]:
    """Return how far the outputs of both decoders differ in float32; raise an error if it is too far."""
    batch = batch.to(settings.device)
    model = copy.deepcopy(ours).to(settings.device)
    torch.manual_seed(1)
    with torch.no_grad():  # initially, biases and the post-net have no effect
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    models = model, with_frame_loop(model)
    with r.without_tf32():
        mels = [model.eval().predict_teacher_forced(batch) for model in models]
        losses, norms = [], []
        for model in models:
            torch.manual_seed(2)  # the same dropout
            total = model.train().loss(batch).total
            total.backward()
            losses.append(float(total.detach()))
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norms.append(float(nn.utils.get_total_norm(gradients)))
    differences = {"mels": float((mels[0] - mels[1]).abs().max())}
    for name, (x, y) in (("loss", losses), ("gradient", norms)):
        differences[name] = abs(x - y) / abs(y)
    relative = max(differences["loss"], differences["gradient"], key=r.nan_last)
    if not (differences["mels"] <= MAX_MEL_DIFFERENCE and relative <= MAX_RELATIVE_DIFFERENCE):
        raise RuntimeError(f"the outputs of the decoders must be equal, but differ by {differences}")
    return differences


class _OperationCounter(TorchDispatchMode):
    """Counts the operations that compute something."""

    ALLOCATIONS = ("empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func._schema.name.partition("::")[2] not in self.ALLOCATIONS
        return func(*args, **(kwargs or {}))


def count_launches(settings: Settings, model: Tacotron) -> float:
    """Count the kernels of a decoder step, forward and backward; on a CPU, operations instead of kernels.

    The count is the difference of two numbers of steps, divided by the additional steps.
    """
    model = copy.deepcopy(model).to(settings.device).train()
    step = model.config.reduction_factor

    def count(steps: int) -> int:
        mels = [torch.rand(frames, model.config.n_mels) for frames in (steps * step, steps * step - 1)]
        batch = SpeechBatch.from_sequences([[*range(4, 20), EOS], [4, EOS]], mels).to(settings.device)

        def run() -> None:
            with settings.autocast():
                total = model.loss(batch).total
            total.backward()

        if not settings.on_gpu:
            with _OperationCounter() as counter:
                run()
            return counter.count
        run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())

    return (count(2 * NUM_COUNTED_STEPS) - count(NUM_COUNTED_STEPS)) / NUM_COUNTED_STEPS


# ---------------------------------------------------------------------------------------------- training


def training(report: Report, settings: Settings) -> None:
    sizes = get_sizes(settings)
    ours = build_network(sizes.model)
    data = {static: draw_utterances(sizes, fixed_shapes=static) for static in (False, True)}
    # All implementations get the same utterances: some batches, from short to long ones.
    batches = sorted(data[True].batches(0), key=lambda index: int(data[True].lengths[index].max()))
    count = settings.num_batches
    batches = [batches[int((n + 0.5) * len(batches) / count)] for n in range(count)]
    lengths = [data[False].lengths[index] for index in batches]
    case = f"{sum(map(len, batches))} utterances in {len(batches)} batches of {sizes.frames:,} frames"
    row = report.row("training", case, dtype=str(settings.dtype), config=dataclasses.asdict(sizes.model))
    row["frames"] = int(sum(batch.sum() for batch in lengths))
    row["steps"] = int(sum(-(-batch.max() // sizes.model.reduction_factor) for batch in lengths))
    row["real"] = {
        name: row["frames"] / sum(data[static].collate(index).mels.shape[:2].numel() for index in batches)
        for name, static in (("static shapes", True), ("as long as the longest", False))
    }
    models = {"ours": ours, "loop": with_frame_loop(ours)}
    row["weights"] = {name: count_weights(model) for name, model in models.items()}
    report.note(row, differs=check(settings, ours, data[False].collate(batches[0][:8])))

    def build(build_model: Callable[[], Tacotron], graphs: bool) -> Callable[[], TrainingRun]:
        config = dataclasses.replace(sizes.train, cuda_graphs="auto" if graphs else False)
        collate = data[graphs and settings.on_gpu].collate
        return lambda: build_learner_round(settings, build_model(), config, [collate(index) for index in batches])

    implementations = [
        Implementation("ours", build(lambda: copy.deepcopy(ours), graphs=True)),
        Implementation("loop", build(lambda: with_frame_loop(ours), graphs=False)),
    ]
    if settings.on_gpu:
        implementations.append(Implementation("ours, launched", build(lambda: copy.deepcopy(ours), graphs=False)))
        implementations.append(Implementation("loop, graph", build(lambda: with_frame_loop(ours), graphs=True)))
    if settings.compile:
        step = torch.compile(FrameLoop.step, dynamic=True)  # batches have many lengths
        implementations.append(
            Implementation("loop, compiled", build(lambda: with_frame_loop(ours, step), graphs=False), compiles=True)
        )
    for implementation in implementations:
        measure_implementation(report, row, implementation, "frames", "frames_s")
    for name, model in models.items():
        try:
            row.setdefault("launches", {})[name] = count_launches(settings, model)
        except Exception as error:  # the profiler is not available on every machine
            report.note(row, errors={"error": r.short(error)})
    report.save()


def training_tables(rows: list[Row]) -> None:
    for row in rows:
        results = row["implementations"]
        peers = [name for name in ("loop", "loop, compiled", "loop, graph") if name in results]
        row["ratios"] = r.ratios_to_peers(results, peers)
        lines = []
        for name, result in results.items():
            speed = [result.get(key) for key in ("frames_s", "ms", "host_ms")]
            per_step = ratio(1e3 * result["ms"] if "ms" in result else None, row["steps"])
            others = [result.get(key) for key in ("mib", "first_s", "start")]
            lines.append([name, *speed, per_step, *others, *r.speedups(results, name, peers)])
        head = ["implementation", "frames/s", "ms", "launch", "µs per step", "MiB", "first s", "loss"]
        r.table(f"Training, {row['case']}, one round", [*head, *(f"× {m}" for m in "abc"[: len(peers)])], lines)
        r.print_peers(peers)
        if "launches" in row:
            print(f"  kernels (on a CPU, operations) of a decoder step: {r.format_values(row['launches'], '.0f')}")
        print(f"  with equal weights, outputs differ by: {r.format_values(row['differs'], '.0e')}")
        print(f"  share of real frames: {r.format_values(row['real'], '.0%')}")


# --------------------------------------------------------------------------------------------- synthesis


def synthesis(report: Report, settings: Settings) -> None:
    """Measure synthesis on the CPU, whatever the device is."""
    loaded = recipe.load(RECIPE)
    config = dataclasses.replace(SMALL_CONFIG, n_mels=loaded.audio.n_mels) if settings.quick else loaded.model
    model, audio = build_network(config).eval(), AudioProcessor(loaded.audio)
    nn.init.zeros_(model.decoder.stop_projection.weight)
    nn.init.constant_(model.decoder.stop_projection.bias, -1.0)  # never stops
    threads_before = torch.get_num_threads()
    iterations = 2 if settings.quick else loaded.decode.griffin_lim_iterations
    symbols = round(QUICK_NUM_SYMBOLS[0] if settings.quick else NUM_SYMBOLS[0])
    frames = round(symbols * float(np.exp(LOG_FRAMES_PER_SYMBOL[0])))

    def synthesize(batch_size: int) -> list[Any]:
        text = Tokens.pad([[*[4 + n % 30 for n in range(symbols - 1)], EOS]] * batch_size)
        with torch.inference_mode():
            return list(model.synthesize(text, max_frames=frames).mels.numpy())

    def reconstruct(mels: list[Any]) -> list[Any]:
        power = loaded.decode.magnitude_power
        return [audio.reconstruct_waveform(x, num_iterations=iterations, magnitude_power=power) for x in mels]

    try:
        for threads, batch_size in itertools.product((1,) if settings.quick else THREADS, SYNTHESIS_BATCH_SIZES):
            torch.set_num_threads(threads)
            case = f"{batch_size} × {symbols} symbols, {frames} frames"
            row = report.row("synthesis", case, "1 thread" if threads == 1 else f"{threads} threads")
            row["seconds"] = batch_size * frames * loaded.audio.frame_seconds
            row |= {"threads": threads, "griffin_lim_iterations": iterations, "load": os.getloadavg()[0]}
            synthesize_batch = functools.partial(synthesize, batch_size)
            measure_synthesis(report, row, synthesize_batch, reconstruct, 3 if settings.quick else NUM_TURNS)
    finally:
        torch.set_num_threads(threads_before)


def measure_synthesis(
    report: Report,
    row: Row,
    synthesize: Callable[[], list[Any]],
    reconstruct: Callable[[list[Any]], Any],
    repeats: int,
) -> None:
    """Measure the network and Griffin-Lim one after the other: elapsed time, and CPU time of all cores."""
    parts = ("ours", "the network", "Griffin-Lim")
    if report.seconds_left <= 0:
        return report.failed(row, parts[0], r.TIME_LIMIT)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    for repeat in range(repeats + 1):
        if report.seconds_left <= 0 and repeat > 1:
            break
        clocks = [_read_clocks()]
        mels = synthesize()
        clocks.append(_read_clocks())
        reconstruct(mels)
        clocks.append(_read_clocks())
        if repeat:  # the first one warms up
            for name, (start, end) in zip(parts, ((0, 2), (0, 1), (1, 2)), strict=True):
                wall, cpu = (y - x for x, y in zip(clocks[start], clocks[end], strict=True))
                times[name].append((wall, cpu))
    for name, values in times.items():
        result = row["implementations"][name] = r.summarize([1e3 * wall for wall, _ in values])
        result["cpu_ms"] = 1e3 * statistics.median(cpu for _, cpu in values)
        result["times_real"] = row["seconds"] / result["ms"] * 1e3
        report.log_measurement(row, name, f"{r.number(result['times_real'])} seconds of audio per second")
    return report.save()


def _read_clocks() -> tuple[float, float]:
    """Elapsed time, and CPU time of all cores."""
    return time.perf_counter(), time.process_time()


def synthesis_tables(rows: list[Row]) -> None:
    lines = []
    for row in rows:
        for name, result in row["implementations"].items():
            values = [result.get(key) for key in ("ms", "low", "high", "cpu_ms", "times_real")]
            lines.append([row["case"], str(row["threads"]), name, row["seconds"], *values])
    if not lines:
        return
    head = ["case", "threads", "part", "s of audio", "ms", "low", "high", "CPU ms", "× real"]
    r.table("Synthesis on the CPU, in ms, and seconds of audio per second", head, lines)
    print(f"  {rows[0]['griffin_lim_iterations']} iterations of Griffin-Lim; CPU ms is the time of all cores together")
    r.print_loads(rows)


# ---------------------------------------------------------------------------------------------------- main

SECTIONS: dict[str, tuple[Callable[..., None], Callable[[list[Row]], None]]] = {
    "training": (training, training_tables),
    "synthesis": (synthesis, synthesis_tables),
}


def main(arguments: Sequence[str] | None = None) -> None:
    r.run_training_benchmark("speech", __doc__, SECTIONS, arguments)


if __name__ == "__main__":
    main()
