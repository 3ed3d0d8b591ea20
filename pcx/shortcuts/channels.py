"""Channels last: the same program with images kept as (batch, height, width, channels) between its operations.

Models are written for images of (channels, height, width). JAX's compiler for CPUs convolves images whose channels are last: it
turns every image before and after every convolution; inside of loops and branches it does not, and convolves many times slower.
`channels_last` traces a function and runs it again with arrays that remember the order of their axes. A convolution asks for
the order that the compiler likes, elementwise operations keep the order that they meet, and what depends on the order of axes
is told the new one. Where an operation has no rule here, and at the end, axes are put back. The arithmetic is the same; sums
may be taken in another order.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from pcx._jaxpr import ClosedJaxpr, evaluate, inside

F = TypeVar("F", bound=Callable[..., Any])
Order = tuple[int, ...]
SMALL = 64  # pixels of an image

# fmt: off
ELEMENTWISE = {
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le",
    "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "pow",
    "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub", "tan", "tanh",
    "xor",
}
# fmt: on
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")


class Laid(NamedTuple):
    """An array whose axes may stand in another order: axis i of ``array`` is axis ``order[i]`` of what the program means."""

    array: Any
    order: Order

    @property
    def turned(self) -> bool:
        return self.order != _plain(self.array)

    def to(self, order: Order) -> Any:
        """The array with its axes in this order."""
        if order == self.order:
            return self.array
        return jax.lax.transpose(self.array, [self.order.index(axis) for axis in order])

    def places(self, axes: Iterable[Any]) -> list[int]:
        """Where these axes of the program are."""
        return [self.order.index(axis) for axis in axes]


def channels_last(function: F) -> F:
    """A function that computes the same, for `jax.jit` on a CPU, where convolutional networks train faster with it.

    Elsewhere, and where nothing is compiled (``jax.disable_jit()``), it is the function as it is. It belongs around a whole
    training step: its derivatives are those of the function, and `jax.vmap` goes inside. Arguments are arrays and trees of
    arrays, as for `jax.jit`; `pcx.functional.jit` contains it.

    >>> import jax.numpy as jnp
    >>> image, kernel = jnp.ones((1, 3, 5, 5)), jnp.ones((2, 3, 3, 3))
    >>> channels_last(lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID"))(image, kernel).shape
    (1, 2, 3, 3)
    """

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if jax.default_backend() != "cpu" or getattr(jax.config, "jax_disable_jit", False):
            return function(*arguments, **keywords)
        leaves, structure = jax.tree.flatten((arguments, keywords))

        def flat(*leaves: Any) -> Any:
            arguments, keywords = jax.tree.unflatten(structure, leaves)
            return function(*arguments, **keywords)

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        turned = _differentiable(closed.jaxpr) if _convolves(closed) else None
        results = jaxpr_as_fun(closed)(*leaves) if turned is None else turned(closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call  # type: ignore[return-value]


def _differentiable(jaxpr: Jaxpr) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """A program with channels last, of its constants and its arguments, whose derivative is that of the plain program."""

    @jax.custom_jvp
    def turned(consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        results = _run(ClosedJaxpr(jaxpr, consts), [Laid(leaf, _plain(leaf)) for leaf in leaves])
        return [_back(result) for result in results]

    def plain(consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*leaves)

    turned.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return turned


def _plain(array: Any) -> Order:
    return tuple(range(jax.numpy.ndim(array)))


def _back(laid: Laid) -> Any:
    """An array as the program means it."""
    return laid.to(_plain(laid.array))


def _convolves(closed: ClosedJaxpr) -> bool:
    """Whether there is a convolution in a program, or in a loop, a branch or a call inside of it."""

    def within(eqn: JaxprEqn) -> bool:
        inner = inside(eqn)
        parts = LOOPS[eqn.primitive.name](eqn.params) if eqn.primitive.name in LOOPS else [] if inner is None else [inner]
        return eqn.primitive.name == "conv_general_dilated" or any(map(_convolves, parts))

    return any(map(within, closed.jaxpr.eqns))


def _run(closed: ClosedJaxpr, inputs: Sequence[Laid]) -> list[Laid]:
    """The outputs of a program, each in the order in which it comes."""
    jaxpr = closed.jaxpr
    known = {var: Laid(const, _plain(const)) for var, const in zip(jaxpr.constvars, closed.consts, strict=True)}
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Laid:
        return Laid(atom.val, _plain(atom.val)) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands, inner = [read(atom) for atom in eqn.invars], inside(eqn)
        turned = any(operand.turned for operand in operands)
        results: list[Laid] | None = None
        if inner is not None and (turned or _convolves(inner)):
            results = _run(inner, operands)
        elif turned or eqn.primitive.name in ("conv_general_dilated", *LOOPS):
            results = _rule(eqn)(eqn, operands)
        if results is None:
            own = {a: _back(laid) for a, laid in zip(eqn.invars, operands, strict=True) if not isinstance(a, Literal)}
            results = [Laid(array, _plain(array)) for array in evaluate(jaxpr, [eqn], own, eqn.outvars)]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _rule(eqn: JaxprEqn) -> Callable[[JaxprEqn, list[Laid]], list[Laid] | None]:
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _elementwise
    if name in REDUCTIONS:
        return _reduction
    return RULES.get(name, lambda eqn, operands: None)


def _bind(eqn: JaxprEqn, *arrays: Any, **changes: Any) -> Any:
    return eqn.primitive.bind(*arrays, **(eqn.params | changes))


def _common(operands: list[Laid]) -> Order:
    """The order of the first operand that is turned."""
    return next(operand.order for operand in operands if operand.turned)


def _elementwise(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    order = _common(operands)
    arrays = [operand.to(order) if operand.order else operand.array for operand in operands]  # scalars have no axes
    return [Laid(_bind(eqn, *arrays), order)]


def _barrier(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    arrays = _bind(eqn, *(operand.array for operand in operands))
    return [Laid(array, operand.order) for array, operand in zip(arrays, operands, strict=True)]


def _convolution(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    image, kernel, result = (tuple(map(int, spec)) for spec in eqn.params["dimension_numbers"])
    last, count = lambda spec: (spec[0], *spec[2:], spec[1]), len(image)
    arrays = operands[0].to(last(image)), operands[1].to((*kernel[2:], kernel[1], kernel[0]))
    images, kernels = (0, count - 1, *range(1, count - 1)), (count - 1, count - 2, *range(count - 2))
    numbers = jax.lax.ConvDimensionNumbers(images, kernels, images)
    whole, changes = _small(eqn, *arrays)
    return [Laid(_bind(eqn, whole, arrays[1], dimension_numbers=numbers, **changes), last(result))]


def _small(eqn: JaxprEqn, image: Any, kernel: Any) -> tuple[Any, dict[str, Any]]:
    """An image of fewer pixels than the kernel has, or has without an edge, padded here, and so what is left to a convolution.

    A compiler takes such an image for the kernel of the other, which it must turn then, and convolves number by number.
    """
    pixels = image.shape[1:-1]
    if math.prod(n - 1 for n in pixels) >= math.prod(kernel.shape[:-2]) or math.prod(pixels) > SMALL:
        return image, {}
    pairs = zip(eqn.params["padding"], eqn.params["lhs_dilation"], strict=True)
    around = [(0, 0, 0), *((low, high, apart - 1) for (low, high), apart in pairs), (0, 0, 0)]
    padded = jax.lax.pad(image, jax.numpy.zeros((), image.dtype), around)
    return jax.lax.optimization_barrier(padded), {"padding": ((0, 0),) * len(pixels), "lhs_dilation": (1,) * len(pixels)}


def _without(order: Order, axes: Iterable[Any]) -> Order:
    """The order of what is left without some axes."""
    left = [axis for axis in order if axis not in set(axes)]
    return tuple(sorted(left).index(axis) for axis in left)


def _reduction(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    (operand,), axes = operands, eqn.params["axes"]
    return [Laid(_bind(eqn, operand.array, axes=tuple(sorted(operand.places(axes)))), _without(operand.order, axes))]


def _squeeze(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    (operand,), axes = operands, eqn.params["dimensions"]
    return [Laid(jax.lax.squeeze(operand.array, operand.places(axes)), _without(operand.order, axes))]


def _transpose(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    permutation = eqn.params["permutation"]
    return [Laid(operands[0].array, tuple(permutation.index(axis) for axis in operands[0].order))]


def _inserted(order: list[int], axes: Sequence[int]) -> Order:
    """An order with further axes, each after the one before it."""
    for axis in sorted(axes):
        order.insert(order.index(axis - 1) + 1 if axis else 0, axis)
    return tuple(order)


def _broadcast(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid] | None:
    shape, mapped = eqn.params["shape"], [*map(int, eqn.params["broadcast_dimensions"])]
    if len(operands) > 1:
        return None
    kept = [mapped[axis] for axis in operands[0].order]
    order = _inserted([*kept], [axis for axis in range(len(shape)) if axis not in mapped])
    places = [order.index(axis) for axis in kept]
    return [Laid(jax.lax.broadcast_in_dim(operands[0].array, [shape[axis] for axis in order], places), order)]


def _reshape(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid] | None:
    """Axes may be split, and neighbours merged; else the axes are put back first."""
    operand, new = operands[0], eqn.params["new_sizes"]
    old = [operand.array.shape[place] for place in operand.places(range(len(operand.order)))]
    groups = _groups(old, new)
    if groups is None or eqn.params.get("dimensions") is not None or len(operands) > 1:
        return None
    order, rest = list[int](), list(operand.order)
    while rest:
        before, after = next(group for group in groups if rest[0] in group[0])
        if rest[: len(before)] != before or len(before) > 1 < len(after):
            return None
        order, rest = order + after, rest[len(before) :]
    whole = _inserted(order, [axis for before, after in groups if not before for axis in after])
    return [Laid(jax.lax.reshape(operand.array, [new[axis] for axis in whole]), whole)]


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """Which axes of a shape become which of another, in the smallest groups of equal size; None where a size is zero."""
    if 0 in old:
        return None
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        before, after = [*range(i, len(old))[:1]], [*range(j, len(new))[:1]]
        while (first := math.prod(old[k] for k in before)) != (second := math.prod(new[k] for k in after)):
            smaller = before if first < second else after
            smaller.append(smaller[-1] + 1)
        i, j = i + len(before), j + len(after)
        groups.append((before, after))
    return groups


def _slice(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    (operand,) = operands
    names = ("start_indices", "limit_indices", "strides")
    parts = {name: eqn.params[name] and tuple(eqn.params[name][axis] for axis in operand.order) for name in names}
    return [Laid(_bind(eqn, operand.array, **parts), operand.order)]


def _reverse(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    (operand,) = operands
    return [Laid(_bind(eqn, operand.array, dimensions=tuple(operand.places(eqn.params["dimensions"]))), operand.order)]


def _pad(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    operand, filling = operands
    config = tuple(eqn.params["padding_config"][axis] for axis in operand.order)
    return [Laid(_bind(eqn, operand.array, filling.array, padding_config=config), operand.order)]


def _concatenate(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid]:
    order = _common(operands)
    place = order.index(eqn.params["dimension"])
    return [Laid(_bind(eqn, *(operand.to(order) for operand in operands), dimension=place), order)]


def _scan(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid] | None:
    closed, (first, carried) = eqn.params["jaxpr"], _kinds(eqn)
    end = first + carried
    if not _convolves(closed):
        return None
    fixed, start, given = operands[:first], operands[first:end], [_back(operand) for operand in operands[end:]]

    def body(carry: list[Laid], parts: Sequence[Any]) -> tuple[list[Laid], list[Laid]]:
        results = _run(closed, [*fixed, *carry, *(Laid(part, _plain(part)) for part in parts)])
        return results[: end - first], results[end - first :]

    shapes = [jax.ShapeDtypeStruct(part.shape[1:], part.dtype) for part in given]
    orders = _settled(lambda carry, parts: body(carry, parts)[0], start, shapes)

    def step(carry: list[Any], parts: list[Any]) -> Any:
        after, rest = body([*map(Laid, carry, orders)], parts)
        return [laid.to(order) for laid, order in zip(after, orders, strict=True)], [_back(laid) for laid in rest]

    begin = [laid.to(order) for laid, order in zip(start, orders, strict=True)]
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, rest = jax.lax.scan(step, begin, given, **options)
    return [*map(Laid, carry, orders), *(Laid(array, _plain(array)) for array in rest)]


def _kinds(scan: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried from step to step; these come next."""
    if "ft_in" in scan.params:  # since JAX 0.12
        constants, carried, _ = scan.params["ft_in"].unpack()
        return len(constants), len(carried)
    return scan.params["num_consts"], scan.params["num_carry"]


def _while(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid] | None:
    body, condition = eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    if not _convolves(body):
        return None
    start = operands[second:]
    orders = _settled(lambda carry, _: _run(body, [*operands[first:second], *carry]), start, [])

    def going(carry: Any) -> Any:
        return _back(_run(condition, [*operands[:first], *map(Laid, carry, orders)])[0])

    def step(carry: Any) -> Any:
        after = _run(body, [*operands[first:second], *map(Laid, carry, orders)])
        return [laid.to(order) for laid, order in zip(after, orders, strict=True)]

    begin = [laid.to(order) for laid, order in zip(start, orders, strict=True)]
    return [*map(Laid, jax.lax.while_loop(going, step, begin), orders)]


def _branches(eqn: JaxprEqn, operands: list[Laid]) -> list[Laid] | None:
    branches, (place, *given) = eqn.params["branches"], operands
    if not any(map(_convolves, branches)) or eqn.params.get("branches_platforms"):
        return None

    def taken(branch: ClosedJaxpr) -> Callable[..., list[Any]]:
        return lambda *arrays: [_back(laid) for laid in _run(branch, [*map(Laid, arrays, (laid.order for laid in given))])]

    results = jax.lax.switch(place.array, [taken(branch) for branch in branches], *(laid.array for laid in given))
    return [Laid(array, _plain(array)) for array in results]


def _settled(body: Callable[[list[Laid], Any], list[Laid]], start: list[Laid], shapes: list[Any]) -> list[Order]:
    """In which order the arrays of a loop come out of its body: so they are kept from step to step."""
    found: list[Order] = []

    def look(arrays: list[Any], parts: list[Any]) -> None:
        carry = [Laid(array, laid.order) for array, laid in zip(arrays, start, strict=True)]
        found[:] = [laid.order for laid in body(carry, parts)]

    jax.eval_shape(look, [laid.array for laid in start], shapes)
    return found


# loops and branches, and the programs inside of them
LOOPS: dict[str, Callable[[Any], Sequence[ClosedJaxpr]]] = {
    "cond": lambda params: params["branches"],
    "scan": lambda params: [params["jaxpr"]],
    "while": lambda params: [params["body_jaxpr"]],
}
RULES: dict[str, Callable[[JaxprEqn, list[Laid]], list[Laid] | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "cond": _branches,
    "conv_general_dilated": _convolution,
    "optimization_barrier": _barrier,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "scan": _scan,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "while": _while,
}
