"""`raylm serve` MODEL_OR_FILE and knobs: the resulting Serve file, and refused words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raylm.checkpoint import EMBEDDED
from raylm.cli.main import app
from raylm.cli.options import API_KEY_VARIABLE, Place, served, to_yaml
from raylm.cli.serve_file import HAPROXY_VARIABLE, SERVE_OPTIONS, read_serve_file
from raylm.config import knobs
from raylm.errors import ConfigError
from raylm.serve_variables import SERVE_VARIABLES
from tests.serving import ROOT


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def args_of(*words: str, place: Place = Place()) -> dict[str, Any]:  # noqa: B008
    (application,) = served(words, place).tree["applications"]
    return dict(application["args"])


def test_a_model_alone_is_the_shipped_file() -> None:
    assert served(["embedded"], Place()).tree == yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())


@pytest.mark.parametrize(
    ("words", "args"),
    [
        (["--scheduler.max-num-seqs", "64"], {"scheduler": {"max_num_seqs": 64}}),
        (["--scheduler.max_num_seqs=64"], {"scheduler": {"max_num_seqs": 64}}),
        (["--max-num-seqs", "64", "--policy=priority"], {"scheduler": {"max_num_seqs": 64, "policy": "priority"}}),
        (["--cache.memory-gib=2.5"], {"cache": {"memory_gib": 2.5}}),
        (["--no-prefix-caching"], {"cache": {"prefix_caching": False}}),
        (["--no-enable-prefix-caching"], {"cache": {"prefix_caching": False}}),
        (["--cuda-graphs", "--dtype", "float32"], {"engine": {"cuda_graphs": True}, "dtype": "float32"}),
        (["--kv-cache-dtype", "fp8", "--dtype=bfloat16"], {"cache": {"dtype": "fp8"}, "dtype": "bfloat16"}),
        (["--engine.cuda-graphs", "false"], {"engine": {"cuda_graphs": False}}),
        (["--tensor-parallel-size", "2"], {"engine": {"tensor_parallel_size": 2}}),
        (["--data-parallel-size", "2"], {"engine": {"replicas": 2}}),
        (["--revision", "1234567"], {"revision": "1234567"}),
        (["--served-model-name", "7"], {"served_model_name": "7"}),
        (["--ingress.cors-origins", "['*']"], {"ingress": {"cors_origins": ["*"]}}),
        (["--max-model-len", "null"], {"max_model_len": None}),
    ],
)
def test_an_option_is_a_knob(words: list[str], args: dict[str, Any]) -> None:
    assert args_of("embedded", *words) == {"model": "embedded"} | args
    assert args_of(*words, "embedded") == {"model": "embedded"} | args


@pytest.mark.parametrize("name", [name for name, _, _ in knobs() if name != "model"])
def test_every_knob_is_an_option(name: str) -> None:
    *parents, last = name.split(".")
    default = next(default for knob, _, default in knobs() if knob == name)
    value = "x" if default is None and last.endswith(("name", "file", "env", "root", "revision")) else default
    special = {
        "otlp_endpoint": "http://c:4318",
        "cors_origins": "[]",
        "open_paths": "[]",
        "allowed_hosts": "[]",
        "mcp_servers": "[]",
    }
    text = (special | {"quantization": "int8", "block_size": "32"}).get(last, str(value).lower())
    if text == "none":
        text = "2"
    node: Any = args_of("embedded", f"--{name.replace('_', '-')}", text)
    for parent in parents:
        node = node[parent]
    assert last in node


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-num-seq", "3"], "--max-num-seq: unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        (["--schedular.policy", "x"], "did you mean 'scheduler.policy'?"),
        (["--prot", "81"], "--prot: unknown option; did you mean '--port'?"),
        (["--qwertz", "1"], "`raylm config` prints the known ones"),
        (["--replicas", "2"], "--replicas: ambiguous; did you mean --engine.replicas or --ingress.replicas?"),
        (["--enforce-eager"], "--enforce-eager: unknown key 'enforce_eager'; it is engine.cuda_graphs"),
        (["--gpu-memory-utilization", "0.9"], "the KV pool's size is cache.memory_gib"),
        (["--no-dtype"], "--no-dtype: unknown key"),
        (["--no-cuda-graphs=true"], "--no-cuda-graphs: it takes no value"),
        (["--dtype"], "--dtype: a value is missing"),
        (["--dtype", "int3"], "dtype: Input should be"),
        (["--max-num-seqs", "0"], "scheduler.max_num_seqs: Input should be greater"),
        (["--max-num-seqs", "a: ["], "scheduler.max_num_seqs: Input should be a valid integer"),
        (["--model", "x"], "--model: the model is 'embedded' already"),
        (["another"], "serve takes one model or Serve file; 2 were given: embedded, another"),
    ],
)
def test_a_wrong_option_is_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        served(["embedded", *words], Place())
    assert said in caught.value.message


def test_options_alone_name_no_model() -> None:
    with pytest.raises(ConfigError, match="one model or Serve file; none was given"):
        served(["--dtype", "float32"], Place())


def test_a_directory_is_found_from_anywhere_and_called_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EMBEDDED.parent)
    assert args_of("./embedded/") == {"model": str(EMBEDDED), "served_model_name": "./embedded/"}
    assert args_of("./embedded", "--served-model-name", "mine")["served_model_name"] == "mine"
    assert args_of("embedded") == {"model": "embedded"}


def test_a_file_that_is_no_serve_file_is_told_from_one(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("a model")
    with pytest.raises(ConfigError, match="it is a file; a model is a GGUF file, a directory"):
        served([str(tmp_path / "model.bin")], Place())
    with pytest.raises(ConfigError, match="cannot be read"):
        served([str(tmp_path / "no.yaml")], Place())


Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(tree: dict[str, Any]) -> Path:
        (tmp_path / "serve.yaml").write_text(yaml.safe_dump(tree))
        return tmp_path / "serve.yaml"

    return write


def entry(**fields: Any) -> dict[str, Any]:
    return {"import_path": "raylm:build_app", "args": {"cache": {"block_size": 32}}} | fields


def test_options_change_what_a_file_says(write: Write) -> None:
    other = {"name": "other", "import_path": "a:b", "route_prefix": "/o"}
    path = write({"applications": [other, entry()], "http_options": {"host": "0.0.0.0", "port": 81}})
    place = Place(port=82, name="mine", route_prefix="/m")
    file = served([str(path), "--cache.num-blocks", "64", "--model", "x/y"], place)
    assert file.tree["applications"] == [
        other,
        entry(name="mine", route_prefix="/m", args={"cache": {"block_size": 32, "num_blocks": 64}, "model": "x/y"}),
    ]
    assert file.tree["http_options"] == {"host": "0.0.0.0", "port": 82}
    assert file.url("/m") == "http://127.0.0.1:82/m"


def test_a_file_alone_is_served_as_it_is(write: Write) -> None:
    tree = {"applications": [entry()]}
    assert served([str(write(tree))], Place()).tree == tree


def test_an_option_for_several_applications_is_refused(write: Write) -> None:
    path = write({"applications": [entry(name="a"), entry(name="b", route_prefix="/b")]})
    with pytest.raises(ConfigError, match="has 2 RayLM applications, so options are ambiguous"):
        served([str(path), "--dtype", "float32"], Place())
    assert served([str(path)], Place(port=82)).port == 82


def test_what_is_printed_is_a_serve_file_of_the_same(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "embedded", "--port", "81", "--max_num_seqs", "9", "--print_config"])
    assert done.exit_code == 0
    (tmp_path / "serve.yaml").write_text(done.output)
    file = read_serve_file(tmp_path / "serve.yaml")
    assert file.tree == served(["embedded", "--max-num-seqs=9"], Place(port=81)).tree
    assert file.tree["controller_options"] == SERVE_OPTIONS["controller_options"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from pydantic, in Ray's schema
def test_what_is_printed_is_valid_for_serve() -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(to_yaml(served(["embedded"], Place(port=81)))))
    assert (schema.http_options.port, schema.applications[0].import_path) == (81, "raylm:build_app")


def test_an_api_key_is_named_and_not_printed() -> None:
    printed = to_yaml(served(["embedded"], Place(api_key="sk-1")))
    assert f"api_keys_env: {API_KEY_VARIABLE}" in printed
    assert "sk-1" not in printed


def test_nothing_given_is_a_call_for_help() -> None:
    done = CliRunner().invoke(app, ["serve"])
    assert "raylm serve embedded --port 8000" in done.output
    assert "Traceback" not in done.output


def test_a_wrong_word_ends_with_status_2() -> None:
    done = CliRunner().invoke(app, ["serve", "embedded", "--max-num-seq", "3"])
    assert done.exit_code == 2
    assert done.stderr.splitlines() == ["raylm: --max-num-seq: unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"]


def test_a_key_in_the_environment_is_that_of_models_without_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "two.yaml"
    entry = {"import_path": "raylm:build_app"}
    own = {"ingress": {"api_keys_file": "/keys"}}
    applications = [entry | {"name": "a", "route_prefix": "/a"}, entry | {"name": "b", "args": own}]
    file.write_text(yaml.safe_dump({"applications": applications}))
    monkeypatch.setenv(API_KEY_VARIABLE, "sk-1")
    a, b = (config.ingress for config in served([str(file)], Place()).configs())
    assert (a.api_keys_env, a.api_keys_file) == (API_KEY_VARIABLE, None)
    assert (b.api_keys_env, b.api_keys_file) == (None, "/keys")
    monkeypatch.delenv(API_KEY_VARIABLE)
    assert not served([str(file)], Place()).configs()[0].ingress.has_keys


def test_the_help_of_the_api_key_says_where_else_it_may_be() -> None:
    assert "RAYLM_API_KEY" in CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output


def test_variables_that_a_file_lacks_have_their_usual_value_but_haproxy(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    tree: dict[str, Any] = {"applications": [{"import_path": "raylm:build_app"}]}
    file.write_text(yaml.safe_dump(tree))
    lacking = SERVE_VARIABLES.keys() - {HAPROXY_VARIABLE}
    assert read_serve_file(file).environment == {name: SERVE_VARIABLES[name] for name in lacking}
    own = {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "7", "OTHER": "x"}
    file.write_text(yaml.safe_dump(tree | {"controller_options": {"runtime_env": {"env_vars": own}}}))
    assert read_serve_file(file).environment == {name: SERVE_VARIABLES[name] for name in lacking} | own


@pytest.mark.parametrize("key", ["clé", "s3cret admin", "a\tb", ""])
def test_a_key_that_no_client_can_send_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"^--api-key: "):
        served(["embedded"], Place(api_key=key))
