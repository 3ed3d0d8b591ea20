"""A step of stacked layers as one kernel: interpreted here, so that its numbers can be compared with those of the stack."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import Chain, Skip, batch, largest_difference

import pcx
import pcx.nn as pxnn
from pcx.bench.scaling import away_from_stack, build
from pcx.shortcuts import kernel
from pcx.shortcuts.zeros import count

KERNEL = pcx.Shortcuts(kernel=True)
RULES = {"sgd": optax.sgd(0.05), "momentum": optax.sgd(0.05, momentum=0.5), "adam": optax.adam(0.01, eps=1e-3)}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Blocks of four samples and two nodes, and small layers."""
    monkeypatch.setattr(kernel, "INTERPRET", True)
    monkeypatch.setattr(kernel, "BLOCKS", dict.fromkeys(kernel.BLOCKS, kernel.Block(4, 2, 1)))
    monkeypatch.setattr(kernel, "WIDTHS", (3, 4))


def launches(model, x, observed, **options):
    """How many kernels an inference carries out."""
    return count(jax.make_jaxpr(lambda x: pcx.infer(model, x, observed, **options).values)(x).jaxpr, ["pallas_call"])


def both(model, x, observed, **options):
    return [pcx.infer(model, x, observed, shortcuts=way, **options) for way in (pcx.ALL_SHORTCUTS, KERNEL)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("residual", [False, True])
def test_the_kernel_is_the_stack(residual, rule):
    """All layers equal, the last one fixed; every node has an error from the start, so that all steps are the kernel's."""
    model, (x, y) = build(4, 6, residual), batch(4, 4, size=8)
    options = {"optimiser": RULES[rule], "steps": 5, "init": "zeros"}
    stacked, fused = both(model, x, {"vodes.5": y}, **options)
    assert launches(model, x, {"vodes.5": y}, shortcuts=KERNEL, **options) == 5
    assert largest_difference(stacked.values, stacked.forward.values) > 0.01
    found, expected = ((done.values, done.optimiser_state) for done in (fused, stacked))
    assert largest_difference(found, expected) < 1e-13


@pytest.mark.parametrize("nodes", [1, 3, 4, 9])
@pytest.mark.parametrize("sizes", [(5, 4, 4, 4, 4, 4, 4, 4, 4, 2), (4, 4, 4, 4, 4, 4)], ids=["between", "alone"])
def test_blocks_of_other_numbers_of_nodes(nodes, sizes, monkeypatch):
    """Also where they do not divide the chain, and where one block is all of it."""
    monkeypatch.setattr(kernel, "BLOCKS", dict.fromkeys(kernel.BLOCKS, kernel.Block(4, nodes, 1)))
    model, (x, y) = Chain(sizes, activation=jnp.tanh), batch(sizes[0], sizes[-1], size=8)
    observed, options = {f"vodes.{len(sizes) - 2}": y}, {"optimiser": RULES["momentum"], "steps": 3, "init": "zeros"}
    stacked, fused = both(model, x, observed, **options)
    assert launches(model, x, observed, shortcuts=KERNEL, **options) == 3
    assert largest_difference(fused.values, stacked.values) < 1e-14


@pytest.mark.parametrize("init", ["forward", "zeros"])
@pytest.mark.parametrize("steps", [7, 16])
def test_between_other_layers(init, steps):
    """A chain inside of a network: the nodes before and after it are moved apart, and their energies pull at its ends."""
    model, (x, y) = Chain([5, 4, 4, 4, 4, 2], activation=jnp.tanh), batch(5, 2, size=12)
    options = {"optimiser": RULES["momentum"], "steps": steps, "init": init}
    stacked, fused = both(model, x, {"vodes.4": y}, **options)
    reach = 4 if init == "forward" else 0  # steps of the wave front are not the kernel's
    assert launches(model, x, {"vodes.4": y}, shortcuts=KERNEL, **options) == steps - reach
    assert largest_difference(fused.values, stacked.values) < 1e-14


@pytest.mark.parametrize("setting", ["float32", "tensorfloat32", "bfloat16", "state"])
def test_anchored_products(setting):
    """In single precision: products as differences from the start, and a state in bfloat16."""
    model = jax.tree.map(lambda a: a.astype(jnp.float32), Chain([4, 4, 4, 4, 4, 3], activation=jnp.tanh))
    x, y = (a.astype(jnp.float32) for a in batch(4, 3, size=8))
    dtype = {"state_dtype": jnp.bfloat16} if setting == "state" else {}
    with jax.default_matmul_precision("bfloat16" if setting == "state" else setting):
        stacked, fused = both(model, x, {"vodes.4": y}, optimiser=RULES["momentum"], steps=6, init="zeros", **dtype)
    scale = largest_difference(stacked.values, stacked.forward.values)
    bound = {"float32": 1e-6, "tensorfloat32": 1e-6, "bfloat16": 2e-2, "state": 2e-2}[setting]
    assert largest_difference(fused.values, stacked.values) < bound * scale


def test_the_benchmark_says_how_far_the_kernel_is_from_the_stack(monkeypatch):
    """By rounding, and, if the kernel makes each value one percent larger, so far that it shows."""
    point = {"batch": 8, "dim": 4, "layers": 5, "T": 3, "kind": "residual", "precision": "float32"}
    assert away_from_stack(**point) < 1e-6
    moved = kernel.ChainKernel.moved
    larger = lambda *args: [[1.01 * value, *state] for value, *state in moved(*args)]  # noqa: E731
    monkeypatch.setattr(kernel.ChainKernel, "moved", larger)
    assert away_from_stack(**point) > 1e-3


def test_under_jit_and_a_map_over_learning_rates():
    """Numbers that are traced, and mapped, come into the kernel as arguments."""
    model, (x, y) = build(4, 5), batch(4, 4, size=4)

    def settle(rate, shortcuts):
        return pcx.infer(model, x, {"vodes.4": y}, optimiser=optax.sgd(rate), steps=3, init="zeros", shortcuts=shortcuts).values

    rates = jnp.array([0.02, 0.1])
    mapped = jax.jit(jax.vmap(lambda rate: settle(rate, KERNEL)))(rates)
    for i, rate in enumerate(rates):
        assert largest_difference(jax.tree.map(lambda a, i=i: a[i], mapped), settle(rate, pcx.ALL_SHORTCUTS)) < 1e-14


class Normed(pcx.EnergyModule):
    """Layers after a normalisation by the statistics of the batch."""

    def __init__(self):
        with pxnn.keys(jax.random.key(0)):
            self.layers = [pxnn.Linear(4, 4) for _ in range(5)]
        self.norms = [pxnn.BatchNorm(4, statistics="batch") for _ in range(5)]
        self.vodes = [pcx.Vode((4,)) for _ in range(5)]

    def __call__(self, x):
        for layer, norm, vode in zip(self.layers, self.norms, self.vodes, strict=True):
            x = vode(jnp.tanh(norm(layer(x))))
        return x


class Turned(pcx.EnergyModule):
    """Products with the weights on the left, as in equinox."""

    def __init__(self):
        self.weights = [jax.random.normal(jax.random.key(i), (4, 4)) / 2 for i in range(5)]
        self.vodes = [pcx.Vode((4,)) for _ in range(5)]

    def __call__(self, x):
        for weight, vode in zip(self.weights, self.vodes, strict=True):
            x = vode(jnp.tanh(weight @ x))
        return x


def per_unit(h, u):
    return jnp.sum(jnp.array([1.0, 2.0, 3.0, 4.0]) * (h - u) ** 2)


CASES = {
    "samples that do not fill blocks": (lambda: build(4, 5), 6, {}),
    "a width that is no power of two": (lambda: build(5, 5), 8, {}),
    "a precision": (lambda: build(4, 5), 8, {"precision": {f"vodes.{i}": 2.0 for i in range(5)}}),
    "a precision that changes": (lambda: Chain([4, 4, 4, 4, 4, 3]), 8, {"precision": {"vodes.4": lambda step: 1.0 + step}}),
    "a rate per unit": (lambda: build(4, 5), 8, {"optimiser": optax.sgd(0.1 * jnp.arange(1.0, 5.0))}),
    "a norm over the batch": (lambda: build(4, 5), 8, {"optimiser": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1))}),
    "a norm over nodes": (lambda: build(4, 5), 8, {"optimiser": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))}),
    "a schedule": (lambda: build(4, 5), 8, {"optimiser": optax.sgd(optax.linear_schedule(0.1, 0.0, 3))}),
    "statistics of the batch": (Normed, 8, {"training": True}),
    "an energy with an array": (lambda: build(4, 5), 8, {"energy": {f"vodes.{i}": per_unit for i in range(5)}}),
    "a first prediction that is not constant": (lambda: build(4, 5), 8, {"shortcuts": pcx.Shortcuts(constant=False)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_stacked_or_not(case):
    """Refused, with the numbers of the other ways."""
    make, size, options = CASES[case]
    model, options = make(), {"optimiser": RULES["sgd"], "steps": 3, "init": "zeros"} | options
    way = options.pop("shortcuts", pcx.ALL_SHORTCUTS)
    x, y = batch(model.vodes[0].shape[0], model.vodes[-1].shape[0], size=size)
    observed, asked = {"vodes.4": y}, way._replace(kernel=True)
    assert launches(model, x, observed, shortcuts=asked, **options) == 0
    plain, other = (pcx.infer(model, x, observed, shortcuts=each, **options) for each in (way, asked))
    assert largest_difference(other.values, plain.values) == 0.0


@pytest.mark.parametrize("setting", ["float32", "float64"])
def test_weights_on_the_left(setting):
    """Anchored products of these have the batch as their last axis: refused; without an anchor there is nothing to split."""
    model, x, y = jax.tree.map(lambda a: a.astype(setting), (Turned(), *batch(4, 4, size=8)))
    options = {"optimiser": RULES["sgd"], "steps": 3, "init": "zeros"}
    assert launches(model, x, {"vodes.4": y}, shortcuts=KERNEL, **options) == 0
    plain, asked = both(model, x, {"vodes.4": y}, **options)
    assert largest_difference(asked.values, plain.values) == 0.0


def test_a_node_that_others_read_too():
    """A skip connection into the middle of a chain is not one."""
    model, (x, y) = Skip(4, 5, 4), batch(4, 4, size=8)
    last = list(pcx.graph(model, x).parents)[-1]
    options = {"optimiser": RULES["sgd"], "steps": 3, "init": "zeros"}
    assert launches(model, x, {last: y}, shortcuts=KERNEL, **options) == 0


@pytest.mark.parametrize("node", range(5))
@pytest.mark.parametrize("model", [build(4, 5), Chain([5, 4, 4, 4, 4, 4, 4, 2])], ids=["alone", "between"])
def test_a_node_that_is_observed_in_part(model, node):
    """The first one of a chain may be; it is moved apart. Others break the chain."""
    nodes = list(pcx.graph(model, jnp.zeros((2, model.layers[0].weight.shape[1]))).shapes.items())
    x, y = batch(model.layers[0].weight.shape[1], nodes[-1][1][0], size=8)
    part = pcx.Observed(jnp.ones((8, 4)), jnp.arange(4) < 2)
    observed = {nodes[-1][0]: y, f"vodes.{node}": part} if f"vodes.{node}" != nodes[-1][0] else {nodes[-1][0]: part}
    options = {"optimiser": RULES["momentum"], "steps": 4, "init": "zeros"}
    assert launches(model, x, observed, shortcuts=KERNEL, **options) == (4 if node == 0 else 0)
    plain, asked = both(model, x, observed, **options)
    assert largest_difference(asked.values, plain.values) < 1e-14


def test_it_is_asked_for(monkeypatch):
    """By default there is none, and without a GPU there is none."""
    model, (x, y) = build(4, 5), batch(4, 4, size=8)
    options = {"optimiser": RULES["sgd"], "steps": 3, "init": "zeros"}
    assert launches(model, x, {"vodes.4": y}, **options) == 0
    monkeypatch.setattr(kernel, "INTERPRET", False)
    assert launches(model, x, {"vodes.4": y}, shortcuts=KERNEL, **options) == 0
