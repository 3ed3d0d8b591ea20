"""Learning algorithms, one module each; a module may declare variants, and a variant's name is what users type.

>>> "pc_se" in names()
True
>>> hyper, make = get("pc_se")
"""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pcx._types import ModelError, near
from pcx.algorithms._common import Algorithm as Algorithm
from pcx.algorithms._common import Metrics as Metrics
from pcx.algorithms._common import State as State
from pcx.algorithms._common import adamw as adamw
from pcx.algorithms._common import check_positive as check_positive
from pcx.algorithms._common import fresh_state as fresh_state
from pcx.algorithms._common import metrics_of as metrics_of
from pcx.algorithms._common import observations as observations
from pcx.algorithms._common import step_key as step_key
from pcx.algorithms._common import stream as stream
from pcx.algorithms._common import warm_up_cosine as warm_up_cosine


def modules() -> list[ModuleType]:
    """All modules of this folder that hold an algorithm."""
    found = [info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")]
    loaded = [importlib.import_module(f"{__name__}.{name}") for name in sorted(found)]
    owner: dict[str, str] = {}
    for module in loaded:
        if not hasattr(module, "VARIANTS") or not hasattr(module, "make"):
            raise ModelError(f"{module.__name__} has no VARIANTS or no make; a helper's name starts with an underscore.")
        for name in module.VARIANTS:
            if name in owner:
                raise ModelError(f"two algorithms are called {name!r}: in {owner[name]} and in {module.__name__}; rename one.")
            owner[name] = module.__name__
    return loaded


def names() -> list[str]:
    """The names of all algorithms."""
    return sorted(name for module in modules() for name in module.VARIANTS)


def get(name: str) -> tuple[Any, Callable[..., Algorithm]]:
    """The default settings and the ``make`` function of an algorithm."""
    for module in modules():
        if name in module.VARIANTS:
            return module.VARIANTS[name], module.make
    raise ModelError(f"there is no algorithm {name!r}; near: {near(name, names())}.")
