"""2×2 windows of an image: their largest pixels, and by how much these move when the pixels do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

Image = Float[Array, "*channels height width"]
Pixels = Float[Array, "*channels half_height 2 half_width 2"]
Halved = Float[Array, "*channels half_height half_width"]


def windows(x: Image) -> Pixels:
    """Pixels as (…, window row, row inside, window column, column inside); an odd last row or column is left out."""
    height, width = x.shape[-2] // 2, x.shape[-1] // 2
    return x[..., : 2 * height, : 2 * width].reshape(*x.shape[:-2], height, 2, width, 2)


def corners(pixels: Pixels) -> list[Halved]:
    """Upper left, upper right, lower left, lower right."""
    return [pixels[..., i, :, j] for i in (0, 1) for j in (0, 1)]


def largest(a: Array, b: Array, c: Array, d: Array) -> Array:
    return jnp.maximum(jnp.maximum(a, b), jnp.maximum(c, d))


def order(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array, Array]:
    """Whether the first largest of four corners is an upper one; of the upper ones the left; of the lower ones the left."""
    return jnp.maximum(a, b) >= jnp.maximum(c, d), a >= b, c >= d


def pick(found: tuple[Array, Array, Array], a: Any, b: Any, c: Any, d: Any) -> Array:
    """Of four arrays the one that belongs to the corner of this `order`."""
    upper, left_top, left_bottom = found
    return jnp.where(upper, jnp.where(left_top, a, b), jnp.where(left_bottom, c, d))


def first_largest(pixels: Pixels, by: Callable[[Array], Array] | None) -> tuple[Halved, Int8[Array, "..."]]:
    """The pixels at which ``by`` is largest, and their places: 0 and 1 in the upper row, 2 and 3 in the lower.

    Without ``by`` the pixels are maxima: a compiler for GPUs then makes one kernel of this, and else writes the corners first.
    """
    four = corners(pixels)
    found = order(*(four if by is None else map(by, four)))
    return largest(*four) if by is None else pick(found, *four), pick(found, 0, 1, 2, 3).astype(jnp.int8)


@jax.jit
def pcx_max_2x2(x: Image) -> Halved:
    """The largest pixels; programs call it by this name (`NAME`), so that it is found there."""
    return largest(*corners(windows(x)))


NAME = "pcx_max_2x2"


def max_2x2_moved(x: Image, by: Image) -> Halved:
    """By how much the largest pixels have moved when the pixels did by ``by``."""
    now, ways = corners(windows(x)), corners(windows(by))
    if jax.default_backend() == "gpu":  # the same numbers in fewer kernels; on a CPU a tenth of a training step slower
        before = corners(windows(x - by))
    else:
        before = [pixel - way for pixel, way in zip(now, ways, strict=True)]
    return larger_moved(largest(*now), pick(order(*now), *ways), largest(*before))


def larger_moved(largest: Array, way: Array, start: Array) -> Array:
    """By how much the largest of some numbers has moved, if the one that is it now went this ``way``.

    From where that one began it is as far again to the ``start``, the largest one then: nothing if it is the same one.
    """
    moved = way + ((largest - way) - start)
    plain = jnp.where(largest == start, 0, largest - start)
    return jnp.where(jnp.abs(moved) < jnp.inf, moved, plain)  # infinities are not subtracted
