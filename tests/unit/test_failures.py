"""The table of failures: every status has a row, and the kinds are those of the design, here written by hand."""

from collections import Counter

import grpc
import pytest

from publishworker.failures import REASONS, Kind, is_refused, kind_of, reason_of

CONTENT = {"undecodable", "too_large", "invalid_topic", "topic_not_allowed", "expired", "invalid_argument"}
TARGET = {"not_found", "permission_denied", "failed_precondition", "unimplemented"}
OUTAGE = {
    "unavailable",
    "deadline_exceeded",
    "resource_exhausted",
    "internal",
    "aborted",
    "cancelled",
    "unknown",
    "unauthenticated",
    "credentials",
}
UNKNOWN = {"already_exists", "out_of_range", "data_loss"}

STATUSES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


class FailedCall:
    """What is read of a call that has failed."""

    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        """Fail with this."""
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """Return the status."""
        return self._code

    def details(self) -> str | None:
        """Return what the service said."""
        return self._details


@pytest.mark.parametrize("code", STATUSES)
@pytest.mark.parametrize("details", ["", None, "no Getting metadata from plugin failed"])
def test_every_status_has_one_row_in_the_table(code: grpc.StatusCode, details: str | None) -> None:
    """A new status of gRPC is not charged to tasks by accident; a call without details has a reason, too."""
    name = reason_of(FailedCall(code, details))
    assert [(each.name, each.source) for each in REASONS if each.source == code.name] == [(name, code.name)]


def test_names_are_unique_and_fit_for_a_metrics_tag() -> None:
    """One row a reason, in small letters, each with its meaning."""
    assert max(Counter(each.name for each in REASONS).values()) == 1
    for each in REASONS:
        assert each.name.replace("_", "").isalpha()
        assert each.name == each.name.lower()
        assert each.meaning.endswith(".")


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Kind.CONTENT, CONTENT), (Kind.TARGET, TARGET), (Kind.OUTAGE, OUTAGE), (Kind.UNKNOWN, UNKNOWN)],
)
def test_the_kinds_are_those_of_the_design(kind: Kind, names: set[str]) -> None:
    """Who pays for a failure is decided here: a row in the wrong place kills tasks, or keeps them for ever."""
    assert {each.name for each in REASONS if each.kind is kind} == names
    assert {name for name in CONTENT | TARGET | OUTAGE | UNKNOWN if kind_of(name) is kind} == names


@pytest.mark.parametrize("reason", ["", "new_in_grpc", "NOT_FOUND"])
def test_a_reason_without_a_row_is_unknown(reason: str) -> None:
    """Charged to the task alone: it rests no topic."""
    assert kind_of(reason) is Kind.UNKNOWN


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "Getting metadata from plugin failed with error: ('invalid_grant: Bad Request', {})",
            "credentials",
        ),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", "unavailable"),
        (grpc.StatusCode.UNAUTHENTICATED, "Request had invalid authentication credentials.", "unauthenticated"),
    ],
)
def test_credentials_that_give_no_token_are_told_from_a_service_that_is_away(
    code: grpc.StatusCode, details: str, reason: str
) -> None:
    """The status is the same: only the details tell whose fault it is."""
    assert reason_of(FailedCall(code, details)) == reason


def test_what_pubsub_has_surely_not_taken() -> None:
    """Every answer that is a refusal, and what never left; not what may have been published before it failed."""
    refused = {each.name for each in REASONS if is_refused(each.name)}
    assert refused == CONTENT | TARGET | {"resource_exhausted", "unauthenticated", "credentials"}
    assert not is_refused("something new")
