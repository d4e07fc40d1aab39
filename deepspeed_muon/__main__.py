"""``python -m deepspeed_muon COMMAND``, and ``deepspeed-muon COMMAND``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Sequence

from deepspeed_muon.errors import MuonError
from deepspeed_muon.ops import report, self_test
from deepspeed_muon.tools import convert, plan, rates, routes
from deepspeed_muon.tools.command_line import Output, parse


def run() -> int:
    """Run the command of this process and return its exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command without a traceback
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # command_line.begin replaced it
    if sys.stdout is sys.stderr:
        sys.stdout = sys.__stdout__  # command_line.begin replaced it
    # MODULE:FUNCTION may be in the current folder, which only `python -m` searches by itself.
    sys.path.insert(0, os.getcwd())
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 if a check failed, 2 for an error of usage or configuration."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal's encoding does not have (ASCII with LC_ALL=C) are printed as escapes.
            stream.reconfigure(errors="backslashreplace")
    parsed = parse(arguments)
    as_json = getattr(parsed, "json", False)
    try:
        # What models and libraries print is not JSON.
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            output = _COMMANDS[parsed.command](parsed)
        if text := json.dumps(output.data, indent=1) if as_json else output.text:
            if sys.stdout is None:
                raise OSError("standard output is closed")
            print(text, flush=True)  # a full disk is an error here, not when the process ends
    except (MuonError, OSError) as error:
        print(f"deepspeed_muon {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"deepspeed_muon {parsed.command}: interrupted", file=sys.stderr)
        return 130  # the shells' status of SIGINT
    return output.status


def _report(parsed: argparse.Namespace) -> Output:
    checks = self_test.checks() if parsed.selftest else None
    machine = report.collect()
    status = 0 if checks is None or all(check["ok"] for check in checks) else 1
    data = machine if checks is None else {**machine, "selftest": checks}
    return Output(data, report.render(machine, checks), status)


_COMMANDS = {
    "report": _report,
    "checkpoint": convert.run,
    "plan": plan.run,
    "routes": routes.run,
    "rates": rates.run,
}


if __name__ == "__main__":
    sys.exit(run())
