"""``trimtab load-test``."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from trimtab._internal.files import typed
from trimtab._internal.serialization import dumps
from trimtab._internal.units import positive
from trimtab._internal.units import seconds as duration
from trimtab.cli._lazy import lazy_import
from trimtab.errors import UsageError

EXIT_NOT_KEPT = 1
File = typed("request.json")


def load_test_command(
    target: Annotated[
        str,
        typer.Argument(metavar="URL|ARTIFACT", help="Address such as http://127.0.0.1:8000, or a folder to serve meanwhile."),
    ],
    vs: Annotated[
        str | None, typer.Option("--vs", metavar="URL|ARTIFACT", help="A second server, measured in turns with the first.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Arrivals per second.")] = None,
    find: Annotated[bool, typer.Option("--find", help="Find the highest rate that keeps --p99.")] = False,
    p99: Annotated[str | None, typer.Option(help="Limit of the 99th percentile of latency [20ms with --find].")] = None,
    time: Annotated[str, typer.Option(help="How long each rate is offered.")] = "10s",
    model: Annotated[str | None, typer.Option(help="Name of the model [the only one].")] = None,
    rows: Annotated[int, typer.Option(help="Size of each dimension that varies, in random inputs.")] = 1,
    request: Annotated[
        pathlib.Path | None, typer.Option(parser=File, metavar="FILE", help="Body of an infer request in JSON, instead.")
    ] = None,
    token_file: Annotated[
        pathlib.Path | None,
        typer.Option(parser=typed("token"), metavar="FILE", help="File with the token that the server wants."),
    ] = None,
    ca: Annotated[
        pathlib.Path | None,
        typer.Option(parser=typed("cert.pem"), metavar="FILE", help="Certificates to trust [the system's]."),
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Allow artifacts that carry native code.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Measure a server under load that does not wait for its answers.

    It runs against any server of the Open Inference Protocol v2.

    \b
    Examples:
      trimtab load-test http://127.0.0.1:8000 --rate 200
      trimtab load-test http://127.0.0.1:8000 --find --p99 20ms --time 5s
      trimtab load-test runs/digits/artifact --rate 200
      trimtab load-test http://127.0.0.1:8000 --vs http://127.0.0.1:9000 --rate 99
    """
    if (rate is None) != find:
        raise UsageError("Give either --rate, such as --rate 200, or --find.")
    limit = None if p99 is None else duration(p99, "--p99")
    for name, file in (("request", request), ("token-file", token_file), ("ca", ca)):
        if file is not None and not file.is_file():
            raise UsageError(f"--{name}: there is no file {str(file)!r}.")
    token = None if token_file is None else lazy_import("serve.options").read_token(token_file)
    load_options: dict[str, Any] = {
        "model": model,
        "rate": None if rate is None else positive(rate, "--rate", "200"),
        "seconds": duration(time, "--time"),
        "rows": positive(rows, "--rows"),
        "body": None if request is None else request.read_bytes(),
        "access": lazy_import("serve.load_test").Access(token, ca),
    }
    address_of = lazy_import("serve.own_server").address_of
    if vs is not None:
        if rate is None or limit is not None:
            raise UsageError("Two servers are compared at one rate. Give --vs with --rate, and without --find and --p99.")
        with address_of(target, trust=trust) as first, address_of(vs, trust=trust) as second:
            compared = lazy_import("serve.load_comparison").compare_servers(first, second, **load_options)
        typer.echo(dumps(compared) if json else compared)
        return 0
    with address_of(target, trust=trust) as url:
        found = lazy_import("serve.load_test").load_test(
            url, p99_s=limit, on_load=lambda load: None if json else typer.echo(load), **load_options
        )
    if json:
        typer.echo(dumps(found))
    elif find:
        typer.echo("No rate keeps the limit." if found is None else f"highest rate within the limit: {found.rate:,.4g}/s")
    kept = found is not None and (limit is None or found.keeps(limit))
    return 0 if kept else EXIT_NOT_KEPT
