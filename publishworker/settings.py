"""The worker's settings: this list is what flags, environment, help and docs/reference/settings.md are made of."""

import argparse
from dataclasses import dataclass

from outbox.errors import SettingError
from outbox.shared.settings import (
    DatabaseSettings,
    flag_of,
    fraction,
    matching,
    one_of,
    seconds,
    setting,
    whole_number,
)
from publishworker.healthcheck import HEARTBEAT_FILE

_PATTERN = r"(?:projects/[A-Za-z0-9.:_*-]+/topics/)?[A-Za-z0-9._~+%*-]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings(DatabaseSettings):
    """What the relay takes wherever it runs: in a worker, and in the tasks of a drain by Spark."""

    batch_size: int = setting(
        "100",
        whole_number(1, 1000),
        "Tasks that share a transaction at most; 1 is one transaction for each task.",
    )
    batch_bytes: int = setting(
        "8000000", whole_number(1, 100_000_000), "Bytes of messages that share a transaction at most."
    )
    concurrency: int = setting("8", whole_number(1, 100), "Batches in flight at once.")
    publish_timeout: float = setting(
        "5",
        seconds(0.1, 8),
        "Time to publish a batch; Spanner may abort a transaction that is idle for 10 s.",
    )
    allowed_topics: str = setting(
        "*",
        matching(rf"{_PATTERN}(?:,{_PATTERN})*", "patterns of topics, separated by commas, in which * is any text"),
        "Topics to publish to: ids in the worker's own project, or projects/PROJECT/topics/TOPIC.",
    )
    pubsub_endpoint: str = setting(
        "",
        matching(
            r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[1-9][0-9]{0,4})?)?",
            "a host, or nothing for the global endpoint",
        ),
        "Pub/Sub's endpoint in one region, as europe-west1-pubsub.googleapis.com: ordered tasks need one.",
    )
    on_ordering_failure: str = setting(
        "block",
        one_of("block", "skip"),
        "Whether a dead task holds back the later ones of its ordering key, until somebody acts, or is passed over.",
    )
    backoff_initial: float = setting(
        "1", seconds(0.05, 3600), "Time until a failed task is tried again; doubles with each attempt."
    )
    backoff_max: float = setting("3600", seconds(0.05, 7 * 86_400), "The longest time between two attempts.")
    max_attempts: int = setting("10", whole_number(1, 1_000_000), "Failed attempts after which a task is dead.")
    dead_after: float = setting(
        "86400",
        seconds(0, 365 * 86_400),
        "Age of a task before which a missing or closed topic does not make it dead.",
    )
    fair_share: float = setting(
        "0.1", fraction(0, 0.5), "Share of the batches that lower priorities get while higher ones never end."
    )
    poll_interval: float = setting("1", seconds(0.05, 30), "Time between polls while there is nothing to do.")
    shutdown_timeout: float = setting(
        "30", seconds(0, 3600), "Time to finish what is in flight after SIGTERM; less than the pod's grace period."
    )
    log_format: str = setting(
        "auto", one_of("auto", "json", "text"), "How to log; auto is text on a terminal, else json."
    )
    log_level: str = setting("info", one_of("debug", "info", "warning", "error"), "What to log at least.")

    def __post_init__(self) -> None:
        """Refuse values that contradict each other. Raises SettingError."""
        if self.backoff_initial > self.backoff_max:
            raise SettingError(
                f"--backoff-initial: {self.backoff_initial:g} is not allowed: it must not be more than --backoff-max, "
                f"which is {self.backoff_max:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(RelaySettings):
    """What `publishworker run`, `drain` and `check` take."""

    heartbeat_file: str = setting(
        HEARTBEAT_FILE,
        matching(r".+", "a path that the worker can write"),
        "File that the loop touches; see healthcheck.",
    )


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Give a drain its flag that is no setting."""
    parser.add_argument(
        "--deadline",
        type=flag_of("--deadline", seconds(0, 1e9)),
        metavar="SECONDS",
        help="Give up after this time, exit code 4 (default: never).",
    )
