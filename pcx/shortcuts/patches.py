"""A convolution of few channels, such as a first layer's three colours, as one product of patches.

Tensor cores take numbers by eight, so that a vendor's kernels fill three channels up with five zeros, at every pixel of a
window. A window of 3×3 pixels of three colours has 27 numbers, and needs five zeros in all.
"""

import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxtyping import Array

FEW, FULL = 4, 8  # channels that are few; what numbers of a patch are filled up to a multiple of


def fits(eqn: JaxprEqn) -> bool:
    """Whether an equation is a convolution of few channels, without holes or groups, in the order that layers have."""
    if eqn.primitive.name != "conv_general_dilated" or cast(Any, eqn.invars[0].aval).ndim != 4:
        return False
    if cast(Any, eqn.outvars[0].aval).size == 0:
        return False
    params, usual = eqn.params, (0, 1, 2, 3)
    plain = {*params["lhs_dilation"], *params["rhs_dilation"]} == {1}
    plain &= params["feature_group_count"] == params["batch_group_count"] == 1
    return plain and {*params["dimension_numbers"]} == {usual} and cast(Any, eqn.invars[0].aval).shape[1] <= FEW


def product(eqn: JaxprEqn, images: Array, kernel: Array) -> Array:
    """The convolution, in the dtype of its operands: the pixels of every window side by side, times the kernel."""
    count, _, height, width = cast(Any, eqn.outvars[0].aval).shape
    out, channels, *window = kernel.shape
    (down, right), edges = eqn.params["window_strides"], [(low, high, 0) for low, high in eqn.params["padding"]]
    padded = jax.lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), (0, 0, 0), *edges])
    planes = jax.lax.optimization_barrier(padded.reshape(count * channels, -1))  # one after the other in memory
    padded = planes.reshape(padded.shape)
    ends = down * (height - 1) + 1, right * (width - 1) + 1
    shifted = [
        jax.lax.slice(padded, (0, 0, i, j), (count, channels, i + ends[0], j + ends[1]), (1, 1, down, right))
        for i, j in itertools.product(*map(range, window))
    ]
    numbers = len(shifted) * channels
    spare = -numbers % FULL
    patches = jnp.concatenate([*shifted, jnp.zeros((count, spare, height, width), images.dtype)], axis=1)
    columns = jnp.pad(kernel.transpose(2, 3, 1, 0).reshape(numbers, out), ((0, spare), (0, 0)))
    both = patches.reshape(count, -1, height * width), jnp.broadcast_to(columns, (count, *columns.shape))
    result = jax.lax.dot_general(*both, (((1,), (1,)), ((0,), (0,))), precision=eqn.params["precision"])
    return result.reshape(count, height, width, out).transpose(0, 3, 1, 2)
