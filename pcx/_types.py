"""The vocabulary: what goes into the core and what comes out of it.

* **node** – one group of neurons of the model (a `Vode`), named by its dotted path, such as ``vodes.3``.
* **value** ``h`` – the state of a node; **prediction** ``u`` – what its parents say it should be; **error** – ``h - u``.
* **observed** – nodes (or parts of nodes) whose value is given by data and does not move.

Everything that exists once per node lives in a `Nodes` mapping, in the order in which the model calls its nodes.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

T = TypeVar("T")
INPUT = ""  # stands for the input among names of nodes
Key: TypeAlias = Any  # a typed key (`jax.random.key`) or a raw `jax.random.PRNGKey`


class ModelError(ValueError):
    """A model, a node or an argument is not usable; the message says which one, what came and what to do."""


def near(name: str, names: Iterable[str]) -> str:
    """The known names nearest to an unknown one, as the end of an error message."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
    return ", ".join(close) if close else "none"


class _Roots(frozenset[str]):
    """A set that does not take part in the comparison of trees."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, frozenset)

    def __hash__(self) -> int:
        return 0


@jax.tree_util.register_pytree_with_keys_class
class Nodes(Mapping[str, T]):
    """An immutable mapping from node names to anything; a pytree that keeps its order.

    A plain dict leaves `jax.jit` sorted by name (0, 1, 10, 11, 2); this one comes out as it went in.

    >>> Nodes({"vodes.2": 1, "vodes.10": 2}) | {"vodes.2": 3}
    Nodes({'vodes.2': 3, 'vodes.10': 2})
    """

    __slots__ = ("_items", "roots")

    def __init__(self, items: Mapping[str, T] | Iterable[tuple[str, T]] = (), roots: Iterable[str] = ()):
        self._items = dict(items)
        self.roots = _Roots(roots)  # the nodes that were called without a prediction

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            raise KeyError(f"no node {name!r}; known: {near(str(name), self._items)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Nodes({self._items!r})"

    def __or__(self, other: Mapping[str, T]) -> "Nodes[T]":
        return Nodes({**self._items, **other}, self.roots)

    def only(self, names: Iterable[str]) -> "Nodes[T]":
        """The entries with these names, in the order of this mapping."""
        wanted = set(names)
        return Nodes({name: item for name, item in self._items.items() if name in wanted}, self.roots)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, T]], Any]:
        return [(jax.tree_util.DictKey(n), v) for n, v in self._items.items()], (tuple(self._items), self.roots)

    @classmethod
    def tree_unflatten(cls, structure: Any, items: Iterable[T]) -> "Nodes[T]":
        names, roots = structure
        return cls(zip(names, items, strict=True), roots)


class Observed(NamedTuple):
    """Part of a node is data: where ``mask`` is True the node is fixed to ``value``, elsewhere it is free.

    ``value`` has a batch axis; ``mask`` has the node's shape, with or without one.
    """

    value: Any
    mask: Any


Observations: TypeAlias = Mapping[str, Any]  # name -> array (the whole node is fixed) or Observed (part of it)
Rule: TypeAlias = Callable[[Array], Array]  # what a node's value is, given the prediction of one sample


class Displaced(NamedTuple):
    """Values as a start and the way from it, which is known to its own precision: ``values = start + by``.

    ``gap`` is how far the start of a node was from its prediction there, where that is known; None where it was the prediction.
    """

    start: "Nodes[Float[Array, 'batch ...']]"
    by: "Nodes[Float[Array, 'batch ...']]"
    gap: "Nodes[Float[Array, 'batch ...'] | None]" = Nodes()

    @property
    def values(self) -> "Nodes[Float[Array, 'batch ...']]":
        return Nodes({name: value + self.by[name] for name, value in self.start.items()}, self.start.roots)


class Run(NamedTuple):
    """One execution of a model: all values and predictions, what the model returned, and new layer statistics."""

    values: Nodes[Float[Array, "batch ..."]]
    predictions: Nodes[Float[Array, "batch ..."]]
    output: Any
    state: dict[str, Any]


class Inferred(eqx.Module):
    """Where inference ended.

    ``reached`` names the nodes whose energy may differ from its minimum (all of them, unless the wave front of
    `infer` is still on its way): the others have a weight gradient of exactly zero.
    ``steps`` counts the steps of every sample; the gradient norms (per sample, over all free nodes) exist where a
    tolerance was given; ``history`` stacks what ``record`` returned before the first step and after each one.
    ``displaced`` says the values more exactly, where inference kept track of the way from the start.
    """

    values: Nodes[Float[Array, "batch ..."]]
    forward: Run
    optimiser_state: Any
    steps: Int[Array, " batch"]
    gradient_start: Float[Array, " batch"] | None = None
    gradient_end: Float[Array, " batch"] | None = None
    history: Any = None
    displaced: Displaced | None = None
    reached: frozenset[str] = eqx.field(static=True, default=frozenset())


class Trained(eqx.Module):
    """One training step: the new model and optimiser state, the inference before it, and the energies it learned from."""

    model: Any
    optimiser_state: Any
    inferred: Inferred
    energies: Nodes[Float[Array, " batch"]]


class Shortcuts(NamedTuple):
    """Which exact shortcuts `infer` may take. Each is used only where its conditions hold (`docs/design`).

    ``anchor`` is about precision, not work: below float64, products and values are kept as differences from the start.
    ``kernel``, on a GPU, makes one kernel of a step of stacked layers, and one of the error of a pooled node, and does not keep
    momentum that the last two values of a node say as well (`pcx.shortcuts.momentum`); it has to be asked for, and has no
    derivative. ``half`` computes large anchored products, where ``jax.default_matmul_precision`` is
    "tensorfloat32", with as many bits in half the bytes (`pcx.shortcuts.half`); these have a first derivative only.
    """

    wave: bool = True
    constant: bool = True
    stack: bool = True
    anchor: bool = True
    kernel: bool = False
    half: bool = False


ALL_SHORTCUTS = Shortcuts()
NO_SHORTCUTS = Shortcuts(False, False, False, False)
