"""JSON schemas of what the API answers with (docs/api.md, section Values)."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
TEXT: Schema = {"type": ["string", "null"]}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
MAYBE_INTEGER: Schema = {"type": ["integer", "null"]}
MAYBE_NUMBER: Schema = {"type": ["number", "null"]}
OBJECT: Schema = {"type": "object"}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def record(optional: tuple[str, ...] = (), /, **fields: Schema) -> Schema:
    """An object whose fields are all there, but for the optional ones."""
    return {
        "type": "object",
        "properties": fields,
        "required": [name for name in fields if name not in optional],
    }


PAIR: Schema = {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}
STAGE = record(node_id=STRING, start_layer=INTEGER, end_layer=INTEGER)
ROUTE = record(
    model=STRING,
    window={"anyOf": [PAIR, {"type": "null"}]},
    node_ids=array(STRING),
    stages=array(STAGE),
    hops=INTEGER,
    cost_ms=MAYBE_NUMBER,
)
WEIGHTS = record(latency=NUMBER, load=NUMBER, capacity=NUMBER, hop=NUMBER, prompt=NUMBER)
ROUTING = record(cost_model=one_of("measured", "weighted"), weights=WEIGHTS)
OPENAI_MODEL = record(
    id=STRING, object=one_of("model"), created=INTEGER, owned_by=STRING, aliases=array(STRING)
)
TIMES = record(
    decode_ms_per_layer=NUMBER, prefill_ms_per_token_layer=NUMBER, embed_ms=NUMBER, output_ms=NUMBER
)
SHARD = record(
    model=STRING,
    fingerprint=STRING,
    start_layer=INTEGER,
    end_layer=INTEGER,
    model_layers=INTEGER,
    entry_layers=array(INTEGER),
    mid_shard_entry=FLAG,
    state=STRING,
    progress=NUMBER,
    free_slots=INTEGER,
    n_slots=INTEGER,
    n_ctx=INTEGER,
    memory_bytes=INTEGER,
    fetch={
        "anyOf": [
            record(done_bytes=INTEGER, total_bytes=INTEGER, bytes_per_s=NUMBER, source=STRING),
            {"type": "null"},
        ]
    },
    times=TIMES,
)
NODE = record(
    node_id=STRING,
    name=STRING,
    ready=FLAG,
    alive=FLAG,
    state=one_of("joining", "loading", "ready", "draining", "suspect", "lost"),
    hardware=record(name=STRING, os=STRING, cores=INTEGER, memory_bytes=INTEGER, device=STRING),
    http_url=STRING,
    grpc_address=STRING,
    served_layers=array(PAIR),
    shards=array(SHARD),
    latency_ms=NUMBER,
    current_load=NUMBER,
    capacity_score=NUMBER,
    memory_free_bytes=INTEGER,
    memory_limit_bytes=INTEGER,
    numerics_class=STRING,
    versions=record(meshnet=STRING, engine=STRING),
    trust=NUMBER,
    served_requests=INTEGER,
    failed_requests=INTEGER,
    on_battery=FLAG,
    placed=FLAG,
    joined_ms=INTEGER,
    last_seen_ms=INTEGER,
    problems=array(STRING),
)
MODEL = record(
    id=STRING,
    name=STRING,
    aliases=array(STRING),
    fingerprint=STRING,
    arch=STRING,
    layers=INTEGER,
    n_ctx=INTEGER,
    quantisation=STRING,
    bytes=INTEGER,
    complete=FLAG,
    gaps=array(PAIR),
    replicas=array(INTEGER),
    tools=FLAG,
    cost_model=one_of("measured", "weighted"),
    default=FLAG,
    fill_command=TEXT,
)
CALL = record(
    ("timeline",),
    tracker=TEXT,
    id=STRING,
    request_id=STRING,
    model=STRING,
    key=STRING,
    kind=one_of("chat", "completion"),
    stream=FLAG,
    phase=one_of(
        "accepted",
        "queued",
        "route_selected",
        "connected",
        "prefill",
        "generating",
        "complete",
        "cancelled",
        "failed",
    ),
    stages=array(
        record(
            node_id=STRING,
            name=STRING,
            start_layer=INTEGER,
            end_layer=INTEGER,
            compute_ms=NUMBER,
            queue_ms=NUMBER,
            link_ms=NUMBER,
            tokens=INTEGER,
        )
    ),
    prompt_tokens=INTEGER,
    prefill_done=INTEGER,
    output_tokens=INTEGER,
    tokens_per_second=NUMBER,
    ttft_ms=MAYBE_NUMBER,
    queue_position=MAYBE_INTEGER,
    accepted_ms=INTEGER,
    ended_ms=MAYBE_INTEGER,
    elapsed_ms=NUMBER,
    finish_reason=TEXT,
    error={"anyOf": [record(code=STRING, message=STRING), {"type": "null"}]},
    reroutes=INTEGER,
    degraded=FLAG,
    numerics_changed=FLAG,
    timeline=array(record(ms=NUMBER, event=STRING, detail=OBJECT)),
)
CONSOLE_EVENT = record(
    ("call_id",), seq=INTEGER, ms=INTEGER, level=STRING, event=STRING, call_id=STRING, line=STRING
)
FIGURES: dict[str, Schema] = {
    "samples": INTEGER,
    "excluded": OBJECT,
    "decode_tokens_per_s": MAYBE_NUMBER,
    "prefill_tokens_per_s": MAYBE_NUMBER,
    "decode_ms_per_layer": MAYBE_NUMBER,
    "prefill_ms_per_token_layer": MAYBE_NUMBER,
    "ttft_ms": MAYBE_NUMBER,
    "link_ms": MAYBE_NUMBER,
    "success_rate": MAYBE_NUMBER,
}

SCHEMAS: dict[str, Schema] = {
    "Object": OBJECT,
    "Error": record(error=record(message=STRING, type=STRING, code=STRING, param=TEXT)),
    "Health": record(status=one_of("ok"), version=STRING),
    "Ready": record(ready=FLAG, models=array(STRING), missing=OBJECT),
    "OpenAiModel": OPENAI_MODEL,
    "OpenAiModels": record(object=one_of("list"), data=array(OPENAI_MODEL)),
    "Answer": record(
        id=STRING,
        object=one_of("chat.completion", "text_completion"),
        created=INTEGER,
        model=STRING,
        choices=array(OBJECT),
        usage=record(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER),
        system_fingerprint=STRING,
    ),
    "JoinInfo": record(
        mesh_id=STRING,
        name=STRING,
        grpc_address=STRING,
        version=STRING,
        protocol_version=INTEGER,
        trackers=array(STRING),
        tls=FLAG,
        ca=STRING,
    ),
    "Enrolled": record(certificate=STRING, ca=STRING, mac=STRING),
    "Session": record(scope=one_of("use", "admin"), name=STRING),
    "SignedOut": record(signed_out=FLAG),
    "Node": NODE,
    "Nodes": record(nodes=array(ref("Node"))),
    "Model": MODEL,
    "Models": record(models=array(ref("Model"))),
    "Call": CALL,
    "Calls": record(calls=array(ref("Call"))),
    "Cancelled": record(id=STRING, phase=STRING),
    "ConsoleEvent": CONSOLE_EVENT,
    "Console": record(events=array(ref("ConsoleEvent")), next=INTEGER),
    "Plan": record(
        model=STRING,
        cost_model=one_of("measured", "weighted"),
        weights=WEIGHTS,
        route=ROUTE,
        alternatives=array(ROUTE),
        standby={"anyOf": [ROUTE, {"type": "null"}]},
        explanation=OBJECT,
    ),
    "Placement": record(
        model=STRING,
        objective=one_of("throughput", "latency"),
        stages=array(record(node_id=STRING, start_layer=INTEGER, end_layer=INTEGER, ms_per_token=NUMBER)),
        shards=OBJECT,
        loads=OBJECT,
        drops=OBJECT,
        cuts=array(INTEGER),
        slowest_ms=NUMBER,
        latency_ms=NUMBER,
        moved_layers=INTEGER,
        exact=FLAG,
        why=array(STRING),
    ),
    "LoadedModel": record(id=STRING),
    "UnloadedModel": record(id=STRING, held_by=array(STRING)),
    "DefaultModel": record(default=STRING),
    "Alias": record(alias=STRING, model=TEXT),
    "PlacementState": record(
        models=array(
            record(
                id=STRING,
                state=one_of(
                    "reading",
                    "placing",
                    "loading",
                    "ready",
                    "waiting",
                    "evicted",
                    "off",
                    "incomplete",
                    "failed",
                ),
                asked=FLAG,
                progress=NUMBER,
                reason=TEXT,
                why=array(STRING),
            )
        ),
        names={"type": "object", "additionalProperties": STRING},
        moves=array(record(node=STRING, action=one_of("load", "unload"), model=STRING, layers=PAIR)),
        default=STRING,
        aliases={"type": "object", "additionalProperties": STRING},
    ),
    "RoutingSettings": record(default=ROUTING, models={"type": "object", "additionalProperties": ROUTING}),
    "Statistics": record(
        window_ms=INTEGER,
        min_output_tokens=INTEGER,
        nodes=array(record((), node_id=STRING, model=STRING, trust=NUMBER, **FIGURES)),
        routes=array(record((), model=STRING, stages=array(STAGE), **FIGURES)),
    ),
    "Ticket": record(ticket=STRING, call_id=STRING, route=STRING, expires_ms=INTEGER),
    "Invitation": record(join_link=STRING, command=STRING, token=STRING, expires_ms=INTEGER),
}
