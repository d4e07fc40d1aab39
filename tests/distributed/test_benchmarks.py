"""The benchmarks of a step: bytes and times of every optimizer, links of a limited rate, one rank of very many."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.network import End, host_network, inside, limit_rate, link_bytes, refusal
from benchmarks.optimizer_step import rank_hosts
from benchmarks.scale import LIMITS
from tests.support.harness import REPOSITORY, RankPool, run_command
from tests.support.thinning import full

WHY_NOT = refusal()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "hosts can be made")


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize(
    "rates", [[], pytest.param(["unlimited", "20mbit"], marks=needs_namespaces)], ids=str
)
def test_quick_run(tmp_path: Path, rates: list[str]) -> None:
    out = tmp_path / "step"
    names = ["ours", "DeepSpeed Muon, standard", "DeepSpeed AdamW"]
    command = [sys.executable, "benchmarks/optimizer_step.py", "--model", "tiny", "--stages", "3"]
    command += ["--ranks", "2", "--accumulation", "1", "--repeats", "2", "--optimizers", *names]
    command += ["--rates", *rates] if rates else []
    run_command([*command, "--out", str(out)], timeout=800)
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert sorted(row["optimizer"] for row in rows) == sorted(names * max(len(rates), 1))
    assert out.with_suffix(".md").read_text().count("\n| tiny |") == len(rows)
    sent = {row["optimizer"]: row["sent_bytes"] for row in rows}
    assert sent["ours"] < sent["DeepSpeed Muon, standard"]
    for row in rows:
        assert min(row["total_s"]) > 0
        assert bool(rates) or row["peak_bytes"] > 0  # times alone are measured over links of a limited rate
        if row["optimizer"] == "ours":
            assert any(kernel["calls"] for kernel in row["kernels"])
        if rates:
            # plan predicts no step of DeepSpeed's Muon.
            predicted = row["rate"] is not None and not row["optimizer"].startswith("DeepSpeed Muon")
            assert ("predicted_s" in row) == predicted and row.get("predicted_s", 1.0) > 0
            assert min(row["link_bytes"]) >= row["sent_bytes"] > 0


def exchange(rank: int, world_size: int, *, ends: list[End], rate: float, nbytes: int) -> list[float]:
    """Send to the other rank and receive at the same time; return the best of five times, and bytes by the kernel."""
    if rank == 0:
        limit_rate(ends, rate)
    send, received = torch.full((nbytes,), rank, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    splits = [0 if peer == rank else nbytes for peer in range(world_size)]
    times, counts = [], []
    for _ in range(5):
        dist.barrier()
        before, start = link_bytes(), time.perf_counter()
        dist.all_to_all_single(received, send, splits, splits)
        times.append(time.perf_counter() - start)
        dist.barrier()
        counts.append([now - then for now, then in zip(link_bytes(), before, strict=True)])
    assert received.eq(1 - rank).all()
    return [min(times), *map(float, counts[-1])]


@needs_namespaces
@pytest.mark.full
def test_links_hold_their_rate_and_count_what_is_sent() -> None:
    nbytes = 2_000_000
    devices = os.listdir("/sys/class/net")
    with host_network(2) as network, RankPool(2, hosts=rank_hosts(network)) as pool:
        for megabits in (80, 40):
            results = pool.run(exchange, ends=network.ends, rate=megabits * 1e6, nbytes=nbytes)
            for process, device in network.ends:
                # Nothing slower: how long it really takes depends on the machine's other work.
                words = [*inside(process), "tc", "qdisc", "show", "dev", device]
                shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
                assert f"rate {megabits}Mbit" in shown
            for seconds, sent, received in results:
                # Of 1514 bytes on the wire 1448 are data, and half a millisecond of the rate may leave at once.
                assert seconds > 0.98 * 8 * nbytes / (megabits * 1e6)
                # Headers are 5 %, acknowledgements and the barrier another 2 %.
                assert nbytes <= sent <= 1.08 * nbytes
                assert nbytes <= received <= 1.08 * nbytes
    assert gone([network.switch, *network.hosts])
    assert os.listdir("/sys/class/net") == devices


def gone(processes: list[int]) -> bool:
    """Return whether all these processes have ended, within some seconds."""
    deadline = time.monotonic() + 10
    while alive := any(Path(f"/proc/{process}").exists() for process in processes):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return not alive


CHILD = """
import signal, time
from benchmarks.optimizer_step import _stop
from benchmarks.network import host_network
signal.signal(signal.SIGTERM, _stop)
with host_network(2) as network:
    print(network.switch, *network.hosts, flush=True)
    time.sleep(60)
"""


@needs_namespaces
@pytest.mark.parametrize("number", [full(signal.SIGTERM), signal.SIGKILL])
def test_a_stopped_run_leaves_nothing(number: signal.Signals) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", CHILD], cwd=REPOSITORY, **pipes)
    try:
        assert child.stdout is not None
        holders = [int(word) for word in child.stdout.readline().split()]
        namespaces = {os.readlink(f"/proc/{process}/ns/net") for process in (*holders, "self")}
        assert len(namespaces) == 4
        child.send_signal(number)
        child.communicate(timeout=30)
        assert gone(holders)
    finally:
        child.kill()
        child.wait()


def test_users_without_the_right_to_make_hosts_read_what_it_needs() -> None:
    become = "os.setuid(65534); " if os.geteuid() == 0 else ""
    program = f"import os, sys; from benchmarks import optimizer_step as step; {become}sys.exit(step.main())"
    command = [sys.executable, "-c", program, "--rates", "200mbit"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "optimizer_step.py: " in done.stderr
    assert any(word in done.stderr for word in ("root", "iproute2", "Linux"))


@pytest.mark.parametrize(("parameters", "stage"), [(723, 3), full(44000, 1), full(44000, 3)])
def test_one_rank_of_16384(parameters: int, stage: int) -> None:
    """What it stores, saves and sends at the start is bounded; times depend on what else the machine does."""
    command = [sys.executable, "benchmarks/scale.py", "--cell", str(parameters), str(stage), "16384"]
    measured = json.loads(run_command(command).stdout.splitlines()[-1])
    for quantity in ("memory_mb", "record_kb", "messages_kb"):
        assert measured[quantity] <= LIMITS[quantity], quantity
    assert measured["chunks"] >= 1
