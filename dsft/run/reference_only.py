"""`--reference_only`: score the pairs of a preference run with its reference model, write them to the store,
and exit without training."""

from __future__ import annotations

from functools import partial

from dsft.engine.initialize import check_precision, set_tf32
from dsft.engine.world import join
from dsft.identity import build_identity, input_identity, process_identity
from dsft.inputs import read_inputs
from dsft.plan.reference import reference_layout
from dsft.rank.heartbeat import Heartbeat
from dsft.rank.launched import Launched
from dsft.rank.stopping import Stopping
from dsft.reference.precomputed import precompute
from dsft.reference.score import micro_batch_size
from dsft.run.job import Log
from dsft.run.main import watch_ranks
from dsft.spec.schema import Spec


def score_only(spec: Spec, launched: Launched, stopping: Stopping, heartbeat: Heartbeat, way_on: str) -> None:
    """Score all pairs into the store, then print where it is and what to type next. A collective of all
    launched ranks, of any world size that the reference's pipeline stages divide. way_on: what to type next.

    Raises SpecError where the stages do not divide the ranks, and whatever a training run would raise at its
    start for the same data and reference.
    """
    log: Log = partial(print, flush=True) if launched.rank == 0 else lambda text: None
    places = reference_layout(spec, launched.world_size)
    heartbeat.mark("load")
    world = join(launched, places, log, process_identity(spec, {}), spec.accelerator)
    with watch_ranks(stopping, world) as ranks:
        world.each(lambda: check_precision(spec.train.precision))
        set_tf32(spec.train.tf32, world.device)
        inputs = world.each(lambda: read_inputs(spec, log, first=world.rank == 0))
        world.check_same(world.each(lambda: input_identity(spec, inputs, build_identity(inputs))))
        precompute(spec, micro_batch_size(spec, places.data_parallel), inputs, world, log, recheck=True)
        log(f"next: {way_on}")
        ranks.leave()
        world.close()
