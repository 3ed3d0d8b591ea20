"""Download of published files, with progress and resume; nothing is used before its checksum is right."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pcx.data._types import DataError
from pcx.data.sources import Source
from pcx.data.store import find, places, verify


def fetch_source(source: Source, root: Path | None, progress: bool) -> Path:
    """Downloads the published files that are not here yet and returns the folder that holds the data set."""
    if not source.downloads:
        return find(source, root).folder
    folder, held = _held(source, root)
    for name, addresses in source.downloads.items():
        if name not in held:
            _from_any(source, name, addresses, folder / name, progress)
    return find(source, root).folder


def _held(source: Source, root: Path | None) -> tuple[Path, set[str]]:
    """Where to download to, and the names of those downloads whose content is there with the right checksum."""
    try:
        found = find(source, root)
    except DataError:
        folder = places(source.name, root)[0]
        files = [folder / raw / name for raw in ("", "raw") for file in source.downloads for name in (file, _plain(file))]
        return folder, {_plain(path.name) + ".gz" for path in files if _is_good(path, source)}
    if not source.archive:
        return found.folder, {_plain(path.name) + ".gz" for path in found.paths() if _is_good(path, source)}
    return found.folder, {source.archive} if all(_is_good(path, source) for path in found.paths()) else set()


def _plain(name: str) -> str:
    return name.removesuffix(".gz")


def _is_good(path: Path, source: Source) -> bool:
    try:
        verify(path, source)
    except (DataError, FileNotFoundError):
        return False
    return path.exists()


def _from_any(source: Source, name: str, addresses: tuple[str, ...], target: Path, progress: bool) -> None:
    problems = []
    for address in addresses:
        try:
            return _download(source, name, address, target, progress)
        except DataError as error:
            problems.append(str(error).removesuffix("."))
    raise DataError("; ".join(problems) + ".")


def _download(source: Source, name: str, address: str, target: Path, progress: bool) -> None:
    part = target.with_name(name + ".part")
    try:
        with _folder(target.parent):
            while True:
                resumed = _transfer(address, part, progress)
                try:
                    verify(part, source, name)
                    break
                except DataError as error:
                    part.unlink()
                    if not resumed:  # a part left by an earlier call may be what is wrong: once more from the start
                        raise DataError(f"{name} from {address} was discarded: {_checksums(error)}.") from error
            os.replace(part, target)
    except OSError as error:
        raise DataError(f"{target} could not be written ({error}).") from error


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Inside there is this folder; what was made for it is removed again where it stays empty."""
    made = [place for place in (path, *path.parents) if not place.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()


def _checksums(error: DataError) -> str:
    """The part of `verify`'s message that names the expected and the found checksum."""
    return str(error).partition("not used: ")[2].partition(";")[0]


def _transfer(address: str, part: Path, progress: bool) -> bool:
    """Appends what is missing to a partial file; True if it went on from an earlier call."""
    import pooch
    import requests

    start = part.stat().st_size if part.exists() else 0
    answers: list[Any] = []
    with part.open("ab") as file:

        def begin(response: Any, *_: Any, **__: Any) -> None:
            answers.append(response)
            if response.status_code in (200, 416):  # the whole file comes, or there is nothing to go on with
                file.truncate(0)

        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        download = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 14, headers=headers, hooks={"response": begin})
        try:
            download(address, file, None)
            file.flush()
            os.fsync(file.fileno())
        except requests.RequestException as error:
            if start and answers and answers[-1].status_code == 416:
                return _transfer(address, part, progress)
            raise DataError(_stopped(address, part, error)) from error
        finally:
            for response in answers:
                response.close()
    return bool(start) and answers[-1].status_code == 206


def _stopped(address: str, part: Path, error: Exception) -> str:
    size = part.stat().st_size
    if size:
        return f"the download of {address} stopped after {size} bytes ({_reason(error)}); run it again to go on from there."
    part.unlink()
    return f"{address} could not be downloaded ({_reason(error)})."


def _reason(error: Exception) -> str:
    """In a few words; what requests says names every layer that it went through."""
    import requests

    response = getattr(error, "response", None)
    if response is not None:
        return f"{response.status_code} {response.reason}"
    words = {
        requests.Timeout: "no answer in time",
        requests.ConnectionError: "no connection",
        requests.exceptions.ChunkedEncodingError: "it broke off",
    }
    return next((said for kind, said in words.items() if isinstance(error, kind)), type(error).__name__)
