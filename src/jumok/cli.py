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

from jumok import lines as usual
from jumok.errors import InputError, JumokError, MissingExtra
from jumok.files import check_output
from jumok.lines import output

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
NO_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "storage size calculation overflowed",
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Beam = Annotated[int | None, typer.Option(min=1, help="Hypotheses side by side; 1 is greedy.")]
StyleFrom = Annotated[str | None, typer.Option(help="Of a voice: speak in the style of this recording.")]
Token = Annotated[
    str | None, typer.Option(help="Of a voice: speak in a mix of its style tokens, as in 3=0.4,5=0.3.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]


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
    from jumok.run import Run, locked
    from jumok.tasks import of

    chosen = recipes.load(recipe, overrides or [])
    folder = out or recipes.folder_of(recipe)
    with _stoppable(), locked(folder):
        of(chosen.task).train(Run.start(folder, chosen), _console())


@app.command("run")
def predict(
    run: RunFolder,
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
    beam: Beam = None,
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
    picture: Annotated[
        Path | None,
        typer.Option("--map", help="Draw the first line's attention (.png, .svg, .pdf)."),
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="stop, or skip: an empty line for what cannot be read.")
    ] = "stop",
    again: Annotated[
        bool, typer.Option("--again", help="Of --out: begin anew, whatever was done before.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="What computes: torch, ctranslate2, onnx, or ray: a cluster of machines.")
    ] = "torch",
    style_from: StyleFrom = None,
    token: Token = None,
    device: Device = "auto",
) -> None:
    """Predict for a text, a file or standard input: a line out for every line in.

    A .jsonl file has an object a line, such as {"id": 7, "text": "…"}. What is written with --out goes on
    where it stopped when the same command is given again.
    """
    from jumok import bulk
    from jumok.run import Run
    from jumok.tasks import linking, of

    opened = Run.open(run)
    if picture is not None:
        from jumok.look.figures import check_picture

        check_picture(picture)
    job = bulk.Job(
        opened,
        of(opened.recipe.task).Search(
            beam=beam,
            n_best=n_best,
            sample=sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            style_from=style_from,
            token=token,
        ),
        engine=engine,
        device=device,
        alignments=alignments,
        as_json=as_json,
        align=as_json,
        maps=picture is not None,
        skip=linking.on_error(on_error) == "skip",
    )
    bulk.run(job, text, out, picture=picture, again=again)


@app.command("eval")
def evaluate(
    run: RunFolder,
    split: Annotated[str, typer.Option(help="test or valid.")] = "test",
    beam: Beam = None,
    faithfulness: Annotated[
        bool,
        typer.Option("--faithfulness", help="Of a classifier that highlights words: do they mean anything?"),
    ] = False,
    device: Device = "auto",
) -> None:
    """Score a run on its test data; figures and outputs go into the run's folder."""
    from jumok.run import Run
    from jumok.tasks import highlights, of

    opened = Run.open(run)
    task = of(opened.recipe.task)
    predictor, console = task.load(opened, device), _console()
    if faithfulness:
        highlights.check(predictor)
    task.evaluate(predictor, split, task.Search(beam=beam), console)
    if faithfulness:
        highlights.evaluate(predictor, split, console)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN …", help="The first is compared with the others.")
    ],
    split: Annotated[str, typer.Option(help="test or valid.")] = "test",
    out: Annotated[Path, typer.Option(help="The folder for the figure and the table.")] = Path(
        "runs/compare"
    ),
    beam: Beam = None,
    device: Device = "auto",
) -> None:
    """Compare runs on the same test data: scores with intervals, significance, and scores by length."""
    from jumok.run import Run
    from jumok.tasks import of

    opened = [Run.open(run) for run in runs]
    if len(opened) < 2:
        raise InputError("one run came; compare takes two or more")
    tasks = {one.recipe.task for one in opened}
    if len(tasks) > 1:
        raise InputError(
            f"these runs have different tasks ({', '.join(sorted(tasks))}); compare like with like"
        )
    task = of(tasks.pop())
    task.compare(opened, split, task.Search(beam=beam), out, device, _console())


@app.command()
def align(
    run: RunFolder,
    pairs: Annotated[
        list[str],
        typer.Argument(metavar="PAIRS", help="A table, two files of text, a split of a data set, or -."),
    ],
    reverse: Annotated[Path | None, typer.Option(help="A run of the other direction.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write there, not to standard output.")] = None,
    layer: Annotated[str, typer.Option(help="auto, or a number, counted from 0.")] = "auto",
    head: Annotated[str, typer.Option(help="auto, mean, or a number.")] = "auto",
    shift: Annotated[
        bool | None, typer.Option(help="Links from the step after a word, which reads it; unsaid: auto.")
    ] = None,
    symmetry: Annotated[
        str | None,
        typer.Option(
            help="With --reverse: together (both maps as one), grow-diag, grow-diag-final-and, intersection, "
            "union, none."
        ),
    ] = None,
    gold: Annotated[str | None, typer.Option(help="Links by people, to score with.")] = None,
    gold_flipped: Annotated[
        bool, typer.Option("--gold-flipped", help="They are written target first.")
    ] = False,
    on_error: Annotated[
        str, typer.Option(help="stop, or skip: an empty line for what cannot be aligned.")
    ] = "stop",
    device: Device = "auto",
) -> None:
    """Link the words of given pairs of sentences: a line for every pair, as in 0-0 1-2."""
    from jumok.tasks import linking

    asked = linking.asked(layer, head, shift)
    job = linking.Job(pairs, asked, symmetry, gold, gold_flipped, linking.on_error(on_error))
    if out is not None:
        check_output(out, [*pairs, *([gold] if gold is not None else [])])
    aligner = linking.aligner_of(run, reverse, device)
    with output(out) as write:
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
    without: Annotated[
        list[str] | None,
        typer.Option(help="And how it is without a head, LAYER:1, or an edge, LAYER:8-2; may come often."),
    ] = None,
    words: Annotated[bool, typer.Option("--words", help="Words rather than their pieces.")] = False,
    style_from: StyleFrom = None,
    token: Token = None,
    port: Annotated[int, typer.Option(help="Of the page.")] = 8765,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    device: Device = "auto",
) -> None:
    """See where a model attends: in the browser, in an HTML file, in a picture."""
    from jumok.look import folder, page, show
    from jumok.look.without import read
    from jumok.look.words import in_words
    from jumok.run import Run
    from jumok.tasks import of

    gone = read(without or ())
    if out is not None:
        check_output(out, [text, *model.glob("*"), *([style_from] if style_from is not None else [])])
    if out is None and (layer is not None or head is not None):
        raise InputError("--layer and --head choose what --out writes; on the page they are chosen there")
    if model.is_dir() and not folder.is_folder(model) and not (model / "recipe.yaml").is_file():
        raise InputError(
            f"{model} has neither a recipe.yaml, as a run of `jumok train` has, nor a config.json, as a "
            "folder that save_pretrained wrote has: give one of these"
        )
    if folder.is_folder(model):
        if style_from is not None or token is not None:
            raise InputError("--style-from and --token are for a voice; this is a Hugging Face folder")
        scenes = folder.look_into(model, usual.whole(text), target, without=gone, device=device)
    else:
        run = Run.open(model)
        task = of(run.recipe.task)
        text = getattr(task, "inputs", usual).whole(text)
        search = task.Search(style_from=style_from, token=token)
        predictor = task.load(run, device)
        if search != task.Search():
            predictor = predictor.searching(search)
        scenes = predictor.look(text, target, without=gone)
    if words:
        scenes = [in_words(scene) for scene in scenes]
    if out is not None:
        print(f"written to {show.save(scenes, out, layer, head)}")
    else:
        page.serve(scenes, port=port, open_browser=browser)


@app.command()
def serve(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN …", help="Folders of runs; NAME=RUN gives one a name.")
    ],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(envvar="JUMOK_TOKEN", help="Only who sends it is answered: Authorization: Bearer …"),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Tokens a model holds at most; beyond it: 503 at once.")
    ] = 65536,
    max_batch: Annotated[int, typer.Option(min=1, help="Tokens that are computed together.")] = 4096,
    max_wait: Annotated[
        float, typer.Option(min=0, help="Milliseconds that a request waits for others to go with.")
    ] = 4.0,
    max_body: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bytes of a request. Defaults to what the largest request of its task needs."
        ),
    ] = None,
    max_text: Annotated[int, typer.Option(min=1, help="Characters of a text.")] = 20_000,
    max_beam: Annotated[int, typer.Option(min=1, help="The largest beam one may ask for.")] = 10,
    max_work: Annotated[
        int, typer.Option(min=1, help="Source tokens times beam size of one translation.")
    ] = 4096,
    max_image: Annotated[int, typer.Option(min=1, help="Bytes of a picture.")] = 12 << 20,
    max_pixels: Annotated[int, typer.Option(min=1, help="Pixels of a picture.")] = 24_000_000,
    max_speech: Annotated[int, typer.Option(min=1, help="Characters of a text that is spoken.")] = 2_000,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until an answer.")] = 60.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish what was taken, at the end.")] = 30.0,
    engine: Annotated[
        str, typer.Option(help="What computes: torch; ctranslate2 for Transformers that translate; onnx.")
    ] = "torch",
    device: Device = "auto",
) -> None:
    """Serve runs over HTTP, and as a web page: translate, classify, tag, answer, fill, caption, speak."""
    try:
        from jumok.serve import server
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f'serving needs {error.name}, which is not installed: pip install "jumok[serve]"'
        ) from error
    from jumok.serve.limits import Limits
    from jumok.tasks.served import Bounds

    if token is None:
        token = os.environ.get("JUMOK_TOKEN")  # typer ignores a variable that is empty
    limits = Limits(
        body=max_body,
        bounds=Bounds(
            text=max_text,
            beam=max_beam,
            work=max_work,
            image=max_image,
            pixels=max_pixels,
            speech=max_speech,
        ),
        queue=max_queue,
        batch=max_batch,
        wait=max_wait / 1000,
        seconds=timeout,
        grace=grace,
    )
    server.serve(runs, host=host, port=port, token=token, limits=limits, engine=engine, device=device)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one.")] = None,
    copy: Annotated[Path | None, typer.Option(help="Write it to a file of yours, to change it.")] = None,
) -> None:
    """List the recipes that come with jumok, show one, or copy it."""
    from jumok import recipe as known

    if name is None:
        for one, path in known.listed().items():
            print(f"{one:<34} {known.summary(path)}")
        return
    text = known.find(name).read_text(encoding="utf-8")
    if copy is None:
        print(text, end="")
    elif copy.exists():
        raise InputError(f"{copy} is there already; give another name")
    else:
        copy.write_text(text, encoding="utf-8")
        print(f"written to {copy}; train it with: jumok train {copy}")


@app.command()
def export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    to: Annotated[str, typer.Option(help="hf (Hugging Face), ctranslate2, onnx: see docs/export.md.")] = "hf",
    quantization: Annotated[
        str | None, typer.Option(help="Of ctranslate2: int8, float16, …; otherwise float32.")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Of ctranslate2: translate some validation data both ways.")
    ] = True,
) -> None:
    """Write a run in another format."""
    from jumok.exchange import formats
    from jumok.run import Run

    opened = Run.open(run)
    check_output(out, [run])
    with _console().status("writing, and comparing"):
        told = formats.export(opened, out, to, quantization=quantization, compare=compare)
    print(f"written to {out}")
    if told:
        print(told)


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder with pytorch_model.bin.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
) -> None:
    """Write an old Hugging Face folder anew, its weights in safetensors rather than a pickle."""
    from jumok.exchange.convert import convert as converted

    check_output(out, [folder])
    print(f"written to {converted(folder, out)}")


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="The data set.")],
    into: Annotated[Path | None, typer.Option(help="The folder. Otherwise JUMOK_DATA, or data/.")] = None,
    mirror: Annotated[
        str | None, typer.Option(help="A URL or folder to take the files from instead.")
    ] = None,
) -> None:
    """Fetch a public data set from where it was published, and check it."""
    from jumok.data import fetch

    fetch.get(name, into=into, mirror=mirror, console=_console())


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
        _run()


def _run() -> None:
    try:
        app(standalone_mode=True)
    except JumokError as error:
        _fail(str(error), getattr(error, "status", 1))
    except OSError as error:  # a full disk, a folder that may not be written to
        _fail(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except (MemoryError, RuntimeError) as error:
        told = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and not any(one in told.lower() for one in NO_MEMORY):
            raise
        _fail(
            "out of memory: take smaller batches, train.tokens=… with train.accumulate=…, or a smaller "
            f"model, model.width=… ({told or 'Python cannot allocate more'})"
        )


def _fail(message: str, status: int = 1) -> NoReturn:
    print(f"jumok: {message}", file=sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
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
        _fail("stopped; the same command goes on from what was saved", 128 + number)
    finally:
        if in_charge:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
