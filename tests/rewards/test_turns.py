"""Rewards that read the records of a sample's turns."""

from podrl.rewards.compose import RewardConfig, Rewards


def test_every_failed_call_costs_one():
    said = {"by": "model", "text": "x"}
    worked, failed = ({"by": "calculator", "failed": why} for why in ("", "ValueError"))
    turns = [[said], [said, worked, said], [said, failed, said, worked, said], [said, failed, said, failed]]
    with Rewards(RewardConfig(fns=("failed_calls",), workers=1)) as rewards:
        scored = rewards.score([""] * 4, ["x"] * 4, {"turns": turns})
    assert scored.tolist() == [[0.0, 0.0, -1.0, -2.0]]
