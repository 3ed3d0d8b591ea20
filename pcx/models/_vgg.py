"""Convolutional classifiers without normalisation: VGG-like networks and AlexNet.

Blocks of a 3×3 convolution, an activation and, after some, 2×2 max-pooling; then dense layers with activations between
them. A node follows each block and each dense layer.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

import pcx.nn as pxnn
from pcx._types import ModelError
from pcx.models._activations import activation
from pcx.predictive_coding import EnergyModule, Vode


class VGG(EnergyModule):
    """``pooled`` says after which convolutions the image is halved, ``dense`` how wide the hidden dense layers are.

    Node i is ``vodes.i``.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        channels: Sequence[int],
        paddings: Sequence[int],
        pooled: Sequence[bool],
        activation_name: str,
        dense: Sequence[int] = (),
        strides: Sequence[int] | None = None,
    ):
        sizes = itertools.pairwise([shape[0], *channels])
        steps = strides or [1] * len(channels)
        self.convolutions = [pxnn.Conv2d(i, o, 3, s, p) for (i, o), s, p in zip(sizes, steps, paddings, strict=True)]
        self.pool = pxnn.MaxPool2d(2)
        self.pooled = tuple(pooled)
        self.activation = activation(activation_name)
        features = self.features(shape, len(channels))
        if features == 0:
            raise ModelError(
                f"nothing is left of images of shape {tuple(shape)} after {len(channels)} convolutions and {sum(pooled)} "
                "poolings; use larger images or a model with fewer poolings."
            )
        *hidden, self.head = [pxnn.Linear(i, o) for i, o in itertools.pairwise([features, *dense, classes])]
        self.hidden = hidden
        self.vodes = [Vode() for _ in [*channels, *dense, classes]]

    def block(self, i: int, x: Array) -> Array:
        """One convolution with its activation and pooling: the prediction of node i."""
        u = self.convolutions[i](x)
        return self.pool.of(u, self.activation) if self.pooled[i] else self.activation(u)

    def features(self, shape: Sequence[int], blocks: int) -> int:
        """How many numbers an image of this shape is after the first blocks."""
        image = jax.ShapeDtypeStruct(tuple(shape), self.convolutions[0].weight.dtype)
        done = jax.eval_shape(lambda x: functools.reduce(lambda x, i: self.block(i, x), range(blocks), x), image)
        return done.size

    def output(self, x: Array, images: Sequence[Array]) -> Float[Array, " classes"]:
        """The prediction of the last node; ``images`` are the values of the nodes after the convolutions."""
        return self.head.of_all(x)

    def __call__(self, x: Float[Array, "channels height width"]) -> Float[Array, " classes"]:
        images = []
        for i in range(len(self.convolutions)):
            x = self.vodes[i](self.block(i, x))
            images.append(x)
        for layer, vode in zip(self.hidden, self.vodes[len(self.convolutions) : -1], strict=True):
            x = vode(self.activation(layer.of_all(x)))
        return self.vodes[-1](self.output(x, images))
