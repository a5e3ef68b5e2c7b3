"""The management API: sessions, settings, previews, tickets, invitations, pages."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from tracker.conftest import Running, Start
from tracker.wire_node import WireNode

from meshnet.protocol.tickets import verify_ticket
from meshnet.tracker.auth import COOKIE
from meshnet.tracker.credential import check_credential, make_credential
from meshnet.tracker.pages import Pages


async def test_a_key_is_exchanged_for_a_cookie_that_works_from_its_own_pages_only(tracker: Running) -> None:
    await tracker.node()
    session = f"{tracker.base}/api/session"
    async with tracker.http.post(session, json={"key": tracker.admin_key}) as answer:
        assert await answer.json() == {"scope": "admin", "name": "first admin key"}
        header = answer.headers["set-cookie"]
        value = answer.cookies[COOKIE].value
    assert "HttpOnly" in header
    assert "SameSite=Strict" in header
    assert tracker.admin_key not in header
    tracker.http.cookie_jar.clear()
    cookie = {"Cookie": f"{COOKIE}={value}"}
    async with tracker.http.get(session, headers=cookie) as answer:
        assert (await answer.json())["scope"] == "admin"
    async with tracker.http.get(f"{tracker.base}/api/nodes", headers=cookie) as answer:
        assert answer.status == 200
    chat = f"{tracker.base}/v1/chat/completions"
    body = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
    for origin, status in ((None, 403), ("http://evil.example", 403), (tracker.base, 200)):
        headers = cookie | ({"Origin": origin} if origin else {})
        async with tracker.http.post(chat, json=body, headers=headers) as answer:
            assert answer.status == status, origin
    for broken in (value[:-4] + "AAAA", "rubbish", ""):
        async with tracker.http.get(session, headers={"Cookie": f"{COOKIE}={broken}"}) as answer:
            assert answer.status == 401
    async with tracker.http.delete(session, headers=cookie) as answer:
        assert "Max-Age=0" in answer.headers["set-cookie"]


async def test_signing_in_with_a_wrong_key_counts_as_a_failed_try(start: Start) -> None:
    tracker = await start(failed_keys_per_minute=2)
    for status in (401, 401, 429):
        async with tracker.http.post(f"{tracker.base}/api/session", json={"key": "wrong"}) as answer:
            assert answer.status == status
    async with tracker.http.post(f"{tracker.base}/api/session", json={"key": 7}) as answer:
        assert answer.status == 400


async def test_a_revoked_key_ends_at_once_with_its_sessions(tracker: Running) -> None:
    keys = (await tracker.get("/api/keys"))["keys"]
    use_key = next(key for key in keys if key["scope"] == "use")
    async with tracker.http.post(f"{tracker.base}/api/session", json={"key": tracker.use_key}) as answer:
        value = answer.cookies[COOKIE].value
    tracker.http.cookie_jar.clear()
    async with tracker.http.delete(
        f"{tracker.base}/api/keys/{use_key['id']}", headers=tracker.admin()
    ) as answer:
        assert answer.status == 200, await answer.text()
    for headers in (tracker.use(), {"Cookie": f"{COOKIE}={value}"}):
        async with tracker.http.get(f"{tracker.base}/v1/models", headers=headers) as answer:
            assert answer.status == 401


async def test_a_use_key_may_not_manage(tracker: Running) -> None:
    for method, path in (
        ("GET", "/api/nodes"),
        ("GET", "/api/settings/routing"),
        ("PUT", "/api/settings/routing"),
        ("POST", "/api/route/preview"),
        ("POST", "/api/tickets"),
        ("POST", "/api/invite"),
        ("POST", "/api/nodes/x/drain"),
        ("GET", "/api/accounts"),
    ):
        async with tracker.http.request(method, tracker.base + path, headers=tracker.use()) as answer:
            assert answer.status == 403, path
        async with tracker.http.request(method, tracker.base + path) as answer:
            assert answer.status == 401, path


async def test_weights_and_cost_model_are_set_live_per_tracker_and_per_model(tracker: Running) -> None:
    await tracker.node(name="alone", decode_ms=5.0)
    url = f"{tracker.base}/api/settings/routing"
    view = await tracker.get("/api/settings/routing")
    assert view["default"]["cost_model"] == "measured"
    change = {"default": {"weights": {"hop": 0.3}}, "models": {"TOY": {"cost_model": "weighted"}}}
    async with tracker.http.put(url, json=change, headers=tracker.admin()) as answer:
        view = await answer.json()
    assert view["models"]["toy"]["cost_model"] == "weighted"
    assert view["models"]["toy"]["weights"]["hop"] == 0.3
    models = (await tracker.get("/api/models"))["models"]
    assert models[0]["cost_model"] == "weighted"
    async with tracker.http.put(url, json={"models": {"toy": None}}, headers=tracker.admin()) as answer:
        assert (await answer.json())["models"] == {}
    refused: list[dict[str, Any]] = [
        {"default": {"weights": {"hop": -1}}},
        {"default": {"weights": {"banana": 1}}},
        {"default": {"cost_model": "magic"}},
        {"banana": 1},
        {"models": []},
    ]
    for bad in refused:
        async with tracker.http.put(url, json=bad, headers=tracker.admin()) as answer:
            assert answer.status == 400, bad
    assert (await tracker.get("/api/settings/routing"))["default"]["weights"]["hop"] == 0.3


async def test_settings_for_an_alias_are_those_of_its_model(tracker: Running) -> None:
    await tracker.node(name="alone", aliases=("nick",))
    url = f"{tracker.base}/api/settings/routing"
    change = {"models": {"Nick": {"cost_model": "weighted"}, "Later": {"weights": {"hop": 2.0}}}}
    async with tracker.http.put(url, json=change, headers=tracker.admin()) as answer:
        view = await answer.json()
        assert set(view["models"]) == {"toy", "later"}
        assert view["unserved"] == ["Later"]  # kept for the day it is there; a slip of the pen shows
    async with tracker.http.post(
        f"{tracker.base}/api/route/preview", json={"model": "nick"}, headers=tracker.admin()
    ) as answer:
        assert (await answer.json())["cost_model"] == "weighted"
    async with tracker.http.put(url, json={"models": {"nick": None}}, headers=tracker.admin()) as answer:
        assert set((await answer.json())["models"]) == {"later"}


async def test_the_weights_decide_the_next_call(tracker: Running) -> None:
    whole = await tracker.node(name="whole", decode_ms=40.0)
    await tracker.node(name="head", layers=(0, 14), decode_ms=1.0)
    await tracker.node(name="tail", layers=(15, 29), decode_ms=1.0)
    url = f"{tracker.base}/api/settings/routing"
    routes = []
    for hop in (0.0, 1000.0):
        change = {"default": {"cost_model": "weighted", "weights": {"hop": hop}}}
        async with tracker.http.put(url, json=change, headers=tracker.admin()) as answer:
            assert answer.status == 200
        routes.append((await tracker.chat()).headers["x-meshnet-route"])
    assert routes == ["head[0-14]>tail[15-29]", "whole[0-29]"]
    assert len(whole.seen) == 1


async def test_a_preview_explains_what_a_call_would_take(tracker: Running) -> None:
    await tracker.node(name="head", layers=(0, 14))
    await tracker.node(name="tail", layers=(15, 29))
    await tracker.node(name="whole", decode_ms=50.0)
    url = f"{tracker.base}/api/route/preview"
    async with tracker.http.post(
        url, json={"model": "toy", "prompt_tokens": 100, "alternatives": 2}, headers=tracker.admin()
    ) as answer:
        plan = await answer.json()
    assert [stage["start_layer"] for stage in plan["route"]["stages"]] == [0, 15]
    assert len(plan["standby"]["node_ids"]) == 1
    assert plan["explanation"]["why"]
    assert plan["explanation"]["candidates"][0]["terms"]
    for bad, status in (
        ({"model": "other"}, 404),
        ({"model": "toy", "prompt_tokens": -1}, 400),
        ({"model": "toy", "layer_range": [5, 1]}, 400),
        ({"model": "toy", "weights": {"hop": "x"}}, 400),
        ({"model": "toy", "banana": 1}, 400),
    ):
        async with tracker.http.post(url, json=bad, headers=tracker.admin()) as answer:
            assert answer.status == status, bad


async def test_a_placement_is_previewed_from_what_the_mesh_measured(tracker: Running) -> None:
    await tracker.node(name="fast", layers=(0, 14), decode_ms=1.0)
    await tracker.node(name="slow", layers=(15, 29), decode_ms=2.0)
    url = f"{tracker.base}/api/place/preview"
    async with tracker.http.post(url, json={"objective": "latency"}, headers=tracker.admin()) as answer:
        assert answer.status == 200, await answer.text()
        found = await answer.json()
    covered = [layer for s in found["stages"] for layer in range(s["start_layer"], s["end_layer"] + 1)]
    assert covered == list(range(30))
    assert found["why"]
    async with tracker.http.post(url, json={"nodes": ["nobody"]}, headers=tracker.admin()) as answer:
        assert answer.status == 404


async def test_tickets_for_direct_use_of_a_node(tracker: Running) -> None:
    node = await tracker.node(name="whole")
    async with tracker.http.post(
        f"{tracker.base}/api/tickets", json={"model": "toy", "nodes": ["whole"]}, headers=tracker.admin()
    ) as answer:
        made = await answer.json()
    assert node.welcome is not None
    key = Ed25519PublicKey.from_public_bytes(node.welcome.ticket_public_key)
    ticket = verify_ticket(made["ticket"], key, mesh_id=node.welcome.mesh_id, now_ms=0)
    assert [(s.node_id, s.start_layer, s.end_layer) for s in ticket.stages] == [(node.node_id, 0, 29)]
    assert ticket.expires_ms <= made["expires_ms"]


async def test_invitations_let_nodes_in_and_can_be_limited(tracker: Running) -> None:
    async with tracker.http.post(
        f"{tracker.base}/api/invite", json={"uses": 1, "expires_s": 60}, headers=tracker.admin()
    ) as answer:
        invitation = await answer.json()
    info = await tracker.get("/api/join-info")
    assert info["grpc_address"] == tracker.grpc
    assert info["mesh_id"] in invitation["join_link"]
    assert invitation["token"] in invitation["command"]
    first = WireNode(invitation["token"])
    tracker.nodes.append(first)
    await first.start(tracker.grpc)
    assert first.refused is None
    second = WireNode(invitation["token"])
    tracker.nodes.append(second)
    await second.start(tracker.grpc)
    await asyncio.wait_for(second.ended.wait(), 5)
    assert second.refused is not None
    assert second.refused.code == "bad_token"


async def test_models_say_what_is_missing_and_how_to_fill_it(tracker: Running) -> None:
    await tracker.node(layers=(0, 9))
    model = (await tracker.get("/api/models", admin=False))["models"][0]
    assert not model["complete"]
    assert model["gaps"] == [[10, 29]]
    assert model["replicas"] == [1] * 10 + [0] * 20
    assert "--layers 10-29" in model["fill_command"]
    assert tracker.base in model["fill_command"]


async def test_every_answer_has_a_strict_policy_and_no_cors(tracker: Running) -> None:
    for path in ("/healthz", "/dashboard", "/api/nodes", "/nowhere"):
        async with tracker.http.get(tracker.base + path, headers={"Origin": "http://evil.example"}) as answer:
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-request-id"]
            assert "access-control-allow-origin" not in answer.headers


async def test_cors_where_it_is_configured(start: Start) -> None:
    tracker = await start(cors_origins=("https://app.example",))
    await tracker.node()
    url = f"{tracker.base}/v1/chat/completions"
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    async with tracker.http.options(url, headers=ask) as answer:
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
    answer = await tracker.chat(headers={"Origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    answer = await tracker.chat(headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


async def test_the_dashboard_serves_built_files_and_nothing_else(tmp_path: Path) -> None:
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    (tmp_path / "dist" / "assets").mkdir(parents=True)
    (tmp_path / "dist" / "index.html").write_text("<html>page</html>")
    (tmp_path / "dist" / "assets" / "a.js").write_text("1")
    (tmp_path / "secret.txt").write_text("secret")
    client = TestClient(Starlette(routes=Pages(tmp_path / "dist").routes()))
    assert "script-src 'self'" in client.get("/dashboard").headers["content-security-policy"]
    assert client.get("/dashboard/calls/call-1").text == "<html>page</html>"
    assert "immutable" in client.get("/dashboard/assets/a.js").headers["cache-control"]
    assert "secret" not in client.get("/dashboard/..%2Fsecret").text
    missing = TestClient(Starlette(routes=Pages(tmp_path / "none").routes())).get("/dashboard")
    assert missing.status_code == 503
    assert "make web" in missing.text


def test_credentials_hold_for_one_node_of_one_mesh() -> None:
    made = make_credential(b"s" * 32, "mesh", "node")
    assert check_credential(b"s" * 32, "mesh", "node", made)
    for secret, mesh, node in (
        (b"t" * 32, "mesh", "node"),
        (b"s" * 32, "m", "node"),
        (b"s" * 32, "mesh", "n"),
    ):
        assert not check_credential(secret, mesh, node, made)


# ------------------------------------------------------------------ the command


async def run_tracker(*arguments: str, env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "meshnet",
        "tracker",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )


async def test_the_command_prints_secrets_once_and_ends_on_sigterm(tmp_path: Path) -> None:
    import json

    arguments = ("--port", "0", "--grpc-port", "0", "--data", str(tmp_path / "d"), "--json")
    keys = []
    for _ in range(2):
        process = await run_tracker(*arguments)
        assert process.stdout is not None
        line = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        keys.append("api_key" in line and "join_token" in line and "#key=" in line["dashboard_url"])
        assert line["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 15) == 0
        assert await process.stdout.read() == b""
    assert keys == [True, False]


async def test_a_port_in_use_is_one_clear_sentence(tracker: Running, tmp_path: Path) -> None:
    port = tracker.base.rsplit(":", 1)[1]
    grpc_port = tracker.grpc.rsplit(":", 1)[1]
    for options, wanted in (
        (("--port", port, "--grpc-port", "0"), f"127.0.0.1:{port}"),
        (("--port", "0", "--grpc-port", grpc_port), f"127.0.0.1:{grpc_port}"),
    ):
        process = await run_tracker(*options, "--data", str(tmp_path / "other"))
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1
        last = stderr.decode().strip().splitlines()[-1]
        assert wanted in last
        assert "give another" in last
        assert "Traceback" not in stderr.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="parents are watched through /proc-like means on Linux")
async def test_the_tracker_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys\n"
        "env = {**os.environ, 'MESHNET_PARENT_PID': str(os.getpid())}\n"
        "ports = ['--port', '0', '--grpc-port', '0', '--json']\n"
        "command = [sys.executable, '-m', 'meshnet', 'tracker', *ports, '--data', sys.argv[1]]\n"
        "child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path / "d"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    await parent.wait()
    async with asyncio.timeout(15):
        while _alive(pid):
            await asyncio.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
