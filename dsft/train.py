"""The script that a launcher starts on every rank: train one spec, from YAML to an exported model.

    deepspeed --hostfile hostfiles/two_nodes dsft/train.py [SPEC] [key=value …] [--deepspeed_config FILE]

Without SPEC it runs specs/quickstart.yaml of a checkout, which trains on any world size. Errors in the spec
or the world are reported within the first second, before torch and deepspeed are imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # A script's own folder comes first on the path, where dsft's modules would shadow others; and a launcher
    # on one host passes no PYTHONPATH.
    sys.path[0] = str(ROOT)

    from dsft.rank.stopping import block_signals

    block_signals()  # signals, until `set_up_process`; the imports below take about a second

    from dsft.system.packages import check_packages

    check_packages()

import argparse
import gc
import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from dsft.errors import DsftError, StoppedError, WorldError, printable
from dsft.generate.scripts import environment
from dsft.plan.config_file import merge_config_file
from dsft.plan.memory.offload import allocator
from dsft.plan.reference import check_precomputed
from dsft.rank.cores import THREADS, Share, share_of
from dsft.rank.environment import Launched, detect
from dsft.rank.heartbeat import Heartbeat
from dsft.rank.launched import check_port
from dsft.rank.process_setup import set_up_process
from dsft.rank.promise import check_promise
from dsft.rank.stopping import Stopping, unblock_signals
from dsft.rank.torchrun import flags, torchrun_argv
from dsft.spec.layout import batch_on, layout_of
from dsft.spec.load import load_spec
from dsft.spec.rules import warnings
from dsft.spec.schema import Spec
from dsft.system.process import VERBOSE, end, is_verbose
from dsft.system.redact import print_fault, redact, redact_command, redact_values
from dsft.system.run_folder import newest_checkpoint, step_of
from dsft.system.software import RANGES, outside, version_of

RANK_0_SPEAKS = 3.0
"""Seconds that other ranks wait before they exit with an error. A launcher kills all processes of a host when
the first fails, and rank 0 must have printed the message by then."""
RANK_0_ENDS = 0.5
"""Seconds that other ranks wait before they exit after a stop, which needs no explanation."""

QUICKSTART = ROOT / "specs" / "quickstart.yaml"


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0, or that of the error. Rank 0 prints the message; other ranks print it only
    while their rank is not known yet, or where the error is theirs alone."""
    options, rank, heartbeat = parse(arguments), 0, Heartbeat(0, 0, None)
    try:
        become_torchrun(arguments, options)
        launched = detect(os.environ)
        rank = launched.rank
        heartbeat, stopping = set_up_process(launched, os.environ)
        train(options, launched, [sys.argv[0], *arguments], stopping, heartbeat)
    except DsftError as error:
        message = printable(redact_values(str(error), os.environ))
        heartbeat.end(error.exit_code, message)
        is_stop = isinstance(error, StoppedError)
        if rank == 0 or error.of_one_rank:
            who = f"rank {rank}: " if error.of_one_rank else ""
            print(f"{'' if is_stop else 'error: '}{who}{message}", file=sys.stderr, flush=True)
        else:
            time.sleep(RANK_0_ENDS if is_stop else RANK_0_SPEAKS)
        return error.exit_code
    except Exception as error:  # a bug in dsft or a library: print the traceback
        heartbeat.end(1, printable(redact(f"{type(error).__name__}: {error}", os.environ)))
        print_fault(error)
        return 1
    heartbeat.end(0)
    return 0


def become_torchrun(arguments: Sequence[str], options: argparse.Namespace) -> None:
    """Replace this process by torchrun where flags or variables give the number of hosts and the number of
    this one; otherwise return. The spec is read first: if a rank rejected it, torchrun would print a
    traceback of its own."""
    argv = torchrun_argv(arguments, os.environ, str(Path(__file__).resolve()))
    if argv is not None:
        load_spec(options.spec, options.overrides)
        words = shlex.join(redact_command(argv[2:], os.environ))
        print(f"launcher: this process becomes torchrun: {words}", flush=True)
        unblock_signals()
        os.execv(argv[0], argv)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dsft/train.py", description="Train the model that SPEC describes.", parents=[flags()]
    )
    parser.add_argument(
        "words", nargs="*", metavar="[SPEC] [key=value …]", help="a spec, then keys with new values"
    )
    parser.add_argument(
        "--deepspeed_config", type=Path, metavar="FILE", help="a DeepSpeed JSON that decides how to train"
    )
    parser.add_argument(
        "--strict", action="store_true", help="refuse a DeepSpeed JSON that contradicts the spec"
    )
    parser.add_argument(
        "--profile",
        type=_step,
        nargs="?",
        const=0,
        metavar="STEP",
        help="write a trace of one step into the run's logs; by default of the third step of this start",
    )
    parser.add_argument(
        "--reference_only",
        "--reference-only",
        action="store_true",
        help="score the pairs of a preference run with its reference, then exit without training",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print every step and the details of the start"
    )
    parser.add_argument("--action", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # see dsft.run.action
    parser.add_argument("--any_ranks", action="store_true", help=argparse.SUPPRESS)
    # passed by `dsft reference`, whose ranks are not those that cluster.hosts promises
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # habit: it is always on
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS
    )  # passed by the deepspeed launcher; LOCAL_RANK is used instead
    options = parser.parse_intermixed_args(arguments)
    has_spec = bool(options.words) and "=" not in options.words[0]
    if not has_spec and not QUICKSTART.exists():  # dsft was installed from a wheel
        parser.error("give a SPEC; `dsft init NAME` writes one")
    options.spec = Path(options.words[0]) if has_spec else QUICKSTART
    options.overrides = options.words[has_spec:]
    if options.verbose:
        os.environ[VERBOSE] = "1"
    return options


def _step(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a step (the first is 1); give SPEC before --profile"
        )
    return int(text)


def train(
    options: argparse.Namespace,
    launched: Launched,
    command: Sequence[str],
    stopping: Stopping,
    heartbeat: Heartbeat,
) -> None:
    spec = load_spec(options.spec, options.overrides)
    stopping.limit(spec.cluster.time_limit if spec.cluster else None)
    if options.reference_only:
        check_precomputed(spec, "--reference_only")
    promise = check_promise(None if options.any_ranks else spec.cluster, launched)
    if launched.rank == 0:
        if is_verbose() or (launched.hosts != 1 and launched.world_size > 1):
            print(launched.line(), flush=True)
        for line in outside({name: version_of(name) for name in RANGES}):
            print(
                f"warning: versions: {line}; something may fail or differ: install a supported one",
                flush=True,
            )
    check_port(launched, os.environ)
    if options.reference_only:
        score_only(options, spec, launched, stopping, heartbeat)
        return
    places = layout_of(spec.parallel, launched.world_size)
    batch = batch_on(spec, places)
    file = None
    if options.deepspeed_config is not None:
        spec, file = merge_config_file(spec, batch, options.deepspeed_config, strict=options.strict)
    if launched.rank == 0:
        for line in known_early(spec):
            print(line, flush=True)
    share = set_environment(spec, launched)
    with heavy_imports():
        from dsft.run import Job, run  # torch and deepspeed are imported from here on

    job = Job(
        spec=spec,
        batch=batch,
        file=file,
        launched=launched,
        layout=places,
        promise=promise,
        command=command,
        profile=options.profile,
        cores=share,
        stopping=stopping,
        heartbeat=heartbeat,
    )
    if options.action is not None:
        from dsft.run.action import act

        act(job, options.action)
    else:
        run(job)


def known_early(spec: Spec) -> Iterator[str]:
    """Yield what is said before the imports, which take seconds: warnings, and that all steps are done."""
    yield from (f"warning: {warning}" for warning in warnings(spec))
    newest = newest_checkpoint(Path(spec.output_dir, spec.name))
    if newest is not None and step_of(newest) >= (spec.train.max_steps or math.inf):
        yield f"{spec.name} has all of its steps: {newest}; this start verifies it and completes the export"


def score_only(
    options: argparse.Namespace, spec: Spec, launched: Launched, stopping: Stopping, heartbeat: Heartbeat
) -> None:
    """Score the pairs of a preference run on any number of ranks. Where a DeepSpeed JSON is read, the world
    size must be that of the run."""
    if options.deepspeed_config is not None:
        places = layout_of(spec.parallel, launched.world_size)
        batch = batch_on(spec, places)
        spec, _ = merge_config_file(spec, batch, options.deepspeed_config, strict=options.strict)
    set_environment(spec, launched)
    with heavy_imports():
        from dsft.run.main import score_only as score

    way_on = "the same command without --reference_only trains"
    if options.any_ranks:
        way_on = f"dsft launch {shlex.join([str(options.spec), *options.overrides])}"
    score(spec, launched, stopping, heartbeat, way_on)


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Around the import of torch and DeepSpeed. What they leave is never garbage, so the collector does not
    look through it, then or later. Raises WorldError where DeepSpeed knows no accelerator of DS_ACCELERATOR's
    name."""
    gc.disable()
    try:
        yield
    except ValueError as error:
        if "DS_ACCELERATOR" in str(error):
            raise WorldError(str(error)) from None
        raise
    finally:
        gc.freeze()
        gc.enable()


def set_environment(spec: Spec, launched: Launched) -> Share | None:
    """Set the environment variables that torch and its libraries read on import. Return the cores of this
    rank."""
    share = share_of(spec, launched, os.environ)
    os.environ.update(environment(spec.cluster))  # however this process was started
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPUs are numbered as nvidia-smi numbers them
    os.environ.update(allocator(spec, os.environ, version("torch")))
    if share is not None:
        os.environ[THREADS] = str(share.threads)
    return share


if __name__ == "__main__":
    end(main(sys.argv[1:]))
