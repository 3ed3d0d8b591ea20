"""Batteries of checks for what users write: a model (`check_model`) and an algorithm (`check_algorithm`)."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from pcx._free_energy import as_inputs, batch_size, free_energy, freeze_state, run
from pcx._model import EnergyModule, Vode, copy, named, partition
from pcx._types import Key, ModelError, Nodes
from pcx.algorithms._common import Algorithm, Metrics, State


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """What was checked of a model; every line held."""

    checks: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(f"ok  {check}" for check in self.checks)


def check_model(model: Any, x: Any = None, *, key: Key = None, batch: int | None = None) -> ModelReport:
    """Run the checks that every model must pass; raise a `ModelError` that lists all that fail, with what to do.

    Arguments: ``x``, a batch of inputs as for `pcx.run` (at least two samples, so that their independence can be seen);
    ``key``, for layers that are random in training.
    """
    size = batch_size(x, batch=2 if as_inputs(x) == () and batch is None else batch)
    key = jax.random.key(0) if key is None else key
    before = [id(leaf) for leaf in jax.tree.leaves(model)]
    passed, problems = [], []
    checks: list[tuple[str, Callable[[], None]]] = [
        ("the model runs in training and in evaluation", lambda: _runs(model, x, key, size)),
        ("every vode is called once", lambda: _called_once(model, x, size)),
        ("samples are independent", lambda: _independent(model, x, key, size)),
        ("no traced value is left behind", lambda: _no_leak(model, x, key, size)),
        ("gradients agree with differences in float64", lambda: _gradients(model, x, key, size)),
    ]
    for name, check in checks:
        try:
            check()
            passed.append(name)
        except ModelError as problem:
            problems.append(f"{name}: {problem}")
            if not passed:
                break  # a model that does not run fails everything else too
    if [id(leaf) for leaf in jax.tree.leaves(model)] != before:
        problems.append("the model is left as it was: __call__ changed it in place; return what changes instead.")
    if problems:
        raise ModelError(f"{type(model).__name__} has {len(problems)} problem(s):\n" + "\n".join(f"- {p}" for p in problems))
    return ModelReport(tuple(passed))


def _runs(model: Any, x: Any, key: Key, size: int) -> None:
    if not named(model, Vode):
        raise ModelError("it has no vodes; give it a pcx.Vode for every group of neurons with a value.")
    for training in (False, True):
        jax.eval_shape(lambda training=training: run(model, {}, x, key=key, training=training, batch=size))


def _called_once(model: Any, x: Any, size: int) -> None:
    called = jax.eval_shape(lambda: run(model, {}, x, batch=size)).values
    missing = [name for name in named(model, Vode) if name not in called]
    if missing:
        raise ModelError(f"{', '.join(missing)} is never called; call it in __call__ or remove it.")


def _settings(model: Any, x: Any, key: Key, size: int) -> tuple[Any, Nodes[Any]]:
    """The model with frozen statistics, and values that are not at their predictions."""
    forward = run(model, {}, x, key=key, training=True, batch=size)
    frozen = freeze_state(model, forward.state)
    moved = {
        name: value + 0.1 * jax.random.normal(jax.random.fold_in(key, i), value.shape, value.dtype)
        for i, (name, value) in enumerate(forward.values.items())
    }
    return frozen, Nodes(moved)


def _independent(model: Any, x: Any, key: Key, size: int) -> None:
    if size < 2:
        raise ModelError("one sample cannot show it; pass a batch of at least two.")
    frozen, values = _settings(model, x, key, size)

    def other_first(tree: Any) -> Any:
        return jax.tree.map(lambda a: jnp.concatenate([a[-1:], a[1:]]), tree)

    def predictions(values: Any, x: Any) -> Nodes[Any]:
        return run(frozen, values, x, key=key, training=True, batch=size).predictions

    one = predictions(values, x)
    other = predictions(other_first(values), other_first(jax.tree.map(jnp.asarray, x)))
    for name in one:
        if not bool(jnp.array_equal(one[name][1:], other[name][1:])):
            raise ModelError(
                f"the prediction of {name} for one sample changes with another sample; do not reduce over the batch axis "
                "(pcx.nn.BatchNorm with statistics='batch' does)."
            )


def _no_leak(model: Any, x: Any, key: Key, size: int) -> None:
    arrays, rest = eqx.partition(copy(model), eqx.is_array)
    try:
        with jax.checking_leaks():
            jax.make_jaxpr(lambda arrays: run(eqx.combine(arrays, rest), {}, x, key=key, training=True, batch=size))(arrays)
    except ModelError:
        raise
    except Exception as error:
        if "leak" not in str(error).lower():
            raise
        message = str(error).strip().splitlines()[0]
        raise ModelError(f"__call__ keeps a traced value outside the model ({message}); return it instead.") from None


def _gradients(model: Any, x: Any, key: Key, size: int) -> None:
    def double(tree: Any) -> Any:
        return jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64) if eqx.is_inexact_array(a) else a, tree)

    with jax.enable_x64(True):
        model, x = double(model), double(jax.tree.map(jnp.asarray, x))
        frozen, values = _settings(model, x, key, size)
        weights, rest = partition(frozen)

        def total(point: Any) -> Any:
            values, weights = point
            return jnp.sum(free_energy(eqx.combine(weights, rest), values, x, key=key, training=True, batch=size))

        point, step = (values, weights), 1e-6
        leaves, structure = jax.tree.flatten(point)
        random = [jax.random.normal(jax.random.fold_in(key, i), a.shape, a.dtype) for i, a in enumerate(leaves)]
        direction = jax.tree.unflatten(structure, random)
        slope = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(jax.grad(total)(point)), random, strict=True))
        ahead, behind = (total(jax.tree.map(lambda a, d, s=s: a + s * step * d, point, direction)) for s in (1, -1))
        measured = (ahead - behind) / (2 * step)
        if not bool(jnp.abs(slope - measured) <= 1e-5 * (1 + jnp.abs(measured))):
            raise ModelError(
                f"the derivative of the free energy is {float(slope):.8g} but differences give {float(measured):.8g}; "
                "look for a custom gradient, a stop_gradient, or a function with a jump."
            )


class CheckFailed(AssertionError):
    """An algorithm is not as it must be; the message names it and says what fails."""


class _Chain(EnergyModule):
    """The model that algorithms are checked on: three dense layers."""

    def __init__(self, key: Key, activation: Callable[[Any], Any], bias: bool, dtype: Any):
        sizes = [3, 5, 4, 2]
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Linear(i, o, use_bias=bias, dtype=dtype, key=k)
            for (i, o), k in zip(itertools.pairwise(sizes), keys, strict=True)
        ]
        self.vodes = [Vode((size,)) for size in sizes[1:]]
        self.activation = activation

    def __call__(self, x: Any) -> Any:
        for layer, vode in zip(self.layers[:-1], self.vodes[:-1], strict=True):
            x = vode(self.activation(layer(x)))
        return self.vodes[-1](self.layers[-1](x))


def _data(dtype: Any, seed: int = 0) -> tuple[Any, Any]:
    x = jax.random.normal(jax.random.key(seed), (4, 3), dtype)
    return x, jax.nn.one_hot(jnp.array([0, 1, 1, 0]), 2, dtype=dtype)


def _arrays(tree: Any) -> list[Any]:
    return [jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in jax.tree.leaves(tree)]


def _same(what: str, one: Any, other: Any, tolerance: float) -> None:
    ones, others = _arrays(one), _arrays(other)
    if [np.shape(a) for a in ones] != [np.shape(b) for b in others]:
        raise CheckFailed(f"{what}: they have other arrays, or arrays of other shapes.")
    for a, b in zip(ones, others, strict=True):
        if not np.allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance):
            raise CheckFailed(f"{what}: the largest difference is {np.max(np.abs(np.asarray(a) - np.asarray(b))):.3g}.")


def check_algorithm(module: Any) -> None:
    """Check a module with a learning algorithm (``docs/add-an-algorithm.md``); an AssertionError says what fails.

    Every variant is pure, is traced once whatever the batch and the epoch, gives the same step alone and as one of several
    seeds, keeps its state's structure and dtypes (so that it can be scanned), and takes its floats as traced values; then the
    identities and the closed-form equilibrium that the module declares.
    """
    _declarations(module)
    with jax.enable_x64(True):
        for name, hyper in module.VARIANTS.items():
            label = f"{module.__name__}: {name}"
            for check, when in CHECKS.items():
                with _explained(f"{label} fails when it is {when}"):
                    check(label, module, hyper)
        for identity in getattr(module, "IDENTITIES", ()):
            with _explained(f"{module.__name__}: the identity {identity!r} cannot be checked"):
                _identity(*identity)
        for name, (changes, factor) in getattr(module, "EQUILIBRIUM", {}).items():
            label = f"{module.__name__}: {name}"
            with _explained(f"{label}: its EQUILIBRIUM cannot be checked"):
                _equilibrium(label, module, dataclasses.replace(module.VARIANTS[name], **changes), factor)


def _declarations(module: Any) -> None:
    """The tables of a module, before anything runs."""
    name = module.__name__
    for field in ("Hyper", "VARIANTS", "SEARCH", "make"):
        if not hasattr(module, field):
            raise CheckFailed(f"{name} declares no {field}; copy pcx/algorithms/_template.py.")
    if not isinstance(module.Hyper, type):
        raise CheckFailed(f"{name}: Hyper is {module.Hyper!r}; it is the class of the settings.")
    if not isinstance(module.VARIANTS, Mapping) or not module.VARIANTS:
        raise CheckFailed(f"{name}: VARIANTS is {module.VARIANTS!r}; it maps at least one name to its settings.")
    for field in ("SEARCH", "EQUILIBRIUM"):
        if not isinstance(getattr(module, field, {}), Mapping):
            raise CheckFailed(f"{name}: {field} is of type {type(getattr(module, field)).__name__}; it is a mapping.")
    if not isinstance(getattr(module, "IDENTITIES", []), list | tuple):
        raise CheckFailed(f"{name}: IDENTITIES is of type {type(module.IDENTITIES).__name__}; it is a list.")
    for variant, hyper in module.VARIANTS.items():
        if not isinstance(hyper, module.Hyper):
            raise CheckFailed(f"{name}: {variant} is of type {type(hyper).__name__}; VARIANTS holds settings, such as Hyper().")
        _settings_of(f"{name}: {variant}", hyper)
        for key in module.SEARCH:
            if not hasattr(hyper, key):
                raise CheckFailed(f"{name}: {variant}: SEARCH names {key}, which is no setting of Hyper.")
    for variant, entry in getattr(module, "EQUILIBRIUM", {}).items():
        if variant not in module.VARIANTS:
            raise CheckFailed(f"{name}: EQUILIBRIUM names {variant}, which is none of {', '.join(module.VARIANTS)}.")
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise CheckFailed(f"{name}: EQUILIBRIUM of {variant} is {entry!r}; it is (settings, function of them).")


def _settings_of(label: str, hyper: Any) -> None:
    """Numbers that may be tuned are floats, and what shapes the program is static."""
    for field in dataclasses.fields(hyper) if dataclasses.is_dataclass(hyper) else ():
        value, name = getattr(hyper, field.name), field.name
        if field.metadata.get("static", False):
            continue
        if name == "T":
            raise CheckFailed(f"{label}: T is not static; it shapes the program: T: int = eqx.field(static=True, default=8).")
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            way_out = f"write {float(value)}, or make it an eqx.field(static=True) if it shapes the program"
            raise CheckFailed(f"{label}: {name} is {value}, a whole number that is not static; {way_out}.")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Whatever the algorithm's own code raises, as one sentence."""
    try:
        yield
    except CheckFailed:
        raise
    except jax.errors.UnexpectedTracerError as error:
        raise CheckFailed(f"{what}: it keeps a traced value outside of its state, but a step is pure.") from error
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        advice = "branch on static settings, not on data or on floats"
        raise CheckFailed(f"{what}: it asks for the value of what is traced; {advice} ({_reason(error)})") from error
    except Exception as error:
        raise CheckFailed(f"{what}: {type(error).__name__}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _shape(label: str, module: Any, hyper: Any) -> None:
    """What `make`, ``init`` and ``step`` return."""
    algorithm = module.make(hyper, total_steps=20, weight_optimiser=None, output=None)
    if not isinstance(algorithm, Algorithm):
        raise CheckFailed(f"{label}: make returns {type(algorithm).__name__}; it returns Algorithm(init, step).")
    x, y = _data(jnp.float64)
    state = algorithm.init(_Chain(jax.random.key(0), jnp.tanh, True, jnp.float64), x, y, jax.random.key(0))
    if not isinstance(state, State):
        raise CheckFailed(f"{label}: init returns {type(state).__name__}; it returns a State.")
    done = jax.eval_shape(algorithm.step, state, x, y, jax.random.key(0), 0)
    if not isinstance(done, tuple) or len(done) != 2 or not isinstance(done[0], State) or not isinstance(done[1], Metrics):
        found = ", ".join(type(part).__name__ for part in done) if isinstance(done, tuple) else type(done).__name__
        raise CheckFailed(f"{label}: a step returns ({found}); it returns (State, Metrics).")


def _start(module: Any, hyper: Any, dtype: Any = jnp.float64, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    algorithm = _compiled(module.make(hyper, total_steps=20))
    x, y = _data(dtype, seed)
    model = _Chain(jax.random.key(seed), jnp.tanh, True, dtype)
    return algorithm, algorithm.init(model, x, y, jax.random.key(seed)), x, y


def _compiled(algorithm: Any) -> Any:
    return algorithm._replace(step=jax.jit(algorithm.step))


def _pure(label: str, module: Any, hyper: Any) -> None:
    algorithm, state, x, y = _start(module, hyper)
    kept = jax.tree.map(lambda a: np.asarray(a).copy(), _arrays(state))
    traced_again = jax.jit(lambda *arguments: algorithm.step.__wrapped__(*arguments))
    first = algorithm.step(state, x, y, jax.random.key(0), 0)
    for step in (algorithm.step, traced_again):
        other = step(state, x, y, jax.random.key(0), 0)
        _same(f"{label} is not a function of its arguments: two equal calls differ", first, other, 0.0)
    _same(f"{label} changes its arguments", kept, _arrays(state), 0.0)
    if int(first[0].step) != int(state.step) + 1:
        raise CheckFailed(f"{label}: a step must advance state.step by one.")


def _one_trace(label: str, module: Any, hyper: Any) -> None:
    _, state, x, y = _start(module, hyper)
    algorithm, traces = module.make(hyper, total_steps=20), []

    def step(*arguments: Any) -> Any:
        traces.append(1)
        return algorithm.step(*arguments)

    compiled = jax.jit(step)
    for i in range(3):
        state, _ = compiled(state, x + i, y, jax.random.key(i), jnp.asarray(i))
    if len(traces) != 1:
        raise CheckFailed(f"{label} is traced {len(traces)} times for batches of one shape; a step must not depend on values.")


def _seeds(label: str, module: Any, hyper: Any) -> None:
    runs = [_start(module, hyper, seed=seed) for seed in (0, 1)]
    step = runs[0][0].step
    keys = jnp.stack([jax.random.key(0), jax.random.key(1)])
    alone = [step(state, x, y, key, 0) for (_, state, x, y), key in zip(runs, keys, strict=True)]
    states, xs, ys = (jax.tree.map(lambda *a: jnp.stack(a), *part) for part in zip(*(r[1:] for r in runs), strict=True))
    together = jax.vmap(step, in_axes=(0, 0, 0, 0, None))(states, xs, ys, keys, 0)
    _same(
        f"{label}: seeds mapped together differ from seeds alone",
        together,
        jax.tree.map(lambda *a: jnp.stack(a), *alone),
        1e-12,
    )


def _scan(label: str, module: Any, hyper: Any) -> None:
    algorithm, state, x, y = _start(module, hyper)
    inputs = jnp.stack([x, 2 * x, -x])
    body: Callable[[Any, Any], Any] = lambda state, x: algorithm.step(state, x, y, jax.random.key(0), 1)  # noqa: E731
    try:
        scanned, _ = jax.lax.scan(body, state, inputs)
    except TypeError as error:
        raise CheckFailed(f"{label}: a step changes the structure, shapes or dtypes of the state: {error}") from error
    for x in inputs:
        state, _ = body(state, x)
    _same(f"{label}: scanned steps differ from a loop", scanned, state, 1e-10)


def _dtypes(label: str, module: Any, hyper: Any) -> None:
    algorithm, state, x, y = _start(module, hyper, jnp.float32)
    new, _ = jax.eval_shape(algorithm.step, state, x, y, jax.random.key(0), 0)
    before, after = ([a.dtype for a in jax.tree.leaves(tree)] for tree in (state, new))
    if before != after:
        raise CheckFailed(f"{label} changes dtypes of a float32 model: {before} to {after}.")


def _traced_settings(label: str, module: Any, hyper: Any) -> None:
    floats, rest = eqx.partition(hyper, lambda leaf: isinstance(leaf, float))
    _, state, x, y = _start(module, hyper)

    def step(floats: Any) -> Any:
        algorithm = module.make(eqx.combine(floats, rest), total_steps=20)
        return algorithm.step(state, x, y, jax.random.key(0), 0)

    # AdamW turns rounding of a gradient that should be zero into steps of up to lr·ε_machine/1e-8, hence the bound.
    traced = jax.jit(step)(jax.tree.map(jnp.asarray, floats))
    _same(f"{label}: settings as traced values give another step", traced, jax.jit(lambda: step(floats))(), 1e-7)


CHECKS: dict[Callable[[str, Any, Any], None], str] = {
    _shape: "made and called once",
    _pure: "called again",
    _one_trace: "compiled",
    _seeds: "mapped over seeds",
    _scan: "scanned",
    _dtypes: "given a float32 model",
    _traced_settings: "made with traced settings",
}


def _identity(text: str, one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]]) -> None:
    """Two algorithms that must move the weights alike, with plain gradient descent on the weights."""
    from pcx.algorithms import get

    results = []
    for name, changes in (one, other):
        hyper, make = get(name)
        algorithm = _compiled(make(dataclasses.replace(hyper, **changes), weight_optimiser=optax.sgd(0.1)))
        x, y = _data(jnp.float64)
        model = _Chain(jax.random.key(3), jnp.tanh, True, jnp.float64)
        state, _ = algorithm.step(algorithm.init(model, x, y, jax.random.key(0)), x, y, jax.random.key(0), 0)
        results.append(state.model)
    _same(f"identity '{text}' does not hold", results[0], results[1], 1e-12)


def _equilibrium(label: str, module: Any, hyper: Any, factor: Callable[[Any], float]) -> None:
    """On a linear chain E* = ½ rᵀ S⁻¹ r with S = I + Σ P Pᵀ, P the product of the weights from a node to the output."""
    x, y = _data(jnp.float64)
    model = _Chain(jax.random.key(5), lambda h: h, False, jnp.float64)
    algorithm = _compiled(module.make(hyper, weight_optimiser=optax.sgd(0.0)))
    _, metrics = algorithm.step(algorithm.init(model, x, y, jax.random.key(0)), x, y, jax.random.key(0), 0)
    w1, w2, w3 = (np.asarray(layer.weight) for layer in model.layers)
    residual = np.asarray(y) - np.asarray(x) @ (w3 @ w2 @ w1).T
    spread = np.eye(2) + w3 @ w3.T + (w3 @ w2) @ (w3 @ w2).T
    expected = factor(hyper) * 0.5 * np.mean(np.einsum("bi,ij,bj->b", residual, np.linalg.inv(spread), residual))
    found = float(sum(metrics.energies.values()))
    if abs(found - expected) > 1e-8 * abs(expected):
        raise CheckFailed(f"{label}: the energy of a settled linear chain is {found:.12g}, its closed form {expected:.12g}.")
