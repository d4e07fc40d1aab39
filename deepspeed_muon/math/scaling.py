"""The ``adjust_lr_fn`` rules: by which factor an orthogonalised update is multiplied.

Each formula stands in this file only. Beware of "spectral": other projects call two different rules so. For a matrix
of ``rows x cols``:

==================  ===========================  ==================================================
name                factor                       source
==================  ===========================  ==================================================
``original``        ``sqrt(max(1, rows/cols))``  Keller Jordan's Muon; ``torch.optim.Muon`` "original"
``match_rms_adamw`` ``0.2 sqrt(max(rows, cols))``  Moonlight (arXiv 2502.16982); torch's name
``spectral``        ``sqrt(max(rows, cols))``    TransformerEngine / Emerging-Optimizers "spectral"
``unit_rms_norm``   ``sqrt(rows/cols)``          arXiv 2502.07529; Dion calls it "spectral_norm"
==================  ===========================  ==================================================
"""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["AdjustLrName", "update_scale"]

AdjustLrName = Literal["original", "match_rms_adamw", "spectral", "unit_rms_norm"]


def update_scale(rule: AdjustLrName, rows: int, cols: int) -> float:
    """Return the factor of the update ``lr * factor * orthogonalize(u)``.

    Args:
        rule: One of the names in the table above.
        rows: Output features of the layer, however its weight is stored.
        cols: Input features.
    """
    if rule == "original":
        return math.sqrt(max(1.0, rows / cols))
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if rule == "spectral":
        return math.sqrt(max(rows, cols))
    if rule == "unit_rms_norm":
        return math.sqrt(rows / cols)
    raise ValueError(f"adjust_lr_fn: unknown rule {rule!r}; expected one of {AdjustLrName.__args__}")
