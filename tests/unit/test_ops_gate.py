"""Native CUDA code runs only after a self-test: what hangs, crashes or is wrong ends in a warning and torch's code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.ops import candidates, checks, dispatch, gate
from deepspeed_muon.ops.candidates import Problem
from tests.support.native_ops import REPOSITORY
from tests.support.thinning import full

IDENTITY = ["a GPU", "13000", torch.__version__, "a key"]


def command(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


GOOD = command("print('{}')")

PLANTED = {
    "hangs": (
        command("import time; print('sym_gemm', flush=True); time.sleep(600)"),
        "did not end within 1 s: sym_gemm",
    ),
    "crashes": (
        command("import os; print('sym_gemm', flush=True); os.abort()"),
        "ended by SIGABRT: sym_gemm",
    ),
    "is wrong": (
        command("""print('{"native": "sym_gemm: error 0.5, bound 0.001"}')"""),
        "native: sym_gemm: error 0.5",
    ),
    "ends badly": (command("raise SystemExit('no such device')"), "with 1: no such device"),
}


@pytest.mark.parametrize("how", list(PLANTED))
def test_a_bad_kernel_is_kept_out(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, why = PLANTED[how]
    verdict = gate.decide(IDENTITY, bad, folder=tmp_path, seconds=1.0 if how == "hangs" else 60.0)
    assert "native" in verdict.failed and why in verdict.why
    assert verdict.transient == (how != "is wrong")
    (warning,) = caplog.records
    assert why in warning.getMessage() and "runs it again" in warning.getMessage()
    # The next process believes it and warns too, without running anything.
    again = gate.decide(IDENTITY, command("raise SystemExit('not run')"), folder=tmp_path)
    assert again == verdict and len(caplog.records) == 2
    # Another driver is another machine.
    other = gate.decide([*IDENTITY[:1], "13010", *IDENTITY[2:]], GOOD, folder=tmp_path)
    assert not other.failed and len(caplog.records) == 2


def test_what_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    code = f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(tmp_path / "partial")!r}, "w").write(str(child.pid))
        os.replace({str(tmp_path / "partial")!r}, {str(tmp_path / "child")!r})
        time.sleep(600)
    """
    for seconds in (3.0, 100.0):  # it may end before the child has begun, on a busy machine
        assert gate.decide([*IDENTITY, str(seconds)], command(code), folder=tmp_path, seconds=seconds).failed
        if (tmp_path / "child").exists():
            break
    child = Path("/proc", (tmp_path / "child").read_text())
    while child.exists() and (child / "stat").read_text().split()[2] != "Z":
        time.sleep(0.1)


def test_what_cannot_be_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process inside of a driver may outlive its SIGKILL; so may one that the test has started, with its output."""
    monkeypatch.setattr(gate, "_LAST_SECONDS", 0.2)
    hangs = command(f"""
        import os, time
        print("testing native", flush=True)
        open({str(tmp_path / "hanging")!r}, "w").write(str(os.getpid()))
        time.sleep(600)
    """)
    leaves = command(f"""
        import subprocess
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open({str(tmp_path / "left")!r}, "w").write(str(left.pid))
        print("{{}}")
    """)
    with monkeypatch.context() as patched:
        patched.setattr(gate.os, "killpg", lambda *_: None)
        assert "within 3 s" in gate.decide(IDENTITY, hangs, folder=tmp_path, seconds=3.0).why
        assert not gate.decide([*IDENTITY, "leaves"], leaves, folder=tmp_path, seconds=60.0).failed
    for name in ("hanging", "left"):  # both still run
        while not (written := tmp_path / name).exists() or not written.read_text():
            time.sleep(0.1)
        os.kill(int(written.read_text()), signal.SIGKILL)


def test_a_self_test_that_nobody_waits_for_ends_by_itself() -> None:
    """The training that had started it was killed: else it would keep the GPU. The last line names the part."""
    code = """
        import runpy, sys, time, torch
        from deepspeed_muon.ops import checks

        def hangs():
            time.sleep(600)

        checks.triton_products = lambda: 1
        checks._test_triton = hangs
        checks.library.try_load = lambda: None
        torch.cuda.set_device = lambda device: None
        sys.argv = ["gate", "0"]
        runpy.run_module("deepspeed_muon.ops.gate", run_name="__main__")
    """
    environment = {**os.environ, "DS_MUON_SELF_TEST_SECONDS": "1"}
    done = subprocess.run(
        command(code), env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGALRM and done.stdout.split("\n")[-2] == "testing triton"


@pytest.mark.parametrize("processors", [40, 84, 108, 132, 142, 160])
def test_products_of_the_self_test_come_back_to_their_barriers(processors: int) -> None:
    small, (batch, m, k) = checks.product_shapes(processors)
    rows = -(-m // 128)  # of tiles
    tiles = batch * rows * (rows + 1) // 2
    assert tiles >= 3 * 2 * processors
    assert batch >= 8 and k > 2 * 5 * 64 and k % 64
    assert tiles >= triton_tiles_from() and checks.product_shapes(0) == [small]


def triton_tiles_from() -> int:
    text = (Path(gate.__file__).parent / "triton_sym.py").read_text()
    (found,) = re.findall(r"^_TILES_FROM = (\d+)$", text, flags=re.MULTILINE)
    return int(found)


def decide_at_once(rank: int, world_size: int, *, folder: str) -> dict[str, str]:
    count = f"import time; time.sleep(1); open({folder + '/count'!r}, 'a').write('x'); print('{{}}')"
    dist.barrier()
    return gate.decide(["same"], [sys.executable, "-c", count], folder=Path(folder)).failed


def test_processes_that_start_at_once_test_once(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(decide_at_once, folder=str(tmp_path)) == [{}, {}]
    assert (tmp_path / "count").read_text() == "x"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not gate.decide(IDENTITY, GOOD, folder=tmp_path / "file").failed


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give a GPU operators of which these parts failed the self-test, by reason, or that lack code for the GPU."""

    def give(failed: dict[str, str] | None = None, *, missing: str = "") -> None:
        operators = SimpleNamespace(sym_gemm_kernel=lambda _: "sm90", flat_passes_missing=lambda _: missing)
        for name in ("momentum_pack_", "momentum_pack_int8_", "unpack_apply_"):
            setattr(operators, name, SimpleNamespace(default=None))
        for module in (candidates, dispatch):
            monkeypatch.setattr(module, "has_kernel", lambda given, *_: given is not None)
        monkeypatch.setattr(dispatch, "_operators", lambda _: operators)
        monkeypatch.setattr(dispatch, "trusted", lambda _: gate.Verdict(failed or {}))

    return give


def offered() -> list[str]:
    """Return the names of the candidates that a GPU would choose from."""
    names: list[str] = []

    def choose(_: Problem, candidates: list[Any], __: torch.device) -> tuple[Any, None]:
        names.extend(candidate.name for candidate in candidates)
        return candidates[0], None

    chosen = dispatch.Orthogonalizer("auto", SimpleNamespace(choose=choose))  # type: ignore[arg-type]
    chosen._choose(PROBLEM, torch.device("cuda"))
    return names


GRAM = NsSettings(resolve_schedule("quintic"), "gram", torch.float16)
PROBLEM = Problem("cuda", torch.float32, 1, 512, 2048, 0, GRAM)


def test_without_trust_only_torch_runs(trust: Callable[..., None]) -> None:
    trust()
    names = offered()
    assert any(name.startswith("ops ") for name in names) and any(name.endswith("+graph") for name in names)
    assert dispatch.flat_passes("auto", "cuda").name == "ops"
    trust(dict.fromkeys(gate.COMPONENTS, "it hangs"))
    assert offered() == ["torch gram", "torch standard"]
    assert dispatch.flat_passes("auto", "cuda").name == "torch"
    with pytest.raises(InstallationError, match="it hangs"):
        dispatch.Orthogonalizer("ops")._choose(PROBLEM, torch.device("cuda"))
    with pytest.raises(InstallationError, match="it hangs"):
        dispatch.flat_passes("ops", "cuda")
    # Graphs and momentum in 8 bits have verdicts of their own.
    trust({"graphs": "error inf, bound 0"})
    assert offered() == [name for name in names if not name.endswith("+graph")]
    assert dispatch.flat_passes("ops", "cuda", int8=True).name == "ops"
    trust({"int8": "error 1, bound 0"})
    assert dispatch.flat_passes("ops", "cuda").name == "ops"
    assert dispatch.flat_passes("auto", "cuda", int8=True).name == "torch"
    with pytest.raises(InstallationError, match="error 1, bound 0"):
        dispatch.flat_passes("ops", "cuda", int8=True)


def test_a_library_for_other_gpus_has_no_flat_passes(trust: Callable[..., None]) -> None:
    trust(missing="no code for this device")
    assert dispatch.flat_passes("auto", "cuda").name == "torch"
    with pytest.raises(InstallationError, match="no code for this device"):
        dispatch.flat_passes("ops", "cuda")


# A Triton that cannot import switched all native kernels off, and a GPU without memory did so for good.


def test_each_part_has_a_verdict(tmp_path: Path) -> None:
    told = command("""print('noise\\n{"triton": "ImportError: no driver", "transient": true}')""")
    assert gate.decide(IDENTITY, told, folder=tmp_path).failed == {"triton": "ImportError: no driver"}


def test_what_crashes_or_hangs_is_a_failure_of_its_part_alone(tmp_path: Path) -> None:
    told = command("""
        import os, sys, time
        for part, ending in (("triton", os.abort), ("graphs", lambda: None), ("native", lambda: time.sleep(600))):
            if part not in sys.argv:
                print("testing", part, flush=True)
                ending()
        print('{"int8": "error 0.5"}')
    """)
    verdict = gate.decide(IDENTITY, told, folder=tmp_path, seconds=5.0)
    assert verdict.failed == {
        "triton": "it was ended by SIGABRT: testing triton",
        "native": "it did not end within 5 s: testing graphs; testing native",
        "int8": "error 0.5",
    }
    assert verdict.transient


def test_what_raises_is_a_failure_of_its_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[dict[str, object]]:
        raise ImportError("no driver")

    right = {"op": "replay", "device": "cuda", "error": 0.0, "bound": 0.0, "ok": True}
    monkeypatch.setattr(checks.library, "try_load", lambda: None)
    monkeypatch.setattr(checks, "triton_products", lambda: 1)
    monkeypatch.setattr(checks, "_test_triton", broken)
    monkeypatch.setattr(checks, "_test_graphs", lambda *_: [dict(right)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    failures = gate._failures(0)
    assert failures.pop("checks") and failures == {"triton": "ImportError: no driver", "transient": True}


def ends_with(component: str, ending: str) -> list[str]:
    """Return a self-test whose native operators end in some way, without a GPU."""
    return command(f"""
        import os, sys, torch
        from deepspeed_muon.ops import checks, gate

        broken = False
        def synchronize():
            if broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def test_{component}(*_):
            global broken
            {ending}

        def right(*arguments):
            if arguments and arguments[0] is not None and "native" not in arguments[1]:
                test_native()  # graphs replay the native operators too
            return [checks._check("product", "cuda", 0.0, 0.0)]

        torch.cuda.synchronize, torch.cuda.set_device = synchronize, lambda device: None
        checks.library.try_load = lambda: 1
        checks.triton_products = lambda: 1
        checks._test_triton, checks._test_graphs = lambda: right(), right
        checks._test_operators = lambda *given: right() if given[2] == ["momentum_pack_int8_"] else test_native()
        print("\\n" + gate.json.dumps(gate._failures(0, sys.argv[1:])))
    """)


@pytest.mark.parametrize(
    "ending", ["broken = True; raise RuntimeError('illegal address')", full("os.abort()")]
)
def test_a_broken_context_costs_its_part_alone(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An illegal address made every later call fail, and so kept all parts out; a crash of a kernel cost the graphs."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    verdict, tested = gate._self_test(ends_with("native", ending), 120.0)
    assert verdict.failed.keys() == {"native"} and verdict.transient, verdict.why
    # The report of the self-test lists the others, too.
    monkeypatch.setattr(gate, "_self_test", lambda *_: (verdict, tested))
    listed = {check["component"]: check["ok"] for check in gate.checks_of(0)}
    assert listed == {"native": False, "int8": True, "triton": True, "graphs": True}


def test_only_wrong_numbers_are_remembered_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr(gate.time, "time", lambda: now[0])
    crashed = gate.decide(IDENTITY, command("raise MemoryError"), folder=tmp_path)
    assert crashed.failed.keys() == set(gate.COMPONENTS)
    assert gate.decide(IDENTITY, GOOD, folder=tmp_path) == crashed, "the processes of one start test once"
    now[0] += 3600
    assert not gate.decide(IDENTITY, GOOD, folder=tmp_path).failed
    other = [*IDENTITY, "wrong"]
    wrong = gate.decide(other, command("""print('{"native": "error 0.5"}')"""), folder=tmp_path)
    now[0] += 1e8
    assert gate.decide(other, GOOD, folder=tmp_path) == wrong
