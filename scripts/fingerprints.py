"""Writes deepspeed_muon/engine/fingerprints.json: digests of the functions of DeepSpeed that the package depends on.

    make fingerprints RELEASES="0.19.9"                the same as below
    scripts/fingerprints.py 0.19.9                     adds a release, whose sources pip downloads
    scripts/fingerprints.py ../DeepSpeed-0.19.9        adds the release in a folder with its sources
    scripts/fingerprints.py                            makes the rows of all releases in the table again

Add a release when its tests have passed (``make versions``): engines warn of functions that are in no release of the
table. Nothing is installed: DeepSpeed is imported from its sources, with what this environment has besides. After
another function is replaced or called, make all rows again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "deepspeed_muon" / "engine" / "fingerprints.json"


def main() -> int:
    """Return 0 once the table is written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="*", help="releases, or folders or archives with sources")
    parser.add_argument(
        "--facts", action="store_true", help=argparse.SUPPRESS
    )  # with the sources on the path
    options = parser.parse_args()
    if options.facts:
        print(json.dumps(facts()))
        return 0
    table: dict[str, Any] = json.loads(TABLE.read_text()) if TABLE.exists() else {"releases": []}
    # A row holds its digests by the first release that has them, so all releases are read again.
    sources = {release: release for release in table["releases"]}
    digests: dict[str, dict[str, dict[str, str]]] = {}
    for source in [*options.sources, *sources]:
        with folder_of(source) as folder:
            release_facts = read(folder)
        digests.setdefault(release_facts.pop("release"), release_facts)
    TABLE.write_text(json.dumps(merged(digests), indent=1) + "\n")
    print(f"{TABLE.relative_to(ROOT)}: {', '.join(sorted(digests, key=Version))}")
    return 0


@contextmanager
def folder_of(source: str) -> Iterator[Path]:
    """Yield a folder with the sources of a release, which pip downloads unless ``source`` is a folder or archive."""
    if Path(source).is_dir():
        yield Path(source).absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(source)
        if not archive.is_file():
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "-d", folder]
            wanted = [f"deepspeed=={source}", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
            subprocess.run([*pip, *wanted], check=True)
            (archive,) = Path(folder).glob("deepspeed-*.tar.gz")
        subprocess.run(["tar", "xzf", str(archive), "-C", folder], check=True)
        yield Path(folder, archive.name.removesuffix(".tar.gz"))


def read(folder: Path) -> dict[str, Any]:
    """Return :func:`facts` of the sources in a folder."""
    path = os.pathsep.join((str(folder), str(ROOT)))
    command = [sys.executable, str(Path(__file__).resolve()), "--facts"]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    release_facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return release_facts


def facts() -> dict[str, Any]:
    """Return the release of the DeepSpeed that is imported, and the digests of its functions."""
    import deepspeed

    from deepspeed_muon.engine import hooks, patching

    functions = hooks.watched_functions()
    return {
        "release": Version(deepspeed.__version__).base_version,
        "functions": {patching.name_of(*pair): patching.digest_of(*pair) for pair in functions},
    }


def merged(digests: dict[str, dict[str, dict[str, str]]]) -> dict[str, Any]:
    """Return the table of several releases."""
    releases = sorted(digests, key=Version)
    rows: dict[str, dict[str, str]] = {}
    for release in releases:
        for name, digest in digests[release]["functions"].items():
            row = rows.setdefault(name, {})
            if digest not in row.values():
                row[release] = digest
    return {"releases": releases, "functions": {name: rows[name] for name in sorted(rows)}}


if __name__ == "__main__":
    sys.exit(main())
