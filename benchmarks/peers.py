"""This library beside another: the same weights and batches, whether the numbers agree, and what each takes.

    python benchmarks/peers.py --task fashionmnist/mlp --algorithm pc_se
    python benchmarks/peers.py --task cifar10/vgg5 --algorithm ipc --batch 4 --steps 2 --passes 0 --float64
    python benchmarks/peers.py --task cifar100/vgg5 --batch 32 --steps 1 --passes 0 --exact
    python benchmarks/peers.py --library fabricpc --set momentum_h=0

The peer is a released package: `pcx` 0.6.3 of the paper's authors, or `fabricpc` 0.6.0. The first has the name of this library,
so each trains in a process of its own, with the same versions of everything else; the package is fetched into runs/peers
without what is installed already, or read from --peer. Images are random, of the task's shape, and the settings those of
`pcx run`, with a constant weight learning rate. After one pass over the batches the change of every weight array is compared;
then passes are timed, the two libraries in turn. With --exact the change is also computed in float64, and the cosine of each
library's own with it is printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
SHAPES = {"mnist": (1, 28, 28), "fashionmnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}
ACTIVATIONS = ("gelu", "hard_tanh", "leaky_relu", "relu")


class Peer(NamedTuple):
    """The version of a package, a folder in it, what it needs and this library does not, and what it can do."""

    release: str
    inside: str
    needs: tuple[str, ...]
    algorithms: tuple[str, ...]
    momentum: bool


PEERS = {
    "pcx": Peer("0.6.3", "pcx/predictive_coding", (), ("pc_se", "pc_ce", "pn", "nn", "ipc"), momentum=True),
    "fabricpc": Peer("0.6.0", "fabricpc/training", ("tqdm",), ("pc_se", "pc_ce"), momentum=False),
}


def prepare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write weights and batches, and what both libraries are to do with them."""
    import jax

    import pcx
    from pcx.bench.config import parse_pairs, set_values
    from pcx.bench.tasks import build_model, configure

    changes = parse_pairs(options.set)
    config = set_values(configure(options.task, options.algorithm), changes)
    classes, shape = (100 if config.dataset == "cifar100" else 10), SHAPES[config.dataset]
    model = build_model(config, shape, classes, jax.random.key(0))
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(pcx.weights(model))]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(options.steps, options.batch, *shape)).astype(arrays[0].dtype)
    labels = rng.integers(0, classes, (options.steps, options.batch))
    batches = {"x": x if len(arrays[0].shape) > 2 else x.reshape(*x.shape[:2], -1), "y": np.eye(classes, dtype=x.dtype)[labels]}
    np.savez(folder / "arrays.npz", **{f"weights_{i}": array for i, array in enumerate(arrays)}, **batches)
    padding = [layer.padding for layer in getattr(model, "convolutions", [])]
    pooled = getattr(model, "pooled", ())
    numbers = {name: getattr(config.hyper, name) for name in ("T", "lr_h", "momentum_h", "lr_theta", "weight_decay")}
    strength = getattr(config.hyper, "beta", 1.0) * (-1 if options.algorithm == "nn" else 1)
    return numbers | {
        "task": options.task,
        "algorithm": options.algorithm,
        "batch": options.batch,
        "steps": options.steps,
        "passes": options.passes,
        "changes": changes,
        "count": len(arrays),
        "arrays": str(folder / "arrays.npz"),
        "convolutions": [{"padding": p, "pooled": q} for p, q in zip(padding, pooled, strict=True)],
        "activation": config.options.activation,
        "loss": "ce" if options.algorithm == "pc_ce" else "se",
        "incremental": options.algorithm == "ipc",
        "beta": strength,
    }


def ours(task: dict[str, Any]) -> None:
    """The same training by this library, in the form of `peer_pcx.main`."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import pcx
    from pcx.bench.config import set_values
    from pcx.bench.tasks import build_model, configure, make_algorithm

    config = set_values(configure(task["task"], task["algorithm"], schedule="constant"), task["changes"])
    with np.load(task["arrays"]) as file:
        wide = jnp.result_type(float)
        arrays = [jnp.asarray(file[f"weights_{i}"], wide) for i in range(task["count"])]
        xs, ys = jnp.asarray(file["x"], wide), jnp.asarray(file["y"], wide)
    shape = SHAPES[config.dataset]
    model = build_model(config, shape, ys.shape[-1], jax.random.key(0))
    weights = jax.tree.unflatten(jax.tree.structure(pcx.weights(model)), arrays)
    model = eqx.combine(weights, model)
    algorithm = make_algorithm(config, config.hyper, 1)
    key = jax.random.key(0)
    state = algorithm.init(model, xs[0], ys[0], key)

    @jax.jit
    @pcx.channels_last
    def scan(state: Any) -> Any:
        return jax.lax.scan(lambda s, b: (algorithm.step(s, *b, key)[0], None), state, (xs, ys))[0]

    seconds = []
    for number in range(1 + task["passes"]):
        start = time.perf_counter()
        state = scan(state)
        after = [np.asarray(leaf) for leaf in jax.tree.leaves(pcx.weights(state.model))]
        if number == 0:
            np.savez(task["result"], *after)
        else:
            seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds))


def refuse(library: str, task: dict[str, Any]) -> None:
    """Stop where the peer cannot do what the task says."""
    peer = PEERS[library]
    if task["algorithm"] not in peer.algorithms:
        sys.exit(f"error: {library} has no {task['algorithm']}; use --algorithm {'|'.join(peer.algorithms)}.")
    if task["momentum_h"] and not peer.momentum:
        sys.exit(f"error: {library} has no momentum of the values, and momentum_h is {task['momentum_h']}; --set momentum_h=0.")
    if task["activation"] not in ACTIVATIONS:
        sys.exit(f"error: the peers have no activation {task['activation']}; --set activation={'|'.join(ACTIVATIONS)}.")


def peer_folder(library: str, given: Path | None) -> Path:
    """The folder of the released package; fetched if it is not there."""
    peer = PEERS[library]
    folder = given or Path("runs/peers") / f"{library}-{peer.release}"
    if not (folder / peer.inside).is_dir():
        if given:
            sys.exit(f"error: {given} holds no released {library}; leave --peer away to fetch it.")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        if subprocess.run([*command, f"{library}=={peer.release}", *peer.needs], check=False).returncode:
            sys.exit(f"error: {library} {peer.release} could not be fetched; give the folder of a copy by --peer.")
    return folder.resolve()


def start(command: list[str], environment: dict[str, str]) -> list[float]:
    """Run a worker; the seconds of its passes."""
    done = subprocess.run([sys.executable, *command], env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def differences(folder: Path, task: dict[str, Any]) -> list[float]:
    """Per weight array: the largest difference between the two changes, as a part of the largest change."""
    result = []
    with np.load(task["arrays"]) as before, np.load(folder / "ours.npz") as a, np.load(folder / "peer.npz") as b:
        for i in range(task["count"]):
            first = before[f"weights_{i}"]
            mine, theirs = (file[f"arr_{i}"].reshape(first.shape) - first for file in (a, b))
            result.append(float(np.abs(mine - theirs).max() / np.abs(theirs).max()))
    return result


def cosines(folder: Path, task: dict[str, Any], name: str) -> list[float]:
    """Per weight matrix or kernel: of the change by a library with that in float64."""
    result = []
    with np.load(task["arrays"]) as before, np.load(folder / f"{name}.npz") as a, np.load(folder / "exact.npz") as b:
        for i in range(0, task["count"], 2):
            first = before[f"weights_{i}"].astype(np.float64).ravel()
            mine, exact = (file[f"arr_{i}"].ravel() - first for file in (a, b))
            result.append(float(mine @ exact / np.sqrt((mine @ mine) * (exact @ exact))))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="pcx", choices=PEERS, help="the peer")
    parser.add_argument("--task", default="fashionmnist/mlp")
    parser.add_argument("--algorithm", default="pc_se", choices=PEERS["pcx"].algorithms)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100, help="batches of a pass")
    parser.add_argument("--passes", type=int, default=3, help="timed passes of each process; there are two of each library")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings, as of pcx run")
    parser.add_argument("--tf32", action="store_true", help="products of both in tf32, where the device has them")
    parser.add_argument("--float64", action="store_true", help="numbers then agree to rounding, and times mean little")
    parser.add_argument("--exact", action="store_true", help="compare both with the same steps in float64")
    parser.add_argument("--peer", type=Path, help="folder of the released package (default: fetched into runs/peers)")
    parser.add_argument("--out", type=Path, default=Path("results/peers.jsonl"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return ours(json.loads(options.worker.read_text()))
    dataset, _, model = options.task.partition("/")
    if dataset not in SHAPES or model not in ("mlp", "vgg5", "vgg7"):
        sys.exit(f"error: {options.task} is not one of {'|'.join(SHAPES)}/mlp|vgg5|vgg7.")
    folder = Path("runs/peers").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    products = "tensorfloat32" if options.tf32 else "float32"
    wide = {"JAX_ENABLE_X64": "1" if options.float64 else "0", "JAX_DEFAULT_MATMUL_PRECISION": products}
    os.environ |= wide
    from pcx.bench import record
    from pcx.bench.config import ConfigError

    try:
        task = prepare(options, folder)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    refuse(options.library, task)
    peer, title = peer_folder(options.library, options.peer), f"{options.library} {PEERS[options.library].release}"
    names = ("ours", "peer")
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(task | {"result": str(folder / f"{name}.npz")}))
    commands = {
        "ours": ([str(HERE / "peers.py"), "--worker", str(folder / "ours.json")], {}),
        "peer": ([str(HERE / f"peer_{options.library}.py"), str(folder / "peer.json")], {"PYTHONPATH": str(peer)}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names * (2 if options.passes else 1):
        seconds[name] += start(*commands[name])
    away = differences(folder, task)
    print(f"{options.task} by {options.algorithm}, {task['steps']} steps of {task['batch']} samples, T = {task['T']}")
    print("largest difference between the changes of a weight array, of its largest change:", *(f"{d:.1e}" for d in away))
    found: dict[str, Any] = {
        "what": "peers",
        "peer": title,
        "float64": options.float64,
        "products": products,
        "away": away,
        "seconds": seconds,
    }
    if options.passes:
        median = {name: statistics.median(times) for name, times in seconds.items()}
        each = {name: 1e3 * value / task["steps"] for name, value in median.items()}
        ratio = each["peer"] / each["ours"]
        print(f"ms per step: ours {each['ours']:.3f}, {title} {each['peer']:.3f}, {ratio:.1f} times")
    if options.exact:
        (folder / "exact.json").write_text(json.dumps(task | {"result": str(folder / "exact.npz"), "passes": 0}))
        start([str(HERE / "peers.py"), "--worker", str(folder / "exact.json")], {"JAX_ENABLE_X64": "1"})
        found["cosines"] = {name: cosines(folder, task, name) for name in names}
        for name, called in zip(names, ("ours", title), strict=True):
            numbers = (f"{c:.3f}" for c in found["cosines"][name])
            print(f"cosine with the change in float64, layer by layer, {called}:", *numbers)
    kept = {name: value for name, value in task.items() if name != "arrays"}
    record.append(options.out, found | {"task": kept} | record.environment())


if __name__ == "__main__":
    main()
