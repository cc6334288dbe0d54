"""Handle calls: a wrong argument is refused by its name before anything else is done."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from raylm.config import Config
from raylm.errors import InvalidRequestError, UnsupportedFieldError
from raylm.frontend import Admission
from raylm.frontend.admission.lifecycle import Lifecycle
from raylm.params import PoolingParams, SamplingParams
from tests.ingress.fake_llm import FakeAsyncLLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve's own use of pydantic
    from raylm.ingress.ingress import Ingress

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


def ingress(llm: FakeAsyncLLM, policy: str = "fcfs") -> Ingress:
    """As it stands when Serve has built its application."""
    found = Ingress(Config.model_validate({"scheduler": {"policy": policy}}), None)  # type: ignore[arg-type]
    found._llm = llm  # type: ignore[assignment]
    found._lifecycle = Lifecycle(8)
    return found


@pytest.mark.parametrize(
    ("call", "arguments", "param"),
    [
        *(("generate", {"prompt": prompt}, "prompt") for prompt in (None, 5, b"a", (1, 2), [1, "2"], [True], [1.0])),
        *(("chat", {"messages": messages}, "messages") for messages in (None, "Hi", HI[0], ["Hi"], tuple(HI))),
        *(("chat", {"messages": HI, "tools": tools}, "tools") for tools in ("a", {}, ["a"])),
        ("chat", {"messages": HI, "template_kwargs": [1]}, "template_kwargs"),
        *(("generate", {"prompt": "a", "params": params}, "params") for params in ({}, PoolingParams(), 1)),
        ("chat", {"messages": HI, "params": {"temperature": 0}}, "params"),
        ("embed", {"prompt": ["a"]}, "prompt"),
        ("embed", {"prompt": "a", "params": SamplingParams()}, "params"),
        *((call, {name: value, "cache_salt": 5}, "cache_salt") for call, name, value in (
            ("generate", "prompt", "a"), ("chat", "messages", HI), ("embed", "prompt", "a"),
        )),
        *(("generate", {"prompt": "a", "priority": value}, "priority") for value in ("1", 1.5, True, 2**31)),
    ],
)  # fmt: skip
async def test_a_wrong_argument_is_named(call: str, arguments: dict[str, Any], param: str) -> None:
    llm = FakeAsyncLLM()
    made = getattr(ingress(llm, "priority"), call)(**arguments)
    with pytest.raises(InvalidRequestError, match=param) as caught:
        await (made if call == "embed" else anext(made))
    assert caught.value.param == param
    assert not llm.calls
    assert not llm.rendered


@pytest.mark.parametrize(("call", "first"), [("generate", "a"), ("chat", HI)])
async def test_a_priority_has_its_policy_or_is_refused(call: str, first: Any) -> None:
    llm = FakeAsyncLLM(admission=Admission())
    for priority in (0, 3):
        with pytest.raises(UnsupportedFieldError, match="fcfs") as caught:
            await anext(getattr(ingress(llm), call)(first, priority=priority))
        assert caught.value.param == "priority"
    assert not llm.calls
    for policy, priority, wanted in (("fcfs", None, 0), ("priority", -4, -4), ("priority", None, 0)):
        outputs = getattr(ingress(llm, policy), call)(first, priority=priority)
        assert [output async for output in outputs][-1].finished
        assert llm.calls[-1].head.priority == wanted
