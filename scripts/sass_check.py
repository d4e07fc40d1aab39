#!/usr/bin/env python3
"""Checks what the compiler made of the passes over flat partitions: 16-byte loads and stores in every dtype.

    scripts/sass_check.py OBJECT...      object files of ops/csrc/cuda/flat_passes.cu

Such a pass is bound by the memory. Where the compiler makes four stores of one, it is right but slow, which nobody
would notice without a GPU. It needs ``cuobjdump`` and ``nvdisasm`` (``pip install nvidia-cuda-cuobjdump
nvidia-cuda-nvdisasm``), beside this interpreter's packages or on ``PATH``; without them it says so and checks nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

EXPECTED = {
    # kernel and whether its third array is fp32: 16-byte loads and stores of eight elements
    ("momentum_pack_kernel", True): (4, 4),
    ("momentum_pack_kernel", False): (4, 3),
    ("unpack_apply_kernel", True): (4, 2),
    ("unpack_apply_kernel", False): (3, 2),
}
_KERNEL = re.compile(r"(momentum_pack_kernel|unpack_apply_kernel)I(f|6__half|13__nv_bfloat16)")


def faults_in(listing: str) -> Iterator[str]:
    """Yield what is wrong in a listing of ``cuobjdump --dump-sass``; a loop may be unrolled any number of times."""
    found: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for line in listing.splitlines():
        if "Function :" in line:
            counts = found.setdefault(line.split()[-1], Counter())
        elif match := re.search(r"\b(LDG|STG)\.E(\.128)?\b", line):
            counts[match[1] + (match[2] or "")] += 1
    seen = set()
    for name, counts in found.items():
        if match := _KERNEL.search(name):
            kind = match[1], match[2] == "f"
            seen.add((match[1], match[2]))
            loads, stores = EXPECTED[kind]
            rounds = counts["STG.128"] // stores
            if not rounds or (counts["LDG.128"], counts["STG.128"]) != (rounds * loads, rounds * stores):
                yield (
                    f"{match[1]}<{match[2]}>: {counts['LDG.128']} loads and {counts['STG.128']} stores of 16 bytes, "
                    f"expected {loads} and {stores} for each eight elements"
                )
    missing = {
        (kernel, dtype) for kernel, _ in EXPECTED for dtype in ("f", "6__half", "13__nv_bfloat16")
    } - seen
    yield from (f"{kernel}<{dtype}> is not in the listing" for kernel, dtype in sorted(missing))


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
