"""The paper's comparison of samples by MCPC and a variational autoencoder on MNIST (lower FID, higher inception score).

pcx table sampling        the paper's figures; ours have no runs yet
"""

PAPER: dict[tuple[str, str], tuple[float, float]] = {
    ("mcpc", "fid"): (2.53, 0.17),
    ("vae", "fid"): (4.19, 0.38),
    ("mcpc", "inception_score"): (7.13, 0.1),
    ("vae", "inception_score"): (7.91, 0.03),
}
