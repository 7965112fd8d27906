import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.protocol import Level


def test_every_key_is_read() -> None:
    options = {
        "url": "packed:/var/kv",
        "bytes_max": "100GiB",
        "model": "org/model",
        "revision": "1",
        "on_reset": "keep",
        "level": "durable",
        "deadline_s": 2,
        "close_timeout_s": 3.5,
        "locality": "REMOTE",
        "store_share": 0.5,
    }
    read = TierSettings.of(options)
    assert options.keys() == TierSettings.model_fields.keys()
    unsaid = TierSettings(url="u").model_dump()
    assert not {name for name, value in read.model_dump().items() if value == unsaid[name]}
    assert (read.bytes_max, read.on_reset, read.level) == (100 << 30, "keep", Level.DURABLE)


def test_weights_may_have_changed_at_a_reset_unless_the_user_says_otherwise() -> None:
    assert TierSettings(url="file:/var/kv").on_reset == "forget"


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"url": "file:/kv"}, "LOCAL"),
        ({"url": "packed:/kv"}, "LOCAL"),
        ({"url": "grpc://host:1"}, "REMOTE"),
        ({"url": "package.module:factory"}, "REMOTE"),
        ({"url": "file:/nfs", "locality": "REMOTE"}, "REMOTE"),
    ],
)
def test_a_store_lies_where_its_url_or_the_user_says(options: dict[str, object], place: str) -> None:
    assert TierSettings.of(options).place == place


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "url must name a store"),
        ({"url": "file:/kv", "urll": "x"}, "no setting urll; did you mean url"),
        ({"url": "file:/kv", "on_reset": "drop"}, "on_reset must be 'forget' or 'keep', found 'drop'"),
        ({"url": "file:/kv", "level": True}, "level must be 'cached' or 'durable', found True"),
        ({"url": "file:/kv", "bytes_max": "many"}, "bytes_max must be bytes"),
        ({"url": "file:/kv", "deadline_s": 0}, "deadline_s must be greater than 0"),
        ({"url": "file:/kv", "deadline_s": "soon"}, "deadline_s must be a number"),
        ({"url": "file:/kv", "locality": "local"}, "locality must be 'LOCAL' or 'REMOTE', found 'local'"),
        ({"url": "file:/kv", "store_share": 2}, "store_share must be less than or equal to 1"),
        ({"url": 5}, "url must be a valid string, found 5"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierSettings.of(options)
