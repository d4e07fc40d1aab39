"""What studies of many small trainings share: the optimizers, a process for each run, and its line of JSON.

A study is a list of runs, frozen dataclasses, in the order in which they are worth having. :func:`train_missing` trains
those that its file does not have, so the command that started a study also continues it.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "examples")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import deepspeed_muon  # noqa: E402
from benchmarks.support import Row, hardware_name  # noqa: E402

ADAMW = "AdamW"
MUON: dict[str, dict[str, Any]] = {
    "Muon, match": {"adjust_lr_fn": "match_rms_adamw"},
    "Muon, original": {"adjust_lr_fn": "original"},
    "NorMuon, match": {"adjust_lr_fn": "match_rms_adamw", "variant": "normuon"},
    "Muon, match, no Nesterov": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "momentum": 0.9},
}
"""Name to the settings of :class:`deepspeed_muon.Muon`. "match" is ``match_rms_adamw``, one rate for everything."""
BETAS = (0.9, 0.95)

Run = TypeVar("Run")


def optimizer_of(
    name: str, model: nn.Module, *, rate: float, rest: float | None = None
) -> torch.optim.Optimizer:
    """Return an optimizer without weight decay for everything in ``model`` that is not frozen.

    Args:
        name: ``ADAMW`` or a key of ``MUON``.
        model: The model. Muon updates its hidden matrices.
        rate: The rate of the matrices.
        rest: The rate of everything else, which AdamW updates; the same if ``None``.
    """
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if name == ADAMW:
        return torch.optim.AdamW((param for _, param in trained), rate, BETAS, weight_decay=0, fused=True)
    rates = {"muon_lr": rate, "adam_lr": rate if rest is None else rest}
    return deepspeed_muon.Muon(trained, model=model, betas=BETAS, health=False, **rates, **MUON[name])


def moved(batch: tuple[Tensor, Tensor], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on a device."""
    return batch[0].to(device), batch[1].to(device)


def capture(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Make the passes of ``model`` in training mode CUDA graphs of batches like ``batch``, in place; on a CPU nothing.

    The loss is then a buffer that the next pass overwrites.
    """
    if batch[0].is_cuda:
        gc.collect()  # frees the memory of earlier ones, which refer to themselves
        torch.cuda.make_graphed_callables(model, batch)


def read_rows(path: Path) -> list[Row]:
    """Return the finished runs of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def agrees(row: Row, settings: Any) -> bool:
    """Return whether a row has the values of a dataclass."""
    return all(row.get(key) == value for key, value in asdict(settings).items())


def train_missing(
    runs: Iterable[Run], train: Callable[[Run], Row], path: Path, *, side_by_side: int = 1
) -> None:
    """Train the runs that ``path`` does not have, and append a line for each.

    Every run has a process with one thread, forked from this one, which must not have computed gradients before.
    Where several are trained side by side, on a GPU, each process is a new interpreter that goes on with the next run,
    and ``train`` must be picklable. A run that fails, and those that a killed process of several leaves behind, are
    reported and tried again by the next call.

    Raises:
        SystemExit: Another process is writing to ``path``.
    """
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"{path}: another process is at work on these runs") from None
        finished = read_rows(path)
        missing = (
            run
            for run in runs
            if not any(row["run"] == type(run).__name__ and agrees(row, run) for row in finished)
        )
        in_turn = ((run, in_process(train, run)) for run in missing)
        for run, row in in_turn if side_by_side == 1 else in_pool(train, missing, side_by_side):
            if row is None:
                print(f"failed: {run}", flush=True)
                continue
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{time.strftime('%H:%M:%S')} {row['seconds']} s {run}", flush=True)


def row_of(train: Callable[[Run], Row], run: Run) -> Row:
    """Return ``train(run)`` with the settings of the run, its processor time as ``seconds``, machine and versions."""
    torch.set_num_threads(1)
    start = time.process_time()
    result = train(run)
    settings = asdict(run)  # type: ignore[call-overload]
    versions = {"torch": torch.__version__, "deepspeed_muon": deepspeed_muon.__version__}
    seconds = round(time.process_time() - start, 1)
    return {
        "run": type(run).__name__,
        **settings,
        "seconds": seconds,
        **result,
        "hardware": hardware_name(),
        **versions,
    }


def in_process(train: Callable[[Run], Row], run: Run) -> Row | None:
    """Return :func:`row_of` a run that a process of its own trains; ``None`` if it raised or was killed."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def call(results: Connection) -> None:
        try:
            results.send(row_of(train, run))
        except BaseException:
            traceback.print_exc()
            raise

    process = context.Process(target=call, args=(sender,))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def in_pool(
    train: Callable[[Run], Row], runs: Iterable[Run], processes: int
) -> Iterator[tuple[Run, Row | None]]:
    """Yield each run with :func:`row_of` it, ``None`` if it raised, as they end in some processes."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(row_of, train, run): run for run in runs}
        for future in as_completed(running):
            if error := future.exception():
                print("".join(traceback.format_exception(error)), file=sys.stderr)
            yield running[future], None if error else future.result()


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error."""

    mean: float
    error: float
    """Not a number with one seed."""
    seeds: int

    def __str__(self) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.4f}"
        return f"{self.mean:.4f}{error} ({self.seeds})"

    def verdict(self, below: str = "better", above: str = "worse") -> str:
        """Return ``below`` or ``above`` where the mean is more than two standard errors from zero."""
        if self.seeds < 3:
            return "too few seeds"
        return "no difference" if abs(self.mean) <= 2 * self.error else below if self.mean < 0 else above


def estimate(values: Sequence[float], *, other_error: float = 0.0) -> Estimate:
    """Return the mean of ``values``, a value for each seed; ``other_error`` is added to the error in quadrature."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(statistics.fmean(values), math.hypot(error, other_error), len(values))
