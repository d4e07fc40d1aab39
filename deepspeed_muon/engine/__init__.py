"""All that reads or patches DeepSpeed; its private attributes are touched here and nowhere else."""
