"""Pictures of runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pcx.bench.config import Config
from pcx.bench.record import way_of


def new_figure(columns: int) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, columns, figsize=(5 * columns, 3.8), layout="constrained", squeeze=False)


def _band(axes: Any, curves: list[list[Any]], label: str) -> None:
    """The mean and the range of curves of different length."""
    length = max(map(len, curves))
    padded = np.array([curve + [None] * (length - len(curve)) for curve in curves], float)  # None is NaN
    if np.isnan(padded).all(axis=0).any():
        return
    epochs = np.arange(1, length + 1)
    (line,) = axes.plot(epochs, np.nanmean(padded, axis=0), label=label)
    axes.fill_between(epochs, np.nanmin(padded, axis=0), np.nanmax(padded, axis=0), alpha=0.2, color=line.get_color())


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _of(lines: list[dict[str, Any]], metric: str) -> list[list[Any]]:
    seeds = sorted({line["seed"] for line in lines})
    return [[line[metric] for line in lines if line["seed"] == seed] for seed in seeds]


def curves(lines: list[dict[str, Any]], config: Config, path: Path) -> None:
    """Accuracy, loss and energy per node of one run, over epochs: mean and range over seeds."""
    import matplotlib.pyplot as plt

    figure, ((accuracy, loss, energy),) = new_figure(3)
    for split in ("train", "validation", "test"):
        if f"{split}_top1" in lines[-1]:
            _band(accuracy, [[_percent(v) for v in curve] for curve in _of(lines, f"{split}_top1")], split)
            _band(loss, _of(lines, f"{split}_loss"), split)
    for node in lines[-1]["energies"]:
        energies = [[line["energies"][node] for line in lines if line["seed"] == s] for s in sorted({x["seed"] for x in lines})]
        if max((value or 0.0) for curve in energies for value in curve) > 0:
            _band(energy, energies, node)
    accuracy.set(xlabel="epoch", ylabel="accuracy (%)", title=f"{config.task} by {config.algorithm}")
    loss.set(xlabel="epoch", ylabel="output energy", yscale="log")
    energy.set(xlabel="epoch", ylabel="energy at learning (train)", yscale="log")
    for axes in (accuracy, loss, energy):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def compare(runs: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """Test accuracy of several runs in one picture."""
    import matplotlib.pyplot as plt

    figure, ((axes,),) = new_figure(1)
    for name, lines in runs.items():
        _band(axes, [[_percent(v) for v in curve] for curve in _of(lines, "test_top1")], name)
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", title=title)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def energies(history: Any, path: Path, title: str) -> None:
    """The energy of every node while values settle, from ``pcx.infer(record=pcx.record_energies)``."""
    import matplotlib.pyplot as plt

    figure, ((axes,),) = new_figure(1)
    for name, energy in history.items():
        axes.plot(np.asarray(energy).mean(axis=1), label=name)
    axes.set(xlabel="inference step", ylabel="energy (mean over the batch)", yscale="log", title=title)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _series(records: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The lines of a panel: stacked, one kernel and not stacked, in each precision, with a label."""
    for way, precision in sorted({(way_of(r), r["precision"]) for r in records}, reverse=True):
        yield f"{way}, {precision}", [r for r in records if (way_of(r), r["precision"]) == (way, precision)]


def scaling(records: list[dict[str, Any]], path: Path) -> None:
    """Training time relative to the base against the multiplier of one number, stacked and not: the paper's scaling figure."""
    import matplotlib.pyplot as plt

    titles = {"batch": "batch", "dim": "width", "layers": "depth", "T": "inference steps"}
    figure, (panels,) = new_figure(len(titles))
    for axes, (parameter, title) in zip(panels, titles.items(), strict=True):
        for series, mine in _series([r for r in records if r["parameter"] in ("base", parameter)]):
            mine.sort(key=lambda r: r["multiplier"])
            seconds = [r["seconds"]["median"] for r in mine]
            label = f"{series}, {seconds[0]:.3f} to {seconds[-1]:.3f} s"
            axes.plot([r["multiplier"] for r in mine], [s / seconds[0] for s in seconds], "o-", label=label)
        axes.set(xlabel="multiplier", ylabel="time relative to base", title=f"{title}, base {mine[0][parameter]}")
        axes.legend(fontsize=8)
    figure.suptitle(f"one epoch of {records[0]['batches']} batches on {records[0]['device']['kind']}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def depth(records: list[dict[str, Any]], path: Path) -> None:
    """Time of one inference against the number of equal layers: stacked, not stacked, and in one kernel a step."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(r["kind"] for r in records))
    figure, (panels,) = new_figure(len(kinds))
    for axes, kind in zip(panels, kinds, strict=True):
        for series, mine in _series([r for r in records if r["kind"] == kind]):
            mine.sort(key=lambda r: r["layers"])
            milliseconds = [1e3 * r["seconds"]["median"] for r in mine]
            grown = milliseconds[-1] / milliseconds[0]
            label = f"{series}, × {grown:.2f} from {mine[0]['layers']} to {mine[-1]['layers']}"
            axes.plot([r["layers"] for r in mine], milliseconds, "o-", label=label)
        axes.set(xlabel="layers", ylabel="ms per inference", xscale="log", yscale="log", title=f"{kind}, T = {mine[0]['T']}")
        axes.set_xticks([r["layers"] for r in mine], [str(r["layers"]) for r in mine], minor=False)
        axes.set_xticks([], minor=True)
        axes.legend(fontsize=8)
    figure.suptitle(f"width {mine[0]['dim']}, batch {mine[0]['batch']} on {mine[0]['device']['kind']}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
