from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Knowledge(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KNOWLEDGE_NONE: _ClassVar[Knowledge]
    KNOWLEDGE_PART: _ClassVar[Knowledge]
    KNOWLEDGE_WHOLE: _ClassVar[Knowledge]
KNOWLEDGE_NONE: Knowledge
KNOWLEDGE_PART: Knowledge
KNOWLEDGE_WHOLE: Knowledge

class ScoreRequest(_message.Message):
    __slots__ = ("tokens", "namespace")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    namespace: PromptNamespace
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., namespace: _Optional[_Union[PromptNamespace, _Mapping]] = ...) -> None: ...

class PromptNamespace(_message.Message):
    __slots__ = ("extra_key", "cache_salt", "lora_id", "tenant", "bigrams")
    EXTRA_KEY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BIGRAMS_FIELD_NUMBER: _ClassVar[int]
    extra_key: str
    cache_salt: str
    lora_id: str
    tenant: str
    bigrams: bool
    def __init__(self, extra_key: _Optional[str] = ..., cache_salt: _Optional[str] = ..., lora_id: _Optional[str] = ..., tenant: _Optional[str] = ..., bigrams: _Optional[bool] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineScore]
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineScore, _Mapping]]] = ...) -> None: ...

class EngineScore(_message.Message):
    __slots__ = ("engine", "knowledge", "page_size", "device_pages", "host_pages", "storage_pages")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    KNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_PAGES_FIELD_NUMBER: _ClassVar[int]
    engine: str
    knowledge: Knowledge
    page_size: int
    device_pages: int
    host_pages: int
    storage_pages: int
    def __init__(self, engine: _Optional[str] = ..., knowledge: _Optional[_Union[Knowledge, str]] = ..., page_size: _Optional[int] = ..., device_pages: _Optional[int] = ..., host_pages: _Optional[int] = ..., storage_pages: _Optional[int] = ...) -> None: ...

class EnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EnginesReply(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[FollowedEngine]
    def __init__(self, engines: _Optional[_Iterable[_Union[FollowedEngine, _Mapping]]] = ...) -> None: ...

class FollowedEngine(_message.Message):
    __slots__ = ("engine", "knowledge", "pages", "batches", "gaps", "losses", "restarts")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    KNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    knowledge: Knowledge
    pages: int
    batches: int
    gaps: int
    losses: int
    restarts: int
    def __init__(self, engine: _Optional[str] = ..., knowledge: _Optional[_Union[Knowledge, str]] = ..., pages: _Optional[int] = ..., batches: _Optional[int] = ..., gaps: _Optional[int] = ..., losses: _Optional[int] = ..., restarts: _Optional[int] = ...) -> None: ...
