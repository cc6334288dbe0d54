"""YAML files: a repeated key is refused, and the text is UTF-8 in every locale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raylm.cli.options import split
from raylm.cli.serve_file import read_serve_file
from raylm.errors import ConfigError
from raylm.simulate import Fleet
from raylm.strict_yaml import parse_yaml, read_yaml

SERVED_TWICE = """applications:
- import_path: raylm:build_app
  args:
    ingress: {api_keys_file: keys}
    model: embedded
    ingress: {access_log: true}
"""


def test_a_repeated_key_of_a_serve_file_is_refused_by_name_and_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(SERVED_TWICE)
    with pytest.raises(ConfigError) as caught:
        read_serve_file(file)
    assert caught.value.message == f"{file}, line 6: the key 'ingress' is already in line 4."


def test_a_repeated_key_of_a_fleet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("ingresses: 1\nconfig: {}\ningresses: 2\n")
    with pytest.raises(ConfigError, match="line 3: the key 'ingresses' is already in line 1"):
        Fleet.read(file)


def test_a_repeated_key_of_an_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--ingress\.mcp-servers: line 1: the key 'a' is already in line 1"):
        split(["--ingress.mcp-servers", "{a: {url: http://x}, a: {url: http://y}}"])


def test_merged_keys_may_be_replaced() -> None:
    text = "nest: {base: &b {<<: &a {x: 1, y: 1}, x: 2}}\nother: {<<: *b, x: 3}\nboth: {<<: [*a, *b], 1: a, '1': b}"
    assert parse_yaml(text) == {
        "nest": {"base": {"x": 2, "y": 1}}, "other": {"x": 3, "y": 1}, "both": {"x": 1, "y": 1, 1: "a", "1": "b"},
    }  # fmt: skip


@pytest.mark.parametrize("text", [b"a: [", b"a: \xff", b"a: \x00"])
def test_a_file_that_is_no_yaml_is_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.yaml").write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path / "a.yaml")
    assert caught.value.message.startswith(f"{tmp_path / 'a.yaml'}: it cannot be read: ")
    assert "\n" not in caught.value.message


def test_files_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_bytes("\ufeffname: é".encode())
    (tmp_path / "config.json").write_bytes('{"name": "é"}'.encode())
    code = (
        "import pathlib, sys; from raylm.checkpoint import read_json; from raylm.strict_yaml import read_yaml; "
        "f = pathlib.Path(sys.argv[1]); "
        "found = read_yaml(f / 'serve.yaml'), read_json(f / 'config.json'); "
        "sys.exit(found != ({'name': chr(233)},) * 2)"
    )
    locale = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=locale, check=True)
