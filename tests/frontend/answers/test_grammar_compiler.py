"""GrammarCompiler: errors are reported, dangerous forms are refused, and known forms are not compiled again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from raylm.checkpoint import EMBEDDED
from raylm.errors import EngineUnavailableError, InvalidRequestError, OverloadedError
from raylm.frontend.answers.grammar_bounds import Form
from raylm.frontend.answers.grammar_compiler import MAX_KEPT, GrammarCompiler
from raylm.frontend.timelines.record import CURRENT, Record
from raylm.grammar_server import Verdict
from raylm.params import StructuredOutputs
from tests.frontend.cancelling import cancel_in_every_turn


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(EMBEDDED, (2, 0))
    yield compiler
    compiler.close()


WRONG: list[dict[str, Any]] = [
    {"regex": "(a"}, {"regex": "(?=a)b"}, {"json": "{"}, {"json": {"type": "nope"}}, {"json": False},
    {"json": {"type": 5}}, {"json": {"type": {"a": 1}, "required": 3}},
    {"json": {"type": "array", "uniqueItems": True}}, {"json": {"$ref": "#/nowhere"}}, {"json": {"$ref": "#"}},
    {"json": {"$ref": "http://localhost/x"}}, {"json": {"pattern": "(", "type": "string"}}, {"grammar": "xx"},
    {"json": {"type": "string", "format": "nonsense"}}, {"grammar": "start: missing"}, {"grammar": 'root ::= "a'},
    {"json": {"type": "integer", "minimum": 3, "maximum": 2}}, {"grammar": "start: start"},
    {"grammar": 'other ::= "a"'}, {"grammar": "root ::= missing"}, {"grammar": ""}, {"grammar": " \n"},
    {"grammar": 'root ::= "a"\nstart ::= root'}, {"grammar": "root ::= (" * 400}, {"json": "[" * 10**5},
    {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    {"json": {"const": "a" * 4097}}, {"regex": "a" * 4097}, {"choice": ("a" * 4097,)}, {"grammar": "\n" * 2001},
    {"grammar": f'start: "{"a" * 4097}"'}, {"json": {"enum": [0] * 20_001}}, {"choice": ("a" * 4000,) * 66},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_wrong_is_said_twice(compiler: GrammarCompiler, wrong: dict[str, Any]) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as refused:
            await compiler.compile(StructuredOutputs(**wrong, param="response_format.json_schema.schema"))
        assert refused.value.param == "response_format.json_schema.schema"
        assert len(refused.value.message) < 300


BOMBS: dict[str, dict[str, Any]] = {
    "a huge enum": {"json": {"enum": [f"v{i}" for i in range(200_000)]}},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(30_000)}}},
    "combinations": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"const": j}}} for j in range(8)]} for i in range(9)]}
    },
    "intersections": {"json": {"allOf": [{"type": "string", "pattern": f".*{c * 3}.*"} for c in "abcdefghij"]}},
    "a large number": {"json": {"type": "integer", "multipleOf": 999_983, "minimum": 5, "maximum": 10**18}},
    "repetition": {"regex": "a{1000000}b"},
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_ends_and_others_are_served_meanwhile(compiler: GrammarCompiler, name: str) -> None:
    await compiler.compile(StructuredOutputs(regex="a"))
    bomb = asyncio.create_task(compiler.compile(StructuredOutputs(**BOMBS[name])))
    assert await compiler.compile(StructuredOutputs(regex="b+"))
    (ended,) = await asyncio.gather(bomb, return_exceptions=True)
    if isinstance(ended, BaseException):  # it may also be within the limits
        assert isinstance(ended, InvalidRequestError)
        assert ended.param == "structured_outputs"
    else:
        assert ended


def chain(rules: int, last: str = "b") -> StructuredOutputs:
    """A grammar of rules that each use the next one."""
    lines = [f'r{i}: "a" r{i + 1}' for i in range(rules)]
    return StructuredOutputs(grammar="\n".join(["%llguidance {}", "start: r0", *lines, f'r{rules}: "{last}"']))


def references(definitions: int, last: str = "string") -> StructuredOutputs:
    chained: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(definitions)}
    return StructuredOutputs(json={"$ref": "#/$defs/d0", "$defs": chained | {f"d{definitions}": {"type": last}}})


CRASHES = {"rules": chain(1900), "references": references(1900)}


@pytest.mark.parametrize("name", CRASHES)
async def test_what_overflows_a_stack_is_refused_however_often_it_comes(compiler: GrammarCompiler, name: str) -> None:
    await compiler.compile(StructuredOutputs(regex="a"))
    sent = [asyncio.create_task(compiler.compile(CRASHES[name])) for _ in range(100)]
    assert await compiler.compile(StructuredOutputs(regex="b+"))
    for ended in await asyncio.gather(*sent, return_exceptions=True):
        assert isinstance(ended, InvalidRequestError)
        assert ended.message == "Invalid value for 'structured_outputs': it is too complex to compile."


async def test_a_form_that_works_for_long_is_ended(compiler: GrammarCompiler) -> None:
    """The time to parse GBNF grows with the square of the rules. The process gets two seconds."""
    rules = "\n".join(f"r{i} ::= [a] r{i + 1}" for i in range(1950))
    with pytest.raises(InvalidRequestError, match="too complex to compile"):
        await compiler.compile(StructuredOutputs(grammar=f"root ::= r0\n{rules}\nr1950 ::= [b]"))


GREEDY_FOR_MEMORY = f'start: "{"x" * 4000}" start start'


async def test_a_form_that_takes_too_much_memory_ends_its_process_alone(compiler: GrammarCompiler) -> None:
    await compiler.compile(StructuredOutputs(regex="a"))
    server = compiler._process._server
    with pytest.raises(InvalidRequestError, match="too complex to compile"):
        await compiler.compile(StructuredOutputs(grammar=GREEDY_FOR_MEMORY))
    assert await compiler.compile(StructuredOutputs(regex="b+"))
    assert compiler._process._server is server


def test_an_allocation_that_fails_ends_the_whole_process() -> None:
    """The reason for separate processes: llguidance allocates 1.5 GiB at once, and Rust aborts if it cannot."""
    program = (
        "from raylm.checkpoint import EMBEDDED\nfrom raylm.grammar import load_tokenizer\n"
        "from raylm import fork_server, grammar_server\nfrom raylm.params import StructuredOutputs\n"
        "tokenizer = load_tokenizer(EMBEDDED, (2, 0))\nfork_server.set_limits()\n"
        f"grammar_server.judge(tokenizer, StructuredOutputs(grammar={GREEDY_FOR_MEMORY!r}))\n"
    )
    env = os.environ | {"RUST_BACKTRACE": "0"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGABRT
    assert "memory allocation of" in ended.stderr


async def test_masks_that_take_long_are_refused(compiler: GrammarCompiler) -> None:
    """The limit of a mask applies, or on a slow processor the limit of the whole form."""
    piece = '"' + "a" * 4000 + '"'
    with pytest.raises(
        InvalidRequestError, match=r"one token of the answer takes more than 20 ms|complex to compile\."
    ):
        await compiler.compile(StructuredOutputs(grammar=f"start: A\nA: {' '.join([piece] * 60)}"))


@pytest.mark.parametrize("properties", [500, 1000, 2000])
async def test_what_could_not_be_followed_later_is_refused(compiler: GrammarCompiler, properties: int) -> None:
    """After the first quotation mark any of the names may follow, too many for a row of the parser."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
    with pytest.raises(InvalidRequestError, match="too complex"):
        await compiler.compile(StructuredOutputs(json=schema))
    schema["required"] = list(schema["properties"])[:-100]
    assert properties > 500 or await compiler.compile(StructuredOutputs(json=schema))


async def test_a_server_that_was_lost_is_started_again(compiler: GrammarCompiler) -> None:
    await compiler.compile(StructuredOutputs(regex="a"))
    server = compiler._process._server
    assert server is not None
    server.kill()
    server.wait()
    assert await compiler.compile(StructuredOutputs(regex="b"))


async def test_a_server_that_cannot_start_is_no_fault_of_the_form(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, (2,))
    with pytest.raises(EngineUnavailableError) as refused:
        await compiler.compile(StructuredOutputs(regex="a"))
    assert refused.value.retry_after_s
    compiler.close()


@pytest.mark.parametrize("answer", [b"\0", b'\0["gram'])
async def test_an_answer_that_is_not_whole_is_none(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    async def ask(*_: object) -> bytes:
        return answer

    monkeypatch.setattr("raylm.frontend.answers.grammar_process._ask", ask)
    with pytest.raises(InvalidRequestError, match="too complex to compile"):
        await compiler.compile(StructuredOutputs(regex="a"))


async def test_limits_hold_where_signals_are_blocked(compiler: GrammarCompiler) -> None:
    """A server inherits blocked and ignored signals from the thread that starts it."""
    deadly = {signal.SIGALRM, signal.SIGPROF, signal.SIGIO}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deadly)
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in deadly}
    try:
        await compiler.compile(StructuredOutputs(regex="a"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in ignored.items():
            signal.signal(number, handler)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1_600)}}
    assert await compiler._process.prove(("json", json.dumps(wide)), cpu_s=0.005, nice=0) is None
    assert await compiler._process.prove(("json", json.dumps(wide)), cpu_s=2.0, nice=0) is not None


async def test_the_process_of_a_cancelled_form_ends(compiler: GrammarCompiler) -> None:
    """The work would take two more seconds. Its place is free at once."""
    await compiler.compile(StructuredOutputs(regex="a"))
    server = compiler._process._server
    assert server is not None
    await _busy(compiler, server.pid)
    await until(lambda: not _children(server.pid))
    assert not compiler._jobs
    assert await compiler.compile(StructuredOutputs(regex="b"))


async def _busy(compiler: GrammarCompiler, server: int) -> None:
    """Wait until a large form is being compiled, then cancel it."""
    rules = "\n".join(f"r{i} ::= [a] r{i + 1}" for i in range(1950))
    task = asyncio.create_task(compiler.compile(StructuredOutputs(grammar=f"root ::= r0\n{rules}\nr1950 ::= [b]")))
    await until(lambda: bool(_children(server)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


class Played:
    """Replaces the processes. Records the forms, and answers when the test sets ``go``."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.cancelled = 0
        self.go = asyncio.Event()

    async def prove(self, form: Form, cpu_s: float, nice: int) -> Verdict | None:
        self.asked.append(form[1])
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return f"grammar of {form[1]}", None

    def close(self) -> None:
        pass


@pytest.fixture
async def played(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(compiler, "_process", played)
    return played


def large(number: int) -> StructuredOutputs:
    return StructuredOutputs(choice=(f"{number}", *(x * 4000 for x in "vwxyz")))


def huge(name: str) -> StructuredOutputs:
    """A form that is larger than a ``large`` one."""
    return StructuredOutputs(choice=(name, *(x * 4090 for x in "vwxyz")))


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_equal_forms_in_flight_are_one(compiler: GrammarCompiler, played: Played) -> None:
    sent = [asyncio.create_task(compiler.compile(StructuredOutputs(regex="a", param=f"p{i}"))) for i in range(20)]
    await _settle()
    sent[3].cancel()
    played.go.set()
    ended = await asyncio.gather(*sent, return_exceptions=True)
    assert isinstance(ended.pop(3), asyncio.CancelledError)
    assert set(ended) == {"grammar of a"}
    assert played.asked == ["a"]
    assert not played.cancelled


async def test_a_form_that_nobody_waits_for_is_given_up(compiler: GrammarCompiler, played: Played) -> None:
    sent = [asyncio.create_task(compiler.compile(StructuredOutputs(regex="a"))) for _ in range(3)]
    await _settle()
    for task in sent:
        task.cancel()
    await asyncio.gather(*sent, return_exceptions=True)
    await _settle()
    assert played.cancelled == 1
    played.go.set()
    assert await compiler.compile(StructuredOutputs(regex="a"))


async def test_small_forms_pass_large_ones_and_too_many_are_turned_away(
    compiler: GrammarCompiler, played: Played
) -> None:
    many = [asyncio.create_task(compiler.compile(large(i))) for i in range(60)]
    await _settle()
    ended = [task.exception() for task in many if task.done()]
    assert len(ended) == 60 - 17
    assert all(isinstance(error, OverloadedError) and error.retry_after_s for error in ended)
    small = asyncio.create_task(compiler.compile(StructuredOutputs(regex="a")))
    await _settle()
    assert [type(asked) for asked in played.asked] == [list, str]
    for task in many[10:]:
        task.cancel()
    await _settle()
    played.go.set()
    await small
    assert len([task for task in await asyncio.gather(*many, return_exceptions=True) if isinstance(task, str)]) == 10
    assert len(played.asked) == 11


async def test_the_smallest_that_waits_is_next(compiler: GrammarCompiler, played: Played) -> None:
    texts = ["a" * 3000, "b" * 2000, "c" * 1000, "d"]
    sent = [asyncio.create_task(compiler.compile(StructuredOutputs(regex=text))) for text in texts]
    await _settle()
    played.go.set()
    await asyncio.gather(*sent)
    assert [text[0] for text in played.asked] == ["a", "b", "d", "c"]


async def compile_for_key(compiler: GrammarCompiler, key: str, spec: StructuredOutputs) -> str:
    """Compile a form for a request of an API key."""
    CURRENT.set(Record("a request", key, "/", time.time))
    return await compiler.compile(spec)


async def test_keys_have_their_forms_compiled_in_turn(compiler: GrammarCompiler, played: Played) -> None:
    """Whatever their sizes, the many forms of one key delay each form of another key by one."""
    many = [asyncio.create_task(compile_for_key(compiler, "many", large(number))) for number in range(10)]
    await _settle()
    others = [asyncio.create_task(compile_for_key(compiler, key, huge(key))) for key in ("few", "other", "few")]
    await _settle()
    played.go.set()
    await asyncio.gather(*many, *others)
    order = [asked[0] for asked in played.asked]
    assert order == ["0", "few", "other", *map(str, range(1, 10))], "the third form is the same as the first"


async def test_one_key_turns_no_other_away(compiler: GrammarCompiler, played: Played) -> None:
    many = [asyncio.create_task(compile_for_key(compiler, "many", large(number))) for number in range(40)]
    await _settle()
    waiting = [task for task in many if not task.done()]
    assert len(waiting) == 17
    few = [asyncio.create_task(compile_for_key(compiler, "few", large(number))) for number in range(100, 110)]
    await _settle()
    gone = [task for task in waiting if task.done()]
    assert gone == waiting[-8:], "the newest forms of the key"
    assert all(isinstance(task.exception(), OverloadedError) for task in gone)
    assert [task.done() for task in few] == [False] * 8 + [True] * 2
    waiting[1].cancel()
    played.go.set()
    ended = await asyncio.gather(*many, *few, return_exceptions=True)
    assert sum(isinstance(found, str) for found in ended) == 1 + 7 + 8
    assert [int(asked[0]) >= 100 for asked in played.asked[:5]] == [False, True, False, True, False]


async def test_a_cancellation_is_never_lost(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prove(*_: object) -> Verdict:
        return await asyncio.to_thread(lambda: ("a grammar", None))

    monkeypatch.setattr(compiler._process, "prove", prove)
    await cancel_in_every_turn(lambda: compiler.compile(StructuredOutputs(regex="a")))


async def test_a_form_is_compiled_once_and_the_oldest_are_forgotten(compiler: GrammarCompiler, played: Played) -> None:
    played.go.set()
    first = await compiler.compile(StructuredOutputs(regex="a"))
    assert await compiler.compile(StructuredOutputs(regex="a", param="other")) == first
    assert played.asked == ["a"]
    for i in range(MAX_KEPT):
        await compiler.compile(StructuredOutputs(regex=f"b{i}"))
    assert len(compiler._verdicts) == MAX_KEPT
    await compiler.compile(StructuredOutputs(regex="a"))
    assert played.asked.count("a") == 2


async def test_kinds_share_nothing(compiler: GrammarCompiler) -> None:
    """The same text is a form of each kind."""
    kinds: list[dict[str, Any]] = [{"json": '"x"'}, {"regex": '"x"'}, {"choice": ('"x"',)}, {"grammar": '"x"'}]
    for kind in kinds:
        with suppress(InvalidRequestError):
            await compiler.compile(StructuredOutputs(**kind))
    assert len(compiler._verdicts) == len(kinds)
    with pytest.raises(InvalidRequestError):
        await compiler.compile(StructuredOutputs(grammar=""))
    assert json.loads(await compiler.compile(StructuredOutputs(json_object=True)))


async def test_a_model_without_an_end_token_cannot() -> None:
    compiler = GrammarCompiler(EMBEDDED, ())
    with pytest.raises(InvalidRequestError, match="no token that ends"):
        await compiler.compile(StructuredOutputs(regex="a"))
    compiler.close()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "json": {}},
        {"choice": ()},
        {"choice": ("a", "")},
        {"regex": "a" * 2**19},
        {"choice": ("a",) * 2000},
    ],
)
def test_exactly_one_form_within_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        StructuredOutputs(**fields)
    assert refused.value.param == "structured_outputs"
