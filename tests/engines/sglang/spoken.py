"""Commands as the engine understands them: its own parser of arguments, its own routes and requests.

    python -m tests.engines.sglang.spoken launch ARGUMENT...        prints the server's arguments as JSON
    python -m tests.engines.sglang.spoken request METHOD PATH BODY  prints the request as JSON; its route must exist

It runs in the engine's environment, with the repository on its path.
"""

import argparse
import ast
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tests.engines.sglang import absent

__all__: list[str] = []

SERVER = "sglang/srt/entrypoints/http_server.py"
NEEDS_KEY = "_admin_api_key_missing_response"


def understood_launch(arguments: list[str]) -> dict[str, Any]:
    """Return the arguments of ``sglang.launch_server`` as its parser reads them, and whether their tree is known."""
    parser = argparse.ArgumentParser()
    vars(import_module("sglang.srt.server_args"))["ServerArgs"].add_cli_args(parser)
    told = vars(parser.parse_args(arguments))
    vars(import_module("unified_cache.integrations.sglang.tree_plugin"))["register"]()
    factory_of = vars(import_module("sglang.srt.mem_cache.registry"))["get_radix_cache_factory"]
    return told | {"has_radix_cache": factory_of(told["radix_cache_backend"]) is not None}


def understood_request(method: str, path: str, body: str) -> dict[str, Any]:
    """Return the fields of a request, and whether its route asks for the administrator's key.

    The server is read and not run: it needs a tokenizer and a model. A request is read as the server does.
    """
    tree = ast.parse((Path(os.environ["SGLANG_WHEEL"]) / SERVER).read_text(encoding="utf-8"))
    (route,) = (
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.AsyncFunctionDef) and any(_is_route(one, method, path) for one in each.decorator_list)
    )
    fields: dict[str, Any] = {}
    if route.args.args:
        kind = ast.unparse(route.args.args[0].annotation or ast.Constant(None))
        name = kind.removeprefix("Annotated[").partition(",")[0]
        asked = TypeAdapter(vars(import_module("sglang.srt.managers.io_struct"))[name]).validate_json(body)
        fields = {each: getattr(asked, each) for each in asked.__struct_fields__}
    return {"needs_key": NEEDS_KEY in ast.unparse(route), **fields}


def _is_route(decorator: ast.expr, method: str, path: str) -> bool:
    if not isinstance(decorator, ast.Call) or not decorator.args:
        return False
    methods = next((each.value for each in decorator.keywords if each.arg == "methods"), None)
    verbs = [] if methods is None else ast.literal_eval(methods)
    is_named = isinstance(decorator.args[0], ast.Constant) and decorator.args[0].value == path
    verb = decorator.func.attr.upper() if isinstance(decorator.func, ast.Attribute) else ""
    return is_named and method in (*verbs, verb)


def main() -> None:
    """Print what the engine understands."""
    absent.provide(os.environ["SGLANG_WHEEL"])
    verb, *words = sys.argv[1:]
    understood = understood_launch(words) if verb == "launch" else understood_request(*words)
    sys.stdout.write(json.dumps(understood, default=str) + "\n")


if __name__ == "__main__":
    main()
