"""``jumok run`` and ``jumok align``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from jumok.cli.options import (
    BeamSizeOption,
    DeviceOption,
    OnErrorOption,
    RunArgument,
    StyleAudioOption,
    StyleWeightsOption,
    alignment_option,
    computation_option,
    generation_option,
    io_option,
    scoring_option,
)


def predict(
    run: RunArgument,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT", help="Text or file. For a captioner: image or folder. Defaults to standard input."
        ),
    ] = None,
    out: Annotated[
        Path | None, io_option(help="Output file. For speech: .wav file or folder. Defaults to standard output.")
    ] = None,
    as_json: Annotated[bool, io_option("--json", help="Write one JSON object per line.")] = False,
    on_error: OnErrorOption = "stop",
    overwrite: Annotated[bool, io_option("--overwrite", help="Overwrite existing output instead of resuming.")] = False,
    attention_map: Annotated[
        Path | None, io_option(help="Draw the attention of the first line into this file (.png, .svg, .pdf).")
    ] = None,
    alignments: Annotated[bool, io_option("--alignments", help="Append word alignments, for example 0-0 1-2.")] = False,
    n_best: Annotated[
        int | None, io_option(min=1, help="Number of predictions per line, best first. Defaults to 1.")
    ] = None,
    beam_size: BeamSizeOption = None,
    sample: Annotated[bool | None, generation_option("--sample", help="Sample instead of searching.")] = None,
    temperature: Annotated[float | None, generation_option(help="Sampling temperature. Defaults to 1.")] = None,
    top_k: Annotated[
        int | None,
        generation_option(min=0, help="Sample from the k most probable tokens. 0, the default, means all tokens."),
    ] = None,
    top_p: Annotated[
        float | None,
        generation_option(help="Sample from the smallest set of tokens with this total probability. Defaults to 1."),
    ] = None,
    seed: Annotated[int | None, generation_option(help="Random seed for sampling. Defaults to 1.")] = None,
    style_audio: StyleAudioOption = None,
    style_weights: StyleWeightsOption = None,
    engine: Annotated[
        Literal["torch", "ctranslate2", "onnx", "ray"],
        computation_option(help="Inference engine. ray distributes the work over a cluster."),
    ] = "torch",
    device: DeviceOption = "auto",
) -> None:
    """Predict for a text, a file or standard input.

    Writes one output line for each input line. A .jsonl file contains one object per line, for example
    {"id": 7, "text": "…"}. With --out, the same command resumes interrupted work.
    """
    from jumok.inference import batch_inference
    from jumok.run import Run
    from jumok.tasks import build_task

    opened_run = Run.open(run)
    if attention_map is not None:
        from jumok.look.figures.plots import check_image_path

        check_image_path(attention_map)
    job = batch_inference.InferenceJob(
        opened_run,
        build_task(opened_run).options_type.from_command_line(
            beam_size=beam_size,
            n_best=n_best,
            sample=sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            style_audio=style_audio,
            style_weights=style_weights,
        ),
        engine=engine,
        device=device,
        write_alignments=alignments,
        as_json=as_json,
        compute_alignments=as_json,
        draw_maps=attention_map is not None,
        skip_invalid=on_error == "skip",
    )
    batch_inference.run_inference(job, text, out, map_path=attention_map, overwrite=overwrite)


def align(
    run: RunArgument,
    pairs: Annotated[
        list[str],
        typer.Argument(
            metavar="PAIRS",
            help="Sentence pairs: a table, two text files, a split of a data set, or - for standard input.",
        ),
    ],
    out: Annotated[Path | None, io_option(help="Output file. Defaults to standard output.")] = None,
    on_error: OnErrorOption = "stop",
    reverse_run: Annotated[
        Path | None, alignment_option(help="Run folder of the model for the opposite direction.")
    ] = None,
    alignment_layer: Annotated[str, alignment_option(help="Decoder layer, counted from 0, or auto.")] = "auto",
    alignment_head: Annotated[str, alignment_option(help="Attention head, counted from 0, or mean, or auto.")] = "auto",
    alignment_shift: Annotated[
        bool | None,
        alignment_option(
            help="Use the attention of the following step, whose input is the word. Selected automatically by default."
        ),
    ] = None,
    symmetrization: Annotated[
        Literal["product", "grow-diag", "grow-diag-final-and", "intersection", "union", "none"] | None,
        alignment_option(
            help="How to combine both directions if --reverse-run is given. product multiplies the attention "
            "maps and is the default."
        ),
    ] = None,
    gold_alignments: Annotated[str | None, scoring_option(help="File of manual alignments to score against.")] = None,
    gold_target_first: Annotated[
        bool, scoring_option("--gold-target-first", help="The manual alignments are written target first.")
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Align the words of sentence pairs. Writes one line per pair, for example 0-0 1-2."""
    from jumok.files import check_not_input
    from jumok.inference.line_io import open_output
    from jumok.tasks.translate import corpus_alignment

    job = corpus_alignment.AlignmentJob(
        pairs,
        corpus_alignment.parse_view_filter(alignment_layer, alignment_head, alignment_shift),
        symmetrization,
        gold_alignments,
        gold_target_first,
        on_error,
    )
    if out is not None:
        check_not_input(out, [*pairs, *([gold_alignments] if gold_alignments is not None else [])])
    aligner = corpus_alignment.load_aligner(run, reverse_run, device)
    with open_output(out) as write_line:
        job.run(aligner, write_line, lambda line: print(line, file=sys.stderr))
