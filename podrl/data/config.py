"""Settings of a job's data: one file or task, or a mixture of sources."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from podrl.config import Count, Positive, Range, Seed, section
from podrl.data import facts, problems, sums
from podrl.data.cache import AUTO
from podrl.data.pools import CurriculumConfig
from podrl.data.problem_generator import ProblemGenerator
from podrl.data.reasoning import PREFIX as REASONING
from podrl.data.transforms import Transform
from podrl.mappings import TaskFields

PROBLEMS = "problems"
# The tasks that come with podrl, by the value of data.path that chooses them.
EMBEDDED: Mapping[str, ProblemGenerator[Any]] = {
    PROBLEMS: problems.GENERATOR,
    "sums": sums.GENERATOR,
    "facts": facts.GENERATOR,
}


def is_generated(path: str) -> bool:
    """Returns True if a value of data.path names a task and no file; a task generates its records, and holds out a
    part of them."""
    return path in EMBEDDED or path.startswith(REASONING)


@section("data.sources")
@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Settings of one source of a mixture; a setting that a source lacks is taken from the section `data`.

    Attributes:
      path: an embedded task, a dataset of reasoning-gym or a file of records, as data.path takes it.
      name: name of the source in tables, and in the field `dataset` of its records. '' takes the last part of the path,
        up to its first dot.
      weight: share of the prompts that are drawn from this source, relative to the other sources' weights. Either all
        sources have a weight, or no source has one; without weights every record of the mixture is drawn equally often.
      count: number of the source's records that are used, chosen by data.seed; None uses all.
      fraction: share of the source's records that are used, chosen by data.seed; None uses all.
      split: beginning of the names of the files to read, such as 'train', where `path` is a directory.
      template: form of this source's prompts, as data.template takes it; '' takes data.template.
      system_prompt: instructions before the questions of this source. 'auto' takes data.system_prompt; if that is
        'auto' as well, the functions that score the records of this source decide.
      question_field, answer_field: names of the fields with the question and the answer in this source's records; ''
        takes the name in `data`.
      reward: reward functions that score the samples of this source, instead of reward.fns.
      group: value of the field `group` in this source's records. Rewards and evaluations are also reported for each
        group alone.
      hint: text that only a teacher reads after the question, as data.hint takes it; '' takes data.hint.
      env: name of the environment that plays the samples of this source, one of env.others; '' takes env.environment.
      grpo: settings of the section grpo that differ for samples of this source, such as {'teacher_coef': 1.0}. They
        may set weights of the loss's components, the loss, and the advantage (docs/algorithms.md).
      transforms: steps that change or drop the source's records before they are used, in this order.
      arguments: settings of this source's dataset of reasoning-gym, instead of data.arguments.
    """

    path: str
    name: str = ""
    weight: Positive | None = None
    count: Count | None = None
    fraction: Annotated[float, Range("(0, 1]")] | None = None
    split: str = ""
    template: Literal["", "chat", "plain"] = ""
    system_prompt: str = AUTO
    question_field: str = ""
    answer_field: str = ""
    reward: tuple[str, ...] = ()
    group: str = ""
    hint: str = ""
    env: str = ""
    grpo: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    transforms: tuple[Transform, ...] = ()
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("data.sources holds a source whose path is '': name a file of records.")
        if self.group and not _GROUP.fullmatch(self.group):
            raise ValueError(
                f"data.sources: {self.path} has group={self.group!r}, which is part of names of metrics: give letters, "
                "digits, '_' and '-'."
            )
        if self.count is not None and self.fraction is not None:
            raise ValueError(
                f"data.sources: {self.path} has count={self.count} and fraction={self.fraction:g}: give one of them."
            )
        if is_generated(self.path) and (self.transforms or self.split):
            kind = "a dataset of reasoning-gym" if self.path.startswith(REASONING) else "an embedded task"
            raise ValueError(f"data.sources: {self.path} is {kind}, which has no transforms and no split.")
        _check_arguments("data.sources", self.path, self.arguments)

    @property
    def label(self) -> str:
        """The source's name: `name`, or the name that its path gives."""
        last = (
            self.path.removeprefix(REASONING)
            .rstrip("/")
            .rsplit("/", 1)[-1]
            .partition(".")[0]
            .removeprefix("hf:")
            .partition(":")[0]
        )
        return self.name or last.strip("*-_") or self.path

    @property
    def fields(self) -> TaskFields:
        """The fields that these settings add to the source's records."""
        settings = {"group": self.group, "env": self.env, "reward_fns": list(self.reward)}
        return {name: value for name, value in settings.items() if value}


@section("data")
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Settings of a job's records: where they come from, how they become prompts, and in which order.

    Attributes:
      path: an embedded task, 'problems', 'sums' or 'facts'; a dataset of reasoning-gym, such as
        'reasoning_gym:chain_sum'; or a file of records (see podrl.data.sources.read). '' if `sources` is set.
      sources: sources of a mixture, used instead of `path`.
      eval_path: file of held-out records; '' holds out a part of `path`, or of each source.
      eval_fraction: share of the questions of a file that is held out if `eval_path` is ''. An embedded task and a
        dataset of reasoning-gym always hold out a tenth of their questions.
      question_field: name of the record's field with the question. A record may have its question in the field 'prompt'
        or 'messages' instead (docs/data.md).
      answer_field: name of the record's field with the answer, which only some rewards need. The answer of a GSM8K
        solution is the text after '####'.
      system_prompt: instructions before the question; '' for none. 'auto' depends on the reward functions that score
        the records of a file: if one of them ('answer', 'exact_format', ...) reads the tags of podrl.data.template,
        'auto' means the text that asks for these tags; otherwise it means no instructions.
      hint: text after the question that only a teacher reads, with names of the record's fields in braces, such as 'The
        answer is {answer}.'. A hint with {prompt} replaces the question. '' for none.
      template: form of a prompt: 'chat' writes turns by the model's chat template, 'plain' is for a model without a
        chat template.
      seed: seed of the shuffling, of generated problems, and of the choice by a source's `count` or `fraction`.
      shuffle: True if every epoch has a new order; False keeps the order of the file.
      long_prompts: treatment of a prompt longer than rollout.max_prompt_length: 'skip' leaves it out and counts it,
        'error' ends the run with an error.
      size: number of generated problems in an epoch.
      arguments: settings of a dataset of reasoning-gym by name, such as {'max_terms': 3}; its seed and size come from
        this section.
      cache: directory, local or gs://, that keeps transformed records and the results of reading large files. 'auto'
        is a directory under $XDG_CACHE_HOME or ~/.cache; '' keeps nothing after the run.
      curriculum: choice of prompts by how often their samples pass.
    """

    path: str = PROBLEMS
    sources: tuple[SourceConfig, ...] = ()
    eval_path: str = ""
    eval_fraction: Annotated[float, Range("[0, 1)")] = 0.05
    question_field: str = "question"
    answer_field: str = "answer"
    system_prompt: str = AUTO
    hint: str = ""
    template: Literal["chat", "plain"] = "chat"
    seed: Seed = 42
    shuffle: bool = True
    long_prompts: Literal["skip", "error"] = "skip"
    size: Count = 1_000_000
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    cache: str = AUTO
    curriculum: CurriculumConfig = CurriculumConfig()

    def __post_init__(self) -> None:
        if self.sources:
            if self.path not in ("", *EMBEDDED, *(source.path for source in self.sources)):
                raise ValueError(
                    f"data.path={self.path!r} is not read, because data.sources names the data: add it there as a "
                    "source, or set data.path=''."
                )
            object.__setattr__(self, "path", "")
            _check_mixture(self.sources)
        elif not self.path:
            raise ValueError(f"data.path is '': name a file of records, or an embedded task: {' or '.join(EMBEDDED)}.")
        if not self.sources:
            _check_arguments("data", self.path, self.arguments)

    @property
    def hinted(self) -> bool:
        """True if any source has a hint for a teacher."""
        return any(single.hint for single in self.singles())

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the sources' groups, each once, in the order of the sources."""
        return tuple(dict.fromkeys(source.group for source in self.sources if source.group))

    def singles(self) -> "Sequence[DataConfig]":
        """Returns a job's settings for each source alone; without a mixture, a list with these settings themselves."""
        return [self._single(source) for source in self.sources] or [self]

    def _single(self, source: SourceConfig) -> "DataConfig":
        own = {
            "template": source.template or self.template,
            "system_prompt": self.system_prompt if source.system_prompt == AUTO else source.system_prompt,
            "question_field": source.question_field or self.question_field,
            "answer_field": source.answer_field or self.answer_field,
            "hint": source.hint or self.hint,
            "arguments": source.arguments or (self.arguments if source.path.startswith(REASONING) else {}),
        }
        return dataclasses.replace(self, path=source.path, sources=(), **own)


def _check_arguments(section: str, path: str, arguments: Mapping[str, object]) -> None:
    if arguments and not path.startswith(REASONING):
        raise ValueError(f"{section}: {path!r} takes no arguments={dict(arguments)}: only {REASONING}NAME does.")
    if own := sorted({"seed", "size"} & set(arguments)):
        raise ValueError(f"{section}: arguments of {path} set {', '.join(own)}: set data.seed and data.size instead.")


def _check_mixture(sources: Sequence[SourceConfig]) -> None:
    names = [source.label for source in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"data.sources has several sources called {', '.join(twice)}: give each a 'name' of its own.")
    without = [source.label for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise ValueError(
            f"data.sources: no weight is set for {', '.join(without)}, but other sources have one: give every source a "
            "weight, or none."
        )


_GROUP = re.compile(r"[A-Za-z0-9_-]+")
