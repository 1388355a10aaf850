"""fp16's loss scale: how it moves, and when skipped steps are a failure."""

import pytest
import torch

from dsft.data.steps.batch import GlobalStep
from dsft.engine.api import GROWTH_STEPS, INITIAL_SCALE, LOWEST_SCALE, LossScale, StepResult
from dsft.engine.gradients import Scaler
from dsft.run.loop import Progress, loss_scale_record

BATCH = GlobalStep((), {"tokens": 1}, 1, 0.5, (0,))


def result(applied: bool, scale: LossScale | None) -> StepResult:
    return StepResult(torch.zeros(1), 0.0, applied, scale)


def test_it_halves_with_an_overflow_and_doubles_after_enough_steps_without_one() -> None:
    scale = LossScale()
    assert scale.after(applied=False) == LossScale(INITIAL_SCALE / 2)
    for _ in range(GROWTH_STEPS - 1):
        scale = scale.after(applied=True)
    assert scale == LossScale(INITIAL_SCALE, GROWTH_STEPS - 1)
    assert scale.after(applied=False) == LossScale(INITIAL_SCALE / 2, 0)
    assert scale.after(applied=True) == LossScale(INITIAL_SCALE * 2, 0)
    assert LossScale(LOWEST_SCALE).after(applied=False) == LossScale(LOWEST_SCALE)


def test_the_scale_of_a_step_stays_until_the_step_is_done() -> None:
    scaler = Scaler()
    scaler.update_scale(True)
    assert scaler.loss_scale == scaler.cur_scale == INITIAL_SCALE
    assert scaler.scale_loss(torch.tensor(2.0)) == 2 * INITIAL_SCALE
    assert scaler.step(applied=False) == LossScale(INITIAL_SCALE)
    assert scaler.loss_scale == INITIAL_SCALE / 2


def test_an_overflow_is_a_failure_only_at_the_lowest_scale() -> None:
    progress = Progress()
    scale = LossScale(4.0)
    counted = []
    for _ in range(5):
        progress = progress.after(BATCH, result(False, scale))
        counted.append(progress.nonfinite_in_a_row)
        assert progress.loss_scale is not None
        scale = LossScale(progress.loss_scale, progress.loss_scale_steps)
    assert counted == [0, 0, 1, 2, 3]
    assert progress.applied_steps == 0 and progress.step == 5
    progress = progress.after(BATCH, result(True, scale))
    assert (progress.nonfinite_in_a_row, progress.loss_scale, progress.loss_scale_steps) == (0, 1.0, 1)


def test_other_precisions_have_none() -> None:
    progress = Progress().after(BATCH, result(False, None))
    assert progress.nonfinite_in_a_row == 1 and progress.loss_scale is None
    assert loss_scale_record(result(True, None)) == {}
    assert loss_scale_record(result(True, LossScale(8.0))) == {"train/loss_scale": pytest.approx(8.0)}
