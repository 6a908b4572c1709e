"""A request that the console does not answer as asked."""


class Refused(Exception):
    """The answer is a page with this status, what is wrong, and what to do. Access and handlers raise it."""

    def __init__(self, status: int, title: str, advice: str) -> None:
        super().__init__(title)
        self.status, self.title, self.advice = status, title, advice
