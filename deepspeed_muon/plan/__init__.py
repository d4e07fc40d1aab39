"""Pure data: who holds, owns and sends which fragment of which matrix. No communication, no DeepSpeed."""
