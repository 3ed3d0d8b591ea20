"""The command line: help, refusals in one sentence, settings, data, tables."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import go_to_an_empty_place, run_command

import pcx.algorithms
import pcx.data
from pcx.bench import cli, modes, record, runs, script
from pcx.bench.folder import RunError

COLUMNS = "dataset,model,algorithm,metric,paper,final_mean,final_std,best_mean,seeds"
TIMING_COLUMNS = "dataset,model,algorithm,precision,median,std,ratio,paper,pcx,jpc,song,data,device"


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """An empty place without data, records and caches."""
    go_to_an_empty_place(monkeypatch, tmp_path)


SUMMARY = {
    "final": {"test_top1": {"mean": 0.975, "std": 0.005}},
    "best": {"test_top1": {"mean": 0.981}},
    "seconds_per_epoch": 0.25,
    "diverged": [],
}


@pytest.fixture
def started(monkeypatch):
    """What `pcx run` would run: the arguments of each run, which do not take place."""
    calls: list[dict[str, Any]] = []

    def run(config: Any, data: Any, seeds: list[int], path: Path, **options: Any) -> dict[str, Any]:
        calls.append({"config": config, "data": data.name, "seeds": seeds, "path": path, **options})
        return SUMMARY

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)
    return calls


# --- help


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (["--help"], ["run", "table", "data", "pcx run digits/mlp --algorithm pc_se --epochs 5"]),
        (["run", "--help"], ["pcx run mnist/mlp --algorithm ipc --seeds 5 --out runs/ipc"]),
        (["run", "--help"], ["pcx run mnist/mlp --algorithm pc_se --set T=12 lr_h=0.02 --set batch=64"]),
        (["run", "--help"], [" ".join(pcx.algorithms.names())]),
        (["search", "--help"], [" ".join(pcx.algorithms.names())]),
        (["run", "--help"], ["--algorithm", "--seeds", "--epochs", "--set", "--out", "--quick", "Ctrl-C"]),
        (["bench", "--help"], ["speed", "scaling", "population", "pcx bench speed --rows mlp --random --quick"]),
        (["bench", "speed", "--help"], ["pcx bench speed --precision bf16", "--rows", "--epochs", "--random", "--out"]),
        (["bench", "population", "--help"], ["pcx bench population --random", "--seeds", "--task"]),
        (["bench", "scaling", "--help"], ["pcx bench scaling --part depth", "--figure", "--quick", "--draw"]),
        (["table", "--help"], ["pcx table accuracy --format markdown", "accuracy, generative, memory, sampling or timing"]),
        (["data", "--help"], ["get"]),
    ],
)  # fmt: skip
def test_help_has_examples(command, parts):
    code, out, _ = run_command(*command)
    assert code == 0
    flat = re.sub(r"\s+", " ", out)
    for part in parts:
        assert part in flat


def test_the_version_is_that_of_the_package():
    assert run_command("--version") == (0, f"pcx {pcx.__version__}\n", "")


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["digits", "-a", "pc_se"], ["dataset/model", "'digits'"]),
        (["digits/", "-a", "pc_se"], ["dataset/model"]),
        (["digts/mlp", "-a", "pc_se"], ["data set 'digts'", "near: digits"]),
        (["digits/mpl", "-a", "pc_se"], ["model 'mpl'", "mlp"]),
        (["digits/mlp", "-a", "pc_es"], ["algorithm 'pc_es'", "pc_se", "pc_ce"]),
        (["digits/mlp"], ["--algorithm", "pc_se", "bp_ce"]),
        (["digits/mlp", "-a", "pc_se", "--set", "lrh=0.1"], ["'lrh'", "lr_h"]),
        (["digits/mlp", "-a", "pc_se", "--set", "momentum=0.1"], ["'momentum'", "momentum_h"]),
        (["digits/mlp", "-a", "bp_se", "--set", "T=3"], ["'T'", "bp_se"]),
        (["digits/mlp", "-a", "pc_se", "--set", "T=2.5"], ["T is '2.5'", "whole number"]),
        (["digits/mlp", "-a", "pc_se", "--set", "lr_h=fast"], ["lr_h is 'fast'", "a number"]),
        (["digits/mlp", "-a", "pc_se", "--set", "lr_h=nan"], ["lr_h is nan"]),
        (["digits/mlp", "-a", "pc_se", "--set", "momentum_h=1.5"], ["momentum_h is 1.5", "at most 1"]),
        (["digits/mlp", "-a", "mcpc", "--set", "momentum_h=1.5"], ["momentum_h is 1.5", "at most 1"]),
        (["digits/mlp", "-a", "pc_se", "--set", "lr_h=abc"], ["lr_h is 'abc'; it takes a number, such as 0.011."]),
        (["digits/mlp", "-a", "pc_se", "--set", "T=-1"], ["T is -1; it is a whole number of at least zero."]),
        (["digits/mlp", "-a", "ipc", "--set", "T=0"], ["T is 0; it is a whole number above zero."]),
        (["digits/mlp", "-a", "pc_se", "--set", "lr_h=-1"], ["lr_h is -1.0; it is a finite number of at least zero."]),
        (["iris/mlp", "-a", "pc_se", "--set", "batch=4", "augmentation=crop4_flip"], ["iris has rows of numbers, not images"]),
        (["digits/mlp", "-a", "pc_se", "--out", "/proc/none"], ["/proc/none cannot be the folder of a run", "--out"]),
        (["digits/mlp", "-a", "pn", "--set", "beta=0"], ["beta is 0.0", "above zero"]),
        (["digits/mlp", "-a", "pn", "--set", "clamp=never"], ["clamp is 'never'", "stay"]),
        (["digits/mlp", "-a", "pc_se", "--set", "batch=0"], ["batch is 0", "at least 1"]),
        (["digits/mlp", "-a", "pc_se", "--set", "validation=1"], ["validation is 1.0", "below 1"]),
        (["digits/mlp", "-a", "pc_se", "--set", "patience=3"], ["patience", "validation=0.1"]),
        (["digits/mlp", "-a", "pc_se", "--set", "schedule=linear"], ["schedule is 'linear'", "warm_up_cosine, constant"]),
        (["digits/mlp", "-a", "pc_se", "--set", "population=pmap"], ["population is 'pmap'", "vmap, map"]),
        (
            ["iris/vgg5", "-a", "pc_se"],
            ["vgg5 cannot take samples of shape (4,) of iris: Input to `Conv` needs to have rank 3,"],
        ),
        (["digits/mlp", "-a", "pc_se", "--set", "activation=rleu"], ["'rleu'", "relu"]),
        (["digits/mlp", "-a", "pc_se", "--set", "loss=mse"], ["loss", "'mse'", "se", "ce"]),
        (["digits/mlp", "-a", "pc_se", "--set", "width=0"], ["width is 0"]),
        (["digits/mlp", "-a", "pc_se", "--set", "width=-5"], ["width is -5"]),
        (["digits/mlp", "-a", "pc_se", "--set", "hidden=-1"], ["hidden is -1"]),
        (["digits/mlp", "-a", "pc_se", "--set", "T"], ["name=value", "'T'"]),
        (["digits/mlp", "-a", "pc_se", "--set", "T="], ["name=value", "'T='"]),
        (["digits/mlp", "-a", "pc_se", "--set", "T=3", "--set", "T=4"], ["T twice", "as 3 and as 4"]),
        (["digits/mlp", "-a", "pc_se", "--epochs", "3", "--set", "epochs=4"], ["--epochs is 3", "epochs=4", "one of them"]),
        (["digits/mlp", "-a", "pc_se", "--precision", "bf16", "--set", "precision=tf32"], ["--precision is bf16", "=tf32"]),
        (["digits/mlp", "-a", "pc_se", "--set", "algorithm=pc_ce"], ["algorithm is not a setting", "--algorithm pc_ce"]),
        (["digits/mlp", "-a", "pc_se", "--set", "seeds=2"], ["seeds is not a setting", "--seeds 2"]),
        (["digits/mlp", "-a", "pc_se", "--out", ""], ["--out is empty"]),
        (["digits/mlp", "-a", "pc_se", "--set", "batch=2000"], ["batch of 2000", "1438"]),
        (["digits/mlp", "-a", "pc_se", "--epochs", "0"], ["epochs is 0", "at least 1"]),
        (["digits/mlp", "-a", "pc_se", "--seeds", "0"], ["--seeds is 0"]),
        (["digits/mlp", "-a", "pc_se", "--precision", "fp8"], ["precision is 'fp8'", "float32, tf32, f16, bf16"]),
        (["generative"], ["generative", "accuracy"]),
        (["timing"], ["timing", "pcx bench speed"]),
        (["accuracy", "-a", "pc_es"], ["'pc_es'", "near: pc_se, pc_ce"]),
        (["accuracy", "-a", "mcpc"], ["accuracy has no cell by 'mcpc'"]),
        (["accuracy", "--out", "here"], ["--out", "accuracy", "runs/"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith(("dig", "gen", "tim", "acc")) else "",
)
def test_bad_input_is_one_sentence_and_exit_code_two(monkeypatch, arguments, parts):
    original = runs.run

    def run(*arguments: Any, **options: Any) -> Any:
        """Only what must look at data may get here; nothing is trained."""
        options["on_epoch"] = lambda *_: pytest.fail("trained")
        monkeypatch.setattr("pcx.bench.runs.choose_mode", lambda *_: ("scan", ""))
        return original(*arguments, **options)

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)
    code, out, err = run_command("run", *arguments)
    assert code == 2
    assert out == ""
    told = [line for line in err.splitlines() if line.strip()]
    assert len(told) == 1
    assert told[0].startswith("error: ")
    for part in parts:
        assert part in told[0]


def test_nothing_is_left_behind_by_a_refusal(tmp_path):
    assert run_command("run", "digits/mlp", "-a", "pc_se", "--set", "T=x")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)
    (tmp_path / "taken").write_text("mine")
    code, _, err = run_command("run", "digits/mlp", "-a", "bp_se", "--out", "taken")
    assert code == 2
    assert err.startswith("error: ")
    assert err == "error: taken is a file; --out names a folder.\n"
    assert (tmp_path / "taken").read_text() == "mine"


def test_an_unreadable_run_folder_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"config": {"da')
    code, _, err = run_command("run", "digits/mlp", "-a", "bp_se", "--out", "run")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "config.json" in err


# --- settings that reach the run


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "T=3", "--set", "lr_h=0.5", "--set", "width=16"],
        ["--set", "T=3", "lr_h=0.5", "width=16"],
        ["--set", "T=3 lr_h=0.5 width=16"],
        ["--set", "T=3", "lr_h=0.5", "--set", "width=16"],
    ],
    ids=["repeated", "several", "one text", "mixed"],
)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_settings_may_be_written_in_several_ways(started, arguments, first):
    rest = ["--algorithm", "pc_se", "--seeds", "2", "--out", "here"]
    assert run_command("run", "digits/mlp", *(arguments + rest if first else rest + arguments))[0] == 0
    (call,) = started
    assert (call["config"].hyper.T, call["config"].hyper.lr_h, call["config"].options.width) == (3, 0.5, 16)
    assert (call["seeds"], call["path"], call["quick"], call["data"]) == ([0, 1], Path("here"), False, "digits")


def test_options_reach_the_config_and_a_result_is_printed(started):
    code, out, _ = run_command(
        "run", "digits/mlp", "-a", "ipc", "--epochs", "7", "--precision", "bf16", "--set", "population=map"
    )
    (call,) = started
    config = call["config"]
    assert (config.algorithm, config.epochs, config.precision, config.population) == ("ipc", 7, "bf16", "map")
    assert code == 0
    assert "97.50 %" in out
    assert "98.10 %" in out
    assert str(call["path"]) in out


def test_quick_is_two_epochs_on_two_thousand_images_and_marked(started):
    run_command("run", "digits/mlp", "-a", "bp_se", "--quick")
    run_command("run", "digits/mlp", "-a", "bp_se", "--quick", "--epochs", "3", "--set", "train_limit=100")
    run_command("run", "digits/mlp", "-a", "bp_se")
    first, second, third = started
    assert (first["quick"], first["config"].epochs, first["config"].train_limit) == (True, 2, 2000)
    assert (second["quick"], second["config"].epochs, second["config"].train_limit) == (True, 3, 100)
    assert third["quick"] is False
    assert len({first["path"], second["path"], third["path"]}) == 3  # each in a folder of its own


def test_a_setting_may_be_given_twice_alike(started):
    arguments = ["--epochs", "3", "--set", "epochs=3", "--set", "T=4", "--set", "T=4"]
    assert run_command("run", "digits/mlp", "-a", "pc_se", *arguments)[0] == 0
    assert (started[0]["config"].epochs, started[0]["config"].hyper.T) == (3, 4)


def test_every_seed_diverged_is_a_failure(monkeypatch):
    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)
    monkeypatch.setattr(runs, "run", lambda *_, **__: SUMMARY | {"diverged": [0, 1]})
    code, _, err = run_command("run", "digits/mlp", "-a", "bp_se", "--seeds", "2")
    assert code == 2
    assert "every seed diverged" in err
    assert "above energy_limit=1e+08;" in err
    code, _, err = run_command("run", "digits/mlp", "-a", "bp_se", "--seeds", "2", "--set", "energy_limit=0")
    assert "above energy_limit=0;" in err
    assert run_command("run", "digits/mlp", "-a", "bp_se", "--seeds", "3")[0] == 0  # the third went on


def test_an_interrupt_before_the_first_epoch_says_what_to_do(monkeypatch, tmp_path):
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)
    monkeypatch.setattr(runs, "run", interrupted)
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command("run", "digits/mlp", "-a", "bp_se", "--out", "here")
    assert (code, err) == (130, "stopped at once; there was no checkpoint yet, so it begins anew\n")
    Path("here").mkdir()
    Path("here/checkpoint.safetensors").touch()
    code, _, err = run_command("run", "digits/mlp", "-a", "bp_se", "--out", "here")
    assert (code, err) == (130, "stopped at once; the same command goes on from the last checkpoint in here\n")


def test_a_run_error_is_one_sentence(monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise RunError("here is in use by process 7; wait for it, or choose another --out.")

    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)
    monkeypatch.setattr(runs, "run", refuse)
    code, _, err = run_command("run", "digits/mlp", "-a", "bp_se")
    assert (code, err) == (2, "error: here is in use by process 7; wait for it, or choose another --out.\n")


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = [{"train_loss": 0.5, "test_top1": 0.25, "seconds": 1.5}, {"train_loss": 1.5, "test_top1": 0.75, "seconds": 1.5}]
    shown = {}
    monkeypatch.setenv("TERM", "xterm")
    for kind in (Terminal, io.StringIO):
        stream = kind()
        monkeypatch.setattr("sys.stderr", stream)
        with cli.Bar(4, "digits/mlp pc_se") as bar:
            bar.say("a sentence")
            bar.epoch(3, lines)
        shown[kind] = stream.getvalue()
    assert shown[io.StringIO] == "a sentence\nepoch 3/4  loss 1.0000  test 50.00 %  1.50 s\n"
    for part in ("a sentence", "digits/mlp pc_se", "3/4", "loss 1.0000  test 50.00 %", "\x1b["):
        assert part in shown[Terminal]


# --- data


def test_missing_data_is_one_sentence_with_the_remedy(tmp_path):
    code, out, err = run_command("run", "mnist/mlp", "-a", "pc_se", "--epochs", "1")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for part in ("mnist is not here", str(tmp_path / "pcx_data" / "mnist"), "pcx data get mnist"):
        assert part in err


def process(*arguments: str) -> tuple[int, str, str]:
    """A command in a process of its own: typer's context is not of the type that its own annotation names."""
    done = subprocess.run([sys.executable, "-m", "pcx.bench.cli", *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_data_lists_what_is_here_and_where_it_looked(tmp_path):
    code, out, err = process("data")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert re.search(r"here .*train 1,438, test 359", rows["digits"])
    assert "not here" not in rows["digits"]
    assert "not here" in rows["mnist"]
    assert set(pcx.data.names()) <= rows.keys()
    assert str(tmp_path / "pcx_data") in rows["looked"]


def test_data_that_cannot_be_fetched_is_one_sentence():
    code, out, err = process("data", "get", "mnits")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "; near: mnist, " in err


def test_damaged_data_are_not_called_absent(tmp_path):
    """An archive that is cut off is damaged; one with arrays that do not fit cannot be used."""
    (tmp_path / "pcx_data").mkdir()
    images, labels = np.zeros((4, 2, 2), np.uint8), np.arange(4)
    arrays = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    np.savez(tmp_path / "pcx_data" / "whole.npz", **arrays)
    (tmp_path / "pcx_data" / "torn.npz").write_bytes((tmp_path / "pcx_data" / "whole.npz").read_bytes()[:-40])
    np.savez(tmp_path / "pcx_data" / "odd.npz", **arrays | {"train_labels": labels / 2})
    code, out, err = process("data")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert re.match(r"whole +here ", rows["whole"])
    assert re.match(r"torn +damaged .*torn\.npz", rows["torn"])
    assert re.match(r"odd +unusable .*odd\.npz: train_labels has dtype float64", rows["odd"])
    assert re.match(r"mnist +not here ", rows["mnist"])


# --- tables


def made(algorithm: str = "pc_se", *, final: list[float], best: list[float], time: str = "2025-01-01T00:00:00Z",
         quick: bool = False, dataset: str = "mnist", model: str = "mlp", **config: Any) -> dict[str, Any]:  # fmt: skip
    """A record as a run writes it, with means and deviations worked out here."""

    def stats(values: list[float]) -> dict[str, Any]:
        mean = sum(values) / len(values)
        return {"mean": mean, "std": (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5, "seeds": values}

    plain = {"dataset": dataset, "model": model, "algorithm": algorithm, "train_limit": 0, "validation": 0.0}
    return {
        "config": plain | config,
        "seeds": list(range(len(final))),
        "members": len(final),
        "quick": quick,
        "time": time,
        "seconds_per_epoch": 1.25,
        "final": {"test_top1": stats(final), "test_top5": stats([1.0] * len(final))},
        "best": {"test_top1": stats(best), "test_top5": stats([1.0] * len(final))},
    }


def timed(median: float, algorithm: str = "pc_se", *, time: str = "2025-01-01T00:00:00Z", device: str = "H200",
          **changes: Any) -> dict[str, Any]:  # fmt: skip
    """A record as `pcx bench speed` writes it, with what a table needs."""
    return {
        "what": "speed",
        "dataset": "fashionmnist",
        "model": "mlp",
        "algorithm": algorithm,
        "precision": "tf32",
        "data": "random",
        "seconds": {"median": median, "mean": median, "std": 0.125},
        "quick": False,
        "device": {"platform": "cpu" if device == "cpu" else "gpu", "kind": device},
        "time": time,
    } | changes


def write(*records: Any, path: str = "results/records.jsonl") -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def table(name: str = "accuracy", *arguments: str) -> list[dict[str, str]]:
    code, out, err = run_command("table", name, "--format", "csv", *arguments)
    assert code == 0, err
    assert out.splitlines()[0] == (TIMING_COLUMNS if name == "timing" else COLUMNS)
    return list(csv.DictReader(io.StringIO(out)))


def cell(rows: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def test_the_csv_has_one_row_per_metric_and_empty_cells_where_not_run():
    rows = table()
    assert len(rows) == (14 + 8) * 8  # 14 groups with top-1, 8 of them with top-5, by 8 algorithms
    assert all(row["final_mean"] == row["final_std"] == row["best_mean"] == row["seeds"] == "" for row in rows)
    assert cell(rows, dataset="mnist", algorithm="ipc")["paper"] == "98.45"
    both = [row["metric"] for row in rows if (row["dataset"], row["model"], row["algorithm"]) == ("cifar100", "vgg5", "cn")]
    assert both == ["top1", "top5"]


def test_numbers_come_from_the_records():
    write(made(final=[0.97, 0.98, 0.99], best=[0.975, 0.995, 0.991]))
    row = cell(table(), dataset="mnist", model="mlp", algorithm="pc_se", metric="top1")
    assert float(row["paper"]) == 98.26
    assert float(row["final_mean"]) == pytest.approx(98)
    assert float(row["final_std"]) == pytest.approx(0.816497, rel=1e-4)
    assert float(row["best_mean"]) == pytest.approx(98.7)
    assert row["seeds"] == "3"
    assert sum(row["final_mean"] != "" for row in table()) == 1  # no other cell has anything


def test_both_metrics_of_a_set_are_filled():
    write(made("cn", final=[0.6], best=[0.7], dataset="cifar100", model="vgg5"))
    rows = table()
    assert cell(rows, dataset="cifar100", model="vgg5", algorithm="cn", metric="top1")["final_mean"] == "60"
    assert cell(rows, dataset="cifar100", model="vgg5", algorithm="cn", metric="top5")["final_mean"] == "100"


UNFIT = [{"quick": True}, {"train_limit": 2000}, {"validation": 0.1}, {"algorithm": "pc_ce"}, {"dataset": "kmnist"}]


@pytest.mark.parametrize("unfit", [*UNFIT, {"epochs": 1}, {"batch": 64}])
def test_some_records_do_not_enter_a_table(unfit):
    write(made(**({"final": [0.5] * 9, "best": [0.5] * 9} | unfit)))
    assert cell(table(), dataset="mnist", model="mlp", algorithm="pc_se")["final_mean"] == ""
    write(made(final=[0.9], best=[0.9]), made(**({"final": [0.5] * 9, "best": [0.5] * 9} | unfit)))
    assert cell(table(), dataset="mnist", model="mlp", algorithm="pc_se")["final_mean"] == "90"


def test_the_most_seeds_win_and_then_the_newest():
    old = made(final=[0.91] * 5, best=[0.91] * 5, time="2025-01-01T00:00:00Z")
    new = made(final=[0.92] * 5, best=[0.92] * 5, time="2025-02-01T00:00:00Z")
    few = made(final=[0.93] * 2, best=[0.93] * 2, time="2025-03-01T00:00:00Z")
    for order in ((old, new, few), (few, new, old), (new, few, old)):
        write(*order)
        row = cell(table(), dataset="mnist", model="mlp", algorithm="pc_se")
        assert (row["final_mean"], row["seeds"]) == ("92", "5")


def test_the_file_of_records_can_be_chosen(monkeypatch):
    write(made(final=[0.9], best=[0.9]), path="mine/file.jsonl")
    assert cell(table("accuracy", "--records", "mine/file.jsonl"), dataset="mnist", algorithm="pc_se")["final_mean"] == "90"
    assert cell(table(), dataset="mnist", algorithm="pc_se")["final_mean"] == ""
    monkeypatch.setenv("PCX_RESULTS", "mine/file.jsonl")
    assert cell(table(), dataset="mnist", algorithm="pc_se")["final_mean"] == "90"


def test_a_file_of_records_that_is_not_there_yet_is_one_line(monkeypatch):
    """Not an error, also where it was named by the environment; tables of the paper's figures alone need no records."""
    for name, file in (("accuracy", "records.jsonl"), ("timing", "speed.jsonl")):
        for folder in ("results", "mine"):
            if folder == "mine":
                monkeypatch.setenv("PCX_RESULTS", "mine/records.jsonl")
            code, out, err = run_command("table", name)
            assert (code, err) == (0, f"there are no records in {folder}/{file} yet\n")
            assert "not run" in out
        monkeypatch.delenv("PCX_RESULTS")
    assert run_command("table", "sampling")[2] == ""
    write(made(final=[0.9], best=[0.9]))
    assert run_command("table", "accuracy")[2] == ""


def test_quick_timings_that_are_left_out_are_counted():
    """Those of cells that nothing else was timed of."""
    write(timed(0.5), timed(0.4, quick=True), timed(0.3, "bp_se", quick=True), path="results/speed.jsonl")
    code, out, err = run_command("table", "timing", "-f", "csv")
    assert (code, err) == (0, "1 quick record is not shown\n")
    assert len(out.splitlines()) == 1 + 8
    population = timed(0.2, quick=True, what="population")
    write(timed(0.4, quick=True), timed(0.3, "bp_se", quick=True), population, path="results/speed.jsonl")
    assert run_command("table", "timing")[2] == "2 quick records are not shown\n"


def test_text_and_markdown_say_the_same():
    write(made(final=[0.97, 0.98, 0.99], best=[0.975, 0.995, 0.991]))
    code, text, _ = run_command("table", "accuracy")
    assert code == 0
    code, marked, _ = run_command("table", "accuracy", "--format", "markdown")
    assert code == 0
    cells = ["mnist", "mlp", "pc_se", "top1", "98.26", "98.00 ± 0.82", "98.70", "3"]
    (plain,) = [line for line in text.splitlines() if re.match(r"mnist +mlp +pc_se ", line)]
    assert re.split(r" {2,}", plain) == cells
    assert "| " + " | ".join(cells) + " |" in marked.splitlines()
    widths = {line.count("|") for line in marked.splitlines()}
    assert widths == {9}
    assert re.fullmatch(r"\|( --- \|){8}", marked.splitlines()[1])
    (other,) = [line for line in text.splitlines() if re.match(r"mnist +mlp +bp_se ", line)]
    assert re.split(r" {2,}", other) == ["mnist", "mlp", "bp_se", "top1", "98.29", "not run"]


@pytest.mark.parametrize(
    ("name", "count", "wanted", "paper"),
    [
        ("generative", 12, {"dataset": "celeba", "algorithm": "ipc"}, "1.3"),
        ("memory", 18, {"model": "memory2048", "metric": "mse_1e-4_noise_250"}, "8.9"),
        ("sampling", 4, {"algorithm": "mcpc", "metric": "fid"}, "2.53"),
        ("timing", 8, {"dataset": "tinyimagenet", "algorithm": "pc_se"}, "54.6"),
    ],
)
def test_the_other_tables(name, count, wanted, paper):
    rows = table(name)
    assert len(rows) == count
    assert cell(rows, **wanted)["paper"] == paper
    for format_ in ("text", "markdown"):
        assert run_command("table", name, "-f", format_)[0] == 0


def test_timing_is_that_of_the_speed_file():
    """Runs do not enter the timing table, and what was timed does not disturb the others."""
    write(made(final=[0.9], best=[0.9], dataset="fashionmnist"))
    assert cell(table("timing"), dataset="fashionmnist", algorithm="pc_se")["median"] == ""
    write(timed(0.5), path="results/speed.jsonl")
    row = cell(table("timing"), dataset="fashionmnist", algorithm="pc_se")
    assert (row["paper"], row["median"], row["pcx"], row["device"]) == ("1.94", "0.5", "0.577", "H200")
    assert cell(table(), dataset="fashionmnist", model="mlp", algorithm="pc_se")["final_mean"] == "90"


PLAIN = made(final=[0.9], best=[0.9])
NO_RECORDS = ['{"config": {"da', "{}", "3", '{"quick": false}', PLAIN | {"config": {}}, PLAIN | {"config": None}]
NO_RECORDS += [PLAIN | {"seeds": 3}, PLAIN | {"seeds": None}]
NO_RECORDS += [PLAIN | {"config": PLAIN["config"] | {name: None}} for name in ("hyper", "options")]
NO_RECORDS += [PLAIN | {"final": {}}, PLAIN | {"best": None}, PLAIN | {"final": {"test_top1": {"mean": None, "std": 0.0}}}]


@pytest.mark.parametrize("command", [["table"], ["run"]], ids=lambda command: command[0])
@pytest.mark.parametrize("broken", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_a_line_that_is_not_a_record_is_named(broken, command):
    write(PLAIN, broken)
    code, out, err = run_command(*command, "accuracy")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: line 2 of results/records\.jsonl is not a record; .*\n", err)


@pytest.mark.parametrize("name", ["accuracy", "timing"])
def test_a_file_that_holds_no_records_is_named(name):
    """A folder, no file at all, or one that is not text."""
    Path("folder").mkdir()
    Path("picture").write_bytes(b"\x89PNG\xff\n")
    for file, told in [("folder", "folder is a folder"), ("none", "there is no file none"), ("picture", "line 1 of picture")]:
        code, out, err = run_command("table", name, "--records", file)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {told}")
        assert len(err.splitlines()) == 1


def test_every_precision_is_a_row_with_its_ratio_to_bp():
    write(timed(0.6), timed(0.2, "bp_se"), timed(0.3, precision="bf16"), path="results/speed.jsonl")
    rows = table("timing")
    assert len(rows) == 9  # one more than without bf16
    assert cell(rows, algorithm="pc_se", precision="tf32")["ratio"] == "3"
    assert cell(rows, algorithm="pc_se", precision="bf16")["ratio"] == ""  # no BP in this precision
    backpropagation = cell(rows, algorithm="bp_se", precision="tf32")
    assert [backpropagation[name] for name in ("ratio", "paper", "pcx", "jpc", "song")] == ["", "1.82", "0.45", "", ""]
    code, text, _ = run_command("table", "timing")
    assert code == 0
    (line,) = [line for line in text.splitlines() if re.match(r"fashionmnist +mlp +pc_se +tf32", line)]
    wanted = ["fashionmnist", "mlp", "pc_se", "tf32", "0.600 ± 0.125"]
    wanted += ["3.00", "1.94", "0.577", "0.603", "5.65", "random", "H200"]
    assert re.split(r" {2,}", line) == wanted
    assert "| " + " | ".join(wanted) + " |" in run_command("table", "timing", "-f", "markdown")[1].splitlines()


def test_the_newest_of_an_accelerator_is_shown():
    old, new = timed(0.5), timed(0.25, time="2025-02-01T00:00:00Z")
    cpu = timed(9.0, time="2025-03-01T00:00:00Z", device="cpu")
    quick = timed(0.01, time="2025-04-01T00:00:00Z", quick=True)
    many = timed(0.01, time="2025-04-01T00:00:00Z", what="population")
    for order in ((old, new, cpu, quick, many), (many, quick, cpu, new, old)):
        write(*order, path="results/speed.jsonl")
        row = cell(table("timing"), dataset="fashionmnist", algorithm="pc_se")
        assert (row["median"], row["device"]) == ("0.25", "H200")
    write(cpu, quick, timed(3.0, "bp_se"), path="results/speed.jsonl")
    row = cell(table("timing"), dataset="fashionmnist", algorithm="pc_se")
    assert (row["median"], row["device"], row["ratio"]) == ("9", "cpu", "")  # BP was timed elsewhere


TIMES = ({}, {"median": 0.5}, {"median": "fast", "std": 0.1}, 3)


@pytest.mark.parametrize(
    "broken",
    [
        *('{"what": "sp', "{}", "3", '{"what": "speed", "quick": false}'),
        *(timed(0.5, seconds=seconds) for seconds in TIMES),
        timed(0.5) | {"device": "H200"},
    ],
    ids=str,
)
def test_a_line_that_is_not_a_timing_is_named(broken):
    write(timed(0.5), broken, path="results/speed.jsonl")
    code, out, err = run_command("table", "timing")
    assert (code, out) == (2, "")
    assert re.match(r"error: line 2 of results/speed\.jsonl is not a record", err)


@pytest.mark.parametrize("command", ["speed", "population", "scaling"])
def test_measurements_are_not_added_to_a_file_of_something_else(tmp_path, command):
    (tmp_path / "README.md").write_text("# Mine\n")
    code, _, err = run_command("bench", command, "--quick", "--out", "README.md")
    assert (code, err) == (2, "error: line 1 of README.md is not a record; remove it or restore the file.\n")
    assert run_command("bench", command, "--out", "")[2].startswith("error: --out is empty")
    assert (tmp_path / "README.md").read_text() == "# Mine\n"


def test_unknown_tables_and_formats_are_refused():
    code, _, err = run_command("table", "acuracy")
    assert code == 2
    for name in ("accuracy", "generative", "memory", "sampling", "timing"):
        assert name in err
    code, _, err = run_command("table", "accuracy", "--format", "html")
    assert code == 2
    assert "text, markdown, csv" in err


@pytest.fixture
def only_mnist_is_here(monkeypatch):
    status, digits = pcx.data.status, pcx.data.load("digits")
    here = [s for s in status() if s.name == "digits"]
    fake = [type(s)("mnist", True, {"train": 60000, "test": 10000}, 1, "", None, ()) for s in here]
    monkeypatch.setattr(pcx.data, "status", lambda: fake)
    monkeypatch.setattr(pcx.data, "load", lambda name: digits)


@pytest.mark.usefixtures("only_mnist_is_here")
def test_a_whole_table_runs_what_can_run_here(started):
    """Only cells without a record, of models and data that are here."""
    write(made(final=[0.9], best=[0.9]), made("bp_se", final=[0.9], best=[0.9]))
    code, out, _ = run_command("run", "accuracy", "--epochs", "1")
    assert code == 0
    assert "2 of 112 cells have a record; 6 can run here" in out
    assert {call["config"].task for call in started} == {"mnist/mlp"}
    assert started[0]["config"].algorithm == "bp_ce"  # the cheapest first
    assert {call["config"].algorithm for call in started} == {"pc_ce", "pn", "nn", "cn", "ipc", "bp_ce"}


@pytest.mark.usefixtures("only_mnist_is_here")
def test_a_cell_that_fails_does_not_stop_the_others():
    """The energies of every algorithm are above a limit of zero."""
    code, out, err = run_command("run", "accuracy", "--quick", "--set", "energy_limit=0", "width=8", "batch=32")
    assert code == 2
    assert "0 of 112 cells have a record; 8 can run here" in out
    assert err.count("every seed diverged") == 8
    assert err.splitlines()[-1].startswith("error: 8 of 8 cells failed: mnist/mlp by bp_ce, mnist/mlp by bp_se,")


@pytest.mark.usefixtures("only_mnist_is_here")
def test_a_table_can_be_run_by_one_algorithm(started):
    code, out, _ = run_command("run", "accuracy", "-a", "pc_se", "--epochs", "1")
    assert code == 0
    assert "0 of 14 cells have a record; 1 can run here" in out
    assert [(call["config"].task, call["config"].algorithm) for call in started] == [("mnist/mlp", "pc_se")]


# --- caches and progress


def test_time_left_is_in_seconds_below_a_minute():
    assert [record.time_left(s) for s in (0.2, 42.4, 59.6, 150.0)] == [
        "about 0 seconds left",
        "about 42 seconds left",
        "about 1.0 minutes left",
        "about 2.5 minutes left",
    ]


def test_a_cache_that_cannot_be_written(monkeypatch):
    """One that was asked for is refused before anything is measured; without the platform's own nothing is kept."""
    brief = ("run", "digits/mlp", "-a", "bp_se", "--epochs", "1", "--set", "width=8", "train_limit=200")
    monkeypatch.setenv("PCX_CACHE", "/dev/null/x")
    code, _, err = run_command(*brief)
    reason = "which cannot be written (Not a directory); set another folder."
    assert (code, err) == (2, f"error: PCX_CACHE is /dev/null/x, {reason}\n")
    monkeypatch.delenv("PCX_CACHE")
    monkeypatch.setattr(modes, "platform_cache", lambda: Path("/dev/null/x"))
    code, _, err = run_command(*brief)
    assert code == 0, err


def test_without_a_terminal_a_note_is_a_line_every_ten_seconds(capsys):
    bar = cli.Bar(3, "title")
    with bar:
        bar.note("first")
        bar.said -= 11
        bar.note("second")
        bar.note("third")
    assert capsys.readouterr().err == "second\n"


# --- what is not installed


@pytest.mark.parametrize(("package", "code"), [("typer", 2), ("rich", 2), ("numbers", 1)])
def test_packages_that_are_not_installed_are_one_sentence(package, code):
    """Those of the extra; of others there is no such thing to say."""
    program = f"""
import sys
{"" if package == "typer" else "import pcx.bench.cli; pcx.bench.cli.app = lambda: __import__(" + repr(package) + ")"}
sys.modules[{package!r}] = None
from pcx.bench import script
script.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    if code == 2:
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith(f"error: {package} is not installed")
        assert "pip install '.[bench]'" in done.stderr
    else:
        assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("content", "code", "told"),
    [
        ("VARIANTS = {'torn': 1", 2, "error: {file} cannot be read: '{{' was never closed, in line 1; mend it or remove it.\n"),
        ("VARIANTS = {'mine': 1}", 2, "error: {file} has no function make; "),
        ("VARIANTS, make = {'pc_se': 1}, print", 2, "error: two algorithms are called 'pc_se': in {file} and in "),
        ("raise KeyboardInterrupt", 130, "stopped\n"),
    ],
)
def test_a_command_line_that_cannot_be_loaded_is_one_sentence(tmp_path, content, code, told):
    """A broken file among the algorithms is named; so early a Ctrl-C is no traceback either."""
    (tmp_path / "mine.py").write_text(content)
    program = f"""
import pcx.algorithms
pcx.algorithms.__path__.append({str(tmp_path)!r})
from pcx.bench import script
script.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.startswith(told.format(file=tmp_path / "mine.py"))
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupt_while_jax_is_imported_is_one_line(tmp_path):
    (tmp_path / "jax.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n")
    (tmp_path / "pcx").write_text("from pcx.bench.script import main\nmain()\n")
    path = os.pathsep.join([str(tmp_path), str(Path(pcx.__file__).parent.parent)])
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", heard, sys.executable, str(tmp_path / "pcx")]  # also where the tests ignore interrupts
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


@pytest.mark.parametrize("how", ["raise KeyboardInterrupt", "raise SystemExit(130)"])
def test_the_process_ends_at_once_after_an_interrupt(tmp_path, how):
    """What still runs is not waited for, nor taken apart under its feet; what was said is not lost."""
    program = f"""
import atexit, sys, threading, time, types
def run():
    print("said", end="")
    {how}
sys.modules["pcx.bench.cli"] = types.SimpleNamespace(main=run)
atexit.register(print, "taken apart")
threading.Thread(target=time.sleep, args=(600,)).start()
from pcx.bench import script
script.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "said")


def test_the_command_is_the_one_that_says_so():
    import tomllib

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["pcx"] == "pcx.bench.script:main"
    names = {re.split("[><=]", package)[0] for package in project["optional-dependencies"]["bench"]}
    modules = {"pillow": "PIL", "scikit-learn": "sklearn"}
    assert {modules.get(name, name) for name in names} == script.EXTRA
