"""Small models that many tests use."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from typer.testing import CliRunner

import pcx
import pcx.nn as pxnn


class Chain(pcx.EnergyModule):
    """Dense layers in a row, an activation after all but the last; node i is ``vodes.i``."""

    def __init__(self, dims: Sequence[int], activation: Callable[[Any], Any] = jnp.tanh, seed: int = 0, bias: bool = True):
        with pxnn.keys(jax.random.key(seed)):
            self.layers = [pxnn.Linear(i, o, bias) for i, o in itertools.pairwise(dims)]
        self.vodes = [pcx.Vode((o,)) for o in dims[1:]]
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        for i, (layer, vode) in enumerate(zip(self.layers, self.vodes, strict=True)):
            u = layer(x)
            x = vode(u if i == len(self.layers) - 1 else self.activation(u))
        return u


class Skip(pcx.EnergyModule):
    """A chain of equal layers with a skip connection from the second node to the second to last."""

    def __init__(self, width: int, depth: int, outputs: int, seed: int = 0):
        with pxnn.keys(jax.random.key(seed)):
            self.layers = [pxnn.Linear(width, width) for _ in range(depth)] + [pxnn.Linear(width, outputs)]
        self.vodes = [pcx.Vode() for _ in self.layers]

    def __call__(self, x: jax.Array) -> jax.Array:
        kept = None
        for i, (layer, vode) in enumerate(zip(self.layers, self.vodes, strict=True)):
            u = layer(x) if i == len(self.layers) - 1 else jnp.tanh(layer(x))
            x = vode(u + kept if i == len(self.layers) - 2 else u)
            kept = x if i == 1 else kept
        return u


class Convolutional(pcx.EnergyModule):
    """Two convolutions with pooling, then a dense layer: images 3×8×8 to 4 classes."""

    def __init__(self, seed: int = 0, selects: bool = True):
        with pxnn.keys(jax.random.key(seed)):
            self.first = pxnn.Conv2d(3, 4, 3, padding=1)
            self.second = pxnn.Conv2d(4, 5, 3, padding=1)
            self.last = pxnn.Linear(5 * 2 * 2, 4)
        self.pool = pxnn.MaxPool2d(2, selects=selects)
        self.vodes = [pcx.Vode() for _ in range(3)]

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.vodes[0](self.pool(jax.nn.gelu(self.first(x))))
        x = self.vodes[1](self.pool(jax.nn.hard_tanh(self.second(x))))
        u = self.last(x.reshape(-1))
        self.vodes[2](u)
        return u


def batch(inputs: int | Sequence[int], classes: int, size: int = 7, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    """Random inputs and one-hot labels."""
    shape = (inputs,) if isinstance(inputs, int) else tuple(inputs)
    x = jax.random.normal(jax.random.key(seed), (size, *shape))
    return x, jax.nn.one_hot(jnp.arange(size) % classes, classes)


@contextmanager
def untyped() -> Iterator[None]:
    """Without the checks of types that this suite adds: users do not have them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def largest_difference(a: Any, b: Any) -> float:
    """The largest absolute difference between two trees of arrays."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in pairs)


def go_to_an_empty_place(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in a folder without data, records and caches, for a terminal of 160 columns."""
    monkeypatch.chdir(folder)
    for name in ("PCX_CACHE", "PCX_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    monkeypatch.delenv("PCX_RESULTS", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "dumb")


def run_command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `pcx …`; an exception that is not an exit is raised."""
    from pcx.bench import cli

    result = CliRunner().invoke(cli.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
