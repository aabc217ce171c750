#!/usr/bin/env bash
# Install each tested set into a new environment, then run `freescale doctor` and a short training. Outside the gate: it
# downloads gigabytes. Usage: benchmarks/installs.sh [PYTHON3.11 [PYTHON3.12]]
set -euo pipefail
cd "$(dirname "$0")/.."
first=${1:-python3.11} other=${2:-python3.12}
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT

try() { # NAME PYTHON [PACKAGE ...]: the packages replace those of requirements/cpu.txt
  local name=$1 python=$2 && shift 2
  "$python" -m venv "$place/venv"
  "$place/venv/bin/pip" install --quiet --no-compile --no-deps -r requirements/cpu.txt .
  # With dependencies: where the index has no CPU build, torch needs the libraries of CUDA to load.
  [ $# -eq 0 ] || { "$place/venv/bin/pip" install --quiet --no-compile "$1" && shift; }
  [ $# -eq 0 ] || "$place/venv/bin/pip" install --quiet --no-compile --no-deps "$@"
  "$place/venv/bin/freescale" doctor --device cpu --quiet
  (mkdir "$place/work" && cd "$place/work" && "$place/venv/bin/freescale" train tiny --nproc 2 --train.max-steps 5)
  echo "ok: $name"
  rm -rf "$place/venv" "$place/work"
}

try "$("$first" -V), torch 2.13.0, FBGEMM 1.8.0, TorchRec 1.8.0" "$first"
try "$("$other" -V), torch 2.13.0, FBGEMM 1.8.0, TorchRec 1.8.0" "$other" torch==2.13.0
try "$("$first" -V), torch 2.14.1, FBGEMM 1.9.0, TorchRec 1.9.2" "$first" torch==2.14.1 fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2
