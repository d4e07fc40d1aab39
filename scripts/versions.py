"""Runs the compat tests and the README's example under many versions of DeepSpeed, torch and Python; writes a table.

    make versions                                                  the pinned torch and Python, all 0.19 releases
    scripts/versions.py --python python3.11 python3.12 --torch 2.13.0 2.14.1 --deepspeed 0.19.2 0.19.8
    scripts/versions.py --deepspeed 0.19.8 --hf transformers==4.51.3 accelerate==1.6.0 peft==0.15.2

Releases before the oldest supported one must be refused; of those the last of each minor release is tried. One
environment for each Python and torch, where the releases of DeepSpeed follow each other; it is removed at the end.
With ``--hf`` the distributed tests that name transformers run instead of the compat tests. Results are kept in
``benchmarks/results/versions.json`` after every run: what is there is not run again (``--again`` does), and the table
in ``docs/usage.md`` is written from it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from canary import ROOT, Environment
from packaging.version import Version
from walk_readme import FILES

RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "usage.md"
TABLE = re.compile(r"(?<=<!-- scripts/versions.py -->\n).*?(?=<!-- end -->)", re.S)


def main() -> int:
    """Return 1 if a supported version fails, or one that is too old is not refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", nargs="+", default=[os.environ.get("PYTHON", "python3")])
    parser.add_argument("--torch", nargs="+", default=[os.environ.get("TORCH_VERSION", "2.13.0")])
    parser.add_argument("--deepspeed", nargs="+", help="releases (all that are to be tried)")
    parser.add_argument("--hf", nargs="+", default=[], help="such as transformers==4.51.3 accelerate==1.6.0")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-versions", help="where environments go")
    parser.add_argument("--again", action="store_true", help="run what is in the results too")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for python in options.python:
        for torch in options.torch:
            environment = Environment(options.folder / f"{Path(python).name}-{torch}")
            for release in options.deepspeed or releases():
                name = subprocess.check_output(
                    [python, "-c", "import platform as p; print(p.python_version())"]
                )
                key = f"Python {name.decode().strip()}, torch {torch}, DeepSpeed {release}"
                key = ", ".join([key, *(each.replace("==", " ") for each in options.hf)])
                if key in results and not options.again:
                    continue
                print(key, flush=True)
                environment.make(release, PYTHON=python, TORCH_VERSION=torch)
                results[key] = outcome(environment, release, options.hf)
                print(json.dumps(results[key], indent=1), flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            if not options.keep:
                shutil.rmtree(environment.folder, ignore_errors=True)
    PAGE.write_text(TABLE.sub(lambda _: table(results), PAGE.read_text()))
    return int(any(not each["as expected"] for each in results.values()))


def oldest() -> Version:
    """Return the oldest supported release, as ``engine/hooks.py`` has it."""
    text = (ROOT / "deepspeed_muon" / "engine" / "hooks.py").read_text()
    return Version(re.findall(r'^OLDEST = "(.*)"', text, re.M)[0])


def releases() -> list[str]:
    """Return what pip offers: all releases of the oldest supported minor one and later, the last of some before."""
    told = subprocess.check_output([sys.executable, "-m", "pip", "index", "versions", "deepspeed"], text=True)
    offered = sorted(map(Version, re.findall(r"Available versions: (.*)", told)[0].split(", ")))
    first = oldest()
    minors = {(each.major, each.minor): each for each in offered}  # the last one of each stays
    old = [each for minor, each in minors.items() if (0, 16) <= minor < (first.major, first.minor)]
    return [
        str(each)
        for each in (*old, *(each for each in offered if each.release >= (first.major, first.minor)))
    ]


def outcome(environment: Environment, release: str, hf: list[str]) -> dict[str, Any]:
    """Install a release, and the packages of ``--hf``, and return what becomes of it."""
    environment.install(release)
    which = []
    if hf:
        environment.run("-m", "pip", "install", "-q", *hf, check=True)
        files = sorted((ROOT / "tests" / "distributed").glob("test_*.py"))
        which = [str(file) for file in files if "transformers" in file.read_text()]
    facts = environment.facts()
    if facts["guard"]:
        return {"as expected": Version(release) < oldest(), "outcome": "refused", "report": facts["guard"]}
    passed, report = environment.tests(*which)
    with tempfile.TemporaryDirectory() as folder:
        for language, text in re.findall(
            r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
        ):
            if language in FILES:
                (Path(folder) / FILES[language]).write_text(text)
        program = environment.python.parent / "deepspeed"
        done = environment.run(program, "--num_accelerators", "1", "train.py", cwd=folder)
    example = "loss " in done.stdout
    counts = re.sub(r"(, \d+ warnings)? in .*|=", "", report.splitlines()[-1]).strip()
    return {
        "as expected": Version(release) >= oldest() and passed and example,
        "outcome": f"{counts}; the example {'trains' if example else 'fails'}",
        "report": report if example else f"{report}\n{done.stderr[-2000:]}",
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a Markdown table; one row for the releases of DeepSpeed with the same outcome."""
    releases_of: dict[tuple[str, str], list[str]] = {}
    for key, each in sorted(results.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        environment, release = key.split(", DeepSpeed ")
        outcome = each["outcome"].removesuffix("; the example trains")
        releases_of.setdefault((environment, outcome), []).insert(0, release)
    rows = ["| versions | tests |", "|---|---|"]
    rows += [
        f"| {environment}, DeepSpeed {', '.join(found)} | {outcome} |"
        for (environment, outcome), found in reversed(releases_of.items())
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
