"""The paper's own surface, part two: transforms that track the objects passed to them by keyword.

One rule for all of them: the keyword objects are taken apart into arrays, a pure function runs on fresh objects, and
only when it succeeds are the new arrays written into the caller's objects. An exception inside leaves them untouched.
Positional arguments are ordinary pytrees, as in JAX: a model among them can be called, but not changed in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

from pcx._model import EnergyModule, LayerParam, Module, VodeParam, assign, kinds, objects, path_name, refuse_shared, set_flags
from pcx._types import ModelError
from pcx.shortcuts.channels import channels_last
from pcx.utils import Mask

Function = Callable[..., Any]


@jax.tree_util.register_pytree_node_class
class _Static:
    """Rides through a transform as structure: the part of an object that is not an array."""

    def __init__(self, value: Any):
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], "_Static"]:
        return (), self

    @classmethod
    def tree_unflatten(cls, static: "_Static", children: tuple[()]) -> "_Static":
        return static

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _apart(tree: Any) -> tuple[list[Any], _Static]:
    """Arrays, and everything else in a form that can be compared and hashed."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [_is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
    others = tuple(None if yes else leaf for leaf, yes in zip(leaves, is_array, strict=True))
    return arrays, _Static((others, tuple(is_array), structure))


def _together(arrays: Sequence[Any], static: _Static) -> Any:
    """Fresh objects from their parts; being fresh, they may hold traced values."""
    others, is_array, structure = static.value
    source = iter(arrays)
    tree = jax.tree.unflatten(structure, [next(source) if yes else o for o, yes in zip(others, is_array, strict=True)])
    for module in objects(tree, Module):
        module._pcx_live = get_opaque_trace_state()
    return tree


def _array_kinds(tree: Any) -> list[Any]:
    """The kind of every array of a tree, in order."""
    return [kind for leaf, kind in zip(jax.tree.leaves(tree), kinds(tree), strict=True) if _is_array(leaf)]


def _refuse(tracked: dict[str, Any]) -> None:
    """What no transform can track."""
    for item in tracked.values():
        if objects(item, EnergyModule):
            refuse_shared(item)


def _write_back(tracked: dict[str, Any], new: dict[str, Any]) -> None:
    for name, item in tracked.items():
        for module in objects(new[name], Module):
            module._pcx_live = None
        assign(item, new[name])


def _call(function: Function, args: Sequence[Any], tracked: dict[str, Any]) -> Any:
    """Call the user's function, and refuse what it did to a model among its positional arguments."""
    models = [(i, arg, _identities(arg)) for i, arg in enumerate(args) if objects(arg, EnergyModule)]
    result = function(*args, **tracked)
    for i, arg, before in models:
        after, gone = _identities(arg), object()
        changed = [name for name in before | after if before.get(name, gone) is not after.get(name, gone)]
        if changed:
            raise ModelError(
                f"positional argument {i} is a model that was changed in place ({changed[0]}), and the change would be lost; "
                "pass the model by keyword (model=model), then it is tracked."
            )
    return result


def _identities(tree: Any) -> dict[str, Any]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {path_name(p): leaf for (p, leaf), k in zip(pairs, kinds(tree), strict=True) if k is not VodeParam.Cache}
    modes = {(m._pcx_flags.training, m._pcx_flags.status) for m in objects(tree, Module)}
    return leaves | {f"mode {mode}": True for mode in modes}


def jit(function: Function | None = None, *, static_argnums: int | Sequence[int] = ()) -> Any:
    """`jax.jit` for functions of tracked objects; also as a decorator with arguments. On a CPU, with `pcx.channels_last`."""
    if function is None:
        return functools.partial(jit, static_argnums=static_argnums)
    fixed = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def compiled(static: _Static, rest: _Static, args: Sequence[Any], arrays: Sequence[Any]) -> Any:
        given = dict(static.value)

        @channels_last
        def pure(args: Sequence[Any], arrays: Sequence[Any]) -> Any:
            tracked, remaining = _together(arrays, rest), iter(args)
            everything = [given[i] if i in given else next(remaining) for i in range(len(given) + len(args))]
            result = _call(function, everything, tracked)
            return _apart(result), _apart(tracked)

        return pure(args, arrays)

    @functools.wraps(function)
    def call(*args: Any, **tracked: Any) -> Any:
        _refuse(tracked)
        chosen = {i % len(args) for i in fixed} if args else set()
        static = _Static(tuple((i, args[i]) for i in sorted(chosen)))
        arrays, rest = _apart(tracked)
        result, new = compiled(static, rest, [a for i, a in enumerate(args) if i not in chosen], arrays)
        _write_back(tracked, _together(*new))
        return _together(*result)

    return call


def value_and_grad(mask: Mask, *, has_aux: bool = False) -> Callable[[Function], Function]:
    """The value of a scalar function and its gradient for the masked arrays of its keyword objects.

    Returns ``value, {"model": gradient, …}``; a gradient has its object's structure, with None where the mask is False.
    """

    def transform(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **tracked: Any) -> Any:
            _refuse(tracked)
            args = jax.tree.map(lambda leaf: leaf, args)  # copies of models: a change in place must not reach the caller's
            arrays, rest = _apart(tracked)
            wanted = [mask.matches(k) and eqx.is_inexact_array(a) for k, a in zip(_array_kinds(tracked), arrays, strict=True)]
            if not any(wanted):
                raise ModelError(
                    f"there is no {mask.name} to differentiate in {', '.join(tracked) or 'the keyword arguments'}; "
                    "pass the model by keyword, and give nodes their values first: pxu.step(model, pxc.STATUS.INIT)."
                )

            def scalar(chosen: list[Any], others: list[Any]) -> Any:
                sources = {True: iter(chosen), False: iter(others)}
                fresh = _together([next(sources[yes]) for yes in wanted], rest)
                set_flags(fresh, batch=1)
                learning = [m for m in objects(fresh, Module) if mask.matches(LayerParam) and m._pcx_flags.status is None]
                _set_status(learning, "learn")
                result = _call(function, args, fresh)
                _set_status(learning, None)
                value, aux = result if has_aux else (result, None)
                return value, (aux, _apart(fresh))

            chosen, others = ([a for a, yes in zip(arrays, wanted, strict=True) if yes is side] for side in (True, False))
            (value, (aux, new)), slopes = jax.value_and_grad(scalar, has_aux=True)(chosen, others)
            source, positions = iter(slopes), iter(wanted)
            _, is_array, structure = rest.value
            parts = [next(source) if yes and next(positions) else None for yes in is_array]
            gradient = jax.tree.unflatten(structure, parts)
            updated = _together(*new)
            modes = {name: [m._pcx_flags for m in objects(item, Module)] for name, item in updated.items()}
            for name, item in gradient.items():
                for module, flags in zip(objects(item, Module), modes[name], strict=True):
                    module._pcx_flags = flags
            _write_back(tracked, updated)
            return ((value, aux) if has_aux else value), gradient

        return call

    return transform


def _set_status(modules: Sequence[Module], status: str | None) -> None:
    for module in modules:
        module._pcx_flags = dataclasses.replace(module._pcx_flags, status=status)


def grad(mask: Mask, *, has_aux: bool = False) -> Callable[[Function], Function]:
    """Like `value_and_grad`, without the value."""

    def transform(function: Function) -> Function:
        both = value_and_grad(mask, has_aux=has_aux)(function)

        @functools.wraps(function)
        def call(*args: Any, **tracked: Any) -> Any:
            value, gradient = both(*args, **tracked)
            return (gradient, value[1]) if has_aux else gradient

        return call

    return transform


def vmap(
    mask: Mask | None = None, *, in_axes: Any = 0, out_axes: Any = 0, axis_name: str | None = None
) -> Callable[[Function], Function]:
    """Map over a batch. ``in_axes`` is for positional arguments; ``mask``, such as ``Mask(VodeParam, [None, 0])``, gives the
    axis of each array of the keyword objects, before and after. Without a mask they are shared by all samples, and what
    nodes get inside is stacked.
    """

    def axis_of(kind: Any, new: bool = False) -> int | None:
        if mask is None:
            return 0 if new and kind in (VodeParam, VodeParam.Cache) else None
        return mask.value(kind) if kind is not VodeParam.Cache or mask.matches(kind) else mask.value(VodeParam)

    def transform(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **tracked: Any) -> Any:
            _refuse(tracked)
            arrays, rest = _apart(tracked)
            axes = [axis_of(k) for k in _array_kinds(tracked)]
            per_argument = tuple(in_axes) if isinstance(in_axes, list | tuple) else (in_axes,) * len(args)
            size = _axis_size(args, per_argument, arrays, axes)

            def one(args: Sequence[Any], arrays: Sequence[Any]) -> Any:
                fresh = _together(arrays, rest)
                set_flags(fresh, batch=size)
                result = _call(function, args, fresh)
                new, static = _apart(fresh)
                given = {id(array) for array in arrays}
                new_axes = tuple(axis_of(k, id(a) not in given) for k, a in zip(_array_kinds(fresh), new, strict=True))
                groups = {str(a): [v for v, axis in zip(new, new_axes, strict=True) if axis == a] for a in set(new_axes)}
                places = _Static((static, new_axes))
                return result, {str(a): groups.get(str(a), []) for a in possible}, places

            possible = {axis_of(k, True) for k in (VodeParam, VodeParam.Cache, object)} | set(axes)
            outs = (out_axes, {str(a): a for a in possible}, None)
            result, groups, places = jax.vmap(
                one, in_axes=(per_argument, axes), out_axes=outs, axis_name=axis_name, axis_size=size
            )(tuple(args), arrays)
            static, new_axes = places.value
            sources = {key: iter(group) for key, group in groups.items()}
            _write_back(tracked, _together([next(sources[str(a)]) for a in new_axes], static))
            return result

        return call

    return transform


def _axis_size(args: Sequence[Any], in_axes: Sequence[Any], arrays: Sequence[Any], axes: Sequence[Any]) -> int:
    mapped = [(leaf, axis) for arg, axis in zip(args, in_axes, strict=True) for leaf in jax.tree.leaves(arg)]
    sizes = [leaf.shape[axis] for leaf, axis in [*mapped, *zip(arrays, axes, strict=True)] if isinstance(axis, int)]
    if not sizes:
        raise ModelError("nothing is mapped: give in_axes for a positional argument or a mask with an axis.")
    if len(set(sizes)) > 1:
        raise ModelError(
            f"the mapped axes have different sizes ({', '.join(map(str, sizes))}); initialise the model for this batch."
        )
    return sizes[0]


def _check_same(before: _Static, after: _Static, old: Sequence[Any], new: Sequence[Any], what: str) -> None:
    shapes = [[(a.shape, a.dtype) for a in arrays] for arrays in (old, new)]
    if before.value[1:] != after.value[1:] or shapes[0] != shapes[1]:
        raise ModelError(
            f"the {what} changes which arrays its keyword objects hold; initialise values and optimisers before it, and clear "
            "caches inside it: pxu.step(model, clear_params=pxc.VodeParam.Cache)."
        )


def scan(function: Function, length: int | None = None) -> Function:
    """``scan(f, length)(carry, xs, model=…)`` with ``f(carry, x, *, model) -> carry, y``; objects are carried along."""

    @functools.wraps(function)
    def call(carry: Any = None, xs: Any = None, **tracked: Any) -> Any:
        _refuse(tracked)
        arrays, rest = _apart(tracked)

        def body(state: Any, x: Any) -> Any:
            carry, arrays = state
            fresh = _together(arrays, rest)
            carry, y = _call(function, (carry, x), fresh)
            new, static = _apart(fresh)
            _check_same(rest, static, arrays, new, "scanned function")
            return (carry, new), y

        (carry, new), ys = jax.lax.scan(body, (carry, arrays), xs, length=length)
        _write_back(tracked, _together(new, rest))
        return carry, ys

    return call


def while_loop(condition: Function, body: Function) -> Function:
    """``while_loop(condition, body)(carry, model=…)``; both get the carry and the keyword objects."""

    @functools.wraps(body)
    def call(carry: Any = None, **tracked: Any) -> Any:
        _refuse(tracked)
        arrays, rest = _apart(tracked)

        def again(state: Any) -> Any:
            return condition(state[0], **_together(state[1], rest))

        def once(state: Any) -> Any:
            fresh = _together(state[1], rest)
            carry = _call(body, (state[0],), fresh)
            new, static = _apart(fresh)
            _check_same(rest, static, state[1], new, "body of the loop")
            return carry, new

        carry, new = jax.lax.while_loop(again, once, (carry, arrays))
        _write_back(tracked, _together(new, rest))
        return carry

    return call


def cond(if_true: Function, if_false: Function) -> Function:
    """``cond(if_true, if_false)(predicate, *operands, model=…)``."""

    @functools.wraps(if_true)
    def call(predicate: Any, *operands: Any, **tracked: Any) -> Any:
        _refuse(tracked)
        arrays, rest = _apart(tracked)

        def branch(function: Function) -> Function:
            def run(arrays: Sequence[Any], *operands: Any) -> Any:
                fresh = _together(arrays, rest)
                result = _call(function, operands, fresh)
                new, static = _apart(fresh)
                _check_same(rest, static, arrays, new, "branch")
                return result, new

            return run

        result, new = jax.lax.cond(predicate, branch(if_true), branch(if_false), arrays, *operands)
        _write_back(tracked, _together(new, rest))
        return result

    return call
