"""The argument parser of all commands. Standard library only."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from outbox.errors import SettingError
from outbox.program.settings import did_you_mean
from outbox.program.terminal import write


class Parser(argparse.ArgumentParser):
    """Accepts only whole flags, and suggests the nearest name for a misspelled one or a command (SettingError)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        # Like -5, -5m is a value and no flag. So the flag before it says what is allowed.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as ArgumentParser does, but refuse unknown arguments here, where the flags of the command are known."""
        self._words = list(sys.argv[1:] if args is None else args)
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise SettingError(self._unknown(unknown))
        return options, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse drops the error of a stream that cannot be written.
        write(message, file or sys.stderr)

    def _unknown(self, arguments: Sequence[str]) -> str:
        flag = next((each.partition("=")[0] for each in arguments if each.startswith("-")), None)
        if flag is None:
            return f"unexpected argument {arguments[0]!r}. See `{self.prog} --help`"
        near = did_you_mean(flag, self._option_string_actions)
        return f"unknown flag {flag!r}.{near} `{self.prog} --help` lists the flags"

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Before Python 3.13, argparse takes the value of --flag=-- for the end of the flags.
        if action.option_strings and arg_strings == ["--"]:
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # From Python 3.14, argparse can suggest names itself (`suggest_on_error`).
        if isinstance(action.choices, dict) and value not in action.choices:
            # A flag that is unknown to argparse has no value, so its value is taken for the command.
            before = [each for each in self._words[: self._words.index(value)] if each.startswith("-")]
            if unknown := [flag for flag in before if flag.partition("=")[0] not in self._option_string_actions]:
                raise SettingError(self._unknown(unknown))
            near = did_you_mean(value, action.choices)
            noun = str(action.metavar).lower()
            raise SettingError(f"unknown {noun} {value!r}.{near} `{self.prog} --help` lists the {noun}s")
        super()._check_value(action, value)
