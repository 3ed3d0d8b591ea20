"""Decoded arrays as .npy files with an about.json beside them, so that a data set is decoded once per machine.

Every file is written under another name, flushed to the disk and then renamed, the JSON last. Processes that decode the
same set at once write the same bytes; any mixture that does not match its checksums is discarded and made again.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

import pcx
from pcx.data._types import DataError, Decoded, Stream
from pcx.data.store import Found, platform_cache

Facts: TypeAlias = dict[str, Any]  # of one published file or folder
ABOUT = "about.json"


def folder_of(found: Found) -> Path:
    """The cache folder of the data set that lies in this place: ``$PCX_CACHE`` or the platform's cache."""
    given = os.environ.get("PCX_CACHE")
    root = Path(given).expanduser() if given else platform_cache() / "decoded"
    place = hashlib.sha256(str(found.folder.resolve()).encode()).hexdigest()[:12]
    return root / f"{found.source.name}-{place}"


def fingerprint(found: Found) -> list[Facts]:
    """Names, sizes and times of the published files; of a folder of images: their number, total size and a checksum."""
    return [_folder_facts(path) if path.is_dir() else {"name": path.name, **_facts(path.stat())} for path in found.paths()]


def _facts(stat: os.stat_result) -> dict[str, int]:
    return {"bytes": stat.st_size, "modified": stat.st_mtime_ns}


def _folder_facts(path: Path) -> Facts:
    digest, files, size = hashlib.sha256(), 0, 0
    for folder, folders, _ in os.walk(path):
        folders.sort()
        with os.scandir(folder) as entries:
            for entry in sorted((e for e in entries if e.is_file()), key=lambda e: e.name):
                stat = entry.stat()
                digest.update(f"{os.path.relpath(entry.path, path)} {_facts(stat)}\n".encode())
                files, size = files + 1, size + stat.st_size
    return {"name": path.name, "files": files, "bytes": size, "sha256": digest.hexdigest()}


def about(found: Found, facts: list[Facts]) -> dict[str, Any] | None:
    """What the cache says of itself, or None where it is missing, unreadable or made from other files."""
    try:
        note = json.loads((folder_of(found) / ABOUT).read_bytes())
        made_from = note["version"], note["sources"], set(note) >= {"arrays", "class_names"}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return note if made_from == (pcx.__version__, facts, True) else None


def read(found: Found, facts: list[Facts]) -> tuple[dict[str, np.ndarray], tuple[str, ...]] | None:
    """The cached arrays (mapped into memory, read-only) and class names, or None unless all match their checksums."""
    note = about(found, facts)
    if note is None:
        return None
    arrays = {}
    for name, entry in note["arrays"].items():
        try:
            array = np.load(folder_of(found) / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        if _checksum(array) != entry["sha256"]:  # of what is mapped, not of what the path may name a moment later
            return None
        arrays[name] = np.asarray(array)
    return arrays, tuple(note["class_names"])


def _checksum(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data.cast("B") if array.size else b"").hexdigest()


def write(found: Found, facts: list[Facts], decoded: Decoded) -> None:
    """Decodes every array straight into the cache."""
    folder = folder_of(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: _write_array(folder / f"{name}.npy", stream) for name, stream in decoded.arrays.items()}
        note = {"version": pcx.__version__, "sources": facts, "arrays": arrays, "class_names": decoded.class_names}
        with replacing(folder / ABOUT) as file:
            file.write(json.dumps(note, indent=1).encode())
    except OSError as error:
        raise DataError(
            f"decoded {found.source.name} could not be written to {folder} ({error}); set PCX_CACHE to a folder with room."
        ) from error


def _write_array(path: Path, stream: Stream) -> dict[str, Any]:
    digest = hashlib.sha256()
    header = {"descr": np.lib.format.dtype_to_descr(stream.dtype), "fortran_order": False, "shape": stream.shape}
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in stream.pieces():
            data = np.ascontiguousarray(piece, stream.dtype).tobytes()
            digest.update(data)
            file.write(data)
    return {"shape": stream.shape, "sha256": digest.hexdigest()}


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` when all of it is on the disk, and vanishes if anything fails."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def read_or_make(found: Found, decode: Callable[[], Decoded]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The cached arrays, decoded first where the cache does not hold them."""
    facts = fingerprint(found)
    cached = read(found, facts)
    if cached is None:
        write(found, facts, decode())
        cached = read(found, facts)
    if cached is None:
        raise DataError(f"the decoded arrays in {folder_of(found)} changed while they were read; try again.")
    return cached
