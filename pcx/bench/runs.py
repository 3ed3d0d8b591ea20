"""A run from config to record: train, evaluate, write a line per epoch and seed, checkpoint, go on after a kill.

Killed at any moment and started again with the same command, a run ends with the same numbers as one that was not: all
randomness comes from seed, epoch and step, and the population keeps its shape.
"""

import json
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pcx.bench import record
from pcx.bench.config import Config
from pcx.bench.engine import Engine, Population
from pcx.bench.folder import Folder
from pcx.bench.modes import choose_mode
from pcx.data import DataSet
from pcx.utils import atomic_write

CHECKPOINT_SECONDS = 5.0
Report = Callable[[str], None]


class Stopped(Exception):
    """A run was interrupted; its folder is in order."""


def member_line(engine: Engine, i: int, epoch: int, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
    """The JSON line of one seed after an epoch."""
    seen = engine.steps * engine.config.batch * engine.members
    line: dict[str, Any] = {"seed": engine.seeds[i], "epoch": epoch}
    for name, values in metrics.items():
        if name == "train_energies":
            line["energies"] = {node: finite(v) for node, v in zip(engine.nodes, values[i], strict=True)}
        else:
            line[name] = finite(values[i])
    line |= {"seconds": engine.timing.train, "evaluate_seconds": engine.timing.evaluate}
    line |= {"examples_per_second": seen / engine.timing.train, "compile_seconds": engine.timing.compile}
    return line


def finite(value: Any) -> float | None:
    """A number for JSON, which has no infinity and no NaN."""
    return float(value) if np.isfinite(value) else None


def statistics_of(values: list[float | None]) -> dict[str, Any]:
    """Mean and deviation over seeds, of the values that are numbers."""
    known = [value for value in values if value is not None]
    return {"mean": finite(np.mean(known)) if known else None, "std": finite(np.std(known)) if known else None, "seeds": values}


class Progress:
    """What the loop knows beyond arrays: which members still train, and the best validation accuracy of each."""

    def __init__(self, members: int):
        self.training = [True] * members
        self.best = [-1.0] * members
        self.since = [0] * members

    def early_stop(self, i: int, accuracy: float, patience: int) -> bool:
        """Count epochs without a better validation accuracy."""
        better = accuracy > self.best[i]
        self.best[i], self.since[i] = max(self.best[i], accuracy), 0 if better else self.since[i] + 1
        return patience > 0 and self.since[i] >= patience


def epochs(
    engine: Engine, population: Population, start: int, progress: Progress
) -> Iterator[tuple[int, Population, list[Any]]]:
    """Train epoch by epoch; yields the number of epochs done, the population, and the lines of the members that trained."""
    for number in range(start, engine.config.epochs):
        if not any(progress.training):
            return
        population, metrics = engine.epoch(population, number)
        splits = ["validation", "test"] if "validation" in engine.evaluation else ["test"]
        for split in splits:
            metrics |= engine.evaluate(population, split)
        health = population.health
        alive, lines = np.array(health.alive), []
        for i in range(engine.members):
            if not progress.training[i]:
                continue
            line = member_line(engine, i, number + 1, metrics)
            if not alive[i]:
                node = engine.nodes[int(health.node[i])]
                line["stopped"] = {
                    "reason": "diverged",
                    "epoch": int(health.epoch[i]) + 1,
                    "step": int(health.step[i]),
                    "node": node,
                }
                progress.training[i] = False
            elif engine.config.patience and progress.early_stop(i, line["validation_top1"], engine.config.patience):
                line["stopped"] = {"reason": "no better validation accuracy", "epoch": number + 1}
                progress.training[i] = alive[i] = False
            lines.append(line)
        population = population._replace(health=health._replace(alive=jnp.asarray(alive)))
        yield number + 1, population, lines


def describe_stop(seed: int, stopped: dict[str, Any]) -> str:
    if stopped["reason"] == "diverged":
        return (
            f"seed {seed} stopped: the energy of {stopped['node']} is not finite or too large "
            f"at epoch {stopped['epoch']}, step {stopped['step']}"
        )
    return f"seed {seed} stopped at epoch {stopped['epoch']}: {stopped['reason']}"


def summarise(
    config: Config, seeds: list[int], lines: list[dict[str, Any]], mode: str, quick: bool, data: str = ""
) -> dict[str, Any]:
    """The record of a finished run: per seed the last epoch and the best ones, means and deviations, time, and all curves."""
    by_seed = {seed: [line for line in lines if line["seed"] == seed] for seed in seeds}
    metrics = [m for m in lines[-1] if m.endswith(("top1", "top5", "loss"))]
    final = {m: [by_seed[s][-1][m] for s in seeds] for m in metrics}
    best = {m: [max(line[m] for line in by_seed[s]) for s in seeds] for m in metrics if not m.endswith("loss")}
    seconds = [line["seconds"] for line in by_seed[seeds[0]]]
    return {
        "config": config.as_dict(),
        "digest": config.digest(),
        "seeds": seeds,
        "members": len(seeds),
        "mode": mode,
        "quick": quick,
        "protocol": record.PROTOCOL,
        "final": {m: statistics_of(v) for m, v in final.items()},
        "best": {m: statistics_of(v) for m, v in best.items()},
        "diverged": [s for s in seeds if by_seed[s][-1].get("stopped", {}).get("reason") == "diverged"],
        "epochs": {str(s): len(by_seed[s]) for s in seeds},
        "curves": {m: [[line[m] for line in by_seed[s]] for s in seeds] for m in metrics if m.startswith("test")},
        "seconds_per_epoch": statistics.median(seconds[1:] or seconds),
        "compile_seconds": lines[-1]["compile_seconds"],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **({"data": data} if data else {}),
        **record.environment(),
    }


def run(
    config: Config,
    data: DataSet,
    seeds: list[int],
    path: Path,
    *,
    quick: bool = False,
    report: Report = print,
    on_epoch: Callable[[int, list[dict[str, Any]]], None] = lambda epoch, lines: None,
    on_step: Callable[[int, int], None] | None = None,
    results: Path | None = None,
) -> dict[str, Any]:
    """Train into a folder, or go on with what it holds; returns the summary, which is also appended to the records.

    ``on_epoch`` is told the epoch and its lines. ``on_step`` is told how many steps of an epoch are done, of how many, where
    an epoch is not one program.
    """
    results = results or record.results_file()
    record.check(results)
    with Folder(path) as folder:
        mode = folder.mode_before(config, seeds, quick, data.checksum)
        finished = folder.summary()
        if finished is not None:
            report(f"{path} is finished already")
            _record_once(results, finished)
            return finished
        begun = mode is not None
        if mode is None:
            mode, why = choose_mode(config, data, seeds, report)
            report(why)
        engine = Engine(config, data, seeds, mode)
        if not begun:
            folder.start(config, seeds, mode, quick, data.checksum)
        engine.on_step = on_step
        if unreached := engine.unreached():
            report(unreached)
        population, progress, start = engine.prepare().init(), Progress(len(seeds)), 0
        loaded = folder.load(population)
        if loaded is not None:
            population, extra = loaded
            start = extra["epoch"]
            progress.training, progress.best, progress.since = extra["training"], extra["best"], extra["since"]
            report(f"going on with {path} after epoch {start}")
        lines = folder.lines_until(start, dict(zip(seeds, progress.training, strict=True)))
        with Interrupt(report) as interrupt:
            saved = time.monotonic()
            for epoch, population, new in epochs(engine, population, start, progress):  # noqa: B020
                folder.append(new)
                lines += new
                for line in new:
                    if "stopped" in line:
                        report(describe_stop(line["seed"], line["stopped"]))
                on_epoch(epoch, new)
                due = time.monotonic() - saved > CHECKPOINT_SECONDS
                if due or interrupt.wanted or epoch == config.epochs or not any(progress.training):
                    folder.save(population, epoch, vars(progress))
                    saved = time.monotonic()
                if interrupt.wanted and epoch < config.epochs:
                    raise Stopped(f"stopped after epoch {epoch} of {config.epochs}; the same command goes on from there")
        summary = summarise(config, seeds, lines, mode, quick, data.checksum)
        plot_curves(lines, config, path / "curves.png")
        atomic_write(path / "summary.json", json.dumps(summary, indent=2).encode())
        _record_once(results, summary)
        return summary


def _record_once(file: Path, summary: dict[str, Any]) -> None:
    """Append the summary, unless it is there: the run was killed right after, or its summary was lost and written again."""
    identity = ("digest", "seeds", "curves", "seconds_per_epoch")  # seconds are those of one training
    same = [r for r in record.read(file) if all(r.get(name) == summary[name] for name in identity)]
    if not same:
        record.append(file, summary)


def plot_curves(lines: list[dict[str, Any]], config: Config, path: Path) -> None:
    from pcx.bench.plots import curves

    curves(lines, config, path)


class Interrupt:
    """Ctrl-C lets the epoch finish; a second one stops at once, and loses what is newer than the checkpoint."""

    def __init__(self, report: Report):
        self.wanted, self.report = False, report
        self.before: Any = None

    def _handle(self, *_: Any) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        self.report("stopping after this epoch; press Ctrl-C again to stop at once")

    def __enter__(self) -> "Interrupt":
        try:
            self.before = signal.signal(signal.SIGINT, self._handle)
        except ValueError:  # not in the main thread: Ctrl-C is somebody else's
            self.before = None
        return self

    def __exit__(self, *_: Any) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
