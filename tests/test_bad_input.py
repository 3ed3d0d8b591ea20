"""Bad input: one message that names the node or argument, what came and what to do; the model is left as it was."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Chain, batch, untyped
from snapshots import bits, snapshot, tracers

import pcx
import pcx.functional as pxf
import pcx.nn as pxnn
import pcx.predictive_coding as pxc
import pcx.utils as pxu

DIMS = (4, 5, 3)
AXES = pxu.Mask(pxc.VodeParam, [None, 0])
VALUES, WEIGHTS = pxu.Mask(pxc.VodeParam), pxu.Mask(pxc.LayerParam)
RULE = optax.sgd(0.1)


@contextmanager
def refuses(*words: str, models: Any = ()) -> Iterator[None]:
    """A `ModelError` whose message has all these words; the models hold the same arrays and flags as before."""
    before, arrays = snapshot(*models), bits(list(models))
    with pytest.raises(pcx.ModelError) as caught:
        yield
    message = str(caught.value)
    missing = [word for word in words if not re.search(word, message)]
    assert not missing, f"{missing} not in: {message}"
    assert snapshot(*models) == before
    assert bits(list(models)) == arrays
    assert not tracers(*models)


def infer(model: Any, x: Any, y: Any, **options: Any) -> Any:
    return pcx.infer(model, x, {"vodes.1": y}, **{"optimiser": RULE, "steps": 2, **options})


def train(model: Any, x: Any, y: Any, **options: Any) -> Any:
    settings = {"state_optimiser": RULE, "weight_optimiser": RULE, "weight_state": RULE.init(pcx.weights(model)), "steps": 2}
    return pcx.train_step(model, x, {"vodes.1": y}, **{**settings, **options})


def started(model: Any, x: Any) -> Any:
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        model(x)
    return model


def energy(x: Any, y: Any, *, model: Any) -> Any:
    model(x)
    model.vodes[-1].set("h", y)
    return model.energy()


def forward(x: Any, *, model: Any) -> Any:
    return model(x)


# A batch of the wrong shape


CORE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "run": lambda model, x, y: pcx.run(model, {}, x),
    "initialise": lambda model, x, y: pcx.initialise(model, x),
    "energies": lambda model, x, y: pcx.energies(model, {}, x),
    "graph": lambda model, x, y: pcx.graph(model, x),
    "infer": infer,
    "train_step": train,
    "jitted": lambda model, x, y: jax.jit(infer)(model, x, y),
}


@pytest.mark.parametrize("call", CORE)
def test_the_core_refuses_a_batch_of_the_wrong_shape(call):
    """What came, where it went wrong, and that a batch axis is expected."""
    model, (_, y) = Chain(DIMS), batch(4, 3)
    with refuses("Chain failed", "before its first node", r"shape \(6,\)", "batch axis", models=[model]):
        CORE[call](model, jnp.ones((7, 6)), y)


def test_the_core_refuses_one_sample_without_a_batch_axis():
    model = Chain(DIMS)
    with refuses("Chain failed", r"shape \(\)", "batch axis", models=[model]):
        pcx.run(model, {}, jnp.ones(4))
    with refuses("input 0", "is a number", "leading batch axis", models=[model]):
        pcx.run(model, {}, 3.0)


def test_the_core_refuses_batches_of_different_sizes():
    model, (x, y) = Chain(DIMS), batch(4, 3, 7)
    with refuses("batch sizes differ", "input 0: 7", r"node 'vodes\.1': 5", "same leading axis", models=[model]):
        infer(model, x, y[:5])
    with refuses("nothing is given", "pass batch=", models=[model]):
        pcx.run(model, {}, None)


def test_the_core_refuses_a_wrong_number_of_inputs():
    model, (x, _) = Chain(DIMS), batch(4, 3)
    with refuses("Chain failed", r"\(4,\), \(4,\)", models=[model]):
        pcx.run(model, {}, (x, x))


def test_the_core_refuses_a_value_of_the_wrong_shape():
    model, (x, _) = Chain(DIMS), batch(4, 3)
    with refuses(r"node 'vodes\.0'", r"\(5,\) per sample", r"\(6,\) per sample", models=[model]):
        pcx.run(model, {"vodes.0": jnp.ones((7, 6))}, x)
    with refuses(r"node 'vodes\.0'", r"\(5,\) per sample", r"\(6,\) per sample", models=[model]):
        pcx.run(model, {}, x, errors={"vodes.0": jnp.ones((7, 6))})


def test_the_core_refuses_a_prediction_that_does_not_fit_its_node():
    model, (x, _) = Chain(DIMS), batch(4, 3)
    model.vodes[0] = pcx.Vode((9,))
    with refuses(r"node 'vodes\.0' has shape \(9,\), but its prediction has shape \(5,\)", models=[model]):
        pcx.run(model, {}, x)


SURFACE: dict[str, Callable[[Any, Any], Any]] = {
    "eager": lambda model, x: model(x[0]),
    "jit": lambda model, x: pxf.jit(forward)(x[0], model=model),
    "vmap": lambda model, x: pxf.vmap(AXES)(forward)(x, model=model),
    "grad": lambda model, x: pxf.grad(WEIGHTS)(energy)(x[0], jnp.ones(3), model=model),
    "plain vmap": lambda model, x: jax.vmap(model)(x),
}


@pytest.mark.parametrize("call", SURFACE)
def test_the_surface_refuses_a_sample_of_the_wrong_shape(call):
    model = Chain(DIMS)
    with refuses("Chain", r"\(6,\)", "one sample", models=[model]):
        SURFACE[call](model, jnp.ones((7, 6)))


class Outer(pcx.EnergyModule):
    """A model inside a model: its nodes are named from the outside."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


def test_the_surface_refuses_a_prediction_that_does_not_fit_its_node():
    inner = Chain(DIMS)
    inner.vodes[0] = pcx.Vode((9,))
    model = Outer(inner)
    with refuses(r"node 'inner\.vodes\.0' has shape \(9,\), but its prediction has shape \(5,\)", models=[model]):
        model(jnp.ones(4))


class Direct(pcx.EnergyModule):
    """A node without a declared shape directly on the input."""

    def __init__(self):
        self.layer = pxnn.Linear(4, 3, key=jax.random.key(0))
        self.vodes = [pcx.Vode(), pcx.Vode()]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.vodes[1](self.layer(self.vodes[0](x)))


def test_a_refused_call_does_not_fix_the_shape_of_a_node():
    """After a sample of the wrong shape the right one must still fit, also where the shape is taken from the first call."""
    model, x = Direct(), jnp.ones(4)
    expected = model.layer(x)
    with pytest.raises((TypeError, ValueError)):
        model(jnp.ones(6))
    np.testing.assert_allclose(model(x), expected, rtol=1e-15)


# Unknown names


UNKNOWN: dict[str, Callable[[Any, Any, Any], Any]] = {
    "values": lambda model, x, y: pcx.run(model, {"vode.1": y}, x),
    "errors": lambda model, x, y: pcx.run(model, {}, x, errors={"vode.1": y}),
    "observed": lambda model, x, y: pcx.infer(model, x, {"vode.1": y}, optimiser=RULE, steps=1),
    "observed by a function": lambda model, x, y: pcx.infer(model, x, {"vode.1": lambda u: u}, optimiser=RULE, steps=1),
    "initialise": lambda model, x, y: pcx.initialise(model, x, {"vode.1": y}),
    "init": lambda model, x, y: pcx.initialise(model, x, init={"vode.1": "zeros"}),
    "start": lambda model, x, y: infer(model, x, y, values={"vode.1": y}),
    "energy": lambda model, x, y: infer(model, x, y, energy={"vode.1": pcx.squared_error}),
    "precision": lambda model, x, y: infer(model, x, y, precision={"vode.1": 2.0}),
    "delta": lambda model, x, y: pcx.weight_gradient(model, {"vode.1": y}, {}, x),
    "names": lambda model, x, y: pcx.weight_gradient(model, lambda u: u, {}, x, names=["vode.1"]),
    "train_step": lambda model, x, y: pcx.train_step(model, x, {"vode.1": y}, state_optimiser=RULE, weight_optimiser=RULE,
                                                     weight_state=RULE.init(pcx.weights(model)), steps=1),
}  # fmt: skip


@pytest.mark.parametrize("where", UNKNOWN)
def test_an_unknown_node_is_refused_with_near_names(where):
    model, (x, y) = Chain(DIMS), batch(4, 3)
    with refuses(r"no node 'vode\.1'", r"near: .*vodes\.1", models=[model]):
        UNKNOWN[where](model, x, y)


def test_an_optimiser_for_an_unknown_node_or_for_too_few_is_refused():
    model, (x, y) = Chain(DIMS), batch(4, 3)
    with refuses(r"vodes\.0", "optimiser", models=[model]):
        infer(model, x, y, optimiser={"vode.0": RULE})
    with refuses(r"'vode\.0'", r"near: .*vodes\.0", models=[model]):
        infer(model, x, y, optimiser={"vodes.0": RULE, "vode.0": RULE})


def test_a_result_asked_for_an_unknown_node_lists_near_names():
    model, (x, _) = Chain(DIMS), batch(4, 3)
    with pytest.raises(KeyError, match=r"no node 'vode\.1'; known: .*vodes\.1"):
        pcx.run(model, {}, x).values["vode.1"]


# Labels


@pytest.mark.parametrize("call", ["infer", "train_step", "initialise", "jitted"])
def test_the_core_refuses_a_label_of_the_wrong_size(call):
    model, (x, _) = Chain(DIMS), batch(4, 3)
    calls = {**CORE, "initialise": lambda model, x, y: pcx.initialise(model, x, {"vodes.1": y})}
    with refuses(r"node 'vodes\.1'", r"shape \(7, 3\)", r"given \(7, 4\)", r"\(7,\) integer labels", models=[model]):
        calls[call](model, x, jnp.ones((7, 4)))


@pytest.mark.parametrize(("labels", "found"), [([0, 1, 2, 3, 0, 0, 0], "0 to 3"), ([0, 1, 2, -1, 0, 0, 0], "-1 to 2")])
def test_the_core_refuses_a_label_that_is_no_class(labels, found):
    model, (x, _) = Chain(DIMS), batch(4, 3)
    with refuses(r"node 'vodes\.1' has 3 classes", found, "count from 0", models=[model]):
        infer(model, x, jnp.array(labels))


def test_the_surface_refuses_a_label_of_the_wrong_size():
    x = jnp.ones(4)
    model = started(Chain(DIMS), x)
    message = (r"node 'vodes\.1' has shape \(3,\)", r"new value has shape \(4,\)")
    with refuses(*message, models=[model]):
        model.vodes[-1].set("h", jnp.ones(4))
    for function in (pxf.jit(energy), pxf.grad(WEIGHTS)(energy), pxf.jit(pxf.grad(VALUES)(energy))):
        with refuses(*message, models=[model]):
            function(x, jnp.ones(4), model=model)
    new = Chain(DIMS)
    with refuses(*message, models=[new]):
        pxf.vmap(AXES)(energy)(jnp.ones((7, 4)), jnp.ones((7, 4)), model=new)


@pytest.mark.parametrize("label", [3, -1])
def test_the_surface_refuses_a_label_that_is_no_class(label):
    model = started(Chain(DIMS), jnp.ones(4))
    with refuses(r"node 'vodes\.1' has 3 classes", f"from {label} to {label}", "count from 0", models=[model]):
        model.vodes[-1].set("h", label)


# A vode called twice


class Twice(pcx.EnergyModule):
    def __init__(self):
        self.layers = [pxnn.Linear(3, 3, key=jax.random.key(i)) for i in range(2)]
        self.vodes = [pcx.Vode((3,))]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.vodes[0](self.layers[1](self.vodes[0](self.layers[0](x))))


def test_the_core_refuses_a_vode_that_is_called_twice():
    model = Twice()
    with refuses(r"node 'vodes\.0' is called twice", "one vode per call", models=[model]):
        pcx.run(model, {}, jnp.ones((2, 3)))


@pytest.mark.parametrize("status", [None, pxc.STATUS.INIT])
@pytest.mark.parametrize("call", ["eager", "jit", "vmap", "plain vmap"])
def test_the_surface_refuses_a_vode_that_is_called_twice(call, status):
    model, x = Twice(), jnp.ones((2, 3))
    with pxu.step(model, status), refuses(r"node 'vodes\.0' is called twice", "one vode per call", models=[model]):
        SURFACE[call](model, x)


def test_the_surface_allows_one_call_per_call_of_the_model():
    """Calling the model again without clearing caches is not calling a node twice."""
    model, x = Chain(DIMS), jnp.ones(4)
    np.testing.assert_array_equal(model(x), model(x))


# One object at two paths


class Shared(pcx.EnergyModule):
    def __init__(self, what: str):
        layer = pxnn.Linear(3, 3, key=jax.random.key(0))
        other = eqx.tree_at(lambda layer: layer.weight, pxnn.Linear(3, 3, key=jax.random.key(1)), layer.weight)
        vode = pcx.Vode((3,))
        self.layers = [layer, {"layer": layer, "array": other}.get(what, pxnn.Linear(3, 3, key=jax.random.key(2)))]
        self.vodes = [vode, vode if what == "vode" else pcx.Vode((3,))]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, vode in zip(self.layers, self.vodes, strict=True):
            x = vode(layer(x))
        return x


SHARED = {
    "layer": ("one Linear", r"layers\.0 and layers\.1"),
    "array": ("one ArrayImpl", r"layers\.0\.weight and layers\.1\.weight"),
    "vode": ("one Vode", r"vodes\.0 and vodes\.1"),
}


@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize("call", ["run", "graph", "infer", "train_step"])
def test_the_core_refuses_one_object_at_two_paths(call, what):
    model = Shared(what)
    with refuses(*SHARED[what], "one for each" if what == "vode" else "one attribute", models=[model]):
        CORE[call](model, jnp.ones((2, 3)), jnp.ones((2, 3)))


@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize("call", ["jit", "vmap", "grad"])
def test_the_surface_refuses_one_object_at_two_paths(call, what):
    """A transform takes the model apart and would silently make two of the one."""
    model = Shared(what)
    with refuses(*SHARED[what], "one for each" if what == "vode" else "one attribute", models=[model]):
        SURFACE[call](model, jnp.ones((2, 3)))


def test_the_surface_refuses_to_optimise_one_object_at_two_paths():
    model = Shared("layer")
    optim = pxu.Optim(RULE, WEIGHTS(model))
    with refuses(*SHARED["layer"], "one attribute", models=[model]):
        optim.step(model, jax.tree.map(jnp.ones_like, pcx.weights(model)))


# A vode inside a transform of the model


class Inside(pcx.EnergyModule):
    """Calls its node inside a scan (or another transform) of its own."""

    def __init__(self, how: str):
        self.layer = pxnn.Linear(3, 3, key=jax.random.key(0))
        self.vodes = [pcx.Vode((3,))]
        self.how = how

    def __call__(self, x: jax.Array) -> jax.Array:
        def body(x: jax.Array) -> jax.Array:
            return self.vodes[0](self.layer(x))

        if self.how == "scan":
            return jax.lax.scan(lambda x, _: (body(x), None), x, None, length=2)[0]
        if self.how == "cond":
            return jax.lax.cond(x[0] > 0, body, lambda x: x, x)
        return {"checkpoint": jax.checkpoint, "jit": jax.jit}[self.how](body)(x)


@pytest.mark.parametrize("how", ["scan", "cond", "checkpoint", "jit"])
def test_the_core_refuses_a_vode_inside_a_transform(how):
    model = Inside(how)
    with refuses(r"node 'vodes\.0' is called inside a scan, cond", "model's own __call__", models=[model]):
        pcx.run(model, {}, jnp.ones((2, 3)))


@pytest.mark.parametrize("status", [None, pxc.STATUS.INIT])
@pytest.mark.parametrize("call", ["eager", "jit", "vmap"])
def test_the_surface_refuses_a_vode_inside_a_scan(call, status):
    """It would get no value, or keep a traced one."""
    model = Inside("scan")
    with pxu.step(model, status), refuses(r"node 'vodes\.0' is called inside a scan", "own __call__", models=[model]):
        SURFACE[call](model, jnp.ones((2, 3)))


# A NaN learning rate


NAN: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(float("nan")),
    "array": lambda: optax.sgd(jnp.array(jnp.nan)),
    "numpy": lambda: optax.sgd(np.float64("nan")),
    "adam": lambda: optax.adam(float("nan")),
    "momentum": lambda: optax.sgd(0.1, momentum=float("nan")),
    "schedule": lambda: optax.sgd(optax.constant_schedule(float("nan"))),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=float("nan")),
}


@pytest.mark.parametrize("rule", NAN)
@pytest.mark.parametrize("options", [{}, {"shortcuts": pcx.NO_SHORTCUTS}, {"tolerance": 0.1}], ids=str)
def test_the_core_refuses_a_nan_rate_of_the_values(rule, options):
    model, (x, y) = Chain(DIMS), batch(4, 3)
    with refuses("state optimiser", "NaN", "learning rate", models=[model]):
        infer(model, x, y, optimiser=NAN[rule](), **options)


def test_the_core_refuses_a_nan_rate_of_one_node():
    model, (x, y) = Chain(DIMS), batch(4, 3)
    with refuses("NaN", "learning rate", models=[model]):
        infer(model, x, y, optimiser={"vodes.0": optax.sgd(float("nan"))})


@pytest.mark.parametrize("rule", NAN)
def test_the_core_refuses_a_nan_rate_of_the_weights(rule):
    model, (x, y) = Chain(DIMS), batch(4, 3)
    optimiser = NAN[rule]()
    with refuses("weight", "NaN", "learning rate", models=[model]):
        train(model, x, y, weight_optimiser=optimiser, weight_state=optimiser.init(pcx.weights(model)))


@pytest.mark.parametrize("rule", NAN)
@pytest.mark.parametrize("jitted", [False, True])
def test_the_surface_refuses_a_nan_rate(rule, jitted):
    model = started(Chain(DIMS), jnp.ones(4))
    optim = pxu.Optim(NAN[rule](), WEIGHTS(model))

    def step(*, model: Any, optim: Any) -> None:
        optim.step(model, jax.tree.map(jnp.ones_like, pcx.weights(model)))

    with refuses("NaN", "learning rate", models=[model]):
        (pxf.jit(step) if jitted else step)(model=model, optim=optim)
    assert optim.state is None


def test_a_good_rate_with_a_nan_gradient_is_not_blamed_on_the_rate():
    """NaN in data is no NaN learning rate: the update goes through, as in optax."""
    model = Chain(DIMS)
    optim = pxu.Optim(optax.sgd(0.1), WEIGHTS(model))
    optim.step(model, jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), pcx.weights(model)))
    assert np.isnan(model.layers[0].weight).all()


# A checkpoint of another model, a positional model


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    pxu.save_params(Chain((4, 6, 3)), tmp_path / "other")
    model = Chain(DIMS)
    words = ("other is not a checkpoint of this Chain", r"layers\.0\.weight is float64\[5, 4\] in the model",
             r"float64\[6, 4\] in the file")  # fmt: skip
    with refuses(*words, models=[model]):
        pxu.load_params(model, tmp_path / "other")


def test_a_positional_model_that_takes_new_values_is_refused():
    """The most likely mistake: a listing's body with the model as a positional argument."""
    model = Chain(DIMS)

    def start(model: Any, x: Any) -> Any:
        with pxu.step(model, pxc.STATUS.INIT):
            return model(x)

    words = ("positional argument 0", r"vodes\.0\.h", "changed in place", r"by keyword \(model=model\)")
    with refuses(*words, models=[model]):
        pxf.jit(start)(model, jnp.ones(4))


# Other arguments


def test_other_arguments_of_the_core_are_checked():
    model, (x, y) = Chain(DIMS), batch(4, 3)
    with refuses("steps is -1", "zero or more", models=[model]):
        infer(model, x, y, steps=-1)
    with refuses("steps is 3000000000", r"below 2\*\*31", models=[model]):
        infer(model, x, y, steps=3_000_000_000)
    for tolerance in (float("nan"), -1.0):
        with refuses(f"tolerance is {tolerance}", "zero or more", models=[model]):
            infer(model, x, y, tolerance=tolerance)
    for shape in ((7, 2), (7,)):
        with refuses("a mask of shape", "does not fit", models=[model]):
            pcx.infer(model, x, {"vodes.1": pcx.Observed(y, jnp.ones(shape, bool))}, optimiser=optax.sgd(0.1), steps=1)
    with refuses("unknown initialisation 'ones'", "'zeros'", models=[model]):
        infer(model, x, y, init="ones")
    with refuses("random start needs a key", "key=", models=[model]):
        infer(model, x, y, init=pcx.normal(1.0))
    with refuses(r"node 'vodes\.0' is given a value and an error", models=[model]):
        pcx.run(model, {"vodes.0": jnp.ones((7, 5))}, x, errors={"vodes.0": jnp.ones((7, 5))})
    with refuses(r"energy of node 'vodes\.0' has shape \(5,\)", "one number", models=[model]):
        pcx.energies(model, {}, x, energy={"vodes.0": lambda h, u: (h - u) ** 2})


def test_a_precision_of_the_wrong_shape_is_refused():
    model, (x, _) = Chain(DIMS), batch(4, 3)
    for shape in ((2,), (2, 5)):
        with refuses(r"precision of node 'vodes\.0' has shape \(2,", r"node has shape \(5,\)", models=[model]):
            pcx.energies(model, {}, x, precision={"vodes.0": jnp.ones(shape)})


OTHER = optax.adam(0.1)
STATES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "another optimiser's": lambda model: {"weight_optimiser": OTHER},
    "an unused one": lambda model: {"weight_state": OTHER.init(pcx.weights(model))},
    "none": lambda model: {"weight_optimiser": OTHER, "weight_state": None},
    "a wider model's": lambda model: {
        "weight_optimiser": OTHER,
        "weight_state": OTHER.init(pcx.weights(Chain((4, 6, 3)))),
    },
    "a deeper model's": lambda model: {
        "weight_optimiser": OTHER,
        "weight_state": OTHER.init(pcx.weights(Chain((4, 5, 5, 3)))),
    },
}


@pytest.mark.parametrize("whose", STATES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "jitted"])
def test_a_weight_state_that_is_not_that_of_optimiser_and_model_is_refused(whose, wrapped):
    model, (x, y) = Chain(DIMS), batch(4, 3)
    options = STATES[whose](model)
    with refuses("not that of this optimiser and model", r"optimiser\.init\(pcx\.weights\(model\)\)", models=[model]):
        (jax.jit(lambda x: train(model, x, y, **options)) if wrapped else lambda x: train(model, x, y, **options))(x)


class Bare(pcx.EnergyModule):
    """A model without nodes, or with one that it does not call."""

    def __init__(self, held: bool):
        self.layer = pxnn.Linear(4, 3)
        self.vodes = [pcx.Vode((3,))] * held

    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("held", [False, True])
def test_a_model_without_nodes_cannot_train(held):
    model, (x, _) = Bare(held), batch(4, 3)
    state = RULE.init(pcx.weights(model))
    with refuses("Bare calls no vode", r"pcx\.Vode", models=[model]):
        pcx.train_step(model, x, {}, state_optimiser=RULE, weight_optimiser=RULE, weight_state=state, steps=1)
    with refuses("Bare calls no vode", r"pcx\.Vode", models=[model]):
        pcx.infer(model, x, optimiser=RULE, steps=1)
    with refuses("Bare calls no vode", "draw", models=[model]):
        pcx.draw(model, x)


FACTORS: list[tuple[dict[str, Any], list[str]]] = [
    ({"energy": {"vodes.1": "se"}}, [r"energy of node 'vodes\.1' is 'se'", r"pcx\.squared_error"]),
    ({"energy": {"o": "se"}}, ["no node 'o'", "near: "]),
    ({"precision": {"vodes.1": -1.0}}, [r"precision of node 'vodes\.1' is -1", "at least zero"]),
    ({"precision": {"vodes.0": float("nan")}}, [r"precision of node 'vodes\.0' is nan", "finite"]),
    ({"precision": {"vodes.0": float("inf")}}, [r"precision of node 'vodes\.0' is inf", "finite"]),
    ({"precision": {"vodes.0": "high"}}, [r"precision of node 'vodes\.0' is high", "finite"]),
    ({"precision": {"vodes.0": [1.0, "low"]}}, [r"precision of node 'vodes\.0'", "finite"]),
    ({"precision": {"vodes.0": np.array([1, 1, -1, 1, 1])}}, [r"precision of node 'vodes\.0'", "at least zero"]),
    ({"precision": {"vodes.0": jnp.array([1, 1, jnp.nan, 1, 1])}}, [r"precision of node 'vodes\.0'", "finite"]),
]


@pytest.mark.parametrize(("options", "words"), FACTORS, ids=lambda part: str(part)[:40])
def test_energies_and_precisions_that_cannot_be_meant(options, words):
    model, (x, y) = Chain(DIMS), batch(4, 3)
    calls = [
        lambda: train(model, x, y, **options),
        lambda: infer(model, x, y, **options),
        lambda: jax.jit(lambda x: infer(model, x, y, **options))(x),
        lambda: pcx.energies(model, {}, x, **options),
    ]
    for call in calls:
        with untyped(), refuses(*words, models=(model,)):
            call()


def test_good_precisions_are_taken():
    model, (x, _) = Chain(DIMS), batch(4, 3)
    values = {"vodes.0": jnp.ones((7, 5))}
    plain = pcx.energies(model, values, x)["vodes.0"]
    for precision in (0, 2.0, np.float32(2), jnp.full(5, 2, jnp.bfloat16), lambda step: 2.0):
        found = pcx.energies(model, values, x, precision={"vodes.0": precision})["vodes.0"]
        np.testing.assert_allclose(found, (0 if isinstance(precision, int) else 2) * plain)
    traced = jax.jit(lambda p: pcx.energies(model, values, x, precision={"vodes.0": p})["vodes.0"])(2.0)
    np.testing.assert_allclose(traced, 2 * plain)


def test_a_vode_whose_energy_is_a_name_is_refused():
    model, (x, y) = Chain(DIMS), batch(4, 3)
    with untyped():
        model.vodes[0] = pcx.Vode((5,), "se")
        with refuses(r"energy of node 'vodes\.0' is 'se'", r"pcx\.squared_error", models=(model,)):
            infer(model, x, y)


def test_an_unknown_status_is_refused():
    model = Chain(DIMS)
    with refuses("no status 'innit'", "near: 'init'", models=[model]), pxu.step(model, "innit"):
        pass


def test_float_labels_are_refused_with_their_dtype():
    model, (x, _) = Chain(DIMS), batch(4, 3)
    with refuses(r"node 'vodes\.1'", r"\(7,\) integer labels", r"given \(7,\) float64", models=[model]):
        train(model, x, jnp.zeros(7))


def test_a_node_that_is_never_called_is_refused():
    model = Chain(DIMS)
    model.spare = pcx.Vode((2,))
    with refuses(r"node 'spare' is given a value, but the model never calls it", models=[model]):
        pcx.run(model, {"spare": jnp.ones((7, 2))}, jnp.ones((7, 4)))


def test_a_root_without_a_shape_is_refused():
    class Root(pcx.EnergyModule):
        def __init__(self):
            self.layer = pxnn.Linear(2, 3, key=jax.random.key(0))
            self.vodes = [pcx.Vode(), pcx.Vode()]

        def __call__(self) -> jax.Array:
            return self.vodes[1](self.layer(self.vodes[0]()))

    model = Root()
    with refuses(r"node 'vodes\.0' is called without a prediction", r"Vode\(shape\)", models=[model]):
        pcx.run(model, {}, batch=2)
    with refuses(r"node 'vodes\.0' is called without a prediction", r"Vode\(shape\)"):
        model()


class Loose(pcx.EnergyModule):
    """A vode made in the call: the model does not hold it."""

    def __init__(self):
        self.first, self.second, self.y = pxnn.Linear(4, 5), pxnn.Linear(5, 3), pcx.Vode((3,))

    def __call__(self, x):
        return self.y(self.second(pcx.Vode((5,))(self.first(x))))


def test_a_vode_that_is_no_attribute_is_refused():
    model, (x, y) = Loose(), batch(4, 3)
    with refuses("no part of the model", "__init__", models=[model]):
        pcx.run(model, {}, x)
    with refuses("no part of the model", models=[model]):
        pcx.infer(model, x, {"y": y}, optimiser=RULE, steps=1)
    with refuses("no part of the model", models=[model]):
        pcx.check_model(model, x)
    assert pcx.Vode((2,))(jnp.ones(2)).shape == (2,)  # outside a run, a node is its prediction


class Idle(pcx.EnergyModule):
    """A vode that is held, but never called."""

    def __init__(self):
        self.layer, self.y, self.unused = pxnn.Linear(4, 3), pcx.Vode((3,)), pcx.Vode((2,))

    def __call__(self, x):
        return self.y(self.layer(x))


def test_a_vode_that_is_never_called_takes_no_part():
    model, (x, y) = Idle(), batch(4, 3)
    found = pcx.infer(model, x, {"y": y}, optimiser=RULE, steps=2)
    assert list(found.values) == ["y"]
    np.testing.assert_array_equal(found.values["y"], y)


def test_an_empty_batch_cannot_train():
    model = Chain(DIMS)
    with refuses("no samples", models=[model]):
        train(model, jnp.zeros((0, 4)), jnp.zeros((0, 3)))


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"optimiser": None}, ["optimiser is None", r"optax\.sgd"]),
    ({"optimiser": 0.1}, [r"optimiser is 0\.1", r"optax\.sgd"]),
    ({"steps": 2.5}, [r"steps is 2\.5", "whole number"]),
    ({"steps": -1}, ["steps is -1", "zero or more"]),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=lambda part: str(part)[:30])
def test_settings_of_inference_that_cannot_be_meant(options, words):
    model, (x, y) = Chain(DIMS), batch(4, 3)
    with untyped(), refuses(*words, models=(model,)):
        infer(model, x, y, **options)


def test_a_bare_array_or_list_instead_of_names():
    model, (x, y) = Chain(DIMS), batch(4, 3)
    options = {"optimiser": RULE, "steps": 2}
    with untyped():
        for give in (lambda: pcx.infer(model, x, y, **options), lambda: pcx.infer(model, x, {}, values=y, **options),
                     lambda: pcx.energies(model, y, x), lambda: pcx.run(model, {}, x, errors=y)):  # fmt: skip
            with refuses("is of type ArrayImpl", "maps names of nodes", models=(model,)):
                give()
        for what in ("energy", "precision"):
            with refuses(f"{what} is of type list", "maps names of nodes", models=(model,)):
                pcx.infer(model, x, {}, **options, **{what: ["vodes.0"]})
        with refuses("input 0", "list", "leading batch axis", models=(model,)):
            pcx.run(model, {}, np.asarray(x).tolist())


def test_values_that_would_broadcast_are_no_errors():
    """Integer labels, or one column for all units, are refused where they would be taken as numbers."""
    model, (x, _) = Chain(DIMS), batch(4, 3)
    predictions = pcx.run(model, {}, x).predictions
    name = list(predictions)[-1]
    for value in (jnp.arange(len(x)) % 3, jnp.ones((len(x), 1))):
        with untyped(), refuses(repr(name), "one-hot", models=(model,)):
            pcx.deltas(model, {name: value}, predictions.only([name]))
