"""Reading a traced program: which inputs each output depends on, and which equations it needs.

A traced program (jaxpr) is a list of equations over variables. Equations that only call another program (jit, custom_jvp,
remat) are entered, so that the answer is exact for each of their outputs; loops and branches are taken as a whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
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


def written_out(closed: ClosedJaxpr, calls: Callable[[JaxprEqn], bool] = lambda eqn: True) -> ClosedJaxpr:
    """The same program with the programs that it calls written out in it, and without what its results do not need."""

    def run(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *operands], strict=True))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for eqn in cut(jaxpr, jaxpr.outvars):
            inner = inside(eqn) if calls(eqn) else None
            results = run(inner, [*map(value, eqn.invars)]) if inner else evaluate(jaxpr, [eqn], known, eqn.outvars)
            known.update(zip(eqn.outvars, results, strict=True))
        return [*map(value, jaxpr.outvars)]

    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in closed.in_avals]
    return jax.make_jaxpr(lambda *operands: run(closed, operands))(*shapes)


def kinds(scan: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried from step to step; these come next."""
    if "ft_in" in scan.params:  # since JAX 0.12
        constants, carried, _ = scan.params["ft_in"].unpack()
        return len(constants), len(carried)
    return scan.params["num_consts"], scan.params["num_carry"]


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
