"""The cluster benchmark: links hold their rate, nothing is left behind, and waits are told from work."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.cluster import places
from benchmarks.network import (
    HostNetwork,
    LinkEnd,
    limit_rate,
    link_bytes,
    namespaces,
    refusal,
    remove_leftovers,
)
from benchmarks.waits import WaitMeter
from tests.support.harness import REPOSITORY, RankPool, run_command

WHY_NOT = refusal()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "hosts can be made")
MEGABIT = 1e6


def exchange(rank: int, world_size: int, *, ends: list[list[str]], rate: float, nbytes: int) -> list[float]:
    """Send to the other rank and receive at the same time; return the best of five times, and bytes by the kernel."""
    if rank == 0:
        limit_rate([LinkEnd(*end) for end in ends], rate)
    send, received = torch.full((nbytes,), rank, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    splits = [0 if peer == rank else nbytes for peer in range(world_size)]
    times, counted = [], []
    for _ in range(5):
        dist.barrier()
        before, start = link_bytes(), time.perf_counter()
        dist.all_to_all_single(received, send, splits, splits)
        times.append(time.perf_counter() - start)
        dist.barrier()
        counted.append([now - then for now, then in zip(link_bytes(), before, strict=True)])
    assert received.eq(1 - rank).all()
    return [min(times), *(float(each) for each in counted[-1])]


@needs_namespaces
@pytest.mark.full
def test_links_hold_their_rate_and_count_what_is_sent() -> None:
    nbytes = 2_000_000
    devices = os.listdir("/sys/class/net")
    with HostNetwork(2) as network, RankPool(2, places=places(network, 1)) as pool:
        ends = [[end.namespace, end.device] for end in network.ends]
        assert len(namespaces()) >= 3
        for rate in (80 * MEGABIT, 40 * MEGABIT):
            wire = 8 * nbytes / rate
            for seconds, sent, received in pool.run(exchange, ends=ends, rate=rate, nbytes=nbytes):
                # Of 1514 bytes on the wire 1448 are data, and half a millisecond of the rate may leave at once. Other
                # work of the machine delays the last bytes; bits taken for bytes would be a factor of eight.
                assert 0.98 * wire < seconds < 4 * wire
                # Headers are 5 %, acknowledgements and the barrier another 2 %.
                assert nbytes <= sent <= 1.08 * nbytes
                assert nbytes <= received <= 1.08 * nbytes
    assert not [name for name in namespaces() if name.startswith(network.name)]
    assert os.listdir("/sys/class/net") == devices


CHILD = """
import signal, time
from benchmarks.cluster import _stop
from benchmarks.network import HostNetwork
signal.signal(signal.SIGTERM, _stop)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
with HostNetwork(2) as network:
    print(network.name, flush=True)
    time.sleep(60)
"""


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_leaves_nothing(number: signal.Signals) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        assert len([each for each in namespaces() if each.startswith(name)]) == 3
        child.send_signal(number)
        child.communicate(timeout=30)
        if (
            number == signal.SIGKILL
        ):  # only the next run can remove them, and it leaves those of runs that live
            with HostNetwork(1) as other:
                assert [each for each in namespaces() if each.startswith(other.name)]
                assert not [each for each in namespaces() if each.startswith(name)]
        assert not [each for each in namespaces() if each.startswith(name)]
    finally:
        child.kill()
        child.wait()
        remove_leftovers()


def test_other_users_are_told_what_it_needs() -> None:
    if os.geteuid() != 0:
        program = "import sys; from benchmarks import cluster; sys.exit(cluster.main())"
    else:
        program = "import os, sys; from benchmarks import cluster; os.setuid(65534); sys.exit(cluster.main())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("cluster.py: ")
    assert any(word in done.stderr for word in ("root", "iproute2", "Linux"))


def wait_for_a_late_rank(rank: int, world_size: int, *, busy: bool) -> list[float]:
    """Wait 0.3 s for rank 1, which sleeps; with ``busy``, another thread of this rank computes meanwhile."""
    meter, flag = WaitMeter(), torch.zeros(1)
    dist.barrier()

    def work() -> None:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            hashlib.sha256(bytes(1 << 20))  # without the interpreter's lock

    helper = threading.Thread(target=work)
    with meter.watching():
        if rank == 0 and busy:
            helper.start()
        if rank == 1:
            time.sleep(0.3)
        dist.all_reduce(flag)
    if helper.ident is not None:
        helper.join()
    return [meter.blocked, meter.exposed, float(meter.waits)]


def test_waits_are_exposed_unless_the_rank_works(ranks: Callable[[int], RankPool]) -> None:
    for busy in (False, True):
        found: list[Any] = ranks(2).run(wait_for_a_late_rank, busy=busy)
        blocked, exposed, waits = found[0]
        assert waits == 1
        assert blocked > 0.25
        if busy:
            assert exposed < 0.3 * blocked
        else:
            # Threads that look around now and then, and the machine's other work.
            assert 0.8 * blocked < exposed <= 1.05 * blocked
        assert found[1][0] < 0.2, "the late rank waits for nobody"


@needs_namespaces
@pytest.mark.full
@pytest.mark.time_limit(900)
def test_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "cluster"
    run_command([sys.executable, "benchmarks/cluster.py", "--quick", "--out", out], timeout=800)
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert len(rows) == 2 * 4
    for row in rows:
        assert row["rate"] is None or row["predicted_s"] > 0
        assert len(row["samples"]) == 3 and len(row["samples"][0]) == 2
    assert out.with_suffix(".md").read_text().count("\n| tiny |") == len(rows)
    assert out.with_suffix(".png").stat().st_size > 0
    assert not namespaces() or all(str(os.getpid()) not in name for name in namespaces())
