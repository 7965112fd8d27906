"""Write the published schemas of the kinds in ``deploy/kubernetes``, and of nothing else, for the test of manifests.

    pip install kubernetes-validate && python scripts/kubernetes_schemas.py

The package has the schemas of every version of Kubernetes, 100 MB; what the test needs of one version is 100 KB. Field
descriptions are left out, and fields that no schema names are refused, as ``kubectl apply --validate=strict`` does.
"""

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "fixtures" / "kubernetes.json"
VERSION = "v1.31.0"
"""The oldest that manifests must fit; later ones take what it takes."""

KINDS = {
    "apps/v1 Deployment": "deployment-apps-v1",
    "apps/v1 StatefulSet": "statefulset-apps-v1",
    "networking.k8s.io/v1 NetworkPolicy": "networkpolicy-networking-v1",
    "policy/v1 PodDisruptionBudget": "poddisruptionbudget-policy-v1",
    "v1 ConfigMap": "configmap-v1",
    "v1 Namespace": "namespace-v1",
    "v1 Service": "service-v1",
}
"""File of its schema, by ``apiVersion kind``."""

REFERENCE = re.compile(r'"\$ref": "[^"]*#/\$defs/([^"]+)"')


def _without_descriptions(schema: object) -> object:
    if isinstance(schema, list):
        return [_without_descriptions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # A description is text; a field of that name is a schema.
    return {
        name: _without_descriptions(each)
        for name, each in schema.items()
        if not (isinstance(each, str) and name in ("description", "$id"))
    }


def _read(name: str) -> dict[str, object]:
    """Read a file of the package for our version.

    Raises:
        SystemExit: kubernetes-validate is not installed, or has no such version.
    """
    wanted = f"{VERSION}-local-strict/{name}.json"
    for path in files("kubernetes-validate") or ():
        if str(path).endswith(wanted):
            found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
            return found
    sys.exit(f"kubernetes-validate must be installed and have {wanted}")


def _named_in(text: str) -> Iterator[str]:
    yield from REFERENCE.findall(text)


def main() -> None:
    """Write the kinds, and every definition that they reach."""
    definitions = _read("_definitions")["$defs"]
    assert isinstance(definitions, dict)
    kinds = {kind: _without_descriptions(_read(file)) for kind, file in KINDS.items()}
    reached: dict[str, object] = {}
    waiting = list(_named_in(json.dumps(kinds)))
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = _without_descriptions(definitions[name])
            waiting.extend(_named_in(json.dumps(reached[name])))
    text = json.dumps(
        {"version": VERSION, "kinds": kinds, "$defs": dict(sorted(reached.items()))}, separators=(",", ":")
    )
    TARGET.write_text(re.sub(r'"\$ref":"[^"]*#/\$defs/', '"$ref":"#/$defs/', text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
