"""The benchmark: from a task's name to a trained, evaluated, recorded, resumable run. `pcx --help` is its command line.

Nothing else in the library imports it.
"""

from pcx.bench.api import Result as Result
from pcx.bench.api import train as train
from pcx.bench.config import Config as Config
from pcx.bench.config import ConfigError as ConfigError
from pcx.bench.tasks import configure as configure
