"""The command line of timing: `pcx bench speed`, `scaling` and `population`."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import pcx.algorithms

bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Time training here: the paper's rows, scaling, and populations.",
    epilog="Start with: `pcx bench speed --rows mlp --random --quick`",
)


def fail(message: object) -> typer.Exit:
    """One sentence on standard error, and a non-zero exit."""
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(2)


def path_of(text: str) -> Path:
    """A path as typed. An empty one, such as an unset variable, would be the present folder."""
    if not text.strip():
        raise fail("--out is empty; name a file or a folder, or leave --out away.")
    return Path(text)


def check_folder(out: Path | None) -> None:
    """Refuse a file where a folder is wanted."""
    if out is not None and out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; --out names a folder.")


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def refusals(out: Path) -> Iterator[None]:
    """Errors as one sentence; after Ctrl-C, where the records are."""
    from pcx.bench.config import ConfigError

    try:
        yield
    except (ConfigError, ValueError, OSError) as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        say(f"stopped; what was finished is in {out}")
        raise typer.Exit(130) from None


ALGORITHMS = " ".join(pcx.algorithms.names())
Algorithm = Annotated[str | None, typer.Option("--algorithm", "-a", help=ALGORITHMS)]
Precision = Annotated[str, typer.Option(help="float32, tf32, f16, bf16, bf16_state (values too), tf32_plain")]
Epochs = Annotated[int, typer.Option(help="epochs that count; one more warms up")]
Random = Annotated[bool, typer.Option("--random", help="random images of the data set's number and shape")]
Out = Annotated[Path | None, typer.Option(parser=path_of, help="file of records (default results/speed.jsonl)")]
Quick = Annotated[bool, typer.Option("--quick", help="two epochs of 10 steps on 2,000 images; never enters a table")]

SPEED_HELP = """Seconds per epoch of the paper's timing rows, by PC and by BP.

Real epochs, with shuffling and augmentation; compiling (with an empty cache, and again from it), memory and a few uncompiled
steps are measured apart. Each cell is recorded as soon as it is done; `pcx table timing` shows the newest records.

Examples:

    pcx bench speed --rows mlp --random --quick

    pcx bench speed --precision bf16

    pcx bench speed --rows vgg5,vgg7 --random --epochs 10"""


@bench_app.command(help=SPEED_HELP)
def speed(
    rows: Annotated[str, typer.Option(help="rows, with commas between them")] = "mlp,alexnet,vgg5,vgg7",
    algorithms: Annotated[str, typer.Option(help="which of the two, with a comma between them")] = "pc_se,bp_se",
    precision: Precision = "tf32",
    epochs: Epochs = 5,
    random: Random = False,
    out: Out = None,
    quick: Quick = False,
    uncompiled: Annotated[
        bool, typer.Option(help="also time a few steps without compiling (a minute; never with --quick)")
    ] = True,
) -> None:
    from pcx.bench import record
    from pcx.bench import speed as work

    path = out or work.file("speed.jsonl")
    with refusals(path):
        record.check(path, record.SPEED)
        names, which = ([name.strip() for name in text.split(",") if name.strip()] for text in (rows, algorithms))
        records = work.speed(names, precision, epochs, random, quick, path, say, uncompiled, which)
        print(work.as_text(records))
        print(f"{path}: {len(records)} records added")


POPULATION_HELP = """Seconds per epoch of one seed, and of many that train side by side as one program, by PC.

Examples:

    pcx bench population --random

    pcx bench population --seeds 16 --task digits/mlp --quick"""


@bench_app.command(help=POPULATION_HELP)
def population(
    seeds: Annotated[int, typer.Option(help="how many seeds train side by side")] = 64,
    task: Annotated[str, typer.Option(help="dataset/model")] = "mnist/mlp",
    precision: Precision = "tf32",
    epochs: Epochs = 5,
    random: Random = False,
    out: Out = None,
    quick: Quick = False,
) -> None:
    from pcx.bench import record
    from pcx.bench import speed as work

    path = out or work.file("speed.jsonl")
    with refusals(path):
        record.check(path, record.SPEED)
        found = work.population(task, seeds, precision, epochs, random, quick, path, say)
        one, many = (found["seconds"][name]["median"] for name in ("one", "all"))
        print(f"{task}: {one:.4f} s per epoch of one seed, {many:.4f} s of {seeds}, {found['ratio']:.2f} times as long")


SCALING_HELP = """How time grows with batch, width, depth and inference steps, with and without stacking of equal layers.

Part `scaling` is the paper's figure: training a small MLP, one of the four numbers multiplied at a time. Part `depth` is
the inference phase alone for 4 to 64 equal layers, a plain chain and a residual one; on a GPU also with one kernel for each
step. Records and a figure for each.

Examples:

    pcx bench scaling --quick

    pcx bench scaling --part depth --precision bf16_state

    pcx bench scaling --draw        the figures again, from the records"""


@bench_app.command(help=SCALING_HELP)
def scaling(
    part: Annotated[str, typer.Option(help="scaling, depth or both")] = "both",
    precision: Precision = "tf32",
    quick: Annotated[bool, typer.Option("--quick", help="two points each, few batches; figures are named -quick")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="measure nothing; draw the newest records")] = False,
    out: Annotated[Path | None, typer.Option(parser=path_of, help="file of records (default results/scaling.jsonl)")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="the first figure (default results/scaling.png); depth.png is beside it")
    ] = None,
) -> None:
    from pcx.bench import plots, record
    from pcx.bench import scaling as work
    from pcx.bench.speed import file

    if part not in ("scaling", "depth", "both"):
        raise fail(f"--part is {part!r}; use scaling, depth or both.")
    path = out or file("scaling.jsonl")
    suffix = "-quick" if quick else ""
    picture = figure or path.with_name(f"scaling{suffix}.png")
    with refusals(path):
        if not draw:
            record.check(path, record.SCALING)
        for name in ("scaling", "depth") if part == "both" else (part,):
            measure = {"scaling": work.scaling, "depth": work.depth}[name]
            records = work.newest(path, name) if draw else measure(path, quick, say, precision)
            target = picture if name == "scaling" else picture.with_name(f"depth{suffix}.png")
            {"scaling": plots.scaling, "depth": plots.depth}[name](records, target)
            print(f"{target}: {len(records)} points of {path}")
