"""Convolutional classifiers without normalisation: VGG-like networks and AlexNet.

Blocks of a 3×3 convolution, an activation and, after some, 2×2 max-pooling; then dense layers with activations between
them. A node follows each block and each dense layer.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

import pcx.nn as pxnn
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
        features = jax.eval_shape(self.features, jax.ShapeDtypeStruct(tuple(shape), self.convolutions[0].weight.dtype))
        *hidden, self.head = [pxnn.Linear(i, o) for i, o in itertools.pairwise([features.size, *dense, classes])]
        self.hidden = hidden
        self.vodes = [Vode() for _ in [*channels, *dense, classes]]

    def block(self, i: int, x: Array) -> Array:
        """One convolution with its activation and pooling: the prediction of node i."""
        u = self.convolutions[i](x)
        return self.pool.of(u, self.activation) if self.pooled[i] else self.activation(u)

    def features(self, x: Any) -> Array:
        for i in range(len(self.convolutions)):
            x = self.block(i, x)
        return x

    def __call__(self, x: Float[Array, "channels height width"]) -> Float[Array, " classes"]:
        for i in range(len(self.convolutions)):
            x = self.vodes[i](self.block(i, x))
        x = x.reshape(-1)
        for layer, vode in zip(self.hidden, self.vodes[len(self.convolutions) : -1], strict=True):
            x = vode(self.activation(layer(x)))
        return self.vodes[-1](self.head(x))
