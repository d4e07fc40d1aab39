"""Reads ``deepspeed.pipe.PipelineModule``, whose layers have numbers for names, so that names tell routing little."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed_muon.routing.shapes import true_shape

__all__ = ["is_divided", "is_pipeline", "pipeline_kinds"]


def is_pipeline(model: nn.Module) -> bool:
    """Return whether ``model`` is a ``deepspeed.pipe.PipelineModule``."""
    return all(hasattr(model, name) for name in ("forward_funcs", "tied_modules", "stage_id", "num_stages"))


def is_divided(model: Any) -> bool:
    """Return whether ``model`` is a pipeline of which each rank holds one of several stages."""
    return is_pipeline(model) and model.num_stages > 1


def pipeline_kinds(model: Any) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of this rank's stage that are its output ``head``, or ``tied`` between stages."""
    found: dict[str, list[nn.Parameter]] = {"head": [], "tied": list(model.tied_modules.parameters())}
    last = model.forward_funcs[-1] if model.forward_funcs else None
    if model.stage_id == model.num_stages - 1 and isinstance(last, nn.Module):
        matrices = [param for param in last.parameters() if len(true_shape(param)) > 1]
        # A transformer block has several matrices; a last layer with only one is the projection onto the outputs.
        if len(matrices) == 1:
            found["head"] = matrices
    return found
