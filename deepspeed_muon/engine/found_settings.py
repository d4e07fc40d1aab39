"""Settings that are left open and depend on the machines: the ranks find them together, to do all the same."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import OpsUnavailableError
from deepspeed_muon.logs import warn
from deepspeed_muon.ops import select, trusted
from deepspeed_muon.step.assignment import may_share, ranks_of_this_node
from deepspeed_muon.transport.agreement import common
from deepspeed_muon.transport.members import Members

__all__ = ["found_settings"]


def found_settings(config: MuonConfig, *, device: torch.device, members: Members) -> dict[str, Any]:
    """Return what stands in place of settings that are left open. Must be called by all ``members``.

    ``ranks_per_node`` is what the launcher says, if it says the same everywhere. Ranks share no matrices under ``auto``
    if the self-test of the CUDA code failed on any machine.

    Args:
        config: The settings, equal on all ranks.
        device: Where the iteration runs.
        members: The ranks of the engine.
    """
    found: dict[str, Any] = {}
    if config.ranks_per_node is None:
        what = "comparison of ranks per machine"
        found["ranks_per_node"] = common(ranks_of_this_node(), members=members, what=what) or None
    if config.share_matrices == "auto" and may_share(config, device):
        (distrusted,) = members.sum([int(not _is_trusted(config, device))], what="comparison of self-tests")
        if distrusted:
            found["share_matrices"] = False
            warn(
                "deepspeed_muon: ranks share no matrices, because the self-test failed on %d ranks",
                distrusted,
            )
    return found


def _is_trusted(config: MuonConfig, device: torch.device) -> bool:
    try:
        select(config.ns_backend)  # what the self-test tests is loaded first
    except OpsUnavailableError:
        return False  # it is raised again where all ranks hear of it
    return trusted(device).ok
