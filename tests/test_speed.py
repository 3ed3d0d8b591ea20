"""Timing: the settings of the rows, complete records, refusals, figures. Nothing here looks at how long anything takes."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import go_to_an_empty_place, run_command

import pcx
import pcx.data
from pcx.bench import record, scaling, speed
from pcx.bench.configs import timing
from pcx.bench.tasks import build_model, pipeline


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """An empty place without data, records and caches."""
    go_to_an_empty_place(monkeypatch, tmp_path)


def bench(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `pcx bench …`."""
    return run_command("bench", *arguments)


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# --- rows, copied by hand from the original experiments (hyperparameters.yaml: timing, runs)


# T, lr_h, momentum_h, lr_theta, weight_decay, activation, augmentation
SETTINGS = {
    ("mlp", "pc_se"): (5, 0.026070879231635192, 0.1, 0.0002972210629627541, 0.0018383293983087593, "gelu", "none"),
    ("mlp", "bp_se"): (None, None, None, 0.0002751176541841286, 0.0001717093341589651, "relu", "none"),
    ("alexnet", "pc_se"): (10, 0.1, 0.5, 1e-4, 1e-4, "leaky_relu", "crop4_flip"),
    ("alexnet", "bp_se"): (None, None, None, 1e-4, 1e-4, "leaky_relu", "crop4_flip"),
    ("vgg5", "pc_se"):
        (7, 0.014971608777949093, 0.35, 0.00014796725461384345, 0.00015400633791940761, "leaky_relu", "crop4_flip"),
    ("vgg5", "bp_se"): (None, None, None, 0.00019889634426085358, 0.00013051747032219178, "gelu", "crop4_flip"),
    ("vgg7", "pc_se"):
        (12, 0.0201665922554088, 0.3, 4.1875592144321886e-05, 3.4901249493240924e-05, "leaky_relu", "crop56_flip"),
    ("vgg7", "bp_se"): (None, None, None, 0.00015850480323653223, 2.0980180272305617e-05, "leaky_relu", "crop56_flip"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "algorithm"), SETTINGS)
def test_settings_of_the_rows(row, algorithm):
    config = speed.config_of(row, algorithm)
    hyper = [getattr(config.hyper, name, None) for name in ("T", "lr_h", "momentum_h", "lr_theta", "weight_decay")]
    assert (*hyper, config.options.activation, config.augmentation) == SETTINGS[row, algorithm]
    assert (config.hyper.loss, config.batch, config.epochs) == ("se", 128, 6)
    assert (config.precision, config.train_limit, config.validation) == ("float32", 0, 0.0)


@pytest.mark.parametrize(
    ("row", "task", "shape", "parameters", "steps"),
    [
        ("mlp", "fashionmnist/mlp", (1, 28, 28), 134_794, 468),
        ("alexnet", "cifar10/alexnet", (3, 32, 32), 23_272_266, 390),
        ("vgg5", "cifar100/vgg5", (3, 32, 32), 4_043_620, 390),
        ("vgg7", "tinyimagenet/vgg7", (3, 56, 56), 6_214_984, 781),
    ],
)
def test_models_of_the_rows(row, task, shape, parameters, steps):
    """What the model sees, its number of parameters, and steps per epoch."""
    config = speed.config_of(row, "pc_se")
    (count, *stored), classes = speed.IMAGES[config.dataset]
    sample = jax.eval_shape(pipeline(config).test, jax.ShapeDtypeStruct((1, *stored), np.uint8))
    weights = jax.eval_shape(lambda key: pcx.weights(build_model(config, sample.shape[1:], classes, key)), jax.random.key(0))
    assert (config.task, sample.shape[1:]) == (task, shape)
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == parameters
    assert count // config.batch == steps


def test_figures_of_others():
    assert timing.PEERS["mlp", "fashionmnist"]["pc_se"] == {"pcx": 0.577, "jpc": 0.603, "song": 5.65}
    assert timing.PEERS["alexnet", "cifar10"]["pc_se"] == {"pcx": 1.72, "jpc": 2.77, "song": 20.1}
    assert timing.PEERS["vgg5", "cifar100"]["pc_se"] == {"pcx": 1.93, "jpc": 3.32, "song": 11.0}
    assert timing.PEERS["vgg7", "tinyimagenet"]["pc_se"] == {"pcx": 18.9, "jpc": 24.4, "song": 66.3}
    assert [peers["bp_se"]["pcx"] for peers in timing.PEERS.values()] == [0.450, 0.956, 0.574, 2.88]


def test_random_images_have_the_shape_of_the_real_ones():
    data = speed.data_of("tinyimagenet", random=True, limit=300)
    assert data.train.images.shape == (300, 3, 64, 64)
    assert (data.train.images.dtype, data.classes) == (np.uint8, 200)
    assert data.train.images.max() == 255
    assert 150 < data.train.labels.max() < 200


# --- records


NAMES = {
    *("what", "time", "quick", "commit", "dirty", "versions", "device"),
    *("dataset", "model", "algorithm", "precision", "batch", "T", "data", "config"),
    *("mode", "steps", "parameters", "seconds", "compile_seconds", "memory_bytes", "alive"),
}


def test_quick_writes_complete_records():
    code, out, err = bench("speed", "--rows", "mlp", "--quick", "--random")
    assert code == 0
    predictive, backpropagation = record.read(Path("results/speed.jsonl"), record.SPEED)
    assert [predictive["algorithm"], backpropagation["algorithm"]] == ["pc_se", "bp_se"]
    assert [predictive["T"], backpropagation["T"]] == [5, 0]
    for found in (predictive, backpropagation):
        assert found.keys() == NAMES
        wanted = {"what": "speed", "quick": True, "data": "random", "precision": "tf32", "batch": 128, "alive": True}
        assert found | wanted == found
        assert (found["steps"], found["parameters"], len(found["seconds"]["each"])) == (10, 134_794, 2)
        assert found["seconds"]["median"] == pytest.approx(np.median(found["seconds"]["each"]))
        assert found["seconds"]["std"] == pytest.approx(np.std(found["seconds"]["each"]))
        assert found["compile_seconds"].keys() == {"first", "cached"}
        memory = found["memory_bytes"]
        assert memory["data"] == 2000 * (784 + 4)  # uint8 images, int32 labels
        assert memory["program"] == memory["argument"] + memory["output"] + memory["temp"] - memory["alias"] - memory["data"]
        assert memory["program"] > 3 * 8 * 134_794  # weights and two moments, in float64
    assert "fashionmnist/mlp by bp_se in tf32: loading" in err
    assert re.search(r"fashionmnist/mlp +pc_se +5 +tf32 ", out)
    table = run_command("table", "timing")[1]
    assert table.count("not run") == 8  # quick records are not shown
    assert run_command("table", "timing")[2] == "2 quick records are not shown\n"


def test_a_whole_cell_also_runs_uncompiled(monkeypatch):
    """Small data and a small model in place of the real ones; nothing is left in the settings of jax."""
    monkeypatch.setitem(speed.IMAGES, "fashionmnist", ((300, 1, 28, 28), 10))
    for algorithm, changes in {"pc_se": {"T": 2}, "bp_se": {}}.items():
        monkeypatch.setitem(timing.SETTINGS, ("mlp", "fashionmnist", algorithm), {"width": 4, "hidden": 1} | changes)
    monkeypatch.setattr(speed, "UNCOMPILED_SECONDS", 0.0)
    monkeypatch.setattr(speed, "choose_mode", lambda *_: ("host", ""))
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # every operation would be compiled again
    before = jax.config.jax_compilation_cache_dir
    code, out, _ = bench("speed", "--rows", "mlp", "--random", "--epochs", "3", "--precision", "float32", "--out", "mine.jsonl")
    assert code == 0
    assert "mine.jsonl: 2 records added" in out
    predictive, backpropagation = lines("mine.jsonl")
    assert predictive.keys() == backpropagation.keys() == NAMES | {"uncompiled"}
    assert (predictive["quick"], predictive["steps"], len(predictive["seconds"]["each"])) == (False, 2, 3)
    assert (predictive["mode"], predictive["precision"], predictive["config"]["epochs"]) == ("host", "float32", 4)
    assert predictive["uncompiled"].keys() == {"all_shortcuts", "no_shortcuts"}
    assert backpropagation["uncompiled"].keys() == {"all_shortcuts"}
    part = predictive["uncompiled"]["no_shortcuts"]
    assert part["ratio"] == pytest.approx(2 * part["seconds_per_step"]["median"] / predictive["seconds"]["median"])
    assert jax.config.jax_compilation_cache_dir == before
    rows = run_command("table", "timing", "--records", "mine.jsonl")[1]
    assert rows.count("not run") == 6


def test_population_is_one_seed_and_many():
    code, out, _ = bench("population", "--seeds", "3", "--task", "digits/mlp", "--quick")
    assert code == 0
    (found,) = record.read(Path("results/speed.jsonl"), record.SPEED)
    wanted = {"what": "population", "seeds": 3, "data": "real", "T": 8, "batch": 64, "alive": {"one": 1, "all": 3}}
    assert found | wanted == found
    assert found["config"]["population"] == "vmap"
    medians = {name: part["median"] for name, part in found["seconds"].items()}
    assert found["ratio"] == pytest.approx(medians["all"] / medians["one"])
    assert "of 3, " in out


def test_an_interrupt_leaves_complete_records(monkeypatch):
    cells = iter([{"seconds": speed.summary([0.5])}])

    def cell(*_: Any) -> dict[str, Any]:
        for found in cells:
            return found
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "_time_cell", cell)
    code, out, err = bench("speed", "--rows", "mlp", "--quick", "--random", "--algorithms", "bp_se, pc_se")
    assert (code, out) == (130, "")
    assert "what was finished is in results/speed.jsonl" in err
    assert [found["algorithm"] for found in record.read(Path("results/speed.jsonl"), record.SPEED)] == ["bp_se"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["speed", "--rows", "mpl"], ["no row 'mpl'", "mlp"]),
        (["speed", "--rows", "mlp,vgg9", "--random"], ["no row 'vgg9'", "vgg7"]),
        (["speed", "--rows", ","], ["--rows", "mlp, alexnet, vgg5, vgg7"]),
        (["speed", "--rows", "mlp", "--algorithms", "bp_se,ipc"], ["'ipc'", "pc_se and bp_se"]),
        (["speed", "--rows", "mlp", "--algorithms", ","], ["--algorithms names none", "pc_se, bp_se"]),
        (["speed", "--precision", "fp8", "--random"], ["precision is 'fp8'", "float32, tf32, f16, bf16"]),
        (["speed", "--epochs", "0", "--random"], ["--epochs is 0"]),
        (["population", "--seeds", "1", "--random"], ["--seeds is 1"]),
        (["population", "--task", "mnist", "--random"], ["dataset/model"]),
        (["population", "--task", "kmnist/mlp", "--random"], ["--random", "kmnist"]),
        (["population", "--precision", "fp8", "--random"], ["precision is 'fp8'"]),
        (["population"], ["mnist is not here", "--random"]),
        (["scaling", "--precision", "half"], ["--precision is 'half'", "bf16_state"]),
        (["scaling", "--part", "width"], ["--part is 'width'", "scaling, depth or both"]),
        (["scaling", "--draw"], ["no records of scaling in results/scaling.jsonl"]),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_sentence_and_exit_code_two(tmp_path, arguments, parts):
    code, out, err = bench(*arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("error: ")
    for part in parts:
        assert part in err
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_refused_with_the_remedy():
    code, out, err = bench("speed", "--rows", "vgg5")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: cifar100 is not here.*--random\.\n", err)


def test_the_data_of_all_rows_are_looked_for_before_the_first_is_timed(monkeypatch, tmp_path):
    """Nothing is loaded or timed where the second row's data are missing, and random images need none."""
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        path = tmp_path / "pcx_data" / "fashionmnist" / f"{name}-ubyte"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"here, whatever it holds")
    monkeypatch.setattr(pcx.data, "load", lambda name: pytest.fail(f"{name} was loaded"))
    monkeypatch.setattr(speed, "_time_cell", lambda *_: {"seconds": speed.summary([0.5]), "compile_seconds": {}})
    code, out, err = bench("speed", "--rows", "mlp,alexnet")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: cifar10 is not here.*--random\.\n", err)
    assert not Path("results").exists()
    said: list[str] = []
    speed.speed(["mlp", "alexnet"], "tf32", 1, True, True, Path("made.jsonl"), said.append)
    assert [found["dataset"] for found in lines("made.jsonl")] == ["fashionmnist"] * 2 + ["cifar10"] * 2


def test_backpropagation_beside_float16_is_that_of_tf32(tmp_path):
    """It has no inference, so that both are the same program; it is timed once."""
    facts = {"what": "speed", "quick": False, "dataset": "cifar100", "model": "vgg5", "data": "random", "time": "1"}
    facts |= {"device": {"platform": "gpu", "kind": "H200"}}
    cells = [("pc_se", "f16", 0.9), ("pc_se", "bf16", 0.6), ("bp_se", "tf32", 0.4)]
    made = [facts | {"algorithm": a, "precision": p, "seconds": {"median": s, "std": 0.0}} for a, p, s in cells]
    (tmp_path / "made.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in made))
    rows = run_command("table", "timing", "--records", str(tmp_path / "made.jsonl"))[1].splitlines()
    ratio = {row.split()[3]: row.split()[7] for row in rows if "pc_se" in row and "vgg5" in row}
    assert ratio == {"f16": "2.25", "bf16": "5.33"}  # without a record beside it, the next column is the paper's


# --- scaling


def test_points_scale_one_number_at_a_time():
    found = list(scaling.points(scaling.MULTIPLIERS))
    assert len(found) == 1 + 4 * 5
    assert found[0] == ("base", 1, {"batch": 32, "dim": 64, "layers": 2, "T": 8})
    assert ("layers", 6, {"batch": 32, "dim": 64, "layers": 12, "T": 8}) in found
    assert ("T", 2, {"batch": 32, "dim": 64, "layers": 2, "T": 16}) in found


@pytest.mark.parametrize("stacked", [True, False])
def test_an_epoch_is_a_row_of_training_steps(stacked):
    """The scanned epoch equals train_step by hand, from zero, by AdamW and plain gradient descent, without shortcuts."""
    epoch, (carry, (x, y)) = scaling.make_epoch(batch=3, dim=4, layers=4, T=5, batches=2, stacked=stacked, precision="tf32")
    (model, _), _ = jax.jit(epoch)(carry, (x, y))
    expected, adamw = scaling.build(4, 4), optax.adamw(1e-3, weight_decay=1e-4)
    state = adamw.init(pcx.weights(expected))
    for i in range(2):
        options = {"state_optimiser": optax.sgd(0.05), "weight_optimiser": adamw, "weight_state": state, "steps": 5}
        done = pcx.train_step(expected, x[i], {"vodes.3": y[i]}, init="zeros", shortcuts=pcx.NO_SHORTCUTS, **options)
        expected, state = done.model, done.optimiser_state
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", scaling.KINDS)
def test_inference_of_a_depth_is_repeated(kind):
    """Each call starts from an input that depends on all values of the last one."""
    point = {"batch": 3, "dim": 4, "layers": 5, "T": 4, "calls": 2, "kind": kind, "stacked": True, "precision": "tf32"}
    repeat, (model, x, y, total) = scaling.make_inference(**point)
    result = jax.jit(repeat)(model, x, y, 1e9 + total)[3]
    total = 1e9 + total
    for _ in range(2):
        options = {"optimiser": optax.sgd(0.05), "steps": 4, "init": "zeros", "shortcuts": pcx.NO_SHORTCUTS}
        values = pcx.infer(model, x + 1e-9 * total, {"vodes.4": y}, **options).values
        total = sum(np.sum(value) for value in values.values())
    np.testing.assert_allclose(result, total, rtol=1e-10, atol=1e-12)
    h = np.linspace(-1, 1, 4)
    u = np.maximum(model.layers[0].weight @ h + model.layers[0].bias, 0)
    first = pcx.run(model, {}, h[None]).predictions["vodes.0"][0]
    np.testing.assert_allclose(first, h + u if kind == "residual" else u, rtol=1e-10)


def test_inference_of_a_depth_keeps_its_state_in_bfloat16():
    """With bf16_state the values are those of float64 to the rounding of their way from the start, and not nearer."""
    point = {"batch": 3, "dim": 4, "layers": 5, "T": 4, "calls": 1, "kind": "chain", "stacked": True}
    found = {}
    for precision in ("float32", "bf16_state"):
        repeat, arguments = scaling.make_inference(**point, precision=precision)
        found[precision] = jax.jit(repeat)(*arguments)[3]
    assert found["bf16_state"] != found["float32"]
    np.testing.assert_allclose(found["bf16_state"], found["float32"], rtol=2e-2)


def test_scaling_measures_and_draws(monkeypatch):
    monkeypatch.setattr(scaling, "BASE", {"batch": 2, "dim": 3, "layers": 1, "T": 1})
    monkeypatch.setattr(scaling, "DEPTH_BASE", {"batch": 2, "dim": 3, "T": 1})
    monkeypatch.setattr(scaling, "KINDS", ("residual",))
    code, out, err = bench("scaling", "--quick")
    assert code == 0
    found = record.read(Path("results/scaling.jsonl"), record.SCALING)
    points = [(r["parameter"], r["multiplier"], r["stacked"]) for r in found if r["what"] == "scaling"]
    wanted = [("base", 1), ("batch", 2), ("dim", 2), ("layers", 2), ("T", 2)]
    assert points == [(*point, stacked) for stacked in (True, False) for point in wanted]
    depths = [(r["kind"], r["layers"], r["stacked"]) for r in found if r["what"] == "depth"]
    assert depths == [("residual", n, stacked) for stacked in (True, False) for n in (4, 8)]
    assert all(r["ratio"] == 1 for r in found if r["what"] == "depth" and r["layers"] == 4)
    assert all(r["quick"] for r in found)
    assert len(err.splitlines()) == len(found) == 14
    for name in ("scaling-quick.png", "depth-quick.png"):
        assert (Path("results") / name).read_bytes().startswith(b"\x89PNG")
        assert name in out


def test_figures_are_drawn_again_from_the_newest_records():
    """A later record of a point replaces an earlier one; quick ones and those of another device are left out."""
    facts = {"quick": False, "precision": "tf32", "device": {"kind": "H200"}, "batches": 4, "batch": 2, "dim": 3, "T": 2}
    made = [
        facts | {"what": what, "parameter": p, "multiplier": m, "kind": k, "layers": n, "stacked": stacked, "time": time,
                 "seconds": {"median": float(time)}}
        for time in ("1", "2")
        for stacked in (True, False)
        for what, p, m, k, n in [("scaling", "base", 1, None, 2), *(("scaling", p, 2, None, 2) for p in scaling.BASE),
                                 ("depth", None, None, "chain", 4), ("depth", None, None, "chain", 8)]
    ]  # fmt: skip
    for unfit in ({"quick": True, "time": "9"}, {"device": {"kind": "cpu"}, "time": "0"}, {"what": "other", "time": "9"}):
        made.append(made[0] | unfit)
    for item in made:
        record.append(Path("results/scaling.jsonl"), item)
    for what, points in (("scaling", 10), ("depth", 4)):
        newest = scaling.newest(Path("results/scaling.jsonl"), what)
        assert len(newest) == points
        assert {r["time"] for r in newest} == {"2"}
    code, out, _ = bench("scaling", "--draw", "--figure", "here.png")
    assert code == 0
    assert "here.png: 10 points" in out
    assert "depth.png: 4 points" in out
    assert Path("here.png").exists()
    assert Path("depth.png").exists()
