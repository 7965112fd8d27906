"""Plans held against full replays of the bundled trace, twenty combinations, and the time of both.

    python -m benchmarks.plan_replays [--replays N] [--json FILE] [--anew]

Every combination is kept as soon as it has been replayed, and one that is kept is not replayed again, so the run can
be taken in parts: ``--replays`` says how many at most. A plan evaluates all 404 combinations of the default sweep; what
replaying them all would take is told from the mean of those that were.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import machine
from benchmarks.report import write_json
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import Retention
from unified_cache.core.hits import Hits
from unified_cache.sizing.plan.sweep import TIERS, PlannedModel, TierBytes, combinations, parse_sweeps
from unified_cache.sizing.plan.tier_hits import LruHits
from unified_cache.sizing.replay.plan import ReplayPolicies
from unified_cache.sizing.replay.runner import replay
from unified_cache.sizing.replay.trace import read_trace
from unified_cache.sizing.replay.trace_pages import TracePages

ROOT = Path(__file__).resolve().parent
TRACE = ROOT.parent / "traces" / "mooncake_conversation.jsonl.gz"
KEPT = ROOT / "results" / "plan_replays.json"

SEED = 17
COMBINATIONS = 20
MODEL, PAGE_SIZE = "deepseek-v4-flash", 256

POINTS_MAX = 0.005
"""Half a point of the tokens: how far a plan may be off."""

TIMES_FASTER_MIN = 20.0
"""Plans are worth their own code from here on."""


@dataclass(frozen=True, slots=True)
class ReplayedCombination:
    """One combination, as planned and as replayed."""

    number: int
    """Place in the sweep."""
    sizes: TierBytes
    planned: float
    replayed: float
    planned_tiers: dict[str, float]
    """Share of all pages by the slowest tier that they needed."""
    replayed_tiers: dict[str, float]
    replay_cpu_s: float
    commit: str

    @property
    def error(self) -> float:
        """Share of the tokens by which the plan is off."""
        return abs(self.planned - self.replayed)

    @property
    def tier_error(self) -> float:
        """Share of the pages by which it is off in one tier at most."""
        return max(abs(self.planned_tiers[tier] - self.replayed_tiers[tier]) for tier in TIERS)

    def as_json(self) -> dict[str, object]:
        """Return the fields."""
        return {**asdict(self), "error": self.error, "tier_error": self.tier_error}


def planned_model() -> PlannedModel:
    """Return the model that the bundled trace is replayed with: windows, states and several pools."""
    return PlannedModel(MODEL, size_preset(MODEL, page_size=PAGE_SIZE), Retention(), ReplayPolicies())


def sampled_combinations() -> list[tuple[int, TierBytes]]:
    """Return the combinations that are replayed, with their places in the default sweep; always the same."""
    sweep = combinations(parse_sweeps(()))
    return [(number, sweep[number]) for number in random.Random(SEED).sample(range(len(sweep)), COMBINATIONS)]


def read_kept(path: Path) -> dict[int, ReplayedCombination]:
    """Return what a file keeps, by place in the sweep; nothing where there is no file."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    rows = (
        ReplayedCombination(
            row["number"],
            TierBytes(**row["sizes"]),
            row["planned"],
            row["replayed"],
            row["planned_tiers"],
            row["replayed_tiers"],
            row["replay_cpu_s"],
            row["commit"],
        )
        for row in kept["combinations"]
    )
    return {row.number: row for row in rows}


def cpu_s(call: Callable[[], object]) -> float:
    """Return the processor's seconds that a call takes in this process: a busy machine adds little to them."""
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


def plan_all(model: PlannedModel) -> float:
    """Plan the whole sweep from the trace's file on, as a user does; return the processor's seconds."""

    def whole() -> None:
        requests = read_trace(TRACE)
        hits = LruHits(TracePages.of(requests, PAGE_SIZE, padded=False))
        for sizes in combinations(parse_sweeps(())):
            hits.ends(model.settings(sizes).plan)

    return cpu_s(whole)


def measure(model: PlannedModel, chosen: Sequence[tuple[int, TierBytes]]) -> list[ReplayedCombination]:
    """Plan and replay combinations one after the other."""
    requests = read_trace(TRACE)
    trace = TracePages.of(requests, PAGE_SIZE, padded=False)
    hits = LruHits(trace)
    commit = machine().commit
    measured = []
    for number, sizes in chosen:
        settings = model.settings(sizes)
        ends = hits.ends(settings.plan)
        began_s = time.process_time()
        result = replay("bundled", requests, settings)
        took_s = time.process_time() - began_s
        row = ReplayedCombination(
            number,
            sizes,
            trace.token_ratio(ends.storage),
            float(result.token_hit_ratio),
            _shares(ends.hits(), result.pages),
            _shares(result.hits, result.pages),
            took_s,
            commit,
        )
        measured.append(row)
        print(f"{number:4} {sizes}: planned {row.planned:.4%}, replayed {row.replayed:.4%} in {took_s:.0f} s", end="")
        print(f"; off by {row.tier_error:.4%} of the pages in one tier at most", flush=True)
    return measured


def _shares(hits: Hits, of: int) -> dict[str, float]:
    return {tier: pages / of for tier, pages in hits.by_tier().items()}


def record(rows: Sequence[ReplayedCombination], plan_cpu_s: float) -> dict[str, object]:
    """Return the JSON of what has been found so far."""
    sweep_count = len(combinations(parse_sweeps(())))
    replays_cpu_s = sum(row.replay_cpu_s for row in rows) / len(rows) * sweep_count
    worst = max(row.error for row in rows)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine()),
        "model": MODEL,
        "page_size": PAGE_SIZE,
        "trace": TRACE.name,
        "combinations_of_the_sweep": sweep_count,
        "plan_cpu_s": plan_cpu_s,
        "replays_cpu_s": replays_cpu_s,
        "times_faster": replays_cpu_s / plan_cpu_s,
        "times_faster_min": TIMES_FASTER_MIN,
        "error_max": worst,
        "error_mean": sum(row.error for row in rows) / len(rows),
        "tier_error_max": max(row.tier_error for row in rows),
        "error_wanted": POINTS_MAX,
        "combinations": [row.as_json() for row in rows],
    }


def main(
    replays: Annotated[int, typer.Option(metavar="N", help="Replay at most N combinations now.")] = COMBINATIONS,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE", help="Figures are kept here.")] = KEPT,
    anew: Annotated[bool, typer.Option("--anew", help="Replay those too that are kept.")] = False,
) -> None:
    """Hold plans of the bundled trace against replays; fails where one is off by more than half a point."""
    model = planned_model()
    kept = {} if anew else read_kept(json_file)
    chosen = sampled_combinations()
    missing = [pair for pair in chosen if pair[0] not in kept][:replays]
    plan_cpu_s = plan_all(model)
    for pair in missing:
        kept[pair[0]] = measure(model, [pair])[0]
        rows = [kept[number] for number, _ in chosen if number in kept]
        write_json(record(rows, plan_cpu_s), json_file)
    rows = [kept[number] for number, _ in chosen if number in kept]
    found = record(rows, plan_cpu_s)
    print(
        f"{len(rows)} of {COMBINATIONS} combinations: off by {max(row.error for row in rows):.3%} of the tokens at "
        f"most; {found['times_faster']:.0f} times as fast as replaying all"
    )
    if any(row.error > POINTS_MAX for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
