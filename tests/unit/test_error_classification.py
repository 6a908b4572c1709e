"""The table of failures (publishworker/pubsub/failures.py), and the texts of services' errors."""

from types import SimpleNamespace

import grpc
import pytest
from google.api_core.exceptions import ServiceUnavailable

from outbox.errors import NotReached
from outbox.table.schema import service_errors
from publishworker.pubsub.failures import REASONS, FailureKind, failure_kind, is_refused, reason_of
from publishworker.pubsub.publisher import failure_of
from publishworker.spanner.write_errors import describe

STATUSES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
KINDS = {
    FailureKind.CONTENT: "undecodable too_large invalid_topic topic_not_allowed expired invalid_argument",
    FailureKind.TARGET: "not_found permission_denied failed_precondition unimplemented",
    FailureKind.OUTAGE: "unavailable deadline_exceeded resource_exhausted internal aborted cancelled unknown "
    "unauthenticated "
    "credentials",
}


def reason(code: grpc.StatusCode, details: str | None) -> str:
    return reason_of(SimpleNamespace(code=lambda: code, details=lambda: details))


def test_every_status_that_pubsub_returns_has_one_row_in_the_table() -> None:
    others = {grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS}
    assert {failure_kind(reason(code, "")) for code in others} == {FailureKind.UNKNOWN}
    for code in set(STATUSES) - others:
        for details in ("", None, "no Getting metadata from plugin failed"):
            name = reason(code, details)
            assert [(each.name, each.source) for each in REASONS if each.source == code.name] == [(name, code.name)]
    assert len({each.name for each in REASONS}) == len(REASONS)
    for each in REASONS:
        assert each.name.replace("_", "").isalpha()
        assert each.name == each.name.lower()
        assert each.meaning.endswith(".")


def test_each_status_has_its_kind() -> None:
    """The kind decides which attempts are recorded: a wrong row kills tasks, or keeps them for ever."""
    for kind, names in KINDS.items():
        assert {each.name for each in REASONS if each.kind is kind} == set(names.split())
        assert {failure_kind(name) for name in names.split()} == {kind}
    # A reason without a row is recorded on the task; its topic continues.
    assert {failure_kind(name) for name in ("", "new_in_grpc", "NOT_FOUND")} == {FailureKind.UNKNOWN}


def test_which_failures_prove_that_nothing_was_published() -> None:
    """A refusal, or a call that never left the worker; not a message that Pub/Sub may have published."""
    content_and_target = f"{KINDS[FailureKind.CONTENT]} {KINDS[FailureKind.TARGET]}".split()
    refused = {*content_and_target, "resource_exhausted", "unauthenticated", "credentials"}
    assert {each.name for each in REASONS if is_refused(each.name)} == refused
    assert not is_refused("something new")


def test_the_text_of_a_service_ends_without_a_full_stop() -> None:
    """Otherwise, a log line that goes on would have two."""
    error = ServiceUnavailable("One at a time.")  # type: ignore[no-untyped-call]  # the client has no types
    assert describe(error) == "503 One at a time"
    with pytest.raises(NotReached, match=r"One at a time$"), service_errors("orders"):
        raise error
    answer = SimpleNamespace(code=lambda: grpc.StatusCode.UNAVAILABLE, details=lambda: "Try later.")
    assert failure_of(answer, "orders", str).error == "orders: Try later"
