"""Checks what is uploaded: the archive has real files, and both wheels, of the archive and of the tree, are equal.

    scripts/compare_wheels.py ARCHIVE.tar.gz WHEEL_OF_ARCHIVE.whl WHEEL_OF_TREE.whl

``scripts/wheel_check.sh`` calls it.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile


def faults(archive: str, of_archive: str, of_tree: str) -> list[str]:
    """Return what is wrong with a release; nothing if it can be uploaded."""
    wrong = []
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
    # deepspeed_muon/ops is a link in the repository.
    wrong += [f"{member.name} is a link" for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/")[2] for member in members}
    for name in ("deepspeed_muon/ops/builder.py", "deepspeed_muon/ops/csrc/", "LICENSE", "CHANGELOG.md"):
        if not any(member.startswith(name) for member in names):
            wrong.append(f"the archive has no {name}")
    with zipfile.ZipFile(of_archive) as first, zipfile.ZipFile(of_tree) as second:
        inside = set(first.namelist()), set(second.namelist())
        wrong += [f"{name} is in one wheel only" for name in sorted(inside[0] ^ inside[1])]
        wrong += [
            f"{name} differs"
            for name in sorted(inside[0] & inside[1])
            if first.read(name) != second.read(name)
        ]
        if not of_archive.endswith("-py3-none-any.whl"):
            wrong.append(f"{of_archive} is not for every platform")
        wrong += [f"{name} is compiled" for name in sorted(inside[0]) if name.endswith((".so", ".o", ".pyc"))]
    return wrong


if __name__ == "__main__":
    differences = faults(*sys.argv[1:])
    print("\n".join(differences) or "the archive has real files, and both wheels are equal")
    sys.exit(bool(differences))
