"""Learning: the weight gradient is that of the mean free energy at fixed values, however delta is given."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Chain, Convolutional, Skip, batch, largest_difference

import pcx
import pcx.nn as pxnn
from pcx.shortcuts.zeros import count


class Twice(pcx.EnergyModule):
    """One layer called twice; its gradient is the sum of both places."""

    def __init__(self):
        with pxnn.keys(jax.random.key(0)):
            self.shared, self.head = pxnn.Linear(3, 3), pxnn.Linear(3, 2)
        self.vodes = [pcx.Vode() for _ in range(3)]

    def __call__(self, x):
        first = self.vodes[0](jnp.tanh(self.shared(x)))
        return self.vodes[2](self.head(self.vodes[1](jnp.tanh(self.shared(first)))))


MODELS = {
    "chain": (lambda: Chain([3, 4, 4, 2]), 3),
    "skip": (lambda: Skip(3, 4, 2), 3),
    "twice": (Twice, 3),
    "convolutional": (Convolutional, (3, 8, 8)),
}


def problem(name, size=5):
    """A model, inputs, and values far from their predictions."""
    make, inputs = MODELS[name]
    model, (x, _) = make(), batch(inputs, 2, size=size)
    forward = pcx.run(model, {}, x).values
    keys = jax.random.split(jax.random.key(9), len(forward))
    return model, x, pcx.Nodes({n: jax.random.normal(k, v.shape) for k, (n, v) in zip(keys, forward.items(), strict=True)})


def by_autodiff(model, values, x, names=None, **options):
    """`jax.grad` of the mean free energy, values fixed."""
    weights, rest = eqx.partition(model, eqx.is_inexact_array)

    def mean(weights):
        energies = pcx.energies(eqx.combine(weights, rest), values, x, **options)
        return sum(jnp.mean(e) for n, e in energies.items() if names is None or n in names)

    return jax.jit(jax.grad(mean))(weights)


OPTIONS = {"precision": {"vodes.0": 2.5, "vodes.1": lambda step: 3.0 + step}, "energy": {"vodes.2": pcx.cross_entropy}}


@pytest.mark.parametrize(
    ("name", "options"),
    [("chain", {}), ("chain", OPTIONS), ("skip", OPTIONS), ("twice", {}), ("convolutional", OPTIONS)],
)
def test_gradient_of_the_mean(name, options):
    model, x, values = problem(name)
    expected = by_autodiff(model, values, x, **options)

    @eqx.filter_jit
    def both(values, x):
        delta = pcx.deltas(model, values, pcx.run(model, values, x).predictions, **options)
        function = pcx.weight_gradient(model, lambda u: pcx.deltas(model, values, u, **options), values, x)
        return pcx.weight_gradient(model, delta, values, x), function

    mapping, function = both(values, x)
    assert largest_difference(mapping, expected) < 1e-12
    assert largest_difference(function, expected) < 1e-12
    assert jax.tree.structure(mapping) == jax.tree.structure(pcx.weights(model))


def test_written_out():
    """∂E/∂W_l = -mean(f'(a_l) ε_l h_{l-1}ᵀ), ∂E/∂b_l = -mean(f'(a_l) ε_l)."""
    model, x, values = problem("chain")
    gradient = pcx.weight_gradient(model, lambda u: pcx.deltas(model, values, u), values, x)
    below = [np.asarray(x), *map(np.asarray, values.values())]
    for i, layer in enumerate(model.layers):
        a = below[i] @ np.asarray(layer.weight).T + np.asarray(layer.bias)
        u, slope = (np.tanh(a), 1 - np.tanh(a) ** 2) if i < 2 else (a, 1.0)
        local = -slope * (below[i + 1] - u)
        np.testing.assert_allclose(gradient.layers[i].weight, local.T @ below[i] / len(x), atol=1e-13)
        np.testing.assert_allclose(gradient.layers[i].bias, local.mean(axis=0), atol=1e-13)


def test_delta_is_minus_the_weighted_error():
    model, x, values = problem("chain")
    predictions = pcx.run(model, values, x).predictions
    delta = pcx.deltas(model, values, predictions, precision={"vodes.1": lambda step: 2.0 * step}, step=3)
    for name, factor in {"vodes.0": 1.0, "vodes.1": 6.0, "vodes.2": 1.0}.items():
        np.testing.assert_allclose(delta[name], -factor * (values[name] - predictions[name]), atol=1e-14)
    delta = pcx.deltas(model, values, predictions, energy={"vodes.2": pcx.cross_entropy})
    u, h = np.asarray(predictions["vodes.2"]), np.asarray(values["vodes.2"])
    softmax = np.exp(u) / np.sum(np.exp(u), axis=1, keepdims=True)
    np.testing.assert_allclose(delta["vodes.2"], softmax * h.sum(axis=1, keepdims=True) - h, atol=1e-13)


def test_delta_of_a_root():
    """Minus the error around its prior; nothing without one, as its energy is zero."""
    values = {"root": jnp.array([[1.0, -2.0]]), "out": jnp.zeros((1, 2))}
    model = _Root(mean=np.array([0.5, 0.5]))
    delta = pcx.deltas(model, values, pcx.run(model, values).predictions)
    np.testing.assert_array_equal(delta["root"], [[-0.5, 2.5]])
    bare = _Root()
    delta = pcx.deltas(bare, values, pcx.run(bare, values).predictions)
    np.testing.assert_array_equal(delta["root"], [[0.0, 0.0]])


class _Root(pcx.EnergyModule):
    def __init__(self, **prior):
        self.scale = jnp.array(2.0)
        self.root, self.out = pcx.Vode((2,), **prior), pcx.Vode()

    def __call__(self):
        return self.out(self.scale * self.root())


def test_scaled_delta_weights_each_place_of_a_shared_layer():
    """Depth scaling is a factor per node, not per weight: 3 × the first place + 5 × the second."""
    model, x, values = problem("twice")
    delta = pcx.deltas(model, values, pcx.run(model, values, x).predictions)
    factors = {"vodes.0": 3.0, "vodes.1": 5.0, "vodes.2": 1.0}
    scaled = pcx.weight_gradient(model, {n: factors[n] * d for n, d in delta.items()}, values, x)
    one = by_autodiff(model, values, x, ["vodes.0"]).shared.weight
    two = by_autodiff(model, values, x, ["vodes.1"]).shared.weight
    assert float(jnp.max(jnp.abs(one - two))) > 1e-2
    np.testing.assert_allclose(scaled.shared.weight, 3 * one + 5 * two, atol=1e-13)


@pytest.mark.parametrize("names", [["vodes.1"], ["vodes.2", "vodes.0"]])
def test_some_nodes_only(names):
    """The others contribute nothing, and are not computed."""
    model, x, values = problem("chain")
    expected = by_autodiff(model, values, x, names)
    delta = pcx.deltas(model, values, pcx.run(model, values, x).predictions)
    assert largest_difference(pcx.weight_gradient(model, {n: delta[n] for n in names}, values, x), expected) < 1e-13
    function = pcx.weight_gradient(model, lambda u: pcx.deltas(model, values, u), values, x, names=names)
    assert largest_difference(function, expected) < 1e-13

    def gradient(values):
        return pcx.weight_gradient(model, lambda u: pcx.deltas(model, values, u), values, x, names=names)

    program = jax.make_jaxpr(lambda v: eqx.filter(gradient(v), eqx.is_array))(values)
    assert count(program.jaxpr) == 2 * len(names), "one product for the prediction and one for the weight"


def test_learning_at_other_values():
    """Errors from settled values, products with forward values: delta and values are independent."""
    model, x, values = problem("chain")
    forward = pcx.run(model, {}, x).values
    delta = {n: values[n] * 0.1 for n in values}
    gradient = pcx.weight_gradient(model, delta, forward, x)
    activation = np.asarray(forward["vodes.0"]) @ np.asarray(model.layers[1].weight).T + np.asarray(model.layers[1].bias)
    local = (1 - np.tanh(activation) ** 2) * np.asarray(delta["vodes.1"])
    np.testing.assert_allclose(gradient.layers[1].weight, local.T @ np.asarray(forward["vodes.0"]) / 5, atol=1e-13)


def test_order_of_the_values_does_not_matter():
    """A plain dict, in any order, is as good as `Nodes` in call order (equal widths: no shape would tell)."""
    model, (x, _) = Chain([3, 3, 3, 3]), batch(3, 3, size=5)
    keys = jax.random.split(jax.random.key(9), 3)
    values = pcx.Nodes({f"vodes.{i}": jax.random.normal(k, (5, 3)) for i, k in enumerate(keys)})
    delta = pcx.deltas(model, values, pcx.run(model, values, x).predictions)
    expected = by_autodiff(model, values, x)
    backwards = {name: values[name] for name in reversed(list(values))}
    assert largest_difference(pcx.weight_gradient(model, delta, backwards, x), expected) < 1e-13


def test_learned_mean_of_a_prior():
    """∂E/∂μ = mean(μ - h)."""
    model = _Root(mean=np.array([1.0, -1.0]), learn_mean=True)
    h = np.array([[3.0, 0.0], [0.0, 4.0], [1.0, 1.0]])
    values = {"root": jnp.asarray(h), "out": jnp.zeros((3, 2))}
    gradient = pcx.weight_gradient(model, lambda u: pcx.deltas(model, values, u), values)
    np.testing.assert_allclose(gradient.root.mean, (np.array([1.0, -1.0]) - h).mean(axis=0), atol=1e-15)
    np.testing.assert_allclose(gradient.scale, np.mean(np.sum(2.0 * h * h, axis=1)), rtol=1e-14)


def test_unknown_node_is_refused():
    model, x, values = problem("chain")
    with pytest.raises(pcx.ModelError, match=r"no node 'vodes.5'; near: vodes"):
        pcx.weight_gradient(model, {"vodes.5": jnp.ones((5, 2))}, values, x)


# --- train_step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "steps"), [("chain", 1), ("chain", 5), ("twice", 2), ("convolutional", 1)])
def test_train_step_is_inference_then_one_update(name, steps):
    """Also while the wave front is on its way: nodes that it has not reached contribute exactly nothing."""
    model, x, _ = problem(name)
    last = pcx.output_node(model, x)
    y = pcx.run(model, {}, x).output + 1.0
    optimiser = optax.sgd(0.1, momentum=0.9)

    def step(model, x, y):
        return pcx.train_step(
            model, x, {last: y}, state_optimiser=optax.sgd(0.2), weight_optimiser=optimiser,
            weight_state=optimiser.init(pcx.weights(model)), steps=steps, weight_scale=3.0,
        )  # fmt: skip

    trained = eqx.filter_jit(step)(model, x, y)
    slow = eqx.filter_jit(pcx.infer)(model, x, {last: y}, optimiser=optax.sgd(0.2), steps=steps, shortcuts=pcx.NO_SHORTCUTS)
    assert largest_difference(trained.inferred.values, slow.values) < 1e-12
    gradient = by_autodiff(model, slow.values, x)
    expected = jax.tree.map(lambda w, g: w - 0.1 * 3.0 * g, eqx.filter(model, eqx.is_inexact_array), gradient)
    assert largest_difference(eqx.filter(trained.model, eqx.is_inexact_array), expected) < 1e-12
    assert largest_difference(trained.energies, pcx.energies(model, slow.values, x)) < 1e-12
    assert list(trained.energies) == list(slow.values)
    assert largest_difference(trained.optimiser_state[0].trace, jax.tree.map(lambda g: 3.0 * g, gradient)) < 1e-12


def test_train_step_of_a_generative_model():
    """A root without a prior has no energy, and its value moves no weight but through what it predicts."""
    model = _Root()
    data, optimiser = jnp.array([[1.0, 2.0], [3.0, -1.0]]), optax.sgd(0.1)
    trained = pcx.train_step(
        model, None, {"out": data}, state_optimiser=optax.sgd(0.1), weight_optimiser=optimiser,
        weight_state=optimiser.init(pcx.weights(model)), steps=3,
    )  # fmt: skip
    h = np.zeros((2, 2))
    for _ in range(3):
        h = h + 0.1 * 2.0 * (np.asarray(data) - 2.0 * h)
    np.testing.assert_allclose(trained.inferred.values["root"], h, atol=1e-15)
    error = np.asarray(data) - 2.0 * h
    np.testing.assert_allclose(trained.model.scale, 2.0 + 0.1 * np.mean(np.sum(error * h, axis=1)), rtol=1e-14)
    np.testing.assert_array_equal(trained.energies["root"], [0.0, 0.0])
    np.testing.assert_allclose(trained.energies["out"], 0.5 * np.sum(error**2, axis=1), rtol=1e-13)


def test_precision_schedule_at_the_last_step():
    """The weights learn from the energies after the last step, at its precision."""
    model, x, _ = problem("chain")
    y, optimiser = pcx.run(model, {}, x).output + 1.0, optax.sgd(1.0)
    options = {"precision": {"vodes.2": lambda step: 1.0 + step}}
    trained = pcx.train_step(
        model, x, {"vodes.2": y}, state_optimiser=optax.sgd(0.1), weight_optimiser=optimiser,
        weight_state=optimiser.init(pcx.weights(model)), steps=4, **options,
    )  # fmt: skip
    values = trained.inferred.values
    gradient = by_autodiff(model, values, x, step=4, **options)
    moved = jax.tree.map(lambda old, new: old - new, eqx.filter(model, eqx.is_array), eqx.filter(trained.model, eqx.is_array))
    assert largest_difference(moved, gradient) < 1e-13
    assert largest_difference(trained.energies, pcx.energies(model, values, x, step=4, **options)) < 1e-13


def test_training_settles_the_energy():
    """Gradient descent on a linear chain fits linear data: the free energy falls to zero."""
    model, (x, _) = Chain([3, 3, 2], lambda u: u), batch(3, 2, size=20)
    y = x @ jnp.array([[1.0, -0.5], [0.3, 0.2], [0.0, 0.7]])
    optimiser = optax.sgd(0.1, momentum=0.8)

    @eqx.filter_jit
    def step(model, state):
        done = pcx.train_step(model, x, {"vodes.1": y}, state_optimiser=optax.sgd(0.3), weight_optimiser=optimiser,
                              weight_state=state, steps=20)  # fmt: skip
        return done.model, done.optimiser_state

    state = optimiser.init(pcx.weights(model))
    for _ in range(500):
        model, state = step(model, state)
    np.testing.assert_allclose(pcx.run(model, {}, x).output, y, atol=1e-6)


def test_nothing_observed_teaches_nothing():
    """At the forward pass every error is zero: energies are zero and plain gradient descent leaves the weights alone."""
    model, (x, _) = Chain([3, 3, 3]), batch(3, 3, size=5)
    descent = optax.sgd(0.1)
    state = descent.init(pcx.weights(model))
    done = pcx.train_step(model, x, {}, state_optimiser=descent, weight_optimiser=descent, weight_state=state, steps=3)
    assert all(energy.tolist() == [0.0] * 5 for energy in done.energies.values())
    assert largest_difference(pcx.weights(done.model), pcx.weights(model)) == 0
