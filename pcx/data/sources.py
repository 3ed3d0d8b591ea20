"""Which files a data set is published as, their checksums, and where to download them.

Checksums: "torchvision" means the values in torchvision's ``datasets/*.py``; those of uncompressed idx files and CIFAR
binaries were computed from files whose archives match the published values.
"""

import string
from collections.abc import Mapping
from typing import NamedTuple


class Source(NamedTuple):
    """The published files of one data set.

    ``files`` maps a role to the name of an unpacked file or folder; ``archive`` holds all of them under ``inside``.
    ``downloads`` maps published file names to addresses, tried in turn, and ``digests`` file names to checksums.
    ``counts`` are the published numbers of samples; roles in ``optional`` may be absent.
    """

    name: str
    kind: str
    files: Mapping[str, str]
    counts: Mapping[str, int]
    digests: Mapping[str, str]
    downloads: Mapping[str, tuple[str, ...]]
    class_names: tuple[str, ...] = ()
    archive: str = ""
    inside: str = ""
    optional: tuple[str, ...] = ()
    by_hand: str = ""


def _idx(train: str, test: str) -> dict[str, str]:
    images, labels = "images-idx3-ubyte", "labels-idx1-ubyte"
    return {
        "train_images": f"{train}-{images}",
        "train_labels": f"{train}-{labels}",
        "test_images": f"{test}-{images}",
        "test_labels": f"{test}-{labels}",
    }


_MNIST_FILES = _idx("train", "t10k")
_MNIST_COUNTS = {"train": 60_000, "test": 10_000}
_CIFAR_COUNTS = {"train": 50_000, "test": 10_000}
_TRAIN = ("train_images", "train_labels")
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""


def _digests(packed: str, plain: str) -> dict[str, str]:
    """Checksums of the four idx files in the order of `_MNIST_FILES`, packed and plain; ``-`` where none is known."""
    files = [name + ending for ending in (".gz", "") for name in _MNIST_FILES.values()]
    named = zip(files, f"{packed} {plain}".split(), strict=True)
    return {name: f"md5:{digest}" for name, digest in named if digest != "-"}


def _packed(*addresses: str, roles: tuple[str, ...] = tuple(_MNIST_FILES)) -> dict[str, tuple[str, ...]]:
    names = [_MNIST_FILES[role] + ".gz" for role in roles]
    return {name: tuple(address + name for address in addresses) for name in names}


_ALL = [
    Source(
        "mnist",
        "idx",
        _MNIST_FILES,
        _MNIST_COUNTS,
        _digests(  # packed: torchvision
            "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
            "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c",
            "6bbc9ace898e44ae57da46a324031adb a25bea736e30d166cdddb491f175f624 "
            "2646ac647ad5339dbf082846283269ea 27ae3e4e09519cfbb04c329615203637",
        ),
        _packed("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        tuple(string.digits),
    ),
    Source(
        "fashionmnist",
        "idx",
        _MNIST_FILES,
        _MNIST_COUNTS,
        _digests(  # packed: torchvision
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
            "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310",
            "f4a8712d7a061bf5bd6d2ca38dc4d50a 9018921c3c673c538a1fc5bad174d6f9 "
            "8181f5470baa50b63fa0f6fddb340f0a 15d484375f8d13e6eb1aabb0c3f46965",
        ),
        _packed("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    Source(
        "kmnist",
        "idx",
        _MNIST_FILES,
        _MNIST_COUNTS,
        _digests(  # packed: torchvision; none is known for the plain train files
            "bdb82020997e1d708af4cf47b453dcf7 e144d726b3acfaa3e44228e80efcd344 "
            "5c965bf0a639b31b8f53240b1b52f4d7 7320c461ea6c1c855c0b718fb2a4b134",
            "- - bf305b8cd328700fbc17f5acbc2856d2 9f55f451c0988b028eccdf7d5cc265ab",
        ),
        _packed("http://codh.rois.ac.jp/kmnist/dataset/kmnist/"),
        ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        optional=_TRAIN,
    ),
    Source(
        "emnist",
        "emnist",
        _idx("emnist-letters-train", "emnist-letters-test"),
        {"train": 124_800, "test": 20_800},
        {"gzip.zip": "md5:58c8d27c78d21e728a6bc7b3cc06412e"},  # torchvision; none is known for the files inside
        {
            "gzip.zip": (
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
            )
        },
        tuple(string.ascii_lowercase),
        archive="gzip.zip",
        inside="gzip",
    ),
    # The sample in MNIST's format by D. Flanagan. No checksum is published: these two are of the copy that the project
    # uses; without one for the train files they are not downloaded, and where they lie only format and count are checked.
    Source(
        "notmnist",
        "idx",
        _MNIST_FILES,
        _MNIST_COUNTS,
        _digests("- - - -", "- - 1e78b07d677d6e4de2c8857bafff012e b10b3ef34b4e468313a7b24c216c6a53"),
        _packed("https://github.com/davidflanagan/notMNIST-to-MNIST/raw/master/", roles=("test_images", "test_labels")),
        tuple("ABCDEFGHIJ"),
        optional=_TRAIN,
    ),
    Source(
        "cifar10",
        "cifar",
        {**{f"train_{i}": f"data_batch_{i}.bin" for i in range(1, 6)}, "test": "test_batch.bin"},
        _CIFAR_COUNTS,
        {
            "cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530",  # the authors' page
            "data_batch_1.bin": "md5:5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "md5:5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "md5:942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "md5:ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "md5:53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "md5:803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        {"cifar-10-binary.tar.gz": ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)},
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        archive="cifar-10-binary.tar.gz",
        inside="cifar-10-batches-bin",
    ),
    Source(
        "cifar100",
        "cifar",
        {"train": "train.bin", "test": "test.bin"},
        _CIFAR_COUNTS,
        {
            "cifar-100-binary.tar.gz": "md5:03b5dce01913d631647c71ecec9e9cb8",  # the authors' page
            "train.bin": "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",  # torchvision-ruby
            "test.bin": "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
        {"cifar-100-binary.tar.gz": ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",)},
        tuple(_CIFAR100_CLASSES.split()),
        archive="cifar-100-binary.tar.gz",
        inside="cifar-100-binary",
    ),
    Source(
        "tinyimagenet",
        "tinyimagenet",
        {"tree": "tiny-imagenet-200"},
        {"train": 100_000, "test": 10_000},
        {"tiny-imagenet-200.zip": "md5:90528d7ca1a48142e341f4ef8d21d0de"},  # the value that public loaders agree on
        {"tiny-imagenet-200.zip": ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",)},
        archive="tiny-imagenet-200.zip",
        inside="tiny-imagenet-200",
    ),
    Source(
        "celeba",
        "celeba",
        {"tree": "img_align_celeba"},
        {},  # any number of images
        {"img_align_celeba.zip": "md5:00d2c5bc6d35e252742224ab0c1e8fcb"},  # torchvision
        {},
        archive="img_align_celeba.zip",
        inside="img_align_celeba",
        by_hand="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",  # its host asks for consent to the terms first
    ),
]
SOURCES: dict[str, Source] = {source.name: source for source in _ALL}
EMBEDDED = ("iris", "two_moons", "two_circles", "digits")
NAMES = (*SOURCES, *EMBEDDED)
