"""The error of a node behind 2×2 pooling in one kernel, interpreted: the same numbers as without it."""

import itertools

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
from pcx.shortcuts import pooling
from pcx.shortcuts.zeros import count

KERNEL = pcx.Shortcuts(kernel=True)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(pooling, "INTERPRET", True)
    monkeypatch.setattr("pcx.shortcuts.plan.momenta", lambda *given: [])  # the kernel alone, bit by bit: `test_momentum.py`
    pooling.works.cache_clear()
    yield
    pooling.works.cache_clear()


def network(activation="leaky_relu", channels=(16, 32, 48), shape=(3, 16, 16), dtype=jnp.float64):
    pxnn.seed(0)
    model = VGG(shape, 5, channels, [1] * 3, [True, True, False], activation)
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_array(leaf) else leaf, model)


def problem(model, shape=(3, 16, 16)):
    dtype = model.head.weight.dtype
    x = jax.random.normal(jax.random.key(1), (4, *shape), dtype)
    return x, {"vodes.3": jax.nn.one_hot(jnp.arange(4), 5, dtype=dtype)}


def runner(model, kernel, **options):
    options = {"optimiser": optax.sgd(0.1, momentum=0.5), "steps": 6} | options
    shortcuts = KERNEL if kernel else pcx.ALL_SHORTCUTS
    return lambda x, observed: pcx.infer(model, x, observed, shortcuts=shortcuts, **options)


def kernels(model, x, observed, products, kernel=True, **options):
    """How many are in the program."""
    run = runner(model, kernel, **options)
    with jax.default_matmul_precision(products):
        return count(jax.make_jaxpr(lambda *given: run(*given).values)(x, observed).jaxpr, ["pallas_call"])


def settle(model, x, observed, products, kernel, **options):
    run = runner(model, kernel, **options)
    with jax.default_matmul_precision(products):
        # compiled, roundings to bfloat16 are left out where a compiler sees both sides of them: not in a kernel
        return (run if products == "bfloat16" else eqx.filter_jit(run))(x, observed)


@pytest.mark.parametrize(
    ("dtype", "precision", "init", "activation"),
    [
        (jnp.float32, "tensorfloat32", "forward", "relu"),
        (jnp.float32, "bfloat16", "forward", "leaky_relu"),
        (jnp.float32, "bfloat16", "zeros", "relu"),
        (jnp.float64, "tensorfloat32", "forward", "leaky_relu"),
        (jnp.float64, "tensorfloat32", "zeros", "relu"),
        (jnp.float64, "bfloat16", "forward", "relu"),
    ],
)
def test_equal(dtype, precision, init, activation):
    model = network(activation, dtype=dtype)
    x, observed = problem(model)
    plain, quick = (settle(model, x, observed, precision, kernel, init=init) for kernel in (False, True))
    assert kernels(model, x, observed, precision, init=init) > 0
    bound = 0 if precision == "bfloat16" else {jnp.float32: 1e-5, jnp.float64: 1e-13}[dtype]
    sizes = [float(jnp.max(jnp.abs(part))) for part in plain.displaced.by.values()]
    assert min(sizes[:-1]) > 0
    assert largest_difference(plain.displaced.by, quick.displaced.by) <= bound * max(sizes)


def test_a_state_in_bfloat16():
    """The node's error is rounded once more on its way, by half a unit of bfloat16's eight bits."""
    model = network(dtype=jnp.float32)
    x, observed = problem(model)
    plain, quick = (settle(model, x, observed, "bfloat16", k, state_dtype=jnp.bfloat16) for k in (False, True))
    for name in ("vodes.0", "vodes.1", "vodes.2"):
        size = float(jnp.max(jnp.abs(plain.displaced.by[name])))
        assert size > 0
        assert float(jnp.max(jnp.abs(plain.displaced.by[name] - quick.displaced.by[name]))) <= 6 * 2**-9 * size


def test_the_wave_front_and_constants_stay():
    """Two of four nodes are pooled; the first has a constant prediction, and the second moves when its parent has."""
    model = network(dtype=jnp.float32)
    x, observed = problem(model)
    assert [kernels(model, x, observed, "tensorfloat32", steps=n) for n in range(7)] == [0, 0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("apart", [False, True])
def test_one_launch_by_hand(apart):
    """Error and pixels of every window in numpy, with ties: the first largest pixel takes all."""
    rng = np.random.default_rng(0)
    z, base = (rng.integers(-2, 3, (2, 16, 4, 6)).astype(float) for _ in range(2))
    by, gap, bias = rng.normal(size=(2, 16, 2, 3)), rng.normal(size=(2, 16, 2, 3)), rng.normal(size=16)
    gap = gap if apart else None

    def act(value):
        return value if value >= 0 else 0.01 * value

    error, pixels = np.zeros_like(by), np.zeros_like(z)
    for n, c, i, j in itertools.product(*map(range, by.shape)):
        window = [(base + z)[n, c, 2 * i + k, 2 * j + m] + bias[c] for k in (0, 1) for m in (0, 1)]
        place = int(np.argmax(window))
        begin = max(base[n, c, 2 * i + k, 2 * j + m] + bias[c] for k in (0, 1) for m in (0, 1))
        error[n, c, i, j] = by[n, c, i, j] - (act(window[place]) - act(begin) - (gap[n, c, i, j] if apart else 0))
        slope = 1 if window[place] >= 0 else 0.01
        pixels[n, c, 2 * i + place // 2, 2 * j + place % 2] = -error[n, c, i, j] * slope
    given = [None if array is None else jnp.asarray(array) for array in (z, by, base, gap, bias)]
    found = pooling._launch(jax.nn.leaky_relu, *given)
    np.testing.assert_allclose(found[0], error, rtol=1e-12)
    np.testing.assert_allclose(found[1], pixels, rtol=1e-12)
    energy = pooling._energy(jax.nn.leaky_relu, *given)
    np.testing.assert_allclose(energy, 0.5 * np.sum(error**2, axis=(1, 2, 3)), rtol=1e-14)


ARGUMENTS = {"channels": [16, 16, 16], "paddings": [1, 1, 1], "pooled": [True, True, False], "activation_name": "relu"}


class Odd(VGG):
    """Predictions that are not a convolution, a bias of the channels, pooling and an activation, one way or another."""

    way = ""

    def __init__(self, way, channels):
        super().__init__((3, 16, 16), 5, **ARGUMENTS | {"channels": channels})
        self.way = way
        if way in ("map", "parent"):
            self.convolutions[1] = pxnn.Conv2d(*channels[:2], 3, padding=1, bias=False)

    def block(self, i, x):
        if i != 1 or not self.way:
            return super().block(i, x)
        match self.way:
            case "after":
                return 2 * super().block(i, x)
            case "scaled":
                u = 2 * self.convolutions[1](x)
            case "map":  # a number for each of 8 × 8 = 64 places
                u = self.convolutions[1](x) + jnp.arange(64.0).reshape(8, 8) / 64
            case "parent":
                u = self.convolutions[1](x) + x
            case "square":
                u = jnp.einsum("chk,cwk->chw", x, x) + self.convolutions[1].bias
            case "reshaped":
                u = self.convolutions[1](x).reshape(16, 16, 4)
            case "twice":
                u = self.convolutions[1](x) + self.convolutions[0].bias
        return self.pool.of(u, self.activation)


def train(model, x, observed, kernel, products="tensorfloat32", **options):
    """The gradient of a training step, as momentum without decay keeps it, and its energies."""
    options = {"state_optimiser": optax.sgd(0.1, momentum=0.5), "steps": 6, "training": True} | options
    if kernel:
        options["shortcuts"] = options.get("shortcuts", pcx.ALL_SHORTCUTS)._replace(kernel=True)
    rule = optax.trace(0.9)

    @eqx.filter_jit
    def step(model, x):
        state = rule.init(pcx.weights(model))
        done = pcx.train_step(model, x, observed, weight_optimiser=rule, weight_state=state, **options)
        return done.optimiser_state.trace, done.energies, done.inferred.values

    with jax.default_matmul_precision(products):
        return step(model, x), count(jax.make_jaxpr(lambda x: step(model, x))(x).jaxpr, ["pallas_call"])


@pytest.mark.parametrize("steps", [2, 6])
@pytest.mark.parametrize("init", ["forward", "zeros"])
def test_weights_learn_the_same(init, steps):
    """Every gradient, biases included, and every energy; after two steps the error has not reached all nodes."""
    model = network()
    x, observed = problem(model)
    (mine, launched), (plain, none) = (train(model, x, observed, kernel, init=init, steps=steps) for kernel in (True, False))
    inside = settle(model, x, observed, "tensorfloat32", True, init=init, steps=steps)
    assert none == 0 < launched - kernels(model, x, observed, "tensorfloat32", init=init, steps=steps)
    assert inside.reached == frozenset(["vodes.3", "vodes.2", "vodes.1"] if (init, steps) == ("forward", 2) else inside.values)
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-14)
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(plain[0])) == (steps == 6 or init == "zeros")


def test_weights_learn_the_same_in_fewer_bytes():
    """In bfloat16 with a state in bfloat16, the errors of the kernel are rounded before they are summed; and in float16."""
    model = network(dtype=jnp.float32)
    x, observed = problem(model)
    settings = ({"products": "bfloat16", "state_dtype": jnp.bfloat16}, {"shortcuts": pcx.Shortcuts(half=True)})
    for options, bound in zip(settings, (1e-3, 1e-5), strict=True):
        (mine, _), (plain, _) = (train(model, x, observed, kernel, **options) for kernel in (True, False))
        for one, other in zip(jax.tree.leaves(mine[0]), jax.tree.leaves(plain[0]), strict=True):
            one, other = np.ravel(one).astype(float), np.ravel(other).astype(float)
            assert 1 - one @ other / np.sqrt((one @ one) * (other @ other)) < bound


def test_other_energies_and_precisions_learn_as_before():
    """A pooled node with a precision, or another energy, is left to the predictions."""
    model = network()
    x, observed = problem(model)
    for options in ({"precision": {"vodes.1": 2.0}}, {"energy": {"vodes.1": lambda h, u: jnp.sum(jnp.abs(h - u) ** 3)}}):
        (mine, _), (plain, _) = (train(model, x, observed, kernel, **options) for kernel in (True, False))
        for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("way", ["after", "scaled", "map", "parent", "square", "reshaped", "twice"])
def test_predictions_that_are_refused(way):
    """Then no kernel is made, and the numbers are those without one."""
    pxnn.seed(0)
    model = Odd(way, [16, 64 if way == "map" else 16, 16])
    x, observed = problem(model)
    plain, quick = (settle(model, x, observed, "tensorfloat32", kernel) for kernel in (False, True))
    assert kernels(model, x, observed, "tensorfloat32") == 0
    assert largest_difference(plain.values, quick.values) == 0


class Inner(VGG):
    """A product in a jit of its own before the convolution: that one is the whole product, not what has moved of it."""

    def block(self, i, x):
        if i == 1:
            x = jax.jit(lambda x: jnp.tensordot(jnp.cos(jnp.arange(256.0)).reshape(16, 16), x, 1))(x)
        return super().block(i, x)


def test_a_product_before_the_convolution():
    pxnn.seed(0)
    model = Inner((3, 16, 16), 5, **ARGUMENTS)
    x, observed = problem(model)
    plain, quick = (settle(model, x, observed, "tensorfloat32", kernel) for kernel in (False, True))
    assert kernels(model, x, observed, "tensorfloat32") > 0
    assert largest_difference(plain.values, quick.values) < 1e-13


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"activation_name": "gelu"}, {}),
        ({"channels": [16, 24, 16]}, {}),  # 24 channels: blocks of 8
        ({"paddings": [1, 0, 1]}, {"shape": (3, 14, 14)}),  # five rows are left before pooling
        ({}, {"precision": {"vodes.1": 2.0}}),
        ({}, {"precision": {"vodes.1": lambda step: 1.0 + step}}),
        ({}, {"energy": {"vodes.1": lambda h, u: jnp.sum(jnp.abs(h - u))}}),
        ({}, {"observed": True}),
    ],
)
def test_problems_that_are_refused(settings, options):
    shape = options.pop("shape", (3, 16, 16))
    pxnn.seed(0)
    model = VGG(shape, 5, **ARGUMENTS | settings)
    x, observed = problem(model, shape)
    if options.pop("observed", False):
        value = pcx.run(model, {}, x).values["vodes.1"]
        observed |= {"vodes.1": pcx.Observed(value + 1, jnp.arange(value.size).reshape(value.shape) % 3 == 0)}
    plain, quick = (settle(model, x, observed, "tensorfloat32", kernel, **options) for kernel in (False, True))
    assert kernels(model, x, observed, "tensorfloat32", **options) == 0
    assert largest_difference(plain.values, quick.values) == 0


def test_it_has_to_be_asked_for(monkeypatch):
    model = network(dtype=jnp.float32)
    x, observed = problem(model)
    assert kernels(model, x, observed, "tensorfloat32", False) == 0
    monkeypatch.setattr(pooling, "INTERPRET", False)  # and there is no GPU
    assert kernels(model, x, observed, "tensorfloat32", True) == 0


def test_tolerance_and_record():
    """A recorded energy is not that of a kernel, and stopping early works with it."""
    model = network(dtype=jnp.float32)
    x, observed = problem(model)
    for options in ({"tolerance": 1e-2, "steps": 40}, {"record": pcx.record_energies}):
        plain, quick = (settle(model, x, observed, "tensorfloat32", kernel, **options) for kernel in (False, True))
        assert largest_difference(plain.values, quick.values) < 1e-6
    assert largest_difference(plain.history, quick.history) < 1e-5 * float(jnp.max(plain.history["vodes.3"]))


def test_members_of_a_population():
    """Mapped over models, a kernel takes all members."""
    models = [network(dtype=jnp.float32), network(dtype=jnp.float32)]
    models[1] = jax.tree.map(lambda leaf: 1.1 * leaf if eqx.is_array(leaf) else leaf, models[1])
    x, observed = problem(models[0])

    def values(arrays, static):
        model = eqx.combine(arrays, static)
        with jax.default_matmul_precision("tensorfloat32"):
            return pcx.infer(model, x, observed, optimiser=optax.sgd(0.1), steps=5, shortcuts=KERNEL).values

    arrays, static = eqx.partition(models[0], eqx.is_array)
    other = eqx.filter(models[1], eqx.is_array)
    both = jax.jit(jax.vmap(lambda arrays: values(arrays, static)))(jax.tree.map(lambda a, b: jnp.stack([a, b]), arrays, other))
    alone = jax.jit(lambda arrays: values(arrays, static))(other)
    assert largest_difference(jax.tree.map(lambda leaf: leaf[1], both), alone) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_device_is_tried_before_kernels_are_used(dtype, monkeypatch):
    """Right numbers are taken, wrong ones and failures are not, and a sentence says why."""
    right = pooling._launch

    def wrong(*given):
        error, pixels = right(*given)
        return error, jnp.roll(pixels, 1, axis=-1)

    def nothing(*given):
        error, pixels = right(*given)
        return error, jnp.full_like(pixels, jnp.nan)

    def fails(*given):
        raise NotImplementedError("no such instruction\nmore")

    with jax.enable_x64(False):
        assert pooling.works(dtype)
        cases = ((wrong, "numbers are wrong"), (nothing, "numbers are wrong"), (fails, "fail here: no such instruction$"))
        for launch, message in cases:
            monkeypatch.setattr(pooling, "_launch", launch)
            pooling.works.cache_clear()
            with pytest.warns(UserWarning, match=message):
                assert not pooling.works(dtype)
        monkeypatch.setattr(pooling, "INTERPRET", False)
        pooling.works.cache_clear()
        assert not pooling.works(dtype)  # there is no GPU, and nothing to say
