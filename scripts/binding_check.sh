#!/usr/bin/env bash
# Builds the whole native library, CUDA kernels and binding, against a CUDA build of torch, and loads it. Needs nvcc and
# some 6 GB of disk, but no GPU; CI does not run it. The last output is kept in benchmarks/results/binding_check.txt.
#
#   scripts/binding_check.sh FOLDER      FOLDER: a virtual environment; made if it is not there
#
# Environment:
#   CUDA_TORCH            the torch to install (2.11.0)
#   TORCH_CUDA_ARCH_LIST  what to compile for (8.0;9.0a)
set -euo pipefail

folder=$1
cd "$(dirname "$0")/.."
pip() { "$folder/bin/python" -m pip -q --disable-pip-version-check "$@"; }

[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip install "setuptools>=77,<82" wheel numpy ninja py-cpuinfo packaging
pip install "torch==${CUDA_TORCH:-2.11.0}"
"$folder/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$folder/constraints.txt"
pip install --no-build-isolation --constraint "$folder/constraints.txt" deepspeed==0.19.8 "pydantic>=2" safetensors

builds=$(mktemp -d)
trap 'rm -rf "$builds"' EXIT
export TORCH_EXTENSIONS_DIR=$builds TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-8.0;9.0a} DS_ACCELERATOR=cpu
PYTHONPATH=$PWD "$folder/bin/python" -m deepspeed_muon report --selftest | tee "$builds/report.txt"
without=$(sed -n '/^ops$/,/^$/{/^ /p}' "$builds/report.txt" | grep -v cuda || true)
[ -z "$without" ] || { echo "FAILED: no CUDA kernel for:" $without; exit 1; }
