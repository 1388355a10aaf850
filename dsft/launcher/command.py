"""Run `dsft launch` and `dsft train`: start a run on all of its hosts, watch it to its end, restart it if
asked to, and return the exit code."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsft.errors import MissingInputError, Problem, SpecError, StorageError, WorldError, printable
from dsft.generate.hostfile import read_hostfile
from dsft.launcher.agent import SILENCE
from dsft.launcher.attempt import Attempt, AttemptSettings, Log, Requests
from dsft.launcher.launch_plan import TRAIN, LaunchPlan
from dsft.launcher.output import LineWriter, StatusWriter, now
from dsft.launcher.verdict import STOPPED, Outcome, may_succeed, shown_lines
from dsft.rank.launched import counted, master_port
from dsft.rank.promise import check_hosts
from dsft.rank.slurm import allocation
from dsft.remote import Channel, NoAnswer, forwarded, is_this_machine
from dsft.spec.layout import batch_on, layout_of
from dsft.spec.load import load_spec
from dsft.spec.schema import Spec
from dsft.system.lock import lock_folder
from dsft.system.process import EVERY_STEP
from dsft.system.redact import redact, redact_command
from dsft.system.run_folder import newest_checkpoint

PAUSE = 3.0  # seconds before a restart: ports close, the kernel frees the devices' memory
RETURN = 60.0  # seconds that a lost host has to answer again
SHOWN = 12  # lines of the failed rank's log
ANSWER = 12.0  # seconds that a lost host's agent may take to answer, of which ssh may take 5 to connect
EVERY = 2.0  # seconds between two writes of status.json
OF_OTHER_STARTS = frozenset({"port", "programs", "hostfile"})
"""The doctor's checks that do not concern `dsft launch`: pdsh, its hostfile, and a fixed port (here rank 0's
host finds a free one)."""

DEVICES = (
    "from deepspeed.accelerator import get_accelerator as a; "
    "print('devices', a().device_name(), a().device_count())"
)


@dataclass(frozen=True)
class Options:
    """Options of the command line, beside the spec and its overrides. only_here: `dsft train`, which uses no
    other host."""

    launcher: str | None = None
    restarts: int = 0
    hostfile: Path | None = None
    processes: int | None = None
    dry_run: bool = False
    doctor: bool = True
    only_here: bool = False


@dataclass(frozen=True)
class LaunchSettings:
    """Settings shared by all attempts."""

    spec: Spec
    path: Path
    overrides: tuple[str, ...]
    options: Options
    plan: LaunchPlan
    environ: Mapping[str, str]
    typed: str  # the command that was typed, without secrets
    port: int | None = None  # rank 0's, if MASTER_PORT sets it

    @property
    def logs(self) -> Path:
        return Path(self.plan.logs)


def launch(path: Path, overrides: Sequence[str], options: Options) -> int:
    """Launch the run and return its exit code. Raises DsftError if it could not be started."""
    settings = prepared(path, tuple(overrides), options)
    if options.dry_run:
        for line in dry_run(settings):
            print(printable(line))
        return 0
    if options.doctor:
        examine(settings)
    return run(settings)


def run(settings: LaunchSettings) -> int:
    """Supervise the run and return its exit code. Raises LockedError if another process supervises it
    already."""
    try:
        settings.logs.mkdir(parents=True, exist_ok=True)
        log = (settings.logs / "launch.log").open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{settings.logs} cannot be written ({error.strerror}); set another output_dir."
        ) from None
    with log, lock_folder(settings.logs, "launch.lock"):
        writer = LineWriter(log, {**os.environ, **settings.environ})
        try:
            return asyncio.run(supervised(settings, writer))
        finally:
            writer.close()


def prepared(path: Path, overrides: tuple[str, ...], options: Options) -> LaunchSettings:
    spec = load_spec(path, overrides)
    if options.launcher not in (None, "dsft", "slurm"):
        what = (
            f"{options.launcher!r} is neither dsft nor slurm: dsft launch starts the ranks itself, by ssh or "
            "srun; give one of the two, or type deepspeed or torchrun yourself (dsft generate writes scripts)"
        )
        raise SpecError("The command line cannot be used.", [Problem("--launcher", what)])
    named = spec.cluster.launcher if spec.cluster and not options.only_here else "dsft"
    slurm = (options.launcher or named) == "slurm"
    hosts = hosts_of(spec, options, slurm=slurm)
    batch_on(spec, layout_of(spec.parallel, sum(hosts.values())))  # ranks would find it only after imports
    program = (str(TRAIN), str(path), *overrides)
    logs = Path(spec.output_dir, spec.name, "logs").absolute()
    plan = LaunchPlan("srun" if slurm else "ssh", hosts, program, str(Path.cwd()), str(logs), "")
    again = shlex.join(redact_command(["dsft", *sys.argv[1:]], os.environ))
    environ = forwarded(os.environ, spec.cluster) | ({EVERY_STEP: "1"} if sys.stdout.isatty() else {})
    return LaunchSettings(spec, path, overrides, options, plan, environ, again, master_port(os.environ))


def hosts_of(spec: Spec, options: Options, *, slurm: bool) -> dict[str, int]:
    """Return host -> slots: from --hostfile, the Slurm job or the spec, else all devices of this machine.

    Raises SpecError if --processes has no effect, WorldError if the spec promises other hosts, or `dsft
    train` cannot reach them.
    """
    others = "--hostfile" if options.hostfile else "the Slurm job" if slurm else "cluster.hosts"
    if options.processes is not None and (options.hostfile or slurm or spec.cluster):
        what = f"{options.processes} has no effect, since {others} gives the number of processes"
        raise SpecError("The command line cannot be used.", [Problem("--processes", f"{what}; leave it out")])
    if options.hostfile is not None:
        try:
            hosts = read_hostfile(options.hostfile)
        except OSError as error:
            raise MissingInputError(
                f"--hostfile {options.hostfile} cannot be read ({error.strerror}); give one that exists, or "
                "leave it out."
            ) from None
        check_hosts(spec, hosts, f"--hostfile {options.hostfile}")
        return hosts
    if slurm:
        return of_slurm(spec, os.environ)
    if spec.cluster is not None:
        elsewhere = [host for host in spec.cluster.hosts if options.only_here and not is_this_machine(host)]
        if elsewhere:
            raise WorldError(
                f"cluster.hosts names other machines than this one ({', '.join(elsewhere)}), and dsft train "
                "uses this one alone; start the run with dsft launch, or remove the section cluster to train "
                "here."
            )
        return dict(spec.cluster.hosts)
    return {"localhost": options.processes or devices_here(one_on_cpu=options.only_here)}


def of_slurm(spec: Spec, environ: Mapping[str, str]) -> dict[str, int]:
    """Return the hosts of this Slurm job. Slurm chooses their names; their number and slots must be those of
    the spec's cluster, if it has one. Raises WorldError outside a job, and if the number of hosts differs."""
    if spec.cluster is None:
        return dict(allocation(environ, None).hosts)
    promised = spec.cluster.hosts
    given = list(allocation(environ, 1).hosts)
    if len(given) != len(promised):
        raise WorldError(
            f"cluster.hosts has {len(promised)} host(s), but the Slurm job has {len(given)} "
            f"({environ['SLURM_JOB_NODELIST']}); ask Slurm for {len(promised)}, or change cluster.hosts."
        )
    if set(given) == set(promised):
        return dict(promised)
    return dict(zip(given, promised.values(), strict=True))


def devices_here(*, one_on_cpu: bool) -> int:
    """Return the number of devices that `deepspeed dsft/train.py` would use, from DeepSpeed in a separate
    process. Of a CPU these are its NUMA nodes; one_on_cpu: count them as one."""
    try:
        found = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        found = None
    lines = [line for line in (found.stdout if found else "").splitlines() if line.startswith("devices ")]
    name, count = lines[-1].split()[1:] if lines else ("", "0")
    if not count.isdecimal() or int(count) < 1:
        raise WorldError("DeepSpeed finds no device on this machine; give --processes, or cluster.hosts.")
    return 1 if one_on_cpu and name == "cpu" else int(count)


def examine(settings: LaunchSettings) -> None:
    """Run the doctor's quick checks. Raises WorldError if a run could not start."""
    from dsft.doctor.command import quick
    from dsft.doctor.results import failures

    every = quick(settings.path, settings.overrides, hosts=settings.plan.hosts, environ=settings.environ)
    passed_over = OF_OTHER_STARTS - ({"port"} if settings.port else set())
    found = [finding for finding in every if finding.check not in passed_over]
    for finding in found:
        if finding.level == "warning":
            print(printable(f"warning: {finding}"), file=sys.stderr)
    failed = failures(found)
    if failed:
        text = "\n".join(f"  {finding}" for finding in failed)
        raise WorldError(f"The run cannot start (dsft launch --no-doctor starts it all the same):\n{text}")


def dry_run(settings: LaunchSettings) -> Iterator[str]:
    """Yield the exact commands; the address and the port of rank 0 are only known at the start."""
    hidden = settings.environ
    first = next(iter(settings.plan.hosts))
    alone = len(settings.plan.hosts) == 1
    address = "127.0.0.1" if alone else f"ADDRESS-OF-{first}"
    for host, slots in settings.plan.hosts.items():
        command = settings.plan.command_of(host, address, "FREE-PORT")
        ranks = f"{command.ranks[0]} to {command.ranks[-1]}"
        yield f"{host}: {counted(slots, 'process')}, ranks {ranks}"
        yield f"  agent   {shlex.join(settings.plan.agent(host))}"
        yield f"  folder  {settings.plan.folder}"
        yield f"  runs    {shlex.join(redact_command(list(command.argv), hidden))}"
        place = {"RANK": ranks, "LOCAL_RANK": f"0 to {slots - 1}", **command.environ}
        yield f"  each    {', '.join(f'{name}={value}' for name, value in place.items())}"
    for name, value in sorted(settings.environ.items()):
        yield f"  sets    {redact(f'{name}={value}', hidden)}"
    yield f"logs: {settings.logs}"


async def supervised(settings: LaunchSettings, log: Log) -> int:
    """Run all attempts, print the end of the run, and return its exit code."""
    requests, status, cluster = listen(), StatusWriter(settings.logs), settings.spec.cluster
    how = AttemptSettings(
        settings.environ, cluster.hang_timeout if cluster else None,
        (cluster.interface if cluster else None) or os.environ.get("GLOO_SOCKET_IFNAME"), settings.port,
    )  # fmt: skip
    common: dict[str, object] = {
        "pid": os.getpid(), "host": socket.gethostname(), "command": settings.typed,
        "launcher": "slurm" if settings.plan.through == "srun" else "dsft", "started": now(),
        "restarts": settings.options.restarts,
    }  # fmt: skip
    attempt, hosts = 1, dict(settings.plan.hosts)
    try:
        while True:
            plan = replace(settings.plan, job=secrets.token_hex(8), hosts=hosts)
            running = Attempt(plan, how, requests, log)
            facts = common | {"job": plan.job, "hosts": hosts, "attempt": attempt}
            outcome = await one_attempt(settings, running, status, facts)
            failed = outcome.failure is not None and may_succeed(outcome.failure, outcome.code)
            again = failed and not requests.stops and attempt <= settings.options.restarts
            found = await reachable(settings, outcome, requests) if again else None
            if found is None:
                break
            log(f"start {attempt} has failed: {outcome.error}")
            count = f"restart {attempt} of {settings.options.restarts}"
            hosts, attempt = found, attempt + 1
            log(f"starting again from the last checkpoint, on {', '.join(hosts)} ({count})")
            await asyncio.sleep(PAUSE)
        for line in ending(settings, outcome):
            log(line)
        error = outcome.error and redact(outcome.error, os.environ)
        end = {"state": "ended", "exit_code": outcome.code, "error": error}
        status.put({**facts, **running.facts(), **end})
        return outcome.code
    finally:
        status.close()


def listen() -> Requests:
    """Count signals from now on."""
    requests, loop = Requests(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, requests.take, number)
    return requests


async def one_attempt(
    settings: LaunchSettings, running: Attempt, status: StatusWriter, facts: Mapping[str, object]
) -> Outcome:
    plan = running.plan

    async def report() -> None:
        while True:
            status.put({**facts, **running.facts(), "exit_code": None, "error": None})
            await asyncio.sleep(EVERY)

    where = ", ".join(f"{host} {slots}" for host, slots in plan.hosts.items())
    count = counted(sum(plan.hosts.values()), "process")
    by = " by slurm" if plan.through == "srun" else ""
    running.log(f"launching {settings.spec.name}: {count} ({where}){by}; logs: {plan.logs}")
    reporting = asyncio.create_task(report())
    try:
        return await running.run()
    finally:
        reporting.cancel()


async def reachable(settings: LaunchSettings, outcome: Outcome, requests: Requests) -> dict[str, int] | None:
    """Return the hosts of the next start (host -> slots): all promised ones if no host was lost, else those
    that answer, once there are enough of them (the spec's cluster.min_hosts, by default all). None if too few
    answer within RETURN seconds, or a stop is requested meanwhile."""
    promised, cluster = settings.plan.hosts, settings.spec.cluster
    if not outcome.lost and outcome.failure is not None and outcome.failure.kind != "host":
        return dict(promised)
    fewest = (cluster.min_hosts if cluster else None) or len(promised)
    until = time.monotonic() + RETURN
    while True:
        answers = await asyncio.gather(*(does_answer(settings.plan.agent(host)) for host in promised))
        answering = {
            host: promised[host] for host, is_there in zip(promised, answers, strict=True) if is_there
        }
        if len(answering) >= fewest:
            return answering
        if time.monotonic() > until or requests.stops:
            return None
        await asyncio.sleep(PAUSE)


async def does_answer(agent: list[str]) -> bool:
    """Return whether an agent, started for this question only, says hello."""
    try:
        async with asyncio.timeout(ANSWER), await Channel.open(agent, {}) as channel:
            return await channel.receive() is not None
    except (NoAnswer, TimeoutError):
        return False


def ending(settings: LaunchSettings, outcome: Outcome) -> Iterator[str]:
    """Yield the lines printed at the end of a run."""
    for host in outcome.lost:
        yield (
            f"warning: {host} is lost; processes that are left there end by themselves {SILENCE:.0f} seconds "
            "after the last message from here"
        )
    failure = outcome.failure
    if failure is not None:
        where = f"{failure.host}:{failure.rank}" if failure.rank is not None else failure.host
        if failure.rank != 0 or failure.kind != "rank":  # else they have been shown
            lines = shown_lines(failure.lines, failure.message)
            yield from (f"[{where}] {line}" for line in lines[-SHOWN:])
        log = settings.logs / f"rank-{failure.rank}.log"
        own = f"its log: {log}; " if log.exists() else ""
        yield f"{own}all logs: {settings.logs}"
        if outcome.stacks:
            yield f"stacks: {', '.join(f'{settings.logs}/rank-{rank}.stack' for rank in outcome.stacks)}"
    if outcome.code == 0:
        return
    if outcome.code == STOPPED or failure is None or may_succeed(failure, outcome.code):
        saved = newest_checkpoint(settings.logs.parent)
        next_step = (
            f"the last checkpoint is {saved}; go on" if saved else "there is no checkpoint; start again"
        )
        yield f"{'stopped; ' if outcome.code == STOPPED else ''}{next_step} with {settings.typed}"
    if outcome.error is not None:
        yield f"error: {outcome.error}"
    yield f"{'failed' if failure else 'ended'} after {outcome.seconds:.0f} seconds, exit code {outcome.code}"
