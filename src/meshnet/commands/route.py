"""`meshnet route`: a dry run of the router, over a file of states or over a live mesh. Reserves nothing."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from meshnet.routing import (
    CostModel,
    Link,
    MeasuredCost,
    NodeState,
    NodeTimes,
    NoRouteAvailable,
    RouteWeights,
    RoutingRequest,
    WeightedCost,
    plan,
)

DEFAULT_TRACKER = "http://127.0.0.1:8080"
PREVIEW_SECONDS = 30.0
BAD_INPUT, NO_ROUTE, NO_ANSWER = 2, 3, 1
FILE_KEYS = ("states", "times", "links", "token_bytes", "chunk_tokens", "cached_tokens", "excluded")


def route(
    model: Annotated[
        str, typer.Option("--model", help="The model's name: a label, or one the tracker serves.")
    ],
    layers: Annotated[str, typer.Option("--layers", help="Layers A-B, both inclusive; without: all.")] = "",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of the prompt.")] = 0,
    expect_tokens: Annotated[int, typer.Option("--expect-tokens", help="Tokens the answer will have.")] = 256,
    weights: Annotated[
        str,
        typer.Option("--weights", help="latency=2,load=1.5,capacity=0.1,hop=0.05,prompt=0.2 (any of them)."),
    ] = "",
    states: Annotated[Path | None, typer.Option("--states", help="A JSON file of node states.")] = None,
    tracker: Annotated[
        str, typer.Option("--tracker", help=f"URL of a live tracker [{DEFAULT_TRACKER}].")
    ] = "",
    cost_model: Annotated[
        str, typer.Option("--cost-model", help="measured or weighted; without: what the tracker or file has.")
    ] = "",
    alternatives: Annotated[int, typer.Option("--alternatives", help="How many next routes to show.")] = 3,
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="MESHNET_API_KEY", help="An admin key of the tracker.")
    ] = "",
    explain: Annotated[bool, typer.Option("--explain", help="Every candidate with every term.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON, as the API gives it.")] = False,
) -> None:
    """Show which route a call would take, and why. Exits with 3 when there is none, 2 on bad input."""
    if states is not None and tracker:
        _stop(BAD_INPUT, "--states and --tracker cannot be given together")
    if cost_model not in ("", "measured", "weighted"):
        _stop(BAD_INPUT, f"--cost-model must be measured or weighted, got {cost_model!r}")
    try:
        request = RoutingRequest(_layers(layers), prompt_tokens, expect_tokens)
        chosen = _weights(weights)
        if states is not None:
            found = _from_file(states, request, chosen, cost_model, model, alternatives)
        else:
            found = _from_tracker(
                tracker or DEFAULT_TRACKER, api_key, request, chosen, cost_model, model, alternatives
            )
    except ValueError as error:
        _stop(BAD_INPUT, str(error))
    except NoRouteAvailable as error:
        _stop(NO_ROUTE, str(error))
    sys.stdout.write((json.dumps(found) if as_json else rendered(found, explain)) + "\n")


def rendered(found: Mapping[str, Any], explain: bool) -> str:
    """A plan's JSON form as text for a terminal."""
    explanation = found["explanation"]
    standby = found["standby"]
    rows = [
        ("route", _stages(found["route"])),
        ("total", f"{found['route']['cost_ms']:.1f} ms ({explanation['cost_model']})"),
        ("why", explanation["why"]),
        ("standby", _stages(standby) if standby else "none"),
    ]
    lines = [f"{name:<9}{text}" for name, text in rows]
    if not explanation["exact"]:
        lines.append("         (the mesh is too large to prove that nothing is faster)")
    if explain:
        for candidate in explanation["candidates"]:
            lines += ["", f"{', '.join(candidate['roles'])}: {_stages(candidate['route'])}"]
            lines += [f"  {t['ms']:>12.3f} ms  {t['kind']:<15}{t['about']}" for t in candidate["terms"]]
            lines.append(f"  {candidate['total_ms']:>12.3f} ms  total")
        if explanation["excluded"]:
            lines += ["", "left out:"]
            lines += [f"  {left['node_id']} {left['reason']}" for left in explanation["excluded"]]
    return "\n".join(lines)


def _stages(of: Mapping[str, Any]) -> str:
    parts = [f"{s['node_id']} ({s['start_layer']}-{s['end_layer']})" for s in of["stages"]]
    return " -> ".join(parts)


def _stop(code: int, sentence: str) -> NoReturn:
    sys.stderr.write(f"meshnet route: {sentence}\n")
    raise typer.Exit(code)


def _layers(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None:
        raise ValueError(f"--layers must be A-B with A <= B, for example 0-29, got {text!r}")
    return int(match[1]), int(match[2])


def _weights(text: str) -> dict[str, float]:
    """The weights that were named; ValueError on unknown names and bad numbers."""
    named: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--weights must be name=number,..., got {part!r}")
        try:
            named[name.strip()] = float(value)
        except ValueError:
            raise ValueError(f"--weights: {name.strip()} must be a number, got {value!r}") from None
    RouteWeights.from_dict(named)
    return named


# ---------------------------------------------------------------- from a file


def _from_file(
    path: Path,
    request: RoutingRequest,
    weights: Mapping[str, float],
    cost_model: str,
    model: str,
    alternatives: int,
) -> dict[str, object]:
    """Plans over the states in a file: a list of node states, or an object with `states` and measurements."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--states: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--states: {path} is not JSON: {error}") from error
    if isinstance(data, list):
        data = {"states": data}
    if not isinstance(data, dict) or not isinstance(data.get("states"), list):
        wanted = "a list of states, or an object with a list 'states'"
        raise ValueError(f"--states: {path} must hold {wanted}")  # noqa: TRY004 - bad input
    unknown = sorted(set(data) - set(FILE_KEYS))
    if unknown:
        raise ValueError(
            f"--states: {path} has the unknown key {unknown[0]!r}; known are {', '.join(FILE_KEYS)}"
        )
    cost: CostModel = WeightedCost(RouteWeights.from_dict(weights))
    if cost_model == "measured" or (not cost_model and "times" in data):
        cost = _measured(data)
    return plan(
        request,
        [NodeState.from_dict(state) for state in data["states"]],
        cost,
        alternatives=alternatives,
        model=model,
        excluded=_object(data, "excluded"),
        cached_tokens=_object(data, "cached_tokens"),
    ).to_dict()


def _measured(data: Mapping[str, Any]) -> MeasuredCost:
    for needed in ("times", "token_bytes"):
        if needed not in data:
            raise ValueError(f"--states: measured time needs {needed!r} in the file (see docs/routing.md)")
    times = {node: NodeTimes.from_dict(value) for node, value in _object(data, "times").items()}
    links = {}
    for link in data.get("links", []):
        if not isinstance(link, dict) or set(link) != {"from", "to", "ms", "bytes_per_s"}:
            raise ValueError(f"links: a link has from, to, ms and bytes_per_s, got {link!r}")
        if not isinstance(link["from"], str) or not isinstance(link["to"], str):
            raise ValueError(f"links: from and to must be node ids, got {link!r}")  # noqa: TRY004 - bad input
        links[link["from"], link["to"]] = Link(link["ms"], link["bytes_per_s"])
    return MeasuredCost(times, links, data["token_bytes"], data.get("chunk_tokens", 256))


def _object(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        wanted = "an object of node ids and values"
        raise ValueError(f"{key} must be {wanted}, got {value!r}")  # noqa: TRY004 - bad input
    return value


# ---------------------------------------------------------------- from a live tracker


def _from_tracker(
    url: str,
    api_key: str,
    request: RoutingRequest,
    weights: Mapping[str, float],
    cost_model: str,
    model: str,
    alternatives: int,
) -> dict[str, object]:
    """Asks POST {url}/api/route/preview. What the tracker refuses ends the command with its own sentence."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--tracker must be an http:// or https:// URL, got {url!r}")
    if not api_key:
        raise ValueError("a tracker needs a key: give --api-key or set MESHNET_API_KEY")
    body: dict[str, object] = {
        "model": model,
        "prompt_tokens": request.prompt_tokens,
        "expected_tokens": request.expected_tokens,
        "alternatives": alternatives,
    }
    if request.layer_range is not None:
        body["layer_range"] = list(request.layer_range)
    if weights:
        body["weights"] = dict(weights)
    if cost_model:
        body["cost_model"] = cost_model
    asked = urllib.request.Request(  # noqa: S310 - the scheme is checked above
        f"{url.rstrip('/')}/api/route/preview",
        data=json.dumps(body).encode(),
        headers={"authorization": f"Bearer {api_key}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=PREVIEW_SECONDS) as answer:  # noqa: S310
            found: dict[str, object] = json.loads(answer.read())
            return found
    except urllib.error.HTTPError as error:
        _refused(url, error)
    except (OSError, ValueError) as error:
        _stop(NO_ANSWER, f"the tracker at {url} gave no answer: {getattr(error, 'reason', error)}")


def _refused(url: str, error: urllib.error.HTTPError) -> NoReturn:
    message, code = f"the tracker at {url} answered {error.code}", ""
    try:
        told = json.loads(error.read())["error"]
        message, code = str(told["message"]), str(told.get("code"))
    except (ValueError, KeyError, TypeError, OSError):
        pass
    if code == "no_route":
        _stop(NO_ROUTE, message)
    _stop(BAD_INPUT if error.code in (400, 404, 409, 422) else NO_ANSWER, message)
