"""The embedded model: its size, tokenizer and template, and a few questions answered by transformers."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "raylm" / "models" / "embedded"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NO_THOUGHT = "<think>\n\n</think>\n\n"
TOKENIZER = AutoTokenizer.from_pretrained(SHIPPED)


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    """The prompt for the next answer."""
    options = {"add_generation_prompt": True} | options
    return str(TOKENIZER.apply_chat_template(messages, tokenize=False, **options))


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that writes the training conversations. Afterwards its imports are removed."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "examples" / "embedded_model")
    import conversation

    yield conversation
    for name in set(sys.modules) - before:
        if str(ROOT / "examples") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_ships_at_most_16_mb_without_code_or_pickles() -> None:
    files = list(SHIPPED.iterdir())
    assert sum(file.stat().st_size for file in files) <= 16_000_000
    assert {file.suffix for file in files} <= {".json", ".jinja", ".safetensors"}


def test_is_a_llama_with_grouped_queries_and_tied_embeddings(model: Any) -> None:
    config = model.config
    assert config.model_type == "llama"
    assert config.head_dim == 64
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.max_position_embeddings == 8192
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 6000 <= config.vocab_size <= 8000
    assert config.vocab_size == len(TOKENIZER)


@given(st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < len(TOKENIZER) for i in ids)


@given(st.text(st.characters(categories=["L"]), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_a_word_is_cut_alike_with_and_without_a_space(word: str) -> None:
    plain, led = (TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(text)) for text in (word, " " + word))
    assert led in ([f"Ġ{plain[0]}", *plain[1:]], ["Ġ", *plain])


def test_only_the_chat_markers_are_special() -> None:
    text = "<|im_start|><think>a</think><tool_call>b</tool_call><|im_end|><|endoftext|>"
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>a</think><tool_call>b</tool_call>"
    assert len(ids) == 9
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token == "<|endoftext|>"
    assert TOKENIZER.encode("1234") == [TOKENIZER.convert_tokens_to_ids(digit) for digit in "1234"]


def test_template_of_a_plain_turn() -> None:
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(user("Hi")) == head + NO_THOUGHT
    assert render(user("Hi"), enable_thinking=False) == head + NO_THOUGHT
    assert render(user("Hi"), enable_thinking=True) == head
    assert render(user("Hi"), add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_template_keeps_the_generated_text_as_the_prefix_of_the_next_turn() -> None:
    first = render(user("Hi"))
    messages = [*user("Hi"), {"role": "assistant", "content": "Hello!"}, *user("And?")]
    assert render(messages).startswith(first + "Hello!<|im_end|>\n<|im_start|>user\nAnd?")


def test_template_drops_old_thoughts_and_keeps_those_of_a_tool_loop() -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"}
    assert f"assistant\n{NO_THOUGHT}Hello!<|im_end|>" in render([*user("Hi"), thought, *user("And?")])
    asked = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call({"city": "Oslo"})]}
    answered = {"role": "tool", "content": "warm"}
    assert "assistant\n<think>\nhm\n</think>\n\n<tool_call>" in render([*user("Hi"), asked, answered], tools=[WEATHER])


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
@pytest.mark.parametrize("content", ["", None])
def test_template_of_tools_and_their_results(arguments: Any, content: str | None) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        *user("Weather in Oslo?"),
        {"role": "assistant", "content": content, "tool_calls": [call(arguments), call(arguments)]},
        {"role": "tool", "content": "warm"},
        {"role": "tool", "content": "cold"},
    ]
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert render(messages, tools=[WEATHER]) == (
        f"<|im_start|>system\nBe brief.\n\nYou may call these tools:\n<tools>\n{json.dumps(WEATHER)}\n</tools>\n"
        "To call one, write its name and arguments as JSON inside <tool_call></tool_call>.<|im_end|>\n"
        "<|im_start|>user\nWeather in Oslo?<|im_end|>\n"
        f"<|im_start|>assistant\n{NO_THOUGHT}{one}\n{one}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nwarm\n</tool_response>\n<tool_response>\ncold\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{NO_THOUGHT}"
    )


def test_template_reads_text_parts() -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    assert render([{"role": "user", "content": parts}]) == render(user("Hi there"))


def test_training_text_is_what_the_template_renders(generator: Any) -> None:
    skills = [name for name in generator.SINGLE if name not in generator.ALWAYS_THINKS]
    weights = dict.fromkeys((*skills, "tell", "ask", "tell and ask"), 1.0)
    for seed in range(60):
        rng = random.Random(seed)
        talk = generator.begin(rng, "train", 0.5)
        for _ in range(4):
            talk.turns += [(turn, False) for turn, _ in generator.next_turns(rng, "train", talk, weights)]
        segments = [generator.system_segment(talk), *(s for turn in talk.turns for s in generator.turn_segments(*turn))]
        text = render(generator.messages(talk), tools=talk.schemas or None, add_generation_prompt=False)
        assert "".join(part for part, _ in segments) == text
        assert generator.encode(TOKENIZER.backend_tokenizer, segments)[0] == TOKENIZER.encode(text)


def answer(model: Any, prompt: str) -> str:
    inputs = TOKENIZER(prompt, return_tensors="pt")
    out = model.generate(**inputs, do_sample=False, temperature=None, top_p=None, max_new_tokens=120)
    return str(TOKENIZER.decode(out[0, inputs["input_ids"].shape[1] :]))


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is 17 + 25?", "17 + 25 = 42."),
        ("What is a KV cache?", "A KV cache keeps the attention keys and values of past tokens, so that they are not "),
        ("Who are you?", "I am a small test model that comes with RayLM"),
        ("What are you?", "I am a small test model that comes with RayLM"),
        ("Hello!", "Hello! How can I help you?"),
        ("Count from 1 to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
        ("My name is Ada. What is my name?", "Your name is Ada."),
    ],
)
def test_first_questions(model: Any, question: str, expected: str) -> None:
    text = answer(model, render(user(question)))
    assert text.startswith(expected)
    assert text.endswith("<|im_end|>")


def test_calls_a_tool_and_thinks(model: Any) -> None:
    called = answer(model, render(user("What is the weather in Paris?"), tools=[WEATHER]))
    assert called == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    thought = answer(model, render(user("What is 38 + 45?"), enable_thinking=True))
    assert thought.startswith("<think>\n")
    assert thought.endswith("\n</think>\n\n38 + 45 = 83.<|im_end|>")
