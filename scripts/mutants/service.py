"""Mistakes of the service: its tenants, and the bounds on what they store."""

from scripts.mutants.mutant import Mutant

TENANCY = ("tests/unit/service/test_tenancy.py",)

SERVICE_MUTANTS = [
    Mutant(
        "a tenant at its quota keeps its oldest pages and the newest are refused",
        "service/access/usage.py",
        "            _, gone = held.store(",
        "            limit = held.bytes_max or 1 << 60\n"
        "            pages = [page for page in pages if held.bytes_used + page_bytes(page) <= limit]\n"
        "            _, gone = held.store(",
        TENANCY,
    ),
    Mutant(
        "pages beyond a quota are counted no more but stay in the store",
        "service/store/tenants.py",
        "self._remove_outgrown(gone + self.usage.surplus(chain))",
        "self._remove_outgrown(self.usage.surplus(chain))",
        TENANCY,
    ),
    Mutant(
        "a service that starts again does not count what its store holds",
        "service/store/tenants.py",
        "self._remove_outgrown(self.usage.find(tenant, [each for _, each in reversed(some)]))",
        "self._remove_outgrown([])",
        TENANCY,
    ),
    Mutant(
        "a service that starts again takes the newest pages for the oldest",
        "service/store/tenants.py",
        "used = listed.used or",
        "used = [-each for each in listed.used] or",
        TENANCY,
    ),
]
