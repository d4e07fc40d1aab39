"""Newton-Schulz and the flat passes against what a user would run instead, on the same inputs in one run.

    python benchmarks/newton_schulz.py                              # CPU: one and two threads, about ten minutes
    python benchmarks/newton_schulz.py --threads 1 --seconds 1      # a shorter run
    python benchmarks/newton_schulz.py --device cuda --threads 1    # one GPU
    python benchmarks/newton_schulz.py --device cuda --threads 1 --only sym_gemm iteration --shapes 2048x5504

Times are medians over repetitions in which all implementations take turns, so that what else runs on the machine
meets all of them alike. Peers: the iteration of ``torch.optim.Muon``, one matrix at a time as that optimizer calls it;
the two functions inside DeepSpeed, compiled as DeepSpeed compiles them, one matrix at a time as its optimizer calls
them and, for batches, in one call. On a GPU besides: the standard bf16 iteration under ``torch.compile``; torch's code
with cuBLAS, and with the symmetric products of Triton, all in our dtype; where they are installed, also with those of
``quack``, and ``gram-newton-schulz``. A peer that raises is left out, with a message.

The flat passes pack the momentum, kept in fp32, bf16 or 8 bits, into the send buffer and apply the update. Their
bandwidth counts each operand once for each read and write; beside them a plain fp32 copy.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
from deepspeed_muon.math.newton_schulz import NsSettings, Products, orthogonalize, resolve_ns_dtype
from deepspeed_muon.ops import dispatch, library
from deepspeed_muon.ops.autotune import Tuner
from deepspeed_muon.ops.candidates import triton_products

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
    "sym_gemm": "Symmetric products.",
}

Run = Callable[[], object]


def peers(x: Tensor, settings: NsSettings) -> dict[str, Run]:
    """Return what others run on ``x`` (batch, rows, cols)."""
    each = list(x.unbind(0))
    found: dict[str, Run] = {}
    if x.device.type == "cuda":
        compiled = torch.compile(standard_bf16)
        found["compiled standard bf16"] = lambda: compiled(x)
        found |= libraries(x, settings)
    found["torch.optim.Muon"] = lambda: [
        _zeropower_via_newtonschulz(one, QUINTIC, STEPS, 1e-7) for one in each
    ]
    found["DeepSpeed standard"] = lambda: [zeropower_via_newtonschulz5(one, STEPS) for one in each]
    found["DeepSpeed gram"] = lambda: [zeropower_via_gram_newtonschulz(one, STEPS) for one in each]
    if len(each) > 1:
        if x.device.type == "cpu":
            found["DeepSpeed standard, batched"] = lambda: zeropower_via_newtonschulz5(x, STEPS)
        found["DeepSpeed gram, batched"] = lambda: zeropower_via_gram_newtonschulz(x, STEPS)
    return found


def libraries(x: Tensor, settings: NsSettings) -> dict[str, Run]:
    """Return the iteration with the products of each library on this GPU, and ``gram-newton-schulz``, in one call."""
    found: dict[str, Run] = {"cuBLAS": lambda: orthogonalize(x, settings=settings)}
    if (products := triton_products()) is not None:
        found["triton"] = lambda: orthogonalize(x, settings=settings, products=products)
    if installed("quack"):
        found["quack"] = lambda: orthogonalize(x, settings=settings, products=quack_products())
    if installed("gram_newton_schulz"):
        found["gram-newton-schulz"] = lambda: gram_newton_schulz()(x)
    return found


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def quack_products() -> Products:
    gemm = importlib.import_module("quack.gemm_interface").gemm_symmetric

    def multiply_add(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
        return gemm(a, b, C=c, alpha=float(alpha), beta=float(beta))  # it takes an integer for a tensor

    return Products(lambda x: gemm(x, x.mT), multiply_add)


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


def milliseconds(runs: dict[str, Run], seconds: float, device: torch.device) -> dict[str, list[float]]:
    """Return the milliseconds of each implementation in each turn, the device's work included.

    What raises is left out, and a message says why.
    """

    def finished(run: Run) -> Run:
        return lambda: (run(), torch.cuda.synchronize(device))

    if device.type == "cuda":
        runs = {name: finished(run) for name, run in runs.items()}
    usable = {}
    for name, run in runs.items():
        try:
            run()
            usable[name] = run
        except Exception as error:  # whatever a peer raises on a GPU or a version that it does not know
            print(f"{name} is left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return support.timed_in_turn(usable, seconds)


def iteration_rows(
    device: torch.device, shapes: Sequence[tuple[int, int]], seconds: float, folder: Path
) -> Iterator[Row]:
    """Yield our milliseconds of each batch and shape and how many times as long each peer takes."""
    settings = NsSettings(resolve_schedule("quintic", STEPS), "gram", resolve_ns_dtype("auto", device))
    for batch in (1, 8):
        for shape in shapes:
            ours = dispatch.Orthogonalizer("auto", tuner=Tuner(folder))
            x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(device)
            runs: dict[str, Run] = {"ours": lambda ours=ours, x=x: ours(x, settings=settings)}
            times = milliseconds({**runs, **peers(x, settings)}, seconds, device)
            own = times.pop("ours")
            yield {
                "batch": batch,
                "shape": " x ".join(map(str, shape)),
                "ours, ms": statistics.median(own),
                "what ran": ours.report()[0]["ran"],
                **{name: median_ratio(each, own) for name, each in times.items()},
            }


def flat_rows(device: torch.device, seconds: float) -> Iterator[Row]:
    """Yield the GB/s of the flat passes for each dtype of the send buffer."""
    numel = 1 << (28 if device.type == "cuda" else 25)
    native, plain = (dispatch.flat_passes(backend, device) for backend in ("ops", "torch"))
    buf, grad, target = (torch.randn(numel, device=device) for _ in range(3))
    half, codes = buf.bfloat16(), torch.zeros(numel, dtype=torch.int8, device=device)
    scales = torch.zeros(numel // 256, device=device)
    table = torch.tensor([(0, 0, 0, 0, numel, 0)])
    momentum, rates = (torch.tensor([each], dtype=torch.float64) for each in ((0.95, 1.0), (1e-6, 0.999)))
    blocks = torch.tensor([(0, 0)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(numel, dtype=dtype, device=device)
        given, sent = ([grad], [out], table, momentum), out.element_size()
        runs = {
            "copy": (8, lambda: target.copy_(grad)),
            "pack": (12 + sent, lambda given=given: native.momentum_pack([buf], *given)),
            "pack, bf16": (8 + sent, lambda given=given: native.momentum_pack([half], *given)),
            "pack, 8 bits": (
                4 + 2 * (1 + 4 / 256) + sent,
                lambda given=given: native.momentum_pack_int8([codes], [scales], *given, blocks),
            ),
            "apply": (8 + sent, lambda out=out: native.unpack_apply([target], [out], table, rates)),
            "pack, torch": (12 + sent, lambda given=given: plain.momentum_pack([buf], *given)),
            "apply, torch": (8 + sent, lambda out=out: plain.unpack_apply([target], [out], table, rates)),
        }
        times = milliseconds({name: run for name, (_, run) in runs.items()}, seconds, device)
        bandwidth = {
            name: numel * moved / statistics.median(times[name]) / 1e6 for name, (moved, _) in runs.items()
        }
        yield {"wire dtype": str(dtype).removeprefix("torch."), **bandwidth}


def sym_gemm_rows(device: torch.device, seconds: float) -> Iterator[Row]:
    """Yield TFLOP/s of symmetric products, counting a lower triangle of 128 x 128 tiles, and of cuBLAS's whole one."""
    operators = library.load()
    for m in (1024, 2048, 4096, 8192):
        for dtype in (torch.bfloat16, torch.float16):
            a = torch.randn(1, m, m, device=device).to(dtype)
            runs: dict[str, Run] = {
                "sym_gemm": lambda a=a: operators.sym_gemm(a, a, None, 1.0, 0.0, 0.0),
                "cuBLAS": lambda a=a: a @ a.mT,
            }
            if installed("quack"):
                runs["quack"] = lambda a=a: quack_products().gram(a)
            tiles = m**3 * (1 + 128 / m)
            flops = {"sym_gemm": tiles, "quack": tiles, "cuBLAS": 2.0 * m**3}
            times = milliseconds(runs, seconds, device)
            speeds = {
                f"{name}, TFLOP/s": flops[name] / statistics.median(times[name]) / 1e9 for name in times
            }
            yield {"m": m, "dtype": str(dtype).removeprefix("torch."), **speeds}


def page(found: dict[str, list[Row]], device: torch.device) -> list[str]:
    """Return all tables as Markdown."""
    dtype = str(resolve_ns_dtype("auto", device)).removeprefix("torch.")
    lines = support.heading("Newton-Schulz and the flat passes", f"The iteration runs in {dtype}.")
    for part, rows in found.items():
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
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", type=shape, help="of the iteration, such as 2048x5504")
    arguments = parser.parse_args()
    device, seconds = torch.device(arguments.device), arguments.seconds
    library.load()
    found: dict[str, list[Row]] = {}

    def add(part: str, row: Row) -> None:
        found.setdefault(part, []).append(row)
        print(row, flush=True)
        support.write(arguments.out, found, page(found, device))

    if device.type == "cuda" and "sym_gemm" in arguments.only:
        for row in sym_gemm_rows(device, seconds):
            add("sym_gemm", row)
    with tempfile.TemporaryDirectory() as folder:
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            if "iteration" in arguments.only:
                shapes = arguments.shapes or SHAPES[device.type]
                for row in iteration_rows(device, shapes, seconds, Path(folder)):
                    add("iteration", {"threads": threads, **row})
            if "flat" in arguments.only:
                for row in flat_rows(device, seconds):
                    add("flat", {"threads": threads, **row})


if __name__ == "__main__":
    main()
