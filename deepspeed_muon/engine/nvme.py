"""Offload to NVMe at stage 3: what DeepSpeed's swapper, save and load leave out.

**Steps.** DeepSpeed swaps one sub-group in, calls the optimizer, and swaps it out again. Sub-groups hold whole
parameters, so nothing of ours needs two of them at once. Two things go wrong:

- Gradients of a parameter that does not begin at a multiple of 128 elements in its partition are not read, and nobody
  is told: the disk is read without a cache, into places that must be aligned. Here no gradient is swapped: all are in
  the buffer that they were accumulated in anyway, and a sub-group gets a copy of its own when it is swapped in.
- With pipelines masters and state still refer to buffers of the swapper, which hold another sub-group by then; a save
  would write them into its files, and a load would read them.

**Checkpoints.** Beside its usual files DeepSpeed saves a copy of each rank's swap files, and copies them back. Four
things go wrong:

- A save into a folder with such a copy raises: a killed run could not save a tag again that it had begun.
- The first rank names the save in ``latest`` while others still copy.
- Of a copy that was cut short, or is of another save than the usual files, nobody is told.
- A load ignores the usual files of the optimizer: counts of steps, settings of the param groups, and all that is in
  memory (small sub-groups, rows of variants, a momentum of less than 32 bits) begin anew. Swapped state is never read.

So here a save first removes an earlier copy, and writes a list of the swap files among them, which is copied too. The
ranks wait for each other before ``latest`` is written. A load checks that list before anything is changed, and loads
the usual files afterwards.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.ds_to_universal import dp_index_to_str

from deepspeed_muon.checkpoint.files import refusing
from deepspeed_muon.checkpoint.live import optimizer_of
from deepspeed_muon.checkpoint.tag_folder import Glance
from deepspeed_muon.engine.zero.stages import Zero3View, view_of
from deepspeed_muon.engine.zero.views import Original, View
from deepspeed_muon.errors import CheckpointError

_LIST = "deepspeed_muon.json"


def _copy_in(engine: Any, tag_folder: Path) -> Path:
    """Return where DeepSpeed copies this rank's swap files to."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return tag_folder / "offloaded_tensors" / f"rank{dp_index_to_str(rank)}"


def _swap_files(folder: Path) -> dict[str, int]:
    """Return the sizes of the swap files that DeepSpeed copies: all but gradients."""
    return {
        path.name: path.stat().st_size for path in folder.glob("*.tensor.swp") if "gradient" not in path.name
    }


def prepare_save(engine: Any, tag_folder: Path, save_id: str) -> None:
    """Remove an earlier copy of this rank's swap files, and list the files for the next one."""
    swap_folder = view_of(engine.optimizer).swap_folder
    if swap_folder is None:
        return
    with refusing(str(tag_folder)):
        if (copy := _copy_in(engine, tag_folder)).exists():
            shutil.rmtree(copy)
        (swap_folder / _LIST).write_text(json.dumps({"save": save_id, "files": _swap_files(swap_folder)}))


def swap_in(original: Original, view: Zero3View, sub_group_id: int, *args: Any, **kwargs: Any) -> None:
    """Swap a sub-group in, and give its master the gradient."""
    original(sub_group_id, *args, **kwargs)
    master = view.masters[sub_group_id]
    master.grad = view.accumulated(sub_group_id).to(master.device, master.dtype, copy=True)


def write_back(
    original: Original, view: Zero3View, sub_group_id: int, write_opt_state: bool, write_gradients: bool
) -> None:
    """Take over a gradient that the program has set."""
    grad = view.masters[sub_group_id].grad
    if write_gradients and grad is not None:
        view.accumulated(sub_group_id).copy_(grad)
    original(sub_group_id, write_opt_state, write_gradients)


def swap_out(original: Original, view: Zero3View, sub_group_id: int, *args: Any, **kwargs: Any) -> None:
    """Swap a sub-group out, and let its tensors be empty from then on, with pipelines too."""
    original(sub_group_id, *args, **kwargs)
    view.release(sub_group_id)


def wait_for_copies(original: Original, view: View, *args: Any, **kwargs: Any) -> Any:
    """Let all ranks end their copies before a save goes on."""
    if view.optimizer.host.save_id is not None:
        view.optimizer.ranks.gather(None, what="copies of swap files in a save")
    return original(*args, **kwargs)


def check_copy(engine: Any, tag_folder: Path, saved: Glance | None, save_id: str | None, state: bool) -> None:
    """Check that a checkpoint offloads to NVMe as the engine does, and that this rank's copy is of that save.

    Args:
        engine: The engine that is about to load.
        tag_folder: The folder of the checkpoint.
        saved: What is known of it.
        save_id: The id of the save in this rank's usual files.
        state: Whether the optimizer's state is to be loaded.

    Raises:
        CheckpointError: If it does not, with the remedy.
    """
    view, copy = view_of(engine.optimizer), _copy_in(engine, tag_folder)
    if view.swap_folder is None:
        if (tag_folder / "offloaded_tensors").exists() and state:
            raise CheckpointError(
                f"{tag_folder}: saved with offload to NVMe, which this engine does not use: load it with "
                f"zero_optimization.offload_optimizer.device nvme, at stage 3 and on the same ranks"
            )
        return
    assert isinstance(view, Zero3View)
    if not state or saved is None:
        raise CheckpointError(
            f"{tag_folder}: with offload to NVMe engine.load_checkpoint continues what deepspeed_muon saved, with the "
            f"optimizer's state: load weights alone into the model, before deepspeed.initialize"
        )
    if not copy.is_dir():
        raise CheckpointError(
            f"{tag_folder}: has no {copy.relative_to(tag_folder)}: the run that saved it did not offload to NVMe, or a "
            f"save was killed. Load it with zero_optimization.offload_optimizer.device cpu, or load another tag"
        )
    with refusing(str(copy)):
        listed = json.loads((copy / _LIST).read_text()) if (copy / _LIST).exists() else {}
        files, found = listed.get("files", {}), _swap_files(copy)
    if listed.get("save") != save_id or any(found.get(name) != size for name, size in files.items()):
        raise CheckpointError(f"{copy}: cut short, or of another save: a save was killed; load another tag")
    before, now = (
        saved.record.get("optimizer", {}).get("momentum_dtype"),
        optimizer_of(engine).config.momentum_dtype,
    )
    if before != now:
        raise CheckpointError(
            f"{tag_folder}: was saved with optimizer.params.momentum_dtype {before!r}, this engine has {now!r}: with "
            f"offload to NVMe a momentum is not converted. Set it as that run had"
        )
    if missing := view.master_files() - files.keys():
        raise CheckpointError(
            f"{copy}: has no {', '.join(sorted(missing))}. DeepSpeed numbers parameters by process: load in a new one "
            f"that makes its engines as the saved run did, with the same sub_group_size"
        )


def load_the_rest(engine: Any, load_dir: Any, tag: Any) -> None:
    """Load the usual files of the optimizer, and swap in what they say. Must be called by all ranks.

    The swapper then knows our state, whose files DeepSpeed has copied back.
    """
    if view_of(engine.optimizer).swap_folder is not None:
        engine.optimizer.checkpoint_event_prologue()
        engine._load_zero_checkpoint(load_dir, tag, load_optimizer_states=True)
        engine.optimizer.checkpoint_event_epilogue()
