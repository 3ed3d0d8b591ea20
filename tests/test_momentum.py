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
    narrow = found(optax.sgd(jnp.asarray(0.3, jnp.bfloat16), momentum=0.5), half)  # here as a bfloat16
    assert float(np.prod([float(factor) for factor in narrow[0].factors])) == float(jnp.asarray(-0.3, jnp.bfloat16))
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


MADE = pcx.Shortcuts(kernel=True)


def settle(shortcuts=MADE, rate=0.1, steps=7, **options):
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
    mine = pcx.infer(model, x, observed, state_dtype=jnp.float64, shortcuts=MADE, **options)
    plain = pcx.infer(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    assert largest_difference(mine.values, plain.values) < 1e-13
    np.testing.assert_array_equal(mine.values["vodes.0"][:, mask], 0.3)


def test_a_traced_rate_may_be_zero():
    """Then nothing moves. Momentum is kept, and has its derivative, unless it is asked for."""
    mine, plain = {"state_dtype": jnp.float64}, {"shortcuts": pcx.NO_SHORTCUTS}
    still = jax.jit(lambda rate: settle(rate=rate, **mine))(0.0)
    assert largest_difference(still.values, still.forward.values) == 0
    asked = mine | {"shortcuts": pcx.ALL_SHORTCUTS}
    for rate in (0.0, 0.1):
        one, other = (jax.jit(lambda rate, o=o: settle(rate=rate, **o))(rate) for o in (asked, plain))
        assert largest_difference(one.optimiser_state, other.optimiser_state) < 1e-13
        slopes = [jax.grad(lambda rate, o=o: settle(rate=rate, **o).values["vodes.1"].sum())(rate) for o in (asked, plain)]
        assert abs(slopes[0] - slopes[1]) < 1e-11


def test_a_given_state_is_kept():
    """Also that of what is observed now and was free before."""
    free = settle(steps=4, state_dtype=jnp.float64)
    model, x, y = problem()
    observed = {"vodes.2": y, "vodes.0": pcx.Observed(jnp.full((5, 4), 0.3), jnp.arange(4) < 2)}
    options = {"optimiser": optax.sgd(0.1, momentum=0.9), "steps": 2, "optimiser_state": free.optimiser_state}
    mine, plain = (
        pcx.infer(model, x, observed, values=free.values, **options, **which)
        for which in ({"shortcuts": MADE, "state_dtype": jnp.float64}, {"shortcuts": pcx.NO_SHORTCUTS})
    )
    assert largest_difference(mine.optimiser_state, plain.optimiser_state) < 1e-13
    assert largest_difference(mine.values, plain.values) < 1e-13


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16, jnp.float32])
def test_what_an_optimiser_rounds_is_no_multiple(dtype):
    """An update that goes on with a rounded momentum does not say what it was."""

    def update(gradients, state, values=None):
        state = jax.tree.map(lambda g, m: g + 0.9 * m, gradients, state)
        return jax.tree.map(lambda m: -0.1 * m.astype(dtype).astype(m.dtype), state), state

    rule = optax.GradientTransformation(lambda values: jax.tree.map(jnp.zeros_like, values), update)
    assert found(rule, jax.tree.map(lambda a: a.astype(jnp.float64), VALUES)) == []


@pytest.mark.parametrize(("steps", "bound"), [(12, 0.02), (16, 0.03), (40, 0.02)])
def test_rounding_does_not_add_up_over_many_steps(steps, bound):
    """In bfloat16 momentum is made of values for few steps only: the way of the values stays within some roundings."""
    exact = settle(steps=steps, rate=0.01, state_dtype=jnp.float64)
    rounded = settle(steps=steps, rate=0.01, state_dtype=jnp.bfloat16, unroll=True)
    for name in ("vodes.0", "vodes.1"):
        mine, way = (np.asarray(done.displaced.by[name]) for done in (rounded, exact))
        assert np.linalg.norm(mine - way) < bound * np.linalg.norm(way)
    kept = momenta_of(jnp.bfloat16, steps)
    assert len(kept) == (2 if steps <= 16 else 0)
    assert len(momenta_of(jnp.float32, steps)) == 2


def momenta_of(dtype, steps):
    values = jax.tree.map(lambda a: a.astype(dtype), VALUES)
    return ZeroAware(steady(optax.sgd(0.25, momentum=0.5)), values).momenta(steps)
