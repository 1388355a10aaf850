"""Stop a run in its first second if the launcher started other hosts or processes than promised. The promise
is the spec's cluster, or the hostfile on the launcher's command line, which is read from this process's
parents.

DeepSpeed only warns of a hostfile that does not exist, and then trains on this machine alone
(deepspeed/launcher/runner.py, fetch_hostfile); it does not pass the file's name to the ranks. So the
launcher's command line is looked up among this process's parents. Under pdsh it is not among them; there the
command that starts a host's ranks is, and it has all hosts and slots (`--world_info`).

Every rank reaches the same verdict, since all get the same numbers. What a rank cannot know alone, such as
the other hosts under torchrun, is compared once all ranks have met (`dsft.rank.places`).
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from dsft.errors import WorldError
from dsft.generate.hostfile import parse, render
from dsft.rank.ancestors import parents
from dsft.rank.launched import Launched, counted
from dsft.remote import is_this_machine
from dsft.spec.layout import divided_group, hosts_of_ranks, worlds
from dsft.spec.schema import Cluster, Parallel, Spec

DEFAULT_HOSTFILE = "/job/hostfile"
"""The hostfile that deepspeed reads if none is named (runner.py:35 DLTS_HOSTFILE)."""


@dataclass(frozen=True)
class Promise:
    """The hosts and processes that a run was promised.

    hosts     host -> slots; None if nothing was promised
    fewest    fewest of these hosts that the run may start with
    by        source of the promise: "cluster.hosts" or "--hostfile"
    hostfile  text of the launcher's hostfile; None without one
    slots     processes of each host that the launcher started; None where it does not set them
    """

    hosts: Mapping[str, int] | None = None
    fewest: int = 1
    by: str = ""
    hostfile: str | None = None
    slots: tuple[int, ...] | None = None


def check_promise(cluster: Cluster | None, launched: Launched) -> Promise:
    """Return the promise. Raises WorldError if processes, hosts or slots differ from the spec's cluster or
    from the hostfile."""
    hostfile, hosts = _check_hostfile(launched)
    started = next(_started(), None) if launched.launcher == "deepspeed" else None
    slots = tuple(started.values()) if started else launched.slots
    if hostfile is None and started and len(started) > 1:
        hostfile = render(started)
    if cluster is None:
        return Promise(hosts, len(hosts or ()), "--hostfile", hostfile, slots)
    fewest = cluster.min_hosts or len(cluster.hosts)
    promise = Promise(cluster.hosts, fewest, "cluster.hosts", hostfile, slots)
    _check_numbers(promise, launched)
    return promise


def check_groups(parallel: Parallel, on: Sequence[str]) -> None:
    """Raise WorldError if a group of ranks is on several hosts and the spec does not allow that. on: as in
    `divided_group`."""
    divided = divided_group(parallel, on)
    if divided:
        raise WorldError(f"{divided[0]}: {divided[1]}.")


def check_hosts(spec: Spec, hosts: Mapping[str, int], source: str) -> None:
    """Raise WorldError if ranks on these hosts (host -> slots) would break the cluster's promise, or would
    put a group of ranks on several hosts; for use before a start. source: where the hosts
    come from, for the message."""
    check_groups(spec.parallel, hosts_of_ranks(hosts))
    if spec.cluster is None:
        return
    promised, slots = spec.cluster.hosts, list(hosts.values())
    possible = worlds(promised, spec.cluster.min_hosts or len(promised))
    if sum(slots) in possible.get(len(slots), ()) and not Counter(slots) - Counter(promised.values()):
        return
    raise WorldError(
        f"cluster.hosts expects {counted(sum(promised.values()), 'process')} ({_listed(promised)}) but "
        f"{source} has {sum(slots)} ({_listed(hosts)}); give one with as many hosts and slots, or change "
        "cluster.hosts."
    )


def _listed(hosts: Mapping[str, int]) -> str:
    return " + ".join(f"{host} {slots}" for host, slots in hosts.items())


def _check_numbers(promise: Promise, launched: Launched) -> None:
    assert promise.hosts is not None
    possible = worlds(promise.hosts, promise.fewest)
    if launched.hosts is not None:
        possible = {launched.hosts: possible.get(launched.hosts, frozenset())}
    slots, local = promise.slots, launched.local_world_size
    fits = any(launched.world_size in sizes for sizes in possible.values())
    if fits and slots is not None:
        fits = not Counter(slots) - Counter(promise.hosts.values())
    elif fits and local is not None and len(promise.hosts) <= 2:  # on more hosts only some ranks would see it
        fits = local in promise.hosts.values()
    if not fits:
        raise broken_promise(promise, launched, slots)


def broken_promise(promise: Promise, launched: Launched, slots: Sequence[int] | None) -> WorldError:
    """Return the error: what was promised, what was started, and the likely cause. slots: processes of each
    host that were started; None if unknown."""
    assert promise.hosts is not None
    fewer = f", or of at least {promise.fewest} of these hosts" if promise.fewest < len(promise.hosts) else ""
    started = f"{launched.world_size}"
    if slots is not None and (len(slots) > 1 or len(promise.hosts) > 1):
        started += f" on {counted(len(slots), 'host')} ({' + '.join(map(str, slots))})"
    elif launched.hosts is not None and len(promise.hosts) > 1:
        started += f" on {counted(launched.hosts, 'host')}"
    return WorldError(
        f"{promise.by} expects {sum(promise.hosts.values())} processes ({_listed(promise.hosts)}){fewer} "
        f"but {launched.launcher} started {started}: {_cause(promise, launched)}."
    )


def _cause(promise: Promise, launched: Launched) -> str:
    assert promise.hosts is not None
    count, slots = len(promise.hosts), max(promise.hosts.values())
    each = "" if len(set(promise.hosts.values())) > 1 else f"={slots}"
    if launched.launcher == "python":
        return "plain python starts one; use deepspeed --hostfile or torchrun"
    if launched.launcher == "deepspeed" and promise.hostfile is None:
        own = f", or --num_gpus {slots} on that host" if count == 1 else ""
        return f"its --hostfile was left out, or names other hosts or slots; give it{own}"
    ways = {
        "torchrun": f"torchrun's --nnodes and --nproc_per_node decide that; give --nnodes={count} and "
        f"--nproc_per_node{each}",
        "srun": f"srun's --nodes and --ntasks-per-node decide that; give --nodes={count} and "
        f"--ntasks-per-node{each}",
        "mpirun": "mpirun's -n and hostfile decide that; give it the same hosts and slots",
        "environment": "WORLD_SIZE decides that; set it to the sum of the slots of all hosts",
    }
    way = ways.get(launched.launcher, "give the launcher the same hosts and slots")
    return f"{way}, or change cluster.hosts"


def _check_hostfile(launched: Launched) -> tuple[str | None, Mapping[str, int] | None]:
    """Return the hostfile's text and its hosts (host -> slots; None where options of deepspeed leave some
    out); (None, None) without a hostfile."""
    for command, folder in _parents():
        options = deepspeed_options(command)
        named = None if options is None else named_hostfile(options)
        if options is None or (named is None and not Path(DEFAULT_HOSTFILE).is_file()):
            continue
        path = Path(folder, named or DEFAULT_HOSTFILE)
        if not path.is_file():
            raise WorldError(
                f"--hostfile {named} does not exist (looked in {folder}), and deepspeed would "
                f"train on this machine alone with {counted(launched.world_size, 'process')}; give one that "
                "exists, or leave --hostfile out."
            )
        text = path.read_text(encoding="utf-8", errors="backslashreplace")
        hosts = parse(text, str(path))
        if any(word.partition("=")[0] in CHOOSE for word in options):
            return text, None
        if sum(hosts.values()) != launched.world_size:
            raise WorldError(
                f"--hostfile {path} lists {counted(sum(hosts.values()), 'process')} but "
                f"{launched.world_size} were started; correct its slots."
            )
        (only, *others) = hosts
        is_elsewhere = not others and "--force_multi" not in options and not is_this_machine(only)
        if launched.launcher == "deepspeed" and is_elsewhere:
            raise WorldError(
                f"--hostfile {path} names {only} alone, which is not this machine, and deepspeed starts a "
                "single host's processes here; give --force_multi too, or name this machine."
            )
        return text, hosts
    return None, None


def _started() -> Iterator[dict[str, int]]:
    """Yield host -> processes from the command line of deepspeed's launch.py, which has started this host's
    ranks (deepspeed/launcher/launch.py)."""
    for command, _ in _parents():
        for word in command:
            name, _, value = word.partition("=")
            if name == "--world_info" and "deepspeed.launcher.launch" in command:
                try:
                    world = json.loads(base64.urlsafe_b64decode(value))
                    yield {str(host): len(slots) for host, slots in world.items()}
                except (ValueError, AttributeError, TypeError):  # another version's format
                    return


def _parents() -> Iterator[tuple[list[str], str]]:
    """Yield the command and working folder of each ancestor of this process."""
    for parent in parents():
        try:
            yield parent.cmdline(), parent.cwd()
        except psutil.Error:  # another user's process, or one that has just ended
            continue


def deepspeed_options(command: Sequence[str]) -> list[str] | None:
    """Return the words of a command line such as `python …/deepspeed --hostfile F train.py …` between
    `deepspeed` and the script, whose own options follow it. None if the command is not deepspeed's."""
    words = [Path(word).name == "deepspeed" or word == "deepspeed.launcher.runner" for word in command[:4]]
    if not any(words):
        return None
    options = list(command[words.index(True) + 1 :])
    script = next((place for place, word in enumerate(options) if word.endswith(".py")), len(options))
    return options[:script]


def named_hostfile(options: Sequence[str]) -> str | None:
    """Return the hostfile that deepspeed's options name; None if they name none."""
    for word, following in zip(options, [*options[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in {"-H", "--hostfile"}:
            return value or following
    return None


CHOOSE = frozenset({
    "-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators",
})  # fmt: skip
"""Options by which deepspeed starts fewer processes than the hostfile lists."""
