"""The pure core: one function from values to predictions, its energies, both coordinate systems, and how nodes start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Chain, Convolutional, Skip, batch, largest_difference

import pcx
import pcx.nn as pxnn


def layers(model):
    return [(np.asarray(layer.weight), np.asarray(layer.bias)) for layer in model.layers]


def random_values(model, x, seed=5):
    """Values far from their predictions."""
    shapes = pcx.run(model, {}, x).values
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return pcx.Nodes({name: jax.random.normal(k, v.shape) for k, (name, v) in zip(keys, shapes.items(), strict=True)})


# --- run ----------------------------------------------------------------------------------------------------------------


def test_forward_pass_written_out():
    model, (x, _) = Chain([3, 4, 5, 2]), batch(3, 2)
    done = pcx.run(model, {}, x)
    h = np.asarray(x)
    for i, (weight, bias) in enumerate(layers(model)):
        h = h @ weight.T + bias
        h = np.tanh(h) if i < 2 else h
        np.testing.assert_allclose(done.values[f"vodes.{i}"], h, atol=1e-14)
        np.testing.assert_array_equal(done.values[f"vodes.{i}"], done.predictions[f"vodes.{i}"])
    np.testing.assert_allclose(done.output, h, atol=1e-14)


def test_predictions_are_independent_given_all_values():
    """Each reads its parents' values and nothing further."""
    model, (x, _) = Chain([3, 4, 5, 2]), batch(3, 2)
    values = random_values(model, x)
    done = pcx.run(model, values, x)
    below = [np.asarray(x), *map(np.asarray, values.values())]
    for i, (weight, bias) in enumerate(layers(model)):
        u = below[i] @ weight.T + bias
        np.testing.assert_allclose(done.predictions[f"vodes.{i}"], np.tanh(u) if i < 2 else u, atol=1e-14)
        np.testing.assert_array_equal(done.values[f"vodes.{i}"], values[f"vodes.{i}"])


def test_some_values_given():
    """A node without a value is its prediction, from the values before it."""
    model, (x, _) = Chain([3, 4, 5, 2]), batch(3, 2)
    middle = jax.random.normal(jax.random.key(0), (7, 5))
    done = pcx.run(model, {"vodes.1": middle}, x)
    weight, bias = layers(model)[2]
    np.testing.assert_allclose(done.values["vodes.2"], np.asarray(middle) @ weight.T + bias, atol=1e-14)
    np.testing.assert_array_equal(done.values["vodes.0"], pcx.run(model, {}, x).values["vodes.0"])


def test_run_leaves_the_model_alone():
    model, (x, _) = Chain([3, 4, 2]), batch(3, 2)
    before, structure = jax.tree.flatten(model)
    pcx.run(model, {"vodes.0": jnp.ones((7, 4))}, x)
    after, same = jax.tree.flatten(model)
    assert structure == same
    assert all(a is b for a, b in zip(before, after, strict=True))


class Sum(pcx.EnergyModule):
    """Two inputs and a root latent."""

    def __init__(self):
        self.scale = jnp.array(2.0)
        self.root, self.out = pcx.Vode((3,)), pcx.Vode()

    def __call__(self, *inputs):
        return self.out(self.scale * (self.root() + sum(inputs)))


def test_no_input_one_or_several():
    h = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(pcx.run(Sum(), {"root": h}).predictions["out"], 2 * h)
    np.testing.assert_array_equal(pcx.run(Sum(), {"root": h}, h + 1).predictions["out"], 2 * (2 * h + 1))
    np.testing.assert_array_equal(pcx.run(Sum(), {"root": h}, (h, h + 1)).predictions["out"], 2 * (3 * h + 1))
    np.testing.assert_array_equal(pcx.run(Sum(), {}, batch=4).predictions["out"], np.zeros((4, 3)))


def test_batch_sizes():
    model = Chain([3, 4, 2])
    with pytest.raises(pcx.ModelError, match=r"batch sizes differ.*input 0: 7.*'vodes.0': 6"):
        pcx.run(model, {"vodes.0": jnp.ones((6, 4))}, jnp.ones((7, 3)))
    with pytest.raises(pcx.ModelError, match=r"batch sizes differ.*batch=: 5"):
        pcx.run(model, {}, jnp.ones((7, 3)), batch=5)
    with pytest.raises(pcx.ModelError, match="pass batch="):
        pcx.run(Sum(), {})
    with pytest.raises(pcx.ModelError, match="'root' is a number, or a list"):
        pcx.run(Sum(), {"root": jnp.array(1.0)})
    with pytest.raises(pcx.ModelError, match="on one sample with input of shape"):
        pcx.run(model, {}, jnp.ones(3))


def test_names_and_shapes_are_checked():
    model, x = Chain([3, 4, 2]), jnp.ones((7, 3))
    with pytest.raises(pcx.ModelError, match=r"no node 'vodes.7'; near: vodes"):
        pcx.run(model, {"vodes.7": jnp.ones((7, 4))}, x)
    with pytest.raises(pcx.ModelError, match=r"'vodes.0' has shape \(4,\).*\(5,\)"):
        pcx.run(model, {"vodes.0": jnp.ones((7, 5))}, x)
    with pytest.raises(pcx.ModelError, match=r"'vodes.0'.*\(5,\)"):
        pcx.run(model, {}, x, errors={"vodes.0": jnp.ones((7, 5))})
    model.vodes[0] = pcx.Vode((5,))
    with pytest.raises(pcx.ModelError, match=r"'vodes.0' has shape \(5,\), but its prediction has shape \(4,\)"):
        pcx.run(model, {}, x)


def test_vode_without_shape():
    """A predicted node takes its shape from its prediction; a root has none to take it from."""
    model, (x, _) = Skip(4, 3, 2), batch(4, 2)
    assert pcx.run(model, {}, x).values["vodes.3"].shape == (7, 2)
    root = Sum()
    root.root = pcx.Vode()
    with pytest.raises(pcx.ModelError, match="give it a shape"):
        pcx.run(root, {}, batch=2)


def test_dtype_is_that_of_the_weights():
    """Inputs, labels, values and errors in float64 or integers do not widen a float32 model."""
    model = jax.tree.map(lambda a: a.astype(jnp.float32), Chain([3, 4, 2]))
    x = jnp.ones((5, 3), jnp.float64)
    for done in (
        pcx.run(model, {"vodes.0": np.ones((5, 4))}, x),
        pcx.run(model, {}, x, errors={"vodes.0": np.ones((5, 4))}),
        pcx.run(model, {"vodes.1": jnp.ones((5, 2), int)}, x),
    ):
        assert {a.dtype for a in jax.tree.leaves((done.values, done.predictions, done.output))} == {jnp.dtype("float32")}
    values = pcx.initialise(model, x, {"vodes.1": jnp.arange(5) % 2}, init=pcx.normal(1.0), key=jax.random.key(0))
    assert {a.dtype for a in values.values()} == {jnp.dtype("float32")}
    assert pcx.free_energy(model, values, x, precision={"vodes.0": np.ones(4)}).dtype == jnp.float32


# --- errors -------------------------------------------------------------------------------------------------------------


def test_values_from_errors_written_out():
    model, (x, _) = Chain([3, 4, 5, 2]), batch(3, 2)
    errors = random_values(model, x)
    done = pcx.run(model, {}, x, errors=errors)
    h = np.asarray(x)
    for i, (weight, bias) in enumerate(layers(model)):
        u = h @ weight.T + bias
        h = (np.tanh(u) if i < 2 else u) + np.asarray(errors[f"vodes.{i}"])
        np.testing.assert_allclose(done.values[f"vodes.{i}"], h, atol=1e-14)
    energies = pcx.energies(model, {}, x, errors=errors)
    for name, error in errors.items():
        np.testing.assert_allclose(energies[name], 0.5 * np.sum(np.square(error), axis=1), rtol=1e-12)


MODELS = {
    "chain": (lambda: Chain([3, 4, 5, 2]), (3,)),
    "skip": (lambda: Skip(4, 5, 3), (4,)),
    "convolutional": (Convolutional, (3, 8, 8)),
}


@pytest.mark.parametrize(
    ("name", "given"), [("chain", "all"), ("chain", "some"), ("skip", "all"), ("skip", "some"), ("convolutional", "all")]
)
def test_both_coordinates_agree(name, given):
    """The same energies, and gradients that agree through the chain rule: ∂E/∂e = (∂h/∂e)ᵀ ∂E/∂h to 1e-12."""
    make, shape = MODELS[name]
    model, (x, _) = make(), batch(shape, 2, size=3)
    values = random_values(model, x)
    names = list(values)[:: 1 if given == "all" else 2]
    kept = {n: v for n, v in values.items() if n not in names}
    options = {"precision": {names[0]: 2.5}, "energy": {names[-1]: lambda h, u: jnp.sum(jnp.cosh(0.3 * (h - u)))}}
    done = jax.jit(lambda values: pcx.run(model, values, x))(values)
    errors = pcx.Nodes({n: done.values[n] - done.predictions[n] for n in names})

    def by_values(h):
        return jnp.sum(pcx.free_energy(model, {**kept, **h}, x, **options))

    def by_errors(e):
        return jnp.sum(pcx.free_energy(model, kept, x, errors=e, **options))

    def translate(e):
        return pcx.run(model, kept, x, errors=e).values.only(names)

    @jax.jit
    def both(values, errors):
        translated, back = jax.vjp(translate, errors)
        along_values = jax.grad(by_values)(values.only(names))
        one = pcx.energies(model, values, x, **options), jax.grad(by_errors)(errors)
        return translated, one, (pcx.energies(model, kept, x, errors=errors, **options), back(along_values)[0])

    translated, one, other = both(values, errors)
    assert largest_difference(translated, values.only(names)) < 1e-12
    assert largest_difference(one[0], other[0]) < 1e-12
    scale = max(float(jnp.max(jnp.abs(g))) for g in one[1].values())
    assert largest_difference(one[1], other[1]) < 1e-12 * max(1.0, scale)


def test_gradient_by_values_written_out():
    """∂E/∂h_l = ε_l - W_{l+1}ᵀ (f'(a_{l+1}) ε_{l+1})."""
    model, (x, _) = Chain([3, 4, 5, 2]), batch(3, 2)
    values = random_values(model, x)
    gradient = jax.grad(lambda h: jnp.sum(pcx.free_energy(model, h, x)))(values)
    h = [np.asarray(x), *map(np.asarray, values.values())]
    activations = [h[i] @ weight.T + bias for i, (weight, bias) in enumerate(layers(model))]
    predictions = [np.tanh(activations[0]), np.tanh(activations[1]), activations[2]]
    slopes = [1 - np.tanh(activations[0]) ** 2, 1 - np.tanh(activations[1]) ** 2, np.ones_like(activations[2])]
    errors = [h[i + 1] - predictions[i] for i in range(3)]
    for i in range(3):
        above = (slopes[i + 1] * errors[i + 1]) @ layers(model)[i + 1][0] if i < 2 else 0
        np.testing.assert_allclose(gradient[f"vodes.{i}"], errors[i] - above, atol=1e-13)


def test_errors_that_are_refused():
    model, x = Chain([3, 4, 2]), jnp.ones((7, 3))
    with pytest.raises(pcx.ModelError, match=r"'vodes.0' is given a value and an error"):
        pcx.run(model, {"vodes.0": jnp.ones((7, 4))}, x, errors={"vodes.0": jnp.ones((7, 4))})
    model.vodes[1] = pcx.Vode((2,), pcx.cross_entropy)
    with pytest.raises(pcx.ModelError, match=r"'vodes.1' has cross-entropy"):
        pcx.run(model, {}, x, errors={"vodes.1": jnp.ones((7, 2))})


def test_error_of_a_node_whose_energy_is_replaced_by_cross_entropy_is_refused():
    model, x = Chain([3, 4, 2]), jnp.ones((7, 3))
    with pytest.raises(pcx.ModelError, match=r"'vodes.1' has cross-entropy"):
        pcx.energies(model, {}, x, errors={"vodes.1": jnp.ones((7, 2))}, energy={"vodes.1": pcx.cross_entropy})


# --- energies -----------------------------------------------------------------------------------------------------------


def far_apart(energy=pcx.squared_error):
    """A model with one node of three units, with a value and a prediction."""

    class One(pcx.EnergyModule):
        def __init__(self):
            self.shift = jnp.zeros(3)
            self.node = pcx.Vode((3,), energy)

        def __call__(self, x):
            return self.node(x + self.shift)

    h = np.array([[1.0, 2.0, 4.0], [0.0, 1.0, 0.0]])
    u = np.array([[0.5, 2.0, 1.0], [3.0, -1.0, 0.25]])
    return One(), jnp.asarray(h), jnp.asarray(u), h, u


@pytest.mark.parametrize(
    ("precision", "step", "expected"),
    [
        (None, 0, [[1, 1, 1]]),
        (2.5, 0, [[2.5, 2.5, 2.5]]),
        (np.array([1.0, 2.0, 3.0]), 0, [[1, 2, 3]]),
        (lambda step: 1.0 + step, 4, [[5, 5, 5]]),
        (lambda step: jnp.array([1.0, 0.0, 2.0]) ** step, 2, [[1, 0, 4]]),
    ],
    ids=["none", "scalar", "per unit", "schedule", "schedule per unit"],
)
def test_squared_error_with_a_precision(precision, step, expected):
    model, value, x, h, u = far_apart()
    options = {} if precision is None else {"precision": {"node": precision}, "step": step}
    found = pcx.energies(model, {"node": value}, x, **options)["node"]
    np.testing.assert_allclose(found, 0.5 * np.sum(np.array(expected) * (h - u) ** 2, axis=1), rtol=1e-14)


def test_cross_entropy_written_out():
    model, _, x, _, u = far_apart(pcx.cross_entropy)
    labels = np.array([2, 0])
    log_softmax = u - np.log(np.sum(np.exp(u), axis=1, keepdims=True))
    one_hot = jnp.asarray(np.eye(3)[labels])
    np.testing.assert_allclose(
        pcx.energies(model, {"node": one_hot}, x)["node"], -log_softmax[np.arange(2), labels], rtol=1e-14
    )
    np.testing.assert_array_equal(pcx.initialise(model, x, {"node": labels})["node"], one_hot)
    soft = np.array([[0.2, 0.3, 0.5], [0.1, 0.9, 0.0]])
    found = pcx.energies(model, {"node": jnp.asarray(soft)}, x, precision={"node": np.array([1.0, 2.0, 3.0])})["node"]
    np.testing.assert_allclose(found, -np.sum([1.0, 2.0, 3.0] * soft * log_softmax, axis=1), rtol=1e-14)


def test_cross_entropy_is_stable():
    """exp(1e4) is infinite; the energy is a difference of logits, its gradient softmax(u) - h."""
    h, u = jnp.array([0.0, 1.0, 0.0]), jnp.array([1e4, 0.0, -1e4])
    assert float(pcx.cross_entropy(h, u)) == 1e4
    np.testing.assert_array_equal(jax.grad(pcx.cross_entropy, 1)(h, u), [1.0, -1.0, 0.0])


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0]])
def test_labels_out_of_range_are_refused(labels):
    model, _, x, _, _ = far_apart(pcx.cross_entropy)
    with pytest.raises(pcx.ModelError, match="'node' has 3 classes"):
        pcx.initialise(model, x, {"node": np.array(labels)})


def test_zero_and_user_functions():
    model, value, x, h, u = far_apart(lambda h, u: jnp.sum(h**2 * u))
    np.testing.assert_allclose(pcx.energies(model, {"node": value}, x)["node"], np.sum(h**2 * u, axis=1), rtol=1e-14)
    found = pcx.energies(model, {"node": value}, x, precision={"node": 3.0})["node"]
    np.testing.assert_allclose(found, 3 * np.sum(h**2 * u, axis=1), rtol=1e-14)
    replaced = pcx.energies(model, {"node": value}, x, energy={"node": pcx.zero})["node"]
    np.testing.assert_array_equal(replaced, [0.0, 0.0])


def test_energies_that_are_refused():
    model, value, x, _, _ = far_apart(lambda h, u: jnp.sum(h - u))
    with pytest.raises(pcx.ModelError, match=r"precision of node 'node' has shape \(3,\); only an `Energy` takes an array"):
        pcx.energies(model, {"node": value}, x, precision={"node": np.ones(3)})
    with pytest.raises(pcx.ModelError, match=r"precision of node 'node' has shape \(2,\)"):
        pcx.energies(model, {"node": value}, x, precision={"node": np.ones(2)}, energy={"node": pcx.squared_error})
    with pytest.raises(pcx.ModelError, match=r"'node' has shape \(3,\) per sample; return one number"):
        pcx.energies(model, {"node": value}, x, energy={"node": lambda h, u: h - u})
    for option in ({"precision": {"nod": 1.0}}, {"energy": {"nod": pcx.zero}}):
        with pytest.raises(pcx.ModelError, match=r"no node 'nod'.*near: node"):
            pcx.energies(model, {"node": value}, x, **option)


def test_free_energy_is_the_sum_over_nodes():
    model, (x, _) = Skip(4, 4, 3), batch(4, 3)
    values = random_values(model, x)
    energies = pcx.energies(model, values, x)
    assert [e.shape for e in energies.values()] == [(7,)] * 5
    np.testing.assert_allclose(pcx.free_energy(model, values, x), np.sum([*energies.values()], axis=0), rtol=1e-14)


class Latent(pcx.EnergyModule):
    """A root latent that predicts one node."""

    def __init__(self, **prior):
        self.layer = pxnn.Linear(2, 3, key=jax.random.key(0))
        self.root, self.data = pcx.Vode((2,), **prior), pcx.Vode((3,))

    def __call__(self):
        return self.data(self.layer(self.root()))


def test_root_energies():
    """No energy without a prior; around its mean with one."""
    h, mean = np.array([[1.0, -2.0], [3.0, 0.5]]), np.array([0.5, 1.0])
    values = {"root": jnp.asarray(h)}
    np.testing.assert_array_equal(pcx.energies(Latent(), values)["root"], [0.0, 0.0])
    expected = 0.5 * np.sum((h - mean) ** 2, axis=1)
    for learn in (False, True):
        model = Latent(mean=mean, learn_mean=learn)
        np.testing.assert_allclose(pcx.energies(model, values)["root"], expected, rtol=1e-14)
        np.testing.assert_allclose(pcx.energies(model, values, precision={"root": 4.0})["root"], 4 * expected, rtol=1e-14)
        np.testing.assert_array_equal(pcx.run(model, {}, batch=2).values["root"], [mean, mean])
    np.testing.assert_array_equal(pcx.run(Latent(), {}, batch=2).values["root"], np.zeros((2, 2)))
    np.testing.assert_allclose(pcx.energies(Latent(), values, energy={"root": pcx.squared_error})["root"],
                               0.5 * np.sum(h**2, axis=1), rtol=1e-14)  # fmt: skip


def test_only_a_learned_mean_is_a_weight():
    assert pcx.weights(Latent(mean=np.ones(2), learn_mean=True)).root.mean.shape == (2,)
    assert pcx.weights(Latent(mean=np.ones(2))).root.mean is None


# --- initialise ---------------------------------------------------------------------------------------------------------


def test_forward_is_the_default():
    model, (x, _) = Chain([3, 4, 2]), batch(3, 2)
    assert largest_difference(pcx.initialise(model, x), pcx.run(model, {}, x).values) == 0
    assert largest_difference(pcx.initialise(model, x, init="forward"), pcx.run(model, {}, x).values) == 0


def test_zeros_for_all_nodes_and_for_one():
    model, (x, _) = Chain([3, 4, 2]), batch(3, 2)
    assert all(float(jnp.max(jnp.abs(v))) == 0 for v in pcx.initialise(model, x, init="zeros").values())
    values = pcx.initialise(model, x, init={"vodes.0": "zeros"})
    np.testing.assert_array_equal(values["vodes.0"], np.zeros((7, 4)))
    np.testing.assert_allclose(values["vodes.1"], np.tile(layers(model)[1][1], (7, 1)), atol=1e-15)


def test_normal_has_the_given_deviation():
    """20,000 numbers: mean and variance within five standard errors; different for every sample and node."""
    model, x = Skip(40, 3, 40), jnp.zeros((500, 40))
    key = jax.random.key(3)
    values = pcx.initialise(model, x, init=pcx.normal(0.5), key=key)
    for value in values.values():
        n = value.size
        assert abs(float(jnp.mean(value))) < 5 * 0.5 / np.sqrt(n)
        assert abs(float(jnp.var(value)) - 0.25) < 5 * 0.25 * np.sqrt(2 / n)
        assert len(np.unique(np.asarray(value))) == n
    correlation = np.mean(np.asarray(values["vodes.0"]) * np.asarray(values["vodes.1"])) / 0.25
    assert abs(correlation) < 5 / np.sqrt(values["vodes.0"].size)
    doubled = pcx.initialise(model, x, init=pcx.normal(1.0), key=key)
    assert largest_difference(jax.tree.map(lambda v: 2 * v, values), doubled) < 1e-15
    other = pcx.initialise(model, x, init=pcx.normal(0.5), key=jax.random.key(4))
    assert float(jnp.max(jnp.abs(other["vodes.0"] - values["vodes.0"]))) > 0.1


def test_any_function_and_the_vodes_own():
    model, (x, _) = Chain([3, 4, 2]), batch(3, 2)
    forward = pcx.run(model, {}, x).values["vodes.0"]
    values = pcx.initialise(model, x, init={"vodes.0": lambda u, key: 3 * u - 1})
    np.testing.assert_allclose(values["vodes.0"], 3 * forward - 1, atol=1e-15)
    model.vodes[0] = pcx.Vode((4,), init=lambda u, key: u + 7)
    np.testing.assert_allclose(pcx.initialise(model, x)["vodes.0"], forward + 7, atol=1e-14)
    np.testing.assert_array_equal(pcx.initialise(model, x, init="forward")["vodes.0"], forward)
    np.testing.assert_allclose(pcx.initialise(model, x, init={"vodes.1": "zeros"})["vodes.0"], forward + 7, atol=1e-14)


def test_starts_that_are_refused():
    model, x = Chain([3, 4, 2]), jnp.ones((7, 3))
    with pytest.raises(pcx.ModelError, match="unknown initialisation 'ones'"):
        pcx.initialise(model, x, init="ones")
    with pytest.raises(pcx.ModelError, match=r"no node 'vodes.9' to initialise"):
        pcx.initialise(model, x, init={"vodes.9": "zeros"})
    with pytest.raises(pcx.ModelError, match="a random start needs a key"):
        pcx.initialise(model, x, init=pcx.normal(1.0))


@pytest.mark.parametrize("init", ["forward", "zeros"])
def test_observations_are_bound_before_the_start(init):
    """The nodes after an observed node start from what is observed."""
    model, (x, _) = Chain([3, 4, 5, 2]), batch(3, 2)
    seen = jax.random.normal(jax.random.key(2), (7, 4))
    values = pcx.initialise(model, x, {"vodes.0": seen}, init={"vodes.1": "forward", "vodes.2": "forward", "vodes.0": init})
    np.testing.assert_array_equal(values["vodes.0"], seen)
    weight, bias = layers(model)[1]
    np.testing.assert_allclose(values["vodes.1"], np.tanh(np.asarray(seen) @ weight.T + bias), atol=1e-14)


@pytest.mark.parametrize("batched", [False, True])
def test_partly_observed_node(batched):
    model, (x, _) = Chain([3, 4, 2]), batch(3, 2)
    forward = pcx.run(model, {}, x).values
    mask = np.array([True, False, False, True])
    mask = np.tile(mask, (7, 1)) ^ (np.arange(7)[:, None] % 2 == 0) if batched else mask
    seen = np.full((7, 4), 9.0)
    values = pcx.initialise(model, x, {"vodes.0": pcx.Observed(seen, mask)})
    expected = np.where(mask, 9.0, forward["vodes.0"])
    np.testing.assert_array_equal(values["vodes.0"], expected)
    weight, bias = layers(model)[1]
    np.testing.assert_allclose(values["vodes.1"], expected @ weight.T + bias, atol=1e-14)


def test_observations_that_are_refused():
    model, x = Chain([3, 4, 2]), jnp.ones((7, 3))
    with pytest.raises(pcx.ModelError, match=r"no node 'vode.1'; near: vodes"):
        pcx.initialise(model, x, {"vode.1": jnp.ones((7, 2))})
    with pytest.raises(pcx.ModelError, match=r"takes shape \(7, 2\).*integer labels, but was given \(7, 3\) float64"):
        pcx.initialise(model, x, {"vodes.1": jnp.ones((7, 3))})
