"""Policy of the suite: float64, and shapes and types of the package's own signatures checked at run time."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_enable_x64", True)
install_import_hook("pcx", "beartype.beartype")
