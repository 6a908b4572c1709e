"""`outbox schema`: print the DDL of the outbox's tables, or create the missing ones in a database."""

import argparse
from collections.abc import Iterator
from typing import Any

import outbox_admin as admin
from outbox.base.values import counted
from outbox.program.settings import DatabaseSettings, SettingType, whole_number
from outbox.program.terminal import Escaped, say
from outbox.table import ddl
from outbox.table.ddl import MAX_SHARDS, Layout
from outbox_admin import flags

SCHEMA_DESCRIPTION = "Print or create the outbox's tables, or change their number of shards."
PRINT_DESCRIPTION = """\
Print the DDL of the outbox's tables for your own migrations. The command contacts
no service.

    outbox schema print --shards 32 --retention 30 > outbox.sql"""
APPLY_DESCRIPTION = """\
Create the missing tables, columns, constraints and indexes in one schema update, and
print for each object whether it was created or existed. The command never changes or
drops anything that exists. If an object exists with a different definition, it creates
the rest, prints the differences, and the exit code is 1. If a table lacks a column that
cannot be added, it creates nothing.

    outbox schema apply --project my-project --instance main --database orders
    outbox schema apply --roles"""

RESHARD_DESCRIPTION = """\
Change the number of shards while workers run. The command adds a column and two
indexes, waits until all live workers poll them, and drops the old ones. It may be
interrupted and run again at any time. A change of a large table takes hours.

    outbox schema reshard --shards 32
    outbox schema reshard --status
    outbox schema reshard --abort"""

SPLITS_DESCRIPTION = """\
Print split points for a load that is known to come, such as the first of the month:
one for each shard in both indexes, and the others among the IDs of the table. Run
gcloud with at most 100 lines at a time.

    outbox schema splits --nodes 30 | split --lines 100 - splits-
    gcloud spanner databases splits add orders --instance main \\
        --splits-file splits-aa"""

#: Split points for each node, as https://docs.cloud.google.com/spanner/docs/pre-splitting-overview advises.
POINTS_PER_NODE = 10
SHARDS = whole_number(1, MAX_SHARDS)
_DAYS = whole_number(1, ddl.MAX_RETENTION_DAYS)
RETENTION = SettingType(lambda text: None if text == "none" else _DAYS.parse(text), f"none, or days, {_DAYS.allowed}")


def add(commands: Any) -> None:
    parser = flags.command(commands, "schema", "print, apply, reshard or split the tables", SCHEMA_DESCRIPTION)
    actions = parser.add_subparsers(metavar="ACTION")
    printing = flags.command(actions, "print", "print the DDL", PRINT_DESCRIPTION, _run_print)
    _add_choices(printing, "")
    applying = flags.command(actions, "apply", "create missing schema objects", APPLY_DESCRIPTION, _run_apply)
    _add_choices(applying, "; if the table exists, omit this flag or pass the table's value")
    flags.switch(applying, "--roles", "Also create the missing roles of schema/roles.sql, and execute its grants again")
    resharding = flags.command(actions, "reshard", "change the number of shards", RESHARD_DESCRIPTION, _run_reshard)
    choice = resharding.add_mutually_exclusive_group(required=True)
    text = "The new number of shards: {}. To continue, run the command again with the same number"
    flags.add(choice, "--shards", SHARDS, text, metavar="N")
    flags.switch(choice, "--status", "Print the layouts and the next step, and change nothing")
    flags.switch(choice, "--abort", "Return to the former number of shards")
    flags.add_reason(resharding)
    splitting = flags.command(actions, "splits", "print split points for gcloud", SPLITS_DESCRIPTION, _run_splits)
    nodes = whole_number(1, 10_000)
    text = "Nodes (1,000 processing units each) that the instance will have: {}"
    flags.add(splitting, "--nodes", nodes, text, metavar="N", required=True)


def _add_choices(parser: argparse.ArgumentParser, otherwise: str) -> None:
    # argparse must not fill in the default: if a flag is not given, `_run_apply` lets an existing table differ.
    text = f"Number of shards: {{}} (default {ddl.DEFAULT_SHARDS}{otherwise})"
    flags.add(parser, "--shards", SHARDS, text, metavar="N", default=argparse.SUPPRESS)
    text = f"Days after which sent tasks are deleted: {{}} (default {ddl.DEFAULT_RETENTION}{otherwise})"
    flags.add(parser, "--retention", RETENTION, text, metavar="DAYS|none", default=argparse.SUPPRESS)
    text = "Add the change stream AsynchronousTasksInserts: one record for each registered task, kept for 7 days"
    flags.switch(parser, "--change-stream", text)


def _statements(options: argparse.Namespace) -> list[str]:
    values = {"shards": ddl.DEFAULT_SHARDS, "retention": ddl.DEFAULT_RETENTION} | vars(options)
    return ddl.statements(values["shards"], values["retention"], change_stream=options.change_stream)


def _run_print(options: argparse.Namespace) -> None:
    say(Escaped(";\n\n".join(_statements(options)) + ";"))


def _run_splits(options: argparse.Namespace) -> None:
    say(Escaped("\n".join(points(flags.open_table(options).layout, options.nodes))))


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


def _run_apply(options: argparse.Namespace) -> None:
    settings = DatabaseSettings.read(vars(options))
    parts = {"shards": ddl.SHARD_COUNT, "retention": ddl.RETENTION}
    free = {part for flag, part in parts.items() if flag not in options}

    # Importing the Spanner client takes 0.5 s, so check the flags first.
    from outbox.table import applying  # noqa: PLC0415 - see above
    from outbox.table.connection import open_database  # noqa: PLC0415 - see above

    database = open_database(settings)
    for name, state in applying.apply(database, _statements(options), free=free):
        say(f"{state:<8} {name}")
    for name, state in applying.apply_roles(database) if options.roles else ():
        say(f"{state:<8} {name}")


def _run_reshard(options: argparse.Namespace) -> None:
    resharding = admin.reshard.Resharding(flags.open_table(options), flags.author(options))
    if options.status:
        say(*resharding.report())
        return
    target = resharding.former() if options.abort else resharding.target(options.shards)
    for line in resharding.run(target, aborts=options.abort):
        say(line)
    say(f"The table has {counted(target.shards, 'shard')}, in column {target.column}")
