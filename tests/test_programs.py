"""Compiled programs that are kept between runs."""

import os
import re
import subprocess
import sys
import sysconfig

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import pcx.data
from pcx.bench import programs
from pcx.bench.engine import Engine
from pcx.bench.tasks import configure

DIGITS = pcx.data.load("digits")
READS = programs.READS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder where programs are kept, and none of JAX's own that a compiler takes from there."""
    monkeypatch.setattr(programs, "keeping", True)
    monkeypatch.setattr(programs, "started", float("inf"))
    monkeypatch.setattr(programs, "READS", re.compile(rb"(?!)"))  # tests themselves read much
    before = jax.config.values["jax_compilation_cache_dir"], jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # whether it is on is looked up once in a process
    yield tmp_path / "whole"
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_enable_compilation_cache", before[1])
    reset_cache()


def trained(monkeypatch, mode="scan", algorithm="bp_se", **changes):
    """What two short epochs and an evaluation gave, and which programs were compiled for them."""
    compiled = []
    compile = Engine._compile
    monkeypatch.setattr(Engine, "_compile", lambda self, *given: compiled.append(self) or compile(self, *given))
    engine = Engine(configure("digits/mlp", algorithm, epochs=2, width=8, **changes), DIGITS, [3, 4], mode, steps=2).prepare()
    population = engine.init()
    for number in range(2):
        population, metrics = engine.epoch(population, number)
    metrics |= engine.evaluate(population, "test")
    monkeypatch.setattr(Engine, "_compile", compile)
    return (population, metrics), len(compiled)


def same(one, other):
    """Whether all numbers are equal, and those of keys."""
    plain = [
        [jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in jax.tree.leaves(tree)]
        for tree in (one, other)
    ]
    return all(np.array_equal(a, b) for a, b in zip(*plain, strict=True))


@pytest.mark.parametrize("mode", ["scan", "host"])
def test_the_next_run_compiles_nothing_and_has_the_same_numbers(mode, folder, monkeypatch):
    first, compiled = trained(monkeypatch, mode, "pc_se", T=2)
    kept = sorted(folder.iterdir())
    assert len(kept) == 3  # weights, an epoch or a step, evaluation
    again, still = trained(monkeypatch, mode, "pc_se", T=2)
    assert still == compiled - 3
    assert sorted(folder.iterdir()) == kept
    assert same(first, again)


def test_of_something_else_there_is_another(folder, monkeypatch, tmp_path):
    """Settings, XLA's flags, and every file that is loaded; rates are numbers that a program is given."""
    trained(monkeypatch)
    count = len([*folder.iterdir()])
    assert trained(monkeypatch, lr_theta=0.02)[1] > 0  # numbers may be written into programs, so a config is all of it
    engine = Engine(configure("digits/mlp", "pc_se", epochs=2, T=2), DIGITS, [3, 4], steps=2)
    facts, arguments = engine._facts(), (engine.keys, engine.floats)
    places = [programs.place(facts, arguments), programs.place(facts | {"mode": "host"}, arguments)]
    places.append(programs.place(facts, (engine.keys[:1], engine.floats)))
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=true")
    places.append(programs.place(facts, arguments))
    with jax.default_matmul_precision("bfloat16"):
        places.append(programs.place(facts, arguments))
    (tmp_path / "a_module_of_mine.py").write_text("rate = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("a_module_of_mine")
    places.append(programs.place(facts, arguments))
    (tmp_path / "a_module_of_mine.py").write_text("rate = 2\n")
    places.append(programs.place(facts, arguments))
    assert len({*places}) == len(places) == 7
    assert programs.place(facts, arguments) == places[-1]
    assert len([*folder.iterdir()]) > count


def test_what_changes_while_a_process_runs_is_not_kept(folder, monkeypatch, tmp_path):
    """The process has the old code, the file the new one; and what is loaded while a program is traced was not known before."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "late_module_of_mine.py").write_text("rate = 1\n")
    place = programs.place({}, ())
    program = programs.make(place, lambda: __import__("late_module_of_mine") and jax.jit(lambda x: x).lower(1.0).compile())
    assert program(1.0) == 1.0
    assert not folder.exists()
    again = programs.place({}, ())
    assert again.file != place.file
    programs.make(again, jax.jit(lambda x: x).lower(1.0).compile)
    assert [*folder.iterdir()] == [again.file]
    changed = (tmp_path / "late_module_of_mine.py").stat().st_mtime
    monkeypatch.setattr(programs, "started", changed - 1)
    assert programs.place({}, ()) is None
    monkeypatch.setattr(programs, "started", changed + 1)
    assert programs.place({}, ()) == again


def test_flags_in_a_file_count(folder, monkeypatch, tmp_path):
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    one = programs.place({}, ())
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=false")
    assert programs.place({}, ()) != one


def clear():
    programs._here.cache_clear()
    programs._installed.cache_clear()


@pytest.mark.parametrize(
    "line", ["os.environ['RATE']", "os.getenv('RATE')", "open('rate')", "Path('rate').read_text()", "np.load('rate.npy')"]
)
def test_of_code_that_reads_something_nothing_is_known(folder, monkeypatch, tmp_path, line):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_that_reads.py").write_text(f"def rate():\n    return {line}\n")
    before = programs.place({}, ())
    __import__("module_that_reads")
    try:
        assert programs.place({}, ()) != before
        monkeypatch.setattr(programs, "READS", READS)
        kept = ("pcx", "jax", "jaxlib", "equinox", "optax", "module_that_reads")  # and nothing that other tests have loaded
        loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in kept}
        monkeypatch.setattr(sys, "modules", loaded)
        assert programs.place({}, ()) is None
        monkeypatch.delitem(loaded, "module_that_reads")
        assert programs.place({}, ()) is not None  # nothing of our own reads
    finally:
        monkeypatch.undo()
        del sys.modules["module_that_reads"]


def test_a_line_changed_in_an_installed_package_counts(folder, monkeypatch, tmp_path):
    """In a package that programs are traced with, and in a file that belongs to no package."""
    paths = sysconfig.get_paths() | dict.fromkeys(("purelib", "platlib"), str(tmp_path))
    monkeypatch.setattr(programs.sysconfig, "get_paths", lambda: paths)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("traced_with", "of_no_package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("RATE = 1\n")
        monkeypatch.setitem(sys.modules, name, __import__(name))
    monkeypatch.setattr(programs, "TRACED", ("traced_with",))
    found = []
    for name in ("", "traced_with", "of_no_package"):
        if name:
            (tmp_path / name / "__init__.py").write_text("RATE = 2  # changed\n")
        clear()
        found.append(programs.place({}, ()).file)
    clear()
    assert len(set(found)) == 3


def test_a_package_installed_again_counts(folder, monkeypatch):
    """Of the same version, with other files."""
    found = []
    for record in ("helper.py,sha256=one,1", "helper.py,sha256=two,1"):
        package = type("Package", (), {"name": "helper", "version": "0.1", "read_text": lambda self, name, r=record: r})()
        monkeypatch.setattr(programs.importlib.metadata, "distributions", lambda package=package: [package])
        clear()
        found.append(programs.place({}, ()))
    clear()
    assert found[0].file != found[1].file


@pytest.mark.parametrize("on", [True, False])
def test_without_the_cache_of_jax_nothing_is_kept(on, monkeypatch):
    monkeypatch.setattr(programs, "keeping", None)
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", on)
    programs.keep()
    jax.config.update("jax_enable_compilation_cache", before)
    assert programs.keeping is on


def test_a_file_that_is_not_whole_is_made_again(folder, monkeypatch):
    first, compiled = trained(monkeypatch)
    for damaged in (lambda content: content[:-1], lambda content: b"", lambda content: b"x" + content[1:]):
        for file in folder.iterdir():
            file.write_bytes(damaged(file.read_bytes()))
        again, anew = trained(monkeypatch)
        assert anew == compiled
        assert same(first, again)
    assert trained(monkeypatch)[1] == compiled - 3


def test_what_comes_from_the_other_cache_is_not_kept(folder, monkeypatch):
    """On a CPU such a program cannot be written again; its functions are lost."""
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()
    seconds, size = (f"jax_persistent_cache_min_{name}" for name in ("compile_time_secs", "entry_size_bytes"))
    before = {name: jax.config.values[name] for name in (seconds, size)}
    try:
        jax.config.update(seconds, 0.0)
        first, _ = trained(monkeypatch)
        kept = {*folder.iterdir()}
        for file in kept:
            file.unlink()
        jax.clear_caches()
        again, compiled = trained(monkeypatch)
        assert compiled >= 3  # from JAX's cache
        assert not [*folder.iterdir()]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()
    assert len(kept) == 3
    assert same(first, again)


def test_without_being_asked_nothing_is_kept(folder, monkeypatch):
    """A notebook may have changed anything."""
    monkeypatch.setattr(programs, "keeping", False)
    trained(monkeypatch)
    assert not folder.exists()


def test_the_oldest_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "ROOM", 25)
    for age, name in enumerate(["new", "used", "old", "older"]):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    programs._tidy(tmp_path / "older")  # it has just been written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "older"]


def test_the_command_keeps_them(tmp_path):
    """Of two runs with the same settings the second one reads what the first one compiled, and ends with the same numbers."""
    environment = os.environ | {"PCX_CACHE": str(tmp_path / "cache"), "PCX_RESULTS": str(tmp_path / "records.jsonl")}
    found = []
    for name in ("first", "second"):
        code = "from pcx.bench.script import main; main()"
        run = ["run", "digits/mlp", "--algorithm", "pc_se", "--set", "epochs=1", "--quick", "--out", str(tmp_path / name)]
        subprocess.run([sys.executable, "-c", code, *run], env=environment, check=True, capture_output=True, cwd=tmp_path)
        files = {path: path.read_bytes() for path in (tmp_path / "cache" / "compiled" / "whole").iterdir()}
        found.append((files, safetensors.numpy.load_file(tmp_path / name / "checkpoint.safetensors")))
    (files, numbers), (later, again) = found
    assert files
    assert later == files
    assert numbers.keys() == again.keys()
    assert all(np.array_equal(numbers[name], again[name]) for name in numbers)
