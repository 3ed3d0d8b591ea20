"""Readers of the published formats: idx (plain, gzipped or in a zip) and CIFAR binary (folder or tar archive)."""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from pcx.data._types import DataError, Decoded, stream
from pcx.data.images import read_celeba, read_tinyimagenet
from pcx.data.store import Found


def contents(found: Found) -> dict[str, bytes]:
    """The unpacked bytes of every file of a data set, by role."""
    if found.archive is None:
        return {role: _unpacked(path.read_bytes(), path.name, path) for role, path in found.files.items()}
    roles = {name + packed: role for role, name in found.source.files.items() for packed in ("", ".gz")}
    members = _tar_members if tarfile.is_tarfile(found.archive) else _zip_members
    held = members(found.archive, roles)
    if missing := [name for role, name in found.source.files.items() if role not in held]:
        raise DataError(f"{found.archive} does not hold {', '.join(missing)}; remove it and download it again.")
    return held


def _zip_members(path: Path, roles: Mapping[str, str]) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        names = {PurePosixPath(name).name: name for name in archive.namelist()}
        return {role: _unpacked(archive.read(names[name]), name, path) for name, role in roles.items() if name in names}


def _tar_members(path: Path, roles: Mapping[str, str]) -> dict[str, bytes]:
    held = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if name in roles and (file := archive.extractfile(member)):
                held[roles[name]] = _unpacked(file.read(), name, path)
    return held


def _unpacked(data: bytes, name: str, where: Path) -> bytes:
    try:
        return gzip.decompress(data) if name.endswith(".gz") else data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{where} is corrupt: {name} is not a complete gzip file ({error}).") from error


def parse_idx(data: bytes, where: str) -> np.ndarray:
    """An array of unsigned bytes from its idx form: two zeros, type 8, the number of axes, big-endian sizes, the values."""
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{where} is not an idx file of unsigned bytes: it starts with {data[:4].hex(' ') or 'nothing'}.")
    start = 4 + 4 * data[3]
    shape = np.frombuffer(data[4:start], ">u4").astype(int)
    if len(data) - start != shape.prod():
        raise DataError(f"{where} is corrupt: its header promises {shape.prod()} values and {len(data) - start} follow.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_idx(found: Found) -> Decoded:
    """The arrays of MNIST and its relatives, with a channel axis."""
    arrays = {role: parse_idx(data, _where(found, role)) for role, data in contents(found).items()}
    decoded = {role: array[:, None] if "images" in role else array.astype(np.int32) for role, array in arrays.items()}
    if not all(role in decoded for role in ("train_images", "train_labels")):
        decoded = {role: array for role, array in decoded.items() if role.startswith("test")}
    return Decoded({role: stream(array) for role, array in decoded.items()}, found.source.class_names)


def read_emnist(found: Found) -> Decoded:
    """EMNIST letters: labels 1 to 26 become 0 to 25, and the images, published with rows and columns swapped, stand upright."""
    arrays = {role: parse_idx(data, _where(found, role)) for role, data in contents(found).items()}
    upright = {
        role: array.swapaxes(1, 2)[:, None] if "images" in role else array.astype(np.int32) - 1
        for role, array in arrays.items()
    }
    return Decoded({role: stream(array) for role, array in upright.items()}, found.source.class_names)


def parse_cifar(data: bytes, label_bytes: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels from records of label bytes (the last one is the class) and 3 × 32 × 32 pixels, channels first."""
    size = label_bytes + 3 * 32 * 32
    if not data or len(data) % size:
        raise DataError(f"{where} is corrupt: {len(data)} bytes are no whole number of records of {size} bytes.")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1].astype(np.int32)


def read_cifar(found: Found) -> Decoded:
    """CIFAR-10, and CIFAR-100 with its 100 fine classes."""
    label_bytes = 2 if found.source.name == "cifar100" else 1
    parsed = {role: parse_cifar(data, label_bytes, _where(found, role)) for role, data in contents(found).items()}
    arrays = {}
    for split in ("train", "test"):
        images, labels = zip(*(parsed[role] for role in found.source.files if role.startswith(split)), strict=True)
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = stream(np.concatenate(images)), stream(np.concatenate(labels))
    return Decoded(arrays, found.source.class_names)


def _where(found: Found, role: str) -> str:
    return f"{found.source.files[role]} in {found.archive}" if found.archive else str(found.files[role])


_READERS: dict[str, Callable[[Found], Decoded]] = {
    "idx": read_idx,
    "emnist": read_emnist,
    "cifar": read_cifar,
    "tinyimagenet": read_tinyimagenet,
    "celeba": read_celeba,
}


def decode(found: Found) -> Decoded:
    """The arrays of a data set, after a check of their number and labels against what was published."""
    decoded = _READERS[found.source.kind](found)
    for split in ("train", "test"):
        if f"{split}_images" in decoded.arrays:
            _check_split(found, decoded, split)
    return decoded


def _check_split(found: Found, decoded: Decoded, split: str) -> None:
    images, labels = decoded.arrays[f"{split}_images"], decoded.arrays.get(f"{split}_labels")
    count, published = images.shape[0], found.source.counts.get(split)
    if count != (published or count):
        raise DataError(
            f"{found.folder} holds {count} {split} images of {found.source.name} where {published} are published; "
            "finish unpacking it, or remove it and download it again."
        )
    if labels is None:
        return
    values = np.concatenate(list(labels.pieces()))
    if len(values) != count or values.min() < 0 or values.max() >= len(decoded.class_names):
        limits = f"{len(values)} labels from {values.min()} to {values.max()}"
        raise DataError(f"{found.folder} holds {limits} for {count} {split} images in {len(decoded.class_names)} classes.")
