"""The report as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from trimtab._internal.text import plain
from trimtab.errors import MissingPackageError
from trimtab.report import charts as _charts
from trimtab.report import compression, headline, leaders, operator_breakdown, reliability, request, trial_table
from trimtab.report import formatting as words
from trimtab.report.logs import embedded
from trimtab.report.roofline_chart import roofline
from trimtab.study.record import Record

FOLDER = pathlib.Path(__file__).parent


def html(record: Record, folder: pathlib.Path) -> str:
    """``record`` as a page, with the ends of the logs in run folder ``folder``.

    The page fetches nothing. Its content security policy names its three scripts by their hashes, so that no other script runs.
    """
    rows = trial_table.rows(record)
    placed = {point.row for point in _charts.points(record, rows)}
    found = (
        *(_charts.ladder(record), _charts.pareto(record, rows), roofline(record)),
        *(compression.curves(record), compression.tradeoff(record), compression.rounding(record)),
    )
    charts = {chart.name: chart for chart in found if chart is not None}
    scripts = {name: source(name) for name in ("theme", "app")} | {"plotly": _plotly()}
    page = PAGES.get_template("report.jinja").render(
        record=record,
        words=words,
        terms=words.terms(record),
        headline=headline,
        asked=request.asked(record),
        use=request.use(record, folder.name),
        compression=compression,
        leaders=leaders.leader_table(record),
        waterfall=leaders.waterfall(record),
        operator_breakdown=operator_breakdown,
        reliability=reliability,
        rows=rows,
        columns=trial_table.columns(record),
        labelled=trial_table.labelled(record),
        reason_length=trial_table.MAX_REASON,
        left_out=len(record.trials) - len(rows),
        undrawn=sum(row.trial.speedup is not None for n, row in enumerate(rows) if n not in placed),
        states=sorted({str(row.trial.state) for row in rows}),
        backends=sorted({row.trial.recipe.backend.name for row in rows}),
        charts=charts,
        style=Markup(source("style")),
        scripts={name: Markup(text) for name, text in scripts.items()},
        policy=policy(list(scripts.values())),
        data=Markup(embedded(_data(record, folder, rows, charts))),
    )
    return page.encode("utf-8", "replace").decode("utf-8")


def policy(scripts: Sequence[str]) -> str:
    """The content security policy of a page with these scripts: no network, and no other scripts."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def _shown(value: Any) -> Any:
    """Text for a template, without control characters, which HTML does not allow."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_shown,
)
"""The templates of all pages."""


def _data(
    record: Record, folder: pathlib.Path, rows: Sequence[trial_table.Row], charts: dict[str, _charts.Chart]
) -> dict[str, Any]:
    return {
        "charts": {name: {"data": c.data, "layout": c.layout, "height": c.height} for name, c in charts.items()},
        "trials": trial_table.details(rows, folder, record),
    }


def _plotly() -> str:
    """The script in plotly's package, read as data: importing the package takes a second and changes the warning filters."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError("plotly, which draws the charts of the report, is not installed: pip install plotly.")
    path = pathlib.Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script")
