"""Seconds per epoch of PC-SE and BP-SE on MNIST's MLP, side by side in one process, and what the host adds.

    python benchmarks/epoch_time.py --epochs 5 --out results/epoch_time.jsonl

An epoch of each algorithm is timed in turn (60,000 images, batch 128, the input pipeline inside). The host's share is the time
of a whole run (training, evaluation, lines, checkpoint) beyond that of its compiled programs.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax

import pcx.data
from pcx.bench import record, runs
from pcx.bench.engine import Engine
from pcx.bench.modes import choose_mode
from pcx.bench.tasks import configure


def host_share(config, data) -> float:
    """How much longer a run takes than its compiled programs, as a share of the latter."""
    inside = []
    with tempfile.TemporaryDirectory() as folder:
        start = None

        def on_epoch(epoch, lines):
            nonlocal start
            if epoch == 1:
                start = time.perf_counter()  # the first epoch compiles
            else:
                inside.append(lines[0]["seconds"] + lines[0]["evaluate_seconds"])
            on_epoch.end = time.perf_counter()

        runs.run(
            config, data, [0], Path(folder) / "run", report=lambda text: None, on_epoch=on_epoch, results=Path(folder) / "r"
        )
    return (on_epoch.end - start) / sum(inside) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="mnist/mlp")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/epoch_time.jsonl"))
    options = parser.parse_args()
    engines = {}
    for name in ("pc_se", "bp_se"):
        config = configure(options.task, name)
        data = pcx.data.load(config.dataset)
        engines[name] = Engine(config, data, [0], choose_mode(config, data, [0])[0])
    populations = {name: engine.epoch(engine.prepare().init(), 0)[0] for name, engine in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(1, options.epochs + 1):
        for name, engine in engines.items():
            populations[name], _ = engine.epoch(populations[name], number)
            seconds[name].append(engine.timing.train)
    share = host_share(configure(options.task, "pc_se", epochs=options.epochs + 1), data)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    result = {
        "what": "seconds per epoch, one seed", "task": options.task, "T": engines["pc_se"].config.hyper.T, "batch": 128,
        "mode": {name: engine.mode for name, engine in engines.items()}, "epochs": seconds, "median": median,
        "pc_over_bp": median["pc_se"] / median["bp_se"], "host_share": share,
        "compile_seconds": {name: engine.timing.compile for name, engine in engines.items()},
        "cpus_used": len(__import__("os").sched_getaffinity(0)), **record.environment(),
    }  # fmt: skip
    record.append(options.out, result)
    print(
        f"{jax.devices()[0].device_kind}: "
        + ", ".join(f"{n} {s:.3f} s" for n, s in median.items())
        + f", host {100 * share:.1f} %"
    )


if __name__ == "__main__":
    main()
