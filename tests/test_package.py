"""The package as a whole: its public names, what imports what, and what the README promises."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pcx
import pcx.functional
import pcx.nn
import pcx.predictive_coding
import pcx.utils

ROOT = Path(__file__).parent.parent

PUBLIC = {
    "pcx": """ALL_SHORTCUTS Energy EnergyModule Graph Inferred ModelError NO_SHORTCUTS Nodes Observed Run Shortcuts Trained Vode
        algorithms apply_gradient channels_last check_algorithm check_model cross_entropy deltas draw energies free_energy
        freeze_state functional graph infer initialise nn normal optim output_node predictive_coding record_energies run
        squared_error train_step update_state utils weight_gradient weights zero""",
    "pcx.predictive_coding": "EnergyModule LayerParam STATUS StateParam Vode VodeParam energies",
    "pcx.functional": "cond grad jit scan value_and_grad vmap while_loop",
    "pcx.utils": "Mask Optim Selection atomic_write checksum clear load_params save_params step",
    "pcx.nn": """AvgPool2d BatchNorm Conv2d ConvTranspose2d Dropout LayerNorm Linear MaxPool2d keys largest_2x2 max_pool_2x2
        next_key seed""",
    "pcx.optim": "NoisyState langevin noisy_heavy_ball second_order_langevin",
    "pcx.algorithms": """Algorithm Metrics State adamw check_positive fresh_state get metrics_of
        modules names observations step_key stream unit_gradients
        warm_up_cosine""",
}


def public_names(module):
    """What a module defines itself, or re-exports under its own name."""
    names = [n for n in vars(module) if not n.startswith("_")]
    if hasattr(module, "__all__"):
        return set(module.__all__)
    source = ast.parse(Path(module.__file__).read_text())
    own = {n.name for n in source.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    exported = {a.asname for n in source.body if isinstance(n, ast.ImportFrom) for a in n.names if a.asname == a.name}
    return {n for n in names if n in own | exported}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    """Names that users rely on appear and disappear only on purpose."""
    assert public_names(sys.modules[name]) == set(PUBLIC[name].split())


def test_the_package_shows_nothing_of_others():
    """What `dir(pcx)` offers is its own: `pcx.os` would be the standard library's."""
    code = "import inspect, pcx; print([m.__name__ for n, m in vars(pcx).items() if inspect.ismodule(m) and n[0] != '_'])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pcx.nn" in shown
    assert [name for name in ast.literal_eval(shown) if not name.startswith("pcx.")] == []


# A module may import those of earlier ranks. The imperative surface comes last: nothing in the library imports it, except the
# package itself, which shows its two classes.
RANKS = [
    {"_types", "shortcuts.windows"},
    {"_energies", "_init", "_jaxpr", "shortcuts.differences", "shortcuts.half", "shortcuts.patches", "data"},
    {"_model"},
    {"_free_energy", "shortcuts.zeros", "shortcuts.momentum", "shortcuts.products", "shortcuts.channels", "optim"},
    {"shortcuts.plan"},
    {"shortcuts.stack", "shortcuts.pooling"},
    {"shortcuts.kernel"},
    {"_infer"},
    {"_learn"},
    {"draw", "algorithms"},
    {"check"},
    {"nn"},
    {"utils", "predictive_coding"},
    {"functional"},
    {"models"},
    {"bench"},
    {""},
]


FOLDERS = {"algorithms", "data", "models", "bench"}  # inside these, modules may import each other


def rank_of(module):
    for rank, names in enumerate(RANKS):
        if module in names or module.split(".")[0] in names & FOLDERS:
            return rank
    return {"shortcuts": 0}.get(module)


def test_imports_point_one_way():
    """Dependencies follow the layers of the design; no file is forgotten."""
    for path in sorted((ROOT / "pcx").rglob("*.py")):
        module = (
            ".".join(path.relative_to(ROOT / "pcx").with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__")
        )
        mine = rank_of(module)
        assert mine is not None, f"{module} has no place in the layers"
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("pcx"):
                continue
            for alias in node.names:
                target = node.module.removeprefix("pcx").removeprefix(".")
                target = target or (alias.name if rank_of(alias.name) is not None else target)
                same_folder = module.split(".")[0] == target.split(".")[0] and target.split(".")[0] in FOLDERS
                assert same_folder or rank_of(target) < mine, f"pcx.{module} imports pcx.{target}"


def test_import_is_light():
    """Importing the library does not import what only drawing, examples or tests need."""
    code = "import pcx, sys; print([m for m in ('matplotlib', 'sklearn', 'diffrax', 'beartype') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_no_private_jax():
    """The program is read through jax's public interface."""
    for path in (ROOT / "pcx").rglob("*.py"):
        assert "jax._src" not in path.read_text(), path


def test_core_is_small():
    """A PhD student reads it in an evening: the code of the core, without blank lines, comments and docstrings."""
    total = 0
    for path in (ROOT / "pcx").glob("_*.py"):
        if path.name == "__init__.py":
            continue
        text = path.read_text()
        documented = set()
        for node in ast.walk(ast.parse(text)):
            first = node.body[0] if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                documented.update(range(first.lineno, first.end_lineno + 1))
        lines = enumerate(text.splitlines(), 1)
        total += sum(1 for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in documented)
    assert total < 1200


def test_readme_example_runs():
    """The one Python block of the README is a complete program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    subprocess.run([sys.executable, "-W", "error", "-c", blocks[0]], check=True, capture_output=True, timeout=300)


def test_version_is_in_the_changelog():
    assert f"## [{pcx.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_gradient_flow_example():
    """diffrax integrates the values of an unchanged model and ends where gradient descent ends."""
    sys.path.insert(0, str(ROOT / "examples"))
    import gradient_flow

    assert gradient_flow.main() < 1e-8


def test_drawing(tmp_path):
    """Every node is in the picture, with its shape, its energy function and its energy."""
    import matplotlib

    matplotlib.use("Agg")
    from helpers import Skip, batch

    x, y = batch(4, 3)
    model = Skip(4, 5, 3)
    energies = pcx.energies(model, pcx.initialise(model, x, {"vodes.5": y}), x)
    axes = pcx.draw(model, x, energies=energies)
    texts = [text.get_text() for text in axes.texts]
    for name in pcx.graph(model, x).parents:
        (label,) = [text for text in texts if text.startswith(f"{name}\n")]
        assert label.split("\n")[1:3] == ["3" if name == "vodes.5" else "4", "squared_error"]
    (last,) = [text for text in texts if text.startswith("vodes.5\n")]
    assert last.endswith(f"E = {float(energies['vodes.5'].mean()):.3g}")
    path = tmp_path / "graph.png"
    axes.figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_check_model_finds_what_is_wrong():
    """Each problem of a model is named, with what to do."""
    import jax
    import jax.numpy as jnp
    from helpers import Chain, batch

    x, _ = batch(5, 3)
    assert len(pcx.check_model(Chain([5, 4, 3]), x).checks) == 5

    class Unused(Chain):
        def __init__(self):
            super().__init__([5, 4, 3])
            self.spare = pcx.Vode((2,))

        def __call__(self, x):
            return super().__call__(x)

    with pytest.raises(pcx.ModelError, match="spare is never called"):
        pcx.check_model(Unused(), x)

    class Coupled(Chain):
        def __call__(self, x):
            return super().__call__(x - jax.lax.pmean(x, "batch"))

    with pytest.raises(pcx.ModelError, match=r"vodes\.0 for one sample changes with another"):
        pcx.check_model(Coupled([5, 4, 3]), x)

    kept = []

    class Leaky(Chain):
        def __call__(self, x):
            kept.append(self.layers[0].weight * 2)
            return super().__call__(x)

    with pytest.raises(pcx.ModelError, match="traced value"):
        pcx.check_model(Leaky([5, 4, 3]), x)

    @jax.custom_jvp
    def wrong(h):
        return jnp.tanh(h)

    wrong.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), 2 * tangents[0]))
    with pytest.raises(pcx.ModelError, match="derivative of the free energy"):
        pcx.check_model(Chain([5, 4, 3], activation=wrong), x)
