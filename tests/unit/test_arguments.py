"""The argument parser that all commands share."""

from collections.abc import Callable, Sequence

import pytest

from outbox import cli as operators
from outbox_pipeline import cli as pipeline
from publishworker.process import cli as worker

Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize(
    ("main", "words", "error"),
    [
        (worker.main, "rnu", "publishworker: unknown command 'rnu'. Did you mean 'run'? `publishworker --help` lists"),
        (
            worker.main,
            "run --poll-intervall 2",
            "publishworker: unknown flag '--poll-intervall'. Did you mean '--poll-interval'? `publishworker run ",
        ),
        (worker.main, "run --poll-int=2", "publishworker: unknown flag '--poll-int'. Did you mean '--poll-interval'?"),
        (worker.main, "drain now", "publishworker: unexpected argument 'now'. See `publishworker drain --help`"),
        (operators.main, "status --projct x", "outbox: unknown flag '--projct'. Did you mean '--project'? `outbox s"),
        (
            operators.main,
            "--projct x status",
            "outbox: unknown flag '--projct'. Did you mean '--project'? `outbox --help`",
        ),
        (operators.main, "retry --zzz", "outbox: unknown flag '--zzz'. `outbox retry --help` lists the flags"),
        (pipeline.main, "archvie", "outbox-pipeline: unknown job 'archvie'. Did you mean 'archive'?"),
    ],
)
def test_a_misspelled_command_or_flag_is_refused_with_the_nearest_name(
    main: Main, words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(error)


def test_the_health_check_accepts_no_abbreviation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        worker.main(["healthcheck", "--max", "60"])
    assert "unrecognized arguments: --max" in capsys.readouterr().err
