"""The command line: parses and delegates. Heavy imports stay inside the commands."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import typer

from jumok.errors import InputError, JumokError, MissingExtra
from jumok.files import check_not_input
from jumok.inference import line_io as usual
from jumok.inference.line_io import open_output

if TYPE_CHECKING:
    from rich.console import Console

# Threads of torch wait for each other by spinning, by default for so long that one other busy process makes
# training tens of times slower. This is read when torch is loaded, which the commands do.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

app = typer.Typer(
    name="jumok",
    help="Train, run and look into attention models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Public data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

# What torch says when there is not enough memory, on a GPU, on a CPU, and for sizes that no memory has.
OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "storage size calculation overflowed",
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
BeamSizeOption = Annotated[int | None, typer.Option(min=1, help="Hypotheses side by side; 1 is greedy.")]
StyleAudioOption = Annotated[
    str | None, typer.Option(help="Of a voice: speak in the style of this recording.")
]
StyleWeightsOption = Annotated[
    str | None, typer.Option(help="Of a voice: speak in a mix of its style tokens, as in 3=0.4,5=0.3.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A name (see `jumok recipes`) or a YAML file.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value …")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Otherwise under runs/.")] = None,
) -> None:
    """Train a model; on a run that is there, go on with it."""
    from jumok import recipe as recipes
    from jumok.run import Run, lock_run_folder
    from jumok.tasks import get_task_module

    chosen = recipes.load(recipe, overrides or [])
    folder = out or recipes.get_run_folder(recipe)
    with _handle_stop_signals(), lock_run_folder(folder):
        get_task_module(chosen.task).train(Run.create_or_resume(folder, chosen), _build_console())


@app.command("run")
def predict(
    run: RunArgument,
    text: Annotated[
        str | None,
        typer.Argument(
            help="A text, or a file; without it, standard input. For a captioner: a picture, or a folder."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write there, not to standard output. For a voice: a .wav file, or a folder."),
    ] = None,
    beam_size: BeamSizeOption = None,
    n_best: Annotated[int, typer.Option(min=1, help="So many answers to each line, the best first.")] = 1,
    sample: Annotated[bool, typer.Option("--sample", help="Draw at random rather than search.")] = False,
    temperature: Annotated[float, typer.Option(help="Of --sample.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of --sample: only so many words; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of --sample: only the likeliest words of this total.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of --sample.")] = 1,
    alignments: Annotated[
        bool, typer.Option("--alignments", help="Add the word links, as in 0-0 1-2.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object a line, with all that is known.")
    ] = False,
    attention_map: Annotated[
        Path | None,
        typer.Option("--map", help="Draw the first line's attention (.png, .svg, .pdf)."),
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="stop, or skip: an empty line for what cannot be read.")
    ] = "stop",
    overwrite: Annotated[
        bool, typer.Option("--again", help="Of --out: begin anew, whatever was done before.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="What computes: torch, ctranslate2, onnx, or ray: a cluster of machines.")
    ] = "torch",
    style_audio: StyleAudioOption = None,
    style_weights: StyleWeightsOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Predict for a text, a file or standard input: a line out for every line in.

    A .jsonl file has an object a line, such as {"id": 7, "text": "…"}. What is written with --out goes on
    where it stopped when the same command is given again.
    """
    from jumok.inference import batch_inference
    from jumok.run import Run
    from jumok.tasks import get_task_module
    from jumok.tasks.translate import corpus_alignment

    opened = Run.open(run)
    if attention_map is not None:
        from jumok.look.figures.plots import check_image_path

        check_image_path(attention_map)
    job = batch_inference.InferenceJob(
        opened,
        get_task_module(opened.recipe.task).Search(
            beam=beam_size,
            n_best=n_best,
            sample=sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            style_from=style_audio,
            token=style_weights,
        ),
        engine=engine,
        device=device,
        write_alignments=alignments,
        as_json=as_json,
        compute_alignments=as_json,
        draw_maps=attention_map is not None,
        skip_invalid=corpus_alignment.parse_on_error(on_error) == "skip",
    )
    batch_inference.run_inference(job, text, out, map_path=attention_map, overwrite=overwrite)


@app.command("eval")
def evaluate(
    run: RunArgument,
    split: Annotated[str, typer.Option(help="test or valid.")] = "test",
    beam_size: BeamSizeOption = None,
    faithfulness: Annotated[
        bool,
        typer.Option("--faithfulness", help="Of a classifier that highlights words: do they mean anything?"),
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Score a run on its test data; figures and outputs go into the run's folder."""
    from jumok.run import Run
    from jumok.tasks import get_task_module
    from jumok.tasks.classify import error_analysis

    opened = Run.open(run)
    task = get_task_module(opened.recipe.task)
    predictor, console = task.load(opened, device), _build_console()
    if faithfulness:
        error_analysis.check_can_highlight(predictor)
    task.evaluate(predictor, split, task.Search(beam=beam_size), console)
    if faithfulness:
        error_analysis.evaluate_faithfulness(predictor, split, console)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN …", help="The first is compared with the others.")
    ],
    split: Annotated[str, typer.Option(help="test or valid.")] = "test",
    out: Annotated[Path, typer.Option(help="The folder for the figure and the table.")] = Path(
        "runs/compare"
    ),
    beam_size: BeamSizeOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Compare runs on the same test data: scores with intervals, significance, and scores by length."""
    from jumok.run import Run
    from jumok.tasks import get_task_module

    opened = [Run.open(run) for run in runs]
    if len(opened) < 2:
        raise InputError("one run came; compare takes two or more")
    tasks = {one.recipe.task for one in opened}
    if len(tasks) > 1:
        raise InputError(
            f"these runs have different tasks ({', '.join(sorted(tasks))}); compare like with like"
        )
    task = get_task_module(tasks.pop())
    task.compare(opened, split, task.Search(beam=beam_size), out, device, _build_console())


@app.command()
def align(
    run: RunArgument,
    pairs: Annotated[
        list[str],
        typer.Argument(metavar="PAIRS", help="A table, two files of text, a split of a data set, or -."),
    ],
    reverse_run: Annotated[Path | None, typer.Option(help="A run of the other direction.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write there, not to standard output.")] = None,
    alignment_layer: Annotated[str, typer.Option(help="auto, or a number, counted from 0.")] = "auto",
    alignment_head: Annotated[str, typer.Option(help="auto, mean, or a number.")] = "auto",
    alignment_shift: Annotated[
        bool | None, typer.Option(help="Links from the step after a word, which reads it; unsaid: auto.")
    ] = None,
    symmetrization: Annotated[
        str | None,
        typer.Option(
            help="With --reverse: together (both maps as one), grow-diag, grow-diag-final-and, intersection, "
            "union, none."
        ),
    ] = None,
    gold_alignments: Annotated[str | None, typer.Option(help="Links by people, to score with.")] = None,
    gold_target_first: Annotated[
        bool, typer.Option("--gold-flipped", help="They are written target first.")
    ] = False,
    on_error: Annotated[
        str, typer.Option(help="stop, or skip: an empty line for what cannot be aligned.")
    ] = "stop",
    device: DeviceOption = "auto",
) -> None:
    """Link the words of given pairs of sentences: a line for every pair, as in 0-0 1-2."""
    from jumok.tasks.translate import corpus_alignment

    asked = corpus_alignment.parse_view_filter(alignment_layer, alignment_head, alignment_shift)
    job = corpus_alignment.AlignmentJob(
        pairs,
        asked,
        symmetrization,
        gold_alignments,
        gold_target_first,
        corpus_alignment.parse_on_error(on_error),
    )
    if out is not None:
        check_not_input(out, [*pairs, *([gold_alignments] if gold_alignments is not None else [])])
    aligner = corpus_alignment.load_aligner(run, reverse_run, device)
    with open_output(out) as write:
        job.run(aligner, write, lambda line: print(line, file=sys.stderr))


@app.command()
def look(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="The folder of a run, or a Hugging Face folder.")
    ],
    text: Annotated[str, typer.Argument(help="What the model reads, or a file that holds it; a picture.")],
    target: Annotated[str | None, typer.Option(help="What it says; otherwise what it would say.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write an .html file or a picture, rather than serve a page.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Of --out: a layer by its name; * is anything.")] = None,
    head: Annotated[int | None, typer.Option(min=0, help="Of --out: one head.")] = None,
    knock_out: Annotated[
        list[str] | None,
        typer.Option(help="And how it is without a head, LAYER:1, or an edge, LAYER:8-2; may come often."),
    ] = None,
    whole_words: Annotated[bool, typer.Option("--words", help="Words rather than their pieces.")] = False,
    style_audio: StyleAudioOption = None,
    style_weights: StyleWeightsOption = None,
    port: Annotated[int, typer.Option(help="Of the page.")] = 8765,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    device: DeviceOption = "auto",
) -> None:
    """See where a model attends: in the browser, in an HTML file, in a picture."""
    from jumok.look.viewer import huggingface_model, page, view_writer
    from jumok.look.viewer.comparison import parse_ablations
    from jumok.look.viewer.word_merging import merge_into_words
    from jumok.run import Run
    from jumok.tasks import get_task_module

    gone = parse_ablations(knock_out or ())
    if out is not None:
        check_not_input(out, [text, *model.glob("*"), *([style_audio] if style_audio is not None else [])])
    if out is None and (layer is not None or head is not None):
        raise InputError("--layer and --head choose what --out writes; on the page they are chosen there")
    if (
        model.is_dir()
        and not huggingface_model.is_huggingface_folder(model)
        and not (model / "recipe.yaml").is_file()
    ):
        raise InputError(
            f"{model} has neither a recipe.yaml, as a run of `jumok train` has, nor a config.json, as a "
            "folder that save_pretrained wrote has: give one of these"
        )
    if huggingface_model.is_huggingface_folder(model):
        if style_audio is not None or style_weights is not None:
            raise InputError("--style-from and --token are for a voice; this is a Hugging Face folder")
        scenes = huggingface_model.capture_huggingface_model(
            model, usual.read_text(text), target, ablations=gone, device=device
        )
    else:
        run = Run.open(model)
        task = get_task_module(run.recipe.task)
        text = getattr(task, "inputs", usual).whole(text)
        search = task.Search(style_from=style_audio, token=style_weights)
        predictor = task.load(run, device)
        if search != task.Search():
            predictor = predictor.searching(search)
        scenes = predictor.look(text, target, without=gone)
    if whole_words:
        scenes = [merge_into_words(scene) for scene in scenes]
    if out is not None:
        print(f"written to {view_writer.save_view(scenes, out, layer, head)}")
    else:
        page.serve(scenes, port=port, open_browser=browser)


@app.command()
def serve(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN …", help="Folders of runs; NAME=RUN gives one a name.")
    ],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    auth_token: Annotated[
        str | None,
        typer.Option(envvar="JUMOK_TOKEN", help="Only who sends it is answered: Authorization: Bearer …"),
    ] = None,
    max_queue_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens a model holds at most; beyond it: 503 at once.")
    ] = 65536,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are computed together.")] = 4096,
    max_batch_delay_ms: Annotated[
        float, typer.Option(min=0, help="Milliseconds that a request waits for others to go with.")
    ] = 4.0,
    max_body_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bytes of a request. Defaults to what the largest request of its task needs."
        ),
    ] = None,
    max_text_chars: Annotated[int, typer.Option(min=1, help="Characters of a text.")] = 20_000,
    max_beam_size: Annotated[int, typer.Option(min=1, help="The largest beam one may ask for.")] = 10,
    max_decode_tokens: Annotated[
        int, typer.Option(min=1, help="Source tokens times beam size of one translation.")
    ] = 4096,
    max_image_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a picture.")] = 12 << 20,
    max_image_pixels: Annotated[int, typer.Option(min=1, help="Pixels of a picture.")] = 24_000_000,
    max_speech_chars: Annotated[
        int, typer.Option(min=1, help="Characters of a text that is spoken.")
    ] = 2_000,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until an answer.")] = 60.0,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to finish what was taken, at the end.")
    ] = 30.0,
    engine: Annotated[
        str, typer.Option(help="What computes: torch; ctranslate2 for Transformers that translate; onnx.")
    ] = "torch",
    device: DeviceOption = "auto",
) -> None:
    """Serve runs over HTTP, and as a web page: translate, classify, tag, answer, fill, caption, speak."""
    try:
        from jumok.serve import server
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f'serving needs {error.name}, which is not installed: pip install "jumok[serve]"'
        ) from error
    from jumok.serve.limits import ServerLimits
    from jumok.tasks.api import RequestLimits

    if auth_token is None:
        auth_token = os.environ.get("JUMOK_TOKEN")  # typer ignores a variable that is empty
    limits = ServerLimits(
        max_body_bytes=max_body_bytes,
        request_limits=RequestLimits(
            max_text_chars=max_text_chars,
            max_beam_size=max_beam_size,
            max_decode_tokens=max_decode_tokens,
            max_image_bytes=max_image_bytes,
            max_image_pixels=max_image_pixels,
            max_speech_chars=max_speech_chars,
        ),
        max_queue_tokens=max_queue_tokens,
        max_batch_tokens=max_batch_tokens,
        max_batch_delay=max_batch_delay_ms / 1000,
        request_timeout=timeout,
        shutdown_timeout=shutdown_timeout,
    )
    server.serve(
        runs, host=host, port=port, auth_token=auth_token, limits=limits, engine=engine, device=device
    )


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one.")] = None,
    copy_to: Annotated[Path | None, typer.Option(help="Write it to a file of yours, to change it.")] = None,
) -> None:
    """List the recipes that come with jumok, show one, or copy it."""
    from jumok import recipe as known

    if name is None:
        for one, path in known.list_builtin().items():
            print(f"{one:<34} {known.read_summary(path)}")
        return
    text = known.find(name).read_text(encoding="utf-8")
    if copy_to is None:
        print(text, end="")
    elif copy_to.exists():
        raise InputError(f"{copy_to} is there already; give another name")
    else:
        copy_to.write_text(text, encoding="utf-8")
        print(f"written to {copy_to}; train it with: jumok train {copy_to}")


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    format_name: Annotated[
        str, typer.Option(help="hf (Hugging Face), ctranslate2, onnx: see docs/export.md.")
    ] = "hf",
    quantization: Annotated[
        str | None, typer.Option(help="Of ctranslate2: int8, float16, …; otherwise float32.")
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Of ctranslate2: translate some validation data both ways.")
    ] = True,
) -> None:
    """Write a run in another format."""
    from jumok.export import formats as export_formats
    from jumok.run import Run

    opened = Run.open(run)
    check_not_input(out, [run])
    with _build_console().status("writing, and comparing"):
        told = export_formats.export_run(opened, out, format_name, quantization=quantization, compare=verify)
    print(f"written to {out}")
    if told:
        print(told)


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder with pytorch_model.bin.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
) -> None:
    """Write an old Hugging Face folder anew, its weights in safetensors rather than a pickle."""
    from jumok.export.safetensors_converter import convert_to_safetensors as converted

    check_not_input(out, [folder])
    print(f"written to {converted(folder, out)}")


@data_app.command("get")
def get_dataset(
    name: Annotated[str, typer.Argument(help="The data set.")],
    out: Annotated[Path | None, typer.Option(help="The folder. Otherwise JUMOK_DATA, or data/.")] = None,
    mirror: Annotated[
        str | None, typer.Option(help="A URL or folder to take the files from instead.")
    ] = None,
) -> None:
    """Fetch a public data set from where it was published, and check it."""
    from jumok.data import download

    download.download_dataset(name, folder=out, mirror=mirror, console=_build_console())


def main() -> None:
    """Run a command. What went wrong is told in a line or two, with a status that is not zero."""
    with warnings.catch_warnings():
        plainly = warnings.showwarning

        def told(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            """Ours as a line for people; those of libraries with the place they come from."""
            if Path(filename).is_relative_to(Path(__file__).parent):
                print(f"jumok: {message}", file=sys.stderr)
            else:
                plainly(message, category, filename, lineno, file, line)

        warnings.showwarning = told
        _run_app()


def _run_app() -> None:
    try:
        app(standalone_mode=True)
    except JumokError as error:
        _exit_with_error(str(error), getattr(error, "status", 1))
    except OSError as error:  # a full disk, a folder that may not be written to
        _exit_with_error(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except (MemoryError, RuntimeError) as error:
        told = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and not any(
            one in told.lower() for one in OUT_OF_MEMORY_MESSAGES
        ):
            raise
        _exit_with_error(
            "out of memory: take smaller batches, train.batch_tokens=… with train.accumulation_steps=…, or a smaller "
            f"model, model.width=… ({told or 'Python cannot allocate more'})"
        )


def _exit_with_error(message: str, status: int = 1) -> NoReturn:
    print(f"jumok: {message}", file=sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def _handle_stop_signals() -> Iterator[None]:
    """SIGTERM stops as Ctrl-C does, and it is told how to go on. (Within the loop, training sees to it.)"""
    number = signal.SIGINT

    def stop(caught: int, _: FrameType | None) -> NoReturn:
        nonlocal number
        number = signal.Signals(caught)
        raise KeyboardInterrupt

    in_charge = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if in_charge else None
    try:
        yield
    except KeyboardInterrupt:
        _exit_with_error("stopped; the same command goes on from what was saved", 128 + number)
    finally:
        if in_charge:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _build_console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
