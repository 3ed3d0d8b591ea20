"""The paper's own surface, part three: masks, steps, optimisers that hold their state, and checkpoints."""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
import optax
import safetensors
import safetensors.numpy

from pcx._model import (
    LayerParam,
    Module,
    StateParam,
    TransientParam,
    Vode,
    VodeParam,
    assign,
    kinds,
    objects,
    path_name,
    refuse_shared,
    set_flags,
)
from pcx._types import ModelError
from pcx.shortcuts.zeros import refuse_nan

M = TypeVar("M")
Kind = type | types.UnionType | tuple[Any, ...] | Callable[[Any], bool]


class Mask:
    """Chooses parameters by kind.

    ``Mask(LayerParam)(model)`` is the model with only these arrays (an argument for `Optim`);
    ``Mask(VodeParam, [None, 0])`` gives the value 0 to the arrays of that kind and None to the others.
    """

    def __init__(self, kind: Kind, values: Sequence[Any] = (False, True)):
        if len(values) != 2:
            raise ModelError(
                f"a mask has two values, for arrays that are not of the kind and for those that are; got {values}."
            )
        self.kind, self.values, self.is_plain = kind, tuple(values), tuple(values) == (False, True)

    @property
    def name(self) -> str:
        return getattr(self.kind, "__name__", str(self.kind))

    def matches(self, kind: Any) -> bool:
        """Whether a parameter of this kind is chosen."""
        if isinstance(self.kind, type | types.UnionType | tuple):
            return isinstance(kind, type) and issubclass(kind, self.kind)
        return bool(self.kind(kind))

    def value(self, kind: Any) -> Any:
        return self.values[self.matches(kind)]

    def __call__(self, tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        found = kinds(tree)
        if not self.is_plain:
            return jax.tree.unflatten(structure, [self.value(kind) for kind in found])
        chosen = [leaf if self.matches(kind) else None for leaf, kind in zip(leaves, found, strict=True)]
        selection = jax.tree.unflatten(structure, chosen)
        set_flags(selection, training=None, status=None, batch=None)
        return Selection(self, selection)


@jax.tree_util.register_pytree_node_class
class Selection:
    """The chosen arrays of a model (``tree``, None elsewhere), and the mask that chose them."""

    def __init__(self, mask: Mask, tree: Any):
        self.mask, self.tree = mask, tree

    def tree_flatten(self) -> tuple[tuple[Any], Mask]:
        return (self.tree,), self.mask

    @classmethod
    def tree_unflatten(cls, mask: Mask, children: tuple[Any]) -> "Selection":
        return cls(mask, children[0])


@contextlib.contextmanager
def step(model: Any, status: str | None = None, *, clear_params: Any = None) -> Iterator[Any]:
    """Run a block with the model in a status; afterwards, also after an exception, restore it and clear parameters of a kind.

    With the status INIT every node takes a new value, so the old ones are forgotten first (an exception brings them back).
    """
    if status not in (None, "init"):
        raise ModelError(f"there is no status {status!r}; near: 'init' (pxc.STATUS.INIT), or None.")
    before = [(module, module._pcx_flags.status) for module in objects(model, Module)]
    values = [(vode, vode.h) for vode in _vodes(model)]
    set_flags(model, status=status)
    if status == "init":
        clear(model, VodeParam)
    try:
        yield model
    except BaseException:
        for vode, value in values:
            vode.h = value
        raise
    finally:
        for module, old in before:
            module._pcx_flags = dataclasses.replace(module._pcx_flags, status=old)
        if clear_params is not None:
            clear(model, clear_params)


def _vodes(model: Any) -> list[Any]:
    return list(objects(model, Vode))


def clear(model: Any, kind: Kind) -> None:
    """Forget the values or caches of all nodes."""
    mask = Mask(kind)
    for vode in _vodes(model):
        if mask.matches(VodeParam.Cache):
            vode.cache = {"u": None}
            vode._pcx_call = None
        if mask.matches(VodeParam):
            vode.h = None


class Optim(Module):
    """An optax optimiser that holds its state and updates a model in place.

    ``parameters`` says which arrays it moves: ``Mask(kind)(model)``, or a tree with None elsewhere. The state is built at
    the first step; ``init(model)`` builds it anew, ``clear()`` forgets it.
    """

    dynamic_fields = ("state",)
    state_fields = ("state",)

    def __init__(self, optimiser: optax.GradientTransformation, parameters: Any = None):
        self.init_function, self.update_function = optimiser.init, optimiser.update
        self.mask = parameters.mask if isinstance(parameters, Selection) else None
        tree = parameters if self.mask is None else None
        self.names = None if tree is None else frozenset(_named_leaves(tree))
        self.state: Any = None

    def parameters(self, model: Any) -> dict[str, Any]:
        """The arrays of the model that this optimiser moves, by name."""
        leaves = _named_leaves(model)
        chosen = {
            name: leaf
            for (name, leaf), kind in zip(leaves.items(), kinds(model), strict=True)
            if eqx.is_inexact_array(leaf)
            and (self.mask.matches(kind) if self.mask else name in self.names if self.names is not None else kind is LayerParam)
        }
        if not chosen:
            what = self.mask.name if self.mask else "array"
            raise ModelError(f"the model has no {what} to optimise; for nodes, initialise their values first.")
        return chosen

    def init(self, model: Any) -> None:
        """Build the state anew, for a model, or for what a mask selects of it."""
        parameters = self.parameters(model.tree if isinstance(model, Selection) else model)
        refuse_nan(optax.GradientTransformation(self.init_function, self.update_function), parameters, "given")
        self.state = self.init_function(parameters)

    def clear(self) -> None:
        self.state = None

    def step(self, model: M, gradients: Any, scale_by_batch_size: bool = False) -> M:
        """Move the parameters by one update; returns the model, which is also changed in place where it can be.

        ``scale_by_batch_size`` undoes the mean over the batch: gradients are multiplied by the number of samples of the
        energy they come from, which is 1 where the model ran without a batch.
        """
        refuse_shared(model)
        parameters = self.parameters(model)
        slopes = _named_leaves(gradients)
        missing = [name for name in parameters if name not in slopes]
        if missing:
            raise ModelError(f"there is no gradient for {missing[0]}; compute it with the mask of this optimiser.")
        batch = _batch_of(gradients) if scale_by_batch_size else 1
        slopes = {name: slopes[name] * batch if batch != 1 else slopes[name] for name in parameters}
        if self.state is None:
            self.init(model)
        try:
            updates, state = self.update_function(slopes, self.state, parameters)
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"the optimiser's state does not fit these parameters ({error}); after another batch size or model call "
                "optim.clear()."
            ) from error
        new = optax.apply_updates(parameters, updates)
        self.state = state
        leaves, structure = jax.tree.flatten(model)
        names = _named_leaves(model)
        return assign(model, jax.tree.unflatten(structure, [new.get(n, leaf) for n, leaf in zip(names, leaves, strict=True)]))


def _named_leaves(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _batch_of(gradients: Any) -> int:
    sizes = [m._pcx_flags.batch for m in objects(gradients, Module) if m._pcx_flags.batch is not None]
    return sizes[0] if sizes else 1


def _saved(model: Any, kind: Kind) -> dict[str, Any]:
    mask = Mask(kind)
    pairs = zip(_named_leaves(model).items(), kinds(model), strict=True)
    return {name: leaf for (name, leaf), k in pairs if mask.matches(k) and k is not TransientParam and eqx.is_array(leaf)}


def checksum(arrays: dict[str, np.ndarray]) -> str:
    """Of names, dtypes, shapes and contents."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].dtype}:{arrays[name].shape};".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def save_params(model: Any, path: str | Path, kind: Kind = (LayerParam, StateParam)) -> None:
    """Write the weights and layer statistics (or another kind) to one safetensors file, atomically, with a checksum."""
    arrays = {name: np.asarray(leaf) for name, leaf in _saved(model, kind).items()}
    metadata = {"pcx": json.dumps({"model": type(model).__name__, "sha256": checksum(arrays)})}
    atomic_write(Path(path), safetensors.numpy.save(arrays, metadata))


def atomic_write(target: Path, content: bytes) -> None:
    """Write a file so that, whatever happens, either the old or the new one is there, and whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # a temporary file is for its owner only
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load_params(model: M, path: str | Path, kind: Kind = (LayerParam, StateParam)) -> M:
    """Read a file of `save_params` into a model of the same structure, in place where it can be; returns the model.

    A name, shape or dtype that differs, or a file that was changed, is refused, and the model is left as it was.
    """
    target = Path(path)
    if not target.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {target}; save one with pcx.utils.save_params(model, path).")
    try:
        with safetensors.safe_open(target, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {}).get("pcx", "{}"))
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, json.JSONDecodeError) as error:
        raise ModelError(f"{target} is not a readable safetensors file ({error}); it may be cut off: save it again.") from error
    if "sha256" in metadata and metadata["sha256"] != checksum(found):
        raise ModelError(
            f"{target} is damaged: its checksum is {checksum(found)}, but {metadata['sha256']} was saved. Use another copy."
        )
    wanted = _saved(model, kind)
    problems = [f"{name} is in the model but not in the file" for name in wanted if name not in found]
    problems += [f"{name} is in the file but not in the model" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        mine, theirs = ((tuple(a.shape), str(a.dtype)) for a in (wanted[name], found[name]))
        if mine != theirs:
            problems.append(f"{name} is {mine[1]}{list(mine[0])} in the model and {theirs[1]}{list(theirs[0])} in the file")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ModelError(
            f"{target} is not a checkpoint of this {type(model).__name__}: {'; '.join(sorted(problems)[:5])}{more}."
        )
    leaves, structure = jax.tree.flatten(model)
    new = [jax.numpy.asarray(found[n]) if n in wanted else leaf for n, leaf in zip(_named_leaves(model), leaves, strict=True)]
    return assign(model, jax.tree.unflatten(structure, new))
