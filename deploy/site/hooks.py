"""What the site has besides `docs/`: pages generated from code, OpenAPI, changelog and results of benchmarks."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("warning", "error", "critical", "exception")
ERRORS = (
    "StartError",
    "Problem",
    "NamedConflict",
    "TierConflict",
    "TierRefused",
    "DatabaseUnavailable",
    "StoreUnavailable",
)
"""Exceptions whose texts reach operators: at start, or as the `detail` of a response."""
COMMON = ("400", "401", "403", "413", "415", "422")
"""Statuses that nearly every call can have, which the page explains once."""
KVFERRY = Path(sys.executable).with_name("kvferry")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the page about tuning to the navigation, if there is one, and name anchors as GitHub does.

    The pages are read there, too.
    """
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    if (Path(config.docs_dir) / "tuning.md").exists():
        (operating,) = (entry["Operating"] for entry in config.nav or [] if "Operating" in entry)
        operating.insert(1, "tuning.md")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "endpoints.md": endpoints(openapi()),
        "messages.md": messages(),
        "results.md": (ROOT / "bench" / "RESULTS.md").read_text(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository at the pages that have them."""
    return re.sub(r"\]\((?:\.\./)?docs/", "](", markdown.replace("](../bench/RESULTS.md", "](results.md"))


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a service with the embedded engine, which has all calls."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        settings = {"STATE_DIR": folder, "PORT": "0", "POOL_BYTES": "8MiB", "LOG_FORMAT": "text"}
        environment = os.environ | {f"KVFERRY_{name}": value for name, value in settings.items()}
        served = subprocess.Popen([KVFERRY, "serve"], cwd=folder, env=environment, stderr=log)
        try:
            while (found := re.search(r"serving on (http://\S+):", Path(log.name).read_text())) is None:
                if served.poll() is not None:
                    raise RuntimeError(f"kvferry serve ended: {Path(log.name).read_text()}")
                time.sleep(0.1)
            with urllib.request.urlopen(f"{found[1]}/openapi.json") as answer:
                document: dict[str, Any] = json.load(answer)
        finally:
            served.terminate()
            served.wait()
    return document


def endpoints(document: dict[str, Any]) -> str:
    """Return the page of all calls of the HTTP API."""
    found = defaultdict(list)
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method != "head":
                found[operation["tags"][0]].append((path, method, operation))
    lines = ["# Endpoints", "", document["info"]["description"], ""]
    lines += [
        "A running service shows them at `/docs`, where they can be tried, and at `/openapi.json`. Besides the",
        "",
    ]
    lines[-2] += " responses below there are 400, 401, 403, 413, 415 and 422, for calls that are refused as they stand."
    for tag in document["tags"]:
        if tag["name"] in found:
            lines += [f"## {tag['name'].capitalize()}", "", f"{tag['description']}.", ""]
            for path, method, operation in found[tag["name"]]:
                lines += endpoint(f"{method.upper()} {path}", operation, document)
    return "\n".join(lines)


def endpoint(call: str, operation: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    yield from (f"### `{call}`", "", f"{operation['summary']}.", "")
    if "description" in operation:
        yield from (operation["description"], "")
    fields = [
        (one["name"], one["in"], one["schema"], one.get("required", False)) for one in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = resolved(body, document)
    fields += [
        (name, "body", value, name in schema.get("required", []))
        for name, value in schema.get("properties", {}).items()
    ]
    if fields:
        yield from ("| field | in | type | |", "| --- | --- | --- | --- |")
        for name, place, value, required in fields:
            needed = "required" if required else ""
            note = cell(value.get("description", ""))
            yield f"| `{name}` | {place} | {cell(kind(value))} | {'; '.join(filter(None, (needed, note)))} |"
        yield ""
    answers = [
        f"{status} ({cell(answer['description'])})"
        for status, answer in operation["responses"].items()
        if status not in COMMON
    ]
    yield from (f"Responses: {', '.join(answers)}.", "")


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def kind(schema: dict[str, Any]) -> str:
    """Return the type of a field in words."""
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(kind(one) for one in schema.get("anyOf", schema.get("oneOf", [])))
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    return str(schema.get("format", schema.get("type", "any")))


def log_lines_and_errors() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the log lines above INFO by module, each after its level, and the texts of errors by exception."""
    logs, errors = defaultdict(set), defaultdict(set)
    for path in sorted(path for top in ("app", "core", "cuda_ops") for path in (ROOT / top).rglob("*.py")):
        module = ".".join(("kvferry", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        # Texts that have a name before they are logged.
        named = {ast.unparse(one.targets[0]): one.value for one in ast.walk(tree) if isinstance(one, ast.Assign)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name in ERRORS:
                line = " ".join(filter(None, map(text, call.args)))
                if re.search(r"[a-z]{3}", line):
                    errors[name].add(line)
            elif name in (*LEVELS, "log") and re.search("log|seldom", ast.unparse(call.func)):
                # Of `RateLimitedLogger.log`: level, key, text. A level that is computed can be a warning.
                level = ast.unparse(call.args[0]).rpartition(".")[2].lower() if name == "log" else name
                level = {"exception": "error"}.get(level, level if level in ("info", *LEVELS) else "warning")
                values = [text(named.get(ast.unparse(one), one)) for one in call.args[2 if name == "log" else 0 :]]
                line = next((value for value in values if value not in ("", "%s")), "")
                if level != "info" and re.search(r"[a-z]{3}", line):
                    logs[module].add(f"{level.upper()} {line}")
    return logs, errors


def messages() -> str:
    """Return the page of the log lines above INFO, and of the errors that operators and clients see."""
    logs, errors = log_lines_and_errors()
    lines = [
        "# Messages",
        "",
        "Generated from the code: what is searched for when a line of the log needs an explanation.",
        "",
    ]
    lines += ["## Log lines", "", "Those above INFO, by module. `%s` and `%d` stand for values.", ""]
    lines += ["[log lines](log-lines.md) says more of those whose text leaves open what to do.", ""]
    for module, found in sorted(logs.items()):
        lines += [f"### `{module}`", "", *listed(found)]
    lines += [
        "## Errors",
        "",
        "By exception; `...` stands for values. `StartError` ends a start with exit code 2, and the",
        "",
    ]
    lines[-2] += " others are the `detail` of a response."
    for name, found in sorted(errors.items()):
        lines += [f"### `{name}`", "", *listed(found)]
    return "\n".join(lines)


def text(node: ast.expr) -> str:
    """Return the text of a literal, with `...` for its values; nothing for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) or "..." for part in node.values)
    return ""


def listed(found: Iterable[str]) -> Iterator[str]:
    yield from (f"- `` {line.replace(chr(10), ' ')} ``" for line in sorted(found))
    yield ""


def cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")
