"""Define the properties of each preference loss; `dsft.objective.preference` has its formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LossType = Literal["sigmoid", "robust", "ipo", "hinge", "apo_zero", "simpo", "orpo"]


@dataclass(frozen=True)
class PreferenceLoss:
    """Properties of a preference loss.

    reference   it compares the policy with a frozen reference
    averages    it compares log-probabilities per token, not the sums of answers
    per_token   rewards and log-probabilities are reported per token, too
    smooths     it takes dpo.label_smoothing
    nll_weight  weight of the next-token loss on chosen answers that belongs to it
    """

    reference: bool = True
    averages: bool = False
    per_token: bool = False
    smooths: bool = False
    nll_weight: float = 0.0


PREFERENCE_LOSSES: dict[LossType, PreferenceLoss] = {
    **dict.fromkeys(("sigmoid", "robust"), PreferenceLoss(smooths=True)),
    "ipo": PreferenceLoss(averages=True),
    **dict.fromkeys(("hinge", "apo_zero"), PreferenceLoss()),
    "simpo": PreferenceLoss(reference=False, averages=True, per_token=True),
    "orpo": PreferenceLoss(reference=False, averages=True, per_token=True, nll_weight=1.0),
}
