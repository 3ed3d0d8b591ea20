"""Random networks with random skip connections: with all shortcuts they learn what they learn without any."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pcx
import pcx.nn as pxnn

WIDTH, SAMPLES = 5, 4
ACTIVATIONS = [jnp.tanh, jax.nn.relu, jax.nn.gelu, jax.nn.leaky_relu, jax.nn.softplus, jax.nn.sigmoid, jax.nn.silu, lambda a: a]
JOINS = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    jnp.maximum,
    lambda a, b: a / (1 + b * b),
    lambda a, b: a + 0.5 * b / jnp.sqrt(1e-3 + jnp.mean(b * b)),
    lambda a, b: jnp.where(a > b, a, 0.3 * b),
    lambda a, b: a + jnp.log1p(jnp.exp(b)),
    lambda a, b: jnp.concatenate([a[:3], b[3:]]),
    lambda a, b: a - jax.nn.softmax(b),
]
OPTIMISERS = [optax.sgd(0.05), optax.sgd(0.05, momentum=0.7), optax.sgd(0.02, momentum=0.9, nesterov=True)]


class Random(pcx.EnergyModule):
    """Each node follows the last one, and is joined with the value of an earlier one, or of the input; some layers are shared.

    In half of the models the plan repeats itself, so that there are equal pieces.
    """

    def __init__(self, seed, depth):
        rng = np.random.default_rng(seed)
        with pxnn.keys(jax.random.key(seed)):
            self.layers = [pxnn.Linear(WIDTH, WIDTH) for _ in range(depth)]
        self.vodes = [pcx.Vode((WIDTH,)) for _ in range(depth)]
        period = int(rng.integers(1, 3)) if rng.random() < 0.5 else depth
        most = (len(ACTIVATIONS), len(JOINS), 3, 7)
        plan = [tuple(int(rng.integers(count)) for count in most) for _ in range(period)]
        self.plan = tuple(plan[i % period] for i in range(depth))

    def __call__(self, x):
        past = [x, x, x]
        for layer, vode, (activation, join, back, own) in zip(self.layers, self.vodes, self.plan, strict=True):
            u = ACTIVATIONS[activation]((layer if own else self.layers[0])(past[-1]))
            past.append(vode(JOINS[join](u, past[-1 - back]) if back else u))
        return past[-1]


@pytest.mark.parametrize("seed", range(16))
def test_random_models_learn_the_same_with_all_shortcuts(seed):
    """In float64, with and without anchors; in float32 they are no further from it than without shortcuts."""
    rng = np.random.default_rng(1000 + seed)
    depth, steps, optimiser = int(rng.integers(3, 9)), int(rng.integers(1, 14)), OPTIMISERS[seed % 3]
    model, (x, y, other) = Random(seed, depth), jnp.asarray(rng.normal(size=(3, SAMPLES, WIDTH)))
    observed = {f"vodes.{depth - 1}": y}
    if seed % 4 == 1:
        observed["vodes.1"] = pcx.Observed(other, np.array([True, False, True, False, False]))
    options = [{}, {"precision": {"vodes.1": 0.7}}, {"init": "zeros"}][seed % 5 % 3]

    def learn(dtype=jnp.float64, **choice):
        single = jax.tree.map(lambda a: a.astype(dtype) if a.dtype == jnp.float64 else a, (model, x, observed))
        sgd = optax.sgd(1.0)
        weights = {"weight_optimiser": sgd, "weight_state": sgd.init(pcx.weights(single[0]))}
        done = pcx.train_step(*single, state_optimiser=optimiser, steps=steps, **weights, **options, **choice)
        return [np.asarray(a) for a in jax.tree.leaves((done.inferred.values, done.energies, pcx.weights(done.model)))]

    naive = learn(shortcuts=pcx.NO_SHORTCUTS)
    for exact in (learn(), learn(state_dtype=jnp.float64)):
        for a, b in zip(exact, naive, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9 * (1e-3 + np.abs(b).max()))

    def away(found):
        return max(float(np.abs(a - b).max() / (1e-9 + np.abs(b).max())) for a, b in zip(found, naive, strict=True))

    assert away(learn(jnp.float32)) < max(10 * away(learn(jnp.float32, shortcuts=pcx.NO_SHORTCUTS)), 3e-6)
