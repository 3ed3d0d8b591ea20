"""Data sets from small files in the published formats, the cache of decoded arrays, and the splits."""

import gzip
import hashlib
import http.server
import io
import json
import re
import subprocess
import sys
import tarfile
import threading
import zipfile

import numpy as np
import pytest
from helpers import untyped
from PIL import Image

from pcx import data
from pcx.data import cache, formats
from pcx.data.sources import SOURCES

RANDOM = np.random.default_rng(0)
COUNTS = {"train": 6, "test": 4}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty $PCX_DATA, and caches that lie beside it."""
    monkeypatch.setenv("PCX_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PCX_CACHE", str(tmp_path / "decoded"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "platform"))
    return tmp_path / "data"


@pytest.fixture
def change(monkeypatch):
    """Other counts and checksums for one source, as small test files need them."""

    def change(name, **fields):
        monkeypatch.setitem(SOURCES, name, SOURCES[name]._replace(**{"counts": COUNTS, "digests": {}, **fields}))

    return change


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def idx_files(train="train", test="t10k", lowest=0):
    files = {}
    for prefix, count in ((train, 6), (test, 4)):
        files[f"{prefix}-images-idx3-ubyte"] = RANDOM.integers(0, 256, (count, 28, 28), np.uint8)
        files[f"{prefix}-labels-idx1-ubyte"] = (np.arange(count) + lowest).astype(np.uint8)
    return files


def md5(content):
    return "md5:" + hashlib.md5(content).hexdigest()


@pytest.mark.parametrize("folder", ["", "raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_plain_and_gzipped(root, change, folder, packed):
    change("mnist")
    files = idx_files()
    for name, array in files.items():
        path = root / "mnist" / folder / (name + ".gz" * packed)
        write(path, gzip.compress(idx(array)) if packed else idx(array))
    mnist = data.load("mnist")
    assert mnist.train is not None
    np.testing.assert_array_equal(mnist.train.images, files["train-images-idx3-ubyte"][:, None])
    np.testing.assert_array_equal(mnist.train.labels, np.arange(6))
    np.testing.assert_array_equal(mnist.test.images, files["t10k-images-idx3-ubyte"][:, None])
    assert mnist.train.images.dtype == np.uint8
    assert mnist.train.labels.dtype == np.int32
    assert (len(mnist.train), len(mnist.test), mnist.classes, mnist.class_names[3]) == (6, 4, 10, "3")


def test_root_is_looked_at_alone(root, change, tmp_path):
    change("kmnist")
    for place, value in ((root, 1), (tmp_path / "other", 2)):
        write(place / "kmnist/t10k-images-idx3-ubyte", idx(np.full((4, 28, 28), value, np.uint8)))
        write(place / "kmnist/t10k-labels-idx1-ubyte", idx(np.zeros(4, np.uint8)))
    assert data.load("kmnist").test.images.max() == 1
    assert data.load("kmnist", root=tmp_path / "other").test.images.max() == 2
    with pytest.raises(data.DataError, match=r"looked in \S*nowhere/kmnist for"):
        data.load("kmnist", root=str(tmp_path / "nowhere"))


def test_train_is_none_where_only_the_test_files_of_kmnist_are_here(root, change):
    change("kmnist")
    change("mnist")
    for name, array in idx_files().items():
        if name.startswith("t10k"):
            write(root / "kmnist" / name, idx(array))
            write(root / "mnist" / name, idx(array))
    assert data.load("kmnist").train is None
    assert len(data.load("kmnist").test) == 4
    with pytest.raises(data.DataError, match="mnist is not here"):
        data.load("mnist")


def test_emnist_letters_stand_upright_and_count_from_zero(root, change):
    change("emnist")
    files = idx_files("emnist-letters-train", "emnist-letters-test", lowest=1)
    packed = {name + ".gz": gzip.compress(idx(array)) for name, array in files.items()}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in packed.items():
            file.writestr("gzip/" + name, content)
    write(root / "emnist/gzip.zip", archive.getvalue())
    from_archive = data.load("emnist")
    for name, content in packed.items():
        write(root / "emnist/gzip" / name, content)
    for emnist in (from_archive, data.load("emnist")):
        expected = files["emnist-letters-train-images-idx3-ubyte"]
        np.testing.assert_array_equal(emnist.train.images[2, 0], expected[2].T)
        np.testing.assert_array_equal(emnist.test.labels, [0, 1, 2, 3])
        assert emnist.classes == 26
        assert emnist.class_names[0] == "a"


def cifar_records(count, label_bytes):
    labels = RANDOM.integers(0, 10, (count, label_bytes), np.uint8)
    images = RANDOM.integers(0, 256, (count, 3, 32, 32), np.uint8)
    return images, labels, np.concatenate([labels, images.reshape(count, -1)], axis=1).tobytes()


def tar(files):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return held.getvalue()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_folder_and_archive(root, change, name, packed):
    source, label_bytes = SOURCES[name], 2 if name == "cifar100" else 1
    made = {file: cifar_records(3, label_bytes) for file in source.files.values()}
    files = {f"{source.inside}/{file}": content for file, (_, _, content) in made.items()}
    archive = tar({f"{source.inside}/readme.html": b"no data", **dict(reversed(files.items()))})
    digests = {file: md5(content) for file, (_, _, content) in made.items()} | {source.archive: md5(archive)}
    change(name, digests=digests, counts={"train": 3 * (len(files) - 1), "test": 3})
    for path, content in {source.archive: archive}.items() if packed else files.items():
        write(root / name / path, content)
    loaded = data.load(name)
    for split in ("train", "test"):
        parts = [made[file] for role, file in source.files.items() if role.startswith(split)]
        np.testing.assert_array_equal(getattr(loaded, split).images, np.concatenate([images for images, _, _ in parts]))
        np.testing.assert_array_equal(getattr(loaded, split).labels, np.concatenate([labels[:, -1] for _, labels, _ in parts]))
    assert loaded.classes == len(set(loaded.class_names)) == (100 if name == "cifar100" else 10)


def jpeg(value, size=(64, 64), mode="RGB"):
    held = io.BytesIO()
    Image.new(mode, size, value).save(held, "JPEG")
    return held.getvalue()


def colour(number):
    return (10 * number, 100, 250 - 10 * number)


def tiny_files():
    """Two classes, listed in another order than the alphabet's, with images whose numbers have one and two digits."""
    files = {"wnids.txt": b"n02\nn01\n", "words.txt": b"n01\tgoldfish\nn02\tnewt, eft\nn03\tother\n"}
    for wnid, number, value in (("n01", 10, 5), ("n01", 2, 4), ("n02", 0, 1), ("n02", 11, 3), ("n02", 9, 2)):
        files[f"train/{wnid}/images/{wnid}_{number}.JPEG"] = jpeg(colour(value))
    files["train/n01/images/n01_11.JPEG"] = jpeg(60, mode="L")
    files["train/n01/n01_boxes.txt"] = b"n01_2.JPEG\t0\t0\t1\t1\n"
    files["val/val_annotations.txt"] = b"".join(f"val_{i}.JPEG\tn0{1 + i % 2}\t0\t0\t9\t9\n".encode() for i in (3, 10, 0, 2))
    files.update({f"val/images/val_{i}.JPEG": jpeg(colour(i)) for i in (0, 2, 3, 10)})
    files["test/images/test_0.JPEG"] = jpeg(colour(20))
    return files


def write_tree(place, folder, files, packed):
    if packed:
        place.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(place / (folder + ".zip"), "w") as archive:
            archive.mkdir(folder)
            for name, content in files.items():
                archive.writestr(f"{folder}/{name}", content)
    else:
        for name, content in files.items():
            write(place / folder / name, content)


@pytest.mark.parametrize("packed", [False, True])
def test_tinyimagenet_folder_and_zip(root, change, packed):
    change("tinyimagenet")
    write_tree(root / "tinyimagenet", "tiny-imagenet-200", tiny_files(), packed)
    tiny = data.load("tinyimagenet")
    assert tiny.class_names == ("newt, eft", "goldfish")
    assert tiny.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert tiny.test.labels.tolist() == [1, 1, 0, 1]
    expected = np.array([*(colour(v) for v in (1, 2, 3, 4, 5)), (60, 60, 60)])
    assert np.abs(tiny.train.images.mean(axis=(2, 3)) - expected).max() < 3  # what JPEG does to a plain colour
    assert np.abs(tiny.test.images.mean(axis=(2, 3)) - np.array([colour(v) for v in (0, 2, 3, 10)])).max() < 3
    assert tiny.train.images.shape == (6, 3, 64, 64)


def test_a_folder_of_images_that_is_not_whole_is_refused(root, change):
    change("tinyimagenet", counts={"train": 7, "test": 4})
    files = tiny_files()
    write_tree(root / "tinyimagenet", "tiny-imagenet-200", files, packed=False)
    with pytest.raises(data.DataError, match="holds 6 train images of tinyimagenet where 7 are published; finish unpacking"):
        data.load("tinyimagenet")
    change("tinyimagenet")
    broken = write(root / "tinyimagenet/tiny-imagenet-200/val/images/val_2.JPEG", files["val/images/val_2.JPEG"][:-300])
    with pytest.raises(data.DataError, match=f"{broken} is corrupt"):
        data.load("tinyimagenet")
    (root / "tinyimagenet/tiny-imagenet-200/wnids.txt").unlink()
    with pytest.raises(data.DataError, match=r"does not hold wnids\.txt"):
        data.load("tinyimagenet")


@pytest.mark.parametrize("packed", [False, True])
def test_celeba_folder_and_zip(root, change, packed):
    change("celeba", counts={})
    files = {f"{number:06d}.jpg": jpeg(colour(number), size=(10, 14)) for number in range(20, 0, -1)}
    write_tree(root / "celeba", "img_align_celeba", files, packed)
    celeba = data.load("celeba")
    assert (celeba.classes, celeba.class_names, celeba.test.labels) == (0, (), None)
    assert (celeba.train.images.shape, celeba.test.images.shape) == ((18, 3, 14, 10), (2, 3, 14, 10))
    everything = np.concatenate([celeba.train.images, celeba.test.images]).mean(axis=(2, 3))
    assert np.abs(everything - np.array([colour(number) for number in range(1, 21)]).clip(0, 255)).max() < 3


def test_images_of_unequal_size_are_named(root, change):
    change("celeba", counts={})
    files = {"000001.jpg": jpeg(9), "000002.jpg": jpeg(9, size=(63, 64)), "000003.jpg": jpeg(9)}
    write_tree(root / "celeba", "img_align_celeba", files, packed=False)
    with pytest.raises(data.DataError, match=r"000002\.jpg is \(64, 63\) pixels high and wide where others are \(64, 64\)"):
        data.load("celeba")


def test_missing_data_gets_one_sentence(root, tmp_path):
    with pytest.raises(data.DataError) as caught:
        data.load("mnist")
    assert str(caught.value) == (
        f"mnist is not here: looked in {root}/mnist and in {tmp_path}/platform/pcx/mnist for train-images-idx3-ubyte … "
        "t10k-labels-idx1-ubyte (plain or .gz); run `pcx data get mnist`, or set PCX_DATA to a folder that holds mnist/."
    )
    with pytest.raises(data.DataError, match=r"img_align_celeba\.zip from https://mmlab\S+ into \S+/celeba\.$"):
        data.load("celeba")
    with pytest.raises(data.DataError, match=r"no data set 'fashonmnist' \(.* fashonmnist.npz .*\); near: fashionmnist, "):
        data.load("fashonmnist")


def test_data_can_be_looked_for_without_being_read(root, change):
    """Files count as they are; absent ones are refused as by `load`."""
    with pytest.raises(data.DataError, match="mnist is not here: looked in"):
        data.look_for("mnist")
    with pytest.raises(data.DataError, match="there is no data set 'mnits'"):
        data.look_for("mnits")
    for name in idx_files():
        write(root / "mnist" / name, b"never read")
    data.look_for("mnist")
    data.look_for("digits")
    write(root / "mine.npz", b"never read")
    data.look_for("mine")


def test_a_corrupt_file_is_named_with_both_checksums_and_not_used(root, tmp_path):
    files = {name: idx(array) for name, array in idx_files().items()}
    for name, content in files.items():
        write(root / "mnist" / name, content)
    with pytest.raises(data.DataError) as caught:
        data.load("mnist")
    message = str(caught.value)
    assert message.startswith(f"{root}/mnist/train-images-idx3-ubyte is corrupt and was not used")
    assert "expected checksum md5:6bbc9ace898e44ae57da46a324031adb" in message
    assert f"found {md5(files['train-images-idx3-ubyte'])};" in message
    assert not (tmp_path / "decoded").exists()


def test_a_gzip_file_counts_by_its_content_too(root, change):
    files = {name: idx(array) for name, array in idx_files().items()}
    change("mnist", digests={name: md5(content) for name, content in files.items()})
    for name, content in files.items():
        write(root / "mnist" / (name + ".gz"), gzip.compress(content, compresslevel=1))
    assert len(data.load("mnist").test) == 4
    short = write(root / "mnist/t10k-images-idx3-ubyte.gz", gzip.compress(files["t10k-images-idx3-ubyte"])[:-20])
    with pytest.raises(data.DataError, match=rf"{short} is corrupt .* of the unpacked content md5:\w+, found no complete gzip"):
        data.load("mnist")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x08\x01\0\0\0\x05abc", "header promises 5 values and 3 follow"),
        (b"\0\0\x0d\x01\0\0\0\x01abcd", "not an idx file of unsigned bytes: it starts with 00 00 0d 01"),
        (b"", "it starts with nothing"),
        (idx(np.zeros(5, np.uint8)), "holds 5 labels from 0 to 0 for 4 test images"),
        (idx(np.full(4, 10, np.uint8)), "holds 4 labels from 10 to 10 for 4 test images in 10 classes"),
    ],
)
def test_files_without_a_checksum_are_checked_by_their_form(root, change, content, message):
    change("notmnist")
    write(root / "notmnist/t10k-images-idx3-ubyte", idx(np.zeros((4, 28, 28), np.uint8)))
    write(root / "notmnist/t10k-labels-idx1-ubyte", content)
    with pytest.raises(data.DataError, match=message):
        data.load("notmnist")


def test_cifar_with_half_a_record_is_refused():
    with pytest.raises(data.DataError, match="x is corrupt: 3000 bytes are no whole number of records of 3073 bytes"):
        formats.parse_cifar(bytes(3000), 1, "x")


@pytest.fixture
def kmnist(root, change):
    """A small data set on disk: its pixels."""
    change("kmnist")
    files = idx_files()
    for name, array in files.items():
        write(root / "kmnist" / name, idx(array))
    return files["t10k-images-idx3-ubyte"][:, None]


def cache_folder(tmp_path):
    (folder,) = (tmp_path / "decoded").iterdir()
    return folder


def test_decoding_happens_once(kmnist, tmp_path, monkeypatch):
    data.load("kmnist")
    note = json.loads((cache_folder(tmp_path) / "about.json").read_text())
    assert {source["name"] for source in note["sources"]} == set(SOURCES["kmnist"].files.values())
    assert note["arrays"]["test_images"]["sha256"] == hashlib.sha256(kmnist.tobytes()).hexdigest()
    monkeypatch.setattr(formats, "decode", lambda found: pytest.fail("decoded again"))
    np.testing.assert_array_equal(data.load("kmnist").test.images, kmnist)


def flip_last_byte(path):
    content = path.read_bytes()
    path.unlink()  # not in place: an earlier load still maps the old file
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def cut(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-100])


DAMAGE = {
    "changed": lambda folder: flip_last_byte(folder / "test_images.npy"),
    "cut": lambda folder: cut(folder / "test_images.npy"),
    "empty": lambda folder: (folder / "test_images.npy").write_bytes(b""),
    "gone": lambda folder: (folder / "test_images.npy").unlink(),
    "no json": lambda folder: (folder / "about.json").write_text("{"),
    "other json": lambda folder: (folder / "about.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_again(kmnist, tmp_path, damage):
    data.load("kmnist")
    folder = cache_folder(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    DAMAGE[damage](folder)
    np.testing.assert_array_equal(data.load("kmnist").test.images, kmnist)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_changed_files_are_decoded_again(kmnist, root):
    data.load("kmnist")
    write(root / "kmnist/t10k-images-idx3-ubyte", idx(np.full((4, 28, 28), 9, np.uint8)))
    assert (np.asarray(data.load("kmnist").test.images) == 9).all()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write(tmp_path / "folder/array.npy", b"old")

    def fail():
        with cache.replacing(path) as file:
            file.write(b"half of the n")
            assert path.read_bytes() == b"old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == {"array.npy": b"old"}
    with cache.replacing(path) as file:
        file.write(b"new")
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == {"array.npy": b"new"}


def test_decoding_that_fails_leaves_no_cache(root, change, tmp_path):
    change("celeba", counts={})
    files = {"000001.jpg": jpeg(9), "000002.jpg": b"no image", "000003.jpg": jpeg(9)}
    write_tree(root / "celeba", "img_align_celeba", files, packed=False)
    with pytest.raises(data.DataError, match=r"000002\.jpg is corrupt"):
        data.load("celeba")
    assert list(cache_folder(tmp_path).iterdir()) == []
    write(root / "celeba/img_align_celeba/000002.jpg", jpeg(9))
    assert len(data.load("celeba").train) == 2


def test_decoding_twice_at_once_is_harmless(kmnist, tmp_path, monkeypatch):
    both, decode, results = threading.Barrier(2, timeout=20), formats.decode, []

    def together(found):
        both.wait()
        return decode(found)

    monkeypatch.setattr(formats, "decode", together)
    threads = [threading.Thread(target=lambda: results.append(data.load("kmnist").test.images)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for images in results:
        np.testing.assert_array_equal(images, kmnist)
    assert not [path for path in cache_folder(tmp_path).iterdir() if path.name.startswith(".")]


def test_a_cache_that_cannot_be_written_says_what_to_do(kmnist, tmp_path, monkeypatch):
    monkeypatch.setenv("PCX_CACHE", str(write(tmp_path / "a file", b"")))
    with pytest.raises(data.DataError, match=r"decoded kmnist could not be written to .* set PCX_CACHE"):
        data.load("kmnist")


def test_status_says_what_is_here_and_why_the_rest_is_not(kmnist, root, tmp_path):
    write(root / "cifar100/cifar-100-binary.tar.gz", b"cut off")
    for _ in range(2):  # before and after decoding
        status = {entry.name: entry for entry in data.status()}
        assert list(status) == data.names()
        assert status["kmnist"].present
        assert status["kmnist"].splits == {"train": 6, "test": 4}
        assert status["kmnist"].bytes == 10 * 28 * 28 + 10 + 2 * 16 + 2 * 8
        assert status["kmnist"].folder == root / "kmnist"
        assert not status["cifar10"].present
        assert "cifar10 is not here" in status["cifar10"].reason
        assert status["cifar10"].places == (root / "cifar10", tmp_path / "platform/pcx/cifar10")
        assert "expected checksum md5:03b5dce01913d631647c71ecec9e9cb8" in status["cifar100"].reason
        states = {name: status[name].state for name in ("kmnist", "cifar10", "cifar100")}
        assert states == {"kmnist": "here", "cifar10": "not here", "cifar100": "damaged"}
        assert status["digits"].splits == {"train": 1438, "test": 359}
        data.load("kmnist")


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (np.zeros(5), r"dtype float64; .* labels\.astype\(np\.int32\)"),
        (np.zeros(4, np.int32), r"shape \(4,\) for 5 images"),
        (np.zeros((5, 10), np.int32), r"shape \(5, 10\) for 5 images"),
    ],
)
def test_labels_that_number_no_classes_are_refused(labels, told):
    with untyped(), pytest.raises(data.DataError, match=told):
        data.Split(np.zeros((5, 1, 2, 2), np.uint8), labels)


def test_validation_is_the_last_part_of_a_fixed_permutation():
    split = data.Split(np.arange(50, dtype=np.uint8).reshape(50, 1, 1, 1), np.arange(50, dtype=np.int32))
    order = np.random.Generator(np.random.PCG64(data.VALIDATION_SEED)).permutation(50)
    train, validation = data.split_validation(split, 0.1)
    np.testing.assert_array_equal(validation.labels, order[-5:])
    np.testing.assert_array_equal(train.labels, order[:-5])
    np.testing.assert_array_equal(train.images.ravel(), train.labels)
    unlabelled = data.split_validation(data.Split(split.images, None), 0.1)[1]
    assert unlabelled.labels is None
    np.testing.assert_array_equal(unlabelled.images, validation.images)
    for fraction in (0.0, 1.0, 0.001, -0.5):
        with pytest.raises(data.DataError, match="leaves one part of 50 samples empty"):
            data.split_validation(split, fraction)


def rows(images):
    return sorted(map(tuple, np.asarray(images).reshape(len(images), -1).tolist()))


@pytest.mark.parametrize(("name", "tests"), [("iris", [10, 10, 10]), ("digits", None)])
def test_sets_of_scikit_learn_are_whole(name, tests):
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    loaded = data.load(name)
    labelled = [np.column_stack([s.images.reshape(len(s), -1), s.labels]) for s in (loaded.train, loaded.test)]
    assert rows(np.concatenate(labelled)) == rows(np.column_stack([bunch.data.astype(np.float32), bunch.target]))
    assert loaded.classes == len(loaded.class_names) == len(set(bunch.target))
    assert tests is None or np.bincount(loaded.test.labels).tolist() == tests
    np.testing.assert_array_equal(data.load(name).test.images, loaded.test.images)


@pytest.mark.parametrize(("name", "spread"), [("two_moons", 0.2), ("two_circles", 0.02)])
def test_points_lie_around_their_curves(name, spread):
    loaded = data.load(name)
    for split in (loaded.train, loaded.test):
        assert split.images.shape == (1024, 2)
        assert split.images.dtype == np.float32
        assert np.bincount(split.labels).tolist() == [512, 512]
        centre = np.array([[0, 0], [1, 0.5]])[split.labels] if name == "two_moons" else np.zeros(2)
        radius = np.array([1, 1])[split.labels] if name == "two_moons" else np.array([1, 0.5])[split.labels]
        distance = np.linalg.norm(split.images - centre, axis=1) - radius
        assert abs(distance.std() / spread - 1) < 0.1
    assert not set(rows(loaded.train.images)) & set(rows(loaded.test.images))
    np.testing.assert_array_equal(data.load(name).train.images, loaded.train.images)


def test_importing_stays_light():
    heavy = "sklearn", "pooch", "requests", "PIL", "tqdm"
    code = f"import sys, pcx.data; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_names_are_those_of_the_specification():
    wanted = "mnist fashionmnist kmnist emnist notmnist cifar10 cifar100 tinyimagenet celeba iris two_moons two_circles digits"
    assert data.names() == wanted.split()
    for name in set(data.names()) - set(SOURCES):
        assert data.load(name).name == name
    for source in SOURCES.values():
        assert all(re.fullmatch(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", digest) for digest in source.digests.values())
        assert set(source.downloads) <= set(source.digests) | {name + ".gz" for name in source.digests}


class Server(http.server.ThreadingHTTPServer):
    """A loopback host of files. It can break off after some bytes, ignore ranges, and remembers what it was asked for."""

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.break_off, self.ranges, self.asked = files, 0, True, []

    def address(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        content, asked = self.server.files.get(self.path[1:]), self.headers.get("Range", "")
        self.server.asked.append((self.path[1:], asked))
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if content is None or (asked and self.server.ranges and start >= len(content)):
            return self.send_error(404 if content is None else 416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : self.server.break_off or None])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(change):
    """A host of CIFAR-100, of which the source knows the right checksum."""
    _, _, train = cifar_records(6, 2)
    _, _, test = cifar_records(4, 2)
    archive = tar({"cifar-100-binary/train.bin": train, "cifar-100-binary/test.bin": test})
    name = "cifar-100-binary.tar.gz"
    host = Server({name: archive})
    change("cifar100", digests={name: md5(archive)}, downloads={name: (host.address(name),)})
    thread = threading.Thread(target=host.serve_forever, args=(0.02,))
    thread.start()
    yield host
    host.shutdown()
    host.server_close()
    thread.join()


ARCHIVE = "cifar-100-binary.tar.gz"


def left(root):
    return sorted(path.name for path in (root / "cifar100").iterdir())


def test_fetch_downloads_once(server, root, capfd):
    assert data.fetch("cifar100") == root / "cifar100"
    assert "100%" in capfd.readouterr().err
    assert left(root) == [ARCHIVE]
    assert len(data.load("cifar100").train) == 6
    assert data.fetch("cifar100", progress=False) == root / "cifar100"
    assert capfd.readouterr().err == ""
    assert server.asked == [(ARCHIVE, "")]


def test_fetch_into_root(server, tmp_path):
    assert data.fetch("cifar100", root=tmp_path / "elsewhere", progress=False) == tmp_path / "elsewhere/cifar100"
    assert len(data.load("cifar100", root=tmp_path / "elsewhere").test) == 4


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_broke_off_goes_on(server, root, ranges):
    server.break_off, server.ranges = 20_000, ranges
    with pytest.raises(
        data.DataError, match=r"stopped after \d+ bytes \(it broke off\); run it again to go on from there\.$"
    ) as caught:
        data.fetch("cifar100", progress=False)
    assert left(root) == [ARCHIVE + ".part"]
    size = (root / "cifar100" / (ARCHIVE + ".part")).stat().st_size
    assert 0 < size <= 20_000
    assert f"after {size} bytes" in str(caught.value)
    with pytest.raises(data.DataError, match="cifar100 is not here"):
        data.load("cifar100")
    server.break_off = 0
    data.fetch("cifar100", progress=False)
    assert server.asked == [(ARCHIVE, ""), (ARCHIVE, f"bytes={size}-")]
    assert left(root) == [ARCHIVE]
    assert len(data.load("cifar100").train) == 6


@pytest.mark.parametrize("rest", ["wrong start", "whole", "too long"])
def test_a_leftover_part_that_does_not_help_is_replaced(server, root, rest):
    content = server.files[ARCHIVE]
    part = {"wrong start": b"x" * 100, "whole": content, "too long": content + b"x"}[rest]
    write(root / "cifar100" / (ARCHIVE + ".part"), part)
    data.fetch("cifar100", progress=False)
    assert server.asked == [(ARCHIVE, f"bytes={len(part)}-"), (ARCHIVE, "")]
    assert (root / "cifar100" / ARCHIVE).read_bytes() == content


@pytest.mark.parametrize("harm", ["tampered", "truncated"])
def test_a_wrong_file_is_discarded_with_both_checksums(server, root, harm):
    good = server.files[ARCHIVE]
    bad = good[:-1] + bytes([good[-1] ^ 1]) if harm == "tampered" else good[:-10]
    server.files[ARCHIVE] = bad
    with pytest.raises(data.DataError) as caught:
        data.fetch("cifar100", progress=False)
    address = server.address(ARCHIVE)
    assert str(caught.value) == f"{ARCHIVE} from {address} was discarded: expected checksum {md5(good)}, found {md5(bad)}."
    assert not root.exists()
    with pytest.raises(data.DataError, match="cifar100 is not here"):
        data.load("cifar100")


def test_a_corrupt_file_on_disk_is_downloaded_again(server, root):
    write(root / "cifar100" / ARCHIVE, b"cut off")
    with pytest.raises(data.DataError, match=f"{ARCHIVE} is corrupt and was not used"):
        data.load("cifar100")
    data.fetch("cifar100", progress=False)
    assert len(data.load("cifar100").train) == 6


def test_the_second_address_helps_where_the_first_fails(server, root, change):
    known = SOURCES["cifar100"]
    change("cifar100", digests=known.digests, downloads={ARCHIVE: (server.address("gone"), server.address(ARCHIVE))})
    data.fetch("cifar100", progress=False)
    assert left(root) == [ARCHIVE]
    del server.files[ARCHIVE]
    with pytest.raises(data.DataError, match=r"/gone could not be downloaded \(404 .*; \S+gz could not be downloaded \(404"):
        data.fetch("cifar100", root=root / "other", progress=False)


def test_a_host_that_is_not_there(change, root):
    change("cifar100", digests={ARCHIVE: md5(b"")}, downloads={ARCHIVE: ("http://127.0.0.1:9/x",)})
    with pytest.raises(data.DataError) as caught:
        data.fetch("cifar100", progress=False)
    assert str(caught.value) == "http://127.0.0.1:9/x could not be downloaded (no connection)."
    assert not root.exists()  # no folder is left behind
    root.mkdir()
    with pytest.raises(data.DataError):
        data.fetch("cifar100", progress=False)
    assert list(root.iterdir()) == []


def test_missing_idx_files_are_fetched_and_checked_by_their_content(server, root, change):
    """As for notMNIST: the checksums of the unpacked files are known, one file is here already."""
    files = {name: idx(array) for name, array in idx_files().items() if name.startswith("t10k")}
    server.files |= {name + ".gz": gzip.compress(content) for name, content in files.items()}
    downloads = {name + ".gz": (server.address(name + ".gz"),) for name in files}
    change("notmnist", digests={name: md5(content) for name, content in files.items()}, downloads=downloads)
    write(root / "notmnist/t10k-labels-idx1-ubyte", files["t10k-labels-idx1-ubyte"])
    data.fetch("notmnist", progress=False)
    assert [name for name, _ in server.asked] == ["t10k-images-idx3-ubyte.gz"]
    assert len(data.load("notmnist").test) == 4
    server.files["t10k-images-idx3-ubyte.gz"] = gzip.compress(b"other")
    with pytest.raises(
        data.DataError, match=rf"unpacked content {md5(files['t10k-images-idx3-ubyte'])}, found {md5(b'other')}"
    ):
        data.fetch("notmnist", root=root / "other", progress=False)


def test_what_cannot_be_fetched_says_so(root, change):
    with pytest.raises(data.DataError, match=r"download img_align_celeba\.zip from https://mmlab"):
        data.fetch("celeba")
    change("celeba", counts={})
    write_tree(root / "celeba", "img_align_celeba", {"1.jpg": jpeg(9), "2.jpg": jpeg(9)}, packed=False)
    assert data.fetch("celeba") == root / "celeba"
    with pytest.raises(data.DataError, match="digits needs no download: it comes with scikit-learn"):
        data.fetch("digits")
    with pytest.raises(data.DataError, match=r"there is no data set 'imagenet' .*; near: tinyimagenet"):
        data.fetch("imagenet")
