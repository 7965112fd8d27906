"""Hardware that a plan is for: speeds of its links, of prefill, and what things cost; from a TOML file or by name.

base = "h100"                     # what is not named below is as there
device_price_per_hour = 1.9
storage_read_bytes_per_s = "13GB"
[prefill_tokens_per_s]            # measured, one device, by length of the prompt
1024 = 21000
32768 = 17500
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from unified_cache.core.errors import ConfigError, did_you_mean
from unified_cache.core.files import parse_toml, read_up_to
from unified_cache.core.settings.loading import read_table
from unified_cache.core.settings.section import Bytes, Section
from unified_cache.sizing.plan.trace_pages import Counts, Floats

ACTIVE_PARAMETERS = 13e9
"""Parameters that a token passes through, by default: those of a mixture of experts of medium size."""

MODEL_FLOPS_SHARE = 0.4
"""Part of a device's peak that prefill reaches: what well-tuned dense BF16 inference reports, 0.3 to 0.5."""

MONTH_HOURS = 730.0
"""365.25 days of 24 hours, a twelfth."""

GIB = float(1 << 30)
HARDWARE_BYTES_MAX = 1 << 20

Positive = Annotated[float, Field(gt=0.0, strict=True, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, strict=True, allow_inf_nan=False)]


class Hardware(Section):
    """One device with its share of links, and prices. Bandwidths are those reached, not those of a data sheet."""

    name: str
    prefill_tokens_per_s: Annotated[dict[Annotated[int, Field(gt=0, lt=1 << 31)], Positive], Field(min_length=1)]
    """Tokens that one device prefills in a second, by length of the prompt; between two lengths in between."""
    device_bytes_per_s: Bytes
    """From host memory to one device."""
    storage_read_bytes_per_s: Bytes
    """From storage to host memory."""
    device_price_per_hour: NotNegative
    """One device with its share of the machine, without what is planned here."""
    host_price_per_gib_month: NotNegative
    storage_price_per_gib_month: NotNegative
    storage_put_price_per_million: NotNegative = 0.0
    storage_get_price_per_million: NotNegative = 0.0
    """Requests of a bucket: one for each pool of a page."""
    drive_writes_per_day: NotNegative
    """Times a day that the whole drive may be written, for as long as ``drive_years``; 0 for a bucket, which does not
    wear out."""
    drive_years: Positive

    def prefill_s(self, tokens: Counts) -> Floats:
        """Return the seconds in which one device computes prompts of these lengths."""
        lengths, speeds = zip(*sorted(self.prefill_tokens_per_s.items()), strict=True)
        seconds: Floats = tokens / np.interp(tokens, lengths, speeds)
        return seconds


def _accelerator(name: str, peak_flops: float, price_per_hour: float) -> Hardware:
    """Return a data-centre device behind PCIe 5.0, with two drives of its own.

    PCIe 5.0 x16 has 64 GB/s a direction, of which copies of pinned memory reach some 50. A drive for data centres at
    PCIe 4.0 reads at about 6.5 GB/s, and is rated for one write of itself a day over five years. Memory
    at 4 and drives at 0.12 US dollars a GiB, over 36 months.
    """
    speed = MODEL_FLOPS_SHARE * peak_flops / (2 * ACTIVE_PARAMETERS)
    return Hardware(
        name=name,
        prefill_tokens_per_s={1: speed},
        device_bytes_per_s=50_000_000_000,
        storage_read_bytes_per_s=13_000_000_000,
        device_price_per_hour=price_per_hour,
        host_price_per_gib_month=4 / 36,
        storage_price_per_gib_month=0.12 / 36,
        drive_writes_per_day=1.0,
        drive_years=5.0,
    )


HARDWARE: Mapping[str, Hardware] = {
    "h100": _accelerator("h100", 989e12, 2.5),
    "h200": _accelerator("h200", 989e12, 3.5),
    "b200": _accelerator("b200", 2250e12, 5.0),
    "laptop": Hardware(
        name="laptop",
        prefill_tokens_per_s={1: 0.4 * 1e12 / (2 * ACTIVE_PARAMETERS)},
        device_bytes_per_s=10_000_000_000,
        storage_read_bytes_per_s=3_000_000_000,
        device_price_per_hour=0.05,
        host_price_per_gib_month=4 / 36,
        storage_price_per_gib_month=0.12 / 36,
        drive_writes_per_day=0.3,
        drive_years=5.0,
    ),
}
"""Peaks are dense BF16 of NVIDIA's data sheets: 989 TFLOPS for H100 and H200 SXM, 2,250 for one device of HGX B200; a
laptop's eight cores with AVX-512 have about 1. Prices of devices are the order of magnitude of public offers of 2025,
not quotes: put your own into a file."""


def hardware_named(name: str, active_parameters: float | None = None) -> Hardware:
    """Return hardware by name; with ``active_parameters``, its prefill for a model that has so many of them."""
    if name not in HARDWARE:
        raise ConfigError(
            f"hardware must be a TOML file or one of {', '.join(HARDWARE)}, "
            f"found {name!r}{did_you_mean(name, HARDWARE)}"
        )
    found = HARDWARE[name]
    if active_parameters is None:
        return found
    if not active_parameters > 0:
        raise ConfigError(f"active parameters must be positive, found {active_parameters}")
    factor = ACTIVE_PARAMETERS / active_parameters
    speeds = {tokens: speed * factor for tokens, speed in found.prefill_tokens_per_s.items()}
    return found.model_copy(update={"prefill_tokens_per_s": speeds})


def read_hardware(path: Path, active_parameters: float | None = None) -> Hardware:
    """Read a hardware file; a measured prefill in it is taken as it is.

    Raises:
        ConfigError: it is no TOML, names what there is not, or a value is no number.
        OSError: it cannot be read.
    """
    try:
        found = parse_toml(read_up_to(path, HARDWARE_BYTES_MAX).decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} must be TOML, found: {error}") from error
    base = hardware_named(str(found.pop("base", "h100")), active_parameters)
    return read_table(Hardware, {**base.model_dump(), "name": path.stem, **found}, str(path))
