"""Checkpoints: one file that is whole or not there, names, shapes and dtypes checked, the model left alone on refusal."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from helpers import Chain, batch
from snapshots import bits, snapshot

import pcx
import pcx.functional as pxf
import pcx.nn as pxnn
import pcx.predictive_coding as pxc
import pcx.utils as pxu


class Normalised(pcx.EnergyModule):
    def __init__(self, seed: int = 0, width: int = 5):
        with pxnn.keys(jax.random.key(seed)):
            self.layers = [pxnn.Linear(4, width), pxnn.Linear(width, 3)]
        self.norm = pxnn.BatchNorm(width)
        self.vodes = [pcx.Vode(), pcx.Vode()]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.vodes[1](self.layers[1](self.vodes[0](jnp.tanh(self.norm(self.layers[0](x))))))


def trained(seed: int = 0) -> Normalised:
    """A model whose weights and statistics are not those of a new one."""
    x, y = batch(4, 3, 6)
    model, rule = Normalised(seed), optax.sgd(0.3)
    return pcx.train_step(model, x, {"vodes.1": y}, state_optimiser=rule, weight_optimiser=rule,
                          weight_state=rule.init(pcx.weights(model)), steps=2, training=True).model  # fmt: skip


def test_a_round_trip_is_bitwise(tmp_path):
    """Weights and the statistics of batch normalisation; in place, and returned."""
    model, other = trained(), Normalised(1)
    pxu.save_params(model, tmp_path / "model.safetensors")
    assert bits(other) != bits(model)
    weight, vode = other.layers[0].weight, other.vodes[0]
    assert pxu.load_params(other, tmp_path / "model.safetensors") is other
    assert bits(other) == bits(model)
    assert other.layers[0].weight is not weight
    assert other.vodes[0] is vode
    assert float(other.norm.running_mean[0]) != 0.0
    x, _ = batch(4, 3, 6)
    np.testing.assert_array_equal(pcx.run(other, {}, x).output, pcx.run(model, {}, x).output)


def test_the_file_holds_names_shapes_and_dtypes(tmp_path):
    """It is an ordinary safetensors file, named by the paths of the arrays."""
    model = trained()
    pxu.save_params(model, str(tmp_path / "deep" / "er" / "model.safetensors"))
    found = safetensors.numpy.load_file(tmp_path / "deep" / "er" / "model.safetensors")
    expected = {
        **{f"layers.{i}.{part}": getattr(model.layers[i], part) for i in (0, 1) for part in ("weight", "bias")},
        **{f"norm.{part}": getattr(model.norm, part) for part in ("weight", "bias", "running_mean", "running_variance")},
    }
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    assert os.listdir(tmp_path / "deep" / "er") == ["model.safetensors"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_dtype_and_special_numbers_survive(tmp_path, dtype):
    """Infinities, the smallest number, signed zeros and NaN with its bits."""
    special = jnp.array([jnp.inf, -jnp.inf, 0.0, -0.0, jnp.nan, 1e-30, 1.0], dtype)
    model = {"weight": jnp.stack([special, special[::-1]]), "scalar": jnp.array(0.1, dtype)}
    empty = jax.tree.map(jnp.zeros_like, model)
    pxu.save_params(model, tmp_path / "model")
    loaded = pxu.load_params(empty, tmp_path / "model")
    assert bits(loaded) == bits(model)
    assert loaded["weight"].dtype == jnp.dtype(dtype)
    assert isinstance(loaded["weight"], jax.Array)


def test_a_bfloat16_model_round_trip(tmp_path):
    model = jax.tree.map(lambda a: a.astype(jnp.bfloat16), trained())
    other = jax.tree.map(lambda a: a.astype(jnp.bfloat16), Normalised(1))
    pxu.save_params(model, tmp_path / "model")
    assert bits(pxu.load_params(other, tmp_path / "model")) == bits(model)


def test_other_kinds_and_values(tmp_path):
    """By default values of nodes are no part of a checkpoint, and they are left alone; on request they are the checkpoint."""
    model, other = Chain((4, 5, 3)), Chain((4, 5, 3), seed=1)
    for item, number in ((model, 1.0), (other, 2.0)):
        item.vodes[0].h = jnp.full((5,), number)
    pxu.save_params(model, tmp_path / "weights")
    pxu.load_params(other, tmp_path / "weights")
    np.testing.assert_array_equal(other.vodes[0].h, jnp.full((5,), 2.0))
    pxu.save_params(model, tmp_path / "values", pxc.VodeParam)
    assert set(safetensors.numpy.load_file(tmp_path / "values")) == {"vodes.0.h"}
    pxu.load_params(other, tmp_path / "values", pxc.VodeParam)
    np.testing.assert_array_equal(other.vodes[0].h, jnp.ones(5))


def test_a_plain_equinox_model(tmp_path):
    """It cannot be changed in place; the loaded one is returned."""
    one, two = (eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(seed)) for seed in (0, 1))
    before = bits(two)
    pxu.save_params(one, tmp_path / "mlp")
    loaded = pxu.load_params(two, tmp_path / "mlp")
    assert bits(loaded) == bits(one)
    assert bits(two) == before


def test_the_state_of_an_optimiser(tmp_path):
    """`Optim` is a module like others: its state can be saved and loaded to go on with it."""
    x = jnp.ones(4)
    loss = pxf.grad(pxu.Mask(pxc.LayerParam))(lambda x, *, model: jnp.sum(model.layers[0](x) ** 2))
    model = Chain((4, 5, 3))
    optim, other = (pxu.Optim(optax.adam(0.1), pxu.Mask(pxc.LayerParam)(model)) for _ in range(2))
    optim.step(model, loss(x, model=model)["model"])
    pxu.save_params(optim, tmp_path / "optim", (pxc.LayerParam, pxc.StateParam))
    other.init(model)
    pxu.load_params(other, tmp_path / "optim", (pxc.LayerParam, pxc.StateParam))
    assert bits(other) == bits(optim)


def test_a_model_trained_in_the_surface_loads_into_a_new_one(tmp_path):
    """The statistics of the last batch are no part of a checkpoint: a new model does not have them."""
    axes = pxu.Mask(pxc.VodeParam, [None, 0])
    model, (x, _) = Normalised().train(), batch(4, 3, 6)
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        pxf.vmap(axes, axis_name="batch")(lambda x, *, model: model(x))(x, model=model)
    pxu.save_params(model, tmp_path / "model")
    fresh = pxu.load_params(Normalised(1), tmp_path / "model")
    np.testing.assert_array_equal(fresh.norm.running_mean, model.norm.running_mean)
    np.testing.assert_array_equal(fresh.norm.running_variance, model.norm.running_variance)
    np.testing.assert_array_equal(fresh.layers[0].weight, model.layers[0].weight)
    pxu.save_params(Normalised(2), tmp_path / "new")
    pxu.load_params(model, tmp_path / "new")
    np.testing.assert_array_equal(model.norm.running_mean, jnp.zeros(5))


# Atomic


@pytest.mark.parametrize("stage", ["replace", "fsync"])
@pytest.mark.parametrize("error", [OSError("disk is full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, stage, error):
    path = tmp_path / "model.safetensors"
    pxu.save_params(old := trained(), path)
    content = path.read_bytes()

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(os, stage, fail)
    with pytest.raises(type(error)):
        pxu.save_params(Normalised(1), path)
    monkeypatch.undo()
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert bits(pxu.load_params(Normalised(1), path)) == bits(old)


def test_a_failed_first_save_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        pxu.save_params(Normalised(), tmp_path / "model")
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
import jax.numpy as jnp
import pcx.utils as pxu
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
pxu.save_params({"weight": jnp.zeros(1000)}, sys.argv[1])
"""


def test_a_process_killed_before_the_exchange_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.safetensors"
    pxu.save_params({"weight": jnp.ones(3)}, path)
    content = path.read_bytes()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert path.read_bytes() == content
    assert bits(pxu.load_params({"weight": jnp.zeros(3)}, path)) == bits({"weight": jnp.ones(3)})
    pxu.save_params({"weight": jnp.full(3, 2.0)}, path)
    assert bits(pxu.load_params({"weight": jnp.zeros(3)}, path)) == bits({"weight": jnp.full(3, 2.0)})


# Refusals


def refused(model: Any, path: Path) -> str:
    """The message of a refusal; the model is as it was."""
    before, arrays = snapshot(model), bits(model)
    with pytest.raises(pcx.ModelError) as caught:
        pxu.load_params(model, path)
    assert snapshot(model) == before
    assert bits(model) == arrays
    return str(caught.value)


def test_another_shape_is_refused_with_both_sides(tmp_path):
    pxu.save_params(Normalised(width=7), tmp_path / "wide")
    message = refused(Normalised(width=5), tmp_path / "wide")
    assert f"{tmp_path / 'wide'} is not a checkpoint of this Normalised" in message
    assert "layers.0.bias is float64[5] in the model and float64[7] in the file" in message
    assert "and 2 more" in message  # seven arrays differ, five are named


def test_another_dtype_is_refused_with_both_sides(tmp_path):
    pxu.save_params(jax.tree.map(lambda a: a.astype(jnp.float32), Chain((4, 3))), tmp_path / "single")
    message = refused(Chain((4, 3)), tmp_path / "single")
    assert "layers.0.weight is float64[3, 4] in the model and float32[3, 4] in the file" in message


def test_another_set_of_names_is_refused_with_both_sides(tmp_path):
    pxu.save_params(Chain((4, 5, 3)), tmp_path / "chain")
    message = refused(Normalised(), tmp_path / "chain")
    assert "norm.running_mean is in the model but not in the file" in message
    pxu.save_params(Normalised(), tmp_path / "normalised")
    message = refused(Chain((4, 5, 3)), tmp_path / "normalised")
    assert "norm.running_mean is in the file but not in the model" in message


def test_one_difference_among_many_leaves_everything_as_it_was(tmp_path):
    """Not even the arrays that fit are read into the model."""
    model = Chain((4, 5, 3))
    model.layers[1] = pxnn.Linear(5, 3, bias=False, key=jax.random.key(7))
    pxu.save_params(model, tmp_path / "nearly")
    assert "layers.1.bias is in the model but not in the file" in refused(Chain((4, 5, 3), seed=3), tmp_path / "nearly")


@pytest.mark.parametrize("kept", [0, 4, 20, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = tmp_path / "model"
    pxu.save_params(Chain((4, 5, 3)), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    message = refused(Chain((4, 5, 3)), path)
    assert str(path) in message
    assert "not a readable safetensors file" in message
    assert "save it again" in message


@pytest.mark.parametrize("place", [-1, -100])
def test_a_changed_bit_is_refused(tmp_path, place):
    path = tmp_path / "model"
    pxu.save_params(Chain((4, 5, 3)), path)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))
    message = refused(Chain((4, 5, 3)), path)
    assert f"{path} is damaged: its checksum is" in message
    assert "Use another copy" in message


def test_swapped_arrays_are_refused(tmp_path):
    """The checksum covers the names: two arrays of one shape under each other's names are not the same checkpoint."""
    path = tmp_path / "model"
    pxu.save_params(Chain((3, 3, 3)), path)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(b"layers.0.", b"layers.#.").replace(b"layers.1.", b"layers.0.")
    path.write_bytes(content[:8] + header.replace(b"layers.#.", b"layers.1.") + content[8 + size :])
    assert "is damaged" in refused(Chain((3, 3, 3)), path)


def test_something_else_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a checkpoint, but long enough to look like one")
    assert "not a readable safetensors file" in refused(Chain((4, 3)), tmp_path / "text")


def test_a_missing_file(tmp_path):
    model = Chain((4, 3))
    before = snapshot(model)
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at .*save_params"):
            pxu.load_params(model, path)
    assert snapshot(model) == before
    assert not (tmp_path / "nothing").exists()
