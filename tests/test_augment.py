"""Augmentation against plain numpy, given the same draws; the statistics of the draws; batches that cover the set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pcx.data import DataError, augment

KEY = jax.random.key(7)


def pixels(count=6, channels=3, height=8, width=8, seed=0):
    return np.random.default_rng(seed).integers(1, 256, (count, channels, height, width), dtype=np.uint8)


def test_normalise_equals_numpy_to_the_last_bits_of_float64():
    images, mean, std = pixels(), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    expected = (images / 255 - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    for function in (augment.normalise, jax.jit(augment.normalise, static_argnums=(1, 2, 3))):
        actual = function(images, mean, std, jnp.float64)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-15)  # XLA divides by multiplying: one bit each time


def test_normalise_takes_floats_as_they_are_and_other_scales():
    floats = pixels(channels=1) / 255
    np.testing.assert_array_equal(augment.normalise(floats, (0.5,), (0.5,), jnp.float64), (floats - 0.5) / 0.5)
    digits = np.arange(17, dtype=np.uint8).reshape(1, 1, 1, 17)
    np.testing.assert_array_equal(
        augment.normalise(digits, (0.0,), (1.0,), jnp.float64, scale=16), np.arange(17).reshape(digits.shape) / 16
    )


def test_normalise_rounds_once_to_a_short_dtype():
    images, mean, std = pixels(), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    short = augment.normalise(images, mean, std, jnp.bfloat16)
    assert short.dtype == jnp.bfloat16
    np.testing.assert_array_equal(short, augment.normalise(images, mean, std, jnp.float32).astype(jnp.bfloat16))


def test_flip_equals_numpy():
    images, mask = pixels(), np.array([True, False, True, True, False, False])
    expected = np.array([image[:, :, ::-1] if turned else image for image, turned in zip(images, mask, strict=True)])
    flipped = augment.flip_where(images, mask)
    assert flipped.dtype == np.uint8
    np.testing.assert_array_equal(flipped, expected)
    drawn = augment.flip_mask(KEY, len(images))
    np.testing.assert_array_equal(augment.flip(KEY, images), augment.flip_where(images, drawn))


def test_half_of_the_images_are_flipped():
    share = augment.flip_mask(KEY, 20_000).mean()
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(20_000)


def numpy_crop(images, offsets, size, padding):
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    return np.array([p[:, t : t + size, left : left + size] for p, (t, left) in zip(padded, offsets, strict=True)])


@pytest.mark.parametrize(("height", "width", "size", "padding"), [(8, 8, 8, 4), (8, 8, 6, 0), (9, 7, 6, 2)])
def test_pad_and_crop_equals_numpy(height, width, size, padding):
    images = pixels(height=height, width=width)
    offsets = augment.crop_offsets(KEY, images.shape, size, padding)
    cropped = augment.pad_and_crop(KEY, images, size, padding)
    assert cropped.dtype == np.uint8
    np.testing.assert_array_equal(cropped, numpy_crop(images, np.asarray(offsets), size, padding))


def test_crops_reach_every_corner():
    images = pixels(count=4)
    corners = np.array([[0, 0], [0, 8], [8, 0], [8, 8]])
    cropped = np.asarray(augment.crop_at(images, corners, 8, 4))
    np.testing.assert_array_equal(cropped, numpy_crop(images, corners, 8, 4))
    assert (cropped[0, :, :4] == 0).all()
    assert (cropped[0, :, 4:, 4:] == images[0, :, :4, :4]).all()


def test_offsets_are_uniform_and_rows_and_columns_have_their_own_range():
    offsets = np.asarray(augment.crop_offsets(KEY, (18_000, 3, 32, 36), 32, 4))
    assert offsets.min(axis=0).tolist() == [0, 0]
    assert offsets.max(axis=0).tolist() == [8, 12]
    rows = np.bincount(offsets[:, 0], minlength=9)
    assert np.abs(rows - 2000).max() < 5 * np.sqrt(2000)
    assert abs(np.corrcoef(offsets.T)[0, 1]) < 0.05


@pytest.mark.parametrize(("height", "width", "size", "top", "left"), [(64, 64, 56, 4, 4), (9, 8, 6, 2, 1), (7, 7, 6, 0, 0)])
def test_centre_crop(height, width, size, top, left):
    images = pixels(height=height, width=width)
    np.testing.assert_array_equal(augment.centre_crop(images, size), images[:, :, top : top + size, left : left + size])


def test_crops_that_do_not_fit_say_so():
    with pytest.raises(DataError, match="crop of 12 pixels"):
        augment.centre_crop(pixels(), 12)
    with pytest.raises(DataError, match=r"crop of 12 pixels .* padded by 1"):
        augment.pad_and_crop(KEY, pixels(), 12, 1)


def numpy_rotate(images, angles):
    rotated, (height, width) = np.zeros_like(images), images.shape[-2:]
    for image, angle, result in zip(images, np.deg2rad(angles), rotated, strict=True):
        for y in range(height):
            for x in range(width):
                down, right = y - (height - 1) / 2, x - (width - 1) / 2
                row = round(right * np.sin(angle) + down * np.cos(angle) + (height - 1) / 2)
                column = round(right * np.cos(angle) - down * np.sin(angle) + (width - 1) / 2)
                if 0 <= row < height and 0 <= column < width:
                    result[:, y, x] = image[:, row, column]
    return rotated


@pytest.mark.parametrize(("height", "width", "degrees"), [(32, 32, 5.0), (9, 12, 30.0), (8, 8, 180.0)])
def test_rotation_equals_numpy(height, width, degrees):
    images = pixels(height=height, width=width)
    angles = np.asarray(augment.rotation_angles(KEY, len(images), degrees))
    rotated = augment.rotate(KEY, images, degrees)
    assert rotated.dtype == np.uint8
    np.testing.assert_array_equal(rotated, numpy_rotate(images, angles))


def test_a_quarter_turn_is_counter_clockwise():
    images = pixels(count=3, height=9, width=9)
    rotated = augment.rotate_by(images, np.array([0.0, 90.0, -90.0]))
    np.testing.assert_array_equal(rotated, [np.rot90(i, k, axes=(1, 2)) for i, k in zip(images, (0, 1, -1), strict=True)])


def test_rotation_fills_with_zeros():
    rotated = np.asarray(augment.rotate_by(np.full((1, 1, 9, 9), 255, np.uint8), np.array([45.0])))
    assert set(np.unique(rotated)) == {0, 255}
    assert rotated[0, 0, 0, 0] == rotated[0, 0, 8, 8] == 0
    assert rotated[0, 0, 4, 4] == 255


def test_angles_are_uniform():
    angles = np.asarray(augment.rotation_angles(KEY, 20_000, 5.0))
    assert angles.min() >= -5
    assert angles.max() <= 5
    np.testing.assert_allclose(np.quantile(angles, [0.1, 0.5, 0.9]), [-4, 0, 4], atol=0.2)


RANDOM = {
    "flip": lambda key, images: augment.flip(key, images),
    "pad_and_crop": lambda key, images: augment.pad_and_crop(key, images, 8, 4),
    "rotate": lambda key, images: augment.rotate(key, images, 30.0),
}


@pytest.mark.parametrize("name", RANDOM)
def test_keys_decide_alone_and_jit_and_vmap_agree(name):
    images, function = pixels(count=32), RANDOM[name]
    first = np.asarray(function(KEY, images))
    np.testing.assert_array_equal(function(KEY, images), first)
    assert (np.asarray(function(jax.random.key(8), images)) != first).any()
    np.testing.assert_array_equal(jax.jit(function)(KEY, images), first)
    keys = jax.random.split(KEY, 2)
    stacked = jax.vmap(function)(keys, jnp.stack([images, images]))
    np.testing.assert_array_equal(stacked, [function(key, images) for key in keys])


def test_an_epoch_is_a_permutation_without_the_rest():
    order = np.asarray(augment.epoch_order(KEY, 103, 10))
    assert order.shape == (10, 10)
    assert order.dtype == np.int32
    assert len(set(order.ravel().tolist())) == 100
    assert 0 <= order.min() <= order.max() <= 102
    assert (order != np.asarray(augment.epoch_order(jax.random.key(8), 103, 10))).any()
    compiled = jax.jit(augment.epoch_order, static_argnums=(1, 2))(KEY, 103, 10)
    np.testing.assert_array_equal(compiled, order)
    with pytest.raises(DataError, match="batch of 128 is larger than the 103 samples"):
        augment.epoch_order(KEY, 103, 128)


@pytest.mark.parametrize(("count", "batch", "steps"), [(10, 5, 2), (11, 5, 3), (3, 8, 1), (1, 1, 1)])
def test_padded_batches_cover_every_index_once(count, batch, steps):
    indices, mask = augment.padded_batches(count, batch)
    assert indices.shape == mask.shape == (steps, batch)
    assert indices.dtype == np.int32
    assert indices[mask].tolist() == list(range(count))
    assert not indices[~mask].any()
