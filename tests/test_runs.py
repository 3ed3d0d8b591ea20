"""Runs with a folder: killed and resumed, interrupted, locked, stopped early, diverged, recorded."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

import pcx.data
from pcx.bench import configure, record, runs
from pcx.bench.engine import Engine
from pcx.bench.folder import NUMBERS, Folder, RunError

DIGITS = pcx.data.load("digits")
TINY = {"epochs": 3, "width": 4, "hidden": 1, "train_limit": 200, "batch": 64}
TIMING = ("seconds", "evaluate_seconds", "examples_per_second", "compile_seconds")
FILES = {"config.json", "metrics.jsonl", "checkpoint.safetensors", "summary.json", "curves.png"}


@pytest.fixture(autouse=True)
def single(monkeypatch, tmp_path):
    """Float32, nothing measured, nothing written outside of the test's own folder, a checkpoint after every epoch."""
    monkeypatch.setenv("PCX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PCX_RESULTS", str(tmp_path / "records.jsonl"))
    monkeypatch.setattr(runs, "choose_mode", lambda *_: ("scan", "measured elsewhere"))
    monkeypatch.setattr(runs, "CHECKPOINT_SECONDS", 0.0)
    with jax.enable_x64(False):
        yield


def config(algorithm: str = "bp_se", **settings: Any) -> Any:
    return configure("digits/mlp", algorithm, **(TINY | settings))


def go(path: Path, settings: Any = None, seeds: tuple[int, ...] = (0, 1), **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Run in this process; the summary and what was reported."""
    said: list[str] = []
    summary = runs.run(settings or config(), DIGITS, list(seeds), path, report=said.append, **options)
    return summary, said


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run; they are JSON to the letter, so that other programs can read them."""

    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (path / "metrics.jsonl").read_text().splitlines()]


def numbers(path: Path) -> list[dict[str, Any]]:
    """The lines without what the clock says."""
    return [{k: v for k, v in line.items() if k not in TIMING} for line in lines(path)]


def arrays(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path / "checkpoint.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Bitwise the same lines and the same final weights."""
    assert numbers(one) == numbers(other)
    first, second = arrays(one), arrays(other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype
        assert array.tobytes() == second[name].tobytes(), name


# --- what a run leaves behind


def test_a_run_leaves_its_files_lines_and_record(tmp_path):
    path = tmp_path / "run"
    seen = []
    summary, said = go(path, on_epoch=lambda epoch, new: seen.append((epoch, [line["seed"] for line in new])))
    assert {file.name for file in path.iterdir()} - {"lock"} == FILES
    assert said == ["measured elsewhere"]
    assert seen == [(1, [0, 1]), (2, [0, 1]), (3, [0, 1])]
    found = lines(path)
    assert [(line["seed"], line["epoch"]) for line in found] == [(s, e) for e in (1, 2, 3) for s in (0, 1)]
    wanted = {"train_loss", "train_top1", "train_top5", "test_loss", "test_top1", "test_top5", "energies", *TIMING}
    for line in found:
        assert wanted <= line.keys()
        assert set(line["energies"]) == {"vodes.0", "vodes.1"}
        assert line["examples_per_second"] == pytest.approx(2 * 192 / line["seconds"])
    assert (path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((path / "config.json").read_text())["config"] == config().as_dict()
    assert json.loads((path / "summary.json").read_text()) == summary

    by_seed = [[line for line in found if line["seed"] == s] for s in (0, 1)]
    final, best = [seed[-1]["test_top1"] for seed in by_seed], [max(line["test_top1"] for line in seed) for seed in by_seed]
    assert summary["final"]["test_top1"]["mean"] == pytest.approx(sum(final) / 2)
    assert summary["final"]["test_top1"]["std"] == pytest.approx(abs(final[0] - final[1]) / 2)
    assert summary["best"]["test_top1"]["mean"] == pytest.approx(sum(best) / 2)
    assert summary["diverged"] == []

    (kept,) = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert kept == summary
    assert kept["digest"] == config().digest()
    assert kept["members"] == 2  # the size of the population is part of a record
    assert kept["quick"] is False
    assert kept["protocol"]
    assert kept["device"]["platform"] == "cpu"
    assert kept["versions"]["jax"] == jax.__version__
    assert re.fullmatch(r"[0-9a-f]{40}", kept["commit"] or "0" * 40)
    assert kept["dirty"] in (True, False, None)


def test_a_finished_folder_returns_at_once_and_is_recorded_once(tmp_path, monkeypatch):
    path = tmp_path / "run"
    first, _ = go(path)
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock"}
    monkeypatch.setattr(runs, "Engine", lambda *_, **__: pytest.fail("built an engine"))
    second, said = go(path)
    assert second == first
    assert said == [f"{path} is finished already"]
    assert before == {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock"}
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 1


def test_a_summary_that_was_lost_is_written_again_and_recorded_once(tmp_path):
    path = tmp_path / "run"
    first, _ = go(path)
    (path / "summary.json").unlink()
    second, _ = go(path)
    assert (second["final"], second["curves"]) == (first["final"], first["curves"])
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 1
    go(tmp_path / "other")  # a training of its own
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2


def test_quick_runs_are_marked(tmp_path):
    summary, _ = go(tmp_path / "run", seeds=(0,), quick=True)
    assert summary["quick"] is True
    assert json.loads((tmp_path / "records.jsonl").read_text())["quick"] is True


# --- killed and started again, in this process


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, after: bool) -> None:
    """Make the n-th call of a function end the run, before or after its work."""
    original, count = getattr(owner, name), [0]

    def wrapper(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == call and not after:
            raise Killed
        result = original(*arguments, **options)
        if count[0] == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, wrapper)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbs."""
    path = tmp_path_factory.mktemp("whole") / "run"
    patch = pytest.MonkeyPatch()
    patch.setattr(runs, "choose_mode", lambda *_: ("scan", ""))
    with jax.enable_x64(False):
        go(path, results=path.parent / "records.jsonl")
    patch.undo()
    return path


MOMENTS = {
    "between a line and its checkpoint": (Folder, "save", 2, False),
    "before the record": (record, "append", 1, False),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_been(tmp_path, whole, moment):
    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, *MOMENTS[moment])
        with pytest.raises(Killed):
            go(path)
    go(path)
    assert_same_run(path, whole)
    assert {file.name for file in path.iterdir()} - {"lock"} == FILES
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", "half", "no metadata"])
def test_a_broken_checkpoint_is_one_sentence(tmp_path, whole, content):
    path = tmp_path / "run"
    path.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (path / name).write_bytes((whole / name).read_bytes())
    good = (whole / "checkpoint.safetensors").read_bytes()
    content = {"half": good[: len(good) // 2], "no metadata": safetensors.numpy.save(arrays(whole))}.get(content, content)
    (path / "checkpoint.safetensors").write_bytes(content)
    with pytest.raises(RunError, match=r"checkpoint\.safetensors cannot be read") as caught:
        go(path)
    assert "\n" not in str(caught.value)
    assert (path / "checkpoint.safetensors").read_bytes() == content  # nothing was thrown away


def test_a_checkpoint_of_another_program_is_refused(tmp_path, whole):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_bytes((whole / "config.json").read_bytes())
    fewer = {name: array for name, array in arrays(whole).items() if "bias" not in name}
    metadata = {"run": json.dumps({"epoch": 1, "training": [True] * 2, "best": [0.0] * 2, "since": [0] * 2})}
    (path / "checkpoint.safetensors").write_bytes(safetensors.numpy.save(fewer, metadata))
    with pytest.raises(RunError, match="another program"):
        go(path)


def partly(path: Path, whole: Path, **changes: bytes | None) -> Path:
    """A copy of a finished run without its summary, with some files changed (None: left out)."""
    path.mkdir()
    contents = {name: (whole / name).read_bytes() for name in ("config.json", "metrics.jsonl", "checkpoint.safetensors")}
    for name, content in (contents | changes).items():
        if content is not None:
            (path / name).write_bytes(content)
    return path


def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path, whole):
    good = (whole / "checkpoint.safetensors").read_bytes()
    for place in (-1, good.index(b"epoch") + len(b'epoch": ') + 1):  # in an array, and the number of the epoch
        content = bytearray(good)
        content[place] ^= 1
        path = partly(tmp_path / f"run{place}", whole, **{"checkpoint.safetensors": bytes(content)})
        with pytest.raises(RunError, match=r"checkpoint\.safetensors is damaged"):
            go(path)


def test_a_checkpoint_without_a_checksum_is_read(tmp_path, whole):
    with safetensors.safe_open(whole / "checkpoint.safetensors", framework="numpy") as file:
        older = {"run": file.metadata()["run"]}
    path = partly(tmp_path / "run", whole, **{"checkpoint.safetensors": safetensors.numpy.save(arrays(whole), older)})
    _, said = go(path)
    assert said == [f"going on with {path} after epoch 3"]


def damaged(file: str, whole: Path, how: str) -> bytes | None:
    good = (whole / file).read_bytes()
    texts = good.splitlines(keepends=True)
    if how == "no mode":
        return json.dumps({k: v for k, v in json.loads(good).items() if k != "mode"}).encode()
    return {
        "missing": None,
        "garbage": b"".join([*texts[:2], b"garbage\n", *texts[2:]]),
        "no line": b"".join(texts[:2] + texts[3:]),
        "twice": b"".join([*texts[:3], *texts[2:]]),
        "last cut": good[:-9],
        "list": b"".join([*texts[:2], b"[1]\n", *texts[2:]]),
        "other": b"".join([*texts[:2], b"{}\n", *texts[2:]]),
        "text for a number": good.replace(b'"test_top1": 0', b'"test_top1": "x", "y": 0', 1),
        "no energies": re.sub(rb'"energies": \{[^}]*\}', b'"energies": null', good, count=1),
        "not text": b"\xff" + good,
        "empty": b"{}",
        "a list": b"[]",
        "half": good[: len(good) // 2],
    }[how]


DAMAGES = [
    ("metrics.jsonl", how)
    for how in (
        *(
            "missing",
            "garbage",
            "no line",
            "twice",
            "last cut",
            "list",
            "other",
            "not text",
            "text for a number",
            "no energies",
        ),
    )
]
DAMAGES += [("config.json", how) for how in ("missing", "no mode", "not text", "empty", "a list")]
DAMAGES += [("summary.json", how) for how in ("empty", "a list", "half", "not text")]


@pytest.mark.parametrize(("file", "how"), DAMAGES, ids=lambda value: value)
def test_a_damaged_file_of_a_run_is_one_sentence_with_its_name(tmp_path, whole, file, how):
    content = damaged(file, whole, how)
    path = partly(tmp_path / "run", whole, **{file: content})
    with pytest.raises(RunError, match=re.escape(str(path / file))) as caught:
        go(path)
    assert "\n" not in str(caught.value)
    assert how != "twice" or "is the second one of seed" in str(caught.value)
    assert content is None or (path / file).read_bytes() == content  # nothing was thrown away
    assert not (tmp_path / "records.jsonl").exists()


def test_lines_of_a_stopped_seed_end_where_it_stopped(tmp_path):
    """They need not reach the checkpoint, but the last one says why."""
    line = dict.fromkeys(NUMBERS, 0.0) | {"seed": 0, "epoch": 1, "energies": {}}
    with Folder(tmp_path) as folder:
        folder.append([line])
        with pytest.raises(RunError, match="lacks lines of seed 0"):
            folder.lines_until(3, {0: False})
        folder.append([line | {"epoch": 2, "stopped": {}}])
        assert len(folder.lines_until(3, {0: False})) == 2
        with pytest.raises(RunError, match="lacks lines of seed 0"):
            folder.lines_until(3, {0: True})


# --- records


@pytest.mark.parametrize("how", ["damaged", "a folder", "below a file"])
def test_records_that_cannot_be_kept_are_found_before_training(tmp_path, monkeypatch, how):
    file = tmp_path / "records.jsonl"
    if how == "a folder":
        file.mkdir()
    else:
        file.write_text("damaged\n")
    if how == "below a file":
        monkeypatch.setenv("PCX_RESULTS", str(file / "mine.jsonl"))
    with pytest.raises(ValueError, match=r"records\.jsonl"):
        go(tmp_path / "run", on_epoch=lambda *_: pytest.fail("trained"))


def test_records_that_must_not_be_written_are_found_before_training(tmp_path, monkeypatch):
    def refuse(**_: Any) -> None:  # the tests may run as root, who may write everywhere
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(record.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"records\.jsonl, the file of records, cannot be written"):
        go(tmp_path / "run", on_epoch=lambda *_: pytest.fail("trained"))


def test_results_do_not_make_the_files_dirty(tmp_path, monkeypatch):
    """Runs append to results/; a change elsewhere counts."""
    for name in ("pcx", "results", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("old")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(record.pcx, "__file__", str(tmp_path / "pcx" / "__init__.py"))
    for name, dirty in [("results", False), ("docs", True)]:
        (tmp_path / name / "file").write_text("new")
        assert record.environment()["dirty"] is dirty


# --- one folder, one run


@pytest.mark.parametrize(
    ("settings", "seeds", "quick", "told"),
    [
        ({"epochs": 4}, (0, 1), False, "epochs is 3 there and 4 here"),
        ({"lr_theta": 0.5}, (0, 1), False, "lr_theta is 0.002 there and 0.5 here"),
        ({"width": 5}, (0, 1), False, "width is 4 there and 5 here"),
        ({}, (0, 1, 2), False, "seeds is [0, 1] there and [0, 1, 2] here"),
        ({}, (0, 1), True, "quick is False there and True here"),
    ],
)
def test_another_run_in_the_same_folder_is_refused_and_the_setting_named(whole, settings, seeds, quick, told):
    with pytest.raises(RunError, match=re.escape(told)):
        go(whole, config(**settings), seeds, quick=quick)


def test_another_algorithm_in_the_same_folder_is_refused(whole):
    with pytest.raises(RunError, match="algorithm is bp_se there and bp_ce here"):
        go(whole, config("bp_ce"))


def test_a_folder_in_use_names_the_process(tmp_path):
    path = tmp_path / "run"
    with Folder(path), pytest.raises(RunError, match=rf"in use by process {os.getpid()}\b"):
        go(path)
    with Folder(path):  # and is free again afterwards
        pass


# --- seeds that stop


def test_a_diverged_seed_is_named_and_the_others_finish(tmp_path, whole):
    """A limit between the largest energies of two seeds stops one of them."""
    engine, peaks = Engine(config(), DIGITS, [0, 1], "host"), []
    population = engine.init()
    carry = (population.states, population.health.alive)
    for number in range(3):
        order = engine._order(engine.keys, np.int32(number))
        for step in range(engine.steps):
            shared = (engine.arrays, np.int32(number), np.int32(step))
            carry, rows = engine._step(carry, engine.floats, engine.keys, order[:, step], *shared)
            peaks.append([(float(row[: len(engine.nodes)].max()), number, step) for row in rows])
    largest = [max(peak[seed] for peak in peaks) for seed in (0, 1)]
    sick = largest.index(max(largest))
    limit = (largest[0][0] + largest[1][0]) / 2
    number, step = next((number, step) for peak in peaks for energy, number, step in [peak[sick]] if energy > limit)

    path = tmp_path / "run"
    summary, said = go(path, config(energy_limit=limit))
    (text,) = [line for line in said if "stopped" in line]
    for part in (f"seed {sick} stopped", "vodes.1", f"epoch {number + 1}", f"step {step}"):
        assert part in text
    assert summary["diverged"] == [sick]
    assert summary["epochs"] == {str(sick): number + 1, str(1 - sick): 3}
    stopped = [line["stopped"] for line in lines(path) if "stopped" in line]
    assert stopped == [{"reason": "diverged", "epoch": number + 1, "step": step, "node": "vodes.1"}]
    healthy = [line for line in numbers(path) if line["seed"] == 1 - sick]
    assert healthy == [line for line in numbers(whole) if line["seed"] == 1 - sick]


@pytest.mark.parametrize(
    ("settings", "step"), [({"lr_h": 1e6}, 0), ({"lr_theta": 1e6, "hidden": 3}, 1)], ids=["first", "infinite"]
)
def test_a_run_whose_seeds_all_diverge_is_in_order(tmp_path, monkeypatch, settings, step):
    """Its lines are JSON (also where a loss is infinite), its summary and its picture are there, and the checkpoint too."""
    monkeypatch.setattr(runs, "CHECKPOINT_SECONDS", 60.0)
    path = tmp_path / "run"
    summary, said = go(path, config("pc_se", **settings))
    assert summary["diverged"] == [0, 1]
    stops = [re.search(rf"seed (\d) stopped: .*at epoch 1, step {step}\b", text) for text in said if "stopped" in text]
    assert [stop and stop[1] for stop in stops] == ["0", "1"]
    assert [(line["seed"], line["epoch"]) for line in lines(path)] == [(0, 1), (1, 1)]
    assert {file.name for file in path.iterdir()} - {"lock"} == FILES


def test_a_run_stops_when_validation_accuracy_gets_no_better(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "CHECKPOINT_SECONDS", 60.0)  # so that only the end of the run is a reason to save
    path = tmp_path / "run"
    summary, said = go(path, config(epochs=6, validation=0.25, patience=2, lr_theta=0.0))  # weights do not move
    assert summary["epochs"] == {"0": 3, "1": 3}  # the first epoch is the best one, and two more bring nothing
    assert said[1:] == [f"seed {s} stopped at epoch 3: no better validation accuracy" for s in (0, 1)]
    assert summary["diverged"] == []
    assert all("validation_top1" in line for line in lines(path))
    assert {file.name for file in path.iterdir()} - {"lock"} == FILES
    assert arrays(path)["states.step"].tolist() == [6, 6]  # the last checkpoint is that of the last epoch


def test_a_resumed_population_keeps_its_shape(tmp_path):
    """Seed 0 has stopped when the run is killed; it stays masked, and the numbers are those of an undisturbed run."""
    settings = config(epochs=5, validation=0.25, patience=1, lr_theta=0.005, batch=32)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    summary, _ = go(whole, settings, (0, 1, 2), results=tmp_path / "other.jsonl")
    first, last = min(summary["epochs"].values()), max(summary["epochs"].values())
    assert first < last, "the settings of this test stop no seed before another"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, Folder, "save", first, True)
        with pytest.raises(Killed):
            go(cut, settings, (0, 1, 2))
    assert arrays(cut)["states.step"].shape == (3,)
    assert arrays(cut)["health.alive"].tolist() == [False, True, True]
    go(cut, settings, (0, 1, 2))
    assert numbers(cut) == numbers(whole)


# --- other processes

DRIVER = """
import os, signal, sys
from pcx.bench import folder, record, runs
runs.CHECKPOINT_SECONDS = 0.0
runs.choose_mode = lambda *_: ("scan", "measured elsewhere")
where, call = os.environ.get("DIE_AT", ":0").split(":")
count = 0
def die_in(owner, name, tag, work):
    original = getattr(owner, name)
    def wrapper(*arguments):
        global count
        if tag == where:
            count += 1
            if count == int(call):
                work(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)
    setattr(owner, name, wrapper)
def half_a_line(self, lines):
    with open(self.path / "metrics.jsonl", "a") as file:
        file.write('{"seed": 0, "epoch": 1, "tra')
die_in(folder.Folder, "append", "line", half_a_line)
die_in(os, "replace", "rename", lambda *_: None)
from pcx.bench.cli import main
main()
"""
COMMAND = ["run", "digits/mlp", "--algorithm", "bp_se", "--seeds", "2", "--out", "run"]
SETTINGS = ["--set", "width=4", "hidden=1", "--set", "train_limit=200", "--set", "batch=64"]


def environment(folder: Path, **extra: str) -> dict[str, str]:
    kept = {"PCX_CACHE": str(folder / "cache"), "XDG_CACHE_HOME": str(folder / "xdg"), "PCX_RESULTS": "records.jsonl"}
    return os.environ | kept | {"PYTHONWARNINGS": "default"} | extra


def start(folder: Path, cwd: Path, *arguments: str, die: str = "") -> subprocess.Popen[str]:
    cwd.mkdir(exist_ok=True)
    extra = {"DIE_AT": die} if die else {}
    command = [sys.executable, "-c", DRIVER, *COMMAND, *SETTINGS, *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment(folder, **extra), **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not write lines"
        time.sleep(0.002)


def test_a_run_killed_again_and_again_equals_one_that_was_not(tmp_path):
    """SIGKILL while a line is half written, before a checkpoint has its name, and before the summary has."""
    code, out, err = finish(start(tmp_path, tmp_path / "whole", "--epochs", "4"))
    assert code == 0, err
    assert "% after the last epoch" in out
    assert "Warning" not in err
    assert len([line for line in err.splitlines() if re.match(r"epoch \d/4  loss ", line)]) == 4  # plain lines
    assert any((tmp_path / "cache" / "compiled").iterdir())  # programs are kept
    for moment, saved in [("line:3", 2), ("rename:3", 3), ("rename:3", 4)]:
        code, _, err = finish(start(tmp_path, tmp_path / "killed", "--epochs", "4", die=moment))
        assert code == -signal.SIGKILL, err
        with safetensors.safe_open(tmp_path / "killed/run/checkpoint.safetensors", framework="numpy") as file:
            assert json.loads(file.metadata()["run"])["epoch"] == saved
    code, _, err = finish(start(tmp_path, tmp_path / "killed", "--epochs", "4"))
    assert code == 0, err
    assert "after epoch 4" in err
    assert_same_run(tmp_path / "whole" / "run", tmp_path / "killed" / "run")
    assert len((tmp_path / "killed/records.jsonl").read_text().splitlines()) == 1


def test_interrupts_locks_and_kills_from_outside(tmp_path):
    """While a process runs a second one is told; Ctrl-C leaves a resumable run and says so; so does a kill."""
    long = ("--epochs", "20000")
    path = tmp_path / "run" / "metrics.jsonl"
    process = start(tmp_path, tmp_path, *long)
    wait_for_lines(path, 6, process)
    code, _, err = finish(start(tmp_path, tmp_path, *long))
    assert code == 2
    assert f"in use by process {process.pid}" in err
    assert "Traceback" not in err
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "Traceback" not in err
    told = re.search(r"stopped after epoch (\d+) of 20000; the same command goes on", err)
    assert told, err
    done = int(told[1])
    assert max(line["epoch"] for line in lines(tmp_path / "run")) == done
    assert not (tmp_path / "run" / "summary.json").exists()
    before = numbers(tmp_path / "run")

    process = start(tmp_path, tmp_path, *long)
    wait_for_lines(path, 2 * done + 6, process)
    process.kill()
    code, _, err = finish(process)
    assert code == -signal.SIGKILL
    assert f"after epoch {done}" in err
    assert numbers_of_whole_lines(path)[: len(before)] == before
    assert not (tmp_path / "records.jsonl").exists()


def numbers_of_whole_lines(path: Path) -> list[dict[str, Any]]:
    whole = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [{k: v for k, v in line.items() if k not in TIMING} for line in whole]


def test_a_file_of_records_that_is_none_is_refused_before_training():
    with pytest.raises(ValueError, match=r"/dev/null, the file of records, cannot be written \(it is not a plain file\)"):
        record.check(Path("/dev/null"))


def test_a_new_file_of_the_package_makes_a_record_dirty(monkeypatch):
    """An algorithm that is not in the commit is not what the commit says."""
    said = {"--untracked-files=no": "", "--untracked-files=all": "?? pcx/algorithms/mine.py"}
    answers = lambda *words: "abc" if words[0] == "rev-parse" else said[words[2]]  # noqa: E731
    monkeypatch.setattr(record, "_git", answers)
    assert record.environment()["dirty"] is True
    said["--untracked-files=all"] = ""
    assert record.environment()["dirty"] is False


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    refused = configure("digits/mlp", "bp_se", batch=100_000)
    with pytest.raises(ValueError, match="a batch of 100000 is larger"):
        runs.run(refused, DIGITS, [0], tmp_path / "refused", report=lambda text: None, results=tmp_path / "records.jsonl")
    assert not (tmp_path / "refused").exists()
    with Folder(tmp_path / "begun") as folder:
        folder.append([{"seed": 0}])
    assert {file.name for file in (tmp_path / "begun").iterdir()} == {"lock", "metrics.jsonl"}
