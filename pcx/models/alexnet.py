"""AlexNet for small images: five convolutions, the first with stride 2, pooling after the first, second and last, and three
dense layers."""

import dataclasses

from pcx.models._vgg import VGG


@dataclasses.dataclass(frozen=True)
class Options:
    """The paper times this model (its table of seconds per epoch) and gives no accuracy for it."""

    activation: str = "leaky_relu"


def build(shape: tuple[int, ...], classes: int, options: Options) -> VGG:
    """The model for images of this shape."""
    pooled = [True, True, False, False, True]
    channels, strides = [64, 192, 384, 256, 256], [2, 1, 1, 1, 1]
    return VGG(shape, classes, channels, [1] * 5, pooled, options.activation, dense=[4096, 4096], strides=strides)
