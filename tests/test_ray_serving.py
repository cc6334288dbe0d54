"""End to end with `raylm serve`: answers, disconnected clients, calls by handle, killed processes, and shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from raylm.checkpoint import EMBEDDED, Checkpoint
from raylm.cli.serve_process import port_is_free
from tests.ingress.bad_inputs import bad_inputs
from tests.ingress.harness import until
from tests.ingress.test_bad_inputs import LIMIT_S, good_answer, refuse
from tests.reference import greedy, random_prompts
from tests.serving import ARGS, ROOT, Server, chat, free_port, serve_file, text_of, websocket_upgrade
from tests.test_ray_other_users import look

pytestmark = pytest.mark.ray

QUESTION = "What is a KV cache?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of this module except the last, which stops it."""
    port = free_port()
    with Server(serve_file(tmp_path_factory.mktemp("serve") / "serve.yaml", port, ARGS), port) as server:
        yield server


async def stream_text(client: httpx.AsyncClient, content: str, **fields: object) -> str:
    async with client.stream("POST", "/v1/chat/completions", json=chat(content, stream=True, **fields)) as answer:
        assert answer.status_code == 200
        return "".join([text_of(line) async for line in answer.aiter_lines()])


async def drop_at_random(client: httpx.AsyncClient, content: str) -> None:
    """Disconnect at a random time: before the head, within a stream, or while waiting for a whole answer."""
    body = chat(content, stream=random.random() < 0.8, ignore_eos=True, max_tokens=2000)
    try:
        async with asyncio.timeout(random.random()), client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                pass
    except TimeoutError:
        return


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    found = re.findall(
        r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{.*\} (\S+)$", text, re.M
    )
    return {name: float(value) for name, value in found}


async def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        whole = (await client.post("/v1/chat/completions", json=chat(QUESTION, max_tokens=40))).json()
        text = whole["choices"][0]["message"]["content"]
        assert len(text) > 20
        assert await stream_text(client, QUESTION, max_tokens=40) == text


def test_the_controller_starts_haproxy_with_our_settings(server: Server) -> None:
    commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in server.processes()]
    haproxies = [command for command in commands if command[0].endswith("/haproxy")]
    assert haproxies
    assert all("-dS" in command for command in haproxies)


async def test_tokens_equal_those_of_transformers(server: Server) -> None:
    prompts = random_prompts(32, Checkpoint(EMBEDDED).config["vocab_size"], seed=5)
    fields = {"model": "embedded", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        asked = (client.post("/v1/completions", json=fields | {"prompt": prompt}) for prompt in prompts)
        answers = [answer.json() for answer in await asyncio.gather(*asked)]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == greedy(EMBEDDED, prompts, 16)


async def test_a_refusal_has_one_request_id_and_the_envelope(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        answer = await client.get("/v1/nothing", headers={"x-request-id": "mine"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_a_websocket_is_refused_and_nothing_is_logged_of_it(server: Server) -> None:
    before = len(server.log.read_text())
    assert all(websocket_upgrade(server.port, "/v1/requests").startswith(b"HTTP/1.1 40") for _ in range(20))
    assert "Traceback" not in server.log.read_text()[before:]


async def test_bad_inputs_are_refused_through_the_proxy_too(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
        before = await good_answer(client)
        for number, bad in enumerate([*bad_inputs()][::3], 1):
            assert await refuse(client, bad) is None
            if number % 25 == 0:
                assert await good_answer(client) == before
    assert number >= 400


async def test_dropped_streams_leave_no_trace_and_touch_nobody(server: Server) -> None:
    questions = [f"Count from {i} to {i + 9}." for i in range(8)]
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        alone = [await stream_text(client, question, ignore_eos=True, max_tokens=80) for question in questions]
        before = await gauges(client)
        honest = [stream_text(client, question, ignore_eos=True, max_tokens=80) for question in questions]
        dropped = [drop_at_random(client, f"Count from {i}.") for i in range(64)]
        together = await asyncio.gather(*honest, *dropped)
        assert together[:8] == alone
        async with asyncio.timeout(300):
            while await gauges(client) != before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert before == {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}


def test_the_handle_example_calls_without_http(server: Server) -> None:
    found = run_example("handle_call.py")
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=chat(QUESTION, max_tokens=64), timeout=300).json()
    assert whole["choices"][0]["message"]["content"] in found
    assert re.search(r"^\d+ tokens$", found, re.M)


@pytest.mark.parametrize("script", ["openai_client.py", "curl.sh"])
def test_the_client_examples_run(server: Server, script: str) -> None:
    assert "attention" in run_example(script, f"{server.url}/v1")


def run_example(script: str, *args: str) -> str:
    command = [str(ROOT / "examples" / script)] if script.endswith(".sh") else [sys.executable, f"examples/{script}"]
    done = subprocess.run([*command, *args], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rays_ports_are_on_loopback_and_the_printed_command_finds_them(server: Server) -> None:
    assert {host for host, _ in look(server._session).ports} == {"127.0.0.1"}
    (command,) = re.findall(r"RAY_AUTH_MODE=\S+ RAY_ADDRESS=\S+ ray status", server.log.read_text())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    assert "Node status" in done.stdout, done.stderr


def test_a_worker_on_cpus_goes_behind_those_who_deliver_its_tokens(server: Server) -> None:
    def niceness(name: str) -> set[int]:
        (pid,) = server.processes(name)
        return {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}

    assert niceness("WorkerActor") == {5}
    assert niceness("EngineCoreActor") == {0}


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("WorkerActor", signal.SIGKILL),
        pytest.param("EngineCoreActor", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("ServeReplica:default:Engine", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("WorkerActor", signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("EngineCoreActor", signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_a_stream_outlives_a_killed_or_stopped_process_with_the_text_of_an_undisturbed_one(
    server: Server, victim: str, number: int
) -> None:
    body = chat(QUESTION, stream=True, ignore_eos=True, max_tokens=3000, temperature=0.8, seed=7, n=2)
    begun = threading.Event()

    def read_stream() -> list[str]:
        texts = ["", ""]
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=300) as answer:
            for line in filter(re.compile("data").match, answer.iter_lines()):  # comments are keep-alives
                last = line
                for choice in json.loads(line[6:])["choices"] if line != "data: [DONE]" else ():
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                    if all(len(text) > 100 for text in texts):
                        begun.set()
        assert last == "data: [DONE]"
        return texts

    undisturbed = read_stream()
    begun.clear()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read_stream)
        assert begun.wait(300)
        assert not reader.done()
        server.kill_actor(victim, number)
        assert reader.result(300) == undisturbed
    server.wait_ready()
    assert len(server.processes("WorkerActor")) == len(server.processes("EngineCoreActor")) == 1


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("WorkerActor", signal.SIGKILL),
        pytest.param("EngineCoreActor", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("WorkerActor", signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_lost_idle_is_replaced_before_a_request_needs_it(
    server: Server, victim: str, number: int
) -> None:
    (before,) = server.processes(victim)
    server.kill_actor(victim, number)
    server.wait_until(lambda: server.processes(victim) not in ([], [before]), "has no new process")
    server.wait_ready()
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat(QUESTION, max_tokens=40), timeout=300)
    assert "attention" in answer.json()["choices"][0]["message"]["content"]


async def test_at_a_stop_streams_get_their_end_and_no_process_stays(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        short, long = list[str](), list[str]()
        tasks = [
            asyncio.create_task(collect(client, chat(QUESTION, stream=True, ignore_eos=True, max_tokens=tokens), lines))
            for tokens, lines in ((100, short), (8000, long))
        ]
        await until(lambda: bool(short and long))
        status = await asyncio.to_thread(server.stop, signal.SIGTERM)
        await asyncio.gather(*tasks)
    assert short[-1] == "data: [DONE]"
    assert json.loads(long[-1][6:])["error"]["code"] == "shutting_down"
    assert status == 0
    assert server.processes() == []
    assert port_is_free("127.0.0.1", server.port)


async def collect(client: httpx.AsyncClient, body: dict[str, object], lines: list[str]) -> None:
    """Append the lines of a stream to ``lines`` as they arrive."""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)  # noqa: PERF401 - others look at it meanwhile


@pytest.mark.long
def test_local_executor_behind_the_default_proxy(tmp_path: Path) -> None:
    port = free_port()
    args = ARGS | {"engine": {"threads": 2, "executor": "local"}}
    with Server(serve_file(tmp_path / "serve.yaml", port, args, haproxy=False), port) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat(QUESTION, max_tokens=40), timeout=300)
        assert "attention" in answer.json()["choices"][0]["message"]["content"]
        assert server.processes("WorkerActor") == []
        server.kill_actor("EngineCoreActor")
        server.wait_ready()
        assert server.stop(signal.SIGINT) == 0
        assert server.processes() == []


@pytest.mark.parametrize(
    ("args", "said", "status"),
    [
        ({"model": "/no/such/place"}, "model: the directory /no/such/place does not exist", 2),
        ({"schedular": {}}, "unknown key 'schedular'; did you mean 'scheduler'?", 2),
        ({"max_model_len": 100_000}, "max_model_len", 1),
    ],
    ids=["model", "key", "engine"],
)
def test_a_start_that_cannot_succeed_ends_with_one_message(
    tmp_path: Path, args: dict[str, object], said: str, status: int
) -> None:
    path = serve_file(tmp_path / "serve.yaml", free_port(), ARGS | args)
    command = [sys.executable, "-m", "raylm.cli.main", "serve", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status
    written = done.stdout + done.stderr
    assert written.count(said) == 1
    assert "Traceback" not in written


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path) -> None:

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = serve_file(tmp_path / "serve.yaml", port, ARGS)
        command = [sys.executable, "-m", "raylm.cli.main", "serve", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert done.stdout == ""
