"""The benchmark's models: parameter counts and node shapes as published."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pcx
import pcx.models
import pcx.nn as pxnn

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
}


@pytest.mark.parametrize(("name", "shape", "classes"), CASES)
def test_shapes_and_parameters(name, shape, classes):
    """The published numbers of parameters and shapes of nodes (hyperparameters.yaml: architectures)."""
    count, shapes = CASES[name, shape, classes]
    module = pcx.models.get(name)

    def build(key):
        with pxnn.keys(key):
            model = module.build(shape, classes, module.Options())
        return model, pcx.run(model, {}, jnp.zeros((2, *shape))).predictions

    model, predictions = jax.eval_shape(build, jax.random.key(0))
    assert [tuple(u.shape[1:]) for u in predictions.values()] == shapes
    if count is not None:
        assert sum(leaf.size for leaf in jax.tree.leaves(model)) == count


def test_weights_start_as_in_equinox():
    """Weights and biases are uniform in ±1/√fan-in."""
    with pxnn.keys(jax.random.key(0)):
        model = pcx.models.get("vgg5").build((3, 32, 32), 10, pcx.models.get("vgg5").Options())
    bound = 1 / np.sqrt(128 * 9)
    weight = np.asarray(model.convolutions[1].weight)
    assert np.abs(weight).max() <= bound
    assert weight.std() == pytest.approx(bound / np.sqrt(3), rel=0.01)


def test_paddings_of_the_paper():
    """With no padding at the fourth convolution, 4×4 becomes 2×2, pooled to 1×1: 512 features instead of 2048."""
    module = pcx.models.get("vgg5")
    with pxnn.keys(jax.random.key(0)):
        model = module.build((3, 32, 32), 10, module.Options(paddings="1110"))
    assert model.head.weight.shape == (10, 512)
    with pytest.raises(pcx.ModelError, match="paddings is '11'"):
        module.build((3, 32, 32), 10, module.Options(paddings="11"))


def test_unknown_names():
    with pytest.raises(pcx.ModelError, match="vgg5"):
        pcx.models.get("vgg")
    with pytest.raises(pcx.ModelError, match="gelu"):
        pcx.models.get("mlp").build((4,), 2, pcx.models.get("mlp").Options(activation="gelo"))
