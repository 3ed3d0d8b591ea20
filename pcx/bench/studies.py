"""Studies of one setting: the paper's Appendix B asks how accuracy depends on momentum, state learning rate and activation.

A study is a list of points: a task, an algorithm and a value of one setting; all other settings are the task's own. A tenth of
train is held out, so that the best value of a line is chosen on validation and its test accuracy is not a maximum.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

import pcx.data
from pcx._types import near
from pcx.bench import record, runs
from pcx.bench.config import Config, ConfigError, set_values
from pcx.bench.configs.spaces import points as values_of_space
from pcx.bench.configs.spaces import space_of
from pcx.bench.engine import Engine
from pcx.bench.modes import choose_mode
from pcx.bench.plots import new_figure
from pcx.bench.tables import aligned
from pcx.bench.tasks import configure, hyper_floats

QUICK_TASK, QUICK_VALUES, QUICK_ALGORITHMS = "digits/mlp", 3, 4
ENGINES = 6  # how many compiled programs are kept for the next value
NEEDED = ("study", "setting", "value", "own", "digest", "seeds", "config", "final", "diverged", "time")

Record = dict[str, Any]


class Study(NamedTuple):
    """A setting, the paper's tasks, the algorithms, and values in the order in which they tell most.

    Without values they are those of the search space, which may differ between algorithms.
    """

    setting: str
    tasks: tuple[str, ...]
    algorithms: tuple[str, ...]
    values: tuple[float, ...] = ()


STUDIES = {
    # every second value of the paper's grid (0 to 1 in steps of 0.05), and 0.95
    "momentum": Study(
        "momentum_h", ("cifar100/vgg7",), ("pc_se", "pn", "nn", "pc_ce"),
        (0.0, 0.9, 0.5, 0.7, 0.3, 0.8, 0.1, 0.6, 0.2, 0.4, 0.95, 1.0),
    ),
    # the paper's range (0.01 to 0.5, logarithmic) by 1, 2, 5
    "lr_h": Study("lr_h", ("cifar100/vgg7", "cifar100/vgg5"), ("pc_se", "pn", "nn"), (0.01, 0.1, 0.05, 0.2, 0.02, 0.5)),
    "activation": Study(
        "activation", ("cifar100/vgg5", "cifar100/vgg7"), ("pc_ce", "pc_se", "pn", "nn", "cn", "ipc", "bp_ce", "bp_se")
    ),
}  # fmt: skip


def short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


class Point(NamedTuple):
    """One training. ``own`` says that the value is the task's own, which the other settings were tuned with."""

    study: str
    config: Config
    value: Any
    own: bool

    @property
    def text(self) -> str:
        return f"{self.config.task} by {self.config.algorithm}, {STUDIES[self.study].setting}={short(self.value)}"

    def key(self, seeds: Sequence[int]) -> tuple[Any, ...]:
        """What a record has to agree in, for this point not to be trained again."""
        return self.study, self.config.digest(), tuple(seeds)


def plan(name: str, tasks: Sequence[str] = (), quick: bool = False, **given: Any) -> list[Point]:
    """The points of a study: of every task and algorithm first its own value, then the others, line after line.

    ``given`` are settings that all points share, such as ``epochs``. A quick study has three values on 2,000 images.
    """
    if name not in STUDIES:
        raise ConfigError(f"there is no study {name!r}; use {near(name, STUDIES)}.")
    study = STUDIES[name]
    given = {"validation": 0.1} | ({"train_limit": 2000} if quick else {}) | given
    algorithms = study.algorithms[:QUICK_ALGORITHMS] if quick else study.algorithms
    tasks = tasks or ((QUICK_TASK,) if quick else study.tasks)
    lines = []
    for task, algorithm in itertools.product(dict.fromkeys(tasks), algorithms):
        config = configure(task, algorithm, **given)
        known = config.as_dict()["hyper"] | config.as_dict()["options"]
        if study.setting not in known:
            raise ConfigError(f"{task} by {algorithm} has no setting {study.setting!r}; near: {near(study.setting, known)}.")
        own = known[study.setting]
        values = study.values or values_of_space(space_of(config.dataset, config.model, algorithm, known)[study.setting])
        line = [Point(name, set_values(config, {study.setting: v}), v, v == own) for v in dict.fromkeys([own, *values])]
        lines.append(line[: QUICK_VALUES if quick else None])
    return [point for column in itertools.zip_longest(*lines) for point in column if point is not None]


def recorded(path: Path) -> dict[tuple[Any, ...], Record]:
    """The newest records of a file by the key of their point."""
    return {(r["study"], r["digest"], tuple(r["seeds"])): r for r in record.read(path, NEEDED)}


def finished(points: Sequence[Point], seeds: list[int], path: Path) -> list[Record]:
    """The records of the points that have one, in the order of the points."""
    there = recorded(path)
    return [there[point.key(seeds)] for point in points if point.key(seeds) in there]


def run(
    points: Sequence[Point],
    seeds: list[int],
    path: Path,
    quick: bool,
    say: Callable[[str], None],
    move: Callable[[int, str], None] = lambda number, note: None,
) -> None:
    """Train every point that has no record yet; each record is written as soon as its point is done.

    A point whose energies diverge has a record too, which names the seeds; the study goes on.
    """
    there = recorded(path)
    left = [point for point in points if point.key(seeds) not in there]
    before = len(points) - len(left)
    if before:
        say(f"{before} of {len(points)} points have a record in {path}")
    data: dict[str, pcx.data.DataSet] = {}
    engines: dict[str, Engine] = {}
    start = time.monotonic()
    for done, point in enumerate(left):
        config = point.config
        if config.dataset not in data:
            data[config.dataset] = pcx.data.load(config.dataset)
        engine = _engine(config, data[config.dataset], seeds, quick, engines)
        lines: list[Record] = []
        for epoch, _, new in runs.epochs(engine, engine.prepare().init(), 0, runs.Progress(len(seeds))):
            lines += new
            move(before + done, f"{point.text}: epoch {epoch}/{config.epochs}")
        summary = runs.summarise(config, seeds, lines, engine.mode, quick)
        names = {"study": point.study, "setting": STUDIES[point.study].setting, "value": point.value, "own": point.own}
        record.append(path, names | summary)
        seconds = (time.monotonic() - start) / (done + 1) * (len(left) - done - 1)
        say(f"{point.text}: {result(summary)} ({before + done + 1} of {len(points)}, {record.time_left(seconds)})")
        move(before + done + 1, "")


def _engine(config: Config, data: pcx.data.DataSet, seeds: list[int], quick: bool, engines: dict[str, Engine]) -> Engine:
    """An engine with these settings; one that differs only in numbers of the algorithm is used again."""
    numbers = hyper_floats(config)
    same = replace(config, hyper=replace(config.hyper, **dict.fromkeys(numbers, 1.0))).digest()
    if same not in engines:
        if len(engines) == ENGINES:
            del engines[next(iter(engines))]
        engines[same] = Engine(config, data, seeds, "scan" if quick else choose_mode(config, data, seeds)[0])
    columns = {name: jnp.full((len(seeds),), value) for name, value in numbers.items()}
    engines[same].floats = replace(engines[same].floats, **columns)
    return engines[same]


def result(found: Record) -> str:
    """The accuracies of a record in words."""
    parts = [f"{split} {100 * found['final'][f'{split}_top1']['mean']:.2f} %" for split in ("test", "validation")]
    return ", ".join(parts) + (f", diverged with seed {', '.join(map(str, found['diverged']))}" if found["diverged"] else "")


def lines_of(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by task and algorithm, in the order of their values."""
    lines: dict[tuple[str, str], list[Record]] = {}
    for found in records:
        config = found["config"]
        lines.setdefault((f"{config['dataset']}/{config['model']}", config["algorithm"]), []).append(found)
    return {line: sorted(found, key=lambda r: r["value"]) for line, found in lines.items()}


def best(line: Sequence[Record]) -> Record | None:
    """The record with the best validation accuracy among those that did not diverge, the first of equal ones."""
    going = [found for found in line if not found["diverged"]]
    return max(going, key=lambda found: found["final"]["validation_top1"]["mean"], default=None)


def as_text(records: Sequence[Record]) -> str:
    """A row per point; the best value of a line is marked, and so is the task's own."""
    cells = [["task", "algorithm", records[0]["setting"], "test %", "validation %", ""]]
    for (task, algorithm), line in lines_of(records).items():
        for found in line:
            scores = [f"{100 * found['final'][f'{split}_top1']['mean']:.2f}" for split in ("test", "validation")]
            notes = {"best on validation": found is best(line), "own": found["own"], "diverged": bool(found["diverged"])}
            marks = ", ".join(note for note, holds in notes.items() if holds)
            cells.append([task, algorithm, short(found["value"]), *scores, marks])
    return aligned(cells)


def draw(records: Sequence[Record], path: Path) -> None:
    """Test accuracy against the setting, a panel per task and a line per algorithm; a star is the task's own value."""
    import matplotlib.pyplot as plt

    lines, setting = lines_of(records), records[0]["setting"]
    tasks = list(dict.fromkeys(task for task, _ in lines))
    names = sorted({r["value"] for r in records}) if isinstance(records[0]["value"], str) else []
    figure, (panels,) = new_figure(len(tasks))
    for (task, algorithm), line in lines.items():
        axes = panels[tasks.index(task)]
        at = [names.index(r["value"]) if names else r["value"] for r in line]
        means, spreads = ([100 * r["final"]["test_top1"][part] for r in line] for part in ("mean", "std"))
        drawn = axes.errorbar(at, means, spreads, label=algorithm, marker="o", capsize=2 if max(spreads) else 0)
        for mark, size, which in (("*", 140, "own"), ("x", 90, "diverged")):
            marked = [i for i, found in enumerate(line) if found[which]]
            options = {"marker": mark, "s": size, "color": drawn[0].get_color(), "zorder": 3}
            axes.scatter([at[i] for i in marked], [means[i] for i in marked], **options)
        axes.set(xlabel=setting, ylabel="test accuracy (%)", title=task, xscale="log" if setting == "lr_h" else "linear")
        if names:
            axes.set_xticks(range(len(names)), names)
        axes.legend(fontsize=8)
    config, seeds = records[0]["config"], len(records[0]["seeds"])
    facts = f"{config['epochs']} epochs, {seeds} seed{'s' * (seeds > 1)}, {config['precision']}"
    figure.suptitle(f"{facts}; star: the task's own value, cross: diverged", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
