"""A step of this project beside its peers on a network of a chosen rate: a cluster on one machine.

``python benchmarks/cluster.py --out benchmarks/results/cluster-NAME`` gives every rank (or ``--ranks-per-host``) a host
of its own: a network namespace with a link of a limited rate in both directions (``benchmarks/network.py``). All
optimizers live in the same processes and take turns; the rates follow each other without a restart. ``--quick`` is a
smoke test of a minute. Ready-made rows in the JSON of ``--out`` are kept and overwritten one by one, so that a long
matrix can be run in pieces (``--stages 3 --hosts 4``).

It needs root and iproute2. Nothing of it touches the machine's own network, and all is removed at the end, at a signal,
or, after a kill, at the next start.

A step is forward, backward and ``engine.step()`` of one micro-batch. Rates of learning are zero, so that all optimizers
see the same gradients. See benchmarks/NOTES.md for what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.network import DEVICE, HostNetwork, NetworkUnavailable, refusal

OPTIMIZERS = ["ours", "ours, no overlap", "DeepSpeed Muon, standard", "DeepSpeed AdamW"]
_PORT = "29500"  # in namespaces of its own, nobody else has it
_TIME_LIMIT = 3600.0
_GROUP_TIMEOUT = 300

Row = dict[str, Any]


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="5M", help="a model of benchmarks/step_ranks.py (5M)")
    parser.add_argument("--stages", nargs="+", type=int, choices=(0, 1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--ranks-per-host", type=int, default=1)
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
    parser.add_argument("--quick", action="store_true", help="a tiny model, one stage, two hosts, two rates")
    parser.add_argument("--out", help="path without ending for .json and .md")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.stages, arguments.hosts = "tiny", [3], [2]
        arguments.rates, arguments.repeats = [None, 20e6], 3
    return arguments


def measure(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Measure stage by stage on ever more hosts; yield the rows of a stage, all rates and optimizers."""
    from tests.support.harness import RankPool

    for hosts in arguments.hosts:
        with HostNetwork(hosts) as network:
            ranks = hosts * arguments.ranks_per_host
            with RankPool(ranks, places=places(network, arguments.ranks_per_host)) as pool:
                for stage in arguments.stages:
                    started = time.strftime("%Y-%m-%d %H:%M:%S")
                    reports = pool.run(
                        "benchmarks.cluster_ranks:measure",
                        timeout=_TIME_LIMIT,
                        model=arguments.model,
                        stage=stage,
                        optimizers=arguments.optimizers,
                        rates=arguments.rates,
                        repeats=arguments.repeats,
                        cell_seconds=arguments.cell_seconds,
                        tokens=arguments.tokens,
                        ends=[[end.namespace, end.device] for end in network.ends],
                    )
                    common = {
                        "model": arguments.model,
                        "stage": stage,
                        "hosts": hosts,
                        "ranks_per_host": arguments.ranks_per_host,
                        "measured": started,
                        "cores": os.cpu_count(),
                    }
                    yield list(rows_of(reports, arguments, common))


def places(network: HostNetwork, ranks_per_host: int) -> list[Any]:
    """Return where each rank runs: rank by rank on the hosts, in order; the store is on the first one."""
    from tests.support.harness import Place

    return [
        Place(
            network.prefix(rank // ranks_per_host),
            {
                "LOCAL_RANK": str(rank % ranks_per_host),
                "LOCAL_SIZE": str(ranks_per_host),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "MASTER_ADDR": network.address(0),
                "MASTER_PORT": _PORT,
                "GLOO_SOCKET_IFNAME": DEVICE,
                "TP_SOCKET_IFNAME": DEVICE,
                "TESTS_GROUP_TIMEOUT": str(_GROUP_TIMEOUT),
            },
        )
        for rank in range(network.hosts * ranks_per_host)
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


def merged(known: list[Row], rows: list[Row]) -> list[Row]:
    """Return the rows that are known with ``rows`` put in or over them, in order."""
    from benchmarks.step_ranks import OPTIMIZERS as known_optimizers

    def key(row: Row) -> tuple[Any, ...]:
        rate = float("inf") if row["rate"] is None else row["rate"]
        where = (row["model"], row["stage"], row["hosts"], row["ranks_per_host"], -rate)
        return (*where, names.index(row["optimizer"]))

    names = list(known_optimizers)

    found = {key(row): row for row in [*known, *rows]}
    return [found[each] for each in sorted(found)]


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
    from benchmarks.cluster_report import table
    from benchmarks.optimizer_step import machine

    out = Path(arguments.out) if arguments.out else None
    rows: list[Row] = []
    if out and out.with_name(out.name + ".json").exists():
        rows = json.loads(out.with_name(out.name + ".json").read_text())["rows"]
    for found in measure(arguments):
        rows = merged(rows, found)
        add_predictions(rows)
        report = {
            "machine": machine(),
            "command": shlex.join(["python", *sys.argv]),
            "tokens": arguments.tokens,
            "rows": rows,
        }
        print(table({**report, "rows": found}), flush=True)
        if out:
            # A row a line: the samples of one step are of no use without the others.
            lines = ",\n".join(json.dumps(row) for row in rows)
            head = json.dumps({key: value for key, value in report.items() if key != "rows"})
            out.with_name(out.name + ".json").write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')
            out.with_name(out.name + ".md").write_text(table(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
