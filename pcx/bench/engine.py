"""The engine: one epoch of a whole population as one compiled program.

A population is several members (seeds, or settings) that train side by side: an axis that is mapped (``vmap``, one batched
program) or looped over (``map``); by default, convolutions are looped over, and on few CPU cores everything. The data set lies
on the device as uint8; shuffling, gathering and augmentation are part of the program. Three ways to run an epoch are known
(`MODES`); `choose_mode` measures once which is fastest here. A data set that is too large for the device stays on the host
(mode ``stream``), which sends the batches of some steps at a time.
"""

import dataclasses
import inspect
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import pcx.algorithms
from pcx._free_energy import graph, output_node, run
from pcx._model import weights
from pcx._types import ALL_SHORTCUTS, Key, Shortcuts, near
from pcx.algorithms import State, stream
from pcx.algorithms._common import ENERGY
from pcx.bench import programs
from pcx.bench.config import Config, ConfigError
from pcx.bench.tasks import build_model, hyper_floats, make_algorithm, pipeline
from pcx.data import DataSet, Split, augment, split_validation
from pcx.shortcuts import pooling
from pcx.shortcuts.channels import channels_last

F = TypeVar("F", bound=Callable[..., Any])
MODES = ("scan", "host", "host_unrolled")
PRECISION = {
    "float32": "float32",
    "tf32": "tensorfloat32",
    "f16": "tensorfloat32",
    "bf16": "bfloat16",
    "bf16_state": "bfloat16",
    "tf32_plain": "tensorfloat32",
}
PRODUCTS = {"f16": jnp.float16, "bf16": jnp.bfloat16, "bf16_state": jnp.bfloat16}  # where they are not in float32
INFERENCE: dict[str, dict[str, Any]] = {
    "bf16_state": {"state_dtype": jnp.bfloat16},
    "tf32_plain": {"shortcuts": Shortcuts(anchor=False)},
    "f16": {"shortcuts": Shortcuts(half=True)},
}
# Options of the compiler on a GPU. Small kernels of dense layers that need not wait for each other run side by side; that
# makes convolutions no faster. For these it need not try several kernels for every elementwise one, nor have convolutions that
# add a bias or apply an activation, for each of which a library compiles kernels to try: neither makes a step faster.
DENSE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
CONVOLUTIONAL = {
    "xla_gpu_experimental_enable_fusion_autotuner": False,
    "xla_disable_hlo_passes": "cudnn-fused-convolution-rewriter",
}
EVALUATION_BATCH = 500
FEW_CORES = 4  # up to so many CPU cores members are trained one after the other
CHUNK = 16  # steps whose batches a streaming host sends at once


class Health(NamedTuple):
    """Of every member: whether it still trains, and else at which epoch, step and node (an index) its energy went wrong."""

    alive: Bool[Array, " members"]
    epoch: Int[Array, " members"]
    step: Int[Array, " members"]
    node: Int[Array, " members"]


class Sums(NamedTuple):
    """Of every member, over the steps of one epoch: energies per node, loss, how many were right, and the steps it lived."""

    energies: Float[Array, "*members nodes"]
    loss: Float[Array, "*members"]
    top1: Float[Array, "*members"]
    top5: Float[Array, "*members"]
    steps: Float[Array, "*members"]


class Population(NamedTuple):
    """Everything that an epoch changes."""

    states: State
    health: Health


@dataclasses.dataclass
class Timing:
    """Seconds: compiling, and of the last epoch training and evaluating."""

    compile: float = 0.0
    train: float = 0.0
    evaluate: float = 0.0


class Engine:
    """Trains a population on one task. ``floats`` are the settings of each member, stacked; seeds are numbers."""

    def __init__(self, config: Config, data: DataSet, seeds: list[int], mode: str = "scan", steps: int | None = None,
                 sweep: dict[str, list[float]] | None = None):  # fmt: skip
        if data.train is None:
            raise ConfigError(f"{data.name} has no training images here.")
        if data.train.labels is None or data.test.labels is None:
            raise ConfigError(f"{data.name} has no labels, so that no classifier can be trained on it.")
        if not seeds:
            raise ConfigError("there is no seed to train; give at least one.")
        if not all(0 <= seed < 2**32 for seed in seeds):
            raise ConfigError(f"a seed is a number from 0 to {2**32 - 1}, but the seeds are {', '.join(map(str, seeds))}.")
        for name, split in (("train", data.train), ("test", data.test)):
            if len(split) == 0:
                raise ConfigError(f"{data.name} has no samples in its {name} split.")
            found = np.asarray(split.labels)
            if found.min() < 0 or found.max() >= data.classes:
                what = f"labels of {data.name} ({name}) go from {found.min()} to {found.max()}"
                raise ConfigError(f"{what}; with {data.classes} classes they are 0 to {data.classes - 1}.")
        train = data.train if not config.train_limit else Split(*_head(data.train, config.train_limit))
        held = split_validation(train, config.validation) if config.validation else (train, None)
        self.config, self.mode, self.seeds = config, mode, seeds
        self.members, self.classes = len(seeds), data.classes
        self.train_set, self.splits = held[0], {"validation": held[1], "test": data.test}
        self.pipeline = pipeline(config)
        self.steps = min(steps or len(held[0]), len(held[0]) // config.batch)
        if self.steps == 0:
            raise ConfigError(f"a batch of {config.batch} is larger than the {len(held[0])} samples to train on.")
        self.total_steps = (len(held[0]) // config.batch) * config.epochs
        self.timing = Timing()
        self.on_step: Callable[[int, int], None] | None = None  # told after steps: how many are done, of how many
        self.keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        floats, self.static_hyper = eqx.partition(config.hyper, lambda leaf: isinstance(leaf, float))
        self.floats = jax.tree.map(lambda value: jnp.full((self.members,), value), floats)
        for name, values in (sweep or {}).items():
            self._check_sweep(name, values)
            swept = jnp.asarray(values, jnp.result_type(float))
            self.floats = dataclasses.replace(self.floats, **{name: swept})
        self.host = (np.asarray(held[0].images), np.asarray(held[0].labels))
        here = slice(config.batch) if mode == "stream" else slice(None)  # the first batch shows the shapes
        self.arrays = jax.device_put(tuple(array[here] for array in self.host))
        self.evaluation = {name: _padded(split) for name, split in self.splits.items() if split is not None}
        sample = jax.eval_shape(self.pipeline.test, jax.ShapeDtypeStruct((1, *held[0].images.shape[1:]), held[0].images.dtype))
        self.shape = tuple(sample.shape[1:])
        with jax.default_matmul_precision(PRECISION[config.precision]):
            jax.eval_shape(self._look)
            start = time.perf_counter()
            self.quick_pooling = self.convolutional and pooling.works(PRODUCTS.get(config.precision, jnp.float32))
            self.timing.compile += time.perf_counter() - start
            self._build()

    def _check_sweep(self, name: str, values: list[float]) -> None:
        known = hyper_floats(self.config)
        if name not in known:
            raise ConfigError(f"{name!r} cannot be swept; numbers of {self.config.algorithm} are {near(name, known)}.")
        if len(values) != self.members:
            raise ConfigError(f"the sweep of {name} has {len(values)} values for {self.members} members; give one for each.")
        for value in values:
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise ConfigError(f"the sweep of {name} has {value!r}; give numbers.") from None
            dataclasses.replace(self.config.hyper, **{name: number})  # its own checks

    def _look(self) -> None:
        """Find the names of the nodes, and how members are mapped, without computing anything.

        Kernels of a convolution that differ between members would make it a grouped one, which is slow; and a few CPU cores
        have enough to do with one member.
        """
        model = build_model(self.config, self.shape, self.classes, jax.random.key(0))
        self.convolutional = any(leaf.ndim > 2 for leaf in jax.tree.leaves(weights(model)))
        few_cores = jax.default_backend() == "cpu" and (os.cpu_count() or 1) <= FEW_CORES
        self.looped = self.convolutional or few_cores if self.config.population == "auto" else self.config.population == "map"
        example = jnp.zeros((2, *self.shape))
        self.output = output_node(model, example)
        parents = graph(model, example).parents
        self.nodes, self.distance = list(parents), {self.output: 0}
        for name in reversed(self.nodes):  # every node stands after those that it reads
            for parent in parents[name]:
                self.distance[parent] = min(self.distance[name] + 1, self.distance.get(parent, len(parents)))

    def unreached(self) -> str:
        """A sentence where inference is too short for errors to come from the output to every node, else nothing."""
        steps = getattr(self.config.hyper, "T", None)
        far = [name for name in self.nodes if steps is not None and self.distance[name] > steps]
        if not far:
            return ""
        names, enough = ", ".join(far if len(far) < 4 else [far[0], "…", far[-1]]), max(self.distance.values())
        reason = f"the output's error does not get to {names}, so the weights that predict them learn nothing of it"
        return f"T = {steps}: {reason}; T = {enough} is enough"

    # --- one member, one step

    def _algorithm(self, floats: Any) -> pcx.algorithms.Algorithm:
        _, make = pcx.algorithms.get(self.config.algorithm)
        parameters = inspect.signature(make).parameters
        wanted: dict[str, Any] = {"unroll": True} if self.mode == "host_unrolled" else {}
        wanted |= INFERENCE.get(self.config.precision, {})
        if self.quick_pooling:
            wanted["shortcuts"] = wanted.get("shortcuts", ALL_SHORTCUTS)._replace(kernel=True)
        any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        options = {name: value for name, value in wanted.items() if any_name or name in parameters}
        return make_algorithm(
            self.config, eqx.combine(floats, self.static_hyper), self.total_steps, output=self.output, **options
        )

    def _init_member(self, key: Key, floats: Any, arrays: Any) -> State:
        model = build_model(self.config, self.shape, self.classes, stream(key, "weights"))
        rows = jnp.arange(self.config.batch)
        x = self.pipeline.test(arrays[0][rows])
        return self._algorithm(floats).init(model, x, arrays[1][rows], key)

    def _step_member(self, carry: Any, floats: Any, key: Key, arrays: Any, rows: Array, epoch: Array, step: Array) -> Any:
        """One training step, and what it measured as one row: the energies, the loss, how many were right (top 1 and 5).

        A member whose energies or loss go wrong keeps its last state from then on.
        """
        state, alive = carry
        own = jax.random.fold_in(jax.random.fold_in(stream(key, "augmentation"), epoch), step)
        labels = arrays[1][rows]
        x = self.pipeline.train(own, arrays[0][rows])
        learn = self._images_last(lambda floats, *given: self._algorithm(floats).step(*given))
        new, metrics = learn(floats, state, x, labels, key, epoch)
        rank = _rank(metrics.prediction, labels)
        parts = [*(metrics.energies[name] for name in self.nodes), metrics.loss, jnp.sum(rank < 1), jnp.sum(rank < 5)]
        row = jnp.stack([part.astype(jnp.float32) for part in parts])
        alive = alive & ~jnp.any(self._wrong(row))
        return (jax.tree.map(lambda a, b: _select(alive, a, b), new, state), alive), row

    def _images_last(self, function: F) -> F:
        """What a CPU's compiler likes where there are convolutions; without them, nothing need be looked for."""
        return channels_last(function) if self.convolutional else function

    def _wrong(self, row: Array) -> Array:
        """Which energies are not numbers or too large, and whether the loss is no number."""
        energies, loss = row[..., : len(self.nodes)], row[..., len(self.nodes)]
        sick = ~jnp.isfinite(energies) | (energies > self.config.energy_limit)
        return jnp.concatenate([sick, ~jnp.isfinite(loss)[..., None]], axis=-1)

    def _epoch_member(self, state: State, health: Health, floats: Any, key: Key, arrays: Any, epoch: Array) -> Any:
        order = augment.epoch_order(jax.random.fold_in(stream(key, "order"), epoch), len(self.train_set), self.config.batch)

        def body(carry: Any, step: Array) -> Any:
            return self._step_member(carry, floats, key, arrays, order[step], epoch, step)

        (state, _), rows = jax.lax.scan(body, (state, health.alive), jnp.arange(self.steps))
        return state, *self._summarise(health, rows, epoch)

    def _chunk_member(self, carry: Any, floats: Any, key: Key, images: Array, labels: Array, epoch: Array, first: Array) -> Any:
        """Some steps on batches that the host has gathered; the same numbers as in a scan over the whole epoch."""
        rows = jnp.arange(self.config.batch)

        def body(carry: Any, part: Any) -> Any:
            step, *arrays = part
            return self._step_member(carry, floats, key, tuple(arrays), rows, epoch, step)

        return jax.lax.scan(body, carry, (first + jnp.arange(len(images)), images, labels))

    def _summarise(self, health: Health, rows: Array, epoch: Array) -> tuple[Health, Sums]:
        """The health of a member after an epoch, and its sums over the steps before anything went wrong."""
        wrong = self._wrong(rows)
        lived = health.alive & jnp.cumprod(~jnp.any(wrong, axis=-1)).astype(bool)
        fell = health.alive & ~lived[-1]
        step = jnp.argmin(lived)
        node = jnp.minimum(jnp.argmax(wrong[step]), len(self.nodes) - 1)  # the loss belongs to the last node
        places = ((health.epoch, epoch), (health.step, step), (health.node, node))
        after = Health(lived[-1], *(jnp.where(fell, now, before).astype(jnp.int32) for before, now in places))
        total = jnp.sum(jnp.where(lived[:, None], rows, 0), axis=0)
        energies, (loss, top1, top5) = total[: len(self.nodes)], total[len(self.nodes) :]
        return after, Sums(energies, loss, top1, top5, jnp.sum(lived, dtype=jnp.float32))

    # --- the population

    def _mapped(self, function: Callable[..., Any], shared: int) -> Callable[..., Any]:
        """Over the members; the last ``shared`` arguments are the same for all."""

        def call(*arguments: Any) -> Any:
            own, rest = arguments[: len(arguments) - shared], arguments[len(arguments) - shared :]
            if self.members == 1:
                alone = function(*jax.tree.map(lambda a: a[0], own), *rest)
                return jax.tree.map(lambda a: a[None], alone)
            if self.looped:
                return jax.lax.map(lambda own: function(*own, *rest), own)
            return jax.vmap(function, in_axes=(0,) * len(own) + (None,) * shared)(*own, *rest)

        return call

    def _build(self) -> None:
        self._init = jax.jit(self._mapped(lambda key, floats, arrays: self._init_member(key, floats, arrays), 1))
        epoch = self._mapped(self._epoch_member, 2)
        self._epoch = jax.jit(lambda population, *rest: epoch(*population, *rest), donate_argnums=0)
        step = self._mapped(
            lambda carry, floats, key, rows, *shared: self._step_member(carry, floats, key, shared[0], rows, *shared[1:]), 3
        )
        self._step = jax.jit(step, donate_argnums=0)
        self._chunk = jax.jit(self._mapped(self._chunk_member, 2), donate_argnums=0)
        self._summary = jax.jit(self._mapped(self._summarise, 1))
        self._order = jax.jit(
            self._mapped(
                lambda key, epoch: augment.epoch_order(
                    jax.random.fold_in(stream(key, "order"), epoch), len(self.train_set), self.config.batch
                ),
                1,
            )
        )
        self._evaluate = jax.jit(self._mapped(self._evaluate_member, 1))
        self._compiled: dict[str, Any] = {}

    def _run(self, name: str, function: Any, *arguments: Any, like: Any = None) -> Any:
        """Call a compiled program; the first call compiles, and its seconds are counted apart.

        What returns something ``like`` this is kept for later runs (`programs`).
        """
        if name not in self._compiled:
            start = time.perf_counter()
            with jax.default_matmul_precision(PRECISION[self.config.precision]):
                place, found = self._kept(name, arguments, like)
                self._compiled[name] = found or self._compile(function.lower(*arguments), place)
            self.timing.compile += time.perf_counter() - start
        return self._compiled[name](*arguments)

    def _kept(self, name: str, arguments: Any, like: Any) -> tuple[programs.Place | None, Any]:
        """Where a program is kept between runs, and the program if it is there."""
        if like is None:
            return None, None
        place = programs.place({"name": name} | self._facts(), arguments)
        return place, programs.read(place, arguments, like)

    def _facts(self) -> dict[str, Any]:
        """All that programs depend on, but for arguments and source."""
        names = ("mode", "steps", "total_steps", "classes", "quick_pooling", "looped", "shape", "nodes", "output")
        facts = {name: getattr(self, name) for name in names}
        return facts | {"config": self.config.as_dict(), "samples": len(self.train_set)}

    def _compile(self, lowered: Any, place: programs.Place | None = None) -> Any:
        """A program with the options of this device, or without them, where the compiler does not know them; then kept."""
        options = CONVOLUTIONAL if self.convolutional else DENSE

        def compile() -> Any:
            try:
                return lowered.compile(compiler_options=options if jax.default_backend() == "gpu" else None)
            except jax.errors.JaxRuntimeError as error:
                if not any(name in str(error) for name in options):
                    raise
                return lowered.compile()

        return programs.make(place, compile)

    def prepare(self) -> "Engine":
        """Compile the programs of weights and of an epoch side by side, before either is called; returns itself.

        Fresh weights are a small program that compiles slowly. Nothing runs meanwhile: the compiler times kernels.
        """
        if self.mode == "scan" and not self._compiled:
            start = time.perf_counter()
            with jax.default_matmul_precision(PRECISION[self.config.precision]), ThreadPoolExecutor(1) as pool:
                given = self.keys, self.floats, self.arrays
                fresh = self._init.trace(*given)
                place, kept = self._kept("init", given, fresh.out_info)
                first = None if kept else pool.submit(self._compile, fresh.lower(), place)
                population = Population(fresh.out_info, jax.eval_shape(self._healthy))
                rest = self.floats, self.keys, self.arrays, jax.ShapeDtypeStruct((), jnp.int32)
                place, epoch = self._kept("epoch", (population, *rest), (*population, Sums._make(Sums._fields)))
                epoch = epoch or self._compile(self._epoch.lower(population, *rest), place)
                self._compiled |= {"epoch": epoch, "init": first.result() if first else kept}
            self.timing.compile += time.perf_counter() - start
        return self

    def _healthy(self) -> Health:
        never = (jnp.full((self.members,), -1, jnp.int32) for _ in range(3))  # three arrays: each is donated
        return Health(jnp.ones((self.members,), bool), *never)

    def init(self) -> Population:
        """Fresh weights from every member's key."""
        given = self.keys, self.floats, self.arrays
        like = None if "init" in self._compiled else self._init.trace(*given).out_info
        states = self._run("init", self._init, *given, like=like)
        return Population(states, self._healthy())

    def epoch(self, population: Population, number: int) -> tuple[Population, dict[str, np.ndarray]]:
        """Train every living member for one epoch; the population that went in is used up."""
        before = self.timing.compile
        start = time.perf_counter()
        at = jnp.asarray(number, jnp.int32)
        if self.mode == "scan":
            given, like = (population, self.floats, self.keys, self.arrays, at), (*population, Sums._make(Sums._fields))
            states, health, sums = self._run("epoch", self._epoch, *given, like=like)
        else:
            order = self._run("order", self._order, self.keys, at)
            carry = (population.states, jnp.copy(population.health.alive))
            carry, rows = (self._streamed if self.mode == "stream" else self._stepped)(carry, order, at)
            states = carry[0]
            health, sums = self._run(f"summary {self.steps}", self._summary, population.health, rows, at)
        sums = jax.device_get(sums)
        self.timing.train = time.perf_counter() - start - (self.timing.compile - before)
        lived = np.where(sums.steps > 0, sums.steps, np.nan)  # a member that stopped at once has no means
        metrics = {
            "train_loss": sums.loss / lived,
            "train_top1": sums.top1 / (lived * self.config.batch),
            "train_top5": sums.top5 / (lived * self.config.batch),
            "train_energies": sums.energies / lived[:, None],
        }
        return Population(states, health), metrics

    def _stepped(self, carry: Any, order: Array, epoch: Array) -> tuple[Any, Array]:
        """An epoch step by step, and its rows."""
        rows = []
        for i in range(self.steps):
            shared = (self.arrays, epoch, jnp.asarray(i, jnp.int32))
            given = carry, self.floats, self.keys, order[:, i], *shared
            carry, row = self._run("step", self._step, *given, like=(carry, 0))
            rows.append(row)
            self._tell(rows, i + 1)
        return carry, jnp.stack(rows, axis=1)

    def _tell(self, rows: list[Array], done: int) -> None:
        """Say how far the epoch is; what was started last goes on meanwhile."""
        if self.on_step is not None:
            jax.block_until_ready(rows[-2:][0])
            self.on_step(done, self.steps)

    def _streamed(self, carry: Any, order: Array, epoch: Array) -> tuple[Any, Array]:
        """An epoch in chunks of steps, and its rows; the host gathers a chunk while the device works on the last."""
        places, rows = np.asarray(order), []
        for first in range(0, self.steps, CHUNK):
            part = places[:, first : min(first + CHUNK, self.steps)]
            batches = jax.device_put(tuple(array[part] for array in self.host))
            shared = (epoch, jnp.asarray(first, jnp.int32))
            name = f"chunk {part.shape[1]}"
            carry, some = self._run(name, self._chunk, carry, self.floats, self.keys, *batches, *shared, like=(carry, 0))
            rows.append(some)
            self._tell(rows, first + part.shape[1])
        return carry, jnp.concatenate(rows, axis=1)

    def _evaluate_member(self, state: State, batches: Any) -> Any:
        images, labels, mask = batches
        predict = self._images_last(lambda model, x: run(model, {}, x).predictions[self.output])

        def body(total: Any, batch: Any) -> Any:
            images, labels, mask = batch
            u = predict(state.model, self.pipeline.test(images))
            target = jax.nn.one_hot(labels, self.classes, dtype=u.dtype)
            loss = jax.vmap(ENERGY[getattr(self.config.hyper, "loss", "se")])(target, u)
            rank = _rank(u, labels)
            parts = (loss, rank < 1, rank < 5)
            return jax.tree.map(lambda t, p: t + jnp.sum(jnp.where(mask, p, 0)), total, parts), None

        zero = jnp.zeros(())
        total, _ = jax.lax.scan(body, (zero, zero, zero), (images, labels, mask))
        return total

    def evaluate(self, population: Population, split: str) -> dict[str, np.ndarray]:
        """Loss and accuracies of every member on a whole split."""
        before, start = self.timing.compile, time.perf_counter()
        total = self._run(f"evaluate {split}", self._evaluate, population.states, self.evaluation[split], like=(0, 0, 0))
        loss, top1, top5 = (np.asarray(part) / len(self.splits[split]) for part in total)  # type: ignore[arg-type]
        self.timing.evaluate = time.perf_counter() - start - (self.timing.compile - before)
        return {f"{split}_loss": loss, f"{split}_top1": top1, f"{split}_top5": top5}


def _head(split: Split, count: int) -> tuple[Any, Any]:
    return split.images[:count], None if split.labels is None else split.labels[:count]


def _padded(split: Split) -> Any:
    """A split as batches on the device, the last one filled up and masked."""
    rows, mask = augment.padded_batches(len(split), min(EVALUATION_BATCH, len(split)))
    return jax.device_put((split.images[rows], np.asarray(split.labels)[rows], mask))


def _select(alive: Array, new: Array, old: Array) -> Array:
    """The new value while a member is alive, the old one afterwards; keys have no select of their own."""
    if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        data = jnp.where(alive, jax.random.key_data(new), jax.random.key_data(old))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    return jnp.where(alive, new, old)


def _rank(output: Array, labels: Array) -> Array:
    """How many other outputs come before the label's: the larger ones, and of equal ones the earlier. A NaN is last.

    The label's own place is left out: where a compiler evaluates the output twice, with sums in another order, it may not be
    equal to itself.
    """
    own = jnp.take_along_axis(output, labels[:, None], axis=-1)
    place, label = jnp.arange(output.shape[-1]), labels[:, None]
    return jnp.sum((place != label) & (~(output <= own) | ((output == own) & (place < label))), axis=-1)
