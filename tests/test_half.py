"""Large products in float16 with powers of two: as exact as their eleven bits, whatever the size of the numbers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import largest_difference

import pcx
import pcx.nn as pxnn
from pcx.models._vgg import VGG
from pcx.shortcuts import half, pooling
from pcx.shortcuts.zeros import count

HALF, KERNEL = pcx.Shortcuts(half=True), pcx.Shortcuts(half=True, kernel=True)
TF32 = "tensorfloat32"
BITS = 2.0**-11  # what rounding to eleven bits changes, relative to a number
SHAPES = {"dense": ((4, 32), (16, 32)), "turned": ((4, 32), (32, 16)), "convolution": ((4, 6, 8, 8), (5, 6, 3, 3))}


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(half, "LARGE", 0)
    monkeypatch.setattr(pooling, "INTERPRET", True)


def product(kind):
    """A product of samples with weights as a function, and its equation in float32."""

    def dense(x, w):
        return jax.lax.dot_general(x, w, (((1,), (1 if kind == "dense" else 0,)), ((), ())))

    def convolution(x, w):
        return jax.lax.conv_general_dilated(x, w, (2, 1), [(1, 1), (0, 0)])

    function = convolution if kind == "convolution" else dense
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES[kind]]
    (eqn,) = jax.make_jaxpr(function)(*shapes).jaxpr.eqns
    return function, eqn


def operands(kind, sizes, weight_size=1.0):
    """Random samples of these sizes, and weights, in float32."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape) for shape in SHAPES[kind])
    return jnp.float32(x * np.reshape(sizes, (-1, *[1] * (x.ndim - 1)))), jnp.float32(w * weight_size)


@pytest.mark.parametrize("largest", [half.DATA, half.WEIGHTS])
def test_powers_of_two(largest):
    """They bring a bound to between half of the largest and that, and are exact."""
    bounds = np.float32(np.geomspace(1e-30, 1e30, 977))
    powers = np.asarray(half._power(jnp.asarray(bounds), largest), np.float64)
    assert np.array_equal(np.exp2(np.round(np.log2(powers))), powers)
    assert np.all((powers * bounds >= largest / 2) & (powers * bounds < largest))


@pytest.mark.parametrize("sizes", [np.ones(4), [1e-28, 1e-7, 1.0, 1e20]])
@pytest.mark.parametrize("weight_size", [1e-2, 1.0, 1e6])
@pytest.mark.parametrize("kind", SHAPES)
def test_products_to_eleven_bits(kind, sizes, weight_size):
    """Against float64: operands are rounded once, and the result; numbers may be of any size that float32 holds."""
    function, eqn = product(kind)
    x, w = operands(kind, sizes, weight_size)
    found = half.product(eqn, half.samples(x), half.weights(eqn, w)).wide(jnp.float32)
    exact, total = (np.asarray(function(f(x.astype(float)), f(w.astype(float)))) for f in (lambda a: a, jnp.abs))
    assert found.dtype == jnp.float32
    assert np.all(np.abs(found - exact) <= 3.2 * BITS * total)
    assert np.max(np.abs(found - exact) / total) > BITS / 100  # and it is float16, not more


@pytest.mark.parametrize("kind", SHAPES)
def test_errors_sent_back(kind):
    """For samples to eleven bits, for weights as in the product as written; a value already known stays as it is."""
    function, eqn = product(kind)
    x, w = operands(kind, [1e-20, 1e-3, 1.0, 1e10])
    value, known = function(x, w), half.weights(eqn, w)
    error = jnp.float32(np.random.default_rng(1).normal(size=value.shape)) * x[:, :1, ...].max()
    same, pull = jax.vjp(lambda x, w: half.with_derivative(eqn, value, x, w, known), x, w)
    assert np.array_equal(same, value)
    (back, weights), (_, plain) = pull(error), jax.vjp(function, x, w)[1](error)
    assert np.array_equal(weights, plain)
    x64, w64, e64 = (array.astype(float) for array in (x, w, error))
    exact = jax.vjp(lambda x: function(x, w64), x64)[1](e64)[0]
    total = jax.vjp(lambda x: function(x, jnp.abs(w64)), x64)[1](jnp.abs(e64))[0]
    assert np.all(np.abs(back - exact) <= 3.2 * BITS * total)


@pytest.mark.parametrize("kind", SHAPES)
def test_nothing_overflows(kind):
    """All numbers are as large as they can be, with one sign: results are exact, as all are powers of two."""
    function, eqn = product(kind)
    x, w = (jnp.full(shape, 2.0**k, jnp.float32) for shape, k in zip(SHAPES[kind], (60, 40), strict=True))
    wide = half.product(eqn, half.samples(x), half.weights(eqn, w)).wide(jnp.float32)
    np.testing.assert_allclose(wide, function(x, w), rtol=BITS)
    back = half.sent_back(eqn, half.samples(function(x, w)), x.shape, half.weights(eqn, w)).wide(jnp.float32)
    np.testing.assert_allclose(back, jax.vjp(lambda x: function(x, w), x)[1](function(x, w))[0], rtol=2 * BITS)


def test_samples_alone_zeros_and_nan():
    """A sample does not feel the others; nothing moved stays nothing, also by weights of zero; NaN stays where it is."""
    _, eqn = product("dense")
    x, w = operands("dense", np.ones(4))
    known = half.weights(eqn, w)

    def wide(x, known=known):
        return np.asarray(half.product(eqn, half.samples(x), known).wide(jnp.float32))

    odd = wide(x.at[1].multiply(1e20).at[2].set(0).at[3, 5].set(jnp.nan))
    assert np.array_equal(odd[0], wide(x)[0])
    assert np.array_equal(odd[2], np.zeros(16))
    assert np.all(np.isnan(odd[3]))
    assert np.all(np.isfinite(odd[:3]))
    assert np.array_equal(wide(x, half.weights(eqn, jnp.zeros_like(w))), np.zeros((4, 16)))
    assert np.all(np.isnan(wide(x, half.weights(eqn, w.at[0, 0].set(jnp.nan)))))


def test_which_products(monkeypatch):
    def fits(function, *shapes, dtype=jnp.float32):
        (eqn,) = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).jaxpr.eqns
        return half.fits(eqn)

    def batched(x, y):
        return jax.lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,))))

    def grouped(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=2)

    assert fits(jnp.dot, (8, 4), (4, 3))
    assert fits(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"), (2, 3, 4, 4), (5, 3, 3, 3))
    assert not fits(jnp.dot, (8, 4), (4, 3), dtype=jnp.float64)
    assert not fits(batched, (2, 3, 4), (2, 3, 4))
    assert not fits(lambda x, w: jax.lax.dot_general(x, w, (((0,), (0,)), ((), ()))), (8, 4), (8, 3))  # over the samples
    assert not fits(grouped, (2, 4, 4, 4), (6, 2, 3, 3))
    assert not fits(lambda x, w: jnp.dot(x, w, precision="highest"), (8, 4), (4, 3))  # as was asked for
    monkeypatch.setattr(half, "LARGE", 8 * 4 * 3)
    assert fits(jnp.dot, (8, 4), (4, 3))
    assert not fits(jnp.dot, (7, 4), (4, 3))


def network(activation, dtype=jnp.float32):
    pxnn.seed(0)
    model = VGG((3, 16, 16), 5, (16, 32, 48), [1] * 3, [True, True, False], activation)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32).astype(dtype) if eqx.is_array(leaf) else leaf, model)


def settled(model, shortcuts, precision=TF32, **options):
    dtype = model.head.weight.dtype
    x = jax.random.normal(jax.random.key(1), (4, 3, 16, 16), jnp.float32).astype(dtype)
    label = jax.nn.one_hot(jnp.arange(4), 5, dtype=dtype)
    options = {"optimiser": optax.sgd(0.1, momentum=0.5), "steps": 6} | options

    def run(x, label):
        return pcx.infer(model, x, {"vodes.3": label}, shortcuts=shortcuts, **options)

    with jax.default_matmul_precision(precision):
        program = jax.make_jaxpr(lambda *given: run(*given).values)(x, label).jaxpr
        return eqx.filter_jit(run)(x, label), count(program, ["pallas_call"])


@pytest.mark.parametrize("activation", ["gelu", "leaky_relu"])
@pytest.mark.parametrize("shortcuts", [HALF, KERNEL])
def test_inference(activation, shortcuts):
    """Displacements are those of float64 to a few roundings of eleven bits, also by the kernel for pooling."""
    found, kernels = settled(network(activation), shortcuts)
    exact, _ = settled(network(activation, jnp.float64), pcx.ALL_SHORTCUTS)
    plain, _ = settled(network(activation), pcx.ALL_SHORTCUTS)
    assert kernels == (3 if shortcuts.kernel and activation == "leaky_relu" else 0)
    for name in ("vodes.0", "vodes.1", "vodes.2"):
        by, true, other = (np.asarray(way.displaced.by[name], float) for way in (found, exact, plain))
        size = np.linalg.norm(true)
        assert size > 0
        assert np.linalg.norm(other - true) < BITS / 10 * size  # a CPU does not round to tf32
        assert BITS / 3 * size < np.linalg.norm(by - true) < 4 * BITS * size


def test_the_kernel_changes_little():
    """What is sent back is scaled by a bound instead of by what it is: the same numbers but for their rounding."""
    (plain, _), (quick, kernels) = (settled(network("relu"), shortcuts) for shortcuts in (HALF, KERNEL))
    assert kernels == 3
    for name in ("vodes.0", "vodes.1", "vodes.2"):
        a, b = plain.displaced.by[name], quick.displaced.by[name]
        assert float(jnp.linalg.norm(a - b)) <= 4 * BITS * float(jnp.linalg.norm(a))


@pytest.mark.parametrize("derivative", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_no_derivative_through_inference(derivative):
    """It would be a second one of products whose first is rounded."""
    model, x, label = network("relu"), jnp.ones((2, 3, 16, 16), jnp.float32), jnp.arange(2)

    def total(scale):
        with jax.default_matmul_precision(TF32):
            found = pcx.infer(model, scale * x, {"vodes.3": label}, optimiser=optax.sgd(0.1), steps=3, shortcuts=HALF)
        return jnp.sum(found.values["vodes.2"])

    assert total(jnp.float32(1)) != 0
    with pytest.raises(pcx.ModelError, match="leave half out"):
        derivative(total)(jnp.float32(1))


@pytest.mark.parametrize(("precision", "dtype"), [("float32", jnp.float32), ("bfloat16", jnp.float32), (TF32, float)])
def test_only_of_tensorfloat32(precision, dtype):
    """Elsewhere it is not what was asked for, and changes nothing."""
    with_it, without = (settled(network("relu", dtype), s, precision)[0] for s in (HALF, pcx.ALL_SHORTCUTS))
    assert largest_difference(with_it.values, without.values) == 0


def test_dense_layers_in_one_array():
    """A row of equal layers, stacked, has its weights and their powers stacked."""
    pxnn.seed(0)

    class Row(pcx.EnergyModule):
        def __init__(self):
            self.layers = [pxnn.Linear(8, 8) for _ in range(6)]
            self.vodes = [pcx.Vode((8,)) for _ in range(6)]

        def __call__(self, x):
            for layer, vode in zip(self.layers, self.vodes, strict=True):
                x = vode(jnp.tanh(layer(x)))
            return x

    model = jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_array(a) else a, Row())
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 8), jnp.float32)

    def values(shortcuts):
        with jax.default_matmul_precision(TF32):
            options = {"optimiser": optax.sgd(0.1), "steps": 10, "init": "zeros", "shortcuts": shortcuts}
            return eqx.filter_jit(lambda x, y: pcx.infer(model, x, {"vodes.5": y}, **options))(x, y).values

    stacked, lone, plain = map(values, (HALF, HALF._replace(stack=False), pcx.ALL_SHORTCUTS))
    assert largest_difference(stacked, lone) < 1e-6
    assert 1e-6 < largest_difference(stacked, plain) < 4 * BITS


def test_members_of_a_population():
    """Mapped over models, every member has its own powers of two."""
    models = [network("leaky_relu"), network("leaky_relu")]
    models[1] = jax.tree.map(lambda leaf: 30 * leaf if eqx.is_array(leaf) else leaf, models[1])
    x, label = jax.random.normal(jax.random.key(1), (4, 3, 16, 16), jnp.float32), jnp.arange(4)
    (first, static), (second, _) = (eqx.partition(model, eqx.is_array) for model in models)

    def moved(arrays):
        model = eqx.combine(arrays, static)
        with jax.default_matmul_precision(TF32):
            return pcx.infer(model, x, {"vodes.3": label}, optimiser=optax.sgd(1e-4), steps=5, shortcuts=HALF).displaced.by

    both = jax.jit(jax.vmap(moved))(jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second))
    for i, arrays in enumerate((first, second)):
        alone = jax.jit(moved)(arrays)
        for name in ("vodes.0", "vodes.2"):
            size = float(jnp.linalg.norm(alone[name]))
            assert size > 0
            assert float(jnp.linalg.norm(both[name][i] - alone[name])) <= BITS * size
