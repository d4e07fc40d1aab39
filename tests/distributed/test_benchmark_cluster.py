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
from types import SimpleNamespace
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
    with HostNetwork(2) as network, RankPool(2, places=places(network)) as pool:
        ends = [[end.namespace, end.device] for end in network.ends]
        assert len(namespaces()) >= 3
        for rate, said in ((80 * MEGABIT, "rate 80Mbit"), (40 * MEGABIT, "rate 40Mbit")):
            wire = 8 * nbytes / rate
            results = pool.run(exchange, ends=ends, rate=rate, nbytes=nbytes)
            for namespace, device in ends:
                # Nothing slower: how long it really takes depends on the machine's other work.
                words = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
                assert said in subprocess.run(words, capture_output=True, text=True, check=True).stdout
            for seconds, sent, received in results:
                # Of 1514 bytes on the wire 1448 are data, and half a millisecond of the rate may leave at once.
                assert seconds > 0.98 * wire
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


def wait_while_a_thread_works(rank: int, world_size: int) -> list[float]:
    """Wait for rank 1, which comes when a thread of this rank has worked; return its seconds on a core too."""
    meter, waiting, worked = WaitMeter(), threading.Event(), [0.0]
    store, busy = dist.distributed_c10d._get_default_store(), meter._busy

    def busy_and_tell() -> float:
        found = busy()
        waiting.set()
        return found

    def work() -> None:
        waiting.wait()
        for _ in range(100):
            hashlib.sha256(bytes(1 << 20))  # without the interpreter's lock
        worked[0] = time.thread_time()
        store.set("worked", "yes")

    if rank == 1:
        store.wait(["worked"])
        dist.all_reduce(torch.zeros(1))
        return []
    meter._busy = busy_and_tell  # type: ignore[method-assign]
    helper = threading.Thread(target=work)
    helper.start()
    with meter.watching():
        dist.all_reduce(torch.zeros(1))
    helper.join()
    store.delete_key("worked")
    return [meter.blocked, meter.exposed, float(meter.waits), worked[0]]


def test_waits_are_exposed_unless_the_rank_works(ranks: Callable[[int], RankPool]) -> None:
    found: list[Any] = ranks(2).run(wait_while_a_thread_works)
    blocked, exposed, waits, worked = found[0]
    assert waits == 1 and worked > 0
    # The helper has its turns between the meter's looks, but for what it needs to begin and to end.
    assert exposed <= blocked - 0.9 * worked


def wait_by_set_clocks(rank: int, world_size: int) -> list[float]:
    """Wait 10 s by the clock, of which this process works 2 s."""
    meter = WaitMeter()
    clock = SimpleNamespace(perf_counter=iter([100.0, 110.0]).__next__)
    meter._busy = iter([5.0, 7.0]).__next__  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch, meter.watching():
        patch.setattr("benchmarks.waits.time", clock)
        dist.all_reduce(torch.zeros(1))
    return [meter.blocked, meter.exposed, float(meter.waits)]


def test_what_a_rank_works_while_it_waits_is_not_exposed(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(wait_by_set_clocks) == [[10.0, 8.0, 1.0]] * 2


@needs_namespaces
@pytest.mark.full
@pytest.mark.time_limit(900)
def test_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "cluster"
    command = [sys.executable, "benchmarks/cluster.py", "--model", "tiny", "--stages", "3", "--hosts", "2"]
    command += ["--rates", "unlimited", "20mbit", "--repeats", "3"]
    run_command([*command, "--out", str(out)], timeout=800)
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert len(rows) == 2 * 4
    for row in rows:
        # plan predicts no step of DeepSpeed's Muon.
        predicted = row["rate"] is not None and not row["optimizer"].startswith("DeepSpeed Muon")
        assert ("predicted_s" in row) == predicted and row.get("predicted_s", 1.0) > 0
        assert len(row["samples"]) == 3 and len(row["samples"][0]) == 2
    assert out.with_suffix(".md").read_text().count("\n| tiny |") == len(rows)
    assert not namespaces() or all(str(os.getpid()) not in name for name in namespaces())
