"""What a model is made of, so that a test can say that it is as it was, or that nothing traced is left in it."""

import dataclasses
import gc
from typing import Any

import jax
import numpy as np

from pcx._model import Module, objects


def snapshot(*trees: Any) -> list[Any]:
    """The identity of every leaf with its path, and the flags of every module."""
    result: list[Any] = []
    for tree in trees:
        pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
        result.append([(jax.tree_util.keystr(path), id(leaf)) for path, leaf in pairs])
        result.append([(id(module), dataclasses.astuple(module._pcx_flags)) for module in objects(tree, Module)])
    return result


def tracers(*roots: Any) -> list[Any]:
    """Everything traced that can be reached from these objects, hidden attributes included."""
    found, seen, todo = [], set(), list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type) or hasattr(item, "__code__") or type(item).__name__ == "module":
            continue
        seen.add(id(item))
        if isinstance(item, jax.core.Tracer):
            found.append(item)
        elif not isinstance(item, jax.Array | np.ndarray | str | int | float):
            todo.extend(gc.get_referents(item))
    return found


def bits(tree: Any) -> list[tuple[Any, ...]]:
    """Dtype, shape and bytes of every array."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array | np.ndarray)]
    return [(str(leaf.dtype), leaf.shape, leaf.tobytes()) for leaf in leaves]
