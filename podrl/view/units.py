"""The units of metrics, as docs/metrics.md states them, for the axes of the page."""

import re

# (pattern, unit): the first pattern that matches the whole name gives the unit.
_UNITS = (
    (r"(.*/)?error/.*", ""),
    (r".*/(tokens_per_s(_per_device)?)", "tokens per second"),
    (r"time/.*|episode/seconds_p\d+|tools/.*/seconds_p95|perf/compile", "seconds"),
    (
        r"completion/length_m(ean|ax)|(loss/|source/.*/)?tokens(/.*)?|perf/prefill_tokens|episode/given_tokens"
        r"|tools/.*/output_tokens",
        "tokens",
    ),
    (r"perf/memory_peak", "GiB"),
    (r"rollout/staleness", "steps"),
    (r"(actor|critic)/(grad_norm|lr|ratio(_stale_.*)?|pg_loss)|perf/plan_.*|sampler/(exp_diff|pearson|weight)", "1"),
    (r"actor/kl_coef", "1 per nat"),
    (r"reward/kl_coef", "reward per nat"),
    (r"critic/vf_loss", "reward squared"),
    (r"dpo/margin", "nats x beta"),
    (r"(actor|reward|kto|opd)/(approx_kl|entropy|kl|reverse_kl)|echo/nll|(sft|dpo|orpo|reward_model)/loss", "nats"),
    (r"sampler/(abs_diff(_stale_.*)?|kl(_reverse)?)|sft/entropy|.*_log(prob|ratio)|orpo/margin", "nats"),
    (r"eval/pair_margin|reward_model/(margin|score)", "score"),
    (r"accuracy/.*|.*_?accuracy|.*/nonfinite|.*_?clipfrac(_lower|_stale_.*)?|completion/truncated", "share of 1"),
    (
        r"critic/explained_variance|perf/(goodput|mfu|lost_.*|waits_.*)|reward/(groups_without_signal|zero/.*)",
        "share of 1",
    ),
    (
        r"rollout/(kept_mass|mixed_samples|share_stale_.*)|sampler/(ess|kept)|moe/.*|opd/compared|packing/.*",
        "share of 1",
    ),
    (r"eval/(.*/)?(greedy|sampled)_reward(/.*)?|reward/.*|(group|source)/.*/reward(/.*)?", "reward"),
    (r"eval/(.*/)?(greedy|sampled)_(answer|partial|format|pass|majority)", "share of 1"),
    (r"critic/(advantage_abs|return|value)", "reward"),
    (r"(data|dynamic_sampling|front|loss|pod|queue|episode|rollout)/.*|(.*/)?(prompts|records|samples)", "count"),
    (r"perf/(decode_steps|dispatches|prefill_calls)|tools/.*/(calls|failures)", "count"),
)


def unit(name: str) -> str:
    """Returns the unit of a metric; '1' for a number without a unit, '' if the unit is not known."""
    return next((of for form, of in _UNITS if re.fullmatch(form, name)), "")
