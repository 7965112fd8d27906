"""``python -m tests.sim [--seed S] [--ops N] [--seeds K]``: simulate N operations in K seeds from S on.

Shows how far it is, prints every broken promise as soon as it is found with the command that shows it again, and in the
end one line of figures. Exit status 1 if there was one. Operations are shared out evenly; ``--seeds 1`` runs one seed
for N operations.
"""

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.report import SimReport, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--ops", type=int, default=100_000, help="operations of all seeds together")
    parser.add_argument("--seeds", type=int, default=24, help="how many seeds")
    parser.add_argument("--first-violation", action="store_true", help="end with the first seed that breaks a promise")
    given = parser.parse_args()
    if given.seed < 0 or given.ops < 1 or not 1 <= given.seeds <= given.ops:
        parser.error("expected a seed, operations and seeds that are not negative, and an operation for each seed")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        seeds = range(given.seed, given.seed + given.seeds)
        task = progress.add_task("simulating", total=given.seeds)
        told = 0

        def show(report: SimReport) -> None:
            nonlocal told
            for violation in report.violations[told:]:
                sys.stdout.write(f"{violation}\n")
                sys.stdout.flush()
            told = len(report.violations)
            description = f"{report.operations_count:,} operations, {told} violations"
            progress.update(task, completed=report.seeds, description=description)

        report = run_seeds(seeds, -(-given.ops // given.seeds), show, first_violation=given.first_violation)
    if given.seeds == 1:
        sys.stdout.write(f"trace {report.hashes[given.seed]}\n")
    sys.stdout.write(f"{report.last_line()}\n")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
