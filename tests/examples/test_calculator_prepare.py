"""The calculator example's tokenizer, template, problems and files (the warm start is checked by `make demo`)."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import datasets
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_tools_basic.calculator import Calculator

SCRIPT = Path(__file__).parents[2] / "examples" / "calculator" / "prepare.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calculator_prepare", SCRIPT)
    assert spec is not None and spec.loader is not None, SCRIPT
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


prepare = load_script()
warm_start = prepare.warm_start
TASK = prepare.Calculator()
TOKENIZER = warm_start.build_tokenizer(TASK)
PROBLEM = prepare.Problem("What is 37 * 45?", "37 * 45", "1665")
PROBLEMS = st.builds(
    lambda seed, held_out: next(prepare.problems(random.Random(seed), held_out=held_out)),
    st.integers(0, 2**32),
    st.booleans(),
)


def test_demonstration_calls_the_tool_and_answers() -> None:
    text = warm_start.render(TOKENIZER, prepare.good_call(PROBLEM), TASK.tools)
    conversation = text.split("<|im_end|>\n", maxsplit=1)[1]
    assert conversation == (
        "<|im_start|>user\nWhat is 37 * 45?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37 * 45"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1665\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n#### 1665<|im_end|>\n"
    )


def test_prompt_holds_the_schema_and_is_short() -> None:
    text = warm_start.render(TOKENIZER, prepare.conversation(PROBLEM), TASK.tools, generation_prompt=True)
    assert f"<tools>\n{json.dumps(prepare.CALCULATOR_SCHEMA)}\n</tools>" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert len(warm_start.encode(TOKENIZER, text)) <= 120


def test_template_without_tools_has_no_system_message() -> None:
    text = TOKENIZER.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert text == "<|im_start|>user\nHello<|im_end|>\n"


def test_template_keeps_the_given_system_message_with_and_without_tools() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    )
    assert warm_start.render(TOKENIZER, messages, TASK.tools).startswith("<|im_start|>system\nBe brief.\n\n")


def test_consecutive_tool_messages_share_one_user_block() -> None:
    call = {"function": {"name": "calculator", "arguments": {"expression": "1 + 1"}}}
    messages = prepare.conversation(
        PROBLEM,
        {"role": "assistant", "content": "Both.", "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    )
    text = warm_start.render(TOKENIZER, messages, TASK.tools, generation_prompt=True)
    rendered_call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 1"}}\n</tool_call>'
    assert text.endswith(
        f"<|im_start|>assistant\nBoth.\n{rendered_call}\n{rendered_call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@settings(max_examples=30, deadline=None)
@given(PROBLEMS, st.integers(0, 100))
def test_template_is_append_only_and_tokens_do_not_cross_turns(problem, seed: int) -> None:
    messages = prepare.unreliable(problem, random.Random(seed))
    whole = warm_start.render(TOKENIZER, messages, TASK.tools)
    whole_ids = warm_start.encode(TOKENIZER, whole)
    for count in range(1, len(messages)):
        answers_next = messages[count]["role"] == "assistant"
        before = warm_start.render(TOKENIZER, messages[:count], TASK.tools, generation_prompt=answers_next)
        assert whole.startswith(before)
        before_ids = warm_start.encode(TOKENIZER, before)
        assert whole_ids[: len(before_ids)] == before_ids


@settings(max_examples=30, deadline=None)
@given(PROBLEMS, st.integers(0, 100))
def test_mask_marks_exactly_what_the_assistant_says(problem, seed: int) -> None:
    messages = prepare.unreliable(problem, random.Random(seed))
    [(ids, mask)] = warm_start.encode_demonstrations(TOKENIZER, [messages], TASK.tools)
    assert len(ids) == len(mask)
    assert ids == warm_start.encode(TOKENIZER, warm_start.render(TOKENIZER, messages, TASK.tools))
    spoken = TOKENIZER.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
    turns = [turn for turn in messages if turn["role"] == "assistant"]
    assert spoken.count("<|im_end|>") == len(turns)
    assert all((turn["content"] or problem.expression) in spoken for turn in turns)
    assert "<tool_response>" not in spoken and problem.question not in spoken


@settings(deadline=None)
@given(st.text())
def test_tokenizer_repeats_any_text(text: str) -> None:
    assert TOKENIZER.decode(warm_start.encode(TOKENIZER, text)) == text


def test_tokenizer_keeps_digits_apart_and_tags_whole() -> None:
    ids = warm_start.encode(TOKENIZER, "<tool_call>1665</tool_call><|im_end|>")
    assert [TOKENIZER.decode([token]) for token in ids] == ["<tool_call>", *"1665", "</tool_call>", "<|im_end|>"]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<tool_call>1665</tool_call>"
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_tokenizer_is_repeatable() -> None:
    assert warm_start.build_tokenizer(TASK).get_vocab() == TOKENIZER.get_vocab()


@settings(deadline=None)
@given(st.integers(-99, 99), st.sampled_from("+-*"), st.integers(0, 99))
def test_evaluate_is_arithmetic(left: int, sign: str, right: int) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert prepare.evaluate(f"{left} {sign} {right}") == expected


@pytest.mark.parametrize("expression", ["", "1 +", "__import__('os')", "2 ** 9", "7 / 2", "1.5 + 1", "37s", "a"])
def test_evaluate_rejects_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match="allowed are|is not an expression"):
        prepare.evaluate(expression)


def test_supervised_loss_ignores_what_is_masked_and_padding() -> None:
    torch.manual_seed(0)
    model = warm_start.build_model(TOKENIZER)
    [(ids, mask)] = warm_start.encode_demonstrations(TOKENIZER, [prepare.good_call(PROBLEM)], TASK.tools)
    loss = warm_start.supervised_loss(model, [(ids, mask)])
    padded = warm_start.supervised_loss(model, [(ids, mask), (ids + [5] * 7, mask + [0] * 7)])
    assert torch.isclose(loss, padded, atol=1e-5)
    assert not torch.isclose(loss, warm_start.supervised_loss(model, [(ids, [1] * len(ids))]), atol=1e-2)


def test_rollout_answers_the_call_with_the_real_calculator(monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37 * 45"}}\n</tool_call><|im_end|>'
    prompts: list[str] = []

    def scripted(model, tokenizer, rows: list[list[int]], _: int) -> list[list[int]]:
        prompts.extend(TOKENIZER.decode(row) for row in rows)
        said = "#### 1665<|im_end|>" if "<tool_response>" in prompts[-1] else call
        return [warm_start.encode(TOKENIZER, said) for _ in rows]

    monkeypatch.setattr(warm_start, "generate", scripted)
    [row] = warm_start.rollout(None, TOKENIZER, TASK, [PROBLEM])
    assert row.correct
    [(ids, mask)] = warm_start.encode_demonstrations(TOKENIZER, [prepare.good_call(PROBLEM)], TASK.tools)
    assert prompts[1] == TOKENIZER.decode(ids).removesuffix("#### 1665<|im_end|>\n")
    trailing_newline = 1
    assert (row.ids, row.mask) == (ids[:-trailing_newline], mask[:-trailing_newline])


def make_data(output: Path, seed: int) -> dict[str, list[dict]]:
    warm_start.prepare(output / "data", prepare.make_data, seed, recipe=1, force=False)
    return {
        split: datasets.load_dataset(
            "parquet",
            data_files=str(output / "data" / f"{split}.parquet"),
            split="train",
            cache_dir=str(output / "cache"),
        ).to_list()
        for split in ("train", "validation")
    }


def test_data_survives_datasets_and_splits_do_not_overlap(tmp_path: Path) -> None:
    splits = make_data(tmp_path, seed=0)
    assert len(splits["train"]) >= 4000 and len(splits["validation"]) == 200
    questions = {split: {row["prompt"][0]["content"] for row in rows} for split, rows in splits.items()}
    expressions = {
        split: {"".join(c for c in question if c in "0123456789+-*") for question in chosen}
        for split, chosen in questions.items()
    }
    assert not expressions["train"] & expressions["validation"]
    for split, rows in splits.items():
        assert len(expressions[split]) == len(rows)
        for index, row in enumerate(rows):
            assert row["prompt"][0]["role"] == "user" and row["data_source"] == "calculator"
            expression = "".join(c for c in row["prompt"][0]["content"] if c in "0123456789+-*")
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(prepare.evaluate(expression))}
            assert row["extra_info"] == {
                "index": index,
                "split": split,
                "tools_kwargs": {"calculator": {"create_kwargs": None}},
                "interaction_kwargs": None,
            }


def test_rows_for_the_tutor_name_it(tmp_path: Path) -> None:
    prepare.make_data(tmp_path, 0)
    file = str(tmp_path / "tutor-validation.parquet")
    for row in datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=str(tmp_path / "cache")):
        expected = {"name": "tutor", "ground_truth": row["reward_model"]["ground_truth"]}
        assert row["extra_info"]["interaction_kwargs"] == expected


def test_data_is_byte_identical_for_a_seed_and_differs_between_seeds(tmp_path: Path) -> None:
    def contents(name: str, seed: int) -> bytes:
        warm_start.prepare(tmp_path / name, prepare.make_data, seed, recipe=1, force=False)
        return (tmp_path / name / "train.parquet").read_bytes()

    assert contents("a", 3) == contents("b", 3) != contents("c", 4)


def test_prepare_makes_once_per_seed_and_leaves_foreign_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[int] = []

    def make(directory: Path, seed: int) -> None:
        made.append(seed)
        (directory / "file").write_text(str(seed))

    for seed, force in ((0, False), (0, False), (1, False), (1, True)):
        warm_start.prepare(tmp_path / "out", make, seed, recipe=1, force=force)
    assert made == [0, 1, 1]
    assert "already there (seed 0)" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="did not make"):
        warm_start.prepare(foreign, make, 0, recipe=1, force=False)
    assert (foreign / "thesis.txt").read_text() == "mine"


def test_interrupted_prepare_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(directory: Path, seed: int) -> None:
        (directory / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start.prepare(tmp_path / "out", interrupted, 0, recipe=1, force=False)
    assert list(tmp_path.iterdir()) == []


def test_model_directory_loads_with_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "learn_to_copy", lambda tokenizer, *_: warm_start.build_model(tokenizer))
    monkeypatch.setattr(warm_start, "make_unreliable", lambda *_: None)
    monkeypatch.setattr(prepare, "VALIDATION_PROMPTS", 2)
    warm_start.prepare(tmp_path / "model", prepare.make_model, 0, recipe=1, force=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    messages = prepare.good_call(PROBLEM)
    text = warm_start.render(tokenizer, messages, TASK.tools)
    assert text == warm_start.render(TOKENIZER, messages, TASK.tools)
    assert warm_start.encode(tokenizer, text) == warm_start.encode(TOKENIZER, text)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)


def test_copying_rows_do_not_train_the_choice_to_call() -> None:
    [(ids, mask)] = warm_start.without_choice(
        warm_start.encode_demonstrations(TOKENIZER, [prepare.good_call(PROBLEM)], TASK.tools)
    )
    trained = TOKENIZER.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
    assert trained == '37 * 45"}}\n</tool_call><|im_end|>#### 1665<|im_end|>'


def test_schema_of_the_warm_start_is_that_of_the_tool() -> None:
    """The policy must meet in training the prompt that it was warmed up on, to the token."""
    assert json.dumps(prepare.CALCULATOR_SCHEMA) == json.dumps(Calculator.schema)
