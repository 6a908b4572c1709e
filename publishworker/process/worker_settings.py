"""The worker's settings. Flags, environment variables, help and docs/reference/settings.md derive from this list."""

import argparse
from dataclasses import dataclass

from outbox.errors import SettingError
from outbox.program.settings import (
    PubSubSettings,
    argparse_type,
    matching,
    metrics_setting,
    one_of,
    seconds,
    setting,
    whole_number,
)
from publishworker.process.healthcheck import HEARTBEAT_FILE

_PATTERN = r"(?:projects/[a-z0-9.:_*-]+/topics/)?[A-Za-z0-9._~+%*-]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings(PubSubSettings):
    """Settings of the relay, in a worker and in the Spark tasks of a drain."""

    batch_size: int = setting(
        "200", whole_number(1, 1000), "Max tasks in a batch. With 1, each task has its own transaction."
    )
    concurrency: int = setting("8", whole_number(1, 100), "Max in-flight batches.")
    allowed_topics: str = setting(
        "*",
        matching(rf"{_PATTERN}(?:,{_PATTERN})*", "comma-separated patterns of topics, in which * is any text"),
        "Topics to publish to: topic IDs in the worker's project (all with *), or projects/PROJECT/topics/TOPIC.",
    )
    request_priority: str = setting(
        "medium",
        one_of("low", "medium", "high"),
        "Spanner's request priority of polls, claims and marks. Applications without a setting use high.",
    )
    commit_delay: float = setting(
        "0.05",
        seconds(0, 0.5),
        "Max time for which Spanner may delay the marks of tasks without an ordering key, to write them together with "
        "others. With 0, Spanner chooses.",
    )
    on_ordering_failure: str = setting(
        "block",
        one_of("block", "skip"),
        "Whether a dead task blocks its ordering key until an operator acts, or is skipped.",
    )
    backoff_initial: float = setting(
        "1", seconds(0.05, 3600), "Time until a failed task is retried; doubles with each attempt."
    )
    backoff_max: float = setting("3600", seconds(0.05, 7 * 86_400), "Max time between two attempts.")
    max_attempts: int = setting("10", whole_number(1, 1_000_000), "Failed attempts after which a task is dead.")
    dead_after: float = setting(
        "86400",
        seconds(0, 365 * 86_400),
        "A task does not become dead before this age if its topic is missing or refuses messages.",
    )
    poll_interval: float = setting("1", seconds(0.05, 30), "Max time between polls while there is nothing to send.")
    wake: str = setting(
        "off",
        one_of("off", "change-stream"),
        "With change-stream, the change stream AsynchronousTasksInserts starts a poll soon after a task is registered.",
    )
    shutdown_timeout: float = setting(
        "30", seconds(0, 3600), "Time to finish in-flight batches after SIGTERM; less than the pod's grace period."
    )
    metrics: str = metrics_setting()
    log_format: str = setting(
        "auto", one_of("auto", "json", "text"), "Log format; auto is text on a terminal, otherwise json."
    )
    log_level: str = setting("info", one_of("debug", "info", "warning", "error"), "Min level of log lines.")

    def __post_init__(self) -> None:
        if self.backoff_initial > self.backoff_max:
            raise SettingError(
                f"--backoff-initial is {self.backoff_initial:g}. It must not exceed --backoff-max, which is "
                f"{self.backoff_max:g}. Pass both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(RelaySettings):
    """Settings of `publishworker run`, `drain` and `check`."""

    heartbeat_file: str = setting(
        HEARTBEAT_FILE,
        matching(r".+", "a path that the worker can write to"),
        "File that the worker touches; * stands for its process ID. See healthcheck.",
    )


def add_deadline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deadline",
        type=argparse_type("--deadline", seconds(0, 1e9)),
        metavar="SECONDS",
        help="Stop after this time with exit code 4 (default: never).",
    )
