"""Newton-Schulz and the flat passes against what a user would run instead, on the same inputs in one run.

    python benchmarks/newton_schulz.py                  # CPU: one and two threads, about ten minutes
    python benchmarks/newton_schulz.py --quick          # fewer repetitions, one thread
    python benchmarks/newton_schulz.py --device cuda    # one GPU

Times are medians over repetitions in which all implementations take turns, so that what else runs on the machine
meets all of them alike. Peers: the iteration of ``torch.optim.Muon``, one matrix at a time as that optimizer calls it;
the two functions inside DeepSpeed, compiled as DeepSpeed compiles them, one matrix at a time as its optimizer calls
them and, for batches, in one call. On a GPU besides: the standard bf16 iteration under ``torch.compile``; torch's code
with cuBLAS, and with the symmetric products of Triton, all in our dtype; and
``gram-newton-schulz`` where that is installed.

Writes ``newton_schulz-<hardware>.json`` and ``.md`` into the folder ``--out`` (``benchmarks/results``).
"""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
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
from deepspeed_muon.math.newton_schulz import (
    NsSettings,
    orthogonalize,
    reference_orthogonalize,
    resolve_ns_dtype,
)
from deepspeed_muon.ops import dispatch, library
from deepspeed_muon.ops.autotune import Tuner, error_of
from deepspeed_muon.ops.candidates import triton_products
from deepspeed_muon.ops.machine import hardware_name

STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
CPU_SHAPES = [(256, 256), (512, 512), (768, 768), (768, 3072), (1024, 4096)]
CUDA_SHAPES = [(m, round(m * ratio)) for m in (1024, 2048, 4096, 8192) for ratio in (1, 8 / 3, 4)]
RESULTS = support.REPOSITORY / "benchmarks" / "results"

Run = Callable[[], object]


def peers(x: Tensor) -> dict[str, Run]:
    """What others run on ``x`` (batch, rows, cols)."""
    each = list(x.unbind(0))
    found: dict[str, Run] = {}
    if x.device.type == "cuda":
        compiled = torch.compile(standard_bf16)
        found["compiled standard bf16"] = lambda: compiled(x)
        found |= libraries(x)
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


def libraries(x: Tensor) -> dict[str, Run]:
    """The same iteration with the products of each library on this GPU, and ``gram-newton-schulz``, in one call."""
    settings = NsSettings(resolve_schedule("quintic", STEPS), "gram", resolve_ns_dtype("auto", x.device))
    found: dict[str, Run] = {"cuBLAS": lambda: orthogonalize(x, settings=settings)}
    if (products := triton_products()) is not None:
        found["triton"] = lambda: orthogonalize(x, settings=settings, products=products)
    if importlib.util.find_spec("gram_newton_schulz") is not None:
        package = importlib.import_module("gram_newton_schulz")
        theirs = package.GramNewtonSchulz(
            ns_use_kernels=True, use_gram_newton_schulz=True, gram_newton_schulz_reset_iterations=[2]
        )
        found["gram-newton-schulz"] = lambda: theirs(x)
    return found


def standard_bf16(x: Tensor) -> Tensor:
    """The iteration that Muon's authors publish, for a batch."""
    a, b, c = QUINTIC
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.bfloat16()
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def interleaved(
    runs: dict[str, Run], *, seconds: float, least: int, most: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of each implementation in each round; every round runs all of them once."""
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    for done in range(most):
        if done >= least and time.perf_counter() - started > seconds:
            break
        for name, run in runs.items():
            times[name].append(timed(run, device))
    return times


def timed(run: Run, device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end))
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def iteration_rows(
    device: torch.device, shapes: Sequence[tuple[int, int]], threads: int, seconds: float, folder: Path
) -> Iterator[dict[str, Any]]:
    settings = NsSettings(resolve_schedule("quintic", STEPS), "gram", resolve_ns_dtype("auto", device))
    for batch in (1, 8):
        for shape in shapes:
            ours = dispatch.Orthogonalizer("auto", tuner=Tuner(folder))
            x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(device)
            runs: dict[str, Run] = {"ours": lambda ours=ours, x=x: ours(x, settings=settings), **peers(x)}
            times = interleaved(
                runs, seconds=seconds, least=5 if x.numel() > 1e7 else 9, most=201, device=device
            )
            medians = {name: round(statistics.median(values), 4) for name, values in times.items()}
            ratios = {name: round(median_ratio(times[name], times["ours"]), 3) for name in list(times)[1:]}
            small = batch * shape[0] ** 2 * shape[1] < 1e9
            row = {
                "device": device.type,
                "threads": threads,
                "batch": batch,
                "shape": list(shape),
                "rounds": len(times["ours"]),
                "ran": ours.report()[0]["ran"],
                "milliseconds": medians,
                "median_of_ratios": ratios,
                "error": errors(x, ours(x, settings=settings)) if small else None,
            }
            what = f"{threads} thr, {batch} x {shape}: {medians['ours']:.2f} ms ({row['ran']})"
            print(what, *(f"{name} {value:.2f}x" for name, value in ratios.items()), sep=", ", flush=True)
            yield row


def errors(x: Tensor, result: Tensor) -> float:
    """Relative error against the same polynomial in float64."""
    rows = resolve_schedule("quintic", STEPS)
    return round(
        error_of(result.cpu(), torch.stack([reference_orthogonalize(one.cpu(), rows) for one in x])), 5
    )


def flat_rows(device: torch.device, threads: int, seconds: float) -> list[dict[str, Any]]:
    """Bandwidth of the flat passes, counting each operand once for each read and write, against a plain copy."""
    numel = 1 << (28 if device.type == "cuda" else 25)
    native = dispatch.flat_passes("ops", device)
    plain = dispatch.flat_passes("torch", device)
    buf, grad, target = (torch.randn(numel, device=device) for _ in range(3))
    table = torch.tensor([(0, 0, 0, 0, numel, 0)])
    momentum, rates = (torch.tensor([each], dtype=torch.float64) for each in ((0.95, 1.0), (1e-6, 0.999)))
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(numel, dtype=dtype, device=device)
        bytes_moved = {"copy": 8, "pack": 12 + out.element_size(), "apply": 8 + out.element_size()}
        runs: dict[str, Run] = {
            "copy": lambda: target.copy_(grad),
            "pack": lambda out=out: native.momentum_pack([buf], [grad], [out], table, momentum),
            "apply": lambda out=out: native.unpack_apply([target], [out], table, rates),
            "pack, torch": lambda out=out: plain.momentum_pack([buf], [grad], [out], table, momentum),
            "apply, torch": lambda out=out: plain.unpack_apply([target], [out], table, rates),
        }
        times = interleaved(runs, seconds=seconds, least=9, most=101, device=device)
        bandwidth = {
            name: numel * bytes_moved[name.split(",")[0]] / statistics.median(values) / 1e6
            for name, values in times.items()
        }
        of_copy = {
            name: bytes_moved[name] / 8 * median_ratio(times["copy"], times[name])
            for name in ("pack", "apply")
        }
        row = {
            "device": device.type,
            "threads": threads,
            "dtype": str(dtype).removeprefix("torch."),
            "elements": numel,
            "rounds": len(times["copy"]),
            "gigabytes_per_second": {name: round(value, 2) for name, value in bandwidth.items()},
            "of_a_copy": {name: round(value, 3) for name, value in of_copy.items()},
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def sym_gemm_rows(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """TFLOP/s on the tiles that ``sym_gemm`` computes (128 x 128, lower triangle), and of cuBLAS's whole product."""
    rows = []
    operators = library.load()
    for m in (1024, 2048, 4096, 8192):
        for dtype in (torch.bfloat16, torch.float16):
            a = torch.randn(1, m, m, device=device).to(dtype)
            runs: dict[str, Run] = {
                "sym_gemm": lambda a=a: operators.sym_gemm(a, a, None, 1.0, 0.0, 0.0),
                "cuBLAS": lambda a=a: a @ a.mT,
            }
            found = interleaved(runs, seconds=seconds, least=20, most=200, device=device)
            times = {name: statistics.median(values) for name, values in found.items()}
            tiles = m / 128
            flops = {"sym_gemm": m**3 * (tiles + 1) / tiles, "cuBLAS": 2.0 * m**3}
            rows.append(
                {
                    "m": m,
                    "dtype": str(dtype).removeprefix("torch."),
                    "milliseconds": {name: round(value, 4) for name, value in times.items()},
                    "teraflops": {name: round(flops[name] / value / 1e9, 1) for name, value in times.items()},
                }
            )
            print(rows[-1], flush=True)
    return rows


def write(out: Path, about: dict[str, Any], found: dict[str, list[Row]]) -> None:
    told = ", ".join(f"{key} {value}" for key, value in about.items())
    names = sorted({name for row in found["iteration"] for name in row["median_of_ratios"]})
    iteration = [
        [row["threads"], row["batch"], " x ".join(map(str, row["shape"]))]
        + [f"{row['milliseconds']['ours']:.2f}", row["ran"]]
        + [f"{row['median_of_ratios'][n]:.2f}" if n in row["median_of_ratios"] else "" for n in names]
        for row in found["iteration"]
    ]
    flat = [
        [row["threads"], row["dtype"]]
        + [f"{value:.1f}" for value in row["gigabytes_per_second"].values()]
        + [f"{value:.2f}" for value in row["of_a_copy"].values()]
        for row in found["flat"]
    ]
    heads = ["threads", "wire dtype", "copy", "pack", "apply", "pack, torch", "apply, torch"]
    page = [
        "# Newton-Schulz and the flat passes",
        "",
        f"{told}.",
        "",
        "Milliseconds of ours; for each peer how many times as long it takes (median over rounds of its time / ours).",
        "",
        *support.table(["threads", "batch", "shape", "ours, ms", "what ran", *names], iteration),
        "",
        "Flat passes: GB/s, and the share of a plain fp32 copy's bandwidth in the same rounds.",
        "",
        *support.table([*heads, "pack / copy", "apply / copy"], flat),
    ]
    if "sym_gemm" in found:
        libraries = ("sym_gemm", "cuBLAS")
        speeds = [
            [row["m"], row["dtype"], *(row["teraflops"][name] for name in libraries)]
            for row in found["sym_gemm"]
        ]
        page += ["", *support.table(["m", "dtype", *(f"{name}, TFLOP/s" for name in libraries)], speeds)]
    support.write(out, {"setting": about, **found}, page)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def main() -> None:
    parser = support.options(__doc__)
    parser.set_defaults(out=RESULTS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, one thread")
    parser.add_argument(
        "--only",
        choices=["iteration", "flat", "sym_gemm"],
        help="one part; the others of an earlier run on the same hardware are kept",
    )
    parsed = parser.parse_args()
    device = torch.device(parsed.device)
    seconds = 1.0 if parsed.quick else 5.0
    threads = [torch.get_num_threads()] if device.type == "cuda" else [1] if parsed.quick else [1, 2]
    shapes = CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES
    name = torch.cuda.get_device_name() if device.type == "cuda" else hardware_name()
    about = {
        "command": f"python benchmarks/newton_schulz.py --device {device.type}",
        "hardware": f"{name}, {len(os.sched_getaffinity(0))} cores",
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "iteration dtype": str(resolve_ns_dtype("auto", device)).removeprefix("torch."),
        "steps": STEPS,
        "load average before": f"{os.getloadavg()[0]:.1f}",
    }
    found: dict[str, list[Row]] = {"iteration": [], "flat": []}
    path = parsed.out / f"newton_schulz-{slug(name)}"
    if parsed.only and (earlier := support.read(path)):
        later = {f"{parsed.only} in a later run, load average before": about["load average before"]}
        about = {**earlier.pop("setting"), **later}
        found = {**earlier, parsed.only: []}
    library.load()
    with tempfile.TemporaryDirectory() as folder:
        for count in threads:
            torch.set_num_threads(count)
            if parsed.only in (None, "flat"):
                found["flat"] += flat_rows(device, count, seconds)
            if parsed.only in (None, "iteration"):
                for row in iteration_rows(device, shapes, count, seconds, Path(folder)):
                    found["iteration"].append(row)
                    write(path, about, found)  # after every row: a run that is stopped keeps what it has
    if device.type == "cuda" and parsed.only in (None, "sym_gemm"):
        found["sym_gemm"] = sym_gemm_rows(device, seconds)
    write(path, about, found)


if __name__ == "__main__":
    main()
