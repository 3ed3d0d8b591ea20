"""Tables: our results beside the paper's, from the records."""

import csv
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pcx.models
from pcx.bench.config import ConfigError
from pcx.bench.configs import accuracy, generative, memory, sampling, timing
from pcx.bench.tasks import configure

COLUMNS = ("dataset", "model", "algorithm", "metric", "paper", "final_mean", "final_std", "best_mean", "seeds")


class Row(NamedTuple):
    """One metric of one cell; what has not been run is None."""

    dataset: str
    model: str
    algorithm: str
    metric: str
    paper: float | None
    final_mean: float | None
    final_std: float | None
    best_mean: float | None
    seeds: int | None


def _best_record(records: list[dict[str, Any]], dataset: str, model: str, algorithm: str) -> dict[str, Any] | None:
    """Of the records of a cell that may enter a table: the one with the most seeds, and of these the newest."""
    wanted = {"dataset": dataset, "model": model, "algorithm": algorithm}
    fitting = [
        r
        for r in records
        if not r["quick"] and all(r["config"][name] == value for name, value in wanted.items()) and _is_default(r["config"])
    ]
    return max(fitting, key=lambda r: (len(r["seeds"]), r["time"]), default=None)


# What may differ from the task's own settings: how products are rounded and how seeds are mapped, not what is trained.
FREE = ("precision", "population", "energy_limit")


def _is_default(config: dict[str, Any]) -> bool:
    """Whether a run used the settings of its cell."""
    if config["model"] not in pcx.models.names():
        return False
    default = configure(f"{config['dataset']}/{config['model']}", config["algorithm"]).as_dict()
    return all(config.get(name, value) == value for name, value in default.items() if name not in FREE)


def _accuracy(records: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for (model, dataset), metrics in accuracy.PAPER.items():
        for i, algorithm in enumerate(accuracy.ALGORITHMS):
            found = _best_record(records, dataset, model, algorithm)
            for metric, figures in metrics.items():
                row = Row(dataset, model, algorithm, metric, figures[i][0], None, None, None, None)
                if found is not None:
                    final, best = found["final"][f"test_{metric}"], found["best"][f"test_{metric}"]
                    means = {
                        "final_mean": 100 * final["mean"],
                        "final_std": 100 * final["std"],
                        "best_mean": 100 * best["mean"],
                    }
                    row = row._replace(**means, seeds=len(found["seeds"]))
                rows.append(row)
    return rows


def _timing(records: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for (model, dataset), figures in timing.PAPER.items():
        for algorithm, (paper, _) in figures.items():
            found = _best_record([r for r in records if r["members"] == 1], dataset, model, algorithm)
            mean = None if found is None else found["seconds_per_epoch"]
            seeds = None if found is None else len(found["seeds"])
            rows.append(Row(dataset, model, algorithm, timing.METRIC, paper, mean, None, None, seeds))
    return rows


def _generative(records: list[dict[str, Any]]) -> list[Row]:
    return [
        Row(dataset, model, algorithm, generative.METRIC, paper, None, None, None, None)
        for (model, dataset), figures in generative.PAPER.items()
        for algorithm, (paper, _) in figures.items()
    ]


def _memory(records: list[dict[str, Any]]) -> list[Row]:
    return [
        Row("tinyimagenet", f"memory{width}", "pc_se", f"mse_1e-4_{kind}_{images}", figures[i][0], None, None, None, None)
        for kind, rows in memory.PAPER.items()
        for images, figures in rows.items()
        for i, width in enumerate(memory.WIDTHS)
    ]


def _sampling(records: list[dict[str, Any]]) -> list[Row]:
    return [Row("mnist", "decoder", algorithm, metric, paper, None, None, None, None)
            for (algorithm, metric), (paper, _) in sampling.PAPER.items()]  # fmt: skip


TABLES: dict[str, Callable[[list[dict[str, Any]]], list[Row]]] = {
    "accuracy": _accuracy,
    "generative": _generative,
    "memory": _memory,
    "sampling": _sampling,
    "timing": _timing,
}


def rows_of(name: str, records: list[dict[str, Any]]) -> list[Row]:
    """The rows of a table."""
    if name not in TABLES:
        raise ConfigError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
    return TABLES[name](records)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def as_csv(rows: list[Row]) -> str:
    """Comma-separated, one row per metric, empty where not run."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(["" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in row])
    return buffer.getvalue()


def _cells(rows: list[Row]) -> list[list[str]]:
    head = ["data set", "model", "algorithm", "metric", "paper", "ours (final epoch)", "ours (best test epoch)", "seeds"]
    body = []
    for row in rows:
        ours = "not run" if row.final_mean is None else _number(row.final_mean)
        ours += f" ± {_number(row.final_std)}" if row.final_std is not None and (row.seeds or 0) > 1 else ""
        seeds = "" if row.seeds is None else str(row.seeds)
        body.append([*row[:4], _number(row.paper), ours, _number(row.best_mean), seeds])
    return [head, *body]


def as_text(rows: list[Row]) -> str:
    """Aligned columns."""
    cells = _cells(rows)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def as_markdown(rows: list[Row]) -> str:
    cells = _cells(rows)
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]])


FORMATS = {"text": as_text, "markdown": as_markdown, "csv": as_csv}
