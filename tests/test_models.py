"""The benchmark's models: parameter counts and node shapes as published; skip connections and blocks written out."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batch

import pcx
import pcx.models
import pcx.nn as pxnn
from pcx._model import named
from pcx.models import vgg19
from pcx.models._vgg import VGG
from pcx.models.resnet18 import ResNet

VGG9_CONVOLUTIONS = 64 * 28 + 128 * 577 + 256 * 1153 + 256 * 2305 + 512 * 2305 + 512 * 4609  # outputs × (9 × inputs + 1)
VGG19_CONVOLUTIONS = 64 * 28 + 64 * 577 + 128 * 577 + 128 * 1153 + 256 * 1153 + 3 * 256 * 2305 + 512 * 2305 + 7 * 512 * 4609
RESNET18_CONVOLUTIONS = (  # stem; then per stage the first convolution, the shortcut and the three others
    64 * 27 + 4 * 64 * 576 + (128 * 576 + 128 * 64 + 3 * 128 * 1152) + (256 * 1152 + 256 * 128 + 3 * 256 * 2304)
    + (512 * 2304 + 512 * 256 + 3 * 512 * 4608)
)  # fmt: skip
RESNET18_CHANNELS = 64 + 4 * 64 + 5 * 128 + 5 * 256 + 5 * 512  # those of all twenty convolutions

CASES = {
    ("mlp", (1, 28, 28), 10): (134_794, [(128,), (128,), (128,), (10,)]),
    ("alexnet", (3, 32, 32), 10): (
        23_272_266,
        [(64, 8, 8), (192, 4, 4), (384, 4, 4), (256, 4, 4), (256, 2, 2), (4096,), (4096,), (10,)],
    ),
    ("vgg5", (3, 32, 32), 100): (4_043_620, [(128, 16, 16), (256, 8, 8), (512, 4, 4), (512, 2, 2), (100,)]),
    ("vgg5", (3, 56, 56), 200): (None, [(128, 28, 28), (256, 14, 14), (512, 7, 7), (512, 3, 3), (200,)]),
    ("vgg7", (3, 32, 32), 10): (
        None,
        [(128, 16, 16), (128, 16, 16), (256, 8, 8), (256, 6, 6), (512, 3, 3), (512, 1, 1), (10,)],
    ),
    ("vgg7", (3, 56, 56), 200): (
        6_214_984,
        [(128, 28, 28), (128, 28, 28), (256, 14, 14), (256, 12, 12), (512, 6, 6), (512, 4, 4), (200,)],
    ),
    ("vgg9", (3, 32, 32), 10): (
        VGG9_CONVOLUTIONS + 4096 * 2049 + 4096 * 4097 + 10 * 4097,
        [(64, 16, 16), (128, 8, 8), (256, 8, 8), (256, 4, 4), (512, 4, 4), (512, 2, 2), (4096,), (4096,), (10,)],
    ),
    ("vgg9", (3, 56, 56), 200): (
        VGG9_CONVOLUTIONS + 4096 * (512 * 9 + 1) + 4096 * 4097 + 200 * 4097,
        [(64, 28, 28), (128, 14, 14), (256, 14, 14), (256, 7, 7), (512, 7, 7), (512, 3, 3), (4096,), (4096,), (200,)],
    ),
    ("vgg19", (3, 32, 32), 10): (
        VGG19_CONVOLUTIONS + 4096 * 513 + 10 * 4097,
        [(64, 32, 32), (64, 16, 16), (128, 16, 16), (128, 8, 8), *[(256, 8, 8)] * 3, (256, 4, 4), *[(512, 4, 4)] * 3,
         (512, 2, 2), *[(512, 2, 2)] * 3, (512, 1, 1), (4096,), (10,)],
    ),
    ("vgg19", (3, 56, 56), 200): (
        VGG19_CONVOLUTIONS + 4096 * 513 + 200 * 4097,
        [(64, 56, 56), (64, 28, 28), (128, 28, 28), (128, 14, 14), *[(256, 14, 14)] * 3, (256, 7, 7), *[(512, 7, 7)] * 3,
         (512, 3, 3), *[(512, 3, 3)] * 3, (512, 1, 1), (4096,), (200,)],
    ),
    ("resnet18", (3, 32, 32), 10): (
        RESNET18_CONVOLUTIONS + 2 * RESNET18_CHANNELS + 10 * 513,
        [*[(64, 32, 32)] * 5, *[(128, 16, 16)] * 4, *[(256, 8, 8)] * 4, *[(512, 4, 4)] * 4, (10,)],
    ),
    ("resnet18", (3, 56, 56), 200): (
        RESNET18_CONVOLUTIONS + 2 * RESNET18_CHANNELS + 200 * 513,
        [*[(64, 56, 56)] * 5, *[(128, 28, 28)] * 4, *[(256, 14, 14)] * 4, *[(512, 7, 7)] * 4, (200,)],
    ),
}  # fmt: skip


def build(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> Any:
    module = pcx.models.get(name)
    with pxnn.keys(jax.random.key(0)):
        return module.build(shape, classes, module.Options(**options))


def shapes_of(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> tuple[Any, pcx.Nodes[Any], pcx.Graph]:
    """Weights, predictions and graph of a model that is never computed."""
    graphs = []

    def trace() -> Any:
        model, x = build(name, shape, classes, **options), jnp.zeros((2, *shape))
        graphs.append(pcx.graph(model, x))
        return pcx.weights(model), pcx.run(model, {}, x).predictions

    return *jax.eval_shape(trace), graphs[0]


def size(weights: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(weights))


@pytest.mark.parametrize(("name", "shape", "classes"), CASES)
def test_shapes_and_parameters(name, shape, classes):
    """The published numbers of parameters and shapes of nodes (hyperparameters.yaml: architectures)."""
    count, shapes = CASES[name, shape, classes]
    weights, predictions, _ = shapes_of(name, shape, classes)
    assert [tuple(u.shape[1:]) for u in predictions.values()] == shapes
    if count is not None:
        assert size(weights) == count


def test_weights_start_as_in_equinox():
    """Weights and biases are uniform in ±1/√fan-in."""
    model = build("vgg5", (3, 32, 32), 10)
    bound = 1 / np.sqrt(128 * 9)
    weight = np.asarray(model.convolutions[1].weight)
    assert np.abs(weight).max() <= bound
    assert weight.std() == pytest.approx(bound / np.sqrt(3), rel=0.01)


def test_paddings_of_the_paper():
    """With no padding at the fourth convolution, 4×4 becomes 2×2, pooled to 1×1: 512 features instead of 2048."""
    assert build("vgg5", (3, 32, 32), 10, paddings="1110").head.weight.shape == (10, 512)
    with pytest.raises(pcx.ModelError, match="paddings is '11'"):
        build("vgg5", (3, 32, 32), 10, paddings="11")


def test_unknown_names():
    with pytest.raises(pcx.ModelError, match="vgg5"):
        pcx.models.get("vgg")
    for name in ("mlp", "vgg9", "vgg19", "resnet18"):
        with pytest.raises(pcx.ModelError, match=r"there is no activation 'gelo'; near: .*gelu"):
            jax.eval_shape(lambda name=name: build(name, (3, 32, 32), 2, activation="gelo"))
    with pytest.raises(pcx.ModelError, match="norm is 'layer'; use 'batch' or 'none'"):
        build("resnet18", (3, 32, 32), 10, norm="layer")


@pytest.mark.parametrize(("name", "poolings", "pixels"), [("vgg5", 4, 8), ("vgg7", 3, 8), ("vgg9", 4, 15), ("vgg19", 5, 31)])
def test_images_that_are_too_small(name, poolings, pixels):
    with pytest.raises(
        pcx.ModelError, match=rf"nothing is left of images of shape \(3, {pixels}, {pixels}\).* {poolings} poolings"
    ):
        jax.eval_shape(lambda: build(name, (3, pixels, pixels), 10))


# VGG-19's skip connection


@pytest.mark.parametrize(("pixels", "classes", "features"), [(32, 10, 128 * 16 * 16), (56, 200, 128 * 28 * 28)])
def test_the_skip_reads_the_third_node(pixels, classes, features):
    plain, shapes, chain = shapes_of("vgg19", (3, pixels, pixels), classes)
    weights, same, graph = shapes_of("vgg19", (3, pixels, pixels), classes, skip=True)
    assert same == shapes
    assert weights.skip.weight.shape == (classes, features)
    assert size(weights) - size(plain) == classes * (features + 1)
    assert chain.parents == {"vodes.0": set(), **{f"vodes.{i}": {f"vodes.{i - 1}"} for i in range(1, 18)}}
    assert graph.parents == chain.parents | {"vodes.17": {"vodes.16", "vodes.2"}}


def test_the_skip_is_added_to_the_last_prediction():
    """All else is as without it: the same weights for the same key, the same predictions, to the last bit."""
    x, kinds = batch((3, 8, 8), 5, 2)[0], []
    for kind in (vgg19.SkipVGG, VGG):
        with pxnn.keys(jax.random.key(0)):
            kinds.append(kind((3, 8, 8), 5, [4, 4, 6, 6], [1] * 4, [False, True, False, True], "leaky_relu", dense=[7]))
    model, plain = kinds
    run = eqx.filter_jit(pcx.run)
    values = run(plain, {}, x).predictions | {"vodes.2": jax.random.normal(jax.random.key(3), (2, 6, 4, 4))}
    one, other = (run(m, values, x).predictions for m in (model, plain))
    added = np.asarray(values["vodes.2"]).reshape(2, -1) @ np.asarray(model.skip.weight).T + np.asarray(model.skip.bias)
    np.testing.assert_allclose(one["vodes.5"] - other["vodes.5"], added, rtol=0, atol=1e-14)
    zero = eqx.tree_at(lambda m: m.skip, model, jax.tree.map(jnp.zeros_like, model.skip))
    for name, u in run(zero, values, x).predictions.items():
        np.testing.assert_array_equal(u, other[name])
        np.testing.assert_array_equal(u, one[name] if name != "vodes.5" else u)
    np.testing.assert_array_equal(run(zero, {}, x).output, run(plain, {}, x).output)


# ResNet-18's blocks


@pytest.fixture(scope="module")
def resnet() -> Any:
    """ResNet-18 with few channels; its scales, shifts and running statistics are not those of the start."""
    with pxnn.keys(jax.random.key(0)):
        model = ResNet(3, 10, [4, 5, 6, 7], "relu", norm=True)
    numbers = np.random.default_rng(0)
    for norm in named(model, pxnn.BatchNorm).values():
        norm.weight, norm.running_variance = (jnp.asarray(numbers.uniform(0.5, 1.5, norm.bias.shape)) for _ in range(2))
        norm.bias, norm.running_mean = (jnp.asarray(0.1 * numbers.standard_normal(norm.bias.shape)) for _ in range(2))
    return model


def resnet_by_hand(model: Any, values: Any, x: Any, statistics: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Predictions of all nodes on a whole batch, and what each normalisation sees; without statistics it uses its own."""
    seen: dict[str, Any] = {}

    def layer(name: str, part: Any, x: Any, stride: int) -> jax.Array:
        border = part.linear.weight.shape[-1] // 2
        z = jax.lax.conv_general_dilated(x, part.linear.weight, (stride, stride), [(border, border)] * 2)
        seen[name] = z
        mean, variance = moments(z) if statistics is None else statistics[name]
        scale, shift, mean, variance = (a.reshape(-1, 1, 1) for a in (part.norm.weight, part.norm.bias, mean, variance))
        return scale * (z - mean) / jnp.sqrt(variance + 1e-5) + shift

    def relu(z: Any) -> jax.Array:
        return jnp.where(z > 0, z, 0)

    u = {"vodes.0": relu(layer("stem", model.stem, x, 1))}
    h = values.get("vodes.0", u["vodes.0"])
    for b, block in enumerate(model.blocks):
        first, merge, stride = f"vodes.{2 * b + 1}", f"vodes.{2 * b + 2}", 2 if b in (2, 4, 6) else 1
        u[first] = relu(layer(f"blocks.{b}.first", block.first, h, stride))
        past = layer(f"blocks.{b}.shortcut", block.shortcut, h, 2) if b in (2, 4, 6) else h
        u[merge] = relu(layer(f"blocks.{b}.second", block.second, values.get(first, u[first]), 1) + past)
        h = values.get(merge, u[merge])
    return u | {"vodes.17": h.mean((2, 3)) @ model.head.weight.T + model.head.bias}, seen


def moments(z: Any) -> tuple[jax.Array, jax.Array]:
    return z.mean((0, 2, 3)), z.var((0, 2, 3))


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def norms_of(model: Any) -> dict[str, Any]:
    return {name.removesuffix(".norm"): norm for name, norm in named(model, pxnn.BatchNorm).items()}


def test_parents_in_a_resnet():
    """A merge reads its block's first convolution and its block's input: the shortcut has no node."""
    parents = shapes_of("resnet18", (3, 32, 32), 10)[2].parents
    wanted = {"vodes.0": set(), "vodes.17": {"vodes.16"}}
    for block in range(8):
        entry, first, merge = (f"vodes.{2 * block + i}" for i in range(3))
        wanted |= {first: {entry}, merge: {entry, first}}
    assert len(parents) == 18
    assert parents == wanted


def test_resnet_without_normalisation():
    """No statistics, no scales; the convolutions have biases instead, one per channel."""
    bare = jax.eval_shape(lambda: build("resnet18", (3, 32, 32), 10, norm="none"))
    assert norms_of(bare) == {}
    assert size(bare) == RESNET18_CONVOLUTIONS + RESNET18_CHANNELS + 10 * 513
    normalised = jax.eval_shape(lambda: build("resnet18", (3, 32, 32), 10))
    assert len(norms_of(normalised)) == 20
    assert size(normalised) == RESNET18_CONVOLUTIONS + 4 * RESNET18_CHANNELS + 10 * 513


@pytest.mark.parametrize("training", [True, False])
def test_resnet_forward_by_hand(resnet, training):
    """The forward pass: by the statistics of the batch in training, which then move the running ones, else by the running."""
    x = batch((3, 8, 8), 10, 4)[0]
    norms = norms_of(resnet)
    running = {name: (norm.running_mean, norm.running_variance) for name, norm in norms.items()}
    wanted, seen = eqx.filter_jit(resnet_by_hand)(resnet, {}, x, None if training else running)
    done = eqx.filter_jit(pcx.run)(resnet, {}, x, training=training)
    assert list(done.predictions) == [f"vodes.{i}" for i in range(18)]
    for name, u in done.predictions.items():
        close(u, wanted[name])
    assert set(done.state) == ({f"{name}.norm" for name in norms} if training else set())
    check_running_statistics(resnet, pcx.update_state(resnet, done.state), seen, share=0.1 if training else 0)


def check_running_statistics(before: Any, after: Any, seen: Any, share: float) -> None:
    """All twenty layers have moved by this share towards the mean and the unbiased variance of what they saw."""
    old = norms_of(before)
    for name, norm in norms_of(after).items():
        mean, variance = np.mean(seen[name], (0, 2, 3)), np.var(seen[name], (0, 2, 3), ddof=1)
        close(norm.running_mean, (1 - share) * old[name].running_mean + share * mean)
        close(norm.running_variance, (1 - share) * old[name].running_variance + share * variance)


def test_training_step_of_a_resnet(resnet):
    """Three steps reach the last five hidden nodes, past a merge in one; values and weights against gradients by hand."""
    x, y = batch((3, 8, 8), 10, 4)
    rule = optax.sgd(0.01)

    @eqx.filter_jit
    def step(model: Any) -> pcx.Trained:
        return pcx.train_step(model, x, {"vodes.17": y}, state_optimiser=optax.sgd(0.2), weight_optimiser=rule,
                              weight_state=rule.init(pcx.weights(model)), steps=3, training=True)  # fmt: skip

    def energy(weights: Any, h: Any, statistics: Any) -> jax.Array:
        u, _ = resnet_by_hand(weights, h, x, statistics)
        return sum(0.5 * jnp.sum((h[name] - u[name]) ** 2) for name in h)

    trained = step(resnet)
    assert trained.inferred.reached == {f"vodes.{i}" for i in range(12, 18)}

    forward, seen = eqx.filter_jit(resnet_by_hand)(resnet, {}, x)
    constants = {name: moments(z) for name, z in seen.items()}
    slopes = eqx.filter_jit(lambda model, h: jax.grad(lambda h: energy(model, h, constants))(h))
    h = forward | {"vodes.17": y}
    for _ in range(3):
        h = jax.tree.map(lambda value, slope: value - 0.2 * slope, h, slopes(resnet, h)) | {"vodes.17": y}
    for name, value in trained.inferred.values.items():
        close(value, h[name])

    gradient = eqx.filter_jit(eqx.filter_grad(lambda weights: energy(weights, h, None) / 4))(pcx.weights(resnet))
    wanted = jax.tree.map(lambda weight, slope: weight - 0.01 * slope, pcx.weights(resnet), gradient)
    old, new, expected = (named(pcx.weights(model), jax.Array) for model in (resnet, trained.model, wanted))
    for name, weight in new.items():
        close(weight, expected[name])
        reached = name.startswith(("blocks.5.second", "blocks.6", "blocks.7", "head"))
        assert np.array_equal(weight, old[name]) != reached, name
    check_running_statistics(resnet, trained.model, seen, share=0.1)
