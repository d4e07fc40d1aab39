"""The step that ``docs/architecture.md`` follows is the step that two ranks take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_muon.reference import ReferenceMuon
from tests.support import worked_example
from tests.support.worked_example import LR, MOMENTUM, PAGE, SHAPES


@pytest.fixture(scope="module")
def results(ranks: Any) -> list[dict[str, Any]]:
    return ranks(2).run(worked_example.train)


def test_the_page_shows_the_step_of_two_ranks(results: list[dict[str, Any]]) -> None:
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


def test_the_weights_are_those_of_one_process(results: list[dict[str, Any]]) -> None:
    reference = ReferenceMuon(
        {name: lambda weight: [weight] for name in SHAPES}, muon_lr=LR, momentum=MOMENTUM
    )
    weights = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    reference.step(weights, worked_example.gradients())
    for result in results:
        for name, weight in weights.items():
            torch.testing.assert_close(result["weights"][name].double(), weight, rtol=0, atol=1e-6)
