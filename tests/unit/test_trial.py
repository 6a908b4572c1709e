"""The audit of the trials: one that overlooks a loss makes every scenario pass."""

import dataclasses

from tests.support.trial import Figures, out_of_order

KEPT = Figures(
    registered=10, rolled_back=2, lost=0, sent_though_rolled_back=0, unexpected=0, duplicates=3, duplicates_allowed=3,
    out_of_order=0, recovery=1.0,
)  # fmt: skip


def test_tasks_behind_a_later_one_are_out_of_order() -> None:
    for registered, received, count in (
        ("abc", "abc", 0), ("abc", "acb", 1), ("abc", "cab", 2), ("abc", "ac", 0), ("abc", "axbc", 0), ("", "ab", 0),
    ):  # fmt: skip
        assert out_of_order({"key": [*registered]}, {"key": [*received]}) == count, received


def test_a_promise_is_kept_only_if_nothing_is_wrong() -> None:
    assert KEPT.kept()
    for wrong in (
        {"registered": 0}, {"lost": 1}, {"sent_though_rolled_back": 1}, {"unexpected": 1}, {"duplicates": 4},
        {"out_of_order": 1},
    ):  # fmt: skip
        assert not dataclasses.replace(KEPT, **wrong).kept(), wrong
