"""ResNet-18 for small images: a 3×3 stem, four stages (64, 128, 256, 512) of two blocks, a global mean and a dense layer.

The paper reports it without describing it. This is the definition of our benchmark: 18 nodes, one after the stem, two per
block (its first convolution; its merge) and the output. The shortcut has no node, so an error passes a block in one step.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

import pcx.nn as pxnn
from pcx._types import ModelError
from pcx.models._activations import activation
from pcx.predictive_coding import EnergyModule, Vode


@dataclasses.dataclass(frozen=True)
class Options:
    """``norm`` after every convolution: ``batch``, or ``none``."""

    activation: str = "relu"
    norm: str = "batch"

    def __post_init__(self) -> None:
        if self.norm not in ("batch", "none"):
            raise ModelError(f"norm is {self.norm!r}; use 'batch' or 'none'.")
        activation(self.activation)


class Convolution(eqx.Module):
    """A convolution that keeps the size of the image (with stride 1) and its normalisation, which replaces the bias."""

    linear: pxnn.Conv2d
    norm: pxnn.BatchNorm | None

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, norm: bool):
        self.linear = pxnn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=not norm)
        self.norm = pxnn.BatchNorm(outputs) if norm else None

    def __call__(self, x: Float[Array, "channels height width"]) -> Float[Array, "outputs _ _"]:
        u = self.linear(x)
        return u if self.norm is None else self.norm(u)


class Block(eqx.Module):
    """Two 3×3 convolutions and the way past them: a 1×1 convolution where the shape changes, else the input itself."""

    first: Convolution
    second: Convolution
    shortcut: Convolution | None

    def __init__(self, inputs: int, outputs: int, stride: int, norm: bool):
        self.first = Convolution(inputs, outputs, 3, stride, norm)
        self.second = Convolution(outputs, outputs, 3, 1, norm)
        self.shortcut = None if (inputs, stride) == (outputs, 1) else Convolution(inputs, outputs, 1, stride, norm)

    def merge(self, inside: Float[Array, "outputs h w"], x: Float[Array, "inputs _ _"]) -> Float[Array, "outputs h w"]:
        """``second(inside) + shortcut(x)``."""
        return self.second(inside) + (x if self.shortcut is None else self.shortcut(x))


class ResNet(EnergyModule):
    """Two blocks per stage, the first of which halves the image in all stages but the first.

    Node 0 follows the stem, nodes 2b + 1 and 2b + 2 the first convolution and the merge of block b: ``vodes.i``.
    """

    def __init__(self, channels: int, classes: int, stages: Sequence[int], activation_name: str, norm: bool):
        self.stem = Convolution(channels, stages[0], 3, 1, norm)
        self.blocks = []
        for stage, (inputs, outputs) in enumerate(itertools.pairwise([stages[0], *stages])):
            self.blocks += [Block(inputs, outputs, 2 if stage else 1, norm), Block(outputs, outputs, 1, norm)]
        self.head = pxnn.Linear(stages[-1], classes)
        self.vodes = [Vode() for _ in range(2 * len(self.blocks) + 2)]
        self.activation = activation(activation_name)

    def __call__(self, x: Float[Array, "channels height width"]) -> Float[Array, " classes"]:
        x = self.vodes[0](self.activation(self.stem(x)))
        for block, first, merge in zip(self.blocks, self.vodes[1:-1:2], self.vodes[2::2], strict=True):
            inside = first(self.activation(block.first(x)))
            x = merge(self.activation(block.merge(inside, x)))
        return self.vodes[-1](self.head(jnp.mean(x, axis=(1, 2))))


def build(shape: tuple[int, ...], classes: int, options: Options) -> ResNet:
    """The model for images of this shape."""
    return ResNet(shape[0], classes, [64, 128, 256, 512], options.activation, options.norm == "batch")
