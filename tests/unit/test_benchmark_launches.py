"""How many kernels a step launches, and how often the host waits, as the benchmark counts them from a plan."""

from __future__ import annotations

from benchmarks.launches import count


def test_launches_of_a_step_do_not_grow_with_the_fragments() -> None:
    """Llama-7b on 64 ranks: a rank holds fragments of all 224 matrices, and owns four of them."""
    found = count("llama-7b", 64)
    assert (found["matrices"], found["owned"]) == (224, 4)
    assert found["waits"] == 1, "the host waits for the flags of the gradients alone"
    assert found["all-to-all"] == 2 * found["chunks"]
    # Before there were tables, 448 of the passes alone, and copies.
    assert found["passes"] <= 36 and found["with graphs"] <= 150
