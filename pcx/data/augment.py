"""Augmentation of batches inside the compiled epoch: each function is a draw from a key and an exact application of it.

A batch is (count, channels, height, width). As in torchvision's pipelines, padding and rotation fill with 0, so geometry
comes before `normalise`: a filled pixel is black, not the mean.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from pcx._types import Key
from pcx.data._types import DataError

Batch: TypeAlias = Real[Array, "count channels height width"]
Images: TypeAlias = Batch | Real[np.ndarray, "count channels height width"]
Square: TypeAlias = Real[Array, "count channels {size} {size}"]  # size: the argument of the function
Statistics: TypeAlias = Sequence[float | int] | Float[Array | np.ndarray, " channels"]


def normalise(images: Images, mean: Statistics, std: Statistics, dtype: Any, *, scale: float | int = 255) -> Batch:
    """``(x - mean) / std`` per channel, where x is a uint8 pixel divided by ``scale`` and a float pixel itself.

    A dtype of less than 32 bits is rounded to once, at the end.
    """
    work = jnp.promote_types(dtype, jnp.float32)
    pixels = jnp.asarray(images, work)
    if not jnp.issubdtype(images.dtype, jnp.floating):
        pixels = pixels / scale
    centre, spread = (jnp.asarray(statistic, work)[:, None, None] for statistic in (mean, std))
    return ((pixels - centre) / spread).astype(dtype)


def flip(key: Key, images: Images) -> Batch:
    """Each image mirrored left to right with probability 1/2."""
    return flip_where(images, flip_mask(key, len(images)))


def flip_mask(key: Key, count: int) -> Bool[Array, " count"]:
    return jax.random.bernoulli(key, 0.5, (count,))


def flip_where(images: Images, mask: Bool[Array | np.ndarray, " count"]) -> Batch:
    """The images with True in the mask mirrored left to right."""
    return jnp.where(jnp.asarray(mask)[:, None, None, None], images[..., ::-1], images)


def pad_and_crop(key: Key, images: Images, size: int, padding: int) -> Square:
    """Zeros around each image, then a square cut out at a place drawn uniformly for each."""
    return crop_at(images, crop_offsets(key, images.shape, size, padding), size, padding)


def crop_offsets(key: Key, shape: tuple[int, ...], size: int, padding: int) -> Int[Array, "count 2"]:
    """Top and left edges in the padded images, from 0 to the last at which the square still fits."""
    room = jnp.array([length + 2 * padding - size + 1 for length in shape[-2:]])
    if min(shape[-2:]) + 2 * padding < size:
        raise DataError(f"a crop of {size} pixels does not fit images of {shape[-2:]} padded by {padding}.")
    return jax.random.randint(key, (shape[0], 2), 0, room)


def crop_at(images: Images, offsets: Int[Array | np.ndarray, "count 2"], size: int, padding: int) -> Square:
    """The squares with these top and left edges in the padded images."""
    padded = jnp.pad(jnp.asarray(images), ((0, 0), (0, 0), (padding, padding), (padding, padding)))

    def cut(image: Array, offset: Array) -> Array:
        return jax.lax.dynamic_slice(image, (0, offset[0], offset[1]), (image.shape[0], size, size))

    return jax.vmap(cut)(padded, jnp.asarray(offsets))


def centre_crop(images: Images, size: int) -> Square:
    """The square in the middle; its edges are rounded to even, as in torchvision, where the margin is odd."""
    height, width = images.shape[-2:]
    if min(height, width) < size:
        raise DataError(f"a crop of {size} pixels does not fit images of {(height, width)}.")
    top, left = round((height - size) / 2), round((width - size) / 2)
    return jnp.asarray(images)[..., top : top + size, left : left + size]


def rotate(key: Key, images: Images, degrees: float | int) -> Batch:
    """Each image turned about its centre by an angle drawn uniformly from -degrees to degrees."""
    return rotate_by(images, rotation_angles(key, len(images), degrees))


def rotation_angles(key: Key, count: int, degrees: float | int) -> Float[Array, " count"]:
    return jax.random.uniform(key, (count,), minval=-degrees, maxval=degrees)


def rotate_by(images: Images, angles: Float[Array | np.ndarray, " count"]) -> Batch:
    """Counter-clockwise rotation by degrees; a pixel takes the nearest source pixel, or 0 outside the image.

    Nearest is torchvision's default, and keeps uint8 as it is.
    """
    height, width = images.shape[-2:]
    middle = (height - 1) / 2, (width - 1) / 2
    down, right = jnp.meshgrid(jnp.arange(height) - middle[0], jnp.arange(width) - middle[1], indexing="ij")

    def turn(image: Array, angle: Array) -> Array:
        sine, cosine = jnp.sin(jnp.deg2rad(angle)), jnp.cos(jnp.deg2rad(angle))
        row = jnp.round(right * sine + down * cosine + middle[0]).astype(jnp.int32)
        column = jnp.round(right * cosine - down * sine + middle[1]).astype(jnp.int32)
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        return jnp.where(inside, image[:, row.clip(0, height - 1), column.clip(0, width - 1)], 0)

    return jax.vmap(turn)(jnp.asarray(images), jnp.asarray(angles))


def epoch_order(key: Key, count: int, batch: int) -> Int[Array, "steps batch"]:
    """A permutation of the samples as rows of batches; the samples that do not fill a last batch are left out."""
    steps = count // batch
    if steps == 0:
        raise DataError(f"a batch of {batch} is larger than the {count} samples to train on.")
    return jax.random.permutation(key, jnp.arange(count, dtype=jnp.int32))[: steps * batch].reshape(steps, batch)


def padded_batches(count: int, batch: int) -> tuple[Int[np.ndarray, "steps batch"], Bool[np.ndarray, "steps batch"]]:
    """Indices of all samples as rows of batches, and a mask that is False where the last batch is filled up with index 0.

    >>> padded_batches(5, 3)
    (array([[0, 1, 2],
           [3, 4, 0]], dtype=int32), array([[ True,  True,  True],
           [ True,  True, False]]))
    """
    slots = np.arange(-(-count // batch) * batch, dtype=np.int32).reshape(-1, batch)
    mask = slots < count
    return np.where(mask, slots, np.int32(0)), mask
