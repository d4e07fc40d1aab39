"""The step that ``docs/architecture.md`` follows is the step that two ranks take."""

from __future__ import annotations

from typing import Any

import torch

from tests.support import worked_example
from tests.support.worked_example import LR, MOMENTUM, PAGE, SHAPES


def test_the_page_shows_the_step_of_two_ranks(ranks: Any) -> None:
    results = ranks(2).run(worked_example.train)
    drawn = worked_example.FIGURE.search(PAGE.read_text())
    assert drawn is not None
    assert drawn[0] == worked_example.figure(results), "python -m tests.support.worked_example"

    owners, sent = results[0]["owners"], worked_example.messages(results)
    for (kind, _), by_sender in zip(
        worked_example.order_of_all_to_alls(results[0]["chunks"]), sent, strict=True
    ):
        for sender, by_receiver in enumerate(by_sender):
            for receiver, fragments in enumerate(by_receiver):
                owner = receiver if kind == "gather" else sender
                assert all(owners[fragment.name] == owner for fragment in fragments)
    for rank, result in enumerate(results):
        numel = sum(f.stop - f.start for call in sent for f in call[rank][1 - rank])
        assert result["sent_bytes"] == 4 * numel


def test_the_weights_are_those_of_one_process(ranks: Any) -> None:
    results = ranks(2).run(worked_example.train)
    for name, gradient in worked_example.gradients().items():
        rows, cols = SHAPES[name]
        buf = (1 - MOMENTUM) * gradient.double()
        direction = gradient.double() + MOMENTUM * (buf - gradient.double())
        update = max(1, rows / cols) ** 0.5 * quintic(direction)
        for result in results:
            torch.testing.assert_close(result["weights"][name].double(), -LR * update, rtol=0, atol=1e-6)


def quintic(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Keller Jordan's Newton-Schulz iteration in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: torch.Tensor = matrix / matrix.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
