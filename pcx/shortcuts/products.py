"""Products at less than full precision, for networks whose errors are small differences of large numbers.

Under ``jax.default_matmul_precision("tensorfloat32")`` or ``("bfloat16")`` the operands of products have eleven or eight
bits. Rounding a value like that would drown the errors ``h - u``, which are often a thousandth of it or much less. So every
product is anchored where inference starts:

    W h = W h₀ + W (h - h₀)

The first term is computed once, as in the forward pass; the second, small one is rounded relative to its own size.
Derivatives are linear in the errors, and so are rounded relative to them. In exact arithmetic nothing changes. Together with
a state that is the displacement ``h - h₀`` itself (`pcx.infer`), errors far below the rounding of a value survive; so
products of full float32 are anchored too.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

from pcx._jaxpr import ClosedJaxpr, evaluate, inside
from pcx.shortcuts import half, patches
from pcx.shortcuts.differences import COMPARISONS, FIXED, PIVOTS, UNKNOWN, called, difference, tied

F = TypeVar("F", bound=Callable[..., Any])
PRODUCTS = ("dot_general", "conv_general_dilated")
CALLS = ("jit", "pjit")
SUMS = ("reduce_sum",)  # statistics of a batch, say: linear too, and a compiler may take two of them in different orders
SMALL = 64  # pixels of an image
# Of an equation, its operands, their displacements and its place: the result, and by how much that has moved.
Product = Callable[[JaxprEqn, list[Any], list[Any], Any], tuple[Any, Any]]


def precision() -> str | None:
    """JAX's own setting of the precision of products, where it is one that rounds operands."""
    chosen = getattr(jax.config, "jax_default_matmul_precision", None)
    return chosen if chosen in ("tensorfloat32", "bfloat16") else None


def worthwhile(dtype: Any) -> bool:
    """Whether anchored products make a difference: not where everything is float64."""
    return precision() is not None or dtype != jnp.float64


def two_bytes(anchor: "Anchor | None") -> bool:
    """Whether products read operands of fewer bytes than values have."""
    return precision() == "bfloat16" or (anchor is not None and anchor.halved)


def low(array: Array) -> Array:
    """An operand as it goes into a rounded product; the rounding to tensorfloat32 is the hardware's."""
    return array.astype(jnp.bfloat16) if precision() == "bfloat16" else array


def near_zero(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether some equations have an operand that may be near zero at the start, and makes much of it (`PIVOTS`)."""

    def one(eqn: JaxprEqn) -> bool:
        name, inner = eqn.primitive.name, inside(eqn)
        if name in PIVOTS:
            return name != "mul" and not isinstance(eqn.invars[PIVOTS[name]], Literal)
        return inner is not None and near_zero(inner.jaxpr.eqns)

    return any(map(one, eqns))


def compares(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether some equations compare two numbers that may both move, such as the pixels of a window."""

    def one(eqn: JaxprEqn) -> bool:
        inner, two = inside(eqn), len({atom for atom in eqn.invars if not isinstance(atom, Literal)}) > 1
        return (eqn.primitive.name in COMPARISONS and two) or (inner is not None and compares(inner.jaxpr.eqns))

    return any(map(one, eqns))


def remembered(eqns: Sequence[JaxprEqn]) -> list[tuple[tuple[Any, ...], str]]:
    """Of some equations, those of which an `Anchor` knows what they were at the start: their places, and their names.

    These are products and, where numbers may be near zero, `PIVOTS`.
    """
    names = (*PRODUCTS, *PIVOTS) if near_zero(eqns) else PRODUCTS

    def of(eqns: Sequence[JaxprEqn], place: tuple[Any, ...], names: Sequence[str]) -> list[tuple[tuple[Any, ...], str]]:
        found = []
        for eqn in eqns:
            here, inner = (*place, eqn.outvars[0]), inside(eqn)
            if eqn.primitive.name in names:
                found.append((here, eqn.primitive.name))
            elif inner is not None and (eqn.primitive.name in CALLS or near_zero(inner.jaxpr.eqns)):
                found += of(inner.jaxpr.eqns, here, names if eqn.primitive.name in CALLS else tuple(PIVOTS))
        return found

    return of(eqns, (), names)


def interpret(
    jaxpr: Jaxpr,
    eqns: Sequence[JaxprEqn],
    known: Mapping[Any, Any],
    outputs: Sequence[Any],
    product: Product,
    away: Mapping[Any, Any],
    place: tuple[Any, ...] = (),
) -> tuple[list[Any], list[Any]]:
    """Run some equations of a program with another way to compute products. ``away`` are displacements of variables.

    Returns the outputs, and their displacements. Products inside of jit are found; those inside loops, branches and custom
    derivatives are left as they are.
    """
    values, moves = dict(known), dict(away)
    if not place:  # derivatives are those of values
        moves = {var: by if by is FIXED or by is UNKNOWN else jax.lax.stop_gradient(by) for var, by in away.items()}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    def moved(atom: Any) -> Any:
        return FIXED if isinstance(atom, Literal) else moves.get(atom, FIXED)

    for eqn in eqns:
        operands, by, here = [*map(read, eqn.invars)], [*map(moved, eqn.invars)], (*place, eqn.outvars[0])
        still, inner, name = all(amount is FIXED for amount in by), inside(eqn), eqn.primitive.name
        if name in (*PRODUCTS, *SUMS, *COMPARISONS, *PIVOTS):
            result, amount = product(eqn, operands, by, here)
            results, amounts = [result], [amount]
        elif inner is not None and name in CALLS:
            results, amounts = _inside(inner, operands, product, by, here)
            amounts = called(eqn, operands, results, by) or amounts
        else:
            results = _one(jaxpr, eqn, operands)
            if inner is None or (still and not near_zero(inner.jaxpr.eqns) and not compares(inner.jaxpr.eqns)):
                amounts = difference(eqn, operands, results, by)
            else:  # its own derivative is kept, and its program read for how far it goes
                own = functools.partial(_but_products, product)
                amounts = _inside(inner, [*map(jax.lax.stop_gradient, operands)], own, by, here)[1]
        values.update(zip(eqn.outvars, results, strict=True))
        moves.update(zip(eqn.outvars, amounts, strict=True))
    return [*map(read, outputs)], [*map(moved, outputs)]


def along(function: Callable[[Array], Array], x: Array, by: Array) -> tuple[Array, Any]:
    """A function of an array, which has moved by so much, and how much it has moved."""
    closed = jax.make_jaxpr(function)(x)
    known, away = ({closed.jaxpr.invars[0]: part} for part in (x, by))
    (value,), (amount,) = interpret(closed.jaxpr, closed.jaxpr.eqns, known, closed.jaxpr.outvars, _left_alone, away)
    return value, amount


def _inside(
    inner: ClosedJaxpr, operands: list[Any], product: Product, by: list[Any], place: Any
) -> tuple[list[Any], list[Any]]:
    """`interpret` for a program that an equation calls."""
    names, consts = inner.jaxpr.invars, dict(zip(inner.jaxpr.constvars, map(jnp.asarray, inner.consts), strict=True))
    own = consts | dict(zip(names, operands, strict=True))
    return interpret(inner.jaxpr, inner.jaxpr.eqns, own, inner.jaxpr.outvars, product, dict(zip(names, by, strict=True)), place)


def _left_alone(eqn: JaxprEqn, operands: list[Any], by: list[Any], place: Any, start: Any = None) -> tuple[Array, Any]:
    value = _plain(eqn, operands)
    return value, difference(eqn, operands, [value], by, start)[0]


def _but_products(product: Product, eqn: JaxprEqn, *given: Any) -> tuple[Array, Any]:
    """Another way to compute things, but for the products themselves."""
    return (_left_alone if eqn.primitive.name in PRODUCTS else product)(eqn, *given)


def _one(jaxpr: Jaxpr, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    own = {atom: value for atom, value in zip(eqn.invars, operands, strict=True) if not isinstance(atom, Literal)}
    return evaluate(jaxpr, [eqn], own, eqn.outvars)


class Anchor:
    """The products of a program where inference starts, and from there the same products at other values.

    An anchor is filled by one pass with `record`; `product` then gives ``base + low(x - x₀)`` with rounded derivatives.
    What does not move (the weights) is rounded once, by `record`. ``halved`` products have their eleven bits in two bytes
    (`pcx.shortcuts.half`), where they are large enough for that. ``near_zero`` says whether roots, quotients and the like are
    remembered too.
    """

    def __init__(
        self,
        known: Mapping[Any, tuple[list[Array], list[Any], Array]] | None = None,
        halved: bool = False,
        near_zero: bool = True,
    ):
        self.known = dict(known or {})
        self.halved = halved and precision() == "tensorfloat32"
        self.near_zero = near_zero

    def record(self, eqn: JaxprEqn, operands: list[Any], away: list[Any], place: Any) -> tuple[Array, Any]:
        """A product at the start, remembered; so are sums, and what was found true."""
        if eqn.primitive.name in PIVOTS:
            value = _plain(eqn, operands)
            if self.near_zero:
                self.known[place] = ([], [], value)
            return value, FIXED
        if eqn.primitive.name in (*SUMS, *COMPARISONS):
            self.known[place] = (operands, operands, value := _plain(eqn, operands))
            return value, FIXED
        value = _forward(eqn, *operands) if precision() == "bfloat16" else _plain(eqn, operands)
        rounded: list[Any] = [low(operand) for operand in operands]
        if self.halved and half.fits(eqn):
            rounded[1] = half.weights(eqn, operands[1])
        self.known[place] = (operands, rounded, value)
        return value, FIXED

    def product(self, eqn: JaxprEqn, operands: list[Any], away: list[Any], place: Any) -> tuple[Array, Any]:
        """A product at values of which some have moved since the start, and by how much it has."""
        if eqn.primitive.name in PIVOTS:
            return _left_alone(eqn, operands, away, place, self.known[place][2] if place in self.known else None)
        if eqn.primitive.name in SUMS:
            return self._sum(eqn, operands[0], away[0], place)
        if eqn.primitive.name in COMPARISONS:
            return self._truth(eqn, operands, away, place)
        moving = [by is not FIXED for by in away]
        if place not in self.known or all(moving):
            plain = _with_derivative(eqn, _plain(eqn, operands), [low(operand) for operand in operands], *operands)
            return plain, UNKNOWN if any(moving) else FIXED
        value, amount = self.known[place][2], FIXED
        if any(moving):
            amount = self._moved(eqn, operands, away, place)
            value = value + amount
        return self._derived(eqn, value, operands, away, place), amount

    def _sum(self, eqn: JaxprEqn, operand: Array, by: Any, place: Any) -> tuple[Array, Any]:
        """The sum at the start and that of what has moved; the plain one where a function of values moved by more than half."""
        if place not in self.known or by is FIXED:
            return _left_alone(eqn, [operand], [by], place)
        (start,), _, value = self.known[place]
        if by is not UNKNOWN:
            amount = _plain(eqn, [by])
            return tied(value + amount, _plain(eqn, [operand])), amount
        moved, plain = operand - start, _plain(eqn, [operand])
        near = _plain(eqn, [jnp.abs(moved)]) <= _plain(eqn, [jnp.abs(operand)]) / 2
        return jnp.where(near, value + _plain(eqn, [moved]), plain), UNKNOWN

    def _truth(self, eqn: JaxprEqn, operands: list[Any], away: list[Any], place: Any) -> tuple[Array, Any]:
        """A comparison, and what it found at the start: exactly that, also where two numbers were equal."""
        value, amount = _left_alone(eqn, operands, away, place)
        return value, self.known[place][2] if amount is not FIXED and place in self.known else amount

    def moving(self, eqn: JaxprEqn, operands: list[Array], away: list[Any], place: Any) -> Array:
        """By how much a product of which one operand moves has moved since the start; its derivative is that of the product."""
        amount = self._moved(eqn, operands, away, place)
        return self._derived(eqn, amount, operands, away, place)

    def halves(self, eqn: JaxprEqn, operands: list[Array], away: list[Any], place: Any) -> half.Half:
        """What `moving` gives, in float16 as it comes, and without a derivative: `half.with_derivative` adds one."""
        by = operands[0] - self.known[place][0][0] if away[0] is UNKNOWN else away[0]
        return half.product(eqn, half.samples(jax.lax.stop_gradient(by)), self.known[place][1][1])

    def _halved(self, place: Any, away: list[Any]) -> bool:
        return isinstance(self.known[place][1][1], half.Half) and away[1] is FIXED

    def _moved(self, eqn: JaxprEqn, operands: list[Array], away: list[Any], place: Any) -> Array:
        if self._halved(place, away):
            return self.halves(eqn, operands, away, place).wide(operands[0].dtype)
        start, rounded, _ = self.known[place]
        by = [x - s if b is UNKNOWN else b for x, s, b in zip(operands, start, away, strict=True)]
        return _low(eqn, *(jax.lax.stop_gradient(r if b is FIXED else b) for r, b in zip(rounded, by, strict=True)))

    def _derived(self, eqn: JaxprEqn, value: Array, operands: list[Array], away: list[Any], place: Any) -> Array:
        rounded = self.known[place][1]
        if self._halved(place, away):
            return half.with_derivative(eqn, value, operands[0], operands[1], rounded[1])
        both = [r if by is FIXED else low(x) for x, r, by in zip(operands, rounded, away, strict=True)]
        return _with_derivative(eqn, value, both, *operands)


def _plain(eqn: JaxprEqn, operands: list[Any]) -> Array:
    return eqn.primitive.bind(*operands, **eqn.params)


def _low(eqn: JaxprEqn, lhs: Array, rhs: Array) -> Array:
    """The product of rounded operands, in the dtype of the exact one."""
    aval: Any = eqn.outvars[0].aval
    operands = low(lhs), low(rhs)
    params = eqn.params | {"preferred_element_type": jnp.result_type(*operands)}
    return eqn.primitive.bind(*operands, **params).astype(aval.dtype)


def _forward(eqn: JaxprEqn, lhs: Array, rhs: Array) -> Array:
    """`_low` in a forward pass, which on a GPU does not convolve images of few channels; derivatives do."""
    if not (on_gpu() and patches.fits(eqn)):
        return _low(eqn, lhs, rhs)
    both, aval = [low(lhs), low(rhs)], cast(Any, eqn.outvars[0].aval)
    return _with_derivative(eqn, patches.product(eqn, *map(jax.lax.stop_gradient, both)).astype(aval.dtype), both, lhs, rhs)


def _with_derivative(eqn: JaxprEqn, value: Array, rounded: list[Array], lhs: Array, rhs: Array) -> Array:
    """A value that is already known, with the derivative of the product at rounded operands, which has derivatives in turn."""

    @jax.custom_jvp
    def product(lhs: Array, rhs: Array, value: Array, low_lhs: Array, low_rhs: Array) -> Array:
        return value

    def jvp(primals: Any, tangents: Any) -> Any:
        low_lhs, low_rhs = primals[-2:]
        left, right, *_ = tangents
        parts = [] if isinstance(left, SymbolicZero) else [_low(eqn, left, _turned(eqn, low_rhs))]
        parts += [] if isinstance(right, SymbolicZero) else [_low(eqn, low_lhs, right)]
        return product(*primals), sum(parts) if parts else jnp.zeros_like(value)

    product.defjvp(jvp, symbolic_zeros=True)
    return product(lhs, rhs, value, *rounded)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _turned(eqn: JaxprEqn, kernel: Array) -> Array:
    """The kernel of a convolution, written so that errors are sent back by a forward convolution with the turned kernel.

    For small images in tensorfloat32 that is the faster one. What is turned once more by the derivative is known to a compiler.
    """
    if eqn.primitive.name != "conv_general_dilated" or not on_gpu() or precision() != "tensorfloat32":
        return kernel
    numbers, image = eqn.params["dimension_numbers"], cast(Any, eqn.invars[0].aval)
    pixels = math.prod(image.shape[axis] for axis in numbers.lhs_spec[2:])
    plain = {*eqn.params["window_strides"], *eqn.params["lhs_dilation"]} == {1}
    if pixels > SMALL or not plain:
        return kernel
    axes = numbers.rhs_spec[2:]
    return jax.lax.rev(jax.lax.optimization_barrier(jax.lax.rev(kernel, axes)), axes)


def rounded(function: F) -> F:
    """A function whose products are rounded, values and derivatives: for forward passes, which have no small differences.

    Only bfloat16 needs it; tensorfloat32 is the hardware's own.
    """

    def product(eqn: JaxprEqn, operands: list[Any], by: list[Any], place: Any) -> tuple[Array, Any]:
        return _forward(eqn, *operands) if eqn.primitive.name in PRODUCTS else _plain(eqn, operands), FIXED

    return _interpreted(function, product)


def rounded_derivatives(function: F) -> F:
    """A function whose derivatives have rounded products, while its values do not."""
    return _interpreted(function, Anchor().product)


def _interpreted(function: Any, product: Any) -> Any:
    def call(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(arguments), strict=True))
        results = interpret(closed.jaxpr, closed.jaxpr.eqns, known, closed.jaxpr.outvars, product, {})[0]
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call if precision() == "bfloat16" else function
