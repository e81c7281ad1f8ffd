"""DR-Tulu's tools: their names on MCP servers, their arguments, and the documents in their answers."""

import dataclasses
from collections.abc import Mapping

from podrl.environments.calls import decoded
from podrl.mappings import JsonObject

NO_RESULTS = "No results found for the query."


@dataclasses.dataclass(frozen=True)
class KnownTool:
    """A tool that models of DR-Tulu call.

    Attributes:
      theirs: names that a server may use for the tool; the first of these that the server has is taken.
      tag: name of the tag around each document of the tool's answer.
    """

    theirs: tuple[str, ...]
    tag: str = "snippet"


TOOLS: Mapping[str, KnownTool] = {
    "snippet_search": KnownTool(("snippet_search", "semantic_scholar_snippet_search")),
    "google_search": KnownTool(("google_search", "serper_google_webpage_search")),
    "massive_serve": KnownTool(("massive_serve", "massive_serve_search")),
    "browse_webpage": KnownTool(
        (
            "browse_webpage",
            "crawl4ai_docker_fetch_webpage_content",
            "crawl4ai_fetch_webpage_content",
            "serper_fetch_webpage_content",
            "jina_fetch_webpage_content",
        ),
        tag="webpage",
    ),
}
_QUERIES = ("query", "url", "webpage_url", "input", "text")  # usual names of the argument between a call's tags
_NUMBERS = ("limit", "num_results", "n_docs")  # names that servers use for the number of documents


def query_of(schema: JsonObject) -> str:
    """Chooses the argument that receives the text between a call's tags.

    The first of the usual names that the tool has is chosen, else the first required argument, else the first argument.

    Args:
      schema: JSON schema of the tool's arguments.
    """
    names = schema.get("properties", {})
    usual = [name for name in _QUERIES if name in names]
    required = [name for name in schema.get("required", []) if name in names]
    return usual[0] if usual else required[0] if required else next(iter(names), _QUERIES[0])


def arguments(tool: str, values: JsonObject, schema: JsonObject) -> JsonObject:
    """Renames the argument for the number of documents to the name that the server uses.

    Args:
      tool: name of the tool; only DR-Tulu's tools are changed.
      values: arguments as the model wrote them.
      schema: JSON schema of the server's tool.
    """
    names = schema.get("properties", {})
    if tool not in TOOLS:
        return dict(values)
    there = [name for name in _NUMBERS if name in names]
    return {there[0] if k in _NUMBERS and k not in names and there else k: v for k, v in values.items()}


def documents(answer: str) -> list[str]:
    """Splits a tool's answer into the documents that the model reads; an answer in an unknown form is one document."""
    try:
        value = decoded(answer)
    except ValueError:
        return [answer]
    if not isinstance(value, dict):
        return [_text(one) for one in value] if isinstance(value, list) else [answer]
    if value.get("error"):
        return [f"Query failed: {value['error']}"]
    for key in ("data", "organic", "results", "documents"):
        if isinstance(value.get(key), list):
            return [text for one in value[key] if (text := _text(one))] or [NO_RESULTS]
    if value.get("success") is False:
        return ["The page cannot be read."]
    return [_text(value) or answer]


def _text(document: object) -> str:
    """Formats a document as DR-Tulu does: title, URL and text, one line each; '' for an empty document."""
    if not isinstance(document, Mapping):
        return str(document)
    paper, metadata = document.get("paper"), document.get("metadata")
    about = paper if isinstance(paper, Mapping) else metadata if isinstance(metadata, Mapping) else {}
    title = document.get("title") or about.get("title") or ""
    url = document.get("link") or document.get("url") or ""
    body = ""
    for key in ("snippet", "passage", "fit_markdown", "markdown", "text", "content"):
        found = document.get(key)
        if isinstance(found, Mapping):
            found = "" if found.get("snippetKind") == "title" else found.get("text")
        if found:
            body = str(found).strip()
            break
    if not (title or url or body):
        return ""
    lines = [f"Title: {str(title).strip() or 'No title available'}"]
    lines += [f"URL: {str(url).strip()}"] * bool(url)
    return "\n".join([*lines, f"Snippet: {body or 'No content available'}"])
