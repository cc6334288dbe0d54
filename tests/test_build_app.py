"""build_app takes what a Serve file or a program gives it, and says in one line what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.config import Config
from raylm.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray Serve warns when it is imported


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schedular": {}}, "unknown key 'schedular'; did you mean 'scheduler'?"),
        ({"scheduler": {"max_num_seqs": 0}}, "scheduler.max_num_seqs: Input should be greater than or equal to 1"),
        ({"dtype": "float8", "device": "tpu"}, "dtype: Input should be"),
        ({"model": "/no/such/place"}, "model: the directory /no/such/place does not exist"),
        (5, "Input should be a valid dictionary"),
        (None, "Input should be a valid dictionary"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(given: Any, said: str) -> None:
    from raylm.app import build_app

    with pytest.raises(ConfigError) as caught:
        build_app(given)
    assert caught.value.message.startswith(said)
    assert "\n" not in caught.value.message
    assert "pydantic" not in caught.value.message


@pytest.mark.parametrize("given", [Config(device="cpu"), {"device": "cpu"}, {"model": "embedded", "device": "cpu"}])
def test_a_config_and_its_dict_make_the_same(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    from raylm import app

    monkeypatch.setattr(app.ray, "nodes", list)
    built = app.build_app(given)
    assert built._bound_deployment.init_args[0] == Config(device="cpu")
