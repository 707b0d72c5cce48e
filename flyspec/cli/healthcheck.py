"""`flyspec healthcheck`: whether a server is ready, as an exit code."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from flyspec.cli.json_output import print_json
from flyspec.cli.options import read_address, read_admin_address, with_flags
from flyspec.cli.runtime import run_async
from flyspec.credentials import Credentials
from flyspec.errors import FlyspecError
from flyspec.flags import Flag


@with_flags
def healthcheck(
    connection: Credentials,
    address: Annotated[
        str, Flag("Address of a server: orchestrator, draft or verify service.", read=read_address)
    ] = "127.0.0.1:50050",
    admin_address: Annotated[
        str | None,
        Flag(
            "The orchestrator's admin address, to check its state too.",
            read=read_admin_address,
        ),
    ] = None,
    timeout: Annotated[float, Flag("Seconds to wait for an answer.", min=0.1)] = 5.0,
    json: Annotated[bool, Flag("Print one JSON document.")] = False,
) -> None:
    """Exit with 0 if the server is ready, 1 if it is not or does not answer."""
    report = run_async(_check(address, admin_address, timeout, connection))
    if json:
        print_json(report)
    else:
        print(_lines(report))
    raise typer.Exit(0 if report["ready"] else 1)


async def _check(
    address: str, admin_address: str | None, timeout_s: float, credentials: Credentials
) -> dict[str, Any]:
    from flyspec.client import AdminClient, AsyncClient

    report: dict[str, Any] = {"address": address, "ready": False, "status": "UNREACHABLE"}
    try:
        async with AsyncClient(address, credentials=credentials, max_retries=0) as client:
            client.hint = "pass --address"
            report["status"] = await client.check_health(timeout_s=timeout_s)
        report["ready"] = report["status"] == "SERVING"
        if admin_address is not None:
            async with AdminClient(admin_address, credentials) as admin:
                admin.hint = "pass --admin-address"
                report["orchestrator"] = dataclasses.asdict(await admin.status(timeout_s))
            report["ready"] = report["ready"] and report["orchestrator"]["ready"]
    except FlyspecError as error:
        report["ready"] = False
        report["error"] = str(error)
    return report


def _lines(report: dict[str, Any]) -> str:
    lines = [f"{report['address']}: {report['status']}"]
    if "error" in report:
        lines.append(f"  {report['error']}")
    if state := report.get("orchestrator"):
        lines.append(
            f"  generations: {state['active_generations']} running, "
            f"{state['waiting_generations']} waiting"
        )
        for name in ("verify", "draft"):
            upstream = state[name]
            sessions = upstream["sessions"]
            lines.append(
                f"  {name} {upstream['address']}: "
                + (f"{sessions['active']} of {sessions['limit']} sessions"
                   if upstream["ready"] else f"not ready: {upstream['error']}")
            )  # fmt: skip
    return "\n".join(lines)
