"""What `pcx search` varies: the paper's table of search spaces, per data set, model and algorithm.

    pcx search cifar10/vgg9 --algorithm cn --trials 50

A space is ("log", low, high), ("uniform", low, high), ("grid", low, high, step) or ("choice", value, value, …). Each algorithm
declares the ranges of its own numbers (``SEARCH`` in its module, the columns of the paper's table); what depends on model and
data is below. Names with ``*`` match any; of several entries that match, the later one wins.
"""

import inspect
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import pcx.algorithms

Space = tuple[Any, ...]

FEW_STEPS = ("choice", 4, 5, 6, 7, 8)
FASTER = {"lr_theta": ("log", 1e-4, 1e-2)}

# (data set, model, algorithm) -> setting -> space
SPACES: dict[tuple[str, str, str], dict[str, Space]] = {
    ("*", "*", "*"): {"activation": ("choice", "leaky_relu", "gelu", "hard_tanh")},
    ("*", "*", "bp_*"): {"activation": ("choice", "leaky_relu", "gelu", "hard_tanh", "relu")},
    ("*", "mlp", "*"): {"T": FEW_STEPS},
    ("*", "vgg5", "*"): {"T": FEW_STEPS},
    ("*", "vgg7", "*"): {"T": ("choice", 8, 9, 10, 11, 12)},
    ("*", "vgg9", "*"): {"T": ("choice", 9, 10, 12, 15, 18)},
    ("*", "resnet18", "*"): {"T": ("choice", 6, 10, 12, 18, 24)},
    # ours, not the paper's: small sets have fewer steps, and their settings a larger learning rate (`tasks.SMALL`)
    ("digits", "*", "*"): FASTER,
    ("iris", "*", "*"): FASTER,
    ("two_*", "*", "*"): {"lr_theta": ("log", 1e-3, 1e-1)},
    # the paper's table for MCPC, made for unconditional generation of MNIST; its T of 1000 was not searched
    ("*", "*", "mcpc"): {
        "activation": ("choice", "relu", "silu", "tanh", "leaky_relu", "hard_tanh"),
        "lr_h": ("log", 1e-4, 5e-2),
        "momentum_h": ("choice", 0.0, 0.9),
        "variance": ("choice", 1.0, 0.3, 0.01, 0.001),
        "lr_theta": ("log", 1e-4, 1e-1),
        "weight_decay": ("choice", 0.0, 0.1, 0.01, 0.001, 0.0001),
        "output_variance": ("log", 0.03, 1.0),
        "batch": ("choice", 150, 300, 600, 900),
    },
}
NOT_SEARCHED = {"mcpc": ("T",)}


def space_of(dataset: str, model: str, algorithm: str, known: Mapping[str, Any]) -> dict[str, Space]:
    """All that may be searched for a task and an algorithm, of the settings that are ``known`` to it.

    >>> space_of("cifar100", "vgg7", "bp_se", {"lr_theta": 1e-4, "activation": "gelu"})["lr_theta"]
    ('log', 3e-05, 0.0003)
    """
    _, make = pcx.algorithms.get(algorithm)
    found: dict[str, Space] = dict(getattr(inspect.getmodule(make), "SEARCH", {}))
    for pattern, spaces in SPACES.items():
        if all(fnmatchcase(name, part) for name, part in zip((dataset, model, algorithm), pattern, strict=True)):
            found |= spaces
    return {name: space for name, space in found.items() if name in known and name not in NOT_SEARCHED.get(algorithm, ())}


def points(space: Space, count: int = 5) -> list[Any]:
    """The values that a grid search visits: all of a grid or a choice, ``count`` of a range.

    >>> points(("grid", 0.0, 0.15, 0.05)), points(("log", 0.01, 1.0), 3)
    ([0.0, 0.05, 0.1, 0.15], [0.01, 0.1, 1.0])
    """
    kind, *rest = space
    if kind == "choice":
        return rest
    low, high = rest[:2]
    if kind == "grid":
        return [round(low + i * rest[2], 10) for i in range(round((high - low) / rest[2]) + 1)]
    shares = [i / (count - 1) for i in range(count)]
    middle = [low * (high / low) ** s if kind == "log" else low + (high - low) * s for s in shares[1:-1]]
    return [low, *(float(f"{value:.6g}") for value in middle), high]


def extended(space: Space, value: Any) -> Space:
    """The smallest space of this kind that holds a value as well; a grid that misses it becomes a range.

    >>> extended(("choice", 4, 5), 12), extended(("log", 0.01, 0.5), 0.8), extended(("grid", 0.0, 1.0, 0.05), 0.33)
    (('choice', 4, 5, 12), ('log', 0.01, 0.8), ('uniform', 0.0, 1.0))
    """
    kind, *rest = space
    if kind == "choice":
        if value in rest:
            return space
        return (kind, *rest, value) if isinstance(value, str) else (kind, *sorted([*rest, value]))
    low, high = min(rest[0], value), max(rest[1], value)
    if kind == "grid" and abs((value - rest[0]) / rest[2] - round((value - rest[0]) / rest[2])) > 1e-6:
        return ("uniform", low, high)
    if kind == "log" and low <= 0:
        return ("uniform", low, high)
    return (kind, low, high, *rest[2:])


def text_of(space: Space) -> str:
    """A space in words.

    >>> text_of(("log", 0.01, 0.5)), text_of(("grid", 0.0, 1.0, 0.05))
    ('0.01 to 0.5', '0 to 1 in steps of 0.05')
    """
    kind, *rest = space
    if kind == "choice":
        return ", ".join(map(str, rest))
    return f"{rest[0]:g} to {rest[1]:g}" + (f" in steps of {rest[2]:g}" if kind == "grid" else "")
