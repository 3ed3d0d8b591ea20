"""The engine: populations, modes, metrics, divergence and the choice of a mode, against plain loops and numpy."""

import dataclasses
import functools
import re
import time
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Convolutional

import pcx
import pcx.algorithms
import pcx.data
from pcx.bench import configure, modes
from pcx.bench import engine as engine_module
from pcx.bench.config import ConfigError
from pcx.bench.engine import MODES, Engine
from pcx.data import DataSet, Split, augment, split_validation
from pcx.nn import keys
from pcx.shortcuts import half

DIGITS = pcx.data.load("digits")
TINY = {"epochs": 2, "width": 8, "hidden": 2, "train_limit": 200, "batch": 32}  # 6 steps, 8 samples left over
BOUND = {"float32": 1e-6, "float64": 1e-12}


@contextmanager
def precision(dtype: str):
    """Run in float32 or float64."""
    with jax.enable_x64(dtype == "float64"):
        yield


@pytest.fixture
def single():
    """Run in float32, as the command line does."""
    with precision("float32"):
        yield


def config(algorithm: str = "pc_se", **settings: Any) -> Any:
    return configure("digits/mlp", algorithm, **(TINY | settings))


def leaves(tree: Any) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def member(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


def difference(a: Any, b: Any) -> float:
    """The largest absolute difference between two trees of the same structure; not a number counts as infinite."""
    first, second = leaves(a), leaves(b)
    assert first.keys() == second.keys()
    gaps = [np.max(np.abs(first[k].astype(np.float64) - second[k].astype(np.float64))) for k in first]
    return max(np.inf if np.isnan(gap) else float(gap) for gap in gaps)


@functools.cache
def trained(dtype: str, mode: str, seeds: tuple[int, ...], population: str = "vmap") -> Any:
    """The states of a population at first, after one step (host modes) and after one epoch, and both metrics."""
    with precision(dtype):
        engine = Engine(config(population=population), DIGITS, list(seeds), mode)
        before, stepped, of_step = jax.device_get(engine.init().states), None, None
        if mode != "scan":  # there the number of steps is part of the program
            engine.steps = 1
            after, of_step = engine.epoch(engine.init(), 0)
            stepped = jax.device_get(after.states)
        engine.steps = 6
        after, metrics = engine.epoch(engine.init(), 0)
        return before, stepped, jax.device_get(after.states), of_step, metrics


def assert_metrics(found: Any, i: int, expected: Any, j: int) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_allclose(values[i], expected[name][j], rtol=1e-6, atol=1e-6, err_msg=name)


# --- the model in numpy, and the epoch as a plain loop


def forward(model: Any, images: np.ndarray) -> np.ndarray:
    """The outputs of an MLP with relu, in float64."""
    x = ((np.asarray(images, np.float64) / 16 - 0.5) / 0.5).reshape(len(images), -1)
    for i, layer in enumerate(model.layers):
        x = x @ np.asarray(layer.weight, np.float64).T + np.asarray(layer.bias, np.float64)
        x = x if i == len(model.layers) - 1 else np.maximum(x, 0)
    return x


def counts(outputs: np.ndarray, labels: np.ndarray) -> tuple[float, float, float]:
    """Sum of the squared errors (with a half), and how many labels are among the largest one and five outputs."""
    onehot = np.eye(outputs.shape[1])[labels]
    ranked = np.argsort(-outputs, axis=1)
    hit = ranked == labels[:, None]
    return 0.5 * float(np.sum((outputs - onehot) ** 2)), int(hit[:, :1].sum()), int(hit[:, :5].sum())


def plain_epoch(settings: Any, seed: int, number: int = 0) -> Any:
    """One epoch as a plain loop over `pcx.algorithms`: the states before and after each step, energies, rows."""
    _, make = pcx.algorithms.get(settings.algorithm)
    train = Split(DIGITS.train.images[: settings.train_limit], DIGITS.train.labels[: settings.train_limit])
    total = len(train) // settings.batch * settings.epochs
    algorithm = make(settings.hyper, total_steps=None if settings.schedule == "constant" else total)
    key = jax.random.key(seed)
    with keys(pcx.algorithms.stream(key, "weights")):
        model = pcx.models.get("mlp").build((1, 8, 8), 10, settings.options)
    order_key = jax.random.fold_in(pcx.algorithms.stream(key, "order"), number)
    order = np.asarray(augment.epoch_order(order_key, len(train), settings.batch))
    x = augment.normalise(train.images, (0.5,), (0.5,), jnp.float32, scale=16)
    state = algorithm.init(model, x[:2], train.labels[:2], key)
    step = jax.jit(algorithm.step)
    states, energies = [state], []
    for rows in order:
        state, metrics = step(state, x[rows], train.labels[rows], key, number)
        states.append(state)
        energies.append({name: float(value) for name, value in metrics.energies.items()})
    return states, energies, [(train.images[rows], train.labels[rows]) for rows in order]


# --- populations


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_step_of_a_population_equals_the_lone_steps(dtype):
    before, after, _, metrics, _ = trained(dtype, "host", (3, 7))
    assert after.model.layers[0].weight.dtype == dtype
    assert after.step.tolist() == [1, 1]
    assert difference(member(after, 0).model, member(after, 1).model) > 1e-2  # the members are not the same
    assert difference(after.model, before.model) > 1e-4  # and they moved
    for i, seed in [(1, 7)] if dtype == "float32" else [(0, 3), (1, 7)]:
        _, alone, _, own, _ = trained(dtype, "host", (seed,))
        assert difference(member(after, i), member(alone, 0)) <= BOUND[dtype]
        assert_metrics(metrics, i, own, 0)


@pytest.mark.parametrize(("task", "cores", "setting", "looped"), [
    ("digits/mlp", 8, "auto", False), ("digits/mlp", 2, "auto", True), ("digits/mlp", 2, "vmap", False),
    ("digits/mlp", 8, "map", True),
    ("cifar10/vgg5", 8, "auto", True), ("cifar10/vgg5", 8, "vmap", False),
])  # fmt: skip
def test_members_with_convolutions_or_on_few_cores_are_looped_over(task, cores, setting, looped, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    images = np.zeros((130, 3, 32, 32) if "vgg5" in task else (130, 1, 8, 8), np.uint8)
    split = Split(images, np.zeros(130, np.int32))
    data = DataSet(task.split("/")[0], split, split, 10, ())
    assert Engine(configure(task, "pc_se", population=setting), data, [0, 1]).looped is looped


def test_a_run_says_which_nodes_too_few_steps_do_not_reach():
    """With T steps the error gets T links far: weights further away have exactly no gradient, and a sentence says so."""
    engine = Engine(config(hidden=3, T=1, momentum_h=0.0, weight_decay=0.0), DIGITS, [0])
    assert engine.distance == {"vodes.0": 3, "vodes.1": 2, "vodes.2": 1, "vodes.3": 0}
    assert re.search(r"T = 1: .* get to vodes.0, vodes.1, .*; T = 3 is enough", engine.unreached())
    first = engine.init()
    before = jax.device_get(first.states.model)
    after = jax.device_get(engine.epoch(first, 0)[0].states.model)
    moved = [bool(np.any(a.weight != b.weight)) for a, b in zip(before.layers, after.layers, strict=True)]
    assert moved == [False, False, True, True]
    assert Engine(config(hidden=3, T=3), DIGITS, [0]).unreached() == ""
    assert Engine(config("bp_se", hidden=3), DIGITS, [0]).unreached() == ""


def test_one_epoch_of_a_population_equals_the_lone_epochs_in_float64():
    _, _, after, _, metrics = trained("float64", "host", (3, 7))
    assert after.step.tolist() == [6, 6]
    for i, seed in enumerate((3, 7)):
        _, _, alone, _, own = trained("float64", "host", (seed,))
        assert difference(member(after, i), member(alone, 0)) <= 1e-9
        assert_metrics(metrics, i, own, 0)


def test_a_sequential_map_equals_vmap():
    _, _, mapped, _, map_metrics = trained("float64", "scan", (3, 7), population="map")
    _, _, batched, _, metrics = trained("float64", "scan", (3, 7))
    assert difference(mapped, batched) <= 1e-9
    for i in range(2):
        assert_metrics(map_metrics, i, metrics, i)


@pytest.mark.parametrize("mode", [*MODES[1:], "stream"])
def test_all_modes_give_the_same_numbers(mode, monkeypatch):
    monkeypatch.setattr(engine_module, "CHUNK", 4)  # two chunks, the last one shorter
    _, _, scanned, _, scan_metrics = trained("float64", "scan", (3, 7))
    _, _, other, _, metrics = trained("float64", mode, (3, 7))
    assert difference(scanned, other) <= 1e-9
    for i in range(2):
        assert_metrics(metrics, i, scan_metrics, i)


def test_programs_compiled_side_by_side_are_the_same():
    """Nothing is compiled again when a prepared engine trains, and its numbers are those of one that is not prepared."""
    ready, plain = (Engine(config(), DIGITS, [0, 1]) for _ in range(2))
    ready.prepare()
    programs = dict(ready._compiled)
    assert programs.keys() == {"init", "epoch"}
    assert ready.timing.compile > 0
    (first, metrics), (second, others) = (engine.epoch(engine.init(), 0) for engine in (ready, plain))
    assert ready._compiled == programs
    assert difference(first, second) == difference(metrics, others) == 0.0
    assert ready.prepare()._compiled == programs


@pytest.mark.parametrize("precisions", [("bf16", "bf16_state"), ("tf32", "tf32_plain"), ("tf32", "f16")])
@pytest.mark.parametrize(("algorithm", "kept"), [("pc_se", True), ("nn", True), ("ipc", False), ("bp_se", False)])
def test_ways_of_inference_are_of_the_algorithms_that_settle(single, algorithm, kept, precisions, monkeypatch):
    """The weights after an epoch differ a little from those without; those of other algorithms are the same."""
    monkeypatch.setattr(half, "LARGE", 0)
    found = []
    for precision in precisions:
        engine = Engine(config(algorithm, activation="relu", precision=precision), DIGITS, [5])
        population, _ = engine.epoch(engine.init(), 0)
        found.append(member(population.states, 0))
    assert (difference(*found) > 0) == kept
    assert difference(*found) < 1e-3


class Lowered:
    """A program that knows some options of a compiler only."""

    def __init__(self, known):
        self.known, self.asked = known, []

    def compile(self, compiler_options=None):
        self.asked.append(compiler_options)
        unknown = [name for name in compiler_options or {} if name not in self.known]
        if unknown:
            raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{unknown[0]}'")
        return "compiled"


def test_options_of_the_compiler_are_those_of_a_gpu_and_left_out_where_they_are_unknown(single, monkeypatch):
    engine = Engine(config(), DIGITS, [0])
    dense, convolutional = engine_module.DENSE, engine_module.CONVOLUTIONAL
    program = Lowered(dense)
    assert engine._compile(program) == "compiled"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert engine._compile(program) == "compiled"
    engine.convolutional = True
    assert engine._compile(program) == "compiled"
    assert program.asked == [None, dense, convolutional, None]
    full = Lowered(dense)
    full.compile = lambda **_: (_ for _ in ()).throw(jax.errors.JaxRuntimeError("out of memory"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        engine._compile(full)


def test_the_compiler_knows_these_options():
    for options in (engine_module.DENSE, engine_module.CONVOLUTIONAL):
        assert jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)(1.0) == 2


def test_convolutions_on_a_gpu_ask_for_kernels(single, monkeypatch):
    """And dense layers, or a CPU, do not."""
    asked, original = [], engine_module.make_algorithm

    def make(config, hyper, steps, **options):
        asked.append(options.get("shortcuts"))
        return original(config, hyper, steps, **options)

    monkeypatch.setattr(engine_module, "make_algorithm", make)
    split = Split(np.zeros((130, 3, 32, 32), np.uint8), np.zeros(130, np.int32))
    images = DataSet("cifar10", split, split, 10, ())
    pairs = (("cifar10/vgg5", images, "gpu"), ("cifar10/vgg5", images, "cpu"), ("digits/mlp", DIGITS, "gpu"))
    for task, data, backend in pairs:
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        monkeypatch.setattr(engine_module.pooling, "works", lambda in_parts, backend=backend: backend == "gpu")
        engine = Engine(configure(task, "pc_se"), data, [0])
        engine._algorithm(jax.tree.map(lambda a: a[0], engine.floats))
    assert asked == [pcx.Shortcuts(kernel=True), None, None]


def test_a_streaming_engine_keeps_one_batch_on_the_device(monkeypatch):
    """A data set larger than the room on the device is streamed, and the log says so."""
    monkeypatch.setenv("PCX_DEVICE_BYTES", "1000")
    mode, why = modes.choose_mode(config(), DIGITS, [0])
    assert (mode, "1,000" in why) == ("stream", True)
    engine = Engine(config(), DIGITS, [0], mode)
    assert len(engine.arrays[0]) == engine.config.batch < len(engine.host[0])
    monkeypatch.setenv("PCX_DEVICE_BYTES", "much")
    with pytest.raises(ConfigError, match="PCX_DEVICE_BYTES is 'much'"):
        modes.choose_mode(config(), DIGITS, [0])


@pytest.mark.parametrize(("dtype", "members"), [("float32", (1,)), ("float64", (0, 1))])
def test_a_sweep_equals_runs_with_those_settings(dtype, members):
    lr_h, lr_theta = [0.1, 0.03], [0.001, 0.007]  # not representable in binary: rounding to float32 would show
    with precision(dtype):
        engine = Engine(config(), DIGITS, [0, 1], steps=1, sweep={"lr_h": lr_h, "lr_theta": lr_theta})
        swept, _ = engine.epoch(engine.init(), 0)
        for i in members:
            alone = Engine(config(lr_h=lr_h[i], lr_theta=lr_theta[i]), DIGITS, [i], steps=1)
            expected, _ = alone.epoch(alone.init(), 0)
            assert difference(member(swept.states, i), member(expected.states, 0)) <= BOUND[dtype]


SWEEPS = [{"lr_hh": [0.1, 0.2]}, {"T": [2.0, 3.0]}, {"lr_h": [0.1]}, {"lr_h": [0.1, -1.0]}]


@pytest.mark.parametrize("sweep", SWEEPS, ids=["typo", "whole", "length", "negative"])
def test_a_sweep_that_cannot_be_meant_is_refused(single, sweep):
    """By a sentence that names the setting; only numbers of the algorithm can be swept, one value per member."""
    with pytest.raises(ValueError, match=next(iter(sweep))):
        Engine(config(), DIGITS, [0, 1], sweep=sweep)


def test_every_seed_has_its_own_order_and_every_epoch_another(single):
    engine = Engine(config("bp_se"), DIGITS, [0, 1])
    first, second = (np.asarray(engine._order(engine.keys, jnp.asarray(e, jnp.int32))) for e in (0, 1))
    assert first.shape == (2, 6, 32)
    for order in (*first, *second):
        assert len(set(order.ravel().tolist())) == 192
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], second[0])


# --- metrics


def test_evaluation_counts_the_whole_split_with_a_last_partial_batch(single, monkeypatch):
    """359 test samples in batches of 100, against argmax and ranks of a forward pass in numpy."""
    monkeypatch.setattr(engine_module, "EVALUATION_BATCH", 100)
    engine = Engine(config("bp_se", activation="relu", validation=0.25, lr_theta=0.01), DIGITS, [0, 1])
    population, _ = engine.epoch(engine.init(), 0)
    head = Split(DIGITS.train.images[:200], DIGITS.train.labels[:200])
    parts = {"test": DIGITS.test, "validation": split_validation(head, 0.25)[1]}
    assert (len(parts["test"]), len(parts["validation"])) == (359, 50)
    for name, split in parts.items():
        found = engine.evaluate(population, name)
        for i in range(2):
            outputs = forward(member(population.states.model, i), split.images)
            loss, top1, top5 = (value / len(split) for value in counts(outputs, split.labels))
            assert found[f"{name}_top1"][i] == pytest.approx(top1, rel=1e-6)
            assert found[f"{name}_top5"][i] == pytest.approx(top5, rel=1e-6)
            assert found[f"{name}_loss"][i] == pytest.approx(loss, rel=1e-5)
            assert top1 < top5 < 1


def test_validation_samples_are_not_trained_on(single):
    engine = Engine(config("bp_se", validation=0.25), DIGITS, [0])
    train, validation = (
        {image.tobytes() for image in split.images} for split in (engine.train_set, engine.splits["validation"])
    )
    assert (len(engine.train_set), len(engine.splits["validation"])) == (150, 50)
    assert not train & validation
    assert engine.steps == 4
    assert engine.arrays[0].shape[0] == 150


@pytest.mark.parametrize("algorithm", ["pc_se", "bp_se"])
def test_metrics_and_weights_of_an_epoch_equal_those_of_a_plain_loop(single, algorithm):
    settings = config(algorithm, activation="relu")
    engine = Engine(settings, DIGITS, [5])
    population, metrics = engine.epoch(engine.init(), 0)
    states, energies, batches = plain_epoch(settings, 5)
    assert len(energies) == 6
    assert difference(member(population.states, 0), states[-1]) <= 1e-5
    sums = np.array([counts(forward(s.model, images), labels) for s, (images, labels) in zip(states, batches, strict=False)])
    loss, top1, top5 = sums.sum(axis=0) / 192
    assert metrics["train_loss"][0] == pytest.approx(loss, rel=1e-4)
    assert metrics["train_top1"][0] == pytest.approx(top1, rel=1e-6)
    assert metrics["train_top5"][0] == pytest.approx(top5, rel=1e-6)
    for i, node in enumerate(engine.nodes):
        expected = np.mean([step[node] for step in energies])
        assert metrics["train_energies"][0, i] == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert metrics["train_energies"][0, -1] > 0


def test_top_five_of_three_classes_is_always_right(single):
    engine = Engine(configure("iris/mlp", "bp_se", epochs=1, width=4, hidden=1, batch=40), pcx.data.load("iris"), [0])
    population, metrics = engine.epoch(engine.init(), 0)
    assert metrics["train_top5"].tolist() == [1.0]
    assert engine.evaluate(population, "test")["test_top5"].tolist() == [1.0]
    assert engine.evaluate(population, "test")["test_top1"][0] < 1


@pytest.mark.parametrize("noise", [0.0, -1e-7, 1e-7])
def test_an_output_is_never_before_itself(monkeypatch, noise):
    """A compiler may evaluate the label's output twice, with sums in another order; equal ones are ranked by their place."""
    output = np.array([[0.5, 0.1, 0.9], [0.5, 0.1, 0.9], [0.5, 0.1, 0.9], [0.2, 0.2, 0.2], [0.3, np.nan, 0.1]])
    labels, expected = np.array([2, 0, 1, 2, 1]), [0, 1, 2, 2, 2]
    take = jnp.take_along_axis
    monkeypatch.setattr(jnp, "take_along_axis", lambda *args, **options: take(*args, **options) + noise)
    rows = slice(None) if noise == 0 else [0, 1, 2, 4]  # what is equal stays so only without noise
    found = np.asarray(engine_module._rank(jnp.asarray(output), jnp.asarray(labels)))
    assert found[rows].tolist() == np.array(expected)[rows].tolist()


def test_compilation_is_counted_apart(single):
    engine = Engine(config("bp_se"), DIGITS, [0])
    population = engine.init()
    start, before = time.perf_counter(), engine.timing.compile
    population, _ = engine.epoch(population, 0)
    elapsed, compiling = time.perf_counter() - start, engine.timing.compile - before
    assert compiling > 0
    assert 0 < engine.timing.train <= elapsed - compiling
    total = engine.timing.compile
    engine.epoch(population, 1)
    assert engine.timing.compile == total


# --- divergence


@pytest.mark.parametrize(("name", "value"), [("lr_h", 1e6), ("lr_theta", 1e6)])
def test_a_diverged_member_stops_and_the_others_go_on(single, name, value):
    settings = config(schedule="constant")
    normal = getattr(settings.hyper, name)
    sick = Engine(settings, DIGITS, [0, 1, 2], sweep={name: [normal, value, normal]})
    well = Engine(settings, DIGITS, [0, 1, 2])
    population, metrics = sick.epoch(sick.init(), 4)
    reference, expected = well.epoch(well.init(), 4)

    states, energies, _ = plain_epoch(config(schedule="constant", **{name: value}), 1, 4)
    wrong = [[not np.isfinite(e) or e > settings.energy_limit for e in step.values()] for step in energies]
    step = next(i for i, nodes in enumerate(wrong) if any(nodes))
    assert step == {"lr_h": 0, "lr_theta": 1}[name]

    health = population.health
    assert np.asarray(health.alive).tolist() == [True, False, True]
    assert np.asarray(health.epoch).tolist() == [-1, 4, -1]
    assert np.asarray(health.step).tolist() == [-1, step, -1]
    assert sick.nodes[int(health.node[1])] == list(energies[step])[wrong[step].index(True)]
    assert np.asarray(health.node)[[0, 2]].tolist() == [-1, -1]
    np.testing.assert_allclose(
        member(population.states, 1).model.layers[0].weight, states[step].model.layers[0].weight, rtol=1e-4
    )
    for i in (0, 2):
        assert difference(member(population.states, i), member(reference.states, i)) <= 1e-6
        for metric, values in metrics.items():
            np.testing.assert_allclose(values[i], expected[metric][i], rtol=1e-5, err_msg=metric)

    frozen = jax.device_get(member(population.states, 1))
    later, metrics = sick.epoch(population, 5)
    reference, expected = well.epoch(reference, 5)
    assert difference(member(later.states, 1), frozen) == 0
    assert np.asarray(later.health.epoch).tolist() == [-1, 4, -1]  # where it stopped, not where it still stands
    assert difference(member(later.states, 2), member(reference.states, 2)) <= 1e-5
    assert metrics["train_top1"][2] == pytest.approx(expected["train_top1"][2])


@pytest.mark.parametrize("mode", ["scan", "host"])
def test_a_nan_in_one_layer_names_the_node_it_reaches(single, mode):
    """Backpropagation has energy at the output alone: a NaN in the last weights of member 1 shows at the last node."""
    engine = Engine(config("bp_se"), DIGITS, [0, 1], mode)
    population = engine.init()
    poisoned = population.states.model.layers[-1].weight.at[1, 0, 0].set(jnp.nan)
    states = eqx.tree_at(lambda s: s.model.layers[-1].weight, population.states, poisoned)
    population, metrics = engine.epoch(population._replace(states=states), 0)
    assert np.asarray(population.health.alive).tolist() == [True, False]
    assert engine.nodes[int(population.health.node[1])] == "vodes.2"
    assert int(population.health.step[1]) == 0
    well, expected = engine.epoch(engine.init(), 0)
    np.testing.assert_array_equal(metrics["train_loss"], [expected["train_loss"][0], np.nan])  # member 1 made no step
    np.testing.assert_array_equal(
        member(population.states, 0).model.layers[-1].weight, member(well.states, 0).model.layers[-1].weight
    )


def test_metrics_of_a_member_that_stopped_are_those_of_the_steps_it_made(single):
    settings = config("bp_se", lr_theta=1e6)
    engine = Engine(settings, DIGITS, [0])
    population, metrics = engine.epoch(engine.init(), 0)
    assert int(population.health.step[0]) == 1
    _, energies, _ = plain_epoch(settings, 0)
    assert metrics["train_loss"][0] == pytest.approx(energies[0]["vodes.2"], rel=1e-4)


def test_the_energy_limit_is_the_largest_energy_that_passes(single):
    settings = config("bp_se")
    _, energies, _ = plain_epoch(settings, 0)
    largest = max(step["vodes.2"] for step in energies)
    where = int(np.argmax([step["vodes.2"] for step in energies]))
    stops = {}
    for share in (0.999, 1.001):
        engine = Engine(config("bp_se", energy_limit=share * largest), DIGITS, [0])
        population, _ = engine.epoch(engine.init(), 0)
        stops[share] = int(population.health.step[0])
    assert stops == {0.999: where, 1.001: -1}


# --- buffers, steps


def test_the_population_is_donated_and_training_can_start_again(single):
    engine = Engine(config("bp_se"), DIGITS, [0, 1])
    results = []
    for _ in range(2):
        fresh = engine.init()
        population, _ = engine.epoch(fresh, 0)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(fresh.states.model))
        engine.evaluate(population, "test")
        population, _ = engine.epoch(population, 1)  # evaluation used nothing up
        results.append(jax.device_get(population))
    assert difference(*results) == 0
    assert np.asarray(results[0].states.step).tolist() == [12, 12]


def test_steps_leave_a_last_partial_batch_out(single):
    assert Engine(configure("digits/mlp", "bp_se"), DIGITS, [0]).steps == 1438 // 64 == 22
    assert Engine(config("bp_se", batch=100), DIGITS, [0]).steps == 2
    assert Engine(config("bp_se", batch=101), DIGITS, [0]).steps == 1
    with pytest.raises(ValueError, match="a batch of 201 is larger than the 200 samples"):
        Engine(config("bp_se", batch=201), DIGITS, [0])


@pytest.mark.parametrize(
    ("dataset", "count", "steps"),
    [("mnist", 60000, 468), ("cifar10", 50000, 390), ("cifar100", 50000, 390), ("tinyimagenet", 100000, 781)],
)
def test_steps_of_the_papers_sets(single, dataset, count, steps):
    channels = 1 if dataset == "mnist" else 3
    train, test = (Split(np.zeros((n, channels, 2, 2), np.uint8), np.zeros(n, np.int32)) for n in (count, 10))
    data = DataSet(dataset, train, test, 10, tuple("0123456789"))
    settings = configure(f"{dataset}/mlp", "bp_se", epochs=3, width=4, hidden=1)
    engine = Engine(settings, data, [0])
    assert (settings.batch, engine.steps, engine.total_steps) == (128, steps, 3 * steps)


# --- the choice of a mode


def test_the_fastest_mode_is_chosen_and_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("PCX_CACHE", str(tmp_path))
    calls = []

    def measure(config: Any, data: Any, seeds: list[int], mode: str) -> float:
        calls.append(mode)
        return {"scan": 0.003, "host": 0.001, "host_unrolled": 0.002}[mode]

    monkeypatch.setattr(modes, "_measure", measure)
    settings = config()
    mode, why = modes.choose_mode(settings, DIGITS, [0])
    assert mode == "host"
    assert "'host'" in why
    for text in ("scan 3.00 ms", "host 1.00 ms", "host_unrolled 2.00 ms"):
        assert text in why
    assert calls == list(MODES)
    again, why = modes.choose_mode(config(epochs=7), DIGITS, [5])  # the number of epochs and the seed change nothing
    assert again == "host"
    assert "host 1.00 ms" in why
    assert calls == list(MODES)
    modes.choose_mode(settings, DIGITS, [0, 1])
    modes.choose_mode(config(width=9), DIGITS, [0])
    assert calls == list(MODES) * 3  # another population or another model may be fastest in another way
    said = []
    for file in (modes.cache_folder() / "modes").iterdir():
        for content in ("{", "[]", '{"mode": "bogus", "seconds": {}}', '{"mode": "host", "seconds": 3}'):
            file.write_text(content)
            calls.clear()
            modes.choose_mode(settings, DIGITS, [0], said.append)
    assert len(said) == 4  # of the one file that is this kind's: measured again, and told before
    assert all("measuring" in text for text in said)


def test_a_measurement_returns_seconds_per_step(single, monkeypatch):
    """Of an epoch after compilation: no more than a fraction of a second for 8 neurons."""
    seen = []
    original = Engine.epoch

    def epoch(self: Engine, population: Any, number: int) -> Any:
        seen.append((self.mode, self.steps))
        return original(self, population, number)

    monkeypatch.setattr(Engine, "epoch", epoch)
    seconds = modes._measure(config("bp_se", train_limit=0), DIGITS, [0], "host")
    assert 0 < seconds < 0.2
    assert len(seen) >= 2
    assert set(seen) == {("host", 12)}


def test_an_accelerator_runs_an_epoch_as_one_program(monkeypatch):
    """Where the images fit into half of its memory; else they are streamed."""

    class Device:
        platform, device_kind = "gpu", "Some GPU"

        def memory_stats(self):
            return {"bytes_limit": limit}

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    monkeypatch.setattr(modes, "_measure", lambda *_: pytest.fail("measured"))
    limit = 2 * DIGITS.train.images.nbytes
    assert modes.choose_mode(config(), DIGITS, [0]) == ("scan", "an epoch is one program on Some GPU")
    limit -= 2
    assert modes.choose_mode(config(), DIGITS, [0])[0] == "stream"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_sweep_has_the_checks_of_its_setting(value):
    with pytest.raises(ValueError, match="lr_h is"):
        Engine(config(), DIGITS, [0, 1], sweep={"lr_h": [0.1, value]})


def test_a_set_without_labels_is_refused():
    plain = Split(DIGITS.train.images, None)
    with pytest.raises(ConfigError, match="digits has no labels"):
        Engine(config(), DataSet("digits", plain, plain, 10, ()), [0])


@pytest.mark.parametrize(("T", "measured"), [(8, set(MODES)), (100, {"scan", "host"})])
def test_many_steps_are_not_written_out_to_be_measured(monkeypatch, tmp_path, T, measured):
    """Compiling them would take minutes."""
    monkeypatch.setenv("PCX_CACHE", str(tmp_path))
    seen = set()
    monkeypatch.setattr(modes, "_measure", lambda config, data, seeds, mode: seen.add(mode) or 1.0)
    modes.choose_mode(config(T=T), DIGITS, [0])
    assert seen == measured


@pytest.mark.parametrize(("algorithm", "changes"), [("pc_se", {}), ("bp_se", {}), ("pc_se", {"T": 100})])
def test_convolutions_on_a_cpu_go_step_by_step_without_measuring(monkeypatch, algorithm, changes):
    """A step is long enough that a program for each costs nothing, and Ctrl-C need not wait for an epoch."""
    monkeypatch.setattr(modes, "_measure", lambda *_: pytest.fail("measured"))
    images = np.zeros((8, 3, 32, 32), np.uint8)
    data = DataSet("cifar10", Split(images, np.arange(8, dtype=np.int32)), Split(images, np.arange(8, dtype=np.int32)), 10, ())
    assert modes.choose_mode(configure("cifar10/vgg5", algorithm, **changes), data, [0])[0] == "host"


@pytest.mark.parametrize(("algorithm", "mode"), [("pc_se", "scan"), ("ipc", "host"), ("bp_se", "stream")])
def test_channels_last_changes_no_number(monkeypatch, algorithm, mode):
    """Two seeds, one after the other in a loop; an epoch and the evaluation with and without it."""
    monkeypatch.setattr(engine_module, "build_model", lambda config, shape, classes, key: Convolutional())
    rng = np.random.default_rng(0)
    train, test = (Split(rng.integers(0, 256, (n, 3, 8, 8), np.uint8), (np.arange(n) % 4).astype(np.int32)) for n in (12, 7))
    chosen = configure("cifar10/vgg5", algorithm, batch=4, epochs=1, augmentation="none")
    asked, found = [], []
    for kept in (engine_module.channels_last, lambda function: function):
        monkeypatch.setattr(engine_module, "channels_last", lambda function, kept=kept: asked.append(mode) or kept(function))
        engine = Engine(chosen, DataSet("cifar10", train, test, 4, ()), [0, 1], mode)
        fresh = jax.tree.map(np.asarray, engine.init().states.model)
        population, metrics = engine.epoch(engine.init(), 0)
        found.append((population.states.model, metrics, engine.evaluate(population, "test")))
    assert len(asked) >= 4  # training and evaluation, both times
    assert difference(found[0][0], fresh) > 1e-6
    assert difference(*found) < 1e-9


@pytest.mark.parametrize(("mode", "told"), [("host", [1, 2, 3, 4, 5, 6]), ("stream", [4, 6]), ("scan", [])])
def test_steps_are_told(monkeypatch, single, mode, told):
    monkeypatch.setattr(engine_module, "CHUNK", 4)
    engine = Engine(config(), DIGITS, [0], mode, steps=6)
    seen = []
    engine.on_step = lambda done, steps: seen.append((done, steps))
    engine.epoch(engine.init(), 0)
    assert seen == [(done, 6) for done in told]


def test_data_that_cannot_be_meant_are_refused():
    """Labels out of range, a split without samples, and seeds that a key cannot tell apart."""
    good = DIGITS.test
    low, high = (Split(good.images, np.asarray(good.labels) + by) for by in (-1, 1))
    for data, words in (
        (dataclasses.replace(DIGITS, test=low), r"digits \(test\) go from -1 to 8"),
        (dataclasses.replace(DIGITS, train=high), r"digits \(train\) go from 1 to 10; with 10 classes they are 0 to 9"),
        (dataclasses.replace(DIGITS, test=Split(good.images[:0], good.labels[:0])), "no samples in its test split"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(config(), data, [0])
    for seed in (-1, 2**32):
        with pytest.raises(ConfigError, match="a seed is a number from 0 to 4294967295"):
            Engine(config(), DIGITS, [0, seed])


def test_a_member_that_stops_at_once_has_no_means(single):
    """Not a loss of zero, which would read as a perfect one."""
    engine = Engine(config(energy_limit=1e-9), DIGITS, [0])
    population, metrics = engine.epoch(engine.init(), 0)
    assert not population.health.alive[0]
    assert np.isnan(metrics["train_loss"][0])
    assert np.isnan(metrics["train_energies"]).all()
