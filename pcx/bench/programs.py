"""Compiled programs, kept from one run to the next, which then neither traces nor writes them out again.

JAX's own cache knows a program by its text, and making the text takes longer than reading what was compiled. Here a program
is known by all that it is made of: settings, shapes, JAX's configuration, the device, versions, and the source of the package
and of whatever else was loaded from files that are not installed. What is changed while a process runs is no part of that, so
that only the command `pcx` keeps programs (`keep`), and a notebook does not.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import pcx
from pcx.utils import atomic_write

ROOM = 2**30  # bytes for all programs; the ones that were used longest ago go first
keeping = False
_thread = threading.local()


def keep() -> None:
    """From now on, where there is a folder for compiled programs (`modes.use_compilation_cache`)."""
    global keeping
    keeping = True


def _listen(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _thread.hits = _hits() + 1


def _hits() -> int:
    """How many programs this thread has got from JAX's cache."""
    return getattr(_thread, "hits", 0)


jax.monitoring.register_event_listener(_listen)


def place(facts: dict[str, Any], arguments: Any) -> Path | None:
    """The file of a program: for these facts, and arguments of these shapes; None where programs are not kept."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not keeping or folder is None:
        return None
    shapes = [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(arguments)]
    known = {"facts": facts, "shapes": shapes, "settings": _settings(), "here": _here(), "sources": _sources()}
    return Path(folder) / "whole" / hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def read(file: Path | None, arguments: Any, result: Any) -> Any:
    """A program for these arguments, with results of this structure, or None; a file that is not whole goes away."""
    if file is None:
        return None
    try:
        content = file.read_bytes()
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
            file.unlink()
        return None
    with contextlib.suppress(OSError):  # the folder may be somebody else's
        os.utime(file)
    return found


def make(file: Path | None, compile: Callable[[], Any]) -> Any:
    """Compile a program and keep it, if it can be kept: one from JAX's cache may lack what it needs for that."""
    before = _hits()
    program = compile()
    if file is not None and _hits() == before:
        with contextlib.suppress(Exception):  # a device that cannot, or a full disk: the next run compiles
            content, _, _ = serialize_executable.serialize(program)
            atomic_write(file, hashlib.sha256(content).digest() + content)
            _tidy(file)
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
    """JAX's, but for those of caches, and what its compilers read of the environment."""
    names = [name for name in jax.config.values if "cache" not in name]
    environment = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")}
    return {name: repr(getattr(jax.config, name, None)) for name in names} | environment


@functools.cache
def _here() -> dict[str, Any]:
    """The device, its driver and the machine, for which programs are compiled, and every version."""
    device, client = jax.devices()[0], jax.devices()[0].client
    processor = [platform.processor(), platform.machine(), str(os.cpu_count())]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    versions = sorted(f"{found.name} {found.version}" for found in importlib.metadata.distributions())
    kind = device.device_kind, client.platform, client.platform_version, len(jax.devices())
    return {"device": kind, "processor": processor, "python": sys.version, "versions": versions}


def _sources() -> str:
    """A checksum of the package's files, and of all loaded modules that are no part of an installation."""
    own = Path(pcx.__file__).parent
    installed = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    loaded = {file for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    others = {Path(file) for file in loaded if file.endswith(".py") and not file.startswith(installed)}
    found = hashlib.sha256()
    for file in sorted({*own.rglob("*.py"), *others}):
        with contextlib.suppress(OSError):
            found.update(str(file.relative_to(own) if own in file.parents else file).encode() + file.read_bytes())
    return found.hexdigest()
