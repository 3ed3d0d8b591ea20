"""Tutorial 1, a first predictive coding network: define it, look at it, let its values settle, train it on two moons.

    python examples/first_pcn.py         prints what happens; pictures go to examples-output/

In PyTorch a network has weights, and activations come and go. Here activations stay: every layer has a node (a *vode*) that
holds a value h. The layer below predicts it, u = f(h_below), and the node's energy is ½‖h - u‖². Learning is two descents of
the same sum of energies: first the values move with input and label fixed, then the weights move with the values fixed.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax

import pcx
import pcx.data
import pcx.nn as pxnn

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Classifier(pcx.EnergyModule):
    """Two hidden layers. It is written for ONE sample: no batch axis anywhere in this class."""

    def __init__(self, width: int = 32):
        self.layers = [pxnn.Linear(2, width), pxnn.Linear(width, width), pxnn.Linear(width, 2)]
        self.vodes = [pcx.Vode((width,)), pcx.Vode((width,)), pcx.Vode((2,))]

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.vodes[0](jnp.tanh(self.layers[0](x)))  # a vode takes its prediction u and returns its value h
        x = self.vodes[1](jnp.tanh(self.layers[1](x)))
        return self.vodes[2](self.layers[2](x))  # the output is a node too; its value is fixed to the label in training


def settle(model: Classifier, x: jax.Array, y: jax.Array, steps: int = 64) -> pcx.Inferred:
    """Fix the label at the output and let the hidden values descend the energy; keep the energies of every step."""
    # Nodes are named by their path in the model. Integer labels become one-hot. Values are no part of the model:
    # they go in and come out as arrays with a batch axis, one set of values per sample.
    observed = {"vodes.2": y}
    return pcx.infer(model, x, observed, optimiser=optax.sgd(0.1), steps=steps, record=pcx.record_energies)


def train(model: Classifier, x: jax.Array, y: jax.Array, epochs: int, batch: int = 64) -> Classifier:
    """Mini-batches of predictive coding: eight steps for the values, one step for the weights.

    The values move ten times more slowly than in `settle`. Where they settle far from the forward pass, the weights learn to
    explain the settled values: the free energy falls to almost nothing while the forward pass, which predicts, stays poor.
    Set the rate to 0.1 to see it. (The rates here were chosen on a part held out of train.)
    """
    adam = optax.adam(1e-2)
    state = adam.init(pcx.weights(model))  # `pcx.weights` is the model with only its weights, as `eqx.filter` would give it

    @jax.jit  # the library does not compile by itself; models are pytrees, so `jax.jit` takes them like arrays
    def step(model: Classifier, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple[Classifier, optax.OptState]:
        options = {"state_optimiser": optax.sgd(0.01), "weight_optimiser": adam, "weight_state": state}
        trained = pcx.train_step(model, x, {"vodes.2": y}, steps=8, **options)
        return trained.model, trained.optimiser_state  # nothing is changed in place: a new model comes back

    shuffle = np.random.default_rng(0)
    for _ in range(epochs):
        for rows in shuffle.permutation(len(x))[: len(x) // batch * batch].reshape(-1, batch):
            model, state = step(model, state, x[rows], y[rows])
    return model


def accuracy(model: Classifier, x: jax.Array, y: jax.Array) -> float:
    """With nothing fixed, every node takes its prediction: `pcx.run` is then the forward pass of an ordinary network."""
    output = pcx.run(model, {}, x).predictions["vodes.2"]
    return float(jnp.mean(output.argmax(axis=1) == y))


def plot(model: Classifier, history: pcx.Nodes[jax.Array], x: jax.Array, y: jax.Array, path: Path) -> None:
    """The energy of every node while the values settle, and what the trained network says in the plane."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, energy in history.items():
        left.plot(np.asarray(energy.mean(axis=1)), label=name)
    left.set(xlabel="inference step", ylabel="energy (mean over samples)", title="Before training")
    left.set_yscale("symlog", linthresh=1e-4)  # the first node's energy is exactly zero until the error reaches it
    left.legend()
    across, up = np.meshgrid(np.linspace(-2, 3, 80), np.linspace(-1.5, 2, 80))
    output = pcx.run(model, {}, np.stack([across.ravel(), up.ravel()], axis=1)).predictions["vodes.2"]
    side = np.asarray(output[:, 1] - output[:, 0]).reshape(across.shape)
    right.contourf(across, up, side, levels=np.linspace(-2, 2, 21), cmap="coolwarm", extend="both")
    right.scatter(*np.asarray(x).T, c=np.asarray(y), cmap="coolwarm", s=8, edgecolors="k", linewidths=0.3)
    right.set(title="Two moons after training")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(epochs: int = 40, out: Path = Path("examples-output")) -> dict[str, float]:
    moons = pcx.data.load("two_moons")
    (x, y), (x_test, y_test) = ((jnp.asarray(s.images), jnp.asarray(s.labels)) for s in (moons.train, moons.test))
    pxnn.seed(0)  # layers that are built without a key draw from a stream that starts here
    model = Classifier()

    # The graph is recovered from the program: nobody declared it.
    print(pcx.graph(model, x), end="\n\n")

    settled = settle(model, x[:64], y[:64])
    total = sum(settled.history.values()).mean(axis=1)  # the free energy (Eq. 1) of every step, mean over samples
    print("step  " + "  ".join(settled.history))
    for step in (0, 1, 2, 8, 64):
        print(f"{step:>4}  " + "  ".join(f"{float(e[step].mean()):.5f}" for e in settled.history.values()))
    print("At the start all energy sits at the output; it spreads by one layer per step, and the total falls.\n")

    out.mkdir(parents=True, exist_ok=True)
    axes = pcx.draw(model, x, energies=pcx.energies(model, settled.values, x[:64]))
    axes.figure.savefig(out / "first_pcn_graph.png", dpi=110)
    plt.close(axes.figure)

    before = accuracy(model, x_test, y_test)
    model = train(model, x, y, epochs)
    after = accuracy(model, x_test, y_test)
    plot(model, settled.history, x_test, y_test, out / "first_pcn.png")
    print(f"test accuracy {before:.1%} before and {after:.1%} after training; pictures in {out}/")
    steepest = float(jnp.max(jnp.diff(total)))  # below zero if the free energy falls at every step
    return {"accuracy": after, "before": before, "start": float(total[0]), "end": float(total[-1]), "steepest": steepest}


if __name__ == "__main__":
    main()
