#!/usr/bin/env bash
# Makes the records of docs/performance.md that need a GPU anew, on this one, the most important first: about half an hour.
#
#     bash benchmarks/performance.sh              records and figures go to results/
#     bash benchmarks/performance.sh FOLDER       to another folder
#     QUICK=1 bash benchmarks/performance.sh DIR  a few steps of the MLP by every part, to see that all of it runs; on a CPU too
#
# PYTHON is the interpreter (default: python). A part that fails is named at the end and does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-results}
python=${PYTHON:-python}
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
failed=()

part() {
  echo "== $*"
  "$@" || failed+=("$*")
}

bench() {
  "$python" -c 'from pcx.bench.script import main; main()' bench "$@"
}

check() {
  "$python" benchmarks/gpu_check.py "$@" --out "$out/gpu-check.jsonl"
}

peers() {
  "$python" benchmarks/peers.py "$@" --out "$out/peers.jsonl"
}

speed="$out/speed.jsonl" scaling="$out/scaling.jsonl" figure="$out/scaling.png"
if [ -n "${QUICK:-}" ]; then
  part check mlp:tf32 --steps 1
  part bench speed --rows mlp --random --quick --out "$speed"
  part bench population --task digits/mlp --seeds 4 --quick --out "$speed"
  part bench scaling --quick --out "$scaling" --figure "$figure"
else
  part check
  for cell in vgg7:bf16_state alexnet:f16 vgg5:f16 vgg7:f16 vgg7:tf32 alexnet:tf32 vgg5:tf32 vgg5:bf16 mlp:tf32 vgg7:bf16; do
    part bench speed --random --no-uncompiled --rows "${cell%:*}" --precision "${cell#*:}" --out "$speed"
  done
  part bench population --random --precision bf16_state --out "$speed"
  part bench scaling --part depth --precision bf16_state --out "$scaling" --figure "$figure"
  part peers --tf32 --steps 468
  part peers --tf32 --steps 468 --library fabricpc --set momentum_h=0
  part peers --tf32 --steps 200 --task cifar100/vgg5
  part peers --tf32 --steps 100 --task cifar100/vgg5 --library fabricpc --set momentum_h=0
  part peers --tf32 --steps 468 --algorithm ipc
  part peers --tf32 --steps 100 --task cifar100/vgg5 --algorithm ipc
  part bench scaling --part depth --out "$scaling" --figure "$figure"
  part bench scaling --part scaling --out "$scaling" --figure "$figure"
  part bench speed --random --rows mlp,vgg5 --out "$speed"
fi
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
