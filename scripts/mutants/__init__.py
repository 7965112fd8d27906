"""Known mistakes of systems of this kind, by room; ``python -m scripts.mutants`` plants them.

mutant       a mistake, and how it is planted
tree         the tree, its windows, the slots, and the ledger over them
transfers    operations, jobs, loads and prefetches
device       order between a device's streams, its pinned memory and the host
storage      what names, seals, verifies and lists stored pages
engines      engines' own memory and trees
service      tenants of the service, and their bounds
events       KV events, and the index of what engines have reported
facts        names, sizes, keys, permissions, prices, agreement: values that all else rests on
"""

from scripts.mutants.device import DEVICE_MUTANTS
from scripts.mutants.engines import ENGINES_MUTANTS
from scripts.mutants.events import EVENTS_MUTANTS
from scripts.mutants.facts import FACTS_MUTANTS
from scripts.mutants.mutant import TESTS, Mutant, planted
from scripts.mutants.service import SERVICE_MUTANTS
from scripts.mutants.storage import STORAGE_MUTANTS
from scripts.mutants.transfers import TRANSFERS_MUTANTS
from scripts.mutants.tree import TREE_MUTANTS

__all__ = ["MUTANTS", "TESTS", "Mutant", "planted"]

MUTANTS = [
    *TREE_MUTANTS,
    *TRANSFERS_MUTANTS,
    *DEVICE_MUTANTS,
    *STORAGE_MUTANTS,
    *ENGINES_MUTANTS,
    *SERVICE_MUTANTS,
    *EVENTS_MUTANTS,
    *FACTS_MUTANTS,
]
