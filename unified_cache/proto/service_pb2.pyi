from unified_cache.proto import manifest_pb2 as _manifest_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Level(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHED: _ClassVar[Level]
    DURABLE: _ClassVar[Level]
CACHED: Level
DURABLE: Level

class HelloRequest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: _manifest_pb2.Manifest
    def __init__(self, manifest: _Optional[_Union[_manifest_pb2.Manifest, _Mapping]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("format_version", "tenant", "durable", "part_bytes", "pages_max", "store", "stored_bytes", "identities_count")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_MAX_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_COUNT_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    tenant: str
    durable: bool
    part_bytes: int
    pages_max: int
    store: str
    stored_bytes: int
    identities_count: int
    def __init__(self, format_version: _Optional[int] = ..., tenant: _Optional[str] = ..., durable: _Optional[bool] = ..., part_bytes: _Optional[int] = ..., pages_max: _Optional[int] = ..., store: _Optional[str] = ..., stored_bytes: _Optional[int] = ..., identities_count: _Optional[int] = ...) -> None: ...

class PageRun(_message.Message):
    __slots__ = ("identity", "pool", "keys", "object_bytes")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    identity: bytes
    pool: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    object_bytes: int
    def __init__(self, identity: _Optional[bytes] = ..., pool: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., object_bytes: _Optional[int] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ...) -> None: ...

class ExistsReply(_message.Message):
    __slots__ = ("found", "reasons")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    found: bytes
    reasons: bytes
    def __init__(self, found: _Optional[bytes] = ..., reasons: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ...) -> None: ...

class GetPart(_message.Message):
    __slots__ = ("offset", "hits", "reasons", "content")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    offset: int
    hits: bytes
    reasons: bytes
    content: bytes
    def __init__(self, offset: _Optional[int] = ..., hits: _Optional[bytes] = ..., reasons: _Optional[bytes] = ..., content: _Optional[bytes] = ...) -> None: ...

class PutStart(_message.Message):
    __slots__ = ("level", "runs")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    level: Level
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    def __init__(self, level: _Optional[_Union[Level, str]] = ..., runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ...) -> None: ...

class PutPart(_message.Message):
    __slots__ = ("offset", "content", "start")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    offset: int
    content: bytes
    start: PutStart
    def __init__(self, offset: _Optional[int] = ..., content: _Optional[bytes] = ..., start: _Optional[_Union[PutStart, _Mapping]] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("stored", "reasons")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    reasons: bytes
    def __init__(self, stored: _Optional[bytes] = ..., reasons: _Optional[bytes] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ...) -> None: ...

class TouchReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("removed_count",)
    REMOVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    removed_count: int
    def __init__(self, removed_count: _Optional[int] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("identity", "cursor")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    identity: bytes
    cursor: str
    def __init__(self, identity: _Optional[bytes] = ..., cursor: _Optional[str] = ...) -> None: ...

class ScanReply(_message.Message):
    __slots__ = ("runs", "cursor")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    cursor: str
    def __init__(self, runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class IdentitiesRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: bytes
    def __init__(self, after: _Optional[bytes] = ...) -> None: ...

class IdentitiesReply(_message.Message):
    __slots__ = ("manifests",)
    MANIFESTS_FIELD_NUMBER: _ClassVar[int]
    manifests: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Manifest]
    def __init__(self, manifests: _Optional[_Iterable[_Union[_manifest_pb2.Manifest, _Mapping]]] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("identity",)
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    identity: bytes
    def __init__(self, identity: _Optional[bytes] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("removed_count",)
    REMOVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    removed_count: int
    def __init__(self, removed_count: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
