"""AsyncLLM with engines that the test plays: demultiplexing, merging, stop strings, aborts, lost engines."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from raylm.config import Config
from raylm.errors import (
    ConfigError,
    ContextLengthError,
    EngineDiedError,
    EngineUnavailableError,
    InvalidRequestError,
    RayLMError,
)
from raylm.frontend import AsyncLLM, ChatRequest, RequestHead, RequestOutput
from raylm.frontend.answers.answer_format import AnswerFormat
from raylm.frontend.answers.tool_calls import Parsed
from raylm.frontend.text.tokenizer import MAX_CHARS
from raylm.messages import Logprobs
from raylm.params import SamplingParams
from tests.frontend.checkpoints import byte_fallback, byte_level, write_checkpoint
from tests.frontend.played_engine import PlayedEngine, settle

EOS = 2


def begin(llm: AsyncLLM, prompt: Any = "hello", **params: Any) -> asyncio.Task[list[RequestOutput]]:
    """Start a caller that reads all outputs."""

    async def read() -> list[RequestOutput]:
        async with aclosing(llm.generate(prompt, SamplingParams(**params), RequestHead(request_id="r"))) as outputs:
            return [output async for output in outputs]

    return asyncio.create_task(read())


def text_of(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(delta.text for output in outputs for delta in output.deltas if delta.index == index)


async def ids(llm: AsyncLLM, text: str) -> list[int]:
    return await llm.tokenize(text, add_special_tokens=False)


async def test_entries_reach_their_callers(llm: AsyncLLM, engine: PlayedEngine) -> None:
    one, two = begin(llm, "hello"), begin(llm, "world")
    await settle()
    first, second = (request.key for request in engine.added)
    hello, world = await ids(llm, "hello"), await ids(llm, "world")
    engine.say((second, 0, world, None), (first, 0, hello, None), cached_tokens=[0, 1])
    engine.say((first, 0, [EOS], "stop"), (second, 0, world, "length"))
    assert text_of(await one) == "hello"
    assert text_of(await two) == "worldworld"
    last = one.result()[-1]
    assert last.finished
    assert (last.deltas[0].finish_reason, last.deltas[0].stop_reason, last.deltas[0].token_ids[-1]) == (
        "stop",
        None,
        EOS,
    )
    assert last.num_cached_tokens == 1
    assert last.prompt_token_ids == hello
    await settle()
    assert engine.aborted == []


async def test_a_slow_caller_gets_its_deltas_merged(llm: AsyncLLM, engine: PlayedEngine) -> None:
    outputs = llm.generate("hello", SamplingParams(n=2), RequestHead(request_id="r"))
    first = asyncio.create_task(anext(outputs))
    await settle()
    key, hello = engine.added[0].key, await ids(llm, "hello")
    engine.say((key, 0, hello, None))
    assert len((await first).deltas) == 1
    for _ in range(50):
        engine.say((key, 0, hello, None), (key, 1, hello, None))
    engine.say((key, 0, [EOS], "stop"))
    await settle()
    merged = await anext(outputs)
    assert [delta.text for delta in merged.deltas] == ["hello" * 50] * 2
    assert [len(delta.token_ids) for delta in merged.deltas] == [50 * len(hello) + 1, 50 * len(hello)]
    assert [delta.finish_reason for delta in merged.deltas] == ["stop", None]
    await outputs.aclose()


async def test_a_stop_string_ends_one_of_two_sequences(llm: AsyncLLM, engine: PlayedEngine) -> None:
    reader = begin(llm, n=2, stop=("END",))
    await settle()
    key = engine.added[0].key
    so, d = await ids(llm, "so EN"), await ids(llm, "D more")
    engine.say((key, 0, so, None), (key, 1, so, None))
    engine.say((key, 0, d, None), (key, 1, so, None))
    await settle()
    assert engine.stopped == [(key, 0)], "the engine must continue the other sequence"
    engine.say((key, 0, so, None), (key, 1, so, "length"))
    outputs = await reader
    assert text_of(outputs, 0) == "so "
    assert text_of(outputs, 1) == "so EN" * 3
    ends = {delta.index: delta.stop_reason for output in outputs for delta in output.deltas if delta.finish_reason}
    assert ends == {0: "END", 1: None}
    await settle()
    assert (engine.stopped, engine.aborted) == ([(key, 0)], [])


async def test_closing_aborts_at_once(llm: AsyncLLM, engine: PlayedEngine) -> None:
    outputs = llm.generate("hello", SamplingParams(), RequestHead(request_id="r"))
    first = asyncio.create_task(anext(outputs))
    await settle()
    engine.say((engine.added[0].key, 0, [5], None))
    await first
    await outputs.aclose()
    assert engine.aborted == [engine.added[0].key]
    engine.say((engine.added[0].key, 0, [5], None))
    await settle()
    assert llm.is_ready, "tokens of an aborted request must do no harm"


async def test_tokens_of_a_closed_request_shift_nothing(llm: AsyncLLM, engine: PlayedEngine) -> None:
    gone, stays = begin(llm, logprobs=0), begin(llm, logprobs=0)
    await settle()
    gone.cancel()
    hello, size = await ids(llm, "hello"), len(await ids(llm, "hello"))
    first, second = (request.key for request in engine.added)
    columns = Logprobs([1] * (3 + size), [5, 5, 5, *hello], [-9.0] * 3 + [-1.0] * size, [7] * 3 + [1] * size)
    await settle()
    engine.say((first, 0, [5, 5, 5], None), (second, 0, hello, "length"), logprobs=columns)
    (output,) = await stays
    assert output.deltas[0].text == "hello"
    assert [(e.token_id, e.logprob) for e in output.deltas[0].logprobs or []] == [(token, -1.0) for token in hello]


async def test_cancelling_aborts_at_once(llm: AsyncLLM, engine: PlayedEngine) -> None:
    reader = begin(llm)
    await settle()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert engine.aborted == [engine.added[0].key]


async def test_a_lost_engine_ends_its_requests_where_no_other_can_go_on(llm: AsyncLLM, engine: PlayedEngine) -> None:
    other = PlayedEngine("e2", fingerprint="fp_2")
    lost = [begin(llm, "hello") for _ in range(3)]
    await settle()
    engine.say(*((request.key, 0, [5], None) for request in engine.added))
    await settle()
    llm.add_engine(other)
    honest = begin(llm, "world")
    await settle()
    assert len(other.added) == 1
    engine.die(EngineDiedError("insides of the engine"))
    for reader in lost:
        with pytest.raises(EngineDiedError, match="sending it again is safe") as caught:
            await reader
        assert "insides" in str(caught.value.__cause__)
    await settle()
    assert engine.closed
    other.say((other.added[0].key, 0, [EOS], "stop"))
    assert (await honest)[-1].finished
    other.die(RuntimeError("a fault in reading"))
    await settle()
    assert not llm.is_ready
    with pytest.raises(EngineUnavailableError):
        await begin(llm)


async def test_a_request_that_fails_ends_alone(llm: AsyncLLM, engine: PlayedEngine) -> None:
    bad, good = begin(llm), begin(llm)
    await settle()
    engine.say(errors=[(engine.added[0].key, RayLMError("its logits were not finite"))])
    engine.say((engine.added[1].key, 0, [EOS], "stop"))
    with pytest.raises(RayLMError, match="not finite"):
        await bad
    assert (await good)[-1].finished


async def test_tokens_that_cannot_be_decoded_end_their_request_alone(llm: AsyncLLM, engine: PlayedEngine) -> None:
    await ends_alone(begin(llm), -1, llm, engine)


async def ends_alone(bad: asyncio.Task[Any], token: int, llm: AsyncLLM, engine: PlayedEngine) -> None:
    """Check that ``token`` ends the request ``bad``, and nothing else."""
    good = begin(llm)
    await settle()
    engine.say((engine.added[0].key, 0, [token], None), (engine.added[1].key, 0, [EOS], "stop"))
    with pytest.raises(RayLMError, match="could not be decoded"):
        await bad
    assert (await good)[-1].finished
    await settle()
    assert engine.stopped == [(engine.added[0].key, 0)]
    assert llm.is_ready


class FaultyParser:
    """Fails at every piece of text."""

    def __init__(self, tools: Any, *, one_call: bool) -> None: ...

    def push(self, text: str) -> Parsed:
        raise ZeroDivisionError(text)


async def test_an_answer_that_cannot_be_read_ends_its_request_alone(llm: AsyncLLM, engine: PlayedEngine) -> None:
    async def read() -> None:
        form = AnswerFormat(tool_parser=FaultyParser)  # type: ignore[arg-type]
        head = RequestHead(request_id="r")
        async with aclosing(llm.generate("hello", SamplingParams(), head, answer_format=form)) as outputs:
            await anext(outputs)

    await ends_alone(asyncio.create_task(read()), 5, llm, engine)


async def test_the_prompts_own_computation_tells_what_was_cached(llm: AsyncLLM, engine: PlayedEngine) -> None:
    reading = begin(llm, n=2)
    await settle()
    key = engine.added[0].key
    engine.say((key, 0, [5], None), (key, 1, [6], None), cached_tokens=[0, 32])
    engine.say((key, 0, [EOS], "stop"), (key, 1, [EOS], "stop"), cached_tokens=[0, 32])
    assert {output.num_cached_tokens for output in await reading} == {0}


async def test_each_sequence_that_an_error_ends_is_counted(llm: AsyncLLM, engine: PlayedEngine) -> None:
    reading = begin(llm, n=3)
    await settle()
    key = engine.added[0].key
    engine.say((key, 0, [EOS], "stop"), (key, 1, [5], None), (key, 2, [5], None))
    engine.say((key, 1, [-1], None))
    with pytest.raises(RayLMError, match="could not be decoded"):
        await reading
    samples = [sample for family in llm.metrics() for sample in family.samples]
    counts = {s.labels["finished_reason"]: s.value for s in samples if "finished_reason" in s.labels}
    assert counts == {"stop": 1, "error": 2, "abort": 0, "length": 0}


@pytest.mark.parametrize("error", [ContextLengthError("Too long.", param="prompt"), EngineUnavailableError("Later.")])
async def test_an_engines_refusal_keeps_its_class(llm: AsyncLLM, engine: PlayedEngine, error: RayLMError) -> None:
    refused = begin(llm)
    await settle()
    engine.say(errors=[(engine.added[0].key, pickle.loads(pickle.dumps(error)))])
    with pytest.raises(type(error)) as raised:
        await refused
    assert (raised.value.message, raised.value.param) == (error.message, error.param)


async def test_logprobs_are_taken_apart(llm: AsyncLLM, engine: PlayedEngine) -> None:
    asked, not_asked = begin(llm, logprobs=1, prompt_logprobs=0), begin(llm)
    await settle()
    first, second = (request.key for request in engine.added)
    prompt = list(engine.added[0].prompt_token_ids)
    columns = Logprobs([2, 0, 2], [7, 9, 8, 8], [-1.0, -0.5, -0.2, -0.2], [2, 0, 1])
    described = Logprobs([0] + [1] * (len(prompt) - 1), prompt[1:], [-3.0] * (len(prompt) - 1), [4] * len(prompt))
    engine.say(
        (first, 0, [7], None),
        (second, 0, [6], "length"),
        (first, 0, [8], "length"),
        logprobs=columns,
        prompt_logprobs=[(first, described)],
    )
    (output,) = await asked
    assert output.deltas[0].logprobs is not None
    found = [(e.token_id, e.logprob, e.rank, e.top) for e in output.deltas[0].logprobs]
    assert found == [(7, -1.0, 2, [(9, -0.5)]), (8, -0.2, 1, [(8, -0.2)])]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs if entry] == prompt[1:]
    assert (await not_asked)[0].deltas[0].logprobs is None


async def test_a_prompt_of_one_token_has_no_logprobs(llm: AsyncLLM, engine: PlayedEngine) -> None:
    asked = begin(llm, [5], prompt_logprobs=1)
    await settle()
    key = engine.added[0].key
    engine.say((key, 0, [EOS], "stop"), prompt_logprobs=[(key, Logprobs([], [], [], []))])
    (output,) = await asked
    assert list(output.prompt_logprobs or ()) == [None]


async def test_context_errors_name_the_field(llm: AsyncLLM, engine: PlayedEngine) -> None:
    for prompt in ("x" * 100_000, [5] * 128):
        outputs = llm.generate(prompt, SamplingParams(), RequestHead(request_id="r", param="messages"))
        with pytest.raises(ContextLengthError, match="maximum context length is 128 tokens") as caught:
            await anext(outputs)
        assert caught.value.param == "messages"
    assert engine.added == []


async def test_what_it_knows(llm: AsyncLLM) -> None:
    assert (llm.is_ready, llm.max_model_len, llm.model_name) == (False, 512, "played")
    llm.add_engine(PlayedEngine("e1", max_model_len=128))
    llm.add_engine(PlayedEngine("e2", max_model_len=64))
    assert (llm.is_ready, llm.max_model_len) == (True, 64)
    tokens = await llm.render_chat(ChatRequest(messages=[{"role": "user", "content": "hello"}]))
    assert await llm.detokenize(tokens) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_stopping_ends_what_is_open(llm: AsyncLLM, engine: PlayedEngine) -> None:
    reader = begin(llm)
    await settle()
    await llm.stop()
    with pytest.raises(EngineUnavailableError):
        await reader
    assert engine.closed


def test_a_checkpoint_without_tokenizer_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        AsyncLLM(Config(model=str(tmp_path)))


async def test_a_template_file_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level(), tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "chat_template.jinja").write_text("from the file")
    llm = AsyncLLM(Config(model=str(tmp_path)))
    assert (
        await llm.detokenize(await llm.render_chat(ChatRequest(messages=[{"role": "user", "content": "x"}])))
        == "from the file"
    )
    await llm.stop()


async def test_a_conversation_that_can_never_fit_is_not_rendered(
    llm: AsyncLLM, engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm._template, "render", None)
    messages = [{"role": "user", "content": "x" * 3000}] * 3
    with pytest.raises(ContextLengthError, match="9000 characters") as refused:
        await llm.prepare_chat(ChatRequest(messages=messages), SamplingParams())
    assert refused.value.param == "messages"


async def test_no_conversation_is_endless(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylm.frontend.text.chat_template._render", None)
    messages = [{"role": "user", "content": "x" * (MAX_CHARS // 2 + 1)}] * 2
    with pytest.raises(InvalidRequestError) as refused:
        await llm.render_chat(ChatRequest(messages=messages))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(("continues", "wanted"), [(True, " the"), (False, "the")])
async def test_a_completion_keeps_the_space_after_its_prompt(tmp_path: Path, continues: bool, wanted: str) -> None:
    backend = byte_fallback()
    the = backend.token_to_id("▁the")
    assert the is not None
    llm = AsyncLLM(Config(model=str(write_checkpoint(tmp_path / "checkpoint", backend)), served_model_name="played"))
    engine = PlayedEngine("e1")
    llm.add_engine(engine)
    head = RequestHead(request_id="r", continues=continues)

    async def read() -> list[RequestOutput]:
        return [output async for output in llm.generate("at the hat", SamplingParams(), head)]

    asking = asyncio.create_task(read())
    await settle()
    engine.say((engine.added[0].key, 0, [the], "length"))
    assert text_of(await asking) == wanted
    await llm.stop()


async def test_tools_are_rendered_without_strict(llm: AsyncLLM) -> None:
    """A prompt that is only counted has the tokens of the prompt that is answered."""
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = [[{"type": "function", "function": function | more}] for more in ({}, {"strict": False})]
    asked = [ChatRequest(messages=[{"role": "user", "content": "hello"}], tools=one) for one in tools]
    plain, strict = [await llm.render_chat(request) for request in asked]
    assert plain == strict
