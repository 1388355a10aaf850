"""One run of TRL's DPOTrainer under torchrun, timed; knows nothing of dsft.

    torchrun … -m benchmarks.dpo_peers VARIANT WORK RESULT      VARIANT: trl-live or trl-precomputed

Takes the pairs, the model folder and the settings that benchmarks/dpo.py or benchmarks/gpu put into WORK.
Rank 0 writes RESULT: when each step ended and its loss, the seconds of the reference pass (0 where there is
none), and the GPU's peaks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from benchmarks.paired import device_peaks
from benchmarks.sft_peers import Clock, common, load

COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


class Trainer(DPOTrainer):
    """Of the tokens that it is given: TRL's own would differ by what comes behind an answer's end."""

    reference_seconds = 0.0

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Dataset:
        began = time.perf_counter()
        dataset = super()._precompute_ref_logps(*args, **kwargs)
        self.reference_seconds += time.perf_counter() - began
        return dataset


def main(variant: str, work: Path, result: Path) -> None:
    given = json.loads((work / "given.json").read_text())
    pairs = [given["pairs"][index] for step in given["steps"] for index in step]
    args = DPOConfig(
        **common(given, work, given["micro_batch_size"]),
        max_length=given["max_length"],
        beta=given["beta"],
        precompute_ref_log_probs=variant == "trl-precomputed",
    )
    clock = Clock()
    trainer = Trainer(
        model=load(work, given),
        args=args,
        train_dataset=Dataset.from_list([{name: pair[name] for name in COLUMNS} for pair in pairs]),
        processing_class=AutoTokenizer.from_pretrained(work / "model"),
        callbacks=[clock],
    )
    trainer.train()
    if int(os.environ["RANK"]) == 0:
        found = {"ends": clock.ends, "losses": clock.losses, "reference_seconds": trainer.reference_seconds}
        result.write_text(json.dumps(found | {"peaks": device_peaks()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
