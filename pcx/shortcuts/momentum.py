"""Momentum that is not kept, as two sets of values say it.

After a step of gradient descent with momentum, ``m' = μ m + ∂F/∂h`` and ``h' = h - γ m'``, momentum is that step divided by the
rate: ``m' = (h - h') / γ``. A step of large arrays takes as long as they are read and written. With momentum it reads values,
momentum and an error, and writes two arrays; with the values before, it reads as many and writes one.

Momentum gets the rounding of values divided by the rate, and sums it up. In two bytes that is a percent or two of a way after
`FEW` steps, and more later; with more steps momentum is kept there. In four bytes it is nothing.

Nothing is assumed about the optimiser: which parts of its state are such multiples is read from its own program. A traced rate
of zero moves nothing and leaves no momentum, and has no derivative; so all of this has to be asked for, by
``Shortcuts(kernel=True)``, and is not for a state that was given.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal
from jaxtyping import Array

from pcx._jaxpr import ClosedJaxpr, cut, evaluate, free_variables

FEW = 16  # steps


class Momentum(NamedTuple):
    """A part of an optimiser's state, by its place among the leaves, which times some numbers is the last step of a node."""

    place: int
    node: str
    factors: list[Any]


def momenta(program: ClosedJaxpr, names: Sequence[str]) -> list[Momentum]:
    """Those of an optimiser, given the program of its update (`ZeroAware.program`) and the names of the nodes."""
    jaxpr, found = program.jaxpr, list[Momentum]()
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    places: dict[Any, int] = {}
    for place, var in enumerate(jaxpr.outvars[len(names) :]):
        while not isinstance(var, Literal):  # also before it is rounded to the state's dtype
            places[var] = place
            if not _converts(made.get(var), narrower=True):
                break
            var = made[var].invars[0]
    for name, update in zip(names, jaxpr.outvars, strict=False):
        var, factors = update, list[Any]()
        while not isinstance(var, Literal) and var not in places and (part := _part(program, made, made.get(var), not factors)):
            var, number = part
            factors.append(number)
        zero = any(not isinstance(number, jax.core.Tracer) and number == 0 for number in factors)
        if not isinstance(var, Literal) and var in places and var.aval.shape == update.aval.shape and not zero:
            found.append(Momentum(places[var], name, factors))
    return found


def from_steps(found: Sequence[Momentum], before: Mapping[str, Array], after: Mapping[str, Array]) -> dict[int, Array]:
    """These parts of the state, by their places, given the values before and after a step. A rate of zero leaves zeros."""
    result = {}
    for place, name, factors in found:
        dtype = jnp.promote_types(after[name].dtype, jnp.float32)
        rate = jnp.asarray(functools.reduce(operator.mul, factors, 1.0), dtype)
        step = after[name].astype(dtype) - before[name].astype(dtype)
        result[place] = jnp.where(rate == 0, 0, step / jnp.where(rate == 0, 1, rate))
    return result


def _is(eqn: JaxprEqn | None, *names: str) -> bool:
    return eqn is not None and eqn.primitive.name in names


def _converts(eqn: JaxprEqn | None, narrower: bool) -> bool:
    """Whether an equation writes a number in another dtype: in a narrower one it is rounded, in a wider one it is not."""
    if eqn is None or not _is(eqn, "convert_element_type"):
        return False
    before, after = (cast(Any, atom.aval).dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (before, after))
    return floats and (before.itemsize > after.itemsize) == narrower


def _part(program: ClosedJaxpr, made: Mapping[Any, JaxprEqn], eqn: JaxprEqn | None, last: bool) -> tuple[Any, Any] | None:
    """The array that an equation multiplies by a number which is always the same, and that; only the ``last`` may round."""
    if eqn is not None and (_converts(eqn, narrower=False) or (last and _converts(eqn, narrower=True))):
        return eqn.invars[0], 1.0
    for array, number in (eqn.invars, eqn.invars[::-1]) if eqn is not None and _is(eqn, "mul") else ():
        while not isinstance(number, Literal) and _is(made.get(number), "broadcast_in_dim"):
            number = made[number].invars[0]
        if isinstance(number, Literal):
            return array, number.val
        piece, known = cut(program.jaxpr, [number]), dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        if cast(Any, number.aval).shape == () and all(var in known for var in free_variables(piece, [number])):
            return array, evaluate(program.jaxpr, piece, known, [number])[0]
    return None
