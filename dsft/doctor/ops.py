"""Check DeepSpeed's compiled operations: `look` lists those that this host would have to compile and finds
its compiler, `check` reports whether it has what that takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dsft.doctor.results import CheckResult, passed
from dsft.engine.toolchain import build_folder, compiler_version, is_compiled, lacking_tool

if TYPE_CHECKING:
    from dsft.doctor.results import ProbeResults

CHECK = "compiler"


def look(ops: Sequence[str], on_cpu: bool) -> dict[str, Any]:
    """Return facts about the compiled operations.

    root      their folder
    lacking   operations still to be compiled
    fault     why they cannot be, and the remedy
    compiler  its name and version
    """
    lacking = [op for op in ops if not is_compiled(op, "cpu" if on_cpu else "cuda")]
    facts: dict[str, Any] = {"root": str(build_folder()), "ops": list(ops), "lacking": lacking, "fault": None}
    if lacking:
        facts["compiler"], facts["fault"] = compiler_version(), lacking_tool(lacking, with_cuda=not on_cpu)
    return facts


def check(probed: ProbeResults) -> Iterator[CheckResult]:
    for host, part in probed.part("build"):
        lacking = ", ".join(part["lacking"])
        if not part["ops"]:
            yield passed(CHECK, host, "nothing has to be compiled")
        elif not part["lacking"]:
            yield passed(CHECK, host, f"{', '.join(part['ops'])}: compiled in {part['root']}")
        elif part["fault"] is None:
            yield passed(CHECK, host, f"{part['compiler']}, for {lacking} (about a minute, once)")
        else:
            cause, do = part["fault"]
            allowed = part["lacking"] == ["cpu_adam"] and probed.needs.spec.parallel.allow_torch_adam
            yield CheckResult(
                CHECK, host, "warning" if allowed else "failure",
                f"{lacking} cannot be compiled: {cause}",
                "parallel.allow_torch_adam allows torch's AdamW instead, which is slower" if allowed
                else "the run needs them, and DeepSpeed compiles them at the start",
                do,
            )  # fmt: skip
