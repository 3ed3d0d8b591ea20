"""Tutorial 2, the paper's Appendix A: its listings explained, then batched, compiled and trained on digits.

    python examples/appendix_a.py        trains a small classifier; prints accuracies

The listings are *imperative*: the model remembers its values, is changed in place, and is passed by keyword. PCX offers this as
a surface above its pure core (tutorial 3). One rule explains it: a transform of `pcx.functional` takes the objects passed by
KEYWORD apart into arrays, runs a pure function, and writes the new arrays back. Positional arguments are plain JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pcx
import pcx.data
import pcx.functional as pxf
import pcx.nn as pxnn
import pcx.predictive_coding as pxc
import pcx.utils as pxu


class MLP(pxc.EnergyModule):
    """Listing 1. `x = vode(u)` stores the prediction u and returns the value h; the model is written for one sample.

    The listing puts an activation on the output as well; the paper's experiments have none there, and neither has this model.
    """

    def __init__(self, in_dim: int, h_dim: int, out_dim: int):
        self.layers = [pxnn.Linear(in_dim, h_dim), pxnn.Linear(h_dim, h_dim), pxnn.Linear(h_dim, out_dim)]
        self.vodes = [pxc.Vode((dim,)) for dim in (h_dim, h_dim, out_dim)]

    def __call__(self, x: Any, y: Any = None) -> Any:
        for layer, vode in zip(self.layers[:-1], self.vodes[:-1], strict=True):
            x = vode(jax.nn.leaky_relu(layer(x)))
        u = self.layers[-1](x)
        self.vodes[-1](u)
        if y is not None:
            self.vodes[-1].set("h", y)  # the label takes the place of the output's value
        return u


def energy(x: Any, y: Any, *, model: Any) -> Any:
    model(x, y)
    return model.energy()  # the free energy of the last call: the sum over vodes of ½‖h - u‖²


# Listing 2. A mask says which arrays of the keyword objects a transform is about: values (VodeParam) or weights (LayerParam).
grad_h = pxf.value_and_grad(pxu.Mask(pxc.VodeParam, [False, True]))(energy)
grad_w = pxf.value_and_grad(pxu.Mask(pxc.LayerParam, [False, True]))(energy)


def train(T: int, x: Any, y: Any, *, model: Any, optim_h: Any, optim_w: Any) -> list[Any]:
    """One sample, as printed, plus the energies before every update."""
    seen = []
    model.train()
    # INIT: every node takes its prediction as its value. A step clears the caches (the predictions) when it ends.
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        model(x)
    for _ in range(T):  # inference: without a status, values stay as they are, and only their gradient moves them
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            value, g_h = grad_h(x, y, model=model)
            optim_h.step(model, g_h["model"], True)
            seen.append(value)
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):  # learning: one update of the weights at the settled values
        value, g_w = grad_w(x, y, model=model)
        optim_w.step(model, g_w["model"])
    return [*seen, value]


# The same over a batch. Values have a batch axis (0), weights are shared (None): that is what this second kind of mask says.
AXES = pxu.Mask(pxc.VodeParam, [None, 0])


@pxf.vmap(AXES, in_axes=(0, 0), out_axes=None, axis_name="batch")
def batch_energy(x: Any, y: Any, *, model: Any) -> Any:
    return jax.lax.pmean(energy(x, y, model=model), "batch")  # the mean over the batch


batch_forward = pxf.vmap(AXES, in_axes=(0,), axis_name="batch")(lambda x, *, model: model(x))
batch_grad_h = pxf.value_and_grad(pxu.Mask(pxc.VodeParam, [False, True]))(batch_energy)
batch_grad_w = pxf.value_and_grad(pxu.Mask(pxc.LayerParam, [False, True]))(batch_energy)


@pxf.jit(static_argnums=0)  # T is a Python number: the loop is written out while the function is traced
def train_batch(T: int, x: Any, y: Any, *, model: Any, optim_h: Any, optim_w: Any) -> None:
    model.train()
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        batch_forward(x, model=model)
    optim_h.clear()  # momentum of the last batch's values means nothing for this one's; the first step builds it anew
    for _ in range(T):
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            _, g_h = batch_grad_h(x, y, model=model)
            # A value's gradient of the batch MEAN is 1/B of its own; True multiplies it by B again.
            optim_h.step(model, g_h["model"], True)
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        _, g_w = batch_grad_w(x, y, model=model)
        optim_w.step(model, g_w["model"])


@pxf.jit
def evaluate(x: Any, *, model: Any) -> Any:
    """Listing 3: a forward pass."""
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        return batch_forward(x, model=model)


def main(epochs: int = 10, batch: int = 32, T: int = 6) -> dict[str, Any]:
    digits = pcx.data.load("digits")
    (x, y), (x_test, y_test) = (
        (jnp.asarray(s.images.reshape(-1, 64) / 8 - 1), jnp.asarray(s.labels)) for s in (digits.train, digits.test)
    )
    pxnn.seed(0)
    model = MLP(64, 64, 10)
    rate = optax.sgd(0.05, momentum=0.5)
    optim_h = pxu.Optim(rate, pxu.Mask(pxc.VodeParam)(model))  # an optax optimiser that holds its own state
    optim_w = pxu.Optim(optax.adamw(2e-3), pxu.Mask(pxc.LayerParam)(model))

    one = [float(e) for e in train(T, x[0], y[0], model=model, optim_h=optim_h, optim_w=optim_w)]
    print("energy of one sample before each update:", "  ".join(f"{e:.4f}" for e in one))

    # The surface computes what the core computes: the same batch through `pcx.train_step`, from the same weights.
    adamw = optax.adamw(2e-3)
    options = {"state_optimiser": rate, "weight_optimiser": adamw, "weight_state": adamw.init(pcx.weights(model)), "steps": T}
    core = pcx.train_step(model, x[:batch], {"vodes.2": y[:batch]}, **options).model
    optim_w.clear()
    train_batch(T, x[:batch], y[:batch], model=model, optim_h=optim_h, optim_w=optim_w)
    pairs = zip(core.layers, model.layers, strict=True)
    difference = max(float(jnp.abs(a.weight - b.weight).max()) for a, b in pairs)
    print(f"largest difference of a weight between the surface and the core: {difference:.1e}")

    shuffle, correct = np.random.default_rng(0), 0.0
    for epoch in range(epochs):
        for rows in shuffle.permutation(len(x))[: len(x) // batch * batch].reshape(-1, batch):
            train_batch(T, x[rows], y[rows], model=model, optim_h=optim_h, optim_w=optim_w)
        model.eval()
        correct = float(jnp.mean(evaluate(x_test, model=model).argmax(axis=1) == y_test))
        print(f"epoch {epoch + 1}: test accuracy {correct:.1%}")
    return {"one": one, "difference": difference, "accuracy": correct}


if __name__ == "__main__":
    main()
