"""`outbox pause`, `resume` and `limit`: what is refused before anything is contacted."""

import pytest

from outbox import cli

DATABASE = "--project my-project --instance main --database shop"
BURST = "a whole number from 1 to 1,000,000,000"
RATE = "a finite number of tasks a second, 1e-09 or more"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("limit orders --rate 0 --burst 1", f"--rate: '0' is not allowed: it must be {RATE}"),
        ("limit orders --rate -1 --burst 1", f"--rate: '-1' is not allowed: it must be {RATE}"),
        ("limit orders --rate nan --burst 1", f"--rate: 'nan' is not allowed: it must be {RATE}"),
        ("limit orders --rate inf --burst 1", f"--rate: 'inf' is not allowed: it must be {RATE}"),
        ("limit orders --rate=-inf --burst 1", f"--rate: '-inf' is not allowed: it must be {RATE}"),
        ("limit orders --rate 1e999 --burst 1", f"--rate: '1e999' is not allowed: it must be {RATE}"),
        ("limit orders --rate ten --burst 1", f"--rate: 'ten' is not allowed: it must be {RATE}"),
        ("limit orders --rate 1 --burst 0", f"--burst: '0' is not allowed: it must be {BURST}"),
        ("limit orders --rate 1 --burst 1.5", f"--burst: '1.5' is not allowed: it must be {BURST}"),
        ("limit orders --max-in-flight 0", f"--max-in-flight: '0' is not allowed: it must be {BURST}"),
        ("limit orders --max-in-flight -3", f"--max-in-flight: '-3' is not allowed: it must be {BURST}"),
        ("limit orders --rate 2.5", f"--rate 2.5 is given without --burst: give both; --burst must be {BURST}"),
        ("limit orders --burst 20", f"--burst 20 is given without --rate: give both; --rate must be {RATE}"),
        ("limit orders --burst 20 --max-in-flight 5", "--burst 20 is given without --rate: give both"),
        ("limit orders", "no limit is given: give --rate with --burst, --max-in-flight, or --off"),
        ("limit orders --off --rate 1 --burst 2", "--off is given with --rate and --burst: it takes all limits away"),
        ("limit orders --off --max-in-flight 1", "--off is given with --max-in-flight"),
        ("limit ab --off", "topic 'ab' is not a name that Pub/Sub allows: 3 to 255 of letters"),
        ("pause orders google-orders", "topic 'google-orders' is not a name that Pub/Sub allows"),
        ("resume projects/p/orders", "topic 'projects/p/orders' is not a name that Pub/Sub allows"),
    ],
)
def test_a_wrong_value_is_a_usage_error_of_one_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
):
    """It says what was given and what is allowed."""
    assert cli.main([*arguments.split(), *DATABASE.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("outbox: ")
    assert sentence in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("command", ["pause orders", "resume orders", "limit orders --off"])
def test_a_missing_database_is_a_usage_error(command: str, capsys: pytest.CaptureFixture[str]):
    """As of every command that reads the table."""
    assert cli.main([*command.split(), "--project", "my-project", "--instance", "main"]) == 2
    assert "--database is missing: give it, or set OUTBOX_DATABASE" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["pause", "resume", "limit"])
def test_a_missing_topic_is_a_usage_error(command: str, capsys: pytest.CaptureFixture[str]):
    """Nothing is paused by default."""
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *DATABASE.split()])
    assert ended.value.code == 2
    assert "TOPIC" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["pause", "resume", "limit"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]):
    """Help alone is enough to use the command."""
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"\n    outbox {command} orders --" in shown
    assert "OUTBOX_DATABASE" in shown
