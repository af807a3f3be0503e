"""Keys that contradict each other, the capabilities of the plugins, or the files there are."""

import pytest

TOOL_AGENT = "rollout.agent.loops=[tool_agent]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.n=1"],
            "rollout.n (override 'rollout.n=1'): group size 1 with advantage estimator 'grpo', which compares the "
            "samples of one prompt: every advantage would be 0; expected rollout.n >= 2, or an estimator without "
            "groups in algorithm.advantage",
        ),
        (
            ["rollout.engine.python=/env/bin/python"],
            "rollout.engine.python (override 'rollout.engine.python=/env/bin/python'): an engine in its own "
            "environment needs cluster.runtime=ray, found local; set cluster.runtime=ray or rollout.engine.python=null",
        ),
        (
            ["cluster.processes_per_node=2"],
            "cluster.processes_per_node (override 'cluster.processes_per_node=2'): found 2, but the local runtime is "
            "one process; set cluster.runtime=ray or cluster.processes_per_node=1",
        ),
        (
            ["cluster.nodes=3"],
            "cluster.nodes (override 'cluster.nodes=3'): found 3, but the local runtime is one process; set "
            "cluster.runtime=ray or cluster.nodes=1",
        ),
        (
            ["actor.offload_parameters=true", "rollout.engine=hf"],
            "actor.offload_parameters (override 'actor.offload_parameters=true'): engine 'hf' generates with the "
            "actor's own weights in the local runtime, and they must stay on the device; set cluster.runtime=ray or "
            "actor.offload_parameters=false",
        ),
        (
            ["rollout.max_staleness=1", "algorithm.uncorrected_staleness=true"],
            "rollout.max_staleness (override 'rollout.max_staleness=1'): found 1, but in the local runtime, which is "
            "one process, nothing can be sampled while the trainer trains; set cluster.runtime=ray, or "
            "rollout.max_staleness=0",
        ),
        (
            ["rollout.pipeline_depth=1"],
            "rollout.pipeline_depth (override 'rollout.pipeline_depth=1'): found 1, but batches that are begun so far "
            "ahead would be older than rollout.max_staleness=0; allowed is up to 0",
        ),
        (
            ["rollout.deterministic=true", "rollout.engine=fussy"],
            "rollout.engine.name (override 'rollout.engine=fussy'): inference engine 'fussy' lacks the capability "
            "'deterministic', which rollout.deterministic=true needs; installed with it: hf",
        ),
        (
            ["rollout.deterministic=true", "rollout.engine=fussy", "plugins.block=[hf]"],
            "rollout.engine.name (override 'rollout.engine=fussy'): inference engine 'fussy' lacks the capability "
            "'deterministic', which rollout.deterministic=true needs; none installed has it (agentrl plugins list "
            "--kind engine)",
        ),
        (
            ["rollout.sampling.repetition_penalty=1.1", "rollout.engine=fussy"],
            "rollout.engine.name (override 'rollout.engine=fussy'): inference engine 'fussy' lacks the capability "
            "'repetition_penalty', which rollout.sampling.repetition_penalty=1.1 needs; none installed has it (agentrl "
            "plugins list --kind engine)",
        ),
        (
            ["trainer.validation.sampling.logit_bias={7: -100}", "rollout.engine=fussy"],
            "rollout.engine.name (override 'rollout.engine=fussy'): inference engine 'fussy' lacks the capability "
            "'logit_bias', which trainer.validation.sampling.logit_bias={7: -100.0} needs; none installed has it "
            "(agentrl plugins list --kind engine)",
        ),
        (
            ["rollout.sampling={top_p: 0.9, top_k: 20}", "rollout.engine=fussy"],
            "rollout.engine.name (override 'rollout.engine=fussy'): inference engine 'fussy' lacks the capability "
            "'chained_truncation', which rollout.sampling.top_p=0.9 with top_k=20 needs; none installed has it "
            "(agentrl plugins list --kind engine)",
        ),
        (
            ["rollout.sampling.temperature=0.001"],
            "rollout.sampling (override 'rollout.sampling.temperature=0.001'): temperature is 0.001; allowed: 0 "
            "(greedy), or 0.01 to 2",
        ),
        (
            ["rollout.sampling.temperature=2.5"],
            "rollout.sampling.temperature (override 'rollout.sampling.temperature=2.5'): expected a number >= 0 and "
            "<= 2, found 2.5",
        ),
        (
            ["rollout.max_logprob_gap=0.1"],
            "rollout.engine.name (default): inference engine 'hf' lacks the capability 'logprobs', which "
            "rollout.max_logprob_gap=0.1 needs; installed with it: fussy",
        ),
        (
            ["rollout.deterministic=true", "rollout.engine.replicas=2"],
            "rollout.engine.replicas (override 'rollout.engine.replicas=2'): rollout.deterministic needs 1 replica, "
            "found 2",
        ),
        (
            ["rollout.deterministic=true", "rollout.agent.num_workers=2"],
            "rollout.agent.num_workers (override 'rollout.agent.num_workers=2'): rollout.deterministic needs 1 worker, "
            "found 2",
        ),
        (
            ["rollout.deterministic=true", "rollout.agent.max_concurrent=255"],
            "rollout.agent.max_concurrent (override 'rollout.agent.max_concurrent=255'): rollout.deterministic needs "
            "all trajectories of a step to run concurrently, data.batch_size x rollout.n = 256, found 255",
        ),
        (
            ["reference.path=/m"],
            "reference.path (override 'reference.path=/m'): no reference is used because algorithm.kl_coef is 0; set "
            "algorithm.kl_coef > 0 or reference.path=null",
        ),
        (
            ["critic.path=/m"],
            "critic.path (override 'critic.path=/m'): no critic is used because advantage estimator 'grpo' needs no "
            "values; choose another algorithm.advantage or set critic.path=null",
        ),
        (
            ["critic.warmup_steps=3"],
            "critic.warmup_steps (override 'critic.warmup_steps=3'): no critic is used because advantage estimator "
            "'grpo' needs no values; choose another algorithm.advantage or set critic.warmup_steps=0",
        ),
        (
            ["actor.optimizer.betas=[0.9]"],
            "actor.optimizer.betas (override 'actor.optimizer.betas=[0.9]'): expected two numbers, found 1",
        ),
        (
            [TOOL_AGENT, "tools=[calculator, calculator]"],
            "tools.1.name (override 'tools=[calculator, calculator]'): duplicate name 'calculator', first used in "
            "tools.0; rows choose by name, so remove or rename one",
        ),
        (
            ["rollout.agent.loops=[single_turn, single_turn]"],
            "rollout.agent.loops.1.name (override 'rollout.agent.loops=[single_turn, single_turn]'): duplicate "
            "name 'single_turn', first used in rollout.agent.loops.0; rows choose by name, so remove or rename one",
        ),
        (
            ["tools=[calculator]"],
            "rollout.agent.loops (config.yaml:7): agent loop 'single_turn' lacks the capability 'tools', which "
            "tools=[calculator] needs; installed with it: tool_agent",
        ),
        (
            ["tools=[calculator]", "rollout.agent.loops=[single_turn, two_turns]"],
            "rollout.agent.loops (override 'rollout.agent.loops=[single_turn, two_turns]'): each agent loop "
            "('single_turn', 'two_turns') lacks the capability 'tools', which tools=[calculator] needs; installed with "
            "it: tool_agent",
        ),
        (
            ["interactions=[tutor]"],
            "rollout.agent.loops (config.yaml:7): agent loop 'single_turn' lacks the capability 'interactions', which "
            "interactions=[tutor] needs; installed with it: tool_agent",
        ),
        (
            ["reward.functions=[]"],
            "reward.functions (override 'reward.functions=[]'): nothing gives a reward: no function is configured, "
            "no agent loop returns rewards, and reward manager 'naive' uses neither the rewards of tools nor the "
            "scores of interactions; add a function (see `agentrl plugins list`, or ./file.py:function)",
        ),
        (
            ["trainer.checkpoint.best_metric=validation/x/accuracy_greedy"],
            "trainer.checkpoint.best_metric (override "
            "'trainer.checkpoint.best_metric=validation/x/accuracy_greedy'): 'validation/x/accuracy_greedy' is never "
            "measured without data.validation_files",
        ),
        (
            ["data.validation_files=[/v]", "trainer.validation={greedy: false, n: 0}"],
            "trainer.validation.n (override 'trainer.validation={greedy: false, n: 0}'): validation would measure "
            "nothing: set trainer.validation.greedy=true or trainer.validation.n >= 1",
        ),
        (
            ["rollout.agent.loops=[]"],
            "rollout.agent.loops (override 'rollout.agent.loops=[]'): expected at least one agent loop, found none; "
            "see `agentrl plugins list`",
        ),
        (
            ["data.train_files=[]"],
            "data.train_files (override 'data.train_files=[]'): expected at least one file, or an environment in "
            "`environments`; found none",
        ),
    ],
)
def test_message(problems, valid, overrides, message):
    assert problems(valid, *overrides) == [message]


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.n=1", "algorithm.advantage=gae", "critic={path: /m, warmup_steps: 2}"],
        ["rollout.engine.python=/env/bin/python", "cluster.runtime=ray"],
        ["cluster={runtime: ray, nodes: 2, processes_per_node: 8}", "actor.offload_parameters=true"],
        ["rollout.deterministic=true"],
        ["rollout.max_logprob_gap=0.1", "rollout.engine=fussy"],
        ["reference.path=/m", "algorithm.kl_coef=0.1"],
        [TOOL_AGENT, "tools=[calculator]", "interactions=[tutor]"],
        ["reward.functions=[]", "reward.manager=tools_only"],
        ["reward.functions=[]", "rollout.agent.loops=[scores_itself]"],
        ["data.validation_files=[/v]", "trainer.checkpoint.best_metric=x"],
        ["trainer.validation.n=0"],
    ],
)
def test_what_agrees_is_accepted(problems, valid, overrides):
    assert problems(valid, *overrides) == []


def test_they_wait_until_the_tree_is_sound(problems, valid):
    assert len(problems(valid, "rollout.n=1", "trainer.seed=x")) == 1


OVERLAPS = ["cluster.runtime=ray", "rollout.engine.placement=standalone", "rollout.max_staleness=2"]
CORRECTED = "algorithm.correction=truncated"


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ([], "rollout.max_staleness", "the loss 'ppo' compares with the policy before the update, not with the one"),
        (
            [CORRECTED, "rollout.engine.placement=colocated"],
            "rollout.max_staleness",
            "set rollout.engine.placement=stan",
        ),
        ([CORRECTED, "rollout.pipeline_depth=3"], "rollout.pipeline_depth", "allowed is up to 2"),
        (
            [CORRECTED, "rollout.pipeline_depth=2", "rollout.deterministic=true"],
            "rollout.pipeline_depth",
            "set rollout.pipeline_depth=1",
        ),
    ],
)
def test_what_sampling_ahead_needs(problems, valid, overrides, key, message):
    found = problems(valid, *OVERLAPS, *overrides)
    assert any(each.startswith(key) and message in each for each in found), found


@pytest.mark.parametrize("overrides", [[CORRECTED], ["algorithm.uncorrected_staleness=true"]])
def test_what_agrees_may_sample_ahead(problems, valid, overrides):
    assert not [each for each in problems(valid, *OVERLAPS, *overrides) if "staleness" in each]


def test_several_at_once(problems, valid):
    assert len(problems(valid, "rollout.n=1", "tools=[calculator]", "reward.functions=[]")) == 3


def test_model_path_missing_says_what_makes_it(problems, write, valid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("{}", "train.jsonl")
    found = f"model.path (config.yaml:2): no such directory: {tmp_path / 'model'}"
    missing = f"{found}; expected a model that transformers can load"
    assert problems(valid, check_files=True) == [missing]
    write("", "prepare.py")
    assert problems(valid, check_files=True) == [f"{missing}; make it with: python prepare.py"]
    write("", "model/weights")
    assert problems(valid, check_files=True) == [
        f"model.path (config.yaml:2): {tmp_path / 'model'} has no config.json; expected a model that transformers can "
        "load; make it with: python prepare.py"
    ]
    write("{}", "model/config.json")
    assert problems(valid, check_files=True) == []


def test_missing_data_files(problems, write, valid, tmp_path):
    write("{}", "model/config.json")
    assert problems(valid + "  \n", check_files=True) == [
        f"data.train_files.0 (config.yaml:4): no such file: {tmp_path / 'train.jsonl'}"
    ]
    assert problems(valid, check_files=False) == []
