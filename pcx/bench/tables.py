"""Tables: our results beside the paper's, from the records."""

import csv
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pcx.models
from pcx.bench.config import PRECISIONS, ConfigError
from pcx.bench.configs import accuracy, generative, memory, sampling, timing
from pcx.bench.tasks import configure


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


class Speed(NamedTuple):
    """Seconds per epoch of one row by one algorithm; ``ratio`` is PC over BP in the same precision on the same device."""

    dataset: str
    model: str
    algorithm: str
    precision: str | None
    median: float | None
    std: float | None
    ratio: float | None
    paper: float
    pcx: float | None
    jpc: float | None
    song: float | None
    data: str | None
    device: str | None


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
    return all(_filled(config.get(name, value), value) == value for name, value in default.items() if name not in FREE)


def _filled(value: Any, default: Any) -> Any:
    """Settings that a record does not have yet are at their default."""
    return default | value if isinstance(default, dict) else value


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


# These differ from another precision in inference alone, which backpropagation has not.
SAME_BP = {"f16": "tf32", "tf32_plain": "tf32"}


def _timing(records: list[dict[str, Any]]) -> list[Speed]:
    rows = []
    for (model, dataset), figures in timing.PAPER.items():
        cells = {a: _timed(records, dataset, model, a) for a in ("pc_se", "bp_se")}
        for algorithm, found in cells.items():
            peers = timing.PEERS[model, dataset][algorithm]
            others = (figures[algorithm][0], peers.get("pcx"), peers.get("jpc"), peers.get("song"))
            if not found:
                rows.append(Speed(dataset, model, algorithm, None, None, None, None, *others, None, None))
            for precision, record in found.items():
                backpropagation = cells["bp_se"].get(precision, cells["bp_se"].get(SAME_BP.get(precision, "")))
                base = backpropagation if algorithm == "pc_se" else None
                same = base is not None and base["device"]["kind"] == record["device"]["kind"]
                seconds, kind = record["seconds"], record["device"]["kind"]
                ratio = seconds["median"] / base["seconds"]["median"] if base is not None and same else None
                ours = (precision, seconds["median"], seconds["std"], ratio)
                rows.append(Speed(dataset, model, algorithm, *ours, *others, record["data"], kind))
    return rows


def _timed(records: list[dict[str, Any]], dataset: str, model: str, algorithm: str) -> dict[str, dict[str, Any]]:
    """For every precision the newest record of a cell; one from an accelerator comes before one from a CPU."""
    wanted = {"what": "speed", "quick": False, "dataset": dataset, "model": model, "algorithm": algorithm}
    fitting = [r for r in records if all(r[name] == value for name, value in wanted.items())]
    ordered = sorted(fitting, key=lambda r: (r["device"]["platform"] != "cpu", r["time"]))
    newest = {r["precision"]: r for r in ordered}
    return {precision: newest[precision] for precision in sorted(newest, key=list(PRECISIONS).index)}


def only_quick(records: list[dict[str, Any]]) -> int:
    """How many quick records are of cells of the timing table that have no other record."""
    cells = [((r["dataset"], r["model"], r["algorithm"]), r["quick"]) for r in records if r["what"] == "speed"]
    shown = {cell for cell, quick in cells if not quick}
    return sum(cell not in shown for cell, _ in cells)


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


TABLES: dict[str, Callable[[list[dict[str, Any]]], list[Any]]] = {
    "accuracy": _accuracy,
    "generative": _generative,
    "memory": _memory,
    "sampling": _sampling,
    "timing": _timing,
}


def rows_of(name: str, records: list[dict[str, Any]]) -> list[Any]:
    """The rows of a table: `Speed` for timing, from the records of `pcx bench speed`; `Row` for all others."""
    if name not in TABLES:
        raise ConfigError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
    return TABLES[name](records)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def as_csv(rows: list[Any]) -> str:
    """Comma-separated, one row per metric, empty where not run."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(rows[0]._fields)
    for row in rows:
        writer.writerow(["" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in row])
    return buffer.getvalue()


def _cells(rows: list[Any]) -> list[list[str]]:
    return _speed_cells(rows) if isinstance(rows[0], Speed) else _result_cells(rows)


def _result_cells(rows: list[Row]) -> list[list[str]]:
    head = ["data set", "model", "algorithm", "metric", "paper", "ours (final epoch)", "ours (best test epoch)", "seeds"]
    body = []
    for row in rows:
        ours = "not run" if row.final_mean is None else _number(row.final_mean)
        ours += f" ± {_number(row.final_std)}" if row.final_std is not None and (row.seeds or 0) > 1 else ""
        seeds = "" if row.seeds is None else str(row.seeds)
        body.append([*row[:4], _number(row.paper), ours, _number(row.best_mean), seeds])
    return [head, *body]


def _speed_cells(rows: list[Speed]) -> list[list[str]]:
    head = ["data set", "model", "algorithm", "precision", "ours (s/epoch)", "PC/BP", "paper (A100)"]
    head += ["PCX 08-2026 (H200)", "JPC (H200)", "Song (H200)", "our data", "our device"]
    body = []
    for row in rows:
        ours = "not run" if row.median is None else f"{_number(row.median, 3)} ± {_number(row.std, 3)}"
        peers = ["" if seconds is None else f"{seconds:.3g}" for seconds in (row.pcx, row.jpc, row.song)]
        figures = [ours, _number(row.ratio), _number(row.paper), *peers]
        body.append([row.dataset, row.model, row.algorithm, row.precision or "", *figures, row.data or "", row.device or ""])
    return [head, *body]


def aligned(cells: list[list[str]]) -> str:
    """Columns of equal width; the first row is the head."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def as_text(rows: list[Any]) -> str:
    """Aligned columns."""
    return aligned(_cells(rows))


def as_markdown(rows: list[Any]) -> str:
    cells = _cells(rows)
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]])


FORMATS = {"text": as_text, "markdown": as_markdown, "csv": as_csv}
