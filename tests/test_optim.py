"""The Langevin transformations: their recursions written out, and their stationary laws in closed form.

All on the energy ``½ a (h - μ)²``, whose chains are linear recursions: the covariance V of the state solves the discrete
Lyapunov equation V = A V Aᵀ + q B Bᵀ exactly, with no limit of small steps. Samples are many parallel chains from one
fixed seed; the bounds are five standard errors.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pcx

STIFFNESS, MEAN = 4.0, 0.7


def stationary(step, noise, variance):
    """The covariance of z' = A z + B n with n of this variance."""
    size = len(step)
    inflow = variance * np.outer(noise, noise)
    return np.linalg.solve(np.eye(size**2) - np.kron(step, step), inflow.ravel()).reshape(size, size)


def langevin(rate, variance):
    """(A, B, q) of the value alone."""
    return np.array([[1 - rate * STIFFNESS]]), np.array([1.0]), 2 * rate * variance


def second_order(rate, momentum, variance):
    """(A, B, q) of (value, momentum): momentum first, then the value with the new momentum."""
    keep = 1 - rate * (1 - momentum)
    step = np.array([[1 - rate**2 * STIFFNESS, rate * keep], [-rate * STIFFNESS, keep]])
    return step, np.array([rate, 1.0]), 2 * (1 - momentum) * rate * variance


def simultaneous(rate, momentum, variance):
    """The same equations with both updated from the old state."""
    step = np.array([[1.0, rate], [-rate * STIFFNESS, 1 - rate * (1 - momentum)]])
    return step, np.array([0.0, 1.0]), 2 * (1 - momentum) * rate * variance


def heavy_ball(rate, momentum, variance):
    """(A, B, q) of (value, momentum): the noise is part of the gradient."""
    step = np.array([[1 - rate * STIFFNESS, -rate * momentum], [STIFFNESS, momentum]])
    return step, np.array([-rate, 1.0]), 2 * variance * (1 - momentum) / rate


CASES = {
    "langevin": (langevin, pcx.optim.langevin, (0.2,)),
    "second order": (second_order, pcx.optim.second_order_langevin, (0.5, 0.4)),
    "heavy ball": (heavy_ball, pcx.optim.noisy_heavy_ball, (0.1, 0.6)),
}


def gradient(h):
    return STIFFNESS * (h - MEAN)


def follow(optimiser, h, steps):
    """All values of a descent, the first included."""

    def body(carry, _):
        h, state = carry
        update, state = optimiser.update(gradient(h), state, h)
        return (h + update, state), h + update

    _, rest = jax.jit(lambda h: jax.lax.scan(body, (h, optimiser.init(h)), length=steps))(h)
    return np.concatenate([np.asarray(h)[None], np.asarray(rest)])


@pytest.mark.parametrize("name", CASES)
def test_without_noise_it_is_the_recursion(name):
    """Written out on a state that starts with no momentum."""
    matrices, make, hyper = CASES[name]
    step, _, _ = matrices(*hyper, 0.0)
    found = follow(make(*hyper, variance=0.0, key=jax.random.key(0)), jnp.array([3.0, -1.0]), 30)
    state = np.zeros((len(step), 2))
    state[0] = np.array([3.0, -1.0]) - MEAN
    for h in found:
        np.testing.assert_allclose(h - MEAN, state[0], atol=1e-13)
        state = step @ state
    assert np.max(np.abs(found[-1] - MEAN)) < 0.1 * np.max(np.abs(found[0] - MEAN)), "it descends"


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: pcx.optim.noisy_heavy_ball(0.05, 0.8, variance=0.0, key=jax.random.key(0)), optax.sgd(0.05, momentum=0.8)),
        (lambda: pcx.optim.langevin(0.05, variance=0.0, key=jax.random.key(0)), optax.sgd(0.05)),
    ],
    ids=["heavy ball", "first order"],
)
def test_without_noise_it_is_optax(make, plain):
    start = jax.random.normal(jax.random.key(1), (5,))
    np.testing.assert_allclose(follow(make(), start, 40), follow(plain, start, 40), atol=1e-14)


@pytest.mark.parametrize("variance", [1.0, 0.3])
@pytest.mark.parametrize("name", CASES)
def test_stationary_law(name, variance):
    """20,000 chains of a root with a prior, through `pcx.infer`: mean and variance of the discretised chain."""
    matrices, make, hyper = CASES[name]
    step, noise, inflow = matrices(*hyper, variance)
    steps, chains = 150, 20_000
    radius = np.max(np.abs(np.linalg.eigvals(step)))
    assert radius**steps < 1e-2 / np.sqrt(chains), "the start is forgotten"
    expected = stationary(step, noise, inflow)[0, 0]
    if name == "langevin":
        np.testing.assert_allclose(expected, 2 * variance / (STIFFNESS * (2 - hyper[0] * STIFFNESS)), rtol=1e-12)
    found = eqx.filter_jit(pcx.infer)(
        _Root(), optimiser=make(*hyper, variance=variance, key=jax.random.key(5)), steps=steps, batch=chains,
        precision={"node": STIFFNESS},
    )  # fmt: skip
    samples = np.asarray(found.values["node"])[:, 0]
    assert abs(samples.mean() - MEAN) < 5 * np.sqrt(expected / chains)
    assert abs(samples.var() - expected) < 5 * expected * np.sqrt(2 / chains)


class _Root(pcx.EnergyModule):
    def __init__(self):
        self.node = pcx.Vode((1,), mean=np.array([MEAN]))

    def __call__(self):
        return self.node()


@pytest.mark.parametrize("name", CASES)
def test_small_steps_sample_the_energy(name):
    """As γ → 0 each law tends to exp(-E/σ²): variance σ²/a, here in closed form."""
    matrices, _, hyper = CASES[name]
    for variance in (1.0, 0.3):
        limit = stationary(*matrices(1e-5, *hyper[1:], variance))[0, 0]
        np.testing.assert_allclose(limit, variance / STIFFNESS, rtol=1e-3)


def test_order_of_the_second_order_update_matters():
    """Momentum first is stable where both at once is not: here γ a = 1.2 > 1 - m = 0.2."""
    rate, momentum = 0.3, 0.8
    first, _, _ = second_order(rate, momentum, 1.0)
    both, _, _ = simultaneous(rate, momentum, 1.0)
    np.testing.assert_allclose(np.linalg.det(first), 1 - rate * (1 - momentum), rtol=1e-12)
    assert np.max(np.abs(np.linalg.eigvals(first))) < 1
    assert np.max(np.abs(np.linalg.eigvals(both))) > 1
    found = follow(
        pcx.optim.second_order_langevin(rate, momentum, variance=0.0, key=jax.random.key(0)), jnp.array([MEAN + 1.0]), 200
    )
    state = np.array([1.0, 0.0])
    for _ in range(200):
        state = both @ state
    assert abs(found[-1, 0] - MEAN) < 0.01
    assert abs(state[0]) > 1e6


def test_order_of_the_second_order_update_changes_the_variance():
    """Where both are stable (γ a = 0.4 < 1 - m = 0.9), 20,000 chains tell the two laws apart."""
    rate, momentum, chains = 0.1, 0.1, 20_000
    right = stationary(*second_order(rate, momentum, 1.0))[0, 0]
    wrong = stationary(*simultaneous(rate, momentum, 1.0))[0, 0]
    error = right * np.sqrt(2 / chains)
    assert abs(right - wrong) > 10 * error
    optimiser = pcx.optim.second_order_langevin(rate, momentum, key=jax.random.key(2))
    found = follow(optimiser, jnp.full((chains,), MEAN), 300)[-1]
    assert abs(found.var() - right) < 5 * error


@pytest.mark.parametrize("name", CASES)
def test_noise_is_independent_between_nodes_steps_and_units(name):
    """Zero gradients leave the noise alone: the correlations of 4,000 units are within five standard errors of zero."""
    _, make, hyper = CASES[name]
    values = pcx.Nodes({"a": jnp.zeros((4000,)), "b": jnp.zeros((4000,))})
    optimiser = make(*hyper, key=jax.random.key(3))
    none = jax.tree.map(jnp.zeros_like, values)
    one, state = optimiser.update(none, optimiser.init(values), values)
    two, _ = optimiser.update(none, state, values)
    # the second update carries the first through the momentum: r' = keep r + noise
    carried = {"langevin": 0.0, "second order": 1 - 0.5 * 0.6, "heavy ball": 0.6}[name]
    fresh = np.asarray(two["a"]) - carried * np.asarray(one["a"])
    for left, right in ((one["a"], one["b"]), (one["a"], fresh), (one["a"], np.roll(one["a"], 1))):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / np.sqrt(4000)
    deviation = np.sqrt({"langevin": 2 * 0.2, "second order": 2 * 0.6 * 0.5 * 0.5**2, "heavy ball": 2 * 0.4 * 0.1}[name])
    for draw in (one["a"], one["b"], fresh):
        assert abs(np.std(draw) - deviation) < 5 * deviation / np.sqrt(2 * 4000)


@pytest.mark.parametrize("name", CASES)
def test_the_key_decides(name):
    _, make, hyper = CASES[name]
    start = jnp.zeros((5,))
    one, same, other = (follow(make(*hyper, key=jax.random.key(seed)), start, 3) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.min(np.abs(one[1:] - other[1:])) > 0


@pytest.mark.parametrize("name", CASES)
def test_dtype_is_kept(name):
    _, make, hyper = CASES[name]
    h = jnp.zeros((3,), jnp.float32)
    optimiser = make(*hyper, key=jax.random.key(0))
    update, state = optimiser.update(h, optimiser.init(h), h)
    assert update.dtype == jnp.float32
    assert name == "langevin" or state.momentum.dtype == jnp.float32


def test_chains_go_on_where_they_stopped():
    """Ten steps are six and four with the state carried: also the key goes on, and is not used twice."""
    options = {"batch": 4, "precision": {"node": STIFFNESS}}
    optimiser = pcx.optim.second_order_langevin(0.3, 0.8, key=jax.random.key(0))
    whole = pcx.infer(_Root(), optimiser=optimiser, steps=10, **options)
    half = pcx.infer(_Root(), optimiser=optimiser, steps=6, **options)
    rest = pcx.infer(_Root(), optimiser=optimiser, steps=4, values=half.values, optimiser_state=half.optimiser_state, **options)
    np.testing.assert_allclose(rest.values["node"], whole.values["node"], atol=1e-14)
