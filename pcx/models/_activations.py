"""The activation functions of the benchmark, by the names that settings use."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pcx._types import ModelError, near

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": jax.nn.gelu,
    "hard_tanh": jax.nn.hard_tanh,
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


def activation(name: str) -> Callable[[Any], Any]:
    """The function behind a name."""
    if name not in ACTIVATIONS:
        raise ModelError(f"there is no activation {name!r}; near: {near(name, ACTIVATIONS)}.")
    return ACTIVATIONS[name]
