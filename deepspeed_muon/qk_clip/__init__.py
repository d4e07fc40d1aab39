"""QK-clip: bounds the attention logits by scaling query and key rows after a step.

The import of :mod:`.clip` makes the setting ``qk_clip`` known to the optimizer.
"""

from deepspeed_muon.qk_clip import clip as clip
