"""Predictive coding (PC-SE, PC-CE): fix input and label, settle the values for T steps, then move every weight once.

    h_l ← h_l - γ ∂F/∂h_l   T times, by SGD with momentum that starts afresh with every batch (Eq. 3, left)
    θ_l ← AdamW(mean over the batch of ∂F/∂θ_l)   at the settled values (Eq. 3, right)

The output node has squared error or, for PC-CE, cross-entropy; all others keep the model's energies. All nodes start at
the forward pass. Reference: Whittington & Bogacz 2017; Pinchetti et al. 2022 for cross-entropy.
"""

from typing import Any

import equinox as eqx
import optax

from pcx._learn import train_step
from pcx._types import Key
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


class Hyper(eqx.Module):
    """Settings; the floats are leaves, so that they can be mapped over."""

    lr_h: Any = 0.01
    momentum_h: Any = 0.0
    lr_theta: Any = 3e-4
    weight_decay: Any = 1e-4
    T: int = eqx.field(static=True, default=8)
    loss: str = eqx.field(static=True, default="se")
    unit_gradients: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_positive(self, "lr_h", "lr_theta", "weight_decay", "T")
        check_positive(self, "momentum_h", most=1.0)
        check_loss(self)


VARIANTS = {"pc_se": Hyper(loss="se"), "pc_ce": Hyper(loss="ce")}

SEARCH = {
    "lr_h": ("log", 1e-2, 5e-1),
    "momentum_h": ("grid", 0.0, 1.0, 0.05),
    "lr_theta": ("log", 1e-5, 3e-4),
    "weight_decay": ("log", 1e-5, 1e-2),
}

EQUILIBRIUM = {"pc_se": ({"T": 3000, "lr_h": 0.1}, lambda hyper: 1.0)}


def make(
    hyper: Hyper,
    *,
    total_steps: int | None = None,
    weight_optimiser: optax.GradientTransformation | None = None,
    output: str | None = None,
    **options: Any,
) -> Algorithm:
    """The algorithm with these settings; ``options`` go to `pcx.infer` (``init``, ``precision``, ``shortcuts`` …)."""
    optimiser = weight_optimiser or adamw(hyper, total_steps)

    def init(model: Any, x: Any, y: Any, key: Key) -> State:
        return fresh_state(model, optimiser)

    def step(state: State, x: Any, y: Any, key: Key, epoch: Any = 0) -> tuple[State, Metrics]:
        name, observed = observations(state.model, x, y, output)
        energy = ENERGY[hyper.loss]
        done = train_step(
            state.model,
            x,
            observed,
            state_optimiser=optax.sgd(hyper.lr_h, momentum=hyper.momentum_h),
            weight_optimiser=optimiser,
            weight_state=state.weights,
            steps=hyper.T,
            energy={name: energy},
            key=step_key(key, state.step),
            training=True,
            **options,
        )
        settled = done.inferred
        metrics = metrics_of(done.energies, energy, settled.values[name], settled.forward.predictions[name])
        return State(done.model, done.optimiser_state, None, state.step + 1), metrics

    return Algorithm(init, step)
