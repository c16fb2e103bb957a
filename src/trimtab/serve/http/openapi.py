"""The OpenAPI document and the page of a server."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Mapping
from typing import Any

import jinja2

from trimtab.serve.deployment import Deployment
from trimtab.serve.protocol import DATATYPES, TensorFormat
from trimtab.serve.repository import Model, Repository

REASONS = {
    400: "The request does not fit the model.",
    401: "The token is missing or wrong.",
    403: "A page of another site has sent the request.",
    404: "There is no such model or version, or it is not loaded.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    500: "The model failed on this request.",
    503: "The queue is full, the model is being loaded, or the server is stopping.",
    504: "The deadline passed in the queue; the request was not begun.",
}
GET_ROUTES = {
    "/v2": "Name, version and extensions of the server",
    "/v2/health/live": "Whether the server runs",
    "/v2/health/ready": "Whether every model can be called",
    "/v2/models": "Names of the models",
    "/v2/models/stats": "Statistics of all models",
    "/metrics": "Prometheus metrics",
    "/openapi.json": "This document",
}
PER_MODEL = {"": "Inputs and outputs", "/ready": "Whether it can be called", "/stats": "Statistics", "/config": "Configuration"}


def document(repository: Repository) -> dict[str, Any]:
    """The OpenAPI document, with the routes of each model by name and its inputs as schemas."""
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in GET_ROUTES.items()}
    paths["/v2/health/ready"]["get"]["responses"]["503"] = _json("A model cannot be called yet.")
    for model in repository.models.values():
        infer = _infer(model.active)
        for base, extra in ((f"/v2/models/{model.name}", []), (f"/v2/models/{model.name}/versions/{{version}}", [VERSION])):
            for path, text in PER_MODEL.items():
                paths[f"{base}{path}"] = {"get": _operation(text, 404, 503), "parameters": extra}
            paths[f"{base}/infer"] = {"post": infer, "parameters": extra}
        for word in ("load", "unload"):
            paths[f"/v2/repository/models/{model.name}/{word}"] = {"post": _operation(f"{word.capitalize()} it", 400, 403, 404)}
    paths["/v2/repository/index"] = {"post": _operation("State of every model", 400, 413)}
    paths["/v2/repository/index"]["post"]["responses"]["200"]["content"]["application/json"]["schema"] = ROWS
    info = {"title": "trimtab: Open Inference Protocol v2", "version": importlib.metadata.version("trimtab")}
    found: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths}
    if repository.options.token is not None:
        found |= {
            "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
            "security": [{"token": []}],
        }
    return found


VERSION = {"name": "version", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9]+$"}}
ROWS = {"type": "array", "items": {"type": "object"}}
LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "Bytes of JSON at the start of the body, where tensors follow in binary",
    "schema": {"type": "integer", "minimum": 0},
}
MOST_EXAMPLE = 20_000
"""Most values of the example of an infer request."""


def _operation(summary: str, *statuses: int) -> dict[str, Any]:
    refusals = {str(status): _json(REASONS[status]) for status in (*statuses, 401)}
    answer = {"text/plain": {"schema": {"type": "string"}}} if summary == GET_ROUTES["/metrics"] else _json("")["content"]
    return {"summary": summary, "responses": {"200": {"description": "The answer", "content": answer}, **refusals}}


def _json(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": {"type": "object"}}}}


def _infer(deployment: Deployment | None) -> dict[str, Any]:
    """The operation that computes: its request in JSON or with binary tensors, and an example."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    found = _operation("Compute", 400, 404, 408, 413, 500, 503, 504)
    found["parameters"] = [LENGTH]
    found["requestBody"] = {
        "required": True,
        "content": {"application/json": _request(deployment), "application/octet-stream": binary},
    }
    found["responses"]["200"]["content"]["application/octet-stream"] = binary
    return found


def _request(deployment: Deployment | None) -> dict[str, Any]:
    """The schema of an infer request, and an example."""
    number = {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "array"}]}
    inputs = () if deployment is None or deployment.interface is None else deployment.interface.inputs
    names = {"enum": [form.name for form in inputs]} if inputs else {}
    datatypes = sorted({form.datatype for form in inputs}) or [datatype for datatype, _ in DATATYPES.values()]
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"type": "string", **names},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "datatype": {"enum": datatypes},
            "data": {"type": "array", "items": number},
        },
    }
    properties = {"id": {"type": "string"}, "inputs": {"type": "array", "items": tensor}}
    schema = {"type": "object", "required": ["inputs"], "properties": properties}
    given = None if deployment is None else example(deployment)
    return {"schema": schema} if given is None else {"schema": schema, "example": given}


def example(deployment: Deployment) -> dict[str, Any] | None:
    """An infer request from the artifact's first test vector, whose start is repeated; ``None`` if the request is large."""
    facts, tensors = deployment.description.get("example"), []
    if facts is None or deployment.interface is None or any(math.prod(shape) > MOST_EXAMPLE for shape in facts["shapes"]):
        return None
    for form, shape, data in zip(deployment.interface.inputs, facts["shapes"], facts["data"], strict=True):
        whole = (data * -(-math.prod(shape) // len(data)))[: math.prod(shape)] if data else []
        tensors.append({"name": form.name, "shape": shape, "datatype": form.datatype, "data": whole})
    return {"inputs": tensors}


@functools.cache
def _template(name: str) -> jinja2.Template:
    loader = jinja2.PackageLoader("trimtab.serve.http", ".")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(name)


def page(repository: Repository) -> str:
    """The page: each model's card, a form to try it, and live figures. It loads nothing from elsewhere."""
    return _template("page.jinja").render(models=[_page_model(model) for model in repository.models.values()])


def sign_in() -> str:
    """The page of a server that wants a token: a field for it. The browser keeps the token until the tab is closed."""
    return _template("sign_in.jinja").render()


def _page_model(model: Model) -> dict[str, Any]:
    found: dict[str, Any] = {"name": model.name, "state": model.state, "version": model.version, "reason": model.reason}
    if (active := model.active) is None:
        return found
    card, layout, interface = active.description["card"], active.layout, active.interface
    assert interface is not None
    evidence, threads, facts = card["evidence"], active.description["threads"], active.description["example"]
    limits = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in card["limits"].items()]
    each = "1 thread" if threads == 1 else f"{threads or 'all'} threads"
    rows = {
        "form": card["recipe"],
        "limits": ", ".join(limits) or "none",
        "test vectors": f"{card['test_vectors']}, replayed in each instance before it served",
        "runs as": f"{layout.instances} x {each}, batches of up to {layout.rows} rows",
        **{card["labels"][name]: _figure(value) for name, value in evidence.items() if name not in RATIOS},
        "made": f"{card['created'][:16].replace('T', ' ')} UTC by trimtab {card['trimtab']} on {card['cpu']}",
    }
    fields = [
        {**_tensor(form), "shape": shape, "data": data}
        for form, shape, data in zip(interface.inputs, facts["shapes"], facts["data"], strict=True)
    ]
    return found | {
        "verdict": _verdict(evidence),
        "ladder": _ladder(evidence),
        "rows": rows,
        "notes": card["notes"],
        "tuning": "" if model.tuning is None else "\n".join(model.tuning.lines()),
        "inputs": fields,
        "outputs": [_tensor(form) for form in interface.outputs],
    }


def _tensor(form: TensorFormat) -> dict[str, Any]:
    return {"name": form.name, "datatype": form.datatype, "sizes": ", ".join(map(str, form.shape))}


RATIOS = {
    "baseline_speedup": "the original, as exported with this artifact",
    "speedup": "this artifact",
}
"""Rungs of the ladder: speed ratios over the model as written."""


def _verdict(evidence: Mapping[str, Any]) -> str:
    """The proven speed-up as a sentence."""
    ratio = evidence.get("speedup")
    if ratio is None:
        return "Its speed was not compared with the model as written."
    sure = ratio["low"] is not None and ratio["low"] > 1
    text = (
        f"{ratio['value']:.3g} times as fast as the model as written"
        if sure
        else "Not provably faster than the model as written"
    )
    text += f" ({_bounds(ratio)})" if sure else f": ratio {_figure(ratio)}"
    if "score" in evidence and "baseline_score" in evidence:
        text += f". Score {evidence['score']:.4g}, that of the model as written {evidence['baseline_score']:.4g}"
    return f"{text}."


def _ladder(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rungs with their speed ratio over the model as written, and its share of the largest one."""
    rungs = [("the model as written", 1.0, "1")]
    if "speedup" in evidence and "against_tuned" in evidence:
        tuned = evidence["speedup"]["value"] / evidence["against_tuned"]["value"]
        rungs.append(("the original, tuned", tuned, f"{tuned:.3g}"))
    rungs += [(text, evidence[name]["value"], _figure(evidence[name])) for name, text in RATIOS.items() if name in evidence]
    most = max(value for _, value, _ in rungs)
    found = [{"name": name, "text": text, "share": round(100 * value / most, 1)} for name, value, text in rungs]
    return found if len(found) > 1 else []


def _bounds(value: Mapping[str, Any]) -> str:
    """The interval of a figure."""
    low, high = value["low"], value.get("high", value.get("upper"))
    return "" if low is None or high is None else f"95% interval {low:.3g} to {high:.3g}"


def _figure(value: Any) -> str:
    """A figure of the evidence as text: a measurement, an interval, or a plain value."""
    if isinstance(value, dict) and "median" in value:
        return f"{value['median']:.3g} {value.get('unit', '')}, median of {value.get('n', 0):,} calls"
    if isinstance(value, dict) and "value" in value and "low" in value:
        return f"{value['value']:.3g}" + (f" ({bounds})" if (bounds := _bounds(value)) else "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)
