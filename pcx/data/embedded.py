"""The data sets that scikit-learn carries or makes: iris, two_moons, two_circles, digits."""

from collections.abc import Callable

import numpy as np

from pcx.data._types import DataSet, Split

POINTS = 1024  # in each split of two_moons and two_circles
_SPLIT_SEED, _TRAIN_SEED, _TEST_SEED = 0, 1, 2


def permutation(count: int, seed: int) -> np.ndarray:
    """A permutation that depends on nothing but its length and the seed."""
    return np.random.Generator(np.random.PCG64(seed)).permutation(count)


def _iris() -> DataSet:
    """Fisher's iris: 150 rows of 4 lengths in cm; of each class's fixed permutation the last 10 of 50 rows are the test set.

    A task that models the density of all 150 rows joins both splits.
    """
    from sklearn.datasets import load_iris

    bunch = load_iris()
    order = permutation(150, _SPLIT_SEED)
    rank = np.empty(150, int)
    for label in range(3):
        rank[order[bunch.target[order] == label]] = np.arange(50)
    train, test = (_take(bunch.data.astype(np.float32), bunch.target, part) for part in (rank < 40, rank >= 40))
    return DataSet("iris", train, test, 3, tuple(str(name) for name in bunch.target_names))


def _digits() -> DataSet:
    """The 1797 digits of 8 by 8 pixels with values 0 to 16; the last 20 % (359) of a fixed permutation are the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, order = bunch.images.astype(np.uint8)[:, None], permutation(len(bunch.target), _SPLIT_SEED)
    test = round(0.2 * len(order))
    train_split, test_split = (_take(images, bunch.target, part) for part in (order[:-test], order[-test:]))
    return DataSet("digits", train_split, test_split, 10, tuple("0123456789"))


def _two_moons() -> DataSet:
    """Two interleaving half circles with Gaussian noise of 0.2."""
    from sklearn.datasets import make_moons

    return _two("two_moons", lambda seed: make_moons(POINTS, noise=0.2, random_state=seed), ("upper", "lower"))


def _two_circles() -> DataSet:
    """A circle within another of twice its radius, with Gaussian noise of 0.02."""
    from sklearn.datasets import make_circles

    return _two("two_circles", lambda seed: make_circles(POINTS, noise=0.02, factor=0.5, random_state=seed), ("outer", "inner"))


def _two(name: str, make: Callable[[int], tuple[np.ndarray, np.ndarray]], class_names: tuple[str, ...]) -> DataSet:
    train, test = (_take(*make(seed), slice(None)) for seed in (_TRAIN_SEED, _TEST_SEED))
    return DataSet(name, train, test, 2, class_names)


def _take(images: np.ndarray, labels: np.ndarray, part: np.ndarray | slice) -> Split:
    kept = images if images.dtype == np.uint8 else images.astype(np.float32)
    return Split(kept[part], labels[part].astype(np.int32))


MAKE: dict[str, Callable[[], DataSet]] = {
    "iris": _iris,
    "two_moons": _two_moons,
    "two_circles": _two_circles,
    "digits": _digits,
}
