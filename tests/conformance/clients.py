"""Client libraries against a running server: chat, tools, reasoning, responses, embeddings, typed errors.

    python -m tests.conformance.clients URL             # all installed libraries
    python -m tests.conformance.clients URL litellm     # the named libraries, which must be installed

The module needs no package of this repository. So `make clients` can test other versions of the libraries in a separate
environment.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

from tests.conformance.agents import JAVASCRIPT, inspect_responses, javascript, litellm_proxy
from tests.conformance.benches import sglang_bench, vllm_bench
from tests.conformance.histories import litellm_histories

MODEL = "embedded"
HOSTED = f"hosted_vllm/{MODEL}"
QUESTION = "What is a KV cache?"
WEATHER = "What is the weather in Rome?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ASK: Any = [{"role": "user", "content": QUESTION}]
# The calls are short, so min_tokens forces several: before it the answer cannot end, only begin another call.
CITIES = {"type": "string", "enum": ["Rome", "Paris", "Oslo"]}
SHORT: Any = {**PARAMETERS, "properties": {"city": CITIES}, "additionalProperties": False}
SEVERAL: Any = {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": SHORT}}]}
AT_LEAST = {"min_tokens": 80}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


def openai_chat(url: str) -> None:
    """Plain, streamed, and with the accumulating helper; log-probabilities; reasoning."""
    api = _openai(url)
    whole = api.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=30, logprobs=True)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    chunks = api.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with api.chat.completions.stream(model=MODEL, messages=ASK, temperature=0, max_tokens=30) as stream:
        assert stream.get_final_completion().choices[0].message.content == text
    thinking = api.chat.completions.create(model=MODEL, messages=ASK, temperature=0, extra_body=THINK)
    assert thinking.usage.completion_tokens_details.reasoning_tokens > 0
    assert thinking.choices[0].message.model_extra["reasoning_content"]


def openai_tools(url: str) -> None:
    """A whole round trip of call, result and answer; then the call again, streamed."""
    api = _openai(url)
    ask: Any = [{"role": "user", "content": WEATHER}]
    first = api.chat.completions.create(model=MODEL, messages=ask, tools=TOOLS, temperature=0)
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny", "temperature": 21}'}
    history = [*ask, first.choices[0].message.model_dump(exclude_none=True), result]
    second = api.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, temperature=0)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content
    with api.chat.completions.stream(model=MODEL, messages=ask, tools=TOOLS, temperature=0) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("get_weather", {"city": "Rome"})


def openai_parallel_tools(url: str) -> None:
    """Required calls: one call if parallel calls are not allowed, each with a unique id, and the same when streamed."""
    api = _openai(url)
    ask: Any = [{"role": "user", "content": "What is the weather in Rome and in Paris?"}]
    for parallel in (True, False):
        for seed in range(4):
            common: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel, "seed": seed}
            whole = api.chat.completions.create(model=MODEL, messages=ask, **common)
            with api.chat.completions.stream(model=MODEL, messages=ask, **common) as stream:
                streamed = stream.get_final_completion()
            calls, again = (answer.choices[0].message.tool_calls for answer in (whole, streamed))
            assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason == "tool_calls"
            assert [call.function.arguments for call in calls] == [call.function.arguments for call in again]
            assert len({call.id for call in calls}) == len(calls) >= 1
            assert all(isinstance(json.loads(call.function.arguments)["city"], str) for call in calls)
            assert parallel or len(calls) == 1


def openai_several_calls(url: str) -> None:
    """Several calls in one answer, whole and streamed, and an answer to all of their results."""
    api = _openai(url)
    ask: Any = [{"role": "user", "content": "What is the weather in Rome and in Paris?"}]
    common: Any = {"model": MODEL, "messages": ask, "tool_choice": "required", "seed": 1, "extra_body": AT_LEAST}
    whole = api.chat.completions.create(**common, **SEVERAL).choices[0]
    with api.chat.completions.stream(**common, **SEVERAL) as stream:
        done = [event.index for event in stream if event.type == "tool_calls.function.arguments.done"]
        streamed = stream.get_final_completion().choices[0]
    calls, again = whole.message.tool_calls, streamed.message.tool_calls
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert len({call.id for call in calls}) == len(calls) >= 2
    assert [call.function.arguments for call in calls] == [call.function.arguments for call in again]
    assert done == list(range(len(calls)))
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather"
        assert arguments.keys() == {"city"}
        assert arguments["city"] in CITIES["enum"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'} for call in calls]
    history: Any = [*ask, whole.message.model_dump(exclude_none=True), *results]
    told = api.chat.completions.create(model=MODEL, messages=history, temperature=0, **SEVERAL).choices[0]
    assert told.finish_reason == "stop"
    assert "sunny" in told.message.content


def openai_structured(url: str) -> None:
    """Required calls, of any tool and of a named tool; parse() into a pydantic model, with chat and with responses."""
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    api = _openai(url)
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = api.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, tool_choice=choice, seed=1)
        for call in answer.choices[0].message.tool_calls:
            assert isinstance(json.loads(call.function.arguments)["city"], str)
    parsed = api.chat.completions.parse(model=MODEL, messages=ASK, response_format=City, seed=1)
    assert isinstance(parsed.choices[0].message.parsed, City)
    assert isinstance(api.responses.parse(model=MODEL, input=QUESTION, text_format=City).output_parsed, City)


def openai_responses(url: str) -> None:
    """Responses: whole, streamed, chained, with a tool, in the background, deleted."""
    import openai

    api = _openai(url)
    first = api.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert first.output_text
    with api.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.output_text == first.output_text
    assert api.responses.create(model=MODEL, input="And why?", previous_response_id=first.id).output_text
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
    called = api.responses.create(model=MODEL, input=WEATHER, tools=tools, temperature=0).output[-1]
    assert (called.type, json.loads(called.arguments)) == ("function_call", {"city": "Rome"})
    answer = {"type": "function_call_output", "call_id": called.call_id, "output": "sunny"}
    history: Any = [{"role": "user", "content": WEATHER}, called.model_dump(exclude_none=True), answer]
    assert api.responses.create(model=MODEL, input=history, tools=tools, temperature=0).output_text
    background = api.responses.create(model=MODEL, input=QUESTION, background=True, max_output_tokens=900)
    assert api.responses.cancel(background.id).status in ("cancelled", "completed")
    api.responses.delete(first.id)
    _raises(openai.NotFoundError, lambda: api.responses.retrieve(first.id))


def openai_rest(url: str) -> None:
    """Completions, embeddings, models, and errors with their types."""
    import openai

    api = _openai(url)
    assert len(api.completions.create(model=MODEL, prompt=["A", "B"], max_tokens=4, n=2).choices) == 4
    vectors = [entry.embedding for entry in api.embeddings.create(model=MODEL, input=["a", "b"]).data]
    assert [round(sum(number * number for number in vector), 4) for vector in vectors] == [1, 1]
    plain = api.embeddings.create(model=MODEL, input="a", encoding_format="float").data[0].embedding
    assert max(abs(one - other) for one, other in zip(plain, vectors[0], strict=True)) < 1e-6
    assert [model.id for model in api.models.list()] == [MODEL]
    wrong = _raises(openai.BadRequestError, lambda: api.completions.create(model=MODEL, prompt="a", temperature=3))
    assert wrong.param == "temperature"
    missing = _raises(openai.NotFoundError, lambda: api.completions.create(model="gpt", prompt="a", stream=True))
    assert missing.code == "model_not_found"
    long = _raises(openai.BadRequestError, lambda: api.completions.create(model=MODEL, prompt="a " * 30_000))
    assert long.code == "context_length_exceeded"


def anthropic_messages(url: str) -> None:
    """Messages: whole, streamed, with thinking, a round trip of a tool, token counts, and errors with their types."""
    import anthropic

    api = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    greedy: Any = {"model": MODEL, "max_tokens": 300, "extra_body": {"temperature": 0}}
    whole = api.messages.create(**greedy, messages=ASK)
    assert whole.content[0].text
    with api.messages.stream(**greedy, messages=ASK) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    assert api.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 5
    thinking = api.messages.create(**greedy, messages=ASK, thinking={"type": "adaptive"})
    assert thinking.content[0].type == "thinking"
    tools: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]
    ask: Any = [{"role": "user", "content": WEATHER}]
    with api.messages.stream(**greedy, messages=ask, tools=tools) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.input == {"city": "Rome"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [*ask, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert api.messages.create(**greedy, messages=history, tools=tools).stop_reason == "end_turn"
    _raises(anthropic.BadRequestError, lambda: api.messages.create(model=MODEL, max_tokens=0, messages=ASK))
    _raises(anthropic.NotFoundError, lambda: api.messages.create(model="claude", max_tokens=9, messages=ASK))


def langchain_chat(url: str) -> None:
    """LangChain's ChatOpenAI and OpenAIEmbeddings: invoked, streamed, with a tool, and with the Responses API."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    common: Any = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**common)
    whole = chat.invoke(QUESTION)
    assert whole.content
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == whole.content
    bound = chat.bind_tools(TOOLS)
    ask = HumanMessage(WEATHER)
    called = bound.invoke([ask])
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})
    assert bound.invoke([ask, called, ToolMessage("sunny", tool_call_id=call["id"])]).content
    assert ChatOpenAI(**common, use_responses_api=True).invoke(QUESTION).text
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    assert len(embeddings.embed_documents(["a", "b"])) == 2


def litellm_chat(url: str) -> None:
    """litellm with its OpenAI, vLLM and Anthropic providers: whole, streamed, and with a pydantic model's schema."""
    import litellm
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    common = _litellm(url)
    whole = litellm.completion(model=HOSTED, messages=ASK, **common).choices[0].message.content
    chunks = litellm.completion(model=HOSTED, messages=ASK, stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert litellm.completion(model=f"openai/{MODEL}", messages=ASK, **common).choices[0].message.content == whole
    message = litellm.completion(model=f"anthropic/{MODEL}", messages=ASK, **common | {"api_base": url})
    assert message.choices[0].message.content == whole
    formed = litellm.completion(model=HOSTED, messages=ASK, response_format=City, **common)
    assert City.model_validate_json(formed.choices[0].message.content).name is not None


def litellm_tools(url: str) -> None:
    """A call that the model chooses to make, and a whole round trip of several required calls, also streamed."""
    import litellm

    common, ask = _litellm(url), [{"role": "user", "content": WEATHER}]
    (call,) = litellm.completion(model=HOSTED, messages=ask, tools=TOOLS, **common).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    required: Any = common | SEVERAL | {"tool_choice": "required", "extra_body": AT_LEAST}
    first = litellm.completion(model=HOSTED, messages=ask, **required)
    chunks = litellm.completion(model=HOSTED, messages=ask, stream=True, **required)
    again = litellm.stream_chunk_builder(list(chunks)).choices[0].message.tool_calls
    calls = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert len(calls) >= 2
    assert [call.function.arguments for call in again] == [call.function.arguments for call in calls]
    assert all(json.loads(call.function.arguments)["city"] in CITIES["enum"] for call in calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'} for call in calls]
    history = [*ask, first.choices[0].message, *results]
    assert "sunny" in litellm.completion(model=HOSTED, messages=history, **common, **SEVERAL).choices[0].message.content


def litellm_rest(url: str) -> None:
    """Embeddings, and errors with litellm's types."""
    import litellm

    common = _litellm(url)
    vectors = litellm.embedding(model=HOSTED, input=["a", "b"], api_base=f"{url}/v1", api_key="none")
    norms = [round(sum(number * number for number in entry["embedding"]), 4) for entry in vectors.data]
    assert norms == [1, 1]
    long = [{"role": "user", "content": "a " * 30_000}]
    _raises(litellm.ContextWindowExceededError, lambda: litellm.completion(model=HOSTED, messages=long, **common))
    wrong = common | {"temperature": 3}
    _raises(litellm.BadRequestError, lambda: litellm.completion(model=HOSTED, messages=ASK, **wrong))
    _raises(litellm.NotFoundError, lambda: litellm.completion(model="hosted_vllm/gpt", messages=ASK, **common))


CHECKS: dict[str, list[Callable[[str], None]]] = {
    "openai": [
        openai_chat,
        openai_tools,
        openai_parallel_tools,
        openai_several_calls,
        openai_structured,
        openai_responses,
        openai_rest,
    ],
    "anthropic": [anthropic_messages],
    "langchain_openai": [langchain_chat],
    "litellm": [litellm_chat, litellm_tools, litellm_rest, litellm_histories, litellm_proxy],
    "inspect_ai": [inspect_responses],
    "javascript": [javascript],
    "vllm": [vllm_bench],
    "sglang": [sglang_bench],
}


def _openai(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _litellm(url: str) -> dict[str, Any]:
    import litellm

    litellm.suppress_debug_info = True  # otherwise it prints advice at each expected error
    return {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 200, "max_retries": 0}


def _raises(kind: type[Exception], call: Callable[[], object]) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def _version(library: str) -> str | None:
    """The version of a library, or None if it is not installed. The JavaScript libraries are pinned together."""
    if library == "javascript":
        return "" if JAVASCRIPT.exists() else None
    if importlib.util.find_spec(library) is None:
        return None
    return importlib.metadata.version(importlib.metadata.packages_distributions()[library][0])


def main() -> int:
    """Run the named libraries, or all that are installed. The exit status is 1 if one failed."""
    url, *named = sys.argv[1:]
    failed = False
    for library in named or CHECKS:
        if (version := _version(library)) is None:
            print(f"{'FAIL' if named else '--  '}  {library} is not installed")
            failed = failed or bool(named)
            continue
        for check in CHECKS[library]:
            try:
                check(url)
                print(f"ok    {library} {version} {check.__name__}")
            except Exception as error:
                failed = True
                print(f"FAIL  {library} {version} {check.__name__}: {type(error).__name__}: {str(error)[:600]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
