#!/usr/bin/env bash
# Builds, checks and then times the CUDA kernels on a machine with a GPU; all output stays in $OUT.
#
#   OUT=folder scripts/gpu_session.sh [PYTHON]     an interpreter with torch (CUDA) and pytest; default python3
#
# Needs nvcc; DeepSpeed and an installed copy of this project only for tests/gpu/test_graphs.py, which is skipped without
# them. Nothing is timed unless everything is right: a fast wrong kernel is worth nothing. Changes no setting of the
# card. About five minutes on an H200.
set -euo pipefail

python=${1:-python3}
OUT=${OUT:?a folder for the output}
cd "$(dirname "$0")/.."
mkdir -p "$OUT"
export PATH="$PATH:/usr/local/cuda/bin" OMP_NUM_THREADS=4

nvidia-smi | tee "$OUT/nvidia-smi.txt"
"$python" - <<'PY' | tee "$OUT/versions.txt"
import torch
print("torch", torch.__version__, "cuda", torch.version.cuda, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
PY

echo "== build"
# Not in $OUT: everything there travels back.
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
"$python" - "$build" <<'PY' 2>&1 | tee "$OUT/build.txt"
import sys
from pathlib import Path
import torch
from tests.support.cuda_library import build
major, minor = torch.cuda.get_device_capability()
print(build(Path(sys.argv[1]), (f"{major}{minor}" + ("a" if major >= 9 else ""),)))
PY
export MUON_CUDA_LIBRARY="$build/libmuon_cuda.so"
if command -v cuobjdump >/dev/null; then
    # wgmma must show as HGMMA; LDL and STL are register spills.
    cuobjdump --dump-sass "$MUON_CUDA_LIBRARY" >"$build/sass.txt"
    for instruction in HGMMA UTMALDG HMMA LDSM LDL STL; do
        echo "$instruction $(grep -c "\b$instruction" "$build/sass.txt" || true)"
    done | tee "$OUT/sass_counts.txt"
fi

echo "== correctness"
# A kernel that waits for ever must not eat the session.
timeout 240 "$python" -m pytest -p no:cacheprovider -q -x tests/gpu 2>&1 | tee "$OUT/tests.txt"

if [ "${SANITIZE:-0}" = 1 ] && command -v compute-sanitizer >/dev/null; then
    echo "== compute-sanitizer"
    for tool in memcheck racecheck; do
        timeout 240 compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -p no:cacheprovider -q -x \
            tests/gpu -k "(test_sym_gemm and 264) or (momentum_pack and 4099)" 2>&1 | tee "$OUT/$tool.txt"
    done
fi

echo "== timing"
timeout 420 "$python" -m tests.gpu.time_kernels "$MUON_CUDA_LIBRARY" "$OUT/times.json" 2>&1 | tee "$OUT/times.txt"
