"""The `dsft` command line.

Each command imports what it needs only when it runs, so that help and validation are fast.
"""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from dsft import __version__
from dsft.errors import DsftError, SpecError, StorageError, printable
from dsft.report.redact import print_fault, redact_values

app = typer.Typer(
    name="dsft",
    help="Fine-tune causal language models under DeepSpeed, from one experiment spec.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value", help="Values that replace its own: train.max_steps=10", show_default=False
    ),
]


def main() -> None:
    """Run the `dsft` command. An expected error is printed as its message, with its exit code, never as a
    traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal without UTF-8, a path that is not UTF-8
    try:
        app(prog_name="dsft")
    except DsftError as error:
        _say(f"error: {redact_values(str(error), os.environ)}", error=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            print_fault(error)
            sys.exit(1)
        print("error: the output cannot be written (no space left on device); free some", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what is still buffered
        sys.exit(StorageError.exit_code)
    except Exception as error:
        print_fault(error)
        sys.exit(1)


def _say(text: str, *, error: bool = False) -> None:
    print(printable(text), file=sys.stderr if error else sys.stdout)


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
    """Fine-tune causal language models under DeepSpeed, from one experiment spec."""


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the run.", show_default=False)],
    task: Annotated[str, typer.Option(help="sft, pretrain or dpo.")] = "sft",
    out: Annotated[
        Path | None, typer.Option(help="The file; by default specs/NAME.yaml.", show_default=False)
    ] = None,
) -> None:
    """Write a commented spec, and the JSON Schema that editors read beside it."""
    from dsft.spec.template import write_template

    for file in write_template(name, task, out or Path("specs") / f"{name}.yaml"):
        print(f"wrote {file}")


@app.command()
def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The config, YAML or JSON.", show_default=False)
    ],
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="llamafactory, axolotl, trl (also transformers), ms-swift or deepspeed; by default "
            "recognized by its keys.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="sft, pretrain or dpo; by default what the config says.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id or folder of the model, for a config that names none.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Data file or hub data set, for a config that names none; may be repeated."),
    ] = None,
    dataset_info: Annotated[
        Path | None, typer.Option(help="LLaMA-Factory's dataset_info.json.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file; by default specs/NAME.yaml.", show_default=False)
    ] = None,
) -> None:
    """Convert the config of another tool into a spec."""
    from dsft.convert.command import convert_file, listed

    done = convert_file(file, tool, task, model, data, dataset_info, out)
    _say(f"wrote {done.path} from a config of {done.title}: {done.carried} keys carried over")
    if done.left:
        _say("not carried over:")
        for line in listed(done.left):
            _say(f"  {line}")
    if done.mistakes is not None:
        _say(f"{done.path} is written, but not valid yet:", error=True)
        _say(done.mistakes, error=True)
        raise typer.Exit(SpecError.exit_code)
    _say(f"next: dsft validate {done.path}, then dsft preview {done.path}")


@app.command()
def validate(
    spec: SpecPath,
    overrides: Overrides = None,
    no_files: Annotated[
        bool, typer.Option("--no-files", help="Do not look for the files that it names.")
    ] = False,
) -> None:
    """Tell all mistakes of a spec at once; no GPU, no network."""
    from dsft.plan.promised import load, promised_batch
    from dsft.spec.rules import warnings
    from dsft.spec.summary import summary

    checked = load(spec, overrides or (), check_files=not no_files)
    batch = promised_batch(checked)
    for warning in warnings(checked):
        _say(f"warning: {warning}", error=True)
    _say(f"valid: {spec}")
    _say(summary(checked))
    if batch is not None:
        _say(f"  batch     {batch.equation()}")


@app.command()
def plan(
    spec: SpecPath,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: sizes in bytes, every DeepSpeed key.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Every DeepSpeed key with its value and the reason.")
    ] = False,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Processes, where the spec has no cluster.", show_default=False)
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Every layout of these hosts: what fits, and why others do not.")
    ] = False,
) -> None:
    """Show what a spec means: batch, ranks, memory, DeepSpeed keys; no GPU needed."""
    if compare:
        from dsft.plan.show_compare import print_comparison

        print_comparison(spec, overrides or (), as_json=as_json, world_size=world_size)
        return
    from dsft.plan.show import print_plan

    print_plan(spec, overrides or (), as_json=as_json, explain=explain, world_size=world_size)


@app.command()
def preview(  # noqa: PLR0913, PLR0917  an argument is an option
    spec: SpecPath,
    overrides: Overrides = None,
    rows: Annotated[
        int | None,
        typer.Option(min=0, help="Rows to show, from the first: 5, or 100 with --json.", show_default=False),
    ] = None,
    row: Annotated[
        str | None,
        typer.Option(metavar="N|FILE:LINE", help="One row, with every token and its id.", show_default=False),
    ] = None,
    worst: Annotated[
        bool, typer.Option("--worst", help="The longest rows, the least trained, the most cut, and more.")
    ] = False,
    problems: Annotated[
        bool, typer.Option("--problems", help="Every row that is bad, cut, dropped or said twice.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all of it as a page.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the rows as the model will see them, and what the run makes of them; no GPU, no weights."""
    from dsft.preview.command import preview as show

    show(
        spec, overrides or (), rows=rows, row=row, worst=worst, problems=problems, html=html, as_json=as_json
    )


@app.command()
def generate(
    spec: SpecPath,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option(help="The folder that gets ds_configs, hostfiles and scripts/launch.")
    ] = Path(),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a file differs from the spec.")
    ] = False,
) -> None:
    """Write the DeepSpeed JSON, the hostfile and the launch script of a spec."""
    from dsft.generate.files import generate_files

    if not generate_files(spec, overrides or (), out, check=check):
        raise typer.Exit(1)


@app.command()
def hostfile(  # noqa: PLR0913, PLR0917  an argument is an option
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOSTS:SLOTS", help="Such as 'node[01-16]:8'.", show_default=False),
    ] = None,
    from_slurm: Annotated[
        bool, typer.Option("--from-slurm", help="The hosts of the Slurm job that this runs in.")
    ] = False,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Processes of each host.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it there.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also over a file that differs.")] = False,
) -> None:
    """Make a hostfile, of ranges of names or of a Slurm job."""
    from dsft.commands.hostfile import hosts_of, put

    put(hosts_of(hosts or (), os.environ, slots, from_slurm=from_slurm), out, force=force)


@app.command()
def launch(  # noqa: PLR0913, PLR0917  an argument is an option
    spec: SpecPath,
    overrides: Overrides = None,
    launcher: Annotated[
        str | None,
        typer.Option(help="dsft, deepspeed, torchrun, slurm; default: cluster.launcher.", show_default=False),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Start again from the last checkpoint, so many times, after a failure.")
    ] = 0,
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Hosts and slots, in place of the spec's.", show_default=False),
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--num_gpus",
            "--num-gpus",
            min=1,
            show_default=False,
            help="Processes on this machine, for a spec without a cluster; by default one a device.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started on each host; start nothing.")
    ] = False,
    no_doctor: Annotated[bool, typer.Option("--no-doctor", help="Do not examine the hosts first.")] = False,
) -> None:
    """Start a run on all of its hosts, watch it, and end all of it together."""
    from dsft.launcher.command import Options
    from dsft.launcher.command import launch as start

    options = Options(launcher, restarts, hostfile, num_gpus, dry_run, not no_doctor)
    raise typer.Exit(start(spec, overrides or (), options))


@app.command()
def reference(
    spec: SpecPath,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; by default one a GPU of this host.", show_default=False),
    ] = None,
) -> None:
    """Score the pairs of a preference run by its reference, ahead of the run; it goes on where it stopped."""
    from dsft.reference.start import start

    raise typer.Exit(start(spec, overrides or (), ranks))


@app.command()
def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="runs/NAME, or NAME.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell what a run is doing, on every host, or how it ended."""
    from dsft.commands.status import print_status

    print_status(run, as_json=as_json)


@app.command()
def verify(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A folder checkpoints/step-N.", show_default=False)
    ],
) -> None:
    """Read all of a checkpoint and say whether it is whole."""
    from dsft.checkpoint.read import verify as verified

    _say(verified(checkpoint))


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A folder checkpoints/step-N.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the whole model, adapters merged into its weights.")
    ] = False,
) -> None:
    """Make a Hugging Face folder of a checkpoint: the model, or the adapter where one was trained."""
    from dsft.checkpoint.export import export_checkpoint

    _say(export_checkpoint(checkpoint, out, merged=merged))


@app.command()
def chat(
    export: Annotated[
        Path, typer.Argument(metavar="EXPORT", help="A model's folder: runs/NAME/export.", show_default=False)
    ],
    system: Annotated[str | None, typer.Option(help="The system prompt.", show_default=False)] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this probability.")
    ] = 0.9,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--max_new_tokens", min=1, help="Longest answer, in tokens.")
    ] = 512,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same answers each time.", show_default=False)
    ] = None,
) -> None:
    """Talk to an exported model; from a pipe, one answer a line."""
    from dsft.commands.chat import Sampling
    from dsft.commands.chat import chat as talk

    talk(export, Sampling(temperature, top_p, max_new_tokens, seed), system)


tokenizer = typer.Typer(no_args_is_help=True, help="Make a tokenizer.")
app.add_typer(tokenizer, name="tokenizer")


@tokenizer.callback()
def of_tokenizers() -> None:
    """Make a tokenizer."""


@tokenizer.command("train")
def train_tokenizer(  # noqa: PLR0913, PLR0917  an argument is an option
    files: Annotated[
        list[str], typer.Argument(metavar="FILES…", help="Files, folders, patterns.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    vocab_size: Annotated[
        int, typer.Option("--vocab_size", "--vocab-size", min=1, help="Tokens, all told.", show_default=False)
    ],
    model: Annotated[str, typer.Option(help="unigram, bpe (both sentencepiece's) or byte_bpe.")] = "byte_bpe",
    character_coverage: Annotated[
        float,
        typer.Option(
            "--character_coverage",
            "--character-coverage",
            help="Share of the text's characters that get a token; the others are bytes.",
        ),
    ] = 0.9995,
    special: Annotated[
        list[str] | None, typer.Option(help="A further special token; can be repeated.", show_default=False)
    ] = None,
    sample_mb: Annotated[
        float, typer.Option("--sample_mb", "--sample-mb", min=0.001, help="Megabytes to learn from.")
    ] = 200.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample.")] = 0,
) -> None:
    """Learn a tokenizer from text, check that text survives it, and write a folder for transformers."""
    from dsft.data.tokenizer.training import TokenizerOptions, kind_named
    from dsft.data.tokenizer.training import train_tokenizer as train

    kind = kind_named(model)
    train(
        TokenizerOptions(files, out, vocab_size, kind, character_coverage, special or (), sample_mb, seed),
        print,
    )


data = typer.Typer(no_args_is_help=True, help="Make the tokens of a spec's rows ahead of its runs.")
app.add_typer(data, name="data")


@data.callback()
def of_data() -> None:
    """Make the tokens of a spec's rows ahead of its runs."""


@data.command(name="build")
def data_build(spec: SpecPath, overrides: Overrides = None) -> None:
    """Make the tokens of all rows, on a machine that needs no GPU; what is there already is kept."""
    from dsft.commands.data_build import build

    build(spec, overrides or ())


@app.command()
def doctor(
    spec: SpecPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    network: Annotated[
        bool, typer.Option("--network", help="Measure every link between the hosts, and an all-reduce.")
    ] = False,
    expect_gbit: Annotated[
        float | None,
        typer.Option(min=0.0, help="With --network: warn of a link slower than this, in Gbit/s."),
    ] = None,
) -> None:
    """Look at all hosts of a spec, and say what a run could not start with; exit code 69 then."""
    from dsft.doctor.command import doctor as look

    look(spec, overrides or (), as_json_text=as_json, with_network=network, expect_gbit=expect_gbit)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec."""
    from dsft.spec.template import schema_text

    print(schema_text(), end="")
