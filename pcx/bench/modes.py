"""Which way of running an epoch is fastest here: measured once per device, version and kind of run, and remembered."""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from pcx.bench.config import Config, ConfigError
from pcx.bench.engine import MODES, Engine
from pcx.bench.tasks import build_model, pipeline
from pcx.data import DataSet
from pcx.data.store import platform_cache
from pcx.utils import atomic_write

STEPS = 12
UNROLLED = 32


def cache_folder() -> Path:
    """``$PCX_CACHE``, else the platform's cache folder."""
    given = os.environ.get("PCX_CACHE")
    return Path(given).expanduser() if given else platform_cache()


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, where there is a folder that can be written."""
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if os.environ.get("PCX_CACHE"):
            reason = error.strerror or error
            raise ConfigError(
                f"PCX_CACHE is {cache_folder()}, which cannot be written ({reason}); set another folder."
            ) from None
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def device_bytes() -> int | None:
    """How large a data set may be that is kept on the device: ``$PCX_DEVICE_BYTES``, else half of an accelerator's memory."""
    given = os.environ.get("PCX_DEVICE_BYTES")
    if given:
        try:
            return int(given)
        except ValueError:
            raise ConfigError(f"PCX_DEVICE_BYTES is {given!r}; it is a number of bytes.") from None
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit // 2


def choose_mode(
    config: Config, data: DataSet, seeds: list[int], report: Callable[[str], None] = lambda text: None
) -> tuple[str, str]:
    """The mode to use, and a sentence for the log that says why. On an accelerator an epoch is one program if the data fit."""
    device = jax.devices()[0]
    room, size = device_bytes(), 0 if data.train is None else data.train.images.nbytes
    if room is not None and size > room:
        return "stream", f"the training images have {size:,} bytes, of which the device gets a part at a time (room: {room:,})"
    if device.platform != "cpu":
        return "scan", f"an epoch is one program on {device.device_kind}"
    if _convolves(config, data):
        return "host", "every step is one program, as the model has convolutions; it is compiled first"
    few = getattr(config.hyper, "T", 0) <= UNROLLED  # many steps written out take minutes to compile, and do not win
    facts = config.as_dict()
    shape = {name: value for name, value in facts["hyper"].items() if not isinstance(value, float)}  # rates cost no time
    here = {"members": len(seeds), "device": device.device_kind, "jax": jax.__version__, "cpus": os.cpu_count()}
    kind = facts | here | {"hyper": shape, "epochs": 0}
    name = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:16]
    file = cache_folder() / "modes" / f"{name}.json"
    known = _known(file)
    if known is not None:
        return known["mode"], f"epochs run as {known['mode']!r}, the fastest when it was measured ({_text(known['seconds'])})"
    report("measuring how epochs run fastest here; the next run of this kind will know")
    seconds = {mode: _measure(config, data, seeds, mode) for mode in MODES if few or mode != "host_unrolled"}
    best = min(seconds, key=lambda mode: seconds[mode])
    with contextlib.suppress(OSError):  # then it is measured again
        atomic_write(file, json.dumps({"mode": best, "seconds": seconds}).encode())
    return best, f"epochs run as {best!r}, the fastest of {_text(seconds)}"


def _convolves(config: Config, data: DataSet) -> bool:
    """Whether a config's model has convolutions, by the shapes of its arrays; nothing is computed."""
    images = jax.eval_shape(pipeline(config).test, jax.ShapeDtypeStruct(data.test.images.shape, data.test.images.dtype))
    model = eqx.filter_eval_shape(build_model, config, images.shape[1:], data.classes, jax.random.key(0))
    return any(len(getattr(leaf, "shape", ())) > 2 for leaf in jax.tree.leaves(model))


def _known(file: Path) -> dict[str, Any] | None:
    """What was measured before; None if there is nothing, or nothing that can be read."""
    try:
        found = json.loads(file.read_text())
        _text(found["seconds"])
        return found if found["mode"] in MODES else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _measure(config: Config, data: DataSet, seeds: list[int], mode: str) -> float:
    """Seconds per step, without compilation."""
    engine = Engine(config, data, seeds, mode, steps=min(STEPS, len(data.train or ()) // config.batch))
    population, _ = engine.epoch(engine.init(), 0)
    times = []
    for number in range(1, 4):
        start = time.perf_counter()
        population, _ = engine.epoch(population, number)
        times.append(time.perf_counter() - start)
    return min(times) / engine.steps


def _text(seconds: dict[str, float]) -> str:
    return ", ".join(f"{mode} {1e3 * s:.2f} ms" for mode, s in seconds.items()) + " per step"
