#!/usr/bin/env python3
"""Checks what the compiler made of the passes over flat partitions: 16-byte loads and stores, 8-byte ones of codes.

    scripts/sass_check.py OBJECT...      object files of ops/csrc/cuda/flat_passes.cu

Such a pass is bound by the memory. Where the compiler makes four stores of one, it is right but slow, which nobody
would notice without a GPU. It needs ``cuobjdump`` and ``nvdisasm`` (``pip install nvidia-cuda-cuobjdump
nvidia-cuda-nvdisasm``), beside this interpreter's packages or on ``PATH``; without them it says so and checks nothing.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

# Arrays that a kernel reads and writes, as positions of its template arguments.
ACCESSES = {
    "momentum_pack_kernel": ((0, 1), (0, 2)),
    "momentum_pack_int8_kernel": ((0,), (1,)),  # and codes: eight are 8 bytes
    "unpack_apply_kernel": ((0, 1), (0,)),
}
# Numbers of MuonDtype; an fp32 array takes two accesses of 16 bytes for eight elements.
DTYPES = {"0": "fp32", "1": "fp16", "2": "bf16"}
_KERNEL = re.compile(rf"({'|'.join(ACCESSES)})I((?:Li\dE)+)E")


def expected(kernel: str, dtypes: Sequence[str]) -> tuple[int, int]:
    """Return the 16-byte loads and stores of eight elements."""
    loads, stores = (sum(2 if dtypes[i] == "fp32" else 1 for i in each) for each in ACCESSES[kernel])
    return loads, stores


def faults_in(listing: str) -> Iterator[str]:
    """Yield what is wrong in a listing of ``cuobjdump --dump-sass``; a loop may be unrolled any number of times."""
    found: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for line in listing.splitlines():
        if "Function :" in line:
            counts = found.setdefault(line.split()[-1], Counter())
        elif match := re.search(r"\b(LDG|STG)\.E(\.128|\.64)?\b", line):
            counts[match[1] + (match[2] or "")] += 1
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for name, counts in found.items():
        if match := _KERNEL.search(name):
            dtypes = tuple(DTYPES[number] for number in re.findall(r"\d", match[2]))
            seen.add((match[1], dtypes))
            loads, stores = expected(match[1], dtypes)
            rounds = counts["STG.128"] // stores
            right = (counts["LDG.128"], counts["STG.128"]) == (rounds * loads, rounds * stores)
            if "int8" in match[1]:
                right = right and counts["LDG.64"] == counts["STG.64"] == rounds
            if not rounds or not right:
                yield (
                    f"{match[1]}<{', '.join(dtypes)}>: {counts['LDG.128']} loads and "
                    f"{counts['STG.128']} stores of 16 bytes, expected {loads} and {stores} for each eight elements"
                )
    wanted = {
        (kernel, dtypes)
        for kernel, arrays in zip(ACCESSES, (3, 2, 2), strict=True)
        for dtypes in itertools.product(DTYPES.values(), repeat=arrays)
    }
    for kernel, dtypes in sorted(wanted - seen):
        yield f"{kernel}<{', '.join(dtypes)}> is not in the listing"


def tools() -> str | None:
    """Return a search path with ``cuobjdump`` and ``nvdisasm``, or ``None``."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = [str(path.parent) for path in sorted(packages.glob("*/bin/cuobjdump"))]
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    return path if all(shutil.which(name, path=path) for name in ("cuobjdump", "nvdisasm")) else None


def main(objects: list[str]) -> int:
    path = tools()
    if path is None:
        print("sass-check: SKIPPED, there is no cuobjdump with nvdisasm")
        return 0
    failed = False
    for each in objects:
        run = subprocess.run(
            [shutil.which("cuobjdump", path=path) or "", "--dump-sass", each],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        faults = list(faults_in(run.stdout)) if run.returncode == 0 else [run.stderr.strip()]
        print(f"sass-check: {'FAILED' if faults else 'ok    '}  {Path(each).name}", *faults, sep="\n  ")
        failed |= bool(faults)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
