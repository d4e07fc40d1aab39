"""Reinforcement learning with verifiable rewards: does Muon collapse where AdamW does not?

    python benchmarks/rewards.py                     # trains what FOLDER/results.jsonl does not have
    python benchmarks/rewards.py --table             # writes results/rewards.md from results/rewards.jsonl

The task is to add two numbers of two digits, ``47+38=085``; an answer is worth 1 if all three digits are right and 0
otherwise. A GPT of 100,000 parameters learns it from examples (AdamW, 1e-3) until it answers ``success`` of the
held-out problems: 0.4, or 0.1 for rare rewards. From there GRPO: 16 problems in each of 150 rounds, eight answers to
each at temperature 1, advantages normalised within the eight, two updates on them with the ratio clipped to 0.8 to
1.2, a penalty of ``kl`` times the divergence from the start (the k3 estimator), gradients clipped to 1, no decay, a
constant rate without warm-up.

Rates go up in steps of the square root of 5, so 5 and 25 times AdamW's best rate are rates of the list, and
``match_rms_adamw`` gives Muon AdamW's size of update at the same rate. The reward that counts is the probability of the
right answer over the 1,000 held-out problems, which no training has seen: the expected reward without sampling noise.
Entropy and divergence (exact, over all twelve tokens, in nats a token) are of the sampled answers. A run has collapsed
if its last reward is under a tenth of its first, if its entropy is under 0.001 at a reward below the first, or if its
divergence is above 3.

The runs come in the order of ``STAGES``, so that every finished stage is of use. Seconds of one core of an EPYC
(AVX512-BF16): 15 s a run; the first stage of two seeds takes 9 minutes, the second (three more) 14, all of them 1.5
hours. A seed decides about the problems and the answers; all seeds have the same start.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "examples")]

from gpt import GPT, GPTConfig  # noqa: E402  # a script of the examples, not a package

from benchmarks import support  # noqa: E402
from benchmarks.support import Row  # noqa: E402
from benchmarks.training_runs import (  # noqa: E402
    ADAMW,
    BETAS,
    REPOSITORY,
    Estimate,
    agrees,
    estimate,
    optimizer_of,
    read_rows,
    train_missing,
)

RAW = REPOSITORY / "benchmarks" / "results" / "rewards.jsonl"
VOCABULARY = "0123456789+="
CONFIG = GPTConfig(vocab_size=len(VOCABULARY), dim=64, layers=2, heads=4)
PROMPT, ANSWER = 6, 3
"""Tokens of ``47+38=`` and of ``085``."""
HELD_OUT = 1000
ROUNDS, PROBLEMS, GROUP, UPDATES, CLIP = 150, 16, 8, 2, 0.2
MEASURED_EVERY = 10
RATES = tuple(float(f"{1e-5 * 5 ** (power / 2):.3g}") for power in range(9))
"""1e-5 to 6.25e-3; entries two apart have a ratio of 5."""
PAIR = (ADAMW, "Muon, match")


@dataclass(frozen=True)
class Start:
    """Learning from examples until a share of the answers is right."""

    success: float


@dataclass(frozen=True)
class Setting:
    """What is compared: optimizers, rates and seeds from one start with one penalty."""

    success: float
    kl: float


@dataclass(frozen=True)
class Reinforcement:
    """One run of GRPO."""

    success: float
    kl: float
    optimizer: str
    rate: float
    seed: int


STAGES: tuple[tuple[Setting, Sequence[str], Sequence[int]], ...] = (
    (Setting(0.4, 0.04), PAIR, (0, 1)),
    (Setting(0.4, 0.04), PAIR, (2, 3, 4)),
    (Setting(0.1, 0.001), PAIR, (0, 1, 2)),
    (Setting(0.4, 0.04), ("NorMuon, match", "Muon, match, no Nesterov"), (0, 1, 2)),
    (Setting(0.4, 0.001), PAIR, (0, 1, 2)),
    (Setting(0.1, 0.001), PAIR, (3, 4)),
    (Setting(0.4, 0.001), PAIR, (3, 4)),
    (Setting(0.4, 0.04), ("NorMuon, match", "Muon, match, no Nesterov"), (3, 4)),
)


def runs() -> Iterator[Start | Reinforcement]:
    """Yield all runs in the order in which they are trained."""
    starts: set[float] = set()
    for setting, optimizers, seeds in STAGES:
        if setting.success not in starts:
            starts.add(setting.success)
            yield Start(setting.success)
        for seed, rate, optimizer in itertools.product(seeds, RATES, optimizers):
            yield Reinforcement(setting.success, setting.kl, optimizer, rate, seed)


# The task


@cache
def problems() -> tuple[Tensor, Tensor]:
    """Return all problems with their answers, ``(10000, PROMPT + ANSWER)`` int64: for training, and held out."""
    texts = [f"{a:02}+{b:02}={a + b:03}" for a in range(100) for b in range(100)]
    random.Random(0).shuffle(texts)
    tokens = torch.tensor([[VOCABULARY.index(char) for char in text] for text in texts])
    return tokens[HELD_OUT:], tokens[:HELD_OUT]


def rewards_of(answers: Tensor, right: Tensor) -> Tensor:
    """Return 1 for each answer that is right in all digits, else 0: ``(answers,)`` fp32 of ``(answers, ANSWER)``."""
    return (answers == right).all(dim=1).float()


def log_probabilities(model: GPT, sequences: Tensor) -> Tensor:
    """Return those of every token at the positions of the answer, ``(sequences, ANSWER, vocabulary)``."""
    return model.logits(sequences[:, :-1])[:, PROMPT - 1 :].log_softmax(dim=-1)


def of_tokens(logs: Tensor, sequences: Tensor) -> Tensor:
    """Return the logarithms of the probabilities of the answers' own tokens, ``(sequences, ANSWER)``."""
    return logs.gather(2, sequences[:, PROMPT:, None]).squeeze(2)


@torch.no_grad()
def expected_reward(model: GPT) -> float:
    """Return the mean probability of the right answer to the held-out problems."""
    sequences = problems()[1]
    return float(of_tokens(log_probabilities(model, sequences), sequences).sum(dim=1).exp().mean())


@torch.no_grad()
def sample(model: GPT, prompts: Tensor, generator: torch.Generator) -> Tensor:
    """Return the prompts with answers drawn at temperature 1, ``(prompts, PROMPT + ANSWER)``."""
    sequences = prompts
    for _ in range(ANSWER):
        probabilities = model.logits(sequences)[:, -1].softmax(dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        sequences = torch.cat((sequences, drawn), dim=1)
    return sequences


# Training


def advantages_of(rewards: Tensor) -> Tensor:
    """Return rewards minus the mean of their group, over its standard deviation; ``(groups, GROUP)`` each."""
    deviation = rewards.std(dim=1, keepdim=True, correction=0)
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (deviation + 1e-4)


def policy_loss(now: Tensor, then: Tensor, start: Tensor, advantages: Tensor, kl: float) -> Tensor:
    """Return GRPO's loss over tokens (arXiv 2402.03300, equation 3, with one mean over all tokens).

    Args:
        now: Logarithms of the answers' probabilities that are trained, ``(answers, ANSWER)``.
        then: The same when the answers were drawn.
        start: The same of the start.
        advantages: Of the answers, ``(answers, 1)``.
        kl: Weight of the divergence from the start.
    """
    ratio = (now - then).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    divergence = (start - now).exp() - (start - now) - 1
    return (kl * divergence - gain).mean()


def learn(folder: Path, run: Start) -> Row:
    """Learn from examples until the expected reward of the held-out problems is ``success``."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, BETAS, weight_decay=0, fused=True)
    generator, training = torch.Generator().manual_seed(0), problems()[0]
    step, reward = 0, 0.0
    while reward < run.success:
        if step == 20_000:
            raise RuntimeError(f"the expected reward is {reward} after {step} steps")
        batch = training[torch.randint(len(training), (128,), generator=generator)]
        model.zero_grad()
        (-of_tokens(log_probabilities(model, batch), batch).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            reward = expected_reward(model)
    torch.save(model.state_dict(), folder / f"start-{run.success:g}.pt")
    return {"steps": step, "reward": round(reward, 4)}


def reinforce(folder: Path, run: Reinforcement) -> Row:
    """Train by GRPO once; a run whose loss is not finite ends there."""
    state = torch.load(folder / f"start-{run.success:g}.pt")
    model, start = GPT(CONFIG), GPT(CONFIG)
    model.load_state_dict(state)
    start.load_state_dict(state)
    optimizer = optimizer_of(run.optimizer, model, rate=run.rate)
    hidden = [weight for name, weight in model.named_parameters() if "layers" in name and weight.dim() == 2]
    generator, training = torch.Generator().manual_seed(run.seed), problems()[0]
    curve = [[0, round(expected_reward(model), 4), *([None] * 4)]]
    measured: list[tuple[float, float, float, float]] = []
    finite = True
    for number in range(1, ROUNDS + 1):
        chosen = training[torch.randint(len(training), (PROBLEMS,), generator=generator)]
        chosen = chosen.repeat_interleave(GROUP, dim=0)  # (PROBLEMS * GROUP, PROMPT + ANSWER)
        sequences = sample(model, chosen[:, :PROMPT], generator)
        rewards = rewards_of(sequences[:, PROMPT:], chosen[:, PROMPT:])
        advantages = advantages_of(rewards.view(PROBLEMS, GROUP)).view(-1, 1)
        with torch.no_grad():
            logs, start_logs = log_probabilities(model, sequences), log_probabilities(start, sequences)
            entropy = float(-(logs.exp() * logs).sum(dim=-1).mean())
            divergence = float((logs.exp() * (logs - start_logs)).sum(dim=-1).mean())
            then, from_start = of_tokens(logs, sequences), of_tokens(start_logs, sequences)
        for _ in range(UPDATES):
            now = of_tokens(log_probabilities(model, sequences), sequences)
            loss = policy_loss(now, then, from_start, advantages, run.kl)
            finite = finite and math.isfinite(loss.item())
            if not finite:
                break
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = [weight.detach().clone() for weight in hidden]
            optimizer.step()
        if not finite:
            break
        change = [weight.detach() - old for weight, old in zip(hidden, before, strict=True)]
        squares = sum(float(update.square().sum()) for update in change)
        size = math.sqrt(squares / sum(update.numel() for update in change))
        measured.append((float(rewards.mean()), entropy, divergence, size / run.rate))
        if number % MEASURED_EVERY == 0:
            means = (statistics.fmean(values) for values in zip(*measured, strict=True))
            curve.append([number, *(float(f"{value:.4g}") for value in (expected_reward(model), *means))])
            measured = []
    return {"curve": curve, "finite": finite, "reward": curve[-1][1] if finite else 0.0}


# Table

SAMPLED, ENTROPY, DIVERGENCE, SIZE = 2, 3, 4, 5
"""Positions in a point of a curve, after the round and the expected reward; means over the last ten rounds."""


def collapse_of(row: Row) -> str:
    """Return in which of the three ways a run has collapsed, or an empty text."""
    first, last = row["curve"][0][1], row["curve"][-1]
    if not row["finite"]:
        return "not finite"
    if row["reward"] < first / 10:
        return "reward"
    if last[ENTROPY] < 0.001 and row["reward"] < first:
        return "entropy"
    return "divergence" if last[DIVERGENCE] > 3 else ""


def setting_page(setting: Setting, rows: Sequence[Row]) -> list[str]:
    """Return the tables of a setting."""
    by_run: dict[tuple[str, float], dict[int, Row]] = {}
    for row in rows:
        by_run.setdefault((row["optimizer"], row["rate"]), {})[row["seed"]] = row
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    first = rows[0]["curve"][0][1]
    lines = ["", f"## Start {setting.success:g} right, KL {setting.kl:g}", ""]
    lines += [
        f"Reward before: {first:.3f}. Afterwards: reward ± standard error (seeds); entropy; divergence; RMS of an "
        "update over the rate; how many collapsed.",
        "",
    ]

    def cell(name: str, rate: float) -> str:
        finished = list(by_run.get((name, rate), {}).values())
        if not finished:
            return ""
        last = [row["curve"][-1] for row in finished if len(row["curve"]) > 1]
        reward = estimate([row["reward"] for row in finished])
        numbers = [
            statistics.fmean(point[index] for point in last) for index in (ENTROPY, DIVERGENCE, SIZE) if last
        ]
        collapsed = [kind for row in finished if (kind := collapse_of(row))]
        kinds = f" ({', '.join(sorted(set(collapsed)))})" if collapsed else ""
        return "; ".join([str(reward), *(f"{x:.2g}" for x in numbers), f"{len(collapsed)}{kinds}"])

    table = [[f"{rate:g}", *(cell(name, rate) for name in names)] for rate in RATES]
    lines += support.table(["rate", *names], table)
    adamw = {rate: by_run[ADAMW, rate] for rate in RATES if (ADAMW, rate) in by_run}
    if len(adamw) < len(RATES):
        return lines
    best = max(adamw, key=lambda rate: statistics.fmean(row["reward"] for row in adamw[rate].values()))
    lines += ["", f"Reward minus AdamW's, same seeds; AdamW's best rate is {best:g}:", ""]

    def difference(name: str, rate: float, base: float) -> str:
        runs_of_name, base_runs = by_run.get((name, rate), {}), adamw[base]
        pairs = [
            row["reward"] - base_runs[seed]["reward"]
            for seed, row in runs_of_name.items()
            if seed in base_runs
        ]
        if not pairs:
            return ""
        result: Estimate = estimate(pairs)
        return f"{result}: {result.verdict('worse', 'better')}"

    others = [name for name in names if name != ADAMW]
    index = RATES.index(best)
    multiples = [(5 ** (k // 2), RATES[index + k]) for k in (0, 2, 4) if index + k < len(RATES)]
    rows_of_table = [
        [f"{factor} times ({rate:g})", *(difference(name, rate, rate) for name in others)]
        for factor, rate in multiples
    ]
    best_of = {
        name: max(
            (rate for rate in RATES if (name, rate) in by_run),
            key=lambda rate: statistics.fmean(row["reward"] for row in by_run[name, rate].values()),
        )
        for name in others
    }
    rows_of_table.append(
        [
            "both at their best",
            *(f"{difference(name, best_of[name], best)} (at {best_of[name]:g})" for name in others),
        ]
    )
    return [*lines, *support.table(["rate", *others], rows_of_table)]


def page(rows: Sequence[Row]) -> list[str]:
    """Return the page of all settings that have runs."""
    hardware = sorted({f"{row['hardware']}, torch {row['torch']}" for row in rows})
    lines = [
        "# Reinforcement learning with verifiable rewards",
        "",
        f"`python benchmarks/rewards.py`, then `--table`: {len(rows)} runs in [{RAW.name}]({RAW.name}); "
        f"{'; '.join(hardware)}, one thread. Two numbers of two digits are added; GRPO in {ROUNDS} rounds of "
        f"{PROBLEMS} problems with {GROUP} answers, {UPDATES} updates each. Within two standard errors, or "
        "with fewer than three seeds, nothing is called better.",
    ]
    for setting in dict.fromkeys(setting for setting, _, _ in STAGES):
        of_setting = [row for row in rows if row["run"] == Reinforcement.__name__ and agrees(row, setting)]
        if of_setting:
            lines += setting_page(setting, of_setting)
    return lines


def main() -> None:
    """Train what is missing, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".cache" / "rewards")
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--raw", type=Path, default=RAW, help="what --table reads, and where it writes the page"
    )
    args = parser.parse_args()
    if args.table:
        args.raw.with_suffix(".md").write_text("\n".join(page(read_rows(args.raw))) + "\n")
        return

    def train(run: Start | Reinforcement) -> Row:
        return learn(args.folder, run) if isinstance(run, Start) else reinforce(args.folder, run)

    train_missing(runs(), train, args.folder / "results.jsonl")


if __name__ == "__main__":
    main()
