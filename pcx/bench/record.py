"""Records: what was run, on what, with which result; one JSON line each, appended and never changed."""

import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import pcx

PROTOCOL = "final epoch, all seeds, whole test set; best_* is the best test epoch of each seed"


def results_file() -> Path:
    """Where records are kept: ``$PCX_RESULTS``, else ``results/records.jsonl`` below the present folder."""
    return Path(os.environ.get("PCX_RESULTS") or "results/records.jsonl")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(pcx.__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment() -> dict[str, Any]:
    """Versions, device and commit. Where there is no git, ``$PCX_COMMIT`` may say which commit the files are of."""
    commit = _git("rev-parse", "HEAD")
    everything_but_results = (":/", ":(top,exclude)results")  # runs append there
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *everything_but_results)
    changed = changed or _git("status", "--porcelain", "--untracked-files=all", "--", ":/pcx")  # a new algorithm, say
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "equinox", "optax", "numpy")
    return {
        "commit": commit or os.environ.get("PCX_COMMIT"),
        "dirty": None if commit is None else bool(changed),
        "versions": {"pcx": pcx.__version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
        "device": {"platform": device.platform, "kind": device.device_kind, "cpus": os.cpu_count()},
    }


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line in one write, so that lines of two processes do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record, sort_keys=True) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


RUN = ("config", "seeds", "quick", "final", "best", "time")
SPEED = ("what", "dataset", "model", "algorithm", "precision", "data", "seconds", "quick", "device", "time")
SCALING = ("what", "stacked", "layers", "seconds", "quick", "device", "time")
MEASURED = {"seconds": ("median", "std"), "device": ("platform", "kind")}  # of a record of `pcx bench speed`
PARTS = {"config": ("dataset", "model", "algorithm"), "final": ("test_top1",), "best": ("test_top1",)}


def is_record(found: Any, needed: tuple[str, ...]) -> bool:
    """Whether this has the ``needed`` names, and each of `PARTS` among them its own."""
    if not isinstance(found, dict) or any(name not in found for name in needed):
        return False
    wanted = PARTS | (MEASURED if found.get("what") == "speed" else {})
    parts = {name: found[name] for name in wanted if name in needed}
    if any(not isinstance(part, dict) or any(inner not in part for inner in wanted[name]) for name, part in parts.items()):
        return False
    settings = [parts.get("config", {}).get(name, {}) for name in ("hyper", "options")]
    seeds = found["seeds"] if "seeds" in needed else []
    if not isinstance(seeds, list) or not all(isinstance(part, dict) for part in settings):
        return False
    scores = [parts[name]["test_top1"] for name in ("final", "best") if name in parts]
    if not all(isinstance(score, dict) for score in scores):
        return False
    numbers = [score.get(name) for score in scores for name in ("mean", "std")]
    numbers += [parts["seconds"][name] for name in MEASURED["seconds"] if "seconds" in parts]
    return all(isinstance(number, int | float) for number in numbers)


def read(path: Path, needed: tuple[str, ...] = RUN) -> list[dict[str, Any]]:
    """All records of a file; a line that lacks one of the ``needed`` names is named."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; records are kept in a file.")
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not is_record(found, needed):
            raise ValueError(f"line {number} of {path} is not a record; remove it or restore the file.")
        records.append(found)
    return records


def check(path: Path, needed: tuple[str, ...] = RUN) -> None:
    """Refuse a file of records that is damaged or cannot be written, before anything is trained."""
    read(path, needed)
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    try:
        if place == path:
            if not path.is_file():
                raise OSError("it is not a plain file")
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{path}, the file of records, cannot be written ({reason}); give another one.") from None


def time_left(seconds: float) -> str:
    """In words how long the rest takes: minutes, or seconds where it is less than one."""
    return f"about {seconds:.0f} seconds left" if seconds < 59.5 else f"about {seconds / 60:.1f} minutes left"


def way_of(point: dict[str, Any]) -> str:
    """In words how equal layers were computed."""
    return "one kernel" if point.get("kernel") else "stacked" if point["stacked"] else "not stacked"
