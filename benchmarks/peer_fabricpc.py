"""A training run by FabricPC, the released `fabricpc` 0.6.0; `peers.py` starts it in a process of its own.

    PYTHONPATH=FOLDER_OF_THE_RELEASED_PACKAGE python benchmarks/peer_fabricpc.py TASK.json

Reads weights and batches, trains by FabricPC's own `train`, and writes the weights after one pass over the batches, and the
seconds of some more. Energies are ½‖h − u‖² there too, with the activation inside of the prediction u; values begin at the
forward pass and move by the gradient of the sum over samples, weights by that of the mean. Differences that are bridged here:
images have their channels last; its `MaxPool` is a node with a value of its own, hence `PooledConv`; and it cuts probabilities
at 1e-7 before the logarithm of the cross-entropy, here at 1e-30. Not bridged: its values move without momentum, there is no
nudging, and weights move once per batch.
"""

import dataclasses
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from fabricpc.core import activations
from fabricpc.core.energy import CrossEntropyEnergy
from fabricpc.core.inference import InferenceSGD
from fabricpc.core.topology import Edge
from fabricpc.core.types import GraphParams, NodeParams
from fabricpc.graph_assembly import TaskMap, graph
from fabricpc.nodes import ConvNode, IdentityNode, Linear, compute_windowed_output_shape
from fabricpc.training import train

ACTIVATIONS = {
    "gelu": activations.GeluActivation,
    "leaky_relu": activations.LeakyReLUActivation,
    "hard_tanh": activations.HardTanhActivation,
    "relu": activations.ReLUActivation,
}


class PooledConv(ConvNode):
    """A node after a convolution, its activation and a 2×2 max-pooling."""

    @staticmethod
    def predict(params, inputs, state, node_info):
        (x,) = inputs.values()
        config, window = node_info.node_config, (1, 2, 2, 1)
        size = compute_windowed_output_shape(x.shape[1:3], config["kernel_size"], config["stride"], config["padding"])
        u, _ = ConvNode.predict(params, inputs, state, dataclasses.replace(node_info, shape=(*size, node_info.shape[-1])))
        return jax.lax.reduce_window(u, -jnp.inf, jax.lax.max, window, window, "VALID"), None


def places(weight, shape):
    """Which number of a weight is where in FabricPC's, which has outputs last and before them channels, then of an image."""
    numbers = np.arange(weight.size).reshape(len(weight), shape[-1], *(weight.shape[2:] or shape[:-1]))
    turned = np.moveaxis(numbers, (0, 1), (-1, -2))
    return turned if weight.ndim > 2 else turned.reshape(-1, len(weight))


def make_node(task, i, weight, shape):
    """The node after a layer that reads values of a shape."""
    last = i == task["count"] // 2 - 1
    options = {
        "name": f"node{i}",
        "activation": activations.IdentityActivation() if last else ACTIVATIONS[task["activation"]](),
    }
    if last and task["loss"] == "ce":
        options |= {"activation": activations.SoftmaxActivation(), "energy": CrossEntropyEnergy(eps=1e-30)}
    if weight.ndim == 2:
        return Linear(shape=(len(weight),), flatten_input=True, **options)
    kernel, padding, pooled = weight.shape[2:], task["convolutions"][i]["padding"], task["convolutions"][i]["pooled"]
    size = compute_windowed_output_shape(shape[:2], kernel, (1, 1), padding)
    if pooled:
        return PooledConv(shape=(size[0] // 2, size[1] // 2, len(weight)), kernel_size=kernel, padding=padding, **options)
    return ConvNode(shape=(*size, len(weight)), kernel_size=kernel, padding=padding, **options)


def build(task, arrays, shape):
    """The graph, its weights, and for each layer where its weights are."""
    nodes, edges, where = [IdentityNode(shape=shape, name="input")], [], []
    weights = {"input": NodeParams({}, {})}
    for i, (weight, bias) in enumerate(zip(arrays[::2], arrays[1::2], strict=True)):
        source, node = nodes[-1], make_node(task, i, weight, nodes[-1].shape)
        where.append(places(weight, source.shape))
        edges.append(Edge(source=source, target=node.slot("in")))
        nodes.append(node)
        matrix = {f"{source.name}->{node.name}:in": jnp.asarray(weight.ravel()[where[-1]])}
        weights[node.name] = NodeParams(matrix, {"b": jnp.asarray(bias.reshape(*[1] * len(node.shape), -1))})
    inference = InferenceSGD(eta_infer=task["lr_h"], infer_steps=task["T"])
    structure = graph(nodes=nodes, edges=edges, task_map=TaskMap(x=nodes[0], y=nodes[-1]), inference=inference)
    return structure, GraphParams(weights), where


def main(path):
    with open(path) as file:
        task = json.load(file)
    with np.load(task["arrays"]) as file:
        arrays = [file[f"weights_{i}"] for i in range(task["count"])]
        xs, ys = np.moveaxis(file["x"], 2, -1), file["y"]  # channels last; a vector stays as it is
    structure, weights, where = build(task, arrays, xs.shape[2:])
    batches = [{"x": jnp.asarray(x), "y": jnp.asarray(y)} for x, y in zip(xs, ys, strict=True)]
    optimiser = optax.adamw(task["lr_theta"], weight_decay=task["weight_decay"])
    times = []

    def pass_done(context):
        # reading the weights waits for the device
        after = [np.asarray(array) for node in structure.nodes for array in jax.tree.leaves(context.params.nodes[node])]
        times.append(time.perf_counter())
        if len(times) == 1:
            for i, order in enumerate(where):
                after[2 * i] = after[2 * i].ravel()[np.argsort(order.ravel())]
            np.savez(task["result"], *after)
            times[0] = time.perf_counter()

    passes = {"num_epochs": 1 + task["passes"]}
    train(weights, structure, batches, optimiser, passes, jax.random.key(0), verbose=False, epoch_callback=pass_done)
    print(json.dumps(np.diff(times).tolist()))


if __name__ == "__main__":
    main(sys.argv[1])
