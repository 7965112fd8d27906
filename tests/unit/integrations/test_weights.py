"""Names of a checkpoint on this machine, which both engines' pages are stored under."""

from pathlib import Path

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.integrations.weights import weights_digest, weights_of


def checkpoint(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return directory


@pytest.mark.parametrize("name", ["served", "{path}"])
@pytest.mark.parametrize("said", ["", "my own"])
def test_the_user_s_word_stands_before_the_bytes_and_an_architecture_before_a_path(
    name: str, said: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "model")
    name = name.format(path=path)
    model, revision = weights_of(name, str(path), said, "elsewhere")
    assert model == (name if said or name == "served" else "LlamaForCausalLM")
    assert revision == (said or f"weights {weights_digest(path)}")


def test_weights_that_are_not_on_this_machine_are_named_as_elsewhere() -> None:
    for path in ("org/model", ""):
        assert weights_of("org/model", path, "", "commit 1") == ("org/model", "commit 1")
        assert weights_of("org/model", path, "my own", "commit 1") == ("org/model", "my own")


def test_the_same_weights_are_the_same_model_at_every_path_and_no_others_are(tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path / "old"), checkpoint(tmp_path / "new"), checkpoint(tmp_path / "others", b"Weights")]
    old, new, others = (weights_of(str(path), str(path), "", "") for path in paths)
    assert old == new
    assert others != new


def test_files_of_weights_in_one_directory_are_models_of_their_own(tmp_path: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        (tmp_path / name).write_bytes(b"weights")
    first, second = (weights_of("served", str(tmp_path / name), "", "") for name in ("q4.gguf", "q8.gguf"))
    assert first != second


def test_a_digest_of_weights_knows_every_byte_and_every_name_and_no_other_file(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(name.encode() * 500_000)
    digests = [weights_digest(tmp_path)]
    (tmp_path / "README.md").write_text("not a weight")
    assert weights_digest(tmp_path) == digests[0]
    with (tmp_path / "b.safetensors").open("r+b") as file:
        file.seek(6_000_000)
        file.write(b"!")
    digests.append(weights_digest(tmp_path))
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors")
    digests.append(weights_digest(tmp_path))
    assert len(set(digests)) == 3


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must hold weights"):
        weights_of("served", str(tmp_path), "", "")
