"""``make release`` runs the commands that README.md shows, but for some, each for a reason that still holds."""

from scripts.release import LEFT_OUT, left_out, readme_commands
from tests.sources import ROOT


def shown() -> list[list[str]]:
    return list(readme_commands((ROOT / "README.md").read_text(encoding="utf-8")))


def test_most_commands_of_the_readme_are_run() -> None:
    run = [arguments for arguments in shown() if left_out(arguments) is None]
    assert {arguments[0] for arguments in run} >= {"replay", "layout", "storage", "backup"}
    assert len(run) > len(shown()) / 2


def test_every_reason_to_leave_a_command_out_is_about_one() -> None:
    reasons = {left_out(arguments) for arguments in shown()}
    assert reasons - {None} == set(LEFT_OUT)


def test_commands_are_read_from_console_blocks_with_places_of_their_own() -> None:
    text = "unified-cache no\n```console\nunified-cache backup file:a 'file:/mnt/backup/kv' # why\nls\n```\n```bash\n"
    text += 'unified-cache no\n```\n```console\nunified-cache serve --storage "$url" &\n```\n'
    assert list(readme_commands(text)) == [["backup", "file:a", "file:backup/kv"], ["serve", "--storage", "$url"]]
