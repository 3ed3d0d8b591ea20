"""By how much a result moves when its operands do, without subtracting two nearly equal numbers.

Finite differences have rules, as derivatives have, and they are exact: with ``Δx = x - x₀`` known to its own precision,

    Δ(x + y) = Δx + Δy        Δ(x y) = Δx y + x₀ Δy        Δ tanh x = tanh Δx (1 - tanh x tanh x₀)

and so on, a rule for each operation. So how far a prediction has gone from where it was at the start is as exact as how far its
parents have, be it ever so little. Where a rule needs ``x₀`` it takes ``x - Δx``: nothing of the start is read. Near zero, a
root, a quotient or a logarithm makes much of the rounding in that; so where the way is long, their results are subtracted
(`PIVOTS`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from pcx._types import Displaced, Nodes
from pcx.shortcuts.windows import NAME, larger_moved, max_2x2_moved

T = TypeVar("T")

FIXED: Any = None  # an operand that has not moved
UNKNOWN: Any = object()  # one that has, by an unknown amount
# These are linear in their first operand, so that its displacement goes the same way as it does.
LINEAR = ("reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "rev", "copy", "neg", "stop_gradient",
          "reduce_window_sum", "psum", "cumsum", "gather", "dynamic_slice")  # fmt: skip
# Of these the operand that may be near zero; what the result was at the start is remembered by an `Anchor`.
PIVOTS = {"sqrt": 0, "rsqrt": 0, "log": 0, "log1p": 0, "div": 1, "mul": 0}
COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne", "and", "or", "not")
CHOICES = ("select_n", "concatenate", "pad")  # of truths, what was chosen at the start
Rule = Callable[[list[Array], list[Array], Array, dict[str, Any]], Any]  # operands, displacements, result, parameters


def difference(
    eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any], by: Sequence[Any], start: Any = None
) -> list[Any]:
    """The displacements of the results of an equation, given those of its operands; what has no rule is UNKNOWN.

    That of a truth is what it was at the start: known where only one of two numbers moves, or from an `Anchor`. ``start`` is
    what the result was, where that is remembered. A difference has no derivative of its own: `tied` gives it one.
    """
    if all(amount is FIXED for amount in by):
        return [FIXED] * len(results)
    name = eqn.primitive.name
    if any(amount is UNKNOWN for amount in by) or len(results) != 1:
        return [UNKNOWN] * len(results)
    if name in LINEAR:
        if any(amount is not FIXED for amount in by[1:]):
            return [UNKNOWN]
        filled = {"fill_value": 0} if by[0].dtype != bool and eqn.params.get("fill_value") is not None else {}
        amount = eqn.primitive.bind(by[0], *operands[1:], **eqn.params | filled)
        return amount if eqn.primitive.multiple_results else [amount]
    truth = results[0].dtype == bool and name in (*COMPARISONS, *CHOICES)
    if name not in (*ARITHMETIC, *RULES, *COMPARISONS, *SMOOTH) or not (
        truth or jnp.issubdtype(results[0].dtype, jnp.floating)
    ):
        return [UNKNOWN]
    x = [jax.lax.stop_gradient(jnp.asarray(operand)) for operand in operands]
    if name in COMPARISONS:
        moving = [atom for atom, amount in zip(eqn.invars, by, strict=True) if amount is not FIXED]
        known = x[0].dtype == bool or all(atom is moving[0] for atom in moving)
        return [eqn.primitive.bind(*map(before, x, by), **eqn.params) if known else UNKNOWN]
    if name in SMOOTH:
        return [_smooth(lambda x: eqn.primitive.bind(x, **eqn.params), x[0], by[0])]
    moved = list(by) if name in ARITHMETIC else [_still(a) if b is FIXED else b for a, b in zip(x, by, strict=True)]
    result = jax.lax.stop_gradient(results[0])
    found = (ARITHMETIC | RULES)[name](x, moved, result, eqn.params)
    if name in PIVOTS and not (by[-1] is FIXED or by[PIVOTS[name]] is FIXED):  # else it is linear, or nothing is near zero
        pivot, way = x[PIVOTS[name]] + (name == "log1p"), by[PIVOTS[name]]
        if start is not None:
            found = jnp.where(jnp.abs(way) <= jnp.abs(pivot) / 2, found, result - jax.lax.stop_gradient(start))
        elif name != "mul":
            found = UNKNOWN
    return [found if found is UNKNOWN else jnp.broadcast_to(found, result.shape)]


def called(eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any], by: Sequence[Any]) -> list[Any] | None:
    """The same for a program that is known by its name, of which there is a rule for all of it."""
    if eqn.params.get("name") != NAME or len(by) != 1 or by[0] is FIXED or by[0] is UNKNOWN:
        return None
    amount = max_2x2_moved(*map(jax.lax.stop_gradient, (operands[0], by[0])))
    return [amount] if amount.shape == results[0].shape else None  # mapped over another axis than the first


def _still(x: Array) -> Array:
    """The displacement of what has not moved, as an array."""
    return x if x.dtype == bool else jnp.zeros_like(x)


def before(x: Array, by: Any) -> Array:
    """What an operand was at the start; the displacement of a truth is that itself."""
    return x if by is FIXED else by if by.dtype == bool else x - by


def _chosen(was: Array, cases: Sequence[Array], by: Sequence[Array], result: Array) -> Array:
    """One of several cases, of which at the start it ``was`` another, maybe: the way of that one, and from it to the result."""
    case = jax.lax.select_n(was, *cases)
    return jax.lax.select_n(was, *by) + jnp.where(result == case, 0, result - case)  # two infinities are not subtracted


def _larger(x: list[Array], by: list[Array], result: Array, _: Any) -> Array:
    (a, b), (by_a, by_b) = jnp.broadcast_arrays(*x), jnp.broadcast_arrays(*by)
    return larger_moved(result, jnp.where(a >= b, by_a, by_b), jnp.maximum(a - by_a, b - by_b))


def _smaller(x: list[Array], by: list[Array], result: Array, _: Any) -> Array:
    return -_larger([-a for a in x], [-b for b in by], -result, _)


def _clamp(x: list[Array], by: list[Array], result: Array, _: Any) -> Array:
    low, value, high = jnp.broadcast_arrays(*x)
    at_least = jnp.maximum(low, value)
    least, most = (jnp.broadcast_to(part, value.shape) for part in (by[0], by[2]))
    return _smaller([at_least, high], [_larger([low, value], [least, by[1]], at_least, _), most], result, _)


def _absolute(x: list[Array], by: list[Array], result: Array, _: Any) -> Array:
    return _chosen(x[0] - by[0] >= 0, [-x[0], x[0]], [-by[0], by[0]], result)


def _select(x: list[Array], by: list[Array], result: Array, _: Any) -> Array:
    which, *cases = x
    was = before(which, by[0] if by[0].dtype == bool else FIXED)  # a number that chooses has not moved
    return jax.lax.select_n(was, *by[1:]) if result.dtype == bool else _chosen(was, cases, by[1:], result)


def _power(x: list[Array], by: list[Array], result: Array, parameters: dict[str, Any]) -> Any:
    """``xⁿ - x₀ⁿ = Δx Σ xᵏ x₀ⁿ⁻¹⁻ᵏ``."""
    n, start = parameters["y"], x[0] - by[0]
    return UNKNOWN if n < 1 else by[0] * sum(x[0] ** k * start ** (n - 1 - k) for k in range(n))


def _concatenate(x: list[Array], by: list[Array], result: Array, parameters: dict[str, Any]) -> Array:
    return jax.lax.concatenate(by, parameters["dimension"])


def _convert(x: list[Array], by: list[Array], result: Array, parameters: dict[str, Any]) -> Any:
    wider = result.dtype == x[0].dtype or result.dtype.itemsize > x[0].dtype.itemsize  # else it rounds
    return by[0].astype(result.dtype) if wider and jnp.issubdtype(x[0].dtype, jnp.floating) else UNKNOWN


def _root(x: list[Array], by: list[Array], result: Array, _: Any) -> Array:
    """``√x - √x₀ = Δx / (√x + √x₀)``."""
    both = result + jnp.sqrt(x[0] - by[0])
    return jnp.where(both > 0, by[0] / jnp.where(both > 0, both, 1), 0)


def _inverse_root(x: list[Array], by: list[Array], result: Array, _: Any) -> Array:
    start = jax.lax.rsqrt(x[0] - by[0])
    return -by[0] * (result * start) ** 2 / (result + start)


def _exponential(x: list[Array], by: list[Array], result: Array, _: Any) -> Array:
    """``eˣ - eʸ = eˣ (1 - eʸ⁻ˣ)`` with the larger of the two in front."""
    return -jnp.sign(by[0]) * jnp.exp(jnp.maximum(x[0], x[0] - by[0])) * jnp.expm1(-jnp.abs(by[0]))


TANH = (1, 1 / 3, 2 / 15, 17 / 315, 62 / 2835, 1382 / 155925, 21844 / 6081075)  # of tanh x / x, in powers of -x²


def _tanh(x: Array, by: Array, result: Array) -> Array:
    """``tanh x - tanh x₀ = tanh Δx (1 - tanh x tanh x₀)``, the first by a series; for a long way the plain difference."""
    start, series = jnp.tanh(x - by), jnp.zeros_like(by)
    for term in reversed(TANH):
        series = term - by * by * series
    return jnp.where(jnp.abs(by) < 1 / 8, by * series * (1 - result * start), result - start)


def _logistic(x: Array, by: Array) -> Array:
    """``σ(x) - σ(x₀) = σ(x) σ(-x₀) (1 - eʸ)`` with ``y = x₀ - x``, or likewise from the other end if that is the larger one."""
    low, high = jnp.minimum(x, x - by), jnp.maximum(x, x - by)
    return -jnp.sign(by) * jax.nn.sigmoid(high) * jax.nn.sigmoid(-low) * jnp.expm1(-jnp.abs(by))


def _smooth(function: Callable[[Array], Array], x: Array, by: Array) -> Array:
    """The mean of the derivative on the way by Simpson's rule; where the way is long, the plain difference is as good."""

    def slope(x: Array) -> Array:
        return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]

    start = x - by
    mean = (slope(start) + 4 * slope(x - by / 2) + slope(x)) / 6
    return jnp.where(jnp.abs(by) < 1 / 64, by * mean, function(x) - function(start))


def _product(x: list[Array], by: list[Any], result: Array, _: Any) -> Array:
    if any(amount is FIXED for amount in by):
        return x[0] * by[1] if by[0] is FIXED else by[0] * x[1]
    return by[0] * x[1] + before(x[0], by[0]) * by[1]


def _quotient(x: list[Array], by: list[Any], result: Array, _: Any) -> Array:
    """``x/y - x₀/y₀ = (Δx - Δy x₀/y₀) / y``."""
    if by[1] is FIXED:
        return by[0] / x[1]
    down = by[1] * (before(x[0], by[0]) / before(x[1], by[1]))
    return (-down if by[0] is FIXED else by[0] - down) / x[1]


# Operands that have not moved are FIXED in these, and zeros in the others.
ARITHMETIC: dict[str, Rule] = {
    "add": lambda x, by, result, _: sum(amount for amount in by if amount is not FIXED),
    "sub": lambda x, by, result, _: by[0] if by[1] is FIXED else -by[1] if by[0] is FIXED else by[0] - by[1],
    "mul": _product,
    "div": _quotient,
}
RULES: dict[str, Rule] = {
    "square": lambda x, by, result, _: by[0] * (x[0] + (x[0] - by[0])),
    "integer_pow": _power,
    "sqrt": _root,
    "rsqrt": _inverse_root,
    "exp": _exponential,
    "expm1": _exponential,
    "log": lambda x, by, result, _: -jnp.log1p(-by[0] / x[0]),
    "log1p": lambda x, by, result, _: -jnp.log1p(-by[0] / (1 + x[0])),
    "tanh": lambda x, by, result, _: _tanh(x[0], by[0], result),
    "logistic": lambda x, by, result, _: _logistic(x[0], by[0]),
    "max": _larger,
    "min": _smaller,
    "clamp": _clamp,
    "abs": _absolute,
    "select_n": _select,
    "concatenate": _concatenate,
    "pad": lambda x, by, result, parameters: jax.lax.pad(by[0], by[1], **parameters),
    "convert_element_type": _convert,
}
SMOOTH = ("erf", "erfc", "sin", "cos", "atan", "asinh")


@jax.custom_jvp
def tied(amount: Array, now: Array, start: Array | None = None) -> Array:
    """A number that is known, with the derivative of ``now``, or of ``now - start``."""
    return amount


def _tied_jvp(primals: Any, tangents: Any) -> Any:
    now, start = (None if t is None or isinstance(t, SymbolicZero) else t for t in tangents[1:])
    moved = jnp.zeros_like(primals[0]) if now is None else now
    return tied(*primals), moved if start is None else moved - start


tied.defjvp(_tied_jvp, symbolic_zeros=True)


@jax.tree_util.register_pytree_with_keys_class
class Predictions(Nodes[T]):
    """Predictions, and ``by`` how much they have moved since the start, to its own precision, where that is known.

    None among these is a prediction that has not moved.
    """

    __slots__ = ("by",)

    def __init__(self, items: Mapping[str, T] | Iterable[tuple[str, T]], roots: Iterable[str], by: Mapping[str, T | None]):
        super().__init__(items, roots)
        self.by = dict(by)

    def with_still(self, others: Mapping[str, T]) -> "Predictions[T]":
        """And others, which have not moved."""
        return Predictions({**self, **others}, self.roots, self.by | dict.fromkeys(others))

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, T]], Any]:
        leaves, structure = super().tree_flatten_with_keys()
        moved: Any = [(jax.tree_util.DictKey(f"by {n}"), v) for n, v in self.by.items()]
        return [*leaves, *moved], (structure, tuple(self.by))

    @classmethod
    def tree_unflatten(cls, structure: Any, items: Iterable[T]) -> "Predictions[T]":
        ((names, roots), moved), parts = structure, list(items)
        return cls(zip(names, parts, strict=False), roots, dict(zip(moved, parts[len(names) :], strict=True)))


def way(values: Displaced, predictions: Mapping[str, Array], name: str) -> Array:
    """How far a prediction is from where its node started, if possible without subtracting the two."""
    u, start, moved = predictions[name], values.start[name], getattr(predictions, "by", {})
    if name not in moved or name not in values.gap:
        return u - start
    amount, gap = jnp.zeros_like(u) if moved[name] is None else moved[name], values.gap[name]
    return tied(amount if gap is None else amount - gap, u, start)


def gaps(values: Nodes[Array], predictions: Mapping[str, Array]) -> Nodes[Array | None]:
    """How far each node is from its prediction; None where it is the prediction itself."""
    return Nodes({name: None if h is predictions[name] else h - predictions[name] for name, h in values.items()})
