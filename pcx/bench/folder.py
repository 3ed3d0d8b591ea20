"""A run's folder: config, one JSON line per epoch and seed, checkpoint, summary, curves; one process at a time.

``config.json``, ``metrics.jsonl``, ``checkpoint.safetensors``, ``summary.json``, ``curves.png``. Lines are written before the
checkpoint that covers them; what is newer than the checkpoint is dropped when a run goes on, and made again.
"""

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from pcx._model import path_name
from pcx.bench import record
from pcx.bench.config import Config
from pcx.utils import atomic_write, checksum

NUMBERS = {"seed", "epoch", "train_loss", "train_top1", "test_loss", "test_top1", "seconds", "compile_seconds"}
SUMMARY = (*record.RUN, "digest", "mode", "diverged", "seconds_per_epoch")


def _sound(line: Any) -> bool:
    """Whether this is a line of metrics: numbers, or null where they are not finite."""
    if not isinstance(line, dict) or not line.keys() >= {*NUMBERS, "energies"} or not isinstance(line["energies"], dict):
        return False
    numbers = [*(line[name] for name in NUMBERS), *line["energies"].values()]
    return isinstance(line["epoch"], int) and all(number is None or isinstance(number, int | float) for number in numbers)


class RunError(Exception):
    """A run cannot start or go on; the message says why and what to do."""


class Folder:
    """The files of one run. Use as a context: it is locked inside."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: Any = None

    def __enter__(self) -> "Folder":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "a+")
        except OSError as error:
            raise RunError(f"{self.path} cannot be the folder of a run ({error.strerror}); choose another --out.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise RunError(f"{self.path} is in use by process {holder}; wait for it, or choose another --out.") from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            if [*self.path.iterdir()] == [self.path / "lock"]:  # nothing was begun
                (self.path / "lock").unlink()
                self.path.rmdir()
        self._lock.close()

    def start(self, config: Config, seeds: list[int], mode: str, quick: bool, data: str = "") -> None:
        """Write down what this run is; ``data`` is the checksum of its data, if they are one's own."""
        facts = {"config": config.as_dict(), "seeds": seeds, "quick": quick, "digest": config.digest(), "mode": mode}
        facts |= {"data": data} if data else {}
        atomic_write(self.path / "config.json", json.dumps(facts, indent=2).encode())

    def mode_before(self, config: Config, seeds: list[int], quick: bool, data: str = "") -> str | None:
        """The mode of the run that this folder holds, None if it is new; a folder that holds another run is refused."""
        file = self.path / "config.json"
        if not file.exists():
            others = [name for name in ("checkpoint.safetensors", "summary.json") if (self.path / name).exists()]
            if others:
                raise RunError(f"{file} is missing, but {others[0]} is there; restore it, or remove {self.path} to start anew.")
            return None
        try:
            found = json.loads(file.read_bytes())
            mode, there = found["mode"], _flat(found["config"]) | {"seeds": found["seeds"], "quick": found["quick"]}
            data_before = found.get("data", data)  # older ones have none
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{file} is not the config of a run; remove {self.path} or choose another --out.") from None
        if data_before != data:
            raise RunError(
                f"{self.path} holds a run on other data, of the name {config.dataset} as well; choose another --out."
            )
        for name, mine in (_flat(config.as_dict()) | {"seeds": seeds, "quick": quick}).items():
            theirs = there.get(name)
            if theirs != mine:
                raise RunError(
                    f"{self.path} holds another run: {name} is {theirs} there and {mine} here; choose another --out."
                )
        return mode

    def summary(self) -> dict[str, Any] | None:
        """The summary of the run, None if it is not finished."""
        file = self.path / "summary.json"
        if not file.exists():
            return None
        try:
            found = json.loads(file.read_bytes())
        except ValueError:
            found = None
        if not record.is_record(found, SUMMARY):
            raise RunError(f"{file} is not the summary of a run; remove it, and the same command writes it again.")
        return found

    def append(self, lines: list[dict[str, Any]]) -> None:
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """The lines so far, without a last one that is half written."""
        file = self.path / "metrics.jsonl"
        texts = file.read_bytes().splitlines() if file.exists() else []
        lines, seen = [], set[tuple[int, int]]()
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
            except ValueError:
                if number == len(texts):
                    break
                line = None
            if not _sound(line):
                raise RunError(f"line {number} of {file} is damaged; restore it, or remove {self.path} to start this run anew.")
            which = (line["seed"], line["epoch"])
            if which in seen:
                raise RunError(
                    f"line {number} of {file} is the second one of seed {which[0]} and epoch {which[1]}; remove one of them, "
                    f"or remove {self.path} to start this run anew."
                )
            seen.add(which)
            lines.append(line)
        return lines

    def lines_until(self, epoch: int, training: dict[int, bool]) -> list[dict[str, Any]]:
        """The lines up to the epoch of the checkpoint; later ones are dropped for good.

        A seed has a line for each epoch, up to that one if it is still ``training``, else up to the one where it stopped.
        """
        file = self.path / "metrics.jsonl"
        kept = [line for line in self.lines() if line["epoch"] <= epoch]
        for seed, trains in training.items():
            mine = [line for line in kept if line["seed"] == seed]
            complete = len(mine) == epoch if trains else bool(mine) and "stopped" in mine[-1]
            if not complete or [line["epoch"] for line in mine] != list(range(1, len(mine) + 1)):
                raise RunError(
                    f"{file} lacks lines of seed {seed}, as the checkpoint is of epoch {epoch}; restore it, or remove "
                    f"{self.path} to start this run anew."
                )
        atomic_write(file, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return kept

    def save(self, tree: Any, epoch: int, extra: dict[str, Any]) -> None:
        """The population after an epoch, with everything needed to go on, and a checksum."""
        arrays = {name: np.asarray(_plain(leaf)) for name, leaf in _leaves(tree).items()}
        run = json.dumps({"epoch": epoch, **extra})
        metadata = {"run": run, "sha256": _checksum(arrays, run)}
        atomic_write(self.path / "checkpoint.safetensors", safetensors.numpy.save(arrays, metadata))

    def load(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The population of the checkpoint, in the structure of another one; None where there is none."""
        file = self.path / "checkpoint.safetensors"
        if not file.exists():
            return None
        try:
            with safetensors.safe_open(file, framework="numpy") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata()
                extra = json.loads(metadata["run"])
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file} cannot be read ({error}); remove it to start this run anew.") from error
        if "sha256" in metadata and metadata["sha256"] != _checksum(found, metadata["run"]):  # older ones have none
            raise RunError(f"{file} is damaged: its checksum is not the one that was saved; remove it to start this run anew.")
        wanted, structure = _leaves(like), jax.tree.structure(like)
        if wanted.keys() != found.keys() or any(_plain(wanted[n]).shape != found[n].shape for n in wanted):
            raise RunError(f"{file} is of another program; remove {self.path} to start this run anew.")
        leaves = [_like(jax.numpy.asarray(found[name]), leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(structure, leaves), extra


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """All settings by their own names."""
    inner = {**config["hyper"], **config["options"]}
    return {name: value for name, value in config.items() if name not in ("hyper", "options")} | inner


def _checksum(arrays: dict[str, np.ndarray], run: str) -> str:
    """Of all that a checkpoint holds."""
    return checksum(arrays | {"run": np.frombuffer(run.encode(), np.uint8)})


def _leaves(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _like(array: Any, leaf: Any) -> Any:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    return array
