"""Each algorithm against equations 1 to 3 written out in numpy, over five training steps, and the batteries and limits."""

import dataclasses
import importlib
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Chain, batch, largest_difference

import pcx
import pcx.nn as pxnn
from pcx.algorithms import ipc, nudging, pc
from pcx.algorithms._common import warm_up_cosine
from pcx.models._vgg import VGG

DIMS = [5, 6, 4, 3]
STEPS = 5


class Numpy:
    """A three-layer MLP (tanh, tanh, linear) with predictive coding by hand, in float64."""

    def __init__(self, model, hyper, total_steps):
        self.theta = [(np.array(layer.weight), np.array(layer.bias)) for layer in model.layers]
        self.hyper, self.total, self.count = hyper, total_steps, 0
        self.moments = [[(np.zeros_like(p), np.zeros_like(p)) for p in pair] for pair in self.theta]

    def predict(self, h):
        """Predictions of all nodes and the slopes of their activations, given h[0] = x and the values above."""
        u, slope = [], []
        for layer, (weight, bias) in enumerate(self.theta):
            a = h[layer] @ weight.T + bias
            last = layer == len(self.theta) - 1
            u.append(a if last else np.tanh(a))
            slope.append(np.ones_like(a) if last else 1 - np.tanh(a) ** 2)
        return u, slope

    def forward(self, x):
        h = [x]
        for layer in range(len(self.theta)):
            h.append(self.predict([*h, *[np.zeros((len(x), d)) for d in DIMS[layer + 1 : -1]]])[0][layer])
        return h

    def delta(self, h, u, loss):
        """∂E/∂u for every node."""
        result = [u[i] - h[i + 1] for i in range(len(u))]
        if loss == "ce":
            p = np.exp(u[-1] - u[-1].max(1, keepdims=True))
            result[-1] = p / p.sum(1, keepdims=True) * h[-1].sum(1, keepdims=True) - h[-1]
        return result

    def state_gradient(self, h, loss):
        u, slope = self.predict(h)
        delta = self.delta(h, u, loss)
        gradient = []
        for i in range(len(self.theta) - 1):
            gradient.append(h[i + 1] - u[i] + (delta[i + 1] * slope[i + 1]) @ self.theta[i + 1][0])
        return gradient

    def settle(self, h, steps, loss, trace=None):
        trace = [np.zeros_like(a) for a in h[1:-1]] if trace is None else trace
        for _ in range(steps):
            gradient = self.state_gradient(h, loss)
            trace = [g + self.hyper.momentum_h * t for g, t in zip(gradient, trace, strict=True)]
            h = [h[0], *[a - self.hyper.lr_h * t for a, t in zip(h[1:-1], trace, strict=True)], h[-1]]
        return h, trace

    def weight_gradient(self, h, loss):
        u, slope = self.predict(h)
        delta, n = self.delta(h, u, loss), len(h[0])
        return [((d * s).T @ h[i] / n, (d * s).sum(0) / n) for i, (d, s) in enumerate(zip(delta, slope, strict=True))]

    def backpropagation(self, x, y, loss):
        h = self.forward(x)
        u, slope = self.predict(h)
        n, result = len(x), []
        back = self.delta([*h[:-1], y], u, loss)[-1] * (2 if loss == "se" else 1)
        for i in reversed(range(len(self.theta))):
            back = back * slope[i]
            result.append((back.T @ h[i] / n, back.sum(0) / n))
            back = back @ self.theta[i][0]
        return result[::-1]

    def adamw(self, gradient, total):
        """Decoupled weight decay 1e-8, 0.9, 0.999; warm-up from lr to 1.1 lr over a tenth, cosine to 0.1 lr."""
        warm = int(0.1 * total) if total else 0
        if total is None:
            rate = self.hyper.lr_theta
        elif self.count < warm:
            rate = self.hyper.lr_theta * (1 + 0.1 * self.count / warm)
        else:
            share = (self.count - warm) / (total - warm)
            rate = self.hyper.lr_theta * (0.1 + 0.5 * (1 + np.cos(np.pi * share)))
        self.count += 1
        for layer, pair in enumerate(gradient):
            new = []
            for i, g in enumerate(pair):
                m, v = self.moments[layer][i]
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                self.moments[layer][i] = (m, v)
                direction = (m / (1 - 0.9**self.count)) / (np.sqrt(v / (1 - 0.999**self.count)) + 1e-8)
                p = self.theta[layer][i]
                new.append(p - rate * (direction + self.hyper.weight_decay * p))
            self.theta[layer] = tuple(new)


def numpy_step(reference, name, x, y, epoch, memory):
    """One training step of each algorithm, by hand."""
    hyper, total = reference.hyper, reference.total
    if name.startswith("bp"):
        return reference.adamw(reference.backpropagation(x, y, hyper.loss), total)
    h = reference.forward(x)
    if name in ("pc_se", "pc_ce"):
        h, _ = reference.settle([*h[:-1], y], hyper.T, hyper.loss)
        return reference.adamw(reference.weight_gradient(h, hyper.loss), total)
    if name in ("pn", "nn", "cn"):
        sign = {"pn": 1, "nn": -1, "cn": {"+": 1, "-": -1}[hyper.signs[epoch]] if name == "cn" else 0}[name]
        beta = sign * (hyper.beta + hyper.beta_ir * epoch)
        h, _ = reference.settle([*h[:-1], h[-1] - beta * (h[-1] - y)], hyper.T, "se")
        gradient = [(w / beta, b / beta) for w, b in reference.weight_gradient(h, "se")]
        return reference.adamw(gradient, total)
    if name == "ipc":
        h, trace = [*h[:-1], y], None
        for _ in range(hyper.T):
            gradient = reference.weight_gradient(h, "se")
            h, trace = reference.settle(h, 1, "se", trace)
            reference.adamw(gradient, total * hyper.T)
        return None
    assert name == "mcpc"  # without noise: momentum is kept from batch to batch, values start at zero
    h = [x, *[np.zeros_like(a) for a in h[1:-1]], y]
    h, memory["trace"] = reference.settle(h, hyper.T, "se", memory.get("trace"))
    return reference.adamw(reference.weight_gradient(h, "se"), None)


CHANGES = {
    "pc_se": {"T": 4, "lr_h": 0.1, "momentum_h": 0.3},
    "pc_ce": {"T": 4, "lr_h": 0.1, "momentum_h": 0.3},
    "pn": {"T": 4, "lr_h": 0.1, "momentum_h": 0.3, "beta": 0.4, "beta_ir": 0.05},
    "nn": {"T": 4, "lr_h": 0.1, "momentum_h": 0.3, "beta": 0.4, "beta_ir": 0.05},
    "cn": {"T": 4, "lr_h": 0.1, "momentum_h": 0.3, "beta": 0.4, "beta_ir": 0.05, "signs": "+-+--"},
    "ipc": {"T": 4, "lr_h": 0.2, "momentum_h": 0.3},
    "mcpc": {"T": 6, "lr_h": 0.1, "momentum_h": 0.3, "variance": 0.0},
    "bp_se": {},
    "bp_ce": {},
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_five_steps_against_numpy(name):
    """Weights after five steps of the library equal those of the equations written out by hand."""
    defaults, make = pcx.algorithms.get(name)
    hyper = dataclasses.replace(defaults, lr_theta=3e-3, weight_decay=0.02, **CHANGES[name])
    model = Chain(DIMS)
    reference, memory = Numpy(model, hyper, 20), {}
    algorithm = make(hyper, total_steps=20)
    key = jax.random.key(0)
    state, step = algorithm.init(model, *batch(5, 3), key), jax.jit(algorithm.step)
    for i in range(STEPS):
        x, y = batch(5, 3, seed=10 + i)
        state, metrics = step(state, x, y, key, i)
        before = reference.forward(np.asarray(x))[-1]
        if name != "mcpc":
            np.testing.assert_allclose(metrics.prediction, before, rtol=1e-9, atol=1e-9)
        numpy_step(reference, name, np.asarray(x), np.asarray(y), i, memory)
    for layer, (weight, bias) in zip(state.model.layers, reference.theta, strict=True):
        np.testing.assert_allclose(layer.weight, weight, rtol=0, atol=1e-10)
        np.testing.assert_allclose(layer.bias, bias, rtol=0, atol=1e-10)


def test_numpy_reference_would_notice():
    """The bound of the comparison above is far below what one wrong detail does (here: momentum left out)."""
    hyper = dataclasses.replace(pcx.algorithms.get("pc_se")[0], lr_theta=3e-3, **CHANGES["pc_se"])
    x, y = (np.asarray(a) for a in batch(5, 3))
    results = []
    for momentum in (0.3, 0.0):
        reference = Numpy(Chain(DIMS), dataclasses.replace(hyper, momentum_h=momentum), 20)
        numpy_step(reference, "pc_se", x, y, 0, {})
        results.append(reference.theta[0][0])
    assert np.abs(results[0] - results[1]).max() > 1e-8


@pytest.mark.parametrize("module", pcx.algorithms.modules(), ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_battery(module):
    pcx.check_algorithm(module)


def test_battery_of_the_template():
    pcx.check_algorithm(importlib.import_module("pcx.algorithms._template"))


def test_battery_notices_a_broken_algorithm():
    """An algorithm that drops its momentum between calls, changes a dtype or breaks an identity does not pass."""
    good = importlib.import_module("pcx.algorithms.pc")

    class Broken:
        __name__, Hyper, VARIANTS, SEARCH = "broken", good.Hyper, {"pc_se": good.VARIANTS["pc_se"]}, good.SEARCH

    def wrong_dtype(hyper, **options):
        algorithm = good.make(hyper, **options)

        def step(*arguments):
            state, metrics = algorithm.step(*arguments)
            weight = state.model.layers[0].weight
            return eqx.tree_at(lambda s: s.model.layers[0].weight, state, weight.astype(jnp.float32)), metrics

        return algorithm._replace(step=step)

    Broken.make = staticmethod(wrong_dtype)
    with pytest.raises(AssertionError, match=r"structure, shapes or dtypes|dtypes|traced 2 times"):
        pcx.check_algorithm(Broken)

    def no_progress(hyper, **options):
        algorithm = good.make(hyper, **options)
        return algorithm._replace(step=lambda state, *rest: (state, algorithm.step(state, *rest)[1]))

    Broken.make = staticmethod(no_progress)
    with pytest.raises(AssertionError, match="advance"):
        pcx.check_algorithm(Broken)

    Broken.make, Broken.EQUILIBRIUM = staticmethod(good.make), {"pc_se": ({"T": 3, "lr_h": 0.1}, lambda hyper: 1.0)}
    with pytest.raises(AssertionError, match="closed form"):
        pcx.check_algorithm(Broken)


def other(**changes):
    """The module of PC with other declarations."""
    module = types.ModuleType("mine")
    good = {name: getattr(pc, name) for name in ("Hyper", "SEARCH", "make")}
    vars(module).update(good | {"VARIANTS": {"pc_se": pc.VARIANTS["pc_se"]}} | changes)
    return module


def changed_step(change):
    """PC whose step is another function of PC's own step and its arguments."""

    def make(hyper, **options):
        algorithm = pc.make(hyper, **options)
        return algorithm._replace(step=lambda *arguments: change(algorithm.step, *arguments))

    return make


def later_rates(calls):
    """Every call that is traced learns by another rate."""

    def make(hyper, **options):
        def step(state, *rest):
            calls.append(1)
            return pc.make(dataclasses.replace(hyper, lr_theta=1e-3 / len(calls)), **options).step(state, *rest)

        return pc.make(hyper, **options)._replace(step=step)

    return make


def remembers(kept):
    def change(step, state, x, *rest):
        kept.append(x)
        return step(state, x + 0 * kept[0], *rest)

    return change


class WholeRate(pc.Hyper):
    scale: Any = 1


class TracedSteps(pc.Hyper):
    T: Any = 8


BROKEN = [
    ({"Hyper": WholeRate, "VARIANTS": {"pc_se": WholeRate()}}, ["pc_se: scale is 1, a whole number", r"write 1\.0, or"]),
    ({"Hyper": TracedSteps, "VARIANTS": {"pc_se": TracedSteps()}}, ["pc_se: T is not static", r"eqx\.field\(static=True"]),
    ({"VARIANTS": {}}, ["VARIANTS is {}", "at least one"]),
    ({"VARIANTS": ["pc_se"]}, ["VARIANTS is", "maps"]),
    ({"VARIANTS": {"pc_se": {"T": 8}}}, ["pc_se is of type dict", r"Hyper\(\)"]),
    ({"SEARCH": ["lr_h"]}, ["SEARCH is of type list"]),
    ({"SEARCH": {"lrh": ("log", 1, 2)}}, ["pc_se: SEARCH names lrh"]),
    ({"EQUILIBRIUM": {"pc": ({}, lambda hyper: 1.0)}}, ["EQUILIBRIUM names pc", "pc_se"]),
    ({"EQUILIBRIUM": {"pc_se": {"T": 3}}}, ["EQUILIBRIUM of pc_se", "settings"]),
    ({"EQUILIBRIUM": {"pc_se": ({"steps": 3}, lambda hyper: 1.0)}}, ["pc_se: its EQUILIBRIUM", "steps"]),
    ({"IDENTITIES": [("equal", ("pc_es", {}), ("pc_se", {}))]}, ["identity", "'pc_es'"]),
    ({"IDENTITIES": [("equal", "pc_se")]}, ["the identity", "'equal'"]),
    ({"IDENTITIES": None}, ["IDENTITIES is of type NoneType"]),
    ({"Hyper": "settings"}, ["Hyper is 'settings'", "class"]),
    ({"make": lambda hyper: None}, ["pc_se fails when it is made", "total_steps"]),
    ({"make": lambda hyper, **options: None}, ["pc_se: make returns NoneType", r"Algorithm\(init, step\)"]),
    ({"make": lambda hyper, **options: pc.make(hyper, **options)._replace(init=lambda *_: None)}, ["init returns NoneType"]),
    ({"make": changed_step(lambda step, *rest: step(*rest)[0])}, [r"a step returns \(State\)", r"\(State, Metrics\)"]),
    ({"make": changed_step(lambda step, *rest: {}["weights"])}, ["pc_se fails when it is made", "KeyError", "weights"]),
    ({"make": changed_step(lambda step, state, x, *rest: step(state, x if x.sum() > 0 else -x, *rest))}, ["traced", "branch"]),
    ({"make": changed_step(lambda step, state, x, *rest: step(state, np.asarray(x), *rest))}, ["traced", "branch"]),
    ({"make": changed_step(remembers([]))}, ["traced value outside", "pure"]),
    ({"make": later_rates([])}, ["pc_se is not a function of its arguments"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), BROKEN, ids=[words[0] for _, words in BROKEN])
def test_battery_says_in_one_sentence_what_is_wrong(changes, words):
    with pytest.raises(AssertionError) as caught:
        pcx.check_algorithm(other(**changes))
    message = str(caught.value)
    assert message.startswith("mine: ")
    assert len(message.splitlines()) == 1
    assert not [word for word in words if not re.search(word, message)], message


def test_schedule_equals_optax():
    """Warm-up and cosine as in optax, over a whole run and beyond."""
    for total in (20, 137, 1000):
        optax_schedule = optax.warmup_cosine_decay_schedule(2e-4, 2.2e-4, int(0.1 * total), total, 2e-5)
        ours = warm_up_cosine(2e-4, total)
        counts = np.arange(total + 5, dtype=float)
        np.testing.assert_allclose([ours(c) for c in counts], [optax_schedule(c) for c in counts], rtol=1e-12)


def bp_gradient_of_half_se(model, x, y):
    """The gradient of ½ Σ (output - y)², mean over the batch, by plain JAX through the whole network."""

    def loss(weights, rest):
        output = jax.vmap(eqx.combine(weights, rest))(x)
        return 0.5 * jnp.mean(jnp.sum((output - y) ** 2, axis=1))

    weights = pcx.weights(model)
    _, rest = eqx.partition(model, eqx.is_inexact_array)
    return jax.grad(loss)(weights, rest)


def settled_gradient(model, x, y, precision=None, **options):
    settled = pcx.infer(model, x, {"vodes.2": y}, precision=precision, **options)
    delta = lambda u: pcx.deltas(model, settled.values, u, precision=precision)  # noqa: E731
    return pcx.weight_gradient(model, delta, settled.values, x)


def test_limit_to_backpropagation_at_equilibrium():
    """A weaker and weaker output precision ρ: the gradient at equilibrium over ρ tends to that of ½·SE, linearly in ρ."""
    model = Chain(DIMS)
    x, y = batch(5, 3)
    expected = bp_gradient_of_half_se(model, x, y)
    differences = []
    for precision in (1e-3, 5e-4):
        gradient = settled_gradient(model, x, y, {"vodes.2": precision}, optimiser=optax.sgd(0.3), steps=400)
        differences.append(largest_difference(jax.tree.map(lambda g, p=precision: g / p, gradient), expected))
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected))
    assert differences[0] < 5e-3 * scale
    assert differences[1] == pytest.approx(differences[0] / 2, rel=0.02)


def test_limit_to_backpropagation_for_small_steps():
    """After T steps of a small rate γ, the gradient k edges from the output is C(T, k) γᵏ times that of ½·SE."""
    model = Chain(DIMS)
    x, y = batch(5, 3)
    expected, rate, steps = bp_gradient_of_half_se(model, x, y), 1e-5, 7
    gradient = settled_gradient(model, x, y, optimiser=optax.sgd(rate), steps=steps)
    for layer, edges in ((2, 0), (1, 1), (0, 2)):
        factor = math.comb(steps, edges) * rate**edges
        np.testing.assert_allclose(gradient.layers[layer].weight / factor, expected.layers[layer].weight, rtol=0, atol=1e-4)


# β at the settings, the first epoch at which it is clamped (hyperparameters.yaml, conventions_discriminative.beta_clamp)
CLAMPED = [
    (0.9, 5, "-"), (0.75, 13, "+"), (0.17877062530418192, 42, "-"), (0.32297201469734277, 34, "+"),
    (0.15, 43, "-"), (0.1, 45, "-"), (0.25, 38, "+"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize(("beta", "first", "direction"), CLAMPED)
def test_strength_of_nudging(beta, first, direction, dtype):
    """β grows by 0.02 per epoch; when it reaches 1 the reading of ``clamp`` decides."""
    sign = 1.0 if direction == "+" else -1.0
    at_end = {"plain": 1.0, "stay": sign, "always": 1.0}
    for clamp, end in at_end.items():
        hyper = nudging.Hyper(beta=jnp.asarray(beta, dtype), beta_ir=jnp.asarray(0.02, dtype), direction=direction, clamp=clamp)
        values = [float(nudging.strength(hyper, jax.random.key(0), jnp.asarray(epoch))) for epoch in range(50)]
        np.testing.assert_allclose(values[:first], sign * (beta + 0.02 * np.arange(first)), rtol=1e-5)
        np.testing.assert_array_equal(values[first:], end)


def test_signs_of_centred_nudging():
    """The listed signs, then drawn ones; "random" draws all; the draw depends on the run's key and the epoch only."""
    signs = "+++++-++---++---+------+-+---++----------+------"  # 48 of 50 epochs: VGG-5 on CIFAR-10
    hyper = nudging.Hyper(beta=0.9, direction="±", signs=signs)
    listed = [float(nudging.strength(hyper, jax.random.key(3), epoch)) for epoch in range(60)]
    np.testing.assert_allclose(listed[:48], [0.9 if s == "+" else -0.9 for s in signs])
    drawn = nudging.Hyper(beta=0.9, direction="±", signs="random")
    random = [float(nudging.strength(drawn, jax.random.key(3), epoch)) for epoch in range(60)]
    np.testing.assert_array_equal(np.sign(listed[48:]), np.sign(random[48:]))
    assert set(np.sign(random)) == {1.0, -1.0}
    other = [float(nudging.strength(drawn, jax.random.key(4), epoch)) for epoch in range(60)]
    assert random != other
    full = nudging.Hyper(beta=1.0, direction="±", signs="+-")
    assert [float(nudging.strength(full, jax.random.key(0), e)) for e in range(2)] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("pc_se", {"lr_h": float("nan")}, "lr_h is nan"),
        ("ipc", {"lr_theta": -1.0}, "lr_theta is -1.0"),
        ("pn", {"beta": 0.0}, "beta is 0.0"),
        ("nn", {"clamp": "maybe"}, "clamp is 'maybe'"),
        ("cn", {"signs": "+-x"}, "signs is"),
        ("mcpc", {"form": "third_order"}, "form is 'third_order'"),
        ("bp_se", {"weight_decay": float("inf")}, "weight_decay is inf"),
    ],
)
def test_settings_are_checked(name, changes, what):
    with pytest.raises(pcx.ModelError, match=what):
        dataclasses.replace(pcx.algorithms.get(name)[0], **changes)


def test_unknown_algorithm():
    with pytest.raises(pcx.ModelError, match="pc_se"):
        pcx.algorithms.get("pcse")


class OneLatent(pcx.EnergyModule):
    """h ~ N(0, 1), y ~ N(w h, 1): the smallest generative model."""

    def __init__(self, weight):
        self.latent = pcx.Vode((1,), mean=jnp.zeros(1))
        self.layer = eqx.tree_at(lambda m: m.weight, pxnn.Linear(1, 1, bias=False), jnp.full((1, 1), weight))
        self.output = pcx.Vode((1,))

    def __call__(self):
        return self.output(self.layer(self.latent()))


@pytest.mark.parametrize("form", ["first_order", "heavy_ball", "second_order"])
def test_mcpc_samples_a_gaussian_posterior(form):
    """The last values of many parallel chains have the mean and variance of the discretised chain.

    The posterior is N(w y / (1 + w²), σ² / (1 + w²)). With energy ½ a (h - μ)², a = 1 + w², the chain (h - μ, r) is
    z ← A z + b N, and its covariance solves C = A C Aᵀ + b bᵀ. Bounds: five standard errors, √(v/n) and v √(2/n).
    """
    weight, y, rate, keep, noise, chains = 1.5, 2.0, 0.1, 0.6, 0.7, 20_000
    a = 1 + weight**2
    if form == "first_order":
        transition, kick = np.array([[1 - rate * a]]), np.array([[np.sqrt(2 * rate * noise)]])
    elif form == "heavy_ball":  # r ← a h + n + m r; h ← h - γ r
        scale = np.sqrt(2 * noise * (1 - keep) / rate)
        transition, kick = np.array([[1 - rate * a, -rate * keep], [a, keep]]), np.array([[-rate * scale], [scale]])
    else:  # r ← (1 - γ(1-m)) r - γ a h + n; h ← h + γ r
        scale, drag = np.sqrt(2 * (1 - keep) * rate * noise), 1 - rate * (1 - keep)
        transition, kick = np.array([[1 - rate**2 * a, rate * drag], [-rate * a, drag]]), np.array([[rate * scale], [scale]])
    size = len(transition)
    covariance = np.linalg.solve(np.eye(size**2) - np.kron(transition, transition), (kick @ kick.T).reshape(-1))
    variance = covariance.reshape(size, size)[0, 0]
    hyper = dataclasses.replace(pcx.algorithms.get("mcpc")[0], lr_h=rate, momentum_h=keep, variance=noise, T=400, form=form)
    dynamics = importlib.import_module("pcx.algorithms.mcpc").dynamics(hyper, jax.random.key(0))
    settled = jax.jit(
        lambda: pcx.infer(OneLatent(weight), None, {"output": jnp.full((chains, 1), y)}, optimiser=dynamics, steps=400)
    )()
    sample = np.asarray(settled.values["latent"])[:, 0]
    assert abs(sample.mean() - weight * y / a) < 5 * np.sqrt(variance / chains)
    assert abs(sample.var() - variance) < 5 * variance * np.sqrt(2 / chains)


def test_names_of_algorithms_are_taken_once(monkeypatch, tmp_path):
    """A copy that keeps a name, or a helper without an underscore, is refused by name instead of replacing what is there."""
    monkeypatch.setattr(pcx.algorithms, "__path__", [*pcx.algorithms.__path__, str(tmp_path)])
    wrong = {
        "my_pc": (Path(pc.__file__).read_text(), r"'pc_se': in .*my_pc\.py and in .*algorithms/pc\.py"),
        "tools": ("x = 1", r"tools\.py has no mapping VARIANTS"),
        "listed": ("VARIANTS = ['listed']", r"listed\.py has no mapping VARIANTS"),
        "unmade": ("VARIANTS = {'unmade': 1}", r"unmade\.py has no function make"),
        "torn": ("VARIANTS = {'torn': 1\n", r"torn\.py cannot be read: .* line 1"),
        "lost": ("import nowhere", r"lost\.py cannot be imported: ModuleNotFoundError: .*nowhere"),
    }
    for name, (text, message) in wrong.items():
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(pcx.ModelError, match=message):
            pcx.algorithms.get("pc_se")
        (tmp_path / f"{name}.py").unlink()
        monkeypatch.delitem(sys.modules, f"pcx.algorithms.{name}", raising=False)


def test_incremental_learning_takes_a_step():
    with pytest.raises(pcx.ModelError, match="T is 0"):
        ipc.Hyper(T=0)


@pytest.mark.parametrize("scale", [1e-35, 1e-8, 1.0, 1e30])
def test_unit_gradients_have_a_root_mean_square_of_one(scale):
    """Whatever the size, also where its square is below the smallest float32; zeros stay zeros."""
    plain = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    gradients = {"w": jnp.asarray(plain * np.float32(scale)), "b": jnp.zeros(3, jnp.float32)}
    transform = pcx.algorithms.unit_gradients()
    found, _ = transform.update(gradients, transform.init(gradients))
    np.testing.assert_allclose(found["w"], plain / np.sqrt(np.mean(plain.astype(np.float64) ** 2)), rtol=2e-6)
    assert found["b"].tolist() == [0, 0, 0]


def deep_gradients(shortcuts, depth=14, rate=0.01):
    """Unit gradients of the weights of every layer by PC in float32, and by BP in float64: a list of each."""
    model, (x, y) = Chain([6] * (depth + 1), activation=lambda a: jnp.tanh(2.5 * a)), batch(6, 6, size=16)
    last = f"vodes.{depth - 1}"

    def loss(model):
        return jnp.mean(jnp.sum(0.5 * (jax.vmap(model)(x) - y) ** 2, axis=-1))

    exact = eqx.filter_grad(loss)(model)
    small = jax.tree.map(lambda a: a.astype(jnp.float32), model)
    narrow, label = x.astype(jnp.float32), y.astype(jnp.float32)
    done = pcx.infer(small, narrow, {last: label}, optimiser=optax.sgd(rate), steps=depth, shortcuts=shortcuts)
    settled = done.values if done.displaced is None else done.displaced
    gradient = pcx.weight_gradient(small, lambda u: pcx.deltas(small, settled, u), settled, narrow)
    unit = pcx.algorithms.unit_gradients().update
    return [[layer.weight for layer in unit(g, optax.EmptyState())[0].layers] for g in (gradient, exact)]


def test_the_first_layers_of_a_deep_network_have_the_direction_of_backpropagation():
    """With a small state learning rate γ and as many steps as layers, the error of a layer is that of BP times γ to the
    power of the layers above it, up to terms that are smaller by γ. Plain float32 rounds it away."""
    ours, exact = deep_gradients(pcx.ALL_SHORTCUTS)
    cosines = [float(jnp.mean(a * b)) for a, b in zip(ours, exact, strict=True)]
    assert min(cosines) > 0.98
    plain, _ = deep_gradients(pcx.Shortcuts(anchor=False))
    assert abs(float(jnp.mean(plain[0] * exact[0]))) < 0.5


def test_unit_gradients_are_a_setting_of_every_algorithm_with_adamw():
    """A step with the setting is a step with the transformation before the same AdamW."""
    model, (x, y) = Chain(DIMS), batch(DIMS[0], DIMS[-1])
    for module, variant in ((pc, "pc_se"), (ipc, "ipc"), (nudging, "nn"), (pcx.algorithms.bp, "bp_se")):
        hyper = dataclasses.replace(module.VARIANTS[variant], unit_gradients=True)
        by_hand = optax.chain(pcx.algorithms.unit_gradients(), optax.adamw(hyper.lr_theta, weight_decay=hyper.weight_decay))
        models = []
        for algorithm in (module.make(hyper), module.make(hyper, weight_optimiser=by_hand)):
            state = algorithm.init(model, x, y, jax.random.key(0))
            models.append(algorithm.step(state, x, y, jax.random.key(0))[0].model)
        assert largest_difference(*map(pcx.weights, models)) == 0
        assert largest_difference(pcx.weights(models[0]), pcx.weights(model)) > 1e-5


@pytest.mark.parametrize("algorithm", ["pc_se", "ipc"])
def test_a_convolutional_network_learns_as_written_out(algorithm):
    """A VGG of two pooled convolutions against its layers, energies and the loops of PC and incremental PC in plain JAX."""
    images = jax.random.normal(jax.random.key(0), (2, 5, 3, 8, 8))
    labels = jax.nn.one_hot(jnp.array([[0, 1, 2, 3, 1], [2, 2, 0, 1, 3]]), 4)
    model = VGG((3, 8, 8), 4, [6, 7], [1, 1], [True, True], "hard_tanh")
    settings = {"T": 4, "lr_h": 0.5, "momentum_h": 0.6}
    optimiser, rule = optax.sgd(0.02, momentum=0.9), optax.sgd(0.5, momentum=0.6)

    def predictions(theta, x, values):
        u = []
        for weight, bias in theta[:-1]:
            a = jax.nn.hard_tanh(jax.lax.conv_general_dilated(x, weight, (1, 1), [(1, 1)] * 2) + bias.reshape(-1, 1, 1))
            corners = jnp.stack([a[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)])
            u.append(corners.max(0))
            x = u[-1] if values is None else values[len(u) - 1]
        weight, bias = theta[-1]
        return [*u, x.reshape(len(x), -1) @ weight.T + bias]

    def free_energy(values, theta, x, y):
        u = predictions(theta, x, values)
        return sum(0.5 * jnp.sum((h - u) ** 2) for h, u in zip([*values, y], u, strict=True))

    def learn(theta, weight_state, gradient, size):
        updates, weight_state = optimiser.update(jax.tree.map(lambda g: g / size, gradient), weight_state)
        return optax.apply_updates(theta, updates), weight_state

    theta = [(layer.weight, layer.bias) for layer in (*model.convolutions, model.head)]
    weight_state = optimiser.init(theta)
    hyper, make = pcx.algorithms.get(algorithm)
    ours = make(dataclasses.replace(hyper, **settings), weight_optimiser=optimiser)
    state = ours.init(model, images[0], labels[0], jax.random.key(2))
    for x, y in zip(images, labels, strict=True):
        state, _ = ours.step(state, x, y, jax.random.key(2))
        values = predictions(theta, x, None)[:-1]
        moves = rule.init(values)
        for _ in range(settings["T"]):
            of_values, of_weights = jax.grad(free_energy, argnums=(0, 1))(values, theta, x, y)
            updates, moves = rule.update(of_values, moves)
            values = optax.apply_updates(values, updates)
            if algorithm == "ipc":
                theta, weight_state = learn(theta, weight_state, of_weights, len(x))
        if algorithm == "pc_se":
            theta, weight_state = learn(theta, weight_state, jax.grad(free_energy, argnums=1)(values, theta, x, y), len(x))
    layers, fresh = ([*found.convolutions, found.head] for found in (state.model, model))
    for (weight, bias), layer, before in zip(theta, layers, fresh, strict=True):
        assert largest_difference([weight, bias.ravel()], [layer.weight, layer.bias.ravel()]) < 1e-13
        assert largest_difference(layer.weight, before.weight) > 1e-4


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_incremental_learning_makes_no_steps_of_rounding(dtype, unroll):
    """Adam makes a full step of any difference between two evaluations of one prediction, however small. Where errors have
    not arrived, and without weight decay, nothing moves: not by a bit."""
    model = VGG((3, 16, 16), 4, [24, 32, 40], [1, 1, 1], [True, False, True], "leaky_relu")
    model = jax.tree.map(lambda a: a.astype(dtype), model)
    images = jax.random.normal(jax.random.key(0), (6, 3, 16, 16), dtype)
    for steps in (1, 2, 3):
        hyper, make = pcx.algorithms.get("ipc")
        ours = make(dataclasses.replace(hyper, T=steps, weight_decay=0.0), unroll=unroll)
        state = ours.init(model, images, jnp.arange(6) % 4, jax.random.key(0))
        state, metrics = jax.jit(ours.step)(state, images, jnp.arange(6) % 4, jax.random.key(0))
        moved = [
            largest_difference(new.weight, old.weight)
            for new, old in zip(state.model.convolutions, model.convolutions, strict=True)
        ]
        reached = len(moved) + 1 - steps  # convolutions before this one have no error yet
        assert moved[:reached] == [0.0] * reached
        assert min([*moved[reached:], largest_difference(state.model.head.weight, model.head.weight)]) > 1e-5
        assert [float(metrics.energies[f"vodes.{i}"]) for i in range(reached)] == [0.0] * reached
