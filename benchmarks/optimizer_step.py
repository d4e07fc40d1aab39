"""One optimizer step of this project beside its peers, in one run: time, bytes, memory.

``python benchmarks/optimizer_step.py --model 5M --out benchmarks/results/optimizer_step-NAME`` runs every stage on 1, 2
and 4 ranks, with 1 and 4 accumulation steps. Ready-made rows in the JSON of ``--out`` are kept and overwritten one by
one, so a long matrix can be run in pieces (``--stages 3 --ranks 4``).

All engines of a cell live in the same processes, get the same weights and batches, and take turns; a time is the
slowest rank's, a ratio the median over the turns of the paired ratio. Rates are zero, so that the gradients stay equal.
Memory is measured afterwards, one optimizer at a time, in processes that give freed memory back at once. The JSON rows
of this project keep rank 0's ``kernel_report()``.

``--rates unlimited 200mbit 50mbit`` gives every rank a host of its own: a network namespace with a link of a limited
rate in both directions (``benchmarks/network.py``). The rates follow each other without a restart. It needs root and
iproute2. Nothing of it touches the machine's own network, and nothing is left when it has ended, even by a kill.

Whole steps on GPUs: ``benchmarks/whole_steps.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from benchmarks.network import DEVICE, HostNetwork, host_network, refusal
from benchmarks.step_forecast import add_predictions
from benchmarks.step_ranks import MODELS, ON_REQUEST, ONLY_STAGE, OPTIMIZERS
from benchmarks.support import Row

# So small that every tensor that matters is mapped by itself and given back when it is freed.
RETURN_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
_TIME_LIMIT = 3600.0
_PORT = "29500"  # in namespaces of their own, nobody else has it
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
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["5M"])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4])
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=OPTIMIZERS,
        default=[name for name in OPTIMIZERS if name not in ON_REQUEST],
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a micro-batch of one sequence")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-times", action="store_true", help="only measure memory")
    links = (
        "of every rank's link in each direction, for times alone: unlimited 1gbit; predictions need unlimited"
    )
    parser.add_argument("--rates", nargs="+", type=rate_of, default=[], help=links)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Measure every cell; yield its rows when its times are known, and again with the memory."""
    cells = list(itertools.product(arguments.model, arguments.stages, arguments.accumulation))
    runner = _Ranks(has_links=bool(arguments.rates))
    with contextlib.closing(runner):
        for ranks in arguments.ranks:
            for model, stage, accumulation in cells:
                cell = {"model": model, "stage": stage, "accumulation": accumulation}
                yield from measure_cell(runner, arguments, ranks, cell)
            runner.close()


def measure_cell(runner: _Ranks, arguments: argparse.Namespace, ranks: int, cell: Row) -> Iterator[list[Row]]:
    common = {**cell, "tokens": arguments.tokens}
    names = [name for name in arguments.optimizers if ONLY_STAGE.get(name, cell["stage"]) == cell["stage"]]
    found: dict[str, Row] = {name: {**cell, "ranks": ranks, "optimizer": name} for name in names}
    if not arguments.no_times:
        timing = {"optimizers": names, "repeats": arguments.repeats, **common}
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        reports = runner.run("measure_times", ranks, rates=arguments.rates or [None], **timing)
        for name, row in found.items():
            own = reports[0][name]
            row["timed"], row["sent_bytes"] = started, max(report[name]["bytes"] for report in reports)
            row |= {key: own[key] for key in ("calls", "kernels") if key in own}
        if arguments.rates:
            yield [
                {**row, "rate": rate, **times}
                for name, row in found.items()
                for rate, times in zip(arguments.rates, reports[0][name]["times"], strict=True)
            ]
            return
        for name, row in found.items():
            row |= reports[0][name]["times"][0]
        yield list(found.values())
    if not arguments.no_memory:
        for name, row in found.items():
            row["peak_bytes"] = max(
                runner.run("measure_memory", ranks, memory=True, optimizer=name, **common)
            )
        yield list(found.values())


class _Ranks:
    """Pools of gloo ranks, one for times and one for memory, as the tests start them; with links on hosts."""

    def __init__(self, *, has_links: bool = False) -> None:
        self._has_links = has_links
        self._open = contextlib.ExitStack()
        self._pools: dict[bool, Any] = {}
        self._ends: list[tuple[int, str]] = []

    def run(self, function: str, ranks: int, *, memory: bool = False, **settings: Any) -> list[Any]:
        from tests.support.harness import RankPool

        if memory not in self._pools:
            hosts: list[Any] = []
            if self._has_links:
                network = self._open.enter_context(host_network(ranks))
                hosts, self._ends = rank_hosts(network), network.ends
            pool = RankPool(ranks, env=RETURN_MEMORY if memory else None, hosts=hosts)
            self._pools[memory] = self._open.enter_context(pool)
            if memory:  # the first call pays for imports and compilation, which are not the optimizer's
                self.run(function, ranks, memory=True, **settings)
        if self._ends:
            settings["ends"] = self._ends
        pool = self._pools[memory]
        return list(pool.run(f"benchmarks.step_ranks:{function}", timeout=_TIME_LIMIT, **settings))

    def close(self) -> None:
        self._open.close()
        self._pools.clear()


def rank_hosts(network: HostNetwork) -> list[Any]:
    """Return where each rank runs: each on a host of its own, the store on the first one."""
    from tests.support.harness import RankHost

    return [
        RankHost(
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
        for rank in range(len(network.hosts))
    ]


def place(row: Row) -> tuple[Any, ...]:
    """Return what tells a row from others, in the order of the table."""
    where = (row[key] for key in ("model", "stage", "ranks", "accumulation"))
    return (*where, -(row.get("rate") or float("inf")), OPTIMIZERS.index(row["optimizer"]))


def _stop(number: int, _frame: Any) -> None:
    """End by an exception, so that ranks and namespaces are removed on the way out."""
    raise SystemExit(128 + number)


def main() -> int:
    arguments = parse_arguments()
    from benchmarks.step_report import page

    if arguments.rates and (reason := refusal()):
        print(f"optimizer_step.py: {reason}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    rows: list[Row] = support.read(arguments.out).get("rows", [])
    with contextlib.closing(measure(arguments)) as cells:
        for found in cells:
            rows = support.merged(rows, found, place)
            if arguments.rates:
                add_predictions(rows)
            report = {
                "machine": support.machine(),
                "command": support.command(),
                "tokens": arguments.tokens,
                "rows": rows,
            }
            # after every cell, so that a long matrix can be stopped
            print("\n".join(page(report)), flush=True)
            support.write(arguments.out, report, page(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
