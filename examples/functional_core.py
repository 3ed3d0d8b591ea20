"""Tutorial 3, the functional core: `run`, `energies`, `infer` and `weight_gradient` by hand, and the five uses of one model.

    python examples/functional_core.py   runs in seconds on Fisher's iris; prints what it finds

The core has one idea: a network is a pure function from the values of ALL nodes to their predictions. Everything below reads
that function or differentiates it. Layers are plain Equinox and optimisers plain optax; only nodes are PCX's.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pcx
import pcx.data


class Classifier(pcx.EnergyModule):
    """Lengths of a flower → hidden → hidden → species."""

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.layers = [eqx.nn.Linear(i, o, key=k) for i, o, k in zip((4, 16, 16), (16, 16, 3), keys, strict=True)]
        self.low, self.high, self.species = pcx.Vode((16,)), pcx.Vode((16,)), pcx.Vode((3,))

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second, third = self.layers
        return self.species(third(self.high(jnp.tanh(second(self.low(jnp.tanh(first(x))))))))


class Generator(pcx.EnergyModule):
    """A latent cause → lengths of a flower. A vode called without a prediction is a root; its mean makes it Gaussian."""

    def __init__(self, key: Any):
        self.layer = eqx.nn.Linear(2, 4, key=key)
        self.cause, self.flower = pcx.Vode((2,), mean=jnp.zeros(2)), pcx.Vode((4,))

    def __call__(self) -> jax.Array:
        return self.flower(self.layer(self.cause()))


def learn(model: Any, x: Any, observed: Any, steps: int, rate: float, precision: Any = None) -> tuple[Any, list[float]]:
    """`pcx.train_step` taken apart: infer, then predictions, errors, weight gradient, update. The whole data is one batch."""
    adam = optax.adam(2e-2)

    @jax.jit
    def step(model: Any, state: Any) -> Any:
        settled = pcx.infer(model, x, observed, optimiser=optax.sgd(rate), steps=40, precision=precision)
        predictions = pcx.run(model, settled.values, x).predictions  # u of every node, at the settled values
        delta = pcx.deltas(model, settled.values, predictions, precision=precision)  # ∂E/∂u: minus the weighted error
        gradient = pcx.weight_gradient(model, delta, settled.values, x)  # the mean over the batch, local to every node
        energy = pcx.free_energy(model, settled.values, x, precision=precision).mean()
        return *pcx.apply_gradient(model, gradient, adam, state), energy

    state, curve = adam.init(pcx.weights(model)), []
    for _ in range(steps):
        model, state, energy = step(model, state)
        curve.append(float(energy))
    return model, curve


def two_coordinates(model: Classifier, x: jax.Array, y: jax.Array) -> tuple[list[str], list[str], float, float]:
    """The same minimum by moving values and by moving errors: which nodes one step reaches, and how far the ends differ.

    For a fresh model. A rate that suits one descent may be too large for the other: after training, the values still settle
    at this rate and the errors oscillate. Ends are worth comparing only where both gradients vanish, so their size is returned.
    """
    observed, rate, steps = {"species": y}, 0.05, 1000
    start, one, end = (pcx.infer(model, x, observed, optimiser=optax.sgd(rate), steps=n).values for n in (0, 1, steps))
    by_value = [name for name in ("low", "high") if bool(jnp.any(one[name] != start[name]))]

    # An error is h - u. Given errors, `run` computes each value on the way, h = u + e: every node depends on all e before it.
    label = start.only(["species"])
    zero = {name: jnp.zeros_like(start[name]) for name in ("low", "high")}
    slope = jax.grad(lambda errors: pcx.free_energy(model, label, x, errors=errors).sum())  # sum: each sample moves alone
    by_error = [name for name, g in slope(zero).items() if bool(jnp.any(g != 0))]
    down = lambda e, _: (jax.tree.map(lambda a, g: a - rate * g, e, slope(e)), None)  # noqa: E731
    errors = jax.jit(lambda e: jax.lax.scan(down, e, length=steps)[0])(zero)
    values = pcx.run(model, label, x, errors=errors).values
    slopes = [jax.grad(lambda h: pcx.free_energy(model, h, x).sum())(h).only(zero) for h in (values, end)]
    left = max(float(jnp.abs(g).max()) for slope in slopes for g in slope.values())
    return by_value, by_error, max(float(jnp.abs(values[name] - end[name]).max()) for name in end), left


def main(steps: int = 300, samples: int = 2000) -> dict[str, Any]:
    iris = pcx.data.load("iris")
    scale = lambda a: jnp.asarray((a - iris.train.images.mean(0)) / iris.train.images.std(0))  # noqa: E731
    x, y, x_test, y_test = scale(iris.train.images), iris.train.labels, scale(iris.test.images), iris.test.labels
    result: dict[str, Any] = {}

    # 1. Classification: input and label are known, hidden values and weights are sought.
    classifier, curve = learn(Classifier(jax.random.key(0)), x, {"species": y}, steps, 0.05)
    result["learning"] = (curve[0], curve[-1])

    # 2. Prediction: only the input is known. The minimum is the forward pass, at energy zero, so nothing has to settle.
    forward = pcx.run(classifier, {}, x_test)
    result["accuracy"] = float(jnp.mean(forward.predictions["species"].argmax(axis=1) == y_test))
    result["forward_energy"] = float(sum(pcx.energies(classifier, forward.values, x_test).values()).max())
    names = ("by_value", "by_error", "coordinates", "gradient")
    result |= dict(zip(names, two_coordinates(Classifier(jax.random.key(0)), x_test, y_test), strict=True))

    # 3. Generation: data at the last node, no input; the cause is inferred. Precision 10 is a noise variance of 1/10. It also
    # makes the energy steeper, and values diverge where rate × curvature is above 2: hence a smaller rate than above.
    precision = {"flower": 10.0}
    generator, curve = learn(Generator(jax.random.key(1)), None, {"flower": x}, steps, 0.01, precision)
    result["generating"] = (curve[0], curve[-1])

    # 4. Recall: a part of a node is known. Hide the last length (petal width) and let it settle with the cause.
    known = jnp.array([True, True, True, False])
    part = {"flower": pcx.Observed(jnp.where(known, x_test, 0.0), known)}
    recalled = pcx.infer(generator, None, part, optimiser=optax.sgd(0.01), steps=1000, precision=precision).values["flower"]
    result["recall"], result["guess"] = (float(jnp.mean((a - x_test)[:, 3] ** 2)) for a in (recalled, 0 * x_test))

    # 5. Sampling: nothing is known, and the descent is noisy. Langevin steps visit values with density exp(-F). This model is
    # linear, so the covariance of its flowers is known: W Wᵀ + I/10. The widest direction forgets its start last: fewer steps
    # give too small a variance.
    noisy = pcx.optim.langevin(5e-3, key=jax.random.key(2))
    drawn = pcx.infer(generator, None, optimiser=noisy, steps=6000, precision=precision, batch=samples).values["flower"]
    weight = np.asarray(generator.layer.weight)
    result["spread"] = (np.cov(np.asarray(drawn).T), weight @ weight.T + np.eye(4) / 10)

    print(f"1 classification: free energy {result['learning'][0]:.3f} → {result['learning'][1]:.3f}")
    print(f"2 prediction: test accuracy {result['accuracy']:.1%}, energy of the forward pass {result['forward_energy']:.1g}")
    print(f"  one step moves {result['by_value']} in values and {result['by_error']} in errors;")
    print(f"  after many steps they differ by {result['coordinates']:.1e}, with gradients of at most {result['gradient']:.1e}")
    print(f"3 generation: free energy {result['generating'][0]:.3f} → {result['generating'][1]:.3f}")
    print(f"4 recall: squared error {result['recall']:.3f}, against {result['guess']:.3f} for guessing the mean")
    print("5 sampling: variances", *(np.round(np.diag(cov), 2) for cov in result["spread"]), "(samples, exact)")
    return result


if __name__ == "__main__":
    main()
