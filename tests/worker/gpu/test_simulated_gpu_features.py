"""Features besides plain decoding on a simulated GPU draw, or pool, the same as on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raylm.checkpoint import EMBEDDED
from raylm.grammar import grammar_of
from raylm.messages import NewSequence
from raylm.models.gpu.int4 import Int4Linear
from raylm.models.gpu.low_rank import GroupedLowRank
from raylm.models.lora import LOW_RANK_LAYERS
from raylm.native import AdapterRun
from raylm.params import PoolingParams, SamplingParams, StructuredOutputs
from raylm.worker.model_runner import ModelRunner
from raylm.worker.sampling import grammars
from raylm.worker.sampling.grammars import AnswerMatcher, Grammars
from tests.adapters import make_adapter
from tests.worker.driver import random_prompt
from tests.worker.gpu.simulated_gpu import Gpu, gpu  # noqa: F401 (a fixture)
from tests.worker.gpu.test_async_decode import Life, blocks
from tests.worker.gpu.test_simulated_gpu import machine, path, start  # noqa: F401 (fixtures)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for every mask, so that no row skips a draw on a busy machine."""
    for name in ("QUICK_MASKS_S", "WAIT_S", "LONE_WAIT_S"):
        monkeypatch.setattr(grammars, name, 60.0)


class Wishing(Life):
    """A Life whose sequences have further fields of NewSequence, by sequence id."""

    wishes: dict[int, dict[str, Any]]

    def _new(self, seq_id: int) -> NewSequence:
        return replace(super()._new(seq_id), **self.wishes.get(seq_id, {}))


def drawn(runner: ModelRunner, wishes: dict[int, dict[str, Any]]) -> dict[int, list[int]]:
    """The tokens of four sequences in some steps."""
    life = Wishing(runner, 2)
    life.wishes = wishes
    for seq_id in range(4):
        life.add(seq_id, random_prompt(5 + 3 * seq_id, seq_id), blocks(seq_id))
    for _ in range(7):
        life.run()
    life.run(finished=(0, 1, 2, 3))
    return life.end()


def low_rank_on(device: Gpu, patch: pytest.MonkeyPatch) -> None:
    """The adapter kernels' result, as one launch. interpreted_low_rank.py compares the real kernels with torch."""
    known: dict[int, Tensor] = {}

    def address(self: GroupedLowRank, tensor: Any) -> int:
        known[tensor.memory.data_ptr()] = tensor.memory
        return int(tensor.memory.data_ptr())

    def add(self: GroupedLowRank, at: int, x: Tensor, out: Tensor) -> None:
        sizes = list(self._layers[at][1].parts.values())

        def run(x: Tensor, out: Tensor, order: Tensor, ends: Tensor, table: Tensor) -> Tensor:
            if x.is_meta:
                return out
            places = zip([0, *ends.tolist()], ends.tolist(), strict=False)
            for (down, up, rank, _), (first, last) in zip(table.tolist(), places, strict=True):
                rows = order[first:last].long()
                if rank and len(rows):
                    narrow = (x[rows] @ known[down].T).split(rank, dim=1)
                    pieces = zip(narrow, known[up].split(sizes), strict=True)
                    out[rows] += torch.cat([piece @ part.T for piece, part in pieces], dim=1)
            return out

        side = self._device_side
        device.kernel(run)(x, out, side["order"], side["ends"], side["table"][:, 4 * at : 4 * at + 4])

    patch.setattr(GroupedLowRank, "_address", address)
    patch.setattr(GroupedLowRank, "_add", add)


def adapters(checkpoint: Path, folder: Path) -> Path:
    make_adapter(checkpoint, folder / "all", seed=1)
    make_adapter(checkpoint, folder / "some", seed=2, target_modules=["q_proj", "down_proj"])
    return folder


def with_adapters(checkpoint: Path, folder: Path, device: str, **config: Any) -> ModelRunner:
    runner = start(checkpoint, device=device, lora={"root": str(folder)}, **config)
    runner.adapters.load(1, "all")
    runner.adapters.load(2, "some")
    return runner


ADAPTED: dict[int, dict[str, Any]] = {0: {"adapter": 1}, 2: {"adapter": 2}, 3: {"adapter": 1}}


@pytest.mark.parametrize("is_fast", [False, pytest.param(True, marks=pytest.mark.long)], ids=["slow", "fast"])
def test_adapters(
    machine: Gpu,  # noqa: F811
    path: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_fast: bool,
) -> None:
    low_rank_on(machine, monkeypatch)
    machine.is_fast = is_fast
    found = []
    for device in ("cpu", "cuda"):
        runner = with_adapters(path, adapters(path, tmp_path / device), device)
        machine.replays = 0
        found.append([drawn(runner, ADAPTED)])
        assert (machine.replays > 0) == (device == "cuda"), "adapters must not prevent graphs"
        found[-1].append(drawn(runner, {}))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_without_triton_adapters_are_multiplied_one_by_one(
    machine: Gpu,  # noqa: F811
    path: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(LOW_RANK_LAYERS._homes, "cuda", "raylm.models.gpu.absent:GroupedLowRank")
    folder = adapters(path, tmp_path)
    here, there = (drawn(with_adapters(path, folder, device), ADAPTED) for device in ("cpu", "cuda"))
    assert there == here
    assert "Adapters are multiplied one by one, without CUDA graphs: No module named" in caplog.text


@pytest.mark.long
def test_a_graph_that_had_other_rows_adapters_would_be_seen(
    machine: Gpu,  # noqa: F811
    path: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault: the adapters of the first step stay in use."""
    low_rank_on(machine, monkeypatch)
    folder = adapters(path, tmp_path)
    here = drawn(with_adapters(path, folder, "cpu"), ADAPTED)
    runner = with_adapters(path, folder, "cuda")
    monkeypatch.setattr(AdapterRun, "__eq__", lambda self, other: True)
    with pytest.raises((AssertionError, IndexError)):  # the first step has more rows
        assert drawn(runner, ADAPTED) == here


def test_forms_of_answers(machine: Gpu) -> None:  # noqa: F811
    wishes = {1: {"grammar": grammar_of(StructuredOutputs(regex="[0-9]{3}-[0-9]{2}"))}}
    here, there = (drawn(start(EMBEDDED, device=device, dtype="float32"), wishes) for device in ("cpu", "cuda"))
    assert there == here


def test_what_changes_logits_is_done_on_the_device(machine: Gpu, path: Path) -> None:  # noqa: F811
    """Among steps that the host draws, because a sequence joins. A row is reused by another sequence."""
    params = [
        {"temperature": 1.2, "presence_penalty": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 1.5},
        {"temperature": 0.0, "logit_bias": {3: 4.0, 9: 4.0}, "repetition_penalty": 1.8},
        {"temperature": 0.9, "allowed_token_ids": list(range(2, 40)), "min_tokens": 5, "frequency_penalty": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.1, "repetition_penalty": 0.7},
    ]
    found = []
    for device in ("cpu", "cuda"):
        runner = start(path, device=device)
        taken = count_launches(runner)
        life = Wishing(runner, 2)
        life.wishes = {at: {"params": SamplingParams(**wish)} for at, wish in enumerate(params)}
        life.wishes[2]["stop_token_ids"] = (5, 6)
        for seq_id in range(4):
            life.add(seq_id, random_prompt(5 + 3 * seq_id, seq_id), blocks(seq_id))
            for _ in range(3):
                life.run()
        life.add(4, random_prompt(9, 4), blocks(0))
        life.run(finished=(0,))
        for _ in range(6):
            life.run()
        found.append(life.end())
        assert len(taken) == (19 if device == "cuda" else 0)
    assert found[0] == found[1]


BAD_WORDS = ((5,), (5, 7), (9, 11, 3), *((at, at + 1) for at in range(0, 60, 2)), *((at, 3, at + 1) for at in range(9)))


def test_bad_words_are_left_out_on_the_device(machine: Gpu, path: Path) -> None:  # noqa: F811
    """With few tokens, so that many would end a bad word. One row has longer bad words than the others."""
    wishes = {
        at: {"bad_words_token_ids": words, "params": SamplingParams(temperature=2.0, allowed_token_ids=list(range(12)))}
        for at, words in enumerate((BAD_WORDS[3:9], BAD_WORDS, tuple((at, at) for at in range(12))))
    }
    found = []
    for device in ("cpu", "cuda"):
        runner = start(path, device=device)
        taken = count_launches(runner)
        found.append([drawn(runner, wishes), drawn(runner, {at: {"params": wishes[0]["params"]} for at in range(3)})])
        assert len(taken) == (14 if device == "cuda" else 0)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_log_probabilities_are_found_on_the_device(machine: Gpu, path: Path) -> None:  # noqa: F811
    """They describe the model's logits, not the processed ones. A row is reused by a sequence with other requests."""
    wishes = {
        0: {"logprobs": 3, "repetition_penalty": 1.6, "temperature": 1.3},
        1: {"logprobs": 20, "temperature": 0.0},
        2: {"temperature": 0.9},
        3: {"logprobs": 0, "temperature": 1.8},
        4: {"logprobs": 2, "logprob_token_ids": (7, 3, 90), "prompt_logprobs": 1, "temperature": 0.0},
        5: {"logprobs": 1, "logprob_token_ids": (8,), "temperature": 0.0},
    }
    found = []
    for device in ("cpu", "cuda"):
        runner = start(path, device=device)
        taken = count_launches(runner)
        life = Wishing(runner, 2)
        life.wishes = {at: {"params": SamplingParams(**wish)} for at, wish in wishes.items()}
        for seq_id in range(4):
            life.add(seq_id, random_prompt(5 + 3 * seq_id, seq_id), blocks(seq_id))
        for seq_id in (4, 5):
            for _ in range(4):
                life.run()
            life.add(seq_id, random_prompt(9, seq_id), blocks(seq_id - 4))
            life.run(finished=(seq_id - 4,))
        for _ in range(4):
            life.run()
        found.append((life.end(), life.described))
        assert len(taken) == (13 if device == "cuda" else 0)
    (told, here), (same, there) = found
    assert told == same
    assert sorted(here) == sorted(there)
    for seq_id, tokens in here.items():
        for (ids, logprobs, rank), (other_ids, other_logprobs, other_rank) in zip(tokens, there[seq_id], strict=True):
            assert (ids, rank) == (other_ids, other_rank)
            assert logprobs == pytest.approx(other_logprobs, abs=1e-5)
    assert [len(ids) for ids, *_ in there[4]] == [4] * len(there[4])


EMBEDDED_WISHES: list[dict[str, Any]] = [
    {"grammar": grammar_of(StructuredOutputs(regex="[0-9]{3}-[0-9]{2}")), "stop_token_ids": (2, 0)},
    {"grammar": grammar_of(StructuredOutputs(regex="[ab]+c")), "params": SamplingParams(min_p=0.1, min_tokens=9)},
    {"params": SamplingParams(logprobs=2), "bad_words_token_ids": ((40,), (30, 31))},
    {"params": SamplingParams(temperature=0.0)},
]


@pytest.mark.parametrize("graphs", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_steady_step_waits_for_nothing_whatever_is_asked(machine: Gpu, graphs: bool) -> None:  # noqa: F811
    """Structured rows whose masks the host computes meanwhile, bad words, and log-probabilities, all in one batch."""
    life = Wishing(start(EMBEDDED, dtype="float32", engine={"cuda_graphs": graphs}), 2)
    life.wishes = dict(enumerate(EMBEDDED_WISHES))
    life.wishes[0] = life.wishes[0] | {"grammar": grammar_of(StructuredOutputs(regex="[0-9 ]{60}"))}
    life.wishes[1] = life.wishes[1] | {"grammar": grammar_of(StructuredOutputs(regex="[a-z ]{60}"))}
    for seq_id in range(4):
        life.add(seq_id, random_prompt(5, seq_id), blocks(seq_id))
    for _ in range(4):
        life.run()
    machine.waits.clear()
    launched = [machine.launched]
    for _ in range(8):
        life.run()
        launched.append(machine.launched)
    assert machine.waits == []
    assert len(set(np.diff(launched).tolist())) == 1, "some steps launch more than others"
    assert [len(tokens) for tokens in life.end().values()] == [12] * 4


@pytest.mark.long
def test_masks_are_applied_where_the_host_applies_them(machine: Gpu) -> None:  # noqa: F811
    wishes = dict(enumerate(EMBEDDED_WISHES))
    found = []
    for device in ("cpu", "cuda"):
        runner = start(EMBEDDED, device=device, dtype="float32")
        taken = count_launches(runner)
        found.append(drawn(runner, wishes))
        assert len(taken) == (7 if device == "cuda" else 0), "the prompts, then six tokens"
    assert found[0] == found[1]


def count_launches(runner: ModelRunner) -> list[object]:
    """A list that grows with each step that the device draws."""
    taken: list[object] = []
    launch = runner.async_decode.launch

    def counting(*args: Any) -> Any:
        taken.append(args)
        return launch(*args)

    runner.async_decode.launch = counting  # type: ignore[method-assign]
    return taken


def test_fp8_is_captured(machine: Gpu, tmp_path: Path) -> None:  # noqa: F811
    """Compares with the steps without graphs, because no CPU path has fp8. Other tests check the products."""
    from tests.models.quantization.test_fp8 import make as make_fp8

    quantized, _ = make_fp8(tmp_path)
    layer_by_layer = drawn(start(quantized, engine={"cuda_graphs": False}), {})
    assert machine.replays == 0
    assert drawn(start(quantized), {}) == layer_by_layer
    assert machine.replays


FORMATS = ["GPTQ", "AWQ", "compressed W4A16 with zeros, a layer ignored"]


@pytest.mark.parametrize("name", [FORMATS[0], *(pytest.param(name, marks=pytest.mark.long) for name in FORMATS[1:])])
def test_4_bit_weights(machine: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:  # noqa: F811
    """interpreted_int4.py compares the real kernel with torch."""
    from tests.models.quantization.test_quantization import BY_NAME
    from tests.models.quantization.test_quantization import make as quantize

    def product(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, half: int) -> Tensor:
        blocks = packed.view(len(packed), -1, 1, half)
        codes = torch.cat([blocks & 15, blocks >> 4], dim=2).view(len(packed), -1)
        group = codes.shape[1] // len(scales)
        shifts, factors = (each.t().repeat_interleave(group, 1) for each in (zeros.float(), scales))
        return x @ ((codes - shifts) * factors).to(x.dtype).t()

    def call(self: Int4Linear, x: Tensor) -> Tensor:
        tables = self._packed, self._scales, self._zeros
        return machine.kernel(product)(x, *tables, self._half)  # type: ignore[no-any-return]

    monkeypatch.setattr(Int4Linear, "__call__", call)
    quantized, meant = quantize(tmp_path, BY_NAME[name])
    assert drawn(start(quantized), {}) == drawn(
        start(meant, device="cpu"), {}
    )  # CPUs round the inputs of 4-bit weights
    assert machine.replays


def test_fp8_weights_with_scales_by_blocks(
    machine: Gpu,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulated kernel multiplies dequantized weights. interpreted_fp8.py compares the real kernels with torch."""
    from raylm.models.gpu.fp8 import Fp8BlocksLinear
    from raylm.models.quantization.fp8_blocks import as_floats
    from tests.models.quantization.test_fp8_blocks import make as make_blocks

    def call(self: Fp8BlocksLinear, x: Tensor) -> Tensor:
        def product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
            return x @ as_floats(weight, scales, self._granule).t()

        return machine.kernel(product)(x, self._weight, self._scales)  # type: ignore[no-any-return]

    monkeypatch.setattr(Fp8BlocksLinear, "__call__", call)
    quantized, _ = make_blocks(tmp_path)
    assert drawn(start(quantized), {}) == drawn(start(quantized, device="cpu"), {})
    assert machine.replays


def test_pooling(machine: Gpu, path: Path) -> None:  # noqa: F811
    found = []
    for device in ("cpu", "cuda"):
        life = Wishing(start(path, device=device), 1)
        life.wishes = {at: {"pooling": PoolingParams(pooling=how)} for at, how in enumerate(("last", "mean", "cls"))}
        for seq_id in range(4):
            life.add(seq_id, random_prompt(9, seq_id) if seq_id else [7], blocks(seq_id))
        life.run()
        told = life.end()
        found.append((told, {seq_id: np.frombuffer(vector, np.float32) for seq_id, vector in life.pooled.items()}))
    (told, here), (same, there) = found
    assert told == same
    assert sorted(here) == sorted(there) == [0, 1, 2]
    assert all(np.allclose(here[seq_id], there[seq_id], atol=1e-5) for seq_id in here)


@pytest.mark.long
def test_rows_whose_masks_are_late_sit_the_step_out(machine: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Masks are late every third time. Penalties and bad words must continue from the right tokens."""
    wishes = dict(enumerate(EMBEDDED_WISHES))
    wishes[1] = wishes[1] | {
        "params": SamplingParams(repetition_penalty=1.3, logprobs=1),
        "bad_words_token_ids": tuple((at, at + 1) for at in range(40)),
    }
    wanted = drawn(start(EMBEDDED, device="cpu", dtype="float32"), wishes)
    asked, ready = [0], Grammars.ready

    def late(self: Grammars, answers: list[AnswerMatcher], draws: int) -> list[bool]:
        asked[0] += 1
        there = ready(self, answers, draws)
        return [asked[0] % 3 != 2] * len(there)

    monkeypatch.setattr(Grammars, "ready", late)
    runner = start(EMBEDDED, dtype="float32")
    found = drawn(runner, wishes)
    assert runner.async_decode.has_deferred
    assert [found[2], found[3]] == [wanted[2], wanted[3]]
    for seq_id in (0, 1):
        assert 3 <= len(found[seq_id]) < len(wanted[seq_id])
        assert found[seq_id] == wanted[seq_id][: len(found[seq_id])]
