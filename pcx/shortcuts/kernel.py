"""A step of a row of equal dense layers as one kernel, on a GPU.

A stacked step (`pcx.shortcuts.stack`) is two batched products and two elementwise passes, and each of the four reads and writes
the values of all layers. Here every block of the kernel takes some samples of a few neighbouring nodes: it predicts them and
the node above them, takes the gradient of these energies, and moves the nodes by the optimiser's own program. It writes nothing
but new values and the optimiser's state. One product per block is computed twice for that, which costs less than the bytes.

The arithmetic is that of the stack, traced for the samples of a block; `ChainKernel.of` refuses what does not fit.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

from pcx._energies import weighted
from pcx._free_energy import Factor
from pcx._jaxpr import ClosedJaxpr, cut, evaluate, free_variables
from pcx._types import Nodes
from pcx.shortcuts.differences import UNKNOWN
from pcx.shortcuts.plan import Program, ZeroAware, written_out
from pcx.shortcuts.products import PRODUCTS, Anchor, interpret, low, precision, remembered
from pcx.shortcuts.stack import BlockEnergy, BlockOptimiser, Packed, repeat


class Block(NamedTuple):
    """What a block of the kernel takes, and how many threads it has."""

    samples: int
    nodes: int
    warps: int


class Place(NamedTuple):
    """Where an argument of a program is: in which array, at which row from the first node of the block (None: it has no rows
    of nodes), of how many, and whether it has a part for the samples of the block."""

    array: int
    row: int | None
    most: int
    split: bool = True


# By the dtype of products: of the blocks in results/step-trials.txt those that take the least time for 64 layers.
BLOCKS = {"bfloat16": Block(32, 2, 8), "other": Block(16, 1, 8)}
WIDTHS = (16, 32, 64, 128)  # of a layer: Triton's arrays have powers of two, and two weight matrices must fit
INTERPRET = False  # run the kernel as plain JAX, anywhere: to test it
Move = Callable[[Packed, list[Any], Packed], tuple[Packed, list[Any]]]


class ChainKernel:
    """Steps of the nodes of a chain, each of which but the first is predicted from the one before, by the same program.

    ``task`` is the inference problem (`pcx._infer`), ``factors`` are its energies; ``move`` updates what is not in the block.
    """

    def __init__(
        self,
        task: Any,
        energy: BlockEnergy,
        optimiser: BlockOptimiser,
        factors: Mapping[str, Factor],
        move: Move,
        block: Block,
    ):
        self.energy, self.optimiser, self.factors, self.constants = energy, optimiser, factors, task.constants
        self.move, self.block, self.samples = move, block, block.samples
        program, group, start = energy.program, energy.program.groups[0], energy.start.blocks[0]
        self.members = [name for name in group if name in factors and name not in self.constants]
        self.inside = energy.blocks.groups[0]
        names = {var: name for name, var in program.inputs.items()}
        columns = [*zip(*(program.free_variables[name] for name in self.members), strict=True)]
        self.moving = [i for i, column in enumerate(columns) if any(var in names for var in column)]
        before = [names.get(var, "") for i in self.moving for var in columns[i]]
        self.chain = [*before[:1], *self.members]
        self.first = self.chain.index(self.inside[0]) if self.inside[0] in self.chain else 0
        self.end, self.batch, self.width = self.first + len(self.inside), start.shape[1], start.shape[-1]
        # a first node whose prediction is constant, as that from the input, is like the others but for where its prediction is
        self.rooted = self.first == 0 and bool(self.chain) and self.chain[0] in self.constants
        self.linked = (
            len(self.moving) == 1
            and len(self.chain) > 2
            and "" not in before
            and before == self.chain[:-1]
            and self.chain[self.first : self.end] == self.inside
        )

    @staticmethod
    def of(
        task: Any, energy: BlockEnergy, optimiser: BlockOptimiser, factors: Mapping[str, Factor], move: Move
    ) -> "ChainKernel | None":
        """The kernel for an inference problem, where there is a GPU and everything fits, else None."""
        (shape, *others), groups = [block.shape for block in energy.start.blocks], energy.program.groups
        if others or len(groups) != 1 or len(shape) != 3 or not (INTERPRET or jax.default_backend() == "gpu"):
            return None
        if any(callable(precision) for precision in task.objective.precision.values()):  # a schedule
            return None
        block = BLOCKS["bfloat16" if precision() == "bfloat16" else "other"]
        if shape[1] % block.samples or shape[2] not in WIDTHS:
            return None
        made = ChainKernel(task, energy, optimiser, factors, move, block)
        return made if made.linked and made.fits() and made.prepare(task) else None

    def fits(self) -> bool:
        """Whether what is outside of the chain touches its ends only, and the members differ in their weights only."""
        program, factors = self.energy.program, self.factors
        outside = [name for name in factors if name not in self.members]
        read = set(outside).union(*(program.parents[name] for name in outside))
        leaves = jax.tree.leaves(self.optimiser.lazy.state_shape)
        parts = [leaves[i].shape for i in self.optimiser.own[self.inside[0]]]
        shared = [leaf for leaf, owner in zip(leaves, self.optimiser.owner, strict=True) if owner is None]
        like = [factors[name] for name in (self.chain if self.rooted else self.members)]
        return (
            read & set(self.inside) <= {self.chain[0], self.chain[-1]}
            and not set(self.chain[1:]) & set(self.energy.start.lone)
            and all(part == (self.batch, self.width) for part in parts)
            and all(number.shape == () for number in shared)
            and all(factor.energy is like[0].energy and factor.precision is None for factor in like)
            and all(stack is not None or i in self.moving for i, stack in enumerate(self.energy.weights[0]))
            and self.energy.program.groups[0][-len(self.members) :] == self.members
        )

    def prepare(self, task: Any) -> bool:
        """Trace the same programs for the samples of a block, and take the data of every member."""
        energy, group, (x, key, training) = self.energy, self.energy.program.groups[0], task.context
        x, values = jax.tree.map(lambda array: array[: self.samples], (x, task.start.values))
        program = Program(task.model, values, x, key, training)
        if program.groups != [group]:
            return False
        lazy = ZeroAware(self.optimiser.lazy.optimiser, task.kept(values.only(task.free)))
        self.program, self.small = program, BlockOptimiser(lazy, energy.blocks)
        last = slice(-len(self.members), None)
        self.data = jax.tree.map(lambda leaf: leaf[last], (energy.weights[0], self.products_of(energy.bases[0])))

        def few() -> Any:
            bases = None if energy.anchor is None else program.stacked_anchor(group, program.anchor(values))
            return program.stacked_weights()[0], self.products_of(bases)

        shapes = jax.tree.leaves(jax.eval_shape(few))
        leaves = jax.tree.leaves(self.data)
        self.split = [leaf.shape[1:] != shape.shape[1:] for leaf, shape in zip(leaves, shapes, strict=True)]
        return all(leaf.shape[2:] == shape.shape[2:] for leaf, shape in zip(leaves, shapes, strict=True)) and self.trace()

    def trace(self) -> bool:
        """Make the programs of blocks (`moved`), for their shapes; False if one mixes samples or does what a kernel cannot."""
        leaves, count = jax.tree.leaves(self.small.lazy.state_shape), self.block.nodes
        members, structure = jax.tree.flatten(self.data)
        start, value = self.energy.start.blocks[0].dtype, self.small.lazy.values[self.inside[0]].dtype
        near, base = (jax.ShapeDtypeStruct((self.samples, self.width), dtype) for dtype in (value, start))
        shapes = [
            (self.samples if split else leaf.shape[1], *leaf.shape[2:]) for leaf, split in zip(members, self.split, strict=True)
        ]
        data = jax.tree.unflatten(
            structure, [jax.ShapeDtypeStruct(s, leaf.dtype) for s, leaf in zip(shapes, members, strict=True)]
        )
        own, self.shared = self.small.own[self.inside[0]], [i for i, owner in enumerate(self.small.owner) if owner is None]
        state, shared = [leaves[i] for i in own], [leaves[i] for i in self.shared]
        arguments = ([near] * (count + 2), [base] * (count + 2), [data] * (count + 1), [base] * 3, [state] * count, shared)
        of_samples = [*[True] * (2 * count + 4), *self.split * (count + 1), *[True] * (3 + count * len(own))]
        of_samples += [False] * len(shared)
        firsts = range(0, len(self.chain), count)
        typical = [first for first in firsts if self.between(first)][:1]
        ends = [first for first in firsts if self.movers(first) and not self.between(first)]
        self.programs = {first: _flat(functools.partial(self.moved, first), arguments) for first in typical + ends}
        return all(
            all(jnp.ndim(const) == 0 for const in closed.consts) and _apart(closed.jaxpr, of_samples)
            for closed in self.programs.values()
        )

    def movers(self, first: int) -> list[int]:
        """Of the block that begins with this node: the nodes that the kernel moves."""
        nodes = range(first, min(first + self.block.nodes, len(self.chain)))
        return [node for node in nodes if self.first <= node < self.end]

    def between(self, first: int) -> bool:
        """Whether the block that begins with this node is one of those between the ends of the chain, which are all alike."""
        return 0 < first < len(self.chain) - self.block.nodes and len(self.movers(first)) == self.block.nodes

    def __call__(self, carry: tuple[Packed, list[Any]], count: int, unroll: bool) -> tuple[Packed, list[Any]]:
        """So many steps from packed values and the optimiser's state."""
        still = self.energy.fixed if self.energy.anchor is None else self.energy.still
        start = self.energy.blocks.rows(self.energy.start, self.energy.fixed, self.chain)

        def step(carry: Any, *_: Any) -> Any:
            rows, lone, state = carry
            packed = Packed((rows[self.first : self.end],), lone)
            gradients, ends = self.outside(packed)
            moved, after = self.move(packed, state, gradients)
            rows, after = self.launch(rows, start, ends, state, after)
            if self.chain[0] in lone:
                rows = rows.at[0].set(moved.lone[self.chain[0]])
            return rows, moved.lone, after

        packed, state = carry
        rows = self.energy.blocks.rows(packed, still, self.chain).astype(packed.blocks[0].dtype)
        rows, lone, state, _ = repeat(step, (rows, packed.lone, state), [None], count, unroll)
        return Packed((rows[self.first : self.end],), lone), state

    def outside(self, packed: Packed) -> tuple[Packed, list[Array]]:
        """The gradients of the energies that the kernel does not take: for the nodes outside, and for the ends of the chain.

        After these two, the constant prediction of the first node.
        """
        blocks, start, anchor = self.energy.blocks, self.energy.start, self.energy.anchor
        dtype, (first, second, last) = start.blocks[0].dtype, (self.chain[0], self.chain[1], self.chain[-1])
        own = self.chain if self.rooted else self.members
        factors = {name: factor for name, factor in self.factors.items() if name not in own}
        if first in packed.lone:
            factors[second] = self.factors[second]
        ends = {name: blocks.one(packed, name).astype(dtype) for name in (first, second, last) if name in blocks.place}

        def total(lone: Nodes[Array], ends: Mapping[str, Array]) -> Array:
            lone = jax.tree.map(lambda by, start: by.astype(start.dtype), lone, start.lone)
            rows: Any = {blocks.place[name][1]: by for name, by in ends.items()}  # of the block, those that are read
            here = there = Packed((rows,), lone)
            if anchor is not None:
                values: Any = {row: start.blocks[0][row] + by for row, by in rows.items()}
                there = Packed((values,), jax.tree.map(jnp.add, start.lone, lone))
            parts = self.energy.lone(here, there, factors, self.constants).values()
            return sum((jnp.sum(part) for part in parts), start=jnp.zeros((), dtype))

        lone, found = jax.grad(total, argnums=(0, 1))(packed.lone, ends)
        none = jnp.zeros((self.batch, self.width), dtype)
        return Packed((), lone), [*(found.get(name, none) for name in (first, last)), self.constants.get(first, none)]

    def moved(
        self,
        first: int,
        near: Sequence[Array],
        base: Sequence[Array],
        data: Sequence[Any],
        ends: Sequence[Array],
        state: Sequence[Sequence[Array]],
        shared: Sequence[Array],
    ) -> list[list[Array]]:
        """Some samples of the nodes of a block after a step: of each that moves its value and its part of the rule's state.

        The block begins with node ``first`` of the chain. ``near`` and ``base`` are displacements (values) and starts of the
        node before it, of its own and of the next; ``data`` the operands and known products of the predictions of all but the
        first of these; ``state`` the optimiser's of its own.
        """
        energy, _ = self.factors[self.members[0]]
        anchored, last, nodes = self.energy.anchor is not None, len(self.chain) - 1, self.movers(first)
        at = {first - 1 + i: i for i in range(len(near))}  # where in these lists a node is
        still = {node: near[i].astype(base[i].dtype) for node, i in at.items()}

        def local(moving: Mapping[int, Array]) -> Array:
            by, total = still | dict(moving), jnp.zeros((), base[0].dtype)
            for node in range(nodes[0], min(nodes[-1] + 1, last) + 1):
                if node == 0 and not self.rooted:
                    continue
                h, start = by[node], base[at[node]]
                u = self.predict(by[node - 1], base[at[node - 1]], *data[at[node] - 1]) if node > 0 else ends[2]
                h, u = (
                    (h, u - start) if anchored and getattr(energy, "difference", False) else (h + start if anchored else h, u)
                )
                part = jax.vmap(lambda h, u: weighted(energy, h, u, precision=None, name=self.members[0]))(h, u)
                total += jnp.sum(part).astype(total.dtype)
            return total

        gradients = jax.grad(local)({node: still[node] for node in nodes})
        rule, name, results = self.small, self.inside[0], []
        outputs = rule._outputs(name)
        for node in nodes:
            own, i = near[at[node]], at[node]
            gradient = gradients[node] + ends[0 if node == 0 else 1] if node in (0, last) else gradients[node]
            known = dict(zip(rule.jaxpr.constvars, rule.consts, strict=True))
            known |= {rule.state[k]: leaf for k, leaf in zip(self.shared, shared, strict=True)}
            known |= dict(zip((rule.state[k] for k in rule.own[name]), state[i - 1], strict=True))
            value = (base[i] + still[node] if anchored else still[node]).astype(own.dtype)
            known |= {rule.gradient[name]: gradient.astype(own.dtype), rule.value[name]: value}
            update, *after = evaluate(rule.jaxpr, cut(rule.jaxpr, outputs), known, outputs)
            results.append([own + update.astype(own.dtype), *after])
        return results

    def products_of(self, bases: Sequence[Any] | None) -> list[Any] | None:
        """Of what is `remembered` the products, which is all that the kernel needs: it does not ask how far the rest goes.

        Products of a forward pass that is rounded to two bytes are read in these.
        """
        if bases is None:
            return None
        names = [name for _, name in remembered(self.energy.program.pieces[self.members[0]])]
        products = [base for base, name in zip(bases, names, strict=True) if name in PRODUCTS]
        return [(operands, rounded, low(value)) for operands, rounded, value in products]

    def predict(self, parent: Array, start: Array, operands: Sequence[Any], bases: Sequence[Any] | None) -> Array:
        """The prediction of one member from the node before it, which is ``parent`` away from its start."""
        program, name = self.program, self.members[0]
        variables, piece, output = program.free_variables[name], program.pieces[name], program.outputs[name]
        own = dict(zip(variables, operands, strict=True))
        moving = variables[self.moving[0]]
        if bases is None:
            return evaluate(program.jaxpr, piece, own | {moving: parent}, [output])[0]
        places = [place for place, name in remembered(piece) if name in PRODUCTS]
        wide = [(operands, rounded, value.astype(start.dtype)) for operands, rounded, value in bases]
        anchor = Anchor(dict(zip(places, wide, strict=True)))

        def product(*given: Any) -> Any:
            return anchor.product(*given)[0], UNKNOWN

        known = own | {moving: start + parent}
        return interpret(program.jaxpr, piece, known, [output], product, {moving: parent})[0][0]

    def given(self, sizes: Sequence[int]) -> dict[int, dict[Any, Place]]:
        """For every program and variable that it reads: where it is in the arrays of the kernel (`launch`)."""
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        values, starts, data, ends, state, numbers = (range(i, i + size) for i, size in zip(firsts, sizes, strict=True))
        count, last, shared = self.block.nodes, len(self.chain) - 1, len(self.shared)
        places = [Place(k, i - 1, last) for k in (*values, *starts) for i in range(count + 2)]
        for i in range(count + 1):
            places += [Place(k, i - 1, len(self.members) - 1, split) for k, split in zip(data, self.split, strict=True)]
        places += [Place(k, None, 0) for k in ends]
        places += [Place(k, i - self.first, len(self.inside) - 1) for i in range(count) for k in state]
        places += [Place(k, None, 0, False) for k in numbers[:shared]]
        given, used = dict[int, dict[Any, Place]](), shared
        for first, closed in self.programs.items():
            own = [Place(k, None, 0, False) for k in numbers[used : used + len(closed.consts)]]
            read = free_variables(closed.jaxpr.eqns, closed.jaxpr.outvars)
            variables = zip([*closed.jaxpr.invars, *closed.jaxpr.constvars], [*places, *own], strict=True)
            given[first], used = {var: place for var, place in variables if var in read}, used + len(own)
        return given

    def launch(
        self, rows: Array, start: Array, ends: list[Array], before: list[Any], after: list[Any]
    ) -> tuple[Array, list[Any]]:
        """The rows of the chain after the kernel, and the optimiser's state ``after`` the step with the part of the block."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton

        indices, count = self.optimiser.own[self.inside[0]], self.block.nodes
        kept, numbers = [before[i] for i in indices], [before[i] for i in self.shared]
        numbers += [const for closed in self.programs.values() for const in closed.consts]
        parts = [[rows], [start], jax.tree.leaves(self.data), ends, kept, [jnp.reshape(number, (1,)) for number in numbers]]
        arrays, given = [array for part in parts for array in part], self.given([len(part) for part in parts])
        order = sorted({0, *(place.array for places in given.values() for place in places.values())})  # those that are read

        def kernel(*refs: Any) -> None:
            part = pl.ds(pl.program_id(1) * self.samples, self.samples)
            head, of, written = pl.program_id(0) * count, dict(zip(order, refs, strict=False)), refs[len(order) :]

            def read(place: Place) -> Array:
                if not place.split and place.row is None:
                    return of[place.array][0]
                row = () if place.row is None else (jnp.clip(head + place.row, 0, place.most),)
                return of[place.array][(*row, part) if place.split else row]

            def move(first: int) -> None:
                reads = {var: functools.partial(read, place) for var, place in given.get(first, {}).items()}
                results = iter(_lazily(self.programs[first].jaxpr, reads) if reads else ())
                for node in range(first, min(first + count, len(self.chain))):
                    row = head + (node - first)
                    if node in self.movers(first):
                        for ref, index in zip(written, [row, *[row - self.first] * len(kept)], strict=True):
                            ref[index, part] = next(results)
                    else:
                        written[0][row, part] = of[0][row, part]

            ends = [first for first in range(0, len(self.chain), count) if not self.between(first)]
            for first in ends:
                pl.when(head == first)(functools.partial(move, first))
            for first in self.programs.keys() - ends:
                pl.when(functools.reduce(jnp.logical_and, [head != end for end in ends]))(functools.partial(move, first))

        like = [rows, *kept]
        rows, *moved = pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like],
            grid=(-(-len(self.chain) // count), self.batch // self.samples),
            interpret=INTERPRET,
            compiler_params=None if INTERPRET else triton.CompilerParams(num_warps=self.block.warps, num_stages=1),
        )(*(arrays[i] for i in order))
        for i, leaf in zip(indices, moved, strict=True):
            after[i] = leaf
        return rows, after


ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "clamp", "convert_element_type", "cos", "div", "eq", "exp", "exp2", "expm1", "ge", "gt"),
    *("integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not"),
    *("one_minus_square", "or", "pow", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tanh"),
}
MOVES = {"broadcast_in_dim", "dot_general", "expand_dims", "reduce_max", "reduce_sum", "reshape", "squeeze", "transpose"}


def _flat(function: Callable[..., Any], arguments: Any) -> ClosedJaxpr:
    """A function as a program without others inside, and without what its results do not need."""
    flat = written_out(jax.make_jaxpr(function)(*arguments))
    return ClosedJaxpr(flat.jaxpr.replace(eqns=cut(flat.jaxpr, flat.jaxpr.outvars)), flat.consts)


def _apart(program: Jaxpr, of_samples: Sequence[bool]) -> bool:
    """Whether samples, the first axis of some arguments, stay apart in a program; no, if it has an operation not listed."""
    carries = {var for var, has in zip(program.invars, of_samples, strict=True) if has}
    for eqn in program.eqns:
        has, name = [not isinstance(atom, Literal) and atom in carries for atom in eqn.invars], eqn.primitive.name
        if name not in ELEMENTWISE and not (name in MOVES and (not any(has) or _first_axis_stays(eqn, has))):
            return False
        carries.update(eqn.outvars if any(has) else ())
    return True


def _first_axis_stays(eqn: JaxprEqn, has: Sequence[bool]) -> bool:
    params, before, after = eqn.params, *(cast(Any, atom.aval).shape[:1] for atom in (eqn.invars[0], eqn.outvars[0]))
    match eqn.primitive.name:
        case "broadcast_in_dim":
            return params["broadcast_dimensions"][:1] == (0,)
        case "dot_general":
            (contracted, _), (batch, _) = params["dimension_numbers"]
            return not has[1] and 0 not in contracted and not batch
        case "expand_dims" | "squeeze":
            return 0 not in params["dimensions"]
        case "reduce_max" | "reduce_sum":
            return 0 not in params["axes"]
        case "transpose":
            return params["permutation"][0] == 0
    return before == after  # reshape


def _lazily(program: Jaxpr, read: Mapping[Any, Callable[[], Array]]) -> list[Array]:
    """The results of a program whose arguments are read where they are used first, so that few are held at a time."""
    known = dict[Any, Any]()
    for eqn in program.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom not in known:
                known[atom] = read[atom]()
        known |= zip(eqn.outvars, evaluate(program, [eqn], known, eqn.outvars), strict=True)
    return [known[var] for var in program.outvars]
