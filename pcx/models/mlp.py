"""The paper's multi-layer perceptron: dense layers with one node each, an activation after all but the last."""

import dataclasses
import itertools
import math

from jaxtyping import Array, Float

import pcx.nn as pxnn
from pcx._types import ModelError
from pcx.models._activations import activation
from pcx.predictive_coding import EnergyModule, Vode


@dataclasses.dataclass(frozen=True)
class Options:
    """``hidden`` layers of ``width`` neurons. (The paper's text says three hidden layers, and so do its experiments.)"""

    activation: str = "gelu"
    width: int = 128
    hidden: int = 3

    def __post_init__(self) -> None:
        if self.width < 1 or self.hidden < 0:
            raise ModelError(f"width is {self.width} and hidden is {self.hidden}; they are at least 1 and 0.")
        activation(self.activation)


class MLP(EnergyModule):
    """Flattens its input; node i is ``vodes.i``."""

    def __init__(self, sizes: tuple[int, ...], activation_name: str):
        self.layers = [pxnn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
        self.vodes = [Vode((size,)) for size in sizes[1:]]
        self.activation = activation(activation_name)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, " classes"]:
        x = x.reshape(-1)
        for layer, vode in zip(self.layers[:-1], self.vodes[:-1], strict=True):
            x = vode(self.activation(layer(x)))
        return self.vodes[-1](self.layers[-1](x))


def build(shape: tuple[int, ...], classes: int, options: Options) -> MLP:
    """The model for inputs of this shape; weights come from the key stream of `pcx.nn`."""
    return MLP((math.prod(shape), *[options.width] * options.hidden, classes), options.activation)
