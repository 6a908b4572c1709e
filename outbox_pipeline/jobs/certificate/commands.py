"""`outbox-pipeline certificate`: verify certificates and prove that one of them contains a task, without Spark."""

import argparse
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

from outbox.base.values import counted, shown
from outbox.errors import OutboxError
from outbox.message import parsed
from outbox.program.terminal import as_json, say
from outbox_pipeline.jobs.audit.attributes import sha256_of
from outbox_pipeline.jobs.certificate import keys, merkle
from outbox_pipeline.jobs.certificate.document import ARCHIVE, MOST_LISTED, RECEIVED, Certificate, check_chain, verified

#: Files that are no inputs: their names begin with a dot or _, or they are in the log of the archive.
_NO_INPUTS = re.compile(r"(^|/)[._][^/]*$|^_delta_log/")
_COLUMNS = ["Id", "CreatedAt", "SentAt", "Data"]


def verify(options: argparse.Namespace) -> int:
    """Verify certificates, their chain and the inputs. Raises OutboxError at the first fault."""
    chain = _chain(options.files, options.public_key)
    if options.archive:
        _check_files(chain, ARCHIVE, Path(options.archive))
        for each in chain:
            _tasks(each, Path(options.archive))
    if options.received:
        _check_files(chain, RECEIVED, Path(options.received))
    if options.proof:
        _check_proof(chain, options.proof)
    for each in chain:
        say(f"{each.content['summary']}, from {shown(each.since)} to {shown(each.until)}, certificate {each.digest}")
    before = chain[0].content["previous"]
    first = f"follows {before}" if before else "begins the chain"
    say(f"Verified {counted(len(chain), 'certificate')}. The first one {first}")
    return 0


def prove(options: argparse.Namespace) -> int:
    """Print the proof that a certificate contains a task. Raises OutboxError if it does not."""
    archive, [certificate] = Path(options.archive), _chain([options.certificate], options.public_key)
    _check_files([certificate], ARCHIVE, archive)
    tasks = _tasks(certificate, archive)
    places = [place for place, (id, _) in enumerate(tasks) if id == options.id]
    if not places:
        raise OutboxError(f"Task {options.id!r} is not in {certificate.where}: it was not sent, or of another window")
    place = places[-1]
    path = merkle.path([merkle.leaf(merkle.line(*task)) for task in tasks], place)
    proof = {"certificate": certificate.digest, "task_id": options.id, "digest": tasks[place][1]}
    say(as_json({**proof, "place": place, "path": path}))
    return 0


def _chain(files: Sequence[str], public_keys: Sequence[str]) -> list[Certificate]:
    """Return the verified certificates by their windows."""
    known = [keys.public_key(keys.contents(path), path) for path in public_keys]
    found = sorted((verified(keys.contents(file), file, known) for file in files), key=lambda each: each.since)
    for before, after in itertools.pairwise(found):
        check_chain(before, after)
    return found


def _check_files(chain: Sequence[Certificate], kind: str, folder: Path) -> None:
    """Check that the files in a folder are those that certificates name, and that their folders have no others."""
    named: dict[str, str] = {}
    for certificate in chain:
        for name, digest in certificate.inputs(kind).items():
            if not (folder / name).is_file():
                raise OutboxError(f"{folder} lacks {name}, which {certificate.where} names")
            if named.get(name) != digest and hashlib.sha256(keys.contents(folder / name)).hexdigest() != digest:
                raise OutboxError(f"{folder}/{name} was changed since {certificate.where}")
            named[name] = digest
    for parent in {_run(name) for name in named}:
        for file in (folder / parent).rglob("*"):
            name = str(file.relative_to(folder))
            if name not in named and file.is_file() and not _NO_INPUTS.search(name):
                raise OutboxError(f"{folder}/{name} was added since {chain[-1].where}")


def _run(name: str) -> str:
    """Return the folder in which no file may be added: the run of an archived file, or that of a received file."""
    return "/".join(name.split("/")[:-1][:2])


def _tasks(certificate: Certificate, archive: Path) -> list[tuple[str, str]]:
    """Return the sent tasks of a window: ID and digest of the message. Raises OutboxError if it has others."""
    files = [archive / name for name in certificate.inputs(ARCHIVE) if name.endswith(".parquet")]
    try:
        found = {task for file in files for task in _tasks_of(file, certificate)}
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise OutboxError(f"{archive} has no files of an archive: {type(error).__name__}: {error}") from None
    tasks = sorted(found, key=lambda task: (task[0].encode(), task[1]))
    if merkle.summary(tasks) != certificate.content["tasks"]:
        raise OutboxError(f"The tasks in {archive} are not those of {certificate.where}")
    return tasks


def _tasks_of(file: Path, certificate: Certificate) -> Iterator[tuple[str, str]]:
    for batch in pq.ParquetFile(file).iter_batches(columns=_COLUMNS):
        columns: Any = batch.to_pydict()
        for id, at, sent_at, data in zip(*(columns[name] for name in _COLUMNS), strict=True):
            if sent_at and certificate.since <= at < certificate.until:
                message = parsed(data)
                empty = hashlib.sha256().hexdigest()
                yield id, empty if message is None else sha256_of(message.data, message.attributes)


def _check_proof(chain: Sequence[Certificate], path: str) -> None:
    """Check a proof of `prove` against the certificate alone."""
    try:
        proof = json.loads(keys.contents(path), object_pairs_hook=_unique)
        entry = merkle.line(proof["task_id"], proof["digest"])
        certificate = next((each for each in chain if each.digest == proof["certificate"]), None)
        if certificate is None:
            raise OutboxError(f"{path} is a proof for the certificate {proof['certificate']}, which was not given")
        tasks = certificate.content["tasks"]
        root = merkle.root_from(entry, range(tasks["count"])[proof["place"]], tasks["count"], proof["path"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise OutboxError(f"{path} is not a proof: {type(error).__name__}: {error}") from None
    if root != tasks["root"]:
        raise OutboxError(f"{path} does not prove that {certificate.where} contains task {proof['task_id']!r}")
    wrong = {each["task_id"]: each["outcome"] for each in certificate.content["not_delivered"]}
    outcome = wrong.get(proof["task_id"], "delivered" if len(wrong) < MOST_LISTED else "with an unknown outcome")
    say(f"{certificate.where} contains task {proof['task_id']!r}, {outcome}, with the message {proof['digest']}")


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(names := dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice")
    return names
