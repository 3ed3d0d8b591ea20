"""What one does with a data set: load it, split it, fetch it, ask what is here."""

import os
from pathlib import Path
from typing import TypeAlias

from pcx._types import near
from pcx.data import cache, embedded, formats, own, store
from pcx.data._types import DamagedError, DataError, DataSet, Decoded, Split, Status
from pcx.data.download import fetch_source
from pcx.data.sources import EMBEDDED, NAMES, SOURCES, Source

Root: TypeAlias = str | os.PathLike[str] | None
VALIDATION_SEED = 0


def names() -> list[str]:
    """All data sets that can be loaded: the known ones, here or not, and one's own (`pcx.data.own`)."""
    return [*NAMES, *(name for name in own.files() if name not in NAMES)]


def load(name: str, *, root: Root = None) -> DataSet:
    """A data set from the files in ``root/<name>/``, else from the places that `status` lists; one's own from ``<name>.npz``.

    Large arrays are mapped into memory from the cache and read-only.
    """
    if name in EMBEDDED:
        return embedded.MAKE[name]()
    if name not in SOURCES and name in (mine := own.files(_path(root))):
        return own.load(name, mine[name])
    found = _find(name, _path(root))
    arrays, class_names = cache.read_or_make(found, lambda: _decode(found))
    splits = {
        split: Split(arrays[f"{split}_images"], arrays.get(f"{split}_labels"))
        for split in ("train", "test")
        if f"{split}_images" in arrays
    }
    return DataSet(name, splits.get("train"), splits["test"], len(class_names), class_names)


def look_for(name: str, *, root: Root = None) -> None:
    """Raise unless the files of a data set are here. They are not read, so that damaged ones pass."""
    if name in EMBEDDED or (name not in SOURCES and name in own.files(_path(root))):
        return
    _find(name, _path(root))


def split_validation(split: Split, fraction: float | int) -> tuple[Split, Split]:
    """Train and validation parts: validation is the last ``fraction`` of a fixed permutation."""
    held_out = round(fraction * len(split))
    if not 0 < held_out < len(split):
        raise DataError(f"a validation fraction of {fraction} leaves one part of {len(split)} samples empty.")
    order = embedded.permutation(len(split), VALIDATION_SEED)
    train, validation = (
        Split(split.images[part], None if split.labels is None else split.labels[part])
        for part in (order[:-held_out], order[-held_out:])
    )
    return train, validation


def fetch(name: str, *, root: Root = None, progress: bool = True) -> Path:
    """Downloads what is missing of a data set and returns the folder that holds it."""
    if name in EMBEDDED:
        raise DataError(f"{name} needs no download: it comes with scikit-learn.")
    if name not in SOURCES and (mine := own.files().get(name)):
        raise DataError(f"{name} needs no download: it is here, {mine}.")
    return fetch_source(_source(name), _path(root), progress)


def status() -> list[Status]:
    """What is here of every data set. Files that were not decoded yet are read and checked: about a second per gigabyte."""
    return [_status(name) for name in names()]


def _status(name: str) -> Status:
    if name in EMBEDDED:
        return Status(name, True, _lengths(embedded.MAKE[name]()), 0, "", None, ())
    places = store.places(name)
    if name not in SOURCES:
        path = own.files()[name]
        try:
            return Status(name, True, _lengths(own.load(name, path)), path.stat().st_size, "", path.parent, places)
        except DataError as error:
            return _unusable(name, error, path.parent, places)
    try:
        found = store.find(SOURCES[name])
    except DataError as error:
        return Status(name, False, {}, 0, str(error), None, places)
    try:
        facts = cache.fingerprint(found)
        counts = _counts(found, facts)
    except DataError as error:
        return _unusable(name, error, found.folder, places)
    return Status(name, True, counts, sum(int(fact["bytes"]) for fact in facts), "", found.folder, places)


def _unusable(name: str, error: DataError, folder: Path, places: tuple[Path, ...]) -> Status:
    return Status(name, False, {}, 0, str(error), folder, places, isinstance(error, DamagedError))


def _lengths(made: DataSet) -> dict[str, int]:
    return {split: len(part) for split, part in (("train", made.train), ("test", made.test)) if part is not None}


def _counts(found: store.Found, facts: list[cache.Facts]) -> dict[str, int]:
    note = cache.about(found, facts)
    if note is None:
        shapes = {name: array.shape for name, array in _decode(found).arrays.items()}
    else:
        shapes = {name: tuple(entry["shape"]) for name, entry in note["arrays"].items()}
    return {name.removesuffix("_images"): shape[0] for name, shape in shapes.items() if name.endswith("_images")}


def _find(name: str, root: Path | None) -> store.Found:
    """The files of a known data set."""
    try:
        return store.find(_source(name), root)
    except DataError as error:
        taken = own.files(root).get(name)
        hint = f" ({taken} is not looked at, as {name} is the name of a known set.)" if taken else ""
        raise DataError(f"{error}{hint}") from error


def _decode(found: store.Found) -> Decoded:
    """The arrays of files whose checksums are right."""
    for path in found.paths():
        store.verify(path, found.source)
    return formats.decode(found)


def _source(name: str) -> Source:
    if name not in SOURCES:
        hint = f"(one of your own is {name}.npz in PCX_DATA)"
        raise DataError(f"there is no data set {name!r} {hint}; near: {near(name, names())}.")
    return SOURCES[name]


def _path(root: Root) -> Path | None:
    return None if root is None else Path(root)
