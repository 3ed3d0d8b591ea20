"""The graph of a model is recovered from its program: who predicts whom, through calls, and what is refused."""

import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import Chain, Convolutional, Skip

import pcx
import pcx.nn as pxnn


def linear(inputs, outputs, seed=0):
    return pxnn.Linear(inputs, outputs, key=jax.random.key(seed))


def edges(model, x):
    return {name: set(parents) for name, parents in pcx.graph(model, x).parents.items()}


def test_chain():
    assert edges(Chain([2, 3, 4, 5]), jnp.ones((1, 2))) == {"vodes.0": set(), "vodes.1": {"vodes.0"}, "vodes.2": {"vodes.1"}}


def test_skip_connection():
    assert edges(Skip(3, 4, 2), jnp.ones((1, 3))) == {
        "vodes.0": set(),
        "vodes.1": {"vodes.0"},
        "vodes.2": {"vodes.1"},
        "vodes.3": {"vodes.1", "vodes.2"},
        "vodes.4": {"vodes.3"},
    }


@pytest.mark.parametrize("selects", [True, False])
def test_convolutions_and_pooling(selects):
    expected = {"vodes.0": set(), "vodes.1": {"vodes.0"}, "vodes.2": {"vodes.1"}}
    assert edges(Convolutional(selects=selects), jnp.ones((2, 3, 8, 8))) == expected


class TwoInputs(pcx.EnergyModule):
    """Each input has its own node; a third node reads both."""

    def __init__(self):
        self.left, self.right, self.both = linear(2, 3), linear(4, 3, 1), linear(3, 2, 2)
        self.a, self.b, self.c = pcx.Vode(), pcx.Vode(), pcx.Vode()

    def __call__(self, x, y):
        return self.c(self.both(self.a(self.left(x)) * self.b(self.right(y))))


def test_several_inputs():
    assert edges(TwoInputs(), (jnp.ones((5, 2)), jnp.ones((5, 4)))) == {"a": set(), "b": set(), "c": {"a", "b"}}


class Twice(pcx.EnergyModule):
    """One layer called twice, with a node after each call, and two outputs."""

    def __init__(self):
        self.shared, self.head = linear(3, 3), linear(3, 2, 1)
        self.vodes = [pcx.Vode() for _ in range(4)]

    def __call__(self, x):
        first = self.vodes[0](jnp.tanh(self.shared(x)))
        second = self.vodes[1](jnp.tanh(self.shared(first)))
        return self.vodes[2](self.head(first)), self.vodes[3](self.head(second))


def test_layer_called_twice_and_several_outputs():
    assert edges(Twice(), jnp.ones((1, 3))) == {
        "vodes.0": set(),
        "vodes.1": {"vodes.0"},
        "vodes.2": {"vodes.0"},
        "vodes.3": {"vodes.1"},
    }
    assert pcx.graph(Twice(), jnp.ones((1, 3))).sinks == ["vodes.2", "vodes.3"]
    with pytest.raises(pcx.ModelError, match=r"vodes\.2, vodes\.3"):
        pcx.output_node(Twice(), jnp.ones((1, 3)))


class Roots(pcx.EnergyModule):
    """Two root latents, one with a prior, that predict one observation; called in the order z, y, x."""

    def __init__(self):
        self.decode = linear(5, 2)
        self.x, self.y, self.z = pcx.Vode(), pcx.Vode(3), pcx.Vode((2,), mean=jnp.ones(2))

    def __call__(self):
        z, y = self.z(), self.y()
        return self.x(self.decode(jnp.concatenate([z, y])))


def test_root_latents_without_input():
    graph = pcx.graph(Roots())
    assert {name: set(parents) for name, parents in graph.parents.items()} == {"z": set(), "y": set(), "x": {"z", "y"}}
    assert list(graph.parents) == ["z", "y", "x"], "the order of calls, not of attributes"
    assert dict(graph.shapes) == {"z": (2,), "y": (3,), "x": (2,)}
    assert pcx.output_node(Roots()) == "x"


@pytest.mark.parametrize(
    ("model", "x", "name"),
    [(Chain([2, 3, 4, 5]), jnp.ones((1, 2)), "vodes.2"), (Skip(3, 4, 2), jnp.ones((1, 3)), "vodes.4"),
     (TwoInputs(), (jnp.ones((1, 2)), jnp.ones((1, 4))), "c")],
)  # fmt: skip
def test_output_node(model, x, name):
    assert pcx.output_node(model, x) == name


class Wrapped(pcx.EnergyModule):
    """A call with two separate results, one of which each last node reads."""

    def __init__(self, function):
        self.a, self.b, self.c, self.d = (pcx.Vode() for _ in range(4))
        self.function = function

    def __call__(self, x):
        a, b = self.a(2 * x), self.b(3 * x)
        c, d = self.function(a, b)
        return self.c(c), self.d(d)


def pair(a, b):
    return jnp.sin(a), jnp.cos(b)


custom = jax.custom_jvp(pair)
custom.defjvp(lambda primals, tangents: (pair(*primals), tangents))


@pytest.mark.parametrize(
    "function",
    [
        pair,
        jax.jit(pair),
        jax.checkpoint(pair),
        custom,
        jax.jit(jax.checkpoint(lambda a, b: custom(*jax.jit(pair)(a, b)))),
    ],
    ids=["plain", "jit", "remat", "custom_jvp", "nested"],
)
def test_calls_are_entered(function):
    """An answer for the call as a whole would make both nodes parents of both."""
    assert edges(Wrapped(function), jnp.ones((1, 3))) == {"a": set(), "b": set(), "c": {"a"}, "d": {"b"}}


def test_loops_are_taken_as_a_whole():
    """A scan that mixes both: no parent may be missing."""

    def mixing(a, b):
        return jax.lax.scan(lambda carry, _: ((carry[1], carry[0]), None), (a, b), length=3)[0]

    found = edges(Wrapped(mixing), jnp.ones((1, 3)))
    assert found["c"] == found["d"] == {"a", "b"}


def test_branches_depend_on_what_decides():
    def branch(a, b):
        return jax.lax.cond(a[0] > 0, jnp.sin, jnp.cos, b), b

    found = edges(Wrapped(branch), jnp.ones((1, 3)))
    assert found["c"] == {"a", "b"}
    assert found["d"] == {"b"}


def test_shape_alone_is_no_dependence():
    found = edges(Wrapped(lambda a, b: (jnp.zeros_like(a) + b, b)), jnp.ones((1, 3)))
    assert found["c"] == {"b"}


def test_printed():
    rows = str(pcx.graph(Skip(3, 4, 2), jnp.ones((1, 3)))).splitlines()
    assert [row.split()[:3] for row in rows] == [[f"vodes.{i}", "3" if i < 4 else "2", "squared_error"] for i in range(5)]
    assert [row.split("<- ")[1] for row in rows] == ["input", "vodes.0", "vodes.1", "vodes.1, vodes.2", "vodes.3"]


class FromInput(pcx.EnergyModule):
    """A node that reads another one and the input, one that reads only nodes, and a root."""

    def __init__(self):
        self.a, self.b, self.c, self.z = (pcx.Vode((3,)) for _ in range(4))

    def __call__(self, x):
        a, z = self.a(jnp.tanh(x)), self.z()
        return self.c(self.b(a + x) * z)


def test_the_input_beside_other_parents():
    graph = pcx.graph(FromInput(), jnp.ones((2, 3)))
    assert {name: set(its) for name, its in graph.parents.items()} == {"a": set(), "z": set(), "b": {"a"}, "c": {"z", "b"}}
    assert graph.readers == {"a", "b"}
    reads = {row.split()[0]: row.split("<- ")[1] for row in str(graph).splitlines()}
    assert reads == {"a": "input", "z": "nothing", "b": "a, input", "c": "z, b"}
    assert graph.sinks == ["c"]


def test_the_input_is_drawn_where_it_is_read():
    import matplotlib

    matplotlib.use("Agg")
    texts = pcx.draw(FromInput(), jnp.ones((2, 3))).texts
    b = next(text.get_position() for text in texts if text.get_text().startswith("b\n"))
    arrows = [text.xy for text in texts if text.get_text() == "x"]
    assert len(arrows) == 2  # to a and, from above, to b; the root z has none
    assert b[0] in [left for left, _ in arrows]
    assert "x" not in [text.get_text() for text in pcx.draw(Roots()).texts]


def test_a_root_without_prior_is_printed_without_energy():
    row = str(pcx.graph(Roots())).splitlines()[1]
    assert "squared_error" not in row


def test_node_that_is_never_called():
    class Spare(Chain):
        def __init__(self):
            super().__init__([2, 3])
            self.spare = pcx.Vode((3,))

    model, x = Spare(), jnp.ones((1, 2))
    assert list(pcx.graph(model, x).parents) == ["vodes.0"]
    with pytest.raises(pcx.ModelError, match=r"'spare' is given a value, but the model never calls it"):
        pcx.run(model, {"spare": jnp.ones((1, 3))}, x)


def test_no_private_api():
    """The package reads programs through jax's public names only."""
    folder = pathlib.Path(pcx.__file__).parent
    text = {path.name: path.read_text() for path in folder.rglob("*.py")}
    assert [name for name, source in text.items() if "jax._src" in source or "jax.interpreters" in source] == []


class Inside(pcx.EnergyModule):
    """A node called under a transform."""

    def __init__(self, transform):
        self.layer, self.hidden, self.last = linear(3, 3), pcx.Vode(), pcx.Vode()
        self.transform = transform

    def __call__(self, x):
        return self.last(self.transform(lambda h: self.hidden(self.layer(h)), x))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.checkpoint(f)(x),
        lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
        lambda f, x: jax.lax.cond(True, f, f, x),
        lambda f, x: jax.vmap(f)(x[None])[0],
    ],
    ids=["jit", "checkpoint", "scan", "cond", "vmap"],
)
def test_node_inside_a_transform_is_refused(transform):
    with pytest.raises(pcx.ModelError, match="'hidden' is called inside"):
        pcx.run(Inside(transform), {}, jnp.ones((2, 3)))


def test_node_called_twice_is_refused():
    class Again(pcx.EnergyModule):
        def __init__(self):
            self.node = pcx.Vode()

        def __call__(self, x):
            return self.node(self.node(x))

    with pytest.raises(pcx.ModelError, match="'node' is called twice"):
        pcx.graph(Again(), jnp.ones((1, 2)))


@pytest.mark.parametrize("part", ["layer", "array", "node"])
def test_one_object_at_two_paths_is_refused(part):
    model = Chain([3, 3, 3])
    if part == "layer":
        model.layers[1] = model.layers[0]
        paths = ("layers.0", "layers.1")
    elif part == "node":
        model.vodes[1] = model.vodes[0]
        paths = ("vodes.0", "vodes.1")
    else:
        model.layers[1] = eqx.tree_at(lambda layer: layer.weight, model.layers[1], model.layers[0].weight)
        paths = ("layers.0.weight", "layers.1.weight")
    for call in (lambda: pcx.graph(model, jnp.ones((1, 3))), lambda: pcx.run(model, {}, jnp.ones((1, 3)))):
        with pytest.raises(pcx.ModelError) as caught:
            call()
        assert all(path in str(caught.value) for path in paths)


def test_names_stay_in_call_order_through_jit():
    """Sorted by name, vodes.10 would come before vodes.2."""
    model, x = Chain([2] + [3] * 12), jnp.ones((2, 2))
    expected = [f"vodes.{i}" for i in range(12)]
    values = jax.jit(lambda x: pcx.run(model, {}, x).values)(x)
    assert list(values) == list(jax.jit(lambda v: pcx.energies(model, v, x))(values)) == expected
    assert list(jax.tree.map(jnp.sum, values)) == expected
    assert list(jax.jit(lambda v: v | {"vodes.3": 2 * v["vodes.3"]})(values)) == expected


def test_mapping_names_what_is_missing():
    nodes = pcx.Nodes({"vodes.0": 1, "vodes.1": 2, "other": 3})
    assert dict(nodes.only(["other", "vodes.0"])) == {"vodes.0": 1, "other": 3}
    assert list(nodes.only(["other", "vodes.0"])) == ["vodes.0", "other"]
    with pytest.raises(KeyError, match=r"vodes\.1"):
        nodes["vodes.11"]
