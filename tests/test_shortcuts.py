"""The exact shortcuts: the same numbers as the naive path, with the work that mathematics says, counted and not timed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Chain, Convolutional, Skip, batch, largest_difference

import pcx
import pcx.nn as pxnn
from pcx.shortcuts.plan import Program, ZeroAware, waves
from pcx.shortcuts.zeros import ZERO, NotZero, count, has_nan, propagate_zeros

WAVE, CONSTANT, STACK = (pcx.Shortcuts(*(i == j for j in range(3))) for i in range(3))

# name -> model, shape of the input, and by hand the nodes that each node's energy ties together
MODELS = {
    "chain": (lambda: Chain([3, 4, 4, 4, 4, 2]), (3,), {0: [0], 1: [0, 1], 2: [1, 2], 3: [2, 3], 4: [3, 4]}),
    "skip": (lambda: Skip(4, 6, 2), (4,), {0: [0], 1: [0, 1], 2: [1, 2], 3: [2, 3], 4: [3, 4], 5: [1, 4, 5], 6: [5, 6]}),
    "convolutional": (Convolutional, (3, 8, 8), {0: [0], 1: [0, 1], 2: [1, 2]}),
}


def problem(name):
    """A model, its input, and an observation of its last node away from the prediction."""
    make, shape, ties = MODELS[name]
    model, (x, _) = make(), batch(shape, 2, size=3)
    last = f"vodes.{len(ties) - 1}"
    return model, x, {last: jax.random.normal(jax.random.key(8), pcx.run(model, {}, x).values[last].shape)}


def settle(model, x, observed, **options):
    """`pcx.infer`, compiled as one program (quickly: the compiler does not optimise)."""
    quickly = {"xla_backend_optimization_level": 0}
    return eqx.filter_jit(lambda x, o: pcx.infer(model, x, o, **options), compiler_options=quickly)(x, observed)


def reached_at(ties):
    """For every node the first step at which its gradient is not zero, with the last node observed: breadth first."""
    last, moved, first = max(ties), set(), {}
    for step in range(len(ties)):
        wrong = [t for n, t in ties.items() if n == last or moved & set(t)]
        moved |= {n for t in wrong for n in t} - {last}
        for node in moved:
            first.setdefault(node, step)
    return first


def masked(model, x, observed, ties, optimiser, steps):
    """The naive path written out, with gradients of nodes that no error has reached set to exactly zero."""
    first = reached_at(ties)
    values = pcx.initialise(model, x, observed)
    free = values.only([n for n in values if n not in observed])
    state = optimiser.init(free)

    @jax.jit
    def step(free, state, on):
        g = jax.grad(lambda free: jnp.sum(pcx.free_energy(model, values | free, x)))(free)
        g = pcx.Nodes({n: jnp.where(on[n], part, 0.0) for n, part in g.items()})
        updates, state = optimiser.update(g, state, free)
        return optax.apply_updates(free, updates), state

    for t in range(steps):
        free, state = step(free, state, {n: first[int(n.split(".")[1])] <= t for n in free})
    return values | free, state


def size(jaxpr):
    """All equations of a program, also those inside others."""
    total = 0
    for eqn in jaxpr.eqns:
        parts = [p for v in eqn.params.values() for p in (v if isinstance(v, tuple | list) else [v])]
        inner = [getattr(p, "jaxpr", p) for p in parts if hasattr(getattr(p, "jaxpr", p), "eqns")]
        total += 1 + sum(size(i) for i in inner)
    return total


def trace(function, model, *arguments):
    """The program of a function of a model."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def pure(arrays, *arguments):
        return eqx.filter(function(eqx.combine(arrays, static), *arguments), eqx.is_array)

    return jax.make_jaxpr(pure)(arrays, *arguments).jaxpr


# --- the same numbers ---------------------------------------------------------------------------------------------------

LINEAR = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "nesterov": optax.sgd(0.05, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("steps", [2, 9], ids=["few", "many"])
@pytest.mark.parametrize("optimiser", LINEAR)
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_naive_path(name, optimiser, steps):
    """All shortcuts together, and with momentum each alone; with fewer steps than waves and with more."""
    model, x, observed = problem(name)
    options = {"optimiser": LINEAR[optimiser], "steps": steps}
    slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    assert largest_difference(slow.values, pcx.initialise(model, x, observed)) > 1e-2
    alone = [WAVE, CONSTANT] if name == "convolutional" else [WAVE, CONSTANT, STACK]
    chosen = [pcx.ALL_SHORTCUTS, *(alone if optimiser == "momentum" else [])]
    for shortcuts in chosen:
        fast = settle(model, x, observed, shortcuts=shortcuts, **options)
        assert largest_difference(fast.values, slow.values) < 1e-10
        assert largest_difference(fast.optimiser_state, slow.optimiser_state) < 1e-10 if optimiser != "sgd" else True


@pytest.mark.parametrize("name", MODELS)
def test_unrolled_is_equal(name):
    model, x, observed = problem(name)
    options = {"optimiser": LINEAR["momentum"], "steps": 6}
    slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    fast = settle(model, x, observed, unroll=True, **options)
    assert largest_difference(fast.values, slow.values) < 1e-10


ADAPTIVE = {
    "adam": optax.adam(0.02),
    "rmsprop": optax.rmsprop(0.02),
    "centred": optax.rmsprop(0.02, centered=True, momentum=0.5),
}


@pytest.mark.parametrize("steps", [2, 9], ids=["few", "many"])
@pytest.mark.parametrize(
    ("name", "optimiser"),
    [(name, optimiser) for name in MODELS for optimiser in ("adam", "rmsprop")] + [("chain", "centred")],
)
def test_adaptive_optimisers_with_unreached_nodes_masked(name, optimiser, steps):
    """Rounding at a node that nothing has reached is not scaled up to a full step; step counts advance all the same."""
    model, x, observed = problem(name)
    ties = MODELS[name][2]
    slow, state = masked(model, x, observed, ties, ADAPTIVE[optimiser], steps)
    fast = settle(model, x, observed, optimiser=ADAPTIVE[optimiser], steps=steps)
    assert largest_difference(fast.values, slow) < 1e-10
    assert largest_difference(fast.optimiser_state, state) < 1e-10
    expected = {f"vodes.{n}" for n, t in ties.items() if n == max(ties) or any(reached_at(ties).get(m, 99) < steps for m in t)}
    assert fast.reached == expected, "energies that may be off their minimum after these steps"


COUPLED = {
    "adamw": optax.adamw(0.02, eps=1e-3, weight_decay=0.1),
    "weight decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "clipped": optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.5)),
    "normalised": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "noise": pcx.optim.langevin(0.05, key=jax.random.key(0)),
    "second order": pcx.optim.second_order_langevin(0.1, 0.5, key=jax.random.key(0)),
    "schedule": optax.sgd(optax.exponential_decay(0.2, 2, 0.5)),
    "added noise": optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, jax.random.key(1))),
    "accumulated": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
}


@pytest.mark.parametrize("optimiser", COUPLED)
def test_other_optimisers_are_refused_or_exact(optimiser):
    """What moves without a gradient, couples nodes, or has its own clock."""
    model, x, observed = problem("chain")
    options = {"optimiser": COUPLED[optimiser], "steps": 4}
    slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    fast = settle(model, x, observed, **options)
    assert largest_difference(fast.values, slow.values) < 1e-10


@pytest.mark.parametrize(
    ("optimiser", "accepted"),
    [
        (optax.sgd(0.1), True),
        (optax.sgd(0.1, momentum=0.9, nesterov=True), True),
        (optax.adam(0.1), True),
        (optax.rmsprop(0.1), True),
        (optax.adamw(0.1), False),
        (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), False),
        (pcx.optim.langevin(0.1, key=jax.random.key(0)), False),
        (pcx.optim.second_order_langevin(0.1, 0.9, key=jax.random.key(0)), False),
        (pcx.optim.noisy_heavy_ball(0.1, 0.9, key=jax.random.key(0)), False),
    ],
)
def test_the_optimiser_is_checked_by_its_program(optimiser, accepted):
    """A node without a gradient is not moved: SGD, Adam and RMSprop; not weight decay, not noise."""
    values = pcx.Nodes({"a": jnp.ones((2, 3)), "b": jnp.ones((2, 4))})
    assert ZeroAware(optimiser, values).keeps_zeros([["b"], ["b"], ["a", "b"]]) is accepted


def test_noise_moves_all_nodes_at_once():
    model, x, observed = problem("chain")
    found = settle(model, x, observed, optimiser=pcx.optim.langevin(0.05, key=jax.random.key(0)), steps=1)
    start = pcx.initialise(model, x, observed)
    assert all(float(jnp.min(jnp.abs(found.values[f"vodes.{i}"] - start[f"vodes.{i}"]))) > 0 for i in range(4))
    assert found.reached == frozenset(found.values)


def test_a_learning_rate_of_nan_is_refused():
    model, x, observed = problem("chain")
    with pytest.raises(pcx.ModelError, match="NaN"):
        pcx.infer(model, x, observed, optimiser=optax.sgd(float("nan")), steps=2)


# --- conditions ---------------------------------------------------------------------------------------------------------


def lopsided(h, u):
    """An energy whose minimum is not at h = u."""
    return 0.5 * jnp.sum((h - u - 0.3) ** 2)


VARIANTS = {
    "user energy": {"energy": {"vodes.1": lopsided}},
    "user energy at a distance": {"energy": {"vodes.0": lopsided}},
    "cross-entropy inside": {"energy": {"vodes.2": pcx.cross_entropy}},
    "stationary user energy": {"energy": {"vodes.1": pcx.Energy("cosh", lambda h, u: jnp.cosh(h - u), stationary=True)}},
    "zero energy": {"energy": {"vodes.2": pcx.zero}},
    "zeros": {"init": "zeros"},
    "one at zero": {"init": {"vodes.1": "zeros"}},
    "random": {"init": pcx.normal(0.5), "key": jax.random.key(3)},
    "schedule": {"precision": {"vodes.2": lambda step: 1.0 / (1 + step), "vodes.4": lambda step: 0.5 * step}},
    "per unit": {"precision": {"vodes.2": np.array([0.0, 1.0, 2.0, 3.0])}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_the_naive_path(variant):
    model, x, observed = problem("chain")
    options = VARIANTS[variant] | {"optimiser": LINEAR["momentum"], "steps": 4}
    slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    assert largest_difference(settle(model, x, observed, **options).values, slow.values) < 1e-10


@pytest.mark.parametrize(
    ("variant", "moved"),
    [
        (None, {3}),
        ("user energy", {0, 1, 3}),
        ("user energy at a distance", {0, 3}),
        ("zeros", {0, 1, 2, 3}),
        ("stationary user energy", {3}),
    ],
)
def test_who_moves_in_the_first_step(variant, moved):
    """A node whose energy is not stationary at its prediction is active from the start, and moves its parents too."""
    model, x, observed = problem("chain")
    options = VARIANTS.get(variant, {}) | {"optimiser": optax.sgd(0.1), "steps": 1}
    found = settle(model, x, observed, **options)
    start = found.forward.values
    assert {i for i in range(4) if float(jnp.max(jnp.abs(found.values[f"vodes.{i}"] - start[f"vodes.{i}"]))) > 0} == moved


OBSERVATIONS = {
    "part of the last": lambda x: {"vodes.4": pcx.Observed(jnp.ones((3, 2)), np.array([True, False]))},
    "part of the middle": lambda x: {"vodes.2": pcx.Observed(jnp.ones((3, 4)), np.array([True, False, True, False]))},
    "mask per sample": lambda x: {"vodes.2": pcx.Observed(jnp.ones((3, 4)), jnp.arange(12).reshape(3, 4) % 5 > 2)},
    "middle and last": lambda x: {"vodes.1": jnp.ones((3, 4)), "vodes.4": jnp.ones((3, 2))},
    "function": lambda x: {"vodes.4": lambda u: u + 0.5},
    "middle": lambda x: {"vodes.2": jnp.ones((3, 4))},
    "nothing": lambda x: {},
}


@pytest.mark.parametrize("case", OBSERVATIONS)
def test_observations_equal_the_naive_path(case):
    model, x, _ = problem("chain")
    observed = OBSERVATIONS[case](x)
    options = {"optimiser": LINEAR["momentum"], "steps": 6}
    slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    fast = settle(model, x, observed, **options)
    assert largest_difference(fast.values, slow.values) < 1e-10


def test_per_node_optimisers_equal_the_naive_path():
    """Each node's own optimiser is checked too: weight decay at an unreached node refuses the wave front."""
    model, x, observed = problem("chain")
    rates = {f"vodes.{i}": optax.sgd(0.05 * (i + 1), momentum=0.5) for i in range(4)}
    decay = rates | {"vodes.0": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))}
    for optimiser, steps in ((rates, 3), (decay, 2)):
        options = {"optimiser": optimiser, "steps": steps}
        slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
        assert largest_difference(settle(model, x, observed, **options).values, slow.values) < 1e-10


@pytest.mark.parametrize("steps", [2, 7])
def test_records_equal_the_naive_path(steps):
    model, x, observed = problem("skip")
    options = {"optimiser": optax.sgd(0.1), "steps": steps, "record": pcx.record_energies}
    slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    fast = settle(model, x, observed, **options)
    assert largest_difference(fast.history, slow.history) < 1e-10
    assert list(fast.history) == list(slow.history)


def test_a_carried_state_disables_the_wave_front():
    """A momentum from elsewhere moves nodes that no error has reached."""
    model, x, observed = problem("chain")
    optimiser = optax.sgd(0.1, momentum=0.9)
    free = pcx.initialise(model, x, observed).only([f"vodes.{i}" for i in range(4)])
    state = jax.tree.map(jnp.ones_like, optimiser.init(free))
    options = {"optimiser": optimiser, "optimiser_state": state, "steps": 2}
    slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    fast = settle(model, x, observed, **options)
    assert largest_difference(fast.values, slow.values) < 1e-10
    assert float(jnp.min(jnp.abs(fast.values["vodes.0"] - free["vodes.0"]))) > 0.1
    assert fast.reached == frozenset(fast.values)


def test_given_values_disable_the_wave_front():
    model, x, observed = problem("chain")
    values = jax.tree.map(lambda v: v + 1.0, pcx.initialise(model, x, observed))
    options = {"optimiser": optax.sgd(0.1), "values": values, "steps": 2}
    slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    assert largest_difference(settle(model, x, observed, **options).values, slow.values) < 1e-10


class Roots(pcx.EnergyModule):
    """Two root latents and three equal layers, two outputs, one layer called twice."""

    def __init__(self):
        with pxnn.keys(jax.random.key(0)):
            self.shared, self.other, self.head = pxnn.Linear(3, 3), pxnn.Linear(3, 3), pxnn.Linear(3, 2)
        self.a, self.b = pcx.Vode((3,)), pcx.Vode((3,), mean=np.ones(3))
        self.vodes = [pcx.Vode() for _ in range(5)]

    def __call__(self):
        a, b = self.a(), self.b()
        first = self.vodes[0](jnp.tanh(self.shared(a)))
        second = self.vodes[1](jnp.tanh(self.shared(b)))
        third = self.vodes[2](jnp.tanh(self.other(second)))
        return self.vodes[3](self.head(first * third)), self.vodes[4](self.head(second))


@pytest.mark.parametrize("seen", [["vodes.3"], ["vodes.4"], ["vodes.3", "vodes.4"]])
def test_any_graph_equals_the_naive_path(seen):
    """Roots, two outputs, a layer called twice (in a stack with another one)."""
    model = Roots()
    observed = {name: jax.random.normal(jax.random.key(1), (3, 2)) for name in seen}
    options = {"optimiser": LINEAR["momentum"], "steps": 5}
    slow = settle(model, None, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    fast = settle(model, None, observed, **options)
    assert largest_difference(fast.values, slow.values) < 1e-10


def test_frozen_batch_statistics_and_dropout():
    """Constant within one inference: the same mask and the same statistics at every step of both paths."""

    class Normed(Chain):
        def __init__(self):
            super().__init__([3, 4, 4, 4, 4, 2])
            self.norms = [pxnn.BatchNorm(4) for _ in range(4)]
            self.drop = [pxnn.Dropout(0.3) for _ in range(4)]

        def __call__(self, x):
            for layer, norm, drop, vode in zip(self.layers, self.norms, self.drop, self.vodes, strict=False):
                x = vode(drop(jnp.tanh(norm(layer(x)))))
            return self.vodes[-1](self.layers[-1](x))

    model, (x, y) = Normed(), batch(3, 2)
    options = {"optimiser": optax.sgd(0.1), "steps": 7, "training": True, "key": jax.random.key(0)}
    slow = settle(model, x, {"vodes.4": y}, shortcuts=pcx.NO_SHORTCUTS, **options)
    fast = settle(model, x, {"vodes.4": y}, **options)
    assert largest_difference(fast.values, slow.values) < 1e-10


# --- stacks -------------------------------------------------------------------------------------------------------------


def straight_through(slope):
    """The same function for every slope, with another gradient."""

    @jax.custom_vjp
    def function(u):
        return jnp.tanh(u)

    function.defvjp(lambda u: (jnp.tanh(u), None), lambda _, g: (slope * g,))
    return function


def custom_slope(slope):
    """The same as a forward rule."""

    @jax.custom_jvp
    def function(u):
        return jnp.tanh(u)

    function.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), slope * tangents[0]))
    return function


class Activations(pcx.EnergyModule):
    """Equal dense layers with an activation of their own."""

    def __init__(self, activations):
        with pxnn.keys(jax.random.key(0)):
            self.layers = [pxnn.Linear(4, 4) for _ in activations]
        self.vodes = [pcx.Vode() for _ in activations]
        self.activations = tuple(activations)

    def __call__(self, x):
        for layer, function, vode in zip(self.layers, self.activations, self.vodes, strict=True):
            x = vode(function(layer(x)))
        return x


@pytest.mark.parametrize(
    "activations",
    [
        [straight_through(s) for s in (0.2, 1.0, 2.0, 3.0)],
        [custom_slope(s) for s in (0.2, 1.0, 2.0, 3.0)],
        [lambda u, s=s: jnp.tanh(s * u) for s in (0.2, 1.0, 2.0, 3.0)],
        [jax.jit(lambda u, s=s: jnp.tanh(s * u)) for s in (0.2, 1.0, 2.0, 3.0)],
        [lambda u, s=s: u * np.array([s, 1.0, 1.0, 1.0]) for s in (0.2, 1.0, 2.0, 3.0)],
        [jax.nn.gelu, jax.nn.relu, jnp.tanh, jax.nn.gelu],
    ],
    ids=["custom_vjp", "custom_jvp", "literals", "literals in jit", "constants", "names"],
)
def test_only_equal_layers_are_stacked(activations):
    """Layers of one shape whose activations differ in a constant, or only in their gradient."""
    model, (x, _) = Activations(activations), batch(4, 2, size=3)
    observed = {"vodes.3": jnp.ones((3, 4))}
    options = {"optimiser": optax.sgd(0.1), "steps": 4, "init": "zeros"}
    slow = settle(model, x, observed, shortcuts=pcx.NO_SHORTCUTS, **options)
    fast = settle(model, x, observed, shortcuts=STACK, **options)
    assert largest_difference(fast.values, slow.values) < 1e-10


def test_stacked_predictions():
    """Eight equal layers are one batched product; their predictions are those of `run`."""
    model, (x, _) = Chain([5] + [6] * 9 + [3]), batch(5, 3)
    values = pcx.initialise(model, x, init=pcx.normal(1.0), key=jax.random.key(0))
    program = Program(model, values, x)
    assert program.groups == [[f"vodes.{i}" for i in range(1, 9)]]
    some = ["vodes.7", "vodes.2", "vodes.4", "vodes.9"]

    @jax.jit
    def predict(values):
        stacks = program.stacked_weights()
        full = program.predict(values, list(values), stacks=stacks)
        return full, program.predict(values, some, stacks=stacks), pcx.run(model, values, x).predictions

    full, found, expected = predict(values)
    assert largest_difference(full, expected) < 1e-14
    assert list(found) == some
    assert largest_difference(dict(found), {n: expected[n] for n in some}) < 1e-14


def test_convolutions_are_not_stacked():
    class Deep(pcx.EnergyModule):
        def __init__(self):
            with pxnn.keys(jax.random.key(0)):
                self.layers = [pxnn.Conv2d(2, 2, 3, padding=1) for _ in range(4)]
            self.vodes = [pcx.Vode() for _ in range(4)]

        def __call__(self, x):
            for layer, vode in zip(self.layers, self.vodes, strict=True):
                x = vode(layer(x))

    model, x = Deep(), jnp.ones((1, 2, 4, 4))
    assert Program(model, pcx.initialise(model, x), x).groups == []


# --- the work -----------------------------------------------------------------------------------------------------------


def one_step(steps, shortcuts, **options):
    def train(model, x, y):
        optimiser = optax.sgd(0.1)
        last = f"vodes.{len(model.vodes) - 1}"
        return pcx.train_step(
            model, x, {last: y}, state_optimiser=optax.sgd(0.1), weight_optimiser=optimiser,
            weight_state=optimiser.init(pcx.weights(model)), steps=steps, shortcuts=shortcuts, **options,
        )  # fmt: skip

    return train


def test_products_of_a_deep_chain():
    """19 layers, 18 steps. Naive: 19 + 18 · (19 + 18) + 2 · 19 = 723; wave front: 19 + Σ_{t=1}^{18} 2t + 2 · 19 = 399.

    Start, then per step the predictions and their pull-backs to the values, then predictions and weight gradients.
    """
    model, (x, y) = Chain([5] + [6] * 18 + [3]), batch(5, 3, size=2)
    naive = count(trace(one_step(18, pcx.NO_SHORTCUTS), model, x, y))
    fast = count(trace(one_step(18, pcx.Shortcuts(stack=False)), model, x, y))
    assert naive == 723
    assert fast == 399
    assert fast / naive <= 0.56


def test_products_beyond_the_front():
    """6 layers, 20 steps: the front needs 5 steps of 2t products; then 5 + 5 a step (first prediction constant), not 6 + 5."""
    model, (x, y) = Chain([5] + [6] * 5 + [3]), batch(5, 3, size=2)
    naive = 6 + 20 * 11 + 12
    assert count(trace(one_step(20, pcx.NO_SHORTCUTS), model, x, y)) == naive
    assert count(trace(one_step(20, pcx.Shortcuts(stack=False)), model, x, y)) == 6 + 2 * (1 + 2 + 3 + 4 + 5) + 15 * 10 + 12
    assert count(trace(one_step(20, CONSTANT), model, x, y)) == naive - 20
    assert count(trace(one_step(20, WAVE), model, x, y)) == 6 + 30 + 15 * 11 + 12


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_convolutions_counted(steps):
    """Two convolutions and a product: naive 3 + 5 T + 6; with the front 2, 4, 4, 4 … a step, and gradients where reached."""
    model, x, observed = problem("convolutional")
    y = observed["vodes.2"]
    assert count(trace(one_step(steps, pcx.NO_SHORTCUTS), model, x, y)) == 3 + 5 * steps + 6
    reached = min(steps + 1, 3)
    expected = 3 + sum(2 if t == 0 else 4 for t in range(steps)) + 2 * reached
    assert count(trace(one_step(steps, pcx.ALL_SHORTCUTS), model, x, y)) == expected
    only = count(trace(one_step(steps, pcx.ALL_SHORTCUTS), model, x, y), ["conv_general_dilated"])
    assert only == 2 + 2 * max(steps - 1, 0) + 2 * (reached - 1)


def test_products_of_a_stack():
    """Zero start, 8 equal layers between two others: 10 to start, then 2 predictions and 2 pull-backs, not 10 and 9."""
    model, (x, y) = Chain([5] + [6] * 9 + [3]), batch(5, 3, size=2)

    def settling(shortcuts):
        return lambda model, x, y: pcx.infer(
            model, x, {"vodes.9": y}, optimiser=optax.sgd(0.1), steps=7, init="zeros", shortcuts=shortcuts
        )

    assert count(trace(settling(pcx.NO_SHORTCUTS), model, x, y)) == 10 + 7 * (10 + 9)
    assert count(trace(settling(CONSTANT), model, x, y)) == 10 + 7 * (9 + 9)
    assert count(trace(settling(pcx.ALL_SHORTCUTS), model, x, y)) == 10 + 7 * (2 + 2)


@pytest.mark.parametrize("name", ["chain", "skip", "convolutional"])
@pytest.mark.parametrize("tolerance", [None, 0.01])
def test_the_program_does_not_grow_with_the_steps(name, tolerance):
    model, x, observed = problem(name)
    ((last, y),) = observed.items()

    def settling(steps):
        return lambda model, x, y: pcx.infer(
            model, x, {last: y}, optimiser=optax.adam(0.1), steps=steps, tolerance=tolerance, record=pcx.record_energies
        )

    assert size(trace(settling(40), model, x, y)) == size(trace(settling(400), model, x, y))


def test_count_and_size():
    """A scan body counts once per iteration; calls inside calls count."""

    def function(a):
        step = jax.jit(lambda c, _: (jnp.tanh(c @ a), None))
        return jax.lax.scan(step, a, length=7)[0] @ a

    assert count(jax.make_jaxpr(function)(jnp.eye(2)).jaxpr) == 8
    assert count(jax.make_jaxpr(jax.checkpoint(lambda a: a @ a))(jnp.eye(2)).jaxpr) == 1
    assert count(jax.make_jaxpr(function)(jnp.eye(2)).jaxpr, ["tanh"]) == 7


# --- the front itself ---------------------------------------------------------------------------------------------------


def test_waves_of_a_chain():
    parents = {"a": frozenset(), "b": frozenset("a"), "c": frozenset("b")}
    assert list(waves(parents, ["a", "b"], ["a", "b", "c"], ["c"])) == [
        (["c"], ["b"]),
        (["b", "c"], ["a", "b"]),
        (["a", "b", "c"], ["a", "b"]),
    ]


def test_waves_reach_the_other_parents_of_a_child():
    """c reads a and b: an error of c moves both at once; d, off the path, only when its parent has moved."""
    parents = {"a": frozenset(), "b": frozenset(), "c": frozenset("ab"), "d": frozenset("a")}
    assert list(waves(parents, ["a", "b", "d"], list(parents), ["c"])) == [
        (["c"], ["a", "b"]),
        (["a", "b", "c", "d"], ["a", "b", "d"]),
        (["a", "b", "c", "d"], ["a", "b", "d"]),
    ]


def test_waves_stop_at_observed_nodes():
    """b is observed: errors below and above it never meet."""
    parents = {"a": frozenset(), "b": frozenset("a"), "c": frozenset("b"), "d": frozenset("c")}
    *_, (active, targets) = waves(parents, ["a", "c"], list(parents), ["d"])
    assert active == ["c", "d"]
    assert targets == ["c"]


def test_waves_without_any_error():
    """At a forward start without observations nothing is ever active."""
    parents = {"a": frozenset(), "b": frozenset("a")}
    assert list(waves(parents, ["a", "b"], ["a", "b"], [])) == [([], [])]


# --- zeros --------------------------------------------------------------------------------------------------------------


def spread(function, *arguments):
    """Trace a function on numbers and run it with the given arguments, ZERO among them."""
    shapes = [jnp.ones(3) if a is ZERO else a for a in arguments]
    return propagate_zeros(jax.make_jaxpr(function)(*shapes), arguments)


X = jnp.array([1.0, -2.0, 3.0])


@pytest.mark.parametrize(
    "function",
    [
        lambda z, x: -2.0 * z,
        lambda z, x: z * x,
        lambda z, x: x * z + z,
        lambda z, x: z / x,
        lambda z, x: jnp.sum(z) * jnp.ones(2),
        lambda z, x: jnp.sqrt(jnp.square(z)),
        lambda z, x: z**3,
        lambda z, x: jnp.where(x > 0, z, 2 * z),
        lambda z, x: z @ jnp.ones((3, 2)),
        lambda z, x: jax.jit(lambda a: jnp.tanh(a) * x)(z),
        lambda z, x: jnp.maximum(z, 0.0),
        lambda z, x: jnp.concatenate([z, z])[1:].reshape(5, 1).T,
        lambda z, x: z / (jnp.sqrt(z) + 1e-8),
        lambda z, x: z * jax.lax.rsqrt(z + 1e-8),
        lambda z, x: z - 0.0 * x,
    ],
)
def test_stays_zero(function):
    """Provably zero, and really zero."""
    assert spread(function, ZERO, X) == [ZERO]
    np.testing.assert_array_equal(function(jnp.zeros(3), X), jnp.zeros_like(function(jnp.zeros(3), X)))


@pytest.mark.parametrize(
    "function",
    [
        lambda z, x: z + x,
        lambda z, x: jnp.exp(z),
        lambda z, x: jnp.cos(z) * x,
        lambda z, x: z**0,
        lambda z, x: jnp.where(z > 0, z, x),
        lambda z, x: jnp.maximum(z, x),
        lambda z, x: jnp.where(x > 0, z, x),
        lambda z, x: jax.nn.sigmoid(z),
        lambda z, x: jnp.concatenate([z, x]),
        lambda z, x: jax.lax.scan(lambda c, _: (c + x, None), z, length=3)[0],
        lambda z, x: jax.lax.cond(z[0] == 0, lambda: x, lambda: 2 * x),
        lambda z, x: jnp.cumprod(z + 1),
        lambda z, x: jax.lax.pad(z, 1.0, [(1, 0, 0)]),
        lambda z, x: x / (jnp.sqrt(z) + 2.0),
    ],
)
def test_does_not_stay_zero(function):
    """Anything else gets real zeros and comes out as it would."""
    (found,) = spread(function, ZERO, X)
    assert found is not ZERO
    np.testing.assert_array_equal(found, function(jnp.zeros(3), X))


@pytest.mark.parametrize(
    "function",
    [
        lambda z, x: jax.lax.rsqrt(z),
        lambda z, x: z * jax.lax.rsqrt(z),
        lambda z, x: jnp.log(z),
        lambda z, x: z * jnp.log(z),
        lambda z, x: z / z,
        lambda z, x: x / z,
        lambda z, x: z * (x / z),
        lambda z, x: z**-1,
        lambda z, x: z * z**-0.5,
    ],
    ids=["rsqrt", "0·rsqrt(0)", "log", "0·log(0)", "0/0", "x/0", "0·(x/0)", "power -1", "0·0^-½"],
)
def test_infinities_are_not_hidden(function):
    """0 · ∞ is NaN: the product with an infinity made of a zero must not count as zero."""
    expected = np.asarray(function(jnp.zeros(3), X))
    assert not np.all(np.isfinite(expected))
    try:
        (found,) = spread(function, ZERO, X)
    except NotZero:
        return
    assert found is not ZERO
    np.testing.assert_array_equal(found, expected)


def test_optimiser_that_divides_by_the_gradient():
    """g · rsqrt(g²) and g / |g| are NaN at a zero gradient in the naive path; the wave front is refused."""
    for function in (lambda g: g * jax.lax.rsqrt(g * g), lambda g: g / jnp.abs(g)):
        optimiser = optax.stateless(lambda g, _, f=function: jax.tree.map(f, g))
        values = pcx.Nodes({"a": jnp.ones((2, 3)), "b": jnp.ones((2, 4))})
        assert ZeroAware(optimiser, values).keeps_zeros([["b"]]) is False


def test_state_starts_and_stays_zero_until_reached():
    """Adam: moments of an unreached node are ZERO, the step count is a number."""
    values = pcx.Nodes({"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))})
    lazy = ZeroAware(optax.adam(0.1), values)
    g = jnp.full((2, 3), 0.5)
    updates, state = lazy.update({"b": g}, lazy.init(), values)
    assert "a" not in updates
    full = lazy.full_state(state)
    expected, expected_state = optax.adam(0.1).update(
        pcx.Nodes({"a": jnp.zeros((2, 3)), "b": g}), optax.adam(0.1).init(values), values
    )
    np.testing.assert_allclose(updates["b"], expected["b"], rtol=1e-15)
    assert jax.tree.structure(full) == jax.tree.structure(expected_state)
    assert largest_difference(full, expected_state) < 1e-15


def test_nan_among_the_constants():
    assert has_nan(jax.make_jaxpr(lambda a: a * jnp.nan)(1.0))
    assert has_nan(jax.make_jaxpr(jax.jit(lambda a: a * np.array([1.0, np.nan])))(1.0))
    assert not has_nan(jax.make_jaxpr(lambda a: a * jnp.inf)(1.0))


# --- pooling ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "ties"), [((2, 4, 6), True), ((1, 5, 7), True), ((2, 4, 6), False)])
def test_pooling_by_selects(shape, ties):
    """Equal to the window reduction in its values and in where it sends the gradient, also of a tie."""
    x = jax.random.normal(jax.random.key(0), shape)
    x = jnp.clip(jnp.round(x), -1, 1) if ties else x
    fast, slow = pxnn.MaxPool2d(2), pxnn.MaxPool2d(2, selects=False)
    cotangent = jax.random.normal(jax.random.key(1), (shape[0], shape[1] // 2, shape[2] // 2))
    one, two = (jax.jit(lambda x, p=pool: (p(x), jax.vjp(p, x)[1](cotangent)))(x) for pool in (fast, slow))
    assert largest_difference(one, two) == 0
    windows = "reduce_window_max", "select_and_scatter_add", "select_and_gather_add", "reduce_window"
    gradients = [jax.make_jaxpr(lambda x, p=pool: jax.vjp(p, x)[1](cotangent))(x).jaxpr for pool in (fast, slow)]
    assert count(gradients[0], windows) == 0
    assert count(gradients[1], windows) > 0


@pytest.mark.parametrize("arguments", [{"kernel_size": 3}, {"kernel_size": 2, "stride": 1}, {"kernel_size": 2, "padding": 1}])
def test_pooling_of_other_windows_is_a_reduction(arguments):
    x = jax.random.normal(jax.random.key(0), (2, 6, 6))
    pool = pxnn.MaxPool2d(**arguments)
    assert count(jax.make_jaxpr(pool)(x).jaxpr, ["reduce_window_max", "reduce_window"]) == 1
    np.testing.assert_array_equal(pool(x), pxnn.MaxPool2d(**arguments, selects=False)(x))


def test_pooling_in_inference():
    """With hard_tanh, where ties are common."""
    x = 3 * jax.random.normal(jax.random.key(0), (3, 3, 8, 8))
    found = [
        settle(Convolutional(selects=selects), x, {"vodes.2": jnp.ones((3, 4))}, optimiser=optax.sgd(0.1), steps=6).values
        for selects in (True, False)
    ]
    assert largest_difference(*found) < 1e-12


@pytest.mark.parametrize(
    "rule", [optax.sgd(0.0), {"vodes.0": optax.set_to_zero()}, optax.rprop(0.01)], ids=["0", "held", "rprop"]
)
def test_rules_that_do_not_move_a_node_that_errors_have_reached(rule):
    """Their updates are known to be zero before any number is."""
    model, (x, y) = Chain([5, 6, 4, 3]), batch(5, 3)
    if isinstance(rule, dict):
        rule = {"vodes.1": optax.sgd(0.1)} | rule
    options = {"optimiser": rule, "steps": 5}
    ours = pcx.infer(model, x, {"vodes.2": y}, shortcuts=pcx.Shortcuts(stack=False), **options).values
    plain = pcx.infer(model, x, {"vodes.2": y}, shortcuts=pcx.NO_SHORTCUTS, **options).values
    assert largest_difference(ours, plain) < 1e-12
