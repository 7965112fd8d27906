"""Commands and configurations as the engine understands them: its own parser, routes, requests and pools.

    python -m tests.engines.sglang.spoken launch ARGUMENT...        prints the server's arguments as JSON
    python -m tests.engines.sglang.spoken request METHOD PATH BODY  prints the request as JSON; its route must exist
    python -m tests.engines.sglang.spoken linker                    prints why our linker cannot be imported as JSON
    python -m tests.engines.sglang.spoken sizes JSON                prints the bytes of host pages as JSON

The JSON is the tokens of a page by directory of a config.json. It runs in the engine's environment, with the repository
on its path, and for sizes with transformers.
"""

import argparse
import ast
import json
import os
import shlex
import sys
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tests.engines.sglang import absent
from unified_cache.core.errors import ConfigError

__all__: list[str] = []

SERVER = "sglang/srt/entrypoints/http_server.py"
NEEDS_KEY = "_admin_api_key_missing_response"

PAGE_TOKENS = 64
"""Of the published arguments; each configuration has its own."""
HOST_RATIO = 2.0
"""Slots of the host for one of the device; SGLang wants more than one."""
CONFIGURATION_S = 120.0
"""Longest wait for the pools of one configuration; a process that is killed gives no answer."""


def understood_launch(arguments: list[str]) -> dict[str, Any]:
    """Return the arguments of ``sglang.launch_server`` as its parser reads them."""
    parser = argparse.ArgumentParser()
    vars(import_module("sglang.srt.server_args"))["ServerArgs"].add_cli_args(parser)
    return vars(parser.parse_args(arguments))


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


def understood_linker() -> dict[str, Any]:
    """Return the line that the version is told which lacks what our linker needs; no line for the others."""
    try:
        vars(import_module("unified_cache.integrations.sglang"))["__getattr__"]("UnifiedCacheExternalLinker")
    except ConfigError as error:
        return {"refusal": str(error)}
    return {"refusal": ""}


def understood_configurations(page_tokens: dict[str, int]) -> dict[str, Any]:
    """Return the bytes of a host page by pool for each configuration."""
    vars(import_module("tests.engines.sglang.cpu"))["serve_as_device"](
        page_size=PAGE_TOKENS,
        hicache_ratio=HOST_RATIO,
        hicache_mem_layout="page_first",
        hicache_io_backend="kernel",
        hicache_write_policy="write_through",
        served_model_name="example/model",
        _mamba_cache_chunk_size=PAGE_TOKENS,
    )
    page_bytes_of = vars(import_module("tests.engines.sglang.host_page_sizes"))["host_page_bytes"]
    # A process for each: threads of SGLang keep the pools of an engine for as long as they run.
    with get_context("fork").Pool(1, maxtasksperchild=1) as processes:
        asked = {named: processes.apply_async(page_bytes_of, (named, tokens)) for named, tokens in page_tokens.items()}
        return {directory: answer.get(CONFIGURATION_S) for directory, answer in asked.items()}


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
    if sys.argv[1:2] == ["sizes"]:
        # It looks for packages once, and must not take the empty names below for them.
        import_module("transformers.models.auto.processing_auto")
    absent.provide(os.environ["SGLANG_WHEEL"])
    match sys.argv[1:]:
        case ["launch", *arguments]:
            understood = understood_launch(arguments)
        case ["request", method, path, body]:
            understood = understood_request(method, path, body)
        case ["linker"]:
            understood = understood_linker()
        case ["sizes", page_tokens]:
            understood = understood_configurations(json.loads(page_tokens))
        case words:
            raise SystemExit(f"expected launch, request, linker or sizes, found {shlex.join(words)}")
    sys.stdout.write(json.dumps(understood, default=str) + "\n")


if __name__ == "__main__":
    main()
