"""Run `dsft doctor`, and its quick checks, which `dsft launch` runs first: start a program on each host
(`dsft.doctor.probe`), compare the answers, print the findings."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dsft.doctor import devices, inputs, limits, network, ops, reach, software, storage
from dsft.doctor.hosts import PROBE, ProbeAnswers, ask_probes
from dsft.doctor.links import judged, network_of
from dsft.doctor.needs import Needs, needs_of
from dsft.doctor.results import CheckResult, ProbeResults, failures, listed
from dsft.doctor.show import as_json, print_findings, progress
from dsft.errors import Problem, SpecError, WorldError
from dsft.rank.launched import master_port
from dsft.rank.slurm import NODES, allocation
from dsft.remote import module_command
from dsft.spec.load import load_spec
from dsft.spec.schema import Spec

PORT = 29500
"""The port of rank 0 unless MASTER_PORT or the launcher sets another: the default of deepspeed and
torchrun."""

Measure = Callable[
    [Mapping[str, int], Mapping[str, str], str | None, Literal["ssh", "srun"]], Mapping[str, Any]
]
"""Measure the network: takes host -> slots, the ranks' variables, cluster.interface and what reaches hosts;
raises WorldError if the ranks fail."""

CHECKS: tuple[Callable[[ProbeResults], Iterator[CheckResult]], ...] = (
    reach.reach, reach.folders, software.check, devices.check, reach.hostfile, reach.programs, network.names,
    network.interface, network.connections, network.port, storage.shared, storage.space,
    storage.shared_memory, inputs.check, ops.check, limits.check,
)  # fmt: skip


def quick(
    spec: Path | str,
    overrides: Sequence[str] = (),
    *,
    hosts: Mapping[str, int] | None = None,
    port: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Sequence[CheckResult]:
    """Run all checks but those of the network's speed, and return the findings instead of raising. Takes at
    most 10 seconds for two hosts.

    hosts    host -> slots, in place of the spec's (those of a hostfile)
    port     where rank 0 will listen, by default MASTER_PORT or 29500
    environ  variables that every rank will get, by default those that `dsft.remote.forwarded` selects here

    Raises SpecError and MissingInputError as `dsft.spec.load.load_spec` does.
    """
    needs = _needs(Path(spec), overrides, hosts, port, environ)
    return findings_of(look(needs))


def doctor(
    spec: Path,
    overrides: Sequence[str],
    *,
    as_json_text: bool = False,
    measure: Measure | None = None,
    expect_gbit: float | None = None,
) -> Sequence[CheckResult]:
    """Run the checks and print the findings. measure: measures the links too, if no check has failed
    (`dsft.launcher.network`); expect_gbit: least Gbit/s of a link, in place of half of the fastest one's.
    Raises WorldError if a run could not start."""
    if expect_gbit is not None and measure is None:
        what = f"{expect_gbit:g} has no effect without --network; give that too"
        raise SpecError("The command line cannot be used.", [Problem("--expect-gbit", what)])
    began = time.monotonic()
    needs = _needs(spec, overrides, None, None, None)
    waiting = list(needs.hosts)
    with progress(quiet=as_json_text) as show:

        def answered(host: str) -> None:
            waiting.remove(host)
            show(f"waiting for {listed(waiting)} …" if waiting else "comparing the answers …")

        show(f"waiting for {listed(waiting)} …")
        probed = look(needs, answered)
        found, network = findings_of(probed), None
        slots = {host: count or 1 for host, count in needs.hosts.items()}
        if measure is not None and not failures(found) and sum(slots.values()) > 1:
            show(f"measuring with {sum(slots.values())} processes …")
            interface = needs.spec.cluster.interface if needs.spec.cluster else None
            try:
                network = network_of(list(slots), measure(slots, needs.environ, interface, needs.through))
                found += judged(network, expect_gbit)
            except WorldError as error:
                found.append(CheckResult(
                    "all-reduce", None, "failure", str(error), "a run's ranks would fail in the same way",
                    "check cluster.interface and the backend's variables (NCCL_DEBUG=INFO)",
                ))  # fmt: skip
    found, seconds = in_order(found), time.monotonic() - began
    if as_json_text:
        print(as_json(probed, found, seconds, network))
    else:
        print_findings(probed, found, seconds, network)
    bad = failures(found)
    if bad:
        checks = ", ".join(dict.fromkeys(finding.check for finding in bad))
        command = shlex.join([str(spec), *overrides])
        raise WorldError(
            f"a run of {command} could not start: {len(bad)} check(s) failed ({checks}); follow the remedies "
            "above, then try again."
        )
    return found


def look(needs: Needs, answered: Callable[[str], None] = lambda host: None) -> ProbeResults:
    """Probe all hosts at once. answered: called with each host that gave its first answer."""

    def wanted(first: Mapping[str, Mapping[str, object]]) -> Mapping[str, Mapping[str, object]]:
        tried = network.targets(first, needs.first, needs.port) if len(needs.hosts) > 1 else {}
        file = first.get(needs.first, {}).get("shared")
        return {host: {"file": file, "nonce": needs.nonce, "targets": tried} for host in first}

    orders = {host: needs.orders(host) for host in needs.hosts}
    answers = ask_probes(
        orders, wanted, lambda host: module_command(host, PROBE, needs.through), needs.environ, answered
    )
    return ProbeResults(needs, answers)


def findings_of(probed: ProbeResults) -> list[CheckResult]:
    """Return the findings of all checks, sorted as by `in_order`, else in the order of CHECKS."""
    found = [finding for check in CHECKS for finding in check(probed)]
    return in_order([*found, *_broken_probes(probed.answers)])


def in_order(found: Sequence[CheckResult]) -> list[CheckResult]:
    """Sort the findings: failures first, then warnings, then passes."""
    order = {"failure": 0, "warning": 1, "pass": 2}
    return sorted(found, key=lambda finding: order[finding.level])


def _broken_probes(answers: ProbeAnswers) -> Iterator[CheckResult]:
    """Yield a warning for each part of a probe that failed with an exception."""
    for host, facts in answers.first.items():
        for name, part in facts.items():
            if isinstance(part, Mapping) and set(part) == {"fault"}:
                yield CheckResult(
                    name, host, "warning", f"could not be examined ({part['fault']})",
                    "a problem there would go unnoticed", "report this error, with the output of --json",
                )  # fmt: skip


def _needs(
    spec: Path,
    overrides: Sequence[str],
    hosts: Mapping[str, int] | None,
    port: int | None,
    environ: Mapping[str, str] | None,
) -> Needs:
    checked = load_spec(spec, overrides)
    own = _slurms(checked) if hosts is None else hosts
    return needs_of(checked, spec, own, port or master_port(os.environ) or PORT, environ)


def _slurms(spec: Spec) -> Mapping[str, int] | None:
    """Return the hosts of this Slurm job, whose names Slurm chooses, with the slots of the spec. None outside
    a job, if the names are those of the spec, and if their number differs."""
    if spec.cluster is None or spec.cluster.launcher != "slurm" or not os.environ.get(NODES):
        return None
    given, promised = list(allocation(os.environ, 1).hosts), spec.cluster.hosts
    if set(given) == set(promised) or len(given) != len(promised):
        return None
    return dict(zip(given, promised.values(), strict=True))
