"""The `dsft` command line.

Each command imports what it needs only when it runs, so that help and validation are fast.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from dsft import __version__
from dsft.commands.groups import AFTER, CLUSTER, LOOK, START, TRAIN, Command, Groups, normalized
from dsft.errors import DsftError, SpecError, StorageError, printable
from dsft.spec.task import task_names
from dsft.system.redact import print_fault, redact_values
from dsft.system.run_folder import named_checkpoint, named_export

F = TypeVar("F", bound=Callable[..., Any])
app = typer.Typer(
    name="dsft",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    cls=Groups,
    context_settings={"token_normalize_func": normalized},
    epilog="Documentation: docs/README.md. An example of a command: dsft COMMAND --help.",
)

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec, a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", help="Override values of the spec, such as train.max_steps=10"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
CheckpointPath = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT", help="A folder checkpoints/step-N, or a run (its folder or name): its newest."
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Number of processes on this machine; by default one per device."),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print every step and the details of the start.")
]
SpecOut = Annotated[Path | None, typer.Option(help="File to write; by default specs/NAME.yaml.")]


def command(group: str, example: str, parent: typer.Typer = app, name: str | None = None) -> Callable[[F], F]:
    """Return a decorator that adds a command, with an example for its help."""
    return parent.command(name, cls=Command, rich_help_panel=group, epilog=f"Example: {example}")


def main() -> None:
    """Run the `dsft` command. An expected error is printed as its message, with its exit code, never as a
    traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # for a terminal without UTF-8, or a path that is not UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="dsft")
    except DsftError as error:
        _print(f"error: {redact_values(str(error), os.environ)}", error=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            print_fault(error)
            sys.exit(1)
        print(
            "error: the output cannot be written (no space left on device); free some space", file=sys.stderr
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what is still buffered
        sys.exit(StorageError.exit_code)
    except Exception as error:
        print_fault(error)
        sys.exit(1)


def _print(text: str, *, error: bool = False) -> None:
    print(printable(text), file=sys.stderr if error else sys.stdout)


def _set_verbose(wanted: bool) -> None:
    """Have this process and all that it starts print more."""
    from dsft.system.process import VERBOSE

    if wanted:
        os.environ[VERBOSE] = "1"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dsft {__version__}")
        raise typer.Exit


@app.callback()
def dsft(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune causal language models with DeepSpeed, from one YAML file: the spec."""


@command(START, "dsft init mychat --model Qwen/Qwen3-4B --data data/chats.jsonl")
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the run.")],
    task: Annotated[str, typer.Option(help=f"{task_names()}.")] = "sft",
    model: Annotated[
        str | None,
        typer.Option(help="Hub id or folder of your model; by default a tiny one with builtin rows."),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Your data file, folder or hub data set; may be repeated.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters instead of all weights.")] = False,
    out: SpecOut = None,
) -> None:
    """Write a new spec with comments. Its JSON Schema, for editors, is written to the same folder."""
    from dsft.spec.template import write_template

    path = out or Path("specs") / f"{name}.yaml"
    for file in write_template(name, task, path, model, data or (), lora=lora):
        _print(f"wrote {file}")


@command(START, "dsft convert qwen3_lora_sft.yaml")
def convert(
    file: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | -- COMMAND",
            help="The config (YAML, JSON), a shell script (.sh), or a training command after --.",
        ),
    ],
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Tool of the config: llamafactory, axolotl, trl (also for transformers), ms-swift or "
            "deepspeed; by default it is recognized by the keys.",
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help=f"{task_names()}; by default as in the config.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id or folder of the model, if the config names none.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Data file or hub data set, if the config names none; may be repeated."),
    ] = None,
    dataset_info: Annotated[Path | None, typer.Option(help="LLaMA-Factory's dataset_info.json.")] = None,
    out: SpecOut = None,
) -> None:
    """Convert the config or the command of another tool into a spec."""
    from dsft.convert.command import convert_file, listed

    is_file = len(file) == 1 and (" " not in file[0] or Path(file[0]).exists())
    source = Path(file[0]) if is_file else file[0] if len(file) == 1 else shlex.join(file)
    done = convert_file(source, tool, task, model, data, dataset_info, out)
    _print(f"wrote {done.path} from a config of {done.title}: {done.carried} keys carried over")
    if done.left:
        _print("not carried over:")
        for line in listed(done.left):
            _print(f"  {line}")
    if done.mistakes is not None:
        _print(f"{done.path} is written, but not valid yet:", error=True)
        _print(done.mistakes, error=True)
        raise typer.Exit(SpecError.exit_code)
    _print(f"next: dsft validate {done.path}, then dsft preview {done.path}")


@command(LOOK, "dsft validate specs/mychat.yaml")
def validate(
    spec: SpecPath,
    overrides: Overrides = None,
    no_files: Annotated[
        bool, typer.Option("--no-files", help="Do not look at the files that the spec names.")
    ] = False,
) -> None:
    """Check a spec and the first rows of its data, without GPU and network, and list all mistakes."""
    from dsft.report.packages import missing_packages
    from dsft.spec.cluster import cluster_batch
    from dsft.spec.load import load_spec
    from dsft.spec.rules import warnings
    from dsft.spec.sources import BUILTIN_PREFIX
    from dsft.spec.summary import summary

    checked = load_spec(spec, overrides or (), check_files=not no_files)
    batch, found = cluster_batch(checked), [*warnings(checked, check_files=not no_files)]
    sources = (*checked.data.train, *checked.data.eval)
    if not no_files and not all(source.path.startswith(BUILTIN_PREFIX) for source in sources):
        from dsft.data.cache.store import check_first_rows

        found += check_first_rows(checked)
    for warning in (*found, *missing_packages(checked)):
        _print(f"warning: {warning}", error=True)
    _print(f"valid: {spec}")
    _print(summary(checked))
    if batch is not None:
        _print(f"  batch     {batch.equation()}")


@command(LOOK, "dsft plan specs/mychat.yaml --processes 8 --compare")
def plan(  # noqa: PLR0913, PLR0917  an argument is an option
    spec: SpecPath,
    overrides: Overrides = None,
    as_json: Json = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="List every DeepSpeed key with its value and the reason.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes, for a spec without a cluster.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare all layouts on these hosts: which fit, and which not.")
    ] = False,
    like: Annotated[
        str | None, typer.Option(metavar="RUN", help="Take the speed of this run (its folder or name).")
    ] = None,
) -> None:
    """Show batch sizes, steps and hours, ranks, memory and DeepSpeed keys. This needs no GPU."""
    from dsft.plan.show import print_plan
    from dsft.preview.count import durations

    if compare and like is not None:
        raise typer.BadParameter("--compare has estimates of all layouts, and no run's speed; leave one out")
    ways = {"as_json": as_json, "explain": explain, "comparing": compare}
    print_plan(spec, overrides or (), **ways, world_size=processes, measure=durations(like))


@command(LOOK, "dsft preview specs/mychat.yaml --html rows.html")
def preview(  # noqa: PLR0913, PLR0917  an argument is an option
    spec: SpecPath,
    overrides: Overrides = None,
    rows: Annotated[
        int | None,
        typer.Option(min=0, help="Number of rows to show, from the first; by default 5, or 100 with --json."),
    ] = None,
    row: Annotated[
        str | None, typer.Option(metavar="N|FILE:LINE", help="Show one row, with every token and its id.")
    ] = None,
    worst: Annotated[
        bool,
        typer.Option("--worst", help="Show the longest, the most truncated and other extreme rows."),
    ] = False,
    problems: Annotated[
        bool, typer.Option("--problems", help="List rows that are invalid, truncated, dropped or duplicated.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything to an HTML page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the rows as the model will see them. This needs no GPU and no weights."""
    from dsft.preview.command import preview as show

    show(
        spec, overrides or (), rows=rows, row=row, worst=worst, problems=problems, html=html, as_json=as_json
    )


@command(LOOK, "dsft prove specs/mychat.yaml")
def prove(
    spec: SpecPath,
    overrides: Overrides = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes; by default 2, or the fewest of the layout."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a small run in the spec's mode with a plain PyTorch loop, and print a certificate."""
    from dsft.prove.command import prove as proved

    raise typer.Exit(proved(spec, overrides or (), processes, as_json=as_json))


@command(LOOK, "dsft rehearse specs/mychat.yaml --ranks 64")
def rehearse(
    spec: SpecPath,
    ranks: Annotated[int, typer.Option(help="Number of ranks of the run, up to 512.")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show memory, collectives and files of a run on N GPUs that are not there, by one rank of each kind."""
    from dsft.commands.rehearse import rehearse as rehearsed

    rehearsed(spec, overrides or (), ranks, as_json=as_json)


@command(CLUSTER, "dsft generate specs/mychat.yaml --check")
def generate(
    spec: SpecPath,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option(help="Folder in which to write ds_configs, hostfiles and scripts/launch.")
    ] = Path(),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a file differs from what the spec gives.")
    ] = False,
) -> None:
    """Write the DeepSpeed JSON, hostfile and launch script of a spec."""
    from dsft.generate.files import generate_files

    if not generate_files(spec, overrides or (), out, check=check):
        raise typer.Exit(1)


@command(CLUSTER, "dsft hostfile 'node[01-16]:8' --out hostfiles/mine")
def hostfile(  # noqa: PLR0913, PLR0917  an argument is an option
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOSTS:SLOTS", help="Hosts and slots, such as 'node[01-16]:8'."),
    ] = None,
    from_slurm: Annotated[
        bool, typer.Option("--from-slurm", help="Take the hosts of the current Slurm job.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes (slots) per host.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; by default the hostfile is printed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Make a hostfile from host names or from a Slurm job."""
    from dsft.commands.hostfile import hosts_of, write_hostfile

    write_hostfile(hosts_of(hosts or (), os.environ, processes, from_slurm=from_slurm), out, force=force)


@command(TRAIN, "dsft train specs/mychat.yaml optim.learning_rate=1e-5")
def train(
    spec: SpecPath,
    overrides: Overrides = None,
    processes: Processes = None,
    verbose: Verbose = False,
) -> None:
    """Train on this machine, on all of its GPUs or else on the CPU. If one process fails, all are ended."""
    from dsft.launcher.command import Options
    from dsft.launcher.command import launch as start

    _set_verbose(verbose)
    raise typer.Exit(start(spec, overrides or (), Options(processes=processes, only_here=True)))


@command(TRAIN, "dsft launch specs/mychat.yaml --restarts 3")
def launch(  # noqa: PLR0913, PLR0917  an argument is an option
    spec: SpecPath,
    overrides: Overrides = None,
    launcher: Annotated[str | None, typer.Option(help="dsft or slurm; by default cluster.launcher.")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Number of restarts from the last checkpoint after a failure.")
    ] = 0,
    hostfile: Annotated[
        Path | None, typer.Option(help="Hostfile to use instead of the spec's hosts.")
    ] = None,
    processes: Processes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started on each host, and start nothing.")
    ] = False,
    no_doctor: Annotated[bool, typer.Option("--no-doctor", help="Do not check the hosts first.")] = False,
    verbose: Verbose = False,
) -> None:
    """Start a run on all of its hosts and watch it. If one process fails, all of them are ended."""
    from dsft.launcher.command import Options
    from dsft.launcher.command import launch as start

    _set_verbose(verbose)
    options = Options(launcher, restarts, hostfile, processes, dry_run, not no_doctor)
    raise typer.Exit(start(spec, overrides or (), options))


@command(TRAIN, "dsft reference specs/mydpo.yaml --processes 4")
def reference(
    spec: SpecPath,
    overrides: Overrides = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; by default one per GPU, or the fewest.")
    ] = None,
) -> None:
    """Score the pairs of a preference run with its reference. The same command continues after a stop."""
    from dsft.reference.start import start

    raise typer.Exit(start(spec, overrides or (), processes))


@command(AFTER, "dsft report mychat other")
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Names or folders of runs.")],
    ask: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Question for the base model and the export; may be repeated."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What dsft answer wrote; by default RUN/answers.jsonl."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Page to write; by default RUN/report.html.")
    ] = None,
) -> None:
    """Write an HTML page about one run or several. It has curves, memory, rows, answers and the spec."""
    from dsft.commands.report import write_report

    _print(f"wrote {write_report(runs, ask or (), out, answers)}")


@command(AFTER, "dsft status mychat")
def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Folder of a run or its name, or a folder of runs (default runs)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a run is doing on every host, or how it ended; without a name, list all runs."""
    from dsft.commands.status import print_status

    print_status(run, as_json=as_json)


@command(AFTER, "dsft verify mychat")
def verify(checkpoint: CheckpointPath) -> None:
    """Read a whole checkpoint and report whether it is intact."""
    folder = named_checkpoint(checkpoint)  # before the imports, which take seconds
    from dsft.checkpoint.read import verify as verified

    _print(verified(folder))


@command(AFTER, "dsft eval mychat --data data/test.jsonl", name="eval")
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A run, a checkpoint, a spec, or a model or adapter.")
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Rows to evaluate, by default the held-out ones; may be repeated."),
    ] = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Evaluate held-out rows without training, exactly as a run does."""
    from dsft.commands.evaluate import evaluate as evaluated

    raise typer.Exit(evaluated(target, overrides or (), data or (), processes, as_json=as_json))


@command(AFTER, "dsft replay mychat 120 --blame")
def replay(  # noqa: PLR0913, PLR0917  an argument is an option
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a run, such as runs/NAME, or its name.")
    ],
    step: Annotated[int, typer.Argument(metavar="STEP", help="The step, from 1.")],
    overrides: Overrides = None,
    blame: Annotated[
        bool, typer.Option("--blame", help="Order rows and layers by their share of the loss and gradient.")
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE:LINE", help="Compute the step without this row too; may be repeated."),
    ] = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Compute a step of a run again, and show what each of its rows and layers did."""
    from dsft.commands.replay import replay as replayed

    given = run, step, overrides or (), without or (), processes
    raise typer.Exit(replayed(*given, blame=blame, as_json=as_json))


@command(AFTER, "dsft export mychat merged --merged")
def export(
    checkpoint: CheckpointPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the whole model, with adapters merged into its weights.")
    ] = False,
    dequantized: Annotated[
        bool, typer.Option("--dequantized", help="As --merged, into the 4-bit weights of training.")
    ] = False,
) -> None:
    """Export a checkpoint as a Hugging Face folder. It has the model, or the adapter if one was trained."""
    folder = named_checkpoint(checkpoint)  # before the imports, which take seconds
    from dsft.checkpoint.export import export_checkpoint

    _print(export_checkpoint(folder, out, merged=merged, dequantized=dequantized))


@command(AFTER, "dsft push mychat OWNER/mychat")
def push(
    export: Annotated[
        Path, typer.Argument(metavar="EXPORT", help="Folder of an export, or a run (its folder or name).")
    ],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository of the hub, such as OWNER/NAME.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch to write to, made if needed; by default the main one.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody read it; by default it is private.")
    ] = False,
) -> None:
    """Upload an export to the Hugging Face hub. The token is HF_TOKEN's or that of `hf auth login`."""
    folder = named_export(export)  # before the imports, which take seconds
    from dsft.commands.push import push as pushed

    _print(pushed(folder, repo, revision, public=public))


@command(AFTER, "dsft answer mychat --data data/test.jsonl")
def answer(  # noqa: PLR0913, PLR0917  an argument is an option
    export: Annotated[
        Path, typer.Argument(metavar="EXPORT", help="Folder of a model, or a run (its folder or name).")
    ],
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Rows with prompts; by default the held-out ones of a run's spec."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL file to write; by default answers.jsonl in a run's folder."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of rows that have none.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of probability to sample from.")
    ] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts in memory at once.")] = 8,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the rows, one per GPU.")] = 1,
) -> None:
    """Generate answers to the rows of a file. The same command continues after a stop."""
    from dsft.commands.answer import answer as answered
    from dsft.commands.answer import defaults
    from dsft.commands.chat import Sampling

    rows, file = defaults(export, data, out)
    sampling = Sampling(temperature, top_p, max_new_tokens, seed)
    _print(answered(export, rows, file, sampling, system, batch_size, processes))


@command(AFTER, "dsft score myreward --data answers.jsonl --out rewards.jsonl")
def score(
    export: Annotated[
        Path,
        typer.Argument(metavar="EXPORT", help="Folder of a reward model or a classifier, or a run's name."),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Rows to score; {path: FILE, columns: {text: review}} renames columns."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write, a line of JSON for each row.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Answers in memory at once.")] = 8,
) -> None:
    """Write the rewards that a reward model gives the answers of a file, or the labels of a classifier."""
    from dsft.commands.score import score as scored

    _print(scored(export, data, out, batch_size))


@command(AFTER, "dsft chat mychat --temperature 0")
def chat(
    export: Annotated[
        Path, typer.Argument(metavar="EXPORT", help="Folder of a model, or a run (its folder or name).")
    ],
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.7,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens of this total probability."),
    ] = 0.9,
    max_new_tokens: Annotated[
        int,
        typer.Option(min=1, help="Maximum tokens of an answer."),
    ] = 512,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the sampling, for repeatable answers.")
    ] = None,
) -> None:
    """Chat with an exported model. From a pipe, each line is a prompt."""
    folder = named_export(export)  # before the imports, which take seconds
    from dsft.commands.chat import Sampling
    from dsft.commands.chat import chat as talk

    talk(folder, Sampling(temperature, top_p, max_new_tokens, seed), system)


tokenizer = typer.Typer(no_args_is_help=True, help="Train a tokenizer.")
app.add_typer(tokenizer, name="tokenizer", rich_help_panel=START)


@command(START, "dsft tokenizer train 'texts/*.txt' --out mine --vocab-size 32000", tokenizer, "train")
def train_tokenizer(  # noqa: PLR0913, PLR0917  an argument is an option
    files: Annotated[list[str], typer.Argument(metavar="FILES…", help="Files, folders or patterns.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    vocab_size: Annotated[
        int,
        typer.Option(min=1, help="Number of tokens, with the special ones."),
    ],
    model: Annotated[
        str, typer.Option(help="unigram, bpe (both of sentencepiece) or byte_bpe.")
    ] = "byte_bpe",
    character_coverage: Annotated[
        float,
        typer.Option(
            min=0.9,
            max=1.0,
            help="Share of the text's characters that get a token; the others are encoded as bytes.",
        ),
    ] = 0.9995,
    special: Annotated[
        list[str] | None, typer.Option(help="Additional special token; may be repeated.")
    ] = None,
    sample_mb: Annotated[float, typer.Option(min=0.001, help="Most megabytes of text to train on.")] = 200.0,
) -> None:
    """Train a tokenizer on text and write it for transformers. It is checked that it reproduces the text."""
    from dsft.data.tokenizer.training import TokenizerOptions
    from dsft.data.tokenizer.training import train_tokenizer as train

    train(
        TokenizerOptions(files, out, vocab_size, model, character_coverage, special or (), sample_mb),
        print,
    )


data = typer.Typer(no_args_is_help=True, help="Tokenize the rows of a spec before its runs.")
app.add_typer(data, name="data", rich_help_panel=TRAIN)


@command(TRAIN, "dsft data build specs/mychat.yaml", data, "build")
def data_build(spec: SpecPath, overrides: Overrides = None) -> None:
    """Tokenize and cache all rows of a spec. This needs no GPU; rows that are cached already are kept."""
    from dsft.commands.data_build import build

    build(spec, overrides or ())


@command(CLUSTER, "dsft doctor specs/mychat.yaml --network")
def doctor(
    spec: SpecPath,
    overrides: Overrides = None,
    as_json: Json = False,
    network: Annotated[
        bool, typer.Option("--network", help="Measure every link between the hosts, and an all-reduce.")
    ] = False,
    expect_gbit: Annotated[
        float | None,
        typer.Option(min=0.0, help="With --network: warn of links slower than this, in Gbit/s."),
    ] = None,
) -> None:
    """Check every host for problems that would stop a run from starting (exit code 69 if any)."""
    from dsft.doctor.command import doctor as look
    from dsft.launcher.network import measure

    by = measure if network else None
    look(spec, overrides or (), as_json_text=as_json, measure=by, expect_gbit=expect_gbit)


@command(START, "dsft schema > spec.schema.json")
def schema() -> None:
    """Print the JSON Schema of a spec."""
    from dsft.spec.template import schema_text

    print(schema_text(), end="")
