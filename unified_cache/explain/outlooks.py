"""Outlooks of a prompt's pages under adaptive eviction, as JSON and as text."""

from collections.abc import Iterator

from unified_cache.tree import ForecastRun, LaneOutlook

__all__ = ["outlook_as_json", "outlook_lines"]


def outlook_as_json(outlook: LaneOutlook, component: str) -> dict[str, object]:
    """Return the outlook of a lane under stable names."""
    victim = outlook.next_victim
    return {
        "tier": outlook.tier.name.lower(),
        "component": component,
        "guide": outlook.guide.value,
        "pages": [_run_as_json(run) for run in outlook.runs],
        "next": None
        if victim is None
        else {**_run_as_json(victim.pages), "is_of_prompt": victim.is_of_prompt, "reason": victim.reason.value},
    }


def outlook_lines(outlook: LaneOutlook, component: str) -> Iterator[str]:
    """Say the outlook of a lane: what it goes by, each run of pages, and what goes next."""
    yield f"{outlook.tier.name.lower()} {component} goes {outlook.guide.text}"
    for run in outlook.runs:
        yield f"  [{run.start}, {run.end})  {_run_text(run)}"
    victim = outlook.next_victim
    if victim is not None:
        whose = "this prompt" if victim.is_of_prompt else "another prompt"
        pages = victim.pages
        yield f"  next to go: [{pages.start}, {pages.end}) of {whose}, since {victim.reason.text}: {_run_text(pages)}"


def _run_as_json(run: ForecastRun) -> dict[str, object]:
    return {"start": run.start, "end": run.end, "cell": run.cell, "age_requests": run.age, "index": run.index}


def _run_text(run: ForecastRun) -> str:
    age = "in the latest request" if not run.age else f"{run.age:,} request{'s' if run.age > 1 else ''} ago"
    worth = "" if run.index is None else f", worth {run.index:.2e} hits a page and request"
    return f"{run.cell}, {age}{worth}"
