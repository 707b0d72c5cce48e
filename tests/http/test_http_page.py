"""The page's HTML and files: headers, caching, what strangers are told (`tests/page` uses it)."""

from __future__ import annotations

import json
import re

import pytest

from flyspec.rules import PARAMETERS
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.tokens import Origin
from orchestrator.front.http.web_page import FILES
from tests.http.clients import client_of, scrape
from tests.orchestrator.stacks import start_stack

STATIC = FILES / "static"
SCRIPTS = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js"))


def data_of(html):
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1])


async def test_the_page_has_what_its_controls_need(served, bare):
    reply = await bare.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    data = data_of(reply.text)
    models = (await bare.get("/v1/models")).json()["data"]
    assert data["model"]["id"] == models[0]["id"]
    assert data["version"] == (await bare.get("/version")).json()["version"]
    assert [rule["name"] for rule in data["rules"]] == [m["rule"] for m in models[1:]]
    listed = (await bare.get("/v1/drafters")).json()["data"]
    assert [d["name"] for d in data["drafters"]] == [d["name"] for d in listed]
    assert {origin["name"] for origin in data["origins"]} == set(Origin.__members__)
    for rule in data["rules"]:
        parameters = {p["name"]: p for p in rule["parameters"]}
        assert set(parameters) == set(RULE_PRESETS[rule["name"]].defaults)
        for name, told in parameters.items():
            assert told["help"] == PARAMETERS[name].help
            ranges = {range_["measure"]: range_ for range_ in told["ranges"]}
            if told["default"] is not None and ranges:
                of = told["measured_by"] and parameters[told["measured_by"]]["default"]
                assert ranges[of]["minimum"] <= told["default"] <= ranges[of]["maximum"]
            if told["type"] == "choice":
                assert told["default"] in told["choices"]


async def test_it_carries_out_only_its_own_files(bare):
    html = await bare.get("/")
    policy = html.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    inline = re.findall(r"<script(?![^>]*(?:src=|application/json))|\sstyle=|\son\w+=", html.text)
    assert inline == []
    wanted = re.findall(r'(?:src|href)="([^"#]+)"', html.text)
    assert wanted
    for url in wanted:
        assert not re.match(r"/|\w+:", url), url  # relative, nothing from elsewhere
        if url.startswith("page/"):
            assert (await bare.get(f"/{url}")).status_code == 200


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in SCRIPTS[:2])])
async def test_what_has_not_changed_is_not_sent_again(bare, path):
    first = await bare.get(path)
    assert first.status_code == 200
    assert first.headers["cache-control"] == "no-cache"
    assert first.headers["x-content-type-options"] == "nosniff"
    again = await bare.get(path, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]


async def test_scripts_have_a_type_that_browsers_run(bare):
    for name in SCRIPTS:
        reply = await bare.get(f"/page/{name}")
        kind = reply.headers["content-type"].split(";")[0]
        assert kind in ("text/javascript", "application/javascript")
        assert reply.content == (STATIC / name).read_bytes()


async def test_nothing_else_is_served(bare):
    for path in ("", "none.js", "../templates/index.html", "%2e%2e/templates/index.html",
                 "..%2f..%2fapp.py", "/etc/passwd"):  # fmt: skip
        reply = await bare.get(f"/page/{path}")
        assert reply.status_code == 404
        assert reply.json()["error"]["type"] == "not_found_error"


async def test_it_is_no_part_of_the_api_and_counted_by_path(served, bare):
    assert (await bare.get("/")).status_code == 200
    await bare.get(f"/page/{SCRIPTS[0]}")
    paths = (await bare.get("/openapi.json")).json()["paths"]
    assert "/" not in paths
    assert not any(path.startswith("/page") for path in paths)
    assert {"/v1/drafters", "/v1/drafters/{name}/activate"} <= set(paths)
    counts = scrape(served)
    assert counts.total("flyspec_http_requests_total", path="/", code="200") >= 1
    assert counts.total("flyspec_http_requests_total", path="/page/{path}", code="200") >= 1
    assert (await bare.post("/")).status_code == 405
    assert (await bare.head("/")).status_code == 200


async def test_strangers_see_the_page_and_no_names(keyed):
    stack, _ = keyed
    async with client_of(stack) as client:
        reply = await client.get("/")
        assert reply.status_code == 200
        data = data_of(reply.text)
        assert (data["keys_required"], data["model"], data["drafters"]) == (True, None, [])
        assert (await client.get(f"/page/{SCRIPTS[0]}")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/pages")).status_code == 401


async def test_the_operators_rules_have_their_parameters(chat_dirs, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[rules.careful]\npreset = "fly"\nfly_entropy_threshold = 0.6\n'
        '[limits]\nallowed_rules = ["exact", "fly", "careful"]\nmin_fly_entropy_threshold = 0.5\n'
        "max_num_speculative_tokens = 9\n"
    )
    options = {"rules_file": str(rules), "rule": "careful"}
    async with start_stack(chat_dirs, http_port=0, **options) as stack, client_of(stack) as client:
        data = data_of((await client.get("/")).text)
    assert [rule["name"] for rule in data["rules"]] == ["careful", "exact", "fly"]
    assert data["default_rule"] == "careful"
    careful = data["rules"][0]
    assert careful["preset"] == "fly"
    (theta,) = (p for p in careful["parameters"] if p["name"] == "fly_entropy_threshold")
    assert theta["default"] == 0.6
    assert data["max_num_speculative_tokens"] == 9
