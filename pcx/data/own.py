"""A data set of one's own: the file ``NAME.npz`` in ``$PCX_DATA``, or in the platform's cache directory.

    np.savez("NAME.npz", train_images=…, train_labels=…, test_images=…, test_labels=…)

Images are uint8 (pixels from 0 to 255), channels first or without channels, or floats, which are taken as they are. Labels are
the numbers of classes, from 0.
"""

import hashlib
from pathlib import Path

import numpy as np

from pcx.data import store
from pcx.data._types import DamagedError, DataError, DataSet, Split

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def files(root: Path | None = None) -> dict[str, Path]:
    """The files that are here, by the name of their data set."""
    folders = [place.parent for place in store.places("any", root)]
    return {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("*.npz"))}


def load(name: str, path: Path) -> DataSet:
    """The data set in a file."""
    arrays = _read(path)
    missing = [key for key in ARRAYS if key not in arrays]
    if missing:
        raise DataError(f"{path} has no {', '.join(missing)}; needed are {', '.join(ARRAYS)}.")
    train, test = (_split(arrays[f"{part}_images"], arrays[f"{part}_labels"], f"{path}: {part}") for part in ("train", "test"))
    if train.images.shape[1:] != test.images.shape[1:] or train.images.dtype != test.images.dtype:
        described = (f"{split.images.dtype} of shape {split.images.shape[1:]}" for split in (train, test))
        raise DataError(f"{path}: images are {' in train and '.join(described)} in test; they must be alike.")
    classes = int(max(split.labels.max() for split in (train, test) if split.labels is not None)) + 1
    if classes > len(train):
        raise DataError(
            f"{path}: labels go up to {classes - 1}, for {len(train)} images in train; classes are numbered from 0."
        )
    _check_classes(train, test, path)
    digest = hashlib.sha256()
    for key in ARRAYS:
        digest.update(f"{key}:{arrays[key].dtype}:{arrays[key].shape};".encode() + arrays[key].tobytes())
    return DataSet(name, train, test, classes, tuple(map(str, range(classes))), digest.hexdigest())


def _read(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened)
            if isinstance(file, np.ndarray):
                raise ValueError("it holds one array without a name")
            return {key: file[key] for key in file.files}
    except Exception as error:  # whatever zipfile and numpy raise on a damaged file
        if str(error).startswith("Object arrays"):
            raise DataError(f"{path} holds arrays of Python objects; give arrays of numbers.") from error
        raise DamagedError(f"{path} is no file of numpy.savez or damaged ({_reason(error)}); write it again.") from error


def _reason(error: Exception) -> str:
    """What is wrong with a file, without numpy's advice to trust it and unpickle it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "it is no archive of arrays" if "pickle" in text else text


def _check_classes(train: Split, test: Split, path: Path) -> None:
    """Refuse classes that can only be guessed."""
    unknown = np.setdiff1d(np.asarray(test.labels), np.asarray(train.labels))
    if unknown.size:
        named = ", ".join(map(str, unknown[:5])) + (" …" if unknown.size > 5 else "")
        raise DataError(
            f"{path}: test_labels has {named}, but train_labels has not; train on every class, or leave these out of test."
        )


def _split(images: np.ndarray, labels: np.ndarray, where: str) -> Split:
    if images.ndim and not len(images):
        raise DataError(f"{where}_images has no images: its shape is {images.shape}; give at least one.")
    if images.ndim not in (2, 3, 4) or not images.size:
        raise DataError(f"{where}_images has shape {images.shape}; give (count, channels, height, width), or rows of numbers.")
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise DataError(f"{where}_images has dtype {images.dtype}; give uint8 from 0 to 255, or floats.")
    if images.ndim == 4 and images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        raise DataError(f"{where}_images has shape {images.shape}, channels last; give images.transpose(0, 3, 1, 2).")
    if images.dtype != np.uint8:
        images = images.astype(np.float32)
        if not np.isfinite(images).all():
            raise DataError(f"{where}_images has numbers that are not finite.")
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
        found = f"dtype {labels.dtype} and shape {labels.shape}"
        raise DataError(f"{where}_labels has {found} for {len(images)} images; give integers of shape ({len(images)},).")
    if labels.min() < 0 or labels.max() >= 2**31 - 1:
        raise DataError(f"{where}_labels goes from {labels.min()} to {labels.max()}; classes are numbered from 0.")
    return Split(images[:, None] if images.ndim == 3 else images, labels.astype(np.int32))
