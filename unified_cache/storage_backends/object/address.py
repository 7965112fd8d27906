"""Address of a bucket, read from a URL, and the bucket opened.

    s3://BUCKET[/PREFIX][?requests=16]     gs://BUCKET[/PREFIX]...     az://CONTAINER[/PREFIX]...

Where the bucket's service is and who we are is what obstore finds: variables such as ``AWS_ENDPOINT_URL`` and
``AWS_ACCESS_KEY_ID``, a web identity, the role of a container or a machine. Nothing of that is taken from a URL.

No redirect to another host is followed, for it would be given our credentials, and no proxy is used but the one that
``AWS_PROXY_URL`` names, whatever ``http_proxy`` says. obstore has no option for either. So all hosts but those of the
cloud, and those that a variable names, are behind a proxy that cannot be.
"""

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from unified_cache.core.errors import ConfigError

if TYPE_CHECKING:  # these names are in obstore's stubs alone
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

REQUESTS = 16
"""Requests of one call at a time: more gain nothing on loopback, and a bucket far away likes some more."""

VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Scheme: how the variables begin that obstore reads for it."""

CLIENT_OPTIONS = "allow_http allow_invalid_certificates connect_timeout proxy_excludes proxy_url timeout user_agent"
"""Variables, behind that beginning, that obstore reads no more once it is given one option of its HTTP client."""

TIMEOUTS = {"timeout": "10s", "connect_timeout": "2s"}
"""Of one request, where no variable says it. A call that is given up uses its memory for so long."""

NO_PROXY = "http://127.0.0.1:0"
"""Nothing can listen at port 0; a connection to it is refused at once."""

LINK_LOCAL = "169.254.169.254,169.254.170.2,169.254.170.23,fd00:ec2::254,fd00:ec2::23"
"""Where a machine and a container are given their credentials."""

CLOUD_HOSTS = {
    "s3": f"amazonaws.com,amazonaws.com.cn,api.aws,{LINK_LOCAL}",
    "gs": f"googleapis.com,google.com,google.internal,metadata,{LINK_LOCAL}",
    "az": "windows.net,microsoftonline.com,microsoftonline.us,usgovcloudapi.net,chinacloudapi.cn,localhost,127.0.0.1,"
    + LINK_LOCAL,
}
"""Scheme: hosts, with all below them, of buckets and of what gives credentials; of Azure, its emulator's, too."""

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
    direct = {
        "proxy_url": NO_PROXY,
        "proxy_excludes": ",".join([CLOUD_HOSTS[address.scheme], *_named_hosts(variables)]),
    }
    given = {option: value for option, value in named.items() if value is not None}
    options = cast("ClientConfig", TIMEOUTS | ({} if "proxy_url" in given else direct) | given)
    kind: type[S3Store | GCSStore | AzureStore] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[address.scheme]
    try:
        return kind(address.bucket, prefix=address.prefix, client_options=options, retry_config=RETRIES)
    except BaseException as error:
        if not isinstance(error, (BaseError, ValueError)) and not is_panic(error):
            raise
        found = type(error).__name__  # its text may have what is secret
    raise ConfigError(f"{address.name} cannot be opened by the variables {variables}...: {found}")


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a bug of a library in Rust; its class cannot be imported, and is no ``Exception``."""
    return type(error).__name__ == "PanicException"


def _named_hosts(variables: str) -> list[str]:
    """Return the hosts of the URLs that variables of a cloud name; raise ConfigError where an endpoint is no URL."""
    hosts: list[str] = []
    for name, value in os.environ.items():
        if not name.startswith((variables, "IDENTITY_", "MSI_", "AZURITE_")) or name.endswith("_PROXY_URL"):
            continue
        host = _host_of(value)
        if host is not None:
            hosts.append(host)
        elif "ENDPOINT" in name and value:
            raise ConfigError(f"{name} must be a URL such as http://minio:9000, found something else")
    return hosts


def _host_of(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and url.split() == [url] and "@" not in parts.netloc
        return parts.hostname if is_url and parts.port != 0 else None
    except ValueError:  # of a port or of brackets
        return None
