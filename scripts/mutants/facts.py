"""Mistakes in the values that all else rests on: names, sizes, keys, permissions, prices, agreement."""

from scripts.mutants.mutant import Mutant

UNIT = "tests/unit"
FAMILIES = (f"{UNIT}/components/test_layout_families.py", f"{UNIT}/components/test_layouts.py")
IDENTITY = (f"{UNIT}/core/test_identity.py",)
SGLANG = (f"{UNIT}/integrations/test_sglang_storage.py",)
VLLM_FACTS = (f"{UNIT}/integrations/vllm/test_facts.py",)
RANKS = (f"{UNIT}/core/test_ranks.py",)
GRAPHS = (f"{UNIT}/forward/test_graph.py", f"{UNIT}/forward/test_forward.py")
ACCESS = (f"{UNIT}/service/test_access.py", f"{UNIT}/service/test_tls.py")
TENANCY = (f"{UNIT}/service/test_tenancy.py",)
PRICES = (f"{UNIT}/plan/test_plan_money.py",)
BUCKETS = ("tests/e2e/test_object_faults.py",)
GUARD = (f"{UNIT}/storage_backends/wrappers/test_guard.py",)
ADAPTER = (f"{UNIT}/integrations/test_transformers_adapter.py", "tests/e2e/test_stock_models.py")

FACTS_MUTANTS = [
    Mutant(
        "a file is renamed before it is synced",
        "core/files.py",
        "        file.flush()\n        os.fsync(file.fileno())\n    directory_fd",
        "        file.flush()\n    directory_fd",
        (f"{UNIT}/core/test_files.py",),
    ),
    Mutant(
        "a replaced file is readable by all",
        "core/files.py",
        "        os.fchmod(file.fileno(), stat.S_IMODE(former.st_mode))\n",
        "        os.fchmod(file.fileno(), 0o644)\n",
        (f"{UNIT}/core/test_files.py", f"{UNIT}/service/test_access.py"),
    ),
    Mutant(
        "ranks with other heads have one name",
        "core/shards.py",
        'return f"heads {self.heads}, {self.stage}"\n\n    @property\n    def stage',
        'return f"heads {self.heads.total}, {self.stage}"\n\n    @property\n    def stage',
        IDENTITY,
    ),
    Mutant(
        "ranks that hold other tokens of a page have one name",
        "core/shards.py",
        "        if tokens.size == 1:\n",
        "        if tokens.size:\n",
        IDENTITY,
    ),
    Mutant(
        "replicas with state of their own have one name",
        "core/shards.py",
        "        if self.replica.count == 1:\n",
        "        if self.replica.count:\n",
        IDENTITY,
    ),
    Mutant(
        "names of a namespace run into each other",
        "core/page.py",
        'parts.append(b"\\x01" + len(encoded).to_bytes(8, "little") + encoded)',
        'parts.append(b"\\x01" + encoded)',
        (f"{UNIT}/core/test_page.py",),
    ),
    Mutant(
        "the tail of a prompt keeps a checkpoint less",
        "core/config.py",
        "max(pages_count - tail_pages, 0) + 1",
        "max(pages_count - tail_pages, 0) + 2",
        (f"{UNIT}/core/test_checkpoints.py",),
    ),
    Mutant(
        "the host evicts by the device's policy",
        "core/config.py",
        "named = self.device if tier is Tier.DEVICE else self.host",
        "named = self.device",
        ("tests/property/test_eviction_policies.py", f"{UNIT}/core/test_tree.py", f"{UNIT}/core/test_cache.py"),
    ),
    Mutant(
        "a damaged coded page is taken for sound",
        "core/seal.py",
        "(flaw is Flaw.FORMAT and verify_buffers((stored,), label, version=CODED_VERSION) is None)",
        "flaw is Flaw.FORMAT",
        (f"{UNIT}/core/test_seal.py", f"{UNIT}/storage_backends/wrappers/test_coded.py"),
    ),
    Mutant(
        "a cipher is kept by its key alone",
        "storage_backends/wrappers/page_keys.py",
        "        found = self._ciphers.get((key_id, identity))\n",
        "        found = next((each for (key, _), each in self._ciphers.items() if key == key_id), None)\n",
        (f"{UNIT}/storage_backends/wrappers/test_encrypted.py",),
    ),
    Mutant(
        "an insert into tombstones overwrites a held slot",
        "tree/radix.py",
        "                is_tombstone = held[offset + given_offsets] < 0\n",
        "                is_tombstone = held[given_offsets] < 0\n",
    ),
    Mutant(
        "a fork that fails keeps a slot",
        "controller/ledger.py",
        "                undo.callback(self.free, Tier.DEVICE, number, slots)\n",
        "                undo.callback(self.free, Tier.DEVICE, number, slots[1:])\n",
        (f"{UNIT}/core/test_checkpoints.py",),
    ),
    Mutant(
        "pages that a full disk dropped stay counted",
        "storage_backends/file/quota.py",
        "                self._uncount_gone(gone)\n                self._count_there([each.label for each in named",
        "                self._count_there([each.label for each in named",
        (f"{UNIT}/storage_backends/directory/test_full_disk.py",),
    ),
    Mutant(
        "a window is a token short",
        "components/layouts/attention.py",
        "return None if window is None else window - 1",
        "return None if window is None else window - 2",
        FAMILIES,
    ),
    Mutant(
        "values are taken to be as wide as keys",
        "components/layouts/attention.py",
        "heads * (choice.head_bytes(key_dim) + choice.head_bytes(value_dim))",
        "heads * (choice.head_bytes(key_dim) + choice.head_bytes(key_dim))",
        FAMILIES,
    ),
    Mutant(
        "an indexer's scales are left out of its rows",
        "components/layouts/deepseek.py",
        '{"indexer": key + key // SCALED_VALUES * SCALE_BYTES}',
        '{"indexer": key}',
        FAMILIES,
    ),
    Mutant(
        "a graph's padding reads pages of the batch before",
        "forward/graph.py",
        "        self.page_table.zero_()\n",
        "",
        GRAPHS,
    ),
    Mutant(
        "a translation is kept by address and length",
        "forward/translation.py",
        "return torch.add(offsets, self._table[pages], alpha=self.page_size).to(torch.int32)\n",
        "kept = torch.add(offsets, self._table[pages], alpha=self.page_size).to(torch.int32)\n"
        "        return vars(_never).setdefault(f'{id(self)} {locs.data_ptr()} {locs.numel()}', kept)\n",
        GRAPHS,
    ),
    Mutant(
        "settings of a server are left out of what names its pages",
        "integrations/sglang/naming.py",
        'facts = {**dict(engine.settings), "page_hash": PAGE_HASH}',
        'facts = {"page_hash": PAGE_HASH}',
        SGLANG,
    ),
    Mutant(
        "the draft model is left out of what names an engine's pages",
        "integrations/sglang/engine_facts.py",
        '    "speculative_draft_model_path",\n    "speculative_draft_model_revision",\n)',
        '    "speculative_draft_model_revision",\n)',
        SGLANG,
    ),
    Mutant(
        "pages of one rank are named as the stage's",
        "integrations/sglang/naming.py",
        "engine.rank if any(pools[pool].is_rank_own for pool in bundle) else engine.stage",
        "engine.stage",
        SGLANG,
    ),
    Mutant(
        "an engine's quantization is left out of its identity",
        "integrations/vllm/facts.py",
        '        "quantization": _text(model.quantization, "none"),\n',
        "",
        VLLM_FACTS,
    ),
    Mutant(
        "the dtype of an engine's KV cache is left out of its identity",
        "integrations/vllm/facts.py",
        '        "kv cache dtype": config.cache_config.cache_dtype,\n',
        "",
        VLLM_FACTS,
    ),
    Mutant(
        "a rank takes slots that another could not have",
        "controller/ranks/group.py",
        "return held if ranks.agree(np.array([held is not None]))[0] else None",
        "return held if ranks.agree(np.array([held is not None])).size else None",
        RANKS,
    ),
    Mutant(
        "every rank stores what one owner stores for all",
        "controller/ranks/group.py",
        "return frozenset(pool for pool, owner in owners.items() if owner not in stored)",
        "return frozenset(owners)",
        RANKS,
    ),
    Mutant(
        "a duplicate is compared with another page",
        "controller/duplicates.py",
        "page = start + int(np.flatnonzero(given == duplicate)[0])",
        "page = int(np.flatnonzero(given == duplicate)[0])",
        (f"{UNIT}/core/test_duplicates.py",),
    ),
    Mutant(
        "one probe closes a breaker whatever else had failed",
        "storage_backends/common/breaker.py",
        "if self._failures_count and self._successes_count < self.failures_max:",
        "if self._failures_count and self._successes_count < 1:",
        GUARD,
    ),
    Mutant(
        "a forged manifest names another tenant as the owner",
        "storage_backends/manifest.py",
        'tenant if manifest.model.startswith("@") and slash and is_sound(manifest, manifest.identity) else ""',
        'tenant if manifest.model.startswith("@") and slash else ""',
        TENANCY,
    ),
    Mutant(
        "a token ends a day early",
        "service/access/tokens.py",
        "entry.last_day < today",
        "entry.last_day <= today",
        ACCESS,
    ),
    Mutant(
        "a token is known by its public part",
        "service/access/tokens.py",
        "if not hmac.compare_digest(presented, entry.digest if entry else _NOBODY) or entry is None:",
        "if entry is None:",
        ACCESS,
    ),
    Mutant(
        "a revoked certificate holds for whoever shows it",
        "service/access/tls.py",
        "        if names.serial in trust.revoked:\n",
        "        if names in trust.revoked:\n",
        ACCESS,
    ),
    Mutant(
        "pages that a tenant removed stay counted",
        "service/store/tenants.py",
        "        self.usage.drop(tenant, named)\n        return sum(map(bool, stored))",
        "        return sum(map(bool, stored))",
        TENANCY,
    ),
    Mutant(
        "an hour of storage costs what a month does",
        "sizing/plan/costs.py",
        "return self.model.engines * engine + storage / MONTH_HOURS",
        "return self.model.engines * engine + storage",
        PRICES,
    ),
    Mutant(
        "an hour of host memory costs what a month does",
        "sizing/plan/costs.py",
        "self.model.devices * hardware.device_price_per_hour + memory / MONTH_HOURS",
        "self.model.devices * hardware.device_price_per_hour + memory",
        PRICES,
    ),
    Mutant(
        "an object of another length in a bucket is left there",
        "storage_backends/object/store.py",
        "                self._bucket.remove([name])\n            return Answer.FLAWED",
        "                pass\n            return Answer.FLAWED",
        BUCKETS,
    ),
    Mutant(
        "what lies in a bucket under a page's name is taken for the page",
        "storage_backends/object/store.py",
        "return self._bucket.size_of(_page_name(label)) == object_bytes",
        "return self._bucket.size_of(_page_name(label)) is not None",
        BUCKETS,
    ),
    Mutant(
        "a model's window is restored a token short",
        "integrations/transformers/layer_rows.py",
        "        rows_max = layer.sliding_window - 1\n",
        "        rows_max = layer.sliding_window - 2\n",
        ADAPTER,
    ),
]
