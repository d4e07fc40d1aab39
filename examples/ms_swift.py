"""Makes this Muon an optimizer of ms-swift, whose Trainer fails on any optimizer in DeepSpeed's configuration (4.6).

    NPROC_PER_NODE=8 swift sft --external_plugins examples/ms_swift.py --optimizer deepspeed_muon --deepspeed zero3 ...

The configuration of DeepSpeed names no optimizer. Rates, decay, betas and epsilon are those of the command line.
"""

from __future__ import annotations

from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map

import deepspeed_muon


class MuonCallback(OptimizerCallback):
    """Makes the optimizer from the training arguments."""

    def create_optimizer(self, model: Any = None) -> deepspeed_muon.Muon:
        """Return Muon for the matrices of the model, AdamW for the rest."""
        args = self.args
        return deepspeed_muon.Muon(
            self.trainer.model if model is None else model,
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            adjust_lr_fn="match_rms_adamw",
        )


optimizers_map["deepspeed_muon"] = MuonCallback
