"""Learning algorithms, one module each; a module may declare variants, and a variant's name is what users type.

>>> "pc_se" in names()
True
>>> hyper, make = get("pc_se")
"""

import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
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
from pcx.algorithms._common import unit_gradients as unit_gradients
from pcx.algorithms._common import warm_up_cosine as warm_up_cosine


def modules() -> list[ModuleType]:
    """All modules of this folder that hold an algorithm."""
    loaded, owner = [], dict[str, str]()
    for name in sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")):
        module = _load(name)
        for variant in module.VARIANTS:
            if variant in owner:
                raise ModelError(
                    f"two algorithms are called {variant!r}: in {owner[variant]} and in {module.__file__}; rename one."
                )
            owner[variant] = str(module.__file__)
        loaded.append(module)
    return loaded


def _load(name: str) -> ModuleType:
    """A module of this folder, or one sentence that names its file."""
    spec = importlib.util.find_spec(f"{__name__}.{name}")
    file = spec.origin if spec else name
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except SyntaxError as error:
        raise ModelError(f"{file} cannot be read: {error.msg}, in line {error.lineno}; mend it or remove it.") from error
    except Exception as error:
        raise ModelError(f"{file} cannot be imported: {type(error).__name__}: {error}; mend it or remove it.") from error
    has = {"VARIANTS": isinstance(getattr(module, "VARIANTS", None), Mapping), "make": callable(getattr(module, "make", None))}
    for field, fits in has.items():
        if not fits:
            what = {"VARIANTS": "mapping", "make": "function"}[field]
            raise ModelError(f"{file} has no {what} {field}; copy _template.py, or let the name of a helper start with _.")
    return module


def names() -> list[str]:
    """The names of all algorithms."""
    return sorted(name for module in modules() for name in module.VARIANTS)


def get(name: str) -> tuple[Any, Callable[..., Algorithm]]:
    """The default settings and the ``make`` function of an algorithm."""
    for module in modules():
        if name in module.VARIANTS:
            return module.VARIANTS[name], module.make
    raise ModelError(f"there is no algorithm {name!r}; near: {near(name, names())}.")
