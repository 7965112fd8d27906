"""``unified-cache conformance``: the storage contract run over any backend, promise by promise."""

import inspect
import sys
import threading
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Literal

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.progress import watched
from unified_cache.cli.text import console_on
from unified_cache.cli.tool_calls import open_in_time
from unified_cache.core.errors import CacheError, ConfigError, without_secrets
from unified_cache.core.sizes import parse_bytes
from unified_cache.storage_backends.offline.listing import listed
from unified_cache.storage_backends.offline.stores import open_to_write
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing import storage_contract

CONFORMANCE_EPILOG = """**Examples**

    unified-cache conformance file:scratch

    unified-cache conformance my_stores.redis:connect --bytes-max 1MiB
"""

conformance_app = typer.Typer(rich_markup_mode="markdown")

_OWN_IDENTITIES = (
    storage_contract.label(1).identity,
    storage_contract.label(1, model=storage_contract.OTHER_MODEL).identity,
)
"""All that the contract ever stores under."""

_FIRST = "test_"

_Test = Callable[[Store], None]


TrialVerdict = Literal["pass", "FAIL", "skip"]
"""Result of trying one promise; one that does not apply to the backend is skipped."""


@dataclass(frozen=True, slots=True)
class ContractTrial:
    """One promise, tried on a backend of its own."""

    promise: str
    verdict: TrialVerdict
    reason: str
    """Why it failed or was skipped; empty where it passed."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ConformanceCommand(JsonOptions):
    """Run the storage contract over a backend and show which promises it keeps.

    STORE is the URL of a store: one of ours, or a third party's package.module:factory, with a further colon and an
    argument where it takes one. It is opened again for every promise, as factory(argument, bytes_max), and closed. The
    contract stores under two identities of its own, cleared before every promise. A store that holds other pages is
    refused, since a cap makes them go; one that cannot list its identities is taken for empty. It needs room for 1 MiB.
    Every page that is read is verified, as every cache does it.
    """

    store: Annotated[str, typer.Argument(metavar="STORE", help="Backend to try: package.module:factory.")]
    bytes_max: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Cap to open it with, at most 1MiB, so that declining is tried too."),
    ] = None
    keys_only: Annotated[
        bool, typer.Option("--keys-only", help="The promises of a backend that keeps names but no bytes.")
    ] = False
    not_empty: Annotated[
        bool, typer.Option("--not-empty", help="Try a store that holds pages all the same; any of them may go.")
    ] = False
    timeout_s: Annotated[float, typer.Option(help="Seconds for one promise; a call that hangs breaks it.")] = 60.0

    def run(self) -> None:
        """Try every promise and show the verdicts."""
        cap = None if self.bytes_max is None else parse_bytes("--bytes-max", self.bytes_max)
        if cap is not None and cap > storage_contract.ROOM_BYTES_MAX:
            raise ConfigError(f"--bytes-max must be at most {storage_contract.ROOM_BYTES_MAX}, found {cap}")
        if not self.timeout_s > 0:
            raise ConfigError(f"--timeout-s must be positive, found {self.timeout_s}")
        if not self.not_empty:
            _check_empty(self.store)
        open_in_time(lambda url: open_to_write(url, cap), self.store).close()
        contract = storage_contract.KeysOnlyContract if self.keys_only else storage_contract.StorageContract
        tests = promises_of(contract)
        tried: list[ContractTrial] = []
        with watched(sys.stderr, "conformance", len(tests), "promises") as on_progress:
            for trial in try_promises(tests, lambda: self._opened(cap), self.timeout_s):
                tried.append(trial)
                on_progress(len(tried), "")
        self._show(tried)
        broken = sum(trial.verdict == "FAIL" for trial in tried)
        if broken:
            raise CacheError(f"{self.store} must keep {len(tried)} promises, {broken} are broken")

    def _opened(self, cap: int | None) -> Store:
        storage = open_to_write(self.store, cap)
        # A backend of names alone gives no bytes to be verified.
        return storage if self.keys_only else VerifiedStorage(storage)

    def _show(self, tried: Sequence[ContractTrial]) -> None:
        value = {"store": without_secrets(self.store), "promises": list(map(asdict, tried))}
        if self.shown_as_json("conformance", value):
            return
        console = console_on(sys.stdout)
        rows = ((each.promise, each.verdict, f"{each.seconds:.2f}") for each in tried)
        console.print_table(("promise", "verdict", "seconds"), rows, left=2)
        for each in tried:
            if each.reason:
                console.print_line(f"{each.verdict}: {each.promise}: {each.reason}")


def _check_empty(url: str) -> None:
    """Refuse a store that holds pages of others. It is opened without a cap, so that nothing goes."""
    with closing(open_in_time(open_to_write, url)) as storage:
        for identity in storage.manifests() or ():
            if identity not in _OWN_IDENTITIES and any(listed(storage, identity)):
                raise ConfigError(
                    f"{without_secrets(url)} must be empty, found pages of {identity.hex()[:12]}, any of which may go; "
                    f"name another store, or say so with --not-empty"
                )


def promises_of(contract: type) -> dict[str, _Test]:
    """Return the tests of a contract class by the sentence that each is, those that take a storage and nothing else."""
    case: object = contract()
    return {
        name.removeprefix(_FIRST).replace("_", " "): test
        for name, test in inspect.getmembers(case, inspect.ismethod)
        if name.startswith(_FIRST) and list(inspect.signature(test).parameters) == ["storage"]
    }


def try_promises(
    tests: dict[str, _Test], open_backend: Callable[[], Store], timeout_s: float
) -> Iterator[ContractTrial]:
    """Try every promise on a backend opened for it; whatever it raises breaks that promise and no other.

    A call that does not return within ``timeout_s`` is left behind on its thread, which ends with the process.
    """
    for sentence, test in tests.items():
        started_s = time.monotonic()
        result = unittest.TestResult()
        case = unittest.FunctionTestCase(partial(_try, test, open_backend))
        thread = threading.Thread(target=case.run, args=(result,), name=sentence, daemon=True)
        thread.start()
        thread.join(timeout_s)
        verdict, reason = _verdict(result)
        if thread.is_alive():
            verdict, reason = "FAIL", f"it did not return within {timeout_s:g} s"
        yield ContractTrial(sentence, verdict, reason, time.monotonic() - started_s)


def _try(test: _Test, open_backend: Callable[[], Store]) -> None:
    with closing(open_backend()) as storage:
        storage_contract.open_for_contract(storage)
        storage_contract.remove_all(storage)
        test(storage)


def _verdict(result: unittest.TestResult) -> tuple[TrialVerdict, str]:
    """Return the verdict of one test and its reason: what a trace ends with, and where."""
    for _, trace in (*result.failures, *result.errors):
        lines = [line.strip() for line in trace.strip().splitlines()]
        places = [line for line in lines if line.startswith("File ")]
        return "FAIL", f"{lines[-1]} ({places[-1]})" if places else lines[-1]
    for _, reason in result.skipped:
        return "skip", reason
    return "pass", ""


conformance_app.command("conformance", epilog=CONFORMANCE_EPILOG)(ConformanceCommand)
