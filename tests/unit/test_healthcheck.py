"""The heartbeat file: the answer of a probe, and a worker that cannot write it."""

import logging
import os
from pathlib import Path

import pytest

from publishworker.process import healthcheck
from publishworker.process.commands import heartbeat_file


def test_the_health_check_reports_fresh_old_and_missing_heartbeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "heartbeat"
    monkeypatch.setenv("OUTBOX_HEARTBEAT_FILE", str(file))
    assert healthcheck.main([]) == 1
    assert "No heartbeat" in capsys.readouterr().err
    heartbeat_file(file)()
    assert healthcheck.main([]) == 0
    os.utime(file, (0, 0))
    assert healthcheck.main([]) == 1
    assert "s old; --max-age is 45 s" in capsys.readouterr().err
    for wrong in ("nan", "inf", "0", "-1", "soon"):
        with pytest.raises(SystemExit, match="2"):
            healthcheck.main(["--max-age", wrong])
        assert "--max-age" in (error := capsys.readouterr().err)
        assert f"{wrong} is not allowed" in error or f"invalid float value: {wrong!r}" in error


def test_a_heartbeat_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "publishworker"):
        heartbeat = heartbeat_file(tmp_path / "missing" / "heartbeat")
        heartbeat(), heartbeat(), heartbeat()
    assert [record.__dict__["action"] for record in caplog.records] == ["heartbeat"]
