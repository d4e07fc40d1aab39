"""``python -m deepspeed_muon health``: what the files of a run say, in lines or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deepspeed_muon.monitoring.page import findings, read_run, write_page

__all__ = ["add_subcommand"]


def add_subcommand(subparsers: Any) -> None:
    """Add ``health``. Its parser sets ``run``: a function of the parsed arguments that returns the exit status."""
    parser = subparsers.add_parser("health", help="what the monitor's files of a run say")
    parser.add_argument(
        "run_folder",
        type=Path,
        metavar="RUN",
        help="where DeepSpeed's csv_monitor wrote: output_path/job_name",
    )
    parser.add_argument("--html", action="store_true", help="write a page with charts")
    parser.add_argument("--out", type=Path, help="the page (default: RUN/health.html)")
    parser.set_defaults(run=_health)


def _health(parsed: argparse.Namespace) -> int:
    """Print what is found; return 1 if something is bad."""
    folder: Path = parsed.run_folder
    if parsed.html:
        out: Path = parsed.out or folder / "health.html"
        found = write_page(folder, out)
    else:
        found = findings(read_run(folder))
    for finding in found:
        print(f"{finding.level:4}  {finding.text}")
    if parsed.html:
        print(f"Page: {out}")
    return int(any(finding.level == "bad" for finding in found))
