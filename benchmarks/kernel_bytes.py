"""How many bytes the kernels of one training step read and write, convolutions apart, counted in the compiled program of a GPU.

    python benchmarks/kernel_bytes.py vgg7:bf16_state                     # on this GPU
    python benchmarks/kernel_bytes.py vgg7:bf16_state --target h200.txtpb # for another, without having one

A count of the sizes of what goes into each kernel and comes out of it; what a cache saves is not known to it. Beside it stands
how many different convolutions there are (a compiler tries many kernels for each), and the memory that the program holds at
once, the data set apart. ``--target`` is a description of a device in the form of XLA's
`xla/backends/gpu/target_config/specs`, and needs JAX's plugin for CUDA with its libraries, and on a machine without a GPU
``JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1``; no kernels are tried against each other then, so that convolutions may hold less or more
than they do on the device. ``--plain`` leaves the kernel for pooling out. A row is one of `pcx bench speed`, or a task such as
mnist/mlp; with ``--seeds`` that many are trained side by side.
"""

import argparse
import contextlib
import re
from pathlib import Path
from typing import Any

SIZES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1, "s64": 8, "u64": 8}
NO_KERNELS = ("get-tuple-element", "parameter", "tuple", "constant", "bitcast")


def size(shape: str) -> int:
    """Bytes of a shape, or of all parts of a tuple."""
    total = 0
    for kind, numbers in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        count = 1
        for number in numbers.split(","):
            count *= int(number or 1)
        total += SIZES.get(kind, 0) * count
    return total


def kernels(text: str) -> list[tuple[str, str, int, str]]:
    """Name, operation, bytes and shapes of every kernel of the loop over steps, which is the part with most of them."""
    parts = re.split(r"\n(?=%?[\w.\-]+ \(|ENTRY)", text)
    body = max(parts, key=lambda part: part.count(" fusion("))
    shapes, found = dict[str, str](), []
    for line in body.splitlines():
        match = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:,|$)", line)
        if match is None:
            continue
        name, shapes[match[1]], operation = match[1], match[2], match[3]
        if operation in NO_KERNELS:
            continue
        target = re.search(r'custom_call_target="([^"]*)"', line)
        operands = [shapes.get(other, "") for other in re.findall(r"%([\w.\-]+)", match[4])]
        window = re.findall(r"(?:window|dim_labels)=(?:\{[^}]*\}|\S+)", line)
        everything = size(match[2]) + sum(map(size, operands))
        found.append((name, target[1] if target else operation, everything, f"{match[2]} {operands} {window}"))
    return found


def compiled(text: str, algorithm: str, seeds: int, target: Path | None, plain: bool) -> tuple[str, int]:
    """The program of an epoch, as the compiler writes it, and the bytes that it holds."""
    import jax
    import jax.numpy as jnp

    from pcx.bench import speed
    from pcx.bench.engine import PRECISION, Engine, Population
    from pcx.bench.tasks import configure

    row, precision = text.split(":")
    changes: dict[str, Any] = {"precision": precision, "epochs": 2, "population": "vmap"}
    config = (configure if "/" in row else speed.config_of)(row, algorithm, **changes)
    engine = Engine(config, speed.data_of(config.dataset, random=True, limit=2 * config.batch), list(range(seeds)), "scan")
    place: Any = jax.devices()[0]
    kind: Any = contextlib.nullcontext()
    if target is not None:
        from jax.experimental import topologies
        from jaxlib import xla_client

        jax.devices()  # finds the plugins
        xla_client.initialize_pjrt_plugin("cuda")
        described = target.read_text()
        place = topologies.get_topology_desc("", "cuda", target_config=described, topology="1x1x1").devices[0]
        jax.default_backend = lambda: "gpu"  # what is compiled for
        engine.quick_pooling = engine.convolutional
        name = re.search(r'\bname: "(.*?)"', described)  # which kernels of our own are written for
        abstract = jax.sharding.AbstractDevice(device_kind=name[1] if name else "", num_cores=None, platform="gpu")
        kind = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract))
    engine.quick_pooling = engine.quick_pooling and not plain
    there = jax.sharding.SingleDeviceSharding(place)
    fresh = jax.eval_shape(engine._init, engine.keys, engine.floats, engine.arrays)
    given = (Population(fresh, jax.eval_shape(engine._healthy)), engine.floats, engine.keys, engine.arrays, jnp.int32(0))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), given)
    with jax.default_matmul_precision(PRECISION[precision]), kind:
        lowered = engine._epoch.trace(*shapes).lower(lowering_platforms=("cuda",) if target is not None else None)
        engine._compiled["epoch"] = engine._compile(lowered)
    return engine._compiled["epoch"].as_text(), speed._memory(engine)["program"] or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", metavar="ROW:PRECISION")
    parser.add_argument("--algorithm", default="pc_se", help="pc_se (default) or bp_se")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--all", action="store_true", help="a line for every kernel, in the order of the program")
    parser.add_argument("--shapes", action="store_true", help="with --all, what each kernel writes and reads")
    options = parser.parse_args()
    if options.row.count(":") != 1:
        parser.error(f"{options.row!r} is not ROW:PRECISION, such as vgg7:bf16_state")
    if options.target is not None and not options.target.is_file():
        parser.error(f"there is no file {options.target}")
    text, memory = compiled(options.row, options.algorithm, options.seeds, options.target, options.plain)
    found = kernels(text)
    for name, operation, count, shapes in found if options.all else ():
        print(f"{count / 1e6:8.1f} MB  {operation:30} {name} {shapes if options.shapes else ''}".rstrip())
    others = [count for _, operation, count, _ in found if "cudnn" not in operation]
    everything = sum(count for _, _, count, _ in found) / 1e9
    different = {(operation, kind) for _, operation, _, kind in found if "cudnn" in operation}
    moved = f"those other than convolutions read and write {sum(others) / 1e9:.2f} GB a step, all {everything:.2f}"
    title = f"{options.row} {options.algorithm}, seeds: {options.seeds}"
    kernel_count = f"{len(found)} kernels, {len(different)} different convolutions"
    print(f"{title}; {kernel_count}; {moved}; {memory / 2**20:.0f} MiB at once")


if __name__ == "__main__":
    main()
