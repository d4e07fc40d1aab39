"""Runs clients on two ranks with ``DEEPSPEED_MUON=1``, and checks the line by which this Muon says that it trains.

    make clients                             # all
    make clients CLIENTS="trl llamafactory"
    python -m tests.clients trl --stages 3 --environments /big/disk/clients --output table.md

Each program runs as a user starts it, on a tiny random model. The first time an environment of some gigabytes is made
for it. It is not a part of CI: the newest version of every program is installed. Plain DeepSpeed, transformers.Trainer
and Accelerate are in the test suite.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.environment import ROOT, Environment, build_wheel
from tests.clients.programs import CLIENTS, FOLDER, Run
from tests.support.harness import free_port

OURS = re.compile(r"deepspeed_muon \d+\.\d+\.\d+: .*")
LOSS = re.compile(r"'?(?:train_loss|eval_loss|loss)'?[:=] ?'?([0-9.]+(?:e-?\d+)?)")
LIMIT = 900.0
HEAD = """# Programs run unchanged with `DEEPSPEED_MUON=1`

Command: `make clients`, on two CPU ranks with gloo; a random Qwen2 of 0.1M parameters, texts made on the machine.
Losses: the first and the last that the program printed. Programs on top of the Trainer end with the mean over all
steps. What was left out of an environment because it needs CUDA, and the plugin of ms-swift, are in
`tests/clients/programs.py`.

| client | ZeRO | versions | result | loss | the line in the log |
|---|---|---|---|---|---|"""


def prepare(names: list[str], folder: Path, work: Path) -> dict[str, Environment]:
    """Make the environments of the named clients, and what the programs train."""
    wheel = build_wheel(work)
    environments: dict[str, Environment] = {}
    for key in dict.fromkeys(CLIENTS[name].environment for name in names):
        # Clients that share an environment are installed at once, so that pip finds versions that go together.
        clients = [client for client in CLIENTS.values() if client.environment == key]
        environments[key] = Environment(folder / key)
        environments[key].make(
            sorted({package for client in clients for package in client.packages}),
            sorted({package for client in clients for package in client.without}),
            sorted({pattern for client in clients for pattern in client.removed}),
            wheel,
        )
        command = [environments[key].bin / "python", FOLDER / "material.py", work / "material" / key]
        subprocess.run(command, check=True, env=environments[key].variables())
    return environments


def run(name: str, stage: int, environment: Environment, work: Path) -> tuple[bool, str]:
    """Run one client once; return whether it trained with this Muon, and its row of the table."""
    client, folder = CLIENTS[name], work / f"{name}-zero{stage}"
    folder.mkdir()
    versions = environment.versions(sorted({"torch", "deepspeed", *client.packages}))
    case = Run(folder, work / "material" / client.environment, stage, free_port())
    command = client.command(case)
    print("+ DEEPSPEED_MUON=1", " ".join(command), flush=True)
    variables = {"DEEPSPEED_MUON": "1", "PYTHONPATH": str(FOLDER / "cpu_ranks"), **client.variables(case)}
    variables = {**environment.variables(), **variables}
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            command, env=variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            status = process.wait()
    text = (folder / "log.txt").read_text(errors="replace")
    line = next(iter(OURS.findall(text)), "").strip()
    losses = LOSS.findall(text)
    passed = status == 0 and bool(line)
    installed = ", ".join(f"{package} {version}" for package, version in versions.items())
    outcome = "trained" if passed else f"FAILED, status {status}"
    curve = f"{float(losses[0]):.3f} to {float(losses[-1]):.3f}" if losses else "-"
    row = f"| {name} | {stage} | {installed} | {outcome} | {curve} | `{line}` |"
    print("" if passed else text[-6000:], row, sep="\n", flush=True)
    return passed, row


def main() -> int:
    """Run what the command line names; return 1 if a run failed or did not say that this Muon trains."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__.split("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; none: all")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], help="ZeRO stages")
    parser.add_argument("--environments", type=Path, default=ROOT / ".cache" / "clients", help="used again")
    parser.add_argument("--output", type=Path, help="a file for the table")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders with their logs")
    options = parser.parse_args()
    names = options.clients or list(CLIENTS)
    if unknown := set(names) - CLIENTS.keys():
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    work = Path(tempfile.mkdtemp(prefix="clients"))
    try:
        environments = prepare(names, options.environments.resolve(), work)
        outcomes = [
            run(name, stage, environments[CLIENTS[name].environment], work)
            for name in names
            for stage in options.stages
        ]
    finally:
        if options.keep:
            print(f"runs and logs: {work}")
        else:
            shutil.rmtree(work)
    if options.output:
        options.output.write_text("\n".join([HEAD, *(row for _, row in outcomes)]) + "\n")
    return 0 if all(passed for passed, _ in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
