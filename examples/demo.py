"""Train the paper's MLP on scikit-learn's digits by predictive coding, incremental PC and backpropagation.

    python examples/demo.py              three algorithms, three seeds, 40 epochs: about a minute on two cores
    python examples/demo.py --help       what can be changed

Ends with a table of test accuracies, and two pictures in demo-output/: the accuracy of every epoch, and the energy of
every layer while the values of a trained network settle.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits

import pcx
import pcx.nn as pxnn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 64
# T, learning rates and momentum are those tuned for MNIST (PC-SE and iPC); the set is small, so the weights learn faster.
ALGORITHMS = {
    "pc_se": {"T": 8, "lr_h": 0.0105, "momentum_h": 0.65, "lr_theta": 2e-3, "weight_decay": 3.6e-4},
    "ipc": {"T": 8, "lr_h": 0.85, "momentum_h": 0.35, "lr_theta": 1e-3, "weight_decay": 3.3e-2},
    "bp_se": {"lr_theta": 2e-3, "weight_decay": 5.1e-3},
}


class MLP(pcx.EnergyModule):
    """Three hidden layers of 128 neurons, as in the paper's Table 1."""

    def __init__(self, inputs: int = 64, width: int = 128, classes: int = 10):
        sizes = [inputs, width, width, width, classes]
        self.layers = [pxnn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
        self.vodes = [pcx.Vode((size,)) for size in sizes[1:]]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, vode in zip(self.layers[:-1], self.vodes[:-1], strict=True):
            x = vode(jax.nn.leaky_relu(layer(x)))
        return self.vodes[-1](self.layers[-1](x))


def load() -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """1,437 images of digits to train on and 360 to test on, scaled to [-1, 1]."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x, y = jnp.asarray(images[order] / 8 - 1, jnp.float32), jnp.asarray(labels[order])
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def make_epoch(algorithm: pcx.algorithms.Algorithm, train: Any, test: Any) -> Any:
    """One epoch as one compiled program: shuffle, step through the batches, then the accuracy on the whole test set."""
    steps = len(train[0]) // BATCH

    @jax.jit
    def epoch(state: pcx.algorithms.State, key: jax.Array, number: jax.Array) -> Any:
        order = jax.random.permutation(jax.random.fold_in(key, number), len(train[0]))[: steps * BATCH]

        def step(state: Any, rows: jax.Array) -> Any:
            state, metrics = algorithm.step(state, train[0][rows], train[1][rows], key, number)
            return state, metrics.loss

        state, losses = jax.lax.scan(step, state, order.reshape(steps, BATCH))
        output = jax.vmap(state.model)(test[0])
        return state, losses.mean(), jnp.mean(jnp.argmax(output, axis=1) == test[1])

    return epoch


def train_one(name: str, seed: int, epochs: int, train: Any, test: Any) -> tuple[list[float], Any, float]:
    """Accuracy after every epoch, the trained model, and seconds per epoch without compilation."""
    hyper, make = pcx.algorithms.get(name)
    algorithm = make(dataclasses.replace(hyper, **ALGORITHMS[name]), total_steps=epochs * (len(train[0]) // BATCH))
    key = jax.random.key(seed)
    with pxnn.keys(key):
        state = algorithm.init(MLP(), train[0][:BATCH], train[1][:BATCH], key)
    epoch = make_epoch(algorithm, train, test)
    curve, start = [], 0.0
    for number in range(epochs):
        state, loss, accuracy = epoch(state, key, jnp.asarray(number))
        curve.append(float(accuracy))
        if number == 0:
            start = time.perf_counter()  # the first epoch compiles
        if sys.stderr.isatty():
            line = (
                f"\r{name:6} seed {seed}  epoch {number + 1}/{epochs}  loss {float(loss):.4f}  test accuracy {curve[-1]:6.2%} "
            )
            print(line, end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return curve, state.model, (time.perf_counter() - start) / max(epochs - 1, 1)


def plot_energies(model: Any, train: Any, path: Path) -> None:
    """The energy of every layer while the values of one batch settle."""
    settled = pcx.infer(
        model,
        train[0][:BATCH],
        {pcx.output_node(model, train[0][:BATCH]): train[1][:BATCH]},
        optimiser=optax.sgd(ALGORITHMS["pc_se"]["lr_h"], momentum=ALGORITHMS["pc_se"]["momentum_h"]),
        steps=32,
        record=pcx.record_energies,
    )
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for i, (name, energy) in enumerate(settled.history.items()):
        axes.plot(energy.mean(axis=1), label=f"layer {i + 1} ({name})")
    axes.set(xlabel="inference step", ylabel="energy (mean over the batch)", yscale="log")
    axes.set_title("Energy travels from the output to the first layer")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="epochs of training (default 40)")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default 3)")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="where pictures go (default demo-output/)")
    options = parser.parse_args()
    if options.epochs < 1 or options.seeds < 1:
        parser.error("--epochs and --seeds are at least 1")
    train, test = load()
    options.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    models: dict[str, Any] = {}
    for name in ALGORITHMS:
        results = [train_one(name, seed, options.epochs, train, test) for seed in range(options.seeds)]
        curves[name] = 100 * np.array([curve for curve, _, _ in results])
        models[name], seconds[name] = results[0][1], float(np.median([time for _, _, time in results]))
        print(f"{name} done: {curves[name][:, -1].mean():.2f} %", flush=True)
    print(f"\nDigits (64-128-128-128-10), {options.epochs} epochs, {options.seeds} seeds: test accuracy after the last epoch")
    print(f"{'algorithm':<10} {'accuracy':>16} {'s/epoch':>9}")
    for name, curve in curves.items():
        print(f"{name:<10} {curve[:, -1].mean():8.2f} ± {curve[:, -1].std():4.2f} % {seconds[name]:8.3f}")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        epochs = np.arange(1, options.epochs + 1)
        axes.plot(epochs, curve.mean(axis=0), label=name)
        axes.fill_between(epochs, curve.min(axis=0), curve.max(axis=0), alpha=0.2)
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", title="Digits: mean and range over seeds")
    axes.legend()
    figure.savefig(options.out / "accuracy.png", dpi=120)
    plot_energies(models["pc_se"], train, options.out / "energies.png")
    print(f"\npictures: {options.out / 'accuracy.png'}, {options.out / 'energies.png'}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; nothing was kept")
