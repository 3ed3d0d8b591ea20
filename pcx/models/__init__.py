"""Model families of the benchmark, one file each; `get` finds them by name.

>>> names()
['alexnet', 'mlp', 'resnet18', 'vgg19', 'vgg5', 'vgg7', 'vgg9']
"""

import importlib
import pkgutil
from types import ModuleType

from pcx._types import ModelError, near


def names() -> list[str]:
    """The names of all model families."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))


def get(name: str) -> ModuleType:
    """The module of a family: ``Options``, its settings, and ``build(shape, classes, options)``, a model."""
    if name not in names():
        raise ModelError(f"there is no model {name!r}; near: {near(name, names())}.")
    return importlib.import_module(f"{__name__}.{name}")
