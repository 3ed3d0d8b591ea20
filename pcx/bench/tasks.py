"""Tasks: what a data set and a model make together. Normalisation and augmentation belong here, not to the data.

``dataset/model`` names a task; `configure` gives its config for an algorithm: the tuned settings where there are some.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

import pcx.algorithms
import pcx.data
import pcx.models
import pcx.nn as pxnn
from pcx._types import Key, ModelError, near
from pcx.bench.config import Config, ConfigError, set_values
from pcx.bench.configs import accuracy
from pcx.data import augment

# mean and deviation per channel of images in [0, 1] (the paper's table of normalisation); digits count to 16
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.5,), (0.5,)),
    "fashionmnist": ((0.5,), (0.5,)),
    "kmnist": ((0.5,), (0.5,)),
    "emnist": ((0.5,), (0.5,)),
    "notmnist": ((0.5,), (0.5,)),
    "digits": ((0.5,), (0.5,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "tinyimagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
PIXELS = ((0.5,), (0.5,))  # of images that are one's own: from -1 to 1
SCALE = {"digits": 16}
CROP = {"crop56_flip": 56}

# Smaller sets than the tuned settings were found on: weights learn faster, and there are more epochs of fewer steps.
SMALL: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 40, "batch": 64, "lr_theta": 2e-3},
    "iris": {"epochs": 100, "batch": 32, "lr_theta": 2e-3},
    "two_moons": {"epochs": 8, "batch": 32, "lr_theta": 1e-2},
    "two_circles": {"epochs": 8, "batch": 32, "lr_theta": 1e-2},
}


class Pipeline(NamedTuple):
    """From stored samples to what the model sees: ``train(key, images)`` with augmentation, ``test(images)`` without."""

    train: Callable[[Key, Array], Array]
    test: Callable[[Array], Array]


def pipeline(config: Config) -> Pipeline:
    """The input pipeline of a config, for use inside the compiled epoch."""
    statistics = NORMALISATION.get(config.dataset)

    def normalise(images: Array) -> Array:
        if statistics is None and images.dtype != jnp.uint8:
            return images.astype(jnp.float32)
        return augment.normalise(images, *(statistics or PIXELS), jnp.float32, scale=SCALE.get(config.dataset, 255))

    def check(images: Array) -> None:
        if config.augmentation != "none" and images.ndim != 4:
            raise ConfigError(
                f"{config.dataset} has rows of numbers, not images; augmentation={config.augmentation} cannot be."
            )

    def train(key: Key, images: Array) -> Array:
        check(images)
        first, second = jax.random.split(key)
        if config.augmentation.startswith("crop") and images.shape[-1] != images.shape[-2]:
            raise ConfigError(f"{config.augmentation} crops squares; images of {config.dataset} are {images.shape[-2:]}.")
        if config.augmentation == "crop4_flip":
            images = augment.pad_and_crop(second, augment.flip(first, images), images.shape[-1], 4)
        elif config.augmentation == "crop56_flip":
            images = augment.pad_and_crop(second, augment.flip(first, images), 56, 0)
        elif config.augmentation == "rotate5_flip":
            images = augment.rotate(second, augment.flip(first, images), 5.0)
        return normalise(images)

    def test(images: Array) -> Array:
        check(images)
        size = CROP.get(config.augmentation)
        return normalise(images if size is None else augment.centre_crop(images, size))

    return Pipeline(train, test)


def split_task(task: str) -> tuple[str, str]:
    """The data set and the model of a task's name."""
    dataset, slash, model = task.partition("/")
    if not slash or not model:
        raise ConfigError(f"a task is written dataset/model, such as mnist/mlp, but got {task!r}.")
    for name, known, what in ((dataset, pcx.data.names(), "data set"), (model, pcx.models.names(), "model")):
        if name not in known:
            hint = f" (one of your own is {name}.npz in PCX_DATA)" if what == "data set" else ""
            raise ConfigError(f"there is no {what} {name!r}{hint}; near: {near(name, known)}.")
    return dataset, model


def configure(task: str, algorithm: str, **changes: Any) -> Config:
    """The config of a task and an algorithm: tuned settings where the paper has them, those of the nearest set elsewhere."""
    dataset, model = split_task(task)
    try:
        hyper, _ = pcx.algorithms.get(algorithm)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    config = Config(dataset, model, algorithm, hyper, pcx.models.get(model).Options())
    return set_values(set_values(config, known_settings(dataset, model, algorithm) | SMALL.get(dataset, {})), changes)


def known_settings(dataset: str, model: str, algorithm: str) -> dict[str, Any]:
    """The tuned settings of a task, or those of the nearest data set, without its augmentation; empty where there are none."""
    tuned, *near = (accuracy.settings(model, name, algorithm) for name in (dataset, "mnist", "cifar10"))
    return tuned or next((found | {"augmentation": "none"} for found in near if found), {})


def build_model(config: Config, shape: tuple[int, ...], classes: int, key: Key) -> Any:
    """A model with weights from a key, for samples of this shape as the pipeline gives them."""
    try:
        with pxnn.keys(key):
            return pcx.models.get(config.model).build(shape, classes, config.options)
    except (ModelError, ConfigError):
        raise
    except ValueError as error:  # of a layer, at a shape that it cannot take
        reason = " ".join(str(part).strip() for part in error.args)
        raise ConfigError(f"{config.model} cannot take samples of shape {shape} of {config.dataset}: {reason}") from None


def make_algorithm(config: Config, hyper: Any, total_steps: int, **options: Any) -> pcx.algorithms.Algorithm:
    """The algorithm of a config, with settings that may be traced."""
    _, make = pcx.algorithms.get(config.algorithm)
    return make(hyper, total_steps=total_steps if config.schedule == "warm_up_cosine" else None, **options)


def hyper_floats(config: Config) -> dict[str, float]:
    """The settings of the algorithm that are numbers, and so can differ between members of a population."""
    fields = {f.name: getattr(config.hyper, f.name) for f in dataclasses.fields(config.hyper)}
    return {name: value for name, value in fields.items() if isinstance(value, float)}
