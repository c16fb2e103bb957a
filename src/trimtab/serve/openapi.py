"""The OpenAPI document and the page of a server."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from typing import Any

import jinja2

from trimtab.serve.deployment import Deployment
from trimtab.serve.protocol import DATATYPES
from trimtab.serve.repository import Model, Repository

REASONS = {
    400: "The request does not fit the model.",
    401: "The token is missing or wrong.",
    404: "There is no such model or version, or it is not loaded.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    500: "The model failed on this request.",
    503: "The queue is full, the model is being loaded, or the server is stopping.",
    504: "The deadline passed in the queue; the request was not begun.",
}
READ = {
    "/v2": "Name, version and extensions of the server",
    "/v2/health/live": "Whether the server runs",
    "/v2/health/ready": "Whether every model can be called",
    "/v2/models": "Names of the models",
    "/v2/models/stats": "Statistics of all models",
    "/metrics": "Prometheus metrics",
    "/openapi.json": "This document",
}
OF_MODEL = {"": "Inputs and outputs", "/ready": "Whether it can be called", "/stats": "Statistics", "/config": "Configuration"}


def document(repository: Repository) -> dict[str, Any]:
    """The OpenAPI document, with the routes of each model by name and its inputs as schemas."""
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in READ.items()}
    paths["/v2/health/ready"]["get"]["responses"]["503"] = _json("A model cannot be called yet.")
    for model in repository.models.values():
        base = f"/v2/models/{model.name}"
        paths |= {f"{base}{path}": {"get": _operation(text, 404, 503)} for path, text in OF_MODEL.items()}
        infer = _operation("Compute", 400, 404, 408, 413, 500, 503, 504)
        infer["requestBody"] = {"required": True, "content": {"application/json": _request(model.active)}}
        paths[f"{base}/infer"] = {"post": infer}
        for word in ("load", "unload"):
            paths[f"/v2/repository/models/{model.name}/{word}"] = {"post": _operation(f"{word.capitalize()} it", 400, 404)}
    paths["/v2/repository/index"] = {"post": _operation("State of every model", 400)}
    info = {"title": "trimtab: Open Inference Protocol v2", "version": importlib.metadata.version("trimtab")}
    found: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths}
    if repository.options.token is not None:
        found |= {
            "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
            "security": [{"token": []}],
        }
    return found


def _operation(summary: str, *statuses: int) -> dict[str, Any]:
    refusals = {str(status): _json(REASONS[status]) for status in (*statuses, 401)}
    return {"summary": summary, "responses": {"200": {"description": "The answer"}, **refusals}}


def _json(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": {"type": "object"}}}}


def _request(deployment: Deployment | None) -> dict[str, Any]:
    """The schema of an infer request, and an example."""
    number = {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "array"}]}
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "datatype": {"enum": [datatype for datatype, _ in DATATYPES.values()]},
            "data": {"type": "array", "items": number},
        },
    }
    properties = {"id": {"type": "string"}, "inputs": {"type": "array", "items": tensor}}
    schema = {"type": "object", "required": ["inputs"], "properties": properties}
    return {"schema": schema} if deployment is None else {"schema": schema, "example": example(deployment)}


def example(deployment: Deployment) -> dict[str, Any]:
    """An infer request from the artifact's first test vector; without data if that is large."""
    facts = deployment.description["example"]
    assert deployment.interface is not None
    return {
        "inputs": [
            {"name": form.name, "shape": shape, "datatype": form.datatype, "data": data}
            for form, shape, data in zip(deployment.interface.inputs, facts["shapes"], facts["data"], strict=True)
        ]
    }


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(loader=jinja2.PackageLoader("trimtab.serve", "."), autoescape=True, trim_blocks=True)
    return environment.get_template("page.jinja")


def page(repository: Repository) -> str:
    """The page: each model's card, a form to try it, and live figures. It loads nothing from elsewhere."""
    return _template().render(models=[_shown(model) for model in repository.models.values()])


def _shown(model: Model) -> dict[str, Any]:
    found: dict[str, Any] = {"name": model.name, "state": model.state, "version": model.version, "reason": model.reason}
    if (active := model.active) is None:
        return found
    card, layout, interface = active.description["card"], active.layout, active.interface
    assert interface is not None
    evidence = {name: _figure(value) for name, value in card["evidence"].items()}
    rows = {
        "inputs": interface.describe(),
        "outputs": ", ".join(map(str, interface.outputs)),
        "recipe": card["recipe"],
        "limits": card["limits"] or "none",
        "test vectors": f"{card['test_vectors']}, replayed in each instance before it served",
        "runs as": f"{layout.instances} x {active.description['threads'] or 'all'} threads, up to {layout.rows} rows at once",
        "made": f"{card['created']} by trimtab {card['trimtab']} on {card['cpu']}",
        **evidence,
    }
    tuning = [] if model.tuning is None else model.tuning.lines()
    return found | {"rows": rows, "tuning": "\n".join(tuning), "example": json.dumps(example(active))}


def _figure(value: Any) -> str:
    """A figure of the evidence as text: an interval, or a plain value."""
    if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
        low, high = value["low"], value["high"]
        return f"{value['value']:.3g}" + ("" if low is None or high is None else f" (95% interval {low:.3g} to {high:.3g})")
    return f"{value:.4g}" if isinstance(value, float) else str(value)
