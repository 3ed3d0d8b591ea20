"""Programs with channels last compute what they compute otherwise, and are what a CPU's compiler likes."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Convolutional, batch, largest_difference

import pcx
import pcx.functional as pxf
import pcx.nn as pxnn
import pcx.predictive_coding as pxc
import pcx.utils as pxu
from pcx.algorithms import get
from pcx.shortcuts import channels
from pcx.shortcuts.channels import channels_last

IMAGE = jax.random.normal(jax.random.key(0), (3, 4, 6, 8))
KERNEL = jax.random.normal(jax.random.key(1), (4, 4, 3, 3))
SAME = functools.partial(jax.lax.conv, window_strides=(1, 1), padding="SAME")


@jax.custom_jvp
def odd_square(x):
    return x * x


odd_square.defjvp(lambda primals, tangents: (odd_square(*primals), 7 * tangents[0]))


@jax.custom_vjp
def odd_cube(x):
    return x**3


odd_cube.defvjp(lambda x: (x**3, None), lambda _, g: (7 * g,))


def looped(x, w):
    """Two arrays from step to step, one of which is no image, and something kept of each step."""

    def body(carry, part):
        h, total = carry
        h = jnp.tanh(SAME(h, w)) + part
        return (h, total + jnp.sum(h)), (jnp.max(h, axis=1), total)

    return jax.lax.scan(body, (x, 0.0), jnp.arange(5.0), reverse=True)


def until(x, w):
    def body(carry):
        h, steps = carry
        return jnp.tanh(SAME(h, w)) / 2, steps + 1

    return jax.lax.while_loop(lambda carry: (jnp.sum(carry[0] ** 2) > 1e-3) & (carry[1] < 9), body, (x, 0))


AFTER = {
    "bias and activation": lambda z: jax.nn.leaky_relu(z + jnp.arange(4.0)[:, None, None]) * 2 - 1,
    "two images": lambda z: jnp.where(z > IMAGE, z, IMAGE) + IMAGE.at[0].set(0),
    "types": lambda z: (z > 0).astype(jnp.int8) + z.astype(jnp.float32).astype(jnp.int8),
    "sums": lambda z: (z.sum(1), z.max((0, 2)), z.min((1, 2, 3)), jnp.prod(z, axis=3), (z > 0).all(0), (z > 2).any((1, 2))),
    "transposed": lambda z: (z.transpose(1, 0, 3, 2) + 1).transpose(2, 3, 0, 1),
    "flat": lambda z: z.reshape(3, -1) @ jnp.ones((192, 2)),
    "windows": lambda z: z.reshape(3, 4, 3, 2, 4, 2).max((3, 5)),
    "merged pixels": lambda z: z.reshape(3, 4, 48),
    "merged samples and channels": lambda z: z.reshape(12, 6, 8),
    "mixed": lambda z: z.reshape(3, 8, 3, 8),
    "axes of size one": lambda z: (z.reshape(1, 3, 4, 1, 6, 8, 1) + 1).reshape(3, 4, 6, 1, 8).squeeze(3),
    "squeezed": lambda z: jnp.squeeze(z[:, :, 2:3], 2),
    "broadcast": lambda z: jnp.broadcast_to(z[:, :, :, None, :, None], (3, 4, 6, 2, 8, 2)) * jnp.arange(2.0),
    "sliced": lambda z: z[1:, ::3, 1:5:2, ::-1],
    "padded": lambda z: jnp.pad(z, ((0, 0), (1, 0), (2, 1), (0, 3))),
    "joined": lambda z: jnp.concatenate([IMAGE, z, z], axis=1),
    "rolled": lambda z: jnp.roll(z, 1, axis=2),  # no rule
    "largest": lambda z: (z.argmax(1), jnp.sort(z, axis=1), jnp.cumsum(z, axis=1)),
    "window sums": lambda z: jax.lax.reduce_window(z, 0.0, jax.lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"),
    "own reductions": lambda z: (
        jax.lax.reduce(z, 1.0, lambda a, b: a * b + 1, (1,)),
        jax.lax.reduce_window(z, 0.0, lambda a, b: a + 2 * b, (1, 2, 1, 1), (1, 1, 1, 1), "VALID"),
    ),
    "no steps": lambda z: jax.lax.scan(lambda h, part: (SAME(h, KERNEL) + part, h), z, jnp.zeros((0, 8))),
    "held": lambda z: jax.lax.optimization_barrier((z, IMAGE, z * 2)),
    "called": lambda z: (jax.jit(lambda x: x + 1)(z), odd_square(z), odd_cube(z), jax.checkpoint(jnp.sin)(z)),
    "branch": lambda z: jax.lax.cond(z[0, 0, 0, 0] > 0, lambda: SAME(z, KERNEL), lambda: z),
    "branches": lambda z: [
        jax.lax.switch(i, [lambda z, k: SAME(z, k).sum(1), lambda z, k: z[:, 1], lambda z, k: z.max(1)], z, KERNEL)
        for i in (0, 1, 2)
    ],
    "a branch without": lambda z: jax.lax.cond(z[0, 0, 0, 0] > 0, lambda: z.sum(1), lambda: z[:, 0]),
    "another": lambda z: SAME(jax.nn.gelu(z), KERNEL).std(),
    "random": lambda z: z + jax.random.normal(jax.random.key(3), z.shape),
    "nothing": lambda z: z[:0].reshape(0, 192),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_follows_a_convolution_is_the_same(name):
    def function(x, w):
        return AFTER[name](SAME(x, w))

    expected, found = function(IMAGE, KERNEL), jax.jit(channels_last(function))(IMAGE, KERNEL)
    shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (expected, found)]
    assert shapes[0] == shapes[1]
    for mine, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((2, 4, 9), (6, 4, 3), {"padding": "SAME"}),
        ((2, 4, 5, 6, 7), (3, 4, 2, 3, 1), {"padding": "VALID"}),
        ((2, 4, 9, 9), (6, 2, 3, 3), {"padding": "SAME", "feature_group_count": 2}),
        ((2, 4, 9, 9), (6, 4, 3, 3), {"padding": [(2, 0), (1, 1)], "window_strides": (2, 3), "rhs_dilation": (1, 2)}),
        ((2, 4, 5, 5), (6, 4, 3, 3), {"padding": [(1, 2), (2, 1)], "lhs_dilation": (2, 2)}),
        ((2, 5, 5, 4), (6, 3, 3, 4), {"padding": "SAME", "dimension_numbers": ("NHWC", "OHWI", "NCHW")}),
    ],
)
def test_convolutions_of_every_kind_and_their_derivatives(image, kernel, options):
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((image, kernel)))
    convolve = functools.partial(jax.lax.conv_general_dilated, **{"window_strides": (1,) * (len(image) - 2)} | options)

    def function(x, w):
        y = convolve(x, w)
        return y, jax.grad(lambda x, w: jnp.sum(jnp.sin(convolve(x, w))), (0, 1))(x, w)

    expected, found = function(x, w), jax.jit(channels_last(function))(x, w)
    assert largest_difference(found, expected) < 1e-12


@pytest.mark.parametrize("function", [looped, until])
def test_loops_are_the_same(function):
    assert largest_difference(jax.jit(channels_last(function))(IMAGE, KERNEL), function(IMAGE, KERNEL)) < 1e-12


def test_derivatives_are_those_of_the_function():
    """By arguments and by what the function closes over, inside of other transformations too."""

    def function(x, w):
        return jnp.sum(odd_square(SAME(x, w)) + odd_cube(SAME(x, w)))

    expected = jax.grad(function, (0, 1))(IMAGE, KERNEL)
    cases = [
        jax.grad(channels_last(function), (0, 1)),
        jax.grad(lambda x, w: channels_last(lambda: function(x, w))(), (0, 1)),
        jax.grad(jax.jit(lambda x, w: channels_last(lambda x: function(x, w))(x)), (0, 1)),
        lambda x, w: (
            jax.grad(lambda x: jax.jit(lambda x, w: channels_last(lambda x: function(x, w))(x))(x, w))(x),
            expected[1],
        ),
    ]
    for case in cases:
        assert largest_difference(case(IMAGE, KERNEL), expected) < 1e-11

    def looped(x, keep):
        return jax.lax.scan(lambda h, k: (keep(lambda h: jnp.sin(SAME(h, KERNEL * k)))(h), None), x, jnp.arange(2.0))[0].sum()

    plain = jax.grad(looped)(IMAGE, lambda function: function)
    assert largest_difference(jax.grad(looped)(IMAGE, channels_last), plain) < 1e-12


def test_arguments_of_every_kind():
    """Defaults stay what they are; keywords are arguments too."""

    def function(x, w, *more, times=2, mode="SAME", scale, **others):
        for _ in range(times):
            x = jax.lax.conv(x, w, (1, 1), mode) * scale
        return [x + sum(more), *others.values()]

    given = {"scale": jnp.float32(0.5), "last": None, "other": {"a": KERNEL}}
    expected, found = function(IMAGE, KERNEL, 1.0, **given), channels_last(function)(IMAGE, KERNEL, 1.0, **given)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert largest_difference(found, expected) < 1e-12
    assert channels_last(function).__name__ == "function"


def doubled(x, interpret=True):
    """By a kernel of whole arrays."""
    from jax.experimental import pallas as pl

    def double(given, result):
        result[...] = given[...] * 2

    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(x)


def test_what_is_only_for_other_platforms_stays_there():
    """Such a kernel cannot be compiled for a CPU."""

    def function(x, w):
        return jax.lax.platform_dependent(x, w, cuda=lambda x, w: doubled(SAME(x, w), False), default=SAME)

    assert largest_difference(jax.jit(channels_last(function))(IMAGE, KERNEL), SAME(IMAGE, KERNEL)) < 1e-12


def test_a_kernel_of_whole_arrays_is_no_call():
    """Its program writes to its arguments; neither this nor the graph of a model goes into it."""
    found = jax.jit(channels_last(lambda x, w: doubled(SAME(x, w))))(IMAGE, KERNEL)
    assert largest_difference(found, 2 * SAME(IMAGE, KERNEL)) < 1e-12

    class Doubling(pcx.EnergyModule):
        def __init__(self):
            self.first, self.second = pcx.Vode((4,)), pcx.Vode((4,))

        def __call__(self, x):
            return self.second(doubled(self.first(x)))

    assert pcx.graph(Doubling(), jnp.ones((3, 4))).parents["second"] == {"first"}


def test_mapped_over_kernels_and_with_other_arguments():
    def function(tree, count, key):
        return SAME(tree["x"], tree["w"]) * count + jax.random.normal(key, ()), key, tree["w"]

    trees = {"x": IMAGE, "w": jnp.stack([KERNEL, 2 * KERNEL])}
    axes, given = ({"x": None, "w": 0}, None, None), (trees, jnp.int32(3), jax.random.key(4))
    expected = jax.vmap(function, axes)(*given)
    found = jax.jit(jax.vmap(channels_last(function), axes))(*given)
    assert largest_difference((found[0], found[2]), (expected[0], expected[2])) < 1e-12
    assert jnp.all(jax.random.key_data(found[1]) == jax.random.key_data(expected[1]))


def test_a_function_without_convolutions_is_the_same_program():
    calls = []

    def function(x):
        calls.append(x)
        return x.T @ jnp.sin(x).T.swapaxes(0, 1), {"shape": jnp.cumsum(x)}

    there, here = (str(jax.make_jaxpr(f)(IMAGE[0, 0])) for f in (channels_last(function), function))
    assert there == here
    assert len(calls) == 2, "traced once for each of the two"


def test_without_compilation_a_function_is_called_as_it_is():
    """So that who looks for a mistake sees numbers."""
    with jax.disable_jit():
        assert channels_last(lambda x, w: float(SAME(x, w)[0, 0, 0, 0]))(IMAGE, KERNEL) == SAME(IMAGE, KERNEL)[0, 0, 0, 0]


def test_on_an_accelerator_a_function_is_called_as_it_is(monkeypatch):
    """There the compiler orders axes by itself."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "transpose" not in str(jax.make_jaxpr(channels_last(SAME))(IMAGE, KERNEL))
    monkeypatch.undo()
    assert "transpose" in str(jax.make_jaxpr(channels_last(SAME))(IMAGE, KERNEL))


class Normalised(pcx.EnergyModule):
    """Convolutions with batch statistics and a skip connection, then the mean over pixels."""

    def __init__(self):
        with pxnn.keys(jax.random.key(0)):
            sizes = [3, 4, 4, 4]
            self.layers = [pxnn.Conv2d(i, o, 3, padding=1) for i, o in itertools.pairwise(sizes)]
            self.head = pxnn.Linear(4, 4)
        self.norms = [pxnn.BatchNorm(4) for _ in self.layers]
        self.vodes = [pcx.Vode() for _ in range(4)]

    def __call__(self, x):
        for layer, norm, vode in zip(self.layers, self.norms, self.vodes, strict=False):
            u = jax.nn.relu(norm(layer(x)))
            x = vode(u if x.shape[0] == 3 else u + x)
        return self.vodes[-1](self.head(pxnn.AvgPool2d(8)(x).reshape(-1)))


@pytest.mark.parametrize("model", [Convolutional, Normalised])
@pytest.mark.parametrize("name", ["pc_se", "pc_ce", "ipc", "pn", "cn", "bp_ce", "mcpc"])
def test_every_algorithm_trains_as_it_does(name, model):
    hyper, make = get(name)
    few = dataclasses.replace(hyper, T=3) if hasattr(hyper, "T") else hyper
    algorithm, key = make(few), jax.random.key(5)
    x, y = batch((3, 8, 8), 4)
    state = algorithm.init(model(), x, y, key)

    def step(state, x, y, key):
        return algorithm.step(state, x, y, key)

    expected, found = (jax.jit(f)(state, x, y, key) for f in (step, channels_last(step)))
    assert largest_difference(expected[0].model, state.model) > 1e-6
    for mine, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(mine.dtype, jnp.floating):  # Adam divides small gradients by their own size
            np.testing.assert_allclose(mine, plain, rtol=1e-9, atol=1e-9)


def test_inference_to_a_tolerance_is_the_same():
    x, y = batch((3, 8, 8), 4)

    def settle(model, x, y):
        return pcx.infer(model, x, {"vodes.2": y}, optimiser=optax.sgd(0.1), steps=40, tolerance=0.5).values

    expected, found = (jax.jit(f)(Convolutional(), x, y) for f in (settle, channels_last(settle)))
    assert largest_difference(found, expected) < 1e-12


def test_every_convolution_is_one_that_the_compiler_is_quick_at():
    """In loops as well: there the compiler for CPUs leaves all others to a plain loop over numbers."""
    hyper, make = get("ipc")
    algorithm, key = make(hyper), jax.random.key(5)
    x, y = batch((3, 8, 8), 4)
    state = algorithm.init(Convolutional(), x, y, key)

    def labels(function):
        text = jax.jit(function).lower(state, x, y).as_text(dialect="hlo")
        return re.findall(r"convolution\(.*dim_labels=(\S+?)[,\s]", text)

    def step(state, x, y):
        return algorithm.step(state, x, y, key)[0]

    good = "b01f_01io->b01f"

    def choose(state, x, y):
        return jax.lax.cond(
            y[0, 0] > 0, lambda: SAME(jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))), KERNEL), lambda: jnp.zeros((7, 4, 8, 8))
        )

    assert set(labels(channels_last(choose))) == {good} != set(labels(choose))
    assert set(labels(step)) - {good}
    assert len(labels(channels_last(step))) == len(labels(step))
    assert set(labels(channels_last(step))) == {good}


def test_a_jitted_loop_over_tracked_objects_has_channels_last():
    """The paper's surface, with inference in a scan: `pxf.jit` turns its convolutions, and the numbers stay."""
    x, y = batch((3, 8, 8), 4)
    axes = pxu.Mask(pxc.VodeParam, [None, 0])

    @pxf.vmap(axes, in_axes=(0, 0), out_axes=None, axis_name="batch")
    def energy(x, y, *, model):
        model(x)
        model.vodes[-1].set("h", y)
        return jax.lax.pmean(model.energy(), "batch")

    forward = pxf.vmap(axes, in_axes=(0,), axis_name="batch")(lambda x, *, model: model(x))
    slope_h, slope_w = (pxf.grad(pxu.Mask(kind))(energy) for kind in (pxc.VodeParam, pxc.LayerParam))

    def train(x, y, *, model, optim_h, optim_w):
        def once(carry, _, *, model, optim_h):
            with pxu.step(model, clear_params=pxc.VodeParam.Cache):
                optim_h.step(model, slope_h(x, y, model=model)["model"], True)
            return carry, None

        with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            forward(x, model=model)
        optim_h.init(pxu.Mask(pxc.VodeParam)(model))
        pxf.scan(once, 5)(None, None, model=model, optim_h=optim_h)
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            optim_w.step(model, slope_w(x, y, model=model)["model"])

    def trained(x, transform):
        model = Convolutional()
        objects = {
            "optim_h": pxu.Optim(optax.sgd(0.1, momentum=0.5), pxu.Mask(pxc.VodeParam)(model)),
            "optim_w": pxu.Optim(optax.sgd(0.1)),
        }
        transform(train)(x, y, model=model, **objects)
        return pcx.weights(model)

    start, expected, found = pcx.weights(Convolutional()), trained(x, lambda f: f), trained(x, pxf.jit)
    assert largest_difference(expected, start) > 1e-3
    assert largest_difference(found, expected) < 1e-12
    text = jax.jit(lambda x: trained(x, pxf.jit)).lower(x).as_text(dialect="hlo")
    assert set(re.findall(r"convolution\(.*dim_labels=(\S+?)[,\s]", text)) == {"b01f_01io->b01f"}


def test_images_are_turned_once_not_at_every_layer():
    """Between two convolutions no image changes the order of its axes, as the traced program shows."""

    def turned(x, w):
        for _ in range(5):
            x = jax.nn.leaky_relu(SAME(x, w) + 1)
            x = x.reshape(3, 4, 3, 2, 4, 2)
            x = jnp.maximum(x[:, :, :, :1], x[:, :, :, 1:]).repeat(2, 3).reshape(3, 4, 6, 8)
        return x

    jaxpr = jax.make_jaxpr(channels_last(turned))(IMAGE, KERNEL)
    count = str(jaxpr).count("= transpose[")
    assert (
        count == 1 + 5 + 1
    )  # the image, the kernel for each convolution (a compiler knows that these are the same), the result


def test_sizes_of_axes_that_become_others():
    assert channels._groups((3, 4, 6), (3, 24)) == [([0], [0]), ([1, 2], [1])]
    assert channels._groups((3, 24), (3, 4, 6)) == [([0], [0]), ([1], [1, 2])]
    assert channels._groups((4, 6), (3, 8)) == [([0, 1], [0, 1])]
    assert channels._groups((4, 1), (1, 4, 1, 1)) == [([0], [0, 1]), ([1], [2]), ([], [3])]
    assert channels._groups((2, 0), (0, 3)) is None


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (4, 2), (5, 2), (8, 3)])
@pytest.mark.parametrize("pooled", [False, True])
def test_small_images_are_not_taken_for_kernels(size, stride, pooled):
    """A compiler that swaps the two turns one of them around, which a CPU then convolves number by number."""
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 4, size, size), (4, 4, 3, 3)]))

    def loss(x, w):
        z = SAME(jnp.tanh(jax.lax.conv(x, w, (stride, stride), "SAME")), w)
        return jnp.sum((pxnn.max_pool_2x2(z) if pooled else z) ** 2)

    program = jax.jit(channels_last(jax.grad(loss, (0, 1)))).lower(x, w).compile()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), program(x, w), jax.grad(loss, (0, 1))(x, w)
    )
    found = re.findall(r" convolution\(.*", program.as_text())
    assert len(found) == 6 or size == 1  # those of single pixels are products
    assert all("dim_labels=b01f_01io->b01f" in line and "reversal" not in line for line in found)
