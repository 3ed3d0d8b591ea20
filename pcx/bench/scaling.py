"""How time grows with batch, width, depth and inference steps: the paper's scaling figure, and inference against depth.

The model is a row of equal dense layers with relu. All nodes start at zero, so that every node has an error from the first
step on and nothing can be left out; what remains is whether equal layers are computed one after the other or as one stack.
"""

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import pcx
import pcx.nn as pxnn
from pcx._types import Shortcuts
from pcx.bench import record
from pcx.bench.config import PRECISIONS, ConfigError
from pcx.bench.engine import PRECISION
from pcx.bench.speed import Say, stamp, summary
from pcx.predictive_coding import EnergyModule, Vode

BASE = {"batch": 32, "dim": 64, "layers": 2, "T": 8}
MULTIPLIERS = (1, 2, 3, 4, 5, 6)
BATCHES, EPOCHS = 1024, 5
DEPTHS, CALLS = (4, 8, 16, 32, 64), 200
DEPTH_BASE = {"batch": 128, "dim": 128, "T": 8}
KINDS = ("chain", "residual")
LR_H, LR_THETA, WEIGHT_DECAY = 0.05, 1e-3, 1e-4


class EqualLayers(EnergyModule):
    """``h ← relu(W h + b)``, or with ``residual`` ``h ← h + relu(W h + b)``; node i is ``vodes.i``."""

    def __init__(self, dim: int, layers: int, residual: bool = False):
        self.layers = [pxnn.Linear(dim, dim) for _ in range(layers)]
        self.vodes = [Vode((dim,)) for _ in range(layers)]
        self.residual = residual

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " dim"]:
        for layer, vode in zip(self.layers, self.vodes, strict=True):
            u = jax.nn.relu(layer(x))
            x = vode(x + u if self.residual else u)
        return x


def build(dim: int, layers: int, residual: bool = False) -> EqualLayers:
    """The model, with weights from a fixed key."""
    with pxnn.keys(jax.random.key(0)):
        return EqualLayers(dim, layers, residual)


def make_epoch(batch: int, dim: int, layers: int, T: int, batches: int, stacked: bool, precision: str) -> tuple[Any, Any]:
    """A training epoch on random data as one function, and its first arguments; it returns what goes in again."""
    model = build(dim, layers)
    optimiser = optax.adamw(LR_THETA, weight_decay=WEIGHT_DECAY)
    x, y = jax.random.normal(jax.random.key(1), (2, batches, batch, dim))
    options = {"state_optimiser": optax.sgd(LR_H), "weight_optimiser": optimiser, "steps": T, "init": "zeros"}
    options |= {"shortcuts": _shortcuts(stacked, precision)} | _state_dtype(precision)

    def step(carry: Any, data: Any) -> Any:
        model, state = carry
        observed = {f"vodes.{layers - 1}": data[1]}
        done = pcx.train_step(model, data[0], observed, weight_state=state, **options)
        return (done.model, done.optimiser_state), None

    def epoch(carry: Any, data: Any) -> Any:
        return jax.lax.scan(step, carry, data)[0], data

    return epoch, ((model, optimiser.init(pcx.weights(model))), (x, y))


def make_inference(
    batch: int, dim: int, layers: int, T: int, calls: int, kind: str, stacked: bool, precision: str, kernel: bool = False
) -> tuple[Any, Any]:
    """Inference again and again as one function, and its first arguments; the input of each call depends on the last one.

    What is handed on is the sum of all values: with less, the compiler would leave out the layers that did not reach it.
    """
    model, x, y, last, options = _inference(batch, dim, layers, T, kind, stacked, precision, kernel)

    def repeat(model: Any, x: Any, y: Any, total: Any) -> Any:
        def body(total: Any, _: Any) -> Any:
            values = pcx.infer(model, x + 1e-9 * total, {last: y}, **options).values
            return jnp.sum(functools.reduce(jnp.add, values.values())), None  # one reduction, however many layers

        return model, x, y, jax.lax.scan(body, total, length=calls)[0]

    return repeat, (model, x, y, jnp.zeros((), x.dtype))


def _inference(
    batch: int, dim: int, layers: int, T: int, kind: str, stacked: bool, precision: str, kernel: bool
) -> tuple[EqualLayers, Array, Array, str, dict[str, Any]]:
    """The model, input and target, the name of the last node, and the options of an inference."""
    x, y = jax.random.normal(jax.random.key(1), (2, batch, dim))
    shortcuts = _shortcuts(stacked, precision)._replace(kernel=kernel)
    options = {"optimiser": optax.sgd(LR_H), "steps": T, "init": "zeros", "shortcuts": shortcuts} | _state_dtype(precision)
    return build(dim, layers, kind == "residual"), x, y, f"vodes.{layers - 1}", options


def away_from_stack(batch: int, dim: int, layers: int, T: int, kind: str, precision: str) -> float:
    """The largest difference of a value between one kernel a step and the stack, as a part of the largest value."""
    found = []
    for kernel in (True, False):
        model, x, y, last, options = _inference(batch, dim, layers, T, kind, True, precision, kernel)

        def settled(model: Any, x: Array, y: Array, last: str = last, options: Any = options) -> Array:
            values = pcx.infer(model, x, {last: y}, **options).values
            return jnp.stack([value for name, value in values.items() if name != last])

        with jax.default_matmul_precision(PRECISION[precision]):
            found.append(jax.jit(settled)(model, x, y))
    one, other = found
    return float(jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(other)))


def _shortcuts(stacked: bool, precision: str) -> Shortcuts:
    return Shortcuts(stack=stacked, anchor=precision != "tf32_plain")


def _state_dtype(precision: str) -> dict[str, Any]:
    return {"state_dtype": jnp.bfloat16} if precision == "bf16_state" else {}


def compiled(job: tuple[Any, Any], precision: str) -> tuple[Any, Any]:
    """The program of a function and its arguments, and the arguments.

    One after the other: the compiler times kernels to choose among them, and a busy device would mislead it.
    """
    with jax.default_matmul_precision(PRECISION[precision]):
        return jax.jit(job[0]).lower(*job[1]).compile(), job[1]


def measure(program: Any, arguments: Any, epochs: int) -> dict[str, Any]:
    """Seconds per call of a compiled program, the first one left out."""
    seconds = []
    for _ in range(epochs + 1):
        start = time.perf_counter()
        arguments = jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - start)
    return summary(seconds[1:])


def check_precision(precision: str) -> None:
    """Refuse a precision that is none."""
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision is {precision!r}; use {', '.join(PRECISIONS)}.")


def points(multipliers: tuple[int, ...]) -> Iterator[tuple[str, int, dict[str, int]]]:
    """The base, and each of its four numbers multiplied alone."""
    yield "base", 1, BASE
    for name in BASE:
        for multiplier in multipliers:
            if multiplier > 1:
                yield name, multiplier, BASE | {name: multiplier * BASE[name]}


def scaling(out: Path, quick: bool, say: Say, precision: str = "tf32") -> list[dict[str, Any]]:
    """Training time against batch, width, depth and inference steps, with and without stacking; one record each."""
    check_precision(precision)
    batches, epochs, multipliers = (8, 1, (1, 2)) if quick else (BATCHES, EPOCHS, MULTIPLIERS)
    chosen: list[dict[str, Any]] = [
        {"precision": precision, "parameter": parameter, "multiplier": multiplier, "stacked": stacked, **sizes}
        for stacked in (True, False)
        for parameter, multiplier, sizes in points(multipliers)
    ]
    arguments = ("batch", "dim", "layers", "T", "stacked", "precision")
    records = []
    for point in chosen:
        job = make_epoch(**{name: point[name] for name in arguments}, batches=batches)
        seconds = measure(*compiled(job, precision), epochs)
        records.append(stamp("scaling", quick) | point | {"batches": batches, "seconds": seconds})
        record.append(out, records[-1])
        title = f"{point['parameter']} × {point['multiplier']}{'' if point['stacked'] else ', not stacked'}"
        say(f"{title}: {seconds['median']:.4f} s per epoch")
    return records


def depth(out: Path, quick: bool, say: Say, precision: str = "tf32", only: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Time of the inference phase against the number of equal layers, on a GPU also in one kernel a step; one record each.

    ``only`` are the ways to take ("stacked", "not stacked", "one kernel"); without it, all that there are here.
    """
    check_precision(precision)
    calls, epochs, depths = (2, 1, (4, 8)) if quick else (CALLS, EPOCHS, DEPTHS)
    ways = [{"stacked": True, "kernel": False}, {"stacked": False, "kernel": False}]
    ways += [{"stacked": True, "kernel": True}] if jax.default_backend() == "gpu" else []
    chosen: list[dict[str, Any]] = [
        {"precision": precision, "kind": kind, "layers": layers, "calls": calls, **way, **DEPTH_BASE}
        for kind in KINDS
        for way in ways
        if not only or record.way_of(way) in only
        for layers in depths
    ]
    records, first = list[dict[str, Any]](), 0.0
    for point in chosen:
        whole = measure(*compiled(make_inference(**point), precision), epochs)
        seconds = summary([second / calls for second in whole["each"]])
        first = seconds["median"] if point["layers"] == depths[0] else first
        ratio = seconds["median"] / first
        found: dict[str, Any] = {"seconds": seconds, "ratio": ratio}
        if point["kernel"]:
            same = {name: value for name, value in point.items() if name not in ("stacked", "kernel", "calls")}
            found["away_from_stack"] = away_from_stack(**same)
        records.append(stamp("depth", quick) | point | found)
        record.append(out, records[-1])
        text = f"{1e3 * seconds['median']:.3f} ms per call, {ratio:.2f} times {depths[0]} layers"
        text += f", values {found['away_from_stack']:.1e} from the stack's" if "away_from_stack" in found else ""
        say(f"{point['kind']} of {point['layers']} layers, {record.way_of(point)}: {text}")
    return records


def newest(path: Path, what: str) -> list[dict[str, Any]]:
    """Of a file of records of a part: the newest of every point, without quick ones, all of the newest record's device."""
    records = [r for r in record.read(path, record.SCALING) if not r["quick"] and r["what"] == what]
    if not records:
        raise ConfigError(f"there are no records of {what} in {path}; measure first, without --draw and --quick.")
    kind = max(records, key=lambda r: r["time"])["device"]["kind"]
    identity = ("parameter", "multiplier", "kind", "layers", "precision")
    here = sorted((r for r in records if r["device"]["kind"] == kind), key=lambda r: r["time"])
    return list({(*(r.get(name) for name in identity), record.way_of(r)): r for r in here}.values())
