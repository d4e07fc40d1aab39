"""The choice between candidates: right before fast, remembered, bounded in time, and visible in the report."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.ops import autotune, dispatch, library, machine, torch_operators
from deepspeed_muon.ops.autotune import Tuner, measure
from deepspeed_muon.ops.candidates import Candidate, candidates_for, has_kernel, problem_of
from deepspeed_muon.ops.machine import lock_file, locked, write_json
from deepspeed_muon.reference import newton_schulz
from tests.support.comparisons import within
from tests.support.kernels import forced_kernel
from tests.support.rounding import iteration_limit

pytestmark = pytest.mark.skipif(bool(forced_kernel()), reason="the choice that it tests is forced")

SETTINGS = NsSettings(resolve_schedule("quintic"))
CPU = torch.device("cpu")
PROBLEM = problem_of(torch.empty(8, 12), SETTINGS)


class Clock:
    """Seconds that only candidates spend, so that no choice depends on the machine's other work."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(autotune, "time", made)
    return made


Taking = Callable[..., Candidate]


@pytest.fixture
def taking(clock: Clock) -> Taking:
    def make(name: str, seconds: float, factor: float = 1.0) -> Candidate:
        def run(x: Tensor, settings: NsSettings) -> Tensor:
            clock.now += seconds
            return factor * orthogonalize(x, settings=settings)

        return Candidate(name, run)

    return make


def plain(x: Tensor, settings: NsSettings) -> Tensor:
    return orthogonalize(x, settings=settings)


def fails(x: Tensor, settings: NsSettings) -> Tensor:
    raise RuntimeError("no such kernel")


def test_the_fastest_candidate_with_a_right_result_is_taken(
    caplog: pytest.LogCaptureFixture, taking: Taking
) -> None:
    wrong, failing = taking("wrong", 0.0, 1.01), Candidate("failing", fails)
    choice = measure(PROBLEM, [taking("slow", 0.02), wrong, failing, taking("fast", 0.001)], CPU)
    assert choice.name == "fast" and choice.reason == "measured"
    assert choice.rejected["wrong"].startswith("relative error 0.01")
    assert choice.rejected["failing"] == "failed: no such kernel"
    assert sorted(record.message.split("'")[1] for record in caplog.records) == ["failing", "wrong"]
    assert all("is not used for cpu" in record.message for record in caplog.records)
    assert set(choice.milliseconds) == {"slow", "fast"}


def test_only_a_part_of_a_large_batch_is_built(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(autotune, "BATCH_NUMEL", 1000)
    batches = []

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        batches.append(x.shape[0])
        return plain(x, settings)

    for matrix, built in (((8, 12), 10), ((40, 50), 1)):
        problem = problem_of(torch.empty(384, 1, 1).expand(384, *matrix), SETTINGS)
        assert measure(problem, [Candidate("one", run), Candidate("two", run)], CPU).reason == "measured"
        assert set(batches) == {built}
        batches.clear()


def test_the_expected_winner_stays_unless_another_is_clearly_faster(taking: Taking) -> None:
    assert measure(PROBLEM, [taking("expected", 0.02), taking("same", 0.02)], CPU).name == "expected"


def test_one_run_that_takes_too_long_ends_the_measurement(
    monkeypatch: pytest.MonkeyPatch, taking: Taking, clock: Clock
) -> None:
    monkeypatch.setattr(autotune, "PROBLEM_SECONDS", 0.05)
    choice = measure(PROBLEM, [taking("expected", 0.1), taking("other", 30.0)], CPU)
    assert choice.name == "expected" and "too long" in choice.reason
    assert clock.now == 0.1, "the other one did not run"


def test_choices_are_remembered_between_processes(tmp_path: Path, taking: Taking) -> None:
    candidates = [taking("slow", 0.02), taking("fast", 0.001)]
    assert Tuner(tmp_path).choose(PROBLEM, candidates, CPU)[0].name == "fast"
    turned = [taking("slow", 0.0), taking("fast", 0.02)]  # measured anew it would be the other one
    candidate, choice = Tuner(tmp_path).choose(PROBLEM, turned, CPU)
    assert candidate.name == "fast" and choice.reason == "remembered"
    assert Tuner(tmp_path, library_key="new").choose(PROBLEM, turned, CPU)[0].name == "slow"
    longer = Tuner(tmp_path).choose(PROBLEM, [*turned, taking("fastest", 0.0)], CPU)[0].name
    assert longer != "fast", "another list is measured anew"


def test_each_schedule_is_checked(tmp_path: Path, clock: Clock) -> None:
    """A kernel that was right for one schedule ran another one of as many steps unchecked."""

    def restarts_wrongly(x: Tensor, settings: NsSettings) -> Tensor:
        return orthogonalize(x, settings=SETTINGS)

    tuner = Tuner(tmp_path)
    for schedule, rejected in ((SETTINGS.coefficients, False), (resolve_schedule("polar_express_5"), True)):
        problem = replace(PROBLEM, settings=NsSettings(schedule))
        assert len(schedule) == 5
        candidates = [Candidate("standard", plain), Candidate("other", restarts_wrongly)]
        assert ("other" in tuner.choose(problem, candidates, CPU)[1].rejected) is rejected


def test_a_candidate_without_memory_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taking: Taking
) -> None:
    """The fastest kernel was ruled out for good because the GPU was out of memory when it was timed."""
    seconds = [1e9]
    monkeypatch.setattr(machine.time, "time", lambda: seconds[0])
    slow, fast = taking("slow", 0.02), taking("fast", 0.001)

    def has_no_memory(x: Tensor, settings: NsSettings) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    assert Tuner(tmp_path).choose(PROBLEM, [slow, Candidate("fast", has_no_memory)], CPU)[0].name == "slow"
    # The processes of one start choose alike.
    choice = Tuner(tmp_path).choose(PROBLEM, [slow, fast], CPU)[1]
    assert (choice.name, choice.reason) == ("slow", "remembered")
    seconds[0] += 3600
    assert Tuner(tmp_path).choose(PROBLEM, [slow, fast], CPU)[0].name == "fast"
    seconds[0] += 1e8
    assert Tuner(tmp_path).choose(PROBLEM, [slow, fast], CPU)[1].reason == "remembered"


def test_a_process_keeps_a_choice_that_it_could_not_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taking: Taking
) -> None:
    """A busy machine measured in part, and the next optimizer of the process measured anew and rounded differently."""
    tuner = Tuner(tmp_path)
    others = [taking("second", 0.01), taking("slow", 0.05), taking("last", 0.0)]
    for allowed, first in ((0.05, 0.02), (2.0, 0.0)):
        monkeypatch.setattr(autotune, "PROBLEM_SECONDS", allowed)
        candidate, choice = tuner.choose(PROBLEM, [taking("first", first), *others], CPU)
        assert (candidate.name, choice.reason) == ("second", "measured in part")


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_products_in_tf32_are_no_broken_kernel(
    tmp_path: Path, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With torch's TF32 every candidate in fp32 was outside of the bound of fp32, and reported as wrong."""

    def in_tf32(x: Tensor, settings: NsSettings) -> Tensor:
        return orthogonalize(x.half(), settings=replace(settings, dtype=torch.float16)).float()

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        offered = [Candidate("torch gram", in_tf32), Candidate("torch standard", in_tf32)]
        rejected = Tuner(tmp_path).choose(PROBLEM, offered, CPU)[1].rejected
        assert bool(rejected) == bool(caplog.records) == (precision == "highest")
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_process_waits_for_the_one_that_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three times the budget of a problem it gave up, and ran other kernels than the process that measured."""
    monkeypatch.setattr(autotune, "PROBLEM_SECONDS", 0.01)
    monkeypatch.setattr(autotune, "PROCESS_SECONDS", 0.02)
    candidates = [Candidate("expected", plain), Candidate("other", plain)]
    waiting, measuring, finished = Tuner(tmp_path), threading.Event(), threading.Event()

    def measures() -> None:
        with locked(lock_file(tmp_path, "measuring"), 60.0):
            measuring.set()
            time.sleep(0.5)
            entry = {"name": "other", "reason": "measured", "milliseconds": {}, "rejected": {}}
            entry["candidates"] = ["expected", "other"]
            write_json(waiting._file, {"choices": {PROBLEM.key(): entry}})
            finished.wait()  # it goes on with the next problem

    thread = threading.Thread(target=measures)
    thread.start()
    measuring.wait()
    candidate, choice = waiting.choose(PROBLEM, candidates, CPU)
    finished.set()
    thread.join()
    assert (candidate.name, choice.reason) == ("other", "remembered")
    # What it waited for is not time that it measured.
    assert "measured" in waiting.choose(replace(PROBLEM, rows=10), candidates, CPU)[1].reason


def test_waiting_ends_and_is_for_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with one home waited for each other, and a process up to ten minutes for each shape."""
    seconds = [0.0]
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: seconds[0])
    monkeypatch.setattr(time, "sleep", lambda pause: seconds.__setitem__(0, seconds[0] + pause))
    candidates = [Candidate("expected", plain), Candidate("other", plain)]
    problems = [replace(PROBLEM, rows=rows) for rows in (10, 11, 12)]
    with locked(lock_file(tmp_path, "measuring"), 0.0):
        tuner = Tuner(tmp_path)
        reasons = [tuner.choose(problem, candidates, CPU)[1].reason for problem in problems]
        assert all("another process was measuring" in reason for reason in reasons)
        assert seconds[0] == pytest.approx(autotune.LOCK_SECONDS)
        monkeypatch.setattr(machine.platform, "node", lambda: "another-machine")
        assert Tuner(tmp_path).choose(PROBLEM, candidates, CPU)[1].reason == "measured"
        assert seconds[0] == pytest.approx(autotune.LOCK_SECONDS)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"identity": 1}', '{"identity": ["x"], "choices": {"a": 3}}']
)
def test_a_damaged_file_is_measured_over(tmp_path: Path, content: str, taking: Taking) -> None:
    tuner = Tuner(tmp_path)
    tuner._file.write_text(content)
    assert tuner.choose(PROBLEM, [taking("slow", 0.02), taking("fast", 0.001)], CPU)[0].name == "fast"
    assert PROBLEM.key() in json.loads(tuner._file.read_text())["choices"]


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path, taking: Taking) -> None:
    (tmp_path / "file").touch()
    tuner = Tuner(tmp_path / "file" / "folder")
    assert tuner.choose(PROBLEM, [taking("slow", 0.02), taking("fast", 0.001)], CPU)[0].name == "fast"


def test_measuring_stops_when_a_process_has_spent_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taking: Taking
) -> None:
    monkeypatch.setattr(autotune, "PROCESS_SECONDS", 0.0)
    tuner = Tuner(tmp_path)
    candidate, choice = tuner.choose(PROBLEM, [taking("expected", 9.0), taking("other", 9.0)], CPU)
    assert candidate.name == "expected" and "used up" in choice.reason


def test_measuring_leaves_the_random_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    dispatch.Orthogonalizer("auto", tuner=Tuner(tmp_path))(torch.ones(8, 12), settings=SETTINGS)
    assert torch.equal(torch.randn(4), expected)


def names(rows: int, cols: int, method: str, dtype: torch.dtype, batch: int = 1) -> list[str]:
    settings = NsSettings(resolve_schedule("quintic"), method, dtype)  # type: ignore[arg-type]
    problem = problem_of(torch.empty(batch, rows, cols), settings)
    return [candidate.name for candidate in candidates_for(problem, library.load())]


def test_standard_pins_the_order_of_the_products_and_gram_allows_both() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert all("standard" in name for name in names(64, 256, "standard", dtype))
        assert names(64, 256, "gram", dtype)[0].startswith("ops gram")
        assert names(64, 64, "gram", dtype)[0].startswith("ops standard")
        assert {"torch standard", "torch gram"} <= set(names(64, 256, "gram", dtype))


def test_tiles_and_vectors_are_for_bfloat16_only() -> None:
    assert not any("+tiles" in name or "+vectors" in name for name in names(64, 64, "gram", torch.float32))
    has = torch.ops.deepspeed_muon
    found = names(64, 64, "gram", torch.bfloat16)
    assert any("+tiles" in name for name in found) is bool(has.tiles_available())
    only_vectors = bool(has.vectors_available()) and not has.tiles_available()
    assert any("+vectors" in name for name in found) is only_vectors


@pytest.mark.parametrize(("shape", "in_fp32"), [((9, 16, 16), True), ((40, 16), True), ((3, 17, 24), False)])
def test_small_matrices_iterate_in_fp32(shape: tuple[int, ...], in_fp32: bool, tmp_path: Path) -> None:
    """By a rule that knows only the shape of a matrix, and so whatever the number of ranks."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    half = replace(SETTINGS, dtype=torch.bfloat16)
    auto = dispatch.Orthogonalizer("auto", tuner=Tuner(tmp_path))
    result = auto(x, settings=half)
    assert (auto.report()[0]["ran"] == "torch in fp32") is in_fp32
    exact = orthogonalize(x, settings=replace(SETTINGS, dtype=torch.float32))
    assert torch.equal(result, exact.bfloat16()) is in_fp32
    for backend in ("ops", "torch"):
        other = dispatch.Orthogonalizer(backend, tuner=Tuner(tmp_path))  # type: ignore[arg-type]
        other(x, settings=half)
        assert other.report()[0]["ran"].startswith(backend) and "fp32" not in other.report()[0]["ran"]


@pytest.mark.parametrize("backend", ["auto", "ops", "torch"])
@pytest.mark.parametrize("shape", [(24, 24), (24, 64), (64, 24), (3, 24, 64), (2, 2, 64, 24), (0, 4, 8)])
def test_every_backend_has_the_contract_of_the_torch_code(
    backend: dispatch.NsBackend, shape: tuple[int, ...], tmp_path: Path
) -> None:
    chosen = dispatch.Orthogonalizer(backend, tuner=Tuner(tmp_path))
    x = torch.randn(shape)
    for dtype in (torch.float32, torch.bfloat16):
        settings = NsSettings(resolve_schedule("quintic"), "gram", dtype)
        result = chosen(x, settings=settings)
        assert result.shape == x.shape and result.dtype == dtype
        if x.numel():
            flat = [newton_schulz(each, settings.coefficients) for each in x.reshape(-1, *shape[-2:])]
            expected = torch.stack(flat).reshape(shape)
            error = float((result.double() - expected).norm() / expected.norm())
            limit = max(iteration_limit(each, dtype) for each in x.reshape(-1, *shape[-2:]))
            within(error, limit, "orthogonalised")
    for entry in chosen.report():
        assert entry["calls"] == 1
        if backend != "auto":
            assert entry["ran"].startswith(backend)


def test_the_report_says_what_ran_and_why(tmp_path: Path, clock: Clock) -> None:
    chosen = dispatch.Orthogonalizer("auto", tuner=Tuner(tmp_path))
    for _ in range(3):
        chosen(torch.randn(24, 64), settings=SETTINGS)
    (entry,) = json.loads(json.dumps(chosen.report()))
    assert entry["calls"] == 3 and entry["reason"] == "measured" and "1x24x64" in entry["problem"]
    assert entry["ran"] in entry["milliseconds"]


def test_the_flat_passes_of_each_backend() -> None:
    """That they agree is shown in tests/unit/test_ops_kernels.py."""
    native, plain = library.load(), torch_operators
    for backend, name, holder in (("ops", "ops", native), ("auto", "ops", native), ("torch", "torch", plain)):
        passes = dispatch.flat_passes(backend)  # type: ignore[arg-type]
        assert passes.name == name
        for own in ("momentum_pack", "momentum_pack_int8", "unpack_apply"):
            expected = getattr(holder, f"{own}_")
            assert getattr(passes, own) == getattr(expected, "default", expected)


def test_bad_calls_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    library.load()
    assert not has_kernel(torch.ops.deepspeed_muon, "meta")
    with pytest.raises(InstallationError, match="no flat passes for meta"):
        dispatch.flat_passes("ops", "meta")
    assert dispatch.flat_passes("auto", "meta").name == "torch" and not caplog.records


def test_nothing_right_is_an_error(tmp_path: Path, taking: Taking) -> None:
    """With ``ns_backend: ops`` the first candidate ran although all had failed."""
    offered = [Candidate("ops gram", fails), taking("ops standard", 0.0, 2.0)]
    said = "ops gram: failed: no such kernel; ops standard: relative error"
    with pytest.raises(InstallationError, match=said):
        Tuner(tmp_path).choose(PROBLEM, offered, CPU)


# The choice between kernels ended training where a candidate raised something else than a RuntimeError, and differed
# between the first process, whose time went into compiling, and the second.


def test_any_exception_of_a_candidate_rules_it_out() -> None:
    class TritonError(Exception):
        pass

    def lacking(x: Tensor, settings: NsSettings) -> Tensor:
        raise TritonError

    choice = measure(PROBLEM, [Candidate("fine", plain), Candidate("odd", lacking)], CPU)
    assert choice.name == "fine" and choice.rejected == {"odd": "failed: TritonError"}


def test_compiling_does_not_count(clock: Clock) -> None:
    compiled = []

    def taking(name: str, seconds: float, compile_seconds: float) -> Candidate:
        def run(x: Tensor, settings: NsSettings) -> Tensor:
            clock.now += seconds if name in compiled else compile_seconds
            compiled.append(name)
            return orthogonalize(x, settings=settings)

        return Candidate(name, run, warm_calls=1)

    offered = [taking("slow", 0.02, 30.0), taking("other", 0.02, 30.0), taking("fast", 0.001, 30.0)]
    for _ in range(2):  # the second time everything is compiled
        choice = measure(PROBLEM, offered, CPU)
        assert (choice.name, choice.reason) == ("fast", "measured")
