"""The swapper of ZeRO 3, which keeps masters and state of sub-groups on NVMe between two steps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_muon.optimizer import Muon
from deepspeed_muon.step.state import STATE_TENSORS


def swap_what_fits(swapper: Any, optimizer: Muon) -> None:
    """Let a swapper keep masters and those tensors of our state that it can, and no gradients."""
    swapper.swap_out_gradients = lambda *_, **__: None
    swapper._get_state_tensors = functools.partial(_state_to_swap, optimizer)


def _state_to_swap(optimizer: Muon, master: Any) -> list[Tensor]:
    """Return the state of a partition that the swapper can keep: with the partition's dtype and length.

    Everything else stays in memory: rows of variants, a momentum of less than 32 bits. The lengths are not looked at:
    between two steps all that is swapped is empty. A load makes another dict of all states.
    """
    own = optimizer.state.get(master, {})
    found = {key: own[key] for key in STATE_TENSORS if key in own and own[key].dtype == master.dtype}
    for key, tensor in found.items():
        tensor.ds_id = f"{key}-{master.ds_id}"  # the name of its file
    return list(found.values())


def release(swapper: Any, master: Any) -> None:
    """Let a master that was swapped out, and its state, refer to no buffer of the swapper."""
    swapper.swap_params_info[master.ds_id].release_memory()


def master_files(swapper: Any) -> set[str]:
    """Return the names of the files with masters."""
    return {Path(info.tensors[0].swap_path).name for info in swapper.swap_params_info.values()}
