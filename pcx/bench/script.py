"""The command `pcx`: the command line, or one sentence where the packages that it needs are not installed."""

import sys

EXTRA = {"matplotlib", "PIL", "pooch", "rich", "sklearn", "tqdm", "typer"}  # what pip install '.[bench]' brings


def main() -> None:
    try:
        from pcx.bench.cli import main as run

        run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        how = "pip install '.[bench]' in the project's folder"
        print(f"error: {missing} is not installed; the benchmark needs the extra packages pcx[bench]: {how}.", file=sys.stderr)
        raise SystemExit(2) from None
