"""The paper's table of associative memory: mean squared error × 10⁻⁴ of recall from noise or half an image (Tiny ImageNet).

    pcx table memory        the paper's figures; ours have no runs yet

Rows are images to memorise, columns hidden neurons (512, 1024, 2048).
"""

WIDTHS = (512, 1024, 2048)
PAPER: dict[str, dict[int, tuple[tuple[float, float], ...]]] = {
    "noise": {
        50: ((6.06, 0.11), (5.91, 0.14), (5.95, 0.06)),
        100: ((6.99, 0.19), (6.76, 0.23), (6.16, 0.07)),
        250: ((9.95, 0.05), (10.14, 0.06), (8.9, 0.06)),
    },
    "mask": {
        50: ((0.06, 0.02), (0.01, 0.0), (0.0, 0.0)),
        100: ((1.15, 0.78), (1.01, 0.79), (0.11, 0.03)),
        250: ((39.1, 10.8), (3.74, 0.73), (0.22, 0.06)),
    },
}
