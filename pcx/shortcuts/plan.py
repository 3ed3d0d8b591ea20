"""Exact shortcuts: the same numbers with less work.

* **Slices.** The program of a model is cut into one piece per node (`Program`), so that a step computes only the
  predictions whose energies can change.
* **Wave front** (`waves`). After a forward start only observed nodes have an error. At step t it has travelled t edges;
  every node further away has gradient zero, if the optimiser maps a zero gradient to a zero update (`ZeroAware` finds out).
* **Equal neighbours stacked.** Nodes whose pieces are the same program on arrays of the same shapes, with dense
  products and no convolution, are evaluated as one batched product.

Each is refused where its conditions do not hold; `docs/design/core.md` derives them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.custom_batching import custom_vmap
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

from pcx._free_energy import run
from pcx._jaxpr import ClosedJaxpr, cut, evaluate, free_variables, inside, reach
from pcx._types import Key, ModelError, Nodes
from pcx.shortcuts.differences import UNKNOWN, Predictions
from pcx.shortcuts.momentum import FEW, Momentum, from_steps, momenta
from pcx.shortcuts.products import Anchor, Product, interpret, near_zero, remembered
from pcx.shortcuts.zeros import ZERO, NotZero, materialise, propagate_zeros, refuse_nan

SMALLEST_STACK = 3  # equal pieces
LARGE = 2**25  # numbers in all values: about where the arrays of a step begin to count
MANY = 8  # members of a population: their values are held too
WRITTEN_OUT = 8  # a loop of at most this many steps is written out: nothing is copied between steps, and more is fused


class Program:
    """All predictions of a model as one program, cut into a piece per node.

    ``parents`` says which nodes each prediction reads. ``predict`` evaluates chosen pieces only.
    """

    def __init__(self, model: Any, values: Nodes[Array], x: Any = None, key: Key = None, training: bool = False):
        self.arrays, static = eqx.partition(model, eqx.is_array)
        self.given = (jax.tree.map(jnp.asarray, x), key)

        def predictions(values: Nodes[Array], arrays: Any, given: Any) -> Nodes[Array]:
            x, key = given
            batch = jax.tree.leaves(values)[0].shape[0]
            return run(eqx.combine(arrays, static), values, x, key=key, training=training, batch=batch).predictions

        self.closed, shapes = jax.make_jaxpr(predictions, return_shape=True)(values, self.arrays, self.given)
        self.jaxpr: Jaxpr = self.closed.jaxpr
        self.roots = shapes.roots
        self.outputs = dict(zip(shapes, self.jaxpr.outvars, strict=True))
        self.inputs = dict(zip(values, self.jaxpr.invars, strict=False))
        rest = len(self.jaxpr.invars) - len(values)
        labels = [frozenset([name]) for name in values] + [frozenset[str]()] * rest
        self.parents = dict(zip(shapes, reach(self.jaxpr, labels), strict=True))
        self.pieces = {name: cut(self.jaxpr, [var]) for name, var in self.outputs.items()}
        self.free_variables = {name: free_variables(piece, [self.outputs[name]]) for name, piece in self.pieces.items()}

    @functools.cached_property
    def groups(self) -> list[list[str]]:
        """The nodes whose pieces are the same program with a dense product, and no convolution, group by group."""
        groups: dict[str, list[str]] = {}
        for name, piece in self.pieces.items():
            free = self.free_variables[name]
            text = signature(self.jaxpr, piece, free, [self.outputs[name]])
            if "dot_general" in text and "conv_general_dilated" not in text:
                text += _derivative(self.jaxpr, piece, free, self.outputs[name]) if "custom_" in text else ""
                groups.setdefault(text, []).append(name)
        return [group for group in groups.values() if len(group) >= SMALLEST_STACK]

    def _known(self, values: Mapping[str, Array], arrays: Any) -> dict[Any, Any]:
        leaves = jax.tree.leaves((self.arrays if arrays is None else arrays, self.given))
        known = dict(zip(self.jaxpr.constvars, map(jnp.asarray, self.closed.consts), strict=True))
        known |= dict(zip(self.jaxpr.invars[len(self.inputs) :], leaves, strict=True))
        return known | {self.inputs[name]: value for name, value in values.items()}

    def anchor(self, values: Nodes[Array], halved: bool = False) -> Anchor:
        """All products at these values, for `pcx.shortcuts.products`."""
        anchor = Anchor(halved=halved, near_zero=near_zero(self.jaxpr.eqns))
        self.predict(values, self.outputs, product=anchor.record)
        return anchor

    def stacked_weights(self) -> list[list[Array | None]]:
        """For every group, and every free variable of its pieces: the members' arrays stacked, where they are the model's."""
        known = self._known({}, None)
        return [
            [
                jnp.stack([known[v] for v in column]) if all(v in known for v in column) and len(set(column)) > 1 else None
                for column in zip(*(self.free_variables[name] for name in group), strict=True)
            ]
            for group in self.groups
        ]

    def stacked_anchor(self, group: list[str], anchor: Anchor) -> list[Any]:
        """For all that is `remembered` of the pieces of a group's members: what the anchor knows of it, stacked."""
        known = [[anchor.known[place] for place, _ in remembered(self.pieces[name])] for name in group]
        return [jax.tree.map(lambda *parts: jnp.stack(parts), *column) for column in zip(*known, strict=True)]

    def predict(
        self,
        values: Mapping[str, Array],
        names: Iterable[str],
        arrays: Any = None,
        stacks: Sequence[Sequence[Array | None]] | None = None,
        product: Product | None = None,
        moved: Mapping[str, Array] | None = None,
    ) -> Predictions[Array]:
        """The predictions of the named nodes.

        ``stacks`` (from `stacked_weights`) switches stacking on. ``product`` replaces how products are computed; ``moved``
        tells it which nodes are not at their start, and how far away, and the predictions say then how far they have moved.
        """
        known, wanted = self._known(values, arrays), list(names)
        done: dict[str, Array] = {}
        for group, weights in zip(self.groups, stacks or (), strict=False):
            members = [name for name in group if name in wanted]
            if len(members) >= SMALLEST_STACK:
                done |= self._predict_stacked(known, group, members, weights)
        lone = [name for name in wanted if name not in done]
        outputs = [self.outputs[name] for name in lone]
        piece = cut(self.jaxpr, outputs)
        by: dict[str, Any] = {}
        if product is None:
            results = evaluate(self.jaxpr, piece, known, outputs)
        else:
            away = {self.inputs[name]: by for name, by in (moved or {}).items()}
            results, amounts = interpret(self.jaxpr, piece, known, outputs, product, away)
            by = {name: amount for name, amount in zip(lone, amounts, strict=True) if amount is not UNKNOWN}
        done |= zip(lone, results, strict=True)
        return Predictions({name: done[name] for name in wanted}, self.roots, by)

    def _predict_stacked(
        self, known: dict[Any, Any], group: list[str], members: list[str], weights: Sequence[Array | None]
    ) -> dict[str, Array]:
        """The predictions of the members of a group, one by one, from one batched product."""

        def rows(parts: list[Any]) -> Array:
            return jnp.stack([known[self.inputs[part]] if isinstance(part, str) else part for part in parts])

        result, _ = self.predict_rows(group, members, weights, rows)
        return {name: result[i] for i, name in enumerate(members)}

    def predict_rows(
        self,
        group: list[str],
        members: list[str],
        weights: Sequence[Array | None],
        rows: Callable[[list[Any]], Array],
        bases: list[Any] | None = None,
        away: Callable[[list[Any]], Array] | None = None,
    ) -> tuple[Array, Any]:
        """The predictions of the members of a group in one array; ``rows`` puts the values of nodes, and arrays, into one.

        With ``bases`` (from `stacked_anchor`) products are anchored; ``away`` then puts displacements into one array. Beside
        the predictions comes how far they have moved, or None.
        """
        first, known = members[0], self._known({}, None)
        places = [group.index(name) for name in members]
        whole = places == list(range(len(group)))
        pick = slice(places[0], places[-1] + 1) if places == list(range(places[0], places[-1] + 1)) else jnp.array(places)
        names = {var: name for name, var in self.inputs.items()}
        operands, axes, moves = [], [], []
        for column, stack in zip(zip(*(self.free_variables[name] for name in members), strict=True), weights, strict=True):
            same = len(set(column)) == 1
            parts = [names[var] if var in names else known[var] for var in column]
            chosen = stack if stack is None or whole else stack[pick]
            operands.append(chosen if chosen is not None else rows(parts[:1])[0] if same else rows(parts))
            axes.append(None if same and stack is None else 0)
            moving = away is not None and any(var in names for var in column)
            ways = [part if isinstance(part, str) else jnp.zeros_like(part) for part in parts] if moving else []
            moves.append(None if away is None or not moving else away(ways[:1])[0] if same else away(ways))
        piece, variables, output = self.pieces[first], self.free_variables[first], self.outputs[first]

        def one(operands: Sequence[Array], moves: Sequence[Array | None], bases: list[Any] | None) -> tuple[Array, Any]:
            own = dict(zip(variables, operands, strict=True))
            if bases is None:
                return evaluate(self.jaxpr, piece, own, [output])[0], None
            anchor = Anchor({place: base for (place, _), base in zip(remembered(piece), bases, strict=True)})
            by = {var: move for var, move in zip(variables, moves, strict=True) if move is not None}
            (u,), (amount,) = interpret(self.jaxpr, piece, own, [output], anchor.product, by)
            return u, None if amount is UNKNOWN else amount

        own_bases = bases if whole or bases is None else jax.tree.map(lambda base: base[pick], bases)
        own_axes = [axis if move is not None else None for axis, move in zip(axes, moves, strict=True)]
        return jax.vmap(one, in_axes=(axes, own_axes, None if bases is None else 0))(operands, moves, own_bases)


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


def signature(jaxpr: Jaxpr, piece: Sequence[JaxprEqn], free: Sequence[Any], outputs: Sequence[Any]) -> str:
    """A text that is equal for two pieces only if they are the same program on the same shapes; see also `_derivative`."""
    number = {var: f"v{i}:{var.aval}" for i, var in enumerate(free)}

    def text(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{atom.val!r}:{atom.aval}"
        return number.setdefault(atom, f"v{len(number)}:{atom.aval}")

    def parameter(value: Any, rules: bool) -> str:
        if isinstance(value, ClosedJaxpr):
            return f"{value.jaxpr}{[id(const) for const in value.consts]}"
        if rules and not isinstance(value, bool | int | str | tuple):
            return "rule"  # told apart by the derivative
        return f"{id(value)}" if callable(value) else str(value)

    lines = []
    for eqn in piece:
        custom = eqn.primitive.name.startswith("custom_")
        parameters = {name: parameter(value, custom) for name, value in sorted(eqn.params.items())}
        lines.append(f"{eqn.primitive.name}{parameters}({[*map(text, eqn.invars)]})->{[*map(text, eqn.outvars)]}")
    return "\n".join([*map(text, free), *lines, *map(text, outputs)])


def _derivative(jaxpr: Jaxpr, piece: Sequence[JaxprEqn], free: Sequence[Any], output: Any) -> str:
    """The text of a piece's pull-back: a custom rule is opaque in the program, but written out in its derivative."""
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in free]
    floats = [i for i, shape in enumerate(shapes) if jnp.issubdtype(shape.dtype, jnp.floating)]

    def pull_back(operands: Sequence[Any], cotangent: Any) -> Any:
        def function(*moving: Any) -> Any:
            known = dict(zip(free, operands, strict=True)) | {free[i]: m for i, m in zip(floats, moving, strict=True)}
            return evaluate(jaxpr, piece, known, [output])[0]

        return jax.vjp(function, *(operands[i] for i in floats))[1](cotangent)

    return str(jax.make_jaxpr(pull_back)(shapes, jax.ShapeDtypeStruct(output.aval.shape, output.aval.dtype)))


def waves(
    parents: Mapping[str, frozenset[str]], free: Iterable[str], factors: Iterable[str], start: Iterable[str]
) -> Iterator[tuple[list[str], list[str]]]:
    """Step by step: the nodes whose energy may be off its minimum, and the free nodes whose gradient may be non-zero.

    Ends with the step after which nothing new is reached; all later steps are like that one.
    """
    free, factors, start = list(free), set(factors), set(start)
    active, moved = factors & start, set[str]()
    while True:
        reached = active.union(*(parents[name] for name in active))
        targets = [name for name in free if name in reached]
        yield [name for name in parents if name in active], targets
        after = moved.union(targets)
        grown = factors & (start | {name for name in parents if name in after or parents[name] & after})
        if grown == active and after == moved:
            return
        active, moved = grown, after


class ZeroAware:
    """A state optimiser whose updates skip what is exactly zero.

    Gradients and state that are ZERO stay so as long as the optimiser's own program says that they do; its scalars
    (such as Adam's step count) advance as always. Nothing is assumed about which optimiser it is.
    """

    def __init__(self, optimiser: optax.GradientTransformation, values: Nodes[Array]):
        self.optimiser, self.values = optimiser, values
        self.start = jax.make_jaxpr(optimiser.init)(values)
        self.state_shape = jax.eval_shape(optimiser.init, values)
        program = jax.make_jaxpr(optimiser.update)(values, self.state_shape, values)
        self.program = written_out(program, lambda eqn: eqn.primitive.name in ("jit", "pjit"))  # rules of derivatives stay
        refuse_nan(optimiser, values, "state")

    def momenta(self, steps: int) -> list[Momentum]:
        """What of its state two values of a node say as well, for so many steps: exactly enough (`FEW`)."""
        enough = steps <= FEW or all(value.dtype.itemsize > 2 for value in self.values.values())
        return momenta(self.program, list(self.values)) if enough else []

    def check(self, state: Any) -> None:
        """Refuse a given state that belongs to other values."""
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(s)] for s in (self.state_shape, state)]
        if state is not None and shapes[0] != shapes[1]:
            raise ModelError(
                f"optimiser_state belongs to other values: it has shapes {shapes[1]}, these need {shapes[0]}; "
                "a state can only go on with the same model, observations and batch size."
            )

    def init(self) -> list[Any]:
        return propagate_zeros(self.start, jax.tree.leaves(self.values))

    def update(self, gradients: Mapping[str, Array], state: list[Any], values: Nodes[Array]) -> tuple[Nodes[Any], list[Any]]:
        """The updates that are not zero, and the state after."""
        arguments = [gradients.get(name, ZERO) for name in values]
        results = propagate_zeros(self.program, [*arguments, *state, *values.values()])
        updates = Nodes({name: update for name, update in zip(values, results, strict=False) if update is not ZERO})
        return updates, results[len(values) :]

    def full_state(self, state: list[Any]) -> Any:
        leaves, structure = jax.tree.flatten(self.state_shape)
        return jax.tree.unflatten(structure, [materialise(s, aval) for s, aval in zip(state, leaves, strict=True)])

    def keeps_zeros(self, patterns: Sequence[Sequence[str]]) -> bool:
        """Whether a node that no gradient has reached is not moved, for these sets of reached nodes, one per step."""

        def rehearse(values: Nodes[Array]) -> None:
            state, reached = self.init(), set[str]()
            for pattern in patterns:
                updates, state = self.update({name: values[name] for name in pattern}, state, values)
                reached.update(pattern)
                if updates.keys() - reached:
                    raise NotZero("update")

        try:
            jax.eval_shape(rehearse, self.values)
        except NotZero:
            return False
        return True


def settled(
    before: Nodes[Array], after: Nodes[Array], state: Any, momenta: Sequence[Momentum], rounded: bool, moved: Iterable[str]
) -> tuple[Nodes[Array], Any]:
    """Values and the optimiser's state after a step; large ones as arrays that the compiler keeps.

    It may else keep the gradients of several steps, and compute momentum and values from them again and again. Values of which
    products read a ``rounded`` copy are left to it: one kernel writes both, or writes and measures them. Those that have not
    ``moved`` are zeros still, which nobody need keep, and so are ``momenta``: they are made of values.
    """
    leaves, structure = jax.tree.flatten(state)
    made = {place for place, *_ in momenta if leaves[place] is not ZERO}
    arrays, rest = eqx.partition(
        (after.only(() if rounded else moved), [None if i in made else leaf for i, leaf in enumerate(leaves)]), eqx.is_array
    )
    values, kept = eqx.combine(_hold(arrays, sum(leaf.size for leaf in jax.tree.leaves(after)) >= LARGE), rest)
    found = from_steps(momenta, before, after := after | values)
    leaves = [found[i].astype(leaf.dtype) if i in made else kept[i] for i, leaf in enumerate(leaves)]
    return after, jax.tree.unflatten(structure, leaves)


def _hold(arrays: Any, large: bool) -> Any:
    """Arrays that the compiler keeps, if they are large, or many members of a population have them."""
    leaves, tree = jax.tree.flatten(arrays)
    if not leaves:
        return arrays
    hold = custom_vmap(lambda *leaves: list(jax.lax.optimization_barrier(leaves) if large else leaves))
    hold.def_vmap(lambda members, batched, *leaves: (_hold(list(leaves), large or members >= MANY), list(batched)))
    same = jax.custom_jvp(hold)  # to derivatives nothing has happened
    same.defjvp(lambda leaves, tangents: (same(*leaves), list(tangents)))
    return jax.tree.unflatten(tree, same(*leaves))


def per_node(optimisers: Mapping[str, optax.GradientTransformation]) -> optax.GradientTransformation:
    """One optimiser per node."""

    def init(values: Mapping[str, Array]) -> Any:
        missing = [name for name in values if name not in optimisers]
        if missing:
            raise ModelError(f"no optimiser is given for the free node {missing[0]!r}; name every free node.")
        return Nodes({name: optimisers[name].init(value) for name, value in values.items()})

    def update(gradients: Mapping[str, Array], state: Any, values: Any = None) -> Any:
        pairs = {n: optimisers[n].update(g, state[n], None if values is None else values[n]) for n, g in gradients.items()}
        return Nodes({n: u for n, (u, _) in pairs.items()}), Nodes({n: s for n, (_, s) in pairs.items()})

    return optax.GradientTransformation(init, update)


def steady(optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimiser whose updates and state keep their dtypes, also where its settings are of a wider one."""

    def as_before(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: n if n.dtype == o.dtype else n.astype(o.dtype), new, old)

    def update(gradients: Any, state: Any, values: Any = None) -> Any:
        updates, after = optimiser.update(gradients, state, values)
        return as_before(updates, gradients), as_before(after, state)

    return optax.GradientTransformation(optimiser.init, update)
