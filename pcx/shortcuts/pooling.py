"""The error of a node behind 2×2 pooling as one kernel, on a GPU.

Such a node is predicted by ``act(max(z))``, the largest of four pixels of a product. Its error needs the largest pixel, and
what is sent back goes to that pixel alone; a compiler makes three kernels of it, which write and read the largest pixels, their
places and the error in between. Here a block reads the four pixels of some windows, as what was known and what has moved, and
writes the error of the node, and of the pixels. The arithmetic is that of `pcx.nn.MaxPool2d` and of `differences`.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jaxtyping import Array, Float

from pcx._energies import squared_error
from pcx._model import partition
from pcx._types import Displaced, Nodes
from pcx.shortcuts import half
from pcx.shortcuts.plan import Program
from pcx.shortcuts.products import Anchor, along, interpret, low, precision
from pcx.shortcuts.windows import larger_moved, largest, order, pick

# Of these the largest value is that of the largest argument, and two arguments with the same value have the same derivative.
INCREASING = (jax.nn.relu, jax.nn.leaky_relu)
# Of a block, which is one window: channels, at most, and warps; by bytes of a number, the fastest of those tried.
BLOCKS = {2: (128, 1), 4: (256, 4)}
INTERPRET = False  # run the kernel as plain JAX, anywhere: to test it
CORNERS = [*itertools.product((0, 1), (0, 1))]
Scales = tuple[Array, Array] | None  # powers of two for each sample: of a product in float16, and of the errors sent back


def pool_name(activation: Any) -> str:
    """What programs call 2×2 pooling (`pcx.nn.MaxPool2d`) with one of these, so that it can be found there."""
    return f"pcx_max_pool_2x2_{activation.__name__}"


ACTIVATIONS = {pool_name(activation): activation for activation in INCREASING}


class PooledErrors:
    """Of an inference problem (`pcx._infer`) the nodes whose errors a kernel takes, and their energies."""

    def __init__(self, task: Any):
        self.task, self.nodes = task, dict[str, PooledError]()
        if task.shortcuts.kernel and task.anchor is not None and _possible():
            scaled = {name for name, precision in task.objective.precision.items() if precision is not None}
            plain = {name for name, energy in task.energies.items() if energy is squared_error and name not in scaled}
            self.nodes = PooledError.among(task.program, plain.intersection(task.free) - task.fixed.keys())

    def __call__(self, free: Nodes[Array], names: Iterable[str], moved: Iterable[str]) -> dict[str, Array]:
        """The energies of those of the named nodes that are predicted from one that has moved."""
        here, task = [name for name in names if name in self.nodes and self.nodes[name].parent in set(moved)], self.task
        return {name: self.nodes[name](task.anchor, Displaced(task.start.values, free, task.gap)) for name in here}


def learned(
    model: Any, settled: Any, x: Any, factors: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Array], Any]:
    """Of a training step (`pcx.train_step`) the energies of nodes whose errors a kernel takes, and their gradient for weights.

    ``settled`` is where inference ended, ``factors`` are the energies to learn from, ``options`` those of inference. As in
    `pcx.weight_gradient`, the gradient is that of the mean over the batch.
    """
    weights, rest = partition(model)
    kernel, none = getattr(options.get("shortcuts"), "kernel", False), jax.tree.map(jnp.zeros_like, weights)
    if not kernel or not isinstance(settled, Displaced) or not _possible():
        return {}, none
    program = Program(model, settled.values, x, options.get("key"), options.get("training", False))
    plain = {name for name, factor in factors.items() if factor.energy is squared_error and factor.precision is None}
    nodes = PooledError.among(program, plain & settled.gap.keys())
    if not nodes:
        return {}, none
    anchor, dtype = program.anchor(settled.start), options.get("state_dtype")
    by = settled.by if dtype is None else jax.tree.map(lambda way: way.astype(dtype), settled.by)  # as inference had it

    def energies(weights: Any) -> dict[str, Array]:
        arrays = eqx.filter(eqx.combine(weights, rest), eqx.is_array)
        return {name: node(anchor, settled._replace(by=by), arrays) for name, node in nodes.items()}

    found, pull = jax.vjp(energies, weights)
    (gradient,) = pull(jax.tree.map(jnp.ones_like, found))
    return found, jax.tree.map(lambda g: g / len(next(iter(found.values()))), gradient)


class PooledError:
    """A node that is predicted by a convolution of one other, a bias, an activation and 2×2 pooling."""

    def __init__(self, program: Program, name: str, parent: str, product: int, bias: Any, activation: Callable[[Array], Array]):
        self.program, self.name, self.parent = program, name, parent
        self.product, self.bias, self.activation = product, bias, activation

    @staticmethod
    def among(program: Program, names: Iterable[str]) -> "dict[str, PooledError]":
        """Those of some nodes for which there is a kernel."""
        found = {name: PooledError.of(program, name) for name in program.pieces if name in set(names)}
        return {name: node for name, node in found.items() if node is not None}

    @staticmethod
    def of(program: Program, name: str) -> "PooledError | None":
        """The kernel for a node, if its prediction is such a program, else None."""
        piece, output, parents = program.pieces[name], program.outputs[name], program.parents[name]
        places = [i for i, eqn in enumerate(piece) if eqn.primitive.name == "conv_general_dilated"]
        activation = ACTIVATIONS.get(piece[-1].params.get("name", "")) if piece else None
        if len(places) != 1 or len(parents) != 1 or activation is None or piece[-1].outvars != [output]:
            return None
        product, pooled = piece[places[0]], piece[-1].invars[0]
        shape, inside = (cast(Any, var.aval).shape for var in (product.outvars[0], pooled))
        weights = program.jaxpr.invars[len(program.inputs) :][: len(jax.tree.leaves(program.arrays))]
        if len(shape) != 4 or inside != shape or product.invars[1] not in weights:
            return None
        bias = _added(piece[places[0] + 1 : -1], product.outvars[0], pooled, shape[1])
        fits = not any(size % 2 for size in shape[2:]) and not shape[1] % 16
        if not fits or bias not in weights:
            return None
        return PooledError(program, name, next(iter(parents)), places[0], bias, activation)

    def __call__(self, anchor: Anchor, values: Displaced, arrays: Any = None) -> Float[Array, " batch"]:
        """The energy of every sample, with the derivative of the kernel; ``arrays`` are the model's, if not its own."""
        program, piece, free = self.program, self.program.pieces[self.name], values.by
        start, convolution = values.start[self.parent], piece[self.product]
        place, moved = (convolution.outvars[0],), free[self.parent].astype(start.dtype)
        known = program._known({self.parent: start + moved}, arrays)
        away = {program.inputs[self.parent]: moved}
        base, gap, weights = anchor.known[place][2], values.gap[self.name], anchor.known[place][1][1]

        def product(eqn: JaxprEqn, operands: list[Any], away: list[Any], here: Any) -> tuple[Array, Any]:
            if here != place:
                return anchor.product(eqn, operands, away, here)
            if not isinstance(weights, half.Half):
                return anchor.moving(eqn, operands, away, here), None
            found = anchor.halves(eqn, operands, away, here)
            error = _error_scale(found.scale, free[self.name], gap)
            return half.with_derivative(eqn, found.array, operands[0], operands[1], weights, error), (found.scale, error)

        (moving,), (scales,) = interpret(program.jaxpr, piece[: self.product + 1], known, convolution.outvars, product, away)
        if precision() == "bfloat16":  # both products are in bfloat16 as they come
            base, moving = low(base), low(moving)
        return _energy(self.activation, moving, free[self.name], base, gap, known[self.bias].reshape(-1), scales)


def _error_scale(scale: Array, by: Array, gap: Array | None) -> Array:
    """The power of two for errors: of a displacement, a gap, and a prediction that moves by no more than the product."""
    bound = half.largest(jax.lax.stop_gradient(by)).astype(scale.dtype) + half.BOUND / scale
    return half.power(bound if gap is None else bound + half.largest(gap))


def _added(eqns: list[JaxprEqn], product: Any, result: Any, channels: int) -> Any:
    """The array with a number for each channel that some equations add to a product, if they do nothing else, else None."""
    same, source, found = {product}, dict[Any, Any](), list[Any]()
    for eqn in eqns:
        if not eqn.invars or len(eqn.outvars) != 1 or any(isinstance(atom, Literal) for atom in eqn.invars):
            return None
        name, (first, *rest), (out,) = eqn.primitive.name, eqn.invars, eqn.outvars
        shapes = [cast(Any, atom.aval).shape for atom in (first, out)]
        if name in ("reshape", "squeeze") and first in same:
            same.add(out)
        elif name == "broadcast_in_dim" and shapes == [(channels, 1, 1), (1, channels, 1, 1)]:
            source[out] = first
        elif name == "add" and (first in same) != (rest[0] in same):
            found.append(source.get(rest[0] if first in same else first))
            same.add(out)
        else:
            return None
    return found[0] if len(found) == 1 and result in same else None


def _possible() -> bool:
    """Whether there is a GPU, and what compiles kernels for it."""
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError:
        return INTERPRET
    return INTERPRET or jax.default_backend() == "gpu"


@functools.cache
def works(dtype: Any) -> bool:
    """Whether there is a GPU where a kernel, for moving products in this dtype, computes what numpy does: tried once."""
    if not _possible():
        return False
    try:
        away = _away(dtype)
    except Exception as error:  # whatever a driver or a compiler says
        warnings.warn(f"no kernels for pooling are used, as they fail here: {str(error).splitlines()[0]}", stacklevel=2)
        return False
    if not away <= 1:
        warnings.warn("no kernels for pooling are used, as their numbers are wrong here; please report this.", stacklevel=2)
    return away <= 1


def _away(dtype: Any) -> float:
    """How far a launch is from numpy, in units of what rounding explains."""
    rng, slope, halved, channels = np.random.default_rng(0), 0.01, dtype == jnp.float16, 2 * BLOCKS[4][0]
    small, large = (2, channels, 3, 4), (2, channels, 6, 8)
    moving, base, by = (rng.normal(size=size).astype(dtype) for size in (large, large, small))
    bias, scales = rng.normal(size=channels).astype(np.float32), np.ones((2, 2, 1, 1, 1), np.float32)
    if halved:  # the product alone is; powers of two
        base, by = (rng.normal(size=array.shape).astype(np.float32) for array in (base, by))
        scales = np.array([8, 2, 4, 16], np.float32).reshape(scales.shape)
    given = (moving, by, base, None, bias, (jnp.asarray(scales[0]), jnp.asarray(scales[1])) if halved else None)
    found = jax.jit(lambda *given: _launch(jax.nn.leaky_relu, *given))(*given)

    def pixels(array: Any) -> np.ndarray:
        """The pixels of each window, last."""
        windows = np.asarray(array, np.float32).reshape(2, channels, 3, 2, 4, 2)
        return windows.transpose(0, 1, 2, 4, 3, 5).reshape(*small, 4)

    def act(z: np.ndarray) -> np.ndarray:
        return np.where(z >= 0, z, slope * z)

    way, offset = pixels(moving) / scales[0][..., None], bias[:, None, None, None]
    z, before = pixels(base) + way + offset, pixels(base) + offset  # the kernel's order: which pixel is larger may depend on it
    error = by.astype(np.float32) - (act(np.max(z, axis=-1)) - act(np.max(before, axis=-1)))
    chosen = np.arange(4) == np.argmax(z, axis=-1)[..., None]
    sent = np.where(chosen, -error[..., None] * np.where(z >= 0, 1, slope), 0) * scales[1][..., None]
    pairs = ((np.asarray(found[0], np.float32), error), (pixels(found[1]), sent))
    eps = float(jnp.finfo(dtype).eps)
    return float(np.max([np.max(np.abs(mine - its) / (1e-5 + eps * np.abs(its))) for mine, its in pairs]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _energy(
    activation: Any, moving: Array, by: Array, base: Array, gap: Array | None, bias: Array, scales: Scales = None
) -> Float[Array, " batch"]:
    """``½ Σ (by - (act(max(base + moving)) - act(max(base)) - gap))²`` of every sample, with the bias in both products.

    With scales the product is in float16, multiplied by the first of each sample, and so is its gradient, by the second.
    """
    return _forward(activation, moving, by, base, gap, bias, scales)[0]


def _forward(activation: Any, moving: Array, by: Array, base: Array, gap: Array | None, bias: Array, scales: Scales) -> Any:
    error, pixels = _launch(activation, moving, by, base, gap, bias, scales)
    return 0.5 * jnp.sum(jnp.square(error.astype(bias.dtype)), axis=(1, 2, 3)), (error, pixels, base, gap, bias, scales)


def _backward(activation: Any, kept: Any, cotangent: Array) -> Any:
    error, pixels, base, gap, bias, scales = kept
    scale = cotangent.reshape(-1, 1, 1, 1)
    moving = scale.astype(pixels.dtype) * pixels
    wide = moving.astype(bias.dtype) if scales is None else half.Half(moving, scales[1]).wide(bias.dtype)
    none = jax.tree.map(jnp.zeros_like, (base, gap, scales))
    return moving, scale.astype(error.dtype) * error, *none[:2], jnp.sum(wide, axis=(0, 2, 3)), none[2]


_energy.defvjp(_forward, _backward)


def _parameters(warps: int) -> Any:
    if INTERPRET:
        return None
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=1)


@functools.partial(jax.jit, static_argnums=0)  # traced and written out once, however many steps and nodes take it
def _launch(
    activation: Any, moving: Array, by: Array, base: Array, gap: Array | None, bias: Array, scales: Scales = None
) -> tuple[Array, Array]:
    """The error of the node, and the gradient of its energy for the product, which has four pixels for each of the node's."""
    from jax.experimental import pallas as pl

    (samples, channels, height, width), dtype = by.shape, bias.dtype

    def windows(pixels: Array) -> Array:
        return pixels.transpose(0, 2, 3, 1).reshape(samples * height, 2, width, 2, channels)

    def rows(values: Array) -> Array:
        return values.transpose(0, 2, 3, 1).reshape(samples * height, width, channels)

    gaps = [] if gap is None else [rows(gap)]
    powers = [] if scales is None else [(1 / scales[0]).reshape(-1), scales[1].reshape(-1)]
    most, warps = BLOCKS[base.dtype.itemsize if base.dtype.itemsize in BLOCKS else 4]
    size = min(most, channels & -channels)  # a power of two that divides their number
    parts = channels // size
    blocks = samples * height * width * parts

    def at(i: Any) -> tuple[Any, Any, Any]:
        """Row, column and part of the channels: from the end, of which a cache still has what the product wrote last."""
        i = blocks - 1 - i  # neighbours in memory are neighbours in time
        return i // (width * parts), i // parts % width, i % parts

    def whole_at(i: Any) -> tuple[Any, ...]:
        row, column, part = at(i)
        return row, 0, column, 0, part

    whole, part = pl.BlockSpec((1, 2, 1, 2, size), whole_at), pl.BlockSpec((1, 1, size), at)
    channel = pl.BlockSpec((size,), lambda i: (at(i)[2],))
    sample = pl.BlockSpec((1,), lambda i: (at(i)[0] // height,))

    def corners(ref: Any) -> list[Array]:
        return [ref[:, i, :, j, :].astype(dtype) for i, j in CORNERS]

    def kernel(*refs: Any) -> None:
        moving, base, by, bias, *more, error, pixels = refs
        gap, (back, scale) = more[: len(gaps)], more[len(gaps) :] or (None, None)
        moved, offset = corners(moving), bias[...]
        if back is not None:
            moved = [way * back[...] for way in moved]
        z = [known + way + offset for known, way in zip(corners(base), moved, strict=True)]
        before = [now - way for now, way in zip(z, moved, strict=True)]
        found = upper, left, left_below = order(*z)
        _, amount = along(activation, largest(*z), larger_moved(largest(*z), pick(found, *moved), largest(*before)))
        away = by[...].astype(dtype) - (amount - gap[0][...].astype(dtype) if gap else amount)
        (sent,) = jax.vjp(activation, largest(*z))[1](-away if scale is None else -away * scale[...])
        chosen = (upper & left, upper & ~left, ~upper & left_below, ~upper & ~left_below)
        for (i, j), here in zip(CORNERS, chosen, strict=True):
            pixels[:, i, :, j, :] = jnp.where(here, sent, 0).astype(pixels.dtype)
        error[...] = away.astype(error.dtype)

    found, sent = pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[whole, whole, part, channel, *(part for _ in gaps), *(sample for _ in powers)],
        out_specs=[part, whole],
        out_shape=[
            jax.ShapeDtypeStruct((samples * height, width, channels), by.dtype),
            jax.ShapeDtypeStruct((samples * height, 2, width, 2, channels), moving.dtype),
        ],
        interpret=INTERPRET,
        compiler_params=_parameters(warps),
    )(windows(moving), windows(base), rows(by), bias, *gaps, *powers)
    error = found.reshape(samples, height, width, channels).transpose(0, 3, 1, 2)
    return error, sent.reshape(samples, 2 * height, 2 * width, channels).transpose(0, 3, 1, 2)
