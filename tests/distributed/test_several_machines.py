"""The quick start for several machines in ``docs/usage.md``, on two network namespaces as hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network import DEVICE, host_network, refusal
from tests.support.harness import REPOSITORY
from tests.support.hygiene import TAG_VARIABLE, kill_tagged, new_tag

WHY_NOT = refusal()
PORT = "29511"


def readme_blocks(folder: Path) -> None:
    """Write README's configuration, in fp32 for two CPU ranks, and its script."""
    text = (REPOSITORY / "README.md").read_text()
    blocks = dict(re.findall(r"```(json|python)\n(.*?)```", text, re.DOTALL))
    (folder / "ds_config.json").write_text(blocks["json"].replace('"bf16": {"enabled": true},', ""))
    (folder / "train.py").write_text(blocks["python"].replace("range(50)", "range(3)"))


def documented(start: str) -> list[str]:
    """Return the words of the one line of the page that begins so."""
    page = (REPOSITORY / "docs" / "usage.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(start)]
    return line.partition("#")[0].split()


@pytest.mark.full
@pytest.mark.time_limit(400)
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "hosts can be made")
@pytest.mark.parametrize(
    "start",
    ["deepspeed --hostfile hostfile --no_ssh", "DEEPSPEED_MUON=1 torchrun --nnodes 2"],
    ids=["deepspeed", "torchrun"],
)
def test_the_documented_line_trains_on_two_hosts(start: str, tmp_path: Path) -> None:
    readme_blocks(tmp_path)
    (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    tag = new_tag()
    with host_network(2) as network:
        runs = []
        for host in range(2):
            words = [word.replace("node1", network.address(0)) for word in documented(start)]
            variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
            words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
            words[0] = str(Path(sys.executable).parent / words[0])
            options = {"--node_rank": str(host), "--nproc_per_node": "1", "--master_port": PORT}
            for option, value in options.items():
                if option in words:
                    words[words.index(option) + 1] = value
            if "--rdzv_endpoint" in words:
                # All namespaces have the machine's name, by which torchrun would find out which host is node1.
                first = str(host == 0).lower()
                words[1:1] = ["--rdzv_conf", f"is_host={first}", "--local_addr", network.address(host)]
            environment = {
                **os.environ,
                **variables,
                TAG_VARIABLE: tag,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": DEVICE,
                "TP_SOCKET_IFNAME": DEVICE,
            }
            command, pipe = [*network.prefix(host), *words], subprocess.PIPE
            runs.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
                )
            )
        try:
            said = [run.communicate(timeout=300)[0] for run in runs]
        finally:
            kill_tagged(tag)
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)[-4000:]
    assert all("loss " in text for text in said), said
    # Rank 0's line: on one host only, because both are in one group.
    assert ["deepspeed_muon " in text for text in said].count(True) == 1, said
