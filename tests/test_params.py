"""Parameters from Python callers: types are checked when parameters are created, not in the engine."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.errors import InvalidRequestError
from raylm.params import PoolingParams, SamplingParams, StructuredOutputs


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"])
def test_lists_are_as_good_as_tuples(name: str) -> None:
    items: list[Any] = ["a", "b"] if name in ("stop", "bad_words") else [5, 6]
    params = SamplingParams(**{name: items})
    assert params == SamplingParams(**{name: tuple(items)})
    assert hash(getattr(params, name)) == hash(tuple(items))


def test_one_stop_string_is_not_a_list_of_letters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1.5),
        ("n", True),
        ("top_k", "1"),
        ("max_tokens", 1.5),
        ("seed", "x"),
        ("logprobs", True),
        ("temperature", "1"),
        ("temperature", None),
        ("stop", [5]),
        ("stop", None),
        ("bad_words", "x"),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", 5),
        ("allowed_token_ids", [1.5]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: "x"}),
        ("logit_bias", [1]),
        ("structured_outputs", "a"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name} must be")


def test_a_form_may_be_a_dict() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputs(choice=("a", "b"))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "takes exactly one of json"),
        ({"choice": ["a"], "regex": "a"}, "takes exactly one of json"),
        ({"regexp": "a"}, "and no ['regexp']."),
        ({"param": "regex", "regex": "a"}, "and no ['param']."),
        ({"regex": 5}, "takes regex as a str."),
        ({"grammar": b"start: A"}, "takes grammar as a str."),
        ({"json": 5}, "takes json as a schema, an object or its text."),
        ({"json_object": "yes"}, "takes json_object as a bool."),
        ({"choice": "ab"}, "takes choice as a list of str."),
        ({"choice": ["a", 5]}, "takes choice as a list of str."),
    ],
)
def test_what_is_no_form_is_refused(form: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(structured_outputs=form)
    assert refused.value.param == "structured_outputs"
    assert said in refused.value.message


@pytest.mark.parametrize(("name", "value"), [("dimensions", "8"), ("dimensions", 8.0), ("normalize", 1)])
def test_what_is_no_way_to_pool_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        PoolingParams(**{name: value})
    assert refused.value.param == name
