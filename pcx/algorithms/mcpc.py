"""Monte Carlo predictive coding (MCPC): the values do not settle, they sample their posterior; then one weight step.

    h ← one step of Langevin dynamics on F, T times;  θ ← AdamW(∂F/∂θ) at the last sample

``form`` chooses the dynamics (`pcx.optim`): "heavy_ball" (the tuned settings), "first_order" (the paper's Eq. 4) or
"second_order" (its Eqs. 5 and 6). Momentum and noise go on from batch to batch; the values start anew, at zero.
Reference: Oliviers et al. 2024. To generate, call `pcx.infer` with the same optimiser and nothing observed.
"""

from typing import Any

import equinox as eqx
import optax

from pcx import optim
from pcx._energies import squared_error
from pcx._free_energy import run
from pcx._infer import infer
from pcx._learn import train_step
from pcx._types import Key, ModelError
from pcx.algorithms._common import (  # fmt: skip
    Algorithm,
    Metrics,
    State,
    adamw,
    check_positive,
    fresh_state,
    metrics_of,
    observations,
    step_key,
    stream,
)


class Hyper(eqx.Module):
    """Settings; ``variance`` is that of the noise, ``output_variance`` that of the output node (its precision's inverse)."""

    lr_h: Any = 0.01
    momentum_h: Any = 0.9
    variance: Any = 1.0
    output_variance: Any = 1.0
    lr_theta: Any = 1e-3
    weight_decay: Any = 1e-4
    T: int = eqx.field(static=True, default=100)
    form: str = eqx.field(static=True, default="heavy_ball")
    init: str = eqx.field(static=True, default="zeros")

    def __check_init__(self) -> None:
        check_positive(self, "variance", "lr_theta", "weight_decay", "T")
        check_positive(self, "momentum_h", most=1.0)
        check_positive(self, "lr_h", "output_variance", allow_zero=False)
        if self.form not in ("heavy_ball", "first_order", "second_order"):
            raise ModelError(f"form is {self.form!r}; use 'heavy_ball', 'first_order' or 'second_order'.")


VARIANTS = {"mcpc": Hyper()}

SEARCH = {
    "lr_h": ("log", 1e-3, 1e-1),
    "lr_theta": ("log", 1e-4, 1e-2),
    "output_variance": ("log", 1e-2, 1.0),
    "weight_decay": ("choice", 0.0, 1e-4, 1e-3, 1e-2),
}

_QUIET = {"variance": 0.0, "init": "forward", "lr_h": 0.05, "T": 4}
IDENTITIES = [
    (
        "without noise the heavy ball is PC-SE",
        ("mcpc", {"momentum_h": 0.5, **_QUIET}),
        ("pc_se", {"momentum_h": 0.5, "lr_h": 0.05, "T": 4}),
    ),
    (
        "without noise first-order Langevin is PC-SE",
        ("mcpc", {"form": "first_order", **_QUIET}),
        ("pc_se", {"lr_h": 0.05, "T": 4}),
    ),
]
EQUILIBRIUM = {"mcpc": ({"T": 3000, "lr_h": 0.05, "variance": 0.0}, lambda hyper: 1.0)}


def dynamics(hyper: Hyper, key: Key) -> optax.GradientTransformation:
    """The optax transformation that samples the values."""
    if hyper.form == "first_order":
        return optim.langevin(hyper.lr_h, hyper.variance, key=key)
    form = optim.second_order_langevin if hyper.form == "second_order" else optim.noisy_heavy_ball
    return form(hyper.lr_h, hyper.momentum_h, hyper.variance, key=key)


def make(
    hyper: Hyper,
    *,
    total_steps: int | None = None,
    weight_optimiser: optax.GradientTransformation | None = None,
    output: str | None = None,
    **options: Any,
) -> Algorithm:
    """The algorithm with these settings; ``options`` go to `pcx.infer`. The learning rate of the weights is constant."""
    optimiser = weight_optimiser or adamw(hyper, None)

    def init(model: Any, x: Any, y: Any, key: Key) -> State:
        _, observed = observations(model, x, y, output)
        noise = stream(key, "noise")
        start = infer(model, x, observed, optimiser=dynamics(hyper, noise), steps=0, init=hyper.init, key=key, **options)
        return fresh_state(model, optimiser, start.optimiser_state)

    def step(state: State, x: Any, y: Any, key: Key, epoch: Any = 0) -> tuple[State, Metrics]:
        name, observed = observations(state.model, x, y, output)
        done = train_step(
            state.model,
            x,
            observed,
            state_optimiser=dynamics(hyper, key),
            weight_optimiser=optimiser,
            weight_state=state.weights,
            steps=hyper.T,
            init=hyper.init,
            optimiser_state=state.nodes,
            precision={name: 1 / hyper.output_variance},
            key=step_key(key, state.step),
            training=True,
            **options,
        )
        settled = done.inferred
        batch = settled.steps.shape[0]
        forward = run(state.model, {}, x, key=step_key(key, state.step), training=True, batch=batch).predictions[name]
        metrics = metrics_of(done.energies, squared_error, settled.values[name], forward)
        return State(done.model, done.optimiser_state, settled.optimiser_state, state.step + 1), metrics

    return Algorithm(init, step)
