"""An independent judge: llama.cpp's own server, from the same wheel, gives the same greedy answers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
from support.mesh import Demo, answer_text, chat

from meshnet.models.store import Store

PROMPTS = (
    "What is the capital of France?",
    "Write three sentences about the sea.",
    "Wie heißt du? 🙂",
    "List the planets. " + "Take your time. " * 60,
)
ROUNDING = 1.0
"""Logits that differ by less may change places when kernels round differently."""
SERVE = """
import json, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 2048, 1, False, 2
server = xllamacpp.Server(params)
for text in json.loads(sys.argv[2]):
    answer = server.handle_chat_completions(
        {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 48,
         "cache_prompt": False}
    )
    answer = json.loads(answer) if isinstance(answer, str) else answer
    said = answer["choices"][0]["message"]["content"]
    print("ANSWER " + json.dumps({"text": said, "usage": answer["usage"]}))
"""


@pytest.fixture(scope="module")
def reference() -> dict[str, dict[str, Any]]:
    """Text and usage per prompt from the server, which runs in a process of its own."""
    model = Store().open("smollm2")
    path = Store().resolve("smollm2").path
    assert model.n_layers == 30
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(path), json.dumps(PROMPTS)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return dict(zip(PROMPTS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("text", PROMPTS, ids=range(len(PROMPTS)))
def test_the_split_demo_says_what_llama_cpps_server_says(
    demo: Demo, reference: dict[str, dict[str, Any]], text: str
) -> None:
    """Same text, or they part at a near tie: the server feeds prompts in other chunks, and rounds so."""
    with demo.client() as client:
        response = chat(client, text, max_tokens=48, logprobs=True, top_logprobs=2)
    ours, theirs = answer_text(response), reference[text]["text"]
    assert response.json()["usage"]["prompt_tokens"] == reference[text]["usage"]["prompt_tokens"]
    if ours == theirs:
        return
    common = next(i for i, pair in enumerate(itertools.zip_longest(ours, theirs)) if pair[0] != pair[1])
    assert common > 20
    said = 0
    for token in response.json()["choices"][0]["logprobs"]["content"]:
        said += len(token["token"])
        if said > common:
            first, second = (alternative["logprob"] for alternative in token["top_logprobs"])
            assert first - second < ROUNDING
            return
    pytest.fail("they part after the last token")
