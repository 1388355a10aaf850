"""`dsft/train.py`, with a fault: planted.py FAULT SPEC [key=value …]"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dsft.checkpoint.read import CheckpointReader
from dsft.data.render import masks
from dsft.data.steps import collate, steps
from dsft.data.steps.batch import NO_TARGET, MicroBatch, Segments
from dsft.engine import frozen, initialize, optimizer, pipeline, zero
from dsft.model import policy
from dsft.objective import api, preference
from dsft.reference import model
from dsft.run import trainer
from dsft.tasks import api as tasks
from dsft.tasks import preference as preferences
from dsft.train import main


def mean_of_micro_batches() -> None:
    """Divide each micro-batch's loss by its own count, and take the mean over them."""
    step, sums = zero.ZeroEngine.step, zero.ZeroEngine._sums

    def stepped(
        self: zero.ZeroEngine, batches: Sequence[MicroBatch], counts: Mapping[str, int], rate: float
    ) -> Any:
        self.whole = counts["tokens"] / len(batches) / self._world.layout.data_parallel  # type: ignore[attr-defined]
        return step(self, batches, counts, rate)

    def summed(self: zero.ZeroEngine, batch: MicroBatch) -> torch.Tensor:
        own = int((batch.tokens.targets != NO_TARGET).sum())
        return sums(self, batch) * self.whole / max(1, own)  # type: ignore[attr-defined]

    zero.ZeroEngine.step, zero.ZeroEngine._sums = stepped, summed  # type: ignore[assignment]


def mean_over_ranks() -> None:
    """Leave DeepSpeed's mean over the ranks in the gradient."""
    begin = zero.ZeroEngine._begin

    def begun(self: zero.ZeroEngine, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scales, total = begin(self, *args)
        return scales / dist.get_world_size(), total

    zero.ZeroEngine._begin = begun  # type: ignore[method-assign]


def mask_off_by_one() -> None:
    targets_of = collate.targets_of
    collate.targets_of = lambda example: targets_of(  # type: ignore[assignment]
        replace(example, trained=np.roll(example.trained, 1))
    )


def packing_leak() -> None:
    """Let all examples of a packed row attend to those before them."""
    packed = steps.collate_packed

    def leaking(*args: Any) -> MicroBatch:
        batch = packed(*args)
        return replace(batch, segments=batch.segments and Segments((sum(batch.segments.lengths),)))

    steps.collate_packed = leaking  # type: ignore[assignment]


def positions_run_on() -> None:
    """Number the tokens of a packed row from its start, not from that of each example."""
    packed = steps.collate_packed

    def numbered(*args: Any) -> MicroBatch:
        batch = packed(*args)
        positions = torch.arange(batch.tokens.input_ids.shape[1])[None]
        return replace(batch, tokens=batch.tokens._replace(position_ids=positions))

    steps.collate_packed = numbered  # type: ignore[assignment]


def tie_of_one_stage() -> None:
    """Give each copy of a tied embedding the gradient of its own stage alone."""
    pipeline._add_up = lambda gradient, group, shard_rank: None


def reference_with_dropout() -> None:
    """Score the reference as in training, with its dropout."""
    score = frozen.FrozenEngine.score
    frozen.FrozenEngine.score = functools.partialmethod(score, training=True)  # type: ignore[assignment]
    model.switch_off_dropout = lambda causal_lm: ()


def rate_one_step_early() -> None:
    rate = trainer.learning_rate
    trainer.learning_rate = lambda optim, step, total: rate(optim, step + 1, total)  # type: ignore[assignment]


def beta_squared() -> None:
    margin = preference.margin
    preference.margin = lambda scores, dpo: dpo.beta * margin(scores, dpo)  # type: ignore[assignment]


def ipo_by_tokens_of_both() -> None:
    """Divide both answers' log-ratios by the number of tokens of the pair."""
    own = preference._num_tokens
    preference._num_tokens = lambda logps, answers: own(logps, answers).sum(1, keepdim=True) / 2


def mean_of_set_means() -> None:
    """Take the mean of the held-out sets' losses, whatever their sizes."""
    exact = api.evaluation_record

    def averaged(objective: Any, sums: torch.Tensor, counts: Any, names: Any) -> dict[str, float]:
        sets = zip(sums, counts, strict=True)
        each = [api.means(objective, own, count, "eval")["eval/loss"] for own, count in sets]
        return exact(objective, sums, counts, names) | {"eval/loss": sum(each) / len(each)}

    tasks.evaluation_record = preferences.evaluation_record = averaged


def smoothing_in_evaluation() -> None:
    """Smooth the labels of held-out rows too."""
    of_logits = policy.Policy._of_logits

    def as_in_training(self: policy.Policy, *args: Any) -> torch.Tensor:
        self.training = True
        return of_logits(self, *args)

    policy.Policy._of_logits = as_in_training  # type: ignore[method-assign]


def decay_of_norms() -> None:
    optimizer.is_matrix = lambda name, shape: True  # type: ignore[assignment]


def no_end_of_turn() -> None:
    """Train on answers without the token that ends them, in the run and in what the loop is given."""
    builder: Any = masks.MaskBuilder
    ends = builder.mask

    def without(self: Any, conversation: Any) -> Any:
        found = ends(self, conversation)
        spans = [span._replace(stop=span.stop - len("<|im_end|>")) for span in found.spans]
        return found._replace(spans=spans)

    builder.mask = without


def moments_are_lost() -> None:
    """Begin again with moments of 0 after a resume."""
    read = CheckpointReader.read

    def forgetful(self: CheckpointReader, name: str, kind: Any, start: int, stop: int) -> torch.Tensor:
        found = read(self, name, kind, start, stop)
        return found if kind == "value" else torch.zeros_like(found)

    CheckpointReader.read = forgetful  # type: ignore[method-assign]


def shards_out_of_order() -> None:
    """Reverse each rank's shard of the gradient of a layer's parameter that ZeRO 3 does not keep whole, after
    the first step, in which dsft itself would find it."""
    build, partition, of_layers = initialize.build_optimizer, Stage3.partition_grads, set[int]()
    step, steps = zero.ZeroEngine.step, list[int]()

    def stepped(self: zero.ZeroEngine, batches: Any, counts: Any, rate: float) -> Any:
        steps.extend([1] * (rate > 0))  # not the probe of the memory
        return step(self, batches, counts, rate)

    def built(trained: Mapping[str, torch.nn.Parameter], *args: Any, **keys: Any) -> torch.optim.Optimizer:
        of_layers.update(id(one) for name, one in trained.items() if ".layers." in name)
        return build(trained, *args, **keys)

    def partitioned(self: Any, parameters: Iterable[Any], shards: Iterable[torch.Tensor]) -> None:
        parameters, shards = list(parameters), list(shards)
        for parameter, shard in zip(parameters, shards, strict=True):
            if len(steps) > 1 and id(parameter) in of_layers and not parameter.ds_persist:
                shard.copy_(shard.flip(0))
        partition(self, parameters, shards)

    initialize.build_optimizer, Stage3.partition_grads = built, partitioned
    zero.ZeroEngine.step = stepped  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        mean_over_ranks, mask_off_by_one, no_end_of_turn, mean_of_micro_batches, rate_one_step_early,
        packing_leak, positions_run_on, tie_of_one_stage, reference_with_dropout, beta_squared,
        decay_of_norms, mean_of_set_means, smoothing_in_evaluation, ipo_by_tokens_of_both, moments_are_lost,
        shards_out_of_order,
    )
}  # fmt: skip

if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    FAULTS[fault]()
    sys.exit(main(arguments))
