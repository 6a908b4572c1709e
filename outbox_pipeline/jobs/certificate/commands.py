"""`outbox-pipeline certificate`: verify certificates and prove that one of them contains a task, without Spark."""

import argparse
import itertools
import json
from collections.abc import Sequence

from outbox.base.times import shown
from outbox.base.values import counted
from outbox.errors import OutboxError, SettingError
from outbox.program.terminal import as_json, say
from outbox_pipeline.jobs.certificate import keys, merkle
from outbox_pipeline.jobs.certificate.document import ARCHIVE, MOST_LISTED, RECEIVED, Certificate, check_chain, verified
from outbox_pipeline.jobs.certificate.evidence import Evidence


def verify(options: argparse.Namespace) -> int:
    """Verify certificates, their chain and the inputs. Raises OutboxError at the first fault."""
    chain = _chain(options.files, options.public_key)
    if options.archive:
        archive = Evidence(options.archive)
        for each in chain:
            _check_archive(each, archive)
    if options.received:
        _check_received(chain, Evidence(options.received))
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
    [certificate] = _chain([options.certificate], options.public_key)
    tasks = _check_archive(certificate, Evidence(options.archive))
    places = [place for place, (id, _) in enumerate(tasks) if id == options.id]
    if not places:
        raise OutboxError(f"Task {options.id!r} is not in {certificate.where}: it was not sent, or of another window")
    place = places[-1]
    path = merkle.path([merkle.leaf(merkle.line(*task)) for task in tasks], place)
    proof = {"task_id": options.id, "digest": tasks[place][1], "place": place, "path": path}
    say(as_json({"certificate": certificate.digest, **proof}))
    return 0


def _chain(files: Sequence[str], public_keys: Sequence[str]) -> list[Certificate]:
    """Return the verified certificates by their windows."""
    known = [keys.public_key(keys.contents(path), path) for path in public_keys]
    found = sorted((verified(keys.contents(file), file, known) for file in files), key=lambda each: each.since)
    for before, after in itertools.pairwise(found):
        check_chain(before, after)
    return found


def _check_archive(certificate: Certificate, archive: Evidence) -> list[tuple[str, str]]:
    """Return the tasks of a certificate, after checking that the files of the archive are those that it names."""
    wanted = certificate.inputs(ARCHIVE)
    for name, digest in wanted.items():
        if name not in archive.files:
            raise OutboxError(f"{archive.path} lacks {name}, which {certificate.where} names")
        if archive.digest(name) != digest:
            raise OutboxError(f"{archive.path}/{name} was changed since {certificate.where}")
    # The log names one folder of files for each window, and a killed run may have left others.
    folders = {_folder(name) for name in wanted}
    for name in archive.files.keys() - wanted.keys():
        if name.endswith(".parquet") and _folder(name) in folders:
            raise OutboxError(f"{archive.path}/{name} was added since {certificate.where}")
    tasks, tree = archive.tasks(certificate), merkle.Tree()
    for task in tasks:
        tree.add(*task)
    if tree.summary() != certificate.content["tasks"]:
        raise OutboxError(f"The tasks in {archive.path} are not those of {certificate.where}")
    return tasks


def _folder(name: str) -> str:
    """Return the window and the run of a file of the archive."""
    return "/".join(name.split("/")[:2])


def _check_received(chain: Sequence[Certificate], received: Evidence) -> None:
    """Check that the received files are those that the certificates name. A copy may have other folders."""
    wanted = {digest: (name, each.where) for each in chain for name, digest in each.inputs(RECEIVED).items()}
    found = {received.digest(name): name for name in received.files}
    for digest, (name, where) in wanted.items():
        if digest not in found:
            raise OutboxError(f"{received.path} lacks the file {name} of {where}, or it was changed")
    for digest, name in found.items():
        if digest not in wanted:
            raise OutboxError(f"{received.path}: the file {name} is in no certificate")


def _check_proof(chain: Sequence[Certificate], path: str) -> None:
    """Check a proof of `prove` against the certificate alone."""
    try:
        proof = json.loads(keys.contents(path))
        entry = merkle.line(proof["task_id"], proof["digest"])
        certificate = next((each for each in chain if each.digest == proof["certificate"]), None)
        if certificate is None:
            raise OutboxError(f"{path} is a proof for the certificate {proof['certificate']}, which was not given")
        tasks = certificate.content["tasks"]
        root = merkle.root_from(entry, proof["place"], tasks["count"], proof["path"])
    except (ValueError, TypeError, KeyError) as error:
        raise SettingError(f"{path} is not a proof: {type(error).__name__}: {error}") from None
    if root != tasks["root"]:
        raise OutboxError(f"{path} does not prove that {certificate.where} contains task {proof['task_id']!r}")
    wrong = {each["task_id"]: each["outcome"] for each in certificate.content["not_delivered"]}
    outcome = wrong.get(proof["task_id"], "delivered" if len(wrong) < MOST_LISTED else "with an unknown outcome")
    say(f"{certificate.where} contains task {proof['task_id']!r}, {outcome}, with the message {proof['digest']}")
