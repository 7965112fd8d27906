"""The refusal of a call: a status and a message for the client."""

from collections.abc import Sequence

import grpc

from unified_cache.service.access.callers import Caller

__all__ = ["Refused"]


class Refused(Exception):  # noqa: N818  # a refusal is an answer, not a fault
    """A call that is answered with a status instead of a result; ``message`` is for the client and tells no internals.

    ``trailing`` is metadata that goes with it, for clients that act on refusals; ``caller`` is whom the gate knows to
    have asked.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        trailing: Sequence[tuple[str, str]] = (),
        caller: Caller | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.trailing = tuple(trailing)
        self.caller = caller
