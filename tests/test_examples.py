"""The tutorials run, and what they say holds: numbers that mean something, in smaller sizes than the scripts use."""

import re
import sys
from pathlib import Path

import numpy as np
from helpers import go_to_an_empty_place

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_first_pcn(tmp_path):
    """The free energy falls at every step of inference; training beats the best straight line on two moons."""
    import first_pcn

    result = first_pcn.main(epochs=30, out=tmp_path)
    assert result["steepest"] < 0
    assert result["end"] < result["start"]
    assert result["accuracy"] > 0.92
    assert is_picture(tmp_path / "first_pcn.png")
    assert is_picture(tmp_path / "first_pcn_graph.png")


def test_appendix_a():
    """Inference lowers the energy of one sample, the surface moves the weights as the core does, and digits are learned."""
    import appendix_a

    result = appendix_a.main(epochs=3)
    assert np.all(np.diff(result["one"]) < 0)
    assert result["difference"] < 1e-8  # AdamW divides by the gradient's size, so rounding of small gradients shows
    assert result["accuracy"] > 0.9


def test_functional_core():
    """Each of the five uses against a reference: chance, zero, the mean, the exact covariance of a linear model."""
    import functional_core

    result = functional_core.main(steps=150, samples=1000)
    assert result["learning"][1] < 0.1 * result["learning"][0]
    assert result["accuracy"] > 0.9
    assert result["forward_energy"] == 0
    assert result["by_value"] == ["high"]
    assert sorted(result["by_error"]) == ["high", "low"]
    assert result["gradient"] < 1e-10  # both descents have ended, so that their ends can be compared
    assert result["coordinates"] < 1e-10
    assert result["generating"][1] < result["generating"][0]
    assert result["recall"] < 0.5 * result["guess"]
    drawn, exact = result["spread"]
    # a variance of 1000 samples has a relative deviation of √(2/1000) = 0.045; the rest is for the size of the steps
    np.testing.assert_allclose(np.diag(drawn), np.diag(exact), rtol=0.2)


def test_decoder(tmp_path):
    """The decoder explains images it has not seen, and recalls a half better than the mean image does."""
    import decoder

    result = decoder.main(epochs=20, out=tmp_path)
    assert result["curve"][-1] < 0.2 * result["curve"][0]
    assert result["reconstruction"] < 0.5 * result["mean_image"]
    assert result["recall"] < result["recall_mean_image"] < result["recall_masked"]
    assert result["kept"] == 0
    assert is_picture(tmp_path / "decoder.png")


def test_own_algorithm():
    """It passes the battery, is PC-SE with ramp 0 and only then, and learns digits."""
    import own_algorithm

    result = own_algorithm.main(epochs=6)
    assert result["identity"] < 1e-12
    assert result["otherwise"] > 1e-5
    assert result["fade_in"] > 0.9
    assert result["pc_se"] > 0.9


def test_demo_shows_the_papers_figures_where_there_are_some():
    """Ours and the paper's with their epochs; digits has no column that is empty."""
    import demo

    ours = dict.fromkeys(("pc_ce", "pc_se", "pn", "nn", "cn", "ipc", "bp_ce", "bp_se"), (97.654, 0.03125))
    head, _, pc_se, *rest = demo.table("mnist", 4, ours).splitlines()
    assert re.split(" {2,}", head) == ["algorithm", "ours (4 epochs)", "paper (25 epochs)", "s/epoch"]
    assert pc_se.split() == ["pc_se", "97.65", "98.26", "0.031"]  # Table 1
    assert len(rest) == 6
    head, first, *_ = demo.table("digits", 25, ours).splitlines()
    assert re.split(" {2,}", head) == ["algorithm", "ours (25 epochs)", "s/epoch"]
    assert first.split() == ["pc_ce", "97.65", "0.031"]
    assert "ours (1 epoch) " in demo.table("digits", 1, ours)


def test_demo_says_how_to_get_mnist(monkeypatch, tmp_path, capsys):
    import demo

    go_to_an_empty_place(monkeypatch, tmp_path)
    assert demo.best_data_set() == "digits"
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert "digits are used" in out
    assert "pcx data get mnist" in out
