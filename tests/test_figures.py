"""Figures from records: which record is chosen, what is drawn, what is missing, refusals."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import go_to_an_empty_place, run_command

import pcx.data
from pcx.bench import figures, runs
from pcx.bench.config import ConfigError
from pcx.bench.configs import accuracy
from pcx.bench.tasks import configure

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """An empty place; figures are closed at the end."""
    go_to_an_empty_place(monkeypatch, tmp_path)
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def made(task: str, algorithm: str, accuracies: list[float] | list[list[float]], *, quick: bool = False,
         time: str = "2025-01-01T00:00:00Z", diverged: tuple[int, ...] = (), **changes: Any) -> dict[str, Any]:  # fmt: skip
    """A record as a run writes it, with final accuracies or whole curves of the seeds, in shares of 1."""
    curves = [a if isinstance(a, list) else [a] for a in accuracies]
    last = [curve[-1] for curve in curves]
    stats = {"mean": float(np.mean(last)), "std": float(np.std(last)), "seeds": last}
    results = {f"test_{metric}": stats for metric in ("top1", "top5")}
    return {
        "config": configure(task, algorithm, **changes).as_dict(),
        "seeds": list(range(len(curves))),
        "quick": quick,
        "time": time,
        "final": results,
        "best": {name: stats | {"mean": 0.999} for name in results},  # never drawn
        "diverged": list(diverged),
        "curves": {"test_top1": curves},
    }


def write(*records: dict[str, Any], path: str = "results/records.jsonl") -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("".join(json.dumps(r) + "\n" for r in records))


# --- depth


def depth_lines(records: list[dict[str, Any]], title: str, algorithm: str) -> tuple[Any, Any, Any]:
    """Of one panel and algorithm: our line, its error bars, and the paper's line."""
    figure, _ = figures.depth(records)
    (axes,) = [axes for axes in figure.axes if axes.get_title() == title]
    (ours,) = [bars for bars in axes.containers if bars.get_label() == algorithm]
    colour = ours.lines[0].get_color()
    (paper,) = [line for line in axes.lines if line.get_linestyle() == "--" and line.get_color() == colour]
    return ours.lines[0], ours.lines[2][0], paper


def test_depth_draws_ours_and_the_papers():
    """Mean and deviation of the final epoch where there is a record, gaps elsewhere; the paper's figures are always there."""
    records = [
        made("cifar10/vgg5", "pn", [0.86, 0.88, 0.90]),
        made("cifar10/vgg7", "pn", [0.7]),
        made("cifar10/resnet18", "pn", [0.5, 0.6]),
    ]
    ours, bars, paper = depth_lines(records, "CIFAR-10", "pn")
    assert np.allclose(ours.get_ydata(), [88, 70, np.nan, 55], equal_nan=True)
    spans = [segment[:, 1].tolist() for segment in bars.get_segments() if len(segment) and not np.isnan(segment).any()]
    spread = 100 * np.std([0.86, 0.88, 0.90])
    assert np.allclose(spans, [[88 - spread, 88 + spread], [50, 60]])  # one seed has no deviation
    assert paper.get_ydata().tolist() == [88.42, 85.97, 76.9, 62.45]  # Table 1
    assert np.allclose(ours.get_xdata(), paper.get_xdata())
    assert np.array_equal(np.round(paper.get_xdata()), range(4))
    assert (ours.get_linestyle(), paper.get_markerfacecolor()) == ("-", "none")
    assert ours.get_markerfacecolor() == ours.get_color()
    assert paper.get_linewidth() < ours.get_linewidth()


def test_depth_has_all_panels_and_algorithms_with_one_record():
    """Three panels of eight colours; the paper's figures in their places, and what is missing by name."""
    figure, text = figures.depth([made("cifar10/vgg5", "ipc", [0.5])])
    assert [axes.get_title() for axes in figure.axes] == ["CIFAR-10", "CIFAR-100", "Tiny ImageNet"]
    rest = ", ".join(algorithm for algorithm in accuracy.ALGORITHMS if algorithm != "ipc")
    assert text[:2] == ["cifar10/vgg5: ipc 50.00 (1 seed)", f"missing: cifar10/vgg5 by {rest}"]
    others = [f"{d}/{m}" for d in ("cifar10", "cifar100", "tinyimagenet") for m in ("vgg5", "vgg7", "vgg9", "resnet18")][1:]
    assert text[2:-1] == [f"missing: {task} by {', '.join(accuracy.ALGORITHMS)}" for task in others]
    assert text[-1] == "1 of 96 cells drawn, 95 missing"
    for axes, dataset in zip(figure.axes, ("cifar10", "cifar100", "tinyimagenet"), strict=True):
        assert [label.get_text() for label in axes.get_xticklabels()] == ["VGG-5", "VGG-7", "VGG-9", "ResNet-18"]
        dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert len({line.get_color() for line in dashed}) == len(dashed) == len(accuracy.ALGORITHMS)
        for i, line in enumerate(dashed):
            models = ("vgg5", "vgg7", "vgg9", "resnet18")
            assert line.get_ydata().tolist() == [accuracy.PAPER[model, dataset]["top1"][i][0] for model in models]
        drawn = [bars.get_label() for bars in axes.containers if not np.isnan(bars.lines[0].get_ydata()).all()]
        assert drawn == (["ipc"] if dataset == "cifar10" else [])


def test_depth_takes_the_records_of_the_table():
    """Most seeds, then the newest; not quick ones, and not those with other settings."""
    task = ("cifar100/vgg5", "cn")
    records = [
        made(*task, [0.61] * 3, time="2025-01-02T00:00:00Z"),
        made(*task, [0.62] * 3, time="2025-01-03T00:00:00Z", precision="tf32"),
        made(*task, [0.63] * 2, time="2025-01-04T00:00:00Z"),
        made(*task, [0.64] * 9, quick=True),
        made(*task, [0.65] * 9, epochs=3),
        made(*task, [0.66] * 9, T=3),
    ]
    for order in (records, records[::-1]):
        ours, *_ = depth_lines(order, "CIFAR-100", "cn")
        assert np.allclose(ours.get_ydata(), [62, np.nan, np.nan, np.nan], equal_nan=True)


def test_depth_from_the_command(monkeypatch):
    """The picture lies next to the records, and the cells are named."""
    monkeypatch.setenv("PCX_RESULTS", "mine/file.jsonl")
    vgg5 = [made("cifar10/vgg5", "pc_se", [0.88]), made("cifar10/vgg5", "bp_se", [0.9, 0.92])]
    write(*vgg5, made("tinyimagenet/vgg7", "nn", [0.3]), made("mnist/mlp", "nn", [0.98]), path="mine/file.jsonl")
    code, out, err = run_command("figure", "depth")
    assert (code, err) == (0, "")
    told = out.splitlines()
    assert len([line for line in told if line.startswith("missing: ")]) == 12
    assert "missing: cifar10/vgg5 by pc_ce, pn, nn, cn, ipc, bp_ce" in told
    assert [line for line in told if not line.startswith("missing: ")] == [
        "cifar10/vgg5: pc_se 88.00 (1 seed), bp_se 91.00 (2 seeds)",
        "tinyimagenet/vgg7: nn 30.00 (1 seed)",
        "3 of 96 cells drawn, 93 missing",
        "mine/figure-depth.png, from mine/file.jsonl",
    ]
    assert Path("mine/figure-depth.png").read_bytes().startswith(b"\x89PNG")
    code, again, _ = run_command("figure", "depth", "--out", "new/picture.png")
    assert (code, again.splitlines()[-1]) == (0, "new/picture.png, from mine/file.jsonl")
    assert Path("new/picture.png").exists()


# --- skip

VGG19 = ("cifar10/vgg19", "pc_se")


def skip_axes(*records: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Label to line and band; the paper's lines have no band."""
    figure, _ = figures.skip(records)
    (axes,) = figure.axes
    bands = [*axes.collections, None, None]
    return {line.get_label(): (line, band) for line, band in zip(axes.lines, bands, strict=True)}


def test_skip_draws_mean_and_deviation_over_epochs():
    """A line per skip and weight learning rate; the band is one deviation; the paper's figures are level lines."""
    lines = skip_axes(
        made(*VGG19, [[0.3, 0.4], [0.5, 0.8]], epochs=2, skip=True),
        made(*VGG19, [[0.1, 0.2]], epochs=2, lr_theta=0.1),
        made(*VGG19, [[0.1, 0.15]], epochs=2),
    )
    names = ["with skip, lr_theta=0.0001 (2 seeds)", "no skip, lr_theta=0.0001 (1 seed)", "no skip, lr_theta=0.1 (1 seed)"]
    papers = ["paper, with skip, best test epoch", "paper, no skip, best test epoch"]
    assert list(lines) == [f"{name}\nepochs=2" for name in names] + papers
    line, band = lines[f"{names[0]}\nepochs=2"]
    assert np.allclose(line.get_xydata(), [[1, 40], [2, 60]])
    (path,) = band.get_paths()
    assert {(round(x), round(y, 6)) for x, y in path.vertices} == {(1, 30), (1, 50), (2, 40), (2, 80)}
    assert np.allclose(lines[f"{names[2]}\nepochs=2"][0].get_ydata(), [10, 20])
    for name, value in zip(papers, (73.95, 25.32), strict=True):
        assert set(lines[name][0].get_ydata()) == {value}
        assert lines[name][0].get_linestyle() == "--"


def test_skip_takes_the_most_seeds_then_the_newest_and_no_other_cells():
    curve = [0.1] * 29
    records = [
        made(*VGG19, [[*curve, 0.2]] * 3, time="2025-01-02T00:00:00Z"),
        made(*VGG19, [[*curve, 0.3]] * 3, time="2025-01-03T00:00:00Z", precision="bf16"),
        made(*VGG19, [[*curve, 0.4]] * 2, time="2025-01-04T00:00:00Z"),
        made(*VGG19, [[*curve, 0.5]] * 9, quick=True),
        made("cifar10/vgg19", "pc_ce", [[*curve, 0.6]] * 9),
        made("cifar10/vgg7", "pc_se", [[*curve, 0.7]] * 9),
        made("cifar100/vgg19", "pc_se", [[*curve, 0.8]] * 9),
    ]
    for order in (records, records[::-1]):
        (label, (line, _)), *papers = skip_axes(*order).items()
        assert label == "no skip, lr_theta=0.0001 (3 seeds)"
        assert len(papers) == 2
        assert line.get_ydata()[-1] == pytest.approx(30)


def test_a_diverged_seed_counts_to_the_end():
    """It keeps its last accuracy: the line ends at the mean of the record, and the label says so."""
    found = made(*VGG19, [[0.2, 0.4, 0.6], [0.1]], epochs=3, lr_theta=0.1, diverged=(1,))
    lines = skip_axes(found)
    line, _ = lines["no skip, lr_theta=0.1 (2 seeds, 1 diverged)\nepochs=3"]
    assert np.allclose(line.get_ydata(), [15, 25, 35])
    assert line.get_ydata()[-1] == pytest.approx(100 * found["final"]["test_top1"]["mean"])


def test_runs_of_the_same_rate_with_other_settings_are_other_lines():
    """The four runs of the study are four lines, and none is missing."""
    curves = [[0.1] * 30]
    records = [made(*VGG19, curves, **changes) for changes in figures.SKIP_RUNS]
    _, text = figures.skip(records)
    assert text[-1] == "4 lines drawn, 0 of the 4 runs of the study missing"
    rest = "activation=gelu lr_h=0.00078125 momentum_h=0.99 weight_decay=0.0001"
    assert text[2] == f"no skip, lr_theta=0.0001 (1 seed) {rest}: 10.00 ± 0.00 %"
    assert text[1] == "no skip, lr_theta=0.0001 (1 seed): 10.00 ± 0.00 %"
    _, text = figures.skip(records[:2])
    missing = [figures.skip_command(changes) for changes in figures.SKIP_RUNS[2:]]
    assert text[2:] == [*(f"missing: {m}" for m in missing), "2 lines drawn, 2 of the 4 runs of the study missing"]


def test_skip_from_the_command():
    write(made(*VGG19, [[0.3] * 30], skip=True))
    code, out, err = run_command("figure", "skip")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "with skip, lr_theta=0.0001 (1 seed): 30.00 ± 0.00 %"
    assert out.splitlines()[-1] == "results/figure-skip.png, from results/records.jsonl"
    assert Path("results/figure-skip.png").read_bytes().startswith(b"\x89PNG")


def test_the_documented_commands_are_the_four_runs(monkeypatch):
    """The commands of docs/benchmark.md reach `runs.run` with the settings of the paper's study."""
    text = (ROOT / "docs/benchmark.md").read_text()
    commands = [re.sub(r"\\\n\s*", "", c) for c in re.findall(r"^pcx run cifar10/vgg19 (?:.*\\\n)*.*$", text, re.MULTILINE)]
    assert commands == [figures.skip_command(changes) for changes in figures.SKIP_RUNS]
    configs = []

    def run(config: Any, data: Any, seeds: list[int], *_: Any, **__: Any) -> Any:
        assert seeds == [0, 1, 2]
        configs.append(config)
        raise ValueError("enough")

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(pcx.data, "load", lambda name: None)
    monkeypatch.setattr("pcx.bench.modes.use_compilation_cache", lambda: None)
    for command in commands:
        assert run_command(*command.split()[1:])[2] == "error: enough\n"
    assert {(c.epochs, c.augmentation, c.batch, c.hyper.T) for c in configs} == {(30, "rotate5_flip", 128, 24)}
    names = ("lr_h", "momentum_h", "lr_theta", "weight_decay")
    reached = [(c.options.skip, c.options.activation, *(getattr(c.hyper, n) for n in names)) for c in configs]
    tuned, plain = ("leaky_relu", 0.5 / 128, 0.5, 1e-4, 5e-4), ("gelu", 0.1 / 128, 0.99)
    assert reached == [(True, *tuned), (False, *tuned), (False, *plain, 0.1, 1e-4), (False, *plain, 1e-4, 1e-4)]


# --- help and refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dept"], "there is no figure 'dept'; near: depth."),
        (["skpi"], "there is no figure 'skpi'; near: skip."),
        (["depth", "--out", "picture"], "--out is 'picture'; a figure is a .png file."),
        (["depth", "--results", "none.jsonl"], "there is no file none.jsonl; --results names a file of records."),
        (["depth"], "no record of a cell of the figure; make one with: pcx run cifar10/vgg5 -a pc_se"),
        (
            ["skip"],
            "no record of cifar10/vgg19 by pc_se; make one with: "
            "pcx run cifar10/vgg19 -a pc_se --seeds 3 --set skip=true",
        ),
    ],
)  # fmt: skip
def test_refusals(arguments, message):
    """One sentence, exit code 2, and nothing is written."""
    assert run_command("figure", *arguments) == (2, "", f"error: {message}\n")
    assert list(Path().iterdir()) == []


def test_a_quick_record_is_no_record_of_the_skip_study():
    with pytest.raises(ConfigError, match="no record of cifar10/vgg19"):
        figures.skip([made(*VGG19, [[0.3, 0.3]], quick=True, skip=True)])


@pytest.mark.parametrize("broken", [
    {"curves": None}, {"curves": {}}, {"curves": {"test_top1": [[None]]}}, {"curves": {"test_top1": [[]]}},
    {"config": ["epochs"]}, {"config": ["hyper"]}, {"config": ["options"]},
], ids=str)  # fmt: skip
def test_a_record_without_what_is_drawn_is_named(broken):
    whole = made(*VGG19, [[0.3, 0.3]], skip=True)
    if isinstance(broken.get("config"), list):
        broken = {"config": {n: v for n, v in whole["config"].items() if n not in broken["config"]}}
    with pytest.raises(ConfigError, match="the record of cifar10/vgg19 of 2025-01-01T00:00:00Z lacks curves or settings"):
        figures.skip([whole | broken])
    with pytest.raises(ConfigError, match="lacks curves or settings"):
        figures.skip([{name: value for name, value in whole.items() if name != "diverged"}])


def test_a_broken_file_is_one_sentence():
    Path("broken.jsonl").write_text('{"config"\n')
    code, out, err = run_command("figure", "depth", "--results", "broken.jsonl")
    assert (code, out) == (2, "")
    assert err == "error: line 1 of broken.jsonl is not a record; remove it or restore the file.\n"


def test_help_has_examples():
    code, out, _ = run_command("figure", "--help")
    assert code == 0
    for part in ("pcx figure depth", "pcx figure skip --out skip.png", "--results", "--out", "nothing is trained"):
        assert part in out
    assert set(re.findall(r"pcx figure (\w+) ", out)) == set(figures.FIGURES)
