"""Asks etcd which of several masters leads, over the HTTP that every member of it speaks."""

import http.client
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence

from unified_cache.core.errors import StorageError

ETCD_TIMEOUT_S = 0.5
"""For one member: it answers in milliseconds, or stands alone and waits for the others."""

CLUSTER_VARIABLE, CLUSTER = "MC_STORE_CLUSTER_ID", "mooncake_cluster"
"""Environment variable by which Mooncake tells clusters in one etcd apart, and its name for one without."""


def leader_of(members: Sequence[str]) -> tuple[str, int]:
    """Return host and port of the master that leads; StorageError where no member of etcd names one."""
    key = f"mooncake-store/{os.environ.get(CLUSTER_VARIABLE) or CLUSTER}/master_view"
    refused: list[str] = []
    for member in members:
        try:
            found = _value(member, key)
        except (OSError, http.client.HTTPException, ValueError) as error:
            refused.append(f"{member} ({error})")
            continue
        host, _, port = found.rpartition(":")
        if not host:
            raise StorageError(f"no Mooncake master leads now, says etcd at {member}", retryable=True)
        return host, int(port)
    raise StorageError(f"no member of etcd says which Mooncake master leads: {', '.join(refused)}", retryable=True)


def _value(member: str, key: str) -> str:
    """Ask one member; empty where the key is not there, ValueError for what is no answer."""
    host, _, port = member.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=ETCD_TIMEOUT_S)
    try:
        connection.request("POST", "/v3/kv/range", json.dumps({"key": b64encode(key.encode()).decode()}))
        answer = connection.getresponse()
        said = json.loads(answer.read())
    finally:
        connection.close()
    match said:
        case {"kvs": [{"value": str(value)}]}:
            return b64decode(value).decode()
        case {"header": dict()}:
            return ""
        case _:
            raise ValueError(f"answers {answer.status}: {said}")
