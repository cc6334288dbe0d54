"""Tool parsers find calls in texts as the families' chat templates write them, however the texts are cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.frontend.answers.tool_calls import TOOL_PARSERS, ToolParser, detect_tool_parser
from raylm.frontend.answers.tool_parsers.qwen3_coder import Qwen3CoderParser
from raylm.frontend.outputs import ToolCallDelta, join_calls
from tests.frontend.pieces import cut

TOOLS: dict[str, Any] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "note": {"type": "object", "properties": {"text": {"type": "string"}, "tags": {"type": "array"}}},
    "now": {},
}
CALLS = [
    ("get_weather", {"city": "Paris", "days": 3}),
    ("note", {"text": 'a "}]</tool_call>\\ é\n', "tags": [{"x": []}]}),
]
Call = tuple[str, dict[str, Any]]


def hermes(calls: list[Call]) -> str:
    dumped = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in dumped)


def mistral_list(calls: list[Call]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_names(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def llama(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def coder(calls: list[Call]) -> str:
    texts = []
    for name, arguments in calls:
        bare = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in bare.items())
        texts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(texts)


WRITERS = [
    ("hermes", hermes),
    ("mistral", mistral_list),
    ("mistral", mistral_names),
    ("llama3_json", llama),
    ("qwen3_coder", coder),
    ("qwen3_coder", hermes),
]


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[ToolCallDelta]]:
    """All content, and the calls joined as a client does. Checks the rules of the stream."""
    content, calls = "", None
    opened = 0
    for place in range(len(pieces) + 1):
        for text, news in parser.push(pieces[place]) if place < len(pieces) else parser.flush():
            content += text
            for call in news:
                assert (call.id is None) == (call.name is None)
                if call.id is not None:
                    assert call.index == opened
                    opened += 1
                assert call.index == opened - 1
            assert len({call.index for call in news}) == len(news)
            calls = join_calls(calls, news)
    return content, calls or []


def plain(calls: list[ToolCallDelta]) -> list[Call]:
    return [(call.name or "", json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("name", "write"), WRITERS)
@pytest.mark.parametrize("seed", range(25))
def test_calls_are_found_however_the_text_is_cut(name: str, write: Any, seed: int) -> None:
    for wanted in (CALLS[:1], CALLS):
        text = write(wanted)
        whole = read(TOOL_PARSERS[name](TOOLS), [text])
        pieces = read(TOOL_PARSERS[name](TOOLS), cut(text, seed))
        assert plain(pieces[1]) == plain(whole[1]) == wanted
        assert [call.arguments for call in pieces[1]] == [call.arguments for call in whole[1]]
        assert pieces[0] == whole[0] == ""
        assert len({call.id for call in pieces[1]}) == len(wanted)


@pytest.mark.parametrize(("name", "write"), [w for w in WRITERS if w[0] != "llama3_json"])
def test_content_before_and_behind_calls_stays(name: str, write: Any) -> None:
    text = f"I look it up.\n\n{write(CALLS)}"
    for seed in range(10):
        content, calls = read(TOOL_PARSERS[name](TOOLS), cut(text, seed))
        assert (content, plain(calls)) == ("I look it up.", CALLS)
    if name != "mistral":
        content, calls = read(TOOL_PARSERS[name](TOOLS), cut(text + "\nDone.", 3))
        assert (content, plain(calls)) == ("I look it up.\nDone.", CALLS)


ANSWERS = [
    "", "Just text.", "a < b and <tool", "<tool_call>", "<tool_call>\n{\"nam", "<tool_call>no object</tool_call>",
    '<tool_call>{"city": "Paris"}</tool_call>', '<tool_call>{"name": 3}</tool_call>', "  spaces  ", '{"a": 1}',
    '{"name": "Ann", "age": 3}', "{", "[1, 2]", "{'name': 'x'}", "[TOOL", "line\n", "<|python_tag|>", "<tool_call>[1]",
]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("text", ANSWERS)
def test_what_is_no_call_is_content_as_it_was_written(name: str, text: str) -> None:
    for pieces in ([text], list(text), cut(text, 1)):
        content, calls = read(TOOL_PARSERS[name](TOOLS), pieces)
        assert calls == []
        assert re.sub(r"\s", "", content) == re.sub(r"\s", "", text)
        if "<tool_call>" not in text:
            assert content == text


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(text=st.text(st.sampled_from('{}[]":,nametool_callargumentsTOOL_CALLS<>/=; \n\\')), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_any_text_is_read_to_its_end_and_alike_however_cut(name: str, text: str, seed: int) -> None:
    for begun in ("", TOOL_PARSERS[name].marker, hermes(CALLS)[:60]):
        whole = read(TOOL_PARSERS[name](TOOLS), [begun + text])
        pieces = read(TOOL_PARSERS[name](TOOLS), cut(begun + text, seed))
        assert whole[0] == pieces[0]
        assert [(c.name, c.arguments) for c in whole[1]] == [(c.name, c.arguments) for c in pieces[1]]


def test_arguments_stream_before_they_are_complete() -> None:
    parser = TOOL_PARSERS["hermes"](TOOLS)
    parser.push('<tool_call>\n{"name": "note", "arguments": {"text": "one')
    ((_, news),) = parser.push(" two")
    assert [(call.index, call.id, call.arguments) for call in news] == [(0, None, " two")]


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "now"}', {}),
        ('{"arguments": {"city": "x"}, "name": "get_weather"}', {"city": "x"}),
        ('{"id": [1], "name": "now", "arguments": null}', {}),
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{ "name" : "now" , "parameters" : { } }', {}),
    ],
)
def test_objects_in_other_forms(name: str, written: str, arguments: dict[str, Any]) -> None:
    text = f"<tool_call>{written}</tool_call>" if name == "hermes" else written
    for pieces in ([text], list(text)):
        _, (call,) = read(TOOL_PARSERS[name](TOOLS), pieces)
        assert json.loads(call.arguments) == arguments


def test_ids_of_mistral_are_of_nine_letters_and_digits() -> None:
    _, calls = read(TOOL_PARSERS["mistral"](TOOLS), [mistral_list(CALLS)])
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call.id or "") for call in calls)


@pytest.mark.parametrize("schema", [{"properties": {"x": True}}, {"properties": ["x"]}, {"properties": True}])
def test_bare_values_under_a_schema_that_says_nothing_of_them(schema: dict[str, Any]) -> None:
    _, (call,) = read(TOOL_PARSERS["qwen3_coder"]({"f": schema}), [coder([("f", {"x": 1})])])
    assert json.loads(call.arguments) == {"x": 1}


def test_bare_values_get_the_types_of_the_schema() -> None:
    schema = {"properties": {"s": {"type": "string"}, "n": {"type": "number"}, "b": {"type": "boolean"}, "x": {}}}
    text = coder([("f", {"s": "12", "n": 1.5, "b": True, "x": "bare", "y": {"z": None}})])
    _, (call,) = read(TOOL_PARSERS["qwen3_coder"]({"f": schema}), cut(text.replace("true", "True"), 0))
    assert json.loads(call.arguments) == {"s": "12", "n": 1.5, "b": True, "x": "bare", "y": {"z": None}}


REFERRED = {
    "$defs": {
        "Name": {"type": "string"},
        "Color/~1": {"enum": ["1", "2"]},
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]},
        "Ring": {"$ref": "#/$defs/Other"},
        "Other": {"anyOf": [{"$ref": "#/$defs/Ring"}, {"oneOf": [{"$ref": "#/$defs/Name"}]}]},
        "Itself": {"$ref": "#/$defs/Itself"},
    },
}


@pytest.mark.parametrize(
    ("schema", "typed"),
    [
        ({"$ref": "#/$defs/Name"}, "12"),
        ({"$ref": "#/$defs/Color~1~01"}, "12"),
        ({"$ref": "#/%24defs/Maybe"}, "12"),
        ({"$ref": "#/$defs/Maybe/anyOf/0"}, "12"),
        ({"$ref": "#/$defs/Maybe/anyOf/7"}, 12),
        ({"$ref": "#/$defs/Ring"}, "12"),
        ({"$ref": "#/$defs/Itself"}, 12),
        ({"allOf": [{"$ref": "#/$defs/Name"}, {"maxLength": 9}]}, "12"),
        ({"anyOf": [{"anyOf": [{"anyOf": [{"type": "string"}]}]}]}, "12"),
        ({"const": "12"}, "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 12),
        ({"$ref": "https://example.com/schema"}, 12),
        ({"$ref": "#/$defs/Missing"}, 12),
        ({"$ref": 7, "anyOf": {}}, 12),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_bare_values_get_the_types_that_a_schema_refers_to(schema: dict[str, Any], typed: object, whole: bool) -> None:
    """Also if a reference defines all parameters."""
    parameters = REFERRED | {"properties": {"x": schema}}
    if whole:
        parameters = {"$defs": REFERRED["$defs"] | {"All": {"properties": {"x": schema}}}, "$ref": "#/$defs/All"}
    _, (call,) = read(TOOL_PARSERS["qwen3_coder"]({"f": parameters}), [coder([("f", {"x": 12})])])
    assert json.loads(call.arguments) == {"x": typed}


def test_parsers_are_told_by_templates() -> None:
    assert detect_tool_parser("{{ '<tool_call>' }}") == "hermes"
    assert detect_tool_parser("<tool_call>\n<function=x>\n<parameter=y>") == "qwen3_coder"
    assert detect_tool_parser("[TOOL_CALLS]") == "mistral"
    assert detect_tool_parser("""{"name": function name, "parameters": dict} Environment: ipython""") == "llama3_json"
    assert detect_tool_parser("{{ messages }}") is None


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"oneOf": [{"enum": ["1", "2"]}, {"type": "null"}]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "True", "True"),
        ({"enum": ["true", "false"]}, "true", "true"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "integer"}, "1", 1),
        ({"anyOf": "string", "type": 3}, "1", 1),
    ],
)
def test_a_bare_value_is_a_string_where_the_schema_says_so(schema: Any, text: str, value: Any) -> None:
    parser = Qwen3CoderParser({"f": {"properties": {"a": schema}}})
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ((_, calls),) = parser.push(call)
    assert json.loads("".join(call.arguments for call in calls)) == {"a": value}


CODED = coder([("note", {"text": "one", "tags": [1]})])


@pytest.mark.parametrize("length", range(len("<tool_call>\n<function=note>"), len(CODED)))
def test_a_cut_call_in_xml_leaves_no_content(length: int) -> None:
    for pieces in ([CODED[:length]], list(CODED[:length])):
        content, (call,) = read(TOOL_PARSERS["qwen3_coder"](TOOLS), pieces)
        assert content == ""
        assert '{"text": "one", "tags": [1]}'.startswith(call.arguments)


def test_a_bare_number_keeps_its_digits() -> None:
    schema = {"properties": {"n": {"type": "integer"}, "x": {"type": "number"}}}
    values = {"n": "12345678901234567890123", "x": "1.50"}
    _, (call,) = read(TOOL_PARSERS["qwen3_coder"]({"f": schema}), [coder([("f", values)])])
    assert call.arguments == '{"n": 12345678901234567890123, "x": 1.50}'


@pytest.mark.parametrize("end", [";", "; ", " ;\n"])
def test_what_separates_calls_is_no_content(end: str) -> None:
    for pieces in ([llama(CALLS) + end], list(llama(CALLS) + end)):
        content, calls = read(TOOL_PARSERS["llama3_json"](TOOLS), pieces)
        assert (content, plain(calls)) == ("", CALLS)


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS][]", "[TOOL_CALLS][note", '[TOOL_CALLS][{"a": 1}]', "[TOOL_CALLS][ [1]]"]
)
def test_a_list_without_calls_is_content(text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(TOOL_PARSERS["mistral"](TOOLS), pieces) == (text, [])


def test_one_object_in_place_of_a_list_is_a_call() -> None:
    text = '[TOOL_CALLS]{"name": "now", "arguments": {"a": 1}}'
    for pieces in ([text], list(text)):
        content, calls = read(TOOL_PARSERS["mistral"](TOOLS), pieces)
        assert (content, plain(calls)) == ("", [("now", {"a": 1})])
