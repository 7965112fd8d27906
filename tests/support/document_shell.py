"""A shell for the commands of documents: ours run as they stand, over places of a test in place of the document's."""

import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.support.cluster import ServeProcess, ask
from tests.support.documents import CodeBlock, command_lines

ENDPOINT = "127.0.0.1:50051"
"""Address of the documents' service; here the system chooses the port."""


class DocumentShell:
    """Commands run one after the other; ``serve`` in a process that goes on until the next ``serve``, or the end.

    ``places`` maps words of the document, or parts of them, to what stands for them here; more may be added as they
    become known. Every command must succeed, and every server end well.
    """

    def __init__(self, directory: Path, places: Mapping[str, str]) -> None:
        self.places = dict(places)
        self._directory = directory
        self._server: ServeProcess | None = None

    def __enter__(self) -> "DocumentShell":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        elif self._server is not None:
            self._server.kill()

    def run(self, block: CodeBlock) -> list[str]:
        """Run every command of a block; return what each printed."""
        return [self.call(words) for words in command_lines(block)]

    def call(self, words: list[str]) -> str:
        """Run one command; return what it printed, nothing for a server."""
        program, *arguments = map(self.placed, words)
        assert program == "unified-cache", f"expected a command of ours, found {shlex.join(words)}"
        if arguments[0] == "serve":
            self._serve(arguments[1:])
            return ""
        result = ask(*arguments)
        assert result.status == 0, f"{shlex.join(words)}: {result.err}"
        return result.out

    def placed(self, word: str) -> str:
        """Return a word of the document with the places of this test."""
        for place, here in self.places.items():
            word = word.replace(place, here)
        return word

    def _serve(self, arguments: list[str]) -> None:
        self.stop()
        settings = {"ACCESS__LOCAL_ROLE": "admin"}
        self._server = ServeProcess(*arguments, variables=settings, directory=self._directory)
        self.places[ENDPOINT] = self._server.address

    def stop(self) -> None:
        """End the server as an operator does, if it has not been told to end already; it must end well."""
        if self._server is not None:
            self._server.child.send_signal(signal.SIGTERM)
            self.wait_stopped()

    def wait_stopped(self) -> None:
        """Wait for the end of a server that a command has told to end; it must end well."""
        assert self._server is not None
        server, self._server = self._server, None
        status, kinds = server.ended()
        assert status == 0, kinds
        server.kill()
