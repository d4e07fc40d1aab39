"""Runs every command of the tutorial, and writes the output of this machine into the page.

    scripts/walk_tutorial.py            # write docs/tutorial.md
    scripts/walk_tutorial.py --check    # only run the commands; the page stays as it is

A block with a title is written to the file of that name. In a console block the lines that begin with ``$`` are run in
order in one empty folder, and the lines below each of them are its output: standard output and the line that
deepspeed_muon logs, without the lines of DeepSpeed's logger. The first command that fails ends the run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LOGGED_BY_DEEPSPEED = re.compile(r"\[\d{4}-|\[rank|DeepSpeed deepspeed\.ops|Setting ds_accelerator")


class CommandFailed(RuntimeError):
    """A command of the page ended with an error."""


def environment() -> dict[str, str]:
    """Return the environment of the commands: two CPU ranks, and this repository's package."""
    programs = Path(sys.executable).absolute().parent
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }


def output_of(command: str, folder: Path) -> str:
    """Run a command line and return what the page shows of its output.

    Raises:
        CommandFailed: its exit status is not 0.
    """
    completed = subprocess.run(
        command, shell=True, cwd=folder, env=environment(), capture_output=True, text=True
    )
    if completed.returncode:
        raise CommandFailed(f"{command}\n{completed.stdout[-4000:]}\n{completed.stderr[-4000:]}")
    logged = [line for line in completed.stderr.splitlines() if line.startswith("deepspeed_muon ")]
    printed = [line for line in completed.stdout.splitlines() if not LOGGED_BY_DEEPSPEED.match(line)]
    return "".join(f"{line.rstrip()}\n" for line in logged + printed)


def walk(page: str, folder: Path) -> str:
    """Write the files and run the commands of a page in ``folder``; return the page with their output."""

    def execute(block: re.Match[str]) -> str:
        language, title, text = block.groups()
        if title:
            (folder / title).write_text(text)
        if language != "console":
            return block[0]
        commands = re.findall(r"^\$ ((?:.*\\\n)*.*)\n", text, re.MULTILINE)
        return "```console\n" + "".join(f"$ {line}\n{output_of(line, folder)}" for line in commands) + "```"

    return BLOCK.sub(execute, page)


def main() -> int:
    """Walk the tutorial; return 1 if a command failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="do not write the page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            page = walk(PAGE.read_text(), Path(folder))
        except CommandFailed as error:
            print(error, file=sys.stderr)
            return 1
    if not options.check:
        PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
