"""Check that the wheel built from the sdist is the wheel built from the tree, byte for byte and file by file.

The root holds relative symlinks into the package; an sdist that followed or dropped them would lose directories,
and only people who build from the sdist would find out. The sdist must have every file of the repository, so that tests
pass and documents lead somewhere where it is unpacked. Builds without isolation, and so without the network.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "unified_cache"
MARKER = f"{PACKAGE}/py.typed"


def build(kind: str, tree: Path, destination: Path) -> Path:
    """Build the ``kind`` ("sdist" or "wheel") of ``tree`` into ``destination``; return the archive.

    Raises:
        SystemExit: the build failed; what it printed is the message.

    """
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(destination), str(tree)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603  # pinned builder
    if result.returncode:
        sys.exit(f"building the {kind} of {tree} failed\n{result.stdout}{result.stderr}")
    (archive,) = destination.iterdir()
    return archive


def members(wheel: Path) -> dict[str, bytes]:
    """Read a wheel: the bytes of every file in it, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def differences(tree: dict[str, bytes], sdist: dict[str, bytes]) -> list[str]:
    """Name every file in which the wheel from the tree and the wheel from the sdist differ."""
    flaws: list[str] = []
    for name in sorted(tree.keys() | sdist.keys()):
        if name not in sdist:
            flaws.append(f"{name} is lost on the way through the sdist")
        elif name not in tree:
            flaws.append(f"{name} comes from the sdist alone")
        elif tree[name] != sdist[name]:
            flaws.append(f"{name} has other bytes when built from the sdist")
    return flaws


def missing(wheel: dict[str, bytes]) -> list[str]:
    """Name every module of the tree that the wheel lacks, and every top-level name it must not have."""
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).rglob("*.py")} | {MARKER}
    flaws = [f"{name} is in the tree and not in the wheel" for name in sorted(modules - wheel.keys())]
    tops = {name.split("/")[0] for name in wheel}
    strays = sorted(top for top in tops if top != PACKAGE and not top.endswith(".dist-info"))
    return flaws + [f"{top} would be installed beside {PACKAGE}" for top in strays]


def lost_files(unpacked: Path) -> list[str]:
    """Name every file of the repository, links aside, that an unpacked sdist lacks."""
    command = ["git", "ls-files", "-z"]
    try:
        listing = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return []  # there is no repository here to compare with
    files = [name for name in listing.split("\0") if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]
    return [f"{name} is in the repository and not in the sdist" for name in files if not (unpacked / name).is_file()]


def main() -> None:
    """Build three archives and compare.

    Raises:
        SystemExit: a build failed, or the wheels differ; the message names every file.

    """
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        sdist = build("sdist", ROOT, scratch / "sdist")
        shutil.unpack_archive(sdist, scratch / "unpacked")
        (unpacked,) = (scratch / "unpacked").iterdir()
        from_tree = members(build("wheel", ROOT, scratch / "from_tree"))
        from_sdist = members(build("wheel", unpacked, scratch / "from_sdist"))
        lost = lost_files(unpacked)
    flaws = differences(from_tree, from_sdist) + missing(from_tree) + lost
    if flaws:
        sys.exit("\n".join(flaws))
    sys.stdout.write(f"wheel from sdist = wheel from tree, {len(from_tree)} files\n")


if __name__ == "__main__":
    main()
