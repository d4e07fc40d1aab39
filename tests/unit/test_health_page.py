"""``python -m deepspeed_muon health``: findings and the page of a run."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from deepspeed_muon.__main__ import main
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.monitoring.page import findings, read_run, write_page

HEALTHY = {
    "train_loss": lambda x: 5.0 - x / 1000,
    "Train_Samples_lr": lambda x: 0.02,
    "Train_Muon_update_rms": lambda x: 0.2,
    "Train_Muon_orthogonality_error": lambda x: 0.05,
    "Train_Muon_alignment": lambda x: 0.4,
    "Train_Muon_sigma_max": lambda x: 1.15,
    "Train_Muon_stable_rank": lambda x: 20.0,
    "Train_Muon_time_gather": lambda x: 0.1,
    "Train_Muon_time_newton_schulz": lambda x: 0.6,
    "Train_Muon_time_scatter": lambda x: 0.1,
    "Train_Muon_seconds": lambda x: 0.2,
    "Train_Muon_redone": lambda x: 0.0,
    "Train_Muon_failed": lambda x: 0.0,
}


def write_run(folder: Path, **changed) -> Path:
    folder.mkdir(exist_ok=True)
    for name, value in {**HEALTHY, **changed}.items():
        lines = [f"{x},{value(x)}" for x in range(100, 2001, 100)]
        # DeepSpeed repeats the head when a run is resumed, and the positions since the last checkpoint.
        lines = [*lines[:10], "step,value", *lines[8:]]
        folder.joinpath(f"{name}.csv").write_text("\n".join(["step,value", *lines]) + "\n")
    return folder


def levels(folder: Path) -> dict[str, str]:
    return {finding.text: finding.level for finding in findings(read_run(folder))}


def test_a_healthy_run(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert set(levels(folder).values()) == {"good"}
    assert [x for x, _ in read_run(folder)["train_loss"]] == list(range(100, 2001, 100))
    assert main(["health", str(folder)]) == 0
    assert "good  Every orthogonalised matrix passed its check." in capsys.readouterr().out
    assert not list(folder.glob("*.html"))


def test_losses_by_step_and_samples_of_health_have_one_axis(tmp_path):
    """DeepSpeed and health count training samples, 16 a step; a program counts steps, or samples as DeepSpeed does."""
    series = {
        "train_loss": [(step, 2.0 - step / 100) for step in range(1, 101)],
        "eval_loss": [(160, 1.9), (1600, 1.0)],
        "Train_Samples_lr": [(16 * step, 0.02) for step in range(1, 101)],
        "Train_Muon_seconds": [(16 * step, 0.1) for step in (40, 80)],
        "Train_Muon_step": [(16 * step, step) for step in (40, 80)],
    }
    for name, values in series.items():
        lines = [f"{x},{y}" for x, y in values]
        (tmp_path / f"{name}.csv").write_text("\n".join(["step,value", *lines]))
    ends = {name: values[-1][0] for name, values in read_run(tmp_path).items()}
    assert ends.pop("Train_Muon_seconds") == ends.pop("Train_Muon_step") == 80
    assert ends == {"train_loss": 100, "eval_loss": 100, "Train_Samples_lr": 100}
    write_page(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert ">step<" in page and "or sample<" not in page


@pytest.mark.parametrize(
    ("name", "value", "level", "word"),
    [
        ("Train_Muon_failed", 2.0, "bad", "2 updates were left out"),
        ("Train_Muon_redone", 3.0, "look", "3 updates were recomputed in fp32"),
        ("Train_Muon_alignment", -0.1, "bad", "alignment"),
        ("Train_Muon_alignment", math.nan, "bad", "alignment"),
        ("Train_Muon_time_scatter", 0.7, "look", "exchanges take 80%"),
        ("Train_Muon_wire_error_update", 0.02, "look", "wire_error_update"),
        ("Train_Muon_clip_coefficient", 2e-8, "bad", "at a median coefficient of 2e-08. They"),
        ("Train_Muon_update_over_weight", 0.6, "bad", "the rate is too high. Try muon_lr (or lr) / "),
        ("Train_Muon_update_over_weight", 2e-4, "look", "low for pretraining on few tokens. Compare with"),
        ("train_loss", math.nan, "bad", "train_loss is not finite from position 100"),
    ],
)
def test_what_is_not_well_comes_first(name, value, level, word, tmp_path):
    results = findings(read_run(write_run(tmp_path / "run", **{name: lambda x: value})))
    assert results[0].level == level and word in results[0].text, results


def test_updates_are_compared_with_adamw_where_both_have_one_rate(tmp_path):
    """25 times AdamW's is the 5 times the root of the width of some configurations; two rates are no mistake."""
    changes = {"Train_Muon_update_over_adamw": lambda x: 25.0, "Train_Samples_muon_lr": lambda x: 1e-5}
    one_rate = write_run(tmp_path / "one", **changes, Train_Muon_two_rates=lambda x: 0.0)
    assert any("takes AdamW's rate / 25" in text for text in levels(one_rate))
    # Also a resumed run at the end of a schedule, where all groups have one rate.
    changes["Train_Samples_adam_lr"] = changes["Train_Samples_muon_lr"]
    two_rates = write_run(tmp_path / "two", **changes, Train_Muon_two_rates=lambda x: 1.0)
    assert set(levels(two_rates).values()) == {"good"}


def test_what_was_wrong_before_the_last_sample(tmp_path):
    """The last sample alone was judged, and of an event that it does not have an earlier one."""

    def judged(name, **changed):
        folder = write_run(tmp_path / name, Train_Muon_step=lambda x: x, **changed)
        return {finding.key: finding for finding in findings(read_run(folder)) if finding.level != "good"}

    # 1. Clipped to nothing until step 500, then gradient_clipping was unset, and clipping ends there.
    folder = write_run(tmp_path / "unset", Train_Muon_step=lambda x: x)
    for name, value in (("clip_coefficient", 1e-8), ("clipped", 1.0), ("update_over_weight", 0.5)):
        rows = [f"{x},{value * x}" for x in range(100, 501, 100)]
        (folder / f"Train_Muon_{name}.csv").write_text("\n".join(["step,value", *rows]))
    with (folder / "Train_Muon_sigma_max.csv").open("a") as file:
        file.write("99999,1.0\n")  # a damaged position is no sample
    results = {finding.key: finding for finding in findings(read_run(folder))}
    assert "update_over_weight" not in results and "orthogonality error" in results["line"].text
    assert results["clip_coefficient"].level == "bad"
    assert "at step 100, the worst of 5 such samples of 5" in results["clip_coefficient"].text
    # 2. Nine of ten samples: 95 % skipped at step 700.
    results = judged("skipped", Train_Muon_skipped=lambda x: 0.0 if x > 1800 else 0.95 if x == 700 else 0.9)
    assert results["skipped"].level == "bad" and "95% of the steps" in results["skipped"].text
    assert "at step 700, the worst of 18 such samples of 20" in results["skipped"].text
    # 3. A loss scale that was too large at first is worth a look.
    assert judged("first", Train_Muon_skipped=lambda x: 0.4 * (x == 100))["skipped"].level == "look"
    # 4. Twenty steps without gradients, which are more in the next sample; and others long after.
    results = judged(
        "stalled",
        Train_Muon_clip_stalled=lambda x: {500: 30, 600: 60, 1500: 25}.get(x, 0),
        Train_Muon_clip_coefficient=lambda x: 1e-7 if x == 600 else 1.0,
    )
    assert set(results) == {"clip_coefficient", "clip_stalled"}
    assert "at step 1500, the worst of 1 such samples" in results["clip_stalled"].text
    # 5. The last sample is of a skipped step, which measured no matrix.
    folder = write_run(
        tmp_path / "last", Train_Muon_step=lambda x: x, Train_Muon_update_over_weight=lambda x: 0.5
    )
    for name in ("update_rms", "update_over_weight"):
        path = folder / f"Train_Muon_{name}.csv"
        path.write_text(
            "\n".join(line for line in path.read_text().splitlines() if not line.startswith("2000,"))
        )
    assert main(["health", str(folder)]) == 1


def test_failures_before_a_restart_count(tmp_path):
    """The counters began again at 0, and the last sample said that every matrix had passed its check."""
    failed = {"Train_Muon_failed": lambda x: 2.0 * (x < 800), "Train_Muon_redone": lambda x: 3.0 * (x < 800)}
    found = levels(write_run(tmp_path / "run", **failed))
    assert found["2 updates were left out because they were wrong in fp32 too."] == "bad"
    assert any(text.startswith("3 updates were recomputed in fp32") for text in found)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    for name, last in (("train_loss", "3,"), ("val_loss", "3")):
        (tmp_path / f"{name}.csv").write_text(f"step,loss\n1,2.0\n2,1.0\n{last}")
    # in the exponent of a number
    (tmp_path / "Train_Muon_seconds.csv").write_text("step,seconds\n1,2.0\n2,1.0\n3,3.2e-")
    assert set(map(tuple, read_run(tmp_path).values())) == {((1, 2.0), (2, 1.0))}


@pytest.mark.parametrize("value", ["nan", "inf", "1e300"])
def test_steps_that_are_no_numbers(value, tmp_path):
    """They ended in a ValueError without the name of the file."""
    folder = write_run(tmp_path)
    (folder / "Train_Muon_step.csv").write_text(f"step,value\n100,100\n200,{value}\n")
    assert findings(read_run(folder))
    (folder / "loss.csv").write_text(f"step,value\n{value},1.0\n200,1.0\n")
    if value != "1e300":
        with pytest.raises(ConfigError, match=r"loss\.csv is not a file"):
            read_run(folder)


def test_a_run_without_samples_says_so(tmp_path):
    (tmp_path / "train_loss.csv").write_text("step,loss\n1,2.0\n2,1.0\n")
    assert "look" in levels(tmp_path).values()
    assert any("no samples of health" in text for text in levels(tmp_path))


def test_folders_without_a_run_are_told(tmp_path, capsys):
    write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"Its folders run have some.*csv_monitor"):
        read_run(tmp_path)
    (tmp_path / "notes.csv").write_text("name;value\nx;1\n")
    with pytest.raises(ConfigError, match=r"notes\.csv is not a file of DeepSpeed's csv_monitor"):
        read_run(tmp_path)
    (tmp_path / "run" / "health.html").mkdir()  # a file that cannot be written
    for folder, said in (("nowhere", "has no CSV file"), ("run", "Is a directory")):
        assert main(["health", "--html", str(tmp_path / folder)]) == 2
        assert said in capsys.readouterr().err


def test_the_page(tmp_path):
    """All of it is in one file, and names of files cannot write into it."""
    folder = write_run(tmp_path / "a <run>", **{"loss_<b>": lambda x: 1.0 / x})
    assert main(["health", "--html", str(folder)]) == 0
    text = (folder / "health.html").read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles[:3] == ["Loss", "Where the step&#x27;s time goes", "Seconds of the inner step"]
    assert titles[-1] == "All numbers"
    assert "a &lt;run&gt;" in text and text.count("loss_&lt;b&gt;") == 3 and "loss_<b>" not in text
    assert not re.search(r"(src|href)=\"(?!#)", text.replace("xlink:", ""))
