"""The benchmark from Python: `train` returns arrays, a plot and a table, without a folder unless one is wanted."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pcx.data
from pcx.bench import runs
from pcx.bench.config import Config, ConfigError, set_values
from pcx.bench.engine import Engine
from pcx.bench.folder import Folder
from pcx.bench.modes import choose_mode, use_compilation_cache
from pcx.bench.tasks import configure


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained population. Arrays are (seeds, epochs); a seed that stopped early ends in NaN."""

    config: Config
    seeds: list[int]
    lines: list[dict[str, Any]]
    population: Any = None

    def array(self, metric: str = "test_top1") -> np.ndarray:
        """A metric of every seed and epoch."""
        known = [name for name in self.lines[0] if name not in ("seed", "epoch", "energies", "stopped")]
        if metric not in known:
            raise ConfigError(f"there is no metric {metric!r}; there are {', '.join(known)}.")
        result = np.full((len(self.seeds), self.config.epochs), np.nan)
        for line in self.lines:
            result[self.seeds.index(line["seed"]), line["epoch"] - 1] = line[metric]
        return result

    @property
    def accuracy(self) -> np.ndarray:
        """Test accuracy of every seed and epoch."""
        return self.array("test_top1")

    def model(self, seed: int) -> Any:
        """The trained model of a seed."""
        import jax

        if seed not in self.seeds:
            raise ConfigError(f"there is no model of seed {seed}; there are those of {', '.join(map(str, self.seeds))}.")
        if self.population is None:
            raise ConfigError("the models are not there any more: the run's folder has no checkpoint.")
        index = self.seeds.index(seed)
        return jax.tree.map(lambda a: a[index], self.population.states.model)

    def table(self) -> str:
        """The last epoch of every seed, and mean and deviation."""
        rows = [f"{'seed':>6}  {'test top-1':>10}  {'test loss':>10}  epochs"]
        last = {s: [line for line in self.lines if line["seed"] == s][-1] for s in self.seeds}
        rows += [
            f"{s:>6}  {100 * line['test_top1']:>9.2f}%  {_number(line['test_loss']):>10}  {line['epoch']:>6}"
            for s, line in last.items()
        ]
        final = [100 * line["test_top1"] for line in last.values()]
        return "\n".join([*rows, f"{'mean':>6}  {np.mean(final):>9.2f}% ± {np.std(final):.2f}"])

    def plot(self, path: str | Path = "curves.png") -> Path:
        """Write the curves of accuracy, loss and energy as a picture."""
        from pcx.bench.plots import curves

        curves(self.lines, self.config, Path(path))
        return Path(path)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def train(
    task: str,
    algorithm: str,
    *,
    seeds: int | Sequence[int] = 1,
    sweep: dict[str, Sequence[float]] | None = None,
    out: str | Path | None = None,
    **settings: Any,
) -> Result:
    """Train a task: ``train("digits/mlp", "pc_se", seeds=3, epochs=5)``. ``settings`` are those of ``pcx run --set``.

    ``sweep`` gives a number of the algorithm, such as ``lr_h``, another value for every seed, side by side in one program.
    With ``out``, the run has a folder, can be resumed, and is recorded.
    """
    whole = hasattr(seeds, "__index__") and not isinstance(seeds, bool | Iterable)
    numbers: list[Any] = list(range(seeds)) if whole else list(seeds) if isinstance(seeds, Iterable) else []  # type: ignore[arg-type]
    fit = all(hasattr(number, "__index__") and not isinstance(number, bool) and number >= 0 for number in numbers)
    if not numbers or len(set(numbers)) < len(numbers) or not fit:
        raise ConfigError(f"seeds is {seeds!r}; give how many, or a list of whole numbers: at least one seed, each once.")
    if twice := sorted(settings.keys() & (sweep or {}).keys()):
        raise ConfigError(f"{twice[0]} is given as a setting and as a sweep; leave one of them away.")
    use_compilation_cache()
    config = set_values(configure(task, algorithm), settings)
    data = pcx.data.load(config.dataset)
    if out is not None:
        if sweep:
            raise ConfigError("a sweep has no folder; leave out= away, or run each setting by itself.")
        summary = runs.run(config, data, numbers, Path(out), report=lambda text: None)
        folder = Folder(Path(out))
        loaded = folder.load(Engine(config, data, numbers, summary["mode"]).init())
        return Result(config, numbers, folder.lines(), loaded[0] if loaded else None)
    mode, _ = choose_mode(config, data, numbers)
    engine = Engine(config, data, numbers, mode, sweep={k: list(v) for k, v in (sweep or {}).items()})
    done = list(runs.epochs(engine, engine.prepare().init(), 0, runs.Progress(len(numbers))))
    return Result(config, numbers, [line for _, _, new in done for line in new], done[-1][1])
