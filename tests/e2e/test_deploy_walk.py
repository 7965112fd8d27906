"""``docs/deploy.md`` walked from an empty machine to a service that other machines may call, each command as it stands.

The machine is a root directory with a network of its own. From this one it has /usr and, in the place of what the
package index would bring, the Python of these tests. systemd enables units there; starting them is the test's.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.documents import SHELLS, CodeBlock, code_blocks

TIMEOUT_S = 120
DOCUMENT = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
PACKAGES = "asks the package index"
INSTALLED = "/opt/unified-cache/bin"
TLS = "/etc/unified-cache/tls"
SEPARATE = ("unshare", "--mount", "--net")
VENV = Path(sys.prefix).resolve()
PROGRAM = f"""#!/bin/sh
export PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1
exec {VENV}/bin/python -c 'from unified_cache.cli.main import main; main()' "$@"
"""
WITHOUT_STARTS = """systemctl() { command systemctl $(printf '%s\\n' "$@" | grep -v -e --now); }"""


def is_separable() -> bool:
    """Return whether this account may give a process mounts and a network of its own."""
    if not all(map(shutil.which, ("unshare", "chroot", "systemd-sysusers", "systemctl", "openssl", "ip"))):
        return False
    return subprocess.run([*SEPARATE, "true"], check=False, capture_output=True, timeout=60).returncode == 0


def new_machine(root: Path) -> str:
    """Make the directories and files of a machine; return the commands that mount the rest."""
    mounts = ["ip link set lo up"]
    for place in dict.fromkeys(("/usr", "/etc/ssl", "/dev", "/proc", str(ROOT), str(VENV), sys.base_prefix)):
        (root / place[1:]).mkdir(parents=True, exist_ok=True)
        mounts.append(f"mount --rbind {place} {root}{place}")
    for link in ("bin", "sbin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    for place in (INSTALLED, TLS, "/etc/sysusers.d", "/etc/systemd/system", "/var/cache", "/var/log", "/tmp", "/root"):
        (root / place[1:]).mkdir(parents=True, exist_ok=True)
    for name, text in {
        "etc/hosts": "127.0.0.1 localhost kv.example\n",
        "etc/passwd": "root:x:0:0::/root:/bin/sh\n",
        "etc/group": "root:x:0:\n",
        INSTALLED[1:] + "/unified-cache": PROGRAM,
    }.items():
        (root / name).write_text(text, encoding="utf-8")
    (root / INSTALLED[1:] / "unified-cache").chmod(0o755)
    return "\n".join(mounts)


def block_with(text: str) -> CodeBlock:
    """Return the one shell block of the document that has a text, and is not about the package index."""
    (block,) = (
        each
        for each in code_blocks(DOCUMENT)
        if each.language in SHELLS and text in each.text and each.skipped_because != PACKAGES
    )
    return block


def awaited(ping: str) -> str:
    """Return commands that wait for the answer of a service that was just started."""
    return f"for _ in $(seq 100); do {ping} 2> ping.err && break; sleep .1; done\n{ping}"


@pytest.mark.skipif(not is_separable(), reason="this account may not mount, or systemd is not installed")
def test_an_empty_machine_becomes_a_service_for_others(tmp_path: Path) -> None:
    unit = (ROOT / "deploy" / "systemd" / "unified-cache.service").read_text(encoding="utf-8")
    (started,) = re.findall("^ExecStart=(.*)$", unit, re.MULTILINE)
    first_serve, first_ping = block_with("unified-cache serve --storage packed:").text.splitlines()
    typed = f"""
{WITHOUT_STARTS}
{first_serve} 2> first.log &
{awaited(first_ping)}
kill %1 && wait %1

cd {TLS}
{block_with("openssl").text}
cd /root
{block_with("systemd-sysusers").text}
# As systemd does, which runs on no machine without a kernel of its own:
install -d -m 0700 -o unified-cache -g unified-cache /var/cache/unified-cache /var/log/unified-cache
setpriv --reuid unified-cache --regid unified-cache --clear-groups {started} 2> serve.log &
cd {TLS}
{awaited(block_with("kv.example:50051?").text.strip())}
kill %1 && wait %1
"""
    root = tmp_path / "root"
    mounts = new_machine(root)
    (root / "root" / "typed").write_text(typed, encoding="utf-8")
    enter = f"PATH={INSTALLED}:$PATH SYSTEMD_OFFLINE=1 exec chroot {root} bash -euc 'cd /root; set -m; . ./typed'"
    command = [*SEPARATE, "bash", "-euc", f"{mounts}\n{enter}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall("default|acme", done.stdout) == ["default"] * 2 + ["acme"] * 2, "both answer, twice"
    assert (root / "etc/systemd/system/multi-user.target.wants/unified-cache.service").is_symlink()
    assert [path.name for path in (root / "var/log/unified-cache").iterdir()] == ["audit.log"]
