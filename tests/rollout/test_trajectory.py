"""The token record: token in, token out; lists of equal length; budgets."""

import asyncio
import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_core.api import (
    AgentLoopOutput,
    EngineError,
    PluginError,
    PolicySpan,
    ProtocolError,
    RewardResult,
    Termination,
    TokenOutput,
)
from agentrl_core.api.tree import Call, Earned
from agentrl_core.engine_kit.requests import joined
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.loop_output import adopt
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.rollout.trajectory import TrajectoryBuilder, cut_after

CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "1"}}\n</tool_call>'
TOOL = {"role": "tool", "name": "calc", "content": "2"}
STOP = "<|im_end|>"


def generate(builder: TrajectoryBuilder, **sampling):
    return asyncio.run(builder.generate(sampling))


def finish(builder: TrajectoryBuilder) -> AgentLoopOutput:
    output = builder.finish(Termination.COMPLETED)
    assert isinstance(output, AgentLoopOutput)
    return output


def lengths_are_equal(builder: TrajectoryBuilder) -> bool:
    row = builder.row
    log_probs = [] if row.response_logprobs is None else [row.response_logprobs]
    lists = [row.response_ids, row.response_mask, row.policy_versions, *log_probs]
    return len({len(each) for each in lists}) == 1


WORDS = st.text(st.sampled_from('ab 1é日\n<|>{}"'), max_size=12)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), WORDS.filter(bool), st.booleans()),
        st.tuples(st.just("tool"), WORDS, st.integers(1, 3)),
        st.tuples(st.just("user"), WORDS, st.just(1)),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(actions=ACTIONS, response=st.integers(1, 300), context=st.integers(150, 500))
def test_mask_logprob_and_id_lengths_are_equal_after_every_turn(conversation, renderer, actions, response, context):
    """Together with: what was sampled stands in the row as it came, and prompts grow by exact ids."""
    said = [text + STOP * stopped for kind, text, stopped in actions if kind == "say"]
    talk = conversation(said, template=renderer, tools=(), response=response, context=context)
    builder = talk.builder
    expected_sampled: list[int] = []
    for kind, text, argument in actions:
        before = list(talk.ids)
        room = builder.remaining
        if kind == "say":
            turn = generate(builder)
            expected_sampled += turn.token_ids
            assert talk.ids == before + list(turn.token_ids)
            assert bool(turn.token_ids) == (room > 0)
        else:
            messages = [{"role": kind, "content": f"{text}{number}"} for number in range(argument)]
            fits = builder.add_messages(messages)
            assert talk.ids[: len(before)] == before or builder.template_breaks
            if not fits:
                assert talk.ids == before
        assert lengths_are_equal(builder)
        assert builder.remaining >= 0
        assert len(builder.row.response_ids) <= response
        assert builder.num_tokens == len(talk.ids) <= context
    for prompt, params, _ in talk.policy.requests:
        assert params.max_tokens >= 1 and len(prompt) + params.max_tokens <= context
    outputs = builder.finish(Termination.COMPLETED)
    sampled = [
        token
        for output in (outputs if isinstance(outputs, list) else [outputs])
        for token, mask in zip(output.response_ids, output.response_mask, strict=True)
        if mask
    ]
    assert sampled == expected_sampled


def test_token_in_token_out_even_where_the_tokens_are_not_how_the_text_is_encoded(conversation, render_with) -> None:
    """Half a character, and a stop marker spelt letter by letter: ids that no encoder gives."""
    renderer = render_with("qwen2")
    odd = [renderer.encode("日")[0], *renderer.tokenizer.convert_tokens_to_ids(list("<|im_end|>")), 258]
    output = TokenOutput(odd, [-1.0] * len(odd), "stop", [PolicySpan(1, 0, len(odd))])
    talk = conversation([output], template=renderer)
    assert renderer.encode(renderer.decode(odd)) != odd
    generate(talk.builder)
    talk.builder.add_messages([TOOL])
    assert talk.builder.row.response_ids[: len(odd)] == odd


def test_the_prompt_of_a_turn_starts_with_the_exact_ids_of_the_turn_before(conversation) -> None:
    talk = conversation([CALL + STOP, "done" + STOP])
    generate(talk.builder)
    talk.builder.add_messages([TOOL])
    generate(talk.builder)
    (first, _, first_id), (second, _, second_id) = talk.policy.requests
    assert second[: len(first)] == first and first_id == second_id
    assert talk.ids[: len(second)] == second


def test_masks_log_probs_and_versions_say_who_wrote_what(conversation, render_with) -> None:
    renderer = render_with("qwen2")
    first = TokenOutput([1, 2, 258], [-0.1, -0.2, -0.3], "stop", [PolicySpan(4, 0, 1), PolicySpan(5, 1, 3)])
    second = TokenOutput([3], [-0.4], "length", [PolicySpan(5, 0, 1)])
    talk = conversation([first, second], template=renderer)
    generate(talk.builder)
    talk.builder.add_messages([TOOL])
    generate(talk.builder)
    output = finish(talk.builder)
    context = len(output.response_ids) - 4
    assert output.response_mask == [1, 1, 1] + [0] * context + [1]
    assert output.response_logprobs == [-0.1, -0.2, -0.3] + [0.0] * context + [-0.4]
    assert output.policy_versions == [4, 5, 5] + [-1] * context + [5]
    assert output.prompt_ids == talk.policy.requests[0][0]


def test_appended_eos_is_not_trained_with_logprob_0(conversation) -> None:
    """The engine stopped without a stop token: the template's own has mask 0."""
    talk = conversation(["cut off", "more" + STOP])
    turn = generate(talk.builder)
    assert turn.finish_reason == "length"
    talk.builder.add_messages([{"role": "user", "content": "go on"}])
    row = talk.builder.row
    end = row.response_ids.index(talk.renderer.encode(STOP)[0])
    assert row.response_mask[end] == 0 and row.response_mask[end - 1] == 1
    assert talk.text.count(STOP) == talk.renderer.render(talk.builder.messages).count(STOP)


def test_the_stop_token_that_the_policy_sampled_is_trained(conversation) -> None:
    talk = conversation(["done" + STOP])
    turn = generate(talk.builder)
    assert talk.builder.row.response_mask == [1] * 5 and turn.text == "done" and turn.finish_reason == "stop"


def test_tool_calls_are_kept_in_the_history(conversation) -> None:
    talk = conversation([f"so: {CALL}{CALL}{STOP}"])
    turn = generate(talk.builder)
    message = talk.builder.messages[-1]
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "calc", "arguments": {"x": "1"}}] * 2
    assert message["content"] == turn.content == "so:"
    ids = [call.id for call in turn.tool_calls]
    assert len(set(ids)) == 2 and all(len(each) == 9 and each.isalnum() for each in ids)


def test_a_parser_of_a_format_without_types_sees_the_schemas_of_the_tools(conversation) -> None:
    talk = conversation([f"so: {CALL}{STOP}"])
    seen = []
    parser = talk.builder._renderer.context.parser
    parser.parse_turn = lambda text, tools: (seen.extend(tools), parser.parse(text))[1]
    assert generate(talk.builder).tool_calls
    assert [tool["function"]["parameters"]["properties"] for tool in seen] == [{"x": {"type": "string"}}]


def test_a_call_that_cannot_be_read_stays_in_the_history_as_text(conversation) -> None:
    talk = conversation(["<tool_call>{oops</tool_call>" + STOP])
    turn = generate(talk.builder)
    assert turn.parse_errors and not turn.tool_calls
    assert talk.builder.messages[-1] == {"role": "assistant", "content": "<tool_call>{oops</tool_call>"}


def test_arguments_nested_600_deep_are_an_error_and_do_not_end_the_run(conversation) -> None:
    nested = '{"x": ' + "[" * 600 + "]" * 600 + "}"
    talk = conversation([f'<tool_call>{{"name": "calc", "arguments": {nested}}}</tool_call>{CALL}{STOP}'])
    turn = generate(talk.builder)
    assert [call.arguments for call in turn.tool_calls] == [{"x": "1"}]
    assert turn.parse_errors == ["Error: invalid tool call: arguments nested more than 64 levels deep"]


def test_tool_response_that_fits_exactly_is_kept(conversation) -> None:
    probe = conversation(["x" + STOP])
    generate(probe.builder)
    probe.builder.add_messages([TOOL])
    size = len(probe.builder.row.response_ids)
    exact = conversation(["x" + STOP], response=size)
    generate(exact.builder)
    assert exact.builder.add_messages([TOOL]) and exact.builder.remaining == 0
    short = conversation(["x" + STOP], response=size - 1)
    generate(short.builder)
    assert not short.builder.add_messages([TOOL])
    assert short.builder.row.response_mask == [1, 1] and short.builder.messages[-1]["role"] == "assistant"


def test_the_same_at_the_end_of_the_context(conversation) -> None:
    probe = conversation(["x" + STOP])
    generate(probe.builder)
    probe.builder.add_messages([TOOL])
    for context, fits in ((len(probe.ids), True), (len(probe.ids) - 1, False)):
        talk = conversation(["x" + STOP], context=context)
        generate(talk.builder)
        assert talk.builder.add_messages([TOOL]) is fits


@pytest.mark.parametrize(
    ("response", "room", "sampling", "expected"),
    [(50, 80, None, 50), (80, 50, None, 50), (50, 80, 20, 20), (20, 80, 50, 20), (80, 20, 50, 20)],
)
def test_max_tokens_is_the_smallest_of_budget_context_and_sampling(conversation, response, room, sampling, expected):
    prompt = len(conversation([]).ids)
    talk = conversation(["x" * 100], response=response, context=prompt + room)
    generate(talk.builder, max_tokens=sampling)
    assert talk.policy.requests[0][1].max_tokens == expected


@pytest.mark.parametrize("room", [0, -5])
def test_max_tokens_not_positive_sends_no_request(conversation, room: int) -> None:
    prompt = len(conversation([]).ids)
    talk = conversation([], context=prompt + room)
    turn = generate(talk.builder)
    assert (turn.token_ids, turn.finish_reason, turn.termination) == ((), "length", Termination.LENGTH)
    assert talk.policy.requests == []
    output = talk.builder.finish(turn.termination)
    assert output.response_ids == [] and output.num_turns == 1


def test_num_turns_counts_messages_without_the_system_prompt(conversation) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    talk = conversation([CALL + STOP, "done" + STOP], messages=messages)
    generate(talk.builder)
    talk.builder.add_messages([TOOL, TOOL])
    generate(talk.builder)
    assert finish(talk.builder).num_turns == 5


def test_sampling_parameters_reach_the_engine_with_a_seed_for_each_turn(conversation) -> None:
    talk = conversation(["a" + STOP, "b" + STOP])
    generate(talk.builder, temperature=0.5, top_p=0.9, top_k=3, json_schema="{}")
    talk.builder.add_messages([TOOL])
    generate(talk.builder)
    first, second = (params for _, params, _ in talk.policy.requests)
    assert (first.temperature, first.top_p, first.top_k, first.json_schema) == (0.5, 0.9, 3, "{}")
    assert (second.temperature, second.top_p, second.top_k, second.json_schema) == (1.0, 1.0, 0, None)
    assert first.seed != second.seed and first.stop_token_ids == talk.renderer.stop_token_ids
    again = conversation(["a" + STOP])
    generate(again.builder)
    assert again.policy.requests[0][1].seed == first.seed


def test_a_turn_has_the_log_probs_of_its_tokens(conversation) -> None:
    talk = conversation(["first" + STOP, TokenOutput([5, 6], None, "length", [PolicySpan(7, 0, 2)])])
    first, second = generate(talk.builder), generate(talk.builder)
    assert first.log_probs == [-(number + 1) / 100 for number in range(len(first.token_ids))]
    assert second.log_probs is None


def test_a_path_counts_against_its_budget_from_the_first_prompt_to_its_end(conversation) -> None:
    talk = conversation(["first" + STOP, "left" + STOP, "right and more" + STOP])
    generate(talk.builder)
    talk.builder.add_messages([TOOL])
    shared = len(talk.builder.row.response_ids)
    branch = talk.builder.fork()
    generate(talk.builder), generate(branch)
    trunk, twig = finish(talk.builder), finish(branch)
    assert trunk.tokens.leaf.used == len(trunk.response_ids) == 10_000 - talk.builder.remaining
    assert twig.tokens.leaf.used == shared + len(twig.response_ids) == 10_000 - branch.remaining


def test_a_fork_shares_what_was_and_trains_only_what_it_samples_itself(conversation) -> None:
    talk = conversation(["first" + STOP, "left" + STOP, "right" + STOP])
    generate(talk.builder)
    talk.builder.add_messages([TOOL])
    branch = talk.builder.fork()
    generate(talk.builder)
    generate(branch)
    trunk, twig = finish(talk.builder), finish(branch)
    assert talk.renderer.decode(twig.response_ids) == "right" + STOP and all(twig.response_mask)
    assert twig.prompt_ids == talk.policy.requests[2][0] == talk.policy.requests[1][0]
    assert "left" in talk.renderer.decode(trunk.response_ids)
    assert trunk.messages[-1]["content"] == "left" and twig.messages[-1]["content"] == "right"
    assert trunk.trajectory_id == twig.trajectory_id
    requests = talk.policy.requests
    assert requests[1][2] != requests[2][2] and requests[1][1].seed != requests[2][1].seed
    assert twig.turn_texts == ["first", "right"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (TokenOutput([1, 2], [-1.0], "stop", [PolicySpan(0, 0, 2)]), "1 log-probs for 2 tokens"),
        (TokenOutput([1], [math.nan], "stop", [PolicySpan(0, 0, 1)]), "not finite"),
        (TokenOutput([1], [-math.inf], "stop", [PolicySpan(0, 0, 1)]), "not finite"),
        (TokenOutput([1, 2], [-1.0, -1.0], "stop", [PolicySpan(0, 0, 1)]), "spans do not cover"),
        (TokenOutput([1, 2], [-1.0, -1.0], "stop", [PolicySpan(0, 1, 2)]), "spans do not cover"),
        (TokenOutput([1, 2], [-1.0, -1.0], "stop", []), "spans do not cover"),
        (TokenOutput([], [], "stop", []), "no token"),
        (TokenOutput([1] * 11, [-1.0] * 11, "length", [PolicySpan(0, 0, 11)]), "11 tokens where 10"),
    ],
)
def test_engine_outputs_that_do_not_fit_together_are_engine_errors(conversation, output, message: str) -> None:
    talk = conversation([output], response=10)
    with pytest.raises(EngineError, match=message):
        generate(talk.builder)
    assert talk.builder.row.response_ids == [] and lengths_are_equal(talk.builder)


def test_an_abort_may_return_nothing_or_a_part(conversation) -> None:
    part = TokenOutput([1], [-1.0], "abort", [PolicySpan(0, 0, 1)])
    for output in (TokenOutput([], [], "abort", []), part):
        talk = conversation([output])
        assert generate(talk.builder).termination is Termination.ABORTED
        assert talk.builder.row.response_ids == output.token_ids


def test_an_engine_without_logprobs_gives_none(conversation) -> None:
    talk = conversation([TokenOutput([1, 258], None, "stop", [PolicySpan(0, 0, 2)]), "x" + STOP])
    generate(talk.builder)
    talk.builder.add_messages([TOOL])
    generate(talk.builder)
    assert finish(talk.builder).response_logprobs is None


def test_per_token_extras_are_sliced_together_with_the_ids(conversation) -> None:
    """A turn that the budget cuts keeps as many log-probs and versions as ids."""
    talk = conversation(["abcdefgh" + STOP], response=3)
    turn = generate(talk.builder)
    assert turn.finish_reason == "length" and len(turn.token_ids) == 3
    output = finish(talk.builder)
    assert len(output.response_logprobs or ()) == len(output.policy_versions) == 3


def test_texts_for_people_and_rewards(conversation) -> None:
    talk = conversation([CALL + STOP, "done" + STOP])
    generate(talk.builder)
    talk.builder.add_messages([TOOL])
    generate(talk.builder)
    output = finish(talk.builder)
    assert output.turn_texts == [CALL, "done"]
    after_prompt = talk.text[len(output.prompt_text) :]
    assert output.full_text == "".join(text for _, text in output.segments) == after_prompt
    assert [mask for mask, _ in output.segments] == [1, 0, 1]


def test_a_row_s_seed_stands_for_the_run_s(conversation) -> None:
    def seeds(**sampling: int) -> list[int]:
        talk = conversation(["a" + STOP, "b" + STOP])
        for _ in range(2):
            generate(talk.builder, **sampling)
        return [params.seed for _, params, _ in talk.policy.requests]

    assert seeds(seed=7) == seeds(seed=7)
    assert len({*seeds(seed=7), *seeds(seed=8), *seeds()}) == 6


@pytest.mark.parametrize("name", ["beam_width", "stop_token_ids", "n", "temprature"])
def test_a_sampling_parameter_that_would_be_ignored_is_an_error(conversation, name: str) -> None:
    talk = conversation(["hello" + STOP])
    with pytest.raises(PluginError, match=f"unknown sampling parameter {name}; allowed: temperature, top_p"):
        asyncio.run(talk.builder.generate({name: 1}))


@pytest.mark.parametrize("stops", [["</search>"], ["</nothing>", "rch>"]])
def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it(conversation, renderer, stops) -> None:
    """What the engine sampled after it is in no row: the model never reads the answer that it made up."""
    said = "search: weather</search> <result>sunny</result>"
    talk = conversation([said + STOP, "done" + STOP], template=renderer, tools=())
    turn = generate(talk.builder, stop=stops)
    assert (turn.text, turn.finish_reason) == ("search: weather</search>", "stop")
    assert talk.builder.row.response_ids == renderer.encode("search: weather</search>")
    assert talk.builder.row.response_logprobs == [-(i + 1) / 100 for i in range(len(turn.token_ids))]
    assert lengths_are_equal(talk.builder)
    assert talk.builder.add_messages([{"role": "user", "content": "rain"}])
    assert talk.text.endswith("</search><|im_end|>\n<|im_start|>user\nrain<|im_end|>\n<|im_start|>assistant\n")
    assert generate(talk.builder, stop=stops).text == "done"


def test_a_stop_text_of_one_token_ends_sampling_in_the_engine(conversation, renderer) -> None:
    talk = conversation(["one;two" + STOP], template=renderer, tools=())
    assert generate(talk.builder, stop=[";"]).text == "one;"
    assert renderer.encode(";")[0] in talk.policy.requests[0][1].stop_token_ids


def test_the_stop_text_that_comes_first_ends_a_turn_of_two_policies(conversation, renderer) -> None:
    ids = renderer.encode("ab|cd|ef")
    output = TokenOutput(ids, [-0.5] * len(ids), "length", [PolicySpan(3, 0, 2), PolicySpan(4, 2, len(ids))])
    talk = conversation([output], template=renderer, tools=())
    assert generate(talk.builder, stop=["d|", "|c"]).text == "ab|c"
    assert talk.builder.row.policy_versions == [3, 3, 4, 4]


def test_an_empty_stop_text_is_refused(conversation, renderer) -> None:
    talk = conversation(["x" + STOP], template=renderer, tools=())
    with pytest.raises(PluginError, match="stop: an empty text would end every turn"):
        generate(talk.builder, stop=[""])


def test_a_branch_that_grows_while_the_engine_answers_is_an_error(conversation) -> None:
    """What the engine sampled would stand behind messages that it did not see."""
    talk = conversation(["first" + STOP, "second" + STOP])
    generate(talk.builder)
    answer = talk.builder._sample

    async def overtaken(*request):
        talk.builder.add_messages([TOOL])
        return await answer(*request)

    talk.builder._sample = overtaken
    with pytest.raises(ProtocolError, match="still waiting for the engine when the branch grew. Await generate"):
        generate(talk.builder)
    assert [node.kind for node in talk.builder.tree.nodes] == ["prompt", "turn", "context"]


def test_branches_share_the_nodes_before_their_fork(conversation) -> None:
    """The first row that is returned trains them, whichever that is."""
    talk = conversation(["first" + STOP, "left" + STOP, "right" + STOP])
    generate(talk.builder)
    branch = talk.builder.fork()
    generate(talk.builder), generate(branch)
    trunk, twig = finish(talk.builder), finish(branch)
    tree = talk.builder.tree
    assert [node.kind for node in tree.nodes] == ["prompt", "turn", "turn", "turn"]
    assert tree.nodes[2].parent is tree.nodes[3].parent is tree.nodes[1]
    for order in ([trunk, twig], [twig, trunk]):
        first, second = adopt("a loop", tree, order)
        assert [first.turn_ids[0], second.turn_ids[0]] == [0, tree.numbers[second.tokens.leaf]]
        assert second.prompt_ids == first.prompt_ids + tree.nodes[1].ids
        assert second.response_ids == second.tokens.leaf.ids
    (alone,) = adopt("a loop", tree, twig)
    assert alone.response_ids == tree.nodes[1].ids + tree.nodes[3].ids and all(alone.response_mask)


def test_a_tree_of_many_turns_is_pickled(conversation) -> None:
    """A parent stands before its children, so that no depth is reached."""
    talk = conversation([f"{number}" + STOP for number in range(2000)], context=200_000, response=190_000)
    for _ in range(2000):
        generate(talk.builder)
    (row,) = adopt("a loop", talk.builder.tree, finish(talk.builder))
    again = pickle.loads(pickle.dumps(row))
    assert again.response_ids == row.response_ids and again.tokens.leaf.parent is again.tokens.nodes[-2]


def fork_of(talk) -> tuple[AgentLoopOutput, AgentLoopOutput]:
    """The rows of a trajectory and its fork: one turn before it, one in each after it."""
    builder = talk.builder
    generate(builder)
    fork = builder.fork()
    for branch in (builder, fork):
        branch.add_messages([TOOL])
        generate(branch)
    return finish(builder), finish(fork)


SAME = ["first" + STOP, "same" + STOP, "same" + STOP]


def test_a_row_that_is_returned_twice_is_trained_once(conversation) -> None:
    talk = conversation(SAME)
    row, fork = fork_of(talk)
    alone = len(talk.renderer.encode(SAME[1]))
    rows = adopt("loop", talk.builder.tree, [row, fork, row, fork])
    assert [each.tokens.sampled_tokens for each in rows] == [len(talk.renderer.encode(SAME[0])) + alone, alone]


@pytest.mark.parametrize("copied", [dataclasses.replace, copy.copy, copy.deepcopy])
def test_copies_of_branches_with_equal_tokens_are_trained_once_each(conversation, copied) -> None:
    talk = conversation(SAME)
    rows = fork_of(talk)
    expected = [(row.prompt_ids, row.response_ids, row.turn_ids) for row in rows]
    found = adopt("loop", talk.builder.tree, [copied(row) for row in rows])
    assert [(row.prompt_ids, row.response_ids, row.turn_ids) for row in found] == expected
    assert len(talk.builder.tree.nodes) == 6


def test_a_copy_of_a_changed_row_is_changed(conversation) -> None:
    for copied in (copy.copy, copy.deepcopy):
        talk = conversation(["said" + STOP])
        generate(talk.builder)
        row = finish(talk.builder)
        row.response_mask[0] = 0
        (found,) = adopt("loop", talk.builder.tree, copied(row))
        assert found.response_mask[:2] == [0, 1]


def test_a_token_that_a_loop_masked_in_one_row_is_not_trained_in_another(conversation) -> None:
    talk = conversation(["first" + STOP, "left" + STOP, "right" + STOP])
    row, fork = fork_of(talk)
    prompt, shared = fork.prompt_ids, row.turn_ids.index(-1)
    row.response_mask[:shared] = [0] * shared
    left, right = adopt("loop", talk.builder.tree, [row, fork])
    assert right.prompt_ids == prompt
    assert left.tokens.sampled_tokens == len(talk.renderer.encode("left" + STOP))


def test_what_is_earned_before_the_first_turn_stands_before_what_that_earns(conversation) -> None:
    talk = conversation(["said" + STOP])
    tree = talk.builder.tree
    tree.newest.calls.append(Call("early", {}, reward=1.0))
    tree.newest.rewards.append(Earned("partner", 3.0, "interaction"))
    generate(talk.builder)
    tree.newest.calls.append(Call("later", {}, reward=2.0))
    adopt("loop", tree, finish(talk.builder))
    assert [each.value for each in tree.newest.earned] == [1.0, 2.0, 3.0]


def test_a_history_that_is_rewritten_while_a_turn_is_sampled_is_refused(conversation) -> None:
    """The rewritten path is as long as the path before, and other tokens."""
    talk = conversation(["said" + STOP])
    builder = talk.builder
    sample = builder._sample

    async def meanwhile(*request):
        builder.add_messages([{"role": "user", "content": "more"}])
        return await sample(*request)

    builder._sample = meanwhile
    with pytest.raises(ProtocolError, match="still waiting for the engine when the branch grew"):
        generate(builder)
    assert builder.template_breaks == 1 and not builder.tree.turns()


def routed(prompt: int, *ids: int, of: int = 0) -> TokenOutput:
    """An output whose token at place t went to the experts ``of + t % 100`` and 1 of the only layer."""
    experts = np.array([[[of + place % 100, 1]] for place in range(prompt + len(ids) - 1)])
    spans = [PolicySpan(0, 0, len(ids))]
    return TokenOutput(list(ids), [0.0] * len(ids), "length", spans, routed_experts=experts)


def test_turns_keep_the_experts_of_the_tokens_since_the_turn_before(conversation):
    talk = conversation([])
    first = talk.builder.num_tokens
    talk.policy.turns.append(routed(first, 5, 6))
    generate(talk.builder)
    talk.builder.add_messages([TOOL])
    second = talk.builder.num_tokens
    # The engine says it again of all tokens; of those of the first request the first answer counts.
    talk.policy.turns += [routed(second, 7, 8, 9, of=100), routed(second, 7, of=300)]
    fork = talk.builder.fork()
    generate(talk.builder)
    talk.builder.add_messages([TOOL])
    generate(fork)
    rows = [finish(talk.builder), finish(fork)]
    results = TrajectoryResult({"uid": "u"}, "t", Termination.COMPLETED, [], RewardResult(1.0), tree=talk.builder.tree)
    results.outputs = adopt("loop", talk.builder.tree, rows)
    batch = to_data_proto([results], 0, {})
    long, short = batch.non_tensor_batch["routed_experts"]
    assert (long.dtype, short.dtype) == (np.uint8, np.int16)
    begin, then = [place % 100 for place in range(first + 1)], range(first + 1, second + 2)
    assert long[:, 0, 0].tolist() == [*begin, *(100 + place % 100 for place in then)]
    assert short[:, 0, 0].tolist() == [*begin, *(300 + place % 100 for place in then[:-2])]
    small = pickle.loads(pickle.dumps(talk.builder.tree))
    assert [None if node.routed_experts is None else len(node.routed_experts) for node in small.nodes] == [
        None if node.routed_experts is None else len(node.routed_experts) for node in talk.builder.tree.nodes
    ]


def test_experts_that_do_not_fit_the_tokens_are_an_error_of_the_engine(conversation):
    talk = conversation([])
    talk.policy.turns.append(routed(talk.builder.num_tokens - 1, 5, 6))
    with pytest.raises(EngineError, match=r"routed_experts of shape \[\d+, 1, 2\] for \d+ tokens of a prompt and 2"):
        generate(talk.builder)


def test_an_answer_that_is_cut_has_the_experts_of_what_is_left(renderer):
    ids = renderer.encode("ab ab ab")
    output = routed(4, *ids)
    assert len(ids) > 2
    cut = cut_after(output, ["b"], renderer.decode)
    assert len(cut.token_ids) < len(ids) and len(cut.routed_experts) == 4 + len(cut.token_ids) - 1


def test_parts_of_an_answer_have_the_experts_of_all_tokens():
    both = joined(routed(4, 5, 6), routed(6, 7, 8, of=50))
    assert both.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 55, 56]
    assert joined(TokenOutput([5], [0.0], "abort"), routed(5, 7)).routed_experts.shape[0] == 5
    assert joined(routed(4, 5), TokenOutput([], [], "abort")).routed_experts.shape[0] == 4
