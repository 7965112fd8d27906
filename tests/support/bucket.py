"""A bucket on loopback for tests and benchmarks: the S3 server of SeaweedFS, whose wheel is its own program."""

import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.support.mooncake import ClusterProcess
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

LOOPBACK = "127.0.0.1"
BUCKET = "tests"
START_S = 60.0
"""It takes 4 s on an idle machine, most of them to elect itself."""

KEY, SECRET = "test-key", "test-secret"
IDENTITIES = f"""
{{"identities": [{{
    "name": "tests",
    "credentials": [{{"accessKey": "{KEY}", "secretKey": "{SECRET}"}}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"]
}}]}}
"""


class LocalBucket:
    """One process with a bucket that lies in a directory; it can be killed, and started again over what it kept."""

    def __init__(self, directory: Path) -> None:
        """Start it, and wait until it takes an object."""
        self.directory = directory
        self.ports = free_ports(8)
        self._prefixes = itertools.count()
        (directory / "s3.json").write_text(IDENTITIES, encoding="utf-8")
        self.start()

    @classmethod
    @contextmanager
    def running(cls) -> Iterator["LocalBucket"]:
        """Start one, and kill it at the end, whatever happened."""
        with tempfile.TemporaryDirectory(prefix="unified-cache-bucket-") as directory:
            bucket = cls(Path(directory))
            try:
                yield bucket
            finally:
                bucket.process.kill()

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://{LOOPBACK}:{self.ports[0]}"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which obstore finds the server and may use it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def new_url(self) -> str:
        """Return the URL of a store that nobody has used."""
        return f"s3://{BUCKET}/store-{next(self._prefixes)}"

    def client(self, prefix: str = "") -> S3Store:
        """Return a client of the bucket without retries, for what lies there."""
        return S3Store(
            BUCKET,
            prefix=prefix or None,
            access_key_id=KEY,
            secret_access_key=SECRET,
            endpoint=self.endpoint,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "10s"},
            retry_config={"max_retries": 0},
        )

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        self.process.kill()

    def start(self) -> None:
        """Start it at its ports, over what its directory has."""
        s3, master, volume, filer, *grpc = self.ports
        self.process = ClusterProcess(
            [
                "env",
                "GOMAXPROCS=2",
                str(Path(sys.executable).with_name("weed")),
                "-logtostderr",
                "server",
                f"-dir={self.directory}",
                f"-ip={LOOPBACK}",
                f"-ip.bind={LOOPBACK}",
                f"-master.port={master}",
                f"-master.port.grpc={grpc[0]}",
                "-master.electionTimeout=1s",
                "-master.telemetry=false",
                "-master.volumeSizeLimitMB=64",
                f"-volume.port={volume}",
                f"-volume.port.grpc={grpc[1]}",
                "-volume.max=256",
                f"-filer.port={filer}",
                f"-filer.port.grpc={grpc[2]}",
                f"-filer.localSocket={self.directory}/filer.sock",
                "-s3",
                f"-s3.port={s3}",
                f"-s3.port.grpc={grpc[3]}",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                f"-s3.config={self.directory}/s3.json",
                f"-s3.localSocket={self.directory}/s3.sock",
                "-s3.iam=false",
            ],
            self.directory / "server.log",
        )
        if not wait_until(self._takes_an_object, START_S):
            self.process.kill()
            raise AssertionError((self.directory / "server.log").read_text(encoding="utf-8", errors="replace")[-4_000:])

    def _takes_an_object(self) -> bool:
        assert self.process.is_alive, (self.directory / "server.log").read_text(encoding="utf-8", errors="replace")
        try:
            obstore.put(self.client(), "started", b"x")  # an empty one needs no volume
        except BaseError:
            return False
        return True
