"""A call without a network: what gRPC hands to a servicer, and what the servicer tells it."""

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import grpc

PEER = "ipv4:127.0.0.1:1"


class Aborted(Exception):  # noqa: N818  # the end of a call, as in gRPC
    """The servicer ended the call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code


class DirectContext(grpc.ServicerContext):
    """The context of one call by nobody in particular, who stays until the end."""

    def is_active(self) -> bool:
        return True

    def time_remaining(self) -> float:
        return 60.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return ()

    def peer(self) -> str:
        return PEER

    def peer_identities(self) -> Iterable[bytes] | None:
        return None

    def peer_identity_key(self) -> str | None:
        return None

    def auth_context(self) -> Mapping[str, bytes]:
        return {}

    def send_initial_metadata(self, initial_metadata: object) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: object) -> None: ...

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Aborted(code, details)

    def abort_with_status(self, status: grpc.Status) -> NoReturn:
        raise Aborted(status.code, status.details)

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...
