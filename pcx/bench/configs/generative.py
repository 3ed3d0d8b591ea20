"""The paper's table of image reconstruction: mean squared error × 10⁻³ of decoders (PC, iPC) and autoencoders (BP).

pcx table generative        the paper's figures; ours have no runs yet: the decoders are not part of the benchmark so far
"""

PAPER: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("decoder", "mnist"): {"pc_se": (9.25, 0.0), "ipc": (9.09, 0.0), "bp_se": (9.08, 0.0)},
    ("decoder", "fashionmnist"): {"pc_se": (10.56, 0.01), "ipc": (10.11, 0.01), "bp_se": (10.04, 0.0)},
    ("deconvolution", "cifar10"): {"pc_se": (6.67, 0.1), "ipc": (5.5, 0.01), "bp_se": (6.17, 0.46)},
    ("deconvolution", "celeba"): {"pc_se": (2.35, 0.12), "ipc": (1.3, 0.12), "bp_se": (3.34, 0.3)},
}
METRIC = "mse_1e-3"
