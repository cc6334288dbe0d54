"""Chat templates: the variables that they get, and their errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from raylm.checkpoint import EMBEDDED
from raylm.errors import ConfigError, InvalidRequestError
from raylm.frontend.text import chat_template, template_process
from raylm.frontend.text.chat_template import (
    ChatRequest,
    ChatTemplate,
    prepare_messages,
    read_arguments,
)
from raylm.frontend.text.template_process import check_templates
from tests.frontend.checkpoints import TEMPLATE

HI = [{"role": "user", "content": "Hi"}]
SPECIAL = {"eos_token": "<|im_end|>"}


def make(template: str | None = TEMPLATE, **others: str) -> ChatTemplate:
    return ChatTemplate({**({"default": template} if template else {}), **others}, SPECIAL, "some-model")


async def render(template: ChatTemplate, messages: list[dict[str, Any]], **fields: Any) -> str:
    return await template.render(ChatRequest(messages=messages, **fields))


async def test_renders_a_conversation() -> None:
    found = await render(make(), HI, template_kwargs={"enable_thinking": True})
    assert found == "<|im_start|>user\nHi<|im_end|>\n<think><|im_start|>assistant\n"


async def test_tool_arguments_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    found = await render(make(), messages, tools=tools)
    assert "<tool_call>Ulm</tool_call>" in found
    assert '"name": "weather"' in found
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}, "the caller's object"


async def test_conversations_with_tools_take_the_template_for_them() -> None:
    template = make(tool_use="with tools")
    assert await render(template, HI, tools=[{"type": "function"}]) == "with tools"
    assert await render(template, HI) != "with tools"


async def test_the_last_message_can_be_continued() -> None:
    messages = [*HI, {"role": "assistant", "content": "The answer is "}]
    found = await render(make(), messages, add_generation_prompt=False, continue_final_message=True)
    assert found.endswith("<|im_start|>assistant\nThe answer is ")


async def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in await render(make(), [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", {}),
        ('{"city": "Köln"}', {"city": "Köln"}),
        ('{"city": "Kö', {"city": "Kö"}),
        ('{"city": "K\\u00', {"city": "K"}),
        ('{"a": 1, "b": [2, {"c": "d', {"a": 1, "b": [2, {"c": "d"}]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ("{", {}),
        ("{a: 1}", {"arguments": "{a: 1}"}),
        ("[1]", {"arguments": "[1]"}),
        ("nul", {"arguments": "nul"}),
        ('{"a": ' + "[" * 5000, {"arguments": '{"a": ' + "[" * 5000}),
    ],
)
async def test_arguments_of_the_past_are_read_as_far_as_they_go(text: str, read: dict[str, Any]) -> None:
    assert read_arguments(text) == read
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    given = "messages[-1].tool_calls[0].function.arguments"
    dumped = await render(make(f"{{{{ {given} | tojson }}}}"), messages)
    assert dumped == json.dumps(read, ensure_ascii=False)
    names = await render(make(f"{{% for name, value in {given} | items %}}{{{{ name }}}},{{% endfor %}}"), messages)
    assert names == "".join(f"{name}," for name in read)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": [{"role": "forbidden", "content": "x"}]}, "messages", "No such role: forbidden"),
    ({"messages": [{"content": "x"}]}, "messages[0]", "with a role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only text parts"),
    ({"messages": HI, "continue_final_message": True}, "continue_final_message", "cannot be combined"),
    (
        {"messages": [{"role": "user"}], "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
        "last message",
    ),
    *[
        ({"messages": HI, "template_kwargs": {name: 1}}, "chat_template_kwargs", name)
        for name in ("messages", "tools", "tokenize", "chat_template", "eos_token", "raise_exception", "_private")
    ],
]


@pytest.mark.parametrize(("arguments", "param", "phrase"), REFUSED)
async def test_refuses(arguments: dict[str, Any], param: str, phrase: str) -> None:
    with pytest.raises(InvalidRequestError, match=phrase.replace("[", r"\[")) as caught:
        await render(make(), **arguments)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "template", ["{{ messages[9].role }}", "{{ 1 // 0 }}", "{{ messages + 3 }}", "{{ nothing() }}"]
)
async def test_a_template_that_fails_is_the_messages_fault_and_shows_no_insides(template: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^The chat template") as caught:
        await render(make(template), HI)
    assert caught.value.param == "messages"
    assert "0x" not in caught.value.message


async def test_the_sandbox_holds() -> None:
    with pytest.raises(InvalidRequestError):
        await render(make("{{ messages.__class__.__mro__[1].__subclasses__() }}"), HI)


async def test_no_template_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"some-model.*no chat template.*chat_template\.jinja"):
        await render(make(None), HI)


async def test_endless_templates_are_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.1)
    bomb = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = make("{% if endless %}" + bomb + "{% endif %}fine")
    for _ in range(3):  # more often than the number of threads
        with pytest.raises(InvalidRequestError, match="did not render"):
            await render(template, HI, template_kwargs={"endless": True})
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 60)
    assert await render(template, HI) == "fine"


DOUBLED = "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
BOMBS = {
    "nested lists compared": DOUBLED + DOUBLED.replace("n.", "m.").replace("set n =", "set m =") + "{{ n.x == m.x }}",
    "text of nested lists": DOUBLED + "{{ n.x }}",
    "nested lists as JSON": DOUBLED + "{{ n.x | tojson }}",
    "nested tuples hashed": DOUBLED.replace("[n.x, n.x]", "(n.x, n.x)") + "{{ {n.x: 1} }}",
    "texts compared": "{% set a = 'x' * 9000000 %}{{ ([a + 'y', a + 'z'] * 1000000) | sort | length }}",
    "power": "{{ (messages | length + 8) ** (10 ** 9) }}",
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}
GREEDY = {
    "times": "{{ 'x' * (messages | length * 10 ** 10) }}",
    "list times": "{{ ([1] * (messages | length * 10 ** 10)) | length }}",
    "plus": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "tilde": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "output": "{% set x = 'x' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "format": "{{ '{:>9999999999}'.format(messages | length) }}",
    "center": "{{ messages[0].role | center(10 ** 10) }}",
    "tojson": "{{ messages | tojson(indent=10 ** 10) }}",
    "join": "{{ ('x' * 1000000).join('y' * 1000000) }}",
    "a long text": "{{ 'x' * 20000000 }}",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
async def test_a_template_is_ended_while_others_render(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a call in C blocks no thread of this process, and the template's process is killed."""
    template = make("{% if bomb %}" + bomb + "{% endif %}fine")
    assert await render(template, HI) == "fine"
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.5)
    with pytest.raises(InvalidRequestError, match=r"did not render|could not render"):
        await render(template, HI, template_kwargs={"bomb": True})
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 300)
    assert await render(template, HI) == "fine"
    template.close()


@pytest.mark.parametrize("bomb", GREEDY.values(), ids=GREEDY)
async def test_a_template_takes_no_more_memory_than_its_process_may(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 300)
    template = make("{% if bomb %}" + bomb + "{% endif %}fine")
    with pytest.raises(
        InvalidRequestError, match=r"MemoryError|OverflowError|ValueError|more than \d+ characters|ended"
    ):
        await render(template, HI, template_kwargs={"bomb": True})
    assert await render(template, HI) == "fine"
    template.close()


async def test_the_process_of_a_cancelled_rendering_ends() -> None:
    template = make("{% if bomb %}" + BOMBS["text of nested lists"] + "{% endif %}{{ messages[0].content }}")
    bomb = asyncio.create_task(render(template, HI, template_kwargs={"bomb": True}))
    await asyncio.sleep(0.05)
    bomb.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bomb
    assert await render(template, HI) == "Hi"
    template.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_child_and_a_server_that_were_lost_are_replaced() -> None:
    template = make("{{ messages[0].content }}")
    assert await render(template, HI) == "Hi"
    server = template_process._SERVER._server
    assert server is not None
    for child in children_of(server.pid):
        with suppress(ProcessLookupError):  # the child of an earlier test is ending
            os.kill(child, signal.SIGKILL)
    server.kill()
    server.wait()
    assert await render(template, HI) == "Hi"
    template.close()


async def test_a_template_that_ends_its_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def exchange(*_: object) -> None:
        return None

    template = make("fine")
    monkeypatch.setattr(template_process, "_exchange", exchange)
    with pytest.raises(InvalidRequestError, match="crashed the process"):
        await render(template, HI)
    template.close()


async def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must contain only JSON values"):
        await render(make(), HI, template_kwargs={"thing": object()})


LONG = [
    [{"role": "user", "content": "x" * 100_000}],
    [{"role": "user", "content": "x"}] * 3_001,
    [{"role": "user", "content": [{"type": "text", "text": "x"}] * 3_001}],
]


@pytest.mark.parametrize("long", LONG)
async def test_waiting_is_not_the_templates_time(long: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short conversations overtake long ones. The time limit of a long one begins when its rendering begins."""
    begun = []

    def timeout(limit_s: float) -> asyncio.Timeout:
        begun.append(limit_s)
        return asyncio.timeout(limit_s)

    monkeypatch.setattr(template_process, "timeout", timeout)
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 299)
    template = make("{% if bomb %}" + BOMBS["endless"] + "{% endif %}" + TEMPLATE)
    first = asyncio.create_task(render(template, long, template_kwargs={"bomb": True}))
    async with asyncio.timeout(300):
        while 299 not in begun:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(render(template, long)) for _ in range(2)]
        assert "Hi" in await render(template, HI)
        assert begun.count(299) == 2, "only the first long one and the short one have begun"
        first.cancel()
        for rendered in await asyncio.gather(*waiting):
            assert rendered.endswith("<|im_start|>assistant\n")
    assert begun.count(299) == 4
    template.close()


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_is_never_lost(turns: int) -> None:
    """The task is cancelled after the answer arrives and before the loop handles it."""
    template = make()
    await render(template, HI)
    task = asyncio.create_task(render(template, HI))
    await asyncio.sleep(0)
    time.sleep(0.03)  # noqa: ASYNC251 - the child is to be done before the loop goes on
    for _ in range(turns):
        await asyncio.sleep(0)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "Hi" in await render(template, HI)
    template.close()


def test_broken_templates_are_found_at_start() -> None:
    check_templates({"default": TEMPLATE})
    with pytest.raises(ConfigError, match="'default' is not valid"):
        check_templates({"default": "{% for %}"})


def test_messages_are_copied() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    prepare_messages(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


ANY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WITHOUT_ROLES = "{% for m in messages %}{{ 'bot: ' if m.role == 'assistant' else 'you: ' }}{{ m.content }}{% endfor %}"
ONE_MORE = "{% for m in messages %}{% if m.role in ['user', 'critic'] %}{{ m.role + m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role", "taken"),
    [
        (ANY_ROLE, "critic", True),
        (ANY_ROLE, "ipython", True),
        (WITHOUT_ROLES, "critic", False),
        (ONE_MORE, "critic", True),
        (ONE_MORE, "ipython", False),
    ],
)
async def test_roles_are_taken_that_the_template_shows(template: str, role: str, taken: bool) -> None:
    made = make(template)
    messages = [*HI, {"role": role, "content": "x"}]
    for _ in range(2):
        if taken:
            assert role in await render(made, messages)
            continue
        with pytest.raises(InvalidRequestError, match=f"has no role '{role}'") as raised:
            await render(made, messages)
        assert raised.value.param == "messages[1].role"


async def test_what_is_known_of_roles_is_bounded() -> None:
    made = make(ANY_ROLE)
    for number in range(3 * chat_template._MAX_CUSTOM_ROLES):
        await render(made, [{"role": f"r{number}", "content": "x"}])
    assert len(made._custom_roles) <= chat_template._MAX_CUSTOM_ROLES


async def test_the_embedded_model_has_no_roles_of_its_own() -> None:
    made = make((EMBEDDED / "chat_template.jinja").read_text())
    with pytest.raises(InvalidRequestError, match="No such role: critic"):
        await render(made, [*HI, {"role": "critic", "content": "x"}])
