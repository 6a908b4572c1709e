"""The refusals of `outbox pause`, `resume` and `limit` before anything is contacted."""

import pytest

from outbox import cli

PLACE = "--project my-project --instance main"
BURST = "a whole number from 1 to 1,000,000,000"
RATE = "a finite number of tasks a second, 1e-09 or more"
NO_TOPIC = "is not a name that Pub/Sub allows"
COMMANDS = ("pause", "resume", "limit")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        *(
            (f"limit orders --rate={rate} --burst 1", f"--rate: '{rate}' is not allowed: it must be {RATE}")
            for rate in ("0", "-1", "nan", "inf", "-inf", "1e999", "ten")
        ),
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
        ("limit ab --off", f"topic 'ab' {NO_TOPIC}: 3 to 255 of letters"),
        ("pause orders google-orders", f"topic 'google-orders' {NO_TOPIC}"),
        ("resume projects/p/orders", f"topic 'projects/p/orders' {NO_TOPIC}"),
    ],
)
def test_a_wrong_value_is_a_usage_error_of_one_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
):
    """It says what was given and what is allowed."""
    assert cli.main([*arguments.split(), *PLACE.split(), "--database", "shop"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("outbox: ")
    assert sentence in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_missing_is_named_and_help_is_enough(command: str, capsys: pytest.CaptureFixture[str]):
    """A missing database and a missing topic are usage errors; the help has an example."""
    off = ["--off"] if command == "limit" else []
    assert cli.main([command, "orders", *off, *PLACE.split()]) == 2
    assert "--database is missing: give it, or set OUTBOX_DATABASE" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *PLACE.split(), "--database", "shop"])
    assert ended.value.code == 2
    assert "TOPIC" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"\n    outbox {command} orders --" in shown
    assert "OUTBOX_DATABASE" in shown
