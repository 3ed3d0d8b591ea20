"""What a search leaves behind: the best settings, a table of all trials, and pictures."""

import csv
import io
import json
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from pcx.bench.config import Config
from pcx.bench.plots import new_figure
from pcx.bench.search import Plan, finals, winner
from pcx.bench.tasks import configure
from pcx.utils import atomic_write

ENOUGH = 5  # trials, for importances to say anything


def state_of(trial: FrozenTrial) -> str:
    return "diverged" if "diverged" in trial.user_attrs else trial.state.name.lower()


def completed(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def best_settings(plan: Plan, study: optuna.Study) -> dict[str, Any]:
    """What differs from the task's own settings: what was given by hand, and what was found."""
    left_out = ("validation", *(("epochs", "train_limit") if finals(study) else ()))  # finalists train as long as a run
    given = {name: value for name, value in plan.given.items() if name not in left_out}
    return given | winner(study)[0].params


def best_config(plan: Plan, study: optuna.Study) -> Config:
    """The config of a run with the best settings; nothing is held out from it."""
    return configure(plan.config.task, plan.config.algorithm, **best_settings(plan, study))


def command(plan: Plan, study: optuna.Study) -> str:
    """The command that runs the best settings."""
    pairs = " ".join(f"{name}={value}" for name, value in best_settings(plan, study).items())
    return f"pcx run {plan.config.task} --algorithm {plan.config.algorithm} --set {pairs}"


def write(plan: Plan, study: optuna.Study, folder: Path) -> list[str]:
    """Write ``best.json``, ``trials.csv`` and the pictures; returns the sentences about what could not be made."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "trials.csv", table(plan, study).encode())
    if not completed(study):
        return ["no trial was trained to its end, so there are no best settings and no pictures."]
    best, score = winner(study)
    facts = {
        "task": plan.config.task,
        "algorithm": plan.config.algorithm,
        "validation_top1": score,
        "trial": best.number,
        "seeds": plan.seeds,
        "validation": plan.config.validation,
        "settings": best_settings(plan, study),
        "command": command(plan, study),
        "config": best_config(plan, study).as_dict(),
    } | ({"finalists": finals(study)} if finals(study) else {})
    atomic_write(folder / "best.json", json.dumps(facts, indent=2).encode())
    history(study, folder / "history.png")
    slices(plan, study, folder / "slices.png")
    return importance(study, folder / "importance.png")


def table(plan: Plan, study: optuna.Study) -> str:
    """A line per trial, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    final = finals(study)
    writer.writerow(["trial", "state", "validation_top1", "epochs", "seconds", *plan.space, *(["in_full"] if final else [])])
    for trial in study.get_trials(deepcopy=False):
        row = [trial.user_attrs.get(name, "") for name in ("epochs", "seconds")]
        value = "" if trial.value is None else trial.value
        last = [] if not final else ["diverged" if final.get(trial.number, 0.0) is None else final.get(trial.number, "")]
        found = (trial.params.get(name, "") for name in plan.space)
        writer.writerow([trial.number, state_of(trial), value, *row, *found, *last])
    return text.getvalue()


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)


def history(study: optuna.Study, path: Path) -> None:
    """The score of every trial, the best so far, and what finalists have when trained in full (zero if they diverged)."""
    figure, ((axes,),) = new_figure(1)
    done = sorted(completed(study), key=lambda trial: trial.number)
    scores = [100 * float(trial.value or 0.0) for trial in done]
    axes.plot([trial.number for trial in done], scores, "o", label="trial")
    axes.step([t.number for t in done], [max(scores[: i + 1]) for i in range(len(done))], where="post", label="best so far")
    pruned = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    for name, mark in (("pruned", "|"), ("diverged", "x")):
        ended = [trial for trial in pruned if state_of(trial) == name]
        last = [
            100 * trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else 0.0
            for trial in ended
        ]
        if ended:
            axes.plot([trial.number for trial in ended], last, mark, label=f"{name} (its last accuracy)")
    if final := finals(study):
        axes.plot(list(final), [100 * (score or 0.0) for score in final.values()], "*", markersize=10, label="trained in full")
    axes.set(xlabel="trial", ylabel="validation accuracy (%)", title=study.study_name)
    axes.legend(fontsize=8)
    _save(figure, path)


def slices(plan: Plan, study: optuna.Study, path: Path) -> None:
    """The score against every setting; a colour is the number of the trial. Momentum and the state's rate come first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    ahead = [name for name in ("momentum_h", "lr_h") if name in plan.space]
    names = [*ahead, *(name for name in plan.space if name not in ahead)]
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4 * columns, 3.2 * rows), layout="constrained", squeeze=False)
    done = completed(study)
    scores = [100 * float(trial.value or 0.0) for trial in done]
    for axes, name in zip(grid.flat, names, strict=False):
        kind, *values = plan.space[name]
        found = [trial.params[name] for trial in done]
        at = [values.index(value) for value in found] if kind == "choice" else found
        axes.scatter(at, scores, c=[trial.number for trial in done], cmap="viridis", s=18)
        axes.set(xlabel=name, ylabel="validation accuracy (%)", xscale="log" if kind == "log" else "linear")
        if kind == "choice":
            axes.set_xticks(range(len(values)), list(map(str, values)))
        else:
            room = 0.05 * (values[1] - values[0])
            axes.set_xlim((values[0] / 1.1, values[1] * 1.1) if kind == "log" else (values[0] - room, values[1] + room))
            axes.xaxis.set_minor_formatter(NullFormatter())
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    figure.suptitle(study.study_name, fontsize=9)
    _save(figure, path)


def importance(study: optuna.Study, path: Path) -> list[str]:
    """How much of the score's variance each setting explains (fANOVA; without scikit-learn PED-ANOVA)."""
    count = len(completed(study))
    if count < ENOUGH:
        return [f"no importance.png: {count} trials were trained to the end, and at least {ENOUGH} are needed."]
    if len({trial.value for trial in completed(study)}) == 1:
        return ["no importance.png: all trials have the same score."]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PED-ANOVA is called experimental
        try:
            try:
                import sklearn  # noqa: F401

                method = "fANOVA"
                found = optuna.importance.get_param_importances(
                    study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
                )
            except ImportError:
                method = "PED-ANOVA"
                found = optuna.importance.get_param_importances(
                    study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
                )
        except (ImportError, ValueError, RuntimeError) as error:
            return [f"no importance.png: {error}"]
    figure, ((axes,),) = new_figure(1)
    axes.barh(list(found)[::-1], list(found.values())[::-1])
    axes.set(xlabel=f"importance ({method})", title=study.study_name)
    _save(figure, path)
    return []
