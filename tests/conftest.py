"""Policy of the suite: float64, quick compilation, and types and shapes of the package's own signatures checked at run time."""

import gc
import os
from pathlib import Path

import pytest

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_enable_x64", True)
install_import_hook("pcx", "beartype.beartype")

MAPS = Path("/proc/self/maps")
MOST_MAPS = 20000  # Linux lets a process have 65530, and the compiler crashes beyond


@pytest.fixture(autouse=True)
def few_programs():
    """Compiled programs are forgotten before there are too many: each of them holds some mappings of memory."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
