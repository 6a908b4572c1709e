"""The Merkle tree of RFC 6962 over the tasks of a certificate, sorted by task ID and digest.

A leaf and a node are hashed with different first bytes, so a node can never be presented as a leaf.
"""

import functools
import hashlib
from collections.abc import Iterable, Sequence

import rfc8785

from outbox.base.values import chunked


def line(id: str, digest: str) -> bytes:
    """Return the line of a task in the list of tasks: a JSON array in the form of RFC 8785."""
    return rfc8785.dumps([id, digest])


def leaf(entry: bytes) -> bytes:
    """Return the hash of a leaf."""
    return hashlib.sha256(b"\0" + entry).digest()


def node(left: bytes, right: bytes) -> bytes:
    """Return the hash of a node."""
    return hashlib.sha256(b"\1" + left + right).digest()


def summary(tasks: Iterable[tuple[str, str]]) -> dict[str, object]:
    """Return what a certificate says about the list: its length, its digest, and the root. Holds no tasks."""
    count, listed = 0, hashlib.sha256()
    roots: list[bytes] = []  # of full subtrees, the largest first
    for count, task in enumerate(tasks, 1):
        listed.update(line(*task) + b"\n")
        roots.append(leaf(line(*task)))
        size = count
        while size % 2 == 0:
            right, size = roots.pop(), size // 2
            roots.append(node(roots.pop(), right))
    root = functools.reduce(lambda right, left: node(left, right), reversed(roots)) if roots else listed.digest()
    return {"count": count, "sha256": listed.hexdigest(), "root": root.hex()}


def path(leaves: Sequence[bytes], place: int) -> list[str]:
    """Return the hashes with which the leaf at `place` leads to the root."""
    found = []
    while len(leaves) > 1:
        if (place ^ 1) < len(leaves):
            found.append(leaves[place ^ 1].hex())
        leaves = [node(*pair) if len(pair) == 2 else pair[0] for pair in chunked(leaves, 2)]
        place //= 2
    return found


def root_from(entry: bytes, place: int, tasks: int, hashes: Sequence[str]) -> str | None:
    """Return the root to which a path leads, or None if the path does not have the length of such a tree."""
    left, last, root = [bytes.fromhex(each) for each in hashes], tasks - 1, leaf(entry)
    while last > 0:
        if place % 2 or place < last:
            if not left:
                return None
            other = left.pop(0)
            root = node(other, root) if place % 2 else node(root, other)
        place, last = place // 2, last // 2
    return None if left or place else root.hex()
