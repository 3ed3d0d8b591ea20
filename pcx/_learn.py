"""Learning: each weight moves by the local error of the node it predicts.

``∂E/∂θ = Σ_nodes (∂E/∂u)(∂u/∂θ)``. The first factor (`deltas`) is an array per node, the second a pull-back of the
predictions, each of which reads its parents' values and nothing further: there is no pass through the network.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from pcx._free_energy import batch_size, execute, factor_energies, make_objective, update_state
from pcx._infer import infer
from pcx._model import Vode, named, partition, path_name
from pcx._types import Displaced, Key, ModelError, Nodes, Trained, near
from pcx.shortcuts import pooling, products
from pcx.shortcuts.differences import Predictions
from pcx.shortcuts.plan import Program
from pcx.shortcuts.zeros import refuse_nan

M = TypeVar("M")


def deltas(
    model: Any,
    values: Mapping[str, Array] | Displaced,
    predictions: Mapping[str, Array],
    *,
    energy: Mapping[str, Any] | None = None,
    precision: Mapping[str, Any] | None = None,
    step: Any = 0,
) -> Nodes[Array]:
    """``∂E/∂u`` for the nodes in ``predictions``: minus the error, for squared error."""
    given = predictions if isinstance(predictions, Nodes) else Nodes(predictions)
    factors = make_objective(model, energy, precision).factors(model, given, step)

    def total(predictions: Nodes[Array]) -> Array:
        return sum((jnp.sum(part) for part in factor_energies(factors, values, predictions).values()), start=jnp.zeros(()))

    return jax.grad(total)(given).only(given)


def weight_gradient(
    model: M,
    delta: Mapping[str, Array] | Callable[[Nodes[Array]], Mapping[str, Array]],
    values: Mapping[str, Array] | Displaced,
    x: Any = None,
    *,
    names: Iterable[str] | None = None,
    key: Key = None,
    training: bool = False,
) -> M:
    """The gradient of the batch mean for every weight, given ``delta = ∂E/∂u`` per node, at ``values``.

    ``delta`` may be a function of the predictions at these values; then they are computed once, not twice. Nodes that
    are not in ``delta`` (with a function: not in ``names``) contribute nothing and cost nothing. The result has the
    model's structure, with None where there is no weight. BatchNorm is differentiated with its batch statistics.
    Displaced values (`Inferred.displaced`) keep small errors exact where products are rounded.
    """
    values, away = (values.values, values) if isinstance(values, Displaced) else (values, None)
    n, nodes = batch_size(x, values), named(model, Vode)
    if n == 0:
        raise ModelError("the batch has no samples; a weight gradient is a mean over at least one.")
    wanted = list(delta) if isinstance(delta, Mapping) else list(values if names is None else names)
    for name in wanted:
        if name not in nodes:
            raise ModelError(f"the model has no node {name!r}; near: {near(name, nodes)}.")
    weights, rest = partition(model)
    full = Nodes(values) if set(values) == set(nodes) else execute(model, values, x, {}, {}, key, training, n).values
    program = Program(model, full, x, key, training)
    chosen = [name for name in program.outputs if name in wanted]
    anchored = away is not None or products.precision() is not None
    product = program.anchor(full if away is None else away.start).product if anchored else None

    def predictions(weights: M) -> tuple[Nodes[Array], Any]:
        arrays = eqx.filter(eqx.combine(weights, rest), eqx.is_array)
        found = program.predict(full, chosen, arrays, product=product, moved={} if away is None else away.by)
        return Nodes(found, found.roots), found.by

    u, pull, by = jax.vjp(predictions, weights, has_aux=True)
    given = delta if isinstance(delta, Mapping) else delta(Predictions(u, u.roots, by))
    return pull(Nodes({name: (jnp.asarray(given[name]) / n).astype(u[name].dtype) for name in u}))[0]


def apply_gradient(model: M, gradient: M, optimiser: optax.GradientTransformation, state: Any) -> tuple[M, Any]:
    """One update of the weights by an optax optimiser."""
    weights, rest = partition(model)
    trees = (state, jax.eval_shape(optimiser.init, weights))
    found, wanted = ({path_name(path): jnp.shape(a) for path, a in jax.tree_util.tree_leaves_with_path(tree)} for tree in trees)
    if found != wanted:
        raise ModelError("the state is not that of this optimiser and model; it begins as optimiser.init(pcx.weights(model)).")
    refuse_nan(optimiser, weights, "weight")
    updates, state = optimiser.update(gradient, state, weights)
    return eqx.combine(eqx.apply_updates(weights, updates), rest), state


def train_step(
    model: M,
    x: Any,
    observed: Mapping[str, Any],
    *,
    state_optimiser: Any,
    weight_optimiser: optax.GradientTransformation,
    weight_state: Any,
    steps: int,
    weight_scale: Any = 1.0,
    **options: Any,
) -> Trained:
    """Settle the values, then move the weights once: predictive coding on one batch.

    ``weight_state`` comes from ``weight_optimiser.init(pcx.weights(model))``. ``weight_scale`` multiplies the gradient
    before the optimiser (nudging: 1/β). The other options are those of `infer`.
    """
    inferred = infer(model, x, observed, optimiser=state_optimiser, steps=steps, **options)
    objective, learned = {name: options.get(name) for name in ("energy", "precision")}, dict[str, Nodes[Array]]()
    settled = inferred.values if inferred.displaced is None else inferred.displaced

    factors = make_objective(model, **objective).factors(model, inferred.values.only(inferred.reached), steps)
    pooled, part = pooling.learned(model, settled, x, factors, options)

    def delta(u: Nodes[Array]) -> Nodes[Array]:
        learned["energies"] = factor_energies({name: factors[name] for name in u}, settled, u) | pooled
        return deltas(model, settled, u, step=steps, **objective)

    context = {name: options[name] for name in ("key", "training") if name in options}
    gradient = weight_gradient(model, delta, settled, x, names=inferred.reached - pooled.keys(), **context)
    scaled = jax.tree.map(lambda g, more: weight_scale * (g + more), gradient, part)
    trained, weight_state = apply_gradient(model, scaled, weight_optimiser, weight_state)
    none = jnp.zeros(inferred.steps.shape, next(iter(inferred.values.values())).dtype)
    energies = Nodes({name: learned["energies"].get(name, none) for name in inferred.values})
    return Trained(update_state(trained, inferred.forward.state), weight_state, inferred, energies)
