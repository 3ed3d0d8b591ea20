"""A whole inference step of equal dense layers as one kernel, against the stacked program: time for 4 and 64 layers.

    python benchmarks/one_kernel.py --out results/one_kernel.jsonl

Every block of the kernel holds some samples of one node. It computes the predictions of the node and of the one above, both
errors and the update: nothing is written but the new values. Needs a GPU (Pallas for Triton).
"""

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pcx.bench import record
from pcx.bench.scaling import DEPTH_BASE, LR_H, build, make_inference

CALLS = 200


def step(below: Any, h: Any, above: Any, w: Any, b: Any, w_above: Any, b_above: Any) -> Any:
    """The values of one node after a step: its own error less the error above, sent back.

    Products of float32 weights are in tf32: without a precision, Triton's would be in float32 proper, on slow cores.
    """
    below, h, above = (value.astype(jnp.float32) for value in (below, h, above))

    def product(x: Any, w: Any, over: int) -> Any:
        options = {"precision": jax.lax.Precision.DEFAULT, "preferred_element_type": jnp.float32}
        return jax.lax.dot_general(x.astype(w.dtype), w, (((1,), (over,)), ((), ())), **options)

    error = h - jax.nn.relu(product(below, w, 1) + b)
    ahead = product(h, w_above, 1) + b_above
    error_above = jnp.where(ahead > 0, above - jax.nn.relu(ahead), 0.0)
    return h - LR_H * (error - product(error_above, w_above, 0))


def inference(
    layers: int, rows: int, warps: int, batch: int, dim: int, T: int, interpret: bool, dtype: Any = jnp.float32
) -> Callable[..., Any]:
    """T steps on an array of input, values and target, one kernel each; ``rows`` samples per block."""

    def kernel(below: Any, h: Any, above: Any, w: Any, b: Any, w_above: Any, b_above: Any, out: Any) -> None:
        node = pl.program_id(0)

        @pl.when((node > 0) & (node < layers))
        def _() -> None:
            out[...] = step(below[...], h[...], above[...], w[...], b[...], w_above[...], b_above[...]).astype(dtype)

        @pl.when((node == 0) | (node == layers))
        def _() -> None:
            out[...] = h[...]

    def values(offset: int) -> Any:
        return pl.BlockSpec((pl.squeezed, rows, dim), lambda k, i: (jnp.clip(k + offset, 0, layers), i, 0))

    def weights(offset: int, *shape: int) -> Any:
        return pl.BlockSpec((pl.squeezed, *shape), lambda k, i: (jnp.clip(k + offset, 0, layers - 1), *[0] * len(shape)))

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((layers + 1, batch, dim), dtype),
        grid=(layers + 1, batch // rows),
        in_specs=[
            values(-1),
            values(0),
            values(1),
            weights(-1, dim, dim),
            weights(-1, dim),
            weights(0, dim, dim),
            weights(0, dim),
        ],
        out_specs=values(0),
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=warps, num_stages=1),
    )

    def run(state: Any, w: Any, b: Any) -> Any:
        for _ in range(T):
            state = call(state, state, state, w, b, w, b)
        return state

    return run


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """The fastest of five calls of a compiled function."""
    compiled = jax.jit(function).lower(*arguments).compile()
    found = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        found.append(time.perf_counter() - start)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 64, 32])
    parser.add_argument("--warps", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of values and weights")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--interpret", action="store_true", help="without a GPU: slow, to check the result only")
    parser.add_argument("--out", type=Path, default=Path("results/one_kernel.jsonl"))
    options = parser.parse_args()
    batch, dim, T = DEPTH_BASE["batch"], DEPTH_BASE["dim"], DEPTH_BASE["T"]
    for layers in options.layers:
        model = build(dim, layers)
        w, b = (jnp.stack([getattr(layer, name) for layer in model.layers]) for name in ("weight", "bias"))
        x, y = jax.random.normal(jax.random.key(1), (2, 1, batch, dim))
        state = jnp.concatenate([x, jnp.zeros((layers - 1, batch, dim)), y])
        times = {}
        for rows, warps, name in itertools.product(options.rows, options.warps, options.dtypes):
            run = inference(layers, rows, warps, batch, dim, T, options.interpret, jnp.dtype(name))

            def repeat(state: Any, w: Any, b: Any, run: Any = run) -> Any:
                def body(state: Any, _: Any) -> Any:
                    return run(state, w, b), None

                return jax.lax.scan(body, state, length=options.calls)[0]

            arguments = (array.astype(name) for array in (state, w, b))
            label = f"one kernel, {rows} samples and {warps} warps a block, {name}"
            times[label] = seconds(repeat, *arguments) / options.calls
        with jax.default_matmul_precision("tensorfloat32"):
            stacked, arguments = make_inference(batch, dim, layers, T, options.calls, "chain", True, "tf32")
            times["stacked"] = seconds(stacked, *arguments) / options.calls
        cell = {"what": "one kernel", "layers": layers, "seconds": times, **DEPTH_BASE}
        record.append(options.out, cell | record.environment())
        for name, value in times.items():
            print(f"{layers} layers, {name}: {1e6 * value:.1f} µs per inference")


if __name__ == "__main__":
    main()
