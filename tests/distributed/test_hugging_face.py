"""transformers.Trainer and Accelerate with the optimizer type Muon, on real ranks, without a download.

The models are randomly initialised Qwen2 and Llama of a few thousand parameters.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

import deepspeed_muon
from deepspeed_muon import __main__ as cli
from tests.support import training
from tests.support.accelerate_ranks import NEEDS_ACCELERATE, reset_hugging_face, use_cpu_ranks
from tests.support.comparisons import relative, within
from tests.support.contract import compare_paths
from tests.support.harness import free_port, run_command
from tests.support.models import SMALL_DECODER
from tests.support.native_ops import REPOSITORY
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import FP32_MODEL, Limits, measured_limits
from tests.support.thinning import full, usual

pytestmark = NEEDS_ACCELERATE

VOCAB = 61
STEPS = 4
SAVED_STEPS = 2
RATES = {"learning_rate": 3e-3, "muon_lr": 0.02}

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MATRICES = {
    f"model.layers.{layer}.{projection}.weight"
    for layer in range(2)
    for projection in (*PROJECTIONS, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
}

# Two runs in fp32 whose sums are in different orders. The gradients differ by some 1e-6, which the iteration multiplies
# in the directions of small singular values by up to 3.4445^5 = 485; AdamW divides small elements by their own size.
ANOTHER_ORDER = {"muon": 5e-4, "adamw": 1e-3}


def build(kind: str, *, tied: bool, seed: int) -> Any:
    """Make a small causal language model; under stage 3 the Trainer's configuration has it built partitioned."""
    import transformers

    shape = {
        **SMALL_DECODER,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    config = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig}[kind](**shape)
    transformers.set_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)


def gathered_weights(model: Any) -> dict[str, Tensor]:
    """Copy all parameters; under ``zero.Init`` the same seed draws other weights than outside of it."""
    weights = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            weights[name] = param.detach().clone()
    return weights


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (count, 10), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def ds_config(stage: int, *, scheduler: str | None, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """A configuration with ``auto`` wherever Hugging Face fills it in."""
    filled_in = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    fixed = {"muon_lr": RATES["muon_lr"], "ns_dtype": "fp32", "wire_dtype": "fp32"}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config: dict[str, Any] = {
        **dict.fromkeys((*sizes, "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "Muon", "params": {**filled_in, **fixed, **(params or {})}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"},
    }
    if stage == 3:
        config["zero_optimization"].update(
            stage3_prefetch_bucket_size="auto",
            stage3_param_persistence_threshold="auto",
            stage3_gather_16bit_weights_on_model_save=True,
        )
    if scheduler:
        config["scheduler"] = {
            "type": scheduler,
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
        }
        if scheduler == "WarmupDecayLR":
            config["scheduler"]["params"].update(warmup_min_lr="auto", warmup_max_lr="auto")
    return config


def recording_trainer() -> type:
    """A Trainer that keeps what it saw; it is a class of its own because transformers may not be installed."""
    import transformers

    class RecordingTrainer(transformers.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.seen: list[Tensor] = []
            self.losses: list[float] = []
            self.rates: list[list[float]] = []
            self.saved_state: dict[str, Any] = {}  # after SAVED_STEPS steps

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            output = super().compute_loss(model, inputs, *args, **kwargs)
            if model.training:
                loss = output[0] if isinstance(output, tuple) else output
                if not self.saved_state and self.state.global_step == SAVED_STEPS:
                    self.saved_state = training.outcome(self.model_wrapped)
                self.seen.append(inputs["input_ids"].clone())
                self.losses.append(float(loss))
                optimizer = deepspeed_muon.muon_optimizer(self.model_wrapped)
                self.rates.append([float(group["lr"]) for group in optimizer.param_groups])
            return output

    return RecordingTrainer


def trainer_run(
    rank: int,
    world_size: int,
    *,
    folder: str,
    config: dict[str, Any],
    kind: str,
    tied: bool,
    options: dict[str, Any],
    resume: bool = False,
    client: bool = False,
) -> dict[str, Any]:
    """Train ``STEPS`` steps, or the last ones from the checkpoint of step ``SAVED_STEPS``, and report."""
    import transformers

    use_cpu_ranks()
    settings = {
        "learning_rate": RATES["learning_rate"],
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVED_STEPS,
        "eval_strategy": "steps",
        "eval_steps": SAVED_STEPS,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 11,
        "dataloader_pin_memory": False,
        "accelerator_config": {"use_configured_state": True},
        **options,
    }
    arguments = transformers.TrainingArguments(output_dir=folder, deepspeed=config, **settings)
    model = build(kind, tied=tied, seed=7 if resume else 0)
    start = gathered_weights(model)
    extra: dict[str, Any] = {}
    if client:
        chosen = {**training.MUON_PARAMS, "model": model, "eps": 1e-6}
        extra["optimizer_cls_and_kwargs"] = (deepspeed_muon.Muon, chosen)
    trainer = recording_trainer()(
        model=model, args=arguments, train_dataset=rows(64, 1), eval_dataset=rows(6, 2), **extra
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_STEPS}" if resume else None)
    trainer.save_model(f"{folder}/model")
    filled = trainer.accelerator.deepspeed_config.get("optimizer", {}).get("params", {})
    report = {
        "start": start,
        "routes": {route.name: route.algorithm for route in deepspeed_muon.routes(trainer.model_wrapped)},
        "filled": [] if client else [filled[key] for key in ("lr", "weight_decay", "eps")],
        "params": training.full_masters(trainer.model_wrapped),
        "momentum": training.full_states(trainer.model_wrapped, "momentum_buffer"),
        "saved_state": trainer.saved_state,
        "losses": trainer.losses,
        "rates": trainer.rates,
        "eval": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "seen": trainer.seen,
        "saved": {},
    }
    reset_hugging_face()
    if rank == 0:
        saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model")
        report["saved"] = {name: param.detach() for name, param in saved.named_parameters()}
    return report


def reference(rank: int, world_size: int, **arguments: Any) -> list[dict[str, Any]]:
    """Return the parameters after the reference run, and the limits of their paths."""
    run = functools.partial(train_reference, **arguments)
    exact = run()
    # The Trainer's model computes in fp32.
    return [exact[1], measured_limits(run, exact, FP32_MODEL, seeds=2).paths]


def train_reference(
    kind: str, tied: bool, start: dict[str, Tensor], seen: list[Any], rates: list[Any], accumulation: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Train the same model in float64 in one process on all the micro-batches that the ranks saw."""
    model = build(kind, tied=tied, seed=0)
    for name, param in model.named_parameters():
        param.data.copy_(start[name])
    model = model.double()
    oracle = Oracle(matrices_of(MATRICES), clipping=0.5, eps=1e-6)
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        for micro in range(step * accumulation, (step + 1) * accumulation):
            oracle.muon_lr, oracle.adam_lr = rates[micro]
            for tokens in (ranks_seen[micro] for ranks_seen in seen):
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / (accumulation * len(seen))).backward()
        norms.append(oracle.update(model))
    return start, {name: param.detach() for name, param in model.named_parameters()}, norms


TIED, UNTIED = ({"kind": "qwen2", "tied": tied} for tied in (True, False))
CHECKPOINTED = {"lr_scheduler_type": "cosine", "gradient_checkpointing": True}
CASES: dict[str, dict[str, Any]] = {
    "stage0-linear": {"stage": 0, **UNTIED, "options": {"lr_scheduler_type": "linear"}},
    "stage1-cosine": {
        "stage": 1,
        "kind": "llama",
        "tied": True,
        "options": {**CHECKPOINTED, "gradient_accumulation_steps": 2},
    },
    "stage2-deepspeed-schedule": {
        "stage": 2,
        **TIED,
        "scheduler": "WarmupDecayLR",
        "options": {"warmup_steps": 2},
    },
    "stage3-cosine": {"stage": 3, **TIED, "options": CHECKPOINTED},
    "stage2-client": {"stage": 2, "kind": "llama", "tied": False, "client": True, "options": {}},
}


def settings_of(case: str, folder: Path) -> dict[str, Any]:
    settings = dict(CASES[case])
    config = ds_config(settings.pop("stage"), scheduler=settings.pop("scheduler", None))
    if settings.get("client"):
        del config["optimizer"]
    return {"config": config, "folder": str(folder), **settings}


@pytest.mark.parametrize("case", usual(CASES, {"stage3-cosine"}))
def test_trainer(ranks: Any, case: str, tmp_path: Path) -> None:
    """The curve is the reference's, resuming continues it bit by bit, and ``save_model`` writes the weights."""
    settings = settings_of(case, tmp_path)
    uninterrupted = ranks(2).run(trainer_run, **settings)
    first = uninterrupted[0]

    muon = {name for name, algorithm in first["routes"].items() if algorithm == "muon"}
    assert muon == MATRICES, "embeddings, head, norms and biases are AdamW's"
    assert first["filled"] == ([] if settings.get("client") else [3e-3, 0.1, 1e-6])
    ratio = RATES["muon_lr"] / RATES["learning_rate"]
    assert all(muon_rate == pytest.approx(adam_rate * ratio) for muon_rate, adam_rate in first["rates"])
    assert len({muon_rate for muon_rate, _ in first["rates"]}) > 1, "the schedule moves"
    assert len(first["eval"]) == STEPS // SAVED_STEPS

    accumulation = settings["options"].get("gradient_accumulation_steps", 1)
    seen = [result["seen"] for result in uninterrupted]
    model = {"kind": settings["kind"], "tied": settings["tied"], "start": first["start"]}
    arguments = {**model, "seen": seen, "rates": first["rates"], "accumulation": accumulation}
    expected, allowed = ranks(1).run(reference, **arguments)[0]
    assert expected.keys() == first["params"].keys()
    compare_paths(first["params"], first["start"], expected, Limits(paths=allowed))
    for name, param in first["saved"].items():
        assert torch.equal(param.double(), first["params"][name]), name

    rest = ranks(2).run(trainer_run, resume=True, **settings)
    for before, after in zip(uninterrupted, rest, strict=True):
        assert after["losses"] == before["losses"][SAVED_STEPS * accumulation :]
        assert after["rates"] == before["rates"][SAVED_STEPS * accumulation :]
        assert after["eval"][-1] == before["eval"][-1]
        training.assert_same_bits(after, before, "params", "momentum")


@pytest.mark.parametrize(
    ("stage", "size", "to_stage", "to_size"),
    [(2, 1, 2, 2), full(3, 2, 3, 1), full(3, 1, 1, 2)],
)
def test_resuming_on_another_number_of_ranks(
    ranks: Any, tmp_path: Path, stage: int, size: int, to_stage: int, to_size: int
) -> None:
    """One command between the runs, and one line of configuration; batches of all ranks together stay equal."""
    pytest.importorskip("transformers", "5.2", "older Trainers take the checkpoint's batch size per device")
    options = {"lr_scheduler_type": "cosine"}
    settings: dict[str, Any] = {"folder": str(tmp_path), "kind": "qwen2", "tied": True}
    batch = {"per_device_train_batch_size": 4 // size}
    uninterrupted = ranks(size).run(
        trainer_run, config=ds_config(stage, scheduler=None), options={**options, **batch}, **settings
    )[0]
    checkpoint = tmp_path / f"checkpoint-{SAVED_STEPS}"
    words = ["--input_folder", f"{checkpoint}/global_step{SAVED_STEPS}"]
    words += ["--output_folder", f"{checkpoint}/universal"]
    assert cli.main(["checkpoint", "universal", *words]) == 0
    config = {**ds_config(to_stage, scheduler=None), "checkpoint": {"load_universal": True}}
    batch = {"per_device_train_batch_size": 4 // to_size}
    rest = ranks(to_size).run(
        trainer_run, config=config, options={**options, **batch}, resume=True, **settings
    )
    for after in rest:
        training.assert_same_bits(after["saved_state"], uninterrupted["saved_state"])
        assert after["rates"] == uninterrupted["rates"][SAVED_STEPS:], "the schedule goes on"
        assert len(after["losses"]) == STEPS - SAVED_STEPS
        for name, value in uninterrupted["params"].items():
            limit = ANOTHER_ORDER["muon" if name in MATRICES else "adamw"]
            error = relative(after["params"][name], value, uninterrupted["saved_state"]["params"][name])
            within(error, limit, f"path of {name}")


def loop(rank: int, world_size: int, *, stage: int, folder: str, resume: bool) -> dict[str, Any]:
    """A training loop of Accelerate's: weight-decay groups, accumulation, a schedule of its own, its checkpoints."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    use_cpu_ranks()
    config = ds_config(stage, scheduler=None, params={"betas": [0.9, 0.95], "eps": 1e-6})
    config.update(gradient_accumulation_steps=2, gradient_clipping=0.5)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = build("qwen2", tied=False, seed=7 if resume else 0)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name in MATRICES or ("weight" in name and "norm" not in name)]},
        {"params": [p for name, p in named if "norm" in name or name.endswith("bias")], "weight_decay": 0.0},
    ]
    optimizer = DummyOptim(groups, lr=RATES["learning_rate"], weight_decay=0.1)
    scheduler = DummyScheduler(
        optimizer,
        lr_scheduler_callable=lambda real: torch.optim.lr_scheduler.LambdaLR(
            real, lambda step: 1 / (1 + step)
        ),
    )
    loader = torch.utils.data.DataLoader(rows(4 * STEPS * world_size, 1), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if resume:
        accelerator.load_state(folder)
    inner = deepspeed_muon.muon_optimizer(model)
    losses, rates = [], []
    for number, batch in enumerate(loader):
        if resume and number < 2 * SAVED_STEPS:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            rates.append([float(group["lr"]) for group in inner.param_groups])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if not resume and number == 2 * SAVED_STEPS - 1:
            accelerator.save_state(folder)
    reset_hugging_face()
    return {
        "losses": losses,
        "rates": rates,
        "groups": [[group["algorithm"], float(group["weight_decay"])] for group in inner.param_groups],
        "params": training.full_masters(model),
    }


@pytest.mark.parametrize("stage", [full(2), 3])
def test_accelerate_loop(ranks: Any, stage: int, tmp_path: Path) -> None:
    """The caller's groups and schedule survive, and ``save_state`` / ``load_state`` continue bit by bit."""
    uninterrupted = ranks(2).run(loop, stage=stage, folder=str(tmp_path), resume=False)[0]
    assert uninterrupted["groups"] == [["muon", 0.1], ["adamw", 0.1], ["adamw", 0.0]]
    assert len(uninterrupted["losses"]) == 2 * STEPS
    for number, (muon, decayed, undecayed) in enumerate(uninterrupted["rates"]):
        assert muon == pytest.approx(RATES["muon_lr"] / (1 + number // 2))
        assert decayed == undecayed == pytest.approx(RATES["learning_rate"] / (1 + number // 2))
    rest = ranks(2).run(loop, stage=stage, folder=str(tmp_path), resume=True)[0]
    assert rest["losses"] == uninterrupted["losses"][2 * SAVED_STEPS :]
    for name, value in uninterrupted["params"].items():
        assert torch.equal(rest["params"][name], value), name


def muon_lr_auto(rank: int, world_size: int) -> str:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    use_cpu_ranks()
    config = ds_config(1, scheduler=None, params={"betas": [0.9, 0.95], "eps": 1e-6, "muon_lr": "auto"})
    config.update(gradient_accumulation_steps=1, gradient_clipping=0.5, train_batch_size=2 * world_size)
    config["train_micro_batch_size_per_gpu"] = 2

    def start() -> None:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = build("qwen2", tied=False, seed=0)
        accelerator.prepare(model, DummyOptim(list(model.parameters()), lr=1e-3))

    try:
        return training.refusal(start, ValueError)
    finally:
        reset_hugging_face()


def test_muon_lr_cannot_be_auto(ranks: Any) -> None:
    """Hugging Face knows one rate; its error names the key and asks for a number."""
    for message in ranks(2).run(muon_lr_auto):
        assert "optimizer.params.muon_lr" in message and "correct value" in message


LAUNCHERS = {
    "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port"],
    "deepspeed": ["deepspeed", "--num_accelerators", "2", "--master_port"],
    "accelerate": ["accelerate", "launch", "--use_deepspeed", "--num_processes", "2", "--main_process_port"],
}


@pytest.mark.full
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_example(launcher: str, tmp_path: Path) -> None:
    """The example as a user starts it: it trains, evaluates, saves, and goes on from a checkpoint."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    run = tmp_path / "run"
    script = ["examples/hf_trainer.py", "--deepspeed", "ds_configs/hf_zero3.json", "--output_dir", str(run)]
    script += ["--data", str(tmp_path / "text.txt"), "--dim", "32", "--layers", "2", "--seq_len", "32"]
    script += ["--max_steps", "4", "--save_steps", "2", "--logging_steps", "1", "--report_to", "none"]
    script += ["--per_device_train_batch_size", "2", "--learning_rate", "3e-3"]
    output = run_command([*LAUNCHERS[launcher], str(free_port()), *script], cwd=REPOSITORY).stdout
    assert "train_loss" in output, output
    assert (run / "model.safetensors").is_file()
    saved = json.loads((run / "eval_results.json").read_text())
    assert saved["eval_loss"] < 5.5, "a byte drawn at random costs log 256, 5.55"
    if launcher == "deepspeed":
        again = [*script, "--resume_from_checkpoint", str(run / "checkpoint-2")]
        run_command([*LAUNCHERS[launcher], str(free_port()), *again], cwd=REPOSITORY)
        assert json.loads((run / "eval_results.json").read_text())["eval_loss"] == saved["eval_loss"]
