"""Layers: Equinox's own, made without a key in hand, plus what it lacks.

A layer takes its random numbers from ``key=``, or else from a stream that `seed` starts and `keys` replaces for a block:

>>> seed(0)
>>> Linear(3, 2).weight.shape
(2, 3)
>>> with keys(jax.random.key(1)):
...     layer = Linear(3, 2)
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float

from pcx._model import Layer
from pcx._types import Key, ModelError
from pcx.shortcuts.pooling import INCREASING, pool_name
from pcx.shortcuts.windows import first_largest, pcx_max_2x2, windows


class _Stream:
    """A new key at every call. Between calls it holds a number and a way to the first key, so that nothing traced stays."""

    def __init__(self, key: Callable[[], Key]):
        self.key, self.count = key, 0

    def __call__(self) -> Key:
        self.count += 1
        return jax.random.fold_in(self.key(), self.count)


_streams: list[_Stream] = []
_default: list[_Stream] = []


def seed(number: int) -> None:
    """Start the stream that layers draw from when they are built without a key."""
    _default[:] = [_Stream(lambda: jax.random.key(number))]


@contextlib.contextmanager
def keys(key: Key) -> Iterator[None]:
    """Inside this block, layers draw from this key; it may be traced, so building a model can be vmapped over keys."""
    _streams.append(_Stream(lambda: key))
    try:
        yield
    finally:
        _streams.pop()


def next_key(key: Key = None) -> Key:
    """A key as given, or the next one of the stream."""
    if key is not None:
        return key
    if _streams:
        return _streams[-1]()
    if not _default:
        seed(0)
    return _default[0]()


class Linear(eqx.nn.Linear):
    """``W x + b``, written so that a batch of samples stays one row per sample: nothing is transposed on the way."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, dtype: Any = None, key: Key = None):
        super().__init__(in_features, out_features, use_bias=bias, dtype=dtype, key=next_key(key))

    @jax.named_scope("pcx.nn.Linear")
    def __call__(self, x: Array, *, key: Key = None) -> Array:
        if x.shape != (self.in_features,):
            raise ValueError(f"a layer with {self.in_features} inputs got an input of shape {x.shape}")
        y = jax.lax.dot_general(x, self.weight, (((0,), (1,)), ((), ())))
        return y if self.bias is None else y + self.bias

    def of_all(self, image: Array) -> Array:
        """``layer(image.reshape(-1))``: the layer of all numbers of an image (channels, height, width), or of a vector.

        Compilers keep the channels of an image last, so that flattening it copies it, at every step of inference. Here the
        weights are turned instead, once, unless they are the larger array.
        """
        if image.ndim != 3 or image.size != self.in_features or len(self.weight) > image.size:
            return self(image.reshape(-1))
        weight = self.weight.reshape(-1, *image.shape).transpose(0, 2, 3, 1)
        y = jax.lax.dot_general(image.transpose(1, 2, 0), weight, (((0, 1, 2), (1, 2, 3)), ((), ())))
        return y if self.bias is None else y + self.bias


class Conv2d(eqx.nn.Conv2d):
    """A convolution of an image (channels, height, width)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
                 padding: Any = 0, bias: bool = True, *, dtype: Any = None, key: Key = None):  # fmt: skip
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, use_bias=bias, dtype=dtype, key=next_key(key))


class ConvTranspose2d(eqx.nn.ConvTranspose2d):
    """The transpose of a convolution."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
                 padding: Any = 0, output_padding: int | Sequence[int] = 0, bias: bool = True, *, dtype: Any = None,
                 key: Key = None):  # fmt: skip
        super().__init__(in_channels, out_channels, kernel_size, stride, output_padding, padding, use_bias=bias, dtype=dtype,
                         key=next_key(key))  # fmt: skip


class LayerNorm(eqx.nn.LayerNorm):
    """Normalises one sample."""


class AvgPool2d(eqx.Module):
    """The mean of each window; the stride is the window unless given. (Equinox's keeps its functions as leaves.)"""

    kernel_size: Any = eqx.field(static=True)
    stride: Any = eqx.field(static=True)
    padding: Any = eqx.field(static=True)

    def __init__(self, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None, padding: Any = 0):
        self.kernel_size, self.stride, self.padding = _pool_settings(kernel_size, stride, padding)

    def __call__(self, x: Float[Array, "channels height width"], *, key: Key = None) -> Float[Array, "channels _ _"]:
        return eqx.nn.AvgPool2d(self.kernel_size, self.stride, self.padding)(x)


def _pool_settings(kernel_size: Any, stride: Any, padding: Any) -> tuple[Any, Any, Any]:
    """Settings that can be hashed, with the stride filled in."""
    kernel, step = (
        (n, n) if isinstance(n, int) else tuple(n) for n in (kernel_size, kernel_size if stride is None else stride)
    )
    return kernel, step, padding if isinstance(padding, int | str) else tuple(map(_hashable, padding))


def _hashable(item: Any) -> Any:
    return tuple(item) if isinstance(item, list | tuple) else item


@functools.cache
def _named_pool(activation: Any) -> Any:
    def pool(x: Array) -> Array:
        return activation(largest_2x2(x, None))

    pool.__name__ = pool_name(activation)
    return jax.jit(pool)


def max_pool_2x2(x: Float[Array, "*channels height width"]) -> Float[Array, "*channels half_height half_width"]:
    """The maximum of each 2×2 window, by selects: equal to a window reduction, also in where it sends the gradient of a tie.

    The gradient of `lax.reduce_window` is a select-and-scatter, a slow operation on accelerators. Here it is one
    elementwise pass: each pixel takes its window's gradient or zero.
    """
    return largest_2x2(x, None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest_2x2(
    x: Float[Array, "*channels height width"], by: Callable[[Array], Array] | None
) -> Float[Array, "*channels half_height half_width"]:
    """Of each 2×2 window the pixel at which the elementwise function ``by`` is largest, the first one of several.

    ``by(largest_2x2(x, by))`` is the maximum of ``by(x)`` with the same gradient, but the derivative of ``by`` is taken at
    one pixel in four.
    """
    return pcx_max_2x2(x) if by is None else first_largest(windows(x), by)[0]


@largest_2x2.defjvp
def _largest_2x2_jvp(by: Any, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    largest, place = first_largest(windows(primals[0]), by)
    corner = jnp.arange(4, dtype=jnp.int8).reshape(2, 1, 2)
    chosen = place[..., :, None, :, None] == corner
    return largest, jnp.sum(jnp.where(chosen, windows(tangents[0]), 0), axis=(-3, -1))


class MaxPool2d(eqx.Module):
    """The maximum of each window; the stride is the window unless given.

    A plain 2×2 window with stride 2 is done by `max_pool_2x2`; ``selects=False`` switches that off.
    """

    kernel_size: Any = eqx.field(static=True)
    stride: Any = eqx.field(static=True)
    padding: Any = eqx.field(static=True)
    selects: bool = eqx.field(static=True)

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: Any = 0,
        *,
        selects: bool = True,
    ):
        self.kernel_size, self.stride, self.padding = _pool_settings(kernel_size, stride, padding)
        self.selects = selects

    def __call__(self, x: Float[Array, "channels height width"], *, key: Key = None) -> Float[Array, "channels _ _"]:
        return self.of(x, None)

    def of(self, x: Float[Array, "channels height width"], activation: Any) -> Float[Array, "channels _ _"]:
        """``pool(activation(x))`` with less work in its gradient: the activation's derivative is taken at the maxima only."""
        apply = (lambda x: x) if activation is None else activation
        if self.selects and self.kernel_size == self.stride == (2, 2) and self.padding == 0:
            if activation in INCREASING:
                return _named_pool(activation)(x)
            return apply(largest_2x2(x, activation))
        return eqx.nn.MaxPool2d(self.kernel_size, self.stride, self.padding)(apply(x))


class BatchNorm(Layer):
    """Normalises each channel (the first axis of a sample) by its mean and variance over the batch.

    In training the statistics are taken in the forward pass, and the running ones are updated from it. During inference
    they are constants: recomputing them would let one sample's label move another sample's values. In the weight pass
    they are differentiated as batch statistics. ``statistics="batch"`` recomputes them in every step instead.
    ``momentum`` is the share of the new batch in the running statistics.
    """

    state_fields = ("running_mean", "running_variance", "batch_mean", "batch_variance", "held_mean", "held_variance")
    transient_fields = ("batch_mean", "batch_variance", "held_mean", "held_variance")

    def __init__(self, size: int, *, momentum: float = 0.1, epsilon: float = 1e-5, statistics: str = "forward",
                 axis_name: str = "batch", dtype: Any = None):  # fmt: skip
        if statistics not in ("forward", "batch"):
            raise ModelError(f"statistics is {statistics!r}; use 'forward' or 'batch'.")
        dtype = jnp.result_type(float) if dtype is None else dtype
        self.weight, self.bias = jnp.ones((size,), dtype), jnp.zeros((size,), dtype)
        self.running_mean, self.running_variance = jnp.zeros((size,), dtype), jnp.ones((size,), dtype)
        self.batch_mean: Any = None  # frozen by `pcx.freeze_state`
        self.batch_variance: Any = None
        self.held_mean: Any = None  # frozen by the last call with STATUS.INIT
        self.held_variance: Any = None
        self.momentum, self.epsilon, self.statistics, self.axis_name = momentum, epsilon, statistics, axis_name

    def __call__(self, x: Float[Array, "channels ..."]) -> Float[Array, "channels ..."]:
        if x.shape[0] != self.weight.shape[0]:
            raise ModelError(f"layer {self.label} has {self.weight.shape[0]} channels, but its input has shape {x.shape}.")
        mean, variance = self._statistics(x) if self._pcx_flags.training else (self.running_mean, self.running_variance)
        column = (-1,) + (1,) * (x.ndim - 1)
        scale = self.weight * jax.lax.rsqrt(variance + self.epsilon)
        return x * scale.reshape(column) + (self.bias - mean * scale).reshape(column)

    def _statistics(self, x: Array) -> tuple[Array, Array]:
        surface = self._pcx_bound is None
        mean, variance = (self.held_mean, self.held_variance) if surface else (self.batch_mean, self.batch_variance)
        if self.statistics == "forward" and mean is not None and self._pcx_flags.status not in ("init", "learn"):
            return mean, variance
        inside = tuple(range(1, x.ndim))
        try:
            mean = jax.lax.pmean(jnp.mean(x, axis=inside), self.axis_name)
        except NameError:
            raise ModelError(
                f"layer {self.label} is in training but sees no batch; use pcx.run, or pxf.vmap(axis_name={self.axis_name!r})."
            ) from None
        centred = x - mean.reshape((-1,) + (1,) * len(inside))
        variance = jax.lax.pmean(jnp.mean(jnp.square(centred), axis=inside), self.axis_name)
        self._keep(mean, variance, jax.lax.psum(x.size // x.shape[0], self.axis_name))
        return mean, variance

    def _keep(self, mean: Array, variance: Array, count: Any) -> None:
        unbiased = variance * (count / max(count - 1, 1))
        running = {
            "running_mean": (1 - self.momentum) * self.running_mean + self.momentum * mean,
            "running_variance": (1 - self.momentum) * self.running_variance + self.momentum * unbiased,
        }
        if self._pcx_bound is not None:
            if self.label in self._pcx_bound.state:
                raise ModelError(f"layer {self.label} is called twice; its statistics belong to one place: use two layers.")
            self._pcx_bound.state[self.label] = {**running, "batch_mean": mean, "batch_variance": variance}
        elif self._pcx_flags.status == "init" and self._pcx_live == get_opaque_trace_state():
            vars(self).update(running, held_mean=mean, held_variance=variance)


class Dropout(Layer):
    """In training, sets each unit to zero with probability ``p`` and scales the others by ``1 / (1 - p)``.

    `pcx.run` and `pcx.infer` give it its key, the same one for all steps of one inference; elsewhere pass ``key=`` or
    use `keys`.
    """

    def __init__(self, p: float = 0.5):
        if not 0 <= p < 1:
            raise ModelError(f"the dropout probability is {p}; it is at least 0 and below 1.")
        self.p = p

    def __call__(self, x: Float[Array, "..."], *, key: Key = None) -> Float[Array, "..."]:
        if not self._pcx_flags.training or self.p == 0:
            return x
        if key is None and self._pcx_bound is not None:
            key = self._pcx_bound.layer_key(self.label)
        if key is None:
            if not _streams:
                raise ModelError(f"layer {self.label} is random in training; pass key= or use pcx.nn.keys(key).")
            key = next_key()
        return jnp.where(jax.random.bernoulli(key, 1 - self.p, x.shape), x / (1 - self.p), 0).astype(x.dtype)
