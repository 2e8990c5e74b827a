from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import ChatTemplateMissing, InvalidRequest, ModelError
from baton.text.chat_template import ChatMessage, ChatTemplate, load_chat_template, parse_messages

HELLO = [ChatMessage("user", "hi")]
CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def template(source: str, **limits: int) -> ChatTemplate:
    return ChatTemplate(source, ManualClock(86_400), special_tokens={"bos_token": "<s>"}, **limits)


def refusal(source: str, **limits: int) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        template(source, **limits).render(HELLO)
    return caught.value


def test_renders_turns_and_the_opening_of_the_answer() -> None:
    messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "{{ 1 + 1 }} é")]
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{{ 1 + 1 }} é<|im_end|>\n"
    assert template(CHATML).render(messages) == rendered + "<|im_start|>assistant\n"
    assert template(CHATML).render(messages, add_generation_prompt=False) == rendered


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|"),
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 1970"),
        ("{{ {'a': '<é>'} | tojson }}{{ [1] | tojson(indent=1) }}", '{"a": "<é>"}[\n 1\n]'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ ';' if not loop.last }}{% endfor %}", "1/2;2/2"),
        ("{% for m in messages if m.role == 'tool' %}{{ m }}{% else %}none{% endfor %}", "none"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% macro f(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call f('a' ~ 1) %}b{% endcall %}", "[a1b]"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 %}{% endfor %}{{ ns.n * 3 }}",
            "6",
        ),
        ("{{ '-' * 3 }}{{ [1] + [2] }}", "---[1, 2]"),
    ],
)
def test_offers_what_chat_templates_are_written_for(source: str, rendered: str) -> None:
    assert template(source).render(HELLO) == rendered


def test_further_variables_reach_the_template_but_cannot_replace_its_own() -> None:
    thinking = template("{{ 'yes' if enable_thinking else 'no' }}")
    assert thinking.render(HELLO) == "no"
    assert thinking.render(HELLO, variables={"enable_thinking": True}) == "yes"
    with pytest.raises(InvalidRequest, match=r"variables\.bos_token"):
        thinking.render(HELLO, variables={"bos_token": "x"})


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([ChatMessage("user", "a"), ChatMessage("robot", "b")], "messages[1].role"),
        ([ChatMessage("", "a")], "messages[0].role"),
        ([ChatMessage("system", ""), ChatMessage("assistant", ""), ChatMessage("user", "")], "messages[2].content"),
    ],
)
def test_malformed_messages_are_refused_naming_the_place(messages: list[ChatMessage], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(CHATML).render(messages)
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("hi", "messages"),
        ({"role": "user", "content": "a"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": 3, "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": "a", "colour": "red"}], "messages[0].colour"),
    ],
)
def test_malformed_json_messages_are_refused_naming_the_place(value: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_messages(value)
    assert caught.value.field == field


def test_reads_messages_from_json() -> None:
    assert parse_messages([{"role": "user", "content": "a"}]) == (ChatMessage("user", "a"),)


def test_a_template_that_refuses_the_messages_is_quoted() -> None:
    error = refusal("{{ raise_exception('roles must alternate') }}")
    assert error.field == "messages"
    assert "roles must alternate" in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[3].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ undefined_function() }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_is_an_error_of_the_request(source: str) -> None:
    assert refusal(source).field == "messages"


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__ }}", "{{ messages.append(1) }}", "{{ messages.__init__.__globals__ }}"]
)
def test_a_template_cannot_leave_the_sandbox_or_change_the_messages(source: str) -> None:
    messages = [*HELLO]
    try:
        rendered = template(source).render(messages)
    except InvalidRequest:
        rendered = ""
    assert (rendered, messages) == ("", HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{% for i in range(10) %}{% for j in range(1000) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_loops_without_end_is_stopped(source: str) -> None:
    assert "500 loop rounds" in refusal(source, max_steps=500).message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(300) %}0123456789{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(90) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{% set x = 10000000000 * [1] %}",
    ],
)
def test_a_template_that_grows_without_end_is_stopped(source: str) -> None:
    assert "2000 characters" in refusal(source, max_characters=2000).message


def test_a_template_that_does_not_compile_is_an_error_of_the_model() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        template("{% for message in messages %}")


def test_the_template_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    clock = ManualClock()
    with pytest.raises(ChatTemplateMissing, match="no chat template"):
        load_chat_template(tmp_path, clock)
    config.write_text(json.dumps({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<b>"}}))
    assert load_chat_template(tmp_path, clock).render(HELLO) == "<b>"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_chat_template(tmp_path, clock).render(HELLO) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_chat_template(tmp_path, clock).render(HELLO) == "file"


@pytest.mark.parametrize("content", ['{"chat_template": 3}', '{"chat_template": [{"name": "x"}]}', "[1]", "{"])
def test_an_unreadable_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path, ManualClock())
