"""What a user can set about generation: sampling, limits, and the sizes of the engine."""

import dataclasses
import math
from typing import Literal

from podrl.config import refuses


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request draws its tokens. Every value is traced: changing it recompiles nothing.

    Filters apply in this order, each on what the former left: temperature, top-k, top-p, min-p. Tokens that tie with
    the last one a filter keeps stay in.

    Attributes:
      temperature: logits are divided by it; 0 takes the most likely token (greedy).
      top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 is off.
      top_k: keep the k most likely tokens; None or 0 is off.
      min_p: keep tokens at least this fraction as likely as the most likely one; 0 is off.
      max_new: most tokens a sample may generate, the end token included; None is the engine's max_tokens_to_generate.
      stop_ids: token ids that end a sample besides the tokenizer's own.
      stop_strings: texts that end (or, with tools, pause) a sample as soon as its completion contains one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_new: int | None = None
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 turns it off.")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be positive; None turns it off.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]; 0 turns it off.")
        if self.max_new is not None and self.max_new < 0:
            raise ValueError(f"max_new={self.max_new} must not be negative.")
        if any(not text for text in self.stop_strings):
            raise ValueError("stop_strings holds an empty text, which every completion contains: remove it.")


PRESETS = {
    "greedy": Sampling(temperature=0.0),
    "standard": Sampling(temperature=0.7, top_k=50, top_p=0.95),
    "liberal": Sampling(temperature=0.85, top_k=2000),
}


def preset(name: Literal["greedy", "standard", "liberal"], **changes) -> Sampling:
    """A named decoding preset, with changes.

    Raises:
      ValueError: no preset of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"Decoding preset {name!r} is not known: {', '.join(PRESETS)} are.")
    return dataclasses.replace(PRESETS[name], **changes)


@refuses(
    {
        "rollout_vllm_*": "podrl decodes with its own engine; its sizes are lanes, segment_tokens and pool_tokens.",
        "rollout_sglang_jax_*": "podrl decodes with its own engine; its sizes are lanes, segment_tokens, pool_tokens.",
        "rollout_mapping_config": "podrl's trainer and engine share one parameter tree, so nothing needs mapping.",
        "tensor_parallel_size": "give the rollout role a mesh with that axis, e.g. roles.rollout.mesh='tensor=4'.",
        "data_parallel_size": "give the rollout role a mesh with that axis, e.g. roles.rollout.mesh='data=4'.",
        "expert_parallel_size": "podrl's decoders have no experts.",
    }
)
@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Sampling defaults and the fixed sizes of the decode engine.

    Attributes:
      prompts_per_step: P, distinct prompts a training step samples from.
      max_tokens_to_generate: default of Sampling.max_new, tokens.
      temperature, top_p, top_k, min_p: defaults of Sampling.
      seed: of all samples; None is the job's seed.
      max_prompt_length: longest prompt accepted, tokens.
      kv_cache_size: most tokens one sample may hold, prompt included; a request that could exceed it is refused.
      data_type: dtype of the engine's weights, activations and cache; None is the trainer's compute dtype.
      eos_tokens: ids that end a sample; None is the tokenizer's.
      return_logprobs: accepted for compatibility; podrl always returns log-probabilities.
      stop_strings: default of Sampling.stop_strings.
      lanes: samples decoded at once over the whole mesh, rounded up to a multiple of its data-parallel size. Samples
        are bitwise reproducible for a fixed number of lanes.
      steps_per_dispatch: decode steps per device call; a finished sample's lane is refilled at the next call but one.
      segment_tokens: tokens per segment of the key/value pool, a multiple of steps_per_dispatch.
      pool_tokens: tokens of key/value cache per data-parallel shard; None holds every lane's longest request, less
        makes the scheduler spill samples to the host when it runs dry.
      prefill_tokens: tokens prefilled per device call and shard; longer prompts are prefilled in chunks.
      members_per_visit: samples of one prompt that read a prompt segment together; about the group size.
      merge_adapters: under LoRA, fold the adapters into the weights on the trainer and move the whole model at every
        version: decoding is that of a model without adapters, a move costs that of full training. Otherwise the base
        crosses once, and the engine applies the adapters.

    Raises:
      ValueError: sizes that do not fit together.
    """

    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: int | None = None
    max_prompt_length: int = 64
    kv_cache_size: int = 1024
    data_type: str | None = None
    eos_tokens: tuple[int, ...] | None = None
    return_logprobs: bool = False
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    lanes: int = 128
    steps_per_dispatch: int = 8
    segment_tokens: int = 64
    pool_tokens: int | None = None
    prefill_tokens: int = 256
    members_per_visit: int = 16
    prompts_per_step: int = 8
    merge_adapters: bool = False

    def __post_init__(self):
        for name in (
            "prompts_per_step",
            "lanes",
            "steps_per_dispatch",
            "segment_tokens",
            "prefill_tokens",
            "members_per_visit",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name}={getattr(self, name)} must be at least 1.")
        if self.segment_tokens % self.steps_per_dispatch:
            raise ValueError(
                f"rollout.segment_tokens={self.segment_tokens} must be a multiple of "
                f"rollout.steps_per_dispatch={self.steps_per_dispatch}."
            )
        if self.max_prompt_length < 1 or self.max_tokens_to_generate < 0:
            raise ValueError(
                f"rollout.max_prompt_length={self.max_prompt_length} must be at least 1 and "
                f"rollout.max_tokens_to_generate={self.max_tokens_to_generate} at least 0."
            )
        if self.max_prompt_length + self.max_tokens_to_generate > self.kv_cache_size:
            raise ValueError(
                f"rollout.max_prompt_length={self.max_prompt_length} + rollout.max_tokens_to_generate="
                f"{self.max_tokens_to_generate} exceed rollout.kv_cache_size={self.kv_cache_size}: raise kv_cache_size."
            )
        self.sampling()

    def sampling(self) -> Sampling:
        """The sampling a request has when it brings none of its own."""
        return Sampling(
            temperature=self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_new=self.max_tokens_to_generate,
            stop_strings=self.stop_strings,
        )
