"""Any content of the files of a checkpoint, and of a lock file: it is read, or called damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl_core.api import CheckpointError, PluginError
from agentrl_core.plugins.lock import diff_lock, lock_of, read_lock
from agentrl_core.trainer.checkpoint import CheckpointStore, TrainerState, read_state
from tests.fuzz.fuzzing import CORPUS, changed, corpus, fuzz, mutated, outcome

TEXTS = corpus("state")
contents = (
    mutated(TEXTS).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.sampled_from([json.loads(text) for text in TEXTS]).flatmap(changed).map(lambda tree: json.dumps(tree).encode())
    | st.binary(max_size=20)
)


def test_the_corpus_is_read() -> None:
    """Else everything below would be damaged."""
    assert read_lock(CORPUS / "state" / "lock.json").plugins
    assert read_state(CORPUS / "state") == TrainerState(**json.loads((CORPUS / "state" / "trainer.json").read_text()))


@fuzz
@given(contents)
def test_any_lock_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plugins.lock.json"
    path.write_bytes(content)
    lock = outcome(lambda: read_lock(path), PluginError)
    if not isinstance(lock, PluginError):
        assert all(isinstance(line, str) for line in diff_lock(lock, lock_of([])))


@fuzz
@given(contents)
def test_any_state_of_the_trainer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trainer.json").write_bytes(content)
    state = outcome(lambda: read_state(tmp_path), CheckpointError)
    if isinstance(state, TrainerState):
        assert isinstance(state.step, int) and isinstance(state.data_fingerprint, str)
        assert all(isinstance(each, dict) for each in (state.metrics, state.sampler, state.algorithm))


@fuzz
@example(content=json.dumps({"9" * 400: "00"}).encode(), name="checksums.json")
@given(contents, st.sampled_from(["trainer.json", "checksums.json", "actor/weights"]))
def test_a_checkpoint_with_any_content_in_a_file_is_found_intact_or_damaged(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("checkpoints"), 1)

    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_text("w")

    path = store.save(TrainerState(1, None, None, "data"), write)
    before = (path / name).read_bytes()
    (path / name).write_bytes(content)
    found: Any = outcome(lambda: store.find(str(path)), CheckpointError)
    assert isinstance(found, CheckpointError) or content == before or name == "checksums.json"
