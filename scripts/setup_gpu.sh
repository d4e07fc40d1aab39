#!/usr/bin/env bash
# Adds to an environment what `make gpu` uses on a machine with an NVIDIA GPU; on another machine it does nothing.
#
#   scripts/setup_gpu.sh FOLDER
set -euo pipefail

folder=$1
cd "$(dirname "$0")/.."
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi >/dev/null 2>&1; then
    exit 0
fi
cuda=$("$folder/bin/python" -c 'import torch; print(torch.version.cuda or "")')
if [ -z "$cuda" ]; then
    echo "torch in $folder has no CUDA. Run 'make clean' and make it anew; TORCH_ARGS are pip's arguments for torch." >&2
    exit 1
fi

# What cannot be installed is left out: `make gpu` says so on its page.
optional() {
    "$folder/bin/python" -m pip --disable-pip-version-check install -q --no-build-isolation \
        --constraint "$folder/constraints.txt" "$@" || echo "left out, because pip cannot install it: $*" >&2
}
command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || optional "cuda-toolkit[cccl,cudart,nvcc]==$cuda.*"
# pip's toolkit has its runtime under the name libcudart.so.13 alone, which no linker finds.
for runtime in "$folder"/lib/python*/site-packages/nvidia/cu*/lib/libcudart.so.*; do
    [ ! -e "$runtime" ] || ln -sf "$(basename "$runtime")" "${runtime%.so.*}.so"
done
command -v compute-sanitizer >/dev/null || [ -x /usr/local/cuda/bin/compute-sanitizer ] ||
    optional "nvidia-cuda-sanitizer-api==${cuda%%.*}.*"
if [ "${cuda%%.*}" -ge 13 ]; then optional gram-newton-schulz "quack-kernels[cu13]"; else optional gram-newton-schulz quack-kernels; fi
