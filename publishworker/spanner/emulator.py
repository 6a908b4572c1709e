"""The store for the Spanner emulator. On Spanner none of it runs.

The emulator runs one read-write transaction at a time in a database and aborts the others, sometimes the one that has
already published. It reads the whole table for each range of an index.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from outbox.table.shared_sql import IN_ORDER, KEYS, SEEK, UNSENT_OF_KEY
from publishworker.spanner import relay_sql
from publishworker.spanner.store import ABORTED_SECONDS, Decide, SpannerStore
from publishworker.spanner.write_errors import NotWritten
from publishworker.types import KeyHeads, TopicKey

#: With more ordering keys than this, all tasks of the keys are read at once.
FEW_KEYS = 4
#: Max rows of that read. If there are more, the head of each key is read, as on Spanner.
WHOLE_KEYS_ROWS = 2_000
# All unsent tasks of the keys: one scan of the table. If it returns @max_rows rows, some are missing, of any key.
_WHOLE_KEYS = relay_sql.queued(f"""
  SELECT Id FROM {KEYS}
  {SEEK} {IN_ORDER} ON Shard = in_shard AND OrderingKey = of_key AND Topic = of_topic
  WHERE {UNSENT_OF_KEY} LIMIT @max_rows""")


class EmulatorStore(SpannerStore):
    """A SpannerStore whose transactions wait for one another here, which is cheaper than aborts."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._one_at_a_time = threading.Lock()

    def key_heads(self, keys: Mapping[TopicKey, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        """Read many keys at once, because a read of each would scan the table each time."""
        if len(keys) > FEW_KEYS:
            found = self._key_heads(_WHOLE_KEYS, keys, skip_dead=skip_dead, max_rows=WHOLE_KEYS_ROWS)
            if sum(map(len, found.values())) < WHOLE_KEYS_ROWS:
                return {key: tasks[:per_key] for key, tasks in found.items()}
        return super().key_heads(keys, per_key, skip_dead=skip_dead)

    def claim(self, ids: Sequence[str], decide: Decide, *, may_delay: bool = False) -> datetime:
        """Wait until no other claim runs, but no longer than one may take.

        Heartbeats do not wait: while Spanner refuses commits, the transactions before them take all their time.
        """
        if not self._one_at_a_time.acquire(timeout=ABORTED_SECONDS):
            raise NotWritten(f"The emulator runs one transaction at a time; others took {ABORTED_SECONDS:g} s")
        try:
            return super().claim(ids, decide, may_delay=may_delay)
        finally:
            self._one_at_a_time.release()
