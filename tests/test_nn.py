"""Layers against Equinox and against formulas written out: pooling, batch statistics, dropout."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batch
from snapshots import bits

import pcx
import pcx.nn as pxnn
from pcx._model import StateParam, kinds

# Layers that are Equinox's own


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.leaky_relu, jax.nn.hard_tanh, jax.nn.gelu, jnp.tanh, None])
def test_pooling_after_an_activation_is_the_window_reduction(activation):
    """Values and gradients, also at ties and at the ends of a slope: numbers from -2 to 2 in steps of a half."""
    x = jax.random.randint(jax.random.key(0), (3, 8, 9), -4, 5) / 2.0
    weight = jax.random.normal(jax.random.key(1), (3, 4, 4))
    values, slopes = zip(
        *(
            jax.value_and_grad(lambda x, pool=pool: jnp.sum(weight * pool.of(x, activation)))(x)
            for pool in (pxnn.MaxPool2d(2), pxnn.MaxPool2d(2, selects=False))
        ),
        strict=True,
    )
    np.testing.assert_allclose(values[0], values[1], rtol=1e-14)
    np.testing.assert_array_equal(slopes[0], slopes[1])


def test_layers_are_equinox_layers_with_the_same_numbers():
    key, image = jax.random.key(3), jax.random.normal(jax.random.key(4), (2, 5, 6))
    pairs = [
        (pxnn.Conv2d(2, 3, 3, 2, 1, key=key), eqx.nn.Conv2d(2, 3, 3, 2, 1, key=key)),
        (pxnn.Conv2d(2, 3, 3, bias=False, key=key), eqx.nn.Conv2d(2, 3, 3, use_bias=False, key=key)),
        (pxnn.ConvTranspose2d(2, 3, 3, 2, 1, 1, key=key),
         eqx.nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1, key=key)),
        (pxnn.AvgPool2d(2), eqx.nn.AvgPool2d(2, 2)),
        (pxnn.AvgPool2d(3, 1, 1), eqx.nn.AvgPool2d(3, 1, 1)),
        (pxnn.LayerNorm((2, 5, 6)), eqx.nn.LayerNorm((2, 5, 6))),
    ]  # fmt: skip
    for mine, theirs in pairs:
        np.testing.assert_array_equal(mine(image), theirs(image))
    vector = jnp.arange(4.0)
    np.testing.assert_array_equal(pxnn.Linear(4, 2, key=key)(vector), eqx.nn.Linear(4, 2, key=key)(vector))
    assert pxnn.Linear(4, 2, bias=False, key=key).bias is None
    assert pxnn.Linear(4, 2, dtype=jnp.float32, key=key).weight.dtype == jnp.float32


@pytest.mark.parametrize("out", [5, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_all_numbers_of_an_image_is_that_of_the_flat_image(out, bias):
    """Whichever of image and weights is turned, by numpy written out; a layer for other images refuses this one."""
    layer = pxnn.Linear(2 * 5 * 6, out, bias=bias, key=jax.random.key(3))
    image = jax.random.normal(jax.random.key(4), (2, 5, 6))
    expected = np.asarray(layer.weight) @ np.asarray(image).ravel() + (np.asarray(layer.bias) if bias else 0)
    np.testing.assert_allclose(layer.of_all(image), expected, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(layer.of_all(image.reshape(-1)), expected, rtol=1e-13, atol=1e-14)
    with pytest.raises(ValueError, match="a layer with 60 inputs got an input of shape"):
        layer.of_all(image[:, :4])


# Pooling


def images(height: int, width: int) -> jax.Array:
    """Channels without ties, with a few, with nothing but ties, with zeros of both signs, and with infinities."""
    normal = jax.random.normal(jax.random.key(5), (2, height, width))
    kinds = [
        normal,
        jax.nn.hard_tanh(3 * normal),
        jnp.full_like(normal, 0.7),
        jnp.round(normal),
        jnp.where(normal > 0, 0.0, -0.0),
        jnp.where(jnp.abs(normal) > 0.5, jnp.sign(normal) * jnp.inf, normal),
    ]
    return jnp.concatenate(kinds)


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (3, 2)], ids=str)
def test_pooling_by_selects_is_the_window_reduction(shape):
    """Values, and where a gradient goes: to the first of several equal maxima."""
    x = images(*shape)
    theirs = eqx.nn.MaxPool2d(2, 2)
    slope = jax.random.normal(jax.random.key(6), theirs(x).shape)
    values, gradient = theirs(x), jax.vjp(theirs, x)[1](slope)[0]
    for mine in (pxnn.max_pool_2x2, pxnn.MaxPool2d(2), pxnn.MaxPool2d(2, selects=False)):
        np.testing.assert_array_equal(mine(x), values)
        np.testing.assert_array_equal(jax.vjp(mine, x)[1](slope)[0], gradient)


def test_pooling_of_two_by_two_is_done_by_selects():
    """The reason for the layer: no window reduction in its program, forward or backward."""
    program = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(pxnn.MaxPool2d(2)(x))))(images(4, 4)))
    assert "reduce_window" not in program
    assert "select_and" not in program
    plain = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(pxnn.MaxPool2d(2, selects=False)(x))))(images(4, 4)))
    assert "select_and" in plain


def test_the_gradient_of_a_tie_goes_to_the_first_corner():
    """Written out: rows before columns."""
    x = jnp.array([[[1.0, 2.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0]]])
    slope = jax.grad(lambda x: jnp.sum(pxnn.max_pool_2x2(x) * jnp.array([3.0, 5.0])))(x)
    np.testing.assert_array_equal(slope, [[[0.0, 3.0, 5.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pooling_keeps_the_dtype(dtype):
    x = images(5, 4).astype(dtype)
    assert pxnn.max_pool_2x2(x).dtype == dtype
    np.testing.assert_array_equal(pxnn.max_pool_2x2(x), eqx.nn.MaxPool2d(2, 2)(x))


@pytest.mark.parametrize("arguments", [(2, 1), (3,), (2, 2, 1), ((2, 2), (2, 1))], ids=str)
def test_other_windows_are_equinox_windows(arguments):
    kernel, stride, padding = (*arguments, *[None, 0][len(arguments) - 1 :])
    x = images(7, 6)
    theirs = eqx.nn.MaxPool2d(kernel, kernel if stride is None else stride, padding)
    np.testing.assert_array_equal(pxnn.MaxPool2d(kernel, stride, padding)(x), theirs(x))
    slope = jnp.ones(theirs(x).shape)
    mine = jax.vjp(pxnn.MaxPool2d(kernel, stride, padding), x)[1](slope)[0]
    np.testing.assert_array_equal(mine, jax.vjp(theirs, x)[1](slope)[0])


def test_pooling_over_a_batch():
    x = jnp.stack([images(4, 4), -images(4, 4)])
    np.testing.assert_array_equal(jax.vmap(pxnn.max_pool_2x2)(x), jax.vmap(eqx.nn.MaxPool2d(2, 2))(x))
    np.testing.assert_array_equal(pxnn.max_pool_2x2(x), jax.vmap(eqx.nn.MaxPool2d(2, 2))(x))


# Batch statistics


class Only(pcx.EnergyModule):
    """Batch normalisation of the input and nothing else."""

    def __init__(self, size: int, **options: Any):
        self.norm = pxnn.BatchNorm(size, **options)
        self.vode = pcx.Vode()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.vode(self.norm(x))


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 2, 5)], ids=["dense", "image"])
def test_batch_norm_by_hand(shape):
    """Biased variance to normalise, unbiased in the running statistics (PyTorch's rule), over batch and pixels."""
    x = np.asarray(2 + 3 * jax.random.normal(jax.random.key(0), shape))
    model = Only(3, momentum=0.3, epsilon=1e-3)
    model.norm.weight, model.norm.bias = jnp.array([1.0, 2.0, -1.0]), jnp.array([0.5, 0.0, 1.0])
    model.norm.running_mean, model.norm.running_variance = jnp.array([1.0, 0.0, -1.0]), jnp.array([2.0, 1.0, 0.5])
    axes = (0, *range(2, len(shape)))
    column = (1, 3) + (1,) * (len(shape) - 2)
    weight, bias = np.asarray(model.norm.weight).reshape(column), np.asarray(model.norm.bias).reshape(column)
    mean, variance = x.mean(axes), x.var(axes)

    trained = pcx.run(model, {}, x, training=True)
    normal = (x - mean.reshape(column)) / np.sqrt(variance.reshape(column) + 1e-3)
    np.testing.assert_allclose(trained.output, weight * normal + bias, rtol=0, atol=1e-13)

    after = pcx.update_state(model, trained.state).norm
    np.testing.assert_allclose(after.running_mean, 0.7 * np.array([1.0, 0.0, -1.0]) + 0.3 * mean, rtol=0, atol=1e-14)
    unbiased = x.var(axes, ddof=1)
    np.testing.assert_allclose(after.running_variance, 0.7 * np.array([2.0, 1.0, 0.5]) + 0.3 * unbiased, rtol=0, atol=1e-13)

    evaluated = pcx.run(model, {}, x)
    old_mean, old_variance = np.array([1.0, 0.0, -1.0]).reshape(column), np.array([2.0, 1.0, 0.5]).reshape(column)
    expected = weight * (x - old_mean) / np.sqrt(old_variance + 1e-3) + bias
    np.testing.assert_allclose(evaluated.output, expected, rtol=0, atol=1e-13)
    assert evaluated.state == {}
    np.testing.assert_array_equal(model.norm.running_mean, [1.0, 0.0, -1.0])


def test_batch_norm_of_a_constant_and_of_one_sample():
    """Variance zero is no division by zero; one sample has no unbiased variance, so it counts as it is."""
    done = pcx.run(Only(2), {}, jnp.full((3, 2), 5.0), training=True)
    np.testing.assert_array_equal(done.output, np.zeros((3, 2)))
    one = pcx.run(model := Only(2), {}, jnp.array([[5.0, 6.0]]), training=True)
    after = pcx.update_state(model, one.state).norm
    np.testing.assert_allclose(after.running_mean, [0.5, 0.6], rtol=1e-15)
    np.testing.assert_allclose(after.running_variance, [0.9, 0.9], rtol=1e-15)


class Normalised(pcx.EnergyModule):
    """Two normalised layers and an output: the second norm sees settled values."""

    def __init__(self, statistics: str = "forward"):
        self.layers = [pxnn.Linear(i, o, key=jax.random.key(o)) for i, o in ((4, 5), (5, 6), (6, 3))]
        self.norms = [pxnn.BatchNorm(5, statistics=statistics), pxnn.BatchNorm(6, statistics=statistics)]
        self.vodes = [pcx.Vode() for _ in range(3)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, norm, vode in zip(self.layers, self.norms, self.vodes, strict=False):
            x = vode(jnp.tanh(norm(layer(x))))
        return self.vodes[2](self.layers[2](x))


@eqx.filter_jit
def settled(model: Normalised, x: Any, y: Any, shortcuts: pcx.Shortcuts = pcx.ALL_SHORTCUTS) -> Any:
    rule = optax.sgd(0.2)
    return pcx.infer(model, x, {"vodes.2": y}, optimiser=rule, steps=6, training=True, shortcuts=shortcuts)


@pytest.mark.parametrize("shortcuts", [pcx.ALL_SHORTCUTS, pcx.NO_SHORTCUTS])
def test_another_samples_label_does_not_move_a_value(shortcuts):
    """Statistics are constants during inference, so samples stay independent of each other, to the last bit."""
    x, y = batch(4, 3, 6)
    changed = y.at[4].set(jnp.array([5.0, -5.0, 5.0]))
    one, other = (settled(Normalised(), x, labels, shortcuts=shortcuts).values for labels in (y, changed))
    rest = np.array([0, 1, 2, 3, 5])
    for name in ("vodes.0", "vodes.1"):
        np.testing.assert_array_equal(one[name][rest], other[name][rest])
        assert not np.array_equal(one[name][4], other[name][4])


def test_recomputed_statistics_do_move_it():
    x, y = batch(4, 3, 6)
    changed = y.at[4].set(jnp.array([5.0, -5.0, 5.0]))
    one, other = (settled(Normalised("batch"), x, labels, shortcuts=pcx.NO_SHORTCUTS).values for labels in (y, changed))
    assert float(jnp.max(jnp.abs(one["vodes.0"][0] - other["vodes.0"][0]))) > 1e-6


def normalise(z: jax.Array, norm: Any, mean: Any = None, variance: Any = None) -> jax.Array:
    """Batch normalisation of a matrix, by given statistics or its own."""
    mean = jnp.mean(z, axis=0) if mean is None else mean
    variance = jnp.mean((z - jnp.mean(z, axis=0)) ** 2, axis=0) if variance is None else variance
    return norm["weight"] * (z - mean) / jnp.sqrt(variance + 1e-5) + norm["bias"]


def as_arrays(model: Normalised) -> dict[str, Any]:
    return {
        "layers": [{"weight": layer.weight, "bias": layer.bias} for layer in model.layers],
        "norms": [{"weight": norm.weight, "bias": norm.bias} for norm in model.norms],
    }


def energies_by_hand(weights: Any, h: Any, x: Any, y: Any, statistics: Any = ((None, None), (None, None))) -> jax.Array:
    """The energy of every sample, in plain JAX on whole batches."""
    first, second, third = weights["layers"]
    u0 = jnp.tanh(normalise(x @ first["weight"].T + first["bias"], weights["norms"][0], *statistics[0]))
    u1 = jnp.tanh(normalise(h[0] @ second["weight"].T + second["bias"], weights["norms"][1], *statistics[1]))
    u2 = h[1] @ third["weight"].T + third["bias"]
    return sum(0.5 * jnp.sum((value - u) ** 2, axis=1) for value, u in ((h[0], u0), (h[1], u1), (y, u2)))


@pytest.mark.parametrize("statistics", ["forward", "batch"])
@pytest.mark.parametrize("shortcuts", [pcx.ALL_SHORTCUTS, pcx.NO_SHORTCUTS])
def test_inference_by_hand(shortcuts, statistics):
    """Gradient descent on the values, with the statistics of the forward pass as constants, or with their own."""
    x, y = batch(4, 3, 6)
    model = Normalised(statistics)
    weights = as_arrays(model)
    z0 = x @ weights["layers"][0]["weight"].T + weights["layers"][0]["bias"]
    h0 = jnp.tanh(normalise(z0, weights["norms"][0]))
    z1 = h0 @ weights["layers"][1]["weight"].T + weights["layers"][1]["bias"]
    h = [h0, jnp.tanh(normalise(z1, weights["norms"][1]))]
    constants = [(jnp.mean(z, axis=0), jnp.var(z, axis=0)) for z in (z0, z1)]
    used = constants if statistics == "forward" else [(None, None)] * 2
    for _ in range(6):
        slope = jax.grad(lambda h: jnp.sum(energies_by_hand(weights, h, x, y, used)))(h)
        h = [value - 0.2 * g for value, g in zip(h, slope, strict=True)]
    values = settled(model, x, y, shortcuts=shortcuts).values
    np.testing.assert_allclose(values["vodes.0"], h[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(values["vodes.1"], h[1], rtol=0, atol=1e-12)


def test_weights_learn_through_the_batch_statistics():
    """The weight step is SGD on the mean energy with batch statistics, at the settled values."""
    x, y = batch(4, 3, 6)
    model, rule = Normalised(), optax.sgd(1.0)
    trained = pcx.train_step(model, x, {"vodes.2": y}, state_optimiser=optax.sgd(0.2), weight_optimiser=rule,
                             weight_state=rule.init(pcx.weights(model)), steps=6, training=True)  # fmt: skip
    values = trained.inferred.values
    h = [values["vodes.0"], values["vodes.1"]]
    slopes = jax.grad(lambda w: jnp.mean(energies_by_hand(w, h, x, y)))(as_arrays(model))
    expected = jax.tree.map(lambda w, g: w - g, as_arrays(model), slopes)
    for one, other in zip(jax.tree.leaves(as_arrays(trained.model)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_running_statistics_are_no_weights():
    """No gradient, no weight decay, no part in the optimiser's state: one update by their own rule."""
    x, y = batch(4, 3, 6)
    model, rule = Normalised(), optax.adamw(0.1, weight_decay=0.5)
    assert [norm.running_mean for norm in pcx.weights(model).norms] == [None, None]
    assert sum(kind is StateParam for kind in kinds(model)) == 4
    trained = pcx.train_step(model, x, {"vodes.2": y}, state_optimiser=optax.sgd(0.2), weight_optimiser=rule,
                             weight_state=rule.init(pcx.weights(model)), steps=2, training=True).model  # fmt: skip
    z = np.asarray(x @ model.layers[0].weight.T + model.layers[0].bias)
    np.testing.assert_allclose(trained.norms[0].running_mean, 0.1 * z.mean(0), rtol=0, atol=1e-14)
    np.testing.assert_allclose(trained.norms[0].running_variance, 0.9 + 0.1 * z.var(0, ddof=1), rtol=0, atol=1e-14)
    gradient = pcx.weight_gradient(model, {"vodes.0": jnp.ones((6, 5))}, {}, x, training=True)
    assert [norm.running_variance for norm in gradient.norms] == [None, None]


def test_training_keeps_the_structure_of_a_model():
    """What a step returns goes into the next one without another trace: no statistics of the batch are left in it."""
    x, y = batch(4, 3, 6)
    model, rule = Normalised(), optax.sgd(0.1)
    trained = pcx.train_step(model, x, {"vodes.2": y}, state_optimiser=rule, weight_optimiser=rule,
                             weight_state=rule.init(pcx.weights(model)), steps=2, training=True).model  # fmt: skip
    assert jax.tree.structure(trained) == jax.tree.structure(model)


def test_evaluation_in_the_core_does_not_touch_statistics():
    x, y = batch(4, 3, 6)
    model = Normalised()
    before = bits(model)
    done = pcx.infer(model, x, {"vodes.2": y}, optimiser=optax.sgd(0.1), steps=2)
    assert done.forward.state == {}
    assert bits(model) == before


def test_refusals_of_batch_norm():
    with pytest.raises(pcx.ModelError, match=r"statistics is 'sample'; use 'forward' or 'batch'"):
        pxnn.BatchNorm(3, statistics="sample")
    with pytest.raises(pcx.ModelError, match=r"layer norm has 4 channels, but its input has shape \(3,\)"):
        pcx.run(Only(4), {}, jnp.ones((2, 3)))

    class Twice(Only):
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.vode(self.norm(self.norm(x)))

    with pytest.raises(pcx.ModelError, match=r"layer norm is called twice.*use two layers"):
        pcx.run(Twice(3), {}, jnp.ones((2, 3)), training=True)


# Dropout


class Dropping(pcx.EnergyModule):
    def __init__(self, p: float = 0.5):
        self.layers = [pxnn.Linear(4, 40, key=jax.random.key(0)), pxnn.Linear(40, 3, key=jax.random.key(1))]
        self.dropout = pxnn.Dropout(p)
        self.vodes = [pcx.Vode(), pcx.Vode()]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.vodes[1](self.layers[1](self.vodes[0](self.dropout(self.layers[0](x)))))


def test_dropout_zeroes_or_scales():
    layer = pxnn.Dropout(0.2)
    layer._pcx_flags = Dropping()._pcx_flags.__class__(training=True)
    x = jnp.arange(1.0, 101.0)
    outputs = layer(x, key=jax.random.key(0))
    np.testing.assert_allclose(outputs, np.where(outputs == 0, 0, x / 0.8), rtol=1e-15)
    np.testing.assert_array_equal(layer(x, key=jax.random.key(0)), outputs)
    assert not np.array_equal(layer(x, key=jax.random.key(1)), outputs)


def test_dropout_keeps_the_mean():
    """A mean of n units that are 0 or 1/(1-p) deviates by sqrt(p / ((1-p) n)); five of these is one in two million."""
    model = Dropping(0.2).train()
    n = 100_000
    mean = jnp.mean(model.dropout(jnp.ones(n), key=jax.random.key(0)))
    assert abs(float(mean) - 1) < 5 * np.sqrt(0.25 / n)


def test_dropout_is_off_in_evaluation_and_at_zero():
    x = jnp.arange(4.0)
    assert Dropping().dropout(x) is x
    assert Dropping(0.0).train().dropout(x) is x


def test_one_mask_for_all_steps_of_an_inference():
    """The settled values are those of gradient descent with the mask of the forward pass, whatever the number of steps."""
    x, y = batch(4, 3, 6)
    model = Dropping()
    (w0, b0), (w1, b1) = ((layer.weight, layer.bias) for layer in model.layers)
    for steps in (1, 5):
        done = pcx.infer(model, x, {"vodes.1": y}, optimiser=optax.sgd(0.1), steps=steps, training=True, key=jax.random.key(2))
        u = done.forward.predictions["vodes.0"]
        plain = x @ w0.T + b0
        np.testing.assert_allclose(u, np.where(u == 0, 0, 2 * plain), rtol=1e-13)
        assert 60 < int(jnp.sum(u == 0)) < 180
        assert not np.array_equal(u[0] == 0, u[1] == 0), "every sample has its own mask"
        h = u
        for _ in range(steps):
            h = h - 0.1 * ((h - u) - (y - h @ w1.T - b1) @ w1)
        np.testing.assert_allclose(done.values["vodes.0"], h, rtol=0, atol=1e-13)


def test_the_weights_learn_with_the_same_mask():
    x, y = batch(4, 3, 6)
    model, rule = Dropping(), optax.sgd(1.0)
    trained = pcx.train_step(model, x, {"vodes.1": y}, state_optimiser=optax.sgd(0.1), weight_optimiser=rule,
                             weight_state=rule.init(pcx.weights(model)), steps=3, training=True,
                             key=jax.random.key(2))  # fmt: skip
    forward = trained.inferred.forward.predictions["vodes.0"]
    error = trained.inferred.values["vodes.0"] - forward
    delta = np.where(forward == 0, 0, 2 * error)
    expected = model.layers[0].weight + delta.T @ np.asarray(x) / 6
    np.testing.assert_allclose(trained.model.layers[0].weight, expected, rtol=0, atol=1e-13)


def test_keys_of_dropout():
    x, _ = batch(4, 3, 6)
    model = Dropping()
    one, again, other = (pcx.run(model, {}, x, training=True, key=jax.random.key(k)).output for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(
        pcx.run(model, {}, x, key=jax.random.key(1)).output, pcx.run(model, {}, x).output
    )  # evaluation


def test_two_dropouts_have_two_masks():
    class Two(Dropping):
        def __init__(self):
            super().__init__()
            self.second = pxnn.Dropout(0.5)

        def __call__(self, x: jax.Array) -> jax.Array:
            u = self.layers[0](x)
            return self.vodes[0](jnp.stack([self.dropout(u), self.second(u)]))

    u = pcx.run(Two(), {}, jnp.ones((2, 4)), training=True, key=jax.random.key(1)).predictions["vodes.0"]
    assert not np.array_equal(u[:, 0] == 0, u[:, 1] == 0)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_the_probability_of_dropout_is_checked(p):
    with pytest.raises(pcx.ModelError, match=f"the dropout probability is {p}; it is at least 0 and below 1"):
        pxnn.Dropout(p)


def test_dropout_without_a_key_is_refused():
    x, y = batch(4, 3, 6)
    with pytest.raises(pcx.ModelError, match="layer 'dropout' is random in training; pass key="):
        pcx.run(Dropping(), {}, x, training=True)
    with pytest.raises(pcx.ModelError, match="layer 'dropout' is random in training; pass key="):
        pcx.infer(Dropping(), x, {"vodes.1": y}, optimiser=optax.sgd(0.1), steps=1, training=True)
    with pytest.raises(pcx.ModelError, match="is random in training; pass key="):
        Dropping().train()(x[0])
