#!/usr/bin/env bash
# Compiles every CUDA source under ops/csrc for every supported architecture; keeps nothing. Needs nvcc, but no GPU.
#
#   scripts/nvcc_check.sh [PYTHON]     an interpreter with torch, whose headers the sources may include
#
# sm_90a and sm_100a are the architecture-specific targets of Hopper and Blackwell, with wgmma and tcgen05.
set -euo pipefail

python=${1:-python3}
architectures=(80 90a 100a 120a)
cd "$(dirname "$0")/.."

mapfile -t sources < <(find ops/csrc -name '*.cu' 2>/dev/null | sort)
if [ ${#sources[@]} -eq 0 ]; then
    echo "nvcc-check: no CUDA sources under ops/csrc, nothing to compile"
    exit 0
fi
if ! command -v nvcc >/dev/null; then
    echo "nvcc-check: SKIPPED, there is no nvcc on PATH; not compiled: ${sources[*]}"
    exit 0
fi

includes=(-I ops/csrc)
while IFS= read -r include; do
    includes+=(-isystem "$include")
done < <("$python" -c '
import sysconfig
from torch.utils.cpp_extension import include_paths
print(*include_paths(), sysconfig.get_path("include"), sep="\n")')

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
failed=0
for source in "${sources[@]}"; do
    for architecture in "${architectures[@]}"; do
        if nvcc -std=c++17 --expt-relaxed-constexpr "${includes[@]}" -c "$source" -o "$out/object.o" \
            -gencode "arch=compute_$architecture,code=sm_$architecture"; then
            echo "nvcc-check: ok      sm_$architecture  $source"
        else
            echo "nvcc-check: FAILED  sm_$architecture  $source"
            failed=$((failed + 1))
        fi
    done
done
[ "$failed" -eq 0 ]
