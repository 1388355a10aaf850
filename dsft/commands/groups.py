"""How `dsft` shows its commands and reads their names: in groups, each with an example, and with the names
that users of other tools type."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

GROUPS = START, LOOK, TRAIN, AFTER, CLUSTER = (
    "Start", "Look before a run", "Train", "Follow a run, use its model", "Several hosts"
)  # fmt: skip
_OTHER_NAMES = dict.fromkeys(("num-gpus", "ranks", "world-size", "slots"), "processes")
_INSTEAD = {
    **dict.fromkeys(("finetune", "run", "sft", "dpo", "pretrain"), "dsft train or dsft launch"),
    **dict.fromkeys(("evaluate", "test"), "dsft eval"),
    **dict.fromkeys(("infer", "predict", "ask"), "dsft chat or dsft answer"),
    **dict.fromkeys(("check", "lint"), "dsft validate, or dsft doctor for the hosts"),
    **dict.fromkeys(("tokenize", "prepare"), "dsft data build"),
    **dict.fromkeys(("show", "inspect"), "dsft preview"),
    **dict.fromkeys(("upload", "publish"), "dsft push"),
    "merge": "dsft export --merged",
}
"""What users of other tools type -> what dsft has."""


def normalized(name: str) -> str:
    """Return the name of an option or a command: dashes for underscores, one name for the number of
    processes."""
    name = name.replace("_", "-")
    return _OTHER_NAMES.get(name, name)


class Command(TyperCommand):
    """A command, whose usage shows a required argument without braces, which look like a choice."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class Groups(TyperGroup):
    """The commands, shown by their `rich_help_panel`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group in GROUPS:
            with formatter.section(group):
                formatter.write_dl(
                    [
                        (name, command.get_short_help_str(formatter.width - 15))
                        for name, command in self.commands.items()
                        if getattr(command, "rich_help_panel", None) == group
                    ]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _INSTEAD:
            ctx.fail(f"No such command '{args[0]}'. Use {_INSTEAD[args[0]]}.")
        return super().resolve_command(ctx, args)
