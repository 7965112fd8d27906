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
        "self._remove_lost(tenant, Bound.QUOTA, self.usage.take(tenant, list(arriving.values()), chain))",
        "self.usage.take(tenant, list(arriving.values()), chain)",
        TENANCY,
    ),
    Mutant(
        "a service that starts again does not count what its store holds",
        "service/store/tenants.py",
        "gone = self.usage.find(tenant, [each for _, each in reversed(some)])",
        "gone = list[Label]()",
        TENANCY,
    ),
    Mutant(
        "a service that starts again takes the newest pages for the oldest",
        "service/store/tenants.py",
        "used = listed.used or",
        "used = [-each for each in listed.used] or",
        TENANCY,
    ),
    Mutant(
        "bytes of removed pages stay counted",
        "service/store/tenants.py",
        "        self.usage.drop(tenant, named)\n",
        "",
        TENANCY,
    ),
    Mutant(
        "a cleared identity stays counted",
        "service/store/tenants.py",
        "        self.usage.drop_identity(tenant, identity)\n",
        "",
        TENANCY,
    ),
    Mutant(
        "pages that were read and not there are counted as stored",
        "service/store/tenants.py",
        "list(compress(pages, answers))",
        "pages",
        TENANCY,
    ),
    Mutant(
        "declined pages stay counted",
        "service/store/tenants.py",
        "label in new and label not in failed]",
        "label in new and not answers]",
        TENANCY,
    ),
    Mutant(
        "what a put stored before it failed is not counted",
        "service/store/tenants.py",
        "label in new and label not in failed]",
        "label in new]",
        TENANCY,
    ),
    Mutant(
        "pages that a refused put did not store stay counted",
        "service/store/tenants.py",
        "            self._give_back_absent(tenant, fresh)\n",
        "",
        TENANCY,
    ),
    Mutant(
        "tenants with unequal quotas have equal shares",
        "service/access/usage.py",
        "[(held.bytes_used / self._weight(held), tenant)",
        "[(held.bytes_used, tenant)",
        TENANCY,
    ),
    Mutant(
        "pages that were there count again as put",
        "service/store/tenants.py",
        "_by_pool(answers, answers.values())",
        "_by_pool([*answers] * 2, [*answers.values()] * 2)",
        TENANCY,
    ),
    Mutant(
        "answers of a read count as another's",
        "service/store/tenants.py",
        "Counter(zip(map(_POOL, labels), answers, strict=True))",
        "Counter(zip(map(_POOL, labels), [Answer.HIT for _ in answers], strict=True))",
        TENANCY,
    ),
    Mutant(
        "a lookup is not counted",
        "service/store/tenants.py",
        "        self._count(tenant, labels, answers)\n        return answers\n",
        "        return answers\n",
        TENANCY,
    ),
    Mutant(
        "a removed page is counted as often as it is named",
        "service/store/tenants.py",
        "named = list(dict.fromkeys(labels))",
        "named = list(labels)",
        TENANCY,
    ),
]
