"""Compiled programs, kept from one run to the next, which then neither traces nor writes them out again.

JAX's own cache knows a program by its text, and making the text takes longer than reading what was compiled. Here a program
is known by all that it is made of: settings, shapes, JAX's configuration, the device, what is installed, and the source of the
package and of whatever else was loaded from files. What is redefined while a process runs is in no file, so that only the
command `pcx` keeps programs (`keep`), and a notebook does not; and where files are newer than the process, were loaded while a
program was traced, or read something themselves (the environment, other files), nobody knows what it was made of, and it is
not kept.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

import pcx
from pcx.utils import atomic_write

# what models and algorithms, and files of the user's own, may do to become something else than their source says
READS = re.compile(rb"\benviron\b|\bgetenv\b|\bopen\(|\.read_|\.load\w*\(")
TRACED = ("jax", "jaxlib", "equinox", "optax")  # installed, but somebody may have changed a line
ROOM = 2**30  # bytes for all programs; the ones that were used longest ago go first
keeping = False
started = time.time() - 5  # files that are newer may differ from what was loaded of them
_thread = threading.local()


class Place(NamedTuple):
    """The file of a program, and the checksum of the sources that it is known by."""

    file: Path
    sources: str


def keep() -> None:
    """From now on, where there is a folder for compiled programs (`modes.use_compilation_cache`) and JAX's own cache is on."""
    global keeping
    keeping = jax.config.values["jax_enable_compilation_cache"]


def _listen(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _thread.hits = _hits() + 1


def _hits() -> int:
    """How many programs this thread has got from JAX's cache."""
    return getattr(_thread, "hits", 0)


jax.monitoring.register_event_listener(_listen)


def place(facts: dict[str, Any], arguments: Any) -> Place | None:
    """Where a program is: one for these facts, and arguments of these shapes; None where it is not kept."""
    folder, sources = getattr(jax.config, "jax_compilation_cache_dir", None), _sources() if keeping else None
    if folder is None or sources is None:
        return None
    shapes = [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(arguments)]
    known = {"facts": facts, "shapes": shapes, "settings": _settings(), "here": _here(), "sources": sources}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return Place(Path(folder) / "whole" / digest, sources)


def read(place: Place | None, arguments: Any, result: Any) -> Any:
    """A program for these arguments, with results of this structure, or None; a file that is not whole goes away."""
    if place is None:
        return None
    try:
        content = place.file.read_bytes()
    except OSError:
        return None
    check, program = content[:32], content[32:]
    try:
        if hashlib.sha256(program).digest() != check:
            raise ValueError("the file was changed")
        structures = jax.tree.structure((tuple(arguments), {})), jax.tree.structure(result)
        found = serialize_executable.deserialize_and_load(program, *structures, execution_devices=jax.devices()[:1])
    except Exception:  # whatever a driver says of it: then it is compiled
        with contextlib.suppress(OSError):
            place.file.unlink()
        return None
    with contextlib.suppress(OSError):  # the folder may be somebody else's
        os.utime(place.file)
    return found


def make(place: Place | None, compile: Callable[[], Any]) -> Any:
    """Compile a program and keep it, if it can be kept: one from JAX's cache may lack what it needs for that."""
    before = _hits()
    program = compile()
    if place is not None and _hits() == before and _sources() == place.sources:
        with contextlib.suppress(Exception):  # a device that cannot, or a full disk: the next run compiles
            content, _, _ = serialize_executable.serialize(program)
            atomic_write(place.file, hashlib.sha256(content).digest() + content)
            _tidy(place.file)
    return program


def _tidy(new: Path) -> None:
    """Make room, but for what is new."""
    files = [(path, path.stat()) for path in new.parent.iterdir() if path != new]
    used = new.stat().st_size + sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda pair: pair[1].st_mtime):
        if used > ROOM:
            path.unlink(missing_ok=True)
            used -= stat.st_size


def _settings() -> dict[str, str]:
    """JAX's, but for those of caches, and what its compilers read of the environment, or of a file that it names."""
    names = [name for name in jax.config.values if "cache" not in name]
    environment = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")}
    with contextlib.suppress(OSError, ValueError):
        environment["file"] = Path(environment["XLA_FLAGS"]).read_bytes().hex()
    return {name: repr(getattr(jax.config, name, None)) for name in names} | environment


@functools.cache
def _here() -> dict[str, Any]:
    """The device, its driver and the machine, for which programs are compiled, and all that is installed."""
    device, client = jax.devices()[0], jax.devices()[0].client
    processor = [platform.processor(), platform.machine(), str(os.cpu_count())]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    kind = device.device_kind, client.platform, client.platform_version, len(jax.devices())
    return {"device": kind, "processor": processor, "python": sys.version, "installed": _installed()[0]}


@functools.cache
def _installed() -> tuple[str, frozenset[str]]:
    """A checksum of all that is installed, and the files that are. Of those that programs are traced with, as they are now."""
    found, files = hashlib.sha256(), set[str]()
    for package in sorted(importlib.metadata.distributions(), key=lambda package: f"{package.name} {package.version}"):
        record = package.read_text("RECORD") or ""  # with a checksum of every file
        found.update(f"{package.name} {package.version} {record}".encode())
        files.update(line.split(",")[0] for line in record.splitlines())
    for name in sorted(sys.modules.keys() & set(TRACED)):
        for file in sorted(Path(sys.modules[name].__file__ or "").parent.rglob("*.py")):
            status = file.stat()
            found.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
    return found.hexdigest(), frozenset(files)


def _sources() -> str | None:
    """A checksum of the package's files, and of all loaded modules that are no part of an installation.

    None where one of them is newer than this process, which may have loaded what was there before, or reads something.
    """
    own, paths = Path(pcx.__file__).parent, sysconfig.get_paths()
    library = tuple(paths[name] + os.sep for name in ("stdlib", "platstdlib"))
    packages, installed = {Path(paths[name]) for name in ("purelib", "platlib")}, _installed()[1]
    loaded = {file for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    others = set[Path]()
    for file in map(Path, loaded):
        inside = [file.relative_to(folder).as_posix() for folder in packages if folder in file.parents]
        known = installed.intersection(inside) or (not inside and str(file).startswith(library))
        if file.suffix == ".py" and not known and own not in file.parents:
            others.add(file)
    found, changed = hashlib.sha256(), ("models", "algorithms")  # the folders of the package that users add files to
    for file in sorted({*own.rglob("*.py"), *others}):
        with contextlib.suppress(OSError):
            content, new = file.read_bytes(), max(file.stat().st_mtime, file.stat().st_ctime) > started
            if new or ((file in others or file.parent.name in changed) and READS.search(content)):
                return None
            found.update(str(file.relative_to(own) if own in file.parents else file).encode() + content)
    return found.hexdigest()
