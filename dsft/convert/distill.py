"""Convert the keys of distillation."""

from __future__ import annotations

from dsft.convert.draft import Draft


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
