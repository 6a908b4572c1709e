"""`outbox completion`: print a script with which a shell completes commands, flags and states."""

import argparse
import importlib.util
from typing import Any

from outbox.cli import flags
from outbox.errors import OutboxError
from outbox.shared.settings import one_of

DESCRIPTION = """\
Print a script that completes the commands and flags of `outbox`. It needs the extra
spanner-outbox[operators].

    outbox completion bash > ~/.local/share/bash-completion/completions/outbox
    outbox completion zsh > "${fpath[1]}/_outbox"
    outbox completion fish > ~/.config/fish/completions/outbox.fish"""


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "completion", "print a completion script for bash, zsh or fish", DESCRIPTION)
    kind = one_of("bash", "zsh", "fish")
    flags.add(parser, "shell", kind, f"The shell: {kind.allowed}", metavar="SHELL", choices=kind.choices)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script; returns 0. Raises OutboxError if the extra is not installed."""
    if importlib.util.find_spec("shtab") is None:
        raise OutboxError("completion needs shtab. Install it: pip install 'spanner-outbox[operators]'")
    import shtab  # noqa: PLC0415 - optional

    print(shtab.complete(options.parser, options.shell))
    return 0
