"""A job as `--config` describes it: one dataclass for every algorithm, and the registry of algorithms.

A configuration has one section under the name of the algorithm or its family (`grpo`, `ppo`, `sft`, `dpo`). The
registry says how to read that section; all other sections are the same for all algorithms.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from jax.sharding import Mesh
from ml_collections import ConfigDict

from podrl import config
from podrl.algorithms.presets import PRESETS, preset
from podrl.cluster.engines import check_engine
from podrl.cluster.teacher import tokenizer_of
from podrl.config import Count, Devices, Natural, Seed, build, check, defaults, hint_at, merge, section
from podrl.data import labels, pairs, sft, template
from podrl.data.labels import LabelStream
from podrl.data.mixture import Form
from podrl.data.pairs import PairStream
from podrl.data.pipeline import AUTO, REASONING, DataConfig, PromptStream, longest_prompt
from podrl.data.pipeline import EMBEDDED as EMBEDDED_TASKS
from podrl.data.sft import SFTConfig, SFTStream
from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import RolloutConfig
from podrl.environments.config import EnvironmentConfig
from podrl.job.eval_checks import check_evaluation
from podrl.job.placement import RolesConfig
from podrl.learner.answers.preferences import DPO, KTO, ORPO, DPOConfig, KTOConfig, ORPOConfig
from podrl.learner.answers.reward_modelling import RewardModelConfig, RewardModelling
from podrl.learner.answers.supervised import SFT
from podrl.learner.distillation import make_grpo
from podrl.learner.evaluate import EvalConfig
from podrl.learner.instructions import instructions_for
from podrl.learner.ppo import PPO
from podrl.learner.settings import AlgorithmConfig, GRPOConfig, PPOConfig
from podrl.mappings import ConfigValues, ToolSchema
from podrl.models.config import LoraConfig, ModelConfig, gemma2_config
from podrl.models.hf_config import config_from_hf, read_config
from podrl.models.pretrained import check_positions
from podrl.rewards import reasoning
from podrl.rewards.compose import RewardConfig
from podrl.rewards.reference import DEFAULT
from podrl.rundir.metrics import LogConfig
from podrl.runtime.roles import ROLLOUT, TRAINER
from podrl.storage import hub
from podrl.storage.checkpoint import CheckpointConfig
from podrl.storage.storage import Place, locate
from podrl.trainer import custom
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.pack_shape import PackShape, pack_shape

TINY = hub.EMBEDDED["tiny"]
SCRATCH = "scratch"


@section("model.teachers")
@dataclasses.dataclass(frozen=True)
class TeacherSource:
    """Settings of one teacher of distillation.

    Attributes:
      path: a Hugging Face directory, local or gs://, or ORG/NAME of the hub. If its tokenizer is not the policy's,
        tokens are compared by the text that they stand for.
      sources: names of the sources in data.sources whose samples the teacher scores; empty for all sources that no
        other teacher scores.
    """

    path: str
    sources: tuple[str, ...] = ()


@section("model")
@dataclasses.dataclass(frozen=True)
class ModelSource:
    """The starting weights of a job.

    Attributes:
      path: a Hugging Face directory, local or gs://, or ORG/NAME of the hub; 'tiny', 'tiny_moe', 'tiny_hybrid',
        'tiny_tools' and 'tiny_search' are the checkpoints shipped with podrl, 'scratch' is a small model with random
        weights (the section `scratch`).
      size: name of a published model size (podrl/models/sizes.py), which podrl.plan uses if `path` is empty.
      reference: directory of the reference policy or of a teacher, or a name as for `path`; '' for the starting
        weights.
      teachers: teachers of distillation, instead of `reference`; `grpo.teacher_coef` is the weight of distillation.
      critic: directory of the critic's starting weights, or a name as for `path`; '' for a copy of the policy with a
        value head.
      lora: adapters; rank 0 trains all parameters.
    """

    path: str = "tiny"
    size: str = ""
    reference: str = ""
    teachers: tuple[TeacherSource, ...] = ()
    critic: str = ""
    lora: LoraConfig = LoraConfig()

    @property
    def directory(self) -> Place:
        """Returns the checkpoint's directory, after fetching it from the hub if `path` names a repository.

        Raises:
          ValueError: `path` is not a directory.
        """
        path = locate(hub.local(self.path))
        if not path.is_dir():
            raise ValueError(
                f"model.path={self.path!r} is not a directory: give a Hugging Face directory (config.json, "
                "safetensors, tokenizer files), ORG/NAME of the hub, or the name of a checkpoint that comes with "
                f"podrl: {' or '.join(hub.EMBEDDED)}."
            )
        return path

    def tokenizer(self, directory: str) -> Place:
        """Returns the tokenizer's directory: `directory` (the key tokenizer), or the model's directory if it is ''."""
        if directory:
            return locate(hub.local(directory))
        return TINY if self.path == SCRATCH else self.directory

    def open_tokenizer(self, directory: str, tools: Sequence[ToolSchema] = ()) -> Tokenizer:
        """Opens the tokenizer of a job, whose key tokenizer is `directory`.

        Args:
          directory: the key tokenizer; '' for the tokenizer of the model.
          tools: tools that the chat template writes into prompts.

        Raises:
          ValueError: the files cannot be used; the message names the key, tokenizer or model.path.
        """
        key, value = ("tokenizer", directory) if directory else ("model.path", self.path)
        with config.named(key, value):
            return Tokenizer(self.tokenizer(directory), tools=tools)


@section("scratch")
@dataclasses.dataclass(frozen=True)
class ScratchModel:
    """A decoder with random weights, of one of three families.

    The model is a Gemma 2 (podrl.models.config.gemma2_config); with `experts` a Qwen3-MoE; with `linear` a Qwen 3.5.

    Attributes:
      num_layers: number of layers.
      model_dim: width of the residual stream.
      ffn_dim: width of the feed-forward layers; with experts, the width of each expert.
      num_heads: number of query heads in a layer; a multiple of `num_kv_heads`.
      num_kv_heads: number of key/value heads in a layer.
      head_dim: width of a head.
      window: number of tokens that a layer attends to. It applies to every second layer, and in a model with experts to
        every layer. The other layers attend to all tokens; a model with linear attention has no such window.
      max_length: length of the longest sequence, in tokens.
      experts: number of feed-forward experts of a layer; `chosen` of them compute each token. 0 makes a dense model.
      chosen: number of experts that compute a token.
      linear: number of layers of linear attention before each layer of full attention; 0 for no linear attention.
    """

    num_layers: Count = 3
    model_dim: Count = 128
    ffn_dim: Count = 256
    num_heads: Count = 4
    num_kv_heads: Count = 2
    head_dim: Count = 32
    window: Count = 64
    max_length: Count = 1024
    experts: Natural = 0
    chosen: Count = 2
    linear: Natural = 0

    def model(self, vocab_size: int) -> ModelConfig:
        """Returns the configuration of the model.

        Raises:
          ValueError: `chosen` is larger than `experts`, or no layer has full attention.
        """
        if not self.experts and not self.linear:
            others = ("experts", "chosen", "linear")
            fields = {name: value for name, value in dataclasses.asdict(self).items() if name not in others}
            return gemma2_config(vocab_size=vocab_size, **fields)
        if self.experts and self.chosen > self.experts:
            raise ValueError(
                f"scratch.chosen={self.chosen} with scratch.experts={self.experts}: a token cannot have more experts "
                "than there are. Set scratch.chosen to a smaller number."
            )
        if self.linear >= self.num_layers:
            raise ValueError(
                f"scratch.linear={self.linear} with scratch.num_layers={self.num_layers}: at least one layer must have "
                f"full attention. Set scratch.num_layers to a multiple of {self.linear + 1}, or scratch.linear to a "
                "smaller number."
            )
        raw = {
            "vocab_size": vocab_size,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.model_dim,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_length,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
        }
        return config_from_hf(raw | self._feed_forward() | self._attention())

    def _feed_forward(self) -> dict[str, Any]:
        """Returns the fields of config.json that describe the feed-forward part of a layer."""
        if not self.experts:
            return {"intermediate_size": self.ffn_dim}
        fields = {
            "moe_intermediate_size": self.ffn_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
        }
        if self.linear:
            return fields | {"shared_expert_intermediate_size": self.ffn_dim}
        return fields | {"norm_topk_prob": True, "intermediate_size": self.chosen * self.ffn_dim}

    def _attention(self) -> dict[str, Any]:
        """Returns the fields of config.json that describe the attention of layers, and the model's type."""
        if not self.linear:
            return {
                "model_type": "qwen3_moe",
                "use_sliding_window": True,
                "sliding_window": self.window,
                "max_window_layers": 0,
            }
        return {
            "model_type": "qwen3_5_moe_text" if self.experts else "qwen3_5_text",
            "full_attention_interval": self.linear + 1,
            "linear_num_key_heads": self.num_kv_heads,
            "linear_num_value_heads": self.num_heads,
            "linear_key_head_dim": self.head_dim,
            "linear_value_head_dim": self.head_dim,
        }


@dataclasses.dataclass(frozen=True)
class JobKind:
    """A registry entry: the settings, algorithm and data stream of a kind of job.

    Attributes:
      settings: dataclass of the algorithm's section of the configuration.
      algorithm: class or function that makes the algorithm of the loop (podrl.learner.loop.Algorithm).
      stream: function (job, tokenizer) -> stream of batches of data.
      form: function that refuses records whose form the algorithm cannot learn from; None for prompts.
      answers: number of sequences from data in each item of a batch; 0 if sequences are generated.
      base: values of keys, in nested mappings, that a configuration of this kind starts from instead of the defaults.
    """

    settings: type
    algorithm: Any
    stream: Callable[["Job", Tokenizer], Any]
    form: Form | None = None
    answers: int = 0
    base: ConfigValues = dataclasses.field(default_factory=dict)

    @property
    def offline(self) -> bool:
        """True if the job trains on answers from data, as SFT does; it then samples only for evaluations, if at all."""
        return self.answers > 0

    @property
    def scores(self) -> bool:
        """True if the job trains a reward model, which generates nothing."""
        return self.algorithm is RewardModelling


def _prompts(job: "Job", tokenizer: Tokenizer) -> PromptStream:
    return PromptStream.from_config(
        job.data,
        tokenizer,
        prompts_per_step=job.rollout.prompts_per_step * job.algo.prompt_batches,
        max_prompt_length=job.rollout.max_prompt_length,
        hint_tokens=getattr(job.algo, "teacher_hint_tokens", 0),
        teachers=_other_tokenizers(job, tokenizer),
    )


def _other_tokenizers(job: "Job", tokenizer: Tokenizer) -> dict[str, Tokenizer]:
    """Returns the tokenizer of each source's teacher, by the source's name; '' stands for all sources not named here.

    The result is empty if all teachers have the policy's tokenizer.
    """
    own = {teacher: tokenizer_of(hub.local(teacher.path), tokenizer) for teacher in job.model.teachers}
    if not any(own.values()):
        return {}
    return {name: other or tokenizer for teacher, other in own.items() for name in teacher.sources or ("",)}


def _examples(job: "Job", tokenizer: Tokenizer) -> SFTStream:
    return SFTStream(job.data, job.algo, tokenizer)


def _pairs(job: "Job", tokenizer: Tokenizer) -> PairStream:
    return PairStream(job.data, tokenizer, **pair_settings(job))


def pair_settings(job: "Job") -> dict[str, Any]:
    """Returns a pair stream's arguments: pairs of a batch, longest sequence in tokens, and the key of that length."""
    return {"pairs": job.algo.batch_size, "max_length": job.algo.max_length, "key": f"{job.section}.max_length"}


def _labels(job: "Job", tokenizer: Tokenizer) -> LabelStream:
    return LabelStream(job.data, tokenizer, answers=job.algo.batch_size, max_length=job.algo.max_length)


# Training computes log-probabilities at the rollout temperature. Answers from data must train the model's own
# distribution, so the temperature is 1.
_PLAIN = {"rollout": {"temperature": 1.0}}
KINDS: Mapping[str, JobKind] = {
    "grpo": JobKind(GRPOConfig, make_grpo, _prompts),
    "ppo": JobKind(PPOConfig, PPO, _prompts),
    "sft": JobKind(SFTConfig, SFT, _examples, form=sft.check_form, answers=1, base=_PLAIN),
    "dpo": JobKind(DPOConfig, DPO, _pairs, form=pairs.check_form, answers=2, base=_PLAIN),
    "orpo": JobKind(ORPOConfig, ORPO, _pairs, form=pairs.check_form, answers=2, base=_PLAIN),
    "kto": JobKind(KTOConfig, KTO, _labels, form=labels.check_form, answers=1, base=_PLAIN),
    "reward_model": JobKind(RewardModelConfig, RewardModelling, _pairs, form=pairs.check_form, answers=2, base=_PLAIN),
}


def section_of(algorithm: str) -> str:
    """Returns the key of KINDS for an algorithm, which is also its section of the configuration.

    Raises:
      ValueError: the algorithm is unknown; the message lists the known ones.
    """
    config.check(algorithm, str, "algorithm")
    if algorithm in KINDS and algorithm not in PRESETS:
        return algorithm
    return "ppo" if preset(algorithm).advantage_estimator().needs_critic else "grpo"


@section("", {"resume": "the same command with the same --workdir resumes."})
@dataclasses.dataclass(frozen=True)
class Job:
    """The whole configuration of a job, one section per field.

    Attributes:
      algo: settings of the algorithm, which are the section under its name.
      algorithm: 'sft', 'dpo', 'orpo', 'kto', 'reward_model', or a preset of podrl.algorithms.presets.
      seed: seed of random weights, adapters and sampling; the order of the data follows data.seed.
      fake_devices: number of CPU devices to fake; 0 uses the machine's own devices.
      compile_cache: directory that keeps compiled programs, or 'auto', or '' to keep none.
      tokenizer: directory of the tokenizer, ORG/NAME of the hub, or the name of a checkpoint that comes with podrl; ''
        for the tokenizer of the model ('tiny' with model.path='scratch').
      scratch: sizes of the model that is trained if model.path is 'scratch'.
      reward: rewards of generated samples; jobs on answers from data have none.
      env: environment of generated samples, including samples of evaluations.
    """

    trainer: RLTrainingConfig
    algo: Any
    algorithm: str = "grpo"
    seed: Seed = 0
    fake_devices: Devices = 0
    compile_cache: str = "auto"
    tokenizer: str = ""
    model: ModelSource = ModelSource()
    scratch: ScratchModel = ScratchModel()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    env: EnvironmentConfig = EnvironmentConfig()
    roles: RolesConfig = RolesConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def section(self) -> str:
        return section_of(self.algorithm)

    @property
    def kind(self) -> JobKind:
        return KINDS[self.section]

    @property
    def max_steps(self) -> int:
        """The number of the last step. trainer.max_steps counts updates, and a step may make several updates."""
        steps = self.trainer.steps(self.updates_per_step)
        assert steps is not None, "parse() refuses a job without a number of steps"
        return steps

    @property
    def max_staleness(self) -> int:
        return 0 if self.kind.offline else self.algo.max_staleness

    @property
    def kept_versions(self) -> int:
        """Number of weight versions that a trainer keeps under `topology=split`, because rollout hosts may need them.

        Samples in flight are drawn by the newest `max_staleness` + 1 versions. One more version is kept for a host that
        has just joined: the trainers may go on to the next version while the host still pulls its first one.
        """
        return 2 + self.max_staleness

    @property
    def group_size(self) -> int:
        """Number of samples of a prompt, which may share the tokens of the prompt; 1 for answers from data."""
        return 1 if self.kind.offline else self.algo.num_generations

    @property
    def samples_per_step(self) -> int:
        """Number of samples, or of answers from data, in a step."""
        if self.kind.offline:
            return self.algo.batch_size * self.kind.answers
        return self.rollout.prompts_per_step * self.algo.num_generations

    @property
    def mini_batch_size(self) -> int:
        """Number of sequences of one optimizer update."""
        prompts = 0 if self.kind.offline else self.trainer.mini_batch_size or 0
        return prompts * self.group_size or self.samples_per_step

    @property
    def updates_per_step(self) -> int:
        passes = 1 if self.kind.offline else self.algo.num_iterations
        return passes * (self.samples_per_step // self.mini_batch_size)

    @property
    def compares(self) -> bool:
        """True if the policy is compared with a reference or with one teacher; `model.teachers` do not count."""
        if self.kind.offline:
            return getattr(self.kind.algorithm, "compared", False)
        loss = self.algo.policy_loss(self.rollout.max_tokens_to_generate)
        taught = self.algo.distillation is not None and not self.model.teachers
        return bool(taught or loss.needs_reference() or self.algo.reward_kl.coef)

    @property
    def has_accuracies(self) -> bool:
        """True if answers can be expected between the reference tags, where accuracies look for them."""
        needed = any(
            template.ANSWER_START in one.system_prompt
            or (one.system_prompt in ("", AUTO) and one.path in EMBEDDED_TASKS)
            for one in self.data.singles()
        )
        named = {fn.partition("@")[0] for fn in self.reward.fns if isinstance(fn, str)}
        return self.kind.offline or needed or bool(named & {"answer", "number", "recipe_number"})

    @property
    def longest(self) -> int:
        """Length of the longest training sequence, in tokens."""
        if self.kind.offline:
            return self.algo.max_length
        return self.rollout.longest

    def pack_shape(self, mesh: Mesh, more: int = 0) -> PackShape:
        """Computes the shape of one update's packed batch on a mesh; `more` tokens are added to every sequence."""
        samples = not self.kind.offline
        return pack_shape(
            self.trainer,
            mesh,
            sequences=self.mini_batch_size,
            max_length=self.longest + more,
            group_size=self.group_size,
            max_prompt_length=self.rollout.max_prompt_length + more if samples else 0,
            pieces=samples and self.env.branches,
            by_sample=samples and self.algo.policy_loss(self.rollout.max_tokens_to_generate).by_sample,
        )

    def as_mapping(self) -> ConfigValues:
        """Returns the full configuration as nested mappings."""
        values = dataclasses.asdict(self)
        values[self.section] = values.pop("algo")
        return {key: value for key, value in values.items() if key not in _unread(self.kind)}


def _unread(kind: JobKind) -> tuple[str, ...]:
    """Lists the sections of the configuration that jobs of a kind do not have."""
    return ("reward",) if kind.offline else ()


def complete(values: ConfigValues) -> ConfigValues:
    """Fills a configuration: defaults, then the algorithm's preset, then `values`."""
    name = values.get("algorithm", "grpo")
    section = section_of(name)
    kind, values_of_section = KINDS[section], dict(values)
    base = merge({key: value for key, value in defaults(Job).items() if key not in _unread(kind)}, kind.base)
    for key, value in values_of_section.items():
        if isinstance(base.get(key), Mapping) and not isinstance(value, Mapping):
            raise ValueError(f"config.{key}={value!r} must be a group of keys, which are {', '.join(base[key])}.")
    fields: ConfigValues = {}
    if not kind.offline:
        other = "grpo" if section == "ppo" else "ppo"
        # If a configuration for GRPO is run with PPO, or the reverse, the keys that both have keep their values, except
        # keys that the preset sets.
        common = {f.name for f in dataclasses.fields(AlgorithmConfig)}
        carried = {key: value for key, value in values_of_section.pop(other, {}).items() if key in common}
        fields = merge(carried, preset(name).settings)
    whole = merge(merge(base, {section: merge(defaults(kind.settings), fields)}), values_of_section)
    return merge(whole, {section: custom.completed(whole[section], section)})


def lacking(values: Mapping[str, Any]) -> dict[str, type]:
    """Returns the keys that have no default and that a configuration lacks, each with the type of its values.

    Args:
      values: the configuration with all defaults, see `complete`.
    """
    groups: dict[str, Any] = {**config.types_of(Job), **{section: kind.settings for section, kind in KINDS.items()}}
    found = {name: cls for name, cls in groups.items() if name in values and hasattr(cls, "__section__")}
    return {
        f"{group}.{key}": next(iter(get_args(config.types_of(cls)[key])), str)
        for group, cls in found.items()
        for key in config.required(cls)
        if key not in values[group]
    }


def other_section(name: str, algorithm: str) -> str:
    """Makes a sentence for the error about a section that an algorithm does not read: where its own settings are.

    Args:
      name: name of the section that was given.
      algorithm: algorithm of the job, which does not read the section.

    Returns:
      The sentence, with a space before it; '' if no algorithm has such a section.
    """
    if name in KINDS:
        return f" The settings of algorithm={algorithm!r} are in config.{section_of(algorithm)}."
    return f" algorithm={algorithm!r} reads no such settings." if name in defaults(Job) else ""


def unset(algorithm: str) -> ConfigValues:
    """Returns the default configuration of an algorithm; keys without a default are missing."""
    return ConfigDict(_in_own_names(complete({"algorithm": algorithm}))).to_dict()


def check_text(key: str, text: str, algorithm: str) -> bool:
    """Refuses a command-line override that its key cannot hold, such as 2.5 for a whole number.

    Returns:
      True if the text is 'none' and stands for None, in a key whose other values are numbers.

    Raises:
      ValueError: the key cannot hold the text; the message names the key, the text and the allowed values.
    """
    hint = _hint(key, algorithm)
    return hint is not None and config.check_text(text, hint, key)


# Lists that need neither quotes nor brackets: names and paths, or one text without a comma, such as a command.
_ITEMS = re.compile(r"[\w./@:~-]+(,\s*[\w./@:~-]+)*|[^,]+")


def quoted(key: str, text: str, algorithm: str) -> str:
    """Returns the text of a command-line override, as a tuple if the key holds a list of texts: 'a,b' is ('a', 'b').

    Raises:
      ValueError: the key holds a list of texts, and it is unclear whether the text is one entry or several.
    """
    listed = config.takes_texts(_hint(key, algorithm)) and text not in ("", "None") and text[0] not in "([{'\""
    if listed and not _ITEMS.fullmatch(text):
        raise ValueError(f"{key}={text} must be a list: write ({text!r},) with the quotes, if it is one text.")
    return repr(tuple(item.strip() for item in text.split(","))) if listed else text


def _hint(key: str, algorithm: str) -> object:
    """Returns the type of a key of the configuration; None for a key that does not exist."""
    path, section = key.split("."), section_of(algorithm)
    root, below = (KINDS[section].settings, path[1:]) if path[0] == section else (Job, path)
    return hint_at(root, below) if below else None


def parse(values: ConfigValues) -> Job:
    """Builds the job of a configuration and checks its batch arithmetic.

    Raises:
      ValueError: keys are unknown or missing, sizes do not divide, or models and devices do not go together.
    """
    values = _in_own_names(values)
    section = section_of(values.get("algorithm", "grpo"))
    kind = KINDS[section]
    common = {key: value for key, value in values.items() if key != section}
    for key in _unread(kind):
        if key in common:
            raise ValueError(
                f"config.{key} means nothing with algorithm={section}, whose answers are given: take it out of your "
                f"configuration file, or start from --config={section}_tiny.py, whose settings flags change, too."
            )
    algo = build(kind.settings, _with_sources(values, section), f"config.{section}")
    job = build(Job, common | {"algo": algo})
    if kind.offline and job.trainer.mini_batch_size is not None:
        raise ValueError(
            f"trainer.mini_batch_size={job.trainer.mini_batch_size} means nothing with algorithm={section}, where "
            f"every batch makes one update: set {section}.batch_size={job.algo.batch_size} instead."
        )
    if job.samples_per_step % job.mini_batch_size:
        raise ValueError(
            f"{job.rollout.prompts_per_step} prompts do not split into mini-batches of {job.trainer.mini_batch_size}: "
            "rollout.prompts_per_step must be a multiple of trainer.mini_batch_size, which counts prompts."
        )
    if job.trainer.max_steps is None:
        raise ValueError("config.trainer lacks max_steps: set --config.trainer.max_steps=...")
    _check_models(job)
    check_evaluation(job)
    if own := tuple(dict.fromkeys(fn for source in (*job.data.sources, *job.eval.sets) for fn in source.reward)):
        named = tuple(dict.fromkeys((*own, *job.reward.named)))
        job = dataclasses.replace(job, reward=dataclasses.replace(job.reward, named=named))
    job.rollout.require(environment=job.env.used)
    check_engine(job.rollout.engine, job.rollout, job.env.calls_per_window)
    _check_environments(job)
    if job.data.curriculum.used:
        if job.kind.offline:
            raise ValueError(
                f"data.curriculum chooses prompts by how their samples pass, and algorithm={section} learns from given "
                "answers: leave it out."
            )
        job.algo.check_curriculum(job.rollout)
    if not job.kind.offline:
        job.reward.require(environment=job.env.used)
        job.algo.check_clock(job.rollout, job.env.calls_per_window)
    return job


def _with_sources(values: ConfigValues, section: str) -> ConfigValues:
    """Returns the algorithm's section, with the entry `sources`: settings of single data sources, by their names."""
    sources = build(DataConfig, values.get("data", {}), "config.data").sources
    own = {source.label: dict(source.grpo) for source in sources if source.grpo}
    settings = values.get(section, {})
    if own and section != "grpo":
        raise ValueError(
            f"data.sources: {', '.join(own)} has settings 'grpo', and algorithm={section!r} does not read them: "
            "leave them out, or choose algorithm=grpo."
        )
    if settings.get("sources"):
        raise ValueError(
            f"{section}.sources={dict(settings['sources'])!r}: a job takes the settings of sources from its "
            "data, so set 'grpo' in the entries of data.sources."
        )
    return {**settings, "sources": own} if own else settings


def _check_environments(job: Job) -> None:
    named = [(source.label, source.env) for source in job.data.sources] + [(one.name, one.env) for one in job.eval.sets]
    for name, env in named:
        if env not in ("", *job.env.choices):
            raise ValueError(
                f"{name} has env={env!r}, and the job's environments are {', '.join(job.env.choices) or '(nothing)'}: "
                "name it in env.others, too."
            )


def _in_own_names(values: ConfigValues) -> ConfigValues:
    """Translates the aggregation mode from its name in the preset's framework to its name in podrl."""
    algorithm = values.get("algorithm", "grpo")
    section = section_of(algorithm)
    name = values.get(section, {}).get("loss_agg_mode")
    if not isinstance(name, str):
        return dict(values)
    mode = preset(algorithm).mode(name, key=f"{section}.loss_agg_mode")
    return merge(values, {section: {"loss_agg_mode": mode}})


def _check_models(job: Job) -> None:
    """Refuses adapters on random weights, and settings of models or devices that the job would not use."""
    if job.model.path == SCRATCH and job.model.lora.rank:
        raise ValueError(
            f"model.lora.rank={job.model.lora.rank} with model.path={SCRATCH!r} would train adapters alone, and the "
            "model's random weights would never change. Set model.lora.rank=0, or give a trained model by model.path."
        )
    if job.model.reference and job.kind.offline and not job.compares:
        raise ValueError(
            f"model.reference={job.model.reference!r} is not read, because algorithm={job.algorithm} compares the "
            "policy with no other model: leave it out."
        )
    if job.model.critic and job.section != "ppo":
        raise ValueError(
            f"model.critic={job.model.critic!r} is not read, because algorithm={job.algorithm} has no critic: leave it "
            "out, or choose algorithm=ppo."
        )
    _check_teacher(job)
    adapted = job.model.lora.rank > 0
    if job.trainer.offload == "base" and not adapted:
        raise ValueError(
            "trainer.offload='base' keeps the frozen weights under adapters in the host's memory, and "
            "model.lora.rank=0 trains all weights: set trainer.offload='optimizer', or a rank above 0."
        )
    if job.trainer.hosts_reference and not (job.trainer.hosts_base and adapted) and (reason := _no_reference(job)):
        raise ValueError(
            f"trainer.offload={job.trainer.offload!r} keeps the weights of a reference in the host's memory, but "
            f"{reason}: set trainer.offload={'optimizer' if job.trainer.hosts_optimizer else 'none'!r}."
        )
    if job.section == "grpo" and job.algo.observed_weight and not job.env.used:
        raise ValueError(
            f"grpo.observation_coef={job.algo.observed_weight:g} learns what an environment answers, and there is "
            "none: set env.environment (and env.tools), or grpo.observation_coef=0."
        )
    critic, reward = job.roles.critic.mesh, job.roles.reward.mesh
    if job.kind.offline and (critic, reward) != (TRAINER, ROLLOUT):
        raise ValueError(
            f"roles.critic.mesh={critic!r}, roles.reward.mesh={reward!r}: supervised training has neither model, so "
            f"leave them at {TRAINER!r} and {ROLLOUT!r}."
        )
    if critic != TRAINER and job.section != "ppo":
        raise ValueError(
            f"roles.critic.mesh={critic!r} sets devices aside for a critic, and algorithm={job.algorithm} has none: "
            f"set it to {TRAINER!r}, or choose algorithm=ppo."
        )
    if reward != ROLLOUT and not job.reward.model:
        raise ValueError(
            f"roles.reward.mesh={reward!r} sets devices aside for a reward model, and there is none: set it to "
            f"{ROLLOUT!r}, or give reward.model=DIR."
        )


def _no_reference(job: Job) -> str:
    """Returns the reason why the reference has no weights of its own, which could be offloaded; '' if it has them."""
    taught = job.algo.distillation if job.section == "grpo" else None
    if job.model.teachers or (taught and taught.teacher in ("current", "ema")):
        return "the job's teachers are not model.reference"
    if not job.compares:
        return f"algorithm={job.algorithm} with these settings compares the policy with no reference"
    if job.model.lora.rank and not job.model.reference:
        return "under adapters the reference is their base, which trainer.offload='base' keeps in the host's memory"
    return ""


def _check_teacher(job: Job) -> None:
    """Refuses a teacher that has no model or nothing to teach, and a `data.hint` that no teacher reads."""
    taught = job.algo.distillation if job.section == "grpo" else None
    if job.roles.teacher.mesh != TRAINER and not job.model.teachers:
        raise ValueError(
            f"roles.teacher.mesh={job.roles.teacher.mesh!r} sets devices aside for teachers, and there are none: set "
            f"it to {TRAINER!r}, or give model.teachers."
        )
    if taught is None:
        if job.model.teachers:
            raise ValueError(
                "model.teachers has no effect without grpo.teacher_coef above 0: set it, or leave model.teachers out."
            )
        if job.data.hinted:
            raise ValueError(
                "data.hint is what a teacher reads, and the job has no teacher: set grpo.teacher_coef above 0 "
                "and grpo.teacher='current', or leave data.hint out (and 'hint' in data.sources)."
            )
        return
    if job.model.teachers:
        _check_teachers(job)
    elif taught.teacher == "reference":
        if not job.model.reference:
            raise ValueError(
                f"grpo.teacher_coef={taught.coef:g} distills a teacher, and model.reference, which names it, is empty: "
                "give --config.model.reference=DIR, or set grpo.teacher_coef=0."
            )
    elif job.model.reference:
        raise ValueError(
            f"model.reference={job.model.reference!r} names a teacher and so does grpo.teacher={taught.teacher!r}: "
            "leave model.reference empty, or set grpo.teacher='reference'."
        )
    elif not job.data.hinted:
        raise ValueError(
            f"grpo.teacher={taught.teacher!r} has the policy teach itself, and a teacher that reads the same prompt "
            "has nothing to teach: give data.hint, as in --config.data.hint='The answer is {answer}.'"
        )
    if job.data.hinted and taught.kl == "full":
        raise ValueError(
            "grpo.teacher_kl='full' compares policy and teacher after the same prompt, but data.hint gives the "
            "teacher another prompt: set grpo.teacher_kl='top_k', which is exact if grpo.teacher_top_k is the size of "
            "the vocabulary, or 'sampled', or leave data.hint out."
        )


def _check_teachers(job: Job) -> None:
    """Refuses `model.teachers` beside another teacher, and sources that are unknown or would have several teachers."""
    taught, teachers = job.algo.distillation, job.model.teachers
    beside = {
        f"model.reference={job.model.reference!r}": job.model.reference,
        f"grpo.teacher={taught.teacher!r}": taught.teacher != "reference",
        f"grpo.teacher_kl={taught.kl!r}": not taught.sampled,
    }
    if wrong := [key for key, found in beside.items() if found]:
        raise ValueError(
            f"model.teachers does not go with {wrong[0]}: its teachers score the sampled tokens, so leave "
            "model.reference empty, with grpo.teacher='reference' and grpo.teacher_kl='sampled'."
        )
    known = [source.label for source in job.data.sources]
    named = [name for teacher in teachers for name in teacher.sources]
    if unknown := [name for name in named if name not in known]:
        raise ValueError(
            f"model.teachers has a teacher of {unknown[0]!r}, and data.sources has {', '.join(known) or 'nothing'}: "
            "name one of them."
        )
    if len(set(named)) < len(named) or sum(not teacher.sources for teacher in teachers) > 1:
        raise ValueError(
            "model.teachers gives some samples several teachers: name each source once, and leave 'sources' out of at "
            "most one teacher, which has the rest."
        )
    if len({teacher.path for teacher in teachers}) < len(teachers):
        raise ValueError("model.teachers names a directory twice: give one teacher all of its sources.")


def _with_system_prompts(values: ConfigValues) -> ConfigValues:
    """Replaces each system_prompt='auto' by the text that the reward functions need (`instructions_for`), or by ''.

    Records that only the user's functions score get no such text, and so only words that the user wrote. Embedded tasks
    and jobs on answers from data keep 'auto', which adds no text.
    """
    if KINDS[section_of(values.get("algorithm", "grpo"))].offline:
        return dict(values)
    data = build(DataConfig, values.get("data", {}), "config.data")
    evaluation = build(EvalConfig, values.get("eval", {}), "config.eval")
    fns = build(RewardConfig, values.get("reward", {}), "config.reward").fns
    prompt = data.system_prompt

    def decided(path: str, own: str, own_fns: Sequence[object]) -> str:
        if own != AUTO or prompt != AUTO or path in EMBEDDED_TASKS:
            return own
        return instructions_for(own_fns or fns)

    def all_decided(items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(one, system_prompt=decided(one.path, one.system_prompt, one.reward)) for one in items
        )

    changed: dict[str, Any] = {"data": {"system_prompt": decided(data.path, prompt, ())} if data.path else {}}
    if data.sources:
        changed["data"]["sources"] = all_decided(data.sources)
    if evaluation.sets:
        changed["eval"] = {"sets": all_decided(evaluation.sets)}
    return merge(values, changed)


def _with_scorers(values: ConfigValues) -> ConfigValues:
    """Names the reward function 'reasoning_gym' for datasets of reasoning-gym, unless reward.fns names it already.

    The function scores the records of every such source and evaluation set that names no functions of its own. If all
    records of the job are problems of reasoning-gym, the function replaces the default of reward.fns.
    """
    if KINDS[section_of(values.get("algorithm", "grpo"))].offline:
        return dict(values)
    data = build(DataConfig, values.get("data", {}), "config.data")
    evaluation = build(EvalConfig, values.get("eval", {}), "config.eval")
    fns = build(RewardConfig, values.get("reward", {}), "config.reward").fns
    if reasoning.NAME in fns:
        return dict(values)

    def scored(items: Sequence[Any]) -> tuple[Any, ...]:
        named = (reasoning.NAME,)
        return tuple(
            dataclasses.replace(one, reward=named) if one.path.startswith(REASONING) and not one.reward else one
            for one in items
        )

    changed: dict[str, Any] = {}
    if fns == DEFAULT and all(one.path.startswith(REASONING) for one in data.singles()):
        changed["reward"] = {"fns": (reasoning.NAME,)}
    if data.sources:
        changed["data"] = {"sources": scored(data.sources)}
    if evaluation.sets:
        changed["eval"] = {"sets": scored(evaluation.sets)}
    return merge(values, changed)


def with_prompt_length(values: ConfigValues, tools: Sequence[ToolSchema] = ()) -> ConfigValues:
    """Replaces rollout.max_prompt_length=0 by the longest prompt of the data; refuses prompts too long for the model.

    The system prompt of env.system_prompt_file, if there is one, becomes the system prompt of the data;
    `_with_system_prompts` decides all other system prompts.

    Where no key names reward functions, problems of reasoning-gym get the scorer of their dataset.

    Args:
      values: the whole configuration, as nested mappings.
      tools: tools that the chat template writes into prompts.

    Raises:
      ValueError: there is no tokenizer to count tokens with, or prompts leave no position of the model for an answer.
    """
    if values.get("env", {}).get("system_prompt_file"):
        text = build(EnvironmentConfig, values["env"], "config.env").system_prompt()
        values = merge(values, {"data": {"system_prompt": text}})
    values = _with_system_prompts(_with_scorers(values))
    if not values["model"]["path"]:
        if not values["rollout"]["max_prompt_length"]:
            raise ValueError(
                "rollout.max_prompt_length=0 means the longest prompt of the data. Its length depends on the tokenizer "
                "of model.path, which is empty: give model.path=DIR, or the number of tokens."
            )
        return dict(values)
    source = build(ModelSource, values["model"], "config.model")
    directory = source.tokenizer(values["tokenizer"])
    if not values["rollout"]["max_prompt_length"]:
        if not values["tokenizer"] and pathlib.Path(directory, "config.json").is_file():
            with config.named("model.path", source.path):
                read_config(directory)  # refuses a model of an unknown kind before its tokenizer can be refused
        tokenizer = source.open_tokenizer(values["tokenizer"], tools)
        longest = longest_prompt(build(DataConfig, values["data"], "config.data"), tokenizer)
        values = merge(values, {"rollout": {"max_prompt_length": longest}})
    if source.path != SCRATCH and not KINDS[section_of(values.get("algorithm", "grpo"))].scores:
        try:
            model = read_config(source.directory)
        except (ValueError, OSError):  # a later check refuses it and names its key
            return dict(values)
        # This check comes before `parse`, which would advise a larger rollout.kv_cache_size, and that would not help.
        check_positions(model, check(values["rollout"]["max_prompt_length"], Count, "rollout.max_prompt_length"), 0)
    return dict(values)
