"""What all algorithms share: the shape of an algorithm, of its state and of its metrics, and the weight optimiser."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from pcx._energies import cross_entropy, squared_error
from pcx._free_energy import output_node
from pcx._model import weights
from pcx._types import Key, ModelError, Nodes

ENERGY = {"se": squared_error, "ce": cross_entropy}


class State(eqx.Module):
    """Everything that training changes. ``nodes`` is the state optimiser's state where it outlives a batch."""

    model: Any
    weights: Any
    nodes: Any
    step: Int[Array, ""]


def fresh_state(model: Any, optimiser: optax.GradientTransformation, nodes: Any = None) -> State:
    """The state before the first step."""
    return State(model, optimiser.init(weights(model)), nodes, jnp.zeros((), jnp.int32))


class Metrics(NamedTuple):
    """Of one step: the mean energy of every node at learning, the mean output energy and the output of the forward pass."""

    energies: Nodes[Float[Array, ""]]
    loss: Float[Array, ""]
    prediction: Float[Array, "batch ..."]


class Algorithm(NamedTuple):
    """A learning algorithm as two pure functions.

    ``init(model, x, y, key) -> State`` looks at a batch only for its shapes. ``step(state, x, y, key, epoch) ->
    (State, Metrics)`` learns from one batch; ``key`` is that of the whole run (steps fold in their own number) and ``epoch``
    counts from 0. ``y`` is what the output node is fixed to (labels, one-hot or not, or data), or a mapping from node names
    to observations. A step keeps the structure, shapes and dtypes of the state, so that it can be scanned.
    """

    init: Callable[..., State]
    step: Callable[..., tuple[State, Metrics]]


def warm_up_cosine(learning_rate: Any, total_steps: int | None) -> Any:
    """The schedule of the tuned settings: from lr to 1.1 lr over the first tenth, then by a cosine to 0.1 lr.

    Equal to optax's ``warmup_cosine_decay_schedule(lr, 1.1 lr, 0.1 S, S, 0.1 lr)``, whose own version cannot take a
    learning rate that is traced. Constant where ``total_steps`` is None.
    """
    if total_steps is None:
        return lambda count: learning_rate
    warm_up = int(0.1 * total_steps)

    def schedule(count: Any) -> Any:
        count = jnp.asarray(count, jnp.result_type(float))  # an int32 divided is float32, also where float64 is on
        rising = 1.0 + 0.1 * count / max(warm_up, 1)
        share = jnp.clip((count - warm_up) / max(total_steps - warm_up, 1), 0.0, 1.0)
        falling = 0.1 + (1.1 - 0.1) * 0.5 * (1.0 + jnp.cos(jnp.pi * share))
        return learning_rate * jnp.where(count < warm_up, rising, falling)

    return schedule


def adamw(hyper: Any, total_steps: int | None) -> optax.GradientTransformation:
    """The weight optimiser of all tuned settings: decoupled weight decay on all weights, biases included.

    Where the algorithm has the setting ``unit_gradients`` and it is on, `unit_gradients` come first.
    """
    optimiser = optax.adamw(warm_up_cosine(hyper.lr_theta, total_steps), weight_decay=hyper.weight_decay)
    return optax.chain(unit_gradients(), optimiser) if getattr(hyper, "unit_gradients", False) else optimiser


def unit_gradients() -> optax.GradientTransformation:
    """Divide every array of a gradient by its root mean square, so that its direction counts and its size does not.

    The error of a node is smaller by about the state learning rate for every layer above it. In a deep network the gradients
    of the first layers are then far below the ε = 1e-8 of AdamW, and their squares below the smallest number.
    """

    def of(gradient: Array) -> Array:
        largest = jnp.max(jnp.abs(gradient))
        scaled = gradient / jnp.where(largest > 0, largest, 1)
        return scaled / jnp.where(largest > 0, jnp.sqrt(jnp.mean(scaled**2)), 1)

    return optax.stateless(lambda gradients, _: jax.tree.map(of, gradients))


def check_positive(hyper: Any, *names: str, allow_zero: bool = True, most: float = float("inf")) -> None:
    """Refuse settings that cannot be meant; a traced setting is not looked at."""
    for name in names:
        value = getattr(hyper, name)
        if isinstance(value, jax.core.Tracer) or jnp.ndim(value) > 0:
            continue
        if not (value >= 0 if allow_zero else value > 0) or value == float("inf"):
            kind = "whole" if isinstance(getattr(type(hyper), name, value), int) else "finite"
            raise ModelError(f"{name} is {value}; it is a {kind} number {'of at least' if allow_zero else 'above'} zero.")
        if value > most:
            raise ModelError(f"{name} is {value}; it is at most {most}.")


def check_loss(hyper: Any) -> None:
    """The output's energy has one of two names."""
    if hyper.loss not in ENERGY:
        raise ModelError(f"loss is {hyper.loss!r}; use {' or '.join(map(repr, ENERGY))}.")


def observations(model: Any, x: Any, y: Any, output: str | None) -> tuple[str, dict[str, Any]]:
    """The node that the loss is measured at, and all observations."""
    if isinstance(y, Mapping):
        return output or next(iter(y)), dict(y)
    name = output or output_node(model, x)
    return name, {name: y}


def metrics_of(energies: Mapping[str, Array], energy: Any, label: Array, prediction: Array) -> Metrics:
    """The metrics of a step, given the label in the form of the output node and the output of the forward pass."""
    loss = jnp.mean(jax.vmap(energy)(label, prediction))
    return Metrics(Nodes({name: jnp.mean(part) for name, part in energies.items()}), loss, prediction)


def stream(key: Key, name: str) -> Key:
    """A key of the run for one purpose, such as the noise or the steps; streams with different names do not meet."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def step_key(key: Key, step: Any) -> Key:
    """The key of one training step."""
    return jax.random.fold_in(stream(key, "step"), step)
