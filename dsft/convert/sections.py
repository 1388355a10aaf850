"""Convert the section of a task, such as `dpo`, from the keys that the other tools have for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from dsft.convert.draft import Draft, mistake
from dsft.errors import SpecError
from dsft.spec.aliases import OTHER_NAMES
from dsft.spec.document import quote
from dsft.spec.losses import PREFERENCE_LOSSES
from dsft.spec.schema import Kto

KTO_LOSSES = get_args(Kto.model_fields["loss_type"].annotation)
METHODS = {"dpo": "sigmoid", "ipo": "ipo", "cpo": "sigmoid", "simpo": "simpo", "orpo": "orpo"}
"""Method by which another tool trains on pairs -> its loss where no other is named."""
_CPO = "CPO has no reference, and dsft offers it with the loss simpo alone (docs/limits.md)"


def preferences(
    draft: Draft, key: str, method: str = "dpo", named: str = "", beta: str | None = None
) -> None:
    """Convert section dpo. key: names the loss, alone or in a list; method: see `METHODS`; named: the key
    that names it; beta: the tool's keys for it. The reference is another model, or, with an adapter, the
    model without it.

    CPO and SimPO are one trainer, which adds cpo_alpha × the next-token loss on chosen answers. ORPO has one
    loss, whatever other keys say.
    """
    if method not in METHODS:
        reason = "is not for task dpo; leave it out, or choose another --task"
        raise mistake(named or key, f"{quote(method)} {reason}")
    given, is_cpo = draft.get(key) or METHODS[method], method in ("cpo", "simpo")
    losses = given if isinstance(given, list) else [given]
    source = draft.source(key) if draft.get(key) or not named else named
    if method == "orpo":
        draft.leave(key, "orpo has one loss")
        losses, source = ["orpo"], named
    if len(losses) > 1 or losses[0] not in PREFERENCE_LOSSES:
        raise _other_loss(key, losses, "dpo", PREFERENCE_LOSSES)
    if is_cpo and losses != ["simpo"]:
        where, value = (key, losses[0]) if draft.is_given(key) or not named else (named, method)
        raise mistake(where, f"{quote(value)}: {_CPO}; set {key}: simpo")
    draft.put("dpo.loss_type", losses[0], source)
    draft.carry("dpo.beta", beta)
    loss = PREFERENCE_LOSSES[losses[0]]
    if loss.smooths:
        draft.carry("dpo.label_smoothing")
    else:
        draft.leave(OTHER_NAMES["dpo.label_smoothing"], f"{losses[0]} has no label smoothing")
    if loss.nll_weight:
        draft.leave("pref_ftx rpo_alpha cpo_alpha", f"the loss {losses[0]} has this term with weight 1")
    else:
        draft.defaults |= {"cpo_alpha": 1.0}
        draft.carry("dpo.sft_weight", "cpo_alpha" if is_cpo else "pref_ftx rpo_alpha")
    if losses == ["simpo"]:
        draft.carry("dpo.simpo_gamma", note="a margin of rewards in both")
    else:
        draft.leave("simpo_gamma", "for the loss simpo only")
    if loss.reference:
        _reference(draft, "dpo")
    else:
        draft.leave("ref_model ref_model_name_or_path", "this loss has no reference")


def labeled_answers(draft: Draft, key: str | None = None) -> None:
    """Convert section kto. key: names the loss, kto where it is not given; None: the tool has no other. The
    reference is as in `preferences`."""
    if key is not None and (loss := draft.get(key)) is not None:
        if loss not in KTO_LOSSES:
            raise _other_loss(key, [loss], "kto", KTO_LOSSES)
        draft.put("kto.loss_type", loss, key)
    draft.carry("kto.beta", OTHER_NAMES["dpo.beta"], "the divergence is estimated over the whole step here")
    draft.carry_all("kto.desirable_weight", "kto.undesirable_weight")
    draft.leave("pref_ftx", "kto has no next-token term here")
    _reference(draft, "kto")


def rewards(draft: Draft) -> None:
    """Convert section reward."""
    draft.carry("reward.center_rewards_coefficient")
    draft.leave("num_labels task_type", "a reward model has one label")
    draft.leave("model_type", "the class follows from the task")
    draft.comments["task"] += "; the export is a model …ForSequenceClassification, without a bias"


def classes(draft: Draft) -> None:
    """Convert section classify. Labels get the names of transformers' default; rows have their numbers."""
    kind, count = draft.get("problem_type"), int(draft.number("num_labels"))
    if kind not in (None, "single_label_classification") or count < 2:
        key = "num_labels" if count < 2 else "problem_type"
        raise mistake(key, "task classify needs rows with one of two or more labels")
    names = [f"LABEL_{number}" for number in range(count)]
    note = "num_labels; name them as you like, in their order"
    draft.put("classify.labels", names, f"{note}; problem_type is always this one" if kind else note)


def distillation(draft: Draft, *, cools: bool) -> None:
    """Convert section distill, from the keys of GKD, which TRL and ms-swift share. cools: the loss uses the
    temperature, which else is that of generated answers alone."""
    draft.defaults |= {"beta": 0.5, "temperature": 0.9, "lmbda": 0.5}
    draft.carry("distill.reference_model")
    beta = draft.number("beta")
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    draft.put("distill.loss_type", kind, draft.source("beta"))
    if kind == "jsd":
        draft.put("distill.beta", beta, draft.source("beta"))
    if cools:
        draft.carry("distill.temperature", "temperature")
    else:
        draft.leave("temperature", "it is that of generated answers there; the loss takes 1")
    alpha = draft.number("sft_alpha")
    note = "of a sum of 1; of 1 + sft_alpha there" if alpha else "the divergence alone, as there"
    draft.put("distill.weight", round(1 / (1 + alpha), 6), note)
    if draft.carry("distill.top_k", note="the other tokens count as one here, not at all there") is None:
        draft.put("distill.top_k", 64, "all tokens are compared one by one there (docs/distill.md)")
    if share := draft.number("lmbda"):
        draft.read.add("lmbda")
        draft.left["lmbda"] = (
            f"{share:g}: there this part of the steps trains on answers that the student generates; here all "
            "train on those of the rows"
        )
    draft.leave("seq_kd max_new_tokens max_completion_length", "no answers are generated")
    draft.leave("disable_dropout", "dropout is that of the model's config")


SECTIONS: Mapping[str, Callable[..., None]] = {
    "dpo": preferences, "kto": labeled_answers, "reward": rewards, "classify": classes,
    "distill": distillation,
}  # fmt: skip


def section(draft: Draft, **options: Mapping[str, Any]) -> None:
    """Convert the section of the draft's task. options: task whose section the tool has -> arguments of its
    function in `SECTIONS`."""
    task = draft.values["task"]
    if task in options:
        SECTIONS[task](draft, **options[task])


def _other_loss(key: str, losses: Sequence[Any], task: str, offered: Iterable[str]) -> SpecError:
    found = ", ".join(map(str, losses))
    return mistake(key, f"{quote(found)} is not offered; task {task} takes one of {', '.join(offered)}")


def _reference(draft: Draft, section: str) -> None:
    other = draft.carry(f"{section}.reference_model", OTHER_NAMES["dpo.reference_model"])
    if other is None and draft.has("model.lora"):
        draft.put(f"{section}.reference", "adapter", "the model without its adapter, as there")
