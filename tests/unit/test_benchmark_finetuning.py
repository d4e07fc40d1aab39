"""The studies of fine-tuning and of rewards: their lists of runs, what is trained again, their pages."""

import math
import re
from dataclasses import asdict

import pytest
import torch

from benchmarks import finetuning, rewards, training_runs
from benchmarks.finetuning import BLOCKS, RATES, Cell, FineTuning, Pretraining
from benchmarks.rewards import GROUP, PAIR, Reinforcement, Start
from benchmarks.training_runs import ADAMW

CELL = Cell("1M", "code", "much", "full")


@pytest.mark.parametrize("study", [finetuning, rewards])
def test_every_run_comes_once_and_after_what_it_starts_from(study):
    runs = list(study.runs())
    assert len(set(runs)) == len(runs)
    position = {run: index for index, run in enumerate(runs)}
    for run in runs:
        if isinstance(run, FineTuning):
            assert position[Pretraining(run.size, run.old)] < position[run]
        if isinstance(run, Reinforcement):
            assert position[Start(run.success)] < position[run]


def test_a_run_is_trained_once_and_a_failed_one_again(tmp_path, capfd):
    runs, path = [Start(0.25), Start(0.5)], tmp_path / "results.jsonl"

    def train(run):
        if run.success == 0.5 and not (tmp_path / "again").exists():
            raise RuntimeError("this one fails")
        return {"reward": run.success}

    training_runs.train_missing(runs, train, path)
    rows = training_runs.read_rows(path)
    assert [(row["run"], row["success"], row["reward"]) for row in rows] == [("Start", 0.25, 0.25)]
    assert "failed: Start(success=0.5)" in capfd.readouterr().out
    (tmp_path / "again").touch()
    training_runs.train_missing(runs, train, path)
    assert [row["success"] for row in training_runs.read_rows(path)] == [0.25, 0.5]


def reward_of(run):
    if run.success > 0.5:
        raise RuntimeError("this one fails")
    return {"reward": run.success}


def test_runs_side_by_side_have_a_line_each_and_one_that_fails_stops_no_other(tmp_path, capfd):
    path = tmp_path / "results.jsonl"
    training_runs.train_missing([Start(0.25), Start(0.75), Start(0.5)], reward_of, path, side_by_side=2)
    rows = training_runs.read_rows(path)
    assert sorted((row["run"], row["success"], row["reward"]) for row in rows) == [
        ("Start", 0.25, 0.25),
        ("Start", 0.5, 0.5),
    ]
    printed = capfd.readouterr()
    assert "failed: Start(success=0.75)" in printed.out
    assert "this one fails" in printed.err


def fixture_rows(seeds=3):
    """AdamW's frontier is old = 3 - new; Muon's has 0.1 less of the old text's loss, and ends 0.2 lower."""
    machine = {"hardware": "cpu", "torch": "2"}
    rows = [{"run": "Pretraining", "size": "1M", "text": "code", "decay_from": 4000, "gain": 0.01, **machine}]
    rows[0]["blocks"] = {"code": [1.0] * BLOCKS, "prose": [2.0] * BLOCKS}
    for seed in range(seeds):
        for optimizer, shift in ((ADAMW, 0.0), ("Muon, match", 0.1)):
            for index, rate in enumerate(RATES["full"]):
                new = 2 - (0.1 + 0.2 * shift) * (index + 1) + 0.001 * seed
                run = asdict(FineTuning("1M", "code", "much", "full", optimizer, rate, seed))
                losses = {
                    "new_losses": [new] * BLOCKS,
                    "old_losses": [3 - new - shift + 0.002 * seed] * BLOCKS,
                }
                rows.append({"run": "FineTuning", **run, **losses, "moved": 0.1, **machine})
    return rows


def test_frontiers_are_compared_at_equal_loss_on_the_new_text():
    results = finetuning.CellResults(CELL, fixture_rows())
    assert results.seeds[ADAMW] == results.seeds["Muon, match"] == [0, 1, 2]
    at_equal_loss = results.difference("Muon, match", finetuning.old_loss_at(1.65))
    assert at_equal_loss.mean == pytest.approx(-0.1) and at_equal_loss.verdict() == "better"
    least = results.difference("Muon, match", finetuning.least_new)
    assert least.mean == pytest.approx(-0.02 * 7)
    assert results.difference("Muon, match", finetuning.old_loss_at(1.2)) is None  # AdamW does not get there
    assert finetuning.old_loss_at(1.5)([(1, 2.0, 1.0), (2, 1.8, 1.1), (3, 1.9, 1.2), (4, 1.4, 2.0)]) is None


def test_blocks_of_windows_count_in_the_error():
    rows = fixture_rows()
    for row in rows[1:]:
        if row["optimizer"] != ADAMW:
            row["new_losses"] = [
                loss + (0.4 if block % 2 else -0.4) for block, loss in enumerate(row["new_losses"])
            ]
    least = finetuning.CellResults(CELL, rows).difference("Muon, match", finetuning.least_new)
    # The jackknife of a mean is its standard error.
    deviation = 0.4 * math.sqrt(BLOCKS / (BLOCKS - 1))
    assert least.error == pytest.approx(deviation / math.sqrt(BLOCKS), rel=0.01)
    assert least.verdict() == "no difference"


def test_page_of_fine_tuning():
    text = "\n".join(finetuning.page(fixture_rows()))
    assert "| least prose | -0.1400 ± " in text and ": better |" in text
    assert "too few seeds" in "\n".join(finetuning.page(fixture_rows(seeds=2)))


def reward_rows():
    """AdamW is best at the third rate and never collapses; Muon does at five times of it and more."""
    for seed in range(5):
        for optimizer in PAIR:
            for index, rate in enumerate(rewards.RATES):
                reward = 0.9 - 0.1 * abs(index - 2) + 0.001 * seed
                if optimizer != ADAMW and index > 3:
                    reward = 0.0
                curve = [[0, 0.4, None, None, None, None], [10, reward, 0.4, 0.2, 0.1, 0.2]]
                run = asdict(Reinforcement(0.4, 0.04, optimizer, rate, seed))
                result = {"curve": curve, "finite": True, "reward": reward, "hardware": "cpu", "torch": "2"}
                yield {"run": "Reinforcement", **run, **result}


def test_page_of_rewards():
    text = "\n".join(rewards.page(list(reward_rows())))
    assert f"AdamW's best rate is {rewards.RATES[2]:g}" in text
    assert re.search(rf"\| 5 times \({rewards.RATES[4]:g}\) \| -0\.70\d\d ± .*: worse \|", text)
    assert re.search(rf"\| 1 times \({rewards.RATES[2]:g}\) \| 0\.0000 ± .*: no difference \|", text)
    assert "5 (reward)" in text


def test_rewards_and_advantages():
    answers = torch.tensor([[0, 8, 5], [0, 8, 4], [1, 8, 5]])
    assert rewards.rewards_of(answers, torch.tensor([[0, 8, 5]] * 3)).tolist() == [1, 0, 0]
    some = torch.zeros(2, GROUP)
    some[0, :2] = 1
    advantages = rewards.advantages_of(some)
    assert advantages[0].mean().abs() < 1e-6 and advantages[0].std(correction=0) == pytest.approx(1, abs=1e-3)
    assert not advantages[1].any()


def test_held_out_problems_are_not_trained():
    training, held_out = (set(map(tuple, tokens.tolist())) for tokens in rewards.problems())
    assert len(training) == 9000 and len(held_out) == 1000 and not training & held_out
    texts = ("".join(rewards.VOCABULARY[token] for token in tokens) for tokens in held_out)
    assert all(int(text[:2]) + int(text[3:5]) == int(text[6:]) for text in texts)


def test_clipping_stops_the_gradient_and_the_penalty_pulls_back():
    now = torch.tensor([[0.5], [-0.5], [0.0]], requires_grad=True)
    advantages = torch.tensor([[1.0], [-1.0], [0.0]])
    rewards.policy_loss(now, torch.zeros(3, 1), now.detach(), advantages, kl=0.1).backward()
    assert now.grad[:2].abs().max() == 0  # both ratios are outside, on the side that the advantage asks for
    now.grad = None
    rewards.policy_loss(now, torch.zeros(3, 1), torch.full((3, 1), -1.0), advantages, kl=0.1).backward()
    assert now.grad[2] > 0


@pytest.mark.parametrize("study", [finetuning, rewards])
def test_stored_pages_are_those_of_the_stored_runs(study):
    rows = training_runs.read_rows(study.RAW)
    assert not rows or study.RAW.with_suffix(".md").read_text() == "\n".join(study.page(rows)) + "\n"
