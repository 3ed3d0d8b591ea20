"""The benchmark from Python: what `train` returns, what it learns, and the published settings and figures."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import untyped

import pcx.data
from pcx.bench import ConfigError, Result, api, configure, runs, train
from pcx.bench.config import from_dict
from pcx.bench.configs import accuracy, generative, memory, sampling, timing

ROOT = Path(__file__).parent.parent

SETTINGS: dict[str, Any] = {"epochs": 3, "width": 64, "hidden": 1, "activation": "relu", "lr_theta": 0.01, "batch": 32}
TINY: dict[str, Any] = {"epochs": 2, "width": 4, "hidden": 1, "train_limit": 128}


@pytest.fixture(autouse=True)
def single(monkeypatch, tmp_path):
    """Float32, nothing measured, nothing written outside of the test's own folder."""
    monkeypatch.setenv("PCX_RESULTS", str(tmp_path / "records.jsonl"))
    monkeypatch.setenv("PCX_CACHE", str(tmp_path / "cache"))
    for module in (api, runs):
        monkeypatch.setattr(module, "choose_mode", lambda *_: ("scan", ""))
    with jax.enable_x64(False):
        yield


@pytest.fixture(scope="module")
def result() -> Result:
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(False):
        patch.setattr(api, "choose_mode", lambda *_: ("scan", ""))
        return train("digits/mlp", "pc_se", seeds=[4, 9], **SETTINGS)


def forward(model: Any, images: np.ndarray) -> np.ndarray:
    """The outputs of an MLP with relu, in numpy."""
    x = ((images.astype(np.float64) / 16 - 0.5) / 0.5).reshape(len(images), -1)
    for layer in model.layers[:-1]:
        x = np.maximum(x @ np.asarray(layer.weight, np.float64).T + np.asarray(layer.bias), 0)
    return x @ np.asarray(model.layers[-1].weight, np.float64).T + np.asarray(model.layers[-1].bias)


# --- results


def test_predictive_coding_learns_the_digits(result):
    assert result.accuracy.shape == (2, 3)
    assert (result.accuracy[:, -1] > 0.9).all()
    assert (result.array("train_loss")[:, -1] < 0.5 * result.array("train_loss")[:, 0]).all()


@pytest.mark.parametrize("algorithm", ["bp_ce", "ipc"])
def test_other_algorithms_learn_the_digits(algorithm):
    settings = {"lr_theta": 0.002} if algorithm == "ipc" else {}
    learned = train("digits/mlp", algorithm, **(SETTINGS | settings))
    assert learned.seeds == [0]
    assert learned.accuracy[0, -1] > 0.9


def test_arrays_are_seeds_by_epochs_of_the_lines(result):
    for metric in ("test_top1", "test_top5", "train_loss"):
        array = result.array(metric)
        assert array.shape == (2, 3)
        for line in result.lines:
            assert array[[4, 9].index(line["seed"]), line["epoch"] - 1] == line[metric]
    assert len(result.lines) == 6
    np.testing.assert_array_equal(result.accuracy, result.array("test_top1"))


def test_the_model_of_a_seed_has_the_reported_accuracy(result):
    test = pcx.data.load("digits").test
    for i, seed in enumerate((4, 9)):
        right = np.sum(np.argmax(forward(result.model(seed), test.images), axis=1) == test.labels)
        assert right / len(test) == pytest.approx(result.accuracy[i, -1], abs=1e-6)
    with pytest.raises(ValueError):
        result.model(5)


def test_the_table_gives_each_seed_mean_and_deviation(result):
    rows = result.table().splitlines()
    final = 100 * result.accuracy[:, -1]
    assert len(rows) == 4
    for row, seed, value in zip(rows[1:3], (4, 9), final, strict=True):
        assert row.split()[:2] == [str(seed), f"{value:.2f}%"]
    assert rows[3].split() == ["mean", f"{final.mean():.2f}%", "±", f"{abs(final[0] - final[1]) / 2:.2f}"]


def test_the_plot_is_a_picture(result, tmp_path):
    path = result.plot(tmp_path / "curves.png")
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_the_plot_needs_no_argument(result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert result.plot() is not None


def test_a_seed_that_stopped_ends_in_nan():
    stopped = train(
        "digits/mlp", "bp_se", seeds=2, **(TINY | {"lr_theta": 0.0, "validation": 0.25, "patience": 1, "epochs": 4})
    )
    assert np.isnan(stopped.accuracy).tolist() == [[False, False, True, True]] * 2
    assert len(stopped.table().splitlines()) == 4


def test_a_sweep_gives_every_seed_its_own_setting():
    swept = train("digits/mlp", "bp_se", seeds=2, sweep={"lr_theta": [0.0, 0.05]}, **TINY)
    loss = swept.array("test_loss")
    assert loss[0, 0] == loss[0, 1]  # a rate of zero does not learn
    assert loss[1, 0] != loss[1, 1]
    alone = train("digits/mlp", "bp_se", seeds=[1], **(TINY | {"lr_theta": 0.05}))
    np.testing.assert_allclose(alone.array("test_loss")[0], loss[1], rtol=1e-5)


def test_a_run_with_a_folder_returns_the_same_and_is_recorded(tmp_path):
    without = train("digits/mlp", "bp_se", seeds=2, **TINY)
    with_folder = train("digits/mlp", "bp_se", seeds=2, out=tmp_path / "run", **TINY)
    for metric in ("test_top1", "test_loss", "train_loss"):
        np.testing.assert_array_equal(without.array(metric), with_folder.array(metric))
    assert (tmp_path / "run" / "curves.png").exists()
    assert json.loads((tmp_path / "records.jsonl").read_text())["seeds"] == [0, 1]
    np.testing.assert_array_equal(without.model(1).layers[0].weight, with_folder.model(1).layers[0].weight)


def test_a_setting_is_swept_or_given():
    with pytest.raises(ConfigError, match="lr_theta is given as a setting and as a sweep"):
        train("digits/mlp", "bp_se", seeds=2, sweep={"lr_theta": [0.0, 0.05]}, **TINY | {"lr_theta": 0.1})


def test_a_sweep_with_a_folder_is_done_or_refused(tmp_path):
    """But not silently left out."""
    try:
        swept = train("digits/mlp", "bp_se", seeds=2, out=tmp_path / "run", sweep={"lr_theta": [0.0, 0.05]}, **TINY)
    except ConfigError:
        return
    assert swept.array("test_loss")[0, 0] == swept.array("test_loss")[0, 1]


@pytest.mark.parametrize("seeds", [True, [-1], 0, [], "3", 2.5, None, [1.5], ["0"], [1, 1]])
def test_seeds_that_cannot_be_meant_are_refused_by_a_sentence(seeds):
    with untyped(), pytest.raises(ConfigError, match=re.escape(f"seeds is {seeds!r}; give how many, or a list")):
        train("digits/mlp", "bp_se", seeds=seeds, **TINY)


def test_a_result_says_what_it_has(result):
    with pytest.raises(ConfigError, match="no model of seed 7; there are those of 4, 9"):
        result.model(7)
    for metric in ("foo", "energies"):
        with pytest.raises(ConfigError, match=f"no metric '{metric}'; there are .*test_loss.*test_top1"):
            result.array(metric)
    with pytest.raises(ConfigError, match="no checkpoint"):
        dataclasses.replace(result, population=None).model(4)


# --- configs


def test_unknown_names_and_values_are_refused():
    for task, algorithm, settings, told in [
        ("digit/mlp", "pc_se", {}, "digits"),
        ("digits/mpl", "pc_se", {}, "mlp"),
        ("digits/mlp", "pc_s", {}, "pc_se"),
        ("digits/mlp", "pc_se", {"lr_hh": 0.1}, "lr_h"),
        ("digits/mlp", "pc_se", {"T": 2.5}, "whole number"),
        ("digits/mlp", "pc_se", {"lr_h": -1.0}, "lr_h"),
    ]:
        with pytest.raises(ConfigError, match=told):
            train(task, algorithm, **settings)


def test_a_config_survives_json():
    config = configure("mnist/mlp", "cn", T=3, precision="bf16")
    again = from_dict(json.loads(json.dumps(config.as_dict())))
    assert again == config
    assert again.digest() == config.digest()
    assert configure("mnist/mlp", "cn", T=4, precision="bf16").digest() != config.digest()


# from the published experiments, copied by hand
PUBLISHED_MLP: list[tuple[str, str, dict[str, Any]]] = [
    ("mnist", "pc_se", {"T": 8, "lr_h": 0.010534787245955935, "momentum_h": 0.65, "lr_theta": 0.0002968930522737348,
                        "weight_decay": 0.0003550241114984682, "activation": "gelu"}),
    ("mnist", "pc_ce", {"T": 5, "lr_h": 0.01828189494026352, "momentum_h": 0.35, "lr_theta": 0.00029959151754717025,
                        "weight_decay": 0.003314230264294929, "activation": "gelu"}),
    ("mnist", "nn", {"T": 4, "lr_h": 0.06860685364419071, "momentum_h": 0.5, "lr_theta": 0.0002690771766921473,
                     "weight_decay": 0.0046099332767522375, "beta": 0.2, "beta_ir": 0.02, "direction": "-"}),
    ("mnist", "cn", {"T": 7, "beta": 0.55, "beta_ir": 0.0, "signs": "-----+++-++---+---+-++--+", "direction": "±"}),
    ("mnist", "ipc", {"T": 8, "lr_h": 0.8495322487988946, "momentum_h": 0.35, "lr_theta": 0.0002525584875644335,
                      "weight_decay": 0.032533390000821956, "activation": "leaky_relu"}),
    ("mnist", "bp_ce", {"lr_theta": 0.0002809966056688163, "weight_decay": 0.0014781820367232845, "activation": "hard_tanh"}),
    ("fashionmnist", "pc_se", {"T": 5, "lr_h": 0.026070879231635192, "momentum_h": 0.1, "lr_theta": 0.0002972210629627541,
                               "weight_decay": 0.0018383293983087593, "activation": "gelu"}),
    ("fashionmnist", "pn", {"T": 8, "lr_h": 0.012152308689680013, "momentum_h": 0.55, "beta": 0.75, "beta_ir": 0.02}),
    ("fashionmnist", "nn", {"T": 6, "lr_h": 0.028079645950117624, "beta": 0.9, "activation": "leaky_relu"}),
    ("fashionmnist", "cn", {"T": 8, "lr_h": 0.06221269087448299, "beta": 0.25, "signs": "-+++-+++++-+-++--+-++++++"}),
    ("fashionmnist", "bp_se", {"lr_theta": 0.0002751176541841286, "weight_decay": 0.0001717093341589651, "activation": "relu"}),
]  # fmt: skip
PUBLISHED_VGG: list[tuple[str, str, str, dict[str, Any]]] = [
    ("vgg5", "cifar10", "pc_se", {"T": 7, "lr_h": 0.02348681827141059, "momentum_h": 0.3, "lr_theta": 0.0002657691155688603,
                                  "weight_decay": 0.0066559627972820395, "activation": "gelu", "augmentation": "crop4_flip"}),
    ("vgg5", "cifar10", "pn", {"T": 7, "beta": 0.32297201469734277, "beta_ir": 0.02, "momentum_h": 0.1}),
    ("vgg5", "cifar10", "cn", {"T": 7, "beta": 0.9, "signs": "+++++-++---++---+------+-+---++----------+------"}),
    ("vgg5", "cifar100", "nn", {"T": 12, "lr_h": 0.03325378866925405, "momentum_h": 0.25, "beta": 0.15000000000000002}),
    ("vgg5", "cifar100", "ipc", {"T": 8, "lr_h": 0.8806842950826396, "momentum_h": 0.55, "activation": "leaky_relu"}),
    ("vgg5", "tinyimagenet", "pc_ce", {"T": 7, "lr_h": 0.010044339247287183, "lr_theta": 4.463151374486534e-05,
                                       "activation": "hard_tanh", "augmentation": "crop56_flip"}),
    ("vgg5", "tinyimagenet", "bp_se", {"lr_theta": 9.376894185412171e-05, "weight_decay": 0.0004684338798515865}),
    ("vgg7", "cifar100", "pc_se", {"T": 12, "lr_h": 0.021020497754927873, "lr_theta": 0.00018942597048071067}),
    ("vgg7", "cifar100", "bp_ce", {"lr_theta": 0.00013293220201776088, "weight_decay": 0.0011361686420755476}),
    ("vgg7", "tinyimagenet", "nn", {"T": 12, "lr_h": 0.12324451306713315, "momentum_h": 0.95, "beta": 0.9, "beta_ir": 0.0}),
    ("vgg7", "tinyimagenet", "ipc", {"T": 12, "lr_h": 0.01489876698349598, "momentum_h": 0.7,
                                     "weight_decay": 0.009724917538008335, "activation": "hard_tanh"}),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "algorithm", "wanted"), PUBLISHED_MLP)
def test_published_settings_reach_the_config(dataset, algorithm, wanted):
    plain = configure(f"{dataset}/mlp", algorithm).as_dict()
    values = plain | plain["hyper"] | plain["options"]
    wanted = wanted | {"epochs": 25, "batch": 128, "augmentation": "none", "hidden": 3, "width": 128}
    wanted |= {"schedule": "warm_up_cosine", "validation": 0.0, "train_limit": 0}
    assert {name: values[name] for name in wanted} == wanted
    if algorithm.endswith(("_se", "_ce")):
        assert values["loss"] == algorithm[-2:]


@pytest.mark.parametrize(("model", "dataset", "algorithm", "wanted"), PUBLISHED_VGG)
def test_published_settings_of_the_convolutional_models(model, dataset, algorithm, wanted):
    """They are kept for models that come later, or reach the config of those that are there."""
    values = accuracy.SETTINGS[model, dataset, algorithm]
    wanted = wanted | {"epochs": 50, "batch": 128}
    assert {name: values[name] for name in wanted} == wanted
    if model in pcx.models.names():
        plain = configure(f"{dataset}/{model}", algorithm).as_dict()
        reached = plain | plain["hyper"] | plain["options"]
        assert {name: reached[name] for name in values} == values


def test_every_group_with_published_settings_has_all_algorithms():
    groups = [("mlp", "mnist"), ("mlp", "fashionmnist"), ("vgg5", "cifar10"), ("vgg5", "cifar100"), ("vgg5", "tinyimagenet"),
              ("vgg7", "cifar100"), ("vgg7", "tinyimagenet")]  # fmt: skip
    eight = {"pc_ce", "pc_se", "pn", "nn", "cn", "ipc", "bp_ce", "bp_se"}
    for group in groups:
        assert {algorithm for model, dataset, algorithm in accuracy.SETTINGS if (model, dataset) == group} == eight
    rest = {key for key in accuracy.SETTINGS if key[:2] not in groups}
    found = {("resnet18", "cifar10", "pc_se"), ("vgg9", "cifar10", "pc_se")}
    assert rest == {("vgg7", "cifar10", "bp_se"), ("vgg7", "cifar10", "pc_se"), ("vgg19", "cifar10", "pc_se")} | found


@pytest.mark.parametrize("model", ["vgg9", "resnet18"])
def test_settings_from_a_search_are_those_that_it_found(model):
    """On the validation split, by the record that is kept; the budget of its trials is not a setting."""
    best = json.loads((ROOT / f"results/search/cifar10-{model}-pc_se/best.json").read_text())
    found = {name: value for name, value in best["settings"].items() if name not in ("epochs", "train_limit", "precision")}
    settings = accuracy.SETTINGS[model, "cifar10", "pc_se"]
    assert {name: settings[name] for name in found} == found
    assert settings.keys() - found.keys() == {"epochs", "batch", "augmentation"}


def test_every_cell_of_the_table_has_a_config():
    """112 cells; where nothing is published, the settings of the nearest model on the same data, or of VGG-7 on CIFAR-100."""
    cells = [(model, dataset, algorithm) for model, dataset in accuracy.PAPER for algorithm in accuracy.ALGORITHMS]
    assert len(cells) == 112
    sources = {"vgg9": "vgg7", "resnet18": "vgg7"}
    for model, dataset, algorithm in cells:
        config = configure(f"{dataset}/{model}", algorithm)
        found = (model, dataset, algorithm) in accuracy.SETTINGS
        source = model if found else sources.get(model, model), dataset, algorithm
        if source not in accuracy.SETTINGS:
            assert dataset == "cifar10"
            source = "vgg7", "cifar100", algorithm
        plain = config.as_dict()
        reached = plain | plain["hyper"] | plain["options"]
        assert {name: reached[name] for name in accuracy.SETTINGS[source]} == accuracy.SETTINGS[source]


def test_settings_of_the_skip_study():
    """The state learning rate of 0.5 was not multiplied by the batch size there: per sample it is 0.5 / 128."""
    config = configure("cifar10/vgg19", "pc_se", skip=True)
    assert (config.hyper.T, config.hyper.lr_h, config.hyper.momentum_h) == (24, 0.00390625, 0.5)
    assert (config.hyper.lr_theta, config.hyper.weight_decay, config.epochs) == (1e-4, 5e-4, 30)
    assert (config.augmentation, config.options.activation, config.options.skip) == ("rotate5_flip", "leaky_relu", True)


def test_a_set_without_published_settings_has_those_of_mnist_and_its_own_epochs():
    digits, mnist = configure("digits/mlp", "pc_se"), configure("mnist/mlp", "pc_se")
    assert (digits.hyper.T, digits.hyper.lr_h, digits.hyper.momentum_h) == (8, mnist.hyper.lr_h, mnist.hyper.momentum_h)
    assert digits.epochs > mnist.epochs
    assert digits.batch < mnist.batch


# --- the paper's figures, copied by hand from its tables


@pytest.mark.parametrize(
    ("model", "dataset", "metric", "algorithm", "figure"),
    [
        ("mlp", "mnist", "top1", "pc_ce", (98.11, 0.03)),
        ("mlp", "mnist", "top1", "ipc", (98.45, 0.09)),
        ("mlp", "fashionmnist", "top1", "cn", (89.56, 0.05)),
        ("vgg5", "cifar10", "top1", "pn", (88.42, 0.66)),
        ("vgg5", "cifar100", "top1", "pc_se", (54.08, 1.66)),
        ("vgg5", "cifar100", "top5", "bp_se", (85.85, 0.27)),
        ("vgg5", "tinyimagenet", "top1", "nn", (46.40, 0.1)),
        ("vgg5", "tinyimagenet", "top5", "bp_ce", (69.23, 0.23)),
        ("vgg7", "cifar10", "top1", "bp_se", (89.91, 0.1)),
        ("vgg7", "cifar100", "top5", "nn", (81.50, 0.41)),
        ("vgg7", "tinyimagenet", "top1", "cn", (35.59, 7.69)),
        ("vgg9", "cifar100", "top1", "nn", (60.74, 0.75)),
        ("vgg9", "tinyimagenet", "top5", "ipc", (50.48, 0.05)),
        ("resnet18", "cifar10", "top1", "ipc", (70.44, 0.81)),
        ("resnet18", "cifar100", "top5", "bp_ce", (92.14, 0.12)),
        ("resnet18", "tinyimagenet", "top1", "cn", (4.40, 0.49)),
    ],
)
def test_accuracies_of_the_paper(model, dataset, metric, algorithm, figure):
    order = ("pc_ce", "pc_se", "pn", "nn", "cn", "ipc", "bp_ce", "bp_se")
    assert accuracy.PAPER[model, dataset][metric][order.index(algorithm)] == figure


def test_the_papers_accuracies_are_complete():
    assert len(accuracy.PAPER) == 14
    for (_, dataset), metrics in accuracy.PAPER.items():
        assert list(metrics) == (["top1", "top5"] if dataset in ("cifar100", "tinyimagenet") else ["top1"])
        assert all(len(figures) == 8 for figures in metrics.values())


def test_other_figures_of_the_paper():
    assert generative.PAPER["decoder", "fashionmnist"]["ipc"] == (10.11, 0.01)
    assert generative.PAPER["deconvolution", "celeba"]["bp_se"] == (3.34, 0.30)
    assert memory.PAPER["noise"][250] == ((9.95, 0.05), (10.14, 0.06), (8.90, 0.06))
    assert memory.PAPER["mask"][250][0] == (39.1, 10.8)
    assert timing.PAPER["vgg7", "tinyimagenet"] == {"bp_se": (7.59, 0.63), "pc_se": (54.60, 0.10)}
    assert timing.PAPER["alexnet", "cifar10"]["pc_se"] == (3.86, 0.06)
    assert sampling.PAPER == {
        ("mcpc", "fid"): (2.53, 0.17),
        ("vae", "fid"): (4.19, 0.38),
        ("mcpc", "inception_score"): (7.13, 0.10),
        ("vae", "inception_score"): (7.91, 0.03),
    }
