"""Table 1 of the paper: test accuracy of eight algorithms on 14 combinations of model and data.

    pcx run mnist/mlp --algorithm pc_se --seeds 5      one cell, with the settings below
    pcx run accuracy                                   all cells that can run here and have no record yet
    pcx table accuracy                                 ours beside the paper's

``PAPER`` holds the paper's figures in percent, mean and deviation: best test epoch, best five of seven seeds, the last partial
test batch dropped. ``SETTINGS`` holds the tuned settings of the original experiments (v0.6.1-public of the paper's
repository; centred nudging from its pull request 52).
Expected time of an MLP cell with five seeds and 25 epochs, compilation included: under half a
minute on one H200, about two minutes for PC on two CPU cores (`results/records.jsonl` holds seconds per epoch). A cell of
VGG-5 on CIFAR-10 with one seed takes about a minute and a half by PC on one H200.
"""

from typing import Any

ALGORITHMS = ("pc_ce", "pc_se", "pn", "nn", "cn", "ipc", "bp_ce", "bp_se")

# fmt: off
# (model, data set) -> metric -> (mean, deviation) in the order of ALGORITHMS
PAPER: dict[tuple[str, str], dict[str, tuple[tuple[float, float], ...]]] = {
    ("mlp", "mnist"): {
        "top1": ((98.11, 0.03), (98.26, 0.04), (98.36, 0.06), (98.26, 0.07),
                 (98.23, 0.09), (98.45, 0.09), (98.07, 0.06), (98.29, 0.08)),
    },
    ("mlp", "fashionmnist"): {
        "top1": ((89.16, 0.08), (89.58, 0.13), (89.57, 0.08), (89.46, 0.08),
                 (89.56, 0.05), (89.9, 0.06), (89.04, 0.08), (89.48, 0.07)),
    },
    ("vgg5", "cifar10"): {
        "top1": ((86.61, 0.14), (87.98, 0.11), (88.42, 0.66), (88.83, 0.04),
                 (89.47, 0.13), (85.51, 0.12), (88.11, 0.13), (89.43, 0.12)),
    },
    ("vgg5", "cifar100"): {
        "top1": ((60.0, 0.19), (54.08, 1.66), (64.7, 0.25), (65.46, 0.05),
                 (67.19, 0.24), (56.07, 0.16), (60.82, 0.1), (66.28, 0.23)),
        "top5": ((84.97, 0.19), (78.7, 1.0), (84.74, 0.38), (85.15, 0.16),
                 (86.6, 0.18), (78.91, 0.23), (85.84, 0.14), (85.85, 0.27)),
    },
    ("vgg5", "tinyimagenet"): {
        "top1": ((41.29, 0.2), (30.28, 0.2), (34.61, 0.2), (46.4, 0.1),
                 (46.38, 0.11), (29.94, 0.47), (43.72, 0.1), (44.9, 0.2)),
        "top5": ((66.68, 0.09), (57.31, 0.21), (59.91, 0.24), (68.5, 0.18),
                 (69.06, 0.1), (54.73, 0.52), (69.23, 0.23), (65.26, 0.37)),
    },
    ("vgg7", "cifar10"): {
        "top1": ((84.62, 0.1), (81.91, 0.3), (85.97, 0.3), (87.26, 0.1),
                 (88.4, 0.12), (80.15, 0.18), (88.6, 0.1), (89.91, 0.1)),
    },
    ("vgg7", "cifar100"): {
        "top1": ((56.8, 0.14), (37.52, 2.6), (56.56, 0.13), (59.97, 0.41),
                 (64.76, 0.17), (43.99, 0.3), (59.96, 0.1), (65.36, 0.15)),
        "top5": ((83.0, 0.09), (66.73, 2.37), (81.52, 0.17), (81.5, 0.41),
                 (84.65, 0.18), (73.23, 0.3), (85.61, 0.1), (84.41, 0.26)),
    },
    ("vgg7", "tinyimagenet"): {
        "top1": ((41.15, 0.14), (21.28, 0.46), (25.53, 0.77), (39.49, 2.69),
                 (35.59, 7.69), (19.76, 0.15), (45.32, 0.11), (46.08, 0.15)),
        "top5": ((66.25, 0.11), (44.92, 0.27), (50.06, 0.84), (64.66, 1.95),
                 (59.63, 6.0), (40.36, 0.22), (69.64, 0.18), (66.65, 0.2)),
    },
    ("vgg9", "cifar10"): {
        "top1": ((78.12, 0.14), (75.33, 0.25), (76.9, 0.18), (85.9, 0.14),
                 (87.19, 0.41), (79.02, 0.21), (89.18, 0.08), (90.02, 0.18)),
    },
    ("vgg9", "cifar100"): {
        "top1": ((58.25, 0.13), (39.57, 0.18), (43.21, 0.21), (60.74, 0.75),
                 (58.92, 1.61), (44.76, 0.4), (60.63, 0.28), (65.51, 0.23)),
        "top5": ((83.28, 0.06), (66.9, 0.26), (71.13, 0.23), (83.19, 0.38),
                 (81.56, 0.63), (72.88, 0.29), (85.25, 0.11), (84.7, 0.28)),
    },
    ("vgg9", "tinyimagenet"): {
        "top1": ((39.64, 0.17), (21.78, 0.15), (23.62, 0.23), (41.59, 0.27),
                 (31.5, 0.7), (26.34, 0.03), (45.66, 0.09), (45.51, 0.15)),
        "top5": ((64.6, 0.09), (44.43, 0.09), (46.89, 0.11), (66.15, 0.32),
                 (54.67, 0.68), (50.48, 0.05), (69.65, 0.09), (65.62, 0.17)),
    },
    ("resnet18", "cifar10"): {
        "top1": ((43.19, 0.61), (53.74, 0.43), (62.45, 0.52), (62.33, 0.93),
                 (55.29, 1.65), (70.44, 0.81), (92.83, 0.18), (93.21, 0.07)),
    },
    ("resnet18", "cifar100"): {
        "top1": ((16.01, 0.42), (22.83, 0.38), (25.86, 0.86), (26.91, 0.55),
                 (15.45, 1.7), (29.45, 1.36), (72.32, 0.26), (71.89, 0.16)),
        "top5": ((40.67, 0.7), (50.18, 0.52), (53.8, 1.13), (55.57, 0.8),
                 (39.42, 2.8), (56.7, 1.73), (92.14, 0.12), (87.8, 0.18)),
    },
    ("resnet18", "tinyimagenet"): {
        "top1": ((9.52, 0.32), (14.19, 0.25), (15.79, 1.1), (15.95, 0.27),
                 (4.4, 0.49), (6.19, 1.09), (58.0, 0.23), (55.3, 0.16)),
        "top5": ((26.21, 0.5), (34.55, 0.2), (37.36, 1.57), (37.76, 0.52),
                 (14.3, 1.92), (16.51, 3.09), (79.94, 0.06), (74.98, 0.36)),
    },
}

# (model, data set, algorithm) -> settings, by the names that --set takes
SETTINGS: dict[tuple[str, str, str], dict[str, Any]] = {
    ("mlp", "mnist", "pc_ce"): {
        "T": 5, "lr_h": 0.01828189494026352, "momentum_h": 0.35, "lr_theta": 0.00029959151754717025, "weight_decay":
        0.003314230264294929, "activation": "gelu", "epochs": 25, "batch": 128,
    },
    ("mlp", "mnist", "pc_se"): {
        "T": 8, "lr_h": 0.010534787245955935, "momentum_h": 0.65, "lr_theta": 0.0002968930522737348, "weight_decay":
        0.0003550241114984682, "activation": "gelu", "epochs": 25, "batch": 128,
    },
    ("mlp", "mnist", "pn"): {
        "T": 5, "lr_h": 0.058046761743356524, "momentum_h": 0.7, "lr_theta": 0.00029877579046051045, "weight_decay":
        0.00014168785384392708, "beta": 0.55, "beta_ir": 0.0, "clamp": "stay", "activation": "gelu", "epochs": 25,
        "batch": 128,
    },
    ("mlp", "mnist", "nn"): {
        "T": 4, "lr_h": 0.06860685364419071, "momentum_h": 0.5, "lr_theta": 0.0002690771766921473, "weight_decay":
        0.0046099332767522375, "beta": 0.2, "beta_ir": 0.02, "clamp": "stay", "activation": "gelu", "epochs": 25,
        "batch": 128,
    },
    ("mlp", "mnist", "cn"): {
        "T": 7, "lr_h": 0.03523125490134163, "momentum_h": 0.9, "lr_theta": 0.00028477980093205633, "weight_decay":
        0.0002200089194762122, "beta": 0.55, "beta_ir": 0.0, "clamp": "stay", "signs": "-----+++-++---+---+-++--+",
        "activation": "gelu", "epochs": 25, "batch": 128,
    },
    ("mlp", "mnist", "ipc"): {
        "T": 8, "lr_h": 0.8495322487988946, "momentum_h": 0.35, "lr_theta": 0.0002525584875644335, "weight_decay":
        0.032533390000821956, "activation": "leaky_relu", "epochs": 25, "batch": 128,
    },
    ("mlp", "mnist", "bp_ce"): {
        "lr_theta": 0.0002809966056688163, "weight_decay": 0.0014781820367232845, "activation": "hard_tanh", "epochs":
        25, "batch": 128,
    },
    ("mlp", "mnist", "bp_se"): {
        "lr_theta": 0.00027487989229471686, "weight_decay": 0.0051207238497154115, "activation": "gelu", "epochs": 25,
        "batch": 128,
    },
    ("mlp", "fashionmnist", "pc_ce"): {
        "T": 5, "lr_h": 0.013125101796600251, "momentum_h": 0.4, "lr_theta": 0.0002770746850948943, "weight_decay":
        0.0008402702337314271, "activation": "gelu", "epochs": 25, "batch": 128,
    },
    ("mlp", "fashionmnist", "pc_se"): {
        "T": 5, "lr_h": 0.026070879231635192, "momentum_h": 0.1, "lr_theta": 0.0002972210629627541, "weight_decay":
        0.0018383293983087593, "activation": "gelu", "epochs": 25, "batch": 128,
    },
    ("mlp", "fashionmnist", "pn"): {
        "T": 8, "lr_h": 0.012152308689680013, "momentum_h": 0.55, "lr_theta": 0.0002837116035294869, "weight_decay":
        0.00047804186978942176, "beta": 0.75, "beta_ir": 0.02, "clamp": "stay", "activation": "gelu", "epochs": 25,
        "batch": 128,
    },
    ("mlp", "fashionmnist", "nn"): {
        "T": 6, "lr_h": 0.028079645950117624, "momentum_h": 0.15, "lr_theta": 0.00028486330422682293, "weight_decay":
        0.00025199528039895273, "beta": 0.9, "beta_ir": 0.02, "clamp": "stay", "activation": "leaky_relu", "epochs":
        25, "batch": 128,
    },
    ("mlp", "fashionmnist", "cn"): {
        "T": 8, "lr_h": 0.06221269087448299, "momentum_h": 0.35, "lr_theta": 0.00029975980137440924, "weight_decay":
        6.949119768517799e-05, "beta": 0.25, "beta_ir": 0.02, "clamp": "stay", "signs": "-+++-+++++-+-++--+-++++++",
        "activation": "gelu", "epochs": 25, "batch": 128,
    },
    ("mlp", "fashionmnist", "ipc"): {
        "T": 8, "lr_h": 0.7996939108085619, "momentum_h": 0.25, "lr_theta": 0.0002691306332359123, "weight_decay":
        0.01162214097249978, "activation": "leaky_relu", "epochs": 25, "batch": 128,
    },
    ("mlp", "fashionmnist", "bp_ce"): {
        "lr_theta": 0.00027158235095962934, "weight_decay": 8.731835889688842e-05, "activation": "hard_tanh",
        "epochs": 25, "batch": 128,
    },
    ("mlp", "fashionmnist", "bp_se"): {
        "lr_theta": 0.0002751176541841286, "weight_decay": 0.0001717093341589651, "activation": "relu", "epochs": 25,
        "batch": 128,
    },
    ("vgg5", "cifar10", "pc_ce"): {
        "T": 8, "lr_h": 0.014708110891388754, "momentum_h": 0.05, "lr_theta": 0.0002641020393177285, "weight_decay":
        1.2107509557065504e-05, "activation": "gelu", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar10", "pc_se"): {
        "T": 7, "lr_h": 0.02348681827141059, "momentum_h": 0.3, "lr_theta": 0.0002657691155688603, "weight_decay":
        0.0066559627972820395, "activation": "gelu", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar10", "pn"): {
        "T": 7, "lr_h": 0.03623356587254243, "momentum_h": 0.1, "lr_theta": 0.00029968925891952494, "weight_decay":
        3.728852110891977e-05, "beta": 0.32297201469734277, "beta_ir": 0.02, "clamp": "plain", "activation": "gelu",
        "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar10", "nn"): {
        "T": 7, "lr_h": 0.028016192698375384, "momentum_h": 0.5, "lr_theta": 0.000261833244376427, "weight_decay":
        0.0008992487435200682, "beta": 0.17877062530418192, "beta_ir": 0.02, "clamp": "plain", "activation": "gelu",
        "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar10", "cn"): {
        "T": 7, "lr_h": 0.0289108138224975, "momentum_h": 0.1, "lr_theta": 0.00022176352986601758, "weight_decay":
        0.0006584549981050529, "beta": 0.9, "beta_ir": 0.0, "clamp": "plain", "signs":
        "+++++-++---++---+------+-+---++----------+------", "activation": "gelu", "epochs": 50, "batch": 128,
        "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar10", "ipc"): {
        "T": 8, "lr_h": 0.7440875635530856, "momentum_h": 0.65, "lr_theta": 0.00017498021803911615, "weight_decay":
        2.5721054255952748e-05, "activation": "hard_tanh", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar10", "bp_ce"): {
        "lr_theta": 0.0002942494542760219, "weight_decay": 1.003434259988122e-05, "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar10", "bp_se"): {
        "lr_theta": 0.0002788215086724204, "weight_decay": 0.00011081592082589031, "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "pc_ce"): {
        "T": 12, "lr_h": 0.011510981082033004, "momentum_h": 0.25, "lr_theta": 0.00021550147504766553, "weight_decay":
        0.007599378216624812, "activation": "hard_tanh", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "pc_se"): {
        "T": 7, "lr_h": 0.014971608777949093, "momentum_h": 0.35, "lr_theta": 0.00014796725461384345, "weight_decay":
        0.00015400633791940761, "activation": "leaky_relu", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "pn"): {
        "T": 8, "lr_h": 0.01923407063108525, "momentum_h": 0.1, "lr_theta": 4.1030931466511926e-05, "weight_decay":
        0.00028443198598241087, "beta": 0.1, "beta_ir": 0.0, "clamp": "plain", "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "nn"): {
        "T": 12, "lr_h": 0.03325378866925405, "momentum_h": 0.25, "lr_theta": 7.67519702690274e-05, "weight_decay":
        0.004202804226490381, "beta": 0.15000000000000002, "beta_ir": 0.02, "clamp": "plain", "activation": "gelu",
        "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "cn"): {
        "T": 7, "lr_h": 0.039777886431531004, "momentum_h": 0.0, "lr_theta": 0.0002863207767941809, "weight_decay":
        0.003590597658172041, "beta": 0.30000000000000004, "beta_ir": 0.02, "clamp": "plain", "signs":
        "+--+--++++++---++--++-++-+-+--+++++++--+-+-++++--+", "activation": "gelu", "epochs": 50, "batch": 128,
        "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "ipc"): {
        "T": 8, "lr_h": 0.8806842950826396, "momentum_h": 0.55, "lr_theta": 0.00014174838437581804, "weight_decay":
        0.0003653424468419008, "activation": "leaky_relu", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "bp_ce"): {
        "lr_theta": 0.00020820447386646812, "weight_decay": 2.2142560237670734e-05, "activation": "hard_tanh",
        "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "cifar100", "bp_se"): {
        "lr_theta": 0.00019889634426085358, "weight_decay": 0.00013051747032219178, "activation": "gelu", "epochs":
        50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg5", "tinyimagenet", "pc_ce"): {
        "T": 7, "lr_h": 0.010044339247287183, "momentum_h": 0.05, "lr_theta": 4.463151374486534e-05, "weight_decay":
        0.0014288405442168734, "activation": "hard_tanh", "epochs": 50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg5", "tinyimagenet", "pc_se"): {
        "T": 8, "lr_h": 0.013002730454585726, "momentum_h": 0.15, "lr_theta": 4.777137186759985e-05, "weight_decay":
        0.005568395129656513, "activation": "leaky_relu", "epochs": 50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg5", "tinyimagenet", "pn"): {
        "T": 4, "lr_h": 0.035892501613178085, "momentum_h": 0.05, "lr_theta": 7.254463449342445e-05, "weight_decay":
        0.00010237178120121746, "beta": 0.1, "beta_ir": 0.0, "clamp": "plain", "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg5", "tinyimagenet", "nn"): {
        "T": 8, "lr_h": 0.0573599016772709, "momentum_h": 0.1, "lr_theta": 0.0001376789472968569, "weight_decay":
        1.6046037514265988e-05, "beta": 0.5, "beta_ir": 0.0, "clamp": "plain", "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg5", "tinyimagenet", "cn"): {
        "T": 7, "lr_h": 0.07670833046926837, "momentum_h": 0.4, "lr_theta": 0.0001144535829079737, "weight_decay":
        0.0016055536430741842, "beta": 0.2, "beta_ir": 0.02, "clamp": "plain", "signs":
        "-----++-----+-------++---++-----++-+++++----++----", "activation": "gelu", "epochs": 50, "batch": 128,
        "augmentation": "crop56_flip",
    },
    ("vgg5", "tinyimagenet", "ipc"): {
        "T": 7, "lr_h": 0.06464855346323314, "momentum_h": 0.8, "lr_theta": 2.1441628509812798e-05, "weight_decay":
        4.8757731569290235e-05, "activation": "leaky_relu", "epochs": 50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg5", "tinyimagenet", "bp_ce"): {
        "lr_theta": 8.709909364802776e-05, "weight_decay": 2.0892453778883236e-05, "activation": "hard_tanh",
        "epochs": 50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg5", "tinyimagenet", "bp_se"): {
        "lr_theta": 9.376894185412171e-05, "weight_decay": 0.0004684338798515865, "activation": "leaky_relu",
        "epochs": 50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg7", "cifar100", "pc_ce"): {
        "T": 11, "lr_h": 0.020272225800985682, "momentum_h": 0.45, "lr_theta": 0.00011102395763121963, "weight_decay":
        0.00034191542161885526, "activation": "hard_tanh", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg7", "cifar100", "pc_se"): {
        "T": 12, "lr_h": 0.021020497754927873, "momentum_h": 0.35, "lr_theta": 0.00018942597048071067, "weight_decay":
        0.0007968501243194622, "activation": "leaky_relu", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg7", "cifar100", "pn"): {
        "T": 11, "lr_h": 0.05038798558206877, "momentum_h": 0.4, "lr_theta": 0.00012243874591360667, "weight_decay":
        1.835199911169501e-05, "beta": 0.1, "beta_ir": 0.0, "clamp": "plain", "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg7", "cifar100", "nn"): {
        "T": 9, "lr_h": 0.07185961963616658, "momentum_h": 0.85, "lr_theta": 0.0001163737981593612, "weight_decay":
        0.0006065019239474804, "beta": 0.1, "beta_ir": 0.02, "clamp": "plain", "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg7", "cifar100", "cn"): {
        "T": 11, "lr_h": 0.0259850534184893, "momentum_h": 0.5, "lr_theta": 0.0002836859624555198, "weight_decay":
        0.00026954734803245856, "beta": 0.15000000000000002, "beta_ir": 0.02, "clamp": "plain", "signs":
        "++-++++--+-+---++-+-+++-+--+----++-+--+--+++--+++-", "activation": "gelu", "epochs": 50, "batch": 128,
        "augmentation": "crop4_flip",
    },
    ("vgg7", "cifar100", "ipc"): {
        "T": 12, "lr_h": 0.9284617774027867, "momentum_h": 0.45, "lr_theta": 3.463739857883915e-05, "weight_decay":
        0.0001091209699918462, "activation": "leaky_relu", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg7", "cifar100", "bp_ce"): {
        "lr_theta": 0.00013293220201776088, "weight_decay": 0.0011361686420755476, "activation": "hard_tanh",
        "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg7", "cifar100", "bp_se"): {
        "lr_theta": 0.0002492820278734172, "weight_decay": 3.3529077390445286e-05, "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg7", "tinyimagenet", "pc_ce"): {
        "T": 12, "lr_h": 0.02233810859424211, "momentum_h": 0.55, "lr_theta": 7.961890843897934e-05, "weight_decay":
        3.5299055677719896e-05, "activation": "hard_tanh", "epochs": 50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg7", "tinyimagenet", "pc_se"): {
        "T": 12, "lr_h": 0.0201665922554088, "momentum_h": 0.3, "lr_theta": 4.1875592144321886e-05, "weight_decay":
        3.4901249493240924e-05, "activation": "leaky_relu", "epochs": 50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg7", "tinyimagenet", "pn"): {
        "T": 12, "lr_h": 0.012682393749021853, "momentum_h": 0.3, "lr_theta": 0.0001118499556957176, "weight_decay":
        0.0006549007915400498, "beta": 0.25, "beta_ir": 0.02, "clamp": "plain", "activation": "leaky_relu", "epochs":
        50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg7", "tinyimagenet", "nn"): {
        "T": 12, "lr_h": 0.12324451306713315, "momentum_h": 0.95, "lr_theta": 6.629102407363624e-05, "weight_decay":
        0.007018510845368278, "beta": 0.9, "beta_ir": 0.0, "clamp": "plain", "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg7", "tinyimagenet", "cn"): {
        "T": 12, "lr_h": 0.07443737927962991, "momentum_h": 0.85, "lr_theta": 7.146607723186462e-05, "weight_decay":
        0.0002920959659422492, "beta": 0.45000000000000007, "beta_ir": 0.0, "clamp": "plain", "signs":
        "-+---++---+---++-+-++---+---++++-+++++-+", "activation": "leaky_relu", "epochs": 50, "batch": 128,
        "augmentation": "crop56_flip",
    },
    ("vgg7", "tinyimagenet", "ipc"): {
        "T": 12, "lr_h": 0.01489876698349598, "momentum_h": 0.7, "lr_theta": 1.2305317634121828e-05, "weight_decay":
        0.009724917538008335, "activation": "hard_tanh", "epochs": 50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg7", "tinyimagenet", "bp_ce"): {
        "lr_theta": 0.00029753853687237996, "weight_decay": 0.0005812616469177122, "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg7", "tinyimagenet", "bp_se"): {
        "lr_theta": 0.00015850480323653223, "weight_decay": 2.0980180272305617e-05, "activation": "leaky_relu",
        "epochs": 50, "batch": 128, "augmentation": "crop56_flip",
    },
    ("vgg7", "cifar10", "bp_se"): {
        "lr_theta": 0.00025041435727845413, "weight_decay": 2.539850528374565e-05, "activation": "gelu", "epochs": 50,
        "batch": 128, "augmentation": "crop4_flip",
    },
    ("vgg7", "cifar10", "pc_se"): {
        "T": 11, "lr_h": 0.01927208236479854, "momentum_h": 0.85, "lr_theta": 0.00015756692930515384, "weight_decay":
        2.7480603900710354e-05, "activation": "hard_tanh", "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    # not published: found by `pcx search`, results/search/cifar10-vgg9-pc_se and cifar10-resnet18-pc_se
    ("vgg9", "cifar10", "pc_se"): {
        "T": 10, "lr_h": 0.057992620664438076, "momentum_h": 0.9500000000000001, "lr_theta": 7.175432110793849e-05,
        "weight_decay": 0.009156485810470056, "activation": "hard_tanh",
        "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    ("resnet18", "cifar10", "pc_se"): {
        "T": 18, "lr_h": 0.027524023543735433, "momentum_h": 0.7000000000000001, "lr_theta": 0.00022486088987057194,
        "weight_decay": 0.0009327707133243988, "activation": "leaky_relu",
        "epochs": 50, "batch": 128, "augmentation": "crop4_flip",
    },
    # outside of the table: the study of a skip connection, whose state learning rate of 0.5 was divided by the batch size
    ("vgg19", "cifar10", "pc_se"): {
        "T": 24, "lr_h": 0.5 / 128, "momentum_h": 0.5, "lr_theta": 1e-4, "weight_decay": 5e-4, "activation": "leaky_relu",
        "epochs": 30, "batch": 128, "augmentation": "rotate5_flip",
    },
}
# fmt: on

NEAREST = {"vgg9": "vgg7", "resnet18": "vgg7"}


def settings(model: str, dataset: str, algorithm: str) -> dict[str, Any] | None:
    """The tuned settings of a cell; where none are published, those of the nearest model (or of CIFAR-100 for CIFAR-10).

    VGG-9 and ResNet-18 have no published settings, VGG-7 on CIFAR-10 only those of PC-SE and BP-SE; those of the first two
    on CIFAR-10 by PC-SE are from searches of ours.
    """
    near = NEAREST.get(model, model)
    places = [(model, dataset), (near, dataset)] + ([(near, "cifar100")] if (near, dataset) == ("vgg7", "cifar10") else [])
    return next((SETTINGS[*place, algorithm] for place in places if (*place, algorithm) in SETTINGS), None)
