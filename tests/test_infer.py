"""Inference: five uses of one call, against linear algebra written out; tolerance, records, optimisers, precisions."""

import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Chain, Skip, batch, largest_difference

import pcx
import pcx.nn as pxnn


def settle(model, x=None, observed=None, **options):
    """`pcx.infer`, compiled as one program (quickly: the compiler does not optimise)."""
    quickly = {"xla_backend_optimization_level": 0}
    return eqx.filter_jit(lambda x, o: pcx.infer(model, x, o, **options), compiler_options=quickly)(x, observed)


def identity(u):
    return u


def linear_chain(dims, seed=0):
    """A chain without activations, and its weights and biases in numpy."""
    model = Chain(dims, identity, seed)
    return model, [np.asarray(layer.weight) for layer in model.layers], [np.asarray(layer.bias) for layer in model.layers]


def settled(weights, biases, x, y, precision):
    """Minimise ½ Σ_l π_l |h_l - W_l h_{l-1} - b_l|² over the hidden values: one linear system for all of them."""
    sizes = [w.shape[0] for w in weights[:-1]]
    start = np.cumsum([0, *sizes])
    rows = []
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        matrix = np.zeros((len(bias), start[-1]))  # this error as a function of all hidden values: matrix h + offset
        if i < len(sizes):
            matrix[:, start[i] : start[i + 1]] = np.eye(sizes[i])
        if i > 0:
            matrix[:, start[i - 1] : start[i]] = -weight
        offset = -np.tile(bias, (len(x), 1)) - (x @ weight.T if i == 0 else 0) + (y if i == len(sizes) else 0)
        rows.append((matrix, offset, precision[i]))
    hessian = sum(p * m.T @ m for m, _, p in rows)
    slope = sum(p * c @ m for m, c, p in rows)
    h = -np.linalg.solve(hessian, slope.T).T
    energy = 0.5 * sum(p * np.sum((h @ m.T + c) ** 2, axis=1) for m, c, p in rows)
    return [h[:, a:b] for a, b in itertools.pairwise(start)], energy


@pytest.mark.parametrize("precision", [[1.0, 1.0, 1.0, 1.0], [2.0, 0.5, 1.0, 3.0]])
def test_classification_of_a_linear_chain(precision):
    """Input and label fixed: values solve the linear system, and E* = ½ rᵀ S⁻¹ r with S = I/π_L + Σ P Pᵀ/π_l."""
    model, weights, biases = linear_chain([3, 4, 5, 4, 2])
    x, y = map(np.asarray, batch(3, 2))
    options = {"precision": {f"vodes.{i}": p for i, p in enumerate(precision)}}
    found = settle(model, x, {"vodes.3": y}, optimiser=optax.sgd(0.2), steps=3000, **options)
    hidden, energy = settled(weights, biases, x, y, precision)
    for i, h in enumerate(hidden):
        np.testing.assert_allclose(found.values[f"vodes.{i}"], h, atol=1e-10)
    np.testing.assert_array_equal(found.values["vodes.3"], y)
    forward = x
    for weight, bias in zip(weights, biases, strict=True):
        forward = forward @ weight.T + bias
    spread, product = np.eye(2) / precision[3], np.eye(2)
    for weight, p in zip(weights[:0:-1], precision[2::-1], strict=True):
        product = product @ weight
        spread = spread + product @ product.T / p
    residual = y - forward
    closed = 0.5 * np.sum(residual * np.linalg.solve(spread, residual.T).T, axis=1)
    np.testing.assert_allclose(energy, closed, rtol=1e-10)
    np.testing.assert_allclose(pcx.free_energy(model, found.values, x, **options), closed, rtol=1e-10)


class Generator(pcx.EnergyModule):
    """A root latent, a hidden node and data: z → W₁ z + b₁ → W₂ h + b₂."""

    def __init__(self, latent=2, hidden=3, data=5, **prior):
        with pxnn.keys(jax.random.key(0)):
            self.layers = [pxnn.Linear(latent, hidden), pxnn.Linear(hidden, data)]
        self.z, self.h, self.data = pcx.Vode((latent,), **prior), pcx.Vode(), pcx.Vode()

    def __call__(self):
        return self.data(self.layers[1](self.h(self.layers[0](self.z()))))


def arrays(model):
    return [np.asarray(a) for layer in model.layers for a in (layer.weight, layer.bias)]


@pytest.mark.parametrize(("mean", "learn"), [(None, False), ([0.5, -1.0], False), ([0.5, -1.0], True)])
def test_generation(mean, learn):
    """Data fixed at the last node, latent free: least squares without a prior, the posterior mean with one.

    Integrating h out, data ~ N(W₂(W₁ z + b₁) + b₂, S) with S = I + W₂ W₂ᵀ.
    """
    model = Generator() if mean is None else Generator(mean=np.array(mean), learn_mean=learn)
    first, b1, second, b2 = arrays(model)
    data = np.asarray(jax.random.normal(jax.random.key(1), (4, 5)))
    found = settle(model, None, {"data": data}, optimiser=optax.sgd(0.2, momentum=0.9), steps=4000)
    inverse = np.linalg.inv(np.eye(5) + second @ second.T)
    whole, offset = second @ first, data - (second @ b1 + b2)
    prior = 0.0 if mean is None else 1.0
    z = np.linalg.solve(
        whole.T @ inverse @ whole + prior * np.eye(2),
        whole.T @ inverse @ offset.T + prior * np.array(mean or [0, 0])[:, None],
    ).T
    np.testing.assert_allclose(found.values["z"], z, atol=1e-9)
    np.testing.assert_array_equal(found.values["data"], data)
    u = z @ first.T + b1
    h = u + np.linalg.solve(np.eye(3) + second.T @ second, second.T @ (data - u @ second.T - b2).T).T
    np.testing.assert_allclose(found.values["h"], h, atol=1e-9)


def test_a_root_without_prior_is_free_of_its_start():
    model = Generator()
    data = np.asarray(jax.random.normal(jax.random.key(1), (4, 5)))
    options = {"optimiser": optax.sgd(0.2, momentum=0.9), "steps": 4000}
    one = settle(model, None, {"data": data}, **options).values
    other = settle(model, None, {"data": data}, init={"z": pcx.normal(1.0)}, key=jax.random.key(7), **options).values
    assert largest_difference(one, other) < 1e-9


def test_recall():
    """Part of the data fixed: the seen part as given, the unseen part at its prediction, the latent explains the seen."""
    model = Generator(mean=np.zeros(2))
    first, b1, second, b2 = arrays(model)
    mask = np.array([True, False, True, True, False])
    data = np.asarray(jax.random.normal(jax.random.key(1), (4, 5)))
    found = settle(model, None, {"data": pcx.Observed(data, mask)}, optimiser=optax.sgd(0.2, momentum=0.9), steps=4000)
    np.testing.assert_array_equal(np.asarray(found.values["data"])[:, mask], data[:, mask])
    seen, offset = second[mask], (data - (second @ b1 + b2))[:, mask]
    inverse = np.linalg.inv(np.eye(3) + seen @ seen.T)
    whole = seen @ first
    z = np.linalg.solve(whole.T @ inverse @ whole + np.eye(2), whole.T @ inverse @ offset.T).T
    np.testing.assert_allclose(found.values["z"], z, atol=1e-9)
    h = np.asarray(found.values["h"])
    np.testing.assert_allclose(np.asarray(found.values["data"])[:, ~mask], (h @ second.T + b2)[:, ~mask], atol=1e-9)


def test_recall_with_a_mask_per_sample():
    """Each sample is as if it were alone with its own mask."""
    model = Generator(mean=np.zeros(2))
    masks = np.array([[True, False, True, True, False], [False, True, True, False, True]])
    data = np.asarray(jax.random.normal(jax.random.key(1), (2, 5)))
    options = {"optimiser": optax.sgd(0.1), "steps": 30}
    both = settle(model, None, {"data": pcx.Observed(data, masks)}, **options).values
    for i in range(2):
        alone = settle(model, None, {"data": pcx.Observed(data[i : i + 1], masks[i])}, **options).values
        assert largest_difference(jax.tree.map(lambda v, i=i: v[i : i + 1], both), alone) < 1e-13


def test_sampling():
    """Nothing fixed: Langevin steps draw from the model.

    With the precision matrix Λ of (z, h), h' = h - γ Λ (h - m) + √(2γ) n is stationary at V = 2 (2 Λ - γ Λ²)⁻¹. 6,000
    parallel chains: means and covariances within five standard errors.
    """
    model = Generator(1, 1, 1, mean=np.array([0.7]))
    rate, chains, steps = 0.3, 6000, 200
    noise = pcx.optim.langevin(rate, key=jax.random.key(11))
    found = settle(model, optimiser=noise, steps=steps, batch=chains)
    w1, b1, w2, b2 = (float(np.squeeze(a)) for a in arrays(model))
    errors = np.array([[1, 0, 0], [-w1, 1, 0], [0, -w2, 1]])
    matrix = errors.T @ errors
    covariance = 2 * np.linalg.inv(2 * matrix - rate * matrix @ matrix)
    h = w1 * 0.7 + b1
    mean = np.array([0.7, h, w2 * h + b2])
    assert np.max(np.abs(np.linalg.eigvals(np.eye(3) - rate * matrix))) ** steps < 1e-4, "has forgotten its start"
    samples = np.concatenate([np.asarray(found.values[name]) for name in ("z", "h", "data")], axis=1)
    deviation = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(samples.mean(axis=0) - mean) < 5 * deviation / np.sqrt(chains))
    error = np.sqrt((np.outer(deviation**2, deviation**2) + covariance**2) / chains)
    assert np.all(np.abs(np.cov(samples.T) - covariance) < 5 * error)
    assert np.max(np.abs(np.linalg.inv(matrix) - covariance) / error) > 5, "the discretisation shows"


@pytest.mark.parametrize("init", ["zeros", "forward"])
def test_prediction_reaches_the_forward_pass(init):
    """Input fixed, output free: the minimum has no error anywhere."""
    model, (x, _) = Chain([3, 4, 4, 2]), batch(3, 2)
    found = settle(model, x, optimiser=optax.sgd(0.3, momentum=0.8), steps=400, init=init)
    assert largest_difference(found.values, pcx.run(model, {}, x).values) < (1e-10 if init == "zeros" else 1e-15)


@pytest.mark.parametrize("make", [lambda: Chain([3, 4, 4, 2]), lambda: Skip(3, 4, 2)], ids=["chain", "skip"])
def test_samples_are_independent(make):
    model, (x, y) = make(), batch(3, 2, size=3)
    last = pcx.output_node(model, x)
    options = {"optimiser": optax.adam(0.05, eps=1e-3), "steps": 9}
    together = settle(model, x, {last: y}, **options).values
    for i in range(3):
        alone = settle(model, x[i : i + 1], {last: y[i : i + 1]}, **options).values
        assert largest_difference(jax.tree.map(lambda v, i=i: v[i : i + 1], together), alone) < 1e-12


def test_steps_written_out():
    """Momentum on a chain, the gradient by plain JAX."""
    model, (x, y) = Chain([3, 4, 4, 2]), batch(3, 2)
    layers = [(layer.weight, layer.bias) for layer in model.layers]

    def energy(hidden):
        h = [x, *hidden, y]
        u = [h[i] @ w.T + b for i, (w, b) in enumerate(layers)]
        return 0.5 * sum(jnp.sum((h[i + 1] - (jnp.tanh(a) if i < 2 else a)) ** 2) for i, a in enumerate(u))

    first = jnp.tanh(x @ layers[0][0].T + layers[0][1])
    hidden = [first, jnp.tanh(first @ layers[1][0].T + layers[1][1])]
    trace = [jnp.zeros_like(h) for h in hidden]
    for _ in range(6):
        trace = [g + 0.7 * t for g, t in zip(jax.grad(energy)(hidden), trace, strict=True)]
        hidden = [h - 0.1 * t for h, t in zip(hidden, trace, strict=True)]
    found = settle(model, x, {"vodes.2": y}, optimiser=optax.sgd(0.1, momentum=0.7), steps=6)
    for i, h in enumerate(hidden):
        np.testing.assert_allclose(found.values[f"vodes.{i}"], h, atol=1e-13)
    np.testing.assert_array_equal(found.steps, [6] * 7)
    assert largest_difference(found.forward.values["vodes.0"], first) < 1e-14


def test_no_steps():
    model, (x, y) = Chain([3, 4, 2]), batch(3, 2)
    found = settle(model, x, {"vodes.1": y}, optimiser=optax.sgd(0.1), steps=0)
    assert largest_difference(found.values, pcx.initialise(model, x, {"vodes.1": y})) < 1e-15
    with pytest.raises(pcx.ModelError, match="steps is -1"):
        pcx.infer(model, x, {"vodes.1": y}, optimiser=optax.sgd(0.1), steps=-1)


def test_everything_observed():
    """Nothing can move, whatever the optimiser."""
    model, (x, y) = Chain([3, 4, 2]), batch(3, 2)
    seen = {"vodes.0": jnp.ones((7, 4)), "vodes.1": y}
    found = settle(model, x, seen, optimiser=optax.sgd(0.1), steps=3)
    assert largest_difference(dict(found.values), seen) == 0


def test_integer_labels_are_one_hot():
    model, (x, y) = Chain([3, 4, 2]), batch(3, 2)
    options = {"optimiser": optax.sgd(0.1), "steps": 4, "energy": {"vodes.1": pcx.cross_entropy}}
    one = settle(model, x, {"vodes.1": jnp.arange(7) % 2}, **options)
    assert largest_difference(one.values, settle(model, x, {"vodes.1": y}, **options).values) == 0


def test_observed_as_a_function_of_the_forward_prediction():
    """A target relative to the prediction, such as nudging."""
    model, (x, y) = Chain([3, 4, 4, 2]), batch(3, 2)
    target = pcx.run(model, {}, x).output + 0.1 * (y - pcx.run(model, {}, x).output)
    options = {"optimiser": optax.sgd(0.1), "steps": 5}
    one = settle(model, x, {"vodes.2": lambda u: u + 0.1 * (y - u)}, **options)
    assert largest_difference(one.values, settle(model, x, {"vodes.2": target}, **options).values) < 1e-15


def test_function_for_a_node_that_others_read():
    """Either refused, or the nodes after it see its value: with and without shortcuts the same."""
    model, (x, y) = Chain([3, 4, 4, 2]), batch(3, 2)
    observed = {"vodes.0": lambda u: u + 1.0, "vodes.2": y}
    options = {"optimiser": optax.sgd(0.1), "steps": 5}
    try:
        fast = pcx.infer(model, x, observed, **options)
    except pcx.ModelError:
        return
    slow = pcx.infer(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    assert largest_difference(fast.values, slow.values) < 1e-10


def test_start_at_given_values_and_go_on():
    """Ten steps are six and then four, with values and optimiser state handed over."""
    model, (x, y) = Chain([3, 4, 4, 2]), batch(3, 2)
    options = {"optimiser": optax.sgd(0.1, momentum=0.9)}
    whole = settle(model, x, {"vodes.2": y}, steps=10, **options)
    half = settle(model, x, {"vodes.2": y}, steps=6, **options)
    rest = settle(model, x, {"vodes.2": y}, steps=4, values=half.values, optimiser_state=half.optimiser_state, **options)
    assert largest_difference(whole.values, rest.values) < 1e-14
    assert largest_difference(whole.optimiser_state, rest.optimiser_state) < 1e-14
    fresh = settle(model, x, {"vodes.2": y}, steps=4, values=half.values, **options)
    assert largest_difference(whole.values, fresh.values) > 1e-4, "momentum matters here"


def test_state_of_an_optimiser_after_the_wave_front():
    """What comes out is what the optimiser itself would have: step count and moments, also of nodes not reached yet."""
    model, (x, y) = Chain([3, 4, 4, 4, 2]), batch(3, 2)
    optimiser = optax.adam(0.01)
    found = settle(model, x, {"vodes.3": y}, optimiser=optimiser, steps=2)
    fresh = optimiser.init(found.values.only(["vodes.0", "vodes.1", "vodes.2"]))
    assert jax.tree.structure(found.optimiser_state) == jax.tree.structure(fresh)
    assert int(found.optimiser_state[0].count) == 2
    assert float(jnp.max(jnp.abs(found.optimiser_state[0].mu["vodes.0"]))) == 0
    assert float(jnp.max(jnp.abs(found.optimiser_state[0].mu["vodes.1"]))) > 0


# --- tolerance ----------------------------------------------------------------------------------------------------------


def quadratic(rate):
    """One free node around a prior mean: every step multiplies the gradient by 1 - γ a."""

    class One(pcx.EnergyModule):
        def __init__(self):
            self.node = pcx.Vode((2,), mean=np.array([1.0, -1.0]))

        def __call__(self):
            return self.node()

    return One(), {"optimiser": optax.sgd(rate)}


@pytest.mark.parametrize("steps", [3, 12])
@pytest.mark.parametrize("setting", ["float32", "tensorfloat32", "bfloat16"])
@pytest.mark.parametrize("optimiser", [optax.sgd(0.1, momentum=0.5), optax.adam(0.1)], ids=["momentum", "adam"])
@pytest.mark.parametrize("kernel", [False, True])
def test_a_large_state_is_kept_from_step_to_step(monkeypatch, kernel, optimiser, setting, steps):
    """Barriers after an update: of the state, unless values say it, and of these, unless products read rounded copies."""
    model, (x, y) = Chain([3, 4, 4, 2]), batch(3, 2, size=5)

    def settle(x):
        return pcx.infer(model, x, {"vodes.2": y}, optimiser=optimiser, steps=steps, shortcuts=shortcuts).values

    shortcuts = pcx.Shortcuts(kernel=kernel)
    with jax.default_matmul_precision(setting):
        plain = settle(x)
        assert "optimization_barrier" not in str(jax.make_jaxpr(lambda x: settle(x))(x))
        monkeypatch.setattr("pcx.shortcuts.plan.LARGE", 0)
        barriers = re.findall(r"optimization_barrier ((?:\w+\s+)+)", str(jax.make_jaxpr(lambda x: settle(x))(x)) + " ")
        assert largest_difference(settle(x), plain) == 0.0
    operands = max((sum(name != "in" for name in barrier.split()) for barrier in barriers), default=0)
    made, values = kernel and setting != "float32" and steps == 3, 2 * (setting != "bfloat16")  # anchored and written out
    adam = len(jax.tree.leaves(optimiser.init(x))) > 1
    kept = 2 * 2 + 1 if adam else 0 if made else 2  # of the two hidden nodes, when both are reached
    assert operands == values + kept


@pytest.mark.parametrize("widths", [[3, 4, 4, 2], [3, 4, 4, 4, 4, 2]])
def test_equal_steps_are_traced_once(widths):
    """However many are written out; where nothing is traced, each step runs as it is. With and without a stack."""
    calls = []

    def energy(h, u):
        calls.append(1)
        return 0.5 * jnp.sum((h - u) ** 2)

    model, (x, y) = Chain(widths, activation=jnp.tanh), batch(3, 2, size=5)
    nodes, traced, found = [f"vodes.{i}" for i in range(len(widths) - 1)], [], []
    last = nodes[-1]
    for steps in (2, 8):
        options = {"optimiser": optax.sgd(0.1), "steps": steps, "init": "zeros", "energy": dict.fromkeys(nodes, energy)}
        calls.clear()
        found.append(jax.jit(lambda x, options=options: pcx.infer(model, x, {last: y}, **options).values)(x))
        traced.append(len(calls))
    assert traced[0] == traced[1] > 0
    assert largest_difference(found[1], pcx.infer(model, x, {last: y}, **options).values) < 1e-14


def test_a_schedule_may_branch_on_the_number_of_the_step():
    """Steps that are written out have plain numbers: precision 1 for two steps, then 3, as with arrays."""
    model, (x, y) = Chain([3, 4, 2]), batch(3, 2, size=5)

    def settle(schedule):
        options = {"optimiser": optax.sgd(0.1), "steps": 4, "init": "zeros", "precision": {"vodes.0": schedule}}
        return jax.jit(lambda x: pcx.infer(model, x, {"vodes.1": y}, **options).values)(x)

    branches = settle(lambda step: 1.0 if step < 2 else 3.0)
    assert largest_difference(branches, settle(lambda step: jnp.where(step < 2, 1.0, 3.0))) < 1e-15
    assert largest_difference(branches, settle(lambda step: 1.0)) > 1e-3


def test_values_of_many_members_are_kept_too():
    """Eight members side by side have barriers, two have none; values and derivatives are those of each member alone."""
    model, (x, y) = Chain([3, 4, 4, 2]), batch(3, 2, size=5)

    def energy(x):
        found = pcx.infer(model, x, {"vodes.2": y}, optimiser=optax.sgd(0.1, momentum=0.5), steps=3).values
        return sum(jnp.sum(value**2) for value in found.values())

    members = jnp.stack([x * (1 + i / 8) for i in range(8)])
    for count in (2, 8):
        text = str(jax.make_jaxpr(lambda x: jax.vmap(energy)(x))(members[:count]))
        assert ("optimization_barrier" in text) == (count == 8)
    for function in (energy, jax.grad(energy), jax.hessian(energy)):
        np.testing.assert_allclose(jax.vmap(function)(members)[5], function(members[5]), rtol=1e-12, atol=1e-14)


def test_tolerance_on_a_quadratic():
    """The gradient falls by ½ a step: tolerance 0.01 is met after 7 steps (2⁻⁷ < 0.01 < 2⁻⁶), for any start."""
    model, options = quadratic(0.5)
    start = np.array([[3.0, 2.0], [1.0, -0.5], [-7.0, 100.0], [1.0, -1.0]])
    first = np.linalg.norm(start - [1.0, -1.0], axis=1)
    found = settle(model, values={"node": jnp.asarray(start)}, steps=50, tolerance=0.01, **options)
    np.testing.assert_array_equal(found.steps, [7, 7, 7, 0])
    np.testing.assert_allclose(found.gradient_start, first, rtol=1e-14)
    np.testing.assert_allclose(found.gradient_end, first / 2**7, rtol=1e-12)
    np.testing.assert_allclose(found.values["node"], [1, -1] + (start - [1, -1]) / 2**7, atol=1e-13)
    limited = settle(model, values={"node": jnp.asarray(start)}, steps=3, tolerance=0.01, **options)
    np.testing.assert_array_equal(limited.steps, [3, 3, 3, 0])
    np.testing.assert_allclose(limited.gradient_end, first / 2**3, rtol=1e-12)


@pytest.mark.parametrize(
    ("record", "shortcuts"),
    [(None, pcx.ALL_SHORTCUTS), (pcx.record_energies, pcx.ALL_SHORTCUTS), (None, pcx.NO_SHORTCUTS)],
)
def test_tolerance_is_per_sample(record, shortcuts):
    """Each sample stops at the step at which it would stop alone, at the same values; written out as a plain loop."""
    model, (x, y) = Chain([3, 4, 4, 2]), batch(3, 2)
    x = x * jnp.linspace(0.1, 4, 7)[:, None]
    free = ["vodes.0", "vodes.1"]
    found = settle(
        model, x, {"vodes.2": y}, optimiser=optax.sgd(0.2), steps=60, tolerance=0.05, record=record, shortcuts=shortcuts
    )
    assert len(set(np.asarray(found.steps).tolist())) > 2, "the samples differ"
    gradient = jax.jit(jax.grad(lambda free, fixed: jnp.sum(pcx.free_energy(model, free | fixed, x))))
    values = pcx.initialise(model, x, {"vodes.2": y})

    def norms(g):
        return np.sqrt(sum(np.sum(np.square(part), axis=1) for part in g.values()))

    g = gradient(values.only(free), values.only(["vodes.2"]))
    first, steps = norms(g), np.zeros(7, int)
    going = np.ones(7, bool)
    for _ in range(60):
        going &= norms(g) > 0.05 * first
        new = {n: values[n] - 0.2 * g[n] * going[:, None] for n in free}
        steps += going
        values = values | new
        g = gradient(values.only(free), values.only(["vodes.2"]))
    np.testing.assert_array_equal(found.steps, steps)
    assert largest_difference(found.values, values) < 1e-12
    np.testing.assert_allclose(found.gradient_start, first, rtol=1e-12)
    np.testing.assert_allclose(found.gradient_end, norms(g), rtol=1e-9)


def test_finished_samples_stay_under_momentum_and_weight_decay():
    """An optimiser that moves without a gradient does not move a sample that has finished."""
    model, _ = quadratic(0.5)
    start = jnp.array([[2.0, -1.0], [1.0, 40.0]])
    optimiser = optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.3, momentum=0.5))
    options = {"optimiser": optimiser, "tolerance": 0.5, "steps": 40}
    both = settle(model, values={"node": start}, **options)
    for i in range(2):
        alone = settle(model, values={"node": start[i : i + 1]}, **options)
        assert int(alone.steps[0]) == int(both.steps[i])
        np.testing.assert_allclose(both.values["node"][i], alone.values["node"][0], atol=1e-14)


# --- records ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shortcuts", "unroll", "steps"),
    [(pcx.ALL_SHORTCUTS, False, 2), (pcx.ALL_SHORTCUTS, False, 7), (pcx.ALL_SHORTCUTS, True, 7), (pcx.NO_SHORTCUTS, False, 7),
     (pcx.NO_SHORTCUTS, True, 2)],
)  # fmt: skip
def test_energy_of_every_node_at_every_step(shortcuts, unroll, steps):
    model, (x, y) = Chain([3, 4, 4, 4, 2]), batch(3, 2)
    options = {"optimiser": optax.sgd(0.2), "shortcuts": shortcuts}
    found = settle(model, x, {"vodes.3": y}, steps=steps, record=pcx.record_energies, unroll=unroll, **options)
    assert found.history["vodes.0"].shape == (steps + 1, 7)
    for t in (1, steps):
        values = settle(model, x, {"vodes.3": y}, steps=t, **options).values
        at = jax.tree.map(lambda e, t=t: e[t], found.history)
        assert largest_difference(at, pcx.energies(model, values, x)) < 1e-13
    total = sum(found.history.values())
    assert np.all(np.diff(np.sum(total, axis=1)) < 0)


@pytest.mark.parametrize("tolerance", [None, 0.3])
def test_any_function_can_be_recorded(tolerance):
    """It is called before the first step and after each, with the step, the values and the energies."""
    model, (x, y) = Chain([3, 4, 4, 2]), batch(3, 2)

    def record(step, values, energies):
        return {"step": jnp.asarray(step), "norm": jnp.sum(values["vodes.1"] ** 2), "last": energies["vodes.2"]}

    found = settle(model, x, {"vodes.2": y}, optimiser=optax.sgd(0.2), steps=5, record=record, tolerance=tolerance)
    np.testing.assert_array_equal(found.history["step"], np.arange(6))
    np.testing.assert_allclose(found.history["norm"][-1], np.sum(np.square(found.values["vodes.1"])), rtol=1e-13)
    start = pcx.initialise(model, x, {"vodes.2": y})
    np.testing.assert_allclose(found.history["last"][0], pcx.energies(model, start, x)["vodes.2"], rtol=1e-13)
    assert settle(model, x, {"vodes.2": y}, optimiser=optax.sgd(0.2), steps=5, tolerance=tolerance).history is None


# --- optimisers and precisions ------------------------------------------------------------------------------------------


def descend(model, x, observed, rates, steps, **options):
    """Gradient descent written out: one rate per node, the gradient by plain JAX."""
    values = pcx.initialise(model, x, observed)
    free = [name for name in values if name not in observed]
    gradient = jax.jit(jax.grad(lambda f, v, s: jnp.sum(pcx.free_energy(model, v | f, x, step=s, **options))))
    for step in range(steps):
        g = gradient(values.only(free), values, step)
        values = values | {name: values[name] - rates[name] * g[name] for name in free}
    return values


@pytest.mark.parametrize("shortcuts", [pcx.ALL_SHORTCUTS, pcx.NO_SHORTCUTS])
def test_one_optimiser_per_node(shortcuts):
    model, (x, y) = Chain([3, 4, 4, 4, 2]), batch(3, 2)
    rates = {"vodes.0": 0.3, "vodes.1": 0.02, "vodes.2": 0.1}
    optimisers = {name: optax.sgd(rate) for name, rate in rates.items()}
    found = settle(model, x, {"vodes.3": y}, optimiser=optimisers, steps=5, shortcuts=shortcuts)
    assert largest_difference(found.values, descend(model, x, {"vodes.3": y}, rates, 5)) < 1e-13
    with pytest.raises(pcx.ModelError, match=r"no optimiser is given for the free node 'vodes.1'"):
        pcx.infer(model, x, {"vodes.3": y}, optimiser={"vodes.0": optax.sgd(0.1)}, steps=5)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize(
    "precision",
    [3.0, np.array([1.0, 0.5, 0.0, 2.0]), lambda step: 1.0 / (1.0 + step), lambda step: jnp.where(step < 2, 0.0, 1.0)],
    ids=["scalar", "per unit", "schedule", "late"],
)
def test_precisions(precision, unroll):
    model, (x, y) = Chain([3, 4, 4, 4, 2]), batch(3, 2)
    options = {"precision": {"vodes.1": precision, "vodes.3": 2.0}}
    found = settle(model, x, {"vodes.3": y}, optimiser=optax.sgd(0.2), steps=6, unroll=unroll, **options)
    expected = descend(model, x, {"vodes.3": y}, dict.fromkeys(found.values, 0.2), 6, **options)
    assert largest_difference(found.values, expected) < 1e-13


def test_gradient_is_that_of_the_batch_sum():
    """Twice the samples, the same moves."""
    model, (x, y) = Chain([3, 4, 2]), batch(3, 2)
    one = settle(model, x, {"vodes.1": y}, optimiser=optax.sgd(0.1), steps=3).values
    two = settle(model, jnp.tile(x, (2, 1)), {"vodes.1": jnp.tile(y, (2, 1))}, optimiser=optax.sgd(0.1), steps=3).values
    assert largest_difference(jax.tree.map(lambda v: v[:7], two), one) < 1e-15


def test_prior_precision_balances_the_data():
    """One weight, one sample: z = (π μ + w (d - b)/(1)) / (π + w²)."""

    class Scalar(pcx.EnergyModule):
        def __init__(self):
            self.layer = pxnn.Linear(1, 1, key=jax.random.key(4))
            self.z, self.data = pcx.Vode((1,), mean=np.array([2.0])), pcx.Vode()

        def __call__(self):
            return self.data(self.layer(self.z()))

    model = Scalar()
    w, b = float(model.layer.weight[0, 0]), float(model.layer.bias[0])
    for precision in (0.1, 1.0, 20.0):
        found = settle(model, None, {"data": jnp.array([[5.0]])}, optimiser=optax.sgd(0.05), steps=3000,
                          precision={"z": precision})  # fmt: skip
        expected = (precision * 2.0 + w * (5.0 - b)) / (precision + w**2)
        np.testing.assert_allclose(found.values["z"], [[expected]], rtol=1e-8)


def test_dtype_is_kept():
    """A float32 model settles in float32, with a float64 label, an integer schedule and a momentum state."""
    model, (x, y) = jax.tree.map(lambda a: a.astype(jnp.float32), Chain([3, 4, 4, 2])), batch(3, 2)
    for shortcuts in (pcx.ALL_SHORTCUTS, pcx.NO_SHORTCUTS):
        found = settle(model, x, {"vodes.2": y}, optimiser=optax.sgd(0.1, momentum=0.9), steps=6, shortcuts=shortcuts,
                          precision={"vodes.2": lambda step: 1.0 + step}, record=pcx.record_energies)  # fmt: skip
        floats = jax.tree.leaves((found.values, found.optimiser_state, found.history, found.forward.values))
        assert {a.dtype for a in floats} == {jnp.dtype("float32")}
    stopped = settle(model, x, {"vodes.2": y}, optimiser=optax.sgd(0.1), steps=6, tolerance=0.1)
    assert stopped.gradient_end.dtype == jnp.float32
    assert stopped.values["vodes.0"].dtype == jnp.float32


def test_under_jit_and_in_any_mapping():
    """The same numbers compiled; an observation mapping in another order changes nothing."""
    model, (x, y) = Chain([3, 4, 4, 2]), batch(3, 2)
    seen = {"vodes.2": y, "vodes.0": jnp.ones((7, 4))}

    def settle(x, seen):
        return pcx.infer(model, x, seen, optimiser=optax.sgd(0.1), steps=4).values

    assert list(settle(x, seen)) == list(jax.jit(settle)(x, seen)) == ["vodes.0", "vodes.1", "vodes.2"]
    assert largest_difference(settle(x, seen), jax.jit(settle)(x, seen)) < 1e-14
    assert largest_difference(settle(x, seen), settle(x, dict(reversed(seen.items())))) == 0
