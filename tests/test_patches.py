"""Convolutions of few channels as products of patches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pcx
import pcx.nn as pxnn
from pcx.models._vgg import VGG
from pcx.shortcuts import patches, products
from pcx.shortcuts.zeros import count

BF16 = "bfloat16"


def convolve(x, w, **options):
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    return jax.lax.conv_general_dilated(x, w, **options)


def equation(x, w, **options):
    return jax.make_jaxpr(lambda x, w: convolve(x, w, **options))(x, w).jaxpr.eqns[-1]


@pytest.mark.parametrize(
    ("channels", "window", "stride", "padding"),
    [
        (3, (3, 3), (1, 1), ((1, 1), (1, 1))),
        (1, (5, 5), (1, 1), "VALID"),
        (4, (2, 3), (2, 1), ((0, 2), (1, 0))),
        (2, (1, 1), (3, 2), "VALID"),
        (3, (3, 3), (2, 2), "SAME"),
        (1, (4, 4), (1, 2), ((-1, 3), (2, -2))),
    ],
)
def test_patches_are_the_convolution(channels, window, stride, padding):
    """Of numbers that are whole, so that every sum is exact; written out once more as sums over windows."""
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 10, (2, channels, 8, 9)).astype(float)
    w = rng.integers(-9, 10, (5, channels, *window)).astype(float)
    eqn = equation(x, w, window_strides=stride, padding=padding)
    assert patches.fits(eqn)
    found = patches.product(eqn, jnp.asarray(x), jnp.asarray(w))
    (low, _), (left, _) = eqn.params["padding"]
    for n, o, i, j in np.ndindex(found.shape):
        total = 0.0
        for c, a, b in np.ndindex(channels, *window):
            row, column = i * stride[0] + a - low, j * stride[1] + b - left
            # what a negative padding leaves out is no part of the image
            inside = max(0, -low) <= row < 8 + min(0, eqn.params["padding"][0][1])
            inside &= max(0, -left) <= column < 9 + min(0, eqn.params["padding"][1][1])
            total += x[n, c, row, column] * w[o, c, a, b] if inside else 0.0
        assert found[n, o, i, j] == total
    assert np.array_equal(found, convolve(x, w, window_strides=stride, padding=padding))


def test_no_patches_where_there_is_no_window():
    assert not patches.fits(equation(jnp.ones((2, 1, 5, 3)), jnp.ones((5, 1, 4, 5)), padding="VALID"))


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        (5, {}),
        (4, {"feature_group_count": 2}),
        (3, {"rhs_dilation": (2, 1)}),
        (3, {"lhs_dilation": (1, 2), "padding": ((1, 1), (1, 1))}),
    ],
    ids=["many channels", "groups", "holes in the kernel", "holes in the image"],
)
def test_other_convolutions_stay(channels, options):
    x, w = jnp.ones((2, channels, 8, 8)), jnp.ones((4, channels // options.get("feature_group_count", 1), 3, 3))
    assert not patches.fits(equation(x, w, **options))
    last = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    assert not patches.fits(equation(jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4)), **last))
    assert not patches.fits(jax.make_jaxpr(jnp.matmul)(x[0, 0], x[0, 0]).jaxpr.eqns[-1])


def step_of(model):
    weight_optimiser = optax.sgd(1.0)
    options = {"state_optimiser": optax.sgd(0.1), "weight_optimiser": weight_optimiser, "steps": 5}

    def step(model, x, y):
        state = weight_optimiser.init(pcx.weights(model))
        done = pcx.train_step(model, x, {"vodes.2": y}, weight_state=state, **options)
        return jax.tree.map(jnp.subtract, pcx.weights(done.model), pcx.weights(model)), done.energies

    return step


def test_a_training_step_has_the_same_numbers(monkeypatch):
    """In bfloat16 on a GPU the forward pass has one convolution less; all others stay, and weights move as before."""
    pxnn.seed(0)
    model = VGG((3, 8, 8), 5, (8, 16), [1, 1], [True, False], "relu")
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if eqx.is_array(leaf) else leaf, model)
    x = jax.random.normal(jax.random.key(1), (4, 3, 8, 8), jnp.float32)
    y = jax.nn.one_hot(jnp.arange(4), 5, dtype=jnp.float32)

    def run(gpu):
        monkeypatch.setattr(products, "on_gpu", lambda: gpu)
        step = step_of(model)
        with jax.default_matmul_precision(BF16):
            program = jax.make_jaxpr(step)(model, x, y).jaxpr
            return eqx.filter_jit(step)(model, x, y), program

    (plain, without), (found, with_patches) = run(False), run(True)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True):
        size = float(jnp.linalg.norm(a))
        assert size > 0
        assert float(jnp.linalg.norm(a - b)) < 1e-2 * size
    convolutions = [count(program, ["conv_general_dilated"]) for program in (without, with_patches)]
    # the pass of the start, and its products remembered for inference and for the weights: a compiler makes one of the three
    assert convolutions[0] - convolutions[1] == 3
    dots = [count(program, ["dot_general"]) for program in (without, with_patches)]
    assert dots[1] - dots[0] == 3


def test_only_where_it_is_faster(monkeypatch):
    """Nothing changes on a CPU, nor at another precision, where the start is computed as it is written."""
    x, w = jnp.ones((2, 3, 8, 8), jnp.float32), jnp.ones((4, 3, 3, 3), jnp.float32)
    for gpu, precision, expected in ((False, BF16, 1), (True, "tensorfloat32", 1), (True, BF16, 0)):
        monkeypatch.setattr(products, "on_gpu", lambda gpu=gpu: gpu)
        with jax.default_matmul_precision(precision):
            program = jax.make_jaxpr(products.rounded(convolve))(x, w).jaxpr
        assert count(program, ["conv_general_dilated"]) == expected


def test_derivatives_are_those_of_the_convolution(monkeypatch):
    """For the kernel and for the images, by convolutions: whole numbers, which bfloat16 has exactly."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-4, 5, (2, 3, 6, 6)), jnp.float32)
    w, e = (jnp.asarray(rng.integers(-2, 3, shape), jnp.float32) for shape in ((4, 3, 3, 3), (2, 4, 6, 6)))
    plain, pull = jax.vjp(convolve, x, w)
    monkeypatch.setattr(products, "on_gpu", lambda: True)
    with jax.default_matmul_precision(BF16):
        found, pull_patches = jax.vjp(products.rounded(convolve), x, w)
        sent = pull_patches(e)
    for a, b in zip((plain, *pull(e)), (found, *sent), strict=True):
        # operands are exact, and results are rounded to the eight bits of a bfloat16
        assert np.all(np.abs(np.asarray(a) - np.asarray(b)) <= 2.0**-8 * np.abs(np.asarray(a)))
