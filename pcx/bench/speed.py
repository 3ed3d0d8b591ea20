"""Seconds per epoch: the rows of the paper's timing table, and one seed against many.

An epoch is a real one of the engine: shuffling, gathering and augmentation are part of it, compiling is not. One epoch
warms up, the next ones count. `pcx bench --help` is the command line.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

import pcx
import pcx.data
from pcx._types import NO_SHORTCUTS, near
from pcx.bench import record
from pcx.bench.config import Config, ConfigError
from pcx.bench.configs import timing
from pcx.bench.engine import PRECISION, Engine, Population
from pcx.bench.modes import choose_mode
from pcx.bench.tables import aligned
from pcx.bench.tasks import configure, make_algorithm, split_task
from pcx.data import DataSet, Split
from pcx.shortcuts import pooling

ALGORITHMS = ("pc_se", "bp_se")
# of the training images: their number and shape, and the classes
IMAGES: dict[str, tuple[tuple[int, ...], int]] = {
    "mnist": ((60000, 1, 28, 28), 10),
    "fashionmnist": ((60000, 1, 28, 28), 10),
    "cifar10": ((50000, 3, 32, 32), 10),
    "cifar100": ((50000, 3, 32, 32), 100),
    "tinyimagenet": ((100000, 3, 64, 64), 200),
}
QUICK_EPOCHS, QUICK_STEPS, QUICK_IMAGES = 2, 10, 2000
UNCOMPILED_SECONDS = 8.0

Say = Callable[[str], None]


def file(name: str) -> Path:
    """``speed.jsonl`` or ``scaling.jsonl`` next to the records of runs."""
    return record.results_file().with_name(name)


def config_of(row: str, algorithm: str, **changes: Any) -> Config:
    """The settings of a row: those of the original timing experiments."""
    if row not in timing.ROWS:
        raise ConfigError(f"there is no row {row!r}; near: {near(row, timing.ROWS)}.")
    dataset, model = split_task(timing.ROWS[row])
    return configure(timing.ROWS[row], algorithm, **(timing.SETTINGS[model, dataset, algorithm] | changes))


@contextlib.contextmanager
def _or_random() -> Iterator[None]:
    """Where data are missing, the other way out is said too."""
    try:
        yield
    except pcx.data.DataError as error:
        raise ConfigError(f"{str(error).rstrip('.')}, or time random images with --random.") from None


def look_for_data(configs: Sequence[Config]) -> None:
    """Refuse rows whose data are not here; nothing is read."""
    with _or_random():
        for name in dict.fromkeys(config.dataset for config in configs):
            pcx.data.look_for(name)


def data_of(name: str, random: bool, limit: int | None = None) -> DataSet:
    """A data set, or with ``random`` random images of its number and shape."""
    if not random:
        with _or_random():
            return pcx.data.load(name)
    if name not in IMAGES:
        raise ConfigError(f"--random knows the shapes of {', '.join(IMAGES)}, but not of {name!r}.")
    (count, *shape), classes = IMAGES[name]
    draw = np.random.default_rng(0)

    def split(count: int) -> Split:
        images = draw.integers(0, 256, (count, *shape), np.uint8)
        return Split(images, draw.integers(0, classes, count).astype(np.int32))

    return DataSet(name, split(min(count, limit or count)), split(100), classes, tuple(map(str, range(classes))))


def speed(
    rows: list[str],
    precision: str,
    epochs: int,
    random: bool,
    quick: bool,
    out: Path,
    say: Say,
    uncompiled: bool = True,
    algorithms: Sequence[str] = ALGORITHMS,
) -> list[dict[str, Any]]:
    """Time PC and BP on each row, once the data of all are found; every record is written as soon as it is there."""
    epochs = _epochs(epochs, quick)
    for name in algorithms:
        if name not in ALGORITHMS:
            raise ConfigError(f"{name!r} is not timed; --algorithms takes {' and '.join(ALGORITHMS)}.")
    if not algorithms:
        raise ConfigError(f"--algorithms names none; there are {', '.join(ALGORITHMS)}.")
    if not rows:
        raise ConfigError(f"--rows names no row; there are {', '.join(timing.ROWS)}.")
    changes = {"precision": precision, "epochs": epochs + 1, "train_limit": QUICK_IMAGES if quick else 0}
    configs = [config_of(row, algorithm, **changes) for row in rows for algorithm in algorithms]
    if not random:
        look_for_data(configs)
    records = []
    for config in configs:
        title = f"{config.task} by {config.algorithm} in {precision}"
        say(f"{title}: loading, compiling")
        data = data_of(config.dataset, random, config.train_limit or None)
        records.append(_facts("speed", config, random, quick) | _time_cell(config, data, epochs, quick, uncompiled))
        record.append(out, records[-1])
        say(f"{title}: {records[-1]['seconds']['median']:.4f} s per epoch")
    return records


def population(
    task: str, seeds: int, precision: str, epochs: int, random: bool, quick: bool, out: Path, say: Say
) -> dict[str, Any]:
    """Time an epoch of one seed and of many side by side, by PC."""
    epochs = _epochs(epochs, quick)
    if seeds < 2:
        raise ConfigError(f"--seeds is {seeds}; at least two are needed beside the one.")
    changes = {"precision": precision, "epochs": epochs + 1, "train_limit": QUICK_IMAGES if quick else 0}
    config = configure(task, "pc_se", population="vmap", **changes)
    data = data_of(config.dataset, random, config.train_limit or None)
    seconds, alive = {}, {}
    for name, members in (("one", 1), ("all", seeds)):
        say(f"{task} with {members} seed{'s' * (members > 1)}: compiling")
        mode = _mode(config, data, members, quick)
        engine = Engine(config, data, list(range(members)), mode, steps=QUICK_STEPS if quick else None)
        trained, _ = engine.epoch(engine.prepare().init(), 0)
        trained, seconds[name] = _timed_epochs(engine, trained, epochs)
        alive[name] = int(np.sum(trained.health.alive))
        say(f"{task} with {members} seed{'s' * (members > 1)}: {seconds[name]['median']:.4f} s per epoch")
    found = _facts("population", config, random, quick) | {
        "seeds": seeds,
        "seconds": seconds,
        "ratio": seconds["all"]["median"] / seconds["one"]["median"],
        "alive": alive,
        "steps": engine.steps,
    }
    record.append(out, found)
    return found


def _epochs(epochs: int, quick: bool) -> int:
    if epochs < 1:
        raise ConfigError(f"--epochs is {epochs}; at least one epoch is timed.")
    return QUICK_EPOCHS if quick else epochs


def _mode(config: Config, data: DataSet, members: int, quick: bool) -> str:
    """The fastest way to run an epoch; with ``quick`` it is not looked for."""
    return "scan" if quick else choose_mode(config, data, list(range(members)))[0]


def _facts(what: str, config: Config, random: bool, quick: bool) -> dict[str, Any]:
    """What every record says of a cell and of where it was timed."""
    return stamp(what, quick) | {
        "dataset": config.dataset,
        "model": config.model,
        "algorithm": config.algorithm,
        "precision": config.precision,
        "batch": config.batch,
        "T": getattr(config.hyper, "T", 0),
        "data": "random" if random else "real",
        "config": config.as_dict(),
    }


def stamp(what: str, quick: bool) -> dict[str, Any]:
    """The kind of a record, its time, and versions, device and commit."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"what": what, "quick": quick, "time": now} | record.environment()


def _time_cell(config: Config, data: DataSet, epochs: int, quick: bool, uncompiled: bool) -> dict[str, Any]:
    """Compile with an empty cache and again from it, warm up, time the epochs, and run a few steps uncompiled."""
    mode = _mode(config, data, 1, quick)
    compiling: dict[str, float] = {}
    with _empty_compilation_cache():
        for name in ("first", "cached"):
            jax.clear_caches()
            pooling.works.cache_clear()
            engine = Engine(config, data, [0], mode, steps=QUICK_STEPS if quick else None)
            trained, _ = engine.epoch(engine.prepare().init(), 0)
            compiling[name] = engine.timing.compile
            if name == "first":  # a program read from the cache may not know its memory
                memory = _memory(engine)
                del engine, trained
        trained, seconds = _timed_epochs(engine, trained, epochs)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    found = {
        "mode": mode,
        "steps": engine.steps,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(pcx.weights(trained.states.model))),
        "seconds": seconds,
        "compile_seconds": compiling,
        "memory_bytes": memory | {"peak_of_process": peak},
        "alive": bool(np.all(trained.health.alive)),
    }
    if uncompiled and not quick:
        found["uncompiled"] = _uncompiled(engine, trained, seconds["median"] / engine.steps)
    return found


def _timed_epochs(engine: Engine, trained: Population, epochs: int) -> tuple[Population, dict[str, Any]]:
    seconds = []
    for number in range(1, epochs + 1):
        trained, _ = engine.epoch(trained, number)
        seconds.append(engine.timing.train)
    return trained, summary(seconds)


def summary(seconds: list[float]) -> dict[str, Any]:
    """Median, mean and deviation of repeated measurements, and each of them."""
    median, mean, std = (float(f(seconds)) for f in (np.median, np.mean, np.std))
    return {"median": median, "mean": mean, "std": std, "each": seconds}


def _memory(engine: Engine) -> dict[str, int | None]:
    """What the program of an epoch (or of a step, where that is the program) holds at once, and the part that is data."""
    program = engine._compiled.get("epoch") or engine._compiled["step"]
    found = program.memory_analysis()
    data = sum(int(array.nbytes) for array in jax.tree.leaves(engine.arrays))
    if found is None:
        return {"program": None, "data": data}
    kinds = {name: getattr(found, f"{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")}
    total = kinds["argument"] + kinds["output"] + kinds["temp"] - kinds["alias"]
    return {"program": int(total) - data, "data": data, **{name: int(size) for name, size in kinds.items()}}


def _uncompiled(engine: Engine, trained: Population, compiled: float) -> dict[str, Any]:
    """Seconds per step of the algorithm without compilation, on a prepared batch, and how much longer that is.

    Uncompiled, the shortcuts read the model's program anew in every step, so PC is also timed without them.
    """
    config, key = engine.config, jax.random.key(0)
    state = jax.tree.map(lambda a: a[0], trained.states)
    images, labels = (array[: config.batch] for array in engine.arrays)
    x = engine.pipeline.train(key, images)
    variants: dict[str, dict[str, Any]] = {"all_shortcuts": {}}
    if config.algorithm == "pc_se":
        variants["no_shortcuts"] = {"shortcuts": NO_SHORTCUTS}
    found = {}
    for name, options in variants.items():
        algorithm = make_algorithm(config, config.hyper, engine.total_steps, output=engine.output, **options)
        limit, times = time.perf_counter() + UNCOMPILED_SECONDS / len(variants), list[float]()
        with jax.disable_jit(), jax.default_matmul_precision(PRECISION[config.precision]):
            while len(times) < 2 or (len(times) < 6 and time.perf_counter() < limit):
                start = time.perf_counter()
                jax.block_until_ready(algorithm.step(state, x, labels, key))
                times.append(time.perf_counter() - start)
        seconds = summary(times[1:])  # the first one warms up
        found[name] = {"seconds_per_step": seconds, "ratio": seconds["median"] / compiled}
    return found


@contextlib.contextmanager
def _empty_compilation_cache() -> Iterator[None]:
    """Inside, compiled programs are kept in a folder that starts empty and goes away."""
    changes: dict[str, Any] = {"jax_persistent_cache_min_compile_time_secs": 0.0}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        changes["jax_compilation_cache_dir"] = folder
        before = {name: getattr(jax.config, name) for name in changes}
        try:
            for name, value in changes.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def as_text(records: list[dict[str, Any]]) -> str:
    """What `speed` found, as aligned columns."""
    cells = [["task", "algorithm", "T", "precision", "s/epoch (median)", "mean ± std", "compile, from cache (s)", "MiB",
              "uncompiled/compiled"]]  # fmt: skip
    for r in records:
        seconds, compiling, memory = r["seconds"], r["compile_seconds"], r["memory_bytes"]["program"]
        spread = f"{seconds['mean']:.4f} ± {seconds['std']:.4f}"
        times = [f"{seconds['median']:.4f}", spread, f"{compiling['first']:.1f}, {compiling['cached']:.1f}"]
        ratio = ", ".join(f"{part['ratio']:.0f}" for part in r.get("uncompiled", {}).values())
        size = "" if memory is None else f"{memory / 2**20:.0f}"
        cells.append([f"{r['dataset']}/{r['model']}", r["algorithm"], str(r["T"] or ""), r["precision"], *times, size, ratio])
    return aligned(cells)
