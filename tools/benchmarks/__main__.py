"""Run the sections, keep their figures, write the page: `python -m tools.benchmarks`, or `make bench`."""

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from outbox.devtools import emulators
from tools.benchmarks import (
    costs,
    delayed,
    flights,
    latency,
    ordering,
    own_relays,
    page,
    receiving,
    registering,
    results,
    throughput,
)
from tools.benchmarks.bench import Bench

SECTIONS: dict[str, Callable[[Bench], results.Section]] = {
    "throughput": throughput.run,
    "delayed": delayed.run,
    "ordering": ordering.run,
    "costs": costs.run,
    "latency": latency.run,
    "registering": registering.run,
    "inbox": receiving.run,
    "own": own_relays.run,
}

#: With the pipeline, which `make bench-pipeline` runs.
ALL = SECTIONS | {"flights": flights.run}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each section as soon as it is there; write the page at the end."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--rounds", type=int, help="how often each figure is taken (default 5, quick 2)")
    parser.add_argument("--quick", action="store_true", help="smaller numbers, to see that it works; nothing is kept")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (2 if options.quick else 5)
    with emulators.running() as created:
        os.environ |= created.environment()
        for name in options.only:
            section = _run(ALL[name], Bench(created, rounds, options.quick))
            print(page.text(name, section), flush=True)
            if not options.quick:
                kept = results.load() | {name: section}
                results.save({each: kept[each] for each in ALL if each in kept})
    if not options.quick:
        page.write(results.load())
        print(f"written: {page.PAGE.relative_to(results.ROOT)}, {results.FILE.relative_to(results.ROOT)}")
    return 0


def _run(run: Callable[[Bench], results.Section], bench: Bench) -> results.Section:
    ran = results.circumstances()
    begin = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):  # processes of tests.support print a report at their end
        section = run(bench)
    section.ran.update(
        ran,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seconds=f"{time.monotonic() - begin:.0f}",
        rounds=str(bench.rounds),
        command=" ".join(["python -m tools.benchmarks", *sys.argv[1:]]),
    )
    return section


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
