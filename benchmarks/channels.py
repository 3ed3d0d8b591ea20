"""What `pcx.channels_last` is worth on this CPU: a training step and an evaluation with it and without.

    python benchmarks/channels.py cifar100/vgg5:pc_se cifar100/vgg5:ipc cifar10/resnet18:pc_se --batch 32

The engine trains on random images, batch by batch, and evaluates a hundred; figures are the fastest of some passes, with it and
without it in turn. Without it inference is written out, as a compiler for CPUs convolves many times slower in a loop; the loop
over the batches of an evaluation cannot be.
"""

import argparse
import sys
from pathlib import Path
from typing import Any


def engines(task: str, algorithm: str, batch: int) -> dict[str, Any]:
    """An engine with channels last and one without, both compiled, and their trained populations."""
    from pcx.bench import engine, speed
    from pcx.bench.tasks import configure

    config = configure(task, algorithm, batch=batch, epochs=100)
    data, last, found = speed.data_of(config.dataset, random=True, limit=2 * batch), engine.channels_last, {}
    try:
        for name, kept, mode in (("last", last, "host"), ("first", lambda function: function, "host_unrolled")):
            engine.channels_last = kept
            made = engine.Engine(config, data, [0], mode)
            population, _ = made.epoch(made.init(), 0)
            made.evaluate(population, "test")
            found[name] = (made, population)
    finally:
        engine.channels_last = last
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="TASK:ALGORITHM")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/channels.jsonl"))
    options = parser.parse_args()
    if options.passes < 1:
        parser.error(f"--passes is {options.passes}; at least one is timed")
    import jax

    from pcx.bench import record
    from pcx.bench.config import ConfigError

    if jax.default_backend() != "cpu":
        sys.exit("error: on an accelerator the compiler orders axes by itself; set JAX_PLATFORMS=cpu.")
    for cell in options.cells:
        task, _, algorithm = cell.partition(":")
        try:
            made = engines(task, algorithm or "pc_se", options.batch)
        except ConfigError as error:
            sys.exit(f"error: {cell}: {error}")
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for number in range(1, options.passes + 1):
            for name, (engine, population) in made.items():
                population, _ = engine.epoch(population, number)
                engine.evaluate(population, "test")
                seconds[name].append((engine.timing.train / engine.steps, engine.timing.evaluate))
                made[name] = (engine, population)
        found = {name: [min(column) for column in zip(*times, strict=True)] for name, times in seconds.items()}
        compiling = {name: engine.timing.compile for name, (engine, _) in made.items()}
        numbers = {"seconds_per_step_and_evaluation": found, "compile_seconds": compiling, "batch": options.batch}
        record.append(options.out, {"what": "channels last", "cell": cell, **numbers, **record.environment()})
        (step, test), (plain_step, plain_test) = found["last"], found["first"]
        print(
            f"{cell}, batch {options.batch}: step {1e3 * step:.0f} ms, without {1e3 * plain_step:.0f} ({plain_step / step:.1f} "
            f"times); 100 images evaluated in {test:.2f} s, without {plain_test:.2f} ({plain_test / test:.0f} times); "
            f"compiling {compiling['last']:.1f} and {compiling['first']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
