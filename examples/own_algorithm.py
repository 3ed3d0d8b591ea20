"""Tutorial 5, an algorithm of one's own: the label fades in during inference. Checked, then compared with PC on digits.

    python examples/own_algorithm.py     the checks, one identity, and two accuracies

PC fixes the output at the label and lets it pull with full strength from the first step. Here the output's precision rises:

    π(t) = min(1, (t + 1) / (ramp · T)),   h ← h - γ ∂F/∂h with π(t) at the output, T times;   then the weights, as in PC

With ramp = 0 it is PC-SE. It is a toy, made to be short; `docs/add-an-algorithm.md` explains every piece of the module.
"""

import dataclasses
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import pcx
import pcx.data
import pcx.models.mlp
import pcx.nn as pxnn
from pcx.algorithms import Algorithm, Metrics, State, adamw, check_positive, metrics_of, observations, step_key


class Hyper(eqx.Module):
    """Floats are leaves: they can be traced, and `jax.vmap` can try several at once. T shapes the program, so it is static."""

    lr_h: Any = 0.02
    lr_theta: Any = 2e-3
    weight_decay: Any = 1e-4
    ramp: Any = 0.5
    T: int = eqx.field(static=True, default=8)

    def __check_init__(self) -> None:
        check_positive(self, "lr_h", "lr_theta", "weight_decay", "ramp", "T")


VARIANTS = {"fade_in": Hyper()}
SEARCH = {"lr_h": ("log", 1e-2, 5e-1), "lr_theta": ("log", 1e-5, 3e-3), "ramp": ("grid", 0.0, 1.0, 0.25)}
# Once the precision is 1 the energy is that of PC, so on a linear chain it settles at PC's closed form, times 1.
EQUILIBRIUM = {"fade_in": ({"T": 3000, "lr_h": 0.1}, lambda hyper: 1.0)}


def make(hyper: Hyper, *, total_steps: Any = None, weight_optimiser: Any = None, output: str | None = None) -> Algorithm:
    optimiser = weight_optimiser or adamw(hyper, total_steps)

    def strength(t: Any) -> Any:  # a precision may be a function of the inference step, which is traced
        return jnp.minimum(1.0, (t + 1) / jnp.maximum(hyper.ramp * hyper.T, 1.0))

    def init(model: Any, x: Any, y: Any, key: Any) -> State:
        return State(model, optimiser.init(pcx.weights(model)), None, jnp.zeros((), jnp.int32))

    def step(state: State, x: Any, y: Any, key: Any, epoch: Any = 0) -> tuple[State, Metrics]:
        name, observed = observations(state.model, x, y, output)
        done = pcx.train_step(
            state.model,
            x,
            observed,
            state_optimiser=optax.sgd(hyper.lr_h),
            weight_optimiser=optimiser,
            weight_state=state.weights,
            steps=hyper.T,
            energy={name: pcx.squared_error},
            precision={name: strength},
            key=step_key(key, state.step),  # the key is that of the whole run; every step takes its own
            training=True,
        )
        settled = done.inferred
        metrics = metrics_of(done.energies, pcx.squared_error, settled.values[name], settled.forward.predictions[name])
        return State(done.model, done.optimiser_state, None, state.step + 1), metrics

    return Algorithm(init, step)


def train(algorithm: Algorithm, train: Any, test: Any, epochs: int, batch: int = 64) -> float:
    """Test accuracy after the last epoch. A step keeps the shapes of its state, so an epoch is one scan."""
    key = jax.random.key(0)
    with pxnn.keys(key):
        model = pcx.models.mlp.build((64,), 10, pcx.models.mlp.Options(width=64, hidden=2))
    state = algorithm.init(model, train[0][:batch], train[1][:batch], key)

    @jax.jit
    def run_epoch(state: State, epoch: Any) -> State:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), len(train[0]))
        rows = order[: len(order) // batch * batch].reshape(-1, batch)
        body = lambda state, rows: (algorithm.step(state, train[0][rows], train[1][rows], key, epoch)[0], None)  # noqa: E731
        return jax.lax.scan(body, state, rows)[0]

    for epoch in range(epochs):
        state = run_epoch(state, jnp.asarray(epoch))
    output = pcx.run(state.model, {}, test[0]).predictions["vodes.2"]
    return float(jnp.mean(output.argmax(axis=1) == test[1]))


def one_step_difference(hyper: Hyper, x: jax.Array, y: jax.Array) -> float:
    """How far one step of this rule and of PC-SE move the weights apart, by plain gradient descent."""
    key, pc = jax.random.key(1), pcx.algorithms.get("pc_se")
    with pxnn.keys(key):
        model = pcx.models.mlp.build((64,), 10, pcx.models.mlp.Options(width=16, hidden=2))
    rules = (make(hyper, weight_optimiser=optax.sgd(0.1)),
             pc[1](dataclasses.replace(pc[0], lr_h=hyper.lr_h, T=hyper.T), weight_optimiser=optax.sgd(0.1)))  # fmt: skip
    models = [jax.jit(rule.step)(rule.init(model, x, y, key), x, y, key)[0].model for rule in rules]
    leaves = zip(*(jax.tree.leaves(pcx.weights(m)) for m in models), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in leaves)


def main(epochs: int = 8) -> dict[str, float]:
    pcx.check_algorithm(sys.modules[__name__])  # pure, one trace, vmap and scan agree, dtypes kept, the closed form
    print("all checks hold")
    digits = pcx.data.load("digits")
    sets = [(jnp.asarray(s.images.reshape(-1, 64) / 8 - 1), jnp.asarray(s.labels)) for s in (digits.train, digits.test)]
    x, y = (part[:32] for part in sets[0])
    result = {name: one_step_difference(Hyper(ramp=ramp), x, y) for name, ramp in (("identity", 0.0), ("otherwise", 1.0))}
    print(f"weights differ from those of PC-SE by {result['identity']:.1e} with ramp 0, {result['otherwise']:.1e} with ramp 1")
    hyper, make_pc = pcx.algorithms.get("pc_se")
    same = dataclasses.replace(hyper, lr_h=Hyper().lr_h, lr_theta=Hyper().lr_theta)  # the same rates, not tuned for either
    result["fade_in"], result["pc_se"] = (train(rule, *sets, epochs) for rule in (make(Hyper()), make_pc(same)))
    print(f"test accuracy (one seed): fade_in {result['fade_in']:.1%}, pc_se {result['pc_se']:.1%}")
    return result


if __name__ == "__main__":
    main()
