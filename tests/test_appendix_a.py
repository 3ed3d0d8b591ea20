"""The three listings of the paper's Appendix A run as printed, and do what its equations say."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import largest_difference
from snapshots import snapshot, tracers

import pcx
import pcx.functional as pxf
import pcx.nn as pxnn
import pcx.predictive_coding as pxc
import pcx.utils as pxu

LISTINGS = sorted((Path(__file__).parent / "listings").glob("listing_*.py.txt"))


def appendix() -> SimpleNamespace:
    """The listings as one module."""
    space: dict[str, Any] = {"__name__": "appendix_a"}
    exec("import pcx", space)
    for path in LISTINGS:
        exec(compile(path.read_text(), str(path), "exec"), space)
    return SimpleNamespace(**space)


def build(paper: SimpleNamespace, dims: tuple[int, int, int] = (4, 5, 3), **optimisers: Any) -> dict[str, Any]:
    """The model and its two optimisers, as keyword arguments of ``train``."""
    pxnn.seed(0)
    model = paper.MLP(*dims)
    optim_h = pxu.Optim(optimisers.get("h", optax.sgd(0.1)), pxu.Mask(pxc.VodeParam)(model))
    optim_w = pxu.Optim(optimisers.get("w", optax.sgd(0.1)), pxu.Mask(pxc.LayerParam)(model))
    return {"model": model, "optim_h": optim_h, "optim_w": optim_w}


def sample(seed: int = 1) -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(seed), (4,)), jnp.array([0.0, 1.0, 0.0])


def samples(size: int = 6) -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(2), (size, 4)), jnp.eye(3)[jnp.arange(size) % 3]


def parameters(model: Any) -> list[tuple[jax.Array, jax.Array]]:
    return [(layer.weight, layer.bias) for layer in model.layers]


def energy_by_hand(weights: Any, hidden: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Eq. 1 for one sample: half the squared errors of two hidden nodes and the label."""
    total, below = jnp.zeros(()), x
    for (weight, bias), h in zip(weights, [*hidden, y], strict=True):
        total, below = total + 0.5 * jnp.sum((h - jax.nn.leaky_relu(weight @ below + bias)) ** 2), h
    return total


def train_by_hand(weights: Any, x: jax.Array, y: jax.Array, steps: int, rate: float = 0.1) -> tuple[Any, Any, list[Any]]:
    """Predictive coding on a batch in plain JAX: hidden values settle, then the weights move once along the batch mean."""

    def forward(x: jax.Array) -> list[jax.Array]:
        hidden = []
        for weight, bias in weights[:-1]:
            x = jax.nn.leaky_relu(weight @ x + bias)
            hidden.append(x)
        return hidden

    def settle(hidden: Any, x: jax.Array, y: jax.Array) -> Any:
        for _ in range(steps):
            slope = jax.grad(energy_by_hand, 1)(weights, hidden, x, y)
            hidden = [h - rate * g for h, g in zip(hidden, slope, strict=True)]
        return hidden

    hidden = jax.vmap(lambda x, y: settle(forward(x), x, y))(x, y)
    mean = lambda w: jnp.mean(jax.vmap(energy_by_hand, (None, 0, 0, 0))(w, hidden, x, y))  # noqa: E731
    slopes = jax.grad(mean)(weights)
    return jax.tree.map(lambda w, g: w - rate * g, weights, slopes), hidden, slopes


def batched(paper: SimpleNamespace) -> Callable[..., None]:
    """The second listing over a batch, in the composition that the paper's experiments use."""
    axes = pxu.Mask(pxc.VodeParam, [None, 0])
    mapped = {"in_axes": (0, 0), "out_axes": None, "axis_name": "batch"}

    def energy(x: Any, y: Any, *, model: Any) -> Any:
        return jax.lax.pmean(paper.energy(x, y, model=model), "batch")

    grad_h = pxf.value_and_grad(pxu.Mask(pxc.VodeParam, [False, True]))(pxf.vmap(axes, **mapped)(energy))
    grad_w = pxf.value_and_grad(pxu.Mask(pxc.LayerParam, [False, True]))(pxf.vmap(axes, **mapped)(energy))
    forward = pxf.vmap(axes, in_axes=(0,), axis_name="batch")(lambda x, *, model: model(x))

    def train(T: int, x: Any, y: Any, *, model: Any, optim_h: Any, optim_w: Any) -> None:
        model.train()
        with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            forward(x, model=model)
        for _ in range(T):
            with pxu.step(model, clear_params=pxc.VodeParam.Cache):
                _, g_h = grad_h(x, y, model=model)
                optim_h.step(model, g_h["model"], True)
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            _, g_w = grad_w(x, y, model=model)
            optim_w.step(model, g_w["model"])

    return train


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_training_follows_the_equations(steps):
    """Values and weights after one call of the printed ``train`` are those of the same algorithm in plain JAX."""
    paper = appendix()
    parts, (x, y) = build(paper), sample()
    weights, hidden, _ = train_by_hand(parameters(parts["model"]), x[None], y[None], steps)
    paper.train(steps, x, y, **parts)
    assert largest_difference(weights, parameters(parts["model"])) < 1e-14
    settled = [vode.get("h") for vode in parts["model"].vodes]
    assert largest_difference([h[0] for h in hidden], settled[:-1]) < 1e-14
    np.testing.assert_array_equal(settled[-1], y)


@pytest.mark.parametrize("shortcuts", [pcx.NO_SHORTCUTS, pcx.ALL_SHORTCUTS])
@pytest.mark.parametrize("steps", [0, 1, 6])
def test_training_equals_the_core(steps, shortcuts):
    paper = appendix()
    parts, (x, y) = build(paper), sample()
    before = jax.tree.map(lambda a: a, parts["model"])
    rule = optax.sgd(0.1)
    core = pcx.train_step(before, x[None], {"vodes.2": y[None]}, state_optimiser=rule, weight_optimiser=rule,
                          weight_state=rule.init(pcx.weights(before)), steps=steps, shortcuts=shortcuts)  # fmt: skip
    paper.train(steps, x, y, **parts)
    assert largest_difference(pcx.weights(core.model), pcx.weights(parts["model"])) < 1e-12
    for vode, value in zip(parts["model"].vodes, core.inferred.values.values(), strict=True):
        np.testing.assert_allclose(vode.get("h"), value[0], rtol=0, atol=1e-12)


def test_training_twice_starts_from_the_new_weights_and_values():
    """The second call initialises again: nothing of the first sample's values is left."""
    paper = appendix()
    parts = build(paper)
    weights = parameters(parts["model"])
    for seed in (1, 5):
        x, y = sample(seed)
        weights, _, _ = train_by_hand(weights, x[None], y[None], 3)
        paper.train(3, x, y, **parts)
    assert largest_difference(weights, parameters(parts["model"])) < 1e-14


@pytest.mark.parametrize("form", ["function", "decorator"])
def test_jitted(form):
    paper = appendix()
    parts, (x, y) = build(paper), sample()
    weights, _, _ = train_by_hand(parameters(parts["model"]), x[None], y[None], 4)
    train = pxf.jit(paper.train, static_argnums=0) if form == "function" else pxf.jit(static_argnums=0)(paper.train)
    assert train(4, x, y, **parts) is None
    assert largest_difference(weights, parameters(parts["model"])) < 1e-13
    weights, _, _ = train_by_hand(weights, x[None], y[None], 2)
    train(2, x, y, **parts)
    assert largest_difference(weights, parameters(parts["model"])) < 1e-13
    assert not tracers(*parts.values())


def test_jitted_evaluation():
    paper = appendix()
    parts, (x, _) = build(paper), sample()
    np.testing.assert_allclose(pxf.jit(paper.eval)(x, model=parts["model"]), paper.eval(x, model=parts["model"]), atol=1e-15)


@pytest.mark.parametrize(
    ("jitted", "dims"),
    [(True, (4, 5, 3)), (True, (4, 6, 3)), (False, (4, 5, 3))],
    ids=["jitted", "jitted, a width is the batch size", "eager"],
)
def test_over_a_batch(jitted, dims):
    """``True`` undoes the mean: every sample's values move as if it were alone; weights move along the mean."""
    paper = appendix()
    parts, (x, y) = build(paper, dims), samples()
    before = jax.tree.map(lambda a: a, parts["model"])
    weights, hidden, _ = train_by_hand(parameters(before), x, y, 3)
    train = pxf.jit(batched(paper), static_argnums=0) if jitted else batched(paper)
    train(3, x, y, **parts)
    assert largest_difference(weights, parameters(parts["model"])) < 1e-13
    assert largest_difference(hidden, [vode.get("h") for vode in parts["model"].vodes[:-1]]) < 1e-13
    rule = optax.sgd(0.1)
    core = pcx.train_step(before, x, {"vodes.2": y}, state_optimiser=rule, weight_optimiser=rule,
                          weight_state=rule.init(pcx.weights(before)), steps=3)  # fmt: skip
    assert largest_difference(pcx.weights(core.model), pcx.weights(parts["model"])) < 1e-12


def test_batches_of_different_sizes():
    """SGD keeps nothing per value, so the last, smaller batch of an epoch needs no ceremony; nor does one sample after it."""
    paper = appendix()
    parts = build(paper)
    weights = parameters(parts["model"])
    train = pxf.jit(batched(paper), static_argnums=0)
    for size in (4, 2, 4):
        x, y = samples(size)
        weights, _, _ = train_by_hand(weights, x, y, 1)
        train(1, x, y, **parts)
    x, y = sample()
    weights, _, _ = train_by_hand(weights, x[None], y[None], 1)
    paper.train(1, x, y, **parts)
    assert largest_difference(weights, parameters(parts["model"])) < 1e-13


def test_batched_gradients_are_those_of_the_mean():
    paper = appendix()
    model, (x, y) = build(paper)["model"], samples()
    energy = pxf.vmap(pxu.Mask(pxc.VodeParam, [None, 0]), in_axes=(0, 0), out_axes=None, axis_name="batch")(
        lambda x, y, *, model: jax.lax.pmean(paper.energy(x, y, model=model), "batch")
    )
    weights = parameters(model)
    _, hidden, slopes = train_by_hand(weights, x, y, 0)
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        pxf.vmap(pxu.Mask(pxc.VodeParam, [None, 0]), in_axes=(0,))(lambda x, *, model: model(x))(x, model=model)
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        value, g_h = pxf.value_and_grad(pxu.Mask(pxc.VodeParam))(energy)(x, y, model=model)
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        _, g_w = pxf.value_and_grad(pxu.Mask(pxc.LayerParam))(energy)(x, y, model=model)
    mean = lambda hidden: jnp.mean(jax.vmap(energy_by_hand, (None, 0, 0, 0))(weights, hidden, x, y))  # noqa: E731
    np.testing.assert_allclose(value, mean(hidden), rtol=1e-14)
    assert largest_difference(slopes, parameters(g_w["model"])) < 1e-14
    assert largest_difference(jax.grad(mean)(hidden), [vode.h for vode in g_h["model"].vodes[:-1]]) < 1e-14
    np.testing.assert_array_equal(g_h["model"].vodes[-1].h, np.zeros((6, 3)))
    assert g_h["model"].layers[0].weight is None
    assert g_w["model"].vodes[0].h is None


@pytest.mark.parametrize("width", [2, 5, 6])
def test_without_a_batch_the_third_argument_multiplies_by_one(width):
    """The leading axis of a value is then a width, of a weight always."""
    paper = appendix()
    steps = []
    for undo in (True, False):
        parts, (x, y) = build(paper, (4, width, 3)), sample()
        with pxu.step(parts["model"], pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            paper.eval(x, model=parts["model"])
        with pxu.step(parts["model"], clear_params=pxc.VodeParam.Cache):
            _, g_h = paper.grad_h(x, y, model=parts["model"])
            _, g_w = paper.grad_w(x, y, model=parts["model"])
            parts["optim_h"].step(parts["model"], g_h["model"], undo)
            parts["optim_w"].step(parts["model"], g_w["model"], undo)
        steps.append(jax.tree.leaves(parts["model"]))
    for one, other in zip(*steps, strict=True):
        np.testing.assert_array_equal(one, other)


def test_scaling_follows_the_energy_not_an_earlier_one():
    """A batched gradient is scaled by its batch, and an unbatched one right after it by one."""
    paper = appendix()
    parts, (x, y) = build(paper), samples()
    batched(paper)(1, x, y, **parts)
    weights = parameters(parts["model"])
    with pxu.step(parts["model"], pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        parts["model"](x[0])
    with pxu.step(parts["model"], clear_params=pxc.VodeParam.Cache):
        _, g_w = paper.grad_w(x[0], y[0], model=parts["model"])
        parts["optim_w"].step(parts["model"], g_w["model"], True)
    expected, _, _ = train_by_hand(weights, x[:1], y[:1], 0)
    assert largest_difference(expected, parameters(parts["model"])) < 1e-14


def test_evaluation_is_the_forward_pass():
    paper = appendix()
    parts, (x, y) = build(paper), sample()
    model = parts["model"]
    paper.train(3, x, y, **parts)
    expected = x
    for weight, bias in parameters(model):
        expected = jax.nn.leaky_relu(weight @ expected + bias)
    np.testing.assert_allclose(paper.eval(x, model=model), expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(model.vodes[-1].h, expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(paper.eval(x, model=model), pcx.run(model, {}, x[None]).output[0], rtol=0, atol=1e-15)


def test_the_forward_pass_sets_all_errors_to_zero():
    paper = appendix()
    model, (x, _) = build(paper)["model"], sample()
    with pxu.step(model, pxc.STATUS.INIT):
        model(x)
    assert float(model.energy()) == 0.0


def test_the_energy_is_equation_one():
    paper = appendix()
    model, (x, y) = build(paper)["model"], sample()
    with pxu.step(model, pxc.STATUS.INIT):
        model(x)
    hidden = [jnp.full((5,), 0.3), jnp.full((5,), -0.2)]
    for vode, value in zip(model.vodes, hidden, strict=False):
        vode.h = value
    np.testing.assert_allclose(paper.energy(x, y, model=model), energy_by_hand(parameters(model), hidden, x, y), rtol=1e-15)


def test_a_vode_call_is_a_set_and_a_get():
    """“x = vode(u) corresponds to vode.set("u", u); x = vode.get("h")”."""
    vode, u = pxc.Vode((3,)), jnp.arange(3.0)
    vode.h = jnp.ones(3)
    assert vode(u) is vode.get("h")
    np.testing.assert_array_equal(vode.get("u"), u)
    other = pxc.Vode((3,))
    other.h = jnp.ones(3)
    other.set("u", u)
    np.testing.assert_array_equal(other.get("h"), vode.get("h"))
    np.testing.assert_array_equal(other.energy(), vode.energy())
    np.testing.assert_array_equal(vode.energy(), 0.5 * (1 + 0 + 1))


def test_nothing_but_values_and_weights_is_left():
    """After the printed code the caches are empty, the status is gone, and nothing traced is kept."""
    paper = appendix()
    parts, (x, y) = build(paper), sample()
    for train in (paper.train, pxf.jit(paper.train, static_argnums=0)):
        train(2, x, y, **parts)
        paper.eval(x, model=parts["model"])
        assert jax.tree.leaves([vode.cache for vode in parts["model"].vodes]) == []
        assert {vode._pcx_flags.status for vode in parts["model"].vodes} == {None}
        assert not tracers(*parts.values())


def test_an_error_in_the_middle_leaves_the_model_as_it_was():
    """A label of the wrong size, jitted: the step fails as a whole."""
    paper = appendix()
    parts, (x, y) = build(paper), sample()
    paper.train(2, x, y, **parts)
    before = snapshot(*parts.values())
    with pytest.raises(pcx.ModelError, match=r"node 'vodes\.2' has shape \(3,\), but its new value has shape \(4,\)"):
        pxf.jit(paper.train, static_argnums=0)(2, x, jnp.ones(4), **parts)
    assert snapshot(*parts.values()) == before
    assert not tracers(*parts.values())


def test_integer_labels_become_one_hot():
    paper = appendix()
    weights = []
    for label in (jnp.array([0.0, 1.0, 0.0]), 1, jnp.array(1), np.int32(1)):
        parts, (x, _) = build(paper), sample()
        paper.train(2, x, label, **parts)
        weights.append(parameters(parts["model"]))
    for other in weights[1:]:
        assert largest_difference(weights[0], other) == 0


def test_integer_labels_over_a_batch():
    paper = appendix()
    weights = []
    for cast in (lambda y: y, lambda y: jnp.argmax(y, axis=1)):
        parts, (x, y) = build(paper), samples()
        batched(paper)(2, x, cast(y), **parts)
        weights.append(parameters(parts["model"]))
    assert largest_difference(*weights) == 0


def momentum_by_hand(weights: Any, data: Any, steps: int, resets: bool) -> Any:
    """SGD with momentum 0.9 on values and weights, whose velocities live on from sample to sample unless reset."""
    fast_h: Any = None
    fast_w: Any = None
    for x, y in data:
        hidden, below = [], x
        for weight, bias in weights[:-1]:
            below = jax.nn.leaky_relu(weight @ below + bias)
            hidden.append(below)
        if fast_h is None or resets:
            fast_h = jax.tree.map(jnp.zeros_like, hidden)
        for _ in range(steps):
            slope = jax.grad(energy_by_hand, 1)(weights, hidden, x, y)
            fast_h = jax.tree.map(lambda v, g: 0.9 * v + g, fast_h, slope)
            hidden = jax.tree.map(lambda h, v: h - 0.05 * v, hidden, fast_h)
        slope = jax.grad(energy_by_hand)(weights, hidden, x, y)
        fast_w = slope if fast_w is None else jax.tree.map(lambda v, g: 0.9 * v + g, fast_w, slope)
        weights = jax.tree.map(lambda w, v: w - 0.05 * v, weights, fast_w)
    return weights


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("reset", ["never", "clear", "init"])
def test_optimiser_state_lives_until_it_is_reset(jitted, reset):
    """As printed, the state of ``optim_h`` is built at the first step and lives on; ``clear`` and ``init`` reset it."""
    paper = appendix()
    rule = optax.sgd(0.05, momentum=0.9)
    parts, data = build(paper, h=rule, w=rule), [sample(1), sample(7), sample(8)]
    expected = momentum_by_hand(parameters(parts["model"]), data, 3, resets=reset != "never")
    assert parts["optim_h"].state is None
    train = pxf.jit(paper.train, static_argnums=0) if jitted else paper.train
    for x, y in data:
        if reset == "clear":
            parts["optim_h"].clear()
        elif reset == "init" and parts["optim_h"].state is not None:
            parts["optim_h"].init(parts["model"])
        train(3, x, y, **parts)
    assert largest_difference(expected, parameters(parts["model"])) < 1e-13


def test_training_fits_the_data():
    """Three samples with different labels are learned: every prediction ends nearest to its own label."""
    paper = appendix()
    parts, (x, y) = build(paper, (4, 8, 3), w=optax.adam(0.02)), samples(3)
    train = pxf.jit(batched(paper), static_argnums=0)
    for _ in range(100):
        train(4, x, y, **parts)
    outputs = jnp.stack([paper.eval(one, model=parts["model"]) for one in x])
    np.testing.assert_array_equal(jnp.argmax(outputs, axis=1), jnp.arange(3))
