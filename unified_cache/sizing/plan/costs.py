"""Value of hits on given hardware: time to the first token, prefill saved, money, wear of the drives.

    arrival ──► storage link ──► bus to the devices ──► prefill of what is left ──► first token
                 what memory lacks   what devices lack

Each is a queue that serves one prompt after the other in the order in which they come to it. A prompt takes from a
tier only what comes from there sooner than it would be computed, with nobody before it.
"""

from dataclasses import dataclass

import numpy as np

from unified_cache.sizing.plan.hardware import GIB, MONTH_HOURS, Hardware
from unified_cache.sizing.plan.sweep import PlannedModel, TierBytes
from unified_cache.sizing.plan.tier_hits import TierEnds
from unified_cache.sizing.plan.trace_pages import Counts, Floats, TracePages

HOUR_S = 3_600.0
DAY_S = 24 * HOUR_S

PAID_YEARS = 3.0
"""Years over which a price a month pays for a drive: 36 months, as the prices of ``hardware`` say."""

TOKENS_UNIT = REQUESTS_UNIT = 1e6


@dataclass(frozen=True, slots=True)
class Costs:
    """Value and price of one combination of sizes. Times in seconds, money in the currency of the hardware file."""

    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    prefill_hours_saved: float
    """Hours of a whole engine over the trace, of all engines together."""
    prefill_share: float
    """Part of the trace's time in which an engine computes prompts, of several the mean; above 1 it cannot keep up."""
    bus_share: float
    """The same of the bus to the devices."""
    storage_share: float
    """The same of reads from storage."""
    price_per_hour: float
    requests_price_per_hour: float
    """Of storage, as part of the price above."""
    cost_per_million_tokens: float
    """Of prompts, over the hours that the engine computes them; answers are not counted."""
    loaded_bytes: int
    """From host memory to the devices."""
    fetched_bytes: int
    """From storage to host memory."""
    written_bytes: int
    """Into storage."""
    written_per_day: float
    """Bytes a day, at the rate of the trace."""
    drive_life_years: float | None
    """Until the drives have been written as often as they are rated for; None without storage, or if never."""


@dataclass(frozen=True, slots=True)
class PricedSystem:
    """Engines of several devices of one kind."""

    model: PlannedModel
    """Its engines take the requests in turn, and each has queues of its own."""
    hardware: Hardware

    def price_per_hour(self, sizes: TierBytes, drive_life_years: float | None = None) -> float:
        """Return what an hour of all engines costs with host memory of these sizes each, and storage.

        Drives that are worn before they are paid for cost as much more as they last less.
        """
        hardware = self.hardware
        memory = sizes.host / GIB * hardware.host_price_per_gib_month
        worn = 1.0 if drive_life_years is None else max(1.0, PAID_YEARS / drive_life_years)
        storage = sizes.storage / GIB * hardware.storage_price_per_gib_month * worn
        engine = self.model.devices * hardware.device_price_per_hour + memory / MONTH_HOURS
        return self.model.engines * engine + storage / MONTH_HOURS

    def costs(self, trace: TracePages, ends: TierEnds, sizes: TierBytes) -> Costs:
        """Follow every request of a trace through the queues."""
        hardware = self.hardware
        whole_s = self._prefill_s(trace.input_tokens)
        storage_s, bus_s, prefill_s = self._work(trace, ends, whole_s)
        ready_s = trace.times_s.copy()
        for number in range(self.model.engines):
            mine = slice(number, None, self.model.engines)
            for work_s in (storage_s, bus_s, prefill_s):
                ready_s[mine] = queue_ends(ready_s[mine], work_s[mine])
        ttft_s = ready_s - trace.times_s
        span_s = max(float(trace.times_s[-1] - trace.times_s[0]), 1.0)
        engines_s = span_s * self.model.engines
        computed_hours = float(prefill_s.sum()) / HOUR_S
        written = int(ends.moved.written * self.model.storage_ratio)
        written_per_day = written / span_s * DAY_S
        life = None
        if sizes.storage and written_per_day and hardware.drive_writes_per_day:
            life = hardware.drive_writes_per_day * sizes.storage / written_per_day * hardware.drive_years
        gets = int(ends.moved.fetched_objects[storage_s > 0].sum()) * hardware.storage_get_price_per_million
        puts = ends.moved.written_objects * hardware.storage_put_price_per_million
        requests_price = (gets + puts) / REQUESTS_UNIT / (span_s / HOUR_S)
        price = self.price_per_hour(sizes, life) + requests_price
        p50, p90, p99 = (float(each) for each in np.percentile(ttft_s, [50, 90, 99]))
        return Costs(
            ttft_p50_s=p50,
            ttft_p90_s=p90,
            ttft_p99_s=p99,
            prefill_hours_saved=float((whole_s - prefill_s).sum()) / HOUR_S,
            prefill_share=float(prefill_s.sum()) / engines_s,
            bus_share=float(bus_s.sum()) / engines_s,
            storage_share=float(storage_s.sum()) / engines_s,
            price_per_hour=price,
            requests_price_per_hour=requests_price,
            cost_per_million_tokens=price
            * computed_hours
            / self.model.engines
            / (float(trace.input_tokens.sum()) / TOKENS_UNIT),
            loaded_bytes=int(np.rint(bus_s.sum() * self._bus_bytes_per_s)),
            fetched_bytes=int(np.rint(storage_s.sum() * hardware.storage_read_bytes_per_s)),
            written_bytes=written,
            written_per_day=written_per_day,
            drive_life_years=life,
        )

    @property
    def _bus_bytes_per_s(self) -> float:
        """Bytes of prefixes that all devices together take from host memory in a second."""
        return self.hardware.device_bytes_per_s * (1 if self.model.is_replicated else self.model.devices)

    def _prefill_s(self, tokens: Counts) -> Floats:
        seconds: Floats = self.hardware.prefill_s(tokens) / self.model.devices
        return seconds

    def _work(self, trace: TracePages, ends: TierEnds, whole_s: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the seconds that each prompt takes of storage, bus and prefill, on its shortest way."""
        moved = ends.moved
        nothing = np.zeros(trace.requests_count)
        host_s = moved.loaded_from_host / self._bus_bytes_per_s
        read_s = moved.fetched * min(1.0, self.model.storage_ratio) / self.hardware.storage_read_bytes_per_s
        all_s = moved.loaded / self._bus_bytes_per_s
        ways = [
            (nothing, nothing, ends.device),
            (nothing, host_s, ends.host),
            (read_s, all_s, ends.storage),
        ]
        left_s = [
            whole_s - self._prefill_s(np.minimum(end * trace.page_size, trace.input_tokens)) for _, _, end in ways
        ]
        totals = [storage + bus + left for (storage, bus, _), left in zip(ways, left_s, strict=True)]
        way = np.argmin(np.stack(totals), axis=0)
        storage_s, bus_s = (np.choose(way, [each[part] for each in ways]) for part in (0, 1))
        return storage_s, bus_s, np.choose(way, left_s)


def queue_ends(ready_s: Floats, work_s: Floats) -> Floats:
    """Return when each prompt has been served by a queue that serves one at a time; who has no work passes by."""
    done_s = ready_s.copy()
    users = np.flatnonzero(work_s > 0)
    users = users[np.argsort(ready_s[users], kind="stable")]
    work_done_s = np.cumsum(work_s[users])
    done_s[users] = work_done_s + np.maximum.accumulate(ready_s[users] - (work_done_s - work_s[users]))
    return done_s
