"""Where the time of a training step goes on a GPU: device time per family of kernels, for a row of the timing table.

    python benchmarks/profile_step.py --row vgg5 --precision tf32 --out results/profile.jsonl
    python benchmarks/profile_step.py --row mnist/mlp --precision bf16_state --seeds 64

One epoch of random images is traced after a warm-up; a kernel's time is divided by the number of steps. The whole list of
kernels and the compiled program are written next to the record with ``--details FOLDER``. A row is one of `pcx bench speed`, or
a task such as mnist/mlp; with ``--seeds`` that many are trained side by side.
"""

import argparse
import collections
import glob
import tempfile
from pathlib import Path

import jax

from pcx.bench import record, speed
from pcx.bench.engine import Engine
from pcx.bench.tasks import configure

# the first family that has one of its words in a kernel's name
FAMILIES = {
    "convolution, forward": ("fprop", "convolve_common"),
    "convolution, error sent back": ("dgrad",),
    "convolution, weight gradient": ("wgrad",),
    "dense products": ("gemm", "nvjet", "cutlass"),
    "reductions": ("reduce", "sort"),
    "copies and transposes": ("transpose", "copy", "memcpy", "memset"),
    "elementwise": ("fusion", "wrapped"),
}


def family_of(name: str) -> str:
    """The family of a kernel."""
    return next((family for family, words in FAMILIES.items() if any(word in name.lower() for word in words)), "other")


def kernels(folder: str) -> dict[str, tuple[float, int]]:
    """Nanoseconds and calls of every kernel in a trace."""
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
    for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    found[event.name][0] += event.duration_ns
                    found[event.name][1] += 1
    return {name: (time, int(calls)) for name, (time, calls) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="vgg5")
    parser.add_argument("--algorithm", default="pc_se")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("results/profile.jsonl"))
    parser.add_argument("--details", type=Path)
    options = parser.parse_args()
    changes = {"precision": options.precision} | ({"population": "vmap"} if options.seeds > 1 else {})
    config = (configure if "/" in options.row else speed.config_of)(options.row, options.algorithm, **changes)
    data = speed.data_of(config.dataset, random=True, limit=options.steps * config.batch)
    engine = Engine(config, data, list(range(options.seeds)), steps=options.steps)
    population, _ = engine.epoch(engine.init(), 0)
    population, _ = engine.epoch(population, 1)
    wall = engine.timing.train / engine.steps
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            engine.epoch(population, 2)
        found = kernels(folder)
    families: dict[str, dict[str, float]] = {}
    for name, (time, calls) in found.items():
        entry = families.setdefault(family_of(name), {"microseconds": 0.0, "kernels": 0.0})
        entry["microseconds"] += time / 1e3 / engine.steps
        entry["kernels"] += calls / engine.steps
    total = sum(entry["microseconds"] for entry in families.values())
    cell = {"row": options.row, "algorithm": options.algorithm, "precision": options.precision}
    cell |= {"seeds": str(options.seeds)} if options.seeds > 1 else {}
    times = {"wall_microseconds": 1e6 * wall, "device_microseconds": total, "families": families}
    record.append(options.out, {"what": "profile", **cell, **times, **record.environment()})
    print(f"{' '.join(cell.values())}: {1e3 * wall:.3f} ms per step, {total / 1e3:.3f} ms traced")
    for name, entry in sorted(families.items(), key=lambda item: -item[1]["microseconds"]):
        print(f"{entry['microseconds']:9.1f} µs  {entry['kernels']:6.1f} kernels  {name}")
    if options.details:
        options.details.mkdir(parents=True, exist_ok=True)
        tag = f"{options.row.replace('/', '-')}-{options.algorithm}-{options.precision}-{options.seeds}"
        rows = sorted(found.items(), key=lambda item: -item[1][0])
        text = "".join(f"{t / 1e3 / engine.steps:9.1f} µs x{c / engine.steps:6.2f} {name}\n" for name, (t, c) in rows)
        (options.details / f"{tag}-kernels.txt").write_text(text)
        (options.details / f"{tag}-program.txt").write_text(engine._compiled["epoch"].as_text())


if __name__ == "__main__":
    main()
