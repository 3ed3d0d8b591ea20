"""Energies: how far a value ``h`` is from its prediction ``u``, for one sample of one node.

An energy is any function ``(h, u) -> scalar``. The ones here also say three things about themselves that the core can
use: their terms before summation over units (so that a precision may differ per unit), whether they are *stationary*,
that is, whether both gradients vanish at ``h = u`` (then a node that sits at its prediction costs nothing), and whether
they depend on the *difference* ``h - u`` alone (then a small error need not be a difference of two large numbers).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pcx._types import ModelError


@dataclasses.dataclass(frozen=True)
class Energy:
    """A named energy: ``energy(h, u)`` is the sum of its ``terms`` over the units of one sample."""

    name: str
    terms: Callable[[Array, Array], Array]
    stationary: bool
    difference: bool = False

    def __call__(self, h: Float[Array, "..."], u: Float[Array, "..."]) -> Float[Array, ""]:
        return jnp.sum(self.terms(h, u))

    def __repr__(self) -> str:
        return self.name


squared_error = Energy("squared_error", lambda h, u: 0.5 * jnp.square(h - u), stationary=True, difference=True)
"""``½ Σ (h - u)²``: the Gaussian node of Eq. 1, up to a constant.

>>> float(squared_error(jnp.array([1.0, 2.0]), jnp.array([0.0, 0.0])))
2.5
"""

cross_entropy = Energy("cross_entropy", lambda h, u: -h * jax.nn.log_softmax(u), stationary=False)
"""``-Σ h log softmax(u)``: ``u`` are logits (the softmax is over the last axis) and ``h`` a distribution, such as a one-hot
label.

>>> float(cross_entropy(jnp.array([0.0, 1.0]), jnp.array([0.0, 1000.0])))
0.0
"""

zero = Energy("zero", lambda h, u: jnp.zeros((), u.dtype), stationary=True)
"""No energy: a root latent without a prior."""


def check_factor(name: str, energy: Any, precision: Any) -> None:
    """Refuse what is no energy or no precision; what is traced, or a function of the step, is not looked at."""
    if not callable(energy):
        raise ModelError(f"the energy of node {name!r} is {energy!r}; give a function of h and u, such as pcx.squared_error.")
    known = [leaf for leaf in jax.tree.leaves(precision) if not callable(leaf) and not isinstance(leaf, jax.core.Tracer)]
    if not all(jnp.issubdtype(a.dtype, np.number) and np.all((a >= 0) & (a < np.inf)) for a in map(np.asarray, known)):
        raise ModelError(f"the precision of node {name!r} is {precision}; it is finite and at least zero.")


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array of this shape can be broadcast to the whole."""
    pairs = zip(shape[::-1], whole[::-1], strict=False)
    return len(shape) <= len(whole) and all(size in (1, target) for size, target in pairs)


def weighted(energy: Callable[[Array, Array], Array], h: Array, u: Array, precision: Any, name: str) -> Array:
    """The energy of one sample with a precision in front: a number, or an array with one entry per unit."""
    if h.shape != u.shape:
        raise ModelError(f"node {name!r} has shape {u.shape} per sample, but its value {h.shape}; labels are given one-hot.")
    if precision is None:
        return jnp.asarray(energy(h, u))
    precision = jnp.asarray(precision, u.dtype)
    if precision.ndim == 0:
        return precision * energy(h, u)
    if not isinstance(energy, Energy):
        raise ModelError(f"the precision of node {name!r} has shape {precision.shape}; only an `Energy` takes an array.")
    if not _fits(precision.shape, u.shape):
        raise ModelError(f"the precision of node {name!r} has shape {precision.shape}, but the node has shape {u.shape}.")
    return jnp.sum(precision * energy.terms(h, u))
