"""A run with noise, several evaluation sets and its best checkpoints, in one go and in two."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import records, trained, write_spec

HELD_OUT = "builtin:quickstart-heldout"
ASKED = (
    "parallel.zero_stage=2",
    "train.neftune_alpha=5",
    f"data.eval=[{{path: '{HELD_OUT}', name: a}}, {{path: '{HELD_OUT}', name: b}}]",
    "train.eval_every=null",
    "checkpoint.every=1",
    "checkpoint.keep_last=1",
    "checkpoint.keep_best=1",
    "optim.lr_scheduler_type=constant",  # whatever max_steps is
    "optim.warmup_steps=null",
    "optim.scale_with_batch=linear",
    "optim.base_batch_size=6",
)


def test_resumed_run_equals_the_whole_run(tmp_path: Path) -> None:
    for folder in ("whole", "halves"):
        (tmp_path / folder).mkdir()
    trained(write_spec(tmp_path / "whole"), *ASKED, "train.max_steps=4")
    spec = write_spec(tmp_path / "halves")
    output = trained(spec, *ASKED, "train.max_steps=2")
    assert "learning rate: 0.003 × (12 ÷ 6) = 0.006" in output
    output = trained(spec, *ASKED, "train.max_steps=4")
    whole, halves = (tmp_path / folder / "runs" / "small" for folder in ("whole", "halves"))
    for key in ("train/loss", "train/grad_norm", "eval/loss", "eval/a/loss", "train/learning_rate"):
        assert records(halves, key) == records(whole, key), key
    losses = records(whole, "eval/loss")
    assert list(losses) == [1, 2, 3, 4]  # the step of each checkpoint
    assert losses == records(whole, "eval/a/loss") == records(whole, "eval/b/loss")
    assert set(records(whole, "train/learning_rate").values()) == {0.006}

    best = min(losses, key=lambda step: losses[step])
    for run in (whole, halves):
        assert (run / "checkpoints" / "best").read_text() == f"step-{best}\n"
        kept = {path.name for path in (run / "checkpoints").glob("step-*")}
        assert kept == {f"step-{best}", "step-4"}
    assert f"checkpoints/step-{best}, held-out loss" in output
