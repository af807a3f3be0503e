"""Loads the prompts of a run and checks everything that they name, before anything starts."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from agentrl_core.api import (
    ConfigError,
    DataError,
    DatasetContext,
    Message,
    PromptDataset,
    PromptOutcome,
    PromptSampler,
    Renderer,
    SamplerContext,
    TemplateError,
)
from agentrl_core.api.dataset import Split
from agentrl_core.config.capabilities import installed_with
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller.event_loop import EventLoop
from agentrl_core.data.chat_template import media_of
from agentrl_core.data.length_cache import cached_lengths
from agentrl_core.data.overlong import fit_prompt, fit_prompts
from agentrl_core.data.renderer import NO_PROCESSOR
from agentrl_core.data.row_sampling import check_row_sampling
from agentrl_core.data.rows import SOURCES, Row, fingerprint
from agentrl_core.data.streaming import StreamedRows
from agentrl_core.data.template_check import RenderedText, require_tool_role
from agentrl_core.engine_kit.images import shown_by
from agentrl_core.hosting.environments import HostedEnvironment
from agentrl_core.hosting.tools import HostedTool, select_tools
from agentrl_core.plugins.boundary import boundary, hang_reported
from agentrl_core.serving.clients import absent_clients
from agentrl_core.trainer.checkpoint import plugin_refs
from agentrl_core.trainer.row_images import OTHER_MEDIA, RowImages, obstacle

logger = logging.getLogger(__name__)

_AT_START = 1000
"""Streamed rows that are checked and measured before a run, and about as many that its fingerprint is made of."""
_RESERVED = {"sampling_params", "session", "uid", "prompt_index", "sample_index", SOURCES}
_TOOL_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


@dataclass(frozen=True)
class PromptData:
    """Rows that fit, the sampler over the training rows, and the tokens of the longest prompt.

    ``first_prompt`` holds the messages of a training prompt: an environment writes its own only when a task begins.
    Streamed rows are read from ``train`` when their step comes, and ``longest_prompt`` is that of the first ones.
    """

    train: Sequence[Row]
    validation: Sequence[Row]
    sampler: PromptSampler
    longest_prompt: int
    batch_size: int
    first_prompt: Sequence[Message]
    drawn: dict[int, list[int]] = field(default_factory=dict)
    """Rows that the sampler has chosen, by step, until :meth:`update`: it may learn before they are trained."""

    def batch(self, step: int) -> list[Row]:
        """Return the training rows of a step.

        Raises:
            DataError: the sampler named other rows than there are, or another number of them.
        """
        numbers = self.drawn.get(step)
        if numbers is None:
            with hang_reported(f"data.sampler, choosing the rows of step {step},"):
                numbers = list(self.sampler.batch(step))
        if len(numbers) != self.batch_size or not all(0 <= number < len(self.train) for number in numbers):
            raise DataError(
                f"data.sampler: for step {step} it chose {len(numbers)} rows, {list(numbers)!r:.100}; expected "
                f"data.batch_size={self.batch_size} numbers from 0 to {len(self.train) - 1}"
            )
        self.drawn[step] = numbers
        # Streamed rows are read only now.
        with hang_reported(f"the dataset, reading the rows of step {step},"):
            return [self.train[number] for number in numbers]

    def fingerprint(self) -> str:
        """A hash of the training prompts in their order; of streamed rows, of some that are spread over the data."""
        return fingerprint(self.train, _AT_START if isinstance(self.train, StreamedRows) else None)

    def update(self, step: int, rewards: Sequence[Sequence[float]]) -> None:
        """Give the sampler the rewards of a finished step, those of each of its prompts."""
        numbers = self.drawn.pop(step)
        with hang_reported(f"data.sampler, learning from step {step},"):
            self.sampler.update(step, [PromptOutcome(*pair) for pair in zip(numbers, rewards, strict=True)])


class PromptLoader:
    """Loads both splits of a run.

    Args:
        config: resolved.
        renderer: the renderer of the rollout, so that lengths are the same.
        tools: the configured tools, for their schemas; None: they are built here.
    """

    def __init__(self, config: ResolvedConfig, renderer: Renderer, tools: Sequence[HostedTool] | None = None) -> None:
        self._config = config
        self._renderer = renderer
        seed, clients = config.trainer.seed, absent_clients(config.engines)
        if tools is None:
            tools = [HostedTool(slot, seed, clients) for slot in config.tools]
        self._schemas = {tool.name: list(tool.schemas.values()) for tool in tools}
        self._loops = {slot.registered_name: slot.plugin.spec.capabilities for slot in config.rollout.agent.loops}
        self._default_loop = next(iter(self._loops))
        self._used_tools: set[str] = set()
        self._used_interactions: set[str] = set()
        self._longest = 0
        self._all_read = True
        self._images = row_images(config, renderer)
        shows = not self._images.obstacle
        self._environments = [HostedEnvironment(slot, seed, clients, shows) for slot in config.environments]

    def load(self) -> PromptData:
        """Load both splits, filtered or cut to ``data.max_prompt_length``.

        Raises:
            DataError: a file or row that cannot be used.
            ConfigError: a tool or interaction that no row can reach, or an environment that does not fit the run.
            EpisodeError: an environment cannot begin its first task.
        """
        data = self._config.data
        train = self._split("train", data.train_files)
        validation = self._split("validation", data.validation_files)
        self._check_reached()
        first_prompt = self._try_environments(train)
        context = SamplerContext(train, data.batch_size, self._config.trainer.seed, _reward_range(self._config))
        sampler = data.sampler.build(context)
        return PromptData(train, validation, sampler, self._longest, data.batch_size, first_prompt)

    def _split(self, split: Split, files: Sequence[str]) -> Sequence[Row]:
        """The rows of the files, and the tasks of the environments."""
        tasks, without = list[Row](), list[str]()
        for environment in self._environments:
            name = environment.name
            with boundary(DataError, f"{environment.title}: tasks({split!r}) raised"), hang_reported(environment.title):
                own = environment.environment.tasks(split)
                given = [{"data_source": name, **task, "environment": name} for task in own or ()]
            if own is None:
                without.append(name)
            for index, row in enumerate(given):
                row.setdefault("raw_prompt", [])
                self._check_row(row, f"{environment.title}: {split} task {index}", split)
            tasks += given
        return self._file_rows(split, files, without, tasks) if files else tasks

    def _prepared(self, split: Split, without: Sequence[str], index: int, row: Row) -> Row:
        """The checked row, with its environment where it has one; ``without`` are those without tasks of their own."""
        where = f"data: {split} row {index}"
        self._check_row(row, where, split)
        if row["raw_prompt"]:
            row = self._images.named(row, where)
        names = [each.name for each in self._environments]
        if "environment" not in row and len(without) > 1:
            raise DataError(
                f"data: {split} row {index} names no environment, but {', '.join(without)} have no tasks of their own; "
                "add a column `environment`"
            )
        if "environment" not in row and without:
            return {**row, "environment": without[0]}
        if row.get("environment") not in (None, *names):
            raise DataError(
                f"data: {split} row {index}: environment is {row['environment']!r}; configured: "
                f"{', '.join(names) or 'none'}"
            )
        return row

    def _try_environments(self, rows: Sequence[Row]) -> Sequence[Message]:
        """Begin the first task of each environment, check it against the run; return messages of a prompt."""
        first: Sequence[Message] = rows[0]["raw_prompt"] if rows else []

        async def each() -> Sequence[Message]:
            messages = first
            for environment in self._environments:
                try:
                    messages = await self._try(environment, rows) or messages
                finally:
                    await environment.close()
            return messages

        if not self._environments:
            return first
        loop = EventLoop()
        try:
            return loop.run(each())
        finally:
            loop.close()

    async def _try(self, environment: HostedEnvironment, rows: Sequence[Row]) -> Sequence[Message]:
        title, config = environment.title, self._config
        row = next((row for row in rows if row.get("environment") == environment.name), None)
        if row is None:
            raise ConfigError(
                f"{title} has no training task: its tasks('train') gives none, and no row of data.train_files names it"
            )
        if not (environment.environment.scores or config.reward.functions or config.loops_reward):
            raise ConfigError(f"{title} gives no rewards: add a function to reward.functions, or let it score")
        episode = await environment.open(row, 0)
        try:
            loop = row.get("agent_name") or self._default_loop
            used = {"tools": bool(episode.schemas), "interactions": episode.replies}
            for capability in (name for name, needed in used.items() if needed and name not in self._loops[loop]):
                able = ", ".join(installed_with("agent_loop", capability, config.plugins.block))
                raise ConfigError(
                    f"{title} {'offers tools' if capability == 'tools' else 'answers the policy'}, but the agent loop "
                    f"{loop!r} lacks the capability {capability!r}; add one that has it to rollout.agent.loops "
                    f"(installed: {able or 'none'})"
                )
            if episode.schemas:
                require_tool_role(RenderedText(self._renderer))
            schemas = list(episode.schemas.values()) + self._row_schemas(row)
            messages = self._images.of_episode(episode.messages, f"the first messages of {title}")
            prompt = self._renderer.render(messages, schemas, generation_prompt=True)
            self._longest = max(self._longest, len(prompt.ids))
            if self._longest > config.data.max_prompt_length:
                raise ConfigError(
                    f"data.max_prompt_length is {config.data.max_prompt_length}, but the first task of {title} has a "
                    f"prompt of {self._longest} tokens (tool schemas included); raise it"
                )
            return messages
        finally:
            await episode.close()

    def _file_rows(self, split: Split, files: Sequence[str], without: Sequence[str], tasks: list[Row]) -> Sequence[Row]:
        """The rows of the files that fit, then ``tasks``."""
        slot = self._config.data.dataset
        found = [name for file in files for name in _matching(file)]
        chat, longest = self._renderer.chat, self._config.data.max_prompt_length
        context = DatasetContext(found, split, chat, self._row_schemas, longest)
        prepared, overlong = partial(self._prepared, split, without), self._config.data.overlong_prompts
        with hang_reported(f"dataset {slot.name!r}, loading {split} rows,"):
            dataset: PromptDataset = slot.build(context)
            if split == "train" and self._config.data.streaming:
                return self._streamed(dataset, context, prepared, tasks)
            rows = [prepared(index, dataset[index]) for index in range(len(dataset))]

        def kept_lengths(rows: Sequence[Row]) -> list[int]:
            names = ([schema["function"]["name"] for schema in self._row_schemas(row)] for row in rows)
            prompts = ((row["raw_prompt"], tools) for row, tools in zip(rows, names, strict=True))
            folder, model = Path(self._config.trainer.output_dir, ".prompts"), self._config.model
            template = Path(model.chat_template).read_text(encoding="utf-8") if model.chat_template else None
            refs = [astuple(ref) for ref in plugin_refs(self._config)]
            slots = repr((self._config.rollout.renderer, self._config.rollout.tool_parser))
            settings = [refs, template, model.chat_template_kwargs, slots, self._schemas]
            return cached_lengths(folder, Path(model.path), settings, prompts, lambda: self._lengths(split, rows))

        rows, longest = fit_prompts(rows, context, overlong, kept_lengths)
        self._longest = max(self._longest, longest)
        return rows + tasks

    def _lengths(self, split: Split, rows: Sequence[Row], first: int = 0) -> list[int]:
        """Tokens of each row's prompt; ``first`` is the number of the first row."""
        index = first

        def prompts() -> Iterator[tuple[Sequence[Message], list[dict[str, Any]]]]:
            nonlocal index
            for index, row in enumerate(rows, first):  # noqa: B007 - an error names the row
                yield row["raw_prompt"], self._row_schemas(row)

        try:
            with hang_reported(f"the renderer or tool parser, rendering the {split} prompts,"):
                return self._renderer.lengths(prompts())
        except TemplateError as error:
            raise TemplateError(f"data: {split} row {index}: {error}") from error

    def _streamed(
        self, dataset: PromptDataset, context: DatasetContext, prepared: Callable[[int, Row], Row], tasks: list[Row]
    ) -> StreamedRows:
        """The rows one by one; the first ones are tried now."""
        overlong = self._config.data.overlong_prompts

        def prepare(index: int, row: Row) -> Row | None:
            row = prepared(index, row)

            def lengths(rows: Sequence[Row]) -> list[int]:
                return self._lengths(context.split, rows, index)

            [length] = lengths([row])
            fitted = fit_prompt(row, index, length, context, overlong, lengths)
            if fitted is None:
                return None
            self._longest = max(self._longest, fitted[1])
            return fitted[0]

        tried = min(len(dataset), _AT_START)
        for index in range(tried):
            prepare(index, dataset[index])
        self._all_read = tried == len(dataset)
        rows = StreamedRows(dataset, prepare, tasks)
        if not tasks:
            # An error if no row fits.
            rows[0]
        return rows

    def _row_schemas(self, row: Row) -> list[dict[str, Any]]:
        if "tools" not in self._loops[row.get("agent_name") or self._default_loop]:
            return []
        names = select_tools(row.get("extra_info") or {}, list(self._schemas))
        return [schema for name in names for schema in self._schemas[name]]

    def _check_row(self, row: Row, where: str, split: Split) -> None:
        if not isinstance(row.get("raw_prompt"), list):
            raise DataError(f"{where}: the dataset gave no raw_prompt, a list of messages")
        _check_messages(row["raw_prompt"], where)
        if media := _other_media(row):
            raise DataError(
                f"{where}: {media}, but prompts can hold only text and images so far. Remove the row, or describe it "
                "in words"
            )
        if reserved := sorted(_RESERVED & row.keys()):
            raise DataError(f"{where}: the columns {', '.join(reserved)} are reserved; rename them in the data")
        _check_types(row, where)
        name = row.get("agent_name") or self._default_loop
        if name not in self._loops:
            raise DataError(
                f"{where}: agent_name is {name!r}, which rollout.agent.loops does not list; "
                f"listed: {', '.join(self._loops)}"
            )
        extra: Mapping[str, Any] = row.get("extra_info") or {}
        run = self._config.trainer.validation if split == "validation" else self._config.rollout
        check_row_sampling(extra, where, split, run.sampling, self._config.rollout.engine.plugin.spec.capabilities)
        if "tools" in self._loops[name]:
            if unknown := sorted(set(extra.get("tools_kwargs") or {}) - self._schemas.keys()):
                raise DataError(
                    f"{where}: extra_info.tools_kwargs names {', '.join(unknown)}; "
                    f"configured tools: {', '.join(self._schemas) or 'none'}"
                )
            self._used_tools.update(select_tools(extra, list(self._schemas)))
        wanted = (extra.get("interaction_kwargs") or {}).get("name")
        configured = [slot.registered_name for slot in self._config.interactions]
        if wanted is not None and wanted not in configured:
            raise DataError(
                f"{where}: extra_info.interaction_kwargs names {wanted!r}; "
                f"configured interactions: {', '.join(configured) or 'none'}"
            )
        if wanted is not None and "interactions" in self._loops[name]:
            self._used_interactions.add(wanted)

    def _check_reached(self) -> None:
        problems = [
            f"tools: nothing can reach {name!r}: no row of the data runs a loop that uses tools and selects it; "
            "remove it, or check agent_name and extra_info.tools_kwargs of the rows"
            for name in self._schemas
            if name not in self._used_tools
        ]
        problems += [
            f"interactions: nothing can reach {slot.registered_name!r}: no row names it in "
            "extra_info.interaction_kwargs.name; remove it, or name it in the data"
            for slot in self._config.interactions
            if slot.registered_name not in self._used_interactions
        ]
        if problems and self._all_read:
            raise ConfigError(problems)
        for problem in problems:
            logger.warning("in the first %d training rows, %s", _AT_START, problem)


def _matching(file: str) -> list[str]:
    """The local files that a pattern stands for; a file that exists, and an address, as they are."""
    if "://" in file or os.path.isfile(file):
        return [file]
    # One that matches nothing stays, for the dataset's error.
    return sorted(glob(file, recursive=True)) or [file]


def _check_types(row: Row, where: str) -> None:
    """Reject values that would fail during a rollout.

    Raises:
        DataError: names the key, what was found and what is allowed.
    """

    def check(key: str, value: Any, kind: type, allowed: str) -> Any:
        if not isinstance(value, kind):
            raise DataError(f"{where}: {key} is {value!r:.100}; allowed is {allowed}")
        return value

    check("agent_name", row.get("agent_name") or "", str, "a string")
    extra = check("extra_info", row.get("extra_info") or {}, Mapping, "a mapping")
    check("extra_info.interaction_kwargs", extra.get("interaction_kwargs") or {}, Mapping, "a mapping")
    key, allowed = "extra_info.tools_kwargs", f"a mapping with {', '.join(_TOOL_KWARGS)}"
    for name, kwargs in check(key, extra.get("tools_kwargs") or {}, Mapping, "a mapping from tools to kwargs").items():
        for each in check(f"{key}.{name}", kwargs or {}, Mapping, allowed):
            if each not in _TOOL_KWARGS:
                raise DataError(f"{where}: {key}.{name} has the unknown key {each!r}; allowed is {allowed}")


def _check_messages(messages: Sequence[Any], where: str) -> None:
    """Reject messages that no chat template can render.

    Raises:
        DataError: names the message, what was found and what is allowed.
    """
    for number, message in enumerate(messages):
        name = f"{where}: message {number} of the prompt"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{name} is {message!r:.100}; allowed is a mapping with role, a string, and content")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(isinstance(part, Mapping) for part in parts):
            raise DataError(f"{name} has the content {content!r:.100}; allowed is a string or a list of parts")


def row_images(config: ResolvedConfig, renderer: Renderer) -> RowImages:
    """What reads the images of a run's rows."""
    problem = "" if media_of(renderer) is not None else getattr(renderer.chat, "media_problem", "") or NO_PROCESSOR
    engine = config.rollout.engine
    # Not before they are needed: looking for plugins takes a process.
    able = [] if problem or engine.has("images") else installed_with("engine", "images", config.plugins.block)
    reason = obstacle(problem, engine.registered_name, able, engine.has("images"))
    if not reason and not config.trainer.backend.has("images"):
        reason = (
            f"the training backend {config.trainer.backend.registered_name!r} shows none to a model (capability "
            "'images'); choose another trainer.backend, or remove the images"
        )
    files = [*config.data.train_files, *config.data.validation_files]
    folders = dict.fromkeys(Path(file).parent for file in files if "://" not in file)
    return RowImages(config.model.images, reason, [*folders, Path()])


def _other_media(row: Row) -> str:
    """Describe the first part of a row that is neither text nor image; empty if there is none."""
    columns = [f"{name} is not empty" for name in OTHER_MEDIA if row.get(name)]
    contents = [message["content"] for message in row["raw_prompt"] if isinstance(message.get("content"), list)]
    parts = [part for content in contents for part in content]
    kinds = [str(part.get("type")) for part in parts if "text" not in part and shown_by(part) is None]
    return next(iter([*columns, *(f"a message has a part of type {kind}" for kind in kinds)]), "")


def _reward_range(config: ResolvedConfig) -> tuple[float, float] | None:
    """Lowest and highest weighted sum of the reward functions; None if one declares no range."""
    functions = config.reward.functions
    ends = [sorted(function.weight * end for end in function.range) for function in functions if function.range]
    if not ends or len(ends) < len(functions):
        return None
    return sum(low for low, _ in ends), sum(high for _, high in ends)
