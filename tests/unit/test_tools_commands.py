"""``python -m deepspeed_muon`` as a program: its help, its JSON, and the commands for checkpoints in one process."""

from __future__ import annotations

import fcntl
import functools
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon.__main__ import main
from deepspeed_muon.tools.convert import export_weights
from deepspeed_muon.version import __version__
from tests.support.checkpoints import save_as_deepspeed, write_set
from tests.support.native_ops import REPOSITORY


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "deepspeed_muon", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, f"deepspeed_muon {__version__}\n"),
        (["--help"], 0, "usage: python -m deepspeed_muon "),
        (["checkpoint", "export", "--help"], 0, "--everything"),
        (["plan"], 2, ""),
    ],
)
def test_help_and_errors_of_usage_import_neither_torch_nor_deepspeed(
    arguments: list[str], status: int, said: str
) -> None:
    """They took two seconds of CPU."""
    done = program(*arguments)
    assert done.returncode == status and said in done.stdout
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in modules and modules.isdisjoint(("torch", "deepspeed", "pydantic", "numpy"))


def test_the_console_script_imports_models_from_the_current_folder_and_prints_only_json(
    tmp_path: Path,
) -> None:
    """Only ``python -m`` did: the first folder of a script's path is its own.

    DeepSpeed's warning of a machine without a GPU, or a model's prints, came before the JSON.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/deepspeed-muon").write_text(
        "from deepspeed_muon.__main__ import run\nraise SystemExit(run())"
    )
    (tmp_path / "models.py").write_text(
        "from torch import nn\nprint('hello')\ndef build(): return nn.Linear(8, 4)"
    )
    command = [sys.executable, "bin/deepspeed-muon", "routes", "models:build", "--json"]
    variables = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables)
    assert done.returncode == 0 and json.loads(done.stdout)["tensors"] == 2, done.stderr
    assert "hello" in done.stderr


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    """`| head` ended a command in a traceback of BrokenPipeError."""
    (tmp_path / "adamw.json").write_text('{"optimizer": {"type": "AdamW"}}')
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "deepspeed_muon", "rates", str(tmp_path / "adamw.json")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert done.returncode and done.stderr.startswith("deepspeed_muon rates: [Errno 28] No space left")


INTERRUPT = """
import os, signal, sys
def interrupt(event, arguments):
    if event == "import" and arguments[0] == "torch":
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
"""


def test_an_interrupt_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    """They take seconds; where SIGINT is ignored, as in a background job, it remains so."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    command = [sys.executable, "-m", "deepspeed_muon", "rates", "absent.json"]
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    # The tests themselves may run in the background.
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(command, capture_output=True, text=True, env=variables, preexec_fn=heeded)
    assert (done.returncode, done.stderr) == (130, "")
    background = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *command]
    done = subprocess.run(background, capture_output=True, text=True, env=variables)
    assert done.returncode == 2 and "absent.json: No such file" in done.stderr


def test_a_standard_output_that_is_closed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON went to standard error instead, text nowhere, and the status was 0."""
    write_set(tmp_path)
    closed = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-m", "deepspeed_muon"]
    done = subprocess.run(
        [*closed, "routes", str(tmp_path), "--json"], stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert (done.returncode, done.stderr) == (2, "deepspeed_muon routes: standard output is closed\n")
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["routes", str(tmp_path)]) == 2
    assert "standard output is closed" in capsys.readouterr().err


def test_names_that_the_terminal_cannot_show_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "größe.json").write_text("[]")
    said = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(said, encoding="ascii"))
    assert main(["plan", str(tmp_path / "größe.json")]) == 2
    sys.stderr.flush()
    assert rb"gr\xf6\xdfe.json: expected a JSON object" in said.getvalue()


# ---- checkpoints ----


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_becomes_a_folder_for_from_pretrained(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config)
    save_as_deepspeed(model, tmp_path / "step1")
    folders = [str(tmp_path / name) for name in ("step1", "set", "hf")]
    monkeypatch.setattr("deepspeed_muon.tools.convert.DEFAULT_SHARD_BYTES", 8000)  # several files
    assert main(["checkpoint", "consolidate", *folders[:2]]) == 0
    assert main(["checkpoint", "export", *folders[1:]]) == 0
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    config.save_pretrained(folders[2])
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(folders[2], output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    # The folder is not overwritten, and nothing is left beside it.
    assert main(["checkpoint", "export", *folders[1:]]) == 2
    assert len(list(tmp_path.iterdir())) == 3


def test_everything_is_exported_under_the_names_of_the_set(tmp_path: Path) -> None:
    """And names lose what torch.compile adds."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    write_set(tmp_path / "set", ("_orig_mod.w",))
    assert export_weights(tmp_path / "set", tmp_path / "out", everything=True) == 2
    tensors = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert {name: tensor.flatten().tolist() for name, tensor in tensors.items()} == {
        "w": list(range(12)),
        "momentum_buffer/w": list(range(12)),
    }


def test_a_file_is_no_folder_for_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was "[Errno 20] Not a directory"."""
    write_set(tmp_path / "set")
    (tmp_path / "file").touch()
    assert main(["checkpoint", "export", str(tmp_path / "set"), str(tmp_path / "file")]) == 2
    assert (
        f"{tmp_path / 'file'}: is a file, or already holds something; name a new" in capsys.readouterr().err
    )


def test_a_damaged_set_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = write_set(tmp_path / "set")
    shard.write_bytes(shard.read_bytes()[:-4] + b"\1\2\3\4")
    assert main(["checkpoint", "export", str(tmp_path / "set"), str(tmp_path / "out")]) == 2
    assert "its checksum is not that of the index" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_progress_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Only on a terminal, never in the output, and not before two seconds."""
    write_set(tmp_path / "set")
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # no columns, no bar

    def run(delay: float) -> str:
        monkeypatch.setattr("deepspeed_muon.tools.convert.BAR_DELAY", delay)
        assert main(["checkpoint", "verify", str(tmp_path / "set"), "--json"]) == 0
        output, errors = capsys.readouterr()
        assert json.loads(output)["ok"]
        return errors

    assert "%|" not in run(0.0)
    with open(stderr, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        run(2.0)
        assert not select.select([terminal], [], [], 0)[0]
        run(0.0)
        assert "verify:   0%|" in os.read(terminal, 10_000).decode()
    os.close(terminal)


def test_inspect_and_verify_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = write_set(tmp_path)

    def printed(command: str, status: int) -> Any:
        assert main(["checkpoint", command, str(tmp_path), "--json"]) == status
        return json.loads(capsys.readouterr().out)

    assert printed("inspect", 0)["parameters"]["w"]["shape"] == [4, 3]
    assert printed("verify", 0) == {"ok": True, "files": 1, "parameters": 1}
    shard.unlink()
    assert shard.name in printed("verify", 1)["error"]


def test_the_routes_of_a_set_are_those_that_it_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name and shape the routes of ``lm_head`` and of a matrix that a setting chose were guessed."""
    write_set(tmp_path, ("lm_head.weight", "w"))
    assert main(["routes", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["algorithms"] == {"muon": {"tensors": 2, "elements": 24}} and not data["guesses"]["tensors"]
    assert main(["routes", str(tmp_path), "--include", "w"]) == 2
    assert "which has its routes: leave out --include" in capsys.readouterr().err
