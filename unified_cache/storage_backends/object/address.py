"""Address of a bucket, read from a URL, and the bucket opened.

    s3://BUCKET[/PREFIX][?requests=16]     gs://BUCKET[/PREFIX]...     az://CONTAINER[/PREFIX]...

Where the bucket's service is and who we are is what obstore finds: variables such as ``AWS_ENDPOINT_URL`` and
``AWS_ACCESS_KEY_ID``, a web identity, the role of a container or a machine. Nothing of that is taken from a URL.
"""

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, cast

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from unified_cache.core.errors import ConfigError

if TYPE_CHECKING:  # these names are in obstore's stubs alone
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["BucketAddress", "address_of_url", "open_bucket"]

REQUESTS = 16
"""Requests of one call at a time: more gain nothing on loopback, and a bucket far away likes some more."""

VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Scheme: how the variables begin that obstore reads for it."""

CLIENT_OPTIONS = "allow_http allow_invalid_certificates connect_timeout proxy_excludes proxy_url timeout user_agent"
"""Variables, behind that beginning, that obstore reads no more once it is given one option of its HTTP client."""

TIMEOUTS = {"timeout": "10s", "connect_timeout": "2s"}
"""Of one request, where no variable says it. A call that is given up uses its memory for so long."""

RETRIES: "RetryConfig" = {"max_retries": 2, "retry_timeout": timedelta(seconds=3)}
"""Of one request that a service turns away, as S3 does with 503: the guard would repeat it with half of its batch."""

_PART = r"(?!\.{1,2}(?:/|\?|$))[A-Za-z0-9!_.'()=-]+"
_REST = re.compile(
    rf"//(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]+)(?:/(?P<prefix>{_PART}(?:/{_PART})*))?/?(?:\?requests=(?P<requests>[1-9]\d?))?"
)


class BucketAddress(NamedTuple):
    """A bucket, the beginning of all names of a store in it, and how many requests a call makes at a time."""

    scheme: str
    bucket: str
    prefix: str | None
    """Parts of names, joined by slashes; None for a bucket that is the store's alone."""
    requests: int

    @property
    def name(self) -> str:
        """Name for people: the URL without options."""
        return "/".join(filter(None, (f"{self.scheme}://{self.bucket}", self.prefix)))


def address_of_url(scheme: str, rest: str) -> BucketAddress:
    """Read what stands after the scheme; raise ConfigError, which does not repeat it: it may hold what is secret."""
    found = _REST.fullmatch(rest)
    if found is None:
        raise ConfigError(
            f"a bucket is named as {scheme}://BUCKET/PREFIX[?requests=N], N up to 99, and its credentials in the "
            "environment alone; found something else"
        )
    return BucketAddress(scheme, found["bucket"], found["prefix"], int(found["requests"] or REQUESTS))


def open_bucket(address: BucketAddress) -> "ObjectStore":
    """Make the client of a bucket; nothing is sent. Raise ConfigError where the environment contradicts itself."""
    variables = VARIABLES[address.scheme]
    named = {option: os.environ.get(variables + option.upper()) for option in CLIENT_OPTIONS.split()}
    options = cast("ClientConfig", TIMEOUTS | {option: value for option, value in named.items() if value is not None})
    kind: type[S3Store | GCSStore | AzureStore] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[address.scheme]
    try:
        return kind(address.bucket, prefix=address.prefix, client_options=options, retry_config=RETRIES)
    except (BaseError, ValueError) as error:
        found = type(error).__name__  # its text may have what is secret
    raise ConfigError(f"{address.name} cannot be opened by the variables {variables}...: {found}")
