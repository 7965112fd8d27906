"""What we use of the Mooncake library, which has no types of its own. Codes stand in the order of the keys."""

from mooncake.engine import Engine

class BufferDescriptor:
    """Place of a replica."""

    transport_endpoint: str
    buffer_address: int
    size: int

class MemoryReplica:
    buffer_descriptor: BufferDescriptor

class Replica:
    """One replica of an object, as the master knows it."""

    def is_memory_replica(self) -> bool: ...
    def get_memory_descriptor(self) -> MemoryReplica: ...

class ReplicateConfig:
    """Settings of a put: one replica and nothing pinned unless they say so."""

    replica_num: int
    with_hard_pin: bool
    preferred_segments: list[str]
    """Nodes by their addresses; others are taken, and nothing said, where those are not there or full."""
    group_ids: list[str]
    """One for each object of the call: what has one group is evicted together."""

class MooncakeDistributedStore:
    def setup(
        self,
        host: str,
        metadata: str,
        segment: int,
        buffer: int,
        protocol: str,
        devices: str,
        master: str,
        engine: Engine | None,
    ) -> int:
        """Connect. Holds the interpreter's lock until it is done."""

    def register_buffer(self, pointer: int, size: int) -> int: ...
    def unregister_buffer(self, pointer: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return 1, 0 or a code for each; those that exist are leased."""

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Replica]]:
        """Return the replicas of each that exists; they are leased, and each that does not is logged."""

    def batch_put_from(
        self, keys: list[str], pointers: list[int], sizes: list[int], config: ReplicateConfig
    ) -> list[int]:
        """Store; 0 for a key that exists or is reserved, too."""

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], config: ReplicateConfig
    ) -> list[int]: ...
    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        """Read; bytes read or a code for each."""

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        """Remove; with ``force`` what is leased, too."""

    def create_copy_task(self, key: str, targets: list[str]) -> tuple[tuple[int, int], int]:
        """Have a node copy an object to others within a second or so; done, and of no effect, where it lies there."""
