"""Models: plain Python classes with nodes in them.

A model is written for one sample, as a class that derives from `EnergyModule`. Its attributes are layers (Equinox's own
or any callable pytree) and `Vode`s; its ``__call__`` passes data through layers and nodes. Everything else is derived:
`bind` puts values into a fresh copy of the model and watches what each node sees, `dependencies` recovers the graph.

The *kind* of a parameter is its place in the tree: under a `Vode` it is a value or a cache, in a layer's declared state
(running statistics) it is state, everywhere else it is a weight.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from pcx._energies import squared_error
from pcx._init import Init
from pcx._jaxpr import reach
from pcx._types import INPUT, Key, ModelError, Nodes, Rule, near

M = TypeVar("M")
Part = TypeVar("Part")


class LayerParam:
    """Kind: a weight, moved by learning."""


class StateParam:
    """Kind: a statistic that a layer keeps, such as a running mean; no gradient and no weight decay."""


class TransientParam(StateParam):
    """Kind: a statistic of the present batch only; it is not saved."""


class VodeParam:
    """Kind: the value of a node, moved by inference."""

    Cache: ClassVar[type]


class _Cache:
    """Kind: what a node remembers of the last call, such as its prediction."""


VodeParam.Cache = _Cache


@dataclasses.dataclass(frozen=True, eq=False)
class Flags:
    """What a module knows beside its arrays. ``training`` and ``status`` are part of its identity under `jax.jit`.

    In a tree that optimisers are initialised with both are None, which equals anything: it fits the model in every mode.
    ``batch`` is that of the energy whose gradient was taken last: on gradients, and on the model they belong to.
    """

    training: bool | None = False
    status: str | None = None
    batch: int | None = None
    name: str | None = None  # of a vode: its path, its shape as recorded, whether it was called without a prediction
    shape: tuple[int, ...] | None = None
    root: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Flags):
            return NotImplemented
        wild = self.training is None or other.training is None
        mode = wild or (self.training, self.status) == (other.training, other.status)
        return mode and (self.batch == other.batch or self.batch is None or other.batch is None)

    def __hash__(self) -> int:
        return 0


def _is_static(value: Any) -> bool:
    """Whether an attribute is a setting (a number, a name, a function, a tuple of these) and not part of the tree."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return len(value) > 0 and all(map(_is_static, value))
    if value is None or isinstance(value, jax.Array | np.ndarray | np.generic):
        return False
    return jax.tree_util.all_leaves([value]) and value.__hash__ is not None


class Module:
    """A mutable class that is a pytree: attributes with arrays are children, plain settings are structure."""

    dynamic_fields: ClassVar[tuple[str, ...]] = ()  # always children, whatever they hold
    state_fields: ClassVar[tuple[str, ...]] = ()  # children of kind StateParam
    transient_fields: ClassVar[tuple[str, ...]] = ()  # children of kind TransientParam
    _pcx_flags: Flags = Flags()
    _pcx_children: frozenset[str] = frozenset()
    _pcx_bound: "Binding | None" = None
    _pcx_live: Any = None  # made inside a transform (the state of its trace): may hold what is traced there

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, functools.partial(_unflatten, cls), _flatten)


def _names(module: Module) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    items = [(k, v) for k, v in vars(module).items() if not k.startswith("_pcx_")]
    always = module._pcx_children.union(module.dynamic_fields)
    children = tuple(k for k, v in items if k in always or not _is_static(v))
    return children, tuple((k, v) for k, v in items if k not in children)


def _flatten(module: Module) -> tuple[list[Any], Any]:
    children, static = _names(module)
    return [getattr(module, name) for name in children], (children, static, module._pcx_flags)


def _flatten_with_keys(module: Module) -> tuple[list[tuple[Any, Any]], Any]:
    values, structure = _flatten(module)
    return [(jax.tree_util.GetAttrKey(n), v) for n, v in zip(structure[0], values, strict=True)], structure


def _unflatten(cls: type, structure: Any, values: Sequence[Any]) -> Any:
    children, static, flags = structure
    module: Any = object.__new__(cls)
    vars(module).update(static)
    vars(module).update(zip(children, values, strict=True))
    vars(module).update(_pcx_flags=flags, _pcx_children=frozenset(children))
    if isinstance(module, EnergyModule) and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
        for part in objects(values, Module):
            part._pcx_live = get_opaque_trace_state()
    return module


def path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named(tree: Any, kind: type | tuple[type, ...]) -> Nodes[Any]:
    """The objects of a class in a tree, by dotted path; it does not look inside them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
    return Nodes({path_name(path): node for path, node in pairs if isinstance(node, kind)})


def objects(tree: Any, kind: type[Part]) -> list[Part]:
    """All objects of a class in a tree, itself and nested ones included."""
    found: list[Part] = []

    def note(node: Any) -> bool:
        if isinstance(node, kind):
            found.append(node)
        return False

    jax.tree.leaves(tree, is_leaf=note)
    return found


def set_flags(tree: Any, **changes: Any) -> None:
    """Change the flags of all modules of a tree, in place."""
    for module in objects(tree, Module):
        module._pcx_flags = dataclasses.replace(module._pcx_flags, **changes)


running: list[Any] = []  # the bindings of the runs that are being executed


class Vode(Module):
    """A vectorised node: the values ``h`` of one group of neurons, and the energy that ties them to a prediction.

    Arguments: ``shape`` of one sample (optional, then the first call sets it); ``energy``, a function
    ``(h, u) -> scalar``; ``init``, how the node starts when nothing else is said (see `pcx.initialise`).
    Called without a prediction, the node is a root: a latent variable with no energy, or, with a ``mean`` (an array;
    ``learn_mean`` makes it a weight), with its energy around that mean.
    """

    dynamic_fields: ClassVar[tuple[str, ...]] = ("mean",)

    def __init__(
        self,
        shape: Sequence[int] | int | None = None,
        energy: Callable[[Any, Any], Any] = squared_error,
        init: Init | None = None,
        *,
        mean: Any = None,
        learn_mean: bool = False,
    ):
        declared = (shape,) if isinstance(shape, int) else shape
        self.declared_shape = None if declared is None else tuple(declared)
        self.energy_function = energy
        self.init = init
        self.mean = None if mean is None else jnp.asarray(mean)
        self.learn_mean = learn_mean

    def __repr__(self) -> str:
        energy = getattr(self.energy_function, "__name__", repr(self.energy_function))
        return f"Vode(shape={self.shape}, energy={energy})"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one sample: as declared, or as recorded at the first call."""
        prior = None if self.mean is None else self.mean.shape
        return self.declared_shape if self.declared_shape is not None else prior or self._pcx_flags.shape

    @property
    def label(self) -> str:
        return f"node {self._pcx_flags.name!r}" if self._pcx_flags.name else "a vode"

    def prior(self, dtype: Any) -> jax.Array:
        """The prediction of a root: its mean, or zero."""
        if self.shape is None:
            raise ModelError(f"{self.label} is called without a prediction; give it a shape: Vode(shape).")
        return jnp.zeros(self.shape, dtype) if self.mean is None else jnp.broadcast_to(self.mean, self.shape).astype(dtype)

    def check_shape(self, shape: tuple[int, ...], what: str) -> None:
        if self.shape is not None and tuple(shape) != self.shape:
            raise ModelError(f"{self.label} has shape {self.shape}, but its {what} has shape {tuple(shape)}.")

    def __call__(self, u: Any = None) -> jax.Array:
        """Give the node its prediction and get its value; outside a run, a node is its prediction."""
        if self._pcx_bound is not None:
            return self._pcx_bound.visit(self, u)
        if running and self._pcx_flags.name is None:
            raise ModelError("a vode is called that is no part of the model; make it in __init__, as an attribute.")
        return self.prior(jnp.result_type(float)) if u is None else jnp.asarray(u)


class _NameNodes(type):
    """Tells every vode its path when a model has been built, so that messages can name it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__call__(*args, **kwargs)
        for name, vode in named(model, Vode).items():
            vode._pcx_flags = dataclasses.replace(vode._pcx_flags, name=name)
        return model


class EnergyModule(Module, metaclass=_NameNodes):
    """The base class of models: layers and vodes as attributes, and a ``__call__`` for one sample."""


def one_hot(value: Any, shape: tuple[int, ...] | None, dtype: Any, label: str) -> jax.Array:
    """An integer class for a node with one axis as a one-hot vector; other values in the node's dtype."""
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.integer) and shape is not None and len(shape) == 1 and value.ndim < 1:
        check_labels(value, shape[0], label)
        return jax.nn.one_hot(value, shape[0], dtype=dtype)
    return value.astype(dtype)


def check_labels(labels: Any, classes: int, label: str) -> None:
    if isinstance(labels, jax.core.Tracer) or np.size(labels) == 0:
        return
    low, high = (int(extreme(np.asarray(labels))) for extreme in (np.min, np.max))
    if low < 0 or high >= classes:
        raise ModelError(f"{label} has {classes} classes, but got labels from {low} to {high}; classes count from 0.")


def set_training(model: M, training: bool) -> M:
    """Switch dropout and batch statistics on or off, in place; layers of Equinox that know ``inference`` included."""
    set_flags(model, training=training)
    if any(hasattr(layer, "inference") for layer in objects(model, eqx.Module)):
        return assign(model, eqx.nn.inference_mode(model, value=not training))
    return model


def assign(old: Any, new: Any) -> Any:
    """Write a tree into another of the same structure; mutable objects keep their identity."""
    if old is new:
        return old
    if isinstance(old, Module) and type(old) is type(new):
        private = ("_pcx_live", "_pcx_bound", "_pcx_call")
        fresh = {k: assign(vars(old).get(k), v) for k, v in vars(new).items() if k not in private}
        kept = {k: v for k, v in vars(old).items() if k in private}
        vars(old).clear()
        vars(old).update(fresh | kept)
        return old
    if isinstance(old, eqx.Module) and type(old) is type(new) and objects(old, Module):
        for field in dataclasses.fields(old):  # frozen, but it holds nodes, and those are tracked
            object.__setattr__(old, field.name, assign(getattr(old, field.name), getattr(new, field.name)))
        return old
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old[:] = [assign(o, n) for o, n in zip(old, new, strict=True)]
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        fresh = {k: assign(old.get(k), v) for k, v in new.items()}
        old.clear()
        old.update(fresh)
        return old
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        return tuple(assign(o, n) for o, n in zip(old, new, strict=True))
    return new


class _Other:
    """Kind: not a parameter (a setting that ended up in a list, an integer array)."""


def kinds(tree: Any) -> list[type]:
    """The kind of every leaf of a tree, in the order of its leaves."""

    def inside(part: Any) -> list[type]:
        result = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
            field = getattr(path[0], "name", None) if path else None
            if isinstance(part, Vode) and field in ("h", "cache"):
                result.append(VodeParam if field == "h" else VodeParam.Cache)
            elif isinstance(part, Vode) and field == "mean" and not part.learn_mean:
                result.append(StateParam)
            elif isinstance(part, Module) and field in part.state_fields:
                result.append(TransientParam if field in part.transient_fields else StateParam)
            else:
                result.append(LayerParam if eqx.is_inexact_array(leaf) else _Other)
        return result

    def is_part(node: Any) -> bool:
        return isinstance(node, Vode) or (isinstance(node, Module) and bool(node.state_fields))

    return [kind for part in jax.tree.leaves(tree, is_leaf=is_part) for kind in inside(part)]


def partition(model: M, kind: type | Sequence[type] = LayerParam) -> tuple[M, M]:
    """Split a model into the arrays of a kind and the rest, each with None in place of the other."""
    wanted = (kind,) if isinstance(kind, type) else tuple(kind)
    leaves, structure = jax.tree.flatten(model)
    chosen = [k in wanted and eqx.is_inexact_array(leaf) for k, leaf in zip(kinds(model), leaves, strict=True)]
    return eqx.partition(model, jax.tree.unflatten(structure, chosen))


def weight_dtype(model: Any) -> Any:
    """The dtype of values and errors: that of the weights."""
    dtypes = [leaf.dtype for leaf, k in zip(jax.tree.leaves(model), kinds(model), strict=True) if k is LayerParam]
    return jnp.result_type(*dtypes) if dtypes else jnp.result_type(float)


def copy(model: M) -> M:
    """New objects all the way down, the same arrays."""
    return jax.tree.map(lambda leaf: leaf, model)


def refuse_shared(model: Any) -> None:
    """One object at two paths would be two after the first update: refuse it, both paths named."""
    seen: dict[int, Any] = {}
    twice: list[Any] = []

    def note(node: Any) -> bool:
        holds = isinstance(node, Vode | jax.Array) or (
            isinstance(node, eqx.Module | Module) and any(map(eqx.is_array, jax.tree.leaves(node)))
        )
        if holds and not isinstance(node, jax.core.Tracer) and not twice:
            if id(node) in seen:
                twice.append(node)
            seen[id(node)] = node
        return isinstance(node, Vode)  # not inside: the value and the prediction of a node may be one array

    jax.tree.leaves(model, is_leaf=note)
    if twice:
        pairs, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=lambda node: node is twice[0])
        paths = [path_name(path) for path, node in pairs if node is twice[0]]
        advice = "Make one for each." if isinstance(twice[0], Vode) else "Keep it in one attribute and call it twice."
        where = f"one {type(twice[0]).__name__} is at {' and '.join(paths)}"
        raise ModelError(f"{where}; an update would make them two. {advice}")


@dataclasses.dataclass
class Visit:
    """What a node saw: its prediction, the value it gave back, and whether it was called without a prediction."""

    prediction: jax.Array
    value: jax.Array
    root: bool


class Binding:
    """The rules of one run (what value a node takes, given its prediction), and what the nodes saw."""

    def __init__(self, rules: Mapping[str, Rule], dtype: Any, key: Key):
        self.rules, self.dtype, self.key = rules, dtype, key
        self.trace = get_opaque_trace_state()
        self.visits: dict[str, Visit] = {}
        self.overwritten: list[tuple[str, tuple[str, ...]]] = []
        self.state: dict[str, Any] = {}

    def visit(self, vode: Vode, u: Any) -> jax.Array:
        name = vode._pcx_flags.name or ""
        if name in self.visits:
            raise ModelError(f"node {name!r} is called twice; a node holds one value: use one vode per call.")
        if get_opaque_trace_state() != self.trace:
            raise ModelError(
                f"node {name!r} is called inside a scan, cond, checkpoint, jit or another transform of the model; "
                "call nodes in the model's own __call__, transform only layers."
            )
        root = u is None
        u = vode.prior(self.dtype) if root else jnp.asarray(u, self.dtype)
        vode.check_shape(u.shape, "prediction")
        value = self.rules[name](u) if name in self.rules else u
        if value.shape != u.shape:
            given = f"the given value has shape {value.shape} per sample"
            raise ModelError(f"node {name!r} has shape {u.shape} per sample, but {given}.")
        value = value.astype(self.dtype)
        self.visits[name] = Visit(u, value, root)
        return value

    def overwrite(self, vode: Vode, what: str, value: Any) -> None:
        name = vode._pcx_flags.name or ""
        if name not in self.visits:
            raise ModelError(f"node {name!r} is set before it is called; give its value as an observation instead.")
        visit = self.visits[name]
        if what == "u":
            visit.prediction = jnp.asarray(value, self.dtype)
            return
        if next(reversed(self.visits)) != name:
            self.overwritten.append((name, tuple(self.visits)))
        value = one_hot(value, visit.prediction.shape, self.dtype, vode.label)
        if value.shape != visit.prediction.shape:
            raise ModelError(f"{vode.label} has shape {visit.prediction.shape}, but its new value has shape {value.shape}.")
        visit.value = value

    def layer_key(self, name: str) -> Key:
        """The key of one layer: the same for every step of one inference."""
        if self.key is None:
            raise ModelError(f"layer {name!r} is random in training; pass key=.")
        return jax.random.fold_in(self.key, zlib.crc32(name.encode()))


def bind(model: M, rules: Mapping[str, Rule], training: bool = False, key: Key = None) -> tuple[M, Binding]:
    """A fresh copy of a model whose nodes follow rules and report to the binding."""
    known = named(model, Vode)
    for name in rules:
        if name not in known:
            raise ModelError(f"the model has no node {name!r}; near: {near(name, known)}.")
    bound = set_training(copy(model), training)
    set_flags(bound, status=None)
    binding = Binding(rules, weight_dtype(model), key)
    if isinstance(bound, Module):
        bound._pcx_bound = binding
    for name, part in named(bound, (Vode, Layer)).items():
        part._pcx_bound, part._pcx_flags = binding, dataclasses.replace(part._pcx_flags, name=name)
    return bound, binding


class Layer(Module):
    """A layer that takes part in a run: it draws random numbers (``binding.layer_key``) or keeps statistics."""

    @property
    def label(self) -> str:
        return self._pcx_flags.name or type(self).__name__


def abstract(tree: Any) -> Any:
    """Shapes and dtypes in place of arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "shape") else a, tree)


def _constant(value: Any) -> Rule:
    return lambda u: value


def dependencies(model: Any, inputs: tuple[Any, ...]) -> Nodes[frozenset[str]]:
    """Who predicts whom, for one sample: for every node, in the order of calls, what its prediction reads: nodes, `INPUT`."""
    arrays, rest = eqx.partition(abstract((model, inputs)), lambda leaf: hasattr(leaf, "shape"))

    def predictions(values: Mapping[str, Any], arrays: Any) -> Nodes[jax.Array]:
        model, inputs = eqx.combine(arrays, rest)
        bound, binding = bind(model, {name: _constant(value) for name, value in values.items()})
        bound(*inputs)
        return Nodes({name: visit.prediction for name, visit in binding.visits.items()})

    values = jax.eval_shape(lambda arrays: predictions({}, arrays), arrays)
    program = jax.make_jaxpr(predictions)(values, arrays).jaxpr
    labels = [frozenset([name]) for name in values] + [frozenset[str]()] * len(jax.tree.leaves(arrays[0]))
    labels += [frozenset([INPUT])] * len(jax.tree.leaves(arrays[1]))
    return Nodes(zip(values, reach(program, labels), strict=True))


def failure(model: Any, inputs: Any, after: str | None, error: Exception) -> ModelError:
    """What to say when a model's own code fails."""
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in jax.tree.leaves(inputs) if hasattr(leaf, "shape")) or "nothing"
    place = f"after node {after!r}" if after else "before its first node"
    return ModelError(
        f"{type(model).__name__} failed {place}, on one sample with input of shape {shapes}: {' '.join(map(str, error.args))} "
        "(A model is written for one sample; what pcx.run and pxf.vmap take has a batch axis in front.)"
    )


def check_overwritten(binding: Binding, model: Any, inputs: tuple[Any, ...]) -> None:
    """A node whose value a model sets after the call must not have been read in between."""
    parents = dependencies(model, inputs) if binding.overwritten else Nodes()
    for name, before in binding.overwritten:
        refuse_readers(name, [child for child in before if name in parents[child]])


def refuse_readers(name: str, readers: Sequence[str]) -> None:
    if readers:
        raise ModelError(
            f"node {name!r} cannot be set any more: {', '.join(readers)} already read its value in this call. "
            "Set it before the model is called, or after the cache is cleared."
        )


def weights(model: M) -> M:
    """The weights of a model (None elsewhere): what a weight optimiser is initialised with."""
    chosen = partition(model)[0]
    set_flags(chosen, training=None, status=None, batch=None)
    return chosen
