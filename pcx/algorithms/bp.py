"""Backpropagation (BP-SE, BP-CE): the baseline. No inference: the gradient of the loss of the forward pass.

loss = Σ (u_L - y)²  (without ½)   or   -Σ y log softmax(u_L),  mean over the batch;  θ ← AdamW(∂loss/∂θ)
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from pcx._free_energy import observe, run, update_state
from pcx._learn import apply_gradient
from pcx._model import partition
from pcx._types import Key, Nodes
from pcx.algorithms._common import (
    ENERGY,
    Algorithm,
    Metrics,
    State,
    adamw,
    check_loss,
    check_positive,
    fresh_state,
    metrics_of,
    observations,
    step_key,
)
from pcx.shortcuts.products import rounded


class Hyper(eqx.Module):
    """Settings; the floats are leaves, so that they can be mapped over."""

    lr_theta: Any = 3e-4
    weight_decay: Any = 1e-4
    loss: str = eqx.field(static=True, default="se")
    unit_gradients: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_positive(self, "lr_theta", "weight_decay")
        check_loss(self)


VARIANTS = {"bp_se": Hyper(loss="se"), "bp_ce": Hyper(loss="ce")}

SEARCH = {"lr_theta": ("log", 3e-5, 3e-4), "weight_decay": ("log", 1e-5, 1e-2)}


def make(
    hyper: Hyper,
    *,
    total_steps: int | None = None,
    weight_optimiser: optax.GradientTransformation | None = None,
    output: str | None = None,
) -> Algorithm:
    """The algorithm with these settings."""
    optimiser = weight_optimiser or adamw(hyper, total_steps)
    factor = 2.0 if hyper.loss == "se" else 1.0  # the squared error of a node has a half in front

    def init(model: Any, x: Any, y: Any, key: Key) -> State:
        return fresh_state(model, optimiser)

    def step(state: State, x: Any, y: Any, key: Key, epoch: Any = 0) -> tuple[State, Metrics]:
        name, observed = observations(state.model, x, y, output)
        theta, rest = partition(state.model)

        def loss(theta: Any) -> Any:
            done = run(eqx.combine(theta, rest), {}, x, key=step_key(key, state.step), training=True)
            label = observe(state.model, {name: observed[name]}, done.predictions)[name]
            parts = jax.vmap(ENERGY[hyper.loss])(label, done.predictions[name])
            return factor * jnp.mean(parts), (done, label, parts)

        gradient, (done, label, parts) = jax.grad(rounded(loss), has_aux=True)(theta)
        model, weight_state = apply_gradient(state.model, gradient, optimiser, state.weights)
        energies = Nodes({n: parts if n == name else jnp.zeros_like(parts) for n in done.values})
        metrics = metrics_of(energies, ENERGY[hyper.loss], label, done.predictions[name])
        return State(update_state(model, done.state), weight_state, None, state.step + 1), metrics

    return Algorithm(init, step)
