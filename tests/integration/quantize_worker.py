"""One rank of the tests of weights in 4 bits: trains adapters on them in several layouts, and compares losses
and gradients with a plain loop over transformers' own 4-bit model with peft's adapters.

    python quantize_worker.py FOLDER CASES      CASES: a list of the keywords of `compare`, as JSON

FOLDER has the models by the names that cases give (`of`).

Rank 0 prints, per case, how far apart they are.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from dsft.dist.sequence import exchange_of
from dsft.dist.world import World
from dsft.engine.build import build_engine
from dsft.engine.frozen import FrozenEngine
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.model.attention import attend_per_segment
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts, config_around
from dsft.model.policy import Policy
from dsft.model.quantize import QuantizedLinear
from dsft.model.stacked import StackedExperts, peft_name, to_peft
from dsft.model.weights import DTYPES
from dsft.objective.api import means
from dsft.plan.cut import balanced
from dsft.plan.ds_config import deepspeed_config
from dsft.rank.environment import detect
from dsft.reference import model as reference_model
from dsft.reference.refer import refer_to_engine
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec
from dsft.system.process import end
from tests.parity import plain
from tests.parity import worker as parity
from tests.parity.cases import Case
from tests.parity.worker import keep_gradients, merge, relative
from tests.process_groups import own_groups
from tests.specs import minimal_spec

FACTS = TokenFacts(67, None, None, None)
LORA = {"rank": 4, "alpha": 8.0}
RATE, STEPS, LAYERS = 0.1, 3, 3
LINEAR = nn.functional.linear
TEXT = "language_model"  # the text model's name in a multimodal one


def main(folder: str, cases: str) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    reference_model.reference_config = shards_all(reference_model.reference_config)
    torch.set_num_threads(1)
    launched = detect(os.environ)
    world = join(launched, Layout(launched.world_size, 1))
    if any("split" in case for case in json.loads(cases)):  # a group that outlives the cases
        exchange_of(dataclasses.replace(world, layout=Layout(world.world_size, 1, world.world_size)))
    for case in json.loads(cases):
        layout = Layout(launched.world_size, case.get("stages", 1), case.get("split", 1))
        with own_groups():
            found = compare(folder, dataclasses.replace(world, layout=layout), **case)
        if world.rank == 0:
            print("CASE " + json.dumps({"case": case} | found), flush=True)
    world.close()


def compare(  # noqa: PLR0913, PLR0915, PLR0917  a case
    folder: str,
    world: World,
    zero: int = 0,
    stages: int = 1,
    packed: bool = False,
    task: str = "pretrain",
    checkpointing: bool = False,
    precision: str = "fp32",
    live: bool = False,
    of: str = "model",
    eager: bool = False,
    targets: Any = "all-linear",
    quantize: str | None = "nf4",
    dora: bool = False,
    split: int = 1,
    offload: bool = False,
    hpz: int = 1,
) -> dict[str, Any]:
    keys = {"name_or_path": f"{folder}/{of}", "gradient_checkpointing": checkpointing}
    keys |= {"lora": LORA | {"target_modules": targets, "use_dora": dora}, "quantize": quantize}
    keys |= {"experts": {"implementation": "eager"}} if eager else {}
    parallel: dict[str, Any] = {"zero_stage": zero, "pipeline_stages": stages, "sequence_parallel": split}
    parallel |= {"zero_hpz_partition_size": hpz}
    parallel |= {"offload_parameters": {"device": "cpu"}} if offload else {}
    spec = make_spec(keys, parallel, task, precision, "live" if live else "adapter")
    config = deepspeed_config(spec, batch_sizes(spec.train, world.layout.data_parallel))
    if zero == 3:  # else so small a model is kept whole on every rank
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    cut = balanced([1] * LAYERS, stages)
    keep = sharding_for(config, world)
    policy = build_model(spec.model, FACTS, 0, DTYPES[precision], Part(world.stage, cut, keep))
    if packed or split > 1:
        attend_per_segment(policy.causal_lm, "auto", 32, exchange=exchange_of(world))
    weights = merge(world.gather({} if zero == 3 else packed_weights(policy.causal_lm)))
    model = nn.Module() if world.rank else plain_model(spec)  # rank 0 alone compares
    frozen: list[FrozenEngine] = []
    learned = task_of(spec, packed, model, world, frozen)
    engine: Any = build_engine(policy, spec, config, world, learned.objective)
    gradients, apart = keep_gradients(engine), []
    steps = learned.made(0, (2,) * STEPS, world.layout.data_parallel, FACTS.vocab_size)
    batches, refer = learned.shares(steps), learned.refer(policy, engine)
    if live and task != "distill":
        frozen.append(reference_model.open_reference(spec, FACTS, world).engine)
        own = refer_to_engine(frozen[0])
        apart = max_apart(refer(batches[0]), own(batches[0]))
        refer = own
    apart = [one for part in world.gather(apart) for one in part]
    found: list[float] = []
    for number, step in enumerate(steps):
        run = functools.partial(engine.first_step, applied_steps=number) if number < 2 else engine.step
        result = run(refer(batches[number]), learned.counts(step), RATE)
        found.append(means(learned.objective, world.sum(result.sums), learned.counts(step), "")["/loss"])
    gathered = [as_in_peft(merge(world.gather(step))) for step in gradients]
    for one in frozen:
        one.close()
    engine._engine.destroy()
    nn.functional.linear = LINEAR  # ZeRO 3 leaves its own, which the plain loop must not use
    if world.rank:
        return {}
    outcome, expected = [], []
    optimizer = torch.optim.SGD(plain.trained(model).values(), lr=RATE)
    for step in steps:
        outcome.append(plain.backward(model, learned.losses, step))
        expected.append({plain_name(name): g for name, g in plain.gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": max(abs(a - b) / b for a, b in zip(found, outcome, strict=True)),
        "gradients": max(relative(a, b) for a, b in zip(gathered, expected, strict=True)),
        "references": max(apart, default=0.0),
        "moved": abs(outcome[0] - outcome[-1]),
        "other_weights": different(weights, model) if weights else None,
    }


def task_of(
    spec: Spec, packed: bool, model: nn.Module, world: World, frozen: list[FrozenEngine]
) -> parity.Task:
    """What is learned, as in `tests/parity`: with the policy's start as reference, or a live teacher in 4
    bits, whose engine is added to `frozen`. model: the plain loop's."""
    labels: Any = spec.task if spec.task in ("kto", "classify") else "none"
    reference: Any = "adapter" if spec.dpo or spec.kto else "none"
    teacher: Any = "live" if spec.distill else "none"
    case = Case("zero0", world.world_size, "sgd", "varying", packed=packed, reference=reference)
    case = dataclasses.replace(case, labels=labels, reward=spec.reward is not None, teacher=teacher)
    if spec.distill is None:
        return parity.task_of(case, spec, model, world)

    def opened() -> tuple[Policy, FrozenEngine]:
        found = reference_model.open_reference(spec, FACTS, world)
        frozen.append(found.engine)
        return found.policy, found.engine

    dtype, form = DTYPES[spec.train.precision], spec.distill.reference_quantize
    folder = str(spec.distill.reference_model)
    teacher = nn.Module() if world.rank else of_transformers(folder, dtype, form)
    return parity.distilled(case, spec.distill, world, teacher, opened)


def max_apart(ours: Any, theirs: Any) -> list[float]:
    """How far the references of each micro-batch with pairs are apart; none where another stage has them."""
    found = [(a.answers.reference, b.answers.reference) for a, b in zip(ours, theirs, strict=True)]
    return [float((a - b).abs().max()) for a, b in found if a is not None and a.numel()]


def shards_all(config_of: Any) -> Any:
    """The reference's configuration, in which ZeRO 3 shards small weights too."""

    def changed(*arguments: Any) -> Any:
        config = config_of(*arguments)
        if config["zero_optimization"]["stage"] == 3:
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    return changed


def packed_weights(causal_lm: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{own}".replace(".base_layer", "").removesuffix(".weight"): parameter.view(
            torch.uint8
        ).clone()
        for name, module in causal_lm.named_modules()
        if isinstance(module, (QuantizedLinear, StackedExperts))
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 1 and own != "bias"
    }


def different(weights: dict[str, Tensor], model: Any) -> list[str]:
    """The names of the weights whose bytes are not those of bitsandbytes."""
    names, wrong = (
        set(model.bytes),
        [n for n, ours in model.bytes.items() if not torch.equal(ours, weights[n])],
    )
    for name, module in model.named_modules():
        if type(module).__name__ != "Linear4bit" or "lora" in name or not name.endswith("base_layer"):
            continue
        plainly = plain_name(name)
        names.add(plainly)
        if not torch.equal(own_bytes(module.weight.data, module.weight.quant_state), weights[plainly]):
            wrong.append(plainly)
    assert names == weights.keys(), names ^ weights.keys()
    return wrong


def own_bytes(data: Tensor, state: Any) -> Tensor:
    """What dsft stores of what bitsandbytes has of a matrix."""
    parts = [data, state.absmax, state.state2.absmax, state.offset]
    values, scales, *floats = [part.reshape(-1).view(torch.uint8) for part in parts]
    return torch.cat(
        [values, scales, torch.zeros(-(len(values) + len(scales)) % 4, dtype=torch.uint8), *floats]
    )


def quantize_experts(model: nn.Module) -> dict[str, Tensor]:
    """Replace each expert's matrix, which transformers leaves as it is, by what bitsandbytes makes of it.
    Return the bytes, by the name of the parameter."""
    from bitsandbytes import functional  # after dsft has imported it

    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            stored = [
                functional.quantize_4bit(one, compress_statistics=True, quant_type="nf4")
                for one in parameter.data
            ]
            for one, whole in zip(parameter.data, stored, strict=True):
                one.copy_(functional.dequantize_4bit(*whole))
            found[name] = torch.cat([own_bytes(*whole) for whole in stored])
    return found


def plain_model(spec: Spec) -> Any:
    """The same adapters on transformers' 4-bit model."""
    folder, has_scores = str(spec.model.name_or_path), spec.model.head == "score"
    dtype, scores = DTYPES[spec.train.precision], max(1, len(spec.model.labels)) if has_scores else 0
    from peft import LoraConfig, get_peft_model  # after dsft has imported bitsandbytes

    model = of_transformers(folder, dtype, spec.model.quantize, scores)
    own = quantize_experts(model) if spec.model.quantize else {}
    trained = build_model(spec.model, FACTS, 0, dtype).named_trained()
    in_lora = {name: p for name, p in trained.items() if "lora_" in name}
    targets: Any = [*{name.split(".")[-3] for name, p in in_lora.items() if p.ndim == 2}]
    if is_whole(folder):  # whose tower has layers of these names too
        targets = rf".*\.{TEXT}.*\.({'|'.join(targets)})"
    stacked = [*{name.split(".")[-3] for name, p in in_lora.items() if p.ndim == 3}]
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=targets,
        target_parameters=stacked,
        task_type=None if has_scores else "CAUSAL_LM",
        use_dora=spec.model.lora.use_dora,
    )
    ours = as_in_peft(trained)
    adapted = get_peft_model(model, lora)
    adapted.bytes = own
    if has_scores:  # trained in full
        adapted.base_model.model.score.requires_grad_(True)
    theirs = {plain_name(name): p for name, p in plain.trained(adapted).items()}
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            assert "magnitude" not in name or torch.equal(parameter, ours[name]), name
            parameter.copy_(ours[name])
    return adapted.train()


def of_transformers(folder: str, dtype: torch.dtype, form: str | None, scores: int = 0) -> Any:
    """The model of a folder in 4 bits. scores: how many its last layer gives; 0: it is over the
    vocabulary."""
    auto_class: Any = AutoModelForMultimodalLM if is_whole(folder) else AutoModelForCausalLM
    keys: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    if scores:
        auto_class = AutoModelForSequenceClassification
        keys |= {"num_labels": scores}
    if form:
        keys["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=form,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=["lm_head", "score"],
        )
    return auto_class.from_pretrained(folder, **keys).train()  # eval packs weights again on some CPUs


def is_whole(folder: str) -> bool:
    return config_around(folder) is not None


def plain_name(name: str) -> str:
    """Of peft's two adapters of a module of experts, the inner one keeps its base_layer."""
    name = name.removeprefix("base_model.model.").replace(".default", "").replace(f".{TEXT}.", ".")
    name = name.replace("magnitude_vector.weight", "magnitude_vector")
    return name if "base_layer.lora" in name else name.replace(".base_layer", "")


def as_in_peft(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    return {peft_name(name, shapes): to_peft(name, value) for name, value in values.items()}


def make_spec(
    keys: dict[str, Any], parallel: dict[str, Any], task: str, precision: str, reference: str
) -> Spec:
    is_offloaded = parallel["zero_stage"] == 3 and parallel["zero_hpz_partition_size"] == 1
    offloaded = {"reference_offload": "cpu"} if is_offloaded and reference == "live" else {}
    sections: dict[str, Any] = {
        "dpo": {"reference": reference} | offloaded,
        "kto": {"beta": 0.4, "reference": reference} | offloaded,
        "reward": {"center_rewards_coefficient": 0.3},
        "classify": {"labels": parity.LABELS},
        "distill": {"reference": "live", "top_k": FACTS.vocab_size, "temperature": 1.5, "weight": 0.7}
        | {"reference_model": str(Path(keys["name_or_path"]).with_name("qwen")), "reference_quantize": "nf4"}
        | offloaded,
    }
    own: dict[str, Any] = {task: sections[task]} if task in sections else {}
    train = {"micro_batch_size": 2, "accumulation_steps": 2, "precision": precision, "max_grad_norm": 0.0}
    return minimal_spec(
        task, model=keys, parallel=parallel, train=train,
        optim={"name": "sgd", "learning_rate": 1.0, "weight_decay": 0.0}, **own,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
    end(0)
