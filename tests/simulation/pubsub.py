"""A model of Pub/Sub: topics that work, are slow, are missing or do not answer, and every message that was received."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from outbox.message import TASK_ID_ATTRIBUTE
from publishworker.pubsub.publisher import PubSubPublisher
from tests.simulation.audit import Audit
from tests.simulation.clockwork import Clockwork, Process, VirtualThreads
from tests.simulation.duplicates import Message
from tests.support.fakes import CallFailed, Response

PROJECT = "test-project"


class PubSub:
    """The service. The auditor is told of each message that it accepts, and of each answer that arrives."""

    def __init__(self, clockwork: Clockwork, audit: Audit) -> None:
        self.clockwork, self.audit = clockwork, audit
        #: What a topic answers instead of publishing, by topic ID.
        self.broken: dict[str, grpc.StatusCode] = {}
        #: IDs of tasks whose requests fail as in an outage, and nothing else does.
        self.poison: frozenset[str] = frozenset()
        #: Seconds that each request takes longer.
        self.slow = 0.0
        #: The same for one topic, by topic ID.
        self.slow_topics: dict[str, float] = {}

    def publisher(
        self, process: Process, clock: Callable[[], float], median: float, fate: Callable[[str], str | None]
    ) -> PubSubPublisher:
        """Return the relay's own publisher, on a channel to this service."""
        channel: Any = _Channel(self, process, median, fate)
        return PubSubPublisher(channel, PROJECT, clock=clock, threads=VirtualThreads(self.clockwork, process))

    def execute(self, process: Process, request: Any, sent: Sequence[Message]) -> grpc.StatusCode:
        topic = request.topic.rpartition("/")[2]
        if topic in self.broken:
            return self.broken[topic]
        if any(each.attributes[TASK_ID_ATTRIBUTE] in self.poison for each in request.messages):
            return grpc.StatusCode.INTERNAL
        if any("bad" in each.attributes for each in request.messages):
            return grpc.StatusCode.INVALID_ARGUMENT
        messages = [(each.attributes[TASK_ID_ATTRIBUTE], each.ordering_key, each.data) for each in request.messages]
        self.audit.received(process, topic, messages, sent)
        return grpc.StatusCode.OK


class _Channel:
    """The channel to Pub/Sub of one process, and the transport that holds it."""

    def __init__(self, pubsub: PubSub, process: Process, median: float, fate: Callable[[str], str | None]) -> None:
        self._pubsub, self._process, self._median, self._fate = pubsub, process, median, fate
        self.grpc_channel = self

    def unary_unary(self, *_arguments: Any, **_more: Any) -> "_Channel":
        return self

    def future(self, request: Any, timeout: float, **_more: Any) -> "_Answer":
        """Send a request. Its answer comes within `timeout`, but an unanswered request may be executed later."""
        ids = [each.attributes[TASK_ID_ATTRIBUTE] for each in request.messages]
        clockwork, pubsub, answer = self._pubsub.clockwork, self._pubsub, _Answer(request.topic, ids)
        sent = pubsub.audit.requested(self._process, answer.topic, ids)
        fate = self._fate("publish")
        slow = pubsub.slow + pubsub.slow_topics.get(answer.topic, 0.0)
        latency = self._median * clockwork.random.uniform(0.7, 1.6) + slow

        def serve() -> None:
            code = pubsub.execute(self._process, request, sent)
            if fate != "unanswered":
                clockwork.after(latency / 2, lambda: self._answer(answer, code))

        if fate == "refused":
            clockwork.after(latency / 2, lambda: self._answer(answer, grpc.StatusCode.UNAVAILABLE))
        elif fate != "lost":
            clockwork.after(latency / 2, serve)

        def end() -> None:
            if slow and not answer.answered and self._process.alive:
                pubsub.audit.messages.touch_all(sent)
            self._answer(answer, grpc.StatusCode.DEADLINE_EXCEEDED)

        if fate == "unanswered":
            pubsub.audit.messages.touch_all(sent)
        clockwork.after(timeout, end)
        return answer

    def with_call(self, request: Any, timeout: float, **_more: Any) -> tuple[None, "_Answer"]:
        """Send a request, and wait for its answer."""
        answers = VirtualThreads(self._pubsub.clockwork, self._process).queue()
        self.future(request, timeout).add_done_callback(answers.put)
        return None, answers.get()

    def _answer(self, answer: "_Answer", code: grpc.StatusCode) -> None:
        if not answer.answered:
            answer.answered = True
            answer.error = None if code is grpc.StatusCode.OK else CallFailed(code, "no " * 400)
            self._pubsub.audit.answered(self._process, answer.message_ids, code.name.lower())
            for callback in answer.callbacks:
                self._pubsub.clockwork.spawn(self._process, lambda each=callback: each(answer))


class _Answer(Response):
    """The future of an answer that is still on its way."""

    def __init__(self, topic: str, ids: list[str]) -> None:
        super().__init__(ids)
        self.topic = topic.rpartition("/")[2]
        self.answered = False
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)
