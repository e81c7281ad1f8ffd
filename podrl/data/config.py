"""Settings of a job's data: one file or task, or a mixture of sources."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from podrl.config import Count, Positive, Range, Seed, section
from podrl.data import problems, sums
from podrl.data.cache import AUTO
from podrl.data.generated import Generator
from podrl.data.pools import CurriculumConfig
from podrl.data.transforms import Transform

PROBLEMS = "problems"
# The tasks that come with podrl, by the names that data.path has for them.
EMBEDDED: Mapping[str, Generator[Any]] = {PROBLEMS: problems.GENERATOR, "sums": sums.GENERATOR}


@section("data.sources")
@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Settings of one source of a mixture; what is not given is as in the section `data`.

    Attributes:
      path: as data.path.
      name: in tables and, as the field `dataset`, of its records; '' is the path's last part up to a dot.
      weight: share of the prompts that are drawn, relative to the other sources' weights; all sources have one, or
        none, and then every record is drawn as often as any other.
      count: records used, chosen by data.seed.
      fraction: of its records that are used, chosen by data.seed.
      split: where `path` is a directory, the beginning of the names of its files, such as 'train'.
      template: as data.template.
      system_prompt: instructions before the questions of this source; 'auto' takes data.system_prompt, and if that is
        'auto' as well, the functions that score the records of this source decide.
      question_field, answer_field: as in `data`.
      reward: reward functions of its records, instead of reward.fns.
      group: what its records have in the field `group`: rewards and evaluations are also told of the records of each
        group alone.
      hint: as data.hint.
      env: what its records have in the field `env`: an environment of env.others; '' for env.environment.
      grpo: what differs of the section grpo for samples of its records, such as {'teacher_coef': 1.0}: weights of the
        loss's components, the loss and the advantage (docs/algorithms.md).
      transforms: what is done to its records, in this order, before they are used.
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
        if self.path in EMBEDDED and (self.transforms or self.split):
            raise ValueError(f"data.sources: {self.path} is an embedded task, which has no transforms and no split.")

    @property
    def label(self) -> str:
        """The name, or what stands for it."""
        last = self.path.rstrip("/").rsplit("/", 1)[-1].partition(".")[0].removeprefix("hf:").partition(":")[0]
        return self.name or last.strip("*-_") or self.path

    @property
    def fields(self) -> dict[str, Any]:
        """Fields that its records get."""
        given = {"group": self.group, "env": self.env, "reward_fns": list(self.reward)}
        return {name: value for name, value in given.items() if value}


@section("data")
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Settings of the source of prompts: file or generator, template, order.

    Attributes:
      path: an embedded task, 'problems' or 'sums', or a file (see podrl.data.sources.read); '' where there are sources.
      sources: a mixture, instead of `path`.
      eval_path: a file of held-out records; '' holds out a part of `path`.
      eval_fraction: share of the questions of `path` that is held out where `eval_path` is ''. An embedded task
        always holds out its own tenth.
      question_field: the record's field with the question; a record may ask by 'prompt' or 'messages' instead, as
        podrl.data.shape says.
      answer_field: the record's field with the answer, which only some rewards need; of a GSM8K solution, what follows
        '####'.
      system_prompt: instructions before the question; '' for none. 'auto' is none, unless a reward function that
        scores the records of a file reads the reference tags ('answer', 'exact_format', ...): then 'auto' is the text
        that asks for these tags.
      hint: what a teacher alone reads behind the question, with names of the record's fields in braces, as in 'The
        answer is {answer}.'; with {prompt} it stands in place of the question. '' for none.
      template: 'chat' for the model's own turns, 'plain' for a model without a chat template.
      seed: of the shuffling, and of an embedded task's problems.
      shuffle: new order every epoch; False keeps the order of the file.
      long_prompts: what happens to a prompt longer than rollout.max_prompt_length: 'skip' (counted) or 'error'.
      size: problems of an embedded task in an epoch.
      cache: directory, local or gs://, of what reading large files found and of transformed records; 'auto' is one
        under ~/.cache, '' keeps nothing.
      curriculum: the choice of prompts by how often their samples pass.
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
    cache: str = AUTO
    curriculum: CurriculumConfig = CurriculumConfig()

    def __post_init__(self) -> None:
        if self.sources:
            object.__setattr__(self, "path", "")
            _check_mixture(self.sources)
        elif not self.path:
            raise ValueError(f"data.path is '': name a file of records, or an embedded task: {' or '.join(EMBEDDED)}.")

    @property
    def hinted(self) -> bool:
        """True where a teacher reads a hint of some records."""
        return any(single.hint for single in self.singles())

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of the sources, in their order."""
        return tuple(dict.fromkeys(source.group for source in self.sources if source.group))

    def singles(self) -> "Sequence[DataConfig]":
        """The settings of each source alone, or these where there is no mixture."""
        return [self._single(source) for source in self.sources] or [self]

    def _single(self, source: SourceConfig) -> "DataConfig":
        own = {
            "template": source.template or self.template,
            "system_prompt": self.system_prompt if source.system_prompt == AUTO else source.system_prompt,
            "question_field": source.question_field or self.question_field,
            "answer_field": source.answer_field or self.answer_field,
            "hint": source.hint or self.hint,
        }
        return dataclasses.replace(self, path=source.path, sources=(), **own)


def _check_mixture(given: Sequence[SourceConfig]) -> None:
    names = [source.label for source in given]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"data.sources has several sources called {', '.join(twice)}: give each a 'name' of its own.")
    without = [source.label for source in given if source.weight is None]
    if without and len(without) < len(given):
        raise ValueError(f"data.sources: {', '.join(without)} has no weight, and others have: give all one, or none.")


_GROUP = re.compile(r"[A-Za-z0-9_-]+")
