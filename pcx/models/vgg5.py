"""VGG-5: four convolutions (128, 256, 512, 512), each with pooling, and a dense layer."""

import dataclasses

from pcx._types import ModelError
from pcx.models._vgg import VGG


@dataclasses.dataclass(frozen=True)
class Options:
    """``paddings`` of the four convolutions: the experiments used 1111; the paper's table says 1110."""

    activation: str = "gelu"
    paddings: str = "1111"


def build(shape: tuple[int, ...], classes: int, options: Options) -> VGG:
    """The model for images of this shape."""
    if len(options.paddings) != 4 or set(options.paddings) - set("01"):
        raise ModelError(f"paddings is {options.paddings!r}; use four digits, such as 1111.")
    paddings = [int(digit) for digit in options.paddings]
    return VGG(shape, classes, [128, 256, 512, 512], paddings, [True] * 4, options.activation)
