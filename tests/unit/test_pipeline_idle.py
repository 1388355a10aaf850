"""The pipeline benchmark's arithmetic, on steps whose idle share is known."""

import pytest

from benchmarks.pipeline import Computed, formula, idle, replayed

pytestmark = pytest.mark.long  # of the benchmarks, on which no run depends

FORWARD, BACKWARD = 1.0, 2.0  # seconds


def one_step(number: int) -> list[list[Computed]]:
    """1F1B on two ranks without any cost but computing: forward i + 1 of the first stage runs beside
    backward i of the second, backward i of the first beside forward i + 1 of the second."""
    first, second = [], []
    period = FORWARD + BACKWARD
    for i in range(number):
        ahead = i * FORWARD if i < 2 else FORWARD + (i - 1) * period + BACKWARD
        first.append(Computed(0, True, ahead, ahead + FORWARD, FORWARD))
        second.append(Computed(1, True, FORWARD + i * period, FORWARD + i * period + FORWARD, FORWARD))
        second.append(
            Computed(1, False, FORWARD + i * period + FORWARD, FORWARD + (i + 1) * period, BACKWARD)
        )
        back = FORWARD + (i + 1) * period
        first.append(Computed(0, False, back, back + BACKWARD, BACKWARD))
    return [sorted(first, key=lambda one: one.began), second]


@pytest.mark.parametrize("number", [2, 4, 8, 16])
def test_a_step_without_other_costs_has_the_formulas_share(number: int) -> None:
    found = idle(one_step(number))
    assert found["idle"] == pytest.approx(formula(number))
    assert found["replayed"] == pytest.approx(formula(number))
    assert found["last_to_first"] == pytest.approx(1)


def test_other_jobs_do_not_change_the_replay() -> None:
    first, second = one_step(4)
    late = [one._replace(began=one.began + 50, ended=one.ended + 50) for one in second]
    found = idle([first, late])
    assert found["idle"] > formula(4)
    assert found["replayed"] == pytest.approx(formula(4))


def test_a_slower_stage_makes_the_other_wait() -> None:
    first, second = one_step(8)
    second = [one._replace(processor=2 * one.processor) for one in second]
    total = FORWARD + 8 * 2 * (FORWARD + BACKWARD) + BACKWARD
    assert replayed([first, second]) == pytest.approx(total)
