from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Manifest(_message.Message):
    __slots__ = ("format_version", "identity", "model", "revision", "dtype", "shard", "page_size", "components", "generation", "facts")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    identity: bytes
    model: str
    revision: str
    dtype: str
    shard: str
    page_size: int
    components: _containers.RepeatedCompositeFieldContainer[Component]
    generation: int
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, format_version: _Optional[int] = ..., identity: _Optional[bytes] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ..., shard: _Optional[str] = ..., page_size: _Optional[int] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., generation: _Optional[int] = ..., facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("name", "span", "pools", "page_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    span: int
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    page_size: int
    def __init__(self, name: _Optional[str] = ..., span: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., page_size: _Optional[int] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "page_bytes", "tensors")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_bytes: int
    tensors: str
    def __init__(self, name: _Optional[str] = ..., page_bytes: _Optional[int] = ..., tensors: _Optional[str] = ...) -> None: ...
