"""Runs clients on two ranks with ``DEEPSPEED_MUON=1``, and checks the line by which this Muon says that it trains.

    make clients                             # all
    make clients CLIENTS="trl llamafactory"
    python -m tests.clients trl --stages 3 --environments /big/disk/clients --output table.md

Each program runs as a user starts it, on a tiny random model. The first time an environment of some gigabytes is made
for it. It is not a part of CI: the newest version of every program is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environment import ROOT, Environment, build_wheel
from tests.clients.programs import CLIENTS, HERE, Client, Run
from tests.support.harness import free_port

OURS = re.compile(r"deepspeed_muon \d+\.\d+\.\d+: .*")
LOSS = re.compile(r"'?(?:train_loss|eval_loss|loss)'?[:=] ?'?([0-9.]+(?:e-?\d+)?)")
LIMIT = 900.0
HEAD = """# Programs run unchanged with `DEEPSPEED_MUON=1`

Command: `make clients`, on two CPU ranks with gloo; a random Qwen2 of 0.1M parameters, texts made on the machine.
Losses: the first and the last that the program printed. Programs on top of the Trainer end with the mean over all
steps, Accelerate's example prints that of the evaluation alone. What was left out of an environment because it needs
CUDA, and the plugin of ms-swift, are in `tests/clients/programs.py`.

| client | ZeRO | versions | result | loss | the line in the log |
|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Outcome:
    """What one run of one client gave."""

    client: str
    stage: int
    versions: dict[str, str]
    status: int
    seconds: float
    line: str
    losses: list[float]
    lines: int
    warnings: int

    @property
    def passed(self) -> bool:
        return self.status == 0 and bool(self.line)

    def row(self) -> str:
        """Return the row of the table."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        losses = f"{self.losses[0]:.3f} to {self.losses[-1]:.3f}" if self.losses else "-"
        result = "trained" if self.passed else f"FAILED, status {self.status}"
        return f"| {self.client} | {self.stage} | {versions} | {result} | {losses} | `{self.line}` |"


def prepare(names: list[str], folder: Path, work: Path) -> dict[str, Environment]:
    """Make the environments of the named clients, and what the programs train."""
    wheel = build_wheel(work)
    made: dict[str, Environment] = {}
    for name in names:
        key = CLIENTS[name].environment
        if key in made:
            continue
        # Whatever is shared is installed at once, so that pip finds versions that go together.
        together = [client for client in CLIENTS.values() if client.environment == key]
        made[key] = Environment(folder / key)
        packages = sorted({package for client in together for package in client.packages})
        removed = sorted({package for client in together for package in client.removed})
        without = sorted({package for client in together for package in client.without})
        made[key].make(packages, without, removed, wheel)
        command = [made[key].bin / "python", HERE / "material.py", work / "material" / key]
        subprocess.run(command, check=True, env=made[key].variables({}))
    return made


def run(name: str, stage: int, environment: Environment, work: Path, example: Path | None) -> Outcome:
    """Run one client once; print its output if it fails."""
    client: Client = CLIENTS[name]
    folder = work / f"{name}-zero{stage}"
    folder.mkdir()
    versions = environment.versions(sorted({"torch", "deepspeed", *client.packages}))
    material = work / "material" / client.environment
    it = Run(folder, material, stage, free_port(), versions, example)
    command = client.command(it)
    print("+ DEEPSPEED_MUON=1", " ".join(command), flush=True)
    variables = {"DEEPSPEED_MUON": "1", "PYTHONPATH": str(HERE / "cpu_ranks"), **client.variables(it)}
    start = time.monotonic()
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            command,
            env=environment.variables(variables),
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            status = process.wait()
    seconds = time.monotonic() - start
    text = (folder / "log.txt").read_text(errors="replace")
    said = OURS.findall(text)
    outcome = Outcome(
        client=name,
        stage=stage,
        versions=versions,
        status=status,
        seconds=seconds,
        line=said[0].strip() if said else "",
        losses=[float(found) for found in LOSS.findall(text)],
        lines=text.count("\n"),
        warnings=text.count("FutureWarning"),
    )
    if not outcome.passed:
        print(text[-6000:])
    print(
        f"{outcome.row()} {seconds:.0f} s, {outcome.warnings} FutureWarnings in {outcome.lines} lines",
        flush=True,
    )
    return outcome


def main() -> int:
    """Run what the command line names; return 1 if a run failed or did not say that this Muon trains."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__.split("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; none: all")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], help="ZeRO stages")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".cache" / "clients", help="kept between calls"
    )
    parser.add_argument(
        "--accelerate-example",
        type=Path,
        help="examples/by_feature/deepspeed_with_config_support.py "
        "of Accelerate's repository; without it it is downloaded from GitHub",
    )
    parser.add_argument("--output", type=Path, help="a file for the table")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders with their logs")
    parsed = parser.parse_args()
    names = parsed.clients or list(CLIENTS)
    if unknown := set(names) - CLIENTS.keys():
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    example = parsed.accelerate_example and parsed.accelerate_example.resolve()
    work = Path(tempfile.mkdtemp(prefix="clients"))
    try:
        environments = prepare(names, parsed.environments.resolve(), work)
        found = [
            run(name, stage, environments[CLIENTS[name].environment], work, example)
            for name in names
            for stage in parsed.stages
        ]
    finally:
        if parsed.keep:
            print(f"runs and logs: {work}")
        else:
            shutil.rmtree(work)
    if parsed.output:
        parsed.output.write_text("\n".join([HEAD, *(each.row() for each in found)]) + "\n")
    return 0 if all(each.passed for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
