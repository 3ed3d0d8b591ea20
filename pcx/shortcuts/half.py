"""Large products with eleven bits in two bytes: float16, with powers of two taken out first.

A float16 has the bits of a tensorfloat32, half its bytes, and twice its speed, but hardly any range. Here the data of every
sample are multiplied by a power of two that brings the largest to 8…16, and the weights by one that keeps every result below
2¹⁴, whatever the signs: so nothing overflows, and what is lost are numbers a hundred million times smaller than the largest of
their sample; weights of which the largest sum is below a thousandth lose bits too. Powers of two are taken out again without
rounding. What is sent back gets its own, as errors are of another size than values; derivatives for the weights are left to the
product as it is written.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from pcx._types import ModelError

LARGE = 2**29  # multiplications; smaller products are over before their data are measured
DATA, WEIGHTS = 2.0**4, 2.0**10  # bounds of the numbers of a sample, and of what a result can be as a multiple of them
BOUND = DATA * WEIGHTS  # of a result
SMALLEST = 2.0**-100, 2.0**-10  # bounds: so that no product of two powers is infinite
EXPONENT = 0x7F800000  # bits of a float32
ROUNDED = {"preferred_element_type": jnp.float16, "precision": jax.lax.Precision.DEFAULT}


class Half(NamedTuple):
    """Numbers in float16, and the powers of two that they were multiplied by."""

    array: Array
    scale: Array

    def wide(self, dtype: Any) -> Array:
        """The numbers as they are."""
        return self.array.astype(dtype) * (1 / self.scale)


def fits(eqn: JaxprEqn) -> bool:
    """Whether a product is large, in float32, and one of samples (one on each row of the left) with weights.

    One that was written with the highest precision is left as it is.
    """
    lhs, rhs, result = (cast(Any, var.aval) for var in (*eqn.invars, eqn.outvars[0]))
    if not lhs.dtype == rhs.dtype == result.dtype == jnp.float32:
        return False
    if jax.lax.Precision.HIGHEST in jax.tree.leaves([eqn.params["precision"]]):
        return False
    if eqn.primitive.name == "dot_general":
        (mine, its), batched = eqn.params["dimension_numbers"]
        plain = not any(batched) and sorted(mine) == [*range(1, lhs.ndim)]
        inner = math.prod(rhs.shape[axis] for axis in its)
    else:
        numbers = eqn.params["dimension_numbers"]
        plain = numbers.lhs_spec[0] == numbers.out_spec[0] == 0
        plain &= eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1
        inner = rhs.size // rhs.shape[numbers.rhs_spec[0]]
    return plain and result.size * inner >= LARGE


def weights(eqn: JaxprEqn, array: Array) -> Half:
    """The right operand: neither the product nor its transpose exceeds the bound, even where all signs agree."""
    if eqn.primitive.name == "dot_general":
        ((_, inner), _), every = eqn.params["dimension_numbers"], range(array.ndim)
        sums = [inner, [axis for axis in every if axis not in inner]]
    else:
        out, inside, *window = eqn.params["dimension_numbers"].rhs_spec
        sums = [(inside, *window), (out, *window)]
    size = jnp.abs(array)
    bound = jnp.maximum(*(jnp.max(jnp.sum(size, axis=tuple(axes))) for axes in sums))
    return _scaled(array, _power(jnp.maximum(bound, SMALLEST[1]), WEIGHTS))


def samples(array: Array) -> Half:
    """Numbers of samples, each of them with its own power of two."""
    return _scaled(array, power(largest(array)))


def largest(array: Array) -> Array:
    """Of every sample the largest number, whatever its sign."""
    return jnp.max(jnp.abs(array), axis=tuple(range(1, array.ndim)), keepdims=True)


def power(bound: Array) -> Array:
    """What samples are multiplied by, whose numbers are not above a bound."""
    return _power(jnp.maximum(bound, SMALLEST[0]), DATA)


def product(eqn: JaxprEqn, lhs: Half, rhs: Half) -> Half:
    """The product of samples and weights."""
    result = _written(eqn, rhs)(lhs.array)
    return Half(result, per_sample(lhs.scale, result) * rhs.scale)


def sent_back(eqn: JaxprEqn, error: Half, shape: tuple[int, ...], rhs: Half) -> Half:
    """What an error of a product sends back to its samples."""
    back = jax.linear_transpose(_written(eqn, rhs), jax.ShapeDtypeStruct(shape, jnp.float16))
    (result,) = back(error.array)
    return Half(result, per_sample(error.scale, result) * rhs.scale)


def with_derivative(eqn: JaxprEqn, value: Array, lhs: Array, rhs: Array, half: Half, scale: Array | None = None) -> Array:
    """A value that is already known, with the derivative of the product: rounded for the samples, as written for the weights.

    With a scale, what is sent back comes in float16, multiplied by that; else it is measured here. There is no second one.
    """

    @jax.custom_vjp
    def known(lhs: Array, rhs: Array, value: Array, half: Half, scale: Array | None) -> Array:
        return value

    def forward(lhs: Array, rhs: Array, value: Array, half: Half, scale: Array | None) -> Any:
        return _last(value, lhs, rhs), (lhs, rhs, half, scale)

    def backward(kept: Any, error: Array) -> Any:
        lhs, rhs, half, scale = kept
        sent, wide = (samples(error), error) if scale is None else (given := Half(error, scale), given.wide(lhs.dtype))
        weights = jax.linear_transpose(lambda rhs: eqn.primitive.bind(lhs, rhs, **eqn.params), rhs)
        return sent_back(eqn, sent, lhs.shape, half).wide(lhs.dtype), *weights(wide), None, None, None

    known.defvjp(forward, backward)
    return known(lhs, rhs, value, half, scale)


@jax.custom_jvp
def _last(value: Array, *operands: Array) -> Array:
    """A value that has no derivative, though it is made of the operands."""
    return value


@functools.partial(_last.defjvp, symbolic_zeros=True)
def _no_derivative(primals: Any, tangents: Any) -> Any:
    if not all(isinstance(tangent, SymbolicZero) for tangent in tangents[1:]):
        raise ModelError("Shortcuts(half=True) cannot be differentiated through inference; leave half out there.")
    return primals[0], tangents[0]


def per_sample(scale: Array, array: Array) -> Array:
    """A power of two for each sample, as it multiplies an array of them."""
    return scale.reshape(-1, *[1] * (array.ndim - 1))


def _written(eqn: JaxprEqn, rhs: Half) -> Callable[[Array], Array]:
    return lambda lhs: eqn.primitive.bind(lhs, rhs.array, **eqn.params | ROUNDED)


def _power(bound: Array, largest: float) -> Array:
    """The power of two that brings a bound to half of the largest, or at most to that."""
    bits = jax.lax.bitcast_convert_type(bound, jnp.int32)
    return (largest / 2) / jax.lax.bitcast_convert_type(bits & EXPONENT, bound.dtype)


def _scaled(array: Array, scale: Array) -> Half:
    return Half((array * scale).astype(jnp.float16), scale)
