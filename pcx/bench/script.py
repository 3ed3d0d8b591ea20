"""The command `pcx`: the command line, or one sentence where it cannot be loaded.

That is where packages are not installed, a file in `pcx/algorithms` is broken, or Ctrl-C comes early.
"""

import os
import signal
import sys

from pcx._types import ModelError

EXTRA = {"matplotlib", "PIL", "pooch", "rich", "sklearn", "tqdm", "typer"}  # what pip install '.[bench]' brings
STOPPED = 130  # the exit status after Ctrl-C


def leave() -> None:
    """End at once: a program that still runs on the device, or is being compiled, would not find its process any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOPPED)


def main() -> None:
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # in the background of a shell it is
            signal.signal(signal.SIGINT, signal.default_int_handler)
        from pcx.bench import programs
        from pcx.bench.cli import main as run

        programs.keep()
        run()
    except SystemExit as stop:
        if stop.code == STOPPED:
            leave()
        raise
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        leave()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        how = "pip install '.[bench]' in the project's folder"
        print(f"error: {missing} is not installed; the benchmark needs the extra packages pcx[bench]: {how}.", file=sys.stderr)
        raise SystemExit(2) from None
