"""Products in bfloat16, for networks whose errors are small differences of large numbers.

Under ``jax.default_matmul_precision("bfloat16")`` the products that inference and learning repeat have operands of eight
bits. Rounding a value like that would drown the errors ``h - u``, which are often a thousandth of it. So every product is
anchored where inference starts:

    W h = W h₀ + W (h - h₀)

The first term is computed once, as in the forward pass; only the second, small one is rounded, relative to its own size.
Derivatives are linear in the errors, and so are rounded relative to them. In exact arithmetic nothing changes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

from pcx._jaxpr import evaluate, inside

F = TypeVar("F", bound=Callable[..., Any])
LOW = jnp.bfloat16
PRODUCTS = ("dot_general", "conv_general_dilated")
Product = Callable[[JaxprEqn, list[Any], list[bool], Any], Any]  # equation, operands, which of them move, its place


def wanted() -> bool:
    """Whether products are to be in bfloat16: JAX's own setting says so."""
    return getattr(jax.config, "jax_default_matmul_precision", None) == "bfloat16"


def interpret(
    jaxpr: Jaxpr,
    eqns: Sequence[JaxprEqn],
    known: Mapping[Any, Any],
    outputs: Sequence[Any],
    product: Product,
    moving: Collection[Any],
    place: tuple[Any, ...] = (),
) -> list[Any]:
    """`evaluate`, with another way to compute products. ``moving`` are variables; what depends on them moves too.

    Products inside of jit are found; those inside loops, branches and custom derivatives are left as they are.
    """
    values, moves = dict(known), set(moving)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in eqns:
        operands = [read(atom) for atom in eqn.invars]
        flags = [not isinstance(atom, Literal) and atom in moves for atom in eqn.invars]
        inner = inside(eqn) if eqn.primitive.name in ("jit", "pjit") else None
        if eqn.primitive.name in PRODUCTS:
            results = [product(eqn, operands, flags, (*place, eqn.outvars[0]))]
        elif inner is not None:
            variables = inner.jaxpr.invars
            own = dict(zip(inner.jaxpr.constvars, inner.consts, strict=True)) | dict(zip(variables, operands, strict=True))
            moved = [var for var, flag in zip(variables, flags, strict=True) if flag]
            place_inside = (*place, eqn.outvars[0])
            results = interpret(inner.jaxpr, inner.jaxpr.eqns, own, inner.jaxpr.outvars, product, moved, place_inside)
        else:
            own = {atom: value for atom, value in zip(eqn.invars, operands, strict=True) if not isinstance(atom, Literal)}
            results = evaluate(jaxpr, [eqn], own, eqn.outvars)
        values.update(zip(eqn.outvars, results, strict=True))
        if any(flags):
            moves.update(eqn.outvars)
    return [read(atom) for atom in outputs]


class Anchor:
    """The products of a program where inference starts, and from there the same products at other values.

    An anchor is filled by one pass with `record`; `product` then gives ``base + low(x - x₀)`` with derivatives in bfloat16.
    What does not move (the weights) is rounded once, by `record`.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[list[Array], list[Array], Array]] = {}

    def record(self, eqn: JaxprEqn, operands: list[Array], moving: list[bool], place: Any) -> Array:
        """A product at the start, remembered."""
        value = _plain(eqn, operands)
        self.known[place] = (operands, [operand.astype(LOW) for operand in operands], value)
        return value

    def product(self, eqn: JaxprEqn, operands: list[Array], moving: list[bool], place: Any) -> Array:
        """A product at values of which some have moved since the start."""
        fixed = [jax.lax.stop_gradient(operand) for operand in operands]
        low = [operand.astype(LOW) for operand in fixed]
        if place not in self.known or all(moving):
            value = _plain(eqn, fixed)
        else:
            start, rounded, value = self.known[place]
            low = [now if moved else then for now, then, moved in zip(low, rounded, moving, strict=True)]
            if any(moving):
                away = [x - s if m else r for x, s, r, m in zip(fixed, start, rounded, moving, strict=True)]
                value = value + _low(eqn, *away)
        return _with_derivative(eqn, jax.lax.stop_gradient(value), low, *operands)


def _plain(eqn: JaxprEqn, operands: list[Array]) -> Array:
    return eqn.primitive.bind(*operands, **eqn.params)


def _low(eqn: JaxprEqn, lhs: Array, rhs: Array) -> Array:
    """The product of rounded operands, in the dtype of the exact one."""
    params = eqn.params | {"preferred_element_type": LOW}
    aval: Any = eqn.outvars[0].aval
    return eqn.primitive.bind(lhs.astype(LOW), rhs.astype(LOW), **params).astype(aval.dtype)


def _with_derivative(eqn: JaxprEqn, value: Array, low: list[Array], lhs: Array, rhs: Array) -> Array:
    """A value that is already known, with the derivative of the product in bfloat16; ``low`` are the rounded operands."""

    @jax.custom_jvp
    def product(lhs: Array, rhs: Array, value: Array, low_lhs: Array, low_rhs: Array) -> Array:
        return value

    def jvp(primals: Any, tangents: Any) -> Any:
        _, _, value, low_lhs, low_rhs = primals
        left, right, *_ = tangents
        parts = [] if isinstance(left, SymbolicZero) else [_low(eqn, left, low_rhs)]
        parts += [] if isinstance(right, SymbolicZero) else [_low(eqn, low_lhs, right)]
        return value, sum(parts) if parts else jnp.zeros_like(value)

    product.defjvp(jvp, symbolic_zeros=True)
    return product(lhs, rhs, value, *low)


def rounded(function: F) -> F:
    """A function whose products are done in bfloat16, values and derivatives, where that is wanted; else the function itself.

    For plain backpropagation, which has no small differences.
    """
    return _interpreted(function, lambda eqn, operands, moving, place: _low(eqn, *operands)) if wanted() else function


def rounded_derivatives(function: F) -> F:
    """A function whose derivatives have products in bfloat16, where that is wanted, while its values do not."""
    return _interpreted(function, Anchor().product) if wanted() else function


def _interpreted(function: Any, product: Any) -> Any:
    def call(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(arguments), strict=True))
        results = interpret(closed.jaxpr, closed.jaxpr.eqns, known, closed.jaxpr.outvars, product, ())
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call
