"""Readers of JPEG collections, a folder or a zip: Tiny ImageNet and CelebA."""

import io
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pcx.data._types import DataError, Decoded, Stream, stream
from pcx.data.store import Found

CELEBA_SIZE, CELEBA_TRAIN, CELEBA_TEST_START = 202_599, 162_770, 182_637  # the official partition, by image number
_PIECE = 1024  # images decoded at a time


class Tree(NamedTuple):
    """Files by their path below the collection's own folder, on disk or in a zip."""

    where: str
    names: list[str]
    read: Callable[[str], bytes]

    def text(self, name: str) -> list[str]:
        """The lines of a text file."""
        if name not in self.names:
            raise DataError(f"{self.where} does not hold {name}; finish unpacking it, or remove it and download it again.")
        return self.read(name).decode().splitlines()


def open_tree(found: Found) -> Tree:
    """The files of a collection."""
    if found.archive is None:
        root = found.files["tree"]
        names = [os.path.join(os.path.relpath(folder, root), file) for folder, _, files in os.walk(root) for file in files]
        return Tree(str(root), [Path(name).as_posix() for name in names], lambda name: (root / name).read_bytes())
    archive, prefix = zipfile.ZipFile(found.archive), found.source.inside + "/"
    names = [name.removeprefix(prefix) for name in archive.namelist() if name.startswith(prefix) and not name.endswith("/")]
    return Tree(str(found.archive), names, lambda name: archive.read(prefix + name))


def decode_jpeg(data: bytes, where: str) -> np.ndarray:
    """Three channels, height, width; grey images become three equal channels."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for a file that is cut or no image
        raise DataError(f"{where} is corrupt: {error}.") from error


def jpeg_stream(tree: Tree, names: list[str], label: str) -> Stream:
    """The images with these names, decoded by as many threads as there are cores (Pillow decodes outside the lock)."""
    shape = decode_jpeg(tree.read(names[0]), f"{tree.where}/{names[0]}").shape

    def one(name: str) -> np.ndarray:
        image = decode_jpeg(tree.read(name), f"{tree.where}/{name}")
        if image.shape != shape:
            raise DataError(f"{tree.where}/{name} is {image.shape[1:]} pixels high and wide where others are {shape[1:]}.")
        return image

    def pieces() -> Iterator[np.ndarray]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for start in range(0, len(names), _PIECE):
                yield np.stack(list(pool.map(one, names[start : start + _PIECE])))
                _progress(f"{label}: decoded {min(start + _PIECE, len(names))} of {len(names)} images")
        _progress("\n")

    return Stream((len(names), *shape), np.dtype(np.uint8), pieces)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(line if line == "\n" else f"\r{line}")
        sys.stderr.flush()


def _number(name: str) -> int:
    """The number at the end of a file name: 17 of ``val_17.JPEG``."""
    digits = Path(name).stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1


def read_tinyimagenet(found: Found) -> Decoded:
    """Tiny ImageNet: classes in the order of wnids.txt; the validation images, by number, are the test set of the paper."""
    tree = open_tree(found)
    wnids = tree.text("wnids.txt")
    label = {wnid: number for number, wnid in enumerate(wnids)}
    words = dict(line.split("\t", 1) for line in tree.text("words.txt") if "\t" in line)
    validation = dict(line.split("\t")[:2] for line in tree.text("val/val_annotations.txt"))
    images = [name for name in tree.names if name.upper().endswith(".JPEG")]
    train = [(label[parts[1]], name) for name in images if (parts := name.split("/"))[0] == "train" and parts[1] in label]
    train.sort(key=lambda pair: (pair[0], _number(pair[1])))
    held = set(images)
    test = [(label[w], f"val/images/{name}") for name, w in validation.items() if f"val/images/{name}" in held]
    test.sort(key=lambda pair: _number(pair[1]))
    arrays = {}
    for split, pairs in (("train", train), ("test", test)):
        if not pairs:
            raise DataError(f"{tree.where} holds no {split} images; finish unpacking it, or remove it and download it again.")
        labels, names = zip(*pairs, strict=True)
        arrays[f"{split}_images"] = jpeg_stream(tree, list(names), f"tinyimagenet {split}")
        arrays[f"{split}_labels"] = stream(np.array(labels, np.int32))
    return Decoded(arrays, tuple(words.get(wnid, wnid) for wnid in wnids))


def read_celeba(found: Found) -> Decoded:
    """CelebA's aligned faces without labels: the official partition where all images are here, else the last tenth is test.

    The official validation images are in neither split.
    """
    tree = open_tree(found)
    names = sorted(name for name in tree.names if name.lower().endswith(".jpg"))
    if len(names) < 2:
        raise DataError(f"{tree.where} holds {len(names)} images (.jpg); two or more are needed.")
    held_out = max(1, len(names) // 10)
    complete = len(names) == CELEBA_SIZE
    parts = {
        "train": names[:CELEBA_TRAIN] if complete else names[:-held_out],
        "test": names[CELEBA_TEST_START:] if complete else names[-held_out:],
    }
    return Decoded({f"{split}_images": jpeg_stream(tree, part, f"celeba {split}") for split, part in parts.items()}, ())
