"""Settings of generation: sampling, limits, and the sizes of the engine."""

import dataclasses
from typing import Annotated, Literal

from podrl.config import Count, Natural, NonNegative, Range, Seed, Share, section

# Abilities that an engine may have beyond making whole batches (podrl.rollout.interface):
#   windows         several versions of the weights may draw one sample, and prompts may be added while others are
#                   sampled: the methods `player`, `advance` and `rows`
#   greedy_members  the first samples of a group can be greedy: `Sampling.greedy`
#   tells           `generate` takes `mode` and calls `ended` with each sample; `stats` counts the work of the last call
Ability = Literal["windows", "greedy_members", "tells"]


@section("rollout")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling settings.

    Changing a value recompiles nothing: the numbers are arguments of the compiled programs, and stop strings are
    searched on the host.

    The temperature applies first, then top-k, top-p and min-p, each to the tokens that the previous filter kept. Tokens
    that are exactly as likely as a filter's last kept token are kept, too.

    Attributes:
      temperature: divisor of the logits; 0 takes the most likely token (greedy).
      top_p: share of the probability left after top-k; the fewest most likely tokens that reach this share together
        are kept. 1 or None is off.
      top_k: number of most likely tokens to keep; None or 0 is off.
      min_p: least probability of a kept token, as a fraction of the most likely token's probability; 0 is off.
      stop_strings: texts that end a sample, or end a turn of a sample with an environment, as soon as the sampled text
        contains one of them.
    """

    temperature: NonNegative = 1.0
    top_p: Annotated[float, Range("(0, 1]")] | None = 1.0
    top_k: Natural | None = None
    min_p: Share = 0.0
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        if any(not text for text in self.stop_strings):
            raise ValueError("rollout.stop_strings holds an empty text, which every completion contains: remove it.")

    @property
    def nucleus(self) -> float:
        """`top_p` as a number: 1 when it is off."""
        return 1.0 if self.top_p is None else self.top_p

    @property
    def filtered(self) -> bool:
        """True if top-k, top-p or min-p exclude tokens."""
        return bool(self.top_k) or self.nucleus < 1 or self.min_p > 0


@section("rollout")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(SamplingSettings):
    """Sampling settings of one request.

    Attributes:
      max_new: largest number of tokens that a sample may generate, including the end token; None is the engine's
        max_tokens_to_generate.
      stop_ids: token ids that end a sample besides the tokenizer's own.
      greedy: number of greedy samples per prompt. They are the prompt's first samples, drawn at temperature 0, and
        leave its other samples bit for bit unchanged.
      Others: fields of SamplingSettings.
    """

    max_new: Natural | None = None
    stop_ids: tuple[Natural, ...] = ()
    greedy: Natural = 0

    def of(self, place: int) -> "Sampling":
        """Returns the settings of the sample with index `place` in its group."""
        return dataclasses.replace(self, temperature=0.0, greedy=0) if place < self.greedy else self


PRESETS = {
    "greedy": Sampling(temperature=0.0),
    "standard": Sampling(temperature=0.7, top_k=50, top_p=0.95),
    "liberal": Sampling(temperature=0.85, top_k=2000),
}


def preset(name: Literal["greedy", "standard", "liberal"], **changes) -> Sampling:
    """Looks up a decoding preset by its name, and applies changes to it.

    Args:
      name: name of the preset.
      **changes: fields of Sampling to replace.

    Raises:
      ValueError: no preset has this name.
    """
    if name not in PRESETS:
        raise ValueError(f"Decoding preset {name!r} is not known: use one of {', '.join(PRESETS)}.")
    return dataclasses.replace(PRESETS[name], **changes)


@section(
    "rollout",
    {
        "segment_tokens": "it is rollout.page_tokens now.",
        "members_per_visit": "it is rollout.members_per_read now.",
        "stop": "say rollout.stop_strings=['TEXT'] for texts, or rollout.eos_tokens=(ID,) for token ids.",
        "stop_[!s]*": "say rollout.stop_strings=['TEXT'] for texts, or rollout.eos_tokens=(ID,) for token ids.",
        "rollout_vllm_*": "podrl decodes with its own engine; its sizes are lanes, page_tokens and pool_tokens.",
        "rollout_sglang_jax_*": "podrl decodes with its own engine; its sizes are lanes, page_tokens, pool_tokens.",
        "rollout_mapping_config": "podrl's trainer and engine share one parameter tree, so nothing needs mapping.",
        "tensor_parallel_size": "give the rollout role a mesh with that axis, e.g. roles.rollout.mesh='tensor=4'.",
        "data_parallel_size": "give the rollout role a mesh with that axis, e.g. roles.rollout.mesh='data=4'.",
        "expert_parallel_size": "give the rollout role a mesh with that axis, e.g. roles.rollout.mesh='expert=4'.",
    },
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplingSettings):
    """Settings of the rollout: sampling defaults and the fixed sizes of the decode engine.

    Attributes:
      prompts_per_step: P, number of different prompts of a training step.
      max_tokens_to_generate: default of Sampling.max_new, tokens.
      max_response_tokens: largest number of tokens that follow a prompt, sampled tokens and tokens from the environment
        together; must be set if samples have an environment. None is max_tokens_to_generate.
      seed: seed of all samples; None is the job's seed.
      max_prompt_length: length of the longest accepted prompt, in tokens. In a configuration, 0 takes the longest of
        the first 8,192 training prompts, rounded up to a multiple of 64.
      kv_cache_size: largest number of tokens that one sample may hold, including its prompt; a request that could
        exceed it is refused.
      data_type: dtype of the engine's weights, activations and cache; None is the trainer's compute dtype.
      eos_tokens: ids that end a sample; None takes the tokenizer's end tokens.
      return_logprobs: accepted for compatibility; podrl always returns log-probabilities.
      lanes: number of samples that the whole mesh decodes at once, rounded up to a multiple of the mesh's data-parallel
        size. Samples are bitwise reproducible for a fixed number of lanes.
      steps_per_dispatch: number of decode steps per device call; the lane of a finished sample is refilled one or two
        calls later.
      page_tokens: number of tokens per page of the key/value pool, a multiple of steps_per_dispatch.
      pool_tokens: tokens of key/value cache per data-parallel shard; None makes room for every lane's longest request.
        With a smaller pool, the scheduler moves caches of samples to the host when the pool is full.
      prefill_tokens: number of tokens prefilled per device call and shard; longer prompts are prefilled in chunks.
      members_per_read: largest number of samples of one prompt that read a prompt page together; should be about the
        group size.
      window_tokens: number of tokens that a sample draws under each version of the weights except its last version; a
        multiple of steps_per_dispatch. None computes the number from the lengths of earlier samples. The setting has an
        effect with clock='tokens' and max_staleness of 2 or more (docs/async.md).
      clock: rule that decides where weights change inside samples and which samples make a batch; has an effect with
        max_staleness of 1 or more. 'tokens' counts each sample's tokens, so that a killed and resumed run ends with
        bitwise the same weights. 'wall' takes the samples that finish first, for tools that take minutes; it records
        its decisions in a journal, from which the run can be repeated (docs/async.md).
      merge_adapters: True if, with LoRA, the trainer folds the adapters into the weights and sends the whole model at
        every version. Decoding is then as fast as without adapters, and a transfer costs as much as in full training.
        If False, the base model is sent once, and the engine applies the adapters.
      page_kernel: True if decoding on TPUs and GPUs uses podrl's attention kernel. None uses the kernel on v4 and v5p,
        where it reads less memory than attention compiled by XLA (docs/measurements/planning.md), and on NVIDIA GPUs
        from Ampere on. Samples drawn with and without the kernel differ in their last bits.
      engine: decoding engine: 'podrl', or 'file.py:Class' or 'package.module:Class' for a class of your own
        (podrl/rollout/interface.py has its methods).
      router_replay: True if the trainer sends each token to the experts that the token took while it was sampled
        (docs/models.md). It has no effect on models without experts.
      Others: defaults of Sampling, see SamplingSettings.

    Raises:
      ValueError: the sizes do not fit together.
    """

    max_tokens_to_generate: Count = 64
    max_response_tokens: Count | None = None
    temperature: NonNegative = 0.9
    seed: Seed | None = None
    max_prompt_length: Count = 64
    kv_cache_size: Count = 1024
    data_type: Literal["float32", "bfloat16"] | None = None
    eos_tokens: tuple[Natural, ...] | None = None
    return_logprobs: bool = False
    lanes: Count = 128
    steps_per_dispatch: Count = 8
    page_tokens: Count = 64
    pool_tokens: Count | None = None
    prefill_tokens: Count = 256
    members_per_read: Count = 16
    prompts_per_step: Count = 8
    window_tokens: Count | None = None
    clock: Literal["tokens", "wall"] = "tokens"
    merge_adapters: bool = False
    page_kernel: bool | None = None
    engine: str = "podrl"
    router_replay: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.page_tokens % self.steps_per_dispatch:
            raise ValueError(
                f"rollout.page_tokens={self.page_tokens} must be a multiple of "
                f"rollout.steps_per_dispatch={self.steps_per_dispatch}."
            )
        if (self.window_tokens or 0) % self.steps_per_dispatch:
            raise ValueError(
                f"rollout.window_tokens={self.window_tokens} must be a multiple of "
                f"rollout.steps_per_dispatch={self.steps_per_dispatch}."
            )
        if self.response_tokens < self.max_tokens_to_generate:
            raise ValueError(
                f"rollout.max_response_tokens={self.max_response_tokens} counts sampled and appended tokens: it must "
                f"be at least rollout.max_tokens_to_generate={self.max_tokens_to_generate}, which counts "
                "sampled tokens only."
            )
        if self.max_prompt_length + self.response_tokens > self.kv_cache_size:
            key = "max_tokens_to_generate" if self.max_response_tokens is None else "max_response_tokens"
            raise ValueError(
                f"rollout.max_prompt_length={self.max_prompt_length} + rollout.{key}={self.response_tokens} "
                f"exceed rollout.kv_cache_size={self.kv_cache_size}: raise rollout.kv_cache_size, or lower "
                "rollout.max_prompt_length (data.long_prompts decides what happens to longer prompts)."
            )

        pool, longest = self.pool_tokens, self.longest_pages
        if pool is not None and pool // self.page_tokens < longest:
            raise ValueError(
                f"rollout.pool_tokens={pool} is {pool // self.page_tokens} pages of {self.page_tokens} tokens, fewer "
                f"than the {longest} that the longest request may need: raise it to {longest * self.page_tokens}, or "
                f"lower rollout.kv_cache_size={self.kv_cache_size}."
            )

    @property
    def prompt_pages(self) -> int:
        """Largest number of pages that a prompt needs, without its last token."""
        return -(-max(self.max_prompt_length - 1, 1) // self.page_tokens)

    @property
    def longest_pages(self) -> int:
        """Largest number of pages of a prompt and its sample, both of which may end in a page that is not full."""
        return self.prompt_pages + -(-self.kv_cache_size // self.page_tokens) + 1

    @property
    def response_tokens(self) -> int:
        """Largest number of tokens that follow a prompt."""
        return self.max_tokens_to_generate if self.max_response_tokens is None else self.max_response_tokens

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence, prompt included."""
        return self.max_prompt_length + self.response_tokens

    def require(self, *, environment: bool) -> None:
        """Raises ValueError if samples have an environment and max_response_tokens is not set."""
        if environment and self.max_response_tokens is None:
            raise ValueError(
                "rollout.max_response_tokens is not set, and the samples have an environment: set it to the largest "
                "number of sampled and appended tokens of a sample. It must exceed rollout.max_tokens_to_generate="
                f"{self.max_tokens_to_generate} by the tokens that tools and environment may add."
            )

    def sampling(self) -> Sampling:
        """Returns the sampling settings of requests without settings of their own."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingSettings)}
        return Sampling(**shared, max_new=self.max_tokens_to_generate)
