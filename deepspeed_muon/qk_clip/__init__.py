"""QK-clip: bounds the attention logits by scaling query and key rows after a step."""
