"""Which devices engine replicas get."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl_core.api import ConfigError, WorkerError
from agentrl_core.config import load_config
from agentrl_core.config.schema import Config
from agentrl_core.controller import ActorOptions, ClassWithInitArgs, Runtime, make_runtime
from agentrl_core.controller.worker import Worker, WorkerContext, worker_context
from agentrl_core.controller.worker_group import Place
from agentrl_core.serving.placement import (
    GpuAssignment,
    assign_anywhere,
    assign_own_gpus,
    assign_shared_gpus,
    assign_without_training,
    check_sleep,
    engine_memory_share,
    sleep_level,
)
from agentrl_core.trainer import roles
from agentrl_core.trainer.roles import uses_gpus
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.protocols import DeviceMemory

ENGINE = """
from agentrl_core.api import InferenceEngine

class Many(InferenceEngine):
    capabilities = frozenset({"logprobs", "weight_update", "parallel", "multi_node"})

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        raise NotImplementedError
"""


@pytest.fixture
def make_config(tiny_run: Any) -> Any:
    (tiny_run.folder / "many.py").write_text(ENGINE)

    def make(cluster: tuple[int, int] = (1, 4), **engine: Any) -> Config:
        return load_config(
            tiny_run({
                "cluster": {"runtime": "ray", "nodes": cluster[0], "processes_per_node": cluster[1]},
                "rollout.engine": {"name": "./many.py:Many", **engine},
            })
        )  # fmt: skip

    return make


@pytest.fixture
def sleeper(tiny_run: Any) -> Any:
    """A configuration whose engine can sleep, is colocated, and may use the actor's module in the local runtime."""

    def make(runtime: str = "ray", **engine: Any) -> Config:
        return load_config(tiny_run({"cluster.runtime": runtime, "rollout.engine": {"name": "hf", **engine}}))

    return make


def test_engines_on_the_gpus_of_training_processes_sleep_by_themselves(sleeper: Any, make_config: Any) -> None:
    assert sleep_level(sleeper(), on_gpus=True) == 2
    assert sleep_level(sleeper(sleep=1), on_gpus=True) == 1
    assert sleep_level(sleeper("local"), on_gpus=True) == 1, "the weights are the actor's own"
    assert sleep_level(sleeper(placement="standalone"), on_gpus=True) == 0
    assert sleep_level(sleeper(), on_gpus=False) == 0
    assert sleep_level(make_config(), on_gpus=True) == 0, "it cannot"


def test_an_engine_that_stays_awake_beside_a_trainer_on_its_gpu_is_refused(sleeper: Any, make_config: Any) -> None:
    with pytest.raises(ConfigError, match="sleep: found 0.*shares its GPUs.*memory that the update needs.*standalone"):
        check_sleep(sleeper(sleep=0), on_gpus=True)
    for config in (sleeper(), sleeper("local", sleep=0), sleeper(sleep=0, placement="standalone"), make_config()):
        check_sleep(config, on_gpus=True)
    check_sleep(sleeper(sleep=0), on_gpus=False)


GIB = 2**30


def test_an_engine_takes_what_the_trainer_leaves_at_rest() -> None:
    """free - moments that are still to come - 2 GiB, of the fullest GPU, for all replicas on it."""
    fullest = DeviceMemory(80 * GIB, 70 * GIB, 28 * GIB)
    assert engine_memory_share([DeviceMemory(80 * GIB, 60 * GIB), fullest]) == 0.5
    assert engine_memory_share([fullest], replicas=4) == 0.125
    assert engine_memory_share([DeviceMemory(80 * GIB, 80 * GIB)]) == 0.9


def test_a_trainer_that_leaves_nothing_is_named_with_what_it_holds() -> None:
    with pytest.raises(ConfigError, match="hold 11.0 of 24.0 GiB, AdamW's moments will take 12.0 GiB.*offload_optim"):
        engine_memory_share([DeviceMemory(24 * GIB, 13 * GIB, 12 * GIB)])


class Group:
    def __init__(self, *ranks: DeviceMemory) -> None:
        self.ranks = list(ranks)

    def device_memory(self) -> list[DeviceMemory]:
        return self.ranks


def test_moments_of_all_roles_on_a_gpu_count(make_config: Any) -> None:
    """Actor and critic are in one process: both see the same GPU."""
    training = {
        "actor": Group(DeviceMemory(80 * GIB, 50 * GIB, 10 * GIB), DeviceMemory(80 * GIB, 60 * GIB, 10 * GIB)),
        "critic": Group(DeviceMemory(80 * GIB, 46 * GIB, 10 * GIB), DeviceMemory(80 * GIB, 60 * GIB, 10 * GIB)),
    }
    config = make_config((1, 2))
    assert roles._gpu_memory(config, training) == {"memory_share": 0.3, "memory_free": 46 / 80}
    assert roles._gpu_memory(make_config((1, 2), replicas=4), training)["memory_share"] == 0.15
    assert roles._gpu_memory(make_config((1, 2), placement="standalone"), training) == {}
    assert roles._gpu_memory(make_config((1, 2), replicas=4), {}) == {"memory_share": 0.45}
    assert roles._gpu_memory(config, {}) == {}


def places(nodes: int, each: int) -> list[Place]:
    return [Place(f"node{node}", (str(gpu),)) for node in range(nodes) for gpu in range(each)]


def devices(assignments: Any) -> list[list[tuple[str, str]]]:
    return [[(assignment.node, ",".join(assignment.devices)) for assignment in replica] for replica in assignments]


def test_replicas_fill_the_training_processes_unless_they_are_counted(make_config: Any) -> None:
    assert make_config().engine_replicas == 4
    assert make_config((2, 4), tensor_parallel=2, pipeline_parallel=2).engine_replicas == 2
    assert make_config((1, 2), data_parallel=8).engine_replicas == 1
    assert make_config(replicas=3).engine_replicas == 3
    config = make_config()
    config.rollout.deterministic = True
    assert config.engine_replicas == 1


def test_agent_loop_workers_follow_the_size_of_a_step_unless_they_are_counted(make_config: Any) -> None:
    def workers(prompts: int, samples: int, nodes: int = 1, **changes: Any) -> int:
        config = make_config((nodes, 8))
        config.data.batch_size, config.rollout.n = prompts, samples
        for name, value in changes.items():
            setattr(config.rollout, name, value)
        return int(config.agent_workers)

    assert [workers(4, 8), workers(16, 8), workers(16, 9), workers(64, 8)] == [1, 1, 2, 4]
    # No more than a node has processes for, and none without a prompt.
    assert [workers(512, 16), workers(512, 16, nodes=2), workers(2, 1024)] == [8, 16, 2]
    assert workers(512, 16, deterministic=True) == 1
    config = make_config()
    config.data.batch_size, config.rollout.agent.num_workers = 512, 3
    assert config.agent_workers == 3
    config.cluster.runtime, config.rollout.agent.num_workers = "local", None
    assert config.agent_workers == 1


def test_replicas_get_the_gpus_of_consecutive_ranks(make_config: Any) -> None:
    assert devices(assign_shared_gpus(make_config(), places(1, 4))) == [[("node0", str(gpu))] for gpu in range(4)]
    assert devices(assign_shared_gpus(make_config((2, 4), tensor_parallel=2), places(2, 4))) == [
        [("node0", "0,1")], [("node0", "2,3")], [("node1", "0,1")], [("node1", "2,3")]
    ]  # fmt: skip
    assert devices(
        assign_shared_gpus(make_config((2, 2), tensor_parallel=2, pipeline_parallel=2, nodes=2), places(2, 2))
    ) == [[("node0", "0,1"), ("node1", "0,1")]]


def test_small_replicas_may_share_gpus_and_leave_some_out(make_config: Any) -> None:
    assignments = assign_shared_gpus(make_config((1, 2), replicas=5), places(1, 2))
    assert devices(assignments) == [[("node0", str(gpu))] for gpu in (0, 1, 0, 1, 0)]
    assert devices(assign_shared_gpus(make_config(replicas=1, tensor_parallel=2), places(1, 4))) == [[("node0", "0,1")]]


@pytest.mark.parametrize(
    ("cluster", "engine", "message"),
    [
        ((1, 2), {"tensor_parallel": 4}, "1 replica.* 4 GPUs, the training processes have 2 .*standalone"),
        ((1, 4), {"replicas": 3, "tensor_parallel": 2}, "3 replica.* of 2 device.* need 6 GPUs"),
        (
            (2, 3),
            {"tensor_parallel": 2},
            "replica 1 of .* 1 on one node and 1 on one node, not 2 on each of 1 node.*processes_per_node",
        ),
        ((2, 2), {"tensor_parallel": 4}, "2 on one node and 2 on one node, not 4 on each of 1 node"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(
    make_config: Any, cluster: tuple[int, int], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_shared_gpus(make_config(cluster, **engine), places(*cluster))


def test_a_replica_of_several_hosts_has_an_assignment_on_each(make_config: Any) -> None:
    config = make_config(tensor_parallel=4, replicas=2, nodes=2)
    assert assign_own_gpus(config.rollout.engine, 2) == [[GpuAssignment(2.0)] * 2] * 2
    assert assign_anywhere(config.rollout.engine, 2) == [[GpuAssignment()] * 2] * 2
    assert assign_shared_gpus(config, [Place()] * 4) == [[GpuAssignment()] * 2] * 2


@pytest.mark.parametrize(
    ("wanted", "has_gpus", "expected"), [("auto", True, True), ("auto", False, False), ("cpu", True, False)]
)
def test_the_nodes_decide_the_device_and_not_the_drivers_machine(
    make_config: Any, monkeypatch: pytest.MonkeyPatch, wanted: str, has_gpus: bool, expected: bool
) -> None:
    config = make_config()
    config.cluster.address, config.cluster.device = "10.9.9.9:6379", wanted
    # The machine of the driver has what the nodes lack.
    monkeypatch.setattr("torch.cuda.is_available", lambda: not has_gpus)
    assert uses_gpus(config, cast(Runtime, SimpleNamespace(has_gpus=has_gpus))) is expected


def test_a_cluster_without_gpus_is_refused_where_they_are_asked_for(make_config: Any) -> None:
    config = make_config()
    config.cluster.address, config.cluster.device = "10.9.9.9:6379", "cuda"
    with pytest.raises(ConfigError, match=r"no node of the Ray cluster at 10\.9\.9\.9:6379 has a GPU"):
        uses_gpus(config, cast(Runtime, SimpleNamespace(has_gpus=False)))


def test_a_process_that_was_given_a_gpu_does_not_compute_on_the_cpu(make_config: Any) -> None:
    with worker_context(WorkerContext(master_port=1, use_gpu=True)), pytest.raises(ConfigError, match="sees no CUDA"):
        ActorWorker(make_config(), 1)


def test_without_training_small_replicas_share_what_training_would_have(make_config: Any) -> None:
    assert assign_without_training(make_config((1, 2))) == [[GpuAssignment(1)]] * 2
    assert assign_without_training(make_config((1, 1), replicas=3)) == [[GpuAssignment(0.33)]] * 3
    assert assign_without_training(make_config((1, 4), tensor_parallel=2)) == [[GpuAssignment(2)]] * 2


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"tensor_parallel": 2}, "rollout.engine.tensor_parallel.*found 2.*local runtime.*cluster.runtime=ray"),
        ({"nodes": 2, "tensor_parallel": 2}, "rollout.engine.nodes.*found 2.*local runtime"),
        ({"placement": "standalone"}, "rollout.engine.placement.*in the trainer's process"),
        ({"nodes": 2}, r"rollout.engine.nodes.*1 device\(s\) of a replica .* cannot be spread evenly over 2 nodes"),
    ],
)
def test_the_local_runtime_has_one_process(tiny_run: Any, engine: dict[str, Any], message: str) -> None:
    (tiny_run.folder / "many.py").write_text(ENGINE)
    with pytest.raises(ConfigError, match=message):
        load_config(tiny_run({"rollout.engine": {"name": "./many.py:Many", **engine}}))


def test_engines_must_say_that_they_can(tiny_run: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(
            tiny_run({
                "cluster.runtime": "ray",
                "rollout.engine": {"name": "scripted", "tensor_parallel": 2, "data_parallel": 2, "nodes": 2},
            })
        )  # fmt: skip
    assert "'parallel', which rollout.engine.tensor_parallel=2 and rollout.engine.data_parallel=2 needs" in str(
        refused.value
    )
    assert "'multi_node', which rollout.engine.nodes=2 needs" in str(refused.value)


class Shows:
    """What a process sees."""

    def __init__(self) -> None:
        import os

        self.seen = os.environ.get("CUDA_VISIBLE_DEVICES")

    def where(self) -> tuple[str, str | None]:
        import ray

        return ray.get_runtime_context().get_node_id(), self.seen


@pytest.mark.slow
@pytest.mark.ray
def test_ranks_tell_their_gpus_and_actors_go_where_they_are_told(
    warm_ray: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    for name, value in warm_ray.items():
        monkeypatch.setenv(name, value)
    ray.init(num_cpus=16, num_gpus=4, include_dashboard=False, logging_level="ERROR")
    try:
        with make_runtime("ray") as runtime:
            group = runtime.colocated_worker_groups({"actor": ClassWithInitArgs(Worker)}, 1, 4, num_gpus=1.0)["actor"]
            found = group.places()
            assert sorted(gpu for place in found for gpu in place.devices) == ["0", "1", "2", "3"]
            assert len({place.node for place in found}) == 1
            actor = runtime.actor(Shows, name="shows", options=ActorOptions(node=found[0].node))
            node, _ = runtime.run(actor.call("where"))
            assert node == found[0].node
            with pytest.raises(WorkerError, match="'greedy' needs 2 GPUs, but 4 of the 4 .*placement=colocated"):
                runtime.actor(Shows, name="greedy", options=ActorOptions(num_gpus=2))
    finally:
        ray.shutdown()
