"""Walks the README from top to bottom in a fresh clone, and executes every block.

    scripts/walk_readme.py [--python .venv/bin/python] [--skip-make] [--repeat 20]
    scripts/walk_readme.py --extract FOLDER      # only write ds_config.json and train.py

The clone is that of the commit that is checked out. A JSON block becomes ``ds_config.json``, a Python block
``train.py``. The lines of a console block run one by one, and the first that fails ends the walk. Without ``--python``
the clone makes an environment of its own (``make setup``). ``--skip-make`` leaves out the lines that call ``make``:
they take minutes, and CI runs ``make test`` anyway. ``--repeat`` then starts the script that many times on two
ranks: a rank that leaves while another one still uses the process group ends a program with -6 in some runs only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = {"json": "ds_config.json", "python": "train.py"}


def main() -> int:
    """Return 1 if a block failed, has no known language, or if the training used another optimizer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", type=Path, help="the interpreter of an environment that has all that is needed"
    )
    parser.add_argument("--skip-make", action="store_true", help="leave out the lines that call make")
    parser.add_argument(
        "--repeat", type=int, default=0, metavar="N", help="run train.py N more times, on two ranks"
    )
    parser.add_argument("--extract", type=Path, metavar="FOLDER", help="only write the README's files there")
    options = parser.parse_args()
    if options.extract:
        for language, text in blocks(ROOT / "README.md"):
            if language in FILES:
                (options.extract / FILES[language]).write_text(text)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        if options.python is None:
            subprocess.run(["make", "setup"], cwd=clone, check=True)
        programs = clone / ".venv" / "bin" if options.python is None else options.python.absolute().parent
        env = dict(os.environ, PYTHONPATH=str(clone), PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
        return walk(clone, env, skip_make=options.skip_make) or repeat(clone, env, options.repeat)


def blocks(readme: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a README."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", readme.read_text(), re.M | re.S)


def walk(clone: Path, env: dict[str, str], *, skip_make: bool) -> int:
    """Execute the blocks of a clone's README; return 1 if one failed."""
    for language, text in blocks(clone / "README.md"):
        if language in FILES:
            (clone / FILES[language]).write_text(text)
            print(f"wrote   {FILES[language]}")
            continue
        if language != "console":
            print(f"FAILED  a block of the language {language!r}: json, python and console can be executed")
            return 1
        for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
            if skip_make and line.startswith("make "):
                print(f"skipped {line}  (--skip-make)")
                continue
            start = time.monotonic()
            done = subprocess.run(line, shell=True, cwd=clone, env=env, capture_output=True, text=True)
            trained_otherwise = line.endswith("train.py") and "deepspeed_muon" not in done.stderr
            failed = done.returncode or trained_otherwise
            print(
                f"{'FAILED ' if failed else 'ran    '} {line}  ({time.monotonic() - start:.0f} s)", flush=True
            )
            if failed:
                print(done.stdout[-4000:], done.stderr[-4000:], f"exit status {done.returncode}", sep="\n")
                return 1
    return 0


def repeat(clone: Path, env: dict[str, str], times: int) -> int:
    """Run the README's script on two ranks, again and again; return 1 if a run failed."""
    failures = 0
    for number in range(1, times + 1):
        command = ["deepspeed", "--num_accelerators", "2", "train.py"]
        done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)
        if done.returncode:
            failures += 1
            print(f"FAILED  run {number} of {times} on two ranks", done.stderr[-2000:], sep="\n", flush=True)
    if times:
        print(
            f"{'FAILED ' if failures else 'ran    '} train.py on two ranks: {failures} of {times} runs failed"
        )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
