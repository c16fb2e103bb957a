"""The OpenAPI document and the page of a server."""

from __future__ import annotations

from typing import Any

from trimtab.serve.repository import Repository


def document(repository: Repository) -> dict[str, Any]:
    """The OpenAPI document."""
    return {"openapi": "3.1.0", "info": {"title": "trimtab", "version": "2"}, "paths": {}}


def page(repository: Repository) -> str:
    """The page."""
    return "<!doctype html><title>trimtab</title>"
