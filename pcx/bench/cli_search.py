"""The command line of searches: `pcx search`."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pcx.bench.cli_bench import ALGORITHMS, Algorithm, check_folder, fail, path_of

SEARCH_HELP = """Search for the settings of a task and an algorithm, scored on the validation split, never on test.

Ranges are those of the paper's table (`pcx/bench/configs/spaces.py`); the settings of `pcx run` are the first trial, where
the task has some. What is fixed by --set is not searched. Diverged and hopeless trials are pruned.

Examples:

    pcx search digits/mlp --algorithm pc_se --trials 20 --epochs 10

    pcx search cifar10/vgg9 --algorithm cn --trials 50

    pcx search mnist/mlp --algorithm ipc --population 16 --set T=8 activation=gelu

    pcx search cifar100/vgg7 --algorithm pc_se --sampler grid --only lr_h,momentum_h

    pcx search cifar10/vgg9 --algorithm pc_se --epochs 8 --finalists 3     short trials, the three best in full

    pcx search mnist/mlp --algorithm pn --storage /shared/study.log        in several processes at once

The study is a file, and --trials counts all finished ones in it: killed or stopped by Ctrl-C, the same command goes on.
The folder gets best.json, trials.csv, history.png, importance.png and slices.png."""


def search(
    task: Annotated[str, typer.Argument(help="dataset/model")],
    pairs: Annotated[list[str] | None, typer.Argument(help="more name=value pairs", hidden=True)] = None,
    algorithm: Algorithm = None,
    trials: Annotated[int | None, typer.Option(help="finished trials in all (default 50; 3 with --quick)")] = None,
    sampler: Annotated[str, typer.Option(help="tpe, random or grid")] = "tpe",
    seeds: Annotated[int, typer.Option(help="seeds of each trial, from 0; the score is their mean")] = 1,
    epochs: Annotated[int | None, typer.Option(help="epochs, where not those of the task")] = None,
    population: Annotated[int, typer.Option(help="trials asked for at once, and trained side by side where they can")] = 1,
    finalists: Annotated[int, typer.Option(help="so many of the best are trained again as long as pcx run; the best wins")] = 0,
    only: Annotated[str, typer.Option(help="search these, as in lr_h,momentum_h; others stay as in pcx run")] = "",
    storage: Annotated[str | None, typer.Option(help="a file, or a storage URL of Optuna (default FOLDER/study.log)")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="name=value, not searched; several, or repeated")] = None,
    seed: Annotated[int, typer.Option(help="of the sampler")] = 0,
    precision: Annotated[str | None, typer.Option(help="float32, tf32, f16, bf16, bf16_state (values too), tf32_plain")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="3 trials of two epochs on 2,000 images")] = False,
    out: Annotated[Path | None, typer.Option(parser=path_of, help="folder (default runs/search-TASK-ALGORITHM)")] = None,
) -> None:
    from pcx.bench.config import ConfigError, parse_pairs, with_options

    if importlib.util.find_spec("optuna") is None:
        raise fail("pcx search needs Optuna; install it in the project's folder with: pip install '.[search]'")
    try:
        if algorithm is None:
            raise ConfigError(f"name an algorithm: --algorithm pc_se ({ALGORITHMS}).")
        names = [name.strip() for name in only.split(",") if name.strip()]
        loose = [word for word in pairs or [] if "=" not in word]
        if names and loose:
            example = ",".join([*names, *loose]).replace(",,", ",")
            raise ConfigError(f"--only takes names with commas and without spaces: --only {example}")
        given = with_options(parse_pairs([*(set_ or []), *(pairs or [])]), epochs=epochs, precision=precision)
        given = ({"train_limit": 2000, "epochs": 2} if quick else {}) | given
        check_folder(out)
        total = trials if trials is not None else 3 if quick else 50
        folder = out or Path("runs") / f"search-{task.replace('/', '-')}-{algorithm}{'-quick' if quick else ''}"
        work(task, algorithm, given, seeds, names, folder, storage, total, sampler, seed, population, finalists)
    except (ConfigError, ValueError, OSError) as error:
        raise fail(error) from None


def work(
    task: str, algorithm: str, given: dict[str, Any], seeds: int, only: list[str], folder: Path, storage: str | None,
    trials: int, sampler: str, seed: int, population: int, finalists: int,
) -> None:  # fmt: skip
    import pcx.data
    from pcx.bench import runs, search_report
    from pcx.bench import search as searching
    from pcx.bench.cli import Bar
    from pcx.bench.modes import use_compilation_cache

    plan = searching.make_plan(task, algorithm, given, seeds, only, grid=sampler == "grid")
    place = storage or str(folder / "study.log")
    use_compilation_cache()
    try:
        data = pcx.data.load(plan.config.dataset)
        show = Bar(trials, f"{task} {algorithm}")

        def on_batch(study: Any) -> None:
            done = search_report.completed(study)
            best = f"best {100 * study.best_value:.2f} % (trial {study.best_trial.number})" if done else "none completed"
            show.move(searching.finished(study), best)

        with show:
            study = searching.search(
                plan, data, place, trials, sampler=sampler, seed=seed, population=population, finalists=finalists,
                report=show.say, on_batch=on_batch, on_epoch=show.note,
            )  # fmt: skip
    except pcx.data.DataError as error:
        raise fail(error) from None
    except (runs.Stopped, KeyboardInterrupt):
        search_report.write(plan, searching.open_study(plan, place), folder)
        print(f"stopped; the same command goes on; the study is in {place}, what was finished in {folder}", file=sys.stderr)
        raise typer.Exit(130) from None
    for sentence in search_report.write(plan, study, folder):
        print(sentence, file=sys.stderr)
    if not search_report.completed(study):
        raise fail(f"none of {searching.finished(study)} trials was trained to its end; they diverged or were pruned.")
    best, score = searching.winner(study)
    print(
        f"{task} by {algorithm}: {100 * score:.2f} % on validation by trial {best.number} "
        f"of {searching.finished(study)}; run it with"
    )
    print(search_report.command(plan, study))
    print(f"{folder}: " + " ".join(sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".csv", ".png"))))
