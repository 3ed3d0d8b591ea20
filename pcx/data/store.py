"""Where the published files lie, and whether they are what was published."""

import gzip
import hashlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pcx.data._types import DamagedError, DataError
from pcx.data.sources import Source


class Found(NamedTuple):
    """A data set on disk: its unpacked files by role, or the archive that holds them all."""

    source: Source
    folder: Path
    files: Mapping[str, Path]
    archive: Path | None

    def paths(self) -> tuple[Path, ...]:
        return (self.archive,) if self.archive else tuple(self.files.values())


def platform_cache() -> Path:
    """The folder that the operating system keeps for this package."""
    import pooch

    return Path(pooch.os_cache("pcx"))


def places(name: str, root: Path | None = None) -> tuple[Path, ...]:
    """The folders that may hold a data set, best first: in ``root`` alone, else in ``$PCX_DATA`` and the platform's cache."""
    if root is not None:
        return (root / name,)
    given = os.environ.get("PCX_DATA")
    roots = [Path(given).expanduser()] if given else []
    return tuple(folder / name for folder in [*roots, platform_cache()])


def find(source: Source, root: Path | None = None) -> Found:
    """The first place that holds the whole data set; unpacked files come before an archive, plain before gzipped ones."""
    looked = places(source.name, root)
    for folder in looked:
        if found := _find_in(source, folder):
            return found
    where = " and in ".join(str(folder) for folder in looked)
    raise DataError(f"{source.name} is not here: looked in {where} for {_wanted(source)}; {_remedy(source, looked[0])}.")


def _find_in(source: Source, folder: Path) -> Found | None:
    folders = [folder / raw / inside for raw in ("", "raw") for inside in ("", source.inside)]
    files: dict[str, Path] = {}
    for role, name in source.files.items():
        candidates = [place / (name + packed) for packed in ("", ".gz") for place in folders]
        is_there = Path.is_dir if role == "tree" else Path.is_file
        if path := next((path for path in candidates if is_there(path)), None):
            files[role] = path
    if all(role in files for role in source.files if role not in source.optional):
        return Found(source, folder, files, None)
    archives = [folder / raw / source.archive for raw in ("", "raw") if source.archive]
    archive = next((path for path in archives if path.is_file()), None)
    return Found(source, folder, {}, archive) if archive else None


def _wanted(source: Source) -> str:
    needed = [name for role, name in source.files.items() if role not in source.optional]
    unpacked = needed[0] if len(needed) == 1 else f"{needed[0]} … {needed[-1]}"
    if source.archive:
        return f"{source.archive} or {unpacked}"
    return f"{unpacked} (plain or .gz)"


def _remedy(source: Source, folder: Path) -> str:
    if source.by_hand:
        return f"download {source.archive} from {source.by_hand} into {folder}"
    return f"run `pcx data get {source.name}`, or set PCX_DATA to a folder that holds {source.name}/"


def verify(path: Path, source: Source, name: str = "") -> None:
    """Raises unless the file has its published checksum, as it is or (.gz) unpacked; folders and unlisted files pass."""
    name = name or path.name
    expected, unpacked = source.digests.get(name), None
    if path.is_dir() or (expected and _digest(path, expected) == expected):
        return
    if name.endswith(".gz"):
        unpacked = source.digests.get(name.removesuffix(".gz"))
        if unpacked and _digest(path, unpacked, gzip.open) == unpacked:
            return
    if expected or unpacked:
        found = _digest(path, expected) if expected else _digest(path, str(unpacked), gzip.open)
        of = "" if expected else "of the unpacked content "
        raise DamagedError(
            f"{path} is corrupt and was not used: expected checksum {of}{expected or unpacked}, found {found}; "
            f"remove it and run `pcx data get {source.name}`."
        )


def _digest(path: Path, like: str, opener: Any = open) -> str:
    """The checksum of a file's content by the algorithm of another checksum, such as ``md5:…``."""
    algorithm = like.partition(":")[0]
    try:
        with opener(path, "rb") as file:
            return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return "no complete gzip file"
