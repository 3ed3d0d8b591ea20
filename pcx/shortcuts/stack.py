"""Equal neighbours stacked, for the whole of inference.

Nodes whose predictions are the same program on arrays of the same shapes live in one array, a block, from step to step: one
batched product predicts them all, one pulls their errors back, one update moves them. The time of a step is then nearly
independent of depth. `Program` finds the equal predictions; `BlockOptimiser` finds out from the optimiser's own program
whether it treats the nodes of a block alike and apart from each other. Where it does not, nothing is stacked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jaxtyping import Array, Float

from pcx._energies import weighted
from pcx._free_energy import Factor, factor_energies
from pcx._jaxpr import cut, evaluate, free_variables, reach
from pcx._types import Displaced, Nodes
from pcx.shortcuts.differences import tied
from pcx.shortcuts.plan import SMALLEST_STACK, WRITTEN_OUT, Program, ZeroAware, signature
from pcx.shortcuts.products import Anchor


class Packed(NamedTuple):
    """The free values: nodes of a block in one array each, the others by name."""

    blocks: tuple[Array, ...]
    lone: Nodes[Array]


class Blocks:
    """Which nodes share an array, and how to get at them."""

    def __init__(self, groups: Sequence[Sequence[str]], free: Sequence[str]):
        self.groups, self.free = groups, free
        self.place = {name: (b, row) for b, group in enumerate(groups) for row, name in enumerate(group)}

    def pack(self, values: Nodes[Array]) -> Packed:
        blocks = tuple(jnp.stack([values[name] for name in group]) for group in self.groups)
        return Packed(blocks, values.only(name for name in self.free if name not in self.place))

    def unpack(self, packed: Packed) -> Nodes[Array]:
        return Nodes({name: self.one(packed, name) for name in self.free})

    def one(self, packed: Packed, name: str) -> Array:
        block, row = self.place.get(name, (None, None))
        return packed.lone[name] if block is None else packed.blocks[block][row]

    def rows(self, packed: Packed, fixed: Mapping[str, Array], items: Sequence[Any]) -> Array:
        """The values of several nodes (and arrays) in one array; neighbours in a block are one slice of it."""
        runs: list[tuple[int | None, int, int, Any]] = []  # block, first row, end, or the item itself
        for item in items:
            block, row = self.place.get(item, (None, 0)) if isinstance(item, str) else (None, 0)
            if block is not None and runs and (runs[-1][0], runs[-1][2]) == (block, row):
                runs[-1] = (block, runs[-1][1], row + 1, None)
            else:
                runs.append((block, row, row + 1, item))

        def part(block: int | None, first: int, end: int, item: Any) -> Array:
            if block is None:
                array = item if not isinstance(item, str) else fixed[item] if item in fixed else packed.lone[item]
                return array[None]
            whole = packed.blocks[block]
            return whole if (first, end) == (0, len(whole)) else whole[first:end]

        parts = [part(*run) for run in runs]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


class BlockEnergy:
    """The sum of all active energies as a function of packed values, or, with an anchor, of packed displacements."""

    def __init__(
        self,
        program: Program,
        weights: Any,
        blocks: Blocks,
        start: Nodes[Array],
        anchor: Anchor | None,
        gap: Nodes[Array | None],
    ):
        self.program, self.weights, self.blocks, self.anchor, self.gap = program, weights, blocks, anchor, gap
        self.fixed = {name: value for name, value in start.items() if name not in blocks.free}
        self.still = {name: jnp.zeros_like(value) for name, value in self.fixed.items()}
        self.start = blocks.pack(start)
        self.bases = [None if anchor is None else program.stacked_anchor(group, anchor) for group in program.groups]

    @staticmethod
    def of(
        program: Program,
        weights: Any,
        free: Sequence[str],
        whole: Sequence[str],
        factors: Mapping[str, Factor],
        start: Nodes[Array],
        anchor: Anchor | None,
        gap: Nodes[Array | None],
    ) -> "BlockEnergy | None":
        """With blocks of the nodes that are free as a ``whole`` and have equal predictions and energies, if there are any."""
        groups = [[name for name in group if name in whole] for group in program.groups]
        groups = [group for group in groups if len(group) >= SMALLEST_STACK and alike([factors[name] for name in group])]
        return BlockEnergy(program, weights, Blocks(groups, free), start, anchor, gap) if groups else None

    def values(self, packed: Packed) -> Packed:
        """The values themselves."""
        return packed if self.anchor is None else jax.tree.map(jnp.add, self.start, packed)

    def __call__(self, packed: Packed, factors: Mapping[str, Factor], constants: Nodes[Array]) -> Array:
        packed = jax.tree.map(lambda by, start: by.astype(start.dtype), packed, self.start)
        total, done, values = jnp.zeros((), jnp.result_type(*packed.blocks)), set[str](), self.values(packed)

        def rows(items: Sequence[Any]) -> Array:
            return self.blocks.rows(values, self.fixed, items)

        def away(items: Sequence[Any]) -> Array:
            return self.blocks.rows(packed, self.still, items)

        for group, weights, bases in zip(self.program.groups, self.weights, self.bases, strict=True):
            members = [name for name in group if name in factors and name not in constants]
            if len(members) < SMALLEST_STACK or not alike([factors[name] for name in members]):
                continue
            u, moved = self.program.predict_rows(group, members, weights, rows, bases, None if bases is None else away)
            energy, precision = factors[members[0]]
            if self.anchor is not None and getattr(energy, "difference", False):
                h, u = away(members), self.way(members, u, moved)
            else:
                h = rows(members)

            def one(h: Array, u: Array, energy: Any = energy, precision: Any = precision, name: str = members[0]) -> Array:
                return weighted(energy, h, u, precision=precision, name=name)

            total += jnp.sum(jax.vmap(jax.vmap(one))(h, u))
            done.update(members)
        for part in self.lone(packed, values, {n: f for n, f in factors.items() if n not in done}, constants).values():
            total += jnp.sum(part)
        return total

    def way(self, members: Sequence[str], u: Array, moved: Array | None) -> Array:
        """How far the predictions of some nodes, which have ``moved``, are from where these started."""
        start = self.blocks.rows(self.start, self.fixed, members)
        if moved is None:
            return u - start
        gaps = [self.gap[name] for name in members]
        if any(gap is not None for gap in gaps):
            moved = moved - jnp.stack([jnp.zeros_like(u[0]) if gap is None else gap for gap in gaps])
        return tied(moved, u, start)

    def lone(
        self, packed: Packed, values: Packed, factors: Mapping[str, Factor], constants: Nodes[Array]
    ) -> Nodes[Float[Array, " batch"]]:
        """The energies of the nodes that are not predicted as one."""
        read = set(factors).union(*(self.program.parents[name] for name in factors))
        known, start, by = (
            Nodes({name: fixed[name] if name in fixed else self.blocks.one(part, name) for name in read})
            for part, fixed in ((values, self.fixed), (self.start, self.fixed), (packed, self.still))
        )
        moving = [name for name in factors if name not in constants]
        if self.anchor is None:
            return factor_energies(factors, known, self.program.predict(known, moving) | constants.only(factors))
        moved = {name: by[name] for name in read if name not in self.fixed}
        found = self.program.predict(known, moving, product=self.anchor.product, moved=moved)
        return factor_energies(factors, Displaced(start, by, self.gap), found.with_still(constants.only(factors)))


def alike(factors: Sequence[Factor]) -> bool:
    """Whether nodes have the same energy function and the same precision."""
    first = factors[0]
    return all(factor.energy is first.energy and factor.precision is first.precision for factor in factors)


class BlockOptimiser:
    """A state optimiser that moves blocks: the program of one node's update, mapped over the rows of a block.

    ``fits`` is False where the nodes of a block are treated differently, or where one node's update depends on another.
    """

    def __init__(self, lazy: ZeroAware, blocks: Blocks):
        self.lazy, self.blocks, self.jaxpr, self.consts = lazy, blocks, lazy.program.jaxpr, lazy.program.consts
        names, count = list(lazy.values), len(jax.tree.leaves(lazy.state_shape))
        inputs = self.jaxpr.invars
        self.gradient = dict(zip(names, inputs, strict=False))
        self.value = dict(zip(names, inputs[len(names) + count :], strict=True))
        self.state = inputs[len(names) : len(names) + count]
        outputs = self.jaxpr.outvars
        self.update_of = dict(zip(names, outputs, strict=False))
        self.next_state = outputs[len(names) :]
        labels = [frozenset([name]) for name in names] + [frozenset([i]) for i in range(count)]
        reached = reach(self.jaxpr, labels + labels[: len(names)])
        nodes_of = [frozenset(label for label in found if isinstance(label, str)) for found in reached[len(names) :]]
        self.owner = [next(iter(nodes)) if nodes else None for nodes in nodes_of]
        owners = dict(enumerate(self.owner))
        apart = all(len(nodes) <= 1 for nodes in nodes_of)
        for name, found in [*zip(names, reached, strict=False), *zip(self.owner, reached[len(names) :], strict=True)]:
            apart &= all(owners.get(label, label) in (name, None) for label in found)
        self.own = {name: [i for i, owner in enumerate(self.owner) if owner == name] for name in names}
        self.fits = apart and all(len({self._program(name) for name in group}) == 1 for group in blocks.groups)

    def _outputs(self, name: str) -> list[Any]:
        return [self.update_of[name], *(self.next_state[i] for i in self.own[name])]

    def _roles(self, name: str) -> dict[Any, Any]:
        """What a variable is to this node: its gradient, its value, a part of its state, or something that all share."""
        parts = {self.state[i]: f"state {k}" for k, i in enumerate(self.own[name])}
        return {self.gradient[name]: "gradient", self.value[name]: "value"} | parts

    def _program(self, name: str) -> str:
        """A text that is equal for two nodes only if their updates are the same program."""
        outputs, roles = self._outputs(name), self._roles(name)
        piece = cut(self.jaxpr, outputs)
        free = free_variables(piece, outputs)
        return signature(self.jaxpr, piece, free, outputs) + str([roles.get(v, id(v)) for v in free])

    def init(self, state: Any) -> list[Any]:
        """The optimiser's state with the parts of a block stacked; the first member of a block holds them."""
        leaves = jax.tree.leaves(state)
        for group in self.blocks.groups:
            for k, i in enumerate(self.own[group[0]]):
                leaves[i] = jnp.stack([leaves[self.own[name][k]] for name in group])
        return [None if self._follower(i) else leaf for i, leaf in enumerate(leaves)]

    def _follower(self, i: int) -> bool:
        block, row = self.blocks.place.get(self.owner[i] or "", (None, 0))
        return block is not None and row > 0

    def full_state(self, state: list[Any]) -> Any:
        leaves = list(state)
        for group in self.blocks.groups:
            for k, i in enumerate(self.own[group[0]]):
                for row, name in enumerate(group):
                    leaves[self.own[name][k]] = state[i][row]
        return jax.tree.unflatten(jax.tree.structure(self.lazy.state_shape), leaves)

    def update(self, gradients: Packed, state: list[Any], values: Packed) -> tuple[Packed, list[Any]]:
        known = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        known |= {self.state[i]: leaf for i, leaf in enumerate(state) if self.owner[i] is None}
        shared = [i for i, owner in enumerate(self.owner) if owner is None]
        after: list[Any] = [None] * len(state)

        def move(name: str, gradient: Array, value: Array, mapped: bool) -> Array:
            own = {self.gradient[name]: gradient, self.value[name]: value}
            own |= {self.state[i]: state[i] for i in self.own[name]}
            update, *new = _mapped(self.jaxpr, self._outputs(name), known, own, mapped)
            for i, leaf in zip(self.own[name], new, strict=True):
                after[i] = leaf
            return update

        outputs = [self.next_state[i] for i in shared]
        for i, leaf in zip(shared, evaluate(self.jaxpr, cut(self.jaxpr, outputs), known, outputs), strict=True):
            after[i] = leaf
        blocks = [
            move(group[0], g, v, True) for group, g, v in zip(self.blocks.groups, gradients.blocks, values.blocks, strict=False)
        ]
        lone = {name: move(name, g, values.lone[name], False) for name, g in gradients.lone.items()}
        return Packed(tuple(blocks), Nodes(lone)), after


def _mapped(jaxpr: Jaxpr, outputs: list[Any], known: Mapping[Any, Any], own: Mapping[Any, Any], mapped: bool) -> list[Any]:
    """Some outputs of a program; with ``mapped``, its own variables have a leading axis, and so do the outputs."""
    piece = cut(jaxpr, outputs)

    def one(own: Mapping[Any, Any]) -> list[Any]:
        return evaluate(jaxpr, piece, {**known, **own}, outputs)

    variables = list(own)
    function: Callable[..., Any] = lambda *arrays: one(dict(zip(variables, arrays, strict=True)))  # noqa: E731
    return list((jax.vmap(function) if mapped else function)(*own.values()))


def once(body: Callable[..., Any], carry: Any, step: int) -> Callable[..., Any]:
    """``carry, rest = body(carry, step)`` for several steps of a program, traced only once: derivatives take long to trace."""
    leaves = jax.tree.leaves(carry)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves) or not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return body
    again = jax.jit(body)
    try:
        again.eval_shape(carry, step)
    except jax.errors.ConcretizationTypeError:  # a schedule that branches on the number of the step
        return body
    return again


def repeat(
    body: Callable[..., Any],
    carry: Any,
    plan: Sequence[Any],
    steps: int,
    unroll: bool,
    kernel: Callable[..., Any] | None = None,
) -> tuple[Any, ...]:
    """``carry = body(carry, step, plan[step])``; the last entry of the plan is for all later steps. Returns also that entry.

    A ``kernel`` makes the later steps itself: ``carry = kernel(carry, steps, unroll)``.
    """
    done = min(len(plan) - 1, steps)
    for step in range(done):
        carry = body(carry, step, plan[step])
    if kernel is not None:
        carry = kernel(carry, steps - done, unroll)
    elif unroll or steps - done <= WRITTEN_OUT:
        again = once(lambda carry, step: (body(carry, step, plan[done]), None), carry, done)
        for step in range(done, steps):
            carry, _ = again(carry, step)
    else:
        carry, _ = jax.lax.scan(lambda carry, step: (body(carry, step, plan[done]), None), carry, jnp.arange(done, steps))
    return *carry, plan[done]
