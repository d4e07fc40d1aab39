#!/usr/bin/env bash
# Builds the wheel, installs it into an empty environment and uses it outside the repository.
#
#   scripts/wheel_check.sh DEEPSPEED_VERSION
#
# Environment: PYTHON, TORCH_VERSION and TORCH_ARGS as in setup_env.sh.
set -euo pipefail

cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
python=$work/env/bin/python
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

# In the order of setup_env.sh, and for its reasons.
pip install -q "setuptools>=77" wheel numpy
# shellcheck disable=SC2086
pip install -q "torch==${TORCH_VERSION:-2.13.0}" ${TORCH_ARGS:-}
"$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$work/constraints.txt"
hold=(-q --no-build-isolation --constraint "$work/constraints.txt")
pip install "${hold[@]}" ninja py-cpuinfo packaging
pip install "${hold[@]}" "deepspeed==$1"

rm -rf build  # what an earlier build left there would be packed too
pip wheel -q --no-deps --no-build-isolation -w "$work" .
cd "$work"
ls -l ./*.whl
pip install "${hold[@]}" ./*.whl
"$python" -m pip check
"$python" -c 'import deepspeed_muon, deepspeed_muon.ops; print(deepspeed_muon.__version__, deepspeed_muon.ops.__file__)'
"$python" -m deepspeed_muon --help
