"""The imperative surface: transforms, masks, steps, optimisers, keys, flags, and the model as an ordinary pytree."""

import copy
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Chain, batch, largest_difference
from snapshots import bits, snapshot, tracers

import pcx
import pcx.functional as pxf
import pcx.nn as pxnn
import pcx.predictive_coding as pxc
import pcx.utils as pxu

DIMS = (4, 5, 3)
AXES = pxu.Mask(pxc.VodeParam, [None, 0])
VALUES, WEIGHTS = pxu.Mask(pxc.VodeParam), pxu.Mask(pxc.LayerParam)


def energy(x: Any, y: Any, *, model: Any) -> Any:
    """The energy of one sample with its label, written out: `Chain` does not take a label itself."""
    model(x)
    model.vodes[-1].set("h", y)
    return model.energy()


def sample() -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(3), (4,)), jnp.eye(3)[2]


def started(x: jax.Array, dims: Any = DIMS) -> Chain:
    """A chain whose nodes hold the values of a forward pass, apart from the middle one, which is moved away."""
    model = Chain(dims)
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        model(x)
    model.vodes[0].h = model.vodes[0].h + 0.3
    return model


def started_batch(x: jax.Array) -> Chain:
    model = Chain(DIMS)
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        pxf.vmap(AXES)(lambda x, *, model: model(x))(x, model=model)
    return model


def plain_energy(weights: Any, h: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The same for one hidden layer, in plain JAX."""
    (w0, b0), (w1, b1) = weights
    return 0.5 * jnp.sum((h - jnp.tanh(w0 @ x + b0)) ** 2) + 0.5 * jnp.sum((y - (w1 @ h + b1)) ** 2)


def parameters(model: Any) -> list[tuple[jax.Array, jax.Array]]:
    return [(layer.weight, layer.bias) for layer in model.layers]


# Gradients


def test_gradients_are_those_of_plain_jax():
    x, y = sample()
    model = started(x)
    weights, h = parameters(model), model.vodes[0].h
    value, slopes = jax.value_and_grad(plain_energy, (0, 1))(weights, h, x, y)
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        both_value, both = pxf.value_and_grad(pxu.Mask((pxc.LayerParam, pxc.VodeParam)))(energy)(x, y, model=model)
    np.testing.assert_allclose(both_value, value, rtol=1e-15)
    assert largest_difference(slopes[0], parameters(both["model"])) < 1e-15
    assert largest_difference(slopes[1], both["model"].vodes[0].h) < 1e-15
    np.testing.assert_array_equal(both["model"].vodes[1].h, jnp.zeros(3))


def test_gradient_without_value_and_with_an_auxiliary_output():
    x, y = sample()
    model = started(x)
    weights, h = parameters(model), model.vodes[0].h
    slopes = jax.grad(plain_energy)(weights, h, x, y)

    def with_aux(x: Any, y: Any, *, model: Any) -> Any:
        return energy(x, y, model=model), {"prediction": model.vodes[-1].get("u")}

    prediction = weights[1][0] @ h + weights[1][1]
    for jit in (lambda f: f, pxf.jit):
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            alone = jit(pxf.grad(WEIGHTS)(energy))(x, y, model=model)
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            (value, aux), both = jit(pxf.value_and_grad(WEIGHTS, has_aux=True)(with_aux))(x, y, model=model)
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            last, other = jit(pxf.grad(WEIGHTS, has_aux=True)(with_aux))(x, y, model=model)
        np.testing.assert_allclose(value, plain_energy(weights, h, x, y), rtol=1e-14)
        for gradient in (alone, both, last):
            assert largest_difference(slopes, parameters(gradient["model"])) < 1e-14
        for output in (aux, other):
            np.testing.assert_allclose(output["prediction"], prediction, rtol=1e-14)


def test_a_gradient_has_the_structure_of_its_model():
    x, y = sample()
    model = started(x)
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        gradient = pxf.grad(WEIGHTS)(energy)(x, y, model=model)["model"]
    assert type(gradient) is Chain
    assert jax.tree.structure(gradient) == jax.tree.structure(pcx.weights(model))
    assert [leaf.shape for leaf in jax.tree.leaves(gradient)] == [leaf.shape for leaf in jax.tree.leaves(pcx.weights(model))]


def test_gradients_of_several_tracked_objects():
    """Every keyword object has its own gradient; one without such parameters has an empty one."""
    x, _ = sample()
    models = {"first": Chain((4, 5)), "second": Chain((5, 3), seed=1)}

    def distance(x: Any, *, first: Any, second: Any) -> Any:
        return jnp.sum(second(first(x)) ** 2)

    gradient = pxf.grad(WEIGHTS)(distance)(x, **models)

    def plain(weights: Any) -> Any:
        (w0, b0), (w1, b1) = weights
        return jnp.sum((w1 @ (w0 @ x + b0) + b1) ** 2)

    expected = jax.grad(plain)([parameters(models["first"])[0], parameters(models["second"])[0]])
    assert largest_difference(expected[0], parameters(gradient["first"])) < 1e-14
    assert largest_difference(expected[1], parameters(gradient["second"])) < 1e-14


@pytest.mark.parametrize("jit", [lambda f: f, pxf.jit], ids=["eager", "jitted"])
def test_plain_optax_on_a_gradient(jit):
    """``optax`` and ``eqx.apply_updates`` take ``g["model"]`` as it is, in every mode of the model, and agree with `Optim`."""
    x, y = sample()
    model = started(x).train()
    other = jax.tree.map(lambda a: a, model)
    rule = optax.adam(0.1)
    optim, state = pxu.Optim(rule, WEIGHTS(other)), rule.init(pcx.weights(model))
    for _ in range(2):
        for item in (model, other):
            with pxu.step(item, clear_params=pxc.VodeParam.Cache):
                gradient = jit(pxf.grad(WEIGHTS)(energy))(x, y, model=item)["model"]
            if item is other:
                optim.step(other, gradient)
            else:
                updates, state = rule.update(gradient, state, pcx.weights(model))
                model = eqx.apply_updates(model, updates)
    assert largest_difference(parameters(model), parameters(other)) < 1e-15
    assert model.is_training


def test_plain_optax_inside_a_step():
    """Where `Optim.step` works, ``eqx.apply_updates`` does: before the caches are cleared."""
    x, y = sample()
    model = started(x)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, parameters(model),
                            jax.grad(plain_energy)(parameters(model), model.vodes[0].h, x, y))  # fmt: skip
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        gradient = pxf.grad(WEIGHTS)(energy)(x, y, model=model)["model"]
        updates, _ = optax.sgd(0.1).update(gradient, optax.sgd(0.1).init(pcx.weights(model)))
        new = eqx.apply_updates(model, updates)
    assert largest_difference(expected, parameters(new)) < 1e-15


def test_a_function_without_anything_to_differentiate_is_refused():
    x, y = sample()
    with pytest.raises(pcx.ModelError, match=r"there is no VodeParam to differentiate in model; .*STATUS\.INIT"):
        pxf.grad(VALUES)(energy)(x, y, model=Chain(DIMS))
    with pytest.raises(pcx.ModelError, match="the keyword arguments"):
        pxf.grad(VALUES)(energy)(x, y)


# Masks


def test_masks_choose_by_kind():
    x, y = sample()
    model = started(x)
    energy(x, y, model=model)
    model.norm = pxnn.BatchNorm(2)
    weights = {id(leaf) for pair in parameters(model) for leaf in pair} | {id(model.norm.weight), id(model.norm.bias)}
    values = {id(vode.h) for vode in model.vodes}
    caches = {id(vode.cache["u"]) for vode in model.vodes}
    states = {id(model.norm.running_mean), id(model.norm.running_variance)}

    def chosen(kind: Any) -> set[int]:
        return {id(leaf) for leaf in jax.tree.leaves(pxu.Mask(kind)(model).tree)}

    assert chosen(pxc.LayerParam) == weights
    assert chosen(pxc.VodeParam) == values
    assert chosen(pxc.VodeParam.Cache) == caches
    assert chosen(pxc.StateParam) == states
    assert chosen(pxc.LayerParam | pxc.VodeParam) == weights | values
    assert chosen((pxc.LayerParam, pxc.StateParam)) == weights | states
    assert chosen(lambda kind: kind is pxc.VodeParam.Cache) == caches
    assert {id(leaf) for leaf in jax.tree.leaves(model)} == weights | values | caches | states


def test_masks_give_values_by_kind():
    model = started(sample()[0])
    axes = pxu.Mask(pxc.VodeParam, [None, 0])(model)
    assert axes.layers[0].weight is None
    assert axes.vodes[0].h == 0
    numbers = pxu.Mask(pxc.LayerParam, [1, 2])(model)
    assert (numbers.layers[1].bias, numbers.vodes[1].h) == (2, 1)


def test_a_mask_has_two_values():
    with pytest.raises(pcx.ModelError, match=r"two values.*\[1, 2, 3\]"):
        pxu.Mask(pxc.LayerParam, [1, 2, 3])


def test_a_learned_mean_is_a_weight_and_a_fixed_one_is_not():
    for learn, kind in ((True, pxc.LayerParam), (False, pxc.StateParam)):
        vode = pxc.Vode((2,), mean=jnp.ones(2), learn_mean=learn)
        assert pxu.Mask(kind)(vode).tree.mean is vode.mean
        other = pxc.StateParam if learn else pxc.LayerParam
        assert pxu.Mask(other)(vode).tree.mean is None


# jit


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """A function that counts how often it is traced."""
    calls = [0]

    def count(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return function(*args, **kwargs)

    return count, calls


def test_jit_compiles_once_per_structure():
    """The same arrays' shapes: one trace. Another mode of the model: another one, and none when it comes back."""
    x, _ = sample()
    function, calls = counted(lambda x, *, model: model(x))
    call, model = pxf.jit(function), started(x)
    for _ in range(3):
        call(x + 1, model=model)
        pxu.clear(model, pxc.VodeParam.Cache)
    assert calls[0] == 1
    for mode in ("train", "eval", "train"):
        getattr(model, mode)()
        call(x, model=model)
        pxu.clear(model, pxc.VodeParam.Cache)
    assert calls[0] == 2
    call(x, model=jax.tree.map(lambda a: 2 * a, model))
    assert calls[0] == 2, "another model of the same structure is the same program"
    call(x, model=Chain(DIMS, activation=jax.nn.relu))
    assert calls[0] == 3, "another activation is another program"


def test_training_in_a_loop_compiles_at_most_twice():
    """The first step builds the optimiser's state, so it is a program of its own; after that there is only one more."""
    x, y = sample()

    def train(x: Any, y: Any, *, model: Any, optim: Any) -> None:
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            optim.step(model, pxf.grad(WEIGHTS)(energy)(x, y, model=model)["model"])

    function, calls = counted(train)
    model = started(x)
    optim, call = pxu.Optim(optax.adam(0.1), WEIGHTS(model)), pxf.jit(function)
    for _ in range(4):
        call(x, y, model=model, optim=optim)
    assert calls[0] == 2
    assert int(optim.state[0].count) == 4


def test_static_arguments_choose_the_program():
    model = Chain(DIMS)
    call = pxf.jit(lambda n, x, *, model: sum(model(x) for _ in range(n)), static_argnums=0)
    last = pxf.jit(lambda x, n, *, model: sum(model(x) for _ in range(n)), static_argnums=-1)
    x, _ = sample()
    output = pxf.jit(lambda x, *, model: model(x))(x, model=model)
    for n in (1, 3):
        np.testing.assert_allclose(call(n, x, model=Chain(DIMS)), n * output, rtol=1e-14)
        np.testing.assert_allclose(last(x, n, model=Chain(DIMS)), n * output, rtol=1e-14)


def test_jit_returns_whole_objects():
    """What a jitted function returns may be a model; it is usable outside."""
    x, _ = sample()
    model = Chain(DIMS)
    doubled, text = pxf.jit(lambda *, model: (jax.tree.map(lambda a: 2 * a, model), "text"))(model=model)
    assert text == "text"
    np.testing.assert_array_equal(doubled.layers[0].weight, 2 * model.layers[0].weight)
    pxf.jit(lambda x, *, model: model(x))(x, model=doubled)
    assert not tracers(doubled, model)


@pytest.mark.parametrize("transform", ["jax", "pcx"])
def test_a_jitted_update_scales_by_the_batch_of_its_gradient(transform):
    """Weight gradients have the same shapes with and without a batch, so a cached program must still tell them apart."""
    x, y = batch(4, 3, 6)
    mean = pxf.vmap(AXES, in_axes=(0, 0), out_axes=None, axis_name="batch")(
        lambda x, y, *, model: jax.lax.pmean(energy(x, y, model=model), "batch")
    )

    def change(gradient: Any, *, model: Any) -> Any:
        pxu.Optim(optax.sgd(1.0), WEIGHTS(model)).step(model, gradient, True)

    tracked = pxf.jit(change)

    @jax.jit
    def pure(gradient: Any, model: Any) -> Any:
        return pxu.Optim(optax.sgd(1.0)).step(model, gradient, True)

    one, many = started(x[0]), started_batch(x)
    with pxu.step(one, clear_params=pxc.VodeParam.Cache):
        single = pxf.grad(WEIGHTS)(energy)(x[0], y[0], model=one)["model"]
    with pxu.step(many, clear_params=pxc.VodeParam.Cache):
        averaged = pxf.grad(WEIGHTS)(mean)(x, y, model=many)["model"]
    for gradient, factor in ((single, 1), (averaged, 6), (single, 1)):
        gradient = jax.tree.map(lambda g: g, gradient)
        model = Chain(DIMS)
        expected = jax.tree.map(lambda w, g, f=factor: w - f * g, parameters(model), parameters(gradient))
        if transform == "pcx":
            tracked(gradient, model=model)
        else:
            model = pure(gradient, model)
        assert largest_difference(expected, parameters(model)) < 1e-14


# vmap


def test_vmap_gives_values_a_batch_axis_and_shares_weights():
    x, _ = batch(4, 3)
    model = started_batch(x)
    expected = pcx.run(model, {}, x)
    for name, vode in (("vodes.0", model.vodes[0]), ("vodes.1", model.vodes[1])):
        np.testing.assert_allclose(vode.h, expected.values[name], rtol=0, atol=1e-15)
    assert [layer.weight.shape for layer in model.layers] == [(5, 4), (3, 5)]


def test_vmap_over_other_axes_and_without_a_mask():
    x, _ = batch(4, 3)
    model = Chain(DIMS)
    expected = jax.vmap(model)(x)

    def forward(x: Any, scale: Any, *, model: Any) -> Any:
        return scale * model(x)

    output = pxf.vmap(AXES, in_axes=(1, None), out_axes=1)(forward)(x.T, 2.0, model=model)
    np.testing.assert_allclose(output, 2 * expected.T, rtol=1e-14)
    shared = pxf.vmap()(lambda x, *, model: model.layers[0](x))(x, model=model)
    np.testing.assert_allclose(shared, x @ model.layers[0].weight.T + model.layers[0].bias, rtol=1e-13)


def test_the_batch_size_may_change_between_calls():
    x, _ = batch(4, 3, 6)
    model = started_batch(x)
    forward = pxf.vmap(AXES)(lambda x, *, model: model(x))
    for size in (2, 5):
        with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            output = forward(x[:size], model=model)
        np.testing.assert_allclose(output, jax.vmap(model)(x[:size]), rtol=0, atol=1e-15)
        assert model.vodes[0].h.shape == (size, 5)


def test_values_of_another_batch_are_refused():
    """Without a new start, the old batch's values do not fit; the model stays usable."""
    x, y = batch(4, 3, 6)
    model = started_batch(x)
    before = snapshot(model)
    with pytest.raises(pcx.ModelError, match=r"different sizes \(2, 2, 6, 6\); initialise the model"):
        pxf.vmap(AXES)(energy)(x[:2], y[:2], model=model)
    assert snapshot(model) == before


def test_vmap_of_nothing_is_refused():
    with pytest.raises(pcx.ModelError, match="nothing is mapped"):
        pxf.vmap()(lambda *, model: jnp.zeros(()))(model=Chain(DIMS))


# Loops and branches


def settle_by_hand(model: Chain, x: jax.Array, y: jax.Array, steps: int) -> jax.Array:
    weights, h = parameters(model), model.vodes[0].h
    for _ in range(steps):
        h = h - 0.1 * jax.grad(plain_energy, 1)(weights, h, x, y)
    return h


def one_step(x: Any, y: Any, *, model: Any, optim: Any) -> Any:
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        value, gradient = pxf.value_and_grad(VALUES)(energy)(x, y, model=model)
        optim.step(model, gradient["model"])
    return value


@pytest.mark.parametrize("jit", [lambda f: f, pxf.jit], ids=["eager", "jitted"])
def test_scan(jit):
    x, y = sample()
    model = started(x)
    optim, expected = pxu.Optim(optax.sgd(0.1), VALUES(model)), settle_by_hand(model, x, y, 5)
    optim.init(model)

    def body(count: Any, offset: Any, *, model: Any, optim: Any) -> Any:
        return count + offset, one_step(x, y, model=model, optim=optim)

    call = jit(lambda xs, *, model, optim: pxf.scan(body)(jnp.zeros((), int), xs, model=model, optim=optim))
    count, values = call(jnp.arange(5), model=model, optim=optim)
    assert int(count) == 0 + 1 + 2 + 3 + 4
    assert values.shape == (5,)
    assert bool(jnp.all(jnp.diff(values) < 0)), "the energy falls"
    np.testing.assert_allclose(model.vodes[0].h, expected, rtol=0, atol=1e-14)
    assert not tracers(model, optim)


def test_scan_by_length_and_an_optimiser_with_state():
    x, y = sample()
    model = started(x)
    other = jax.tree.map(lambda a: a, model)
    optims = [pxu.Optim(optax.adam(0.05), VALUES(m)) for m in (model, other)]
    optims[0].init(model)
    pxf.scan(lambda carry, _, *, model, optim: (carry, one_step(x, y, model=model, optim=optim)), 4)(
        model=model, optim=optims[0]
    )
    for _ in range(4):
        one_step(x, y, model=other, optim=optims[1])
    assert largest_difference(model.vodes[0].h, other.vodes[0].h) < 1e-14
    assert int(optims[0].state[0].count) == 4


@pytest.mark.parametrize("jit", [lambda f: f, pxf.jit], ids=["eager", "jitted"])
def test_while_loop(jit):
    """Steps until the energy is small: the number of steps and the values are those of a Python loop."""
    x, y = sample()
    model = started(x)
    weights, h, steps = parameters(model), model.vodes[0].h, 0
    bound = 0.7 * float(plain_energy(weights, h, x, y))
    while float(plain_energy(weights, h, x, y)) > bound:
        h, steps = h - 0.1 * jax.grad(plain_energy, 1)(weights, h, x, y), steps + 1
    assert steps > 1
    optim = pxu.Optim(optax.sgd(0.1), VALUES(model))
    optim.init(model)
    model.vodes[1].h = y

    def going(count: Any, *, model: Any, optim: Any) -> Any:
        return energy(x, y, model=model) > bound

    def body(count: Any, *, model: Any, optim: Any) -> Any:
        one_step(x, y, model=model, optim=optim)
        return count + 1

    call = jit(lambda *, model, optim: pxf.while_loop(going, body)(jnp.zeros((), int), model=model, optim=optim))
    assert int(call(model=model, optim=optim)) == steps
    np.testing.assert_allclose(model.vodes[0].h, h, rtol=0, atol=1e-14)
    assert not tracers(model, optim)


@pytest.mark.parametrize("jit", [lambda f: f, pxf.jit], ids=["eager", "jitted"])
def test_cond(jit):
    x, _ = sample()

    def up(amount: Any, *, model: Any) -> Any:
        model.vodes[0].h = model.vodes[0].h + amount
        return amount

    def down(amount: Any, *, model: Any) -> Any:
        model.vodes[0].h = model.vodes[0].h - amount
        return -amount

    for predicate, sign in ((True, 1), (False, -1)):
        model = started(x)
        expected = model.vodes[0].h + 2.0 * sign
        result = jit(pxf.cond(up, down))(jnp.array(predicate), jnp.array(2.0), model=model)
        assert float(result) == 2.0 * sign
        np.testing.assert_array_equal(model.vodes[0].h, expected)


def test_loops_that_change_what_a_model_holds_are_refused():
    """A cache that is filled in the body and not cleared: refused with what to do, and the model is as it was."""
    x, y = sample()
    bodies = {
        "scanned function": lambda m: pxf.scan(lambda c, _, *, model: (c, energy(x, y, model=model)), 2)(model=m),
        "body of the loop": lambda m: pxf.while_loop(
            lambda c, *, model: c < 2, lambda c, *, model: (energy(x, y, model=model), c + 1)[1]
        )(0, model=m),
        "branch": lambda m: pxf.cond(lambda *, model: energy(x, y, model=model), lambda *, model: energy(x, y, model=model))(
            True, model=m
        ),
    }
    for what, call in bodies.items():
        model = started(x)
        before = snapshot(model)
        with pytest.raises(pcx.ModelError, match=f"the {what} changes which arrays.*clear_params"):
            call(model)
        assert snapshot(model) == before
        assert not tracers(model)


# Exceptions and positional models


def failing(x: Any, *, model: Any) -> Any:
    """Changes everything there is to change, then fails."""
    model.train()
    model.vodes[0].h = 2 * model.vodes[0].h
    model(x)
    model.layers[0] = jax.tree.map(lambda a: 2 * a, model.layers[0])
    raise RuntimeError("on purpose")


TRANSFORMS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "jit": pxf.jit,
    "grad": pxf.grad(WEIGHTS),
    "value_and_grad": pxf.value_and_grad(VALUES),
    "vmap": lambda f: lambda x, *, model: pxf.vmap(in_axes=0)(f)(x[None], model=model),
    "scan": lambda f: lambda x, *, model: pxf.scan(lambda c, _, *, model: (c, f(x, model=model)), 2)(model=model),
    "while_loop": lambda f: (
        lambda x, *, model: pxf.while_loop(lambda c, *, model: c < 2, lambda c, *, model: f(x, model=model))(0, model=model)
    ),
    "cond": lambda f: lambda x, *, model: pxf.cond(f, f)(True, x, model=model),
    "all": lambda f: pxf.jit(pxf.grad(WEIGHTS)(lambda x, *, model: pxf.vmap()(f)(x[None], model=model))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_exception_inside_a_transform_leaves_the_model_untouched(name):
    x, _ = sample()
    model = started(x)
    before, arrays = snapshot(model), bits(model)
    with pytest.raises(RuntimeError, match="on purpose"):
        TRANSFORMS[name](failing)(x, model=model)
    assert snapshot(model) == before
    assert bits(model) == arrays
    assert not model.is_training
    assert not tracers(model)


@pytest.mark.parametrize("name", ["jit", "grad"])
def test_success_after_an_exception(name):
    """The failed call leaves nothing behind in the transform either."""
    x, _ = sample()
    model, fail = started(x), [True]

    def sometimes(x: Any, *, model: Any) -> Any:
        if fail[0]:
            failing(x, model=model)
        return jnp.sum(model(x))

    call = TRANSFORMS[name](sometimes)
    with pytest.raises(RuntimeError):
        call(x, model=model)
    fail[0] = False
    call(x, model=model)
    assert not tracers(model)
    np.testing.assert_allclose(model.vodes[-1].get("u"), model.layers[1](model.vodes[0].h), rtol=1e-14)


def test_no_tracer_leaks_by_jax_own_check():
    x, y = sample()
    with jax.checking_leaks():
        model = started(x)
        optim = pxu.Optim(optax.sgd(0.1), VALUES(model))
        optim.init(model)
        pxf.jit(one_step)(x, y, model=model, optim=optim)
    assert not tracers(model, optim)


POSITIONAL: dict[str, Callable[[Any], None]] = {
    "weights": lambda model: model.layers.__setitem__(0, jax.tree.map(lambda a: 2 * a, model.layers[0])),
    "value": lambda model: model.vodes[0].set("h", jnp.ones(5)),
    "attribute": lambda model: setattr(model, "activation_scale", jnp.ones(())),
    "forgotten": lambda model: pxu.clear(model, pxc.VodeParam),
    "optimiser": lambda model: pxu.Optim(optax.sgd(0.1)).step(model, pcx.weights(model)),
    "mode": lambda model: model.train(),
}


@pytest.mark.parametrize("change", POSITIONAL)
@pytest.mark.parametrize("name", ["jit", "grad", "vmap", "scan", "cond"])
def test_a_positional_model_that_is_changed_in_place_is_refused(name, change):
    """One message that says how to pass it; the caller's model is as it was."""
    x, _ = sample()
    model, other = started(x), started(x)
    before = snapshot(model)

    def function(positional: Any, *, model: Any) -> Any:
        POSITIONAL[change](positional)
        return jnp.sum(model.layers[0].weight)

    calls = {
        "jit": lambda: pxf.jit(function)(model, model=other),
        "grad": lambda: pxf.grad(WEIGHTS)(function)(model, model=other),
        "vmap": lambda: pxf.vmap(in_axes=(None, 0))(lambda m, x, *, model: function(m, model=model))(model, x, model=other),
        "scan": lambda: pxf.scan(lambda m, _, *, model: (m, function(m, model=model)), 2)(model, model=other),
        "cond": lambda: pxf.cond(function, function)(True, model, model=other),
    }
    with pytest.raises(pcx.ModelError, match=r"positional argument 0 .*changed in place.*by keyword \(model=model\)"):
        calls[name]()
    assert snapshot(model) == before
    assert not tracers(model, other)


def test_a_positional_model_is_an_ordinary_pytree():
    """It can be called, differentiated by plain JAX, and returned as a new one."""
    x, _ = sample()
    model = started(x)
    before = snapshot(model)
    expected = parameters(model)[1][0] @ model.vodes[0].h + parameters(model)[1][1]
    np.testing.assert_allclose(pxf.jit(lambda model, x: model(x))(model, x), expected, rtol=1e-14)
    new = pxf.jit(lambda model, x: jax.tree.map(lambda a: a + 1, model))(model, x)
    np.testing.assert_array_equal(new.layers[0].bias, model.layers[0].bias + 1)
    slope = pxf.jit(lambda model, x: eqx.filter_grad(lambda m: jnp.sum(m(x)))(pcx.weights(model)))(model, x)
    np.testing.assert_allclose(slope.layers[1].bias, jnp.ones(3), rtol=1e-15)
    assert snapshot(model) == before
    assert not tracers(model)


# A model outside of any transform


@pytest.mark.parametrize("held", [False, True], ids=["new", "with values"])
@pytest.mark.parametrize("transform", ["vmap", "jit", "grad", "scan"])
def test_plain_jax_around_a_model_leaves_no_tracer(transform, held):
    x, _ = batch(4, 3)
    model = started(x[0]) if held else Chain(DIMS)
    arrays = bits(model)
    (w0, b0), (w1, b1) = parameters(model)
    expected = jnp.tanh(x @ w0.T + b0) @ w1.T + b1
    if transform == "vmap":
        np.testing.assert_allclose(jax.vmap(model)(x), expected, rtol=0, atol=1e-14)
    elif transform == "jit":
        np.testing.assert_allclose(jax.jit(model)(x[1]), expected[1], rtol=0, atol=1e-14)
    elif transform == "grad":
        slope = jax.grad(lambda x: jnp.sum(model(x)))(x[1])
        plain = jax.grad(lambda x: jnp.sum(w1 @ jnp.tanh(w0 @ x + b0)))(x[1])
        np.testing.assert_allclose(slope, plain, rtol=0, atol=1e-14)
    else:
        outputs = jax.lax.scan(lambda c, x: (c, model(x)), None, x)[1]
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-14)
    assert bits(model) == arrays
    assert not tracers(model)


class Latent(pcx.EnergyModule):
    """A root node beside the input: its prediction is a constant, also where the input is traced."""

    def __init__(self):
        self.layer = pxnn.Linear(2, 3, key=jax.random.key(0))
        self.vodes = [pcx.Vode((2,), mean=jnp.array([1.0, -1.0])), pcx.Vode((3,))]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.vodes[1](self.layer(self.vodes[0]()) + x)


def test_plain_jax_around_a_model_with_a_root_leaves_no_tracer():
    model = Latent()
    x = jnp.arange(6.0).reshape(2, 3)
    expected = model.layer(jnp.array([1.0, -1.0])) + x
    np.testing.assert_allclose(jax.vmap(model)(x), expected, rtol=1e-15)
    np.testing.assert_allclose(jax.jit(model)(x[0]), expected[0], rtol=1e-15)
    assert not tracers(model)


def test_plain_jax_around_a_model_in_a_status_leaves_no_tracer():
    x, _ = batch(4, 3)
    model = Chain(DIMS)
    with pxu.step(model, pxc.STATUS.INIT):
        output = jax.vmap(model)(x)
        assert not tracers(model)
    np.testing.assert_allclose(output, jax.vmap(model)(x), rtol=0, atol=1e-15)
    assert not tracers(model)


# step


def test_step_restores_and_clears():
    x, _ = sample()
    model = Chain(DIMS)
    with pxu.step(model, pxc.STATUS.INIT) as same:
        assert same is model
        model(x)
    assert model.vodes[0]._pcx_flags.status is None
    assert "u" in model.vodes[0].cache
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        pass
    assert jax.tree.leaves([vode.cache for vode in model.vodes]) == []
    assert model.vodes[0].h is not None
    with pxu.step(model, clear_params=pxc.VodeParam):
        pass
    assert [vode.h for vode in model.vodes] == [None, None]


def test_step_restores_after_an_exception():
    """The status, the old values, and empty caches: as if the block had not been entered."""
    x, _ = sample()
    model = started(x)
    before = snapshot(model)

    def fail() -> None:
        with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            model(x + 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert snapshot(model) == before


def test_nested_steps_restore_the_outer_status():
    model = Chain(DIMS)
    with pxu.step(model, pxc.STATUS.INIT):
        with pxu.step(model):
            assert {v._pcx_flags.status for v in model.vodes} == {None}
        assert {v._pcx_flags.status for v in model.vodes} == {"init"}
    assert {v._pcx_flags.status for v in model.vodes} == {None}


def test_a_start_forgets_the_old_values():
    """With INIT every node takes its own rule's value, whatever it held before."""
    model = Chain(DIMS)
    model.vodes[0].init = "zeros"
    x, _ = sample()
    model.vodes[0].h = jnp.full((5,), 7.0)
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        model(x)
    np.testing.assert_array_equal(model.vodes[0].h, jnp.zeros(5))
    np.testing.assert_array_equal(model.vodes[1].h, model.layers[1].bias)


# Vode.set


class Setting(pcx.EnergyModule):
    """Sets one of its nodes after all of them were called."""

    def __init__(self, index: int):
        self.layers = [pxnn.Linear(3, 3, key=jax.random.key(i)) for i in range(3)]
        self.vodes = [pcx.Vode((3,)) for _ in self.layers]
        self.index = index

    def __call__(self, x: jax.Array, y: jax.Array | None = None) -> jax.Array:
        h = self.vodes[0](self.layers[0](x))
        left, right = self.vodes[1](self.layers[1](h)), self.vodes[2](self.layers[2](h))
        if y is not None:
            self.vodes[self.index].set("h", y)
        return left + right


def test_setting_a_node_that_others_have_read_is_refused():
    x, y = jnp.ones(3), jnp.zeros(3)
    model = Setting(0)
    with pytest.raises(pcx.ModelError, match=r"node 'vodes\.0' cannot be set.*vodes\.1, vodes\.2 already read"):
        model(x, y)
    assert model.vodes[0].h is None
    with pytest.raises(pcx.ModelError, match=r"node 'vodes\.0' cannot be set"):
        pxf.jit(lambda x, y, *, model: model(x, y))(x, y, model=model)
    with pytest.raises(pcx.ModelError, match=r"node 'vodes\.0' cannot be set"):
        pcx.run(model, {}, (x[None], y[None]))


@pytest.mark.parametrize("index", [1, 2])
def test_setting_a_node_that_nobody_reads_is_allowed(index):
    """Also when it is not the one that was called last."""
    x, y = jnp.ones(3), jnp.zeros(3)
    model = Setting(index)
    model(x, y)
    np.testing.assert_array_equal(model.vodes[index].h, y)
    done = pcx.run(model, {}, (x[None], y[None]))
    np.testing.assert_array_equal(done.values[f"vodes.{index}"][0], y)


def test_setting_between_calls_is_allowed():
    """Outside the model's call a value may be replaced, as the code of the paper's experiments does, once caches are clear."""
    x, _ = sample()
    model = started(x)
    model.vodes[0].set("h", jnp.ones(5))
    model(x)
    np.testing.assert_allclose(model.vodes[1].get("u"), model.layers[1](jnp.ones(5)), rtol=1e-15)


def test_set_casts_and_checks():
    vode = pxc.Vode((3,))
    vode.set("h", 2)
    np.testing.assert_array_equal(vode.h, [0.0, 0.0, 1.0])
    assert vode.h.dtype == jnp.float64
    vode(jnp.zeros(3, jnp.float32))
    vode.set("h", jnp.array([1, 2, 3]))
    assert vode.h.dtype == jnp.float32
    np.testing.assert_array_equal(vode.h, [1.0, 2.0, 3.0])
    for name, value, what in (("h", jnp.ones(4), "new value"), ("u", jnp.ones((1, 3)), "prediction")):
        with pytest.raises(pcx.ModelError, match=rf"has shape \(3,\), but its {what} has shape"):
            vode.set(name, value)
    with pytest.raises(pcx.ModelError, match=r"has no 'k'; it has 'h' and 'u'"):
        vode.set("k", jnp.ones(3))
    with pytest.raises(pcx.ModelError, match=r"has no 'k'; it has 'h' and 'u'"):
        vode.get("k")
    np.testing.assert_array_equal(vode.h, [1.0, 2.0, 3.0])


def test_the_energy_of_a_node():
    """Squared error, cross-entropy, a root with a mean and one without."""
    logits = jnp.array([0.1, 0.2, -0.4])
    vode = pxc.Vode((3,), pxc.energies.cross_entropy)
    vode(logits)
    vode.set("h", 1)
    np.testing.assert_allclose(vode.energy(), -jax.nn.log_softmax(logits)[1], rtol=1e-15)
    root = pxc.Vode((2,), mean=jnp.array([1.0, 2.0]))
    root()
    root.h = jnp.zeros(2)
    np.testing.assert_allclose(root.energy(), 0.5 * 5.0, rtol=1e-15)
    free = pxc.Vode((2,))
    free()
    free.h = jnp.ones(2)
    assert float(free.energy()) == 0.0
    with pytest.raises(pcx.ModelError, match="has no prediction; call the model"):
        pxc.Vode((2,)).energy()


# Optim


def test_optim_follows_optax():
    x, y = sample()
    model = started(x)
    rule = optax.adamw(0.05, weight_decay=0.1)
    optim = pxu.Optim(rule, WEIGHTS(model))
    weights, h = parameters(model), model.vodes[0].h
    state = rule.init(weights)
    for _ in range(3):
        updates, state = rule.update(jax.grad(plain_energy)(weights, h, x, y), state, weights)
        weights = optax.apply_updates(weights, updates)
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            optim.step(model, pxf.grad(WEIGHTS)(energy)(x, y, model=model)["model"])
    assert largest_difference(weights, parameters(model)) < 1e-14


def test_optim_moves_what_it_was_told():
    """By a mask, by a tree with None elsewhere, or by default the weights."""
    x, y = sample()
    chosen = {
        "mask": lambda m: WEIGHTS(m),
        "tree": lambda m: pcx.weights(m),
        "one array": lambda m: eqx.tree_at(lambda m: m.layers[0].weight, jax.tree.map(lambda _: None, m), 1.0,
                                           is_leaf=lambda leaf: leaf is None),
        "default": lambda m: None,
    }  # fmt: skip
    for name, choose in chosen.items():
        model = started(x)
        before = jax.tree.map(lambda a: a, model)
        optim = pxu.Optim(optax.sgd(1.0), choose(model))
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            gradient = pxf.grad(pxu.Mask((pxc.LayerParam, pxc.VodeParam)))(energy)(x, y, model=model)["model"]
            assert optim.step(model, gradient) is model
        pairs = zip(jax.tree.leaves(pcx.weights(model)), jax.tree.leaves(pcx.weights(before)), strict=True)
        assert [not np.array_equal(a, b) for a, b in pairs] == [True, *[name != "one array"] * 3], name
        np.testing.assert_array_equal(model.vodes[0].h, before.vodes[0].h)


def test_optim_keeps_objects():
    """The model and its nodes stay the same objects, so references to them stay valid."""
    x, y = sample()
    model = started(x)
    vode, layers = model.vodes[0], model.layers
    optim = pxu.Optim(optax.sgd(0.1), VALUES(model))
    pxf.jit(one_step)(x, y, model=model, optim=optim)
    assert model.vodes[0] is vode
    assert model.layers is layers


def test_optim_with_a_plain_equinox_model():
    """An Equinox model cannot be changed in place: `step` returns the new one, equal to plain optax."""
    mlp = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    x, rule = jnp.arange(3.0), optax.adam(0.1)
    optim, state = pxu.Optim(rule, eqx.filter(mlp, eqx.is_inexact_array)), rule.init(eqx.filter(mlp, eqx.is_inexact_array))
    mine = plain = mlp
    for _ in range(2):
        mine = optim.step(mine, eqx.filter_grad(lambda m: jnp.sum(m(x) ** 2))(mine))
        updates, state = rule.update(eqx.filter_grad(lambda m: jnp.sum(m(x) ** 2))(plain), state)
        plain = eqx.apply_updates(plain, updates)
    assert largest_difference(eqx.filter(mine, eqx.is_array), eqx.filter(plain, eqx.is_array)) < 1e-15
    assert mine is not mlp


def test_a_plain_equinox_model_by_keyword():
    """Gradients of a tracked Equinox model are those of Equinox, jitted and not."""
    mlp, x = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), jnp.arange(3.0)
    loss = lambda x, *, model: jnp.sum(model(x) ** 2)  # noqa: E731
    expected = eqx.filter_grad(lambda m: jnp.sum(m(x) ** 2))(mlp)
    for call in (pxf.grad(WEIGHTS)(loss), pxf.jit(pxf.grad(WEIGHTS)(loss))):
        gradient = call(x, model=mlp)["model"]
        assert largest_difference(eqx.filter(expected, eqx.is_array), eqx.filter(gradient, eqx.is_array)) < 1e-15


def test_optim_before_the_values_exist_is_refused():
    model = Chain(DIMS)
    with pytest.raises(pcx.ModelError, match="no VodeParam to optimise; for nodes, initialise"):
        pxu.Optim(optax.sgd(0.1), VALUES(model)).init(model)


def test_optim_with_the_gradient_of_something_else_is_refused():
    x, y = sample()
    model = started(x)
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        gradient = pxf.grad(WEIGHTS)(energy)(x, y, model=model)["model"]
    before = snapshot(model)
    optim = pxu.Optim(optax.sgd(0.1), VALUES(model))
    with pytest.raises(pcx.ModelError, match=r"no gradient for vodes\.0\.h; compute it with the mask"):
        optim.step(model, gradient)
    assert snapshot(model) == before
    assert optim.state is None


def test_optimiser_state_of_another_batch_is_refused():
    x, y = batch(4, 3, 6)
    model = started_batch(x)
    mean = pxf.vmap(AXES, in_axes=(0, 0), out_axes=None, axis_name="batch")(
        lambda x, y, *, model: jax.lax.pmean(energy(x, y, model=model), "batch")
    )
    optim = pxu.Optim(optax.adam(0.1), VALUES(model))
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        optim.step(model, pxf.grad(VALUES)(mean)(x, y, model=model)["model"], True)
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        pxf.vmap(AXES)(lambda x, *, model: model(x))(x[:2], model=model)
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        gradient = pxf.grad(VALUES)(mean)(x[:2], y[:2], model=model)["model"]
    before = snapshot(model, optim)
    with pytest.raises(pcx.ModelError, match=r"after another batch size or model call optim\.clear\(\)"):
        optim.step(model, gradient, True)
    assert snapshot(model, optim) == before
    optim.clear()
    h = model.vodes[0].h
    optim.step(model, gradient, True)
    np.testing.assert_allclose(jnp.abs(model.vodes[0].h - h), 0.1, rtol=1e-5)  # the first step of Adam is its rate


# Keys


def test_seeds_and_key_blocks():
    pxnn.seed(3)
    first = [pxnn.Linear(2, 2), pxnn.Linear(2, 2)]
    assert bits(first[0]) != bits(first[1])
    pxnn.seed(3)
    again = [pxnn.Linear(2, 2)]
    with pxnn.keys(jax.random.key(9)):
        inside = pxnn.Linear(2, 2)
        with pxnn.keys(jax.random.key(9)):
            nested = pxnn.Linear(2, 2)
        after = pxnn.Linear(2, 2)
    again.append(pxnn.Linear(2, 2))
    assert bits(again) == bits(first), "a block does not advance the stream around it"
    assert bits(inside) == bits(nested)
    assert bits(after) != bits(inside)
    assert bits(pxnn.Linear(2, 2, key=jax.random.key(4))) == bits(eqx.nn.Linear(2, 2, key=jax.random.key(4)))


def test_a_key_block_ends_with_an_exception():
    pxnn.seed(3)
    expected = bits(pxnn.Linear(2, 2))
    pxnn.seed(3)
    with pytest.raises(KeyError), pxnn.keys(jax.random.key(9)):
        raise KeyError
    assert bits(pxnn.Linear(2, 2)) == expected


def test_models_built_under_vmap():
    """An ensemble built from a batch of keys is the stack of models built one by one, and works in `jax.vmap`."""

    def build(key: jax.Array) -> Chain:
        with pxnn.keys(key):
            layers = [pxnn.Linear(4, 5), pxnn.Linear(5, 3)]
        model = Chain(DIMS)
        model.layers = layers
        return model

    keys = jax.random.split(jax.random.key(0), 3)
    ensemble = jax.vmap(build)(keys)
    singles = [build(key) for key in keys]
    for i, single in enumerate(singles):
        assert largest_difference(jax.tree.map(lambda a, i=i: a[i], pcx.weights(ensemble)), pcx.weights(single)) == 0
    x, _ = sample()
    outputs = jax.vmap(lambda model, x: model(x), in_axes=(0, None))(ensemble, x)
    np.testing.assert_allclose(outputs, jnp.stack([single(x) for single in singles]), rtol=1e-13)
    built = jax.jit(build)(keys[0])
    assert largest_difference(pcx.weights(built), pcx.weights(singles[0])) < 1e-16
    assert not tracers(ensemble, built)


@pytest.mark.parametrize("where", ["jit", "scan", "layers"])
def test_the_default_stream_is_not_left_traced(where):
    """A random start inside a compiled function works or is refused; the stream stays usable after it."""
    pxnn.seed(0)
    x, _ = sample()
    model = Chain(DIMS)
    model.vodes[0].init = pcx.normal(1.0)

    def start(x: Any, *, model: Any) -> Any:
        with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            return model(x)

    try:
        if where == "jit":
            pxf.jit(start)(x, model=model)
        elif where == "scan":
            start(x, model=model)
            pxf.scan(lambda c, _, *, model: (c, start(x, model=model)), 2)(model=model)
        else:
            jax.jit(lambda: pxnn.Linear(2, 2).weight)()
    except pcx.ModelError:
        pass
    assert pxnn.Linear(2, 2).weight.shape == (2, 2)
    pxnn.seed(0)


def test_random_starts_of_a_batch_differ_with_a_key_per_sample():
    model = Chain(DIMS)
    model.vodes[0].init = pcx.normal(1.0)
    x = jnp.ones((3, 4))

    def start(x: Any, key: Any, *, model: Any) -> Any:
        with pxnn.keys(key):
            return model(x)

    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        pxf.vmap(AXES)(start)(x, jax.random.split(jax.random.key(0), 3), model=model)
    h = model.vodes[0].h
    assert h.shape == (3, 5)
    assert float(jnp.min(jnp.abs(h[0] - h[1]))) > 0


# Flags


class Noisy(pcx.EnergyModule):
    """Dropout of this package and, on request, of Equinox, both with one key: what is kept is doubled by each."""

    def __init__(self, theirs: bool = True):
        self.mine = pxnn.Dropout(0.5)
        self.theirs = eqx.nn.Dropout(0.5) if theirs else None
        self.layer = pxnn.Linear(9, 9, key=jax.random.key(0))
        self.vode = pcx.Vode((9,))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.mine(self.layer(x), key=jax.random.key(0))
        return self.vode(x if self.theirs is None else self.theirs(x, key=jax.random.key(0)))


def test_train_and_eval_switch_all_layers():
    model, x = Noisy(), jnp.ones(9)
    plain, kept = model.layer(x), jax.random.bernoulli(jax.random.key(0), 0.5, (9,))
    assert not model.is_training
    assert model.train() is model
    assert model.is_training
    assert not model.theirs.inference
    np.testing.assert_allclose(model(x), jnp.where(kept, 4 * plain, 0), rtol=1e-14)
    assert model.eval() is model
    assert model.theirs.inference
    np.testing.assert_allclose(model(x), plain, rtol=1e-14)


def by_keyword(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda model, x: function(x, model=model)


CACHED: dict[str, Callable[[], Callable[[Any, Any], Any]]] = {
    "jax.jit": lambda: jax.jit(lambda model, x: model(x)),
    "filter_jit": lambda: eqx.filter_jit(lambda model, x: model(x)),
    "pxf.jit positional": lambda: pxf.jit(lambda model, x: model(x)),
    "pxf.jit": lambda: by_keyword(pxf.jit(lambda x, *, model: model(x))),
    "core": lambda: eqx.filter_jit(lambda model, x: pcx.run(model, {}, x[None], training=model.is_training).output[0]),
}


@pytest.mark.parametrize(
    ("form", "theirs"),
    [(form, theirs) for form in CACHED for theirs in (False, True) if not theirs or form in ("filter_jit", "pxf.jit", "core")],
)
def test_a_cached_program_is_not_used_in_the_wrong_mode(form, theirs):
    """``train()`` and ``eval()`` are part of a model's identity: the program of the other mode is not run."""
    model, x, call = Noisy(theirs), jnp.ones(9), CACHED[form]()
    plain, kept = model.layer(x), jax.random.bernoulli(jax.random.key(0), 0.5, (9,))
    for _ in range(2):
        np.testing.assert_allclose(call(model.train(), x), jnp.where(kept, (4 if theirs else 2) * plain, 0), rtol=1e-14)
        np.testing.assert_allclose(call(model.eval(), x), plain, rtol=1e-14)


def test_a_program_cached_for_a_changed_model_is_not_used_in_the_wrong_mode():
    """After a plain optax update the model still knows its mode."""
    x = jnp.ones(9)
    model = Noisy(theirs=False).train()
    gradient = pxf.grad(WEIGHTS)(lambda x, *, model: jnp.sum(model.layer(x)))(x, model=model)["model"]
    call = eqx.filter_jit(lambda model, x: model(x))
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, (9,))
    model = eqx.apply_updates(model, gradient)
    np.testing.assert_allclose(call(model, x), jnp.where(kept, 2 * model.layer(x), 0), rtol=1e-14)
    np.testing.assert_allclose(call(model.eval(), x), model.layer(x), rtol=1e-14)


# The model as a pytree


def test_a_model_is_an_ordinary_pytree():
    model = started(sample()[0])
    leaves, structure = jax.tree.flatten(model)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is Chain
    assert jax.tree.structure(again) == structure
    assert [id(leaf) for leaf in jax.tree.leaves(again)] == [id(leaf) for leaf in leaves]
    assert again.vodes[0] is not model.vodes[0]
    again.vodes[0].h = jnp.zeros(5)
    again.layers[0] = pxnn.Linear(4, 5, key=jax.random.key(8))
    assert [id(leaf) for leaf in jax.tree.leaves(model)] == [id(leaf) for leaf in leaves], "the copy is independent"
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    assert paths == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "vodes.0.h", "vodes.1.h"]


def test_tree_map_over_two_models():
    one, two = Chain(DIMS, seed=0), Chain(DIMS, seed=1)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, one, two)
    np.testing.assert_array_equal(mean.layers[0].weight, (one.layers[0].weight + two.layers[0].weight) / 2)


def test_tree_at():
    x, _ = sample()
    model = started(x)
    before = snapshot(model)
    new = eqx.tree_at(lambda m: m.layers[0].weight, model, jnp.zeros((5, 4)))
    np.testing.assert_array_equal(new.layers[0].weight, jnp.zeros((5, 4)))
    assert new.layers[1].weight is model.layers[1].weight
    assert snapshot(model) == before
    fresh = eqx.tree_at(lambda m: m.vodes[0].h, Chain(DIMS), jnp.ones(5), is_leaf=lambda leaf: leaf is None)
    np.testing.assert_allclose(fresh(x), fresh.layers[1](jnp.ones(5)), rtol=1e-15)


def test_filter_jit_takes_and_returns_models():
    x, _ = sample()
    model = started(x)
    before = snapshot(model)
    new = eqx.filter_jit(lambda m: jax.tree.map(lambda a: 3 * a, m))(model)
    np.testing.assert_array_equal(new.layers[1].bias, 3 * model.layers[1].bias)
    value, slope = eqx.filter_value_and_grad(lambda m, x: jnp.sum(m(x)))(model, x)
    np.testing.assert_allclose(value, jnp.sum(model.layers[1](model.vodes[0].h)), rtol=1e-14)
    np.testing.assert_allclose(slope.vodes[0].h, jnp.sum(model.layers[1].weight, axis=0), rtol=1e-14)
    assert snapshot(model)[0] == before[0]
    assert not tracers(model, new, slope)


def test_partition_and_combine_and_deepcopy():
    model = started(sample()[0])
    arrays, rest = eqx.partition(model, eqx.is_array)
    assert bits(eqx.combine(arrays, rest)) == bits(model)
    other = copy.deepcopy(model)
    assert bits(other) == bits(model)
    other.vodes[0].h = None
    assert model.vodes[0].h is not None


def test_the_core_never_looks_at_the_memory_of_a_model():
    x, y = batch(4, 3)
    clean, used = Chain(DIMS), started(x[0])
    used(x[0])
    rule = optax.sgd(0.1)
    results = [
        pcx.infer(model, x, {"vodes.1": y}, optimiser=rule, steps=3, shortcuts=pcx.NO_SHORTCUTS) for model in (clean, used)
    ]
    assert bits(results[0].values) == bits(results[1].values)


# Plain Equinox models with nodes


class Plain(eqx.Module):
    """The chain as an Equinox module: only its nodes are of this package."""

    layers: list[Any]
    vodes: list[Any]

    def __init__(self, like: Chain):
        self.layers = list(like.layers)
        self.vodes = [pcx.Vode() for _ in like.layers]

    def __call__(self, x: jax.Array) -> jax.Array:
        for i, (layer, vode) in enumerate(zip(self.layers, self.vodes, strict=True)):
            u = layer(x)
            x = vode(u if i == len(self.layers) - 1 else jnp.tanh(u))
        return u


def test_the_core_takes_an_equinox_model():
    x, y = batch(4, 3)
    chain = Chain(DIMS)
    plain, rule = Plain(chain), optax.adam(0.05)
    trained = [
        pcx.train_step(model, x, {"vodes.1": y}, state_optimiser=optax.sgd(0.1), weight_optimiser=rule,
                       weight_state=rule.init(pcx.weights(model)), steps=4) for model in (chain, plain)
    ]  # fmt: skip
    assert isinstance(trained[1].model, Plain)
    assert largest_difference(trained[0].inferred.values, trained[1].inferred.values) == 0
    assert largest_difference(parameters(trained[0].model), parameters(trained[1].model)) == 0
    assert list(pcx.graph(plain, x).parents) == ["vodes.0", "vodes.1"]
    jitted = eqx.filter_jit(lambda m, x: pcx.run(m, {}, x).output)(plain, x)
    np.testing.assert_allclose(jitted, jax.vmap(chain)(x), rtol=0, atol=1e-14)


def test_the_surface_with_an_equinox_model_that_holds_nodes():
    """Values that a transform gave to the nodes of an Equinox model are kept, or refused with a message; never lost."""
    x, _ = sample()
    chain = Chain(DIMS)
    plain = Plain(chain)

    def start(x: Any, *, model: Any) -> None:
        with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            model(x)

    try:
        pxf.jit(start)(x, model=plain)
    except pcx.ModelError:
        return
    np.testing.assert_allclose(plain.vodes[0].h, jnp.tanh(chain.layers[0](x)), rtol=1e-14)


class Block(eqx.Module):
    """An Equinox block with a layer and a node, inside a model of this package."""

    layer: Any
    vode: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.vode(jnp.tanh(self.layer(x)))


class Blocks(pcx.EnergyModule):
    def __init__(self):
        self.blocks = [Block(pxnn.Linear(3, 3, key=jax.random.key(i)), pcx.Vode((3,))) for i in range(2)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def test_nodes_inside_equinox_blocks_are_tracked():
    model, x = Blocks(), jnp.ones(3)

    def start(x: Any, *, model: Any) -> None:
        with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            model(x)

    pxf.jit(start)(x, model=model)
    first = jnp.tanh(model.blocks[0].layer(x))
    np.testing.assert_allclose(model.blocks[0].vode.h, first, rtol=1e-14)
    np.testing.assert_allclose(model.blocks[1].vode.h, jnp.tanh(model.blocks[1].layer(first)), rtol=1e-14)
    optim = pxu.Optim(optax.sgd(1.0), WEIGHTS(model))
    weight = model.blocks[0].layer.weight
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        gradient = pxf.grad(WEIGHTS)(lambda x, *, model: jnp.sum(model(x)))(x, model=model)["model"]
        optim.step(model, gradient)
    np.testing.assert_allclose(model.blocks[0].layer.weight, weight - gradient.blocks[0].layer.weight, rtol=1e-15)


# Layers with statistics and random layers in the surface


class Normalised(pcx.EnergyModule):
    def __init__(self, statistics: str = "forward"):
        self.layers = [pxnn.Linear(4, 5, key=jax.random.key(0)), pxnn.Linear(5, 3, key=jax.random.key(1))]
        self.norm = pxnn.BatchNorm(5, statistics=statistics)
        self.vodes = [pcx.Vode((5,)), pcx.Vode((3,))]

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.vodes[0](jnp.tanh(self.norm(self.layers[0](x))))
        return self.vodes[1](self.layers[1](x))


def train_surface(model: Any, x: Any, y: Any, steps: int, *, optim_h: Any, optim_w: Any) -> None:
    """The second listing over a batch."""
    mean = pxf.vmap(AXES, in_axes=(0, 0), out_axes=None, axis_name="batch")(
        lambda x, y, *, model: jax.lax.pmean(energy(x, y, model=model), "batch")
    )
    model.train()
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        pxf.vmap(AXES, in_axes=(0,), axis_name="batch")(lambda x, *, model: model(x))(x, model=model)
    for _ in range(steps):
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            optim_h.step(model, pxf.grad(VALUES)(mean)(x, y, model=model)["model"], True)
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        optim_w.step(model, pxf.grad(WEIGHTS)(mean)(x, y, model=model)["model"])


def surface_and_core(steps: int, weight_rule: Any) -> tuple[Any, Any, jax.Array, jax.Array]:
    """One training step of the same model with batch statistics, in the surface and in the core."""
    x, y = batch(4, 3, 6)
    model, rule = Normalised(), optax.sgd(0.1)
    core = pcx.train_step(model, x, {"vodes.1": y}, state_optimiser=rule, weight_optimiser=weight_rule,
                          weight_state=weight_rule.init(pcx.weights(model)), steps=steps, training=True)  # fmt: skip
    train_surface(model, x, y, steps, optim_h=pxu.Optim(rule, VALUES(model)), optim_w=pxu.Optim(weight_rule, WEIGHTS(model)))
    return model, core, x, y


def test_batch_statistics_in_the_surface_settle_like_the_core():
    """Frozen statistics during inference, running statistics updated once, and by the same rule."""
    model, core, x, _ = surface_and_core(3, optax.sgd(0.1))
    for vode, value in zip(model.vodes, core.inferred.values.values(), strict=True):
        np.testing.assert_allclose(vode.h, value, rtol=0, atol=1e-13)
    inputs = np.asarray(x @ Normalised().layers[0].weight.T + Normalised().layers[0].bias)
    np.testing.assert_allclose(model.norm.running_mean, 0.1 * inputs.mean(0), rtol=0, atol=1e-14)
    np.testing.assert_allclose(model.norm.running_variance, 0.9 + 0.1 * inputs.var(0, ddof=1), rtol=0, atol=1e-14)
    np.testing.assert_allclose(core.model.norm.running_variance, model.norm.running_variance, rtol=0, atol=1e-14)


def test_batch_statistics_in_the_surface_learn_like_the_core():
    """“In the weight pass they are differentiated as batch statistics”: the weights move as in the core."""
    model, core, _, _ = surface_and_core(3, optax.sgd(0.1))
    assert largest_difference(pcx.weights(core.model), pcx.weights(model)) < 1e-12


def test_running_statistics_in_the_surface_are_not_decayed():
    model, core, _, _ = surface_and_core(1, optax.adamw(0.1, weight_decay=0.5))
    assert largest_difference(core.model.norm.running_mean, model.norm.running_mean) < 1e-14
    assert largest_difference(core.model.norm.running_variance, model.norm.running_variance) < 1e-14


def test_the_core_after_the_surface_takes_its_own_statistics():
    """A model that was trained in the surface holds the statistics of its last batch; the core does not look at them."""
    model, _, x, _ = surface_and_core(1, optax.sgd(0.1))
    clean = Normalised()
    for name in ("layers", "norm"):
        setattr(clean, name, jax.tree.map(lambda a: a, getattr(model, name)))
    clean.norm.batch_mean = clean.norm.batch_variance = None
    for field in ("running_mean", "running_variance"):
        setattr(clean.norm, field, getattr(model.norm, field))
    other = 3 * x + 1
    outputs = [pcx.run(m, {}, other, training=True).output for m in (clean, model)]
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=0, atol=1e-14)


def test_evaluation_in_the_surface_uses_running_statistics():
    model, _, x, _ = surface_and_core(1, optax.sgd(0.1))
    model.eval()
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        output = model(x[0])
    norm = model.norm
    z = (model.layers[0](x[0]) - norm.running_mean) / jnp.sqrt(norm.running_variance + 1e-5)
    np.testing.assert_allclose(output, model.layers[1](jnp.tanh(norm.weight * z + norm.bias)), rtol=0, atol=1e-13)


def test_batch_statistics_without_a_batch_are_refused():
    model = Normalised().train()
    with pytest.raises(pcx.ModelError, match=r"is in training but sees no batch.*axis_name='batch'"):
        model(jnp.ones(4))


class Dropping(pcx.EnergyModule):
    def __init__(self):
        self.layer = pxnn.Linear(4, 50, key=jax.random.key(0))
        self.dropout = pxnn.Dropout(0.5)
        self.vodes = [pcx.Vode((50,))]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.vodes[0](self.dropout(self.layer(x)))


def test_dropout_in_the_surface():
    """Refused without keys; with them, every sample and every block has its own mask, and the same key the same one."""
    model, x = Dropping().train(), jnp.ones((3, 4))
    with pytest.raises(pcx.ModelError, match=r"is random in training; pass key= or use pcx\.nn\.keys\(key\)"):
        model(x[0])

    def forward(x: Any, key: Any, *, model: Any) -> Any:
        with pxnn.keys(key):
            return model(x)

    keys = jax.random.split(jax.random.key(1), 3)
    outputs = pxf.vmap(AXES)(forward)(x, keys, model=model)
    again = pxf.jit(pxf.vmap(AXES)(forward))(x, keys, model=Dropping().train())
    np.testing.assert_allclose(outputs, again, rtol=1e-14)
    assert not np.array_equal(outputs[0] == 0, outputs[1] == 0)
    plain = model.layer(x[0])
    np.testing.assert_allclose(outputs, np.where(outputs == 0, 0, 2 * plain), rtol=1e-14)
    assert 0 < int(jnp.sum(outputs == 0)) < 150


def test_attributes_of_a_model_may_be_called_as_those_of_a_node():
    """Only nodes forget their values and caches: a model's own ``h`` and ``cache`` stay."""

    class Named(pxc.EnergyModule):
        def __init__(self):
            with pxnn.keys(jax.random.key(0)):
                self.layer = pxnn.Linear(4, 3)
            self.h, self.cache = pxc.Vode((3,)), {"scale": jnp.array(3.0)}

        def __call__(self, x):
            return self.h(self.layer(x) * self.cache["scale"])

    model, x = Named(), jnp.arange(4.0)
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        output = model(x)
    np.testing.assert_allclose(output, 3.0 * (model.layer.weight @ x + model.layer.bias), rtol=1e-12)
    np.testing.assert_array_equal(model.h.h, output)
    assert model.cache == {"scale": 3.0}
    pxu.clear(model, pxc.VodeParam)
    assert isinstance(model.h, pxc.Vode)
    assert model.h.h is None
