"""What a run is: a task, an algorithm and every setting, checked before anything starts."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pcx.algorithms
import pcx.models
from pcx._types import ModelError, near

# of products; f16: as tf32, in half the bytes; bf16_state: of the state of inference too; tf32_plain: not anchored
PRECISIONS = ("float32", "tf32", "f16", "bf16", "bf16_state", "tf32_plain")


class ConfigError(ValueError):
    """A setting that cannot be meant; the message names it and says what is possible."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. ``hyper`` belongs to the algorithm and ``options`` to the model; `set_values` reaches both by field name."""

    dataset: str
    model: str
    algorithm: str
    hyper: Any
    options: Any
    epochs: int = 25
    batch: int = 128
    schedule: str = "warm_up_cosine"
    augmentation: str = "none"
    validation: float = 0.0
    patience: int = 0
    precision: str = "float32"
    population: str = "auto"
    energy_limit: float = 1e8
    train_limit: int = 0

    def __post_init__(self) -> None:
        at_least = {"epochs": 1, "batch": 1, "validation": 0, "patience": 0, "energy_limit": 0, "train_limit": 0}
        for name, low in at_least.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is at least {low}.")
        choices = {
            "schedule": ("warm_up_cosine", "constant"),
            "augmentation": ("none", "crop4_flip", "crop56_flip", "rotate5_flip"),
            "precision": PRECISIONS,
            "population": ("auto", "vmap", "map"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; use {', '.join(allowed)}.")
        if self.validation >= 1:
            raise ConfigError(f"validation is {self.validation}; it is the share of train that is held out, below 1.")
        if self.patience and not self.validation:
            raise ConfigError("patience stops a run on validation accuracy; hold some of train out with validation=0.1.")

    @property
    def task(self) -> str:
        return f"{self.dataset}/{self.model}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            field.name: dataclasses.asdict(getattr(self, field.name))
            if field.name in ("hyper", "options")
            else getattr(self, field.name)
            for field in dataclasses.fields(self)
        }

    def digest(self) -> str:
        """Equal for equal settings, whatever the seeds."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:12]


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `Config.as_dict`."""
    defaults, _ = pcx.algorithms.get(values["algorithm"])
    options = pcx.models.get(values["model"]).Options(**values["options"])
    return Config(**{**values, "hyper": dataclasses.replace(defaults, **values["hyper"]), "options": options})


def _fields(config: Config) -> dict[str, tuple[str, Any]]:
    """Every field that can be set, with the part it belongs to and its present value."""
    own = {f.name: ("", getattr(config, f.name)) for f in dataclasses.fields(config)}
    for part in ("hyper", "options"):
        own |= {f.name: (part, getattr(getattr(config, part), f.name)) for f in dataclasses.fields(getattr(config, part))}
    for fixed in ("dataset", "model", "algorithm", "hyper", "options"):
        own.pop(fixed)
    return own


def _convert(name: str, text: Any, present: Any) -> Any:
    """A text as the type that the setting has."""
    if not isinstance(text, str):
        text = str(text)
    try:
        if isinstance(present, bool):
            return {"true": True, "false": False}[text.lower()]
        return type(present)(text)
    except (ValueError, KeyError):
        example = f"{present:.2g}" if isinstance(present, float) else present
        raise ConfigError(f"{name} is {text!r}; it takes {_describe(present)}, such as {example}.") from None


def _describe(value: Any) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(type(value), "another value")


def set_values(config: Config, pairs: Mapping[str, Any]) -> Config:
    """A config with some settings replaced; unknown names and values that do not fit are refused."""
    known = _fields(config)
    changes: dict[str, dict[str, Any]] = {"": {}, "hyper": {}, "options": {}}
    for name, text in pairs.items():
        if name not in known:
            raise ConfigError(
                f"there is no setting {name!r} for {config.task} by {config.algorithm}; near: {near(name, known)}."
            )
        part, present = known[name]
        changes[part][name] = _convert(name, text, present)
    try:
        parts = {p: dataclasses.replace(getattr(config, p), **changes[p]) for p in ("hyper", "options") if changes[p]}
    except ModelError as error:
        raise ConfigError(str(error)) from None
    return dataclasses.replace(config, **changes[""], **parts)


def parse_pairs(texts: Sequence[str]) -> dict[str, str]:
    """``["T=8", "lr_h=0.1 momentum_h=0.5"]`` as a mapping."""
    pairs: dict[str, str] = {}
    for text in " ".join(texts).split():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"settings are written name=value, as in --set T=8, but got {text!r}.")
        if pairs.get(name, value) != value:
            raise ConfigError(f"--set gives {name} twice, as {pairs[name]} and as {value}; give it once.")
        pairs[name] = value
    return pairs


def with_options(settings: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """The settings of --set and those with an option of their own; where the two differ, they are refused."""
    for name in ("algorithm", "seeds"):
        if name in settings:
            raise ConfigError(f"{name} is not a setting; use --{name} {settings[name]}.")
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if settings.get(name, str(value)) != str(value):
            raise ConfigError(f"--{name} is {value}, but --set gives {name}={settings[name]}; give one of them.")
    return {**settings, **given}
