"""A convolutional network trained as in the paper's listings, on this CPU: what `pxf.jit` gains by keeping channels last.

    python benchmarks/listings.py --task cifar100/vgg5 --batch 32

The model and settings of a task by PC-SE on random images, as tracked objects: inference once as a loop of Python, written
out, and once as a `pxf.scan`. Figures are the fastest of some steps, with channels last and without it in turn.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pcx.functional as pxf
import pcx.predictive_coding as pxc
import pcx.utils as pxu

AXES = pxu.Mask(pxc.VodeParam, [None, 0])
FORMS = ("written out", "in a scan")


@pxf.vmap(AXES, in_axes=(0, 0), out_axes=None, axis_name="batch")
def energy(x: Any, y: Any, *, model: Any) -> Any:
    model(x)
    model.vodes[-1].set("h", y)
    return jax.lax.pmean(model.energy(), "batch")


forward = pxf.vmap(AXES, in_axes=(0,), axis_name="batch")(lambda x, *, model: model(x))
slope_h = pxf.grad(pxu.Mask(pxc.VodeParam))(energy)
slope_w = pxf.value_and_grad(pxu.Mask(pxc.LayerParam))(energy)


def trainer(form: str) -> Any:
    """A compiled training step with inference in one of the two forms."""

    @pxf.jit(static_argnums=0)
    def train(T: int, x: Any, y: Any, *, model: Any, optim_h: Any, optim_w: Any) -> Any:
        def once(carry: Any, _: Any, *, model: Any, optim_h: Any) -> tuple[Any, Any]:
            with pxu.step(model, clear_params=pxc.VodeParam.Cache):
                optim_h.step(model, slope_h(x, y, model=model)["model"], True)
            return carry, None

        with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
            forward(x, model=model)
        optim_h.init(model)
        if form == "in a scan":
            pxf.scan(once, T)(model=model, optim_h=optim_h)
        else:
            for _ in range(T):
                once(None, None, model=model, optim_h=optim_h)
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            value, gradient = slope_w(x, y, model=model)
            optim_w.step(model, gradient["model"])
        return value

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar100/vgg5")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/channels.jsonl"))
    options = parser.parse_args()
    if jax.default_backend() != "cpu":
        sys.exit("error: on an accelerator the compiler orders axes by itself; set JAX_PLATFORMS=cpu.")
    if options.steps < 1 or options.batch < 1:
        parser.error("at least one step of one sample is timed")
    from pcx.bench import record
    from pcx.bench.config import ConfigError
    from pcx.bench.speed import IMAGES
    from pcx.bench.tasks import build_model, configure

    try:
        config = configure(options.task, "pc_se")
        (_, *shape), classes = IMAGES[config.dataset]
    except (ConfigError, KeyError) as error:
        sys.exit(f"error: {options.task}: {error}")
    hyper: Any = config.hyper
    images = np.random.default_rng(0).normal(size=(options.batch, *shape)).astype(np.float32)
    x, y = jnp.asarray(images), jax.nn.one_hot(jnp.arange(options.batch) % classes, classes)

    def begin(form: str, turned: Any) -> Any:
        """A function that makes one step; it is compiled when it comes back."""
        model = build_model(config, tuple(shape), classes, jax.random.key(0))
        optim_h = pxu.Optim(optax.sgd(hyper.lr_h, momentum=hyper.momentum_h), pxu.Mask(pxc.VodeParam)(model))
        optim_w = pxu.Optim(optax.adamw(hyper.lr_theta), pxu.Mask(pxc.LayerParam)(model))
        optim_w.init(model)
        model.train()
        pxf.channels_last, train = turned, trainer(form)  # type: ignore[attr-defined]

        def step() -> float:
            return float(train(hyper.T, x, y, model=model, optim_h=optim_h, optim_w=optim_w))

        step(), step()  # the second one has values to begin with, and so is another program
        return step

    last = pxf.channels_last  # type: ignore[attr-defined]
    for form in FORMS:
        made = {"last": begin(form, last), "first": begin(form, lambda function: function)}
        seconds: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(options.steps):
            for name, step in made.items():
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
        found = {name: min(times) for name, times in seconds.items()}
        numbers = {"cell": options.task, "form": form, "batch": options.batch, "seconds_per_step": found}
        record.append(options.out, {"what": "listing", **numbers, **record.environment()})
        mine, plain = found["last"], found["first"]
        print(
            f"{options.task}, batch {options.batch}, T = {hyper.T} {form}: {1e3 * mine:.0f} ms a step, without channels last "
            f"{1e3 * plain:.0f} ({plain / mine:.1f} times)",
            flush=True,
        )


if __name__ == "__main__":
    main()
