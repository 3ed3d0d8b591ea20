"""Inference: the values descend the free energy while the weights and the observed nodes stand still.

One call serves every use; only what is observed differs: input and label (training a classifier), data at the last
node (a generative model), part of a node (recall), nothing (sampling), the input alone (prediction).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from pcx._energies import zero
from pcx._free_energy import (
    Factor,
    Objective,
    batch_size,
    begin,
    by_name,
    execute,
    factor_energies,
    freeze_state,
    graph,
    make_objective,
    observe,
    start_rules,
)
from pcx._init import Init, forward
from pcx._model import weight_dtype
from pcx._types import ALL_SHORTCUTS, Displaced, Inferred, Key, ModelError, Nodes, Observations, Observed, Run, Shortcuts, near
from pcx.shortcuts import products
from pcx.shortcuts.differences import gaps
from pcx.shortcuts.kernel import ChainKernel
from pcx.shortcuts.plan import WRITTEN_OUT, Program, ZeroAware, per_node, settled, steady, waves
from pcx.shortcuts.pooling import PooledErrors
from pcx.shortcuts.products import Anchor
from pcx.shortcuts.stack import BlockEnergy, BlockOptimiser, Packed, once, repeat

T = TypeVar("T", bound="Nodes[Array] | Packed")
Record = Callable[[Any, Nodes[Array], Nodes[Array]], Any]


def record_energies(step: Any, values: Nodes[Array], energies: Nodes[Array]) -> Nodes[Array]:
    """For ``infer(record=…)``: keep the energy of every node and sample at every step."""
    return energies


def infer(
    model: Any,
    x: Any = None,
    observed: Observations | None = None,
    *,
    optimiser: optax.GradientTransformation | Mapping[str, optax.GradientTransformation],
    steps: int,
    tolerance: float | None = None,
    init: Init | Mapping[str, Init] | None = None,
    values: Mapping[str, Array] | None = None,
    optimiser_state: Any = None,
    energy: Mapping[str, Any] | None = None,
    precision: Mapping[str, Any] | None = None,
    record: Record | None = None,
    key: Key = None,
    training: bool = False,
    batch: int | None = None,
    shortcuts: Shortcuts = ALL_SHORTCUTS,
    unroll: bool = False,
    state_dtype: Any = None,
) -> Inferred:
    """Settle the values: ``steps`` updates of ``h ← h - γ ∂E/∂h`` by any optax optimiser.

    Arguments:
        observed: ``{name: array}`` fixes a node, ``{name: Observed(value, mask)}`` part of one, before the start and after
            every update; ``{name: function}`` fixes a last node to a function of its forward prediction. The gradient is
            that of the sum over the batch, so every sample moves as if it were alone.
        optimiser: one for all free nodes, or a mapping with one per node.
        tolerance: stop a sample when its gradient norm is at most this fraction of its first; ``steps`` is then the limit.
        init, values: how nodes start (`initialise`), or their values at the start.
        optimiser_state: from an earlier `Inferred`, to go on with it; by default it starts afresh.
        energy, precision: see `energies`.
        record: a function ``(step, values, energies) -> tree``, called before the first step and after each.
        shortcuts: which exact shortcuts may be taken. ``unroll``: write all steps out, also where there are many.
        state_dtype: keep the way from the start, and the optimiser's state, in this dtype. In bfloat16 it has half the bytes;
            starts, predictions and errors stay in the dtype of the weights.
    """
    if not hasattr(steps, "__index__") or not 0 <= steps < 2**31:
        raise ModelError(f"steps is {steps!r}; inference takes zero or more steps, a whole number below 2**31.")
    if isinstance(tolerance, int | float) and not tolerance >= 0:
        raise ModelError(f"tolerance is {tolerance}; it is a fraction of the first gradient norm, zero or more.")
    observed = by_name("observed", observed)
    given = {name: part for name, part in observed.items() if not callable(part)}
    batch = batch_size(x, given, by_name("values", values), batch=batch)
    rounded = products.rounded if shortcuts.anchor else (lambda function: function)
    start = rounded(lambda: begin(model, x, given, init, key, training, batch))()
    fixed = observe(model, given, start.values)
    if values is not None:
        start = rounded(lambda: execute(model, {**values, **fixed}, x, {}, {}, key, training, batch))()
    for name in [*(observed.keys() - given.keys()), *(optimiser if isinstance(optimiser, Mapping) else ())]:
        if name not in start.values:
            raise ModelError(f"there is no node {name!r} to observe or to give an optimiser; near: {near(name, start.values)}.")
    for name in observed.keys() - given.keys():
        if name not in graph(model, x).sinks:
            raise ModelError(f"node {name!r} is fixed to a function of its prediction, but other nodes read it; give a value.")
        fixed |= observe(model, {name: observed[name](start.predictions[name])}, start.values)
        start = start._replace(values=start.values | fixed)
    frozen = freeze_state(model, start.state)
    task = _Task(frozen, (x, key, training), make_objective(model, energy, precision), start, fixed, shortcuts, state_dtype)
    chosen = per_node(optimiser) if isinstance(optimiser, Mapping) else optimiser
    if not hasattr(chosen, "update"):
        raise ModelError(f"optimiser is {optimiser!r}; it is one of optax's, such as optax.sgd(0.1), or one per node.")
    chosen = chosen if state_dtype is None else steady(chosen)
    free = start.values.keys() - fixed.keys() if values is None else set()
    at_prediction = {name for name, rule in start_rules(model, init).items() if rule is forward and name in free}
    return task.solve(chosen, steps, tolerance, optimiser_state, record, unroll, at_prediction)


class _Task:
    """One inference problem: a frozen model, where it starts, what is fixed, and the gradient of its energy.

    ``free`` is the state of the loop throughout: the values of the nodes that are not fixed or, with an anchor, how far they
    are from their start. `all_values` and `values` make values of it.
    """

    def __init__(
        self, model: Any, context: Any, objective: Objective, start: Run, fixed: Any, shortcuts: Shortcuts, state_dtype: Any
    ):
        self.model, self.objective, self.start = model, objective, start
        self.context, self.batch = context, len(next(iter(start.values.values())))  # context: input, key, whether training
        self.fixed, self.dtype = fixed, weight_dtype(model)
        self.free = [name for name in start.values if name not in fixed or isinstance(fixed[name], Observed)]
        self.shortcuts, self.state_dtype = shortcuts, state_dtype
        if state_dtype is not None and not shortcuts.anchor:
            raise ModelError("state_dtype is the dtype of the way from the start; it needs Shortcuts(anchor=True).")
        factors = objective.factors(model, start.values, 0)
        self.energies = {name: factor.energy for name, factor in factors.items()}
        self.factors = [n for n, f in self.energies.items() if f is not zero]
        self.program: Program | None = None
        self.anchor: Anchor | None = None
        self.stacks: Any = None
        self.constants: Nodes[Array] = Nodes()
        if any(shortcuts):
            self.program = Program(model, start.values, *context)
            settled = [n for n, its in self.program.parents.items() if not its & set(self.free)]
            self.constants = start.predictions.only(settled if shortcuts.constant else ())
            self.stacks = self.program.stacked_weights() if shortcuts.stack else None
            if shortcuts.anchor and (state_dtype is not None or products.worthwhile(self.dtype)):
                self.anchor = self.program.anchor(start.values, shortcuts.half)
        # whether products read another copy of the values, in fewer bytes
        self.rounded = state_dtype is None and products.two_bytes(self.anchor)
        self.gap = gaps(start.values, start.predictions)
        self.pooled = PooledErrors(self)

    def first(self) -> Nodes[Array]:
        """The state of the loop: the values of the free nodes, or, with an anchor, how far they are from their start."""
        values = self.start.values.only(self.free)
        return values if self.anchor is None else jax.tree.map(jnp.zeros_like, self.kept(values))

    def kept(self, values: T) -> T:
        """Values in the dtype of the state."""
        return values if self.state_dtype is None else jax.tree.map(lambda v: v.astype(self.state_dtype), values)

    def all_values(self, free: Nodes[Array]) -> Nodes[Array] | Displaced:
        if self.anchor is None:
            return self.start.values | free
        by = {n: free[n].astype(h.dtype) if n in free else jnp.zeros_like(h) for n, h in self.start.values.items()}
        return Displaced(self.start.values, Nodes(by), self.gap)

    def values(self, free: Nodes[Array]) -> Nodes[Array]:
        found = self.all_values(free)
        return found.values if isinstance(found, Displaced) else found

    def predictions(self, values: Nodes[Array] | Displaced, names: list[str], moved: Iterable[str]) -> Nodes[Array]:
        known = values.values if isinstance(values, Displaced) else values
        if self.program is None:
            x, key, training = self.context
            return execute(self.model, known, x, {}, {}, key, training, self.batch).predictions
        moving = [name for name in names if name not in self.constants]
        if self.anchor is None or not isinstance(values, Displaced):
            found = self.program.predict(known, moving, stacks=self.stacks)
        else:
            found = self.program.predict(known, moving, product=self.anchor.product, moved={n: values.by[n] for n in moved})
        return found.with_still(self.constants.only(names))

    def factors_of(self, names: list[str], step: Any) -> dict[str, Factor]:
        return self.objective.factors(self.model, self.start.values.only(names), step)

    def energy_of(
        self, free: Nodes[Array], step: Any, names: list[str], moved: Iterable[str] | None = None
    ) -> Nodes[Float[Array, " batch"]]:
        values = self.all_values(free)
        predictions = self.predictions(values, names, self.free if moved is None else moved)
        return factor_energies(self.factors_of(names, step), values, predictions)

    def gradient(
        self, free: Nodes[Array], step: Any, active: list[str], targets: list[str], moved: Iterable[str] | None = None
    ) -> Nodes[Array]:
        """The gradient of the active energies, summed over nodes and batch, for the target nodes.

        ``moved`` are the nodes that may have left their start (by default all free ones).
        """

        def total(moving: Nodes[Array]) -> Array:
            parts = self.pooled(free | moving, active, self.free if moved is None else moved)
            parts |= self.energy_of(free | moving, step, [name for name in active if name not in parts], moved)
            return sum((jnp.sum(part) for part in parts.values()), start=jnp.zeros((), self.dtype))

        gradients = jax.grad(total)(free.only(targets))
        return Nodes({name: self.unmasked(name, g, jnp.zeros_like(g)) for name, g in gradients.items()})

    def unmasked(self, name: str, free: Array, fixed: Array) -> Array:
        part = self.fixed.get(name)
        return jnp.where(part.mask, fixed, free) if isinstance(part, Observed) else free

    def updated(self, free: Nodes[Array], updates: Mapping[str, Array]) -> Nodes[Array]:
        """The state after an update, with the observed parts imposed again."""
        new = {name: optax.apply_updates(free[name], update) for name, update in updates.items()}
        return free | {name: self.unmasked(name, v, free[name]) for name, v in new.items()}

    def plan(self, lazy: ZeroAware, fresh: bool, at_prediction: set[str], steps: int) -> list[tuple[list[str], list[str]]]:
        """For each of the first steps the active energies and the nodes they move; the last entry is for all later ones."""
        everything = [(self.factors, self.free)]
        if not fresh or not self.shortcuts.wave or self.program is None:
            return everything
        quiet = {n for n in at_prediction if getattr(self.energies[n], "stationary", False)}
        found = list(waves(self.program.parents, self.free, self.factors, set(self.factors) - quiet))
        if not lazy.keeps_zeros([reached for _, reached in found[:steps]]):
            return everything
        return found[: found.index(found[-1]) + 1]

    def solve(
        self,
        optimiser: optax.GradientTransformation,
        steps: int,
        tolerance: float | None,
        state: Any,
        record: Record | None,
        unroll: bool,
        at_prediction: set[str],
    ) -> Inferred:
        start = self.kept(self.start.values.only(self.free))
        lazy = ZeroAware(optimiser, start)
        lazy.check(state)
        plan = self.plan(lazy, state is None and tolerance is None, at_prediction, steps)
        if tolerance is None and record is None:
            stacked = self.solve_stacked(lazy, state, plan, steps, unroll)
            if stacked is not None:
                return stacked

        def note(step: Any, free: Nodes[Array]) -> Any:
            return None if record is None else record(step, self.values(free), self.energy_of(free, step, self.factors))

        free = self.first()
        if tolerance is not None:
            state = optimiser.init(start) if state is None else state
            return self.solve_to_tolerance(optimiser, steps, tolerance, free, state, None if record is None else note)
        history, done, moved, zeros = [note(0, free)], 0, set[str](), lazy.init()
        traces = lazy.momenta(steps) if self.shortcuts.kernel and self.anchor is not None and state is None else []
        for done, (active, targets) in enumerate(plan[:-1][:steps], start=1):
            gradients = self.gradient(free, done - 1, active, targets, moved)
            moved |= set(targets)
            updates, zeros = lazy.update(gradients, zeros, self.kept(self.values(free).only(self.free)))
            free, zeros = settled(free, self.updated(free, updates.only(targets)), zeros, traces, self.rounded, moved)
            history.append(note(done, free))
        active, targets = plan[min(done, len(plan) - 1)]
        state = lazy.full_state(zeros) if state is None else state

        def body(carry: Any, step: Any, moved: Iterable[str] | None = None) -> Any:
            free, state = carry
            gradients = self.gradient(free, step, active, targets, moved)
            everything = Nodes({n: gradients[n] if n in gradients else jnp.zeros_like(free[n]) for n in self.free})
            updates, state = optimiser.update(everything, state, self.kept(self.values(free).only(self.free)))
            free, state = settled(free, self.updated(free, updates), state, traces, self.rounded, self.free)
            return (free, state), note(step + 1, free)

        carry, rest = (free, state), None
        if done == 0 and steps > 0 and self.anchor is not None:  # nothing has moved yet: every product is known
            carry, noted = body(carry, 0, ())
            history, done = [*history, noted], 1
        if unroll or steps - done <= WRITTEN_OUT:
            again = once(body, carry, done) if record is None else body
            for step in range(done, steps):
                carry, noted = again(carry, step)
                history.append(noted)
        else:
            traces = []  # a loop writes all that it carries
            carry, rest = jax.lax.scan(body, carry, jnp.arange(done, steps))
        return self.inferred(*carry, steps, frozenset(active), _join(history, rest))

    def inferred(self, free: Nodes[Array], state: Any, steps: int, reached: frozenset[str], history: Any) -> Inferred:
        count, values = jnp.full((self.batch,), steps, jnp.int32), self.all_values(free)
        displaced = values if isinstance(values, Displaced) else None
        return Inferred(self.values(free), self.start, state, count, history=history, displaced=displaced, reached=reached)

    def solve_stacked(
        self, lazy: ZeroAware, state: Any, plan: list[tuple[list[str], list[str]]], steps: int, unroll: bool
    ) -> Inferred | None:
        """`solve` with the values of equal nodes in one array from step to step, or None where they cannot be."""
        if self.program is None or not self.stacks:
            return None
        whole = [name for name in plan[-1][1] if name not in self.fixed and name in plan[-1][0]]
        factors = self.factors_of(plan[-1][0], 0)
        energy = BlockEnergy.of(self.program, self.stacks, self.free, whole, factors, self.start.values, self.anchor, self.gap)
        optimiser = None if energy is None else BlockOptimiser(lazy, energy.blocks)
        if energy is None or optimiser is None or not optimiser.fits:
            return None

        def move(packed: Packed, state: Any, gradients: Packed) -> tuple[Packed, Any]:
            lone = {n: self.unmasked(n, g, jnp.zeros_like(g)) for n, g in gradients.lone.items()}
            updates, state = optimiser.update(gradients._replace(lone=Nodes(lone)), state, self.kept(energy.values(packed)))
            blocks = optax.apply_updates(packed.blocks[: len(updates.blocks)], updates.blocks)  # none, if a kernel moves them
            return Packed(blocks, self.updated(packed.lone, updates.lone)), state

        def body(carry: tuple[Packed, Any], step: Any, active: list[str]) -> Any:
            return move(*carry, jax.grad(energy)(carry[0], self.factors_of(active, step), self.constants))

        fresh = lazy.full_state(lazy.init()) if state is None else state
        carry = (energy.blocks.pack(self.first()), optimiser.init(fresh))
        kernel = ChainKernel.of(self, energy, optimiser, factors, move) if self.shortcuts.kernel else None
        free, parts, active = repeat(body, carry, [names for names, _ in plan], steps, unroll, kernel)
        return self.inferred(energy.blocks.unpack(free), optimiser.full_state(parts), steps, frozenset(active), None)

    def solve_to_tolerance(
        self,
        optimiser: optax.GradientTransformation,
        steps: int,
        tolerance: float,
        free: Nodes[Array],
        state: Any,
        note: Callable[[Any, Nodes[Array]], Any] | None,
    ) -> Inferred:
        """Every sample stops by itself; the loop ends with the last one."""

        def norm(gradients: Nodes[Array]) -> Array:
            return jnp.sqrt(sum(jnp.sum(jnp.square(g.reshape(self.batch, -1)), axis=1) for g in gradients.values()))

        def mask(going: Array, new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(going.reshape(-1, *[1] * (n.ndim - 1)), n, o), new, old)

        def body(carry: Any) -> Any:
            free, state, gradients, going, count, step, _ = carry
            gradients = mask(going, gradients, jax.tree.map(jnp.zeros_like, gradients))
            updates, state = optimiser.update(gradients, state, self.kept(self.values(free).only(self.free)))
            free = mask(going, self.updated(free, updates), free)
            gradients = self.gradient(free, step + 1, self.factors, self.free)
            now = norm(gradients)
            return free, state, gradients, going & (now > tolerance * first), count + going, step + 1, now

        gradients = self.gradient(free, 0, self.factors, self.free)
        first = norm(gradients)
        going = first > tolerance * first
        carry = (free, state, gradients, going, jnp.zeros((self.batch,), jnp.int32), jnp.zeros((), jnp.int32), first)
        if note is None:
            carry, trace = jax.lax.while_loop(lambda carry: jnp.any(carry[3]) & (carry[5] < steps), body, carry), None
        else:
            carry, rest = jax.lax.scan(lambda c, _: (new := body(c), note(new[5], new[0])), carry, length=steps)
            trace = _join([note(0, free)], rest)
        free, state, _, _, count, _, last = carry
        done = self.inferred(free, state, steps, frozenset(self.factors), trace)
        return dataclasses.replace(done, steps=count, gradient_start=first, gradient_end=last)


def _join(items: list[Any], rest: Any) -> Any:
    first = jax.tree.map(lambda *parts: jnp.stack(parts), *items)
    return first if rest is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, rest)
