"""What a rank does in ``benchmarks/cluster.py``: steps of all optimizers in turn, at one rate after the other."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import support
from benchmarks.network import LinkEnd, limit_rate, link_bytes
from benchmarks.sent_bytes import SentBytes
from benchmarks.step_ranks import MODELS, batch_of, choose_dtype_by_processor, decoder, make_engine
from benchmarks.waits import WaitMeter, idle_seconds

FIELDS = (
    "forward_s",
    "backward_s",
    "step_s",
    "blocked_s",
    "exposed_s",
    "exposed_step_s",
    "waits",
    "cpu_s",
    "idle_s",
    "sent_bytes",
    "received_bytes",
)
"""What a rank measures in a step. ``exposed_step_s`` is the part of ``exposed_s`` inside ``engine.step()``;
``idle_s`` is of all cores of the machine together; bytes are the kernel's."""

_LEAST_REPEATS = 3


@dataclass(slots=True)
class Runner:
    """One optimizer's engine, and the threads that work in its steps."""

    engine: Any
    batch: Tensor
    meter: WaitMeter = field(default_factory=WaitMeter)
    threads: set[int] | None = None

    def step(self, sent: SentBytes | None = None) -> tuple[list[float], list[dict[str, dict[str, int]]]]:
        """Run one step between two barriers; return ``FIELDS``, and counts by phase if ``sent`` is given."""
        dist.barrier()
        before, idle, processor = link_bytes(), idle_seconds(), time.process_time()
        counts: list[dict[str, dict[str, int]]] = []

        def ends() -> float:
            if sent is not None:
                counts.append({"bytes": dict(sent.bytes), "calls": dict(sent.calls)})
                sent.reset()
            return time.perf_counter()

        with self.meter.watching(self.threads) as threads:
            start = ends()
            loss = self.engine(self.batch)
            forward = ends()
            self.engine.backward(loss)
            backward, exposed = ends(), self.meter.exposed
            self.engine.step()
            end = ends()
        self.threads = threads
        processor = time.process_time() - processor
        dist.barrier()
        after = link_bytes()
        meter = self.meter
        times = [forward - start, backward - forward, end - backward, meter.blocked, meter.exposed]
        times += [meter.exposed - exposed, float(meter.waits), processor, idle_seconds() - idle]
        return [*times, *(float(b - a) for a, b in zip(before, after, strict=True))], counts[1:]


def measure(
    rank: int,
    world_size: int,
    *,
    model: str,
    stage: int,
    optimizers: list[str],
    rates: list[float | None],
    repeats: int,
    cell_seconds: float,
    tokens: int,
    ends: list[list[str]],
) -> dict[str, Any]:
    """Measure all optimizers at all rates, with all their engines alive.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        model: A key of ``MODELS``.
        stage: ZeRO's stage.
        optimizers: Keys of ``OPTIMIZERS``.
        rates: Bits a second of every link, ``None`` for no limit, in the order in which they are measured.
        repeats: Turns of each rate.
        cell_seconds: No further turn of a rate starts after this time, and after three turns.
        tokens: Of a micro-batch.
        ends: Namespace and device of both ends of every link; rank 0 limits them.

    Returns:
        On rank 0 ``samples``, for each optimizer and rate a list of steps with the ``FIELDS`` of each rank, and
        ``counts``, for each optimizer bytes and collectives by phase and kind; other ranks have ``counts`` only.
    """
    choose_dtype_by_processor()
    batch = batch_of(MODELS[model].vocabulary, 0, tokens, "cpu")
    runners = {name: Runner(make_engine(name, decoder(model), stage, 1, "cpu"), batch) for name in optimizers}
    sent = SentBytes()
    counts: dict[str, Any] = {}
    for name, runner in runners.items():
        runner.step()  # builds state, compiles, chooses kernels
        sent.install()
        _, counts[name] = runner.step(sent)
        sent.remove()
    gc.collect()
    gc.disable()  # a collection takes 0.1 s, in whichever step it falls
    samples: dict[str, list[Any]] = {name: [] for name in optimizers}
    for rate in rates:
        _set_rate(rank, ends, rate)
        print(f"stage {stage}, {rate} bits a second, {time.strftime('%H:%M:%S')}", flush=True)
        found = _turns(runners, repeats, cell_seconds)
        for name in optimizers:
            samples[name].append(found[name])
    _set_rate(rank, ends, None)
    gc.enable()
    for runner in runners.values():
        runner.engine.destroy()
    return {"counts": counts, **({"samples": samples} if rank == 0 else {})}


def _turns(runners: dict[str, Runner], repeats: int, cell_seconds: float) -> dict[str, list[Any]]:
    """Let all optimizers take turns; return for each the steps, with the figures of every rank."""
    found: dict[str, list[Any]] = {name: [] for name in runners}
    start = time.monotonic()
    for repeat, names in enumerate(support.turns(list(runners), repeats)):
        late = torch.tensor(float(repeat >= _LEAST_REPEATS and time.monotonic() - start > cell_seconds))
        dist.broadcast(late, 0)
        if late:
            break
        gc.collect()
        for name in names:
            own = torch.tensor(runners[name].step()[0], dtype=torch.float64)
            print(f"turn {repeat} of {name}: {sum(own[:3].tolist()):.3f} s", flush=True)
            everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, own)
            found[name].append([each.tolist() for each in everyone])
    return found


def _set_rate(rank: int, ends: list[list[str]], rate: float | None) -> None:
    dist.barrier()
    if rank == 0:
        limit_rate([LinkEnd(*end) for end in ends], rate)
    dist.barrier()
