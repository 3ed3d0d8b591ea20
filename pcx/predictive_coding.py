"""The paper's own surface, part one: models that remember (`Vode`, `EnergyModule`), kinds of parameters, statuses.

In the core a node has no memory: values go in, predictions come out. The listings of the paper's Appendix A work on a
model that holds its values instead. The classes here are the core's, with that memory added; the core itself never
looks at it, so the same model serves both ways. See `pcx.functional` for the transforms and `pcx.utils` for optimisers.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float

from pcx import _energies as energies
from pcx import _model
from pcx._init import Init, as_init
from pcx._model import (
    LayerParam,
    StateParam,
    VodeParam,
    abstract,
    dependencies,
    failure,
    named,
    one_hot,
    refuse_readers,
    running,
    set_training,
)
from pcx._types import ModelError
from pcx.nn import next_key

M = TypeVar("M")

__all__ = ["STATUS", "EnergyModule", "LayerParam", "StateParam", "Vode", "VodeParam", "energies"]


class STATUS(enum.StrEnum):
    """What a call of a model does: with ``INIT``, every node takes its first value; without a status, values stay."""

    INIT = "init"


class Vode(_model.Vode):
    __doc__ = (
        (_model.Vode.__doc__ or "")
        + """
    Outside the core it remembers: ``h``, its value, and the prediction of the last call, in ``cache``.

    >>> Vode((10,))
    Vode(shape=(10,), energy=squared_error)
    """
    )

    dynamic_fields = ("h", "cache", "mean")
    _pcx_call: "_Call | None" = None

    def __init__(
        self,
        shape: Sequence[int] | int | None = None,
        energy: Callable[[Any, Any], Any] = energies.squared_error,
        init: Init | None = None,
        *,
        mean: Any = None,
        learn_mean: bool = False,
    ):
        super().__init__(shape, energy, init, mean=mean, learn_mean=learn_mean)
        self.h: Any = None
        self.cache: dict[str, Any] = {"u": None}

    def __call__(self, u: Any = None) -> Array:
        """Give the node its prediction and get its value: ``set("u", u)``, then ``get("h")``."""
        if self._pcx_bound is not None or (running and self._pcx_flags.name is None):
            return super().__call__(u)
        if _current:
            _current[-1].visit(self)
        self._note(root=u is None)
        u = self.prior(jnp.result_type(float)) if u is None else jnp.asarray(u)
        self.set("u", u)
        if not self._may_hold(u):
            return u  # a plain JAX transform around a model from outside: a forward pass that leaves no trace
        if self._pcx_flags.status != STATUS.INIT:
            return u if self.h is None else self.h
        self.h = jnp.asarray(as_init(self.init)(u, next_key() if self.init else None), u.dtype)
        return self.h

    def get(self, name: str) -> Any:
        """``"h"``, the value (the prediction where there is none), or ``"u"``, the prediction of the last call."""
        self._check_name(name)
        return self.h if name == "h" and self.h is not None else self.cache.get("u")

    def set(self, name: str, value: Any) -> None:
        """Store ``"h"`` or ``"u"``. An integer label becomes one-hot; a shape that does not fit is refused."""
        self._check_name(name)
        if self._pcx_bound is not None:
            return self._pcx_bound.overwrite(self, name, value)
        value = one_hot(value, self.shape, self._dtype, self.label) if name == "h" else jnp.asarray(value)
        self.check_shape(value.shape, "prediction" if name == "u" else "new value")
        if name == "h" and self._pcx_call is not None:
            self._pcx_call.refuse_if_read(self)
        if name == "h" and not self._may_hold(value):
            raise ModelError(
                f"{self.label} of a model from outside would keep a traced value; "
                "pass the model by keyword through a transform of pcx.functional."
            )
        self._note(shape=tuple(value.shape))
        if name == "h":
            self.h = value
        elif self._may_hold(value):
            self.cache = {"u": value}
            self._pcx_call = _current[-1] if _current else None
        return None

    def energy(self) -> Float[Array, ""]:
        """The energy of the last call."""
        if self.cache.get("u") is None:
            raise ModelError(f"{self.label} has no prediction; call the model before asking for its energy.")
        function = energies.zero if self._pcx_flags.root and self.mean is None else self.energy_function
        return jnp.asarray(function(self.get("h"), self.cache["u"]))

    @property
    def _dtype(self) -> Any:
        known = self.cache.get("u") if self.cache.get("u") is not None else self.h
        return jnp.result_type(float) if known is None else known.dtype

    def _check_name(self, name: str) -> None:
        if name not in ("h", "u"):
            raise ModelError(f"{self.label} has no {name!r}; it has 'h' and 'u'.")

    def _note(self, **changes: Any) -> None:
        self._pcx_flags = dataclasses.replace(self._pcx_flags, **changes)

    def _may_hold(self, value: Any) -> bool:
        """A model from outside a transform must not keep what is traced inside it."""
        return not isinstance(value, jax.core.Tracer) or self._pcx_live == get_opaque_trace_state()


class _Call:
    """One call of a model: with inputs of which shapes, in which trace, and which vodes it has reached."""

    def __init__(self, model: "EnergyModule", inputs: tuple[Any, ...]):
        self.model, self.inputs, self.trace = model, abstract(inputs), get_opaque_trace_state()
        self.visited: list[Vode] = []
        self.before = [(v, v.h, v.cache, v._pcx_flags, v._pcx_call) for v in named(model, Vode).values()]

    def visit(self, vode: Vode) -> None:
        if any(vode is other for other in self.visited):
            raise ModelError(f"{vode.label} is called twice; a node holds one value: use one vode per call.")
        if get_opaque_trace_state() != self.trace:
            raise ModelError(
                f"{vode.label} is called inside a scan, cond, checkpoint, jit or another transform of the model; "
                "call nodes in the model's own __call__, transform only layers."
            )
        self.visited.append(vode)

    def refuse_if_read(self, vode: Vode) -> None:
        """A node that was called last has not been read by another; for others, ask the graph."""
        name = next((n for n, v in named(self.model, Vode).items() if v is vode), None)
        if self.visited[-1] is not vode and name is not None:
            parents = dependencies(self.model, self.inputs)
            refuse_readers(name, [child for child, its in parents.items() if name in its])

    def undo(self) -> None:
        """Leave the nodes as they were before a call that failed."""
        for vode, h, cache, flags, call in self.before:
            vode.h, vode.cache, vode._pcx_flags, vode._pcx_call = h, cache, flags, call


_current: list[_Call] = []


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's ``__call__``, with its nodes counted, its failures explained and undone."""

    @functools.wraps(function)
    def call(self: "EnergyModule", *args: Any, **kwargs: Any) -> Any:
        if _current or self._pcx_bound is not None:
            return function(self, *args, **kwargs)
        watch = _Call(self, args)
        _current.append(watch)
        try:
            return function(self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            watch.undo()
            if isinstance(error, ModelError):
                raise
            last = watch.visited[-1]._pcx_flags.name if watch.visited else None
            raise failure(self, args, last, error) from error
        except BaseException:
            watch.undo()
            raise
        finally:
            _current.pop()

    return call


class EnergyModule(_model.EnergyModule):
    """The base class of models: layers and vodes as attributes, and a ``__call__`` for one sample.

    ``energy()`` is the free energy (Eq. 1) of the last call; ``train()`` and ``eval()`` switch dropout and batch statistics.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in vars(cls):
            cls.__call__ = _watched(cls.__call__)  # type: ignore[method-assign]

    def train(self: M) -> M:
        return set_training(self, True)

    def eval(self: M) -> M:
        return set_training(self, False)

    @property
    def is_training(self) -> bool:
        return bool(self._pcx_flags.training)

    def energy(self) -> Float[Array, ""]:
        return sum((vode.energy() for vode in named(self, Vode).values()), start=jnp.zeros(()))
