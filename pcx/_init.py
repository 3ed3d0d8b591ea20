"""How a node starts: a rule from the prediction of one sample (and a key) to a value.

Written as ``"forward"`` (the prediction itself), ``"zeros"``, `normal` with a deviation, or any function
``(prediction, key) -> value``.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pcx._types import Key, ModelError

InitFunction: TypeAlias = Callable[[Array, Key], Array]
Init: TypeAlias = str | InitFunction


def forward(prediction: Float[Array, "..."], key: Key = None) -> Float[Array, "..."]:
    return prediction


def zeros(prediction: Float[Array, "..."], key: Key = None) -> Float[Array, "..."]:
    return jnp.zeros_like(prediction)


def normal(deviation: float) -> InitFunction:
    """Independent Gaussian values with mean zero and this standard deviation."""

    def init(prediction: Array, key: Key) -> Array:
        if key is None:
            raise ModelError("a random start needs a key; pass key=.")
        return deviation * jax.random.normal(key, prediction.shape, prediction.dtype)

    return init


def as_init(init: Init | None) -> InitFunction:
    """The function behind a name; None is forward."""
    named = {"forward": forward, "zeros": zeros}
    if init is None:
        return forward
    if isinstance(init, str):
        if init not in named:
            raise ModelError(f"unknown initialisation {init!r}; use 'forward', 'zeros', pcx.normal(deviation) or a function.")
        return named[init]
    return init
