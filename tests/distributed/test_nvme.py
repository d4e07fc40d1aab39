"""Offload to NVMe at stage 3: the result, a killed run that resumes, and what is refused."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import utils
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor import optimizer_utils

import deepspeed_muon
from tests.support import training
from tests.support.async_io import stand_in
from tests.support.contract import STEPS, compare
from tests.support.harness import RanksFailed, base_environment, run_ranks
from tests.support.models import batch
from tests.support.native_ops import warm

# Elements of a rank: on two ranks the model's matrices make five sub-groups.
SUB_GROUP = 300


@contextlib.contextmanager
def small_swaps(*, native: bool = False) -> Iterator[None]:
    """Let DeepSpeed swap sub-groups of 512 bytes and more, not of a megabyte; with its operator only if asked for."""
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(optimizer_utils, "MIN_AIO_BYTES", 512))
        if native:
            ctypes.CDLL("libaio.so.1", mode=ctypes.RTLD_GLOBAL)  # DeepSpeed's build for a CPU lacks -laio
        else:
            patched.enter_context(mock.patch.object(AsyncIOBuilder, "load", return_value=stand_in()))
        yield


def settings(folder: str, *, device: str = "nvme", pipelined: bool = False, **more: Any) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": device, "buffer_count": 9, "pin_memory": False}
    if device == "nvme":
        offload |= {"nvme_path": folder, "pipeline_read": pipelined, "pipeline_write": pipelined}
    extra = {"aio": {"block_size": 512}, **more.pop("extra", {})}
    zero = {"offload_optimizer": offload, "sub_group_size": SUB_GROUP}
    return training.ds_config(3, zero=zero, extra=extra, **{"clipping": 0.5, **more})


def read(engine: Any) -> dict[str, Any]:
    """Assemble masters and momentum, read from the disk where they are there."""
    wrapper, optimizer = engine.optimizer, deepspeed_muon.muon_optimizer(engine)
    copies: dict[torch.Tensor, dict[str, Any]] = {}
    swapped = []
    for index, master in enumerate(wrapper.fp32_partitioned_groups_flat):
        if is_swapped := wrapper._swappable_optimizer_subgroup(index):
            assert master.numel() == 0
            wrapper._optimizer_states_and_gradient_swap_in(index)
        swapped_state = {
            key: value for key, value in optimizer.state[master].items() if torch.is_tensor(value)
        }
        copies[master] = {"fp32": master.detach().clone(), **{k: v.clone() for k, v in swapped_state.items()}}
        copies[master]["step"] = optimizer.state[master].get("step")
        if is_swapped:
            wrapper._release_swap_buffers(index)
            swapped.append([key for key, value in swapped_state.items() if not value.numel()])
    report = {
        "params": training.assemble(engine, lambda _, tensor: copies[tensor]["fp32"]),
        "steps": [value["step"] for value in copies.values()],
        "state": [
            [value[key] for key in sorted(value) if torch.is_tensor(value[key])] for value in copies.values()
        ],
        "swapped": swapped,
    }
    if optimizer.state_policy.momentum_dtype != "int8":
        report["momentum"] = training.assemble(engine, lambda _, t: copies[t].get("momentum_buffer"))
    return report


def train(
    rank: int,
    world_size: int,
    *,
    folder: str,
    steps: int = STEPS,
    accumulation: int = 1,
    native: bool = False,
    **more: Any,
) -> dict[str, Any]:
    with small_swaps(native=native):
        engine = training.make_engine(settings(folder, accumulation=accumulation, **more))
        norms = training.train_steps(engine, steps, rank, world_size, accumulation)
        return {**read(engine), "norms": norms}


def equal(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for left, right in zip(actual, expected, strict=True):
        assert left["norms"] == right["norms"] and left["steps"] == right["steps"]
        torch.testing.assert_close(left["params"], right["params"], rtol=0, atol=0)
        torch.testing.assert_close(left["state"], right["state"], rtol=0, atol=0)


def test_sub_groups_are_swapped(ranks: Any, tmp_path: Path) -> None:
    """Masters, momentum and moments lie on the disk between steps; the result is the reference's."""
    results = ranks(2).run(train, folder=str(tmp_path))
    swapped = results[0]["swapped"]
    assert ["momentum_buffer"] in swapped and ["exp_avg", "exp_avg_sq"] in swapped, swapped
    compare(results, "toy", 2, 0.5)


# Beside the reference: what the same settings give with offload to the CPU, to the last bit.
CASES: dict[str, dict[str, Any]] = {
    "pipelined": {"pipelined": True},
    "accumulation": {"accumulation": 3, "pipelined": True},
    "normuon": {"params": {"variant": "normuon"}},
    "bf16 momentum": {"params": {"momentum_dtype": "bf16"}},
    "int8 momentum": {"params": {"momentum_dtype": "int8"}},
    "bf16": {"precision": "bf16", "pipelined": True},
    "fp16": {"precision": "fp16"},
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.full
def test_as_on_the_cpu(ranks: Any, tmp_path: Path, name: str, world_size: int) -> None:
    case = CASES[name]
    results = ranks(world_size).run(train, folder=str(tmp_path), **case)
    in_memory = {key: value for key, value in case.items() if key != "pipelined"}
    equal(results, ranks(world_size).run(train, folder=str(tmp_path), device="cpu", **in_memory))
    if name in ("pipelined", "accumulation"):
        compare(results, "toy", world_size * case.get("accumulation", 1), 0.5)
    if name == "normuon":
        compare(results, "toy", world_size, 0.5, variant="normuon")
    swapped = [key for keys in results[0]["swapped"] for key in keys]
    # The swapper keeps tensors with dtype and length of the masters only.
    assert ("momentum_buffer" in swapped) == ("momentum" not in name)


@pytest.mark.full
@pytest.mark.time_limit(1200)
@pytest.mark.parametrize("pipelined", [False, True])
def test_with_deepspeeds_operator(ranks: Any, tmp_path: Path, pipelined: bool) -> None:
    """All other tests here have a stand-in for it, since it needs libaio and minutes to build."""
    if not AsyncIOBuilder().is_compatible():
        pytest.skip("DeepSpeed's operator async_io needs libaio (Debian's libaio-dev)")
    build = "import ctypes, deepspeed.ops.op_builder as b; ctypes.CDLL('libaio.so.1', 256); b.AsyncIOBuilder().load()"
    subprocess.run([sys.executable, "-c", build], env=base_environment(warm()), check=True, timeout=1000)
    results = ranks(2).run(
        train, folder=str(tmp_path), native=True, pipelined=pipelined, params={"variant": "normuon"}
    )
    compare(results, "toy", 2, 0.5, variant="normuon")
    equal(results, ranks(2).run(train, folder=str(tmp_path), device="cpu", params={"variant": "normuon"}))


def interrupted(rank: int, world_size: int, *, folder: str, **more: Any) -> None:
    """Save after two steps, train one more, and be killed in the middle of the next save."""
    with small_swaps():
        engine = training.make_engine(settings(f"{folder}/disk1", **more))
        for step in range(3):
            training.run_step(engine, step, rank, world_size, 1)
            if step == 1:
                engine.save_checkpoint(f"{folder}/saved", tag="whole")
        copied = shutil.copy2

        def copy_some(*args: Any, **kwargs: Any) -> Any:
            if rank == world_size - 1 and len(os.listdir(Path(args[1]).parent)) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return copied(*args, **kwargs)

        # DeepSpeed copies the files of the swapper with it.
        with mock.patch.object(shutil.copytree, "__defaults__", (False, None, copy_some, False, False)):
            engine.save_checkpoint(f"{folder}/saved", tag="last")


def resume(rank: int, world_size: int, *, folder: str, **more: Any) -> dict[str, Any]:
    """Try the killed save, continue from the whole one, save at the killed one's tag; load that into a new engine."""
    norms = []
    with small_swaps():
        engine = training.make_engine(settings(f"{folder}/disk2", **more), seed=1)
        load = engine.load_checkpoint
        refused = training.refusal(lambda: load(f"{folder}/saved", tag="last"))
        engine.load_checkpoint(f"{folder}/saved")
        for step in (2, 3):
            training.run_step(engine, step, rank, world_size, 1)
            norms.append(float(engine.get_global_grad_norm()))
        engine.save_checkpoint(f"{folder}/saved", tag="last")
        engine.destroy()
        engine = training.make_engine(settings(f"{folder}/disk2", **more))
        again = training.refusal(lambda: engine.load_checkpoint(f"{folder}/saved"))
    return {"norms": norms, "refused": refused, "again": again}


def finish(rank: int, world_size: int, *, folder: str, **more: Any) -> dict[str, Any]:
    """Load the last save and take the last step."""
    with small_swaps():
        engine = training.make_engine(settings(f"{folder}/disk3", **more), seed=2)
        engine.load_checkpoint(f"{folder}/saved")
        training.run_step(engine, 4, rank, world_size, 1)
        return {**read(engine), "norms": [float(engine.get_global_grad_norm())]}


@pytest.mark.time_limit(400)
@pytest.mark.parametrize(
    "more",
    [
        {"params": {"variant": "normuon"}},
        pytest.param({"params": {"momentum_dtype": "int8"}, "pipelined": True}, marks=pytest.mark.full),
        pytest.param({"precision": "bf16", "pipelined": True}, marks=pytest.mark.full),
    ],
)
def test_a_killed_run_resumes(ranks: Any, tmp_path: Path, more: dict[str, Any]) -> None:
    """Bit-identical, row state and counts of steps included; the save that was killed is refused, then replaced."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(interrupted, 2, {"folder": str(tmp_path), **more})
    assert caught.value.failures[1].type == "Died"
    middle = run_ranks(resume, 2, {"folder": str(tmp_path), **more})
    for report in middle:
        assert "killed" in report["refused"], report
        assert "load in a new one" in report["again"], report
    last = run_ranks(finish, 2, {"folder": str(tmp_path), **more})
    for report, earlier in zip(last, middle, strict=True):
        report["norms"] = earlier["norms"] + report["norms"]
    uninterrupted = ranks(2).run(train, folder=str(tmp_path / "disk4"), steps=5, **more)
    for report in uninterrupted:
        report["norms"] = report["norms"][2:]
    equal(last, uninterrupted)


def errors(rank: int, world_size: int, *, folder: str) -> dict[str, str]:
    """Call what is refused of an engine that offloads to NVMe, and load its save into other engines."""
    disk, saved = f"{folder}/disk", f"{folder}/saved"

    def load_with(folder: str = saved, save_first: str = "", **changes: Any) -> str:
        engine = training.make_engine(settings(disk, **changes))
        message = training.refusal(lambda: engine.load_checkpoint(folder))
        if save_first:
            engine.save_checkpoint(save_first, tag="b")
        engine.destroy()
        return message

    with small_swaps():
        engine = training.make_engine(settings(disk))
        training.run_step(engine, 0, rank, world_size, 1)
        calls = {
            "consolidate": lambda: deepspeed_muon.consolidate(engine, f"{folder}/set"),
            "restore": lambda: deepspeed_muon.restore(engine, f"{folder}/set"),
            "weights alone": lambda: engine.load_checkpoint(saved, load_optimizer_states=False),
        }
        engine.save_checkpoint(saved, tag="a")
        messages = {name: training.refusal(call) for name, call in calls.items()}
        engine.destroy()
        messages["cpu"] = load_with(device="cpu", save_first=f"{folder}/cpu")
        messages["dtype"] = load_with(params={"momentum_dtype": "bf16"})
        messages["saved on the cpu"] = load_with(f"{folder}/cpu")
        config = settings(disk, params={"consolidate_on_save": True})
        messages["set"] = training.refusal(lambda: training.make_engine(config))
    return messages


@pytest.mark.full
def test_refused_of_a_running_engine(ranks: Any, tmp_path: Path) -> None:
    said = {
        "consolidate": "offload to device cpu",
        "restore": "offload to device cpu",
        "weights alone": "load weights alone into the model",
        "cpu": "offload_optimizer.device nvme",
        "dtype": "momentum_dtype",
        "saved on the cpu": "device cpu",
        "set": "consolidate_on_save",
    }
    for messages in ranks(2).run(errors, folder=str(tmp_path)):
        for name, words in said.items():
            assert words in messages[name], (name, messages)


def access(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Read and set gradient, master and momentum by DeepSpeed's functions."""
    name = "blocks.1.up.weight"
    with small_swaps():
        engine = training.make_engine(settings(folder))
        training.run_step(engine, 0, rank, world_size, 1)
        param = engine.module.get_parameter(name)
        loss = engine(*batch(1, rank))
        engine.backward(loss)
        ones = torch.ones(param.ds_shape)
        utils.safe_set_full_grad(param, ones)
        utils.safe_set_full_optimizer_state(param, 2 * ones, "momentum_buffer")
        utils.safe_set_full_fp32_param(param, 3 * ones)
        got = [
            utils.safe_get_full_grad(param),
            utils.safe_get_full_optimizer_state(param, "momentum_buffer"),
            utils.safe_get_full_fp32_param(param),
        ]
        engine.step()
        master = utils.safe_get_full_fp32_param(param)
    return {"got": got, "moved": bool((master != 3).any())}


@pytest.mark.full
def test_access_from_outside(ranks: Any, tmp_path: Path) -> None:
    for report in ranks(2).run(access, folder=str(tmp_path)):
        for value, tensor in enumerate(report["got"], start=1):
            assert bool((tensor == value).all()), (value, tensor)
        assert report["moved"]
