"""Tutorial 4, generative mode: a decoder with a root latent on digits; reconstruct images, and recall them from the upper half.

    python examples/decoder.py           writes examples-output/decoder.png

A decoder has no input and no encoder. Data sits at the last node, the latent at the first, and inference finds the latent that
explains the image. The model below is an ordinary program; what it is used for is only a matter of what is observed.
"""

from pathlib import Path
from typing import Any

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


class Decoder(pcx.EnergyModule):
    """latent (a root) → hidden → image. `__call__` takes nothing: the first node is called without a prediction.

    With a mean, the root has the energy ½‖h - mean‖², a Gaussian prior; without one it would be free to go anywhere.
    """

    def __init__(self, latent: int = 16, hidden: int = 64, pixels: int = 64):
        self.first, self.second = pxnn.Linear(latent, hidden), pxnn.Linear(hidden, pixels)
        self.latent, self.hidden = pcx.Vode((latent,), mean=jnp.zeros(latent)), pcx.Vode((hidden,))
        self.image = pcx.Vode((pixels,))

    def __call__(self) -> jax.Array:
        return self.image(self.second(self.hidden(jnp.tanh(self.first(self.latent())))))


def settle(model: Decoder, observed: dict[str, Any], steps: int) -> pcx.Inferred:
    """Find the latent and hidden values that explain what is observed."""
    return pcx.infer(model, None, observed, optimiser=optax.sgd(0.03, momentum=0.8), steps=steps)


def train(model: Decoder, images: jax.Array, epochs: int, batch: int = 64) -> tuple[Decoder, list[float]]:
    """The model after training, and the mean free energy of every epoch.

    More epochs reconstruct better and recall worse: the hidden values learn to explain what the latent does not. The number of
    epochs was chosen on a part held out of train.
    """
    adam = optax.adam(2e-3)
    state = adam.init(pcx.weights(model))

    @jax.jit
    def epoch(model: Decoder, state: optax.OptState, order: jax.Array) -> Any:
        def step(carry: Any, rows: jax.Array) -> Any:
            model, state = carry
            options = {"state_optimiser": optax.sgd(0.03, momentum=0.8), "weight_optimiser": adam, "weight_state": state}
            done = pcx.train_step(model, None, {"image": images[rows]}, steps=20, **options)
            return (done.model, done.optimiser_state), sum(done.energies.values()).mean()

        (model, state), energy = jax.lax.scan(step, (model, state), order)
        return model, state, energy.mean()

    shuffle, curve = np.random.default_rng(0), []
    for _ in range(epochs):
        order = shuffle.permutation(len(images))[: len(images) // batch * batch].reshape(-1, batch)
        model, state, energy = epoch(model, state, jnp.asarray(order))
        curve.append(float(energy))
    return model, curve


def plot(rows: dict[str, jax.Array], path: Path) -> None:
    count = len(next(iter(rows.values())))
    figure, axes = plt.subplots(len(rows), count, figsize=(count, 1.15 * len(rows)), layout="constrained")
    for line, (title, images) in zip(axes, rows.items(), strict=True):
        for cell, image in zip(line, images, strict=True):
            cell.imshow(np.asarray(image).reshape(8, 8), cmap="gray", vmin=-1, vmax=1)
            cell.set(xticks=[], yticks=[])
        line[0].set_ylabel(title, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(epochs: int = 20, out: Path = Path("examples-output")) -> dict[str, Any]:
    digits = pcx.data.load("digits")
    train_images, images = (jnp.asarray(s.images.reshape(-1, 64) / 8 - 1) for s in (digits.train, digits.test))
    pxnn.seed(0)
    model = Decoder()
    print(pcx.graph(model), end="\n\n")
    model, curve = train(model, train_images, epochs)
    print(f"free energy {curve[0]:.2f} in the first epoch, {curve[-1]:.2f} in the last")

    # Reconstruction of images that were not trained on: fix the whole image, read what the settled latent predicts.
    # The hidden values are free too, so the prediction is decoded from the latent alone: `run` with only the latent given.
    settled = settle(model, {"image": images}, steps=200)
    decoded = pcx.run(model, settled.values.only(["latent"])).values["image"]

    # Recall: fix the upper half only. The lower half is a free value like any other and settles where the model wants it.
    upper = jnp.arange(64) < 32
    masked = jnp.where(upper, images, -1.0)  # what is hidden is shown as black
    recalled = settle(model, {"image": pcx.Observed(masked, upper)}, steps=400).values["image"]

    # Two references for the lower half: the mean image, and least squares from the upper half, made for this one task.
    inputs = lambda a: np.c_[np.asarray(a[:, upper]), np.ones(len(a))]  # noqa: E731
    fit, *_ = np.linalg.lstsq(inputs(train_images), np.asarray(train_images[:, ~upper]), rcond=None)
    regressed = masked.at[:, ~upper].set(inputs(images) @ fit)

    error = lambda a, where: float(jnp.mean((a - images)[:, where] ** 2))  # noqa: E731
    everywhere, mean = np.arange(64), jnp.broadcast_to(train_images.mean(axis=0), images.shape)
    result = {
        "curve": curve,
        "reconstruction": error(decoded, everywhere),
        "mean_image": error(mean, everywhere),
        "recall": error(recalled, ~upper),
        "recall_masked": error(masked, ~upper),
        "recall_mean_image": error(mean, ~upper),
        "recall_least_squares": error(regressed, ~upper),
        "kept": error(recalled, upper),  # the observed half does not move
    }
    for name, value in list(result.items())[1:]:
        print(f"squared error per pixel, {name.replace('_', ' ')}: {value:.4f}")
    out.mkdir(parents=True, exist_ok=True)
    plot(
        {"original": images[:10], "decoded": decoded[:10], "masked": masked[:10], "recalled": recalled[:10]},
        out / "decoder.png",
    )
    return result


if __name__ == "__main__":
    main()
