"""Whether inference overshoots, and what becomes of the weight update: PC-SE, epoch by epoch.

    python benchmarks/overshoot.py --task fashionmnist/mlp --epochs 7 --set lr_h=0.05 momentum_h=0.85

Trains as `pcx run` does and looks, before every epoch, at inference on the first training samples with the same settings:

* ``step``: the state learning rate times the largest curvature of the energy in the values (by power iteration). Without
  momentum a value overshoots its minimum above 1, and inference diverges above 2.
* ``reversed``: the share of samples whose error at the output has turned against the one before inference.
* ``cosines``: of the weight gradient with that of backpropagation, layer by layer; below zero a layer learns the wrong way.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import pcx
import pcx.data
from pcx.bench import record
from pcx.bench.config import parse_pairs, set_values
from pcx.bench.engine import PRECISION, Engine
from pcx.bench.tasks import configure, pipeline

SAMPLES, CURVED, ITERATIONS = 256, 8, 20


def inner(a, b):
    """Of two trees with a leading axis of samples: a number per sample."""
    return sum(jnp.sum((p * q).reshape(len(p), -1), 1) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def curvature(model, x, y, last):
    """The largest eigenvalue of the energy's second derivative for the values, at the forward pass, of a few samples."""
    start = pcx.run(model, {}, x).predictions
    free = {name: value for name, value in start.items() if name != last}
    slope = jax.grad(lambda free: sum(map(jnp.sum, pcx.energies(model, {**free, last: y}, x).values())))

    def body(_, carry):
        direction, _ = carry
        size = jnp.sqrt(inner(direction, direction))
        direction = jax.tree.map(lambda v: v / size.reshape(-1, *[1] * (v.ndim - 1)), direction)
        image = jax.jvp(slope, (free,), (direction,))[1]
        return image, inner(direction, image)

    keys = jax.random.split(jax.random.key(0), len(free))
    random = {name: jax.random.normal(key, value.shape) for key, (name, value) in zip(keys, free.items(), strict=True)}
    return jnp.max(jax.lax.fori_loop(0, ITERATIONS, body, (random, jnp.zeros(len(x))))[1])


def look(model, x, y, hyper):
    """The step, the share of reversed errors, and the cosine of every weight array's gradient with that of BP."""
    last, rule = pcx.output_node(model, x), optax.sgd(hyper.lr_h, momentum=hyper.momentum_h)
    done = pcx.infer(model, x, {last: y}, optimiser=rule, steps=hyper.T)
    settled = done.values if done.displaced is None else done.displaced
    ours = pcx.weight_gradient(model, lambda u: pcx.deltas(model, settled, u), settled, x)
    start = done.forward.predictions[last]
    outputs = jax.vjp(lambda model: pcx.run(model, {}, x).predictions[last], model)[1](start - y)[0]
    before, after = y - start, y - pcx.run(model, done.values, x).predictions[last]
    trees = ([leaf for leaf in jax.tree.leaves(tree) if leaf.ndim > 1] for tree in (ours, pcx.weights(outputs)))
    pairs = [[jnp.ravel(leaf / jnp.max(jnp.abs(leaf)))[None] for leaf in pair] for pair in zip(*trees, strict=True)]
    cosines = jnp.stack([(inner(a, b) / jnp.sqrt(inner(a, a) * inner(b, b)))[0] for a, b in pairs])
    return hyper.lr_h * curvature(model, x[:CURVED], y[:CURVED], last), jnp.mean(inner(before, after) < 0), cosines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="fashionmnist/mlp")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=Path("results/overshoot.jsonl"))
    options = parser.parse_args()
    config = configure(options.task, "pc_se", epochs=options.epochs, precision=options.precision)
    config = set_values(config, parse_pairs(options.set))
    data = pcx.data.load(config.dataset)
    engine = Engine(config, data, [0]).prepare()
    x = pipeline(config).test(jnp.asarray(data.train.images[:SAMPLES]))
    y = jax.nn.one_hot(jnp.asarray(data.train.labels[:SAMPLES]), data.classes)
    looking, population = jax.jit(look), engine.init()
    for epoch in range(config.epochs):
        model = jax.tree.map(lambda leaf: leaf[0], population.states).model
        with jax.default_matmul_precision(PRECISION[config.precision]):
            step, share, cosines = looking(model, x, y, config.hyper)
        top1 = float(engine.evaluate(population, "test")["test_top1"][0])
        found = {"epoch": epoch, "test_top1": top1, "step": float(step), "reversed": float(share), "cosines": cosines.tolist()}
        print(f"after {epoch} epochs: test {100 * top1:5.2f} %, step {step:.2f}, reversed {share:4.0%}, cosines", end=" ")
        print(*(f"{c:.2f}" for c in cosines), flush=True)
        record.append(options.out, {"what": "overshoot", **found, "config": config.as_dict(), **record.environment()})
        population, _ = engine.epoch(population, epoch)


if __name__ == "__main__":
    main()
