"""What a data set is, what `status` says of one, and the one error of this package."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Shaped


class DataError(Exception):
    """Data is missing, corrupt or misnamed; the message says in one sentence which, where, and what to do."""


class DamagedError(DataError):
    """A file is here, but it is not as it was written."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Samples and their labels, in the order of the published files.

    Images are uint8, channels first (digits: 0 to 16, all others: 0 to 255); points in space are float32 rows.
    """

    images: Shaped[np.ndarray, "count ..."]
    labels: Int32[np.ndarray, " count"] | None

    def __post_init__(self) -> None:
        if self.labels is None:
            return
        dtype, shape = np.asarray(self.labels).dtype, np.shape(self.labels)
        if not np.issubdtype(dtype, np.integer):
            raise DataError(f"the labels are of dtype {dtype}; they are the numbers of classes: give labels.astype(np.int32).")
        if shape != (len(self.images),):
            raise DataError(f"the labels have shape {shape} for {len(self.images)} images; there is one number for each.")

    def __len__(self) -> int:
        return len(self.images)


@dataclasses.dataclass(frozen=True, eq=False)
class DataSet:
    """A data set as published; ``train`` is None where only the test files are here, ``classes`` 0 without labels.

    ``checksum`` is that of a data set of one's own; the others are what their names say.
    """

    name: str
    train: Split | None
    test: Split
    classes: int
    class_names: tuple[str, ...]
    checksum: str = ""


@dataclasses.dataclass(frozen=True)
class Status:
    """One line of `pcx data`: samples per split and bytes of the files, or the reason why the set cannot be read.

    ``folder`` is where its files lie, also those that cannot be used; None where there are none.
    """

    name: str
    present: bool
    splits: Mapping[str, int]
    bytes: int
    reason: str
    folder: Path | None
    places: tuple[Path, ...]
    damaged: bool = False

    @property
    def state(self) -> str:
        """In words: here, not here, damaged, or unusable for another reason."""
        if self.present:
            return "here"
        return "damaged" if self.damaged else "unusable" if self.folder else "not here"


class Stream(NamedTuple):
    """An array that is decoded piece by piece, so that it never has to fit into memory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterator[np.ndarray]]


def stream(array: np.ndarray) -> Stream:
    """An array that is already there, as a `Stream`."""
    return Stream(array.shape, array.dtype, lambda: iter([array]))


class Decoded(NamedTuple):
    """What a reader makes of the published files: arrays by name, such as ``train_images``, and the class names."""

    arrays: dict[str, Stream]
    class_names: tuple[str, ...]
