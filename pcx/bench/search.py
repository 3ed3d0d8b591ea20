"""Search for settings: trials of Optuna, each trained by the engine and scored on the validation split, never on test.

A trial's score is the accuracy on the validation split after the last epoch, mean over seeds. The study lies in a file (or
any storage of Optuna's), so a search goes on where it was, and several processes can share it. Trials that differ only in
numbers of the algorithm use the same compiled program, and train side by side where a population is wanted. Trials may be
shorter than a run of the task; then some of the best can be trained again in full (finalists), and the best of these wins.
"""

import dataclasses
import itertools
import json
import os
import random
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from pcx._types import near
from pcx.bench.config import Config, ConfigError, set_values
from pcx.bench.configs.spaces import Space, extended, points, space_of, text_of
from pcx.bench.engine import Engine
from pcx.bench.modes import choose_mode
from pcx.bench.runs import Interrupt, Report, Stopped
from pcx.bench.tasks import configure, hyper_floats, known_settings
from pcx.data import DataSet, Split

SAMPLERS = ("tpe", "random", "grid")
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
FINAL = "final "  # and the number of a trial: the score of a finalist, None if it diverged
HERE = f"{socket.gethostname()}:{os.getpid()}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is searched: a config, the spaces of some of its settings, and the settings to begin with, if any are known.

    ``given`` are the settings that were fixed by hand, beyond the task's own.
    """

    config: Config
    given: dict[str, Any]
    seeds: list[int]
    space: dict[str, Space]
    first: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.config.task} {self.config.algorithm}"

    def facts(self) -> dict[str, Any]:
        """What has to be equal for scores to be comparable, as JSON has it."""
        facts = flat(self.config) | {"seeds": self.seeds, "space": self.space}
        facts.pop("population")
        return json.loads(json.dumps(facts))


def flat(config: Config) -> dict[str, Any]:
    """All settings of a config by name."""
    values = config.as_dict()
    return values | values.pop("hyper") | values.pop("options")


def make_plan(task: str, algorithm: str, given: dict[str, Any], seeds: int = 1, only: Sequence[str] = (),
              space: dict[str, Space] | None = None, grid: bool = False) -> Plan:  # fmt: skip
    """Plan a search. What is ``given`` is not searched; with ``only``, nothing but these settings is.

    The settings that `pcx run` would take are the first trial, where the task has some; a space that does not hold them is
    extended. A grid and a ``space`` of one's own are left as they are, and have no first trial.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; at least one seed is needed.")
    config = configure(task, algorithm, **({"validation": 0.1} | given))
    if config.validation == 0:
        raise ConfigError("a search is scored on the validation split; give validation a share of train, such as 0.1.")
    if config.patience:
        raise ConfigError("patience has no effect in a search, which prunes trials by itself; leave it away.")
    values = flat(config)
    found = space_of(config.dataset, config.model, algorithm, values) if space is None else space
    found = {name: part for name, part in found.items() if name not in given}
    for name in only:
        if name not in found:
            raise ConfigError(f"{name!r} cannot be searched for {task} by {algorithm}; possible: {near(name, found)}.")
    found = {name: part for name, part in found.items() if not only or name in only}
    if not found:
        raise ConfigError(f"nothing is left to search for {task} by {algorithm}; set fewer settings.")
    known = known_settings(config.dataset, config.model, algorithm)
    plan = Plan(config, {name: values[name] for name in given}, list(range(seeds)), found)
    return _with_first(plan, {name: values[name] for name in found}) if known and space is None and not grid else plan


def _with_first(plan: Plan, first: dict[str, Any]) -> Plan:
    """The plan with these settings as its first trial, in spaces that hold them."""
    space = {name: extended(part, first[name]) for name, part in plan.space.items()}
    changed = [name for name in space if space[name] != plan.space[name]]
    notes = tuple(
        f"{name}={first[name]}, the present setting, is not in {text_of(plan.space[name])}; searching {text_of(space[name])}"
        for name in changed
    )
    return dataclasses.replace(plan, space=space, first=first, notes=notes)


def distribution(space: Space) -> BaseDistribution:
    """A space as Optuna has it."""
    kind, *rest = space
    if kind == "choice":
        return CategoricalDistribution(rest)
    if kind not in ("log", "grid", "uniform") or (kind == "log" and not rest[0] > 0):
        known = "('log', low, high) with low above 0, ('uniform', low, high), ('grid', low, high, step) or ('choice', …)"
        raise ConfigError(f"{space} is no space; write {known}.")
    return FloatDistribution(rest[0], rest[1], log=kind == "log", step=rest[2] if kind == "grid" else None)


def open_study(plan: Plan, storage: str, report: Report = lambda text: None) -> optuna.Study:
    """The study of a plan in a storage, new or not; one that was made with other settings is refused."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=max(2, plan.config.epochs // 3))
    try:
        place = storage if "://" in storage else _file_storage(Path(storage), report)
        study = optuna.create_study(
            storage=place, pruner=pruner, study_name=plan.name, direction="maximize", load_if_exists=True
        )
        there: dict[str, Any] = study.user_attrs.get("search", {})
    except Exception as error:  # whatever the storage's own library raises
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"the study cannot be opened in {storage!r}: {reason}; give another --out or --storage.") from None
    mine = plan.facts()
    if not there:
        study.set_user_attr("search", mine)
    for name in mine if there else ():
        if there.get(name) != mine[name]:
            raise ConfigError(
                f"the study in {storage} was made with {name}={there.get(name)}, now it is {mine[name]}; "
                "give the same settings, or another --out or --storage."
            )
    return study


JOURNAL = b'{"op_code"'  # the first bytes of a study that is a file


def _file_storage(path: Path, report: Report) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        lock = JournalFileSymlinkLock(str(path))  # others may be writing
        lock.acquire()
        try:
            _drop_torn_line(path, report)
        finally:
            lock.release()
    return JournalStorage(JournalFileBackend(str(path)))


def _drop_torn_line(path: Path, report: Report) -> None:
    """Drop a last line without an end: its writer was killed, and Optuna would write the next one behind it.

    A file that is not a study is left as it is.
    """
    content = path.read_bytes()
    if not content.startswith(JOURNAL[: len(content)]):
        raise ValueError("the file is no study")
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
        report(f"the last line of {path} was half written by a process that is gone; it is dropped")


def finished(study: optuna.Study) -> int:
    return len(study.get_trials(deepcopy=False, states=FINISHED))


def in_full(plan: Plan) -> Config:
    """What finalists are trained with: as many epochs and images as a run of the task has."""
    own = configure(plan.config.task, plan.config.algorithm)
    return dataclasses.replace(plan.config, epochs=own.epochs, train_limit=own.train_limit)


def finals(study: optuna.Study) -> dict[int, float | None]:
    """The scores of the finalists, by the number of their trial."""
    return {int(name[len(FINAL) :]): score for name, score in study.user_attrs.items() if name.startswith(FINAL)}


def winner(study: optuna.Study) -> tuple[optuna.trial.FrozenTrial, float]:
    """The best trial and its score: of the finalists, where one got to its end, else of all."""
    ended = {number: score for number, score in finals(study).items() if score is not None}
    if not ended:
        return study.best_trial, study.best_value
    number = max(ended, key=lambda number: ended[number])
    return study.trials[number], ended[number]


# --- training


class Trainer:
    """Trains several configs side by side. An engine is kept for every program that was compiled; they share the data."""

    def __init__(self, data: DataSet, seeds: list[int], mode: str):
        if data.train is None:
            raise ConfigError(f"{data.name} has no training images here.")
        self.data = without_test(data)
        self.seeds, self.mode = seeds, mode
        self.engines: dict[tuple[str, int], Engine] = {}

    def engine(self, configs: list[Config]) -> Engine:
        """An engine whose members have the numbers of these configs, each with every seed."""
        numbers = list(hyper_floats(configs[0]))
        same = dataclasses.replace(configs[0], hyper=dataclasses.replace(configs[0].hyper, **dict.fromkeys(numbers, 1.0)))
        key = (same.digest(), len(configs))
        if key not in self.engines:
            self.engines[key] = Engine(configs[0], self.data, self.seeds * len(configs), self.mode)
            shared = next(iter(self.engines.values()))
            streamed = self.mode == "stream"  # then an engine's arrays are only its first batch
            for part in ("host", "evaluation", "train_set", "splits", *(() if streamed else ("arrays",))):
                setattr(self.engines[key], part, getattr(shared, part))
        engine = self.engines[key]
        columns = {
            name: jnp.asarray(np.repeat([getattr(c.hyper, name) for c in configs], len(self.seeds)), jnp.result_type(float))
            for name in numbers
        }
        engine.floats = dataclasses.replace(engine.floats, **columns)
        return engine

    def train(self, configs: list[Config], judge: Callable[[int, int, float, dict[str, Any] | None], bool]) -> None:
        """Train; after every epoch ``judge(index, epoch, accuracy, where it diverged)`` says whether a config goes on."""
        engine = self.engine(configs)
        population = engine.prepare().init()
        going = np.ones(len(configs), bool)
        for number in range(engine.config.epochs):
            population, _ = engine.epoch(population, number)
            scores = engine.evaluate(population, "validation")["validation_top1"].reshape(len(configs), -1)
            health = population.health
            alive = np.array(health.alive).reshape(len(configs), -1)
            for i in np.flatnonzero(going):
                fell = np.flatnonzero(~alive[i])
                where = None
                if len(fell):
                    member = i * len(self.seeds) + int(fell[0])
                    node = engine.nodes[int(health.node[member])]
                    where = {"epoch": int(health.epoch[member]) + 1, "step": int(health.step[member]), "node": node}
                going[i] = judge(int(i), number + 1, float(scores[i].mean()), where)
            if not going.any():
                return
            still = jnp.asarray((alive & going[:, None]).reshape(-1))
            population = population._replace(health=health._replace(alive=still))


def without_test(data: DataSet) -> DataSet:
    """The data set with its test split replaced by one training image: a search cannot look at what it must not."""
    assert data.train is not None
    labels = data.train.labels
    return dataclasses.replace(data, test=Split(data.train.images[:1], None if labels is None else labels[:1]))


# --- the search


class Search:
    """A study that is being worked on."""

    def __init__(
        self, plan: Plan, study: optuna.Study, trainer: Trainer, sampler: str, seed: int, report: Report, on_epoch: Report
    ):
        self.plan, self.study, self.trainer, self.report, self.on_epoch = plan, study, trainer, report, on_epoch
        self.sampler, self.seed = sampler, seed
        self.distributions = {name: distribution(space) for name, space in plan.space.items()}

    def _states(self, *states: TrialState) -> list[Any]:
        return self.study.get_trials(deepcopy=False, states=states)

    def clear_dead(self) -> None:
        """Trials of a process on this machine that was killed: they have failed, and wait to be tried again."""
        for trial in self._states(TrialState.RUNNING):
            host, _, process = trial.user_attrs.get("by", "").rpartition(":")
            if host == socket.gethostname() and not Path(f"/proc/{process}").exists() and Path("/proc").exists():
                self.study.tell(trial.number, state=TrialState.FAIL)
                self.study.enqueue_trial(trial.params)

    def enqueue_first(self) -> None:
        if self.plan.first and not self._states(*FINISHED, TrialState.WAITING, TrialState.RUNNING):
            self.study.enqueue_trial(self.plan.first)

    def ask(self) -> optuna.Trial:
        """A new trial. Random numbers come from seed and number of trials, so that a search that goes on does not repeat."""
        number = len(self.study.get_trials(deepcopy=False))
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        if self.sampler == "tpe":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                # trials that run count as bad ones: without it those asked for at once were nearly equal
                self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        else:
            self.study.sampler = optuna.samplers.RandomSampler(seed=seed)
        if self.sampler == "grid" and not self._states(TrialState.WAITING):
            self.study.enqueue_trial(next(point for point in self.grid() if point not in self._tried()))
        trial = self.study.ask(self.distributions)
        trial.set_user_attr("by", HERE)
        return trial

    def grid(self) -> list[dict[str, Any]]:
        """All points of the grid in an order that depends on the seed, so that a part of it is spread out."""
        columns = [points(space) for space in self.plan.space.values()]
        product = [dict(zip(self.plan.space, values, strict=True)) for values in itertools.product(*columns)]
        random.Random(self.seed).shuffle(product)
        return product

    def _tried(self) -> list[dict[str, Any]]:
        return [trial.params for trial in self._states(*FINISHED, TrialState.RUNNING)]

    def left(self, trials: int) -> int:
        """How many trials are still to be asked for; a grid has no more than its points."""
        if self.sampler == "grid":
            tried = self._tried()
            trials = min(trials, finished(self.study) + sum(point not in tried for point in self.grid()))
        return trials - finished(self.study)

    def batch(self, count: int, interrupt: Interrupt) -> None:
        """Ask for some trials and train them, those together that differ only in numbers of the algorithm."""
        open_trials: dict[int, optuna.Trial] = {}
        try:
            for _ in range(count):
                trial = self.ask()
                open_trials[trial.number] = trial
            numbers = hyper_floats(self.plan.config)
            groups: dict[str, list[optuna.Trial]] = {}
            for trial in open_trials.values():
                static = {name: value for name, value in trial.params.items() if name not in numbers}
                groups.setdefault(json.dumps(static, sort_keys=True), []).append(trial)
            for group in groups.values():
                self.train(group, open_trials, interrupt)
        except BaseException as error:
            for number, trial in open_trials.items():
                self.study.tell(number, state=TrialState.FAIL)
                if isinstance(error, Stopped | KeyboardInterrupt):
                    self.study.enqueue_trial(trial.params)
            raise

    def train(self, group: list[optuna.Trial], open_trials: dict[int, optuna.Trial], interrupt: Interrupt) -> None:
        start, last = time.monotonic(), self.plan.config.epochs

        def close(trial: optuna.Trial, epoch: int, what: str, **tell: Any) -> bool:
            trial.set_user_attr("epochs", epoch)
            trial.set_user_attr("seconds", round(time.monotonic() - start, 3))
            self.study.tell(trial, **tell)
            del open_trials[trial.number]
            settings = " ".join(f"{name}={short(value)}" for name, value in trial.params.items())
            self.report(f"trial {trial.number}: {what}  {settings}")
            return False

        def judge(i: int, epoch: int, score: float, where: dict[str, Any] | None) -> bool:
            trial = group[i]
            if where is not None:
                trial.set_user_attr("diverged", where)
                what = f"diverged at epoch {where['epoch']}, step {where['step']}, node {where['node']}"
                return close(trial, epoch, what, state=TrialState.PRUNED)
            trial.report(score, epoch)
            self.on_epoch(f"trial {trial.number}: epoch {epoch} of {last}, {100 * score:.2f} %")
            if epoch == last:
                return close(trial, epoch, f"{100 * score:.2f} %", values=score)
            if trial.should_prune():
                return close(trial, epoch, f"pruned after epoch {epoch} at {100 * score:.2f} %", state=TrialState.PRUNED)
            if interrupt.wanted:
                raise Stopped("stopped; the same command goes on from there")
            return True

        self.trainer.train([set_values(self.plan.config, trial.params) for trial in group], judge)

    def finalists(self, count: int) -> list[optuna.trial.FrozenTrial]:
        """The best complete trials that were not trained in full yet."""
        best = sorted(self._states(TrialState.COMPLETE), key=lambda trial: (-float(trial.value or 0.0), trial.number))
        return [trial for trial in best[:count] if trial.number not in finals(self.study)]

    def train_finalist(self, trial: optuna.trial.FrozenTrial, trainer: Trainer, interrupt: Interrupt) -> None:
        config = set_values(in_full(self.plan), trial.params)
        score: float | None = None

        def judge(i: int, epoch: int, accuracy: float, where: dict[str, Any] | None) -> bool:
            nonlocal score
            score = accuracy if where is None else None
            self.on_epoch(f"finalist, trial {trial.number}: epoch {epoch} of {config.epochs}, {100 * accuracy:.2f} %")
            if where is None and epoch < config.epochs and interrupt.wanted:
                raise Stopped("stopped; the same command goes on from there")
            return where is None

        trainer.train([config], judge)
        self.study.set_user_attr(f"{FINAL}{trial.number}", score)
        what = "diverged" if score is None else f"{100 * score:.2f} %"
        self.report(f"finalist, trial {trial.number}: {what} after {config.epochs} epochs")


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def search(plan: Plan, data: DataSet, storage: str, trials: int = 50, *, sampler: str = "tpe", seed: int = 0,
           population: int = 1, finalists: int = 0, report: Report = print,
           on_batch: Callable[[optuna.Study], None] = lambda study: None,
           on_epoch: Report = lambda text: None) -> optuna.Study:  # fmt: skip
    """Work on a study until it has this many finished trials, those before included; ``population`` of them side by side.

    Then train the best ``finalists`` in full, if trials are shorter than that. ``on_epoch`` is told where training is.
    """
    for name, value in (("trials", trials), ("population", population)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}; it is at least 1.")
    if finalists < 0:
        raise ConfigError(f"--finalists is {finalists}; it is at least 0.")
    if seed < 0:
        raise ConfigError(f"--seed is {seed}; it is at least 0.")
    if sampler not in SAMPLERS:
        raise ConfigError(f"--sampler is {sampler!r}; use {', '.join(SAMPLERS)}.")
    study = open_study(plan, storage, report)
    if "data" not in study.user_attrs:
        study.set_user_attr("data", data.checksum)
    elif study.user_attrs["data"] != data.checksum:
        raise ConfigError(f"the study in {storage} was made with other data of the name {data.name}; give another --out.")
    done = finished(study)
    if done:
        report(f"going on with {storage} after {done} finished trials")
    for note in plan.notes:
        report(note)
    if finalists and in_full(plan) == plan.config:
        report("trials are as long as a run of the task, so there is nothing to repeat with --finalists")
        finalists = 0
    if done >= trials and not finalists:
        return study
    mode, why = choose_mode(plan.config, without_test(data) if data.train else data, plan.seeds, report)
    report(why)
    work = Search(plan, study, Trainer(data, plan.seeds, mode), sampler, seed, report, on_epoch)
    work.clear_dead()
    work.enqueue_first()
    if sampler == "grid" and (whole := len(work.grid())) > trials:
        report(f"the grid has {whole:,} points, of which {trials} are visited; search fewer settings with --only")
    with Interrupt(report) as interrupt:
        while (left := work.left(trials)) > 0:
            work.batch(min(population, left), interrupt)
            on_batch(study)
            if interrupt.wanted and work.left(trials) > 0:
                raise Stopped("stopped; the same command goes on from there")
        trainer = Trainer(data, plan.seeds, mode)  # its images may be more than those of the trials
        chosen = work.finalists(finalists)
        for number, trial in enumerate(chosen, 1):
            if interrupt.wanted:
                raise Stopped("stopped; the same command goes on from there")
            report(f"finalist {number} of {len(chosen)}: trial {trial.number}, for {in_full(plan).epochs} epochs")
            work.train_finalist(trial, trainer, interrupt)
    return study
