"""The command line of figures: `pcx figure`."""

from pathlib import Path
from typing import Annotated

import typer

from pcx.bench.cli_bench import refusals

FIGURE_HELP = """Draw a figure of the paper from the records of `pcx run`; nothing is trained.

`depth` is test accuracy against VGG-5, VGG-7, VGG-9 and ResNet-18 by all algorithms, ours beside the paper's; it takes the
records that `pcx table accuracy` takes. `skip` is VGG-19 on CIFAR-10 over epochs, with and without a skip connection.

Examples:

    pcx figure depth

    pcx figure skip --out skip.png

    pcx figure depth --results other/records.jsonl      drawn next to that file

What is drawn and what is missing is printed."""


def figure(
    name: Annotated[str, typer.Argument(help="depth or skip")],
    results: Annotated[Path | None, typer.Option(help="file of records (default results/records.jsonl)")] = None,
    out: Annotated[Path | None, typer.Option(help="the picture, a .png (default figure-NAME.png next to the records)")] = None,
) -> None:
    from pcx._types import near
    from pcx.bench import record
    from pcx.bench.config import ConfigError
    from pcx.bench.figures import FIGURES

    path = results or record.results_file()
    target = out or path.with_name(f"figure-{name}.png")
    with refusals(path):
        if name not in FIGURES:
            raise ConfigError(f"there is no figure {name!r}; near: {near(name, FIGURES)}.")
        if target.suffix != ".png":
            raise ConfigError(f"--out is {str(target)!r}; a figure is a .png file.")
        if results is not None and not results.exists():
            raise ConfigError(f"there is no file {results}; --results names a file of records.")
        picture, text = FIGURES[name](record.read(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(target, dpi=110)
        import matplotlib.pyplot as plt

        plt.close(picture)
        print("\n".join([*text, f"{target}, from {path}"]))
