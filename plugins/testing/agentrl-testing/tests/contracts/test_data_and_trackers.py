import json
import random

from agentrl_core.api import PromptDataset, PromptSampler, Tracker
from agentrl_testing.contracts import (
    DatasetCase,
    DatasetContract,
    SamplerCase,
    SamplerContract,
    TrackerCase,
    TrackerContract,
)


class Rows(PromptDataset):
    def __init__(self, config, context):
        self.context = context

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"raw_prompt": [{"role": "user", "content": f"say {range(3)[index]}"}]}


class NoPrompt(Rows):
    def __getitem__(self, index):
        return {"prompt": "say 1"}


class NoRole(Rows):
    def __getitem__(self, index):
        return {"raw_prompt": [{"content": "say 1"}]}


class Empty(Rows):
    def __len__(self):
        return 0


class Shuffles(Rows):
    def __getitem__(self, index):
        return {"raw_prompt": [{"role": "user", "content": str(random.random())}]}


class Wraps(Rows):
    def __getitem__(self, index):
        return super().__getitem__(index % 3)


def test_every_check_catches_a_broken_dataset(spec, catches) -> None:
    def case(cls, **fields):
        return DatasetCase(spec("dataset", cls), **fields)

    catches(
        DatasetContract,
        {
            "test_rows_are_prompts": [case(NoPrompt), case(NoRole), case(Empty), case(Rows, rows=5)],
            "test_rows_are_the_same_every_time": [case(Shuffles)],
            "test_an_index_beyond_the_end_is_an_error": [case(Wraps)],
        },
    )


class InOrder(PromptSampler):
    def __init__(self, config, context):
        self.rows = len(context.rows)
        self.size = context.batch_size

    def batch(self, step):
        first = (step - 1) * self.size
        return [position % self.rows for position in range(first, first + self.size)]


class BeyondTheEnd(InOrder):
    def batch(self, step):
        return [number + self.size for number in super().batch(step)]


class StopsAtTheEnd(InOrder):
    def batch(self, step):
        return super().batch(step)[: self.rows]


class Rolls(InOrder):
    def batch(self, step):
        return [random.randrange(self.rows) for _ in range(self.size)]


class KeepsItsStateToItself(InOrder):
    seen = 0

    def batch(self, step):
        return [(number + self.seen) % self.rows for number in super().batch(step)]

    def update(self, step, outcomes):
        self.seen += sum(bool(outcome.rewards) for outcome in outcomes)


def test_every_check_catches_a_broken_sampler(spec, catches) -> None:
    def case(cls):
        return SamplerCase(spec("sampler", cls))

    catches(
        SamplerContract,
        {
            "test_batches_are_row_numbers": [case(BeyondTheEnd), case(StopsAtTheEnd)],
            "test_a_step_can_be_asked_for_again": [case(Rolls)],
            "test_a_resumed_run_gets_the_prompts_of_an_uninterrupted_one": [case(KeepsItsStateToItself)],
        },
    )


class Lines(Tracker):
    """Appends JSON lines; right but for what a subclass breaks."""

    mode = "a"

    def __init__(self, config, context):
        super().__init__(config, context)
        self.path = context.run_dir / "lines"
        self.path.open(self.mode).close()

    def log(self, metrics, step):
        with self.path.open("a") as file:
            file.write(json.dumps([step, dict(metrics)]) + "\n")


class StartsOver(Lines):
    mode = "w"


class Forgets(Lines):
    """Keeps the keys of the first step only."""

    keys = None

    def log(self, metrics, step):
        self.keys = self.keys or set(metrics)
        super().log({key: value for key, value in metrics.items() if key in self.keys}, step)


class Pops(Lines):
    def log(self, metrics, step):
        metrics.pop("timing/step", None)
        super().log(metrics, step)


class Strict(Lines):
    def log(self, metrics, step):
        json.dumps(dict(metrics), allow_nan=False)
        super().log(metrics, step)


class NeedsSteps(Lines):
    steps = 0

    def log(self, metrics, step):
        self.steps += 1
        super().log(metrics, step)

    def finish(self, status):
        1 / self.steps


class KnowsOnlyTexts(Lines):
    """A message's content may be a list of parts."""

    def log_trajectories(self, trajectories, step):
        for trajectory in trajectories:
            " ".join(message["content"] for message in trajectory.messages)


def read(run_dir):
    return dict(map(json.loads, (run_dir / "lines").read_text().splitlines()))


def test_every_check_catches_a_broken_tracker(spec, catches) -> None:
    def case(cls):
        return TrackerCase(spec("tracker", cls), read=read)

    catches(
        TrackerContract,
        {
            "test_all_steps_are_kept": [case(Forgets)],
            "test_metrics_are_left_alone": [case(Pops)],
            "test_a_resumed_run_goes_on": [case(StartsOver)],
            "test_trajectories_are_taken": [case(KnowsOnlyTexts)],
            "test_a_number_that_is_not_finite_is_taken": [case(Strict)],
            "test_a_run_without_steps_can_end": [case(NeedsSteps)],
        },
    )
