"""PCX: predictive coding networks on JAX, as one pure function, with the paper's imperative surface on top."""

import os as _os
import signal as _signal
import sys as _sys

if _os.path.basename((_sys.argv or [""])[0]) == "pcx" and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # the command: until it takes over, Ctrl-C ends it without a traceback
    _signal.signal(_signal.SIGINT, lambda *_: (_os.write(2, b"stopped\n"), _os._exit(130)))

from pcx import algorithms as algorithms
from pcx import functional as functional
from pcx import nn as nn
from pcx import optim as optim
from pcx import predictive_coding as predictive_coding
from pcx import utils as utils
from pcx._energies import Energy as Energy
from pcx._energies import cross_entropy as cross_entropy
from pcx._energies import squared_error as squared_error
from pcx._energies import zero as zero
from pcx._free_energy import Graph as Graph
from pcx._free_energy import energies as energies
from pcx._free_energy import free_energy as free_energy
from pcx._free_energy import freeze_state as freeze_state
from pcx._free_energy import graph as graph
from pcx._free_energy import initialise as initialise
from pcx._free_energy import output_node as output_node
from pcx._free_energy import run as run
from pcx._free_energy import update_state as update_state
from pcx._infer import infer as infer
from pcx._infer import record_energies as record_energies
from pcx._init import normal as normal
from pcx._learn import apply_gradient as apply_gradient
from pcx._learn import deltas as deltas
from pcx._learn import train_step as train_step
from pcx._learn import weight_gradient as weight_gradient
from pcx._model import weights as weights
from pcx._types import ALL_SHORTCUTS as ALL_SHORTCUTS
from pcx._types import NO_SHORTCUTS as NO_SHORTCUTS
from pcx._types import Inferred as Inferred
from pcx._types import ModelError as ModelError
from pcx._types import Nodes as Nodes
from pcx._types import Observed as Observed
from pcx._types import Run as Run
from pcx._types import Shortcuts as Shortcuts
from pcx._types import Trained as Trained
from pcx.check import check_algorithm as check_algorithm
from pcx.check import check_model as check_model
from pcx.draw import draw as draw
from pcx.predictive_coding import EnergyModule as EnergyModule
from pcx.predictive_coding import Vode as Vode
from pcx.shortcuts.channels import channels_last as channels_last

__version__ = "0.1.0"
