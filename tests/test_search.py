"""Searches: what is searched, scores, pruning, resuming, populations, and the command."""

import csv
import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from helpers import go_to_an_empty_place, run_command
from optuna.trial import TrialState

import pcx.algorithms
import pcx.data
from pcx.bench import runs, search, search_report
from pcx.bench.config import ConfigError, from_dict, parse_pairs
from pcx.bench.configs import accuracy
from pcx.bench.configs.spaces import extended, points, space_of
from pcx.bench.engine import Engine
from pcx.bench.tasks import configure

TINY = {"epochs": 2, "train_limit": 200, "width": 16, "hidden": 1, "batch": 32, "T": 2, "activation": "gelu"}
RATES = {"lr_theta": ("log", 1e-5, 1e-1)}


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """An empty place, one way to run an epoch, and no test split: whoever evaluates on it fails."""
    go_to_an_empty_place(monkeypatch, tmp_path)
    monkeypatch.setattr(search, "choose_mode", lambda *_: ("scan", "as one program"))
    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)
    evaluate = Engine.evaluate

    def checked(engine: Any, population: Any, split: str) -> Any:
        assert split != "test", "a search looked at the test split"
        return evaluate(engine, population, split)

    monkeypatch.setattr(Engine, "evaluate", checked)


@pytest.fixture(scope="module")
def digits():
    return pcx.data.load("digits")


def plan_of(space=None, given=(), algorithm="pc_se", **options):
    return search.make_plan("digits/mlp", algorithm, TINY | dict(given), space=RATES if space is None else space, **options)


def states(study):
    return [trial.state for trial in study.trials]


# --- spaces


@pytest.mark.parametrize("algorithm", pcx.algorithms.names())
@pytest.mark.parametrize(
    "task", ["mnist/mlp", "cifar10/vgg5", "cifar100/vgg7", "cifar10/vgg9", "cifar10/resnet18", "digits/mlp"]
)
def test_spaces_name_settings_of_the_task(task, algorithm):
    """Every space is of a known kind, and each of its points is a config."""
    plan = search.make_plan(task, algorithm, {})
    assert {"activation", "lr_theta", "weight_decay"} <= set(plan.space)
    assert ("T" in plan.space) == (algorithm not in ("bp_se", "bp_ce", "mcpc"))
    for name, space in plan.space.items():
        assert space[0] in ("log", "uniform", "grid", "choice")
        for value in points(space):
            assert search.distribution(space)._contains(search.distribution(space).to_internal_repr(value))
            assert search.flat(configure(task, algorithm, **{name: value}))[name] == value


def test_spaces_are_the_papers():
    pc = space_of("cifar10", "vgg9", "cn", search.flat(configure("cifar10/vgg9", "cn")))
    assert pc == {
        "activation": ("choice", "leaky_relu", "gelu", "hard_tanh"),
        "beta": ("grid", 0.05, 1.0, 0.05),  # the paper's begins at 0, where nothing would be learnt
        "beta_ir": ("choice", 0.02, 0.0),
        "lr_h": ("log", 1e-2, 5e-1),
        "lr_theta": ("log", 1e-5, 3e-4),
        "momentum_h": ("grid", 0.0, 1.0, 0.05),
        "weight_decay": ("log", 1e-5, 1e-2),
        "T": ("choice", 9, 10, 12, 15, 18),
    }
    bp = space_of("cifar10", "resnet18", "bp_ce", search.flat(configure("cifar10/resnet18", "bp_ce")))
    assert bp == {
        "activation": ("choice", "leaky_relu", "gelu", "hard_tanh", "relu"),
        "lr_theta": ("log", 3e-5, 3e-4),
        "weight_decay": ("log", 1e-5, 1e-2),
    }


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (("log", 0.01, 0.5), 0.1, ("log", 0.01, 0.5)),
        (("log", 0.01, 0.5), 0.001, ("log", 0.001, 0.5)),
        (("log", 0.01, 0.5), 0.0, ("uniform", 0.0, 0.5)),
        (("uniform", 0.0, 1.0), 2.0, ("uniform", 0.0, 2.0)),
        (("grid", 0.0, 1.0, 0.05), 0.35, ("grid", 0.0, 1.0, 0.05)),
        (("grid", 0.05, 1.0, 0.05), 0.15000000000000002, ("grid", 0.05, 1.0, 0.05)),
        (("grid", 0.0, 0.5, 0.25), 0.75, ("grid", 0.0, 0.75, 0.25)),
        (("grid", 0.0, 1.0, 0.05), 0.323, ("uniform", 0.0, 1.0)),
        (("choice", 4, 5), 5, ("choice", 4, 5)),
        (("choice", 4, 5), 12, ("choice", 4, 5, 12)),
        (("choice", 4, 12), 5, ("choice", 4, 5, 12)),
        (("choice", "gelu", "relu"), "hard_tanh", ("choice", "gelu", "relu", "hard_tanh")),
    ],
)
def test_spaces_are_extended(space, value, expected):
    assert extended(space, value) == expected


def test_a_published_setting_outside_of_its_range_is_the_first_trial():
    """T=12 of VGG-5 on CIFAR-100: the range is extended, and a sentence says so; `configure` takes it as before."""
    plan = search.make_plan("cifar100/vgg5", "pc_ce", {})
    assert plan.first is not None
    assert plan.first["T"] == 12
    assert plan.space["T"] == ("choice", 4, 5, 6, 7, 8, 12)
    assert plan.notes == ("T=12, the present setting, is not in 4, 5, 6, 7, 8; searching 4, 5, 6, 7, 8, 12",)
    for model, dataset, algorithm in accuracy.SETTINGS:
        plan = search.make_plan(f"{dataset}/{model}", algorithm, {})
        for name, value in plan.first.items():
            kind = search.distribution(plan.space[name])
            assert kind._contains(kind.to_internal_repr(value)), (model, dataset, algorithm, name)


# --- the search


def test_finds_the_better_of_two(tmp_path, digits):
    """One learning rate that learns nothing, one that learns."""
    plan = plan_of({"lr_theta": ("choice", 1e-9, 1e-2)}, {"epochs": 4})
    study = search.search(plan, digits, str(tmp_path / "study.log"), 4, sampler="random", report=lambda text: None)
    assert {trial.params["lr_theta"] for trial in study.trials} == {1e-9, 1e-2}
    assert study.best_params == {"lr_theta": 1e-2}
    assert study.best_value > 0.4


def test_the_score_is_that_of_the_engine(tmp_path, digits):
    """Mean over seeds of the validation accuracy after the last epoch, on a tenth of train."""
    plan = plan_of({"lr_theta": ("choice", 3e-3)}, seeds=2)
    study = search.search(plan, digits, str(tmp_path / "study.log"), 1, report=lambda text: None)
    engine = Engine(configure("digits/mlp", "pc_se", **TINY, validation=0.1, lr_theta=3e-3), digits, [0, 1])
    population = engine.init()
    for number in range(2):
        population, _ = engine.epoch(population, number)
    assert len(engine.splits["validation"]) == 20
    expected = engine.evaluate(population, "validation")["validation_top1"]
    assert study.best_value == pytest.approx(expected.mean(), abs=1e-9)
    assert sorted(study.trials[0].intermediate_values) == [1, 2]


def test_finalists_are_trained_in_full(tmp_path, digits, monkeypatch):
    """The score is that of the engine with all epochs and images of the task; the same command does not train them again."""
    own = configure("digits/mlp", "pc_se")
    assert (own.epochs, own.train_limit) == (40, 0)
    short = plan_of({"lr_theta": ("choice", 3e-3)})
    assert search.in_full(short) == dataclasses.replace(short.config, epochs=40, train_limit=0)
    monkeypatch.setattr(search, "in_full", lambda plan: dataclasses.replace(plan.config, epochs=5, train_limit=0))
    place, said, seen = str(tmp_path / "study.log"), list[str](), list[str]()
    study = search.search(short, digits, place, 1, finalists=2, report=said.append, on_epoch=seen.append)
    full = TINY | {"epochs": 5, "train_limit": 0}
    engine = Engine(configure("digits/mlp", "pc_se", **full, validation=0.1, lr_theta=3e-3), digits, [0])
    population = engine.init()
    for number in range(5):
        population, _ = engine.epoch(population, number)
    expected = float(engine.evaluate(population, "validation")["validation_top1"][0])
    assert search.finals(study) == {0: pytest.approx(expected, abs=1e-9)}
    assert said[-2] == "finalist 1 of 1: trial 0, for 5 epochs"
    assert said[-1] == f"finalist, trial 0: {100 * expected:.2f} % after 5 epochs"
    assert [text.split(" of ")[0] for text in seen[-5:]] == [f"finalist, trial 0: epoch {n}" for n in range(1, 6)]
    assert seen[-1] == f"finalist, trial 0: epoch 5 of 5, {100 * expected:.2f} %"
    monkeypatch.setattr(search.Trainer, "train", lambda *_: pytest.fail("trained again"))
    again = search.search(short, digits, place, 1, finalists=2, report=said.append)
    assert search.winner(again)[1] == pytest.approx(expected, abs=1e-9)


def test_the_best_finalist_wins(tmp_path, digits, monkeypatch):
    """Rates that are best in short trials are worst in full ones, and the largest diverges: the third is what one gets."""
    rates = (1e-4, 2e-4, 3e-4, 4e-4)

    def train(self: Any, configs: Any, judge: Any) -> None:
        for i, config in enumerate(configs):
            rate, last = config.hyper.lr_theta, config.epochs
            if last == 2:
                judge(i, 1, 0.1, None)
                judge(i, 2, 1000 * rate, None)
            else:
                where = {"epoch": 3, "step": 1, "node": "vodes.0"} if rate == 4e-4 else None
                judge(i, last, 0.9 - 1000 * rate, where)

    monkeypatch.setattr(search.Trainer, "train", train)
    plan = plan_of({"lr_theta": ("choice", *rates)})
    study = search.search(plan, digits, str(tmp_path / "s"), 4, sampler="grid", report=lambda text: None)
    assert search.winner(study)[0].params == {"lr_theta": 4e-4}
    study = search.search(plan, digits, str(tmp_path / "s"), 4, sampler="grid", finalists=3, report=lambda text: None)
    found = {study.trials[number].params["lr_theta"]: score for number, score in search.finals(study).items()}
    assert found == {4e-4: None, 3e-4: pytest.approx(0.6), 2e-4: pytest.approx(0.7)}
    best, score = search.winner(study)
    assert (best.params, score) == ({"lr_theta": 2e-4}, pytest.approx(0.7))
    settings = search_report.best_settings(plan, study)
    assert settings["lr_theta"] == 2e-4
    assert settings.keys() & {"epochs", "train_limit", "validation"} == set()
    rows = list(csv.DictReader(search_report.table(plan, study).splitlines()))
    assert {float(row["lr_theta"]): row["in_full"] for row in rows}[4e-4] == "diverged"
    assert search_report.best_config(plan, study).epochs == configure("digits/mlp", "pc_se").epochs


def test_finalists_of_trials_in_full_are_not_repeated(tmp_path, digits, monkeypatch):
    monkeypatch.setattr(search, "in_full", lambda plan: plan.config)
    said = list[str]()
    study = search.search(plan_of(), digits, str(tmp_path / "s"), 1, finalists=1, report=said.append)
    assert search.finals(study) == {}
    assert any("nothing to repeat" in text for text in said)


def test_a_stopped_finalist_is_trained_again(tmp_path, digits, monkeypatch):
    """Ctrl-C between its epochs leaves no score; the same command begins with it."""
    monkeypatch.setattr(search, "in_full", lambda plan: dataclasses.replace(plan.config, epochs=3))
    plan, place = plan_of({"lr_theta": ("choice", 3e-3)}), str(tmp_path / "s")
    search.search(plan, digits, place, 1, report=lambda text: None)

    class Stop:
        wanted = True

        def __init__(self, report: Any): ...
        def __enter__(self) -> "Stop":
            return self

        def __exit__(self, *_: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(search, "Interrupt", Stop)
        with pytest.raises(runs.Stopped):
            search.search(plan, digits, place, 1, finalists=1, report=lambda text: None)
    assert search.finals(search.open_study(plan, place)) == {}
    assert list(search.finals(search.search(plan, digits, place, 1, finalists=1, report=lambda text: None))) == [0]


def test_the_test_split_is_not_there(digits):
    """The engine of a search does not even hold it."""
    trainer = search.Trainer(digits, [0], "scan")
    engine = trainer.engine([plan_of().config])
    assert len(engine.splits["test"]) == 1
    assert np.array_equal(engine.splits["test"].images, digits.train.images[:1])


def test_population_is_exact(tmp_path, digits):
    """The same settings score the same side by side as one by one, in groups of equal T."""
    space = {
        "lr_h": ("log", 0.01, 0.5),
        "lr_theta": ("log", 1e-4, 1e-1),
        "T": ("choice", 2, 3),
        "beta_ir": ("choice", 0.02, 0.0),
    }
    given = {name: value for name, value in TINY.items() if name != "T"}
    plan = search.make_plan("digits/mlp", "pn", given, 2, space=space)
    side = search.search(plan, digits, str(tmp_path / "side"), 5, population=5, report=lambda text: None)
    trainer = search.Trainer(digits, [0, 1], "scan")
    for trial in side.trials:
        scores: dict[int, float] = {}
        config = search.set_values(plan.config, trial.params)
        trainer.train([config], lambda i, epoch, score, where: scores.update({epoch: score}) is None)  # noqa: B023
        assert trial.intermediate_values == pytest.approx(scores, abs=1e-6)
    assert len({trial.params["T"] for trial in side.trials}) == 2
    assert len(trainer.engines) == 2


def test_streamed_data_score_the_same(tmp_path, digits, monkeypatch):
    """Also with data that stay on the host, and a batch size that is searched."""
    given = {name: value for name, value in TINY.items() if name != "batch"} | {"epochs": 1}
    plan = search.make_plan("digits/mlp", "pc_se", given, space={"batch": ("choice", 16, 32)})
    scores = {}
    for mode in ("scan", "stream"):
        monkeypatch.setattr(search, "choose_mode", lambda *_: (mode, mode))  # noqa: B023
        study = search.search(plan, digits, str(tmp_path / mode), 2, sampler="grid", report=lambda text: None)
        scores[mode] = {trial.params["batch"]: trial.value for trial in study.trials}
    assert scores["scan"] == pytest.approx(scores["stream"], abs=1e-9)
    assert set(scores["scan"]) == {16, 32}


def test_one_program_for_all_numbers(tmp_path, digits, monkeypatch):
    """Trials that differ in numbers do not compile again."""
    made = []
    build = Engine._build
    monkeypatch.setattr(Engine, "_build", lambda engine: (made.append(1), build(engine))[1])
    search.search(plan_of(), digits, str(tmp_path / "study.log"), 4, report=lambda text: None)
    assert len(made) == 1


def test_divergence_is_pruned(tmp_path, digits):
    """A state learning rate that explodes ends a trial after its first epoch; its sibling goes on."""
    plan = plan_of({"lr_h": ("choice", 0.01, 1e9)}, {"T": 8, "epochs": 3})
    said: list[str] = []
    study = search.search(plan, digits, str(tmp_path / "s"), 2, sampler="grid", population=2, report=said.append)
    by_rate = {trial.params["lr_h"]: trial for trial in study.trials}
    assert by_rate[1e9].state == TrialState.PRUNED
    assert by_rate[1e9].user_attrs["diverged"]["epoch"] == 1
    assert by_rate[1e9].user_attrs["epochs"] == 1
    assert by_rate[0.01].state == TrialState.COMPLETE
    assert any("diverged at epoch 1, step" in line and "node vodes." in line for line in said)
    assert search_report.state_of(by_rate[1e9]) == "diverged"


def test_hopeless_trials_are_pruned(tmp_path, digits):
    """After five trials that learn, one that does not is ended before its last epoch."""
    place = str(tmp_path / "s")
    plan = plan_of({"lr_theta": ("log", 1e-9, 1e-1)}, {"epochs": 5})
    study = search.open_study(plan, place)
    for rate in (0.01, 0.011, 0.012, 0.013, 0.014, 1e-9):
        study.enqueue_trial({"lr_theta": rate})
    study = search.search(plan, digits, place, 6, report=lambda text: None)
    assert states(study) == [TrialState.COMPLETE] * 5 + [TrialState.PRUNED]
    assert study.trials[-1].user_attrs["epochs"] < 5


@pytest.fixture(scope="module")
def kept():
    """Engines that are compiled once for several searches of the same plan."""
    return {}


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_resumes_and_repeats(tmp_path, digits, sampler, kept, monkeypatch):
    """Trials are counted over all calls; stopped and taken up, a search tries what an uninterrupted one does."""
    made = search.Trainer.__init__
    monkeypatch.setattr(search.Trainer, "__init__", lambda self, *a: (made(self, *a), setattr(self, "engines", kept))[0])
    plan = plan_of({"lr_h": ("uniform", 0.01, 0.1), "momentum_h": ("grid", 0.0, 0.5, 0.25)})
    said: list[str] = []
    whole = search.search(plan, digits, str(tmp_path / "a"), 4, sampler=sampler, seed=3, report=lambda text: None)
    search.search(plan, digits, str(tmp_path / "b"), 2, sampler=sampler, seed=3, report=lambda text: None)
    parts = search.search(plan, digits, str(tmp_path / "b"), 4, sampler=sampler, seed=3, report=said.append)
    assert [(t.params, t.values) for t in parts.trials] == [(t.params, t.values) for t in whole.trials]
    assert len(parts.trials) == 4
    assert "after 2 finished trials" in said[0]
    again = search.search(plan, digits, str(tmp_path / "b"), 4, sampler=sampler, seed=3, report=lambda text: None)
    assert len(again.trials) == 4


def test_the_seed_of_the_sampler_matters(tmp_path, digits):
    plan, first = plan_of({"lr_h": ("uniform", 0.01, 0.1)}), []
    trainer = search.Trainer(digits, [0], "scan")
    for seed in (3, 4):
        work = search.Search(plan, search.open_study(plan, str(tmp_path / str(seed))), trainer, "random", seed, print, print)
        first.append(work.ask().params)
    assert first[0] != first[1]


def test_grid_visits_all_points(tmp_path, digits):
    space = {"lr_h": ("log", 0.01, 0.1), "momentum_h": ("grid", 0.0, 0.5, 0.25)}
    plan = plan_of(space, grid=True)
    study = search.search(plan, digits, str(tmp_path / "s"), 50, sampler="grid", population=4, report=lambda text: None)
    tried = sorted((trial.params["momentum_h"], trial.params["lr_h"]) for trial in study.trials)
    assert tried == sorted((m, h) for m in (0.0, 0.25, 0.5) for h in points(space["lr_h"]))
    assert len(tried) == 15


def test_a_killed_process_leaves_its_trial_to_others(tmp_path, digits):
    """A trial of a process that is gone has failed, and its settings are tried first."""
    place, plan = str(tmp_path / "s"), plan_of()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    study = search.open_study(plan, place)
    study.enqueue_trial({"lr_theta": 0.0123})
    lost = study.ask({"lr_theta": search.distribution(plan.space["lr_theta"])})
    lost.set_user_attr("by", search.HERE.replace(str(os.getpid()), str(gone.pid)))
    study = search.search(plan, digits, place, 1, report=lambda text: None)
    assert states(study) == [TrialState.FAIL, TrialState.COMPLETE]
    assert study.trials[1].params == {"lr_theta": 0.0123}


@pytest.mark.parametrize("left", [b'{"op_code":4,"worker_id', b"\xff"])
def test_a_line_that_was_half_written_is_dropped(tmp_path, digits, left):
    """A process was killed while it wrote; the search goes on with what is whole, and says so."""
    place, plan, told = tmp_path / "s", plan_of(), []
    search.search(plan, digits, str(place), 1, report=told.append)
    with place.open("ab") as file:
        file.write(left)
    study = search.search(plan, digits, str(place), 2, report=told.append)
    assert states(study) == states(search.open_study(plan, str(place))) == [TrialState.COMPLETE] * 2
    assert [text for text in told if "half written" in text] == [
        f"the last line of {place} was half written by a process that is gone; it is dropped"
    ]


def test_a_damaged_study_is_one_sentence(tmp_path):
    place = tmp_path / "s"
    search.open_study(plan_of(), str(place))
    place.write_bytes(b"{torn\n" + place.read_bytes())
    with pytest.raises(ConfigError, match=r"cannot be opened in .*; give another --out or --storage"):
        search.open_study(plan_of(), str(place))


@pytest.mark.parametrize("content", [b'{"mine": 1}', b"SQLite format 3\x00 and\nmore", b"# Title\n"])
def test_a_file_that_is_no_study_is_left_alone(tmp_path, content):
    place = tmp_path / "mine"
    place.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be opened in .*: the file is no study; give another --out or --storage"):
        search.open_study(plan_of(), str(place))
    assert place.read_bytes() == content


@pytest.mark.parametrize("error", [runs.Stopped, KeyboardInterrupt, RuntimeError])
def test_an_interrupted_trial_is_closed(tmp_path, digits, monkeypatch, error):
    """Nothing is left running; after a stop the same settings are tried again, after an error they are not."""
    place, plan = str(tmp_path / "s"), plan_of()
    with monkeypatch.context() as patch:
        patch.setattr(search.Trainer, "train", lambda *_: (_ for _ in ()).throw(error("now")))
        with pytest.raises(error):
            search.search(plan, digits, place, 3, population=2, report=lambda text: None)
    study = search.open_study(plan, place)
    assert states(study)[:2] == [TrialState.FAIL] * 2
    assert states(study)[2:] == [] if error is RuntimeError else [TrialState.WAITING] * 2
    if error is not RuntimeError:
        study = search.search(plan, digits, place, 2, report=lambda text: None)
        assert [t.params for t in study.trials[2:]] == [t.params for t in study.trials[:2]]


def test_another_search_is_refused(tmp_path):
    place = str(tmp_path / "s")
    search.open_study(plan_of(), place)
    search.open_study(plan_of(given={"population": "map"}), place)
    for other, part in (({"given": {"epochs": 3}}, "epochs=2, now it is 3"), ({"seeds": 2}, "seeds")):
        with pytest.raises(ConfigError, match=part):
            search.open_study(plan_of(**other), place)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_any_storage(tmp_path, digits):
    url = f"sqlite:///{tmp_path}/study.db"
    study = search.search(plan_of(), digits, url, 1, report=lambda text: None)
    assert len(search.open_study(plan_of(), url).trials) == len(study.trials) == 1
    del study
    gc.collect()  # Optuna leaves connections open, of which newer Pythons warn in whatever test comes then


# --- the report


def test_importance_is_skipped_with_a_sentence(tmp_path):
    study = optuna.create_study(direction="maximize")
    for rate, score in ((0.1, 0.5), (0.2, 0.6)):
        kinds = {"lr": optuna.distributions.FloatDistribution(0.0, 1.0)}
        study.add_trial(optuna.trial.create_trial(params={"lr": rate}, distributions=kinds, value=score))
    assert search_report.importance(study, tmp_path / "i.png") == [
        "no importance.png: 2 trials were trained to the end, and at least 5 are needed."
    ]
    assert not (tmp_path / "i.png").exists()


@pytest.mark.parametrize("with_sklearn", [True, False])
def test_importance_without_scikit_learn(tmp_path, monkeypatch, with_sklearn):
    if not with_sklearn:
        monkeypatch.setitem(sys.modules, "sklearn", None)
    study = optuna.create_study(direction="maximize", study_name="x")
    kinds = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in ("a", "b")}
    for i in range(8):
        params = {"a": i / 8, "b": (i * 5 % 8) / 8}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=params["a"]))
    assert search_report.importance(study, tmp_path / "i.png") == []
    assert (tmp_path / "i.png").read_bytes().startswith(b"\x89PNG")


# --- the command


SMALL = ["--set", "train_limit=200", "width=16", "hidden=1", "batch=32", "T=2", "activation=gelu"]


def test_command(tmp_path):
    """The folder holds all that is promised, and the printed command is that of the best settings."""
    arguments = ["search", "digits/mlp", "-a", "pc_se", "--epochs", "2", "--trials", "6", "--out", "found", *SMALL]
    code, out, err = run_command(*arguments)
    assert code == 0, err
    folder = Path("found")
    assert {path.name for path in folder.iterdir() if not path.name.endswith(".lock")} == {
        "best.json", "trials.csv", "history.png", "slices.png", "importance.png", "study.log",
    }  # fmt: skip
    rows = list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
    assert len(rows) == 6
    assert float(rows[0]["lr_h"]) == configure("digits/mlp", "pc_se").hyper.lr_h  # the settings of pcx run come first
    best = json.loads((folder / "best.json").read_text())
    assert best["validation_top1"] == max(float(row["validation_top1"]) for row in rows if row["state"] == "complete")
    (command,) = [line for line in out.splitlines() if line.startswith("pcx run digits/mlp --algorithm pc_se --set ")]
    config = configure("digits/mlp", "pc_se", **parse_pairs([command.partition("--set ")[2]]))
    assert config == from_dict(best["config"])
    assert config.validation == 0
    assert config.options.width == 16
    assert sum(line.startswith("trial ") for line in err.splitlines()) == 6
    code, out, err = run_command(*arguments)
    assert code == 0
    assert "going on with found/study.log after 6 finished trials" in err
    assert command in out


def test_best_settings_run(tmp_path, monkeypatch):
    """`pcx run` takes the printed command."""
    code, out, _ = run_command(
        "search", "digits/mlp", "-a", "bp_se", "--trials", "1", "--epochs", "1", *SMALL[:-2], "activation=gelu"
    )
    assert code == 0
    (command,) = [line for line in out.splitlines() if line.startswith("pcx run")]
    started: list[Any] = []
    summary = {"final": {"test_top1": {"mean": 1.0, "std": 0.0}}, "best": {"test_top1": {"mean": 1.0}}}
    monkeypatch.setattr(
        runs, "run", lambda config, *_, **__: (started.append(config), summary | {"seconds_per_epoch": 1.0, "diverged": []})[1]
    )
    assert run_command(*command.split()[1:])[0] == 0
    assert started == [from_dict(json.loads(Path("runs/search-digits-mlp-bp_se/best.json").read_text())["config"])]


def test_quick(tmp_path, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(search, "search", lambda plan, data, place, trials, **_: seen.append((plan, place, trials)) or (_ for _ in ()).throw(KeyboardInterrupt))  # fmt: skip  # noqa: E501
    code, _, err = run_command("search", "digits/mlp", "-a", "pc_se", "--quick")
    ((plan, place, trials),) = seen
    assert code == 130
    assert "the same command goes on" in err
    assert (plan.config.train_limit, plan.config.epochs, trials) == (2000, 2, 3)
    assert place == "runs/search-digits-mlp-pc_se-quick/study.log"
    assert plan.config.validation == 0.1


def test_nothing_completed(tmp_path):
    """All diverged: the table is there, one sentence says so."""
    code, _, err = run_command(
        "search", "digits/mlp", "-a", "pc_se", "--trials", "1", "--epochs", "1", "--out", "o", "--set", "lr_h=1e9",
        "train_limit=200", "width=16", "batch=32", "T=8",
    )  # fmt: skip
    assert code == 2
    assert "none of 1 trials was trained to its end" in err
    assert "diverged" in Path("o/trials.csv").read_text()
    assert not Path("o/best.json").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["digits", "-a", "pc_se"], ["dataset/model"]),
        (["digits/mlp"], ["--algorithm"]),
        (["digits/mlp", "-a", "pc_es"], ["algorithm 'pc_es'"]),
        (["digits/mlp", "-a", "pc_se", "--trials", "0"], ["--trials is 0", "at least 1"]),
        (["digits/mlp", "-a", "pc_se", "--population", "0"], ["--population is 0"]),
        (["digits/mlp", "-a", "pc_se", "--seeds", "0"], ["--seeds is 0"]),
        (["digits/mlp", "-a", "pc_se", "--seed", "-1"], ["--seed is -1"]),
        (["digits/mlp", "-a", "pc_se", "--finalists", "-1"], ["--finalists is -1"]),
        (["digits/mlp", "-a", "pc_se", "--sampler", "tp"], ["--sampler is 'tp'", "tpe, random, grid"]),
        (["digits/mlp", "-a", "pc_se", "--only", "lrh"], ["'lrh' cannot be searched", "lr_h"]),
        (["digits/mlp", "-a", "pc_se", "--only", "lr_h", "momentum_h"], ["commas", "--only lr_h,momentum_h"]),
        (["digits/mlp", "-a", "pc_se", "--only", "lr_h,", "momentum_h"], ["commas", "--only lr_h,momentum_h"]),
        (["digits/mlp", "-a", "pc_se", "momentum_h"], ["name=value", "'momentum_h'"]),
        (["digits/mlp", "-a", "pc_se", "--epochs", "2", "--set", "epochs=3"], ["--epochs is 2", "epochs=3"]),
        (["digits/mlp", "-a", "pc_se", "--out", ""], ["--out is empty"]),
        (["digits/mlp", "-a", "pc_se", "--set", "validation=0"], ["validation split", "0.1"]),
        (["digits/mlp", "-a", "pc_se", "--set", "validation=0.00001"], ["validation"]),
        (["digits/mlp", "-a", "pc_se", "--set", "patience=3"], ["patience"]),
        (["digits/mlp", "-a", "pc_se", "--set", "momentum=3"], ["'momentum'", "momentum_h"]),
        (["digits/mlp", "-a", "bp_se", "--set", "lr_theta=1e-3", "weight_decay=0", "activation=gelu"], ["nothing is left"]),
        (["digits/mlp", "-a", "pc_se", "--storage", "nowhere://x"], ["cannot be opened", "nowhere://x"]),
        (["digits/mlp", "-a", "pc_se", "--storage", "/dev/null/x"], ["cannot be opened"]),
        (["mnist/mlp", "-a", "pc_se"], ["mnist"]),
        (["digits/vgg5", "-a", "pc_se", "--trials", "1"], []),
    ],
)
def test_bad_input(arguments, parts):
    """One sentence, exit 2."""
    code, out, err = run_command("search", *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    for part in parts:
        assert part in err.splitlines()[-1]


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("mine")
    code, _, err = run_command("search", "digits/mlp", "-a", "pc_se", "--out", str(tmp_path / "taken"))
    assert (code, err) == (2, f"error: {tmp_path / 'taken'} is a file; --out names a folder.\n")


def test_optuna_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run_command("search", "digits/mlp", "-a", "pc_se")
    assert code == 2
    assert err == "error: pcx search needs Optuna; install it in the project's folder with: pip install '.[search]'\n"


def test_help_has_examples():
    code, out, _ = run_command("search", "--help")
    flat = " ".join(out.split())
    assert code == 0
    for part in (
        "pcx search cifar10/vgg9 --algorithm cn --trials 50",
        "--sampler",
        "--storage",
        "Ctrl-C",
        "best.json",
        "as in lr_h,momentum_h",
    ):
        assert part in flat


@pytest.mark.parametrize("space", [("logg", 1e-2, 0.5), ("log", 0, 0.5), ("log", -1, 0.5)])
def test_a_space_that_is_none_is_refused(space):
    with pytest.raises(ConfigError, match="is no space; write"):
        search.distribution(space)
