"""Studies of one setting: their points, records, going on after a stop, diverged points, the figure, refusals."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import go_to_an_empty_place, run_command

import pcx.data
from pcx.bench import runs, studies
from pcx.bench.config import ConfigError
from pcx.bench.configs import accuracy
from pcx.bench.configs.spaces import points as values_of_space
from pcx.bench.configs.spaces import space_of
from pcx.bench.engine import Engine
from pcx.bench.tasks import configure

ROOT = Path(__file__).parent.parent
TINY = {"epochs": 2, "train_limit": 200, "batch": 32, "width": 16, "hidden": 1}


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """An empty place, without a compilation cache."""
    go_to_an_empty_place(monkeypatch, tmp_path)
    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)


def study_of(monkeypatch, setting: str, values: tuple[float, ...], algorithms: tuple[str, ...] = ("pc_se",)) -> None:
    """A study called small of digits/mlp."""
    monkeypatch.setitem(studies.STUDIES, "small", studies.Study(setting, ("digits/mlp",), algorithms, values))


def train(points: list[studies.Point], seeds: list[int], path: Path) -> list[str]:
    """Run the points as one program each; what was said."""
    said: list[str] = []
    studies.run(points, seeds, path, True, said.append)
    return said


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def lines_of(points: list[studies.Point]) -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for point in points:
        found.setdefault((point.config.task, point.config.algorithm), []).append(point.value)
    return found


# --- points


def test_momentum_is_on_the_papers_grid():
    """VGG-7 on CIFAR-100 with and without nudging; every second value of the grid from 0 to 1, 0.95, and the tuned one."""
    found = lines_of(studies.plan("momentum"))
    assert set(found) == {("cifar100/vgg7", algorithm) for algorithm in ("pc_se", "pc_ce", "pn", "nn")}
    tuned = {"pc_se": 0.35, "pc_ce": 0.45, "pn": 0.4, "nn": 0.85}  # hyperparameters.yaml
    grid = values_of_space(space_of("cifar100", "vgg7", "pn", {"momentum_h": 0.0})["momentum_h"])
    assert len(grid) == 21
    for (_, algorithm), values in found.items():
        assert values[0] == tuned[algorithm]
        assert set(values) == {*grid[::2], 0.95, tuned[algorithm]} <= set(grid)
        assert len(values) == len(set(values))


def test_state_learning_rates_span_the_papers_range():
    """VGG-7 and VGG-5 on CIFAR-100, PC-SE and both nudgings; both ends of the range, and the tuned value first."""
    found = lines_of(studies.plan("lr_h"))
    assert set(found) == {(f"cifar100/{m}", a) for m in ("vgg7", "vgg5") for a in ("pc_se", "pn", "nn")}
    for (task, algorithm), values in found.items():
        assert values[0] == accuracy.SETTINGS[task.split("/")[1], "cifar100", algorithm]["lr_h"]
        assert (min(values), max(values)) == (0.01, 0.5)
        assert sorted(values[1:]) == [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]


def test_activations_are_those_of_the_papers_table():
    """Three activations per algorithm of PC, and relu for BP."""
    found = lines_of(studies.plan("activation"))
    assert set(found) == {(f"cifar100/{m}", a) for m in ("vgg5", "vgg7") for a in accuracy.ALGORITHMS}
    for (_, algorithm), values in found.items():
        assert sorted(values) == ["gelu", "hard_tanh", "leaky_relu", *(["relu"] if algorithm.startswith("bp") else [])]


@pytest.mark.parametrize("name", studies.STUDIES)
def test_only_the_setting_differs_from_the_task(name):
    """Everything else is what `pcx run` takes, apart from the held-out tenth and what was asked for."""
    given = {"epochs": 3, "precision": "bf16"}
    for point in studies.plan(name, **given):
        base = configure(point.config.task, point.config.algorithm, validation=0.1, **given)
        setting = studies.STUDIES[name].setting
        mine, own = (config.as_dict()["hyper"] | config.as_dict()["options"] for config in (point.config, base))
        assert mine == own | {setting: point.value}
        assert point.own == (own[setting] == point.value)
        rest = [{k: v for k, v in c.as_dict().items() if k not in ("hyper", "options")} for c in (point.config, base)]
        assert rest[0] == rest[1]


@pytest.mark.parametrize("name", studies.STUDIES)
def test_the_first_points_are_one_of_every_line(name):
    """A study that is stopped early has something to compare: own values of all lines, then the next value of all."""
    points = studies.plan(name)
    count = len({(p.config.task, p.config.algorithm) for p in points})
    assert all(point.own for point in points[:count])
    assert not any(point.own for point in points[count:])
    for start in (0, count):
        assert len({(p.config.task, p.config.algorithm) for p in points[start : start + count]}) == count


def test_points_are_told_apart():
    """No point twice, also with a task named twice; another number of epochs is another point."""
    points = studies.plan("momentum", ["digits/mlp", "digits/mlp"])
    assert len({point.config.digest() for point in points}) == len(points)
    others = studies.plan("momentum", ["digits/mlp"], epochs=3)
    assert not {p.key([0]) for p in points} & {p.key([0]) for p in others}
    assert points[0].key([0]) != points[0].key([0, 1])


# --- training


def test_a_reused_program_gives_what_a_fresh_engine_does(monkeypatch, tmp_path):
    """Two values in one program, with two seeds: the second has the final accuracies of an engine made for it."""
    study_of(monkeypatch, "lr_theta", (1e-4,))
    made = []
    build = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", lambda self, *a, **k: (made.append(a[0]), build(self, *a, **k))[1])
    points = studies.plan("small", **TINY)
    train(points, [0, 1], tmp_path / "studies.jsonl")
    assert len(made) == 1
    assert [point.value for point in points] == [2e-3, 1e-4]
    first, second = (found["final"] for found in lines(tmp_path / "studies.jsonl"))
    engine = Engine(points[1].config, pcx.data.load("digits"), [0, 1])
    *_, (_, _, last) = runs.epochs(engine, engine.init(), 0, runs.Progress(2))
    for split, size in (("test", 359), ("validation", 20)):  # all of test, a tenth of 200
        assert len(engine.splits[split]) == size
        assert second[f"{split}_top1"]["seeds"] == pytest.approx([line[f"{split}_top1"] for line in last], abs=1e-9)
    assert first["test_top1"]["mean"] > second["test_top1"]["mean"]  # the smaller rate has learnt next to nothing


def test_a_diverged_point_is_recorded_and_the_study_goes_on(monkeypatch, tmp_path):
    """A rate at which energies blow up; it is marked, not the best, and not trained again."""
    study_of(monkeypatch, "lr_theta", (1e6, 1e-3))
    points = studies.plan("small", **TINY)
    path = tmp_path / "studies.jsonl"
    said = train(points, [0], path)
    found = {r["value"]: r for r in lines(path)}
    assert {value: r["diverged"] for value, r in found.items()} == {2e-3: [], 1e6: [0], 1e-3: []}
    assert "diverged with seed 0" in said[1]
    assert "diverged" not in said[0] + said[2]
    records = studies.finished(points, [0], path)
    chosen = studies.best(records)
    assert chosen is not None
    assert not chosen["diverged"]
    (row,) = [line for line in studies.as_text(records).splitlines() if " 1e+06 " in line]
    assert row.endswith("diverged")
    assert studies.best([found[1e6]]) is None
    assert train(points, [0], path) == [f"3 of 3 points have a record in {path}"]
    studies.draw(records, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupt_loses_one_point(monkeypatch, tmp_path):
    """What was recorded stays; the next call trains the rest only, and other seeds are other points."""
    study_of(monkeypatch, "lr_h", (0.02, 0.05))
    points, path = studies.plan("small", **TINY), tmp_path / "studies.jsonl"
    epochs, started = runs.epochs, []

    def stopped_in_the_second(engine, *rest):
        started.append(float(engine.floats.lr_h[0]))
        if len(started) == 2:
            raise KeyboardInterrupt
        return epochs(engine, *rest)

    monkeypatch.setattr(runs, "epochs", stopped_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        train(points, [0], path)
    assert [r["value"] for r in lines(path)] == [points[0].value]
    said = train(points, [0], path)
    assert said[0] == f"1 of 3 points have a record in {path}"
    assert said[-1].endswith("(3 of 3, about 0 seconds left)")
    assert np.allclose(started, [points[0].value, 0.02, 0.02, 0.05])
    assert [r["value"] for r in lines(path)] == [p.value for p in points]
    assert studies.finished(points, [0, 1], path) == []


# --- the command


def test_quick_study_from_command_to_figure(monkeypatch):
    """Records and figure lie in runs/, not among the results; the second time, and with --draw, nothing is trained."""
    monkeypatch.setattr(studies, "QUICK_ALGORITHMS", 2)
    code, out, err = run_command("study", "lr_h", "--quick", "--epochs", "1")
    assert code == 0
    found = lines("runs/studies-quick.jsonl")
    assert len(found) == len(err.splitlines()) == 6
    assert not Path("results").exists()
    assert {(r["study"], r["setting"], r["quick"]) for r in found} == {("lr_h", "lr_h", True)}
    assert {(r["config"]["dataset"], r["config"]["model"]) for r in found} == {("digits", "mlp")}
    assert {r["config"]["algorithm"] for r in found} == {"pc_se", "pn"}
    assert all(0.1 < r["final"]["test_top1"]["mean"] <= 1 for r in found)
    assert {"commit", "device", "versions", "curves", "seconds_per_epoch"} <= set(found[0])
    assert Path("runs/study-lr_h-quick.png").read_bytes().startswith(b"\x89PNG")
    assert "runs/study-lr_h-quick.png: 6 of 6 points" in out
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines()[2:-1]]
    assert sorted((r[1], float(r[3])) for r in rows) == sorted(
        (r["config"]["algorithm"], round(100 * r["final"]["test_top1"]["mean"], 2)) for r in found
    )
    assert sum("own" in line for line in out.splitlines()) == 2
    Path("runs/study-lr_h-quick.png").unlink()
    code, again, err = run_command("study", "lr_h", "--quick", "--epochs", "1")
    assert (code, again) == (0, out)
    assert err == "6 of 6 points have a record in runs/studies-quick.jsonl\n"
    assert len(lines("runs/studies-quick.jsonl")) == 6
    Path("runs/study-lr_h-quick.png").unlink()
    code, again, err = run_command("study", "lr_h", "--quick", "--epochs", "1", "--draw")
    assert (code, again, err) == (0, out, "")
    assert Path("runs/study-lr_h-quick.png").exists()


def test_records_of_a_full_study_lie_next_to_those_of_runs(monkeypatch):
    """The default file is studies.jsonl beside $PCX_RESULTS, the figure too; the record says that it is not a quick one."""
    monkeypatch.setenv("PCX_RESULTS", "elsewhere/records.jsonl")
    monkeypatch.setattr(studies, "choose_mode", lambda *_: ("scan", "as one program"))
    study_of(monkeypatch, "lr_h", (configure("digits/mlp", "pc_se").hyper.lr_h,))
    code, out, _ = run_command("study", "small", "--epochs", "1", "--precision", "float32")
    assert code == 0
    assert [(r["quick"], r["config"]["precision"]) for r in lines("elsewhere/studies.jsonl")] == [(False, "float32")]
    assert Path("elsewhere/study-small.png").exists()
    assert "elsewhere/study-small.png: 1 of 1 points, from elsewhere/studies.jsonl" in out


def test_activations_have_places(tmp_path):
    """Names on the axis of a study whose values are texts, and a panel per task."""
    made = [
        {"setting": "activation", "value": value, "own": value == "gelu", "diverged": [], "seeds": [0, 1],
         "config": {"dataset": "digits", "model": model, "algorithm": "pn", "epochs": 1, "precision": "tf32"},
         "final": {f"{split}_top1": {"mean": 0.5, "std": 0.1} for split in ("test", "validation")}}
        for model in ("mlp", "vgg5") for value in ("relu", "gelu", "tanh")
    ]  # fmt: skip
    studies.draw(made, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    text = studies.as_text(made).splitlines()
    assert [line.split()[2] for line in text[2:]] == ["gelu", "relu", "tanh"] * 2
    best = [line.split()[1:3] for line in text[2:] if "best on validation" in line]
    assert best == [["pn", "gelu"], ["pn", "gelu"]]  # all are equal: the first of each line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["momentun"], "there is no study 'momentun'; use momentum."),
        (["momentum", "--seeds", "0"], "--seeds is 0; at least one seed is needed."),
        (["momentum", "--epochs", "0"], "epochs is 0; it is at least 1."),
        (["momentum", "--precision", "fp8"], "precision is 'fp8'; use float32, tf32, f16, bf16, bf16_state, tf32_plain."),
        (["lr_h", "--task", "digits"], "a task is written dataset/model, such as mnist/mlp, but got 'digits'."),
        (
            ["lr_h", "--task", "digit/mlp"],
            "there is no data set 'digit' (one of your own is digit.npz in PCX_DATA); near: digits, iris, mnist.",
        ),
        (
            ["activation", "--draw"],
            "results/studies.jsonl has no record of activation with epochs=10, precision=tf32, seeds=1; leave --draw away.",
        ),
    ],
)
def test_refusals(arguments, message):
    """One sentence, exit code 2, and nothing is written."""
    assert run_command("study", *arguments) == (2, "", f"error: {message}\n")
    assert not Path("results").exists()


def test_absent_data_are_refused():
    code, out, err = run_command("study", "momentum")
    assert (code, out) == (2, "")
    assert err.startswith("error: cifar100 is not here")
    assert len(err.splitlines()) == 1


def test_a_model_without_the_setting_is_refused(monkeypatch):
    study_of(monkeypatch, "momentum_h", (0.0,), ("bp_se",))
    with pytest.raises(ConfigError, match="digits/mlp by bp_se has no setting 'momentum_h'"):
        studies.plan("small")


def test_help_and_cookbook_name_studies_that_exist():
    """Every `pcx study …` of the help and of the cookbook is a study with known options."""
    code, out, _ = run_command("study", "--help")
    assert code == 0
    for option in ("--task", "--seeds", "--epochs", "--precision", "--quick", "--draw", "--out"):
        assert option in out
    commands = re.findall(r"pcx study (\w+)((?: --\w+)*)", out + (ROOT / "docs/cookbook.md").read_text())
    assert {name for name, _ in commands} == set(studies.STUDIES)
    assert {option for _, options in commands for option in options.split()} <= set(re.findall(r"--\w+", out))
