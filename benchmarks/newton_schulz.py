"""Newton-Schulz and the flat passes against what a user would run instead, on the same inputs in one run.

    python benchmarks/newton_schulz.py                              # CPU: one and two threads, about ten minutes
    python benchmarks/newton_schulz.py --threads 1 --seconds 1      # a shorter run
    python benchmarks/newton_schulz.py --device cuda --threads 1    # one GPU
    python benchmarks/newton_schulz.py --device cuda --threads 1 --only sym_gemm iteration --shapes 2048x5504

Times are medians over turns in which all implementations take part, so that whatever else runs on the machine slows
all of them. On a CPU a turn is one call. On a GPU it is 20 to 50 calls between two CUDA events, without a
synchronisation among them, on inputs that together are larger than the L2 cache. Peers: the iteration of
``torch.optim.Muon``, one matrix at a time as that optimizer calls it; the two functions inside DeepSpeed, compiled as
DeepSpeed compiles them, one matrix at a time as its optimizer calls them and, for batches, in one call. On a GPU also:
the standard bf16 iteration under ``torch.compile``; ``gram-newton-schulz``, where it is installed; and what the rule of
``ops/dispatch.py`` chooses from: torch's code with the symmetric products of cuBLAS, of Triton and, where it is
installed, of ``quack``, and the native iteration, each in both orders, launched and as a CUDA graph. Of these the page
has the best of each library. An implementation that raises is left out, with a message.

The flat passes pack the momentum, stored in fp32, bf16 or int8, into the send buffer and apply the update. Their
bandwidth counts each operand once for each read and write; a plain fp32 copy is timed with them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.muon.original_muon import (
    zeropower_via_gram_newtonschulz,
    zeropower_via_newtonschulz5,
)
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from benchmarks.support import Row, median_ratio
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, Products, resolve_ns_dtype
from deepspeed_muon.ops import builder, dispatch
from deepspeed_muon.ops.graphs import (
    Replayed,
    native_iteration,
    products_of,
    torch_iteration,
    triton_products,
)

STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
SHAPES = {
    "cpu": [(256, 256), (512, 512), (768, 768), (768, 3072), (1024, 4096)],
    # Multiples of 64, as in models: the symmetric kernels need multiples of 8.
    "cuda": [(m, 64 * round(m * ratio / 64)) for m in (1024, 2048, 4096, 8192) for ratio in (1, 8 / 3, 4)],
}
PARTS = {
    "iteration": "Milliseconds of ours; for each peer how many times as long it takes (median of the ratios).",
    "flat": "Flat passes, GB/s, by the dtype of the send buffer. The momentum is fp32 unless its dtype is named.",
    "sym_gemm": "Symmetric products. The time of `sym_gemm` includes a launch that fills its counter of tiles; an "
    "iteration has one for all of its products. Multiprocessors that are busy are occupied by another kernel, as by "
    "NCCL's.",
}

Run = Callable[[Tensor], object]
"""An implementation; its argument is one of the inputs, which the turns go through."""


def peers(batch: int, device: torch.device) -> dict[str, Run]:
    """Return what others run on inputs ``(batch, rows, cols)``."""
    runs: dict[str, Run] = {}
    if device.type == "cuda":
        runs["compiled standard bf16"] = torch.compile(standard_bf16)
        if installed("gram_newton_schulz"):
            runs["gram-newton-schulz"] = lambda x: gram_newton_schulz()(x)
    runs["torch.optim.Muon"] = lambda x: [
        _zeropower_via_newtonschulz(matrix, QUINTIC, STEPS, 1e-7) for matrix in x
    ]
    runs["DeepSpeed standard"] = lambda x: [zeropower_via_newtonschulz5(matrix, STEPS) for matrix in x]
    runs["DeepSpeed gram"] = lambda x: [zeropower_via_gram_newtonschulz(matrix, STEPS) for matrix in x]
    if batch > 1:
        if device.type == "cpu":
            runs["DeepSpeed standard, batched"] = lambda x: zeropower_via_newtonschulz5(x, STEPS)
        runs["DeepSpeed gram, batched"] = lambda x: zeropower_via_gram_newtonschulz(x, STEPS)
    return runs


def in_graphs(runs: dict[str, Run], x: Tensor, settings: NsSettings) -> dict[str, Run]:
    """Return implementations as CUDA graphs, those that can be captured."""
    graphs: dict[str, Run] = {}
    for name, run in runs.items():

        def joined(x: Tensor, _: NsSettings, run: Run = run) -> Tensor:
            result: Any = run(x)
            return result if isinstance(result, Tensor) else torch.stack(result)

        replayed = Replayed(joined)
        try:
            replayed.capture(x, settings)
            graphs[f"{name}, graph"] = functools.partial(replayed, settings=settings)
        except Exception as error:  # as in milliseconds
            print(f"no graph of {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return graphs


def candidates(x: Tensor, settings: NsSettings) -> dict[str, Run]:
    """Return what the rule chooses from on a GPU, as ``cuBLAS, gram`` or ``ops, standard, graph``."""
    runs: dict[str, Run] = {}
    for method in ("gram", "standard"):
        iterations = {"cuBLAS": torch_iteration(method), "ops": native_iteration(method, builder.load())}
        for name, products in (("triton", triton_products()), ("quack", quack_products())):
            if products is not None:
                iterations[name] = torch_iteration(method, products)
        for name, iteration in iterations.items():
            runs[f"{name}, {method}"] = functools.partial(iteration, settings=settings)
    return runs | in_graphs(runs, x, settings)


def best_of_each_library(times: dict[str, list[float]], ours: list[float]) -> Row:
    """Move the candidates out of ``times``; return how many times as long the best of each library takes as ours."""
    best: Row = {}
    for name in [name for name in times if ", gram" in name or ", standard" in name]:
        ratio = median_ratio(times.pop(name), ours)
        library_name = name.partition(",")[0]
        best[library_name] = min(ratio, best.get(library_name, ratio))
    return best


def quack_products() -> Products | None:
    """Return the symmetric products of quack, or ``None`` if it is not installed."""
    return (
        products_of(importlib.import_module("benchmarks.quack_sym").sym_gemm) if installed("quack") else None
    )


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def gram_newton_schulz() -> Callable[[Tensor], Tensor]:
    return importlib.import_module("gram_newton_schulz").GramNewtonSchulz(
        ns_use_kernels=True, use_gram_newton_schulz=True, gram_newton_schulz_reset_iterations=[2]
    )


def standard_bf16(x: Tensor) -> Tensor:
    """Return what the iteration that Muon's authors publish makes of a batch."""
    a, b, c = QUINTIC
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.bfloat16()
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def milliseconds(
    runs: dict[str, Run], inputs: Sequence[Tensor], seconds: float, device: torch.device, *, busy: int = 0
) -> dict[str, list[float]]:
    """Return the milliseconds of a call of each implementation in each turn.

    One that raises is left out, and a message says why. Of a GPU so many multiprocessors are ``busy`` meanwhile.
    """
    usable = {}
    for name, run in runs.items():
        try:
            run(inputs[0])
            usable[name] = run
        except Exception as error:  # a peer may raise anything on a GPU or a version that it does not support
            print(f"{name} is left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if device.type != "cuda":
        return support.timed_in_turn(
            {name: functools.partial(run, inputs[0]) for name, run in usable.items()}, seconds
        )
    # The first turn compiles, captures graphs and tells how many calls take a tenth of a second.
    counts = {name: calls_in(0.1, event_milliseconds(run, inputs, 3)) for name, run in usable.items()}
    times: dict[str, list[float]] = {name: [] for name in usable}
    started = time.perf_counter()
    for turn, names in enumerate(support.turns(list(usable), 200) if usable else ()):
        if turn >= 3 and time.perf_counter() - started > seconds:
            break
        for name in names:
            with busy_multiprocessors(busy):
                times[name].append(event_milliseconds(usable[name], inputs, counts[name]))
    return times


@contextlib.contextmanager
def busy_multiprocessors(count: int) -> Iterator[None]:
    """Occupy some multiprocessors for half a second, on a stream of its own, and wait for that at the end."""
    if count:
        spin = importlib.import_module("benchmarks.spin").spin
        with torch.cuda.stream(torch.cuda.Stream()):
            spin[(count,)](500_000_000, num_warps=16)
    yield
    if count:
        torch.cuda.synchronize()


def calls_in(seconds: float, ms: float) -> int:
    """Return how many calls of ``ms`` milliseconds a turn consists of: 20 to 50."""
    return min(50, max(20, round(1e3 * seconds / max(ms, 1e-3))))


def event_milliseconds(run: Run, inputs: Sequence[Tensor], count: int) -> float:
    """Return the milliseconds of a call, from CUDA events around ``count`` calls that follow each other."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for number in range(count):
        run(inputs[number % len(inputs)])
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def inputs_like(x: Tensor, device: torch.device) -> list[Tensor]:
    """Return random tensors like ``x`` on a device: together twice as large as the L2 cache of a GPU, else one."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    count = max(1, -(-2 * cache // (x.numel() * x.element_size())))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(x.shape, generator=generator).to(device, x.dtype) for _ in range(count)]


def iteration_rows(device: torch.device, shapes: Sequence[tuple[int, int]], seconds: float) -> Iterator[Row]:
    """Yield our milliseconds of each batch and shape and how many times as long each peer takes."""
    settings = NsSettings(resolve_schedule("quintic", STEPS), "gram", resolve_ns_dtype("auto", device))
    for batch in (1, 8):
        for shape in shapes:
            ours = dispatch.Orthogonalizer("auto")
            runs: dict[str, Run] = {"ours": functools.partial(ours, settings=settings)}
            runs |= (theirs := peers(batch, device))
            inputs = inputs_like(torch.empty(batch, *shape), device)
            if device.type == "cuda":
                runs |= in_graphs(theirs, inputs[0], settings)
                runs |= candidates(inputs[0], settings)
            # Captures its graph, as the optimizer does.
            ours.prepare(inputs[0], settings=settings, device=device)
            times = milliseconds(runs, inputs, seconds, device)
            row = {"batch": batch, "shape": " x ".join(map(str, shape))}
            if "ours" not in times:
                yield {**row, "what ran": "nothing: ours raised"}
                continue
            ours_ms = times.pop("ours")
            best = best_of_each_library(times, ours_ms)
            yield {
                **row,
                "ours, ms": statistics.median(ours_ms),
                "what ran": ours.report()[0]["ran"],
                **best,
                **{name: median_ratio(ms, ours_ms) for name, ms in times.items()},
            }


def flat_rows(device: torch.device, numel: int, seconds: float) -> Iterator[Row]:
    """Yield the GB/s of the flat passes for each dtype of the send buffer; ``numel`` should be larger than a cache."""
    native, plain = (dispatch.flat_passes(backend, device) for backend in ("ops", "torch"))
    buf, grad, target = (torch.randn(numel, device=device) for _ in range(3))
    half, codes = buf.bfloat16(), torch.zeros(numel, dtype=torch.int8, device=device)
    scales = torch.zeros(-(-numel // 256), device=device)
    # Tables and rates are on the CPU on every device.
    table = torch.tensor([(0, 0, 0, 0, numel, 0)])
    momentum, rates = (torch.tensor([pair], dtype=torch.float64) for pair in ((0.95, 1.0), (1e-6, 0.999)))
    blocks = torch.tensor([(0, 0)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(numel, dtype=dtype, device=device)
        arguments, sent = ([grad], [out], table, momentum), out.element_size()
        # Bytes an element, and a call.
        passes: dict[str, tuple[float, Callable[..., object]]] = {
            "copy": (8, target.copy_),
            "pack": (12 + sent, lambda _, a=arguments: native.momentum_pack([buf], *a)),
            "pack, bf16": (8 + sent, lambda _, a=arguments: native.momentum_pack([half], *a)),
            "pack, int8": (
                4 + 2 * (1 + 4 / 256) + sent,
                lambda _, a=arguments: native.momentum_pack_int8([codes], [scales], *a, blocks),
            ),
            "apply": (8 + sent, lambda _, out=out: native.unpack_apply([target], [out], table, rates)),
            "pack, torch": (12 + sent, lambda _, a=arguments: plain.momentum_pack([buf], *a)),
            "apply, torch": (8 + sent, lambda _, out=out: plain.unpack_apply([target], [out], table, rates)),
        }
        times = milliseconds({name: run for name, (_, run) in passes.items()}, [grad], seconds, device)
        bandwidth = {name: numel * passes[name][0] / statistics.median(times[name]) / 1e6 for name in times}
        yield {"wire dtype": str(dtype).removeprefix("torch."), **bandwidth}


def sym_gemm_rows(
    device: torch.device, sizes: Sequence[int], seconds: float, busy: Sequence[int]
) -> Iterator[Row]:
    """Yield TFLOP/s of symmetric products, counting a lower triangle of 128 x 128 tiles; of cuBLAS the full product.

    They are measured once for each number of multiprocessors that are ``busy``.
    """
    operators = builder.load()
    runs: dict[str, Run] = {"cuBLAS": lambda a: a @ a.mT}
    if device.type == "cuda":
        runs["sym_gemm"] = lambda a: operators.sym_gemm(a, a, None, 1.0, 0.0, 0.0)
        for name, products in (("triton", triton_products()), ("quack", quack_products())):
            if products is not None:
                runs[name] = products.gram
        if installed("quack"):
            unmirrored = importlib.import_module("quack.gemm_interface").gemm_symmetric
            runs["quack, not mirrored"] = lambda a: unmirrored(a, a.mT)
    for m, dtype, count in itertools.product(sizes, (torch.bfloat16, torch.float16), busy):
        inputs = inputs_like(torch.empty(1, m, m, dtype=dtype), device)
        times = milliseconds(runs, inputs, seconds, device, busy=count)
        triangle = m**3 * (1 + 128 / m)
        flops = {name: 2.0 * m**3 if name == "cuBLAS" else triangle for name in times}
        speeds = {f"{name}, TFLOP/s": flops[name] / statistics.median(times[name]) / 1e9 for name in times}
        yield {"m": m, "dtype": str(dtype).removeprefix("torch."), "busy": count, **speeds}


def page(tables: dict[str, list[Row]], device: torch.device) -> list[str]:
    """Return all tables as Markdown."""
    dtype = str(resolve_ns_dtype("auto", device)).removeprefix("torch.")
    lines = support.heading("Newton-Schulz and the flat passes", f"The iteration runs in {dtype}.")
    for part, rows in tables.items():
        lines += [PARTS[part], "", *support.table_of(rows), ""]
    return lines[:-1]


def shape(text: str) -> tuple[int, int]:
    rows, cols = map(int, text.split("x"))
    return rows, cols


def main() -> None:
    """Measure and write; after every row, so that a run that is stopped keeps what it has."""
    parser = support.options(__doc__)
    parser.add_argument("--device", choices=list(SHAPES), default="cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="of all turns of an input")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=None)
    parser.add_argument("--shapes", nargs="+", type=shape, help="of the iteration, such as 2048x5504")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1024, 2048, 4096, 8192], help="of sym_gemm")
    parser.add_argument("--busy", nargs="+", type=int, default=[0], help="multiprocessors, of sym_gemm")
    parser.add_argument("--numel", type=int, help="of the flat passes")
    arguments = parser.parse_args()
    device, seconds = torch.device(arguments.device), arguments.seconds
    only = arguments.only or [part for part in PARTS if part != "sym_gemm" or device.type == "cuda"]
    builder.load()
    tables: dict[str, list[Row]] = {}

    def add(part: str, row: Row) -> None:
        tables.setdefault(part, []).append(row)
        print(row, flush=True)
        support.write(arguments.out, tables, page(tables, device))

    for threads in arguments.threads:
        torch.set_num_threads(threads)
        if "flat" in only:
            numel = arguments.numel or 1 << (28 if device.type == "cuda" else 25)
            for row in flat_rows(device, numel, seconds):
                add("flat", {"threads": threads, **row})
        if "sym_gemm" in only:
            for row in sym_gemm_rows(device, arguments.sizes, seconds, arguments.busy):
                add("sym_gemm", {"threads": threads, **row})
        if "iteration" in only:
            shapes = arguments.shapes or SHAPES[device.type]
            for row in iteration_rows(device, shapes, seconds):
                add("iteration", {"threads": threads, **row})


if __name__ == "__main__":
    main()
