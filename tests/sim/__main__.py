"""``python -m tests.sim [--seed S] [--ops N] [--seeds K]``: simulate N operations in K seeds from S on.

Prints every broken promise with the command that shows it again, then one line of figures. Exit status 1 if there was
one. Operations are shared out evenly; ``--seeds 1`` runs one seed for N operations.
"""

import argparse
import sys

from tests.sim.report import run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--ops", type=int, default=100_000, help="operations of all seeds together")
    parser.add_argument("--seeds", type=int, default=24, help="how many seeds")
    given = parser.parse_args()
    if given.seed < 0 or given.ops < 1 or not 1 <= given.seeds <= given.ops:
        parser.error("expected a seed, operations and seeds that are not negative, and an operation for each seed")
    report = run_seeds(range(given.seed, given.seed + given.seeds), -(-given.ops // given.seeds))
    lines = [str(violation) for violation in report.violations]
    if given.seeds == 1:
        lines.append(f"trace {report.hashes[given.seed]}")
    sys.stdout.write("\n".join([*lines, report.last_line(), ""]))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
