"""Whether what is special on a GPU leaves the numbers as they are: two trainings of a few steps, with it and without.

    python benchmarks/gpu_check.py                     # all rows of the timing table, a minute or two
    python benchmarks/gpu_check.py vgg5:bf16 mlp:tf32

Special are the options of the compiler (`Engine._compile`), the kernel for pooling, turned kernels, patches of images of few
channels, and products in float16 (`pcx/shortcuts`), which without all of that are in tf32.
Printed is the cosine of the two changes of every weight array, the smallest of all; it ends with 1 if one is below the bound.
They are not equal bit by bit: with other programs the compiler picks other kernels for products. On a CPU nothing is special.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROWS = ("alexnet:f16", "vgg5:f16", "vgg7:f16", "alexnet:tf32", "vgg5:tf32", "vgg7:tf32", "vgg5:bf16", "vgg7:bf16",
        "vgg7:bf16_state", "mlp:tf32", "mlp:bf16_state")  # fmt: skip
BOUND = 0.95


def trained(text: str, steps: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The weights before and after some steps, and the loss."""
    import jax
    import numpy as np

    from pcx.bench import speed
    from pcx.bench.engine import Engine

    row, precision = text.split(":")
    config = speed.config_of(row, "pc_se", precision=precision, epochs=2)
    engine = Engine(config, speed.data_of(config.dataset, random=True, limit=steps * config.batch), [0], "scan")
    population = engine.prepare().init()

    def weights(population: Any) -> dict[str, Any]:
        flat, _ = jax.tree_util.tree_flatten_with_path(population.states.model)
        return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in flat if np.ndim(leaf) > 2}

    before = weights(population)
    population, metrics = engine.epoch(population, 0)
    return before, weights(population), float(metrics["train_loss"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW:PRECISION", default=ROWS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file that gets a record of each row")
    options = parser.parse_args()
    import numpy as np

    from pcx.bench import engine, record
    from pcx.bench.config import ConfigError
    from pcx.shortcuts import patches, pooling, products

    worst = 1.0
    for text in options.rows:
        if text.count(":") != 1:
            parser.error(f"{text!r} is not ROW:PRECISION, such as vgg5:bf16")
        special = (engine.DENSE, engine.CONVOLUTIONAL, pooling.works, products.SMALL, patches.FEW, engine.INFERENCE)
        try:
            before, after, loss = trained(text, options.steps)
            engine.DENSE, engine.CONVOLUTIONAL, pooling.works = {}, {}, lambda dtype: False
            products.SMALL = patches.FEW = 0
            engine.INFERENCE = {name: options for name, options in engine.INFERENCE.items() if name != "f16"}
            _, plain, other = trained(text, options.steps)
        except ConfigError as error:
            sys.exit(f"error: {text}: {error}")
        finally:
            engine.DENSE, engine.CONVOLUTIONAL, pooling.works, products.SMALL, patches.FEW, engine.INFERENCE = special
        cosines = []
        for name, start in before.items():
            a, b = (w[name].ravel() - start.ravel() for w in (after, plain))
            cosines.append(float(a @ b / np.sqrt((a @ a) * (b @ b))))
        worst = float(np.min([worst, *cosines]))  # not a number, if one is
        print(
            f"{text}: smallest cosine {min(cosines):.4f} of {len(cosines)} arrays, losses {loss:.6f} and {other:.6f}",
            flush=True,
        )
        if options.out:
            found = {"cosines": dict(zip(before, cosines, strict=True)), "losses": [loss, other], "steps": options.steps}
            record.append(options.out, {"what": "gpu check", "row": text, **found, **record.environment()})
    sys.exit(int(not worst >= BOUND))


if __name__ == "__main__":
    main()
