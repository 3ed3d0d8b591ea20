"""A data set of one's own, ``NAME.npz`` in PCX_DATA: what is read from it, what is refused, and that it trains."""

import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import go_to_an_empty_place, run_command

import pcx.data
from pcx.bench.tasks import configure, pipeline


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    go_to_an_empty_place(monkeypatch, tmp_path)
    monkeypatch.setenv("PCX_DATA", str(tmp_path))
    return tmp_path


def arrays(count: int = 60, shape: tuple[int, ...] = (3, 8, 8)) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {}
    for part, size in (("train", count), ("test", 20)):
        made[f"{part}_images"] = rng.integers(0, 256, (size, *shape), dtype=np.uint8)
        made[f"{part}_labels"] = np.arange(size) % 4
    return made


def test_arrays_come_back_as_they_were_written(folder):
    mine = arrays()
    np.savez(folder / "leaves.npz", **mine)
    data = pcx.data.load("leaves")
    assert data.train is not None
    assert data.train.labels is not None
    assert data.test.labels is not None
    assert np.array_equal(data.train.images, mine["train_images"])
    assert np.array_equal(data.test.images, mine["test_images"])
    assert np.array_equal(data.train.labels, mine["train_labels"])
    assert np.array_equal(data.test.labels, mine["test_labels"])
    assert (data.name, data.classes, data.train.labels.dtype) == ("leaves", 4, np.int32)
    assert "leaves" in pcx.data.names()
    (status,) = (status for status in pcx.data.status() if status.name == "leaves")
    assert status.present
    assert status.splits == {"train": 60, "test": 20}
    assert status.folder == folder


def test_images_without_channels_get_one_and_rows_stay_rows(folder):
    np.savez_compressed(folder / "grey.npz", **arrays(shape=(8, 8)))
    assert pcx.data.load("grey").test.images.shape == (20, 1, 8, 8)
    rows = {k: v.astype(np.float64) if "images" in k else v for k, v in arrays(shape=(5,)).items()}
    np.savez(folder / "rows.npz", **rows)
    images = pcx.data.load("rows", root=folder).test.images
    assert images.shape == (20, 5)
    assert images.dtype == np.float32


def test_pixels_are_scaled_and_floats_are_not(folder):
    np.savez(folder / "leaves.npz", **arrays())
    config = configure("leaves/mlp", "pc_se")
    pixels = np.array([0, 51, 255], np.uint8).reshape(1, 3, 1, 1)
    expected = np.array([-1.0, -0.6, 1.0]).reshape(1, 3, 1, 1)
    assert np.allclose(pipeline(config).test(jax.numpy.asarray(pixels)), expected, atol=1e-6)
    assert np.array_equal(pipeline(config).test(jax.numpy.asarray(expected, "float32")), expected.astype("float32"))


def test_it_takes_the_settings_of_the_nearest_set_without_augmentation(folder):
    np.savez(folder / "leaves.npz", **arrays())
    assert configure("leaves/mlp", "ipc").hyper == configure("mnist/mlp", "ipc").hyper
    mine, cifar = configure("leaves/vgg5", "cn"), configure("cifar10/vgg5", "cn")
    assert mine.hyper == cifar.hyper
    assert (mine.augmentation, cifar.augmentation) == ("none", "crop4_flip")


def test_it_trains_from_the_command_line_and_in_a_search(folder):
    """Labels that can be read from one pixel are learnt; a search sees the set as well."""
    mine = arrays(256, (1, 4, 4))
    for part in ("train", "test"):
        mine[f"{part}_images"][:, 0, 0, :] = 255 * np.eye(4, dtype=np.uint8)[mine[f"{part}_labels"]]
    np.savez(folder / "leaves.npz", **mine)
    few = ("--set", "batch=32", "lr_theta=0.01", "width=16")
    code, _, error = run_command("run", "leaves/mlp", "-a", "pc_se", "--epochs", "6", *few, "--out", "run")
    assert code == 0, error
    assert json.loads((folder / "run" / "summary.json").read_text())["final"]["test_top1"]["mean"] > 0.9
    once = ("--trials", "1", "--epochs", "1", "--out", "found")
    code, out, error = run_command("search", "leaves/mlp", "-a", "bp_se", *once, *few)
    assert code == 0, error
    assert "on validation" in out


def test_crops_of_images_that_are_no_squares_are_refused(folder):
    np.savez(folder / "wide.npz", **arrays(shape=(3, 8, 12)))
    code, _, error = run_command("run", "wide/mlp", "-a", "bp_se", "--set", "augmentation=crop4_flip", "batch=16")
    assert code == 2
    assert error.splitlines()[-1] == "error: crop4_flip crops squares; images of wide are (8, 12)."
    code, _, error = run_command("run", "wide/mlp", "-a", "bp_se", "--epochs", "1", "--set", "batch=16", "width=8")
    assert code == 0, error


def broken(**changes: Any) -> dict[str, Any]:
    return {name: array for name, array in (arrays() | changes).items() if array is not None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"test_labels": None}, "has no test_labels; needed are train_images, train_labels, test_images, test_labels"),
        ({"train_images": np.zeros((60, 8, 8, 3), np.uint8)}, "channels last; give images.transpose(0, 3, 1, 2)"),
        ({"train_images": np.zeros((60, 3, 8, 8), np.int64)}, "train_images has dtype int64; give uint8 from 0 to 255"),
        ({"train_images": np.zeros((60, 3, 9, 9), np.uint8)}, "uint8 of shape (3, 9, 9) in train and uint8 of shape (3, 8, 8)"),
        ({"train_images": np.zeros((0, 3, 8, 8), np.uint8)}, "train_images has no images: its shape is (0, 3, 8, 8)"),
        ({"test_images": np.zeros((0, 3, 8, 8), np.uint8)}, "test_images has no images: its shape is (0, 3, 8, 8)"),
        ({"test_labels": np.r_[7, 5, np.zeros(18, int)]}, "test_labels has 5, 7, but train_labels has not; train on every"),
        ({"test_labels": np.arange(20)}, "test_labels has 4, 5, 6, 7, 8 …, but train_labels has not"),
        ({"train_images": np.array([np.zeros(2), np.zeros(3)], object)}, "holds arrays of Python objects; give arrays of num"),
        ({"test_images": np.full((20, 3, 8, 8), np.nan)}, "test_images has numbers that are not finite"),
        ({"test_labels": np.zeros(3, int)}, "test_labels has dtype int64 and shape (3,) for 20 images"),
        ({"test_labels": np.zeros(20)}, "test_labels has dtype float64 and shape (20,) for 20 images"),
        ({"train_labels": np.zeros((60, 1), int)}, "shape (60, 1) for 60 images; give integers of shape (60,)"),
        ({"test_labels": np.full(20, -1)}, "test_labels goes from -1 to -1; classes are numbered from 0"),
        ({"train_labels": np.full(60, 2**32 + 1)}, "train_labels goes from 4294967297 to 4294967297"),
        ({"train_labels": np.r_[10**8, np.zeros(59, int)]}, "labels go up to 100000000, for 60 images in train"),
        ({"train_images": np.zeros((60, 0, 8), np.uint8)}, "train_images has shape (60, 0, 8)"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(folder, changes, reason):
    np.savez(folder / "leaves.npz", **broken(**changes))
    code, out, error = run_command("run", "leaves/mlp", "-a", "pc_se")
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert reason in error
    assert not out
    (status,) = (status for status in pcx.data.status() if status.name == "leaves")
    assert (status.present, status.state, status.folder) == (False, "unusable", folder)
    assert reason in status.reason


def one_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def damaged(place: int) -> bytes:
    """A compressed archive with zeros somewhere."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays())
    content = bytearray(file.getvalue())
    content[place : place + 280] = bytes(280)
    return bytes(content)


CONTENTS = [b"", b"not a zip file", b"PK\x03\x04 half of one", one_array(), damaged(60), damaged(120), damaged(2000)]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_a_file_that_is_no_archive_is_refused(folder, content):
    (folder / "leaves.npz").write_bytes(content)
    status = next(status for status in pcx.data.status() if status.name == "leaves")
    assert (status.present, status.state) == (False, "damaged")
    with pytest.raises(pcx.data.DataError, match=r"leaves\.npz is no file of numpy\.savez") as caught:
        pcx.data.load("leaves")
    assert "pickle" not in str(caught.value)  # nobody should trust a damaged file


def test_own_files_never_hide_a_known_set_and_are_not_downloaded(folder):
    np.savez(folder / "digits.npz", **arrays())
    assert pcx.data.load("digits").test.images.shape == (359, 1, 8, 8)
    assert pcx.data.names().count("digits") == 1
    np.savez(folder / "leaves.npz", **arrays())
    with pytest.raises(pcx.data.DataError, match=r"leaves needs no download: it is here, .*leaves\.npz"):
        pcx.data.fetch("leaves")


def test_a_run_on_other_data_of_the_same_name_is_refused(folder):
    """Finished or not; and the record says which data they were."""
    few = ("--set", "batch=16", "width=8", "--out", "run")
    for changed in (False, True):
        np.savez(folder / "leaves.npz", **arrays(60 + 4 * changed))
        code, _, error = run_command("run", "leaves/mlp", "-a", "bp_se", "--epochs", "1", *few)
        assert code == 2 * changed, error
    assert error == "error: run holds a run on other data, of the name leaves as well; choose another --out.\n"
    (kept,) = map(json.loads, (folder / "results" / "records.jsonl").read_text().splitlines())
    assert kept["data"] == json.loads((folder / "run" / "config.json").read_text())["data"]
    assert kept["data"] != pcx.data.load("leaves").checksum
    np.savez(folder / "leaves.npz", **arrays())
    assert kept["data"] == pcx.data.load("leaves").checksum


def test_a_search_on_other_data_of_the_same_name_is_refused(folder):
    few = ("--trials", "1", "--epochs", "1", "--out", "found", "--set", "batch=16", "width=8")
    for changed in (False, True):
        np.savez(folder / "leaves.npz", **arrays(60 + 4 * changed))
        code, _, error = run_command("search", "leaves/mlp", "-a", "bp_se", *few)
        assert code == 2 * changed, error
    assert "was made with other data of the name leaves" in error


def test_a_file_with_the_name_of_a_known_set_is_not_looked_at(folder):
    np.savez(folder / "mnist.npz", **arrays())
    with pytest.raises(pcx.data.DataError, match=r"mnist\.npz is not looked at, as mnist is the name of a known set"):
        pcx.data.load("mnist", root=folder)
