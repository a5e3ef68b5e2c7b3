"""`meshnet route`: from a file of states, and against a server that answers as the tracker does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from meshnet.commands.route import route
from meshnet.routing import NodeState, RoutingRequest, WeightedCost, plan

STATES = [
    {
        "node_id": "gpu",
        "latency_ms": 11.9,
        "current_load": 0.98,
        "capacity_score": 10,
        "served_layers": [[0, 3]],
    },
    {
        "node_id": "mini",
        "latency_ms": 13.8,
        "current_load": 0.1,
        "capacity_score": 10,
        "served_layers": [[0, 3], [4, 7]],
    },
    {
        "node_id": "laptop",
        "latency_ms": 4.7,
        "current_load": 0.05,
        "capacity_score": 10,
        "served_layers": [[8, 11]],
    },
]


def run(*arguments: object, key: str = "") -> Result:
    app = typer.Typer()
    app.command("route")(route)
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"MESHNET_API_KEY": key})


@pytest.fixture
def states_file(tmp_path: Path) -> Path:
    path = tmp_path / "states.json"
    path.write_text(json.dumps(STATES))
    return path


class TestFile:
    def test_the_worked_example(self, states_file: Path) -> None:
        result = run("--model", "ncm", "--states", states_file)
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert lines[0] == "route    mini (0-7) -> laptop (8-11)"
        assert lines[1] == "total    71.5 ms (weighted)"
        assert "is the cheapest complete route" in lines[2]
        assert lines[3] == "standby  none"

    def test_explain_shows_every_term(self, states_file: Path) -> None:
        result = run("--model", "ncm", "--states", states_file, "--prompt-tokens", 2048, "--explain")
        assert result.exit_code == 0
        assert "alternative: gpu (0-3) -> mini (4-7) -> laptop (8-11)" in result.stdout
        assert "13.800 ms  latency        mini (0-7)" in result.stdout
        assert "20.000 ms  prompt         2048 tokens" in result.stdout
        assert "91.500 ms  total" in result.stdout

    def test_json_is_the_plan(self, states_file: Path) -> None:
        result = run("--model", "ncm", "--states", states_file, "--layers", "8-11", "--json")
        states = [NodeState.from_dict(state) for state in STATES]
        expected = plan(RoutingRequest((8, 11)), states, WeightedCost(), model="ncm")
        assert json.loads(result.stdout) == expected.to_dict()
        assert json.loads(result.stdout)["explanation"]["excluded"][0]["node_id"] == "gpu"

    def test_weights(self, states_file: Path) -> None:
        weights = "latency=2,load=1.5,capacity=0.1,hop=0.05,prompt=0.2"
        result = run("--model", "ncm", "--states", states_file, "--weights", weights, "--json")
        assert json.loads(result.stdout)["route"]["cost_ms"] == pytest.approx(66.75)

    def test_measured_states(self, tmp_path: Path) -> None:
        data = {
            "states": STATES,
            "times": {
                state["node_id"]: {"decode_ms_per_layer": 1.0, "prefill_ms_per_token_layer": 0.1}
                for state in STATES
            },
            "links": [{"from": "mini", "to": "laptop", "ms": 0.5, "bytes_per_s": 1e8}],
            "token_bytes": 2304,
        }
        path = tmp_path / "mesh.json"
        path.write_text(json.dumps(data))
        result = run("--model", "m", "--states", path, "--expect-tokens", 10, "--explain")
        assert result.exit_code == 0, result.stderr
        assert "130.0 ms (measured)" in result.stdout
        assert "5.000 ms  link back      laptop -> mini x 10" in result.stdout
        weighted = run("--model", "m", "--states", path, "--cost-model", "weighted")
        assert "71.5 ms (weighted)" in weighted.stdout
        del data["token_bytes"]
        path.write_text(json.dumps(data))
        assert run("--model", "m", "--states", path).exit_code == 2

    def test_no_route(self, states_file: Path) -> None:
        result = run("--model", "ncm", "--states", states_file, "--layers", "0-12")
        assert result.exit_code == 3
        assert result.stdout == ""
        assert result.stderr.startswith(
            "meshnet route: no route for model 'ncm' over layers 0-12: nothing goes on from layer 12"
        )
        assert result.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--layers", "7-3"], "layer_range"),
            (["--layers", "seven"], "--layers must be A-B"),
            (["--weights", "speed=3"], "unknown weight 'speed'"),
            (["--weights", "hop"], "--weights must be name=number"),
            (["--weights", "hop=fast"], "hop must be a number"),
            (["--weights", "hop=nan"], "weights.hop must be a finite number"),
            (["--prompt-tokens", "-1"], "prompt_tokens must be at least 0"),
            (["--cost-model", "guess"], "--cost-model must be measured or weighted"),
            (["--cost-model", "measured"], "measured time needs 'times'"),
            (["--tracker", "http://localhost:1"], "--states and --tracker cannot be given together"),
        ],
    )
    def test_bad_input(self, states_file: Path, arguments: list[str], sentence: str) -> None:
        result = run("--model", "m", "--states", states_file, *arguments)
        assert result.exit_code == 2
        assert sentence in result.stderr
        assert result.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            ("{", "is not JSON"),
            ("3", "must hold a list of states"),
            ('{"states": [], "speed": 3}', "unknown key 'speed'"),
            ('[{"latency_ms": 3}]', "node_id is missing"),
            ('[{"node_id": "a", "latency_ms": NaN}]', "latency_ms must be a finite number"),
            ('{"states": [], "times": [], "token_bytes": 1}', "times must be an object"),
            ('{"states": [], "times": {}, "token_bytes": 1, "links": [3]}', "a link has from, to"),
            (
                '{"states": [], "times": {}, "token_bytes": 1,'
                ' "links": [{"from": [], "to": "b", "ms": 1, "bytes_per_s": 1}]}',
                "from and to must be node ids",
            ),
        ],
    )
    def test_bad_files(self, tmp_path: Path, content: str, sentence: str) -> None:
        path = tmp_path / "bad.json"
        path.write_text(content)
        result = run("--model", "m", "--states", path)
        assert result.exit_code == 2
        assert sentence in result.stderr

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        result = run("--model", "m", "--states", tmp_path / "none.json")
        assert result.exit_code == 2
        assert "cannot be read" in result.stderr


class Answers(ThreadingHTTPServer):
    """Answers every request with `status` and `answer`, and keeps what it was sent."""

    status = 200
    answer: Any = None
    asked: dict[str, Any]


@pytest.fixture
def server() -> Iterator[Answers]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            answers.asked = {
                "path": self.path,
                "key": self.headers["authorization"],
                "body": json.loads(self.rfile.read(length)),
            }
            content = json.dumps(answers.answer).encode()
            self.send_response(answers.status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with Answers(("127.0.0.1", 0), Handler) as answers:
        thread = threading.Thread(target=answers.serve_forever)
        thread.start()
        yield answers
        answers.shutdown()
        thread.join()


class TestTracker:
    def url(self, server: Answers) -> str:
        return f"http://127.0.0.1:{server.server_address[1]}"

    def test_the_request_and_the_answer(self, server: Answers) -> None:
        states = [NodeState.from_dict(state) for state in STATES]
        server.answer = plan(RoutingRequest(), states, WeightedCost(), model="m").to_dict()
        options = [
            "--layers",
            "0-11",
            "--prompt-tokens",
            5,
            "--weights",
            "hop=0.5",
            "--cost-model",
            "weighted",
        ]
        result = run("--model", "m", "--tracker", self.url(server), *options, key="secret")
        assert result.exit_code == 0, result.stderr
        assert "mini (0-7) -> laptop (8-11)" in result.stdout
        assert server.asked == {
            "path": "/api/route/preview",
            "key": "Bearer secret",
            "body": {
                "model": "m",
                "layer_range": [0, 11],
                "prompt_tokens": 5,
                "expected_tokens": 256,
                "weights": {"hop": 0.5},
                "cost_model": "weighted",
                "alternatives": 3,
            },
        }

    @pytest.mark.parametrize(
        ("status", "code", "exit_code"),
        [(503, "no_route", 3), (400, "invalid", 2), (404, "model_not_found", 2), (401, "invalid_api_key", 1)],
    )
    def test_refusals(self, server: Answers, status: int, code: str, exit_code: int) -> None:
        server.status, server.answer = status, {"error": {"message": "so it is", "code": code}}
        result = run("--model", "m", "--tracker", self.url(server), "--api-key", "k")
        assert result.exit_code == exit_code
        assert result.stderr == "meshnet route: so it is\n"

    def test_an_error_that_is_not_the_trackers(self, server: Answers) -> None:
        server.status, server.answer = 502, "bad gateway"
        result = run("--model", "m", "--tracker", self.url(server), "--api-key", "k")
        assert result.exit_code == 1
        assert "answered 502" in result.stderr

    def test_nobody_is_there(self) -> None:
        result = run("--model", "m", "--tracker", "http://127.0.0.1:1", "--api-key", "k")
        assert result.exit_code == 1
        assert "the tracker at http://127.0.0.1:1 gave no answer" in result.stderr

    def test_a_key_is_needed(self) -> None:
        result = run("--model", "m", "--tracker", "http://127.0.0.1:1")
        assert result.exit_code == 2
        assert "MESHNET_API_KEY" in result.stderr

    def test_an_address_that_is_no_url(self) -> None:
        result = run("--model", "m", "--tracker", "localhost", "--api-key", "k")
        assert result.exit_code == 2
        assert "--tracker must be an http:// or https:// URL" in result.stderr
