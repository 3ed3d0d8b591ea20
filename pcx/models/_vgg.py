"""VGG-like networks: 3×3 convolutions, an activation, 2×2 max-pooling after some of them, one dense layer at the end.

A node follows each convolution (after its activation and pooling) and the dense layer; there is no normalisation.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

import pcx.nn as pxnn
from pcx.models._activations import activation
from pcx.predictive_coding import EnergyModule, Vode


class VGG(EnergyModule):
    """``pooled`` says after which convolutions the image is halved; node i is ``vodes.i``."""

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        channels: Sequence[int],
        paddings: Sequence[int],
        pooled: Sequence[bool],
        activation_name: str,
    ):
        sizes = [shape[0], *channels]
        self.convolutions = [pxnn.Conv2d(i, o, 3, padding=p) for i, o, p in zip(sizes[:-1], sizes[1:], paddings, strict=True)]
        self.pool = pxnn.MaxPool2d(2)
        self.pooled = tuple(pooled)
        self.activation = activation(activation_name)
        features = jax.eval_shape(self.features, jax.ShapeDtypeStruct(tuple(shape), self.convolutions[0].weight.dtype))
        self.head = pxnn.Linear(features.size, classes)
        self.vodes = [Vode() for _ in [*channels, classes]]

    def block(self, i: int, x: Array) -> Array:
        """One convolution with its activation and pooling: the prediction of node i."""
        u = self.activation(self.convolutions[i](x))
        return self.pool(u) if self.pooled[i] else u

    def features(self, x: Any) -> Array:
        for i in range(len(self.convolutions)):
            x = self.block(i, x)
        return x

    def __call__(self, x: Float[Array, "channels height width"]) -> Float[Array, " classes"]:
        for i in range(len(self.convolutions)):
            x = self.vodes[i](self.block(i, x))
        return self.vodes[-1](self.head(x.reshape(-1)))
