"""Checks of a run's records: each finds one kind of problem, at the first step whose numbers show it.

A check looks at one record, and at the facts that `Past` keeps about the records before it. Checks of causes come
before checks of consequences; docs/doctor.md explains every row.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable

from podrl.config import percent
from podrl.mappings import LogRecord
from podrl.rundir.history import WINDOW, Past, average, number

# Bounds beyond which the checks report a finding; docs/doctor.md states them.
SUPPORT = 0.95  # smallest accepted rollout/kept_mass
TRUNCATED = 0.25  # largest accepted share of samples cut off at the token limit
NO_SIGNAL = 0.8  # largest accepted share of groups with equal rewards
LONGER = 2.0  # largest accepted ratio of the samples' length to their length in the first steps
COLLAPSED = 0.1  # smallest accepted ratio of the entropy to the entropy in the first steps
UNEVEN = 0.5  # smallest accepted ratio of the evenness of the experts' load to the evenness in the first steps
KL_LIMIT = 1.0  # largest accepted KL divergence, in nats per token
SPIKE = 10.0  # largest accepted ratio of the gradient norm to its median in the steps before
FAILING = 0.5  # largest accepted share of a tool's calls that fail
_UNKNOWN = "unknown"  # stands for the tools that models call and that do not exist
STARVED = 0.25  # largest accepted share of a step's time that data, rewards or a checkpoint may take
UNPAID = 0.95  # smallest share of samples with reward 0 that is reported
REPEATED = 8  # number of times in a row that a piece of text occurs, to count as repetition
SETTLED = 10  # number of steps for which a value must be constant before a check reports it
WAITS = 0.5  # largest accepted share of a step's time in which the update waits
LONGEST = 3.0  # without staleness, waits are reported from this ratio of the longest sample to the mean length on
TAUGHT = 0.01  # smallest accepted divergence between policy and teacher, in nats per token
COMPARED = 0.5  # smallest accepted share of tokens with a teacher
APART = 2.0  # largest accepted ratio of the divergence from the teacher to its value in the first steps
UNLIKELY = 1.5  # largest accepted ratio of the negative log-probability to its value in the first steps

Look = Callable[[LogRecord, Past], str]  # describes the fault of a record; '' if there is none


@dataclasses.dataclass(frozen=True)
class Check:
    """A check: one row of the table CHECKS and of docs/doctor.md.

    Attributes:
      name: name of the finding.
      kind: kind of the records that the check reads: 'step', 'evaluation', 'sample' (a line of samples.jsonl), or
        'trace' (all tokens of a step; podrl/rundir/token_checks.py).
      meaning: consequence of the finding, in a sentence.
      key: configuration key to change, or advice; further lines give the key for each likely reason.
      look: function that describes what is wrong with a record, with its numbers; '' if nothing is wrong. A second
        line shows a sample.
    """

    name: str
    kind: str
    meaning: str
    key: str
    look: Look


CHECKS: list[Check] = []


def check(name: str, *, kind: str = "step", meaning: str, key: str) -> Callable[[Look], Look]:
    """Returns a decorator that adds a function to CHECKS as a check; arguments are attributes of `Check`.

    The order in the file matters: checks of causes come before checks of consequences.
    """

    def add(look: Look) -> Look:
        CHECKS.append(Check(name, kind, meaning, key, look))
        return look

    return add


# The checks, by subject. First: do samples and weights agree with their records?


@check(
    "prompts trained twice or lost",
    meaning="the data position and the batches that were trained do not fit: a resumed run repeats or skips data",
    key="start again from a checkpoint before the step; metrics.jsonl must be of this run alone",
)
def _prompts(now: LogRecord, past: Past) -> str:
    first, before = number(now, "data/first_prompt"), number(past.last[-1], "data/last_prompt") if past.last else None
    if first is None or before is None or past.setting("rollout.clock", "tokens") == "wall":
        return ""  # with clock='wall', batches do not follow the order of the data stream
    if first <= before:
        return f"the batch begins with prompt {first:.0f} of the stream, and prompt {before:.0f} was trained before it"
    if first > before + 1 and not past.setting("algo.dynamic_sampling", False):
        return f"prompts {before + 1:.0f} to {first - 1:.0f} of the stream were never trained"
    return ""


@check(
    "tokens of unknown weights",
    meaning="samples name a version of the weights that the trainer had not made yet, or no version",
    key="report it: versions are checked on arrival; until then, another transfer (roles.colocated=True)",
)
def _version(now: LogRecord, past: Past) -> str:
    count = number(now, "rollout/unknown_version") or 0
    return f"{count:.0f} sampled tokens name weights that the trainer had not made" if count else ""


@check(
    "stale beyond the bound",
    meaning="samples come from older weights than the run allows",
    key="raise SECTION.max_staleness, or find out why batches wait",
)
def _stale(now: LogRecord, past: Past) -> str:
    count, bound = number(now, "rollout/stale_tokens") or 0, past.setting("algo.max_staleness", 0)
    return f"{count:.0f} sampled tokens are more than {past.section}.max_staleness={bound} steps old" if count else ""


@check(
    "mask against sampled ids",
    meaning="tokens are trained on that the policy did not sample: prompt, padding, or tokens without a probability",
    key="report it with the sample; an environment or a template of your own is the first suspect (env.environment)",
)
def _mask(now: LogRecord, past: Past) -> str:
    count = number(now, "rollout/faulty_tokens") or 0
    return f"{count:.0f} tokens have a mask that does not fit where they come from" if count else ""


@check(
    "the trainer does not reproduce the sampler",
    meaning="the engine serves other weights than those trained, or computes them in another way",
    key=(
        "rollout.data_type=trainer.dtype, float32 for both; SECTION.sampler_correction='tis', or 'kpop', "
        "which leaves out the tokens that are far off (algorithm=prime_rl does, too); SECTION.max_staleness lower"
    ),
)
def _reproduced(now: LogRecord, past: Past) -> str:
    value, bound = number(now, "sampler/abs_diff"), past.setting("algo.mismatch_bound", 0.2)
    if value is None:
        return ""
    if not past.setting("algo.max_staleness", 0):
        bound = min(bound, 1e-3 if past.exact else 0.05)
    return f"sampler/abs_diff is {value:.3g} nats per token, more than {bound:g}" if value > bound else ""


@check(
    "ratio away from 1 on-policy",
    meaning="the update does not start from the policy that sampled: dropout, another forward pass, or stale samples",
    key="model.lora.dropout=0, trainer.dtype=float32, SECTION.old_logprob='trainer'",
)
def _ratio(now: LogRecord, past: Past) -> str:
    value, bound = number(now, "actor/ratio"), 0.01 if past.exact else 0.05
    # A value of 0 means that no token of the step counts in the loss.
    if not value or not past.on_policy or abs(value - 1) <= bound:
        return ""
    return f"actor/ratio is {value:.4g}, more than {bound:g} away from 1 in a run of one on-policy update a step"


@check(
    "truncated support",
    meaning="top-k, top-p or min-p sample from another distribution than the one that is trained",
    key="rollout.top_k, rollout.top_p and rollout.min_p: weaker, or off",
)
def _support(now: LogRecord, past: Past) -> str:
    values = past.recent(now, "rollout/kept_mass", 1)
    return f"rollout/kept_mass is {values[0]:.3f}, less than {SUPPORT}" if values and values[0] < SUPPORT else ""


# Rewards.


@check(
    "reward not a number",
    meaning="a reward function returns NaN or infinity, or no sample of the batch has a reward",
    key="the named function (reward.fns); samples.jsonl shows the samples that it scored",
)
def _reward_finite(now: LogRecord, past: Past) -> str:
    bad = [name for name in now if name.startswith("reward/") and number(now, name) is None]
    return f"{', '.join(sorted(bad))}: not a finite number" if bad else ""


@check(
    "reward constant",
    meaning="all samples get the same reward, whatever they say: nothing can be learned",
    key="reward.fns and reward.weights; the fields of data.path that they read",
)
def _reward_constant(now: LogRecord, past: Past) -> str:
    stds = past.recent(now, "reward/std")
    zero = [number(now, name) for name in now if name.startswith("reward/zero/")]
    # If every function gives 0 to every sample, the check 'a reward function pays nothing' reports it, with reasons.
    if not stds or any(stds) or _saturated(now, past) or (zero and all(share == 1 for share in zero)):
        return ""
    return f"reward/std is 0 in the last {WINDOW} steps, reward/mean {number(now, 'reward/mean'):.4g}"


@check(
    "reward function without effect",
    meaning="one of the reward functions has given the same to every sample so far",
    key="the function named (reward.fns); the fields of data.path that it reads",
)
def _function_constant(now: LogRecord, past: Past) -> str:
    if past.steps + 1 != SETTLED:
        return ""
    fns = [str(fn).rpartition(":")[2] for fn in past.setting("reward.fns", ())]
    fns = fns if len(fns) > 1 else []
    same = [f"reward/{fn}" for fn in fns if len(set(past.recent(now, f"reward/{fn}", SETTLED))) == 1]
    # The next check reports functions that give 0 to every sample.
    same = [name for name in same if number(now, name.replace("/", "/zero/", 1)) != 1]
    text = ", ".join(f"{name} is {number(now, name):.4g}" for name in same)
    return f"{text} in every one of the first {SETTLED} steps" if same else ""


@check(
    "a reward function pays nothing",
    meaning="the function teaches nothing yet, unless it is a penalty, whose best value is 0",
    key=(
        "the keys of the reason that applies, likeliest first:"
        "\n  1. the answers lack the form that the function looks for: data.system_prompt asks for it, or "
        "algorithm=sft first"
        "\n  2. the function compares with the wrong field: its arguments, data.answer_field"
        "\n  3. the task is too hard: easier data (data.path), more SECTION.num_generations, "
        "SECTION.advantage_estimator='maxrl', a teacher (algorithm=opd), with tools SECTION.observation_coef=0.1"
    ),
)
def _unpaid(now: LogRecord, past: Past) -> str:
    for name in _paying(now, past):
        shares = past.recent(now, f"reward/zero/{name}")
        if not shares or average(shares) < UNPAID or (number(now, f"reward/{name}") or 0) < 0:
            continue
        text = (
            f"reward function {name} gave the reward 0 to {percent(average(shares))} of the samples of {WINDOW} steps"
        )
        example = next((sample for sample in reversed(past.samples) if number(sample, name) == 0), None)
        return text if example is None else f"{text}\na sample of step {example['step']}: {_in_one_line(example)}"
    return ""


def _in_one_line(sample: LogRecord) -> str:
    """Returns a sample in one line: the end of its prompt, the beginning of its answer and of the reference."""
    prompt, *texts = (str(sample.get(name, "")) for name in ("prompt", "completion", "truth"))
    text, truth = (repr(text[:80] + "..." * (len(text) > 80)) for text in texts)
    said = f"prompt {'...' * (len(prompt) > 80) + prompt[-80:]!r}, answer {text}"
    return f"{said}, reference {truth}" if "truth" in sample else said


@check(
    "reward saturated",
    meaning="nearly all samples get the same reward, higher than at first: further steps teach little",
    key="if it is the full reward, harder data (data.path), or stop (trainer.max_steps); else reward.fns",
)
def _reward_saturated(now: LogRecord, past: Past) -> str:
    if not _saturated(now, past):
        return ""
    return (
        f"reward/std is {average(past.recent(now, 'reward/std')):.3g} over {WINDOW} steps and was "
        f"{past.at_first('reward/std'):.3g} at first, at a reward/mean of {number(now, 'reward/mean'):.4g}"
    )


@check(
    "a reward at the cost of another",
    meaning="the sum of the rewards rises and one of them falls: the others may be exploited, as learned ones can be",
    key=(
        "reward.weights, a function of your own that sees what is exploited (reward.fns), another reward.model; a KL "
        "to the starting policy: SECTION.beta higher, or algorithm=rloo, which has it in the reward"
    ),
)
def _reward_exploited(now: LogRecord, past: Past) -> str:
    start, spread, rewards = past.at_first("reward/mean"), past.at_first("reward/std"), past.recent(now, "reward/mean")
    if past.steps + 1 < 2 * WINDOW or start is None or not spread or not rewards:
        return ""
    rise = average(rewards) - start
    for name in (name.replace("/zero/", "/") for name in now if name.startswith("reward/zero/")):
        before, values = past.at_first(name), past.recent(now, name)
        if before is not None and values and rise >= spread / 2 and before - average(values) > spread / 4:
            fall = before - average(values)
            return f"reward/mean rose by {rise:.3g} since the first steps, and {name} fell by {fall:.3g}"
    return ""


# Estimators whose advantages do not compare a sample with its group alone, so that equal rewards may have a signal.
_BEYOND_GROUPS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gae")


@check(
    "groups without signal",
    meaning="all samples of most prompts get the same reward: their advantages are 0 and the work is wasted",
    key=(
        "SECTION.dynamic_sampling=True (algorithm=dapo has it), more SECTION.num_generations, data nearer to "
        "what the model can do; where right answers are rare and rewards 0 or more, "
        "SECTION.advantage_estimator='maxrl', too"
    ),
)
def _signal(now: LogRecord, past: Past) -> str:
    values = past.recent(now, "reward/groups_without_signal")
    if (
        not values
        or average(values) <= NO_SIGNAL
        or past.setting("algo.num_generations", 1) < 2
        or _saturated(now, past)
        or past.section == "ppo"
        or past.setting("algo.advantage_estimator", "") in _BEYOND_GROUPS
    ):
        return ""
    return f"reward/groups_without_signal is {average(values):.2f} over {WINDOW} steps, more than {NO_SIGNAL}"


@check(
    "nothing trained",
    meaning="no sample of the step has weight in the policy's loss, so the step does not change the policy",
    key="what the reasons name (docs/metrics.md, loss/left_out/REASON); equal_rewards: see groups without signal",
)
def _trained(now: LogRecord, past: Past) -> str:
    reasons = {name: value for name, value in now.items() if name.startswith("loss/left_out/") and value}
    if number(now, "loss/samples") != 0 or "loss/left_out/critic_warmup" in reasons:
        return ""
    most = sorted(reasons, key=lambda name: -reasons[name])
    return "no sample has weight in the loss: " + ", ".join(f"{reasons[n]:.0f} {n.rsplit('/')[-1]}" for n in most)


# The content of the samples.


@check(
    "answers get longer",
    meaning="the policy has stopped ending its answers, or length pays",
    key=(
        "SECTION.overlong_shaping=True (algorithm=dapo has it), algorithm=dr_grpo, a reward without a premium on length"
    ),
)
def _length(now: LogRecord, past: Past) -> str:
    values, start = past.recent(now, "completion/length_mean"), past.at_first("completion/length_mean")
    limit = past.setting("rollout.max_tokens_to_generate", math.inf)
    if not values or not start or average(values) < LONGER * start or average(values) < limit / 2:
        return ""
    return (
        f"completion/length_mean is {average(values):.4g} tokens over {WINDOW} steps, "
        f"{average(values) / start:.1f} times that of the first steps, at a limit of {limit}"
    )


@check(
    "answers cut off",
    meaning="many answers meet the token limit before they end, and are scored unfinished",
    key="rollout.max_tokens_to_generate higher, SECTION.overlong_shaping=True, or SECTION.overlong_filter=True",
)
def _truncated(now: LogRecord, past: Past) -> str:
    values = past.recent(now, "completion/truncated")
    if not values or average(values) <= TRUNCATED:
        return ""
    return f"completion/truncated is {average(values):.2f} over {WINDOW} steps, more than {TRUNCATED}"


@check(
    "repetition",
    kind="sample",
    meaning="the policy repeats itself until it is cut off: often an entropy collapse, or a reward that pays length",
    key="SECTION.beta or SECTION.entropy_coef higher, trainer.learning_rate lower, the reward",
)
def _repetition(now: LogRecord, past: Past) -> str:
    if "evaluation" in now:
        return ""
    text = str(now.get("completion", ""))[-400:]
    match = re.search(rf"(\S.{{0,30}}?)\1{{{REPEATED - 1},}}", text, re.DOTALL)
    repeats = match is not None and len(match[0]) >= 24
    past.repeating.append(repeats)
    if match is None or not repeats or sum(past.repeating) < len(past.repeating) / 2 or sum(past.repeating) < 2:
        return ""
    times = len(match[0]) // len(match[1])
    return (
        f"{sum(past.repeating)} of the last {len(past.repeating)} recorded samples repeat themselves, this one "
        f"{match[1]!r} {times} times in a row"
    )


# The update.


@check(
    "gradient not finite",
    meaning="an update was skipped, because its gradient held NaN or infinity; three in a row stop the run",
    key="trainer.learning_rate lower, trainer.max_grad_norm; samples.jsonl for degenerate text",
)
def _nonfinite(now: LogRecord, past: Past) -> str:
    share = number(now, "actor/nonfinite") or 0
    return f"{percent(share)} of the step's updates were skipped" if share else ""


@check(
    "no gradient",
    meaning="samples have weight in the loss, but the gradient is 0: the policy stays as it is",
    key="SECTION.policy_loss_fn, if it is your own; a clip that holds all tokens (SECTION.epsilon); else report it",
)
def _gradient(now: LogRecord, past: Past) -> str:
    if (past.setting("model.lora", {}) or {}).get("rank") or not _still(now, past):
        return ""  # gradients of adapters have a check of their own
    return f"actor/grad_norm is 0 in {WINDOW} steps whose samples have a signal"


@check(
    "gradient spikes",
    meaning="single batches move the policy far more than the others: outliers among samples, or too high a rate",
    key="trainer.max_grad_norm, trainer.learning_rate lower; look at the step's samples",
)
def _spike(now: LogRecord, past: Past) -> str:
    value, before = number(now, "actor/grad_norm"), [number(record, "actor/grad_norm") for record in past.last]
    norms = [norm for norm in before if norm is not None]
    if value is None or len(norms) < WINDOW or value <= SPIKE * statistics.median(norms) or not any(norms):
        return ""
    median = statistics.median(norms)
    return f"actor/grad_norm is {value:.3g}, more than {SPIKE:g} times the {median:.3g} of the steps before (median)"


@check(
    "entropy collapse",
    meaning="the policy says one thing only: samples of a prompt are alike, and nothing new is tried",
    key=(
        "SECTION.entropy_coef or SECTION.beta higher, SECTION.epsilon_high=0.28 (algorithm=dapo has it), "
        "algorithm=clip_cov, trainer.learning_rate lower"
    ),
)
def _entropy(now: LogRecord, past: Past) -> str:
    return _since_first(now, past, "actor/entropy", lambda mean, first: mean < COLLAPSED * first)


@check(
    "router collapse",
    meaning="in some layer most tokens go to the same few experts, and the others learn nothing",
    key="trainer.learning_rate lower, SECTION.beta higher; adapters (model.lora.rank) leave routers as they are",
)
def _router(now: LogRecord, past: Past) -> str:
    return _since_first(now, past, "moe/evenness", lambda mean, first: mean < UNEVEN * first, unit="")


@check(
    "KL drift",
    meaning="the policy has left the reference: it may exploit the reward and forget the rest",
    key=(
        "SECTION.beta (or kl_in_reward, as algorithm=rloo has it) higher, SECTION.kl_target, "
        "trainer.learning_rate lower"
    ),
)
def _kl(now: LogRecord, past: Past) -> str:
    for name in ("actor/kl", "reward/kl"):
        values = past.recent(now, name)
        if values and average(values) > KL_LIMIT:
            return f"{name} is {average(values):.3g} nats per token over {WINDOW} steps, more than {KL_LIMIT:g}"
    return ""


@check(
    "a teacher that teaches nothing",
    meaning="the teacher says what the policy says anyway, or few tokens have a teacher at all",
    key=(
        "model.reference or model.teachers (another model than the policy's, whose sources are those of the data), "
        "data.hint, or 'hint' in data.sources, where the policy teaches itself (SECTION.teacher)"
    ),
)
def _taught(now: LogRecord, past: Past) -> str:
    start, shares = past.at_first("opd/reverse_kl"), past.recent(now, "opd/compared")
    if shares and average(shares) < COMPARED:
        return f"opd/compared is {average(shares):.2f} over {WINDOW} steps: the other tokens have no teacher"
    if past.steps != WINDOW or start is None or abs(start) >= TAUGHT:
        return ""
    return f"opd/reverse_kl is {start:.3g} nats per token in the first {WINDOW} steps, less than {TAUGHT:g}"


@check(
    "a teacher that disagrees more and more",
    meaning="the policy moves away from its teacher: updates are too large, or a policy that teaches itself drifts",
    key=(
        "trainer.learning_rate lower, SECTION.reward_coef lower; SECTION.teacher='initial', or SECTION.teacher_rate "
        "lower, where the policy teaches itself"
    ),
)
def _apart(now: LogRecord, past: Past) -> str:
    return _since_first(now, past, "opd/reverse_kl", lambda mean, first: mean > APART * max(first, 10 * TAUGHT))


@check(
    "observations that are not learned",
    meaning="the environment's answers cannot be predicted, and their gradient disturbs the policy's gradient",
    key="SECTION.observation_coef lower, or 0",
)
def _observed(now: LogRecord, past: Past) -> str:
    if past.steps + 1 < 2 * SETTLED:
        return ""
    return _since_first(now, past, "echo/nll", lambda mean, first: first > 0 and mean >= 0.95 * first)


@check(
    "chosen answers become unlikely",
    meaning="the policy leaves the better answer of a pair as well as the worse one",
    key="dpo.beta higher, trainer.learning_rate lower, or algorithm=orpo, where the policy writes no such answers yet",
)
def _chosen(now: LogRecord, past: Past) -> str:
    name = "dpo/chosen_logprob" if "dpo/chosen_logprob" in now else "orpo/chosen_logprob"
    return _since_first(now, past, name, lambda mean, first: first < 0 and mean < UNLIKELY * first)


@check(
    "adapters without effect",
    meaning="the adapters learn nothing, or what they learned is not served: the base model samples",
    key="model.lora.pattern (which layers have adapters), model.lora.alpha, trainer.learning_rate",
)
def _adapters(now: LogRecord, past: Past) -> str:
    if not (past.setting("model.lora", {}) or {}).get("rank") or not _still(now, past):
        return ""
    return f"actor/grad_norm is 0 in {WINDOW} steps whose samples have a signal"


@check(
    "adapters not served",
    kind="evaluation",
    meaning="evaluations of a trained policy are equal to the last digit: the engine serves the base model, or the "
    "updates are too small, or the records too few, for any answer to change",
    key="rollout.merge_adapters the other way; report it",
)
def _served(now: LogRecord, past: Past) -> str:
    if not (past.setting("model.lora", {}) or {}).get("rank") or not past.evaluations:
        return ""
    before = past.evaluations[-1]
    sampled = {name for name in now if name.startswith("eval/error/sampled")}
    varies = any(number(now, name) for name in sampled)
    same = all(now.get(name) == before.get(name) for name in now if name.startswith("eval/"))
    if not (varies and same and now["step"] > before["step"]):
        return ""
    return f"all {len(now) - 1} numbers of the evaluation are those after step {before['step']}"


# Tools, evaluation, time.


@check(
    "tools that fail",
    meaning="calls of a tool fail: it is broken, too slow, or the model does not know how to ask",
    key="the tool (env.tools, env.mcp), env.call_deadline_s, env.concurrency; samples.jsonl shows its answers",
)
def _tools(now: LogRecord, past: Past) -> str:
    records = [*past.last, now][-WINDOW:]
    count = lambda tool, what: sum(number(record, f"tools/{tool}/{what}") or 0.0 for record in records)  # noqa: E731
    tools = sorted(name.split("/")[1] for name in now if re.fullmatch(r"tools/.+/calls", name))
    if len(records) < WINDOW:
        return ""
    for tool in tools:
        calls, failures = count(tool, "calls"), count(tool, "failures")
        if tool != _UNKNOWN and calls >= 10 and failures > FAILING * calls:
            return f"{failures:.0f} of {calls:.0f} calls of {tool} in {WINDOW} steps failed"
    calls, nowhere = sum(count(tool, "calls") for tool in tools), count(_UNKNOWN, "calls")
    if calls >= 10 and nowhere > FAILING * calls:
        return (
            f"{nowhere:.0f} of {calls:.0f} calls in {WINDOW} steps named a tool that does not exist: the prompts must "
            "tell the model its tools (data.system_prompt, or a chat template that lists them)"
        )
    return ""


@check(
    "evaluation off the training distribution",
    kind="evaluation",
    meaning="what is learned in training does not carry over: learned by heart, an exploited reward, or other data",
    key=(
        "data.eval_path (is it the same task?), more data, the reward; SECTION.beta higher, or a KL in the reward "
        "(algorithm=rloo)"
    ),
)
def _evaluation(now: LogRecord, past: Past) -> str:
    names = [name for name in ("eval/sampled_reward", "eval/greedy_reward") if number(now, name) is not None]
    start, spread = past.at_first("reward/mean"), past.at_first("reward/std")
    trained = [number(record, "reward/mean") for record in list(past.last)[-WINDOW:]]
    if not names or not past.evaluations or start is None or not spread or None in trained or past.steps < 2 * WINDOW:
        return ""
    rise = average([value for value in trained if value is not None]) - start
    before, after = (number(record, names[0]) for record in (past.evaluations[0], now))
    errors = [number(record, names[0].replace("eval/", "eval/error/")) for record in (past.evaluations[0], now)]
    if before is None or after is None or None in errors or rise < spread / 2:
        return ""
    margin = 1.96 * math.hypot(*(error for error in errors if error is not None))
    if after - before + margin >= rise / 4:
        return ""
    return (
        f"reward/mean rose by {rise:.3g} since the first steps, and {names[0]} by {after - before:.3g} ± {margin:.2g}"
    )


@check(
    "evaluation gets worse",
    kind="evaluation",
    meaning="the policy forgets, or learns what does not help: steps are too large, or a teacher is no better than it",
    key=(
        "trainer.learning_rate lower, fewer steps (trainer.max_steps); data.hint, where the policy teaches itself by a "
        "hint that it misreads; with algorithm=sft one pass over the answers, then an algorithm with rewards"
    ),
)
def _worse(now: LogRecord, past: Past) -> str:
    if not past.evaluations:
        return ""
    for name in ("eval/sampled_reward", "eval/greedy_reward"):
        before, after = (number(record, name) for record in (past.evaluations[0], now))
        errors = [number(record, name.replace("eval/", "eval/error/")) for record in (past.evaluations[0], now)]
        if before is None or after is None or None in errors:
            continue
        margin = 3.0 * math.hypot(*(error for error in errors if error is not None))
        return f"{name} was {before:.3g} and is {after:.3g} ± {margin:.2g}" if after + margin < before else ""
    return ""


@check(
    "the trainer waits for samples",
    meaning="the update stands still until the longest samples of its batch have ended",
    key=(
        "SECTION.max_staleness=2 on devices of their own (--topology=split), with algorithm=prime_rl; more devices for "
        "the rollout (roles.rollout.mesh)"
    ),
)
def _waits(now: LogRecord, past: Past) -> str:
    names = ("perf/waits_samples", "completion/length_max", "completion/length_mean")
    waits, longest, mean = (past.recent(now, name, SETTLED) for name in names)
    if past.steps + 1 < SETTLED + 2 or not waits or average(waits) <= WAITS:
        return ""
    uneven = average(longest) / average(mean) if longest and mean and average(mean) > 0 else 0.0
    if not past.setting("algo.max_staleness", 0) and uneven < LONGEST:
        # Without staleness the update always waits for samples. To overlap sampling and update pays only if a few
        # samples are much longer than the others.
        return ""
    text = f"perf/waits_samples is {average(waits):.2f} over {SETTLED} steps"
    return f"{text}, the longest sample {uneven:.2g} times the mean" if uneven else text


@check(
    "a stage is the bottleneck",
    meaning="the devices wait for the host: for prompts, for reward functions, or for the disk",
    key="reward.workers (time/reward), data.path nearer (time/data), checkpoint.every higher (time/checkpoint)",
)
def _bottleneck(now: LogRecord, past: Past) -> str:
    records = [*past.last, now][-SETTLED:]
    total = sum(number(record, "time/step") or 0 for record in records)
    if past.steps + 1 < SETTLED + 2 or not total:  # the first steps are slow, because they compile
        return ""
    for stage in ("data", "reward", "checkpoint"):
        spent = sum(number(record, f"time/{stage}") or 0 for record in records)
        if spent > STARVED * total:
            share = percent(spent / total)
            return f"time/{stage} is {share} of time/step over {SETTLED} steps ({spent:.3g} of {total:.3g} s)"
    return ""


def _since_first(
    now: LogRecord, past: Past, name: str, wrong: Callable[[float, float], bool], unit: str = " nats"
) -> str:
    """Describes a metric if `wrong` is True for its mean over WINDOW steps and its mean in the first steps; else ''."""
    values, first = past.recent(now, name), past.at_first(name)
    if not values or first is None or not wrong(average(values), first):
        return ""
    return f"{name} is {average(values):.3g}{unit} over {WINDOW} steps, and was {first:.3g} in the first ones"


def _paying(now: LogRecord, past: Past) -> list[str]:
    """Lists the names of the reward functions, and of the environment unless it is 'tools', which gives no reward."""
    names = [name.removeprefix("reward/zero/") for name in now if name.startswith("reward/zero/")]
    return [name for name in names if name != "environment" or past.setting("env.environment", "") != "tools"]


def _still(now: LogRecord, past: Past) -> bool:
    """Returns True if the gradient was 0 in WINDOW steps, although each step should have changed the policy.

    Each step had samples in the loss, a learning rate above 0, and, except with PPO, a group with unequal rewards.
    """
    norms, rates = past.recent(now, "actor/grad_norm"), past.recent(now, "actor/lr")
    samples = [count > 0 for count in past.recent(now, "loss/samples")]
    signal = [value < 1 for value in past.recent(now, "reward/groups_without_signal")]
    trains = all(samples) and all(rate > 0 for rate in rates)
    return bool(norms) and not any(norms) and trains and (all(signal) or past.section == "ppo")


def _saturated(now: LogRecord, past: Past) -> bool:
    """Returns True if rewards hardly differ any more and are higher than in the first steps.

    Rewards do not count as saturated if a function gives 0 to nearly all samples: another check reports this function.
    """
    paying = [name for name in _paying(now, past) if (number(now, f"reward/{name}") or 0) >= 0]
    if any((number(now, f"reward/zero/{name}") or 0) >= UNPAID for name in paying):
        return False
    stds, start, mean = past.recent(now, "reward/std"), past.at_first("reward/std"), past.at_first("reward/mean")
    if not stds or not start or mean is None:
        return False
    return average(stds) < 0.1 * start and (number(now, "reward/mean") or 0) > mean
