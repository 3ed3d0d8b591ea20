"""The paper's table of seconds per epoch (batch 128), PC-SE and BP-SE.

    pcx bench speed         times our own rows
    pcx table timing        ours beside the paper's and those of other libraries

``PAPER`` holds the paper's figures on one A100, ``PEERS`` those of other libraries on one H200 with random data (``pcx`` is
the paper's own library, its main branch of August 2026, with the data on the device; ``song`` is written in PyTorch).
``SETTINGS`` holds the settings of the original experiments; six epochs, of which the first is not counted.
"""

from typing import Any

ROWS = {
    "mlp": "fashionmnist/mlp",
    "alexnet": "cifar10/alexnet",
    "vgg5": "cifar100/vgg5",
    "vgg7": "tinyimagenet/vgg7",
}

PAPER: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("mlp", "fashionmnist"): {"bp_se": (1.82, 0.01), "pc_se": (1.94, 0.07)},
    ("alexnet", "cifar10"): {"bp_se": (1.04, 0.08), "pc_se": (3.86, 0.06)},
    ("vgg5", "cifar100"): {"bp_se": (1.61, 0.04), "pc_se": (5.33, 0.02)},
    ("vgg7", "tinyimagenet"): {"bp_se": (7.59, 0.63), "pc_se": (54.6, 0.1)},
}

PEERS: dict[tuple[str, str], dict[str, dict[str, float]]] = {
    ("mlp", "fashionmnist"): {"bp_se": {"pcx": 0.450}, "pc_se": {"pcx": 0.577, "jpc": 0.603, "song": 5.65}},
    ("alexnet", "cifar10"): {"bp_se": {"pcx": 0.956}, "pc_se": {"pcx": 1.72, "jpc": 2.77, "song": 20.1}},
    ("vgg5", "cifar100"): {"bp_se": {"pcx": 0.574}, "pc_se": {"pcx": 1.93, "jpc": 3.32, "song": 11.0}},
    ("vgg7", "tinyimagenet"): {"bp_se": {"pcx": 2.88}, "pc_se": {"pcx": 18.9, "jpc": 24.4, "song": 66.3}},
}

# fmt: off
# (model, data set, algorithm) -> settings, by the names of the config's fields
SETTINGS: dict[tuple[str, str, str], dict[str, Any]] = {
    ("mlp", "fashionmnist", "pc_se"): {
        "T": 5, "lr_h": 0.026070879231635192, "momentum_h": 0.1, "lr_theta": 0.0002972210629627541, "weight_decay":
        0.0018383293983087593, "activation": "gelu", "epochs": 6, "batch": 128,
    },
    ("mlp", "fashionmnist", "bp_se"): {
        "lr_theta": 0.0002751176541841286, "weight_decay": 0.0001717093341589651, "activation": "relu", "epochs": 6,
        "batch": 128,
    },
    ("alexnet", "cifar10", "pc_se"): {
        "T": 10, "lr_h": 0.1, "momentum_h": 0.5, "lr_theta": 0.0001, "weight_decay": 0.0001, "activation": "leaky_relu",
        "epochs": 6, "batch": 128, "augmentation": "crop4_flip",
    },
    ("alexnet", "cifar10", "bp_se"): {
        "lr_theta": 0.0001, "weight_decay": 0.0001, "activation": "leaky_relu", "epochs": 6, "batch": 128,
        "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "pc_se"): {
        "T": 7, "lr_h": 0.014971608777949093, "momentum_h": 0.35, "lr_theta": 0.00014796725461384345, "weight_decay":
        0.00015400633791940761, "activation": "leaky_relu", "epochs": 6, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "bp_se"): {
        "lr_theta": 0.00019889634426085358, "weight_decay": 0.00013051747032219178, "activation": "gelu", "epochs": 6,
        "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg7", "tinyimagenet", "pc_se"): {
        "T": 12, "lr_h": 0.0201665922554088, "momentum_h": 0.3, "lr_theta": 4.1875592144321886e-05, "weight_decay":
        3.4901249493240924e-05, "activation": "leaky_relu", "epochs": 6, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg7", "tinyimagenet", "bp_se"): {
        "lr_theta": 0.00015850480323653223, "weight_decay": 2.0980180272305617e-05, "activation": "leaky_relu",
        "epochs": 6, "batch": 128, "augmentation": "crop56_flip",
    },
}
# fmt: on
