"""VGG-7: six convolutions (128, 128, 256, 256, 512, 512), pooling after the first, third and fifth, and a dense layer."""

import dataclasses

from pcx.models._vgg import VGG


@dataclasses.dataclass(frozen=True)
class Options:
    """Paddings are 1, 1, 1, 0, 1, 0, in the paper's table and in the experiments."""

    activation: str = "gelu"


def build(shape: tuple[int, ...], classes: int, options: Options) -> VGG:
    """The model for images of this shape."""
    pooled = [True, False] * 3
    return VGG(shape, classes, [128, 128, 256, 256, 512, 512], [1, 1, 1, 0, 1, 0], pooled, options.activation)
