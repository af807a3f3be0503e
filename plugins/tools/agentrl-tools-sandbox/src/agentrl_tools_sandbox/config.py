"""Options of the tools."""

from dataclasses import dataclass

from agentrl_core.api import option

MIB = 1 << 20


@dataclass
class SandboxConfig:
    boundary: str = option(
        "auto",
        choices=("auto", "sandlock", "bubblewrap", "landlock"),
        help="what confines the code; auto: sandlock, or else bubblewrap; landlock: weaker, without namespaces",
    )
    unsafe: bool = option(False, help="run without any boundary, with the rights of this process")
    timeout: float = option(10.0, gt=0, le=3600, unit="seconds", help="time limit of the code of one call")
    start_timeout: float = option(
        15.0, gt=0, unit="seconds", help="time limit for a sandbox to start, waiting for its turn included"
    )
    max_starting: int = option(8, ge=1, help="sandboxes that start concurrently in each agent-loop worker")
    max_memory: int = option(1024, ge=64, unit="MiB", help="memory limit; with bubblewrap it applies to each process")
    max_processes: int = option(16, ge=1, help="processes in a sandbox; bubblewrap counts threads too")
    max_disk: int = option(64, ge=1, unit="MiB", help="size limit of the files in a sandbox")
    max_output: int = option(
        20_000, ge=100, unit="bytes", help="output that the model sees of a call; the middle of a longer one is cut"
    )
    python: str | None = option(None, help="interpreter in the sandbox, with its packages; null: the one of this run")
    readable: list[str] = option(default_factory=list, help="more files and directories that the code may read")


@dataclass
class PythonConfig(SandboxConfig):
    keep_state: bool = option(
        False, help="keep variables and files between the calls of a trajectory; false: a new sandbox for each call"
    )


@dataclass
class CodeTestsConfig(SandboxConfig):
    partial: bool = option(False, help="score the share of tests that pass; false: 1 if all pass, otherwise 0")
    max_tests: int | None = option(None, ge=1, unit="tests", help="most tests that are run, the first ones; null: all")


@dataclass
class ShellConfig(SandboxConfig):
    pass


@dataclass
class RemotePythonConfig:
    url: str = option(help="address of the sandbox service; code goes to its path /run_code")
    timeout: float = option(10.0, gt=0, le=3600, unit="seconds", help="time limit of the code of one call")
    answer_timeout: float = option(
        25.0, gt=0, unit="seconds", help="time limit of one request; above the limit of the code, for the queue there"
    )
    max_concurrent: int = option(64, ge=1, help="concurrent requests of each agent-loop worker")
    max_body_bytes: int = option(
        4 * 2**20, ge=1, unit="bytes", help="longest answer of the service, decompressed; more fails the call"
    )
    max_output: int = option(
        20_000, ge=100, unit="bytes", help="output that the model sees of a call; the middle of a longer one is cut"
    )
