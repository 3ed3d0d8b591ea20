"""Reading a traced program: who depends on whom, which equations one output needs, what is exactly zero.

A traced program (jaxpr) is a list of equations over variables. Three questions about it are all the cleverness that
the rest of the core needs: which inputs does each output depend on (`reach`), which equations does an output need
(`cut`), and what stays exactly zero if some inputs are zero (`propagate_zeros`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun


def _inside(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program inside an equation that only calls it (jit, custom_jvp, remat …), else None (scan, cond, …)."""
    inner = [p for p in eqn.params.values() if isinstance(p, Jaxpr | ClosedJaxpr)]
    if len(inner) != 1 or eqn.primitive.name in ("scan", "while", "cond"):
        return None
    closed = inner[0] if isinstance(inner[0], ClosedJaxpr) else ClosedJaxpr(inner[0], ())
    same = len(closed.jaxpr.invars) == len(eqn.invars) and len(closed.jaxpr.outvars) == len(eqn.outvars)
    return closed if same else None


def reach(jaxpr: Jaxpr, inputs: Sequence[frozenset[Any]]) -> list[frozenset[Any]]:
    """For every output the union of the labels of the inputs that it depends on."""
    none: frozenset[Any] = frozenset()
    labels: dict[Any, frozenset[Any]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def label(atom: Any) -> frozenset[Any]:
        return none if isinstance(atom, Literal) else labels.get(atom, none)

    for eqn in jaxpr.eqns:
        incoming = [label(atom) for atom in eqn.invars]
        inner = _inside(eqn)
        outgoing = reach(inner.jaxpr, incoming) if inner else [none.union(*incoming)] * len(eqn.outvars)
        labels.update(zip(eqn.outvars, outgoing, strict=True))
    return [label(atom) for atom in jaxpr.outvars]


def cut(jaxpr: Jaxpr, outputs: Iterable[Any]) -> list[JaxprEqn]:
    """The equations that these outputs need, in program order."""
    needed = {atom for atom in outputs if not isinstance(atom, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if any(var in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return kept[::-1]


def free_variables(eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[Any]:
    """What equations and outputs read but the equations do not compute, in the order of first use."""
    made = {var for eqn in eqns for var in eqn.outvars}
    used = [atom for eqn in eqns for atom in eqn.invars] + list(outputs)
    return list(dict.fromkeys(a for a in used if not isinstance(a, Literal) and a not in made))


def evaluate(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], known: Mapping[Any, Any], outputs: Sequence[Any]) -> list[Any]:
    """Run some equations of a program, given what their free variables are."""
    free = free_variables(eqns, outputs)
    piece = jaxpr.replace(constvars=[], invars=free, outvars=list(outputs), eqns=list(eqns))
    return jaxpr_as_fun(ClosedJaxpr(piece, ()))(*(known[var] for var in free))


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
    "neg convert_element_type broadcast_in_dim reshape transpose squeeze expand_dims slice reduce_sum reduce_max "
    "reduce_min abs sqrt cbrt sign square tanh sin tan asin sinh floor ceil round expm1 log1p copy copy_p real imag conj "
    "cumsum reduce_precision stop_gradient dynamic_slice gather rev".split()
)
_ALL = frozenset("add sub add_any max min concatenate pad".split())
_ANY = frozenset("mul dot_general conv_general_dilated".split())
_INFINITE = frozenset("rsqrt log div rem pow atan2 digamma lgamma".split())


def _stays_zero(eqn: JaxprEqn, arguments: Sequence[Any]) -> bool:
    name, zeros = eqn.primitive.name, [argument is ZERO for argument in arguments]
    if name == "select_n":
        return all(zeros[1:])
    if name == "integer_pow":
        return zeros[0] and eqn.params["y"] > 0
    if name == "div":
        return zeros[0] and not zeros[1]
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
        inner = _inside(eqn)
        if inner is not None:
            outgoing = propagate_zeros(inner, incoming)
        elif _stays_zero(eqn, incoming):
            outgoing = [ZERO] * len(eqn.outvars)
        else:
            real = [materialise(a, atom.aval) for a, atom in zip(incoming, eqn.invars, strict=True)]
            outgoing = evaluate(jaxpr, [eqn], {a: r for a, r in zip(eqn.invars, real, strict=True) if _is_variable(a)}, eqn.outvars)
        known.update(zip(eqn.outvars, outgoing, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def has_nan(closed: ClosedJaxpr) -> bool:
    """Whether a constant of the program is NaN, such as a learning rate."""

    def is_nan(constant: Any) -> bool:
        if isinstance(constant, jax.core.Tracer) or not isinstance(constant, np.ndarray | np.generic | float | jax.Array):
            return False
        return jnp.issubdtype(jnp.result_type(constant), jnp.floating) and bool(np.isnan(np.asarray(constant)).any())

    literals = [atom.val for eqn in closed.jaxpr.eqns for atom in eqn.invars if isinstance(atom, Literal)]
    inner = [program for eqn in closed.jaxpr.eqns if (program := _inside(eqn)) is not None]
    return any(map(is_nan, [*literals, *closed.consts])) or any(map(has_nan, inner))
