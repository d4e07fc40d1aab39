"""Keeps what is left after each fault.

``python -m tests.faults.table`` writes ``benchmarks/results/save_faults.md``; with ``--results`` it takes
what ``python -m tests.faults.runner WORK --full`` wrote before, instead of running it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.harness import run_command
from tests.support.native_ops import REPOSITORY

ACTIONS = (
    "EIO",
    "ENOSPC",
    "done, EIO",
    "kill",
    "lost",
    "done, lost",
    "shard gone",
    "folder gone",
    "not shared",
)

HEAD = """# What a save leaves when something fails

Each line is a call of a save into a folder that holds a complete set of step 1, by an engine at step 2 (or by the
command line, from DeepSpeed's files of step 2). Each column is a way in which that call failed: it reported an error,
it was done and then reported one, the process was killed instead of it, a collective broke off, somebody else had
removed a new shard or the folder, or the rank had a folder of its own. The cell says what the folder held afterwards,
found by `verify` and by restoring it and comparing every tensor with the old and the new state: **old** or **new**; a
first save into folders that it makes leaves **nothing** or **new**. Where a line stands for several calls, the cell
counts them.

`save_checkpoint` is DeepSpeed's, with `consolidate_on_save`: its folder holds a checkpoint of step 1 (new tag), or one
of another run at the same step and tag. Either rank is killed, at each call below the folder and at moments that no
call marks, in the middle of what torch writes. The cell says what `restore` of the folder found, and in brackets what
`checkpoint consolidate` made of each tag's own files: files of two saves must be **refused**.

Command: `python -m tests.faults.table`.

{summary}
"""


def render(results: Mapping[str, Any]) -> str:
    """Return the table as Markdown."""
    cases = results["cases"]
    cuts = sum(sum(case["power cuts"].values()) for case in cases)
    bad = sum(bool(case["wrong"]) for case in cases)
    neither = sum(case["left"].startswith("NEITHER") for case in cases)
    kills = [case for case in cases if "converted" in case]
    unmarked = sum(case["after"] > 0 for case in kills)
    mixed = sum("mixture" in str(case["wrong"]) for case in kills)
    lost = sum(case["left"].startswith("NEITHER") for case in kills)
    summary = (
        f"{len(cases)} faults: {len(cases) - neither} left the old or the new set whole (or nothing, where nothing "
        f"was), {neither} left neither. After {bad} of them something was wrong: the set, a rank that hung, died or "
        f"raised another error than CheckpointError, a message that named the wrong set, or a next save that did not "
        f"clear up. {cuts} folders that power cuts may leave during these saves (tests/faults/disk.py) were laid out "
        f"and verified. {len(kills)} kills inside of `save_checkpoint`, {unmarked} of them at moments that no call "
        f"marks: {lost} lost, {mixed} mixed."
    )
    sections = [HEAD.format(summary=summary)]
    for way in dict.fromkeys(case["way"] for case in cases):
        rows: dict[tuple[str, str, int], dict[str, list[str]]] = {}
        for case in cases:
            if case["way"] == way:
                row = rows.setdefault((case["phase"], case["call"], case["rank"]), {})
                converted = f" ({case['converted']})" if "converted" in case else ""
                row.setdefault(case["action"], []).append(case["left"] + converted)
        sections += [f"## {way}", "", "| phase | call | rank | " + " | ".join(ACTIONS) + " |"]
        sections.append("|---" * (3 + len(ACTIONS)) + "|")
        for (phase, call, rank), row in rows.items():
            cells = " | ".join(_cell(row.get(action, ())) for action in ACTIONS)
            sections.append(f"| {phase} | {call} | {rank} | {cells} |")
        sections.append("")
    return "\n".join(sections)


def _cell(outcomes: Sequence[str]) -> str:
    counts = {left: list(outcomes).count(left) for left in dict.fromkeys(outcomes)}
    return ", ".join(left if count == 1 else f"{count} {left}" for left, count in counts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="results.json of a run of before")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results or Path(folder) / "results.json"
        if arguments.results is None:
            run_command([sys.executable, "-m", "tests.faults.runner", folder, "--full"], timeout=7200)
        text = render(json.loads(results.read_text()))
    (REPOSITORY / "benchmarks" / "results" / "save_faults.md").write_text(text)


if __name__ == "__main__":
    main()
