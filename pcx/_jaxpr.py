"""Reading a traced program: which inputs each output depends on, and which equations it needs.

A traced program (jaxpr) is a list of equations over variables. Equations that only call another program (jit, custom_jvp,
remat) are entered, so that the answer is exact for each of their outputs; loops and branches are taken as a whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr as ClosedJaxpr  # type: ignore[attr-defined, unused-ignore]  # since 0.12 a Jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxpr_as_fun


def inside(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program inside an equation that only calls it (jit, custom_jvp, remat …), else None (scan, cond, …)."""
    inner = [p for p in eqn.params.values() if isinstance(p, Jaxpr | ClosedJaxpr)]
    if len(inner) != 1 or eqn.primitive.name in ("scan", "while", "cond", "shard_map"):
        return None
    closed = inner[0] if isinstance(inner[0], ClosedJaxpr) else ClosedJaxpr(inner[0], ())
    within, around = (
        [[getattr(v.aval, "shape", None) for v in vs] for vs in (e.invars, e.outvars)] for e in (closed.jaxpr, eqn)
    )
    return closed if within == around else None  # that of a reduction combines two numbers, that of a kernel has no outputs


def reach(jaxpr: Jaxpr, inputs: Sequence[frozenset[Any]]) -> list[frozenset[Any]]:
    """For every output the union of the labels of the inputs that it depends on."""
    none: frozenset[Any] = frozenset()
    labels: dict[Any, frozenset[Any]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def label(atom: Any) -> frozenset[Any]:
        return none if isinstance(atom, Literal) else labels.get(atom, none)

    for eqn in jaxpr.eqns:
        incoming = [label(atom) for atom in eqn.invars]
        inner = inside(eqn)
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
