"""What is exactly zero, and how much work a program does: two more readings of a traced program."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from pcx._jaxpr import ClosedJaxpr, evaluate, inside
from pcx._types import ModelError


def count(jaxpr: Jaxpr, primitives: Sequence[str] = ("dot_general", "conv_general_dilated")) -> int:
    """How often these operations are carried out; the body of a scan counts once per iteration.

    >>> count(jax.make_jaxpr(lambda a: a @ a @ a)(jnp.eye(2)).jaxpr)
    2
    """
    total = 0
    for eqn in jaxpr.eqns:
        inner = [p for param in eqn.params.values() for p in (param if isinstance(param, tuple | list) else [param])]
        bodies = [p.jaxpr if isinstance(p, ClosedJaxpr) else p for p in inner if isinstance(p, Jaxpr | ClosedJaxpr)]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += (eqn.primitive.name in primitives) + times * sum(count(body, primitives) for body in bodies)
    return total


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, Literal)


class _Zero:
    """Stands for an array that is exactly zero and need not exist."""

    def __repr__(self) -> str:
        return "ZERO"


ZERO = _Zero()


class NotZero(Exception):
    """A zero went into an operation such as rsqrt, where it is not a zero any more but an infinity."""


# With a zero first operand (and nothing else that matters) these return zero.
_KEEP = frozenset(
    [
        "neg",
        "convert_element_type",
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "slice",
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "abs",
        "sqrt",
        "cbrt",
        "sign",
        "square",
        "tanh",
        "sin",
        "tan",
        "asin",
        "sinh",
        "floor",
        "ceil",
        "round",
        "expm1",
        "log1p",
        "copy",
        "copy_p",
        "real",
        "imag",
        "conj",
        "cumsum",
        "reduce_precision",
        "stop_gradient",
        "dynamic_slice",
        "gather",
        "rev",
    ]
)
_ALL = frozenset(["add", "sub", "add_any", "max", "min", "concatenate", "pad"])
_ANY = frozenset(["mul", "dot_general", "conv_general_dilated"])
_INFINITE = frozenset(["rsqrt", "log", "div", "rem", "pow", "atan2", "digamma", "lgamma"])


def _stays_zero(eqn: JaxprEqn, arguments: Sequence[Any]) -> bool:
    name, zeros = eqn.primitive.name, [argument is ZERO for argument in arguments]
    if name == "select_n":
        return all(zeros[1:])
    if name == "integer_pow":
        return zeros[0] and eqn.params["y"] > 0
    if name == "div" and zeros[0] and not zeros[1]:
        return True
    if name in _INFINITE and any(zeros):
        raise NotZero(name)
    return (name in _KEEP and zeros[0]) or (name in _ALL and all(zeros)) or (name in _ANY and any(zeros))


def materialise(argument: Any, aval: Any) -> Any:
    """The array that a ZERO stands for; anything else as it is."""
    return jnp.zeros(aval.shape, aval.dtype) if argument is ZERO else argument


def propagate_zeros(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Run a program in which some arguments are ZERO; outputs that are provably zero come out as ZERO.

    Work on zeros is not done at all. An operation that this function does not know gets real zeros, so the
    answer is right in every case and an unknown operation costs only the shortcut.
    """
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return known[atom]
        return ZERO if np.ndim(atom.val) == 0 and atom.val == 0 else atom.val

    for eqn in jaxpr.eqns:
        incoming = [read(atom) for atom in eqn.invars]
        inner = inside(eqn)
        if inner is not None:
            outgoing = propagate_zeros(inner, incoming)
        elif _stays_zero(eqn, incoming):
            outgoing = [ZERO] * len(eqn.outvars)
        else:
            real = [materialise(a, atom.aval) for a, atom in zip(incoming, eqn.invars, strict=True)]
            outgoing = evaluate(
                jaxpr, [eqn], {a: r for a, r in zip(eqn.invars, real, strict=True) if _is_variable(a)}, eqn.outvars
            )
        known.update(zip(eqn.outvars, outgoing, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def has_nan(closed: ClosedJaxpr) -> bool:
    """Whether a constant of the program is NaN, such as a learning rate."""

    def is_nan(constant: Any) -> bool:
        if isinstance(constant, jax.core.Tracer) or not isinstance(constant, np.ndarray | np.generic | float | jax.Array):
            return False
        return jnp.issubdtype(jnp.result_type(constant), jnp.floating) and bool(np.isnan(np.asarray(constant)).any())

    atoms = [atom for eqn in closed.jaxpr.eqns for atom in eqn.invars] + list(closed.jaxpr.outvars)
    literals = [atom.val for atom in atoms if isinstance(atom, Literal)]
    inner = [program for eqn in closed.jaxpr.eqns if (program := inside(eqn)) is not None]
    return any(map(is_nan, [*literals, *closed.consts])) or any(map(has_nan, inner))


def refuse_nan(optimiser: Any, parameters: Any, what: str) -> None:
    """A learning rate that is NaN is found in the optimiser's program, before it is used."""
    state = jax.eval_shape(optimiser.init, parameters)
    programs = (jax.make_jaxpr(optimiser.init)(parameters), jax.make_jaxpr(optimiser.update)(parameters, state, parameters))
    if any(map(has_nan, programs)):
        raise ModelError(f"the {what} optimiser multiplies by NaN; check its learning rate and momentum.")
