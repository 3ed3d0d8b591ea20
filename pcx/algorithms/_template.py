"""NAME: what it does, in one sentence. Copy this file to a name without an underscore, and it is an algorithm.

    the equations, one line each, with the letters of the paper

What is particular: targets, schedules, what is kept from batch to batch. Reference: who proposed it, and any deviation.

This template is predictive coding that learns from the settled errors at the *forward* values: it passes
`pcx.check_algorithm`, so change it in small steps and check again.
"""

from typing import Any

import equinox as eqx
import optax

from pcx._free_energy import energies, run, update_state
from pcx._infer import infer
from pcx._learn import apply_gradient, deltas, weight_gradient
from pcx._types import Key
from pcx.algorithms._common import (
    ENERGY,
    Algorithm,
    Metrics,
    State,
    adamw,
    check_positive,
    fresh_state,
    metrics_of,
    observations,
    step_key,
)


class Hyper(eqx.Module):
    """Settings. Floats are leaves (they can be traced and mapped over); what shapes the program is static."""

    lr_h: Any = 0.01
    lr_theta: Any = 3e-4
    weight_decay: Any = 1e-4
    T: int = eqx.field(static=True, default=8)
    loss: str = eqx.field(static=True, default="se")

    def __check_init__(self) -> None:
        check_positive(self, "lr_h", "lr_theta", "weight_decay", "T")


# The names that users type, each with its default settings.
VARIANTS = {"template": Hyper()}

# Where a search looks: ("log", low, high), ("grid", low, high, step) or ("choice", value, …).
SEARCH = {"lr_h": ("log", 1e-2, 5e-1), "lr_theta": ("log", 1e-5, 3e-4), "weight_decay": ("log", 1e-5, 1e-2)}

# What must hold exactly: (text, (name, settings), (name, settings)) move the weights alike.
IDENTITIES: list[Any] = []

# The settled energy of a linear chain, as a multiple of that of PC: {name: (settings, function of them)}.
EQUILIBRIUM = {"template": ({"T": 3000, "lr_h": 0.1}, lambda hyper: 1.0)}


def make(
    hyper: Hyper,
    *,
    total_steps: int | None = None,
    weight_optimiser: optax.GradientTransformation | None = None,
    output: str | None = None,
) -> Algorithm:
    """The algorithm with these settings."""
    optimiser = weight_optimiser or adamw(hyper, total_steps)

    def init(model: Any, x: Any, y: Any, key: Key) -> State:
        return fresh_state(model, optimiser)

    def step(state: State, x: Any, y: Any, key: Key, epoch: Any = 0) -> tuple[State, Metrics]:
        name, observed = observations(state.model, x, y, output)
        energy, model = {name: ENERGY[hyper.loss]}, state.model
        context = {"key": step_key(key, state.step), "training": True}
        settled = infer(model, x, observed, optimiser=optax.sgd(hyper.lr_h), steps=hyper.T, energy=energy, **context)
        batch = settled.steps.shape[0]
        done = energies(model, settled.values, x, energy=energy, batch=batch, **context)
        predictions = run(model, settled.values, x, batch=batch, **context).predictions
        errors = deltas(model, settled.values, predictions, energy=energy)
        forward = settled.forward.values | {name: settled.values[name]}
        gradient = weight_gradient(model, errors, forward, x, **context)
        model, weight_state = apply_gradient(model, gradient, optimiser, state.weights)
        metrics = metrics_of(done, energy[name], settled.values[name], settled.forward.predictions[name])
        return State(update_state(model, settled.forward.state), weight_state, None, state.step + 1), metrics

    return Algorithm(init, step)
