"""Plants defects one at a time into a copy of the repository and tells whether the tests of the default run catch them.

``tests/planted_defects.toml`` lists them: file, text, the text in its place, what would go wrong for a user, and the
test that fails. With ``--workarounds`` the defects are DeepSpeed's own: the workarounds in
``deepspeed_muon/engine/workarounds/`` are switched off one at a time, and the test that each of them names must fail
under the installed DeepSpeed. First the named tests must pass without a defect. The working tree is not touched.

    .venv/bin/python scripts/planted_defects.py
    .venv/bin/python scripts/planted_defects.py --only 3 17
    .venv/bin/python scripts/planted_defects.py --workarounds
    .venv/bin/python scripts/planted_defects.py --all-tests --only 3
    .venv/bin/python scripts/planted_defects.py --table planted_defects.md
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parent.parent
TABLE = REPOSITORY / "tests" / "planted_defects.toml"
# pytest's exit status: all passed; some failed.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Defect:
    """A mistake that a test must catch.

    Attributes:
        file: Where it is, from the root of the repository.
        old: The right text, which the file has once.
        new: The wrong text.
        harm: What a user would see.
        test: The file or node of pytest that fails.
    """

    file: str
    old: str
    new: str
    harm: str
    test: str

    def plant(self, root: Path) -> str:
        """Put the wrong text into the copy; return the right one of the whole file."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.file} has this text {text.count(self.old)} times, not once:\n{self.old}")
        path.write_text(text.replace(self.old, self.new))
        return text


def workarounds() -> list[Defect]:
    """Return the workarounds for defects that the newest tested DeepSpeed has, each switched off."""
    row = re.compile(
        r'^(\w+) = Workaround\(\n    defect="(?:.|\n(?!\)))*?    test="(.*)",\n(?!    fixed_in)', re.M
    )
    defects = []
    for path in sorted((REPOSITORY / "deepspeed_muon" / "engine" / "workarounds").glob("*.py")):
        for found in row.finditer(path.read_text()):
            harm = found[1].lower().replace("_", " ")
            file = str(path.relative_to(REPOSITORY))
            defects.append(Defect(file, found[0], f'{found[0]}    fixed_in="0",\n', harm, found[2]))
    return defects


def copy_repository(to: Path) -> None:
    """Copy all files that git knows or does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source = REPOSITORY / name
        if source.is_symlink() or source.exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)


def run_tests(root: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests of the copy until the first failure; return pytest's status and output.

    A fork runs them, which has imported torch and DeepSpeed already but nothing of the repository.
    """
    output = root.parent / f"{root.name}.log"
    child = os.fork()
    if child == 0:
        with output.open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        sys.path.insert(0, str(root))
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests])
        sys.stdout.flush()
        os._exit(int(status))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), output.read_text()


def first_failure(output: str) -> str:
    """Return the first line of pytest's summary that names a failure."""
    lines = (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR")))
    return next(lines, output.strip().rpartition("\n")[2])


def as_table(defects: dict[int, Defect], caught: dict[int, bool]) -> str:
    """Return the results as Markdown."""
    command = "`.venv/bin/python scripts/planted_defects.py`"
    lines = [
        "# Planted defects",
        "",
        f"{sum(caught.values())} of {len(caught)} caught, each by the named test of the default run. {command}",
        "",
        "| | module | what a user would see | caught by |",
        "|---|---|---|---|",
    ]
    for number, result in caught.items():
        defect = defects[number]
        module = defect.file.removeprefix("deepspeed_muon/")
        test = defect.test.removeprefix("tests/").replace("|", "\\|") if result else "**not caught**"
        lines.append(f"| {number} | `{module}` | {defect.harm} | `{test}` |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the command; return 0 if all defects were caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these defects, counted from 1")
    parser.add_argument(
        "--workarounds", action="store_true", help="switch off workarounds for DeepSpeed instead"
    )
    parser.add_argument("--all-tests", action="store_true", help="run the default suite, not the named test")
    parser.add_argument("--table", type=Path, help="write the results to this Markdown file")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    importlib.import_module("deepspeed")
    listed = [Defect(**entry) for entry in tomllib.loads(TABLE.read_text())["defect"]]
    defects = dict(enumerate(workarounds() if arguments.workarounds else listed, 1))
    chosen = arguments.only or list(defects)
    caught: dict[int, bool] = {}
    with tempfile.TemporaryDirectory(prefix="planted-defects-") as folder:
        root = Path(folder) / "repository"
        copy_repository(root)
        for number in chosen:  # before the first test: a text that is not there ends the run
            (root / defects[number].file).write_text(defects[number].plant(root))
        tests = [] if arguments.all_tests else sorted({defects[n].test for n in chosen})
        status, output = run_tests(root, tests)
        if status != PASSED:
            raise SystemExit(f"the tests fail without a defect:\n{output}")
        for number in chosen:
            defect, began = defects[number], time.monotonic()
            right = defect.plant(root)
            status, output = run_tests(root, [] if arguments.all_tests else [defect.test])
            (root / defect.file).write_text(right)
            if status not in (PASSED, FAILED):
                raise SystemExit(f"{number} {defect.file}: pytest ended with {status}:\n{output}")
            caught[number] = status == FAILED
            verdict = first_failure(output) if caught[number] else f"NOT CAUGHT by {defect.test}"
            print(f"{number:3} {defect.file}: {verdict[:150]} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{sum(caught.values())} of {len(caught)} planted defects caught")
    if arguments.table is not None:
        arguments.table.write_text(as_table(defects, caught))
    return 0 if all(caught.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
