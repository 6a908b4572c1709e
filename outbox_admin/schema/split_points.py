"""Split points, which spread a load before it comes."""

from collections.abc import Iterator

from outbox.table.ddl import Layout

#: Split points for each node, as https://docs.cloud.google.com/spanner/docs/pre-splitting-overview advises.
POINTS_PER_NODE = 10


def points(layout: Layout, nodes: int) -> Iterator[str]:
    """Yield the lines of a file of split points, which spread a load before it comes.

    It is the file of `gcloud spanner databases splits add`: between the shards of both indexes, and evenly among the
    random IDs of the table. A point needs the whole key, INT64 values are in quotes, and a request takes at most 100
    points: https://docs.cloud.google.com/spanner/docs/create-manage-split-points
    """
    begin, end = "'1970-01-01T00:00:00Z'", "'9999-12-31T00:00:00Z'"
    to_send, in_order = (layout.sql(f"AsynchronousTasks{name}") for name in ("ToSend", "InOrder"))
    for shard in range(1, layout.shards):
        # After all entries of the shard before: no SentAt is so late, and the Priority is descending.
        yield f"INDEX {to_send} ('{shard - 1}',{end},'~',{end},'0',{end})"
    for shard in range(1, layout.shards):
        yield f"INDEX {in_order} ('{shard}','','',{begin},{begin},'0')"  # no key is empty
    number = max(nodes, POINTS_PER_NODE * nodes - 2 * layout.shards)
    yield from (f"TABLE AsynchronousTasks ('{place * 16**8 // number:08x}')" for place in range(1, number))
