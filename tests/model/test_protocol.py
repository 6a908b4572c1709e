"""The whole protocol in a small scope: every interleaving, a crash at every point. docs/architecture/model.md."""

import pytest

from tests.model.explore import explore
from tests.model.protocol import RULES, Config

ONE_KEY, KEY_AND_ONE = ("k", "k"), ("k", "k", None)
FIRST_IS_BAD = frozenset({0})
#: With one fault up to three tasks, with two faults up to two tasks.
SMALL = [
    Config((None,), workers=1, faults=3),
    Config((None, None), faults=1),
    Config((None,), faults=2),
    Config(ONE_KEY, workers=1, faults=2),
    Config(ONE_KEY, faults=2),
    Config(ONE_KEY, faults=2, bad=FIRST_IS_BAD),
    Config(("k", "k", "k"), faults=1),
]
#: Minutes each.
LARGE = [
    Config(KEY_AND_ONE, faults=1),
    Config(("k", "k", "k"), faults=2),
    Config(KEY_AND_ONE, workers=1, faults=3),
    Config((None, None), faults=2),
    Config(("k", "l"), faults=2),
    Config(KEY_AND_ONE, faults=1, bad=FIRST_IS_BAD),
]
IN_LONG_FORM = [pytest.mark.long("smaller scopes are above"), pytest.mark.timeout(1800)]


@pytest.mark.parametrize("scope", [*SMALL, *(pytest.param(each, marks=IN_LONG_FORM) for each in LARGE)], ids=str)
def test_no_history_loses_reorders_or_repeats_a_task_without_a_cause(scope: Config) -> None:
    found = explore(scope)
    print(f"{found.states:,} states")
    assert not found.broken, "\n".join(found.way)
    assert found.states > 100


@pytest.mark.extended
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str) -> None:
    """Without it one of the invariants breaks, in a scope that is known to be good with it."""
    scopes = (scope._replace(faults=1) for scope in SMALL if len(scope.keys) < 3)
    broken = [found for scope in scopes if (found := explore(scope._replace(without=rule))).broken]
    assert {found.broken.partition(":")[0] for found in broken} == {RULES[rule]}
