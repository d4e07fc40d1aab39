#!/usr/bin/env bash
# Builds the source archive and the wheel as they are uploaded, and checks them as a stranger gets them: installs
# deepspeed-muon[hf] into an empty environment and trains the README's script on two CPU ranks, with a C++ compiler and
# without one. What was checked is in dist/ afterwards.
#
#   scripts/wheel_check.sh DEEPSPEED_VERSION
#
# Environment: PYTHON, TORCH_VERSION and TORCH_ARGS as in setup_env.sh.
set -euo pipefail

cd "$(dirname "$0")/.."
repository=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The repository's own package must not be imported in place of the installed one.
unset PYTHONPATH
"${PYTHON:-python3}" -m venv "$work/env"
python=$work/env/bin/python
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
say() { printf '== %s\n' "$*"; }

say "an environment with torch and DeepSpeed"
# In the order of setup_env.sh, and for its reasons.
pip install -q "setuptools>=77" wheel numpy
# shellcheck disable=SC2086
pip install -q "torch==${TORCH_VERSION:-2.13.0}" ${TORCH_ARGS:-}
"$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$work/constraints.txt"
hold=(-q --no-build-isolation --constraint "$work/constraints.txt")
pip install "${hold[@]}" ninja py-cpuinfo packaging
pip install "${hold[@]}" "deepspeed==$1"

say "source archive and wheel"
pip install -q build twine
# From a copy without what earlier builds have left, which setuptools would pack too, and which other checks may be
# changing meanwhile.
mkdir "$work/tree"
git ls-files -z --cached --others --exclude-standard --deduplicate | tar c --null --files-from - | tar x -C "$work/tree"
"$python" -m build -q --no-isolation --outdir "$work/dist" "$work/tree"  # the wheel is made from the archive
"$python" -m build -q --no-isolation --wheel --outdir "$work/of_tree" "$work/tree"
"$python" -m twine check --strict "$work"/dist/*
"$python" "$repository/scripts/compare_wheels.py" "$work"/dist/*.tar.gz "$work"/dist/*.whl "$work"/of_tree/*.whl

say "installed from an index"
# An index as pip knows it: a folder for each project. Everything else comes from where pip is told to look anyway.
index=$work/index/deepspeed-muon
mkdir -p "$index"
for file in "$work"/dist/*; do
    name=$(basename "$file")
    cp "$file" "$index/"
    printf '<a href="%s">%s</a>\n' "$name" "$name" >>"$index/index.html"
done
cd "$work"
version=$(ls dist/*.whl | sed -E 's/.*deepspeed_muon-([^-]+)-.*/\1/')
pip install "${hold[@]}" --extra-index-url "file://$work/index" "deepspeed-muon[hf]==$version"
"$python" -m pip check
"$python" -c 'import deepspeed_muon, deepspeed_muon.ops; print(deepspeed_muon.__version__, deepspeed_muon.ops.__file__)'
"$python" -c 'import accelerate, transformers; print("transformers", transformers.__version__, "accelerate", accelerate.__version__)'
"$work/env/bin/deepspeed-muon" --help
DEEPSPEED_MUON=1 "$python" -c 'import deepspeed, sys; from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS; assert sys.modules["deepspeed_muon"].Muon in ZERO_SUPPORTED_OPTIMIZERS'

# train NAME PATH LINE: run the README's script on two ranks with programs from PATH; its output must have LINE.
train() {
    mkdir -p "$work/$1"
    local port failed=0
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    "$python" "$repository/scripts/walk_readme.py" --extract "$work/$1"
    (
        cd "$work/$1"
        env -u CXX -u CC -u CUDA_HOME PATH="$2" HOME="$work/$1" TORCH_EXTENSIONS_DIR="$work/$1/extensions" \
            DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
            deepspeed --num_accelerators 2 --master_port "$port" train.py
    ) >"$work/$1.log" 2>&1 || failed=$?
    rm -f /dev/shm/deepspeed_allreduce_buffer_*_"$port"_*  # DeepSpeed leaves 66 MB a rank
    [ "$failed" = 0 ] || { cat "$work/$1.log"; say "$1: the README's script ended with $failed"; exit 1; }
    grep -E "^loss |^deepspeed_muon" "$work/$1.log" || true
    # Both ranks print, and one may write before the other's line has ended.
    for line in "loss [0-9]+\.[0-9]+" "deepspeed_muon $version: Muon for" "$3"; do
        grep -qE "$line" "$work/$1.log" || { cat "$work/$1.log"; say "$1: no line '$line'"; exit 1; }
    done
}

say "the README's script, with a C++ compiler"
train with_compiler "$work/env/bin:$PATH" "kernels: native"

say "the README's script, without a compiler"
mkdir "$work/programs"
for program in /usr/bin/* /bin/*; do
    name=$(basename "$program")
    [[ $name =~ (^|-)(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|cpp|c89|c99|nvcc|tcc)(-[0-9.]+)?$ ]] || ln -sf "$program" "$work/programs/$name"
done
# On CPU ranks DeepSpeed itself compiles one operator, with any optimizer, and ends without it.
mkdir -p "$work/without_compiler/extensions"
cp -a "$work/with_compiler/extensions/deepspeed_shm_comm" "$work/without_compiler/extensions/"
train without_compiler "$work/env/bin:$work/programs" "the native ops cannot be built on this machine"

cd "$repository"
rm -rf dist
cp -r "$work/dist" .
say "ready: $(ls dist | tr '\n' ' ')"
