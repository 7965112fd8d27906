"""docs/deploy.md: its certificates and the settings of ``deploy`` make a service that its client reaches."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_serve_command import serving
from tests.sources import ROOT
from tests.support.documents import code_blocks, command_lines
from unified_cache.cli.main import run

HEADING = "\n## Certificates\n"
ETC = "/etc/unified-cache"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_certificates_of_the_recipe_let_its_tenant_in_and_nobody_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    _, section = text.split(HEADING)
    recipe = next(block.text for block in code_blocks(section) if block.language == "bash")
    tls = tmp_path / "tls"
    tls.mkdir()
    subprocess.run(["bash", "-euc", recipe], check=True, cwd=tls, capture_output=True, timeout=60)
    settings = (ROOT / "deploy" / "service.toml").read_text(encoding="utf-8").replace(ETC, str(tmp_path))
    (tmp_path / "service.toml").write_text(settings, encoding="utf-8")
    with serving(tmp_path, "--config", str(tmp_path / "service.toml")) as server:
        port = server.address.rpartition(":")[2]
        monkeypatch.chdir(tls)
        (ping,) = (words for block in code_blocks(text) for words in command_lines(block) if "grpcs" in words[-1])
        assert run([*ping[1:-1], ping[-1].replace("kv.example:50051", f"localhost:{port}")]) == 0
        assert "acme" in capsys.readouterr().out
        assert run(["ping", f"grpcs://localhost:{port}?ca_file=ca.crt"]) == 1
        assert (tls / "server.key").stat().st_mode & 0o077 == 0
