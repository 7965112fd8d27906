"""What we use of Mooncake's transfer engine, which has no types of its own."""

class Engine:
    """The engine as the store client takes it."""

class TransferEngine:
    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int: ...
    def get_engine(self) -> Engine: ...
    def batch_transfer_sync_read(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        """Read memory of a node, given by its transport endpoint, into ours; 0, or a negative number for all."""
