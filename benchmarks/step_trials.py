"""What a change is worth: milliseconds per training step, seconds of compiling and MiB, for rows of the timing table.

    python benchmarks/step_trials.py alexnet:tf32 alexnet:tf32_plain vgg7:bf16_state:bp_se
    python benchmarks/step_trials.py vgg5:bf16 --flags= --flags=--xla_gpu_command_buffer_scheduling_mode=CONCURRENT

A trial is ROW:PRECISION or ROW:PRECISION:ALGORITHM, on random images; its figure is the fastest of four short epochs after a
first one. Every ``--flags`` (options of the compiler, added to XLA_FLAGS) is a process of its own that makes all trials. It is
for comparing within one call: a timing for the table is that of `pcx bench speed`, of whole epochs.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

EPOCHS = 4


def trial(text: str, steps: int, flags: str, out: Path) -> None:
    """Make one trial, print it and record it."""
    from pcx.bench import record, speed
    from pcx.bench.engine import Engine

    row, precision, *rest = text.split(":")
    algorithm = rest[0] if rest else "pc_se"
    config = speed.config_of(row, algorithm, precision=precision, epochs=EPOCHS + 1)
    data = speed.data_of(config.dataset, random=True, limit=steps * config.batch)
    engine = Engine(config, data, [0], "scan")
    population, seconds = engine.prepare().init(), []
    for number in range(EPOCHS + 1):
        population, _ = engine.epoch(population, number)
        seconds.append(engine.timing.train)
    milliseconds, program = 1e3 * min(seconds[1:]) / engine.steps, speed._memory(engine)["program"]
    found = {"milliseconds": milliseconds, "compile_seconds": engine.timing.compile, "program_bytes": program}
    cell = {"row": row, "algorithm": algorithm, "precision": precision, "steps": engine.steps, "flags": flags}
    record.append(out, {"what": "step trial", **cell, **found, **record.environment()})
    size = "" if program is None else f", {program / 2**20:.0f} MiB"
    print(f"{row} {algorithm} {precision}: {milliseconds:.3f} ms, compile {engine.timing.compile:.1f} s{size}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="+", metavar="ROW:PRECISION[:ALGORITHM]")
    parser.add_argument("--flags", action="append", default=[], help="options of the compiler; may be repeated")
    parser.add_argument("--steps", type=int, default=60, help="steps of an epoch")
    parser.add_argument("--out", type=Path, default=Path("results/step-trials.jsonl"))
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; an epoch has at least one")
    for text in options.trials:
        if text.count(":") not in (1, 2) or text.split(":")[2:] not in ([], ["pc_se"], ["bp_se"]):
            parser.error(f"{text!r} is not ROW:PRECISION, ROW:PRECISION:pc_se or ROW:PRECISION:bp_se")
    if len(options.flags) > 1:
        failed = False
        for flags in options.flags:
            command = [sys.executable, __file__, *options.trials, f"--flags={flags}", f"--steps={options.steps}"]
            failed |= subprocess.run([*command, f"--out={options.out}"], check=False).returncode != 0
        sys.exit(int(failed))
    flags = "".join(options.flags)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    print(flags or "as it is", flush=True)
    from pcx.bench.config import ConfigError

    for text in options.trials:
        try:
            trial(text, options.steps, flags, options.out)
        except ConfigError as error:
            sys.exit(f"error: {text}: {error}")


if __name__ == "__main__":
    main()
