"""Checks what dynamic sampling promises in runs with `rollout.clock='wall'`."""


def assert_replaced(found, journal, asked, *, size, group_size, differ):
    """Asserts that each opened prompt was either trained once or dropped once, and that the counts of groups are right.

    Args:
      found: the trained batches, by step.
      journal: the journal of the run.
      asked: the prompts that were read for each batch, by step, prompts in reserve included.
      size: number of prompts of a batch, prompts in reserve not counted.
      group_size: number of samples per prompt.
      differ: function that tells from a group's number of tokens whether its rewards differ.
    """
    opened, ended = [], []
    for step, batch in found.items():
        dropped, counts = [index for index, _ in journal.batch(step)["dropped"]], batch.counts
        opened += asked[step].index_P[: size + len(dropped)].tolist()
        ended += [*batch.rollouts.prompts.index_P.tolist(), *dropped]
        equal = sum(
            not differ(n) for n in (batch.rollouts.version_BT >= 0).sum(axis=1).reshape(-1, group_size).sum(axis=1)
        )
        assert len(dropped) <= len(asked[step].index_P) - size
        assert not equal or len(dropped) == len(asked[step].index_P) - size, (
            "groups without signal are trained only if the whole reserve was drawn"
        )
        assert counts["dynamic_sampling/groups_left_without_signal"] == equal
        assert counts["dynamic_sampling/groups_replaced"] == len(dropped)
        assert counts["dynamic_sampling/groups_drawn"] == size + len(dropped)
        assert counts.get("loss/left_out/dynamic_sampling", 0.0) == group_size * len(dropped)
    assert sorted(ended) == sorted(opened)
    assert sum(batch.counts["dynamic_sampling/groups_replaced"] for batch in found.values()) > 0
