"""By how much results move: each rule against a difference in float64, at every size of a step and in float32."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pcx
import pcx.nn as pxnn
from pcx.models._vgg import VGG
from pcx.shortcuts import differences, products
from pcx.shortcuts.differences import UNKNOWN

CHOSEN = np.random.default_rng(4).random((4, 5)) > 0.5
WEIGHT = np.random.default_rng(3).normal(size=(5, 4))


def normalised(x):
    centred = x - jnp.mean(x, axis=0)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=0) + 1e-5)


def pooled(x):
    return pxnn.max_pool_2x2(x.reshape(1, 4, 5)[:, :, :4])


FUNCTIONS = {
    "relu": jax.nn.relu,
    "leaky relu": jax.nn.leaky_relu,
    "hard tanh": jax.nn.hard_tanh,
    "relu6": jax.nn.relu6,
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "gelu by erf": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "sigmoid": jax.nn.sigmoid,
    "absolute": jnp.abs,
    "clip": lambda x: jnp.clip(x, -0.5, 0.7),
    "power": lambda x: x**3 - x**2,
    "root": lambda x: jnp.sqrt(x**2 + 0.1),
    "logarithm": lambda x: jnp.log(x**2 + 0.1),
    "exponential": jnp.exp,
    "quotient": lambda x: x / (x**2 + 1) + 2 / (x**2 + 3) + x / 7,
    "product": lambda x: x * jnp.tanh(x) * 3,
    "pieces": lambda x: jnp.concatenate([x[:2], -x[2:, ::-1], jnp.ones((1, 5), x.dtype)]),
    "normalised": normalised,
    "centred over the batch": jax.vmap(lambda row: row - jax.lax.pmean(row, "batch"), axis_name="batch"),
    "smaller of two": lambda x: jnp.minimum(x, x[::-1]),
    "sum": lambda x: jnp.sum(x, axis=1),
    "pooled": pooled,
    "skip": lambda x: x + jax.nn.relu(x @ jnp.asarray(WEIGHT, x.dtype))[:, [0, 1, 2, 3, 3]],
    "picked": lambda x: x[jnp.array([2, 0, 2])] * 2,
    "padded": lambda x: jnp.pad(x, ((0, 1), (2, 0)), constant_values=3.0),
    "running sum": lambda x: jnp.cumsum(x, axis=0),
    "part": lambda x: jax.lax.dynamic_slice(x, (1, 2), (2, 2)),
    "chosen by a mask": lambda x: jnp.where(CHOSEN, x, 2 * x**2),
    "dropped by a mask": lambda x: jnp.where(CHOSEN, x * 2, 0),
    "chosen by a mask and a sign": lambda x: jnp.where(CHOSEN & (x > 0), x, -3 * x),
    "chosen by masks side by side": lambda x: jnp.where(jnp.concatenate([x[:2] > 0, CHOSEN[2:]]), x, 3 * x),
    "one of three": lambda x: jax.lax.select_n(jnp.asarray(CHOSEN + CHOSEN[::-1], np.int32), x, 2 * x, x**2),
    "winner of two": lambda x: jnp.where(x >= jnp.maximum(x, x[::-1]), x, 7),
    "two winners of five": lambda x: jnp.where(x >= jax.lax.top_k(x, 2)[0][:, -1:], x, 7),
    "a jump where numbers are equal": lambda x: jnp.where(jnp.maximum(x, 0.1) > 0.1, x, 7),
    "sine": jnp.sin,
    "logarithm of one more": lambda x: jnp.log1p(x**2),
}


def moved(function, start, by):
    """The displacement of a function's result, by the rules."""
    closed = jax.make_jaxpr(function)(start)
    variable, anchor = closed.jaxpr.invars[0], products.Anchor()
    consts = dict(zip(closed.jaxpr.constvars, map(jnp.asarray, closed.consts), strict=True))

    def run(x, product, away):
        return products.interpret(closed.jaxpr, closed.jaxpr.eqns, consts | {variable: x}, closed.jaxpr.outvars, product, away)

    run(start, anchor.record, {})
    (value,), (amount,) = run(start + by, anchor.product, {variable: by})
    return value, amount


@pytest.mark.parametrize("size", [3.0, 0.1, 1e-3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules_are_exact(name, size):
    """In float64 the difference by rules is the plain one, for steps large and small, over the kinks too."""
    rng = np.random.default_rng(0)
    start, by = jnp.asarray(rng.normal(size=(4, 5))), jnp.asarray(size * rng.normal(size=(4, 5)))
    value, amount = moved(FUNCTIONS[name], start, by)
    assert amount is not UNKNOWN
    expected = FUNCTIONS[name](start + by) - FUNCTIONS[name](start)
    np.testing.assert_allclose(value, FUNCTIONS[name](start + by), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(amount, expected, rtol=1e-8, atol=1e-13 * max(size, 1))


JOINED = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a / (1 + b**2),
    jnp.maximum,
    lambda a, b: jnp.where(a > b, a, 2 * b),
    lambda a, b: jnp.where(CHOSEN, a, b),
    lambda a, b: jnp.concatenate([a[:1], b[1:]]),
]


@pytest.mark.parametrize("seed", range(30))
def test_rules_one_after_another(seed):
    """Three functions in a row, joined with what went in, at random."""
    rng = np.random.default_rng(seed)
    start, by = jnp.asarray(rng.normal(size=(4, 5))), jnp.asarray([2, 0.1, 1e-3][seed % 3] * rng.normal(size=(4, 5)))
    fitting = [f for name, f in FUNCTIONS.items() if name != "centred over the batch" and f(start).shape == start.shape]
    chosen = [(fitting[rng.integers(len(fitting))], JOINED[rng.integers(len(JOINED))]) for _ in range(3)]

    def function(x):
        for own, join in chosen:
            x = join(jnp.tanh(own(x)), x)
        return x

    value, amount = moved(function, start, by)
    now, before = function(start + by), function(start)
    np.testing.assert_allclose(value, now, rtol=1e-11, atol=1e-12)
    assert amount is not UNKNOWN
    np.testing.assert_allclose(amount, now - before, rtol=1e-7, atol=1e-12 * (1 + float(jnp.max(jnp.abs(now)))))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "pieces"])
def test_a_step_below_rounding_survives(name):
    """In float32, a step of a billionth: plain differences are zero or noise, those by rules have five digits."""
    rng = np.random.default_rng(1)
    start = rng.normal(size=(4, 5)).astype(np.float32)
    by = (1e-9 * rng.normal(size=(4, 5))).astype(np.float32)
    _, amount = moved(FUNCTIONS[name], jnp.asarray(start), jnp.asarray(by))
    slope = jax.jvp(FUNCTIONS[name], (jnp.asarray(start, jnp.float64),), (jnp.asarray(by, jnp.float64),))[1]
    assert amount.dtype == jnp.float32
    np.testing.assert_allclose(amount, slope, rtol=2e-4, atol=2e-5 * float(jnp.max(jnp.abs(slope))))
    plain = FUNCTIONS[name](jnp.asarray(start + by)) - FUNCTIONS[name](jnp.asarray(start))
    assert float(jnp.max(jnp.abs(plain - slope))) > 0.1 * float(jnp.max(jnp.abs(slope)))


def test_kinks_on_the_way():
    """Numbers that cross a kink by less than the rounding of the result: hard_tanh at one, where x = 1 + 2⁻²³ was 1 - 2⁻²⁴."""
    x, by = jnp.array([1 + 2**-23], jnp.float32), jnp.array([3 * 2**-24], jnp.float32)
    for function in (jax.nn.hard_tanh, lambda x: jnp.minimum(x, 1), lambda x: jnp.clip(x, -1, 1)):
        _, amount = moved(function, x - by, by)
        np.testing.assert_array_equal(amount, np.float32(2**-24))
    _, amount = moved(jax.nn.relu, jnp.array([-1e-9, 2e-9], jnp.float32), jnp.array([3e-9, -3e-9], jnp.float32))
    np.testing.assert_allclose(amount, [2e-9, -2e-9], rtol=1e-6)


FAR = {
    "root of what was nearly zero": (jnp.sqrt, 1e-12, 2.0),
    "inverse root of what was nearly zero": (jax.lax.rsqrt, 1e-10, 1.0),
    "logarithm of what was nearly zero": (jnp.log, 1e-10, 1.0),
    "logarithm behind a kink": (lambda x: jnp.log(jax.nn.relu(x) + 1e-8), -1.0, 0.5),
    "logarithm of one more, nearly zero": (jnp.log1p, -1 + 1e-6, 5.0),
    "softplus": (jax.nn.softplus, -90.0, 3.0),
    "quotient of what was zero": (lambda x: x / (jnp.abs(x) + 1e-8), 0.0, 1.0),
    "quotient behind a kink": (lambda x: 1 / (jax.nn.relu(x) + 1e-6), -1.0, 30.0),
    "quotient that grows": (lambda x: 1 / (jax.nn.relu(x) + 1e-6), 30.0, -1.0),
    "normalised": (lambda x: x * jax.lax.rsqrt(jnp.mean(x * x) + 1e-6), 1e-5, 7.0),
    "logarithm of infinity's other end": (lambda x: jnp.maximum(jnp.log(jax.nn.relu(x)), -10.0), -1.0, 0.5),
    "masked by infinity": (lambda x: jnp.maximum(jnp.where(CHOSEN[:1, :2], x, -jnp.inf), -jnp.inf), 0.5, 0.7),
    "sigmoid in its tail": (jax.nn.sigmoid, -20.0, -15.0),
    "sigmoid far in its tail": (lambda x: jnp.log(jax.nn.sigmoid(x)), -25.0, -24.9),
    "sigmoid at its upper end": (lambda x: jax.nn.sigmoid(x) - 1, 3.0, 2.5),
}


@pytest.mark.parametrize("name", FAR)
def test_long_ways_from_what_was_nearly_zero(name):
    """In float32, where the start is lost in the rounding of what came after it: as exact as the plain difference."""
    function, start, end = FAR[name]
    start, end = (np.full((1, 2), part, np.float32) for part in (start, end))
    _, amount = moved(function, jnp.asarray(start), jnp.asarray(end - start))
    exact = np.asarray(function(jnp.asarray(end, jnp.float64))) - np.asarray(function(jnp.asarray(start, jnp.float64)))
    same = np.asarray(function(jnp.asarray(end, jnp.float64))) == np.asarray(function(jnp.asarray(start, jnp.float64)))
    np.testing.assert_allclose(amount, np.where(same, 0, exact), rtol=1e-5)


def test_what_is_chosen_among_truths_and_whole_numbers():
    """Truths at the start are chosen like numbers; whole numbers have no rules; and what fills a gap has not moved."""
    start, by = jnp.array([[-1.0, 0.5, 2.0, -0.2]]), jnp.array([[2.0, 0.1, -3.0, 0.1]])
    mask = np.array([[True, False, True, False]])
    functions = [
        lambda x: jnp.where(jnp.where(mask, x > 0, x > 1), x, 2 * x),
        lambda x: x.at[0, jnp.array([0, 3, 9])].get(mode="fill", fill_value=1.0),
        lambda x: jnp.where(jax.lax.div(jnp.where(x > 0, 7, 1), 2) > 1, x, 2 * x),
    ]
    for function in functions:
        np.testing.assert_allclose(moved(function, start, by)[1], function(start + by) - function(start), rtol=1e-12)
    assert moved(lambda x: jax.lax.div(jnp.where(x > 0, 7, 1), 2), start, by)[1] is UNKNOWN
    assert moved(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), start, by)[1] is UNKNOWN


class Mixed(pcx.EnergyModule):
    """Blocks of one shape of which the first skips from the input and the others from a node."""

    def __init__(self, join):
        with pxnn.keys(jax.random.key(0)):
            self.layers, self.skips = ([pxnn.Linear(6, 6) for _ in range(6)] for _ in range(2))
        self.vodes, self.join = [pcx.Vode((6,)) for _ in range(6)], join

    def __call__(self, x):
        now = before = x
        for layer, skip, vode in zip(self.layers, self.skips, self.vodes, strict=True):
            now, before = vode(jnp.tanh(layer(now)) + self.join(skip, before)), now
        return now


@pytest.mark.parametrize(
    "join",
    [lambda skip, x: x, lambda skip, x: skip(x), lambda skip, x: x / jnp.sqrt(1e-6 + jnp.sum(x * x)), lambda skip, x: x * x],
    ids=["the value", "a product", "normalised", "squared"],
)
def test_equal_layers_of_which_one_reads_the_input(join):
    model, (x, y) = Mixed(join), jax.random.normal(jax.random.key(1), (2, 4, 6))

    def learn(**choice):
        options = {"state_optimiser": optax.sgd(0.1, momentum=0.5), "weight_optimiser": (sgd := optax.sgd(1.0)), "steps": 12}
        done = pcx.train_step(model, x, {"vodes.5": y}, weight_state=sgd.init(pcx.weights(model)), **options, **choice)
        return done.inferred.values, done.energies, pcx.weights(done.model)

    naive, exact = learn(shortcuts=pcx.NO_SHORTCUTS), learn(state_dtype=jnp.float64)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), naive, exact)


def test_what_has_no_rule_is_unknown_and_what_stands_still_is_fixed():
    ones = jnp.ones((3, 3))
    assert moved(jnp.sort, ones, ones)[1] is UNKNOWN
    assert moved(lambda x: jnp.tanh(jnp.sort(x)) + x, ones, ones)[1] is UNKNOWN
    assert moved(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: 2 * x, x), ones, ones)[1] is UNKNOWN
    assert moved(lambda x: jnp.tanh(jnp.ones(3)), ones, ones)[1] is differences.FIXED


def test_a_tied_number_has_the_derivative_of_what_it_is_tied_to():
    def function(x, y):
        return differences.tied(jnp.float64(5.0), jnp.sin(x) * y, jnp.asarray(y) ** 2)

    def plain(x, y):
        return jnp.sin(x) * y - y**2

    for order in (lambda f: f, lambda f: lambda x, y: jax.grad(f, argnums=(0, 1))(x, y)[1]):
        found = jax.grad(order(function), argnums=(0, 1))(0.3, 0.7)
        np.testing.assert_allclose(found, jax.grad(order(plain), argnums=(0, 1))(0.3, 0.7), rtol=1e-12)
    assert function(0.3, 0.7) == 5.0


class Residual(pcx.EnergyModule):
    """Blocks ``u = h + ½ W₂ a(W₁ h)``, so that a prediction moves by as much as the value that it reads."""

    def __init__(self, depth, width, activation):
        with pxnn.keys(jax.random.key(0)):
            self.first = [pxnn.Linear(width, width) for _ in range(depth)]
            self.second = [pxnn.Linear(width, width) for _ in range(depth)]
            self.head = pxnn.Linear(width, 3)
        self.vodes = [pcx.Vode() for _ in range(depth + 1)]
        self.activation = activation

    def __call__(self, x):
        for first, second, vode in zip(self.first, self.second, self.vodes[:-1], strict=True):
            x = vode(x + 0.5 * second(self.activation(first(x))))
        return self.vodes[-1](self.head(x))


def gradient(model, x, y, shortcuts=pcx.ALL_SHORTCUTS, state_dtype=None):
    last = f"vodes.{len(model.vodes) - 1}"
    done = pcx.infer(
        model, x, {last: y}, optimiser=optax.sgd(1e-3), steps=8, shortcuts=shortcuts, unroll=True, state_dtype=state_dtype
    )
    settled = done.values if done.displaced is None else done.displaced
    return pcx.weight_gradient(model, lambda u: pcx.deltas(model, settled, u), settled, x)


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.gelu, jnp.tanh], ids=["relu", "gelu", "tanh"])
def test_gradients_behind_skip_connections(activation, stack):
    """Weight gradients of a residual network in float32 have the direction of float64, not those of noise.

    The reference is the same network in float64 with values as differences from the start, and no other shortcut.
    """
    model = Residual(6, 8, activation)
    x, y = jax.random.normal(jax.random.key(1), (16, 8)) + 3, jnp.arange(16) % 3
    single = jax.tree.map(lambda a: a.astype(jnp.float32), model)
    exact = gradient(model, x, y, pcx.Shortcuts(wave=False, constant=False, stack=False), jnp.float64)
    found = gradient(single, x.astype(jnp.float32), y, pcx.Shortcuts(stack=stack))
    plain = gradient(single, x.astype(jnp.float32), y, pcx.Shortcuts(stack=stack, anchor=False))

    def cosines(other):
        pairs = [(np.asarray(a, np.float64).ravel(), np.asarray(b).ravel()) for a, b in zip(other, exact.first, strict=True)]
        return [a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300) for a, b in pairs]

    exact.first, found.first, plain.first = ([layer.weight for layer in part.first] for part in (exact, found, plain))
    assert min(cosines(found.first)) > 0.9999
    assert min(cosines(plain.first)) < 0.9


def test_errors_do_not_read_where_values_started():
    """They are the same if that is not even a number: nothing large is subtracted from them."""
    model = jax.tree.map(lambda a: a.astype(jnp.float32), Residual(4, 8, jax.nn.relu))
    x, y = jax.random.normal(jax.random.key(1), (2, 8), jnp.float32), jnp.zeros(2, int)
    settled = pcx.infer(model, x, {"vodes.4": y}, optimiser=optax.sgd(0.1), steps=8).displaced
    assert [name for name, gap in settled.gap.items() if gap is not None] == ["vodes.4"]
    lost = settled._replace(start=jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), settled.start))
    seen = {}

    def delta(u):
        seen["kept"], seen["lost"] = (pcx.deltas(model, values, u) for values in (settled, lost))
        return seen["kept"]

    pcx.weight_gradient(model, delta, settled, x)
    assert min(float(jnp.max(jnp.abs(error))) for error in seen["kept"].values()) > 0
    jax.tree.map(np.testing.assert_array_equal, dict(seen["kept"]), dict(seen["lost"]))


class Between(pcx.EnergyModule):
    """Two dense layers with any function between a node and the layer after it."""

    def __init__(self, between):
        with pxnn.keys(jax.random.key(0)):
            self.first, self.second = pxnn.Linear(5, 16), pxnn.Linear(16, 3)
            self.between = between
        self.vodes = [pcx.Vode() for _ in range(2)]

    def __call__(self, x):
        return self.vodes[1](self.second(self.between(self.vodes[0](self.first(x))).reshape(-1)))


def image(x):
    return x.reshape(1, 4, 4)


def attention(x):
    rows = x.reshape(4, 4)
    return jax.nn.softmax(rows @ rows.T) @ rows


LAYERS = {
    "dropout": lambda: pxnn.Dropout(0.4),
    "layer norm": lambda: pxnn.LayerNorm((16,)),
    "layer norm of what is small": lambda: lambda x: pxnn.LayerNorm((16,))(1e-3 * x),
    "length one": lambda: lambda x: x / (1e-6 + jnp.linalg.norm(x)),
    "masked": lambda: lambda x: jax.nn.sigmoid(jnp.where(np.arange(16) % 2, x, -jnp.inf)),
    "batch norm": lambda: pxnn.BatchNorm(16),
    "batch norm in every step": lambda: pxnn.BatchNorm(16, statistics="batch"),
    "attention": lambda: attention,
    "softmax": lambda: jax.nn.softmax,
    "logsumexp": lambda: lambda x: x - jax.nn.logsumexp(x),
    "sorted": lambda: jnp.sort,
    "by its order": lambda: lambda x: x[jnp.argsort(-x)] * jnp.arange(16),
    "largest of three": lambda: lambda x: jnp.concatenate([jax.lax.top_k(x, 3)[0], x[3:]]),
    "mean pooling": lambda: lambda x: jnp.tile(pxnn.AvgPool2d(2)(image(x)).reshape(-1), 4),
    "3×3 pooling": lambda: lambda x: jnp.tile(pxnn.MaxPool2d(3, stride=1)(image(x)).reshape(-1), 4),
    "2×2 pooling": lambda: lambda x: jnp.tile(pxnn.MaxPool2d(2).of(image(x), jax.nn.gelu).reshape(-1), 4),
    "transform": lambda: lambda x: jnp.abs(jnp.fft.fft(x)),
    "rounded": lambda: lambda x: x + jnp.floor(4 * x),
    "loop": lambda: lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x) + x, x),
    "branch": lambda: lambda x: jax.lax.cond(x[0] > 0, jnp.tanh, lambda x: 2 * x, x),
    "standardised": lambda: jax.nn.standardize,
    "power": lambda: lambda x: jnp.abs(x) ** 1.5 + x**0 + (2 + jnp.tanh(x)) ** -2,
    "counted": lambda: lambda x: x * jnp.sum(x > 0),
    "product": lambda: lambda x: x * jnp.prod(1 + 0.1 * x),
    "matrix": lambda: lambda x: jnp.linalg.solve(image(x)[0] + 9 * jnp.eye(4), image(x)[0]),
    "gated": lambda: lambda x: jnp.concatenate([jax.nn.glu(x), jax.nn.sigmoid(x[:8])]),
    "angle": lambda: lambda x: jnp.arctan2(x, 1 + x**2) + jnp.arcsinh(x),
}


@pytest.mark.parametrize("name", LAYERS)
def test_whatever_stands_between_two_nodes(name):
    """Anchored in float64, values, errors and weight gradients are those of the naive path; in float32 they are near them."""
    between = LAYERS[name]()
    model = Between(between)
    x, y = jax.random.normal(jax.random.key(1), (6, 5)), jnp.arange(6) % 3
    options = {"key": jax.random.key(2), "training": True}

    def learn(model, x, **choice):
        done = pcx.infer(model, x, {"vodes.1": y}, optimiser=optax.sgd(0.05, momentum=0.5), steps=6, **options, **choice)
        settled = done.values if done.displaced is None else done.displaced
        return done.values, pcx.weight_gradient(model, lambda u: pcx.deltas(model, settled, u), settled, x, **options)

    naive = learn(model, x, shortcuts=pcx.NO_SHORTCUTS)
    exact = learn(model, x, state_dtype=jnp.float64)
    single = learn(jax.tree.map(lambda a: a.astype(jnp.float32), model), x.astype(jnp.float32))
    for here, there, near in zip(*map(jax.tree.leaves, (exact, naive, single)), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(near, there, rtol=1e-3, atol=1e-4)
    assert float(jnp.max(jnp.abs(naive[0]["vodes.0"] - pcx.run(model, {}, x, **options).values["vodes.0"]))) > 1e-2


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "hard_tanh", "tanh"])
def test_small_errors_come_through_every_pooling(activation):
    """The way of the first node, far below the last bit of its values, as in float64: also where pixels are chosen by gelu."""
    pxnn.seed(0)
    model = VGG((3, 16, 16), 5, [8] * 3, [1] * 3, [True, True, False], activation)
    x, y = jax.random.normal(jax.random.key(1), (4, 3, 16, 16)), jax.nn.one_hot(jnp.arange(4), 5)

    def first(dtype):
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, (model, x, y))
        options = {"optimiser": optax.sgd(1e-3, momentum=0.5), "steps": 6, "state_dtype": dtype}
        done = jax.jit(lambda model, x, y: pcx.infer(model, x, {"vodes.3": y}, **options).displaced)(*cast)
        return np.asarray(done.by["vodes.0"], np.float64), float(jnp.max(jnp.abs(done.start["vodes.0"])))

    (mine, size), (exact, _) = first(jnp.float32), first(jnp.float64)
    assert 0 < np.max(np.abs(exact)) < 1e-7 * size
    np.testing.assert_allclose(mine, exact, atol=1e-4 * np.max(np.abs(exact)))
