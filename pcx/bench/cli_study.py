"""The command line of studies: `pcx study`."""

from pathlib import Path
from typing import Annotated

import typer

from pcx.bench.cli_bench import fail, path_of, refusals

STUDY_HELP = """How accuracy depends on one setting: the studies of the paper's Appendix B, with a figure.

`momentum` varies momentum_h (VGG-7, CIFAR-100), `lr_h` the state learning rate (VGG-7 and VGG-5), `activation` the
activation of every algorithm (VGG-5 and VGG-7). All other settings are the task's own, found for 50 epochs. A tenth of train
is held out: the best value of a line is chosen on it, and test is only reported.

Examples:

    pcx study momentum --quick                      a first look at digits/mlp, in runs/

    pcx study momentum                              needs a GPU, as everything with VGG

    pcx study lr_h --task cifar100/vgg5 --epochs 5 --precision bf16

    pcx study activation --task mnist/mlp --seeds 5

    pcx study momentum --draw                       table and figure again, from the records

Every point is recorded when it is done, the most telling ones first, a diverged one too. Stopped by Ctrl-C, the same command
goes on and loses one point at most. Records with other epochs, precision or seeds are other points."""


def study(
    name: Annotated[str, typer.Argument(help="momentum, lr_h or activation")],
    task: Annotated[str, typer.Option(help="dataset/model instead of the paper's; several with commas")] = "",
    seeds: Annotated[int, typer.Option(help="how many seeds, from 0; they train side by side")] = 1,
    epochs: Annotated[int | None, typer.Option(help="epochs of every point (default 10; 2 with --quick)")] = None,
    precision: Annotated[str, typer.Option(help="float32, tf32, f16, bf16, bf16_state (values too), tf32_plain")] = "tf32",
    quick: Annotated[bool, typer.Option("--quick", help="few points of digits/mlp, 2,000 images; kept in runs/")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="train nothing; table and figure of the records")] = False,
    out: Annotated[Path | None, typer.Option(parser=path_of, help="file of records (default results/studies.jsonl)")] = None,
) -> None:
    import pcx.data
    from pcx.bench import studies as work
    from pcx.bench.cli import Bar
    from pcx.bench.config import ConfigError
    from pcx.bench.modes import use_compilation_cache
    from pcx.bench.speed import file

    path = out or (Path("runs/studies-quick.jsonl") if quick else file("studies.jsonl"))
    with refusals(path):
        if seeds < 1:
            raise ConfigError(f"--seeds is {seeds}; at least one seed is needed.")
        tasks = [part.strip() for part in task.split(",") if part.strip()]
        length = epochs if epochs is not None else 2 if quick else 10
        points = work.plan(name, tasks, quick, epochs=length, precision=precision)
        if not draw:
            use_compilation_cache()
            try:
                with Bar(len(points), f"study {name}") as show:
                    work.run(points, list(range(seeds)), path, quick, show.say, show.move)
            except pcx.data.DataError as error:
                raise fail(error) from None
        records = work.finished(points, list(range(seeds)), path)
        if not records:
            raise ConfigError(
                f"{path} has no record of {name} with epochs={length}, precision={precision}, seeds={seeds}; leave --draw away."
            )
        figure = path.with_name(f"study-{name}{'-quick' if quick else ''}.png")
        work.draw(records, figure)
        print(work.as_text(records))
        print(f"{figure}: {len(records)} of {len(points)} points, from {path}")
