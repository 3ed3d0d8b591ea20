"""VGG-9: six convolutions (64, 128, 256, 256, 512, 512) with four poolings, and three dense layers, without normalisation.

The paper reports it without describing it. This is the definition of our benchmark, from later code of the same group:
64 M 128 M 256 256 M 512 512 M, all padded by 1, then 4096, 4096 and the classes.
"""

import dataclasses

from pcx.models._vgg import VGG


@dataclasses.dataclass(frozen=True)
class Options:
    """No settings of this model are published."""

    activation: str = "gelu"


def build(shape: tuple[int, ...], classes: int, options: Options) -> VGG:
    """The model for images of this shape."""
    pooled = [True, True, False, True, False, True]
    return VGG(shape, classes, [64, 128, 256, 256, 512, 512], [1] * 6, pooled, options.activation, dense=[4096, 4096])
