"""The command `dsft launch`: takes a spec's path, overrides and options, starts the run on all of its hosts,
watches it to its end, and starts it again where that was asked for. Gives the exit code.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dsft.errors import MissingInputError, Problem, SpecError, StorageError, WorldError, plain
from dsft.launch.allocation import allocation
from dsft.launch.launched import master_port
from dsft.launch.promise import check_hosts
from dsft.plan.hostfile import parse
from dsft.plan.promised import load
from dsft.remote import module_command
from dsft.report.redact import redact, redact_command
from dsft.spec.schema import Spec
from dsft.supervise.aside import Voice
from dsft.supervise.attempt import Attempt, Outcome, Requests, Tell, Terms, facts
from dsft.supervise.logs import HEADING
from dsft.supervise.parts import TRAIN, World, forwarded, launcher_argv
from dsft.supervise.status import EVERY, Status, now
from dsft.supervise.sweep import absent, sweep
from dsft.supervise.verdict import STOPPED, may_pass
from dsft.system.lock import hold

AGENT = "dsft.supervise.agent"
LAUNCHERS = ("deepspeed", "torchrun", "slurm")
PAUSE = 3.0  # seconds before a new start: ports close, the kernel frees the devices' memory
RETURN = 60.0  # seconds that a host which was lost may take to answer again
SHOWN = 12  # lines of the failed rank's log
OF_OTHER_STARTS = frozenset({"port", "programs", "hostfile"})
"""Checks of the doctor about pdsh, its file, and a fixed port: here rank 0's host finds a free one."""

DEVICES = "from deepspeed.accelerator import get_accelerator as a; print('devices', a().device_count())"


@dataclass(frozen=True)
class Options:
    """Of the command line, beside the spec and its overrides."""

    launcher: str | None = None
    restarts: int = 0
    hostfile: Path | None = None
    num_gpus: int | None = None
    dry_run: bool = False
    doctor: bool = True


@dataclass(frozen=True)
class Start:
    """What all attempts have in common."""

    spec: Spec
    path: Path
    overrides: tuple[str, ...]
    options: Options
    world: World
    environ: Mapping[str, str]
    again: str  # the command that was typed, without secrets
    port: int | None = None  # of rank 0, where MASTER_PORT chooses it

    @property
    def logs(self) -> Path:
        return Path(self.world.logs)


def launch(path: Path, overrides: Sequence[str], options: Options) -> int:
    """The exit code of the run. Raises DsftError where it could not be started."""
    start = prepared(path, tuple(overrides), options)
    if options.dry_run:
        for line in dry_run(start):
            print(plain(line))
        return 0
    if options.doctor:
        examine(start)
    return run(start)


def run(start: Start) -> int:
    """Its exit code. LockedError where another one supervises it already."""
    try:
        start.logs.mkdir(parents=True, exist_ok=True)
        log = (start.logs / "launch.log").open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{start.logs} cannot be written ({error.strerror}); set another output_dir."
        ) from None
    with log, hold(start.logs, "launch.lock"), requests() as (asked, wake):
        voice = Voice(log)
        try:
            return supervised(start, asked, wake, voice)
        finally:
            voice.close()


def prepared(path: Path, overrides: tuple[str, ...], options: Options) -> Start:
    spec = load(path, overrides)
    launcher = options.launcher or (spec.cluster.launcher if spec.cluster else "deepspeed")
    if launcher not in LAUNCHERS:
        raise SpecError(
            "The command line cannot be used.",
            [Problem("--launcher", f"{launcher!r} is none of {', '.join(LAUNCHERS)}; give one of these")],
        )
    hosts = hosts_of(spec, options, slurm=launcher == "slurm")
    program = (str(TRAIN), str(path), *overrides)
    logs = Path(spec.output_dir, spec.name, "logs").absolute()
    world = World(launcher, hosts, program, str(Path.cwd()), str(logs), "")
    again = shlex.join(redact_command(["dsft", *sys.argv[1:]], os.environ))
    environ = forwarded(os.environ, spec.cluster)
    return Start(spec, path, overrides, options, world, environ, again, master_port(os.environ))


def hosts_of(spec: Spec, options: Options, *, slurm: bool) -> dict[str, int]:
    """Host -> slots: of --hostfile, of the Slurm job, of the spec, else all devices of this machine.

    Raises SpecError where --num_gpus has nothing to say, WorldError where the spec promises other hosts.
    """
    others = "--hostfile" if options.hostfile else "the Slurm job" if slurm else "cluster.hosts"
    if options.num_gpus is not None and (options.hostfile or slurm or spec.cluster):
        what = f"{options.num_gpus} would go unheard, since {others} says how many processes there are"
        raise SpecError("The command line cannot be used.", [Problem("--num_gpus", f"{what}; leave it out")])
    if options.hostfile is not None:
        try:
            text = options.hostfile.read_text(encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise MissingInputError(
                f"--hostfile {options.hostfile} cannot be read ({error.strerror}); give one that exists, or "
                "leave it out."
            ) from None
        hosts = parse(text, str(options.hostfile))
        check_hosts(spec.cluster, hosts, f"--hostfile {options.hostfile}")
        return hosts
    if slurm:
        return of_slurm(spec, os.environ)
    if spec.cluster is not None:
        return dict(spec.cluster.hosts)
    return {"localhost": options.num_gpus or devices_here()}


def of_slurm(spec: Spec, environ: Mapping[str, str]) -> dict[str, int]:
    """The hosts of this job. Their names are Slurm's to choose; how many there are, and the slots of each,
    are the spec's, where it has a cluster. WorldError outside a job, and where the numbers differ."""
    if spec.cluster is None:
        return dict(allocation(environ, None).hosts)
    promised = spec.cluster.hosts
    given = list(allocation(environ, 1).hosts)
    if len(given) != len(promised):
        raise WorldError(
            f"cluster.hosts has {len(promised)} host(s), but the Slurm job has {len(given)} "
            f"({environ['SLURM_JOB_NODELIST']}); ask Slurm for as many, or change cluster.hosts."
        )
    if set(given) == set(promised):
        return dict(promised)
    return dict(zip(given, promised.values(), strict=True))


def devices_here() -> int:
    """As many as `deepspeed dsft/train.py` would take: DeepSpeed is asked, in a process of its own."""
    try:
        said = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        said = None
    counts = [line.split()[1] for line in (said.stdout if said else "").splitlines() if "devices " in line]
    if not counts or not counts[-1].isdecimal() or int(counts[-1]) < 1:
        raise WorldError("DeepSpeed finds no device on this machine; give --num_gpus, or cluster.hosts.")
    return int(counts[-1])


def examine(start: Start) -> None:
    """The doctor's quick part. Raises WorldError where a run could not start."""
    from dsft.doctor.command import quick
    from dsft.doctor.finding import failures

    every = quick(start.path, start.overrides, hosts=start.world.hosts, environ=start.environ)
    passed_over = OF_OTHER_STARTS - ({"port"} if start.port else set())
    found = [finding for finding in every if finding.check not in passed_over]
    for finding in found:
        if finding.level == "warning":
            print(plain(f"warning: {finding}"), file=sys.stderr)
    failed = failures(found)
    if failed:
        text = "\n".join(f"  {finding}" for finding in failed)
        raise WorldError(f"The run cannot start (--no-doctor goes on all the same):\n{text}")


def agent_command(launcher: str, host: str) -> list[str]:
    """Through srun where Slurm has the hosts: ssh to them may not be allowed."""
    if launcher == "slurm":
        module_command(host, AGENT)  # refuses what is no host name
        step = ["srun", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap", "--unbuffered"]
        return [*step, "--", sys.executable, "-m", AGENT]
    return module_command(host, AGENT)


def dry_run(start: Start) -> Iterator[str]:
    """The exact commands; the address and the port of rank 0 are found when it starts."""
    hidden = start.environ
    first = next(iter(start.world.hosts))
    alone = len(start.world.hosts) == 1
    address = "127.0.0.1" if alone else f"ADDRESS-OF-{first}"
    for node, (host, slots) in enumerate(start.world.hosts.items()):
        argv = launcher_argv(start.world, node, address, 0)
        words = [word.replace("--master_port=0", "--master_port=FREE-PORT") for word in argv]
        ranks = start.world.ranks[host]
        yield f"{host}: {slots} process(es), ranks {ranks[0]} to {ranks[-1]}"
        yield f"  agent   {shlex.join(agent_command(start.world.launcher, host))}"
        yield f"  folder  {start.world.folder}"
        yield f"  runs    {shlex.join(redact_command(words, hidden))}"
    for name, value in sorted(start.environ.items()):
        yield f"  sets    {redact(f'{name}={value}', hidden)}"
    yield f"logs: {start.logs}"


def supervised(start: Start, asked: Requests, wake: int, tell: Tell) -> int:
    """All attempts, and what is said at the end."""
    began, status = now(), Status(start.logs)
    written = 0.0
    common = {
        "pid": os.getpid(), "host": socket.gethostname(), "command": start.again,
        "launcher": start.world.launcher, "started": began, "restarts": start.options.restarts,
    }  # fmt: skip
    attempt, hosts = 1, dict(start.world.hosts)
    try:
        while True:
            world = replace(start.world, job=secrets.token_hex(8), hosts=hosts)
            facts_of_this = common | {"job": world.job, "hosts": hosts, "attempt": attempt}
            last = facts_of_this

            def seen(running: Attempt, base: Mapping[str, object] = facts_of_this) -> None:
                nonlocal written, last
                if time.monotonic() >= written + EVERY:
                    written = time.monotonic()
                    last = {**base, **facts(running), "exit_code": None, "error": None}
                    status.put(last)

            outcome = one_attempt(start, world, asked, wake, tell, seen)
            again = wants_another(outcome, attempt, start, asked)
            if again:
                found = reachable(start, outcome, asked)
                again = found is not None
                hosts = found or hosts
            if not again:
                break
            attempt += 1
            count = f"restart {attempt - 1} of {start.options.restarts}"
            tell(f"starting again from the last checkpoint, on {', '.join(hosts)} ({count})")
            time.sleep(PAUSE)
        for line in ending(start, outcome):
            tell(line)
        error = outcome.failure.text() if outcome.failure else None
        status.put({**last, "state": "ended", "exit_code": outcome.code, "error": error})
        return outcome.code
    finally:
        status.close()


def one_attempt(
    start: Start, world: World, asked: Requests, wake: int, tell: Tell, seen: Callable[[Attempt], None]
) -> Outcome:
    spec, commands = start.spec, {host: agent_command(world.launcher, host) for host in world.hosts}
    cluster = spec.cluster
    terms = Terms(
        start.environ,
        cluster.hang_timeout if cluster else None,
        (cluster.interface if cluster else None) or os.environ.get("GLOO_SOCKET_IFNAME"),
        start.port,
    )
    where = ", ".join(f"{host} {slots}" for host, slots in world.hosts.items())
    count = sum(world.hosts.values())
    tell(f"launching {spec.name}: {count} process(es) ({where}) by {world.launcher}; logs: {world.logs}")
    outcome = Attempt(world, commands, terms, asked, tell, seen).run(wake)
    left = sweep(world, outcome.lost, commands) if outcome.lost else []
    return replace(outcome, left=tuple(left))


def wants_another(outcome: Outcome, attempt: int, start: Start, asked: Requests) -> bool:
    failed = outcome.failure is not None and may_pass(outcome.failure, outcome.code)
    return failed and not asked.stops and attempt <= start.options.restarts


def reachable(start: Start, outcome: Outcome, asked: Requests) -> dict[str, int] | None:
    """The hosts of the next start: all that were promised, once they answer; those that do, where the spec's
    cluster.min_hosts allows so few. None where they are too few for RETURN seconds, or a stop was asked for
    meanwhile."""
    promised, cluster = start.world.hosts, start.spec.cluster
    if not outcome.lost and outcome.failure is not None and outcome.failure.kind != "host":
        return dict(promised)
    fewest = (cluster.min_hosts if cluster else None) or len(promised)
    commands = {host: agent_command(start.world.launcher, host) for host in promised}
    until = time.monotonic() + RETURN
    while True:
        silent = absent(commands)
        answering = {host: slots for host, slots in promised.items() if host not in silent}
        if len(answering) >= fewest:
            return answering
        if time.monotonic() > until or asked.stops:
            return None
        time.sleep(PAUSE)


def ending(start: Start, outcome: Outcome) -> Iterator[str]:
    folder = start.logs.parent
    for text in outcome.left:
        yield f"warning: {text}"
    failure = outcome.failure
    if failure is not None:
        yield f"failed after {outcome.seconds:.0f} seconds: {failure.text()}"
        where = f"{failure.host}:{failure.rank}" if failure.rank is not None else failure.host
        if failure.rank != 0 or failure.kind != "rank":
            for line in [line for line in failure.lines if not line.startswith(HEADING)][-SHOWN:]:
                yield f"[{where}] {line}"
        log = f"rank-{failure.rank}.log" if failure.rank is not None else f"launcher-{failure.host}.log"
        yield f"its log: {start.logs / log}; all logs: {start.logs}"
        if outcome.stacks:
            yield f"stacks: {', '.join(str(start.logs / f'rank-{rank}.stack') for rank in outcome.stacks)}"
    if outcome.code == 0:
        return
    if outcome.code == STOPPED or failure is None or may_pass(failure, outcome.code):
        saved = newest_checkpoint(folder)
        kept = f"the last checkpoint is {saved}; go on" if saved else "there is no checkpoint; start again"
        yield f"{'stopped; ' if outcome.code == STOPPED else ''}{kept} with {start.again}"
    yield f"exit code {outcome.code}"


def newest_checkpoint(folder: Path) -> Path | None:
    """By its number, of those that are whole enough to have a manifest."""
    found = [path.parent for path in (folder / "checkpoints").glob("step-*/MANIFEST.json")]
    steps = [path for path in found if path.name.removeprefix("step-").isdecimal()]
    return max(steps, key=lambda path: int(path.name.removeprefix("step-")), default=None)


@contextmanager
def requests() -> Iterator[tuple[Requests, int]]:
    """Signals, counted, and a descriptor that can be read when one has come."""
    asked = Requests()
    readable, writable = os.pipe()
    for end in (readable, writable):
        os.set_blocking(end, False)
    every = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    numbers = [number for number in every if signal.getsignal(number) is not signal.SIG_IGN]  # as by nohup
    before = [signal.signal(number, lambda found, _: asked.take(found)) for number in numbers]
    old = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    try:
        yield asked, readable
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        os.close(readable)
        os.close(writable)
