"""Train the paper's MLP by all eight algorithms of its Table 1, on MNIST if it is here, else on scikit-learn's digits.

    python examples/demo.py              one seed, a few epochs: under three minutes on two cores
    python examples/demo.py --help       what can be changed

Ends with a table of test accuracies, and two pictures in demo-output/: the accuracy of every epoch, and the energy of
every layer while the values of a trained network settle. For real results use `pcx run`.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import pcx
import pcx.data
from pcx.bench import plots, runs
from pcx.bench.configs import accuracy
from pcx.bench.engine import Engine
from pcx.bench.modes import use_compilation_cache
from pcx.bench.tasks import configure, pipeline

EPOCHS = {"mnist": 4, "digits": 25}


def best_data_set() -> str:
    """MNIST if its training images are here, else digits, which always are; then a line says so."""
    here = {status.name for status in pcx.data.status() if status.present and "train" in status.splits}
    if "mnist" in here:
        return "mnist"
    print("MNIST is not here, so scikit-learn's digits are used; `pcx data get mnist` downloads it.", flush=True)
    return "digits"


def train(name: str, algorithm: str, epochs: int, seeds: int, data: Any) -> tuple[Engine, Any, list[dict[str, Any]]]:
    """One algorithm; prints a line per epoch on a terminal."""
    engine = Engine(configure(f"{name}/mlp", algorithm, epochs=epochs), data, list(range(seeds)))
    lines: list[dict[str, Any]] = []
    population = engine.init()
    for epoch, population, new in runs.epochs(engine, population, 0, runs.Progress(seeds)):  # noqa: B007, B020
        lines += new
        if sys.stderr.isatty():
            accuracy = sum(line["test_top1"] for line in new) / max(len(new), 1)
            print(f"\r{algorithm:6} epoch {epoch}/{epochs}  test accuracy {accuracy:6.2%} ", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return engine, population, lines


def plot_energies(engine: Engine, population: Any, data: Any, path: Path) -> None:
    """The energy of every layer while the values of one batch settle."""
    model = jax.tree.map(lambda a: a[0], population.states.model)
    x = pipeline(engine.config).test(jnp.asarray(data.train.images[:128]))
    hyper = engine.config.hyper
    settled = pcx.infer(
        model,
        x,
        {engine.output: data.train.labels[:128]},
        optimiser=optax.sgd(hyper.lr_h, momentum=hyper.momentum_h),
        steps=32,
        record=pcx.record_energies,
    )
    plots.energies(settled.history, path, "Energy travels from the output to the first layer")


def table(name: str, epochs: int, ours: dict[str, tuple[float, float]]) -> str:
    """Test accuracy and seconds per epoch of every algorithm; the paper's accuracy beside them, where it has one."""
    paper = accuracy.PAPER.get(("mlp", name), {}).get("top1", ())
    known = {algorithm: f"{found[0]:.2f}" for algorithm, found in zip(accuracy.ALGORITHMS, paper, strict=bool(paper))}
    width = 19 if known else 0

    def line(algorithm: str, mean: str, beside: str, seconds: str) -> str:
        return f"{algorithm:<10} {mean:>17}{beside if known else '':>{width}} {seconds:>9}"

    head = line("algorithm", f"ours ({epochs} epoch{'s' * (epochs > 1)})", "paper (25 epochs)", "s/epoch")
    return "\n".join([head, *(line(a, f"{mean:.2f}", known.get(a, ""), f"{s:.3f}") for a, (mean, s) in ours.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, help="epochs of training (default 4 on MNIST, 25 on digits)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, side by side (default 1)")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="where pictures go (default demo-output/)")
    options = parser.parse_args()
    name = best_data_set()
    epochs = options.epochs or EPOCHS[name]
    if epochs < 1 or options.seeds < 1:
        parser.error("--epochs and --seeds are at least 1")
    use_compilation_cache()
    data, start = pcx.data.load(name), time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    all_lines, ours = {}, {}
    for algorithm in accuracy.ALGORITHMS:
        engine, population, lines = train(name, algorithm, epochs, options.seeds, data)
        final = [100 * line["test_top1"] for line in lines if line["epoch"] == epochs]
        seconds = sorted(line["seconds"] for line in lines)[len(lines) // 2]
        mean = sum(final) / len(final) if final else float("nan")
        ours[algorithm] = mean, seconds
        print(f"{algorithm}: {mean:.2f} % after {epochs} epoch{'s' * (epochs > 1)}", flush=True)
        all_lines[algorithm] = lines
        if algorithm == "pc_se":
            plot_energies(engine, population, data, options.out / "energies.png")
    print(f"\n{name}/mlp, {options.seeds} seed(s): test accuracy after the last epoch, in percent")
    print(table(name, epochs, ours))
    plots.compare(all_lines, options.out / "accuracy.png", f"{name}/mlp")
    print(f"\npictures: {options.out / 'accuracy.png'}, {options.out / 'energies.png'}; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; nothing was kept")
