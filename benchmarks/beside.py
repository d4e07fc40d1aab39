"""This checkout beside an earlier commit: ``benchmarks/optimizer_step.py`` of both, in turn, in one run.

``python benchmarks/beside.py 169e416 --out benchmarks/results/beside-NAME --model 5M --ranks 2 --stages 1 3`` unpacks
the commit into a temporary folder and runs the benchmark of each side with all other arguments, ``--rounds``
times: before, after, after, before, and so on. Two versions of a package cannot share a process, so a round compares
two runs. What else the machine does changes from run to run; AdamW runs in both and takes most of that out:

    after / before = (ours / AdamW, after) / (ours / AdamW, before)

The table shows its median over the rounds with the quartiles, and that of our own times without AdamW.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from benchmarks.step_report import cells, ratio
from benchmarks.support import REPOSITORY, Row
from tests.support.native_ops import extensions_dir

PEER = "DeepSpeed AdamW"
SIDES = ("before", "after")
Rounds = list[dict[str, list[dict[str, Any]]]]


def unpack(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder; return it."""
    archive = subprocess.run(
        ["git", "-C", str(REPOSITORY), "archive", commit], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    operators = folder / "deepspeed_muon" / "ops"
    if not operators.exists():
        operators.symlink_to("../ops")
    return folder


def run_side(tree: Path, options: list[str], out: Path) -> list[dict[str, Any]]:
    """Run the benchmark of a checkout; return its rows."""
    environment = os.environ | {"PYTHONPATH": str(tree), "TORCH_EXTENSIONS_DIR": str(extensions_dir())}
    command = [sys.executable, "benchmarks/optimizer_step.py", "--no-memory", "--accumulation", "1"]
    subprocess.run(
        [*command, "--optimizers", "ours", PEER, "--out", str(out), *options],
        cwd=tree,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return list(json.loads(out.with_suffix(".json").read_text())["rows"])


def table(rounds: Rounds) -> list[str]:
    """Return a Markdown table: one line a cell."""
    both = [{side: cells(each[side]) for side in SIDES} for each in rounds]
    lines = []
    for key in both[0]["before"]:
        relative, alone = {}, {}
        for side in SIDES:
            found = [each[side][key] for each in both]
            relative[side] = [ratio(each["ours"], each[PEER], "total_s") for each in found]
            alone[side] = [statistics.median(each["ours"]["total_s"]) for each in found]
        line: Row = dict(zip(("model", "stage", "ranks"), key, strict=False))
        line |= {f"ours / AdamW {side}": f"{statistics.median(relative[side]):.3f}" for side in SIDES}
        lines.append(line | change("", relative) | change("ours alone: ", alone))
    return support.table_of(lines)


def change(what: str, sides: dict[str, list[Any]]) -> Row:
    """Return the cells of after over before: median and quartiles over the rounds."""
    changes = [after / before for before, after in zip(sides["before"], sides["after"], strict=True)]
    low, middle, high = statistics.quantiles(changes, n=4) if len(changes) > 1 else changes * 3
    return {f"{what}after / before": f"{middle:.3f}", f"{what}quartiles": f"{low:.3f} to {high:.3f}"}


def main() -> int:
    """Run from the command line."""
    parser = support.options(__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=6)
    arguments, options = parser.parse_known_args()
    rounds: Rounds = []
    with tempfile.TemporaryDirectory(prefix="muon-beside-") as temporary:
        (Path(temporary) / "before").mkdir()
        trees = {"before": unpack(arguments.commit, Path(temporary) / "before"), "after": REPOSITORY}
        for number in range(arguments.rounds):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            result = Path(temporary) / f"round{number}"
            rounds.append({side: run_side(trees[side], options, Path(f"{result}-{side}")) for side in order})
            told = f"{number + 1} rounds."
            page = support.heading(f"After beside before ({arguments.commit})", told) + table(rounds)
            support.write(arguments.out, {"commit": arguments.commit, "rounds": rounds}, page)
    print("\n".join(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
