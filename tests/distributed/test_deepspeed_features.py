"""DeepSpeed's other features: each gives the reference's update, or ``deepspeed.initialize`` refuses it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfigError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import deepspeed_muon
from deepspeed_muon import Muon
from deepspeed_muon.engine import supported
from tests.support import snapshots, training
from tests.support.contract import STEPS, compare, compare_matrices
from tests.support.models import batch, build
from tests.support.rounding import BF16_MODEL
from tests.support.thinning import full


@pytest.mark.parametrize(
    ("stage", "zero_init"), [(0, False), (1, False), (2, False), (3, True)], ids=["0", "1", "2", "3"]
)
def test_frozen_base_with_adapters(ranks: Any, stage: int, zero_init: bool) -> None:
    """Muon updates B of the adapters, AdamW A; what is frozen is no parameter of the optimizer."""
    results = ranks(2).run(training.train, stage=stage, kind="adapters", clipping=0.5, zero_init=zero_init)
    compare(results, "adapters", 2, 0.5)


def with_feature(
    rank: int,
    world_size: int,
    *,
    feature: str,
    stage: int,
    accumulation: int = 1,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Train the toy model with one of DeepSpeed's or torch's features around it."""
    # Inside of no_sync the engine does not count micro-batches: the caller does.
    counted = 1 if feature == "no_sync" else accumulation
    config = training.ds_config(stage, accumulation=counted, clipping=0.5, precision=precision)
    model: Any = build("toy")
    if feature == "torch.compile":
        model = torch.compile(model)
    if feature == "model.to(bf16)":
        model = model.to(torch.bfloat16)
    if feature == "activation-checkpointing":
        config["activation_checkpointing"] = {"partition_activations": False, "number_checkpoints": 3}
        for block in model.blocks:
            block.forward = recomputed(block.forward)
    engine = training.initialize(model, config)
    if feature == "engine.compile":
        engine.compile()
    norms = []
    for step in range(STEPS):
        if feature == "no_sync":
            step_with_no_sync(engine, step, rank, world_size, accumulation)
        elif feature == "set_gradient_accumulation_boundary":
            for micro in range(accumulation):
                engine.set_gradient_accumulation_boundary(is_boundary=micro == accumulation - 1)
                engine.backward(engine(*batch(step, micro * world_size + rank)))
                engine.step()
        else:
            training.run_step(engine, step, rank, world_size, accumulation)
        norms.append(float(engine.get_global_grad_norm()))
    return {
        "params": without_prefix(training.full_masters(engine)),
        "momentum": without_prefix(training.full_states(engine, "momentum_buffer")),
        "norms": norms,
    }


def recomputed(forward: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def without_prefix(named: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("_orig_mod."): value for name, value in named.items()}


def step_with_no_sync(engine: Any, step: int, rank: int, world_size: int, accumulation: int) -> None:
    """Accumulate without reduction, and reduce with the last micro-batch; the caller scales the loss."""
    for micro in range(accumulation):
        last = micro == accumulation - 1
        with contextlib.nullcontext() if last else engine.no_sync():
            loss = engine(*batch(step, micro * world_size + rank)) / accumulation
            engine.backward(loss)
    engine.step()


@pytest.mark.parametrize(
    ("feature", "stage", "accumulation"),
    [
        *(full("torch.compile", stage, 1) for stage in (1, 2)),
        *(full("engine.compile", stage, 1) for stage in (0, 1, 3)),
        full("activation-checkpointing", 1, 1),
        ("activation-checkpointing", 3, 2),
        full("no_sync", 0, 2),
        ("no_sync", 1, 2),
        ("set_gradient_accumulation_boundary", 2, 2),
    ],
)
def test_feature_matches_the_reference(ranks: Any, feature: str, stage: int, accumulation: int) -> None:
    arguments = {"feature": feature, "stage": stage, "accumulation": accumulation}
    results = ranks(2).run(with_feature, timeout=280, **arguments)  # inductor takes long
    compare(results, "toy", 2 * accumulation, 0.5)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (3, "fp32"),
        *(full(stage, "fp32") for stage in (1, 2)),
        (0, "bf16"),
        *(full(stage, "bf16") for stage in (1, 2, 3)),
    ],
)
def test_a_model_that_is_cast_to_bf16(ranks: Any, stage: int, precision: str) -> None:
    """With the section bf16 or, where ZeRO keeps fp32 masters, without it; the masters begin as rounded weights."""
    results = ranks(2).run(with_feature, feature="model.to(bf16)", stage=stage, precision=precision)
    compare_matrices(results, "toy", 2, 0.5, BF16_MODEL)


def ulysses(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Two ranks share each sequence; the toy model looks at each position alone, so half a sequence needs no other."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    model = build("toy")
    engine = training.initialize(model, training.ds_config(stage, clipping=0.5), mpu=parallel_state_sp)
    # Each rank has half of a sequence's mean loss. DeepSpeed adds up the gradients of the ranks that share one, but
    # takes their mean where stage 3 reduces by reduce-scatter.
    share = 1 if stage == 3 else 2
    norms = []
    for step in range(STEPS):
        tokens, targets = (half.chunk(2, dim=1)[rank % 2] for half in batch(step, rank // 2))
        engine.backward(engine(tokens, targets) / share)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    group = deepspeed_muon.muon_optimizer(engine).runners[0].step_set.world_size
    report = {**training.outcome(engine), "norms": norms, "group": group}
    engine.destroy()
    parallel_state_sp._release_sequence_parallel_groups()
    return report


@pytest.mark.parametrize("stage", [full(0), 1, full(2), 3])
def test_ulysses_sequence_parallel(ranks: Any, stage: int) -> None:
    """ZeRO partitions over data and sequence ranks together, and so does the exchange."""
    results = ranks(4).run(ulysses, stage=stage)
    assert [result["group"] for result in results] == [4] * 4
    compare(results, "toy", 2, 0.5)


def start_on_a_mesh(rank: int, world_size: int) -> str:
    start = lambda: training.initialize(build("toy"), training.ds_config(1), mesh_param=(1, 2))  # noqa: E731
    return training.refusal(start, deepspeed_muon.ConfigError)


def test_sequence_parallel_by_mesh_is_refused(ranks: Any) -> None:
    """There DeepSpeed adds up gradients over the data-parallel ranks only, and the weights drift apart."""
    for message in ranks(2).run(start_on_a_mesh):
        assert "mesh_param" in message and "parallel_state_sp" in message


WITHOUT_STATE = {"load_optimizer_states": False}
MODULE_ONLY = {"load_module_only": True}


def loaded_weights(
    rank: int,
    world_size: int,
    *,
    stage: int,
    folder: str,
    save: bool,
    from_fp32: bool,
    options: dict[str, bool],
) -> dict[str, Any]:
    """Save after two steps, or load that into an engine with other weights; then train one step."""
    config = training.ds_config(stage, precision="bf16", zero={"load_from_fp32_weights": from_fp32})
    engine = training.make_engine(config, seed=0 if save else 7)
    if save:
        training.train_steps(engine, 2, rank, world_size)
        engine.save_checkpoint(folder, tag="two")
    else:
        path, _ = engine.load_checkpoint(folder, tag="two", **options)
        assert path is not None
    masters = training.full_masters(engine)
    training.run_step(engine, 2, rank, world_size, 1)
    if save:
        engine.save_checkpoint(folder, tag="three")  # latest
    states = deepspeed_muon.muon_optimizer(engine).state.values()
    return {
        "loaded": masters,
        "params": training.full_masters(engine),
        "steps": sorted({int(state["step"]) for state in states if "step" in state}),
    }


@pytest.mark.parametrize(
    ("stage", "from_fp32", "options"),
    [
        (0, True, WITHOUT_STATE),
        (1, True, WITHOUT_STATE),
        (1, False, {}),
        full(1, True, MODULE_ONLY),
        full(2, True, {}),
        (3, True, WITHOUT_STATE),
        (3, False, MODULE_ONLY),
        full(3, True, {}),
    ],
)
def test_loading_weights(
    ranks: Any, stage: int, from_fp32: bool, options: dict[str, bool], tmp_path: Path
) -> None:
    """``load_from_fp32_weights`` takes the saved masters; without it, or without the state, their bf16 copies count.

    With ``load_module_only`` ZeRO 3 loaded nothing and returned a path all the same. Without the state the first step
    of ZeRO 0 replaced the loaded weights by those from before, which the masters still had.
    """
    arguments = {"stage": stage, "folder": str(tmp_path), "from_fp32": from_fp32, "options": options}
    saved = ranks(2).run(loaded_weights, save=True, **arguments)[0]
    loaded = ranks(2).run(loaded_weights, save=False, **arguments)[0]
    with_state = not options
    for name, master in saved["loaded"].items():
        expected = master if from_fp32 and with_state else master.bfloat16().double()
        assert torch.equal(loaded["loaded"][name], expected), name
    assert loaded["steps"] == ([3] if with_state else [1])
    if from_fp32 and with_state:
        for name, after in saved["params"].items():
            assert torch.equal(loaded["params"][name], after), name


def refusal(rank: int, world_size: int, *, stage: int, change: dict[str, Any]) -> str:
    """Return the error of starting an engine with ``change`` merged into its configuration, or made to the model."""
    model = build("toy")
    if change.pop("in bf16", False):
        model = model.to(torch.bfloat16)
    model.embed.sparse = change.pop("sparse", False)
    config = training.ds_config(stage, zero=change.pop("zero", {}), extra=change)
    return training.refusal(
        lambda: training.initialize(model, config).destroy(),
        (deepspeed_muon.ConfigError, DeepSpeedConfigError),
    )


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        (3, {"zero": {"zero_quantized_weights": True}}, "zero_quantized_weights is not supported"),
        (3, {"zero": {"zero_quantized_gradients": True}}, "zero_quantized_gradients is not supported"),
        (3, {"zero": {"zero_quantized_nontrainable_weights": True}}, "remove it"),
        pytest.param(3, {"zero": {"mics_shard_size": 1}}, "mics_shard_size", marks=pytest.mark.compat),
        pytest.param(2, {"zero": {"elastic_checkpoint": True}}, "elastic_checkpoint", marks=pytest.mark.compat),
        (1, {"compile": {"deepcompile": True}}, "compile.deepcompile is not supported"),
        (1, {"elasticity": {"enabled": True}}, "lastic"),
        (0, {"in bf16": True}, "Set bf16.enabled"),
        (0, {"sparse": True}, "sparse=False"),
        (3, {"sparse": True}, "sparse=False"),
        (2, {"sparse_gradients": True}, "sparse_gradients"),
        (0, {"gradient_clipping": None}, "gradient_clipping must be a number of at least 0, got None"),
        (2, {"gradient_clipping": "1.0"}, "got '1.0': DeepSpeed compares it with norms. Write a number (0"),
    ],
)  # fmt: skip
def test_refused_by_initialize(ranks: Any, stage: int, change: dict[str, Any], said: str) -> None:
    """Every rank raises; keys that DeepSpeed has removed are refused by DeepSpeed itself."""
    for message in ranks(2).run(refusal, stage=stage, change=change):
        assert said in message


def unknown_wrappers(rank: int, world_size: int, *, stage: int) -> list[str]:
    """Return the errors of engines whose wrapper is a subclass, or whose configuration has a key that is new."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    module, name = (
        (stage3, "DeepSpeedZeroOptimizer_Stage3") if stage == 3 else (stage_1_and_2, "DeepSpeedZeroOptimizer")
    )
    owner = module if stage == 3 else deepspeed.runtime.engine  # where the engine takes the class from
    wrapper_class: Any = getattr(module, name)

    class ReflowOptimizer(wrapper_class):  # type: ignore[misc]
        pass

    refusals = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, ReflowOptimizer)
        refusals.append(refusal(rank, world_size, stage=stage, change={}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            supported,
            "_SUPPORTED_KEYS",
            supported._SUPPORTED_KEYS - {"sub_group_size", "buffer_count", "ratio"},
        )
        offload = {"device": "cpu", "buffer_count": 3}
        change = {"zero": {"offload_optimizer": offload, "sub_group_size": 10_000}}
        refusals.append(refusal(rank, world_size, stage=stage, change=change))
    return refusals


@pytest.mark.compat
@pytest.mark.parametrize("stage", [1, 3])
def test_a_later_deepspeed_is_refused_by_name(ranks: Any, stage: int) -> None:
    subclass, keys = ranks(1).run(unknown_wrappers, stage=stage)[0]
    said = "wrapped the optimizer in ReflowOptimizer, which deepspeed_muon does not know. Known are"
    assert said in subclass
    both = "zero_optimization.offload_optimizer.buffer_count, zero_optimization.sub_group_size"
    assert f"{both} is not supported" in keys


class Around(torch.optim.Optimizer):
    """A wrapper as programs write them, with the wrapped optimizer's groups and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.wrapped, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step(closure)


def wrapped_optimizers(rank: int, world_size: int, *, stage: int) -> list[str]:
    """Return the errors of engines that get an optimizer around ours, or a callable that makes one."""
    config = training.ds_config(stage, extra={"zero_allow_untested_optimizer": True})
    del config["optimizer"]
    messages = []
    for is_callable in (False, True):
        model = build("toy")
        wrapped = Around(Muon(model, lr=0.02))
        engine = training.initialize(model, config, optimizer=(lambda _: wrapped) if is_callable else wrapped)  # noqa: B023
        messages.append(training.refusal(lambda: training.run_step(engine, 0, rank, world_size, 1)))  # noqa: B023
    return messages


@pytest.mark.parametrize("stage", [full(2), 3])
def test_an_optimizer_around_ours_is_refused(ranks: Any, stage: int) -> None:
    """The error told users to import the package first, which they had done."""
    for messages in ranks(2).run(wrapped_optimizers, stage=stage):
        for said in messages:
            assert said.startswith("BindingError") and "pass the Muon itself" in said


def converted_engine(rank: int, world_size: int) -> str:
    """Return the error of a step after the weights of an engine were converted."""
    engine = training.make_engine(training.ds_config(0))
    training.run_step(engine, 0, rank, world_size, 1)
    engine.module.bfloat16()
    return training.refusal(lambda: training.run_step(engine, 1, rank, world_size, 1))


def test_a_model_that_is_converted_in_an_engine_is_refused(ranks: Any) -> None:
    for message in ranks(2).run(converted_engine):
        assert "was torch.float32 in deepspeed.initialize and is torch.bfloat16 now" in message


def distributed_tensors(rank: int, world_size: int) -> str:
    """Return the error of making an optimizer of sharded parameters."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return training.refusal(lambda: Muon(model, lr=0.02))


def test_distributed_tensors_are_refused(ranks: Any) -> None:
    """The first step failed in an operator."""
    for message in ranks(2).run(distributed_tensors):
        assert message.startswith("RoutingError")
        assert "0.weight of shape [16, 8] is a DTensor" in message and "leave out fully_shard" in message


def with_scalar(rank: int, world_size: int, *, stage: int, folder: str) -> Any:
    """Train a model with a scalar, clipped; save, and load the weights alone."""
    model = build("toy")
    model.gain = torch.nn.Parameter(torch.tensor(1.0))
    model.register_forward_hook(lambda module, _, loss: loss * module.gain)
    config = training.ds_config(stage, clipping=0.01)
    engine = deepspeed.initialize(model=model, config=config)[0]
    training.run_step(engine, 0, rank, world_size, 1)
    engine.save_checkpoint(folder, tag="t")
    saved = training.full_masters(engine)
    training.run_step(engine, 1, rank, world_size, 1)
    trained = training.full_masters(engine)
    engine.load_checkpoint(folder, tag="t", load_optimizer_states=False)
    return saved, trained, training.full_masters(engine)


@pytest.mark.parametrize("stage", [0, 3, full(1), full(2)])
def test_a_scalar_is_clipped_and_loaded(ranks: Any, tmp_path: Path, stage: int) -> None:
    """The first step raised at stage 0, and a load of weights alone at stage 3."""
    saved, trained, loaded = ranks(2).run(with_scalar, stage=stage, folder=str(tmp_path))[0]
    assert saved["gain"] not in (1.0, trained["gain"])
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def with_state(rank: int, world_size: int, *, stage: int) -> str:
    """Give an engine an optimizer that has stepped, and return what it says."""
    model = build("toy")
    optimizer = deepspeed_muon.Muon(model)
    model(*batch(0, rank)).backward()
    optimizer.step()
    config = training.ds_config(stage)
    del config["optimizer"]

    def start() -> None:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        training.run_step(engine, 1, rank, world_size, 1)
        assert {int(state["step"]) for state in optimizer.state.values()} == {2}

    return training.refusal(start)


@pytest.mark.parametrize("stage", [0, 1, full(2), 3])
def test_an_optimizer_with_state_continues_or_is_refused(ranks: Any, stage: int) -> None:
    """From ZeRO 1 on its state was dropped, and every later save raised a KeyError."""
    for said in ranks(2).run(with_state, stage=stage):
        assert ("restore_from" in said) == (stage > 0), said


def with_bad_rate(rank: int, world_size: int, *, stage: int, precision: str) -> str:
    """Give one rank a rate that is no number; return what the step says, and train on."""
    engine = training.make_engine(training.ds_config(stage, precision=precision, clipping=0.5), "toy")
    training.run_step(engine, 0, rank, world_size, 1)
    group, before = engine.basic_optimizer.param_groups[0], snapshots.tensors_of(engine)
    rate = group["lr"]
    group["lr"] = "fast" if rank == 0 else rate
    said = training.refusal(lambda: training.run_step(engine, 1, rank, world_size, 1))
    assert not snapshots.changed(before, snapshots.tensors_of(engine))
    group["lr"] = rate
    return said


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), full(0, "bf16"), (2, "bf16"), (3, "fp32")])
def test_all_ranks_refuse_a_rate_of_one(ranks: Any, stage: int, precision: str) -> None:
    first, second = ranks(2).run(with_bad_rate, stage=stage, precision=precision)
    assert "param group 0.lr: must be a number" in first and second.startswith("ConfigError: another rank")
