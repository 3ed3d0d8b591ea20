"""Anchored products: nothing changes in exact arithmetic, and errors far below the rounding of a value survive."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Chain, Convolutional, Skip, batch, largest_difference

import pcx
from pcx._types import Displaced
from pcx.algorithms import bp, ipc, pc
from pcx.shortcuts import products
from pcx.shortcuts.zeros import count

PLAIN = pcx.Shortcuts(anchor=False)
TF32 = "tensorfloat32"  # on a CPU, and in float64, products are not rounded: only the order of the sums differs


def settle(model, x, observed, precision=None, **options):
    options = {"optimiser": optax.sgd(0.1, momentum=0.5), "steps": 6} | options
    with jax.default_matmul_precision(precision):
        return eqx.filter_jit(lambda x, o: pcx.infer(model, x, o, **options))(x, observed)


MODELS = {
    "chain": (lambda: Chain([3, 4, 5, 4, 2]), (3,)),
    "skip": (lambda: Skip(4, 4, 2), (4,)),
    "convolutional": (Convolutional, (3, 8, 8)),
}


def problem(name):
    make, shape = MODELS[name]
    model, (x, _) = make(), batch(shape, 2, size=3)
    last = list(pcx.run(model, {}, x).values)[-1]
    return model, x, {last: jax.random.normal(jax.random.key(8), pcx.run(model, {}, x).values[last].shape)}


@pytest.mark.parametrize("steps", [0, 1, 3, 12])
@pytest.mark.parametrize("init", ["forward", "zeros"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_in_exact_arithmetic(name, init, steps):
    """In float64 the anchored path is the naive one, and says by how much every node has moved."""
    model, x, observed = problem(name)
    naive = settle(model, x, observed, steps=steps, init=init, shortcuts=pcx.NO_SHORTCUTS)
    anchored = settle(model, x, observed, TF32, steps=steps, init=init, shortcuts=pcx.Shortcuts(stack=False))
    assert naive.displaced is None
    assert largest_difference(naive.values, anchored.values) < 1e-13
    assert largest_difference(anchored.displaced.values, anchored.values) == 0
    start = pcx.initialise(model, x, observed, init=init)
    assert largest_difference(anchored.displaced.start, start) < 1e-15


@pytest.mark.parametrize("name", MODELS)
def test_equal_weights(name):
    model, x, observed = problem(name)
    optimiser = optax.sgd(1.0)
    options = {"state_optimiser": optax.sgd(0.1), "weight_optimiser": optimiser, "steps": 8}
    options["weight_state"] = optimiser.init(pcx.weights(model))
    learned = {}
    for precision, shortcuts in ((None, pcx.NO_SHORTCUTS), (TF32, pcx.Shortcuts(stack=False))):
        with jax.default_matmul_precision(precision):
            step = eqx.filter_jit(lambda x, o, s=shortcuts: pcx.train_step(model, x, o, shortcuts=s, **options))
            learned[precision] = step(x, observed)
    assert learned[TF32].inferred.displaced is not None
    assert largest_difference(pcx.weights(learned[None].model), pcx.weights(learned[TF32].model)) < 1e-13
    assert largest_difference(learned[None].energies, learned[TF32].energies) < 1e-13


def test_equal_with_tolerance_record_and_parts():
    model, x, observed = problem("chain")
    part = pcx.Observed(jnp.zeros((3, 5)), jnp.arange(5) < 2)
    options = {"tolerance": 1e-6, "steps": 400, "record": pcx.record_energies, "optimiser": optax.sgd(0.1)}
    seen = {**observed, "vodes.1": part}
    naive = settle(model, x, seen, shortcuts=pcx.NO_SHORTCUTS, **options)
    anchored = settle(model, x, seen, TF32, shortcuts=pcx.Shortcuts(stack=False), **options)
    assert anchored.displaced is not None
    np.testing.assert_array_equal(naive.steps, anchored.steps)
    assert largest_difference(naive.values, anchored.values) < 1e-12
    assert largest_difference(naive.history, anchored.history) < 1e-12
    np.testing.assert_array_equal(anchored.values["vodes.1"][:, :2], 0)


def linear_chain(depth, width, rate):
    """The displacements of all nodes of a linear chain when the error has just arrived at the first one, in float64.

    At that moment node l has moved k = depth - 1 - l edges from the output; only the first step of the error counts for the
    first node: it is ``rate^k W' ... W' e``.
    """
    draw = np.random.default_rng(0)
    weights = [draw.normal(size=(width, width)) / np.sqrt(width) for _ in range(depth)]
    x, y = draw.normal(size=(2, 3, width))
    h = x
    for w in weights:
        h = h @ w.T
    first = y - h
    for w in weights[:0:-1]:
        first = rate * first @ w
    return weights, x, y, first


@pytest.mark.parametrize("precision", ["float32", TF32, "bfloat16"])
def test_errors_below_the_rounding_of_a_value_survive(precision):
    """Five layers at a rate of 0.01: the first node moves by 1e-8 of its value, a sixth of what float32 can hold there.

    The displacement and the weight gradient it makes agree with float64 by hand to the precision of the products. Plain
    values lose them completely.
    """
    weights, x, y, first = linear_chain(5, 6, 0.01)
    model = Chain([6] * 6, activation=lambda u: u, bias=False)
    pairs = zip(model.layers, weights, strict=True)
    model.layers = [eqx.tree_at(lambda linear: linear.weight, layer, jnp.asarray(w)) for layer, w in pairs]
    model = jax.tree.map(lambda a: a.astype(jnp.float32), model)
    options = {"state_optimiser": optax.sgd(0.01), "weight_optimiser": optax.sgd(1.0), "steps": 4}
    options["weight_state"] = optax.sgd(1.0).init(pcx.weights(model))
    found = {}
    for name, shortcuts in (("anchored", pcx.Shortcuts(stack=False)), ("plain", pcx.Shortcuts(stack=False, anchor=False))):
        with jax.default_matmul_precision(precision):
            step = eqx.filter_jit(lambda x, y, s=shortcuts: pcx.train_step(model, x, {"vodes.4": y}, shortcuts=s, **options))
            found[name] = step(x.astype(np.float32), y.astype(np.float32))

    def wrong(values, expected):
        return float(np.linalg.norm(np.asarray(values, np.float64) - expected) / np.linalg.norm(expected))

    gradient = first.T @ x / 3
    size = np.abs(first).max() / np.abs(np.asarray(found["plain"].inferred.values["vodes.0"])).max()
    assert size < 1e-7
    precise = 3e-2 if precision == "bfloat16" else 1e-5
    assert wrong(found["anchored"].inferred.displaced.by["vodes.0"], first) < precise
    energy = float(jnp.sum(found["anchored"].energies["vodes.0"]))
    assert energy == pytest.approx(0.5 * np.sum(first**2), rel=2 * precise)
    moved = found["anchored"].inferred.displaced
    errors = pcx.deltas(model, moved, {"vodes.0": found["anchored"].inferred.forward.predictions["vodes.0"]})
    learned = pcx.weight_gradient(model, errors, moved, x.astype(np.float32))
    assert wrong(-learned.layers[0].weight, gradient) < precise
    values = np.asarray(found["plain"].inferred.values["vodes.0"], np.float64)
    assert wrong(values - np.asarray(found["plain"].inferred.forward.values["vodes.0"], np.float64), first) > 0.1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("init", ["forward", "zeros"])
def test_stacked_layers_are_anchored_too(init, precision):
    """Equal layers in one array have the displacements of lone ones, to a rounding of float32 relative to each node's own."""
    model = jax.tree.map(lambda a: a.astype(jnp.float32), Chain([4] * 9 + [2]))
    x, y = (a.astype(jnp.float32) for a in batch(4, 2, size=3))
    options = {"init": init, "steps": 12, "optimiser": optax.sgd(0.05, momentum=0.5)}
    stacked, lone = (
        settle(model, x, {"vodes.8": y}, precision, shortcuts=pcx.Shortcuts(stack=s), **options) for s in (True, False)
    )
    for name, by in lone.displaced.by.items():
        size = float(jnp.linalg.norm(by))
        rounding = 1e-2 if precision == "bfloat16" else 1e-4
        assert float(jnp.linalg.norm(stacked.displaced.by[name] - by)) <= rounding * size, name
    exact = settle(Chain([4] * 9 + [2]), x.astype(jnp.float64), {"vodes.8": y.astype(jnp.float64)}, **options)
    first = exact.values["vodes.0"] - exact.forward.values["vodes.0"]
    wrong = float(jnp.linalg.norm(stacked.displaced.by["vodes.0"] - first) / jnp.linalg.norm(first))
    assert wrong < 0.05


def test_bfloat16_rounds_the_displacement_only():
    """``u = W h₀ + (bf16(W) bf16(d))`` for a linear layer, where d is the displacement of its input: by hand, bit by bit."""
    model = jax.tree.map(lambda a: a.astype(jnp.float32), Chain([3, 4, 2], activation=lambda u: u, bias=False))
    x, y = (a.astype(jnp.float32) for a in batch(3, 2, size=3))
    with jax.default_matmul_precision("bfloat16"):
        done = pcx.infer(model, x, {"vodes.1": y}, optimiser=optax.sgd(0.1), steps=1, record=pcx.record_energies)
    w = model.layers[1].weight
    low = w.astype(jnp.bfloat16)
    start = done.forward
    error = (y - start.predictions["vodes.1"]).astype(jnp.bfloat16)
    d = 0.1 * (error @ low).astype(jnp.float32)
    np.testing.assert_allclose(done.displaced.by["vodes.0"], d, rtol=1e-6)
    u = start.predictions["vodes.1"] + (done.displaced.by["vodes.0"].astype(jnp.bfloat16) @ low.T).astype(jnp.float32)
    expected = 0.5 * jnp.sum((y - u) ** 2, axis=1)
    np.testing.assert_allclose(done.history["vodes.1"][1], expected, rtol=1e-6)


def operand_types(step, *arguments):
    """The dtypes of the operands of all products in a traced function."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in products.PRODUCTS:
                found.append(tuple(str(v.aval.dtype) for v in eqn.invars))
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")):
                if hasattr(inner, "jaxpr"):
                    walk(inner.jaxpr)

    walk(jax.make_jaxpr(step)(*arguments).jaxpr)
    return found


@pytest.mark.parametrize("algorithm", [bp, pc, ipc], ids=["bp", "pc", "ipc"])
def test_which_products_are_in_bfloat16(algorithm):
    """Backpropagation and predictive coding: all. iPC, whose weights move: all derivatives."""
    model = jax.tree.map(lambda a: a.astype(jnp.float32), Chain([3, 4, 2]))
    x, y = (a.astype(jnp.float32) for a in batch(3, 2, size=3))
    made = algorithm.make(next(iter(algorithm.VARIANTS.values())))
    state = made.init(model, x, y, jax.random.key(0))
    arrays, static = eqx.partition(state, eqx.is_array)

    def step(arrays, x, y):
        return eqx.filter(made.step(eqx.combine(arrays, static), x, y, jax.random.key(0)), eqx.is_array)

    with jax.default_matmul_precision("bfloat16"):
        kinds = operand_types(step, arrays, x, y)
    low = [kind for kind in kinds if kind == ("bfloat16", "bfloat16")]
    full = [kind for kind in kinds if kind == ("float32", "float32")]
    assert len(low) + len(full) == len(kinds)
    # low and full. BP: forward, back through the second layer, two weight gradients.
    # PC, T = 8: 8 errors sent back, 7 predictions at moved values, then 1 more and two weight gradients; the forward pass, and
    # the two anchors (of inference and of learning) that the compiler finds equal to it.
    # iPC: in the body of its loop the derivative for the hidden node and two weights; two predictions there, and the start.
    expected = {bp: (2 + 1 + 2, 0), pc: (8 + 7 + 1 + 2 + 2 + 2 + 2, 0), ipc: (1 + 2, 2 + 2)}
    assert (len(low), len(full)) == expected[algorithm]


def test_no_product_more_in_the_compiled_program():
    """The anchor's products are those of the forward pass: the compiler finds them equal, so that nothing is done twice."""
    model = jax.tree.map(lambda a: a.astype(jnp.float32), Chain([3, 5, 6, 7, 2]))
    x, y = (a.astype(jnp.float32) for a in batch(3, 2, size=3))
    options = {"optimiser": optax.sgd(0.1), "steps": 6}

    def program(shortcuts):
        function = jax.jit(lambda x, y: pcx.infer(model, x, {"vodes.3": y}, shortcuts=shortcuts, **options).values)
        return function.lower(x, y).compile({"xla_backend_optimization_level": 3}).as_text()

    def dots(text):
        return sum(" dot(" in line or "__onednn$matmul" in line for line in text.splitlines())

    # steps 0 to 5 need 0, 1, 2, 3, 3, 3 predictions from inputs that have moved (the first layer's does not), and
    # 1, 2, 3, 3, 3, 3 errors sent back; the forward pass has 4 products
    assert dots(program(pcx.ALL_SHORTCUTS)) == dots(program(PLAIN)) == 4 + (0 + 1 + 2 + 3 * 3) + (1 + 2 + 3 * 4)


def test_no_product_more_in_a_compiled_training_step():
    """The weight pass anchors its products at the same forward pass."""
    model = jax.tree.map(lambda a: a.astype(jnp.float32), Chain([3, 5, 6, 7, 2]))
    x, y = (a.astype(jnp.float32) for a in batch(3, 2, size=3))
    optimiser = optax.sgd(0.1)
    options = {"state_optimiser": optax.sgd(0.1), "weight_optimiser": optimiser, "steps": 6}

    def dots(shortcuts):
        def step(x, y):
            state = optimiser.init(pcx.weights(model))
            done = pcx.train_step(model, x, {"vodes.3": y}, weight_state=state, shortcuts=shortcuts, **options)
            return pcx.weights(done.model)

        text = jax.jit(step).lower(x, y).compile({"xla_backend_optimization_level": 3}).as_text()
        return sum(" dot(" in line or "__onednn$matmul" in line for line in text.splitlines())

    # the products of inference (see above), then 3 predictions at the settled values and 4 weight gradients
    assert dots(pcx.ALL_SHORTCUTS) == dots(PLAIN) == 31 + 3 + 4


def test_errors_sent_back_by_turned_kernels(monkeypatch):
    """For small images, on a GPU in tensorfloat32: the same numbers, and no convolution more."""
    model, x, observed = problem("convolutional")
    plain = settle(model, x, observed, TF32)
    monkeypatch.setattr(products, "on_gpu", lambda: True)
    turned = settle(model, x, observed, TF32)
    assert largest_difference(plain.values, turned.values) < 1e-13

    def programs(limit):
        monkeypatch.setattr(products, "SMALL", limit)
        with jax.default_matmul_precision(TF32):
            options = {"optimiser": optax.sgd(0.1), "steps": 6}
            return jax.make_jaxpr(lambda x, o: pcx.infer(model, x, o, **options).values)(x, observed).jaxpr

    small, none = programs(64), programs(0)
    assert count(small) == count(none)
    assert count(small, ["rev"]) > count(none, ["rev"]) > 0  # each derivative turns its kernel, then back


def subtractions_from_itself(jaxpr) -> int:
    parameters = [getattr(p, "jaxpr", p) for eqn in jaxpr.eqns for p in eqn.params.values()]
    inner = [p for p in parameters if hasattr(p, "eqns")]
    here = sum(eqn.primitive.name == "sub" and eqn.invars[0] is eqn.invars[1] for eqn in jaxpr.eqns)
    return here + sum(map(subtractions_from_itself, inner))


@pytest.mark.parametrize("name", MODELS)
def test_a_constant_prediction_that_is_the_start_is_not_read(name):
    """The first node's error is then its displacement: no ``u - h₀`` of two arrays that are one."""
    model, x, observed = problem(name)
    options = {"optimiser": optax.sgd(0.1), "steps": 6, "shortcuts": pcx.Shortcuts(stack=False)}
    with jax.default_matmul_precision(TF32):
        program = jax.make_jaxpr(lambda x, o: pcx.infer(model, x, o, **options).values)(x, observed)
    assert subtractions_from_itself(program.jaxpr) == 0


def test_products_inside_of_jit_are_found():
    def function(x, w):
        return jnp.sum(jax.jit(lambda x: jnp.tanh(x @ w))(x) @ w)

    x, w = jnp.ones((2, 3)), jnp.eye(3)
    with jax.default_matmul_precision("bfloat16"):
        assert set(operand_types(products.rounded(function), x, w)) == {("bfloat16", "bfloat16")}
        assert products.rounded(function)(x, w) == pytest.approx(float(function(x, w)), rel=1e-2)
    assert products.rounded(function) is function


def test_sums_differ_from_those_at_the_start_by_what_has_moved():
    """A thousand numbers near 1000 move by about 1e-3. In float32 a sum may be off by as much as it moves, if not anchored."""
    rng = np.random.default_rng(0)
    start = (1000 + rng.normal(size=(1000, 6))).astype(np.float32)
    now = (start + rng.normal(1e-3, 1e-4, size=start.shape)).astype(np.float32)
    closed = jax.make_jaxpr(lambda x: jnp.sum(x, axis=0))(start)
    variable, anchor = closed.jaxpr.invars[0], products.Anchor()

    def total(x, product, away):
        return products.interpret(closed.jaxpr, closed.jaxpr.eqns, {variable: x}, closed.jaxpr.outvars, product, away)[0][0]

    base = total(jnp.asarray(start), anchor.record, {})
    moved = np.sum(now.astype(np.float64) - start, axis=0)  # about 1, where numbers of this size are 1/16 apart
    found = total(jnp.asarray(now), anchor.product, {variable: products.UNKNOWN})
    assert np.abs(np.asarray(found, np.float64) - base - moved).max() <= 0.5 * np.spacing(np.float32(1e6)) + 1e-4
    known = total(jnp.asarray(now), anchor.product, {variable: jnp.full_like(start, 2**-10)})
    np.testing.assert_array_equal(known, base + jnp.float32(1000 / 2**10))
    np.testing.assert_array_equal(total(jnp.asarray(start), anchor.product, {variable: products.UNKNOWN}), base)
    far = jnp.ones_like(start)  # of which a sum that starts at a million has no digit left
    np.testing.assert_array_equal(total(far, anchor.product, {variable: products.UNKNOWN}), np.full(6, 1000.0))
    one_by_one = [array[:, 0].cumsum(dtype=np.float32)[-1] for array in (now, start)]  # as a compiler may also take it
    assert abs(one_by_one[0] - one_by_one[1] - moved[0]) > 0.3


@pytest.mark.parametrize("precision", [None, TF32, "bfloat16"])
def test_batch_statistics_have_their_derivatives(precision):
    """Anchored at a start that is not where it is: the gradient of batch normalisation is that of plain JAX."""
    x, z0 = jax.random.normal(jax.random.key(0), (9, 3)), jax.random.normal(jax.random.key(1), (9, 3))

    def normalised(x):
        centred = x - jnp.mean(x, axis=0)
        return jnp.sin(centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=0) + 0.1))

    closed = jax.make_jaxpr(normalised)(x)
    variable, anchor = closed.jaxpr.invars[0], products.Anchor()

    def run(x, product, away):
        return products.interpret(closed.jaxpr, closed.jaxpr.eqns, {variable: x}, closed.jaxpr.outvars, product, away)[0][0]

    with jax.default_matmul_precision(precision):
        run(z0, anchor.record, {})
        expected, plain = jax.vjp(normalised, x)
        for function in (
            lambda x: run(x, anchor.product, {variable: products.UNKNOWN}),
            lambda x: run(x, anchor.product, {variable: x - z0}),
        ):
            found, back = jax.vjp(function, x)
            assert largest_difference(found, expected) < 1e-14
            assert largest_difference(back(jnp.ones_like(x)), plain(jnp.ones_like(x))) < 1e-13


def test_displacements_follow_reshapes():
    """The displacement of a flattened node is the flattened displacement: no large numbers are subtracted on the way."""
    seen = []

    def product(eqn, operands, away, place):
        seen.append(away[0])
        return eqn.primitive.bind(*operands, **eqn.params), products.UNKNOWN

    def function(h, w):
        return h.reshape(2, 6) @ w, jnp.sort(h).reshape(2, 6) @ w

    closed = jax.make_jaxpr(function)(jnp.ones((2, 3, 2)), jnp.ones((6, 4)))
    h, w = closed.jaxpr.invars
    by = jnp.arange(12.0).reshape(2, 3, 2)
    known = {h: jnp.ones((2, 3, 2)), w: jnp.ones((6, 4))}
    products.interpret(closed.jaxpr, closed.jaxpr.eqns, known, closed.jaxpr.outvars, product, {h: by})
    np.testing.assert_array_equal(seen[0], by.reshape(2, 6))
    assert seen[1] is products.UNKNOWN


def test_the_sum_of_a_start_and_a_displacement():
    start, by = pcx.Nodes({"a": jnp.ones((2, 3))}), pcx.Nodes({"a": jnp.full((2, 3), 0.5)})
    np.testing.assert_array_equal(Displaced(start, by).values["a"], 1.5)


def test_float64_is_left_alone():
    """Where nothing is rounded nothing is anchored, and the shortcut can be refused where it would be taken."""
    model, x, observed = problem("chain")
    assert settle(model, x, observed).displaced is None
    half = jax.tree.map(lambda a: a.astype(jnp.float32), model)
    assert settle(half, x, observed, shortcuts=PLAIN).displaced is None
    assert settle(half, x, observed).displaced is not None


def test_counts_do_not_grow():
    """An anchored step has the products of a plain one; the pass that fills the anchor has one per layer."""
    model = jax.tree.map(lambda a: a.astype(jnp.float32), Chain([3, 4, 5, 2]))
    x, y = (a.astype(jnp.float32) for a in batch(3, 2, size=3))

    def total(steps, shortcuts):
        options = {"optimiser": optax.sgd(0.1), "steps": steps, "shortcuts": shortcuts}
        return count(jax.make_jaxpr(lambda x, y: pcx.infer(model, x, {"vodes.2": y}, **options).values)(x, y).jaxpr)

    anchored, plain = pcx.Shortcuts(stack=False), pcx.Shortcuts(stack=False, anchor=False)
    assert total(20, anchored) - total(10, anchored) == total(20, plain) - total(10, plain) == 10 * 4


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("optimiser", [optax.sgd(0.1, momentum=0.5), optax.adam(0.01)], ids=["momentum", "adam"])
def test_a_state_of_the_same_dtype_changes_nothing(optimiser, stack):
    model, (x, y) = Chain([4] * 7 + [2]), batch(4, 2, size=3)
    options = {"optimiser": optimiser, "steps": 10}
    naive = settle(model, x, {"vodes.6": y}, shortcuts=pcx.Shortcuts(stack=False, anchor=False), **options)
    kept = settle(model, x, {"vodes.6": y}, shortcuts=pcx.Shortcuts(stack=stack), state_dtype=jnp.float64, **options)
    assert largest_difference(naive.values, kept.values) < 1e-12
    assert largest_difference(kept.displaced.values, kept.values) == 0


def test_a_state_in_bfloat16_by_hand():
    """One free node, four steps with momentum: gradient, trace, update and displacement are rounded, nothing else."""
    model, (x, y) = Chain([3, 4, 2], activation=jnp.tanh), batch(3, 2, size=3)
    rate, momentum = 0.25, 0.5
    options = {"optimiser": optax.sgd(jnp.asarray(rate), momentum=jnp.asarray(momentum)), "steps": 4}
    # operation by operation: a compiler may leave out roundings between them
    found = pcx.infer(model, x, {"vodes.1": y}, state_dtype=jnp.bfloat16, **options)

    def rounded(a):
        return np.asarray(jnp.asarray(a).astype(jnp.bfloat16).astype(jnp.float64))

    w, b = (np.asarray(a) for a in (model.layers[1].weight, model.layers[1].bias))
    start = np.tanh(np.asarray(x) @ np.asarray(model.layers[0].weight).T + np.asarray(model.layers[0].bias))
    d, trace = np.zeros_like(start), np.zeros_like(start)
    for _ in range(4):
        gradient = rounded(d - (np.asarray(y) - (start + d) @ w.T - b) @ w)
        step = gradient + momentum * trace
        trace, d = rounded(step), rounded(d + rounded(-rate * step))
    by = found.displaced.by["vodes.0"]
    assert by.dtype == jnp.float64
    np.testing.assert_array_equal(by, d)
    np.testing.assert_allclose(found.values["vodes.0"], start + d, rtol=1e-14)
    assert [leaf.dtype for leaf in jax.tree.leaves(found.optimiser_state)] == [jnp.bfloat16]
    exact = settle(model, x, {"vodes.1": y}, **options)
    assert 1e-5 < largest_difference(found.values, exact.values) < 1e-2


@pytest.mark.parametrize("stack", [True, False])
def test_a_state_in_bfloat16_learns_nearly_the_same(stack):
    """A chain whose first errors are far below the rounding of a value: each weight's gradient keeps its direction."""
    model, (x, y) = Chain([4] * 7 + [2]), batch(4, 2, size=16)
    options = {"state_optimiser": optax.sgd(0.02, momentum=0.3), "weight_optimiser": optax.sgd(1.0), "steps": 9}
    options["weight_state"] = optax.sgd(1.0).init(pcx.weights(model))
    shortcuts = pcx.Shortcuts(stack=stack)
    trained = [
        eqx.filter_jit(
            lambda x, y, d=d: pcx.train_step(model, x, {"vodes.6": y}, state_dtype=d, shortcuts=shortcuts, **options)
        )(x, y)
        for d in (None, jnp.bfloat16)
    ]
    exact, rough = ([np.asarray(a - b).ravel() for a, b in zip(jax.tree.leaves(pcx.weights(t.model)),
                                                               jax.tree.leaves(pcx.weights(model)), strict=True)]
                    for t in trained)  # fmt: skip
    for a, b in zip(exact, rough, strict=True):
        assert 0.999 < a @ b / np.linalg.norm(a) / np.linalg.norm(b) < 1


def test_a_state_dtype_needs_an_anchor():
    model, (x, y) = Chain([3, 4, 2]), batch(3, 2)
    with pytest.raises(pcx.ModelError, match=r"state_dtype.*anchor=True"):
        pcx.infer(model, x, {"vodes.1": y}, optimiser=optax.sgd(0.1), steps=1, shortcuts=PLAIN, state_dtype=jnp.bfloat16)


def derivative(model, x, y, what, shortcuts, dtype, precision=None, record=None):
    """Of a function of all settled values, or of what was recorded, by the weights, the input, the target or the rate."""
    weights, rest = eqx.partition(model, eqx.is_array)
    point = {"weights": weights, "input": x, "target": y, "rate": jnp.asarray(0.1)}

    def settled(moving):
        own = jax.tree.map(lambda a: a.astype(dtype), point | {what: moving})
        options = {"optimiser": optax.sgd(own["rate"], momentum=0.3), "steps": 6, "shortcuts": shortcuts, "record": record}
        last = f"vodes.{len(model.layers) - 1}"
        found = pcx.infer(eqx.combine(own["weights"], rest), own["input"], {last: own["target"]}, **options)
        parts = found.values if record is None else found.history
        return sum(jnp.sum(jnp.sin(value)) for value in parts.values()).astype(jnp.float64)

    with jax.default_matmul_precision(precision):
        return jax.tree.leaves(jax.jit(jax.grad(settled))(point[what]))


def assert_near(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < tolerance


PARTS = ["weights", "input", "target", "rate"]


@pytest.mark.parametrize("precision", ["float32", TF32, "bfloat16"])
@pytest.mark.parametrize("what", PARTS)
def test_inference_can_be_differentiated(what, precision):
    """The derivative of settled values is that of the naive path: the derivatives of products have derivatives too."""
    problem = Chain([3, 4, 4, 2], activation=jnp.tanh), *batch(3, 2, size=5), what
    exact = derivative(*problem, pcx.NO_SHORTCUTS, jnp.float64)
    found = derivative(*problem, pcx.Shortcuts(stack=False), jnp.float32, precision)
    assert_near(found, exact, 2e-2 if precision == "bfloat16" else 1e-5)


@pytest.mark.parametrize("what", PARTS)
def test_recorded_energies_can_be_differentiated(what):
    """They are computed outside of a gradient; there too, the known part of a product has no derivative of its own."""
    problem = Chain([3, 4, 4, 2], activation=jnp.tanh), *batch(3, 2, size=5), what
    exact = derivative(*problem, pcx.NO_SHORTCUTS, jnp.float64, record=pcx.record_energies)
    assert_near(derivative(*problem, pcx.ALL_SHORTCUTS, jnp.float32, record=pcx.record_energies), exact, 1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", PARTS)
def test_stacked_inference_has_the_derivative_of_lone_nodes(what, precision):
    problem = Chain([4, 4, 4, 4, 2], activation=jnp.tanh), *batch(4, 2, size=5), what
    lone, stacked = (derivative(*problem, pcx.Shortcuts(stack=s), jnp.float32, precision) for s in (False, True))
    assert_near(stacked, lone, 1e-2 if precision == "bfloat16" else 1e-5)  # sums in another order may round apart
