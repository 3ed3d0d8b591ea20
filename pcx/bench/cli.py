"""The command line: run a task, search for settings, print a table, list and fetch data."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import pcx
from pcx.bench.cli_bench import ALGORITHMS, Algorithm, bench_app, check_folder, fail, path_of, say
from pcx.bench.cli_figure import FIGURE_HELP, figure
from pcx.bench.cli_search import SEARCH_HELP, search
from pcx.bench.cli_study import STUDY_HELP, study

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Predictive coding networks: benchmark runs, searches, tables and data.",
    epilog="Start with: `pcx run digits/mlp --algorithm pc_se --epochs 5`",
)
data_app = typer.Typer(help="List the data sets that are here, or fetch one.", invoke_without_command=True)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")


def show_version(wanted: bool) -> bool:
    if wanted:
        print(f"pcx {pcx.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="print it and exit")] = False,
) -> None: ...


RUN_HELP = """Train a task by an algorithm, evaluate it after every epoch, and record the result.

TASK is dataset/model, such as mnist/mlp, or the name of a table (accuracy): then every cell that can run here and has no
record yet is run, cheapest first; with --algorithm, those of one algorithm.

Examples:

    pcx run digits/mlp --algorithm pc_se --epochs 5

    pcx run mnist/mlp --algorithm ipc --seeds 5 --out runs/ipc

    pcx run mnist/mlp --algorithm pc_se --set T=12 lr_h=0.02 --set batch=64

Killed or stopped by Ctrl-C, the same command goes on where it was."""


@app.command(help=RUN_HELP)
def run(
    task: Annotated[str, typer.Argument(help="dataset/model, or the name of a table")],
    pairs: Annotated[list[str] | None, typer.Argument(help="more name=value pairs", hidden=True)] = None,
    algorithm: Algorithm = None,
    seeds: Annotated[int, typer.Option(help="how many seeds, from 0; they train side by side")] = 1,
    epochs: Annotated[int | None, typer.Option(help="epochs, where not those of the task")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="name=value, any setting; several, or repeated")] = None,
    out: Annotated[Path | None, typer.Option(parser=path_of, help="the run's folder (default runs/TASK-ALGORITHM-…)")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32, f16, bf16, bf16_state (values too), tf32_plain")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="two epochs on 2,000 images; never enters a table")] = False,
) -> None:
    from pcx.bench.config import ConfigError, parse_pairs, with_options
    from pcx.bench.tables import TABLES

    try:
        settings = with_options(parse_pairs([*(set_ or []), *(pairs or [])]), epochs=epochs, precision=precision)
        if quick:
            settings = {"train_limit": 2000, "epochs": 2} | settings
        check_folder(out)
        if seeds < 1:
            raise ConfigError(f"--seeds is {seeds}; at least one seed is needed.")
        if task in TABLES:
            if out is not None:
                raise ConfigError(f"--out names the folder of one run; each cell of {task} has its own below runs/.")
            run_table(task, algorithm, seeds, settings, quick)
        elif algorithm is None:
            raise ConfigError(f"name an algorithm: --algorithm pc_se ({ALGORITHMS}).")
        else:
            run_cell(task, algorithm, seeds, settings, out, quick)
    except (ConfigError, ValueError, OSError) as error:
        raise fail(error) from None


def run_cell(task: str, algorithm: str, seeds: int, settings: dict[str, Any], out: Path | None, quick: bool) -> None:
    import pcx.data
    from pcx.bench import runs
    from pcx.bench.folder import RunError
    from pcx.bench.modes import use_compilation_cache
    from pcx.bench.tasks import configure

    config = configure(task, algorithm, **settings)
    name = f"{config.dataset}-{config.model}-{algorithm}-{seeds}-{config.digest()}{'-quick' if quick else ''}"
    path = out or Path("runs") / name
    use_compilation_cache()
    try:
        data = pcx.data.load(config.dataset)
        show = Bar(config.epochs, f"{task} {algorithm}")
        with show:
            told: dict[str, Any] = {"report": show.say, "on_epoch": show.epoch, "on_step": show.step}
            summary = runs.run(config, data, list(range(seeds)), path, quick=quick, **told)
    except (pcx.data.DataError, RunError, ValueError, OSError) as error:
        raise fail(error) from None
    except (runs.Stopped, KeyboardInterrupt) as stop:
        kept = f"the same command goes on from the last checkpoint in {path}"
        kept = kept if (path / "checkpoint.safetensors").exists() else "there was no checkpoint yet, so it begins anew"
        print(str(stop) or f"stopped at once; {kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    final, best = summary["final"]["test_top1"], summary["best"]["test_top1"]
    spread = f" ± {100 * final['std']:.2f}" if seeds > 1 else ""
    print(
        f"{task} by {algorithm}: {100 * final['mean']:.2f}{spread} % after the last epoch ({seeds} seed{'s' * (seeds > 1)}), "
        f"{100 * best['mean']:.2f} % at the best test epoch; {summary['seconds_per_epoch']:.2f} s per epoch"
    )
    print(f"{path}: config.json metrics.jsonl summary.json curves.png checkpoint.safetensors")
    if len(summary["diverged"]) == seeds:
        limit = f"energy_limit={config.energy_limit:g}"
        raise fail(
            f"every seed diverged: an energy is not finite or above {limit}; lower lr_h or lr_theta, or raise the limit."
        )


def run_table(table: str, algorithm: str | None, seeds: int, settings: dict[str, Any], quick: bool) -> None:
    """All cells of a table (or those of one algorithm) that can run here and have no record, cheapest first."""
    import pcx.data
    import pcx.models
    from pcx._types import near
    from pcx.bench import record
    from pcx.bench.config import ConfigError
    from pcx.bench.tables import Row, rows_of

    if table != "accuracy":
        how = "are timed by pcx bench speed" if table == "timing" else "cannot be run yet"
        raise ConfigError(f"the cells of {table} {how}; accuracy can be run.")
    here = {status.name for status in pcx.data.status() if status.present and "train" in status.splits}
    rows = [row for row in rows_of(table, record.read(record.results_file())) if row.metric == "top1"]
    if algorithm is not None:
        known = dict.fromkeys(row.algorithm for row in rows)
        if algorithm not in known:
            raise ConfigError(f"{table} has no cell by {algorithm!r}; near: {near(algorithm, known)}.")
        rows = [row for row in rows if row.algorithm == algorithm]
    missing = [row for row in rows if row.final_mean is None]
    possible = [row for row in missing if row.model in pcx.models.names() and row.dataset in here]
    print(f"{len(rows) - len(missing)} of {len(rows)} cells have a record; {len(possible)} can run here")
    algorithms, sizes = {"bp_se": 1, "bp_ce": 1, "ipc": 4}, {"tinyimagenet": 6}
    models = {"mlp": 1, "vgg5": 20, "vgg7": 30, "vgg9": 40, "resnet18": 120}
    start, failed = time.monotonic(), list[str]()

    def cost(row: Row) -> int:
        """Roughly, in seconds per epoch relative to the MLP by BP."""
        return models.get(row.model, 50) * algorithms.get(row.algorithm, 3) * sizes.get(row.dataset, 1)

    for done, row in enumerate(sorted(possible, key=cost)):
        if done:
            left = (time.monotonic() - start) / done * (len(possible) - done)
            print(f"{done} of {len(possible)} done, {record.time_left(left)}")
        try:
            run_cell(f"{row.dataset}/{row.model}", row.algorithm, seeds, settings, None, quick)
        except typer.Exit as stop:
            if stop.exit_code == 130:  # Ctrl-C
                raise
            failed.append(f"{row.dataset}/{row.model} by {row.algorithm}")
    if failed:
        raise fail(f"{len(failed)} of {len(possible)} cells failed: {', '.join(failed)}.")


class Bar:
    """Progress of a run: a bar with loss, accuracy and time left on a terminal, plain lines elsewhere."""

    def __init__(self, total: int, title: str):
        self.total, self.title = total, title
        self.bar: Any = None
        self.task: Any = None
        self.said = time.monotonic()

    def __enter__(self) -> "Bar":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            done, note = TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[note]}")
            columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn(), note)
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task(self.title, total=self.total, note="compiling")
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)
            self.said = time.monotonic()

    def note(self, text: str) -> None:
        """What is going on: beside the bar, elsewhere a line every ten seconds."""
        if self.bar is not None:
            self.bar.update(self.task, note=text)
        elif time.monotonic() - self.said > 10:
            self.say(text)

    def move(self, number: int, note: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=number, note=note)

    def step(self, done: int, steps: int) -> None:
        if done < steps:
            self.note(f"step {done} of {steps}")

    def epoch(self, number: int, lines: list[dict[str, Any]]) -> None:
        going = [line for line in lines if line.get("stopped", {}).get("reason") != "diverged"]
        mean = {m: sum(line[m] for line in going) / len(going) for m in ("train_loss", "test_top1")} if going else {}
        note = f"loss {mean['train_loss']:.4f}  test {100 * mean['test_top1']:.2f} %" if mean else "no seed left"
        self.move(number, note)
        if self.bar is None:
            seconds = lines[0]["seconds"] if lines else 0.0
            print(f"epoch {number}/{self.total}  {note}  {seconds:.2f} s", file=sys.stderr, flush=True)


app.command(help=SEARCH_HELP)(search)
app.command(help=STUDY_HELP)(study)
app.command(help=FIGURE_HELP)(figure)


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="accuracy, generative, memory, sampling or timing")],
    format_: Annotated[str, typer.Option("--format", "-f", help="text, markdown or csv")] = "text",
    records: Annotated[
        Path | None, typer.Option(help="file of records (default results/records.jsonl; timing: speed.jsonl)")
    ] = None,
) -> None:
    """Print a table of the paper, ours beside it: the last epoch (mean ± deviation over seeds), and the best test epoch.

    The timing table shows what `pcx bench speed` recorded, beside the paper's figures and those of other libraries.

    Example: pcx table accuracy --format markdown
    """
    from pcx.bench import record, speed
    from pcx.bench.config import ConfigError
    from pcx.bench.tables import FORMATS, only_quick, rows_of

    if format_ not in FORMATS:
        raise fail(f"--format is {format_!r}; use {', '.join(FORMATS)}.")
    if records is not None and not records.exists():
        raise fail(f"there is no file {records}; --records names a file of records.")
    try:
        default, needed = (speed.file("speed.jsonl"), record.SPEED) if name == "timing" else (record.results_file(), record.RUN)
        path = records or default
        found = record.read(path, needed)
        rows = rows_of(name, found)
    except (ConfigError, ValueError, OSError) as error:
        raise fail(error) from None
    print(FORMATS[format_](rows).rstrip("\n"))
    if name in ("accuracy", "timing") and not path.exists():
        say(f"there are no records in {path} yet")
    if name == "timing" and (count := only_quick(found)):
        say(f"{count} quick record{'s are' if count > 1 else ' is'} not shown")


@data_app.callback()
def data(context: typer.Context) -> None:
    """List the data sets that are here, their sizes, and where they were looked for."""
    if context.invoked_subcommand is not None:
        return
    import pcx.data

    places: dict[Path, None] = {}
    for status in pcx.data.status():
        splits = ", ".join(f"{name} {count:,}" for name, count in status.splits.items())
        size = f"{status.bytes / 2**20:,.0f} MiB" if status.bytes else ""
        print(f"{status.name:<13} {status.state:<9} {size:>9}  {splits or status.reason}")
        places |= dict.fromkeys(place.parent for place in status.places)
    print("looked in: " + ", ".join(map(str, places)))


@data_app.command("get")
def get(name: Annotated[str, typer.Argument(help="the data set to fetch")]) -> None:
    """Download a data set into the cache (``$PCX_DATA``, else the platform's cache folder); an interrupted one is resumed."""
    import pcx.data

    try:
        print(pcx.data.fetch(name))
    except pcx.data.DataError as error:
        raise fail(error) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
