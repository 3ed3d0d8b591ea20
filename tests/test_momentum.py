"""Momentum that is made of two sets of values: where it is, and that it is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Chain, batch, largest_difference

import pcx
from pcx._types import Nodes
from pcx.shortcuts.momentum import momenta
from pcx.shortcuts.plan import ZeroAware, per_node, steady

VALUES = Nodes({"a": jnp.ones((2, 3)), "b": jnp.ones((2, 4))})


def found(optimiser, values=VALUES):
    return momenta(ZeroAware(optimiser, values).program, list(values))


@pytest.mark.parametrize(
    "optimiser",
    [
        optax.sgd(0.25, momentum=0.5),
        optax.sgd(jnp.asarray(0.25), momentum=jnp.asarray(0.5)),
        optax.chain(optax.clip(1.0), optax.trace(0.5), optax.scale(0.5), optax.scale(-0.5)),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.25, momentum=0.5)),
    ],
    ids=["numbers", "arrays", "several factors", "decay"],
)
def test_momentum_is_found_with_its_rate(optimiser):
    state = jax.tree.leaves(optimiser.init(VALUES))
    for place, node, factors in found(optimiser):
        assert state[place].shape == VALUES[node].shape
        assert float(np.prod(factors)) == -0.25
    assert [node for _, node, _ in found(optimiser)] == ["a", "b"]


def test_momentum_is_found_where_it_is_rounded_and_node_by_node():
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), VALUES)
    rounded = found(steady(optax.sgd(jnp.asarray(0.3, jnp.float32), momentum=0.5)), half)
    assert [node for _, node, _ in rounded] == ["a", "b"]
    assert float(np.prod(rounded[0].factors)) == float(np.float32(-0.3))  # not as a bfloat16
    mixed = found(per_node({"a": optax.adam(0.1), "b": optax.sgd(0.25, momentum=0.5)}))
    assert [node for _, node, _ in mixed] == ["b"]


def schedule(step):
    return 0.25 / (1 + step)


@pytest.mark.parametrize(
    "optimiser",
    [
        optax.sgd(0.25),
        optax.sgd(0.25, momentum=0.5, nesterov=True),
        optax.sgd(schedule, momentum=0.5),
        optax.inject_hyperparams(optax.sgd)(0.25, momentum=0.5),
        optax.chain(optax.trace(0.5), optax.clip_by_global_norm(1.0), optax.scale(-0.25)),
        optax.chain(optax.trace(0.5), optax.add_decayed_weights(0.1), optax.scale(-0.25)),
        optax.sgd(0.0, momentum=0.5),
        optax.adam(0.25),
    ],
    ids=["none", "nesterov", "schedule", "rate in the state", "clipped after", "decay after", "rate of zero", "adam"],
)
def test_what_is_no_multiple_of_a_step_is_left(optimiser):
    assert found(optimiser) == []


def problem():
    return Chain([3, 4, 5, 2], activation=jnp.tanh), *batch(3, 2, size=5)


def settle(shortcuts=pcx.ALL_SHORTCUTS, rate=0.1, steps=7, **options):
    model, x, y = problem()
    options = {"optimiser": optax.sgd(rate, momentum=0.9), "steps": steps, "shortcuts": shortcuts} | options
    return pcx.infer(model, x, {"vodes.2": y}, **options)


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_values_and_state_are_those_of_momentum_that_is_kept(steps):
    """The last one is a loop."""
    mine, plain = settle(steps=steps, state_dtype=jnp.float64), settle(pcx.NO_SHORTCUTS, steps=steps)
    assert mine.displaced is not None
    assert largest_difference(mine.values, plain.values) < 1e-13
    assert largest_difference(mine.optimiser_state, plain.optimiser_state) < 1e-13
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(plain.optimiser_state)) > 0.1


def test_a_state_goes_on():
    """Four steps and three more are seven."""
    first = settle(steps=4, state_dtype=jnp.float64)
    rest = settle(steps=3, state_dtype=jnp.float64, values=first.values, optimiser_state=first.optimiser_state)
    assert largest_difference(rest.values, settle(pcx.NO_SHORTCUTS).values) < 1e-13


def test_observed_parts_stay():
    model, x, y = problem()
    mask = jnp.arange(4) < 2
    observed = {"vodes.2": y, "vodes.0": pcx.Observed(jnp.full((5, 4), 0.3), mask)}
    options = {"optimiser": optax.sgd(0.1, momentum=0.9), "steps": 7}
    mine = pcx.infer(model, x, observed, state_dtype=jnp.float64, **options)
    plain = pcx.infer(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    assert largest_difference(mine.values, plain.values) < 1e-13
    np.testing.assert_array_equal(mine.values["vodes.0"][:, mask], 0.3)


def test_the_rate_may_be_traced_be_zero_and_be_differentiated():
    def last(rate, **options):
        return settle(rate=rate, **options).values["vodes.1"].sum()

    mine, plain = {"state_dtype": jnp.float64}, {"shortcuts": pcx.NO_SHORTCUTS}
    slope = jax.jit(jax.grad(lambda rate: last(rate, **mine)))
    assert abs(slope(0.1) - jax.grad(lambda rate: last(rate, **plain))(0.1)) < 1e-11
    still = jax.jit(lambda rate: settle(rate=rate, **mine))(0.0)
    assert largest_difference(still.values, still.forward.values) == 0
    assert all(not jnp.any(leaf) for leaf in jax.tree.leaves(still.optimiser_state))
