"""Writes the table of ``tests/distributed/test_topologies.py`` from pytest's report of a run.

make test-full PYTEST_ARGS="tests/distributed/test_topologies.py --junitxml report.xml"
python -m tests.support.topologies_table report.xml benchmarks/results/topologies.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.support.topology_changes import CHANGES

HEAD = """# One checkpoint for every layout

Command: `make test-full PYTEST_ARGS="tests/distributed/test_topologies.py --junitxml report.xml"`, then
`python -m tests.support.topologies_table report.xml OUTPUT`. Real ranks, gloo. Saved by `consolidate` and, from
DeepSpeed's own files, by `python -m deepspeed_muon checkpoint consolidate`; both sets were restored at the other
topology. The difference is the largest of any element of masters, momentum and moments, over both ways.

| change | saved at | restored at | largest difference |
|---|---|---|---|"""


def rows(report: Path) -> Iterator[str]:
    """Yield a row for each change that the report has."""
    differences = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for entry in case.iter("property"):
            if entry.get("name") == "worst difference":
                differences[str(case.get("name")).partition("[")[2].rstrip("]")] = entry.get("value")
    for change, (before, after) in CHANGES.items():
        if change in differences:
            yield f"| {change} | {shown(*before)} | {shown(*after)} | {differences[change]} |"


def shown(ranks: int, topology: dict[str, Any]) -> str:
    """Return a topology in words."""
    kind, size = topology["kind"], topology["size"]
    words = [
        f"{ranks} rank{'s' * (ranks > 1)}",
        f"ZeRO {topology['stage']}",
        *([f"{kind} {size}"] if kind != "data" else []),
    ]
    more = (f"{key} {topology[key]}" for key in ("zero", "params", "mark", "model") if topology.get(key))
    return ", ".join([*words, *more]).replace("|", "/")


if __name__ == "__main__":
    report, output = map(Path, sys.argv[1:])
    output.write_text("\n".join([HEAD, *rows(report)]) + "\n")
