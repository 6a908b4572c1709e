"""The `outbox` command. The module of each subject adds its commands with `add(commands)`.

Exit codes: 0 done, 1 failed, 2 usage, 3 a service cannot be reached, the table or a permission is missing, or stdout
cannot be written, 130 interrupted by Ctrl-C, 143 by SIGTERM.
"""

import argparse
import sys
from collections.abc import Sequence

from outbox._version import __version__
from outbox.base.start import need
from outbox.program import logs
from outbox.program.settings import Parser, one_of, unknown_variables
from outbox.program.terminal import Escaped, ended, note, prepare_streams, say
from outbox_admin import console_command, emulators_command, flags, verify_command
from outbox_admin.changes import change_commands, operation_commands
from outbox_admin.schema import schema_commands
from outbox_admin.status import status_commands
from outbox_admin.tasks import task_commands
from outbox_admin.topics import topic_commands

COMPLETION_DESCRIPTION = """\
Print a script that completes the commands and flags of `outbox`. It needs the extra
spanner-outbox[operators].

    outbox completion bash > ~/.local/share/bash-completion/completions/outbox
    outbox completion zsh > "${fpath[1]}/_outbox"
    outbox completion fish > ~/.config/fish/completions/outbox.fish"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An expected error is one sentence on stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    prepare_streams()
    logs.begin(given, is_service=[*given[:1]] == ["console"])
    return ended("outbox", lambda: _run(given))


def _run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    for sentence in unknown_variables():
        note(sentence)
    code: int | None = options.run(options)
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="outbox",
        description="The transactional outbox for Spanner and Pub/Sub. `outbox COMMAND --help` describes one command.",
        formatter_class=flags.HelpFormatter,
        parents=[flags.global_flags("These options may precede or follow the command.")],
    )
    parser.add_argument("--version", action="version", version=f"spanner-outbox {__version__}")
    parser.set_defaults(run=lambda options: options.parser.print_help(), parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    for module in (
        emulators_command, schema_commands, status_commands, task_commands, change_commands, topic_commands,
        operation_commands, console_command, verify_command,
    ):  # fmt: skip
        module.add(commands)
    title = "print a completion script for bash, zsh or fish"
    completing = flags.command(commands, "completion", title, COMPLETION_DESCRIPTION, _complete)
    shell = one_of("bash", "zsh", "fish")
    flags.add(completing, "shell", shell, "The shell: {}", metavar="SHELL", choices=shell.choices)
    return parser


def _complete(options: argparse.Namespace) -> None:
    need("shtab", "completion", "operators")
    import shtab  # noqa: PLC0415 - optional

    say(Escaped(shtab.complete(options.parser, options.shell).rstrip("\n")))
