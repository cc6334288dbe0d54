"""EngineName: the configuration fields that decide which engines an ingress finds."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.config import Config
from raylm.engine import EngineName, engine_digest


@pytest.mark.parametrize("app_name", ["default", "a:b", "", "EngineCore:x"])
def test_a_name_says_what_it_was_made_of(app_name: str) -> None:
    name = EngineName(app_name, "0123", "replica.0")
    assert EngineName.parse(str(name)) == name


@pytest.mark.parametrize("other", ["", "Other", "EngineCore", "EngineCore:a", "EngineCore:a:b", "Other:a:b:c"])
def test_other_actors_have_other_names(other: str) -> None:
    assert EngineName.parse(other) is None


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"ingress": {"max_queued_requests": 3}}, True),
        ({"engine": {"replicas": 2}}, True),
        ({"engine": {"replicas": {"min": 0, "max": 3}}}, True),
        ({"served_model_name": "mine"}, True),
        ({"tool_parser": "none"}, True),
        ({"reasoning_parser": "none"}, True),
        ({"model": "other"}, False),
        ({"engine": {"threads": 2}}, False),
        ({"max_model_len": 17}, False),
        ({"cache": {"num_blocks": 17}}, False),
        ({"scheduler": {"max_num_seqs": 17}}, False),
        ({"lora": {"root": "/adapters"}}, False),
    ],
)
def test_engines_depend_on_all_but_the_front_end_and_their_number(changed: dict[str, Any], same: bool) -> None:
    assert (engine_digest(Config()) == engine_digest(Config.model_validate(changed))) is same
