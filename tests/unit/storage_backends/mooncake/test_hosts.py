"""Names of hosts, and the way to them."""

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.storage_backends.mooncake.address import check_resolves, source_host


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, "."])
def test_a_host_that_nobody_resolves_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="host must be a host that all machines resolve"):
        check_resolves("host", host)


def test_the_way_to_the_loopback_address_is_the_loopback_address() -> None:
    assert source_host("127.0.0.1", 9) == "127.0.0.1"
