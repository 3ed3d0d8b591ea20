"""How much of the exact weight gradient survives rounding: the cosine with the gradient in float64, layer by layer.

    python benchmarks/small_errors.py --task cifar10/vgg5 --out results/small_errors.jsonl

One training step of PC-SE with the task's tuned settings from fresh weights, on random images: plain values and products in
float64 and float32, then displaced values and anchored products in float32 and bfloat16, at last with a state in bfloat16 too.
The exact gradient is that of displaced values and anchored products in float64, without any other shortcut: the errors of the
first layers of a deep network are below the rounding of plain float64. Beside the cosines stands its root mean square.
A cosine of 1 is the exact direction, 0 noise; there is none (null) where all of a gradient is zero.
(tf32 is a rounding of accelerators only; on one, add ``--precisions float32 tensorfloat32 bfloat16``.)
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pcx
from pcx.bench import record
from pcx.bench.speed import IMAGES
from pcx.bench.tasks import build_model, configure, pipeline


def gradients_of(model, x, label, hyper, shortcuts, precision, state_dtype=None):
    """The weight gradient of one training step, as float64 arrays."""
    last = pcx.output_node(model, x)
    options = {"optimiser": optax.sgd(hyper.lr_h, momentum=hyper.momentum_h), "steps": hyper.T, "shortcuts": shortcuts}
    options |= {"state_dtype": state_dtype, "training": True}

    @jax.jit
    @pcx.channels_last
    def gradient(model, x):
        done = pcx.infer(model, x, {last: label}, **options)
        settled = done.values if done.displaced is None else done.displaced
        return pcx.weight_gradient(model, lambda u: pcx.deltas(model, settled, u), settled, x, training=True)

    with jax.default_matmul_precision(precision):
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradient(model, x))]


def cosine(a, b):
    """Of two arrays whose squares may be too small for a float64."""
    a, b = (array / max(np.max(np.abs(array)), np.finfo(np.float64).tiny) for array in (a, b))
    norm = np.sqrt(np.sum(a * a) * np.sum(b * b))
    return float(np.sum(a * b) / norm) if norm > 0 else None


def root_mean_square(array):
    largest = np.max(np.abs(array))
    return float(largest * np.sqrt(np.mean((array / largest) ** 2))) if largest > 0 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar10/vgg5")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=Path("results/small_errors.jsonl"))
    options = parser.parse_args()
    config = configure(options.task, "pc_se")
    (_, *shape), classes = IMAGES[config.dataset]
    images = np.random.default_rng(0).integers(0, 256, (options.samples, *shape), np.uint8)
    label = jnp.arange(options.samples) % classes
    x = pipeline(config).test(jnp.asarray(images))
    model = build_model(config, x.shape[1:], classes, jax.random.key(0))
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: a.astype(jnp.float64), model)
        wide = (double, x.astype(jnp.float64), label, config.hyper)
        anchored = pcx.Shortcuts(wave=False, constant=False, stack=False)
        exact = gradients_of(*wide, anchored, "float32", jnp.float64)
        plain = gradients_of(*wide, pcx.NO_SHORTCUTS, "float32")
    variants = {"plain float32": (pcx.Shortcuts(anchor=False), "float32")}
    variants |= {f"anchored {name}": (pcx.ALL_SHORTCUTS, name) for name in options.precisions}
    variants["bfloat16 state"] = (pcx.ALL_SHORTCUTS, "bfloat16", jnp.bfloat16)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(pcx.weights(model))]
    found = {"plain float64": {name: cosine(a, b) for name, a, b in zip(names, plain, exact, strict=True)}}
    for variant, settings in variants.items():
        mine = gradients_of(model, x, label, config.hyper, *settings)
        found[variant] = {name: cosine(a, b) for name, a, b in zip(names, mine, exact, strict=True)}
    width = max(map(len, names))
    sizes = {name: root_mean_square(array) for name, array in zip(names, exact, strict=True)}
    print(" " * width, *(f"{variant:>20}" for variant in found), f"{'size':>10}")
    for name in names:
        cells = [by_name[name] for by_name in found.values()]
        print(f"{name:<{width}}", *(f"{'none' if c is None else f'{c:.4f}':>20}" for c in cells), f"{sizes[name]:10.1e}")
    settings = {"task": config.task, "samples": options.samples, "hyper": dataclasses.asdict(config.hyper)}
    record.append(options.out, {"what": "small errors", **settings, "cosines": found, "sizes": sizes, **record.environment()})


if __name__ == "__main__":
    main()
