"""Policy of the suite: float64, quick compilation, and types and shapes of the package's own signatures checked at run time."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_enable_x64", True)
install_import_hook("pcx", "beartype.beartype")
