"""A step of this project beside its peers on a network of a chosen rate: a cluster on one machine.

``python benchmarks/cluster.py --out benchmarks/results/cluster-NAME`` gives every rank a host of
its own: a network namespace with a link of a limited rate in both directions (``benchmarks/network.py``). All
optimizers live in the same processes and take turns; the rates follow each other without a restart. Ready-made rows
in the JSON of ``--out`` are kept and overwritten one by one, so that a long matrix can be run in pieces (``--stages 3
--hosts 4``).

It needs root and iproute2. Nothing of it touches the machine's own network, and all is removed at the end, at a signal,
or, after a kill, at the next start.

A step is forward, backward and ``engine.step()`` of one micro-batch. Rates of learning are zero, so that all optimizers
see the same gradients. See benchmarks/NOTES.md for what the columns mean.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from benchmarks.network import DEVICE, HostNetwork, NetworkUnavailable, refusal
from benchmarks.support import Row

OPTIMIZERS = ["ours", "ours, no overlap", "DeepSpeed Muon, standard", "DeepSpeed AdamW"]
_PORT = "29500"  # in namespaces of its own, nobody else has it
_TIME_LIMIT = 3600.0
_GROUP_TIMEOUT = 300


def rate_of(text: str) -> float | None:
    """Return bits a second of ``200mbit``, ``1gbit``, or ``None`` of ``unlimited``."""
    if text == "unlimited":
        return None
    for unit, factor in {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}.items():
        if text.endswith(unit):
            rate = float(text.removesuffix(unit)) * factor
            if rate >= 1e6:
                return rate
    raise argparse.ArgumentTypeError(
        f"{text!r}: expected 'unlimited' or a rate from 1mbit, as 200mbit or 1gbit"
    )


def parse_arguments() -> argparse.Namespace:
    parser = support.options(__doc__)
    parser.add_argument("--model", default="5M", help="a model of benchmarks/step_ranks.py (5M)")
    parser.add_argument("--stages", nargs="+", type=int, choices=(0, 1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument(
        "--rates",
        nargs="+",
        type=rate_of,
        default=[None, 1e9, 200e6, 50e6],
        help="of every link, in each direction: unlimited 1gbit 200mbit 50mbit; unlimited is what predictions need",
    )
    parser.add_argument(
        "--optimizers", nargs="+", default=OPTIMIZERS, help="of those of benchmarks/step_ranks.py"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--cell-seconds",
        type=float,
        default=60.0,
        help="no more than three turns of a rate after this time (60)",
    )
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a micro-batch of one sequence")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Measure stage by stage on ever more hosts; yield the rows of a stage, all rates and optimizers."""
    from tests.support.harness import RankPool

    for hosts in arguments.hosts:
        with HostNetwork(hosts) as network, RankPool(hosts, places=places(network)) as pool:
            for stage in arguments.stages:
                started = time.strftime("%Y-%m-%d %H:%M:%S")
                given = ("model", "optimizers", "rates", "repeats", "cell_seconds", "tokens")
                reports = pool.run(
                    "benchmarks.cluster_ranks:measure",
                    timeout=_TIME_LIMIT,
                    stage=stage,
                    ends=[[end.namespace, end.device] for end in network.ends],
                    **{name: getattr(arguments, name) for name in given},
                )
                common = {
                    "model": arguments.model,
                    "stage": stage,
                    "hosts": hosts,
                    "measured": started,
                    "cores": os.cpu_count(),
                }
                yield list(rows_of(reports, arguments, common))


def places(network: HostNetwork) -> list[Any]:
    """Return where each rank runs: each on a host of its own, the store on the first one."""
    from tests.support.harness import Place

    return [
        Place(
            network.prefix(rank),
            {
                "LOCAL_RANK": "0",
                "LOCAL_SIZE": "1",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": network.address(0),
                "MASTER_PORT": _PORT,
                "GLOO_SOCKET_IFNAME": DEVICE,
                "TP_SOCKET_IFNAME": DEVICE,
                "TESTS_GROUP_TIMEOUT": str(_GROUP_TIMEOUT),
            },
        )
        for rank in range(network.hosts)
    ]


def rows_of(reports: list[Any], arguments: argparse.Namespace, common: Row) -> Iterator[Row]:
    """Return one row for each rate and optimizer, with every rank's figures of every step."""
    from benchmarks.cluster_ranks import FIELDS

    for number, rate in enumerate(arguments.rates):
        for name in arguments.optimizers:
            yield {
                **common,
                "rate": rate,
                "optimizer": name,
                "counts": [report["counts"][name] for report in reports],
                "fields": list(FIELDS),
                "samples": [
                    [[round(value, 6) for value in own] for own in step]
                    for step in reports[0]["samples"][name][number]
                ],
            }


def place(row: Row) -> tuple[Any, ...]:
    """Return what tells a row from others, in the order of the table."""
    from benchmarks.step_ranks import OPTIMIZERS as known_optimizers

    rate = float("inf") if row["rate"] is None else row["rate"]
    where = (row["model"], row["stage"], row["hosts"], -rate)
    return (*where, list(known_optimizers).index(row["optimizer"]))


def main() -> int:
    arguments = parse_arguments()
    if reason := refusal():
        print(f"cluster.py: {reason}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        return run(arguments)
    except NetworkUnavailable as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 2


def _stop(number: int, _frame: Any) -> None:
    """End by an exception, so that ranks and namespaces are removed on the way out."""
    raise SystemExit(128 + number)


def run(arguments: argparse.Namespace) -> int:
    """Measure and write; the files are written after every stage, so that a long matrix can be stopped."""
    from benchmarks.cluster_forecast import add_predictions
    from benchmarks.cluster_report import page

    rows: list[Row] = support.read(arguments.out).get("rows", [])
    for found in measure(arguments):
        rows = support.merged(rows, found, place)
        add_predictions(rows)
        report = {
            "machine": support.machine(),
            "command": support.command(),
            "tokens": arguments.tokens,
            "rows": rows,
        }
        lines = page(report)
        print("\n".join(lines), flush=True)
        support.write(arguments.out, report, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
