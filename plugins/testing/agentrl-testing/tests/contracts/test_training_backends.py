import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_core.api import PluginSpec
from agentrl_testing.contracts import TrainingBackendCase, TrainingBackendContract
from agentrl_testing.devtools.scaffold import scaffold

NAME = "toy-training"
CAN = ("all_weights", "entropies", "temperature", "critic", "ranks")


@pytest.fixture(autouse=True, scope="module")
def importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package that the template makes, and the module that breaks it; also in processes of ranks."""
    folder = scaffold("training_backend", NAME, tmp_path_factory.mktemp("template"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "src"))
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


def case(name: str) -> TrainingBackendCase:
    """A backend of the module ``broken_training``."""
    from toy_training.config import ToyTrainingConfig

    spec = PluginSpec(
        "training_backend", "broken", 1, "broken on purpose", f"broken_training:{name}", ToyTrainingConfig,
        capabilities=frozenset(CAN),
    )  # fmt: skip
    return TrainingBackendCase(spec)


class TestRight(TrainingBackendContract):
    """What the others break is right, on two ranks and with values too."""

    @pytest.fixture
    def plugin(self) -> TrainingBackendCase:
        return case("Right")


def test_every_check_catches_a_broken_backend(catches) -> None:
    catches(
        TrainingBackendContract,
        {
            "test_outputs_are_those_of_each_row_alone": [case("Colder"), case("OneTokenOn"), case("NoEntropies")],
            "test_values_start_at_zero_and_are_trained": [case("HasAnOpinion"), case("Means")],
            "test_steps_are_those_of_plain_pytorch": [case("Means"), case("NoEntropies")],
            "test_the_norm_is_clipped": [case("ClipsEach")],
            "test_gradients_that_are_not_finite_change_nothing": [case("StepsAnyway")],
            "test_forgotten_gradients_are_forgotten": [case("KeepsGradients")],
            "test_a_loss_is_called_once_for_each_micro_batch": [case("CallsTwice")],
            "test_what_a_loss_raises_is_raised": [case("Swallows")],
            "test_what_is_handed_out_is_what_is_trained": [case("HandsOutTheFirst")],
            "test_weights_leave_in_the_data_type_of_the_engines": [case("Uncast")],
            "test_a_snapshot_goes_on_bit_for_bit": [case("CopiesLate"), case("ForgetsMoments"), case("ForgetsSteps")],
            "test_snapshots_of_other_models_are_refused": [case("TakesWhatFits")],
            "test_damaged_snapshots_are_refused": [case("RaisesItsOwn")],
            "test_ranks_are_one_process": [case("Averages"), case("ClipsAlone")],
            "test_a_snapshot_moves_to_another_number_of_ranks": [case("SplitsSnapshots")],
        },
    )


def test_the_template_is_short() -> None:
    """A backend can be written in 250 lines."""
    import toy_training.backend

    assert len(inspect.getsource(toy_training.backend).splitlines()) <= 250
