"""The one idea: a predictive coding network is a pure function from the values of all nodes to their predictions.

`run` is that function. Given every value, all predictions are independent of each other, so forward initialisation,
prediction, energies and gradients are all readings of it. Values, inputs and predictions have a leading batch axis.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pcx._energies import check_factor, cross_entropy, weighted, zero
from pcx._init import Init, InitFunction, as_init, forward
from pcx._model import (
    Binding,
    Layer,
    Vode,
    bind,
    check_labels,
    check_overwritten,
    copy,
    dependencies,
    failure,
    named,
    refuse_shared,
    running,
    weight_dtype,
)
from pcx._types import INPUT, Displaced, Key, ModelError, Nodes, Observations, Observed, Rule, Run, near
from pcx.shortcuts.differences import way

M = TypeVar("M")


def as_inputs(x: Any) -> tuple[Any, ...]:
    """The inputs of the model: none, several (a tuple), or one."""
    return () if x is None else x if isinstance(x, tuple) else (x,)


def by_name(what: str, given: Any) -> Mapping[str, Any]:
    """A mapping from names of nodes, empty where none is given."""
    if given is not None and not isinstance(given, Mapping):
        raise ModelError(f"{what} is of type {type(given).__name__}; it maps names of nodes, as in {{'vodes.2': ...}}.")
    return given or {}


def batch_size(x: Any, *given: Mapping[str, Any] | None, batch: int | None = None) -> int:
    """The common leading axis of inputs and values."""
    sizes: dict[str, int] = {} if batch is None else {"batch=": batch}
    named_parts = [(f"input {i}", part) for i, part in enumerate(as_inputs(x))]
    named_parts += [(f"node {name!r}", part.value if isinstance(part, Observed) else part)
                    for mapping in given for name, part in (mapping or {}).items()]  # fmt: skip
    for label, part in named_parts:
        for leaf in jax.tree.leaves(part):
            if jnp.ndim(leaf) == 0:
                raise ModelError(f"{label} is a number, or a list of them; the core takes arrays with a leading batch axis.")
            sizes[label] = jnp.shape(leaf)[0]
    if not sizes:
        raise ModelError("nothing is given that has a batch axis; pass batch=, the number of samples.")
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{label}: {size}" for label, size in sizes.items())
        raise ModelError(f"the batch sizes differ ({found}); inputs and values need the same leading axis.")
    return next(iter(sizes.values()))


def _rule(given: Any, error: Any, start: InitFunction, key: Key) -> Rule:
    """What one node does in a run, for one sample: a given value, a given error, or a start from its prediction."""
    if error is not None:
        return lambda u: u + error if error.shape == u.shape else error  # another shape is reported by the node
    if isinstance(given, Observed):
        return lambda u: jnp.where(given.mask, given.value, start(u, key)) if given.value.shape == u.shape else given.value
    return (lambda u: start(u, key)) if given is None else (lambda u: given)


def _batched(part: Any, batch: int) -> Any:
    """An observation with a batch axis on its mask too, so that both can be mapped over."""
    if not isinstance(part, Observed):
        return jnp.asarray(part)
    value, mask = jnp.asarray(part.value), jnp.asarray(part.mask, bool)
    own = mask.shape if mask.ndim < value.ndim or mask.shape[:1] != (batch,) else mask.shape[1:]
    try:
        return Observed(value, jnp.broadcast_to(mask, (batch, *jnp.broadcast_shapes(own, value.shape[1:]))))
    except ValueError:
        raise ModelError(f"a mask of shape {mask.shape} does not fit an observed value of shape {value.shape}.") from None


def run(
    model: Any,
    values: Observations,
    x: Any = None,
    *,
    errors: Observations | None = None,
    key: Key = None,
    training: bool = False,
    batch: int | None = None,
) -> Run:
    """Execute the model with some nodes given, and return what all nodes saw.

    A node in ``values`` has that value; a node in ``errors`` has its prediction plus that error; a node in neither has
    its prediction. So ``run(model, {}, x)`` is the forward pass, and with all values given it is prediction: all
    ``u_l = f_l(h_parents)`` at once. ``x`` is one input, a tuple of several, or None.
    """
    return execute(model, values, x, errors, {}, key, training, batch)


def execute(model: Any, values: Observations, x: Any, errors: Observations | None, starts: Mapping[str, InitFunction], key: Key,
            training: bool, batch: int | None) -> Run:  # fmt: skip
    """`run`, with rules for nodes that start by themselves."""
    refuse_shared(model)
    values, errors = by_name("values", values), by_name("errors", errors)
    both = sorted(set(values) & set(errors))
    if both:
        raise ModelError(f"node {both[0]!r} is given a value and an error; give one of them.")
    for name, vode in named(model, Vode).items():
        if name in errors:
            _refuse_cross_entropy(name, vode.energy_function)
    n = batch_size(x, values, errors, batch=batch)
    dtype = weight_dtype(model)
    inputs = jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a,
                          jax.tree.map(jnp.asarray, as_inputs(x)))  # fmt: skip
    keys = None if key is None else jax.random.split(key, n)
    given = {name: _batched(part, n) for name, part in values.items()}
    wrong = {name: jnp.asarray(part) for name, part in errors.items()}

    def one(given: Any, wrong: Any, inputs: tuple[Any, ...], key: Key) -> Any:
        rules = {
            name: _rule(given.get(name), wrong.get(name), starts.get(name, forward), _node_key(key, i))
            for i, name in enumerate({**starts, **given, **wrong})
        }
        bound, binding = bind(model, rules, training, key)
        output = _call(bound, binding, inputs)
        unseen = [name for name in [*given, *wrong] if name not in binding.visits]
        if unseen:
            raise ModelError(f"node {unseen[0]!r} is given a value, but the model never calls it.")
        check_overwritten(binding, model, inputs)
        seen = binding.visits.items()
        roots = [name for name, visit in seen if visit.root]
        arrays = eqx.filter(output, eqx.is_array)
        new_values = Nodes({name: visit.value for name, visit in seen}, roots)
        predictions = Nodes({name: visit.prediction for name, visit in seen}, roots)
        return (new_values, predictions, arrays), binding.state

    mapped = jax.vmap(one, in_axes=0, out_axes=(0, None), axis_name="batch", axis_size=n)
    (run_values, predictions, output), state = mapped(given, wrong, inputs, keys)
    return Run(run_values, predictions, output, state)


def _refuse_cross_entropy(name: str, energy: Any) -> None:
    if energy is cross_entropy:
        raise ModelError(f"node {name!r} has cross-entropy, where h - u is no error; give it a value.")


def _node_key(key: Key, index: int) -> Key:
    return None if key is None else jax.random.fold_in(key, index)


def _call(bound: Any, binding: Binding, inputs: tuple[Any, ...]) -> Any:
    takes_key = "key" in inspect.signature(type(bound).__call__).parameters  # for layers that want one, as in Equinox
    running.append(binding)
    try:
        return bound(*inputs, key=binding.key) if takes_key else bound(*inputs)
    except ModelError:
        raise
    except (TypeError, ValueError) as error:
        raise failure(bound, inputs, next(reversed(binding.visits), None), error) from error
    finally:
        running.pop()


def observe(model: Any, observed: Observations | None, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Observations in the form of values: known names, integer labels as one-hot, the weights' dtype, checked shapes."""
    dtype, result = weight_dtype(model), {}
    for name, part in (observed or {}).items():
        if name not in shapes:
            raise ModelError(f"the model has no node {name!r}; near: {near(name, shapes)}.")
        shape = tuple(shapes[name].shape)
        value = jnp.asarray(part.value if isinstance(part, Observed) else part)
        if jnp.issubdtype(value.dtype, jnp.integer) and value.ndim == 1 and len(shape) == 2:
            check_labels(value, shape[1], f"node {name!r}")
            value = jax.nn.one_hot(value, shape[1], dtype=dtype)
        if value.shape != shape:
            labels = f", or {shape[:1]} integer labels," if len(shape) == 2 else ""
            raise ModelError(
                f"node {name!r} takes shape {shape} (batch first){labels} but was given {value.shape} {value.dtype}."
            )
        value = value.astype(dtype)
        result[name] = Observed(value, part.mask) if isinstance(part, Observed) else value
    return result


def initialise(
    model: Any,
    x: Any = None,
    observed: Observations | None = None,
    *,
    init: Init | Mapping[str, Init] | None = None,
    key: Key = None,
    training: bool = False,
    batch: int | None = None,
) -> Nodes[Float[Array, "batch ..."]]:
    """Give every node its first value, parents first; observed nodes (and parts) are bound before.

    ``init`` is one rule for all nodes or a mapping from names to rules; a node that is not named follows its own
    ``Vode(init=…)``, and without one starts at its prediction.
    """
    return begin(model, x, observed, init, key, training, batch).values


def begin(model: Any, x: Any, observed: Observations | None, init: Init | Mapping[str, Init] | None, key: Key, training: bool,
          batch: int | None) -> Run:  # fmt: skip
    """The run that initialises all nodes."""
    n = batch_size(x, observed, batch=batch)
    shapes = jax.eval_shape(lambda: run(model, {}, x, key=key, training=training, batch=n).predictions)
    if not shapes:
        raise ModelError(f"{type(model).__name__} calls no vode; give it a pcx.Vode for every group of neurons with a value.")
    starts = {name: function for name, function in start_rules(model, init).items() if function is not forward}
    return execute(model, observe(model, observed, shapes), x, {}, starts, key, training, n)


def start_rules(model: Any, init: Init | Mapping[str, Init] | None) -> dict[str, InitFunction]:
    """For every node the function that starts it."""
    nodes = named(model, Vode)
    for name in init if isinstance(init, Mapping) else ():
        if name not in nodes:
            raise ModelError(f"the model has no node {name!r} to initialise; near: {near(name, nodes)}.")
    chosen = {name: init.get(name) if isinstance(init, Mapping) else init for name in nodes}
    return {name: as_init(vode.init if chosen[name] is None else chosen[name]) for name, vode in nodes.items()}


class Factor(NamedTuple):
    """One term of the free energy: an energy function and its precision."""

    energy: Callable[[Array, Array], Array]
    precision: Any


class Objective(NamedTuple):
    """Which energy each node has and how much it weighs: the model's own, with the caller's replacements on top."""

    energy: Mapping[str, Callable[[Array, Array], Array]] = {}
    precision: Mapping[str, Any] = {}

    def factors(self, model: Any, nodes: Nodes[Any], step: Any) -> dict[str, Factor]:
        """The factors of the free energy that belong to these nodes, at this step of inference."""
        vodes, result = named(model, Vode), {}
        for name in nodes:
            own = zero if name in nodes.roots and vodes[name].mean is None else vodes[name].energy_function
            precision = self.precision.get(name)
            result[name] = Factor(self.energy.get(name, own), precision(step) if callable(precision) else precision)
        return result


def factor_energies(
    factors: Mapping[str, Factor], values: Mapping[str, Array] | Displaced, predictions: Mapping[str, Array]
) -> Nodes[Float[Array, " batch"]]:
    """The energy of every factor (node, prediction, energy with its precision), one number per sample.

    Where values are displaced, ``h - u`` is the displacement minus how far the prediction is from the start (`way`).
    """
    result, known = {}, values.values if isinstance(values, Displaced) else values
    for name, (energy, precision) in factors.items():
        one = functools.partial(weighted, energy, precision=precision, name=name)
        h, u = known[name], predictions[name]
        if isinstance(values, Displaced) and getattr(energy, "difference", False):
            h, u = values.by[name], way(values, predictions, name)
        result[name] = jax.vmap(one)(h, u)
        if result[name].ndim != 1:
            raise ModelError(f"the energy of node {name!r} has shape {result[name].shape[1:]} per sample; return one number.")
    return Nodes(result)


def energies(
    model: Any,
    values: Observations,
    x: Any = None,
    *,
    errors: Observations | None = None,
    energy: Mapping[str, Callable[[Array, Array], Array]] | None = None,
    precision: Mapping[str, Any] | None = None,
    step: Any = 0,
    key: Key = None,
    training: bool = False,
    batch: int | None = None,
) -> Nodes[Float[Array, " batch"]]:
    """The energy of every node and sample: ``E_l = π_l · energy_l(h_l, u_l)``, by default ``½‖h_l - u_l‖²``.

    ``energy`` replaces the energy function of named nodes; ``precision`` multiplies it: a number, an array with one entry
    per unit, or a function of the inference step.
    """
    objective = make_objective(model, energy, precision)
    for name in by_name("errors", errors):
        _refuse_cross_entropy(name, objective.energy.get(name))
    done = execute(model, values, x, errors, {}, key, training, batch)
    return factor_energies(objective.factors(model, done.values, step), done.values, done.predictions)


def free_energy(model: Any, values: Observations, x: Any = None, **options: Any) -> Float[Array, " batch"]:
    """The variational free energy of every sample (Eq. 1, without its constant): the sum of `energies` over nodes.

    Takes the options of `energies`. Values descend its sum over the batch, weights its mean.
    """
    return sum(energies(model, values, x, **options).values())  # type: ignore[return-value]


def make_objective(model: Any, energy: Mapping[str, Any] | None, precision: Mapping[str, Any] | None) -> Objective:
    nodes, energy, precision = named(model, Vode), by_name("energy", energy), by_name("precision", precision)
    for name in sorted({*energy, *precision} - nodes.keys(), key=str):
        raise ModelError(f"the model has no node {name!r} to give an energy or a precision; near: {near(name, nodes)}.")
    for name, vode in nodes.items():
        check_factor(name, energy.get(name, vode.energy_function), precision.get(name))
    return Objective(energy, precision)


class Graph(NamedTuple):
    """Who predicts whom: for every node, in the order of calls, the nodes that its prediction reads.

    ``readers`` are the nodes whose predictions read the input, alone or beside other nodes.
    """

    parents: Nodes[frozenset[str]]
    shapes: Nodes[tuple[int, ...]]
    energies: Nodes[str]
    readers: frozenset[str]

    @property
    def sinks(self) -> list[str]:
        """The nodes that no other node reads."""
        read = frozenset[str]().union(*self.parents.values())
        return [name for name in self.parents if name not in read]

    def __str__(self) -> str:
        width = max(map(len, self.parents), default=4)
        rows = [
            f"{name:<{width}}  {'x'.join(map(str, self.shapes[name])) or '1':<12} {self.energies[name]:<14} "
            + f"<- {', '.join([*(n for n in self.parents if n in its), *['input'] * (name in self.readers)]) or 'nothing'}"
            for name, its in self.parents.items()
        ]
        return "\n".join(rows)


def graph(model: Any, x: Any = None) -> Graph:
    """The graph of a model, recovered from its program. Print it, or see `pcx.draw`."""
    refuse_shared(model)
    done = jax.eval_shape(lambda: run(model, {}, x, batch=batch_size(x) if as_inputs(x) else 1))
    first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a)[1:], jnp.result_type(a)), as_inputs(x))
    reads = dependencies(model, first)
    parents = Nodes({name: its - {INPUT} for name, its in reads.items()})
    factors = Objective().factors(model, done.predictions, 0)
    labels = {name: getattr(factor.energy, "__name__", str(factor.energy)) for name, factor in factors.items()}
    shapes = Nodes({name: tuple(u.shape[1:]) for name, u in done.predictions.items()})
    return Graph(parents, shapes, Nodes(labels), frozenset(name for name, its in reads.items() if INPUT in its))


def output_node(model: Any, x: Any = None) -> str:
    """The name of the node that gets the label or the data: the one that no other node reads."""
    sinks = graph(model, x).sinks
    if len(sinks) != 1:
        found = f"{len(sinks)} nodes that no other node reads ({', '.join(sinks)})"
        raise ModelError(f"the model has {found}; name the one you mean.")
    return sinks[0]


def freeze_state(model: M, state: Mapping[str, Mapping[str, Any]]) -> M:
    """A copy of the model whose layers use the batch statistics of this run as constants."""
    return _with_state(model, state, keep_batch=True)


def update_state(model: M, state: Mapping[str, Mapping[str, Any]]) -> M:
    """A copy of the model with the running statistics of this run."""
    return _with_state(model, state, keep_batch=False)


def _with_state(model: M, state: Mapping[str, Mapping[str, Any]], keep_batch: bool) -> M:
    if not state:
        return model
    model = copy(model)
    for name, layer in named(model, Layer).items():
        for field, value in state.get(name, {}).items():
            if keep_batch or not field.startswith("batch_"):
                setattr(layer, field, value)
    return model
