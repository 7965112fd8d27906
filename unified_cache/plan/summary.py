"""A plan in sentences and rows, for a terminal and for the page of a report."""

from unified_cache.byte_sizes import bytes_text
from unified_cache.plan.result import PlanResult
from unified_cache.report.tables import TableSection

__all__ = ["plan_notes", "setting_pairs", "step_notes", "step_table"]


def plan_notes(result: PlanResult) -> list[str]:
    """Say what the best combination moves and saves, and how far off replays were."""
    best = result.best
    costs = best.costs
    lines = [
        f"{result.requests:,} requests, {result.input_tokens:,} tokens, {len(result.points):,} combinations in "
        f"{result.seconds:.1f} s; {result.seen_ratio:.2%} of the tokens had been asked for before",
        f"at the best: TTFT {costs.ttft_p50_s:.2f} s (p50), {costs.ttft_p90_s:.2f} s (p90), {costs.ttft_p99_s:.2f} s "
        f"(p99); {costs.prefill_hours_saved:.2f} hours of prefill saved, "
        f"{costs.prefill_share:.0%} of the time computing",
        f"moved: {bytes_text(costs.loaded_bytes)} to the devices, {bytes_text(costs.fetched_bytes)} out of storage, "
        f"{bytes_text(costs.written_bytes)} into it",
        f"no policy could hand back more than {best.bound_ratio:.2%} with as many bytes",
    ]
    if best.sizes.storage:
        life = costs.drive_life_years
        worn = "never worn" if life is None else f"worn after {life:,.1f} years"
        lines.append(
            f"drives are written {bytes_text(int(costs.written_per_day))} a day at the rate of the trace: {worn}"
        )
    if result.told_by is not None:
        names = " and ".join(sorted({result.model.policies.device.value, result.model.policies.host.value}))
        widest = max(point.open_ratio for point in result.points)
        lines.append(
            f"{names} is told from {result.told_by.count} replays of device and host memory: between two of them the "
            f"smaller is shown, up to {widest * 100:.2f} points more are open, and half a point either way, since more "
            f"memory does not always hand back more (in these replays up to {result.told_by.disorder * 100:.2f} less)"
        )
    if len(result.model.sized.layout.components) > 1:
        lines.append("windows are followed for a cache that never evicts; --check N says how far off that is")
    if result.checked:
        worst = max(each.error for each in result.checked)
        lines.append(
            f"{len(result.checked)} combinations replayed: the plan is off by {worst * 100:.2f} points at most"
            + (", beyond what it left open" if result.told_by is not None else "")
        )
    lines += result.model.sized.left_out
    if not result.is_complete:
        lines.append("interrupted: not all combinations were evaluated")
    return lines


def step_notes(result: PlanResult) -> list[str]:
    """Say what 64 GiB more of each tier would bring."""
    return [
        f"64 GiB more of {step.tier}: {step.hit_ratio_gain * 100:+.2f} points, "
        f"{step.cost_change:+.4f} per million tokens"
        for step in result.steps
    ]


def step_table(result: PlanResult) -> TableSection:
    """Return a row for each tier that can have 64 GiB more."""
    rows = [
        (
            step.tier,
            f"{step.hit_ratio_gain * 100:+.2f} points",
            f"{step.prefill_hours_saved:+.3f}",
            f"{step.cost_change:+.4f}",
        )
        for step in result.steps
    ]
    columns = ("tier", "tokens handed back", "hours of prefill saved", "cost per million tokens")
    return TableSection("64 GiB more", columns, rows)


def setting_pairs(result: PlanResult) -> list[tuple[str, str]]:
    """Return what was planned for: names and values."""
    model, hardware = result.model, result.hardware
    kept = f"{model.retention.tail_tokens} tokens before the end" + (", branches" if model.retention.branches else "")
    page = f"{model.sized.layout.page_size} tokens, {bytes_text(model.sized.layout.page_bytes)}"
    speeds = ", ".join(f"{speed:,.0f} from {tokens:,} on" for tokens, speed in hardware.prefill_tokens_per_s)
    return [
        ("trace", result.trace),
        ("model", model.name),
        ("devices", f"{model.devices}, each with all of a page" if model.is_replicated else f"{model.devices}"),
        ("engines", f"{model.engines}" + (", in turn, over one store" if model.engines > 1 else "")),
        ("page", page),
        ("resumable at", kept),
        *model.policies.rows(),
        ("hardware", hardware.name),
        ("prefill", f"{speeds} tokens/s of one device"),
        ("bus", f"{bytes_text(int(hardware.device_bytes_per_s))}/s to one device"),
        ("storage", f"{bytes_text(int(hardware.storage_read_bytes_per_s))}/s read"),
    ]
