#!/usr/bin/env bash
# Builds wheel and source archive, lets twine check them, installs deepspeed-muon[hf] from an index on this machine into an
# empty environment, and uses it outside the repository. What was checked lies in dist/ afterwards.
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
pip install -q build twine
"$python" -m build -q --no-isolation --outdir "$work/dist" .
"$python" -m twine check --strict "$work"/dist/*

# An index as pip knows it: a folder for each project. Everything else comes from where pip is told to look anyway.
index=$work/index/deepspeed-muon
mkdir -p "$index"
for file in "$work"/dist/*; do
    name=$(basename "$file")
    cp "$file" "$index/"
    printf '<a href="%s">%s</a>\n' "$name" "$name" >>"$index/index.html"
done
cp -r "$work/dist" .
cd "$work"
version=$(ls dist/*.whl | sed -E 's/.*deepspeed_muon-([^-]+)-.*/\1/')
pip install "${hold[@]}" --extra-index-url "file://$work/index" "deepspeed-muon[hf]==$version"
"$python" -m pip check
"$python" -c 'import deepspeed_muon, deepspeed_muon.ops; print(deepspeed_muon.__version__, deepspeed_muon.ops.__file__)'
"$python" -c 'import accelerate, transformers; print("transformers", transformers.__version__, "accelerate", accelerate.__version__)'
"$python" -m deepspeed_muon --help
DEEPSPEED_MUON=1 "$python" -c 'import deepspeed, sys; assert sys.modules["deepspeed_muon"].is_registered()'
