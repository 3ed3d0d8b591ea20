"""Incremental predictive coding (iPC): values and weights move together, at every one of the T steps.

    (g_h, g_θ) = ∇F at the same point;  h ← SGD(g_h), then θ ← AdamW(g_θ);  T times per batch, no learning step after

The weight optimiser is stepped T times per batch, so its schedule is T times as long. The predictions of nodes change with
the weights, so no node may be skipped. Batch statistics stay those of the forward pass. Reference: Salvatori et al. 2024.

Before inference has reached it, a node's error is zero, or as small as the last change of its weights. A compiler may round a
prediction in the loop otherwise than in the forward pass, and Adam would make full steps of that difference. So errors are kept
as differences from the first step: ``h - u = (h₀ - u₀) + (h - h₀) - (u - u of the first step)``.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from pcx._free_energy import execute, factor_energies, freeze_state, make_objective, update_state
from pcx._infer import infer
from pcx._learn import apply_gradient
from pcx._model import partition, weights
from pcx._types import NO_SHORTCUTS, Displaced, Key, Nodes, Observed
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
from pcx.shortcuts.products import rounded_derivatives


class Hyper(eqx.Module):
    """Settings; the floats are leaves, so that they can be mapped over."""

    lr_h: Any = 0.5
    momentum_h: Any = 0.0
    lr_theta: Any = 2e-4
    weight_decay: Any = 1e-3
    T: int = eqx.field(static=True, default=8)
    loss: str = eqx.field(static=True, default="se")
    unit_gradients: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_positive(self, "lr_h", "lr_theta", "weight_decay")
        check_positive(self, "momentum_h", most=1.0)
        check_positive(self, "T", allow_zero=False)
        check_loss(self)


VARIANTS = {"ipc": Hyper()}

SEARCH = {
    "lr_h": ("log", 1e-2, 1.0),
    "momentum_h": ("grid", 0.0, 1.0, 0.05),
    "lr_theta": ("log", 1e-5, 3e-4),
    "weight_decay": ("log", 1e-5, 1e-1),
}

IDENTITIES = [("one incremental step learns what PC learns before inference", ("ipc", {"T": 1}), ("pc_se", {"T": 0}))]
EQUILIBRIUM = {"ipc": ({"T": 3000, "lr_h": 0.1}, lambda hyper: 1.0)}


def make(
    hyper: Hyper,
    *,
    total_steps: int | None = None,
    weight_optimiser: optax.GradientTransformation | None = None,
    output: str | None = None,
    init_values: Any = None,
    unroll: bool = False,
) -> Algorithm:
    """The algorithm with these settings; ``init_values`` is the ``init`` of `pcx.infer`, ``unroll`` writes the steps out."""
    optimiser = weight_optimiser or adamw(hyper, None if total_steps is None else total_steps * hyper.T)
    state_optimiser = optax.sgd(hyper.lr_h, momentum=hyper.momentum_h)

    def init(model: Any, x: Any, y: Any, key: Key) -> State:
        return fresh_state(model, optimiser)

    def step(state: State, x: Any, y: Any, key: Key, epoch: Any = 0) -> tuple[State, Metrics]:
        name, observed = observations(state.model, x, y, output)
        context = {"key": step_key(key, state.step), "training": True}
        energy = {name: ENERGY[hyper.loss]}
        start = infer(state.model, x, observed, optimiser=state_optimiser, steps=0, init=init_values, energy=energy,
                      shortcuts=NO_SHORTCUTS, **context)  # fmt: skip
        frozen = freeze_state(state.model, start.forward.state)
        _, rest = partition(frozen)
        free = [n for n in start.values if n not in observed or isinstance(observed[n], Observed)]
        batch = start.steps.shape[0]
        factors = make_objective(frozen, energy, None).factors(frozen, start.values, 0)
        gap = {n: value - start.forward.predictions[n] for n, value in start.values.items()}  # zero after a forward start

        def body(carry: Any, t: Any) -> Any:
            way, nodes, theta, weight_state, first = carry

            def total(way: Nodes[jax.Array], theta: Any) -> Any:
                values = start.values | {n: start.values[n] + moved for n, moved in way.items()}
                u = execute(eqx.combine(theta, rest), values, x, {}, {}, context["key"], True, batch).predictions
                base = jax.tree.map(lambda now, then: jnp.where(t == 0, now, then), jax.lax.stop_gradient(u), first)
                by = Nodes({n: gap[n] + way[n] if n in way else gap[n] for n in u})
                parts = factor_energies(factors, Displaced(base, by), u)
                return sum(jnp.sum(part) for part in parts.values()), (parts, base)

            found = jax.grad(rounded_derivatives(total), argnums=(0, 1), has_aux=True)(way, theta)
            (g_h, g_theta), (parts, first) = found
            g_h = Nodes({n: jnp.where(observed[n].mask, 0, g) if n in observed else g for n, g in g_h.items()})
            updates, nodes = state_optimiser.update(g_h, nodes, way)
            mean = jax.tree.map(lambda g: g / batch, g_theta)
            theta, weight_state = apply_gradient(theta, mean, optimiser, weight_state)
            return (optax.apply_updates(way, updates), nodes, theta, weight_state, first), parts

        still = Nodes({n: jnp.zeros_like(start.values[n]) for n in free})
        carry = (still, start.optimiser_state, weights(frozen), state.weights, start.forward.predictions)
        if unroll:
            for t in range(hyper.T):
                carry, last = body(carry, t)
        else:
            carry, parts = jax.lax.scan(body, carry, jnp.arange(hyper.T))
            last = Nodes({n: part[-1] for n, part in parts.items()})
        _, _, theta, weight_state, _ = carry
        metrics = metrics_of(last, energy[name], start.values[name], start.forward.predictions[name])
        model = update_state(eqx.combine(theta, partition(state.model)[1]), start.forward.state)
        return State(model, weight_state, None, state.step + 1), metrics

    return Algorithm(init, step)
