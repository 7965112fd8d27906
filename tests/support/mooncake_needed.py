"""The marks of tests that run Mooncake for real; where that is impossible, they are skipped and say why."""

import shutil

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.storage_backends.mooncake.native import usable_wheel


def why_not() -> str:
    """Say what Mooncake lacks here; empty if nothing."""
    try:
        usable_wheel()
    except ConfigError as error:
        return str(error)
    return ""


needs_mooncake = pytest.mark.skipif(bool(why_not()), reason=why_not() or "Mooncake runs")

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed; Debian: etcd-server")
"""Beside the other: for tests of several masters."""
