#!/usr/bin/env bash
# Compiles every CUDA source under ops/csrc for every supported architecture; keeps nothing. Needs nvcc, that of pip's
# wheels too, but no GPU; without it it says so and compiles nothing, and fails if the variable CI is set.
#
#   scripts/nvcc_check.sh [-v]     -v: registers and stack of every kernel too
#
# Fails on warnings, on register spills, and where ptxas serialises wgmma or ignores setmaxnreg (C75xx): such a kernel
# is right but slow, which nobody would notice without a GPU. sm_90a and sm_100a are the architecture-specific targets
# of Hopper and Blackwell; wgmma needs the first, and nothing here uses the second's tcgen05. The sources include no torch headers. Then scripts/sass_check.py looks
# at the machine code of the flat passes.
set -euo pipefail

verbose=0
[ "${1:-}" = "-v" ] && verbose=1
architectures=(80 90a 100a 120a)
cd "$(dirname "$0")/.."

mapfile -t sources < <(find ops/csrc -name '*.cu' 2>/dev/null | sort)
if [ ${#sources[@]} -eq 0 ]; then
    echo "nvcc-check: no CUDA sources under ops/csrc, nothing to compile"
    exit 0
fi
python=.venv/bin/python
[ -x "$python" ] || python=python3
# The package needs torch and DeepSpeed, which this check does not.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
nvcc=$(PATH=${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:$packages/nvidia/cu13/bin:/usr/local/cuda/bin command -v nvcc) || nvcc=""
if [ -z "$nvcc" ]; then
    echo "nvcc-check: SKIPPED, there is no nvcc on PATH, in CUDA_HOME or of pip; not compiled: ${sources[*]}"
    [ -z "${CI:-}" ] || exit 1
    exit 0
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Compiles source $1 for architecture $2; says how it went and leaves the object only if all is well.
check() {
    local source=$1 architecture=$2
    local name
    name=$(basename "$source" .cu)-$architecture
    local log=$out/$name.log
    local fault=""
    # The code for the host is the same for all architectures.
    local kind=-cubin
    [ "$architecture" != "$with_host" ] || kind=-c
    "$nvcc" -std=c++17 -O3 -Werror all-warnings -Xptxas -v $kind "$source" -o "$out/$name.o" \
        -gencode "arch=compute_$architecture,code=sm_$architecture" >"$log" 2>&1 || fault="does not compile"
    if grep -qE '[1-9][0-9]* bytes spill' "$log"; then fault+=" spills registers"; fi
    if grep -qE 'C75[0-9]{2}' "$log"; then fault+=" ptxas gave up an optimisation"; fi
    if [ -z "$fault" ]; then
        echo "nvcc-check: ok      sm_$architecture  $source"
        [ "$verbose" -eq 0 ] || grep -E "Compiling entry|Used|spill" "$log" || true
    else
        echo "nvcc-check: FAILED  sm_$architecture  $source: $fault"
        cat "$log"
        rm -f "$out/$name.o"
    fi
}
export -f check
export out verbose nvcc with_host=${architectures[0]}

for source in "${sources[@]}"; do
    for architecture in "${architectures[@]}"; do
        printf '%s\0%s\0' "$source" "$architecture"
    done
done | xargs -0 -n 2 -P "$(nproc)" bash -c 'check "$1" "$2"' check

compiled=$(find "$out" -name '*.o' | wc -l)
wanted=$((${#sources[@]} * ${#architectures[@]}))
echo "nvcc-check: $compiled of $wanted compiled cleanly"
[ "$compiled" -eq "$wanted" ]

"$python" scripts/sass_check.py "$out"/flat_passes-*.o
