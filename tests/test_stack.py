"""Equal nodes in one array through inference: the same numbers, and a number of products that does not grow with depth."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import Chain, largest_difference

import pcx
import pcx.nn as pxnn
from pcx.shortcuts.plan import ZeroAware
from pcx.shortcuts.stack import BlockOptimiser, Blocks
from pcx.shortcuts.zeros import count

LONE = pcx.Shortcuts(stack=False)


class Row(pcx.EnergyModule):
    """Equal dense layers, plain or residual."""

    def __init__(self, depth, width, residual=False):
        with pxnn.keys(jax.random.key(0)):
            self.layers = [pxnn.Linear(width, width) for _ in range(depth)]
        self.vodes = [pcx.Vode() for _ in self.layers]
        self.residual = residual

    def __call__(self, x):
        for layer, vode in zip(self.layers, self.vodes, strict=True):
            u = jnp.tanh(layer(x))
            x = vode(x + u if self.residual else u)
        return x


def problem(depth=7, width=4, residual=False):
    model = Row(depth, width, residual)
    x, y = jax.random.normal(jax.random.key(1), (2, 3, width))
    return model, x, {f"vodes.{depth - 1}": y}


def settle(model, x, observed, **options):
    options = {"optimiser": optax.sgd(0.1, momentum=0.5), "steps": 12} | options
    return eqx.filter_jit(lambda x, o: pcx.infer(model, x, o, **options))(x, observed)


OPTIMISERS = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.01, eps=1e-3),
    "rmsprop": optax.rmsprop(0.01, eps=1e-2),
    "decay": optax.adamw(0.01, weight_decay=0.1),
    "schedule": optax.sgd(lambda step: 0.1 / (1 + step)),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "clipped by node": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
}


@pytest.mark.parametrize("residual", [False, True], ids=["chain", "residual"])
@pytest.mark.parametrize("init", ["zeros", "forward"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_equal_to_lone_nodes(name, init, residual):
    """Values and the optimiser's whole state, for optimisers that move nodes apart from each other and for others."""
    model, x, observed = problem(residual=residual)
    options = {"optimiser": OPTIMISERS[name], "init": init}
    stacked, lone = (settle(model, x, observed, shortcuts=s, **options) for s in (pcx.ALL_SHORTCUTS, LONE))
    assert jax.tree.structure(stacked.optimiser_state) == jax.tree.structure(lone.optimiser_state)
    tolerance = 1e-6 if name in ("adam", "rmsprop") and init == "forward" else 1e-13  # rounding in the first steps is scaled up
    parts = ((stacked.values, stacked.optimiser_state), (lone.values, lone.optimiser_state))
    assert largest_difference(*parts) < tolerance
    assert stacked.reached == lone.reached


@pytest.mark.parametrize(
    ("optimiser", "fits"),
    [
        ("sgd", True),
        ("adam", True),
        ("schedule", True),
        ("decay", True),
        ("clipped", False),
        ("clipped by node", True),
        ("one by one", False),
        ("all the same", True),
        ("noise", False),
    ],
)
def test_the_optimiser_is_checked_by_its_program(optimiser, fits):
    """A block is moved as one where its nodes are moved alike and apart, which norms over all nodes and noise do not do."""
    names = [f"vodes.{i}" for i in range(4)]
    rates = {"one by one": [0.1, 0.2, 0.3, 0.4], "all the same": [0.1] * 4}
    if optimiser in rates:
        from pcx.shortcuts.plan import per_node

        chosen = per_node({name: optax.sgd(rate) for name, rate in zip(names, rates[optimiser], strict=True)})
    elif optimiser == "noise":
        chosen = pcx.optim.langevin(0.1, key=jax.random.key(0))
    else:
        chosen = OPTIMISERS[optimiser]
    values = pcx.Nodes({name: jnp.ones((2, 3)) for name in names})
    assert BlockOptimiser(ZeroAware(chosen, values), Blocks([names], names)).fits is fits


@pytest.mark.parametrize("residual", [False, True], ids=["chain", "residual"])
def test_products_do_not_grow_with_depth(residual):
    """Zero initialisation, T=8, whatever the depth: one product a step back, one a step forward except for the first, where
    all values are zero, and one for the first node."""

    def products(depth):
        model, x, observed = problem(depth, residual=residual)
        options = {"optimiser": optax.sgd(0.1), "steps": 8, "init": "zeros"}
        program = jax.jit(lambda x, o: pcx.infer(model, x, o, **options).values)
        text = program.lower(x, observed).compile({"xla_backend_optimization_level": 3}).as_text()
        return sum(" dot(" in line or "__onednn$matmul" in line for line in text.splitlines())

    assert products(6) == products(40) == 8 + 7 + 1


def test_products_of_a_wave():
    """From a forward start the front widens by one node a step, and a stack of three or more is one product."""
    model, x, observed = problem(12)

    def total(steps):
        options = {"optimiser": optax.sgd(0.1), "steps": steps}
        return count(jax.make_jaxpr(lambda x, o: pcx.infer(model, x, o, **options).values)(x, observed).jaxpr)

    assert [total(steps + 1) - total(steps) for steps in (4, 5, 6, 7)] == [2, 2, 2, 2]


@pytest.mark.parametrize("case", ["parts", "other energies", "precision", "same precision", "schedule"])
def test_nodes_that_differ_stay_apart(case):
    """Observed parts, energies and precisions of single nodes give the numbers of the lone path."""
    model, x, observed = problem(8)
    options, seen = {}, dict(observed)
    if case == "parts":
        seen["vodes.2"] = pcx.Observed(jnp.zeros((3, 4)), jnp.array([True, False, True, False]))
    elif case == "other energies":
        options["energy"] = {"vodes.3": lambda h, u: jnp.sum(jnp.abs(h - u) ** 3)}
    else:
        one = {"precision": 2.0, "same precision": 2.0, "schedule": lambda step: 1.0 + step}[case]
        names = ["vodes.1"] if case == "precision" else [f"vodes.{i}" for i in range(8)]
        options["precision"] = dict.fromkeys(names, one)
    for init in ("zeros", "forward"):
        stacked, lone = (settle(model, x, seen, shortcuts=s, init=init, **options) for s in (pcx.ALL_SHORTCUTS, LONE))
        assert largest_difference(stacked.values, lone.values) < 1e-13


def test_a_state_that_is_carried_on():
    """Twelve steps are five and then seven, with the optimiser's state handed over."""
    model, x, observed = problem()
    whole = settle(model, x, observed, init="zeros")
    first = settle(model, x, observed, init="zeros", steps=5)
    rest = settle(model, x, observed, values=first.values, optimiser_state=first.optimiser_state, steps=7)
    assert largest_difference(whole.values, rest.values) < 1e-14
    assert largest_difference(whole.optimiser_state, rest.optimiser_state) < 1e-14


def test_rows_are_slices_where_neighbours_are():
    """Neighbours of a block come as one slice, others as parts of a concatenation; arrays and fixed nodes may be between."""
    blocks = Blocks([["a", "b", "c", "d"]], ["a", "b", "c", "d", "e"])
    values = pcx.Nodes({name: jnp.full((2,), float(i)) for i, name in enumerate("abcde")})
    packed, fixed = blocks.pack(values), {"f": jnp.full((2,), 9.0)}
    assert largest_difference(blocks.unpack(packed), values) == 0
    for items in (["a", "b", "c", "d"], ["b", "c"], ["c", "a", "f", "e"], ["f", "a", "b"], [jnp.full((2,), 7.0), "d"]):
        known = {**values, **fixed}
        expected = jnp.stack([known[item] if isinstance(item, str) else item for item in items])
        assert largest_difference(blocks.rows(packed, fixed, items), expected) == 0
    whole = jax.make_jaxpr(lambda packed: blocks.rows(packed, fixed, ["a", "b", "c", "d"]))(packed)
    assert not whole.jaxpr.eqns
    some = jax.make_jaxpr(lambda packed: blocks.rows(packed, fixed, ["b", "c"]))(packed)
    assert "concatenate" not in str(some)


def test_unequal_layers_are_not_stacked():
    model = Chain([3, 4, 5, 6, 2])
    x, y = jax.random.normal(jax.random.key(1), (3, 3)), jnp.ones((3, 2))
    stacked, lone = (settle(model, x, {"vodes.3": y}, shortcuts=s) for s in (pcx.ALL_SHORTCUTS, LONE))
    assert largest_difference(stacked.values, lone.values) == 0
