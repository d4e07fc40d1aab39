"""The command line, ``python -m deepspeed_muon COMMAND``. Each command is one function that returns an exit status."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence

from deepspeed_muon.errors import MuonError
from deepspeed_muon.tools import convert, plan, rates, routes
from deepspeed_muon.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 if a check failed, 2 for an error of usage or configuration."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal's encoding does not have (ASCII with LC_ALL=C) are printed as escapes.
            stream.reconfigure(errors="backslashreplace")
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except (MuonError, OSError) as error:
        print(f"deepspeed_muon {parsed.command}: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepspeed_muon", description="Muon for DeepSpeed ZeRO.")
    parser.add_argument("--version", action="version", version=f"deepspeed_muon {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="what this machine can build and run")
    report.add_argument(
        "--selftest", action="store_true", help="run each op against its reference (may build them)"
    )
    report.add_argument("--json", action="store_true", help="print JSON")
    report.set_defaults(run=_report)
    convert.add_subcommands(commands)
    plan.add_subcommand(commands)
    routes.add_subcommand(commands)
    rates.add_subcommand(commands)
    return parser


def _report(parsed: argparse.Namespace) -> int:
    # Imported here: other commands need no native ops.
    from deepspeed_muon.ops import report, self_test

    checks = self_test.checks() if parsed.selftest else None
    machine = report.collect()
    if parsed.json:
        print(json.dumps(machine if checks is None else {**machine, "selftest": checks}, indent=2))
    else:
        print(report.render(machine, checks))
    return 0 if checks is None or all(check["ok"] for check in checks) else 1
