"""The paper's table of seconds per epoch (one A100, batch 128), PC-SE and BP-SE.

pcx table timing        the paper's figures; ours are those of recorded runs of the same task
"""

PAPER: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("mlp", "fashionmnist"): {"bp_se": (1.82, 0.01), "pc_se": (1.94, 0.07)},
    ("alexnet", "cifar10"): {"bp_se": (1.04, 0.08), "pc_se": (3.86, 0.06)},
    ("vgg5", "cifar100"): {"bp_se": (1.61, 0.04), "pc_se": (5.33, 0.02)},
    ("vgg7", "tinyimagenet"): {"bp_se": (7.59, 0.63), "pc_se": (54.6, 0.1)},
}
METRIC = "seconds_per_epoch"
