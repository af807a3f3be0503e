"""Which trajectory this is, and the seeds that follow from it."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class TrajectoryKey:
    """Names one trajectory of a run.

    Args:
        run_seed: ``trainer.seed``.
        split: ``train``, ``validation.greedy`` or ``validation.sampled``.
        step: from 1; 0 for the validation before training.
        prompt: number of the prompt within the step.
        sample: number of the sample of that prompt.
        attempt: 0, and one more for each fresh start.
    """

    run_seed: int
    split: str
    step: int
    prompt: int
    sample: int
    attempt: int = 0

    @cached_property
    def trajectory_id(self) -> str:
        """Unique within the run; the same for all attempts."""
        return f"{self.split}-{self.step:06d}-{self.prompt:05d}-{self.sample:03d}"

    @cached_property
    def request_id(self) -> str:
        """Unique per attempt; sorts in the order of the prompts."""
        return f"{self.trajectory_id}-{self.attempt}"

    def seed(self, turn: int, branch: int = 0, row_seed: int | None = None) -> int:
        """Seed of one turn in [0, 2^63): a function of run, step, prompt, sample and turn, and of nothing else.

        Args:
            row_seed: in place of run, step and prompt, where the row has its own.
        """
        where = f"{self.run_seed}/{self.split}/{self.step}/{self.prompt}" if row_seed is None else f"row/{row_seed}"
        text = f"{where}/{self.sample}/{branch}/{turn}"
        return self._hashed(text)

    @property
    def task_seed(self) -> int:
        """Seed of the environment's episode in [0, 2^63): the same for all samples and attempts of a prompt, its greedy
        baseline included. A validation prompt has the same one at every step."""
        split = self.split.removesuffix(".greedy")
        where = "validation" if split.startswith("validation") else f"{split}/{self.step}"
        return self._hashed(f"{self.run_seed}/task/{where}/{self.prompt}")

    @staticmethod
    def _hashed(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def next_attempt(self) -> "TrajectoryKey":
        return replace(self, attempt=self.attempt + 1)
