"""What optax lacks for the values: gradient descent with noise, whose steps sample instead of settle.

Each is an ordinary optax transformation. Without noise (``variance=0``) each descends.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pcx._types import Key


class NoisyState(NamedTuple):
    """The key of the noise to come, and the momentum of every array."""

    key: Key
    momentum: Any


def _noise(key: Key, like: Any, variance: Any) -> tuple[Key, Any]:
    """Independent Gaussian noise for every entry of a tree, and the key after it."""
    leaves, structure = jax.tree.flatten(like)
    key, *own = jax.random.split(key, len(leaves) + 1)
    draws = [
        jnp.sqrt(variance).astype(a.dtype) * jax.random.normal(k, a.shape, a.dtype) for k, a in zip(own, leaves, strict=True)
    ]
    return key, jax.tree.unflatten(structure, draws)


def langevin(learning_rate: Any, variance: Any = 1.0, *, key: Key) -> optax.GradientTransformation:
    """First-order Langevin dynamics (the paper's Eq. 4): ``Δh = -γ ∇E + √(2γ) N``, with N of this variance.

    For a quadratic energy ``½ a h²`` the chain is stationary at variance ``2 σ² / (a (2 - γ a))``, which tends to that of
    ``exp(-E / σ²)`` as γ → 0.
    """
    learning_rate, variance = jnp.asarray(learning_rate), jnp.asarray(variance)

    def init(values: Any) -> NoisyState:
        return NoisyState(key, None)

    def update(gradients: Any, state: NoisyState, values: Any = None) -> tuple[Any, NoisyState]:
        new_key, noise = _noise(state.key, gradients, 2 * learning_rate * variance)
        step = jax.tree.map(lambda g, n: -learning_rate.astype(g.dtype) * g + n, gradients, noise)
        return step, NoisyState(new_key, None)

    return optax.GradientTransformation(init, update)


def second_order_langevin(learning_rate: Any, momentum: Any, variance: Any = 1.0, *, key: Key) -> optax.GradientTransformation:
    """Second-order Langevin dynamics (the paper's Eqs. 5 and 6), momentum first, then the value with the new momentum:

    ``r ← r - γ ∇E - γ (1 - m) r + √(2 (1 - m) γ) N``, then ``h ← h + γ r``.

    The paper prints ``+γ ∇E``, which would climb. Updating both at once from the old state is unstable where the curvature
    ``a`` of the energy has ``γ a > 1 - m``.
    """
    rate, keep, variance = jnp.asarray(learning_rate), jnp.asarray(momentum), jnp.asarray(variance)

    def init(values: Any) -> NoisyState:
        return NoisyState(key, jax.tree.map(jnp.zeros_like, values))

    def update(gradients: Any, state: NoisyState, values: Any = None) -> tuple[Any, NoisyState]:
        new_key, noise = _noise(state.key, gradients, 2 * (1 - keep) * rate * variance)

        def faster(r: Any, g: Any, n: Any) -> Any:
            return r - rate.astype(g.dtype) * (g + (1 - keep).astype(g.dtype) * r) + n

        r = jax.tree.map(faster, state.momentum, gradients, noise)
        return jax.tree.map(lambda r: rate.astype(r.dtype) * r, r), NoisyState(new_key, r)

    return optax.GradientTransformation(init, update)


def noisy_heavy_ball(learning_rate: Any, momentum: Any, variance: Any = 1.0, *, key: Key) -> optax.GradientTransformation:
    """SGD with momentum whose gradient carries noise of variance ``2 σ² (1 - m) / γ``: what the tuned settings use.

    ``g ← ∇E + noise``, ``r ← g + m r``, ``h ← h - γ r``. Without noise it is ``optax.sgd(γ, momentum=m)``.
    """
    rate, keep, variance = jnp.asarray(learning_rate), jnp.asarray(momentum), jnp.asarray(variance)

    def init(values: Any) -> NoisyState:
        return NoisyState(key, jax.tree.map(jnp.zeros_like, values))

    def update(gradients: Any, state: NoisyState, values: Any = None) -> tuple[Any, NoisyState]:
        new_key, noise = _noise(state.key, gradients, 2 * variance * (1 - keep) / rate)
        r = jax.tree.map(lambda g, n, r: g + n + keep.astype(g.dtype) * r, gradients, noise, state.momentum)
        return jax.tree.map(lambda r: -rate.astype(r.dtype) * r, r), NoisyState(new_key, r)

    return optax.GradientTransformation(init, update)
