"""Every row of the timing table gives the same results with and without every shortcut.

One training step of the row's own model at its real widths, with its T, activation and momentum, on random images in float64:
the settled values, the gradient of the weights and the new weights. "Without" also takes pooling by window reduction. In
float64 convolutions are slow on a CPU, so VGG-7 sees 32×32 images here, the smallest that its unpadded convolutions allow;
`make slow` takes the 56×56 ones. Weights are √6 times the usual ones, and values move faster than in the row's settings, so
that an error arrives at the first layer far above rounding.
"""

import jax
import numpy as np
import optax
import pytest

import pcx
import pcx.nn as pxnn
from pcx.bench.speed import config_of
from pcx.bench.tasks import build_model

CASES = [
    ("mlp", (1, 28, 28), 10, 2),
    ("alexnet", (3, 32, 32), 10, 1),
    ("vgg5", (3, 32, 32), 100, 1),
    ("vgg7", (3, 32, 32), 200, 1),
    pytest.param("vgg7", (3, 56, 56), 200, 2, marks=pytest.mark.slow),
]


def train(config, shape, classes, batch, shortcuts, selects):
    """Settled values, the gradient (the trace of momentum after one step) and the new weights."""
    model = build_model(config, shape, classes, jax.random.key(0))
    model = jax.tree.map(lambda weight: weight * 6**0.5, model)
    if hasattr(model, "pool"):
        model.pool = pxnn.MaxPool2d(2, selects=selects)
    x = jax.random.normal(jax.random.key(1), (batch, *shape))
    y = jax.random.randint(jax.random.key(2), (batch,), 0, classes)
    optimisers = {"state_optimiser": optax.sgd(0.1, momentum=config.hyper.momentum_h), "weight_optimiser": optax.sgd(0.1, 0.9)}

    def step(model, x, y):
        state = optimisers["weight_optimiser"].init(pcx.weights(model))
        observed = {pcx.output_node(model, x): y}
        done = pcx.train_step(model, x, observed, weight_state=state, steps=config.hyper.T, shortcuts=shortcuts, **optimisers)
        return done.inferred.values, done.optimiser_state, pcx.weights(done.model)

    # this test computes more than it compiles, against the policy of the suite
    fast = {"xla_backend_optimization_level": 2}
    return jax.jit(step).lower(model, x, y).compile(fast)(model, x, y)


@pytest.mark.parametrize(("row", "shape", "classes", "batch"), CASES)
def test_a_row_is_equal_with_and_without_shortcuts(row, shape, classes, batch):
    config = config_of(row, "pc_se")
    values, gradient, weights = train(config, shape, classes, batch, pcx.ALL_SHORTCUTS, selects=True)
    plain_values, plain_gradient, plain_weights = train(config, shape, classes, batch, pcx.NO_SHORTCUTS, selects=False)
    for name, value in plain_values.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-10, atol=1e-12, err_msg=name)
    pairs = list(zip(jax.tree.leaves(gradient), jax.tree.leaves(plain_gradient), strict=True))
    assert len(pairs) == len(jax.tree.leaves(weights))
    for mine, plain in pairs:
        largest = np.abs(plain).max()
        assert largest > 1e-6
        np.testing.assert_allclose(mine, plain, rtol=1e-10, atol=1e-9 * largest)  # errors are differences of values near 1
    for mine, plain in zip(jax.tree.leaves(weights), jax.tree.leaves(plain_weights), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-10, atol=1e-13)
