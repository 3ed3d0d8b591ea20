"""A training run by the paper's own library, the released `pcx` 0.6.3; `peers.py` starts it in a process of its own.

    PYTHONPATH=FOLDER_OF_THE_RELEASED_PACKAGE python benchmarks/peer_pcx.py TASK.json

Reads weights and batches, trains as the authors' experiments do (init step, T steps of the values, then the weights; in
incremental PC both in each of T steps), and writes the weights after one pass over the batches, and the seconds of some more.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pcx as px
import pcx.functional as pxf
import pcx.nn as pxnn
import pcx.predictive_coding as pxc
import pcx.utils as pxu

ACTIVATIONS = {"gelu": jax.nn.gelu, "leaky_relu": jax.nn.leaky_relu, "hard_tanh": jax.nn.hard_tanh, "relu": jax.nn.relu}
VALUES = pxc.VodeParam | pxc.VodeParam.Cache


class Net(pxc.EnergyModule):
    """Convolutions with their paddings and 2×2 poolings, then dense layers; a node after each."""

    def __init__(self, arrays, convolutions, activation, loss):
        super().__init__()
        self.layers = []
        for i, (weight, bias) in enumerate(zip(arrays[::2], arrays[1::2], strict=True)):
            out, into, *kernel = weight.shape
            layer = pxnn.Conv2d(into, out, kernel, padding=convolutions[i]["padding"]) if kernel else pxnn.Linear(into, out)
            layer.nn.weight.set(jnp.asarray(weight))
            layer.nn.bias.set(jnp.asarray(bias.reshape(layer.nn.bias.get().shape)))
            self.layers.append(layer)
        self.pooled = px.static([part["pooled"] for part in convolutions] + [False] * (len(self.layers) - len(convolutions)))
        self.pool = pxnn.MaxPool2d(kernel_size=2, stride=2)
        energies = [pxc.se_energy] * (len(self.layers) - 1) + [pxc.ce_energy if loss == "ce" else pxc.se_energy]
        self.vodes = [pxc.Vode(energy_fn=energy) for energy in energies]
        self.vodes[-1].h.frozen = True
        self.activation = px.static(ACTIVATIONS[activation])

    def __call__(self, x, y, beta=1.0):
        for i, (layer, vode) in enumerate(zip(self.layers, self.vodes, strict=True)):
            dense = layer.nn.weight.get().ndim == 2
            x = layer(x.flatten() if dense else x)
            if i < len(self.layers) - 1:
                x = self.activation(x)
            x = vode(self.pool(x) if self.pooled.get()[i] else x)
        u = self.vodes[-1].get("u")
        if y is not None:
            self.vodes[-1].set("h", u - beta * (u - y))
        return u


@pxf.vmap(pxu.M(VALUES).to((None, 0)), in_axes=(0, 0, None), out_axes=0)
def forward(x, y, beta, *, model):
    return model(x, y, beta)


@pxf.vmap(pxu.M(VALUES).to((None, 0)), in_axes=(0,), out_axes=(None, 0), axis_name="batch")
def energy(x, *, model):
    u = model(x, None)
    return jax.lax.pmean(model.energy().sum(), "batch"), u


def gradient(mask):
    return pxf.value_and_grad(mask.to([False, True]), has_aux=True)(energy)


def make(task):
    """A step on one batch, by the algorithm of a task."""
    free, weights = pxu.M_hasnot(pxc.VodeParam, frozen=True), pxu.M(pxnn.LayerParam)
    batch, beta, incremental = task["batch"], task["beta"], task["incremental"]

    @pxf.jit()
    def step(x, y, *, model, optim_w, optim_h):
        model.train()
        with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            forward(x, y, beta, model=model)
        optim_h.init(pxu.M_hasnot(pxc.VodeParam, frozen=True)(model))
        for _ in range(task["T"]):
            with pxu.step(model, clear_params=pxc.VodeParam.Cache):
                _, g = gradient(free | weights if incremental else free)(x, model=model)
            optim_h.step(model, g["model"], scale_by=batch)
            if incremental:
                optim_w.step(model, g["model"], scale_by=1 / beta)
        optim_h.clear()
        if not incremental:
            with pxu.step(model, clear_params=pxc.VodeParam.Cache):
                _, g = gradient(weights)(x, model=model)
            optim_w.step(model, g["model"], scale_by=1 / beta)

    return step


def main(path):
    with open(path) as file:
        task = json.load(file)
    with np.load(task["arrays"]) as file:
        arrays = [file[f"weights_{i}"] for i in range(task["count"])]
        xs, ys = jnp.asarray(file["x"]), jnp.asarray(file["y"])
    model = Net(arrays, task["convolutions"], task["activation"], task["loss"])
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        forward(xs[0], ys[0], 1.0, model=model)  # values get their shapes
    optim_w = pxu.Optim(lambda: optax.adamw(task["lr_theta"], weight_decay=task["weight_decay"]), pxu.M(pxnn.LayerParam)(model))
    optim_h = pxu.Optim(lambda: optax.sgd(task["lr_h"], momentum=task["momentum_h"]))
    step, seconds = make(task), []
    for number in range(1 + task["passes"]):
        start = time.perf_counter()
        for x, y in zip(xs, ys, strict=True):
            step(x, y, model=model, optim_w=optim_w, optim_h=optim_h)
        # reading the weights waits for the device
        after = [np.asarray(a.get()) for layer in model.layers for a in (layer.nn.weight, layer.nn.bias)]
        if number == 0:
            np.savez(task["result"], *after)
        else:
            seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1])
