"""Pub/Sub as the real publisher sees it: a channel whose requests the model executes and answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from outbox.message import TASK_ID_ATTRIBUTE
from tests.support.stepwise import Point, here


@dataclass(eq=False)
class Request:
    """A publish request; also the future of its answer."""

    topic: str
    ids: list[str]
    keys: set[str]
    code: grpc.StatusCode = grpc.StatusCode.OK
    executed: bool = False
    sender: Any = None  # the worker
    process: Any = None  # of the worker: it may have another one since
    callbacks: list[Any] = field(default_factory=list)

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)
        here().pause(Point.ANSWER)

    def result(self) -> Any:
        if self.code is not grpc.StatusCode.OK:
            raise Refused(self.code)
        return Answer([f"message of {id}" for id in self.ids])

    def answer(self, code: grpc.StatusCode) -> None:
        self.code = code
        for callback in self.callbacks:
            callback(self)


@dataclass
class Answer:
    message_ids: list[str]


class Refused(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code)
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "no " * 400


class Channel:
    """The channel to Pub/Sub, and the transport that holds it."""

    def __init__(self, send: Callable[[Request], None]) -> None:
        self._send = send
        self.grpc_channel = self

    def unary_unary(self, *_arguments: Any, **_more: Any) -> "Channel":
        return self

    def future(self, request: Any, **_more: Any) -> Request:
        ids = [message.attributes[TASK_ID_ATTRIBUTE] for message in request.messages]
        sent = Request(request.topic, ids, {message.ordering_key for message in request.messages})
        self._send(sent)
        return sent
