"""VGG-19 for small images: sixteen convolutions with five poolings and two dense layers, with or without a skip connection.

64 64 M 128 128 M 256×4 M 512×4 M 512×4 M, all padded by 1, then 4096 and the classes: the network of the paper's study of
skip connections. The skip hands the error of the output to an early node in one step of inference instead of fifteen.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

import pcx.nn as pxnn
from pcx.models._vgg import VGG

SOURCE = 2  # the skip reads the node after the third convolution: 128 channels, one pooling


@dataclasses.dataclass(frozen=True)
class Options:
    """``skip``: the prediction of the last node also gets a linear map of the third node's value."""

    activation: str = "leaky_relu"
    skip: bool = False


class SkipVGG(VGG):
    """`VGG` with a linear layer from the value of node 2 to the prediction of the last node."""

    def __init__(self, shape: Sequence[int], classes: int, *settings: Any, **options: Any):
        super().__init__(shape, classes, *settings, **options)
        self.skip = pxnn.Linear(self.features(shape, SOURCE + 1), classes)

    def output(self, x: Array, images: Sequence[Array]) -> Float[Array, " classes"]:
        return super().output(x, images) + self.skip.of_all(images[SOURCE])


def build(shape: tuple[int, ...], classes: int, options: Options) -> VGG:
    """The model for images of this shape; the skip draws its weights last, so that all others are the same without it."""
    kind = SkipVGG if options.skip else VGG
    channels = [64] * 2 + [128] * 2 + [256] * 4 + [512] * 8
    pooled = [i in (1, 3, 7, 11, 15) for i in range(16)]
    return kind(shape, classes, channels, [1] * 16, pooled, options.activation, dense=[4096])
