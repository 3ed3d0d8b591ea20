"""Nudging (PN, NN, CN): fix the output near its own prediction instead of at the label.

    h_L = u_L - β (u_L - y),  u_L from the forward pass, once per batch;  β > 0 towards the label, β < 0 away from it
    then as PC-SE, with the weight gradient multiplied by 1/β (so that a push away also learns towards the label)

The strength grows by ``beta_ir`` per epoch from ``beta``. PN is positive, NN negative. CN takes the sign of each epoch from
``signs`` ("+--+…"), and draws one when these run out; ``signs="random"``, the paper's text, draws all of them.
With β = 1 it is PC-SE. Reference: Scellier et al. 2024 for the idea, the paper's Appendix B for this form.

``clamp`` says what happens when |β| reaches 1; the sources disagree, so all readings are here:
    "plain"   positive → 1; negative nudging → +1, that is plain PC (the convolutional experiments; the default); CN keeps signs
    "stay"    the sign stays: ±1 (the MLP experiments)
    "always"  everything → +1, CN included
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from pcx._energies import squared_error
from pcx._free_energy import observe
from pcx._learn import train_step
from pcx._types import Key, ModelError, Nodes
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
    """Settings; ``direction`` is "+" (PN), "-" (NN) or "±" (CN)."""

    lr_h: Any = 0.02
    momentum_h: Any = 0.0
    lr_theta: Any = 3e-4
    weight_decay: Any = 1e-4
    beta: Any = 0.5
    beta_ir: Any = 0.0
    T: int = eqx.field(static=True, default=8)
    direction: str = eqx.field(static=True, default="+")
    clamp: str = eqx.field(static=True, default="plain")
    signs: str = eqx.field(static=True, default="random")
    unit_gradients: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_positive(self, "lr_h", "lr_theta", "weight_decay", "beta_ir", "T")
        check_positive(self, "momentum_h", most=1.0)
        check_positive(self, "beta", allow_zero=False)
        if self.clamp not in ("plain", "stay", "always"):
            raise ModelError(f"clamp is {self.clamp!r}; use 'plain', 'stay' or 'always'.")
        if self.direction not in ("+", "-", "±"):
            raise ModelError(f"direction is {self.direction!r}; use '+', '-' or '±'.")
        if self.signs != "random" and set(self.signs) - set("+-"):
            raise ModelError(f"signs is {self.signs!r}; use a text of + and -, one per epoch, or 'random'.")


VARIANTS = {"pn": Hyper(direction="+"), "nn": Hyper(direction="-"), "cn": Hyper(direction="±")}

SEARCH = {
    "lr_h": ("log", 1e-2, 5e-1),
    "momentum_h": ("grid", 0.0, 1.0, 0.05),
    "lr_theta": ("log", 1e-5, 3e-4),
    "weight_decay": ("log", 1e-5, 1e-2),
    "beta": ("grid", 0.05, 1.0, 0.05),
    "beta_ir": ("choice", 0.02, 0.0),
}

_SAME = {"lr_h": 0.05, "momentum_h": 0.5, "T": 4}
IDENTITIES = [
    ("β = 1 is PC-SE", ("pn", {"beta": 1.0, **_SAME}), ("pc_se", _SAME)),
    ("negative nudging clamped to +1 is PC-SE", ("nn", {"beta": 1.0, **_SAME}), ("pc_se", _SAME)),
    ("centred nudging in a positive epoch is PN", ("cn", {"signs": "+", **_SAME}), ("pn", _SAME)),
    ("centred nudging in a negative epoch is NN", ("cn", {"signs": "-", **_SAME}), ("nn", _SAME)),
]
EQUILIBRIUM = {name: ({"T": 3000, "lr_h": 0.1, "beta": 0.3}, lambda hyper: hyper.beta**2) for name in VARIANTS}


def sign_of_epoch(hyper: Hyper, key: Key, epoch: Any) -> Any:
    """+1 or -1: the direction of nudging in an epoch."""
    if hyper.direction != "±":
        return 1.0 if hyper.direction == "+" else -1.0
    own = jax.random.fold_in(stream(key, "sign"), epoch)
    drawn = jnp.where(jax.random.bernoulli(own), 1.0, -1.0)
    if hyper.signs in ("random", ""):
        return drawn
    listed = jnp.array([1.0 if sign == "+" else -1.0 for sign in hyper.signs])
    return jnp.where(epoch < len(hyper.signs), listed[jnp.minimum(epoch, len(hyper.signs) - 1)], drawn)


def strength(hyper: Hyper, key: Key, epoch: Any) -> Any:
    """β of an epoch: signed, growing, clamped."""
    sign = sign_of_epoch(hyper, key, epoch)
    size = hyper.beta + hyper.beta_ir * epoch
    flips = hyper.clamp == "always" or (hyper.clamp == "plain" and hyper.direction == "-")
    # 0.1 + 45 × 0.02 is 1 in the settings, but may be a rounding below it in float32
    return jnp.where(size >= 1.0 - 1e-6, 1.0 if flips else sign, sign * jnp.minimum(size, 1.0))


def make(
    hyper: Hyper,
    *,
    total_steps: int | None = None,
    weight_optimiser: optax.GradientTransformation | None = None,
    output: str | None = None,
    **options: Any,
) -> Algorithm:
    """The algorithm with these settings; ``options`` go to `pcx.infer`."""
    optimiser = weight_optimiser or adamw(hyper, total_steps)

    def init(model: Any, x: Any, y: Any, key: Key) -> State:
        return fresh_state(model, optimiser)

    def step(state: State, x: Any, y: Any, key: Key, epoch: Any = 0) -> tuple[State, Metrics]:
        name, observed = observations(state.model, x, y, output)
        beta = strength(hyper, key, epoch)
        label: dict[str, Any] = {}

        def target(u: jax.Array) -> jax.Array:
            label[name] = observe(state.model, {name: observed[name]}, Nodes({name: u}))[name]
            return u - beta.astype(u.dtype) * (u - label[name])

        done = train_step(
            state.model,
            x,
            observed | {name: target},
            state_optimiser=optax.sgd(hyper.lr_h, momentum=hyper.momentum_h),
            weight_optimiser=optimiser,
            weight_state=state.weights,
            steps=hyper.T,
            weight_scale=1 / beta,
            energy={name: squared_error},
            key=step_key(key, state.step),
            training=True,
            **options,
        )
        metrics = metrics_of(done.energies, squared_error, label[name], done.inferred.forward.predictions[name])
        return State(done.model, done.optimiser_state, None, state.step + 1), metrics

    return Algorithm(init, step)
