"""Chat templates: what Hugging Face's templates use works, and a hostile one is stopped in time."""

from __future__ import annotations

import datetime
import time

import pytest

from meshnet.engine.template import DEADLINE_S, ChatTemplate, TemplateError
from meshnet.engine.tokenizer import Tokenizer
from meshnet.models.gguf import ModelFile

HI = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "é<&>"},
    {"role": "assistant", "content": "ok"},
]


def test_the_real_models_template(smollm2: ModelFile, tokenizer: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    template = ChatTemplate(smollm2.chat_template, tokenizer)
    assert template.render(TALK, add_generation_prompt=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\né<&><|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n"
    )
    assert template.render(HI).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert template.render(HI).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert not template.has_tools


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<|im_start|>be brief<|im_end|>"),
        ("{{ {'b': 'é<', 'a': [1]} | tojson }}", '{"b": "é<", "a": [1]}'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        (
            "{% for m in messages %}{{ loop.index ~ loop.length }}{% if loop.last %}!{% endif %}{% endfor %}",
            "132333!",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
            "system",
        ),
        (
            "{% for m in messages %}{% if loop.index0 %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
            "system",
        ),
        (
            "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}",
            "3",
        ),
        ("{{ messages | map(attribute='role') | join(', ') }}", "system, user, assistant"),
        ("{{ messages | join('|', attribute='role') }}", "system|user|assistant"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages[1:] | length ~ '-' ~ 'x' * 3 }}", "2-xxx"),
        ("{{ '%s=%02d' % ('a', 7) }}{{ '{}'.format(1) }}", "a=071"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].role) }}", "<system>"),
        ("{% if tools %}T{% else %}none{% endif %}", "none"),
        ("{%- if true -%}\n  a\n{%- endif %}", "a"),
        ("{% if thinking is defined and thinking %}on{% endif %}", "on"),
        ("{{ messages[0].missing is defined }}{{ messages[0].get('missing', 4) }}", "False4"),
    ],
)
def test_what_templates_use(tokenizer: Tokenizer, source: str, expected: str) -> None:
    template = ChatTemplate(source, tokenizer)
    assert template.render(TALK, variables={"thinking": True}) == expected


def test_the_date(tokenizer: Tokenizer) -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", tokenizer).render(HI) == str(datetime.datetime.now().year)


def test_tools_are_found_and_rendered(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", tokenizer)
    assert template.has_tools
    assert template.render(HI, tools=[{"name": "clock"}]) == '{"name": "clock"}'
    assert template.render(HI, tools=[]) == ""


def test_a_template_can_refuse(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", tokenizer).render(HI)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "must not"),
        ("{{ messages.append(1) }}", "must not"),
        ("{{ messages[0].update({'role': 'x'}) }}", "must not"),
        ("{{ cycler.__init__.__globals__ }}", "must not"),
        ("{{ 'a' * 100000000 }}", "larger"),
        (
            "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "larger",
        ),
        (
            "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "larger",
        ),
        (
            "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "larger",
        ),
        ("{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}", "longer"),
        ("{{ (['a' * 1000000] * 1000) | join }}", "larger"),
        ("{{ 'a'.center(1000000000) }}", "size of 1000000000"),
        ("{{ 'a' | center(1000000000) }}", "size of 1000000000"),
        ("{{ '{:1000000000}'.format(1) }}", "width"),
        ("{{ '%1000000000d' % 1 }}", "width"),
        ("{{ '%*d' % (1000000000, 1) }}", "width"),
        ("{{ '%1000000000d' | format(1) }}", "width"),
        ("{{ 9 ** 9 ** 9 }}", "size|power"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[0].missing.deeper }}", "fails on these messages"),
        ("{% for x in 5 %}{% endfor %}", "fails on these messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "cannot be read"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "cannot be read"),
    ],
)
def test_what_templates_must_not_do(tokenizer: Tokenizer, source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source, tokenizer).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_an_endless_template_is_stopped(
    tokenizer: Tokenizer, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshnet.engine.template.DEADLINE_S", 0.3)
    started = time.monotonic()
    with pytest.raises(TemplateError, match="ran for more than"):
        ChatTemplate(source, tokenizer).render(HI)
    assert time.monotonic() - started < 3 * DEADLINE_S
