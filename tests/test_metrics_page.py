"""docs/metrics.md lists exactly the metrics that runs write; processes.run checks whole runs against it."""

from metric_names import ROOT, listed, unlisted, written


def test_the_page_lists_every_name_that_code_can_write():
    assert sorted(written() - set(listed())) == []


def test_every_name_of_the_page_is_written_by_something():
    assert sorted(set(listed()) - written()) == []


def test_names_are_listed_once_and_in_short_lines():
    assert len(listed()) == len(set(listed())) > 80
    assert max(len(line) for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()) <= 140


def test_an_unknown_name_is_found():
    assert unlisted(["step", "reward/mine", "tools/search/calls", "time/start-up"]) == []
    assert unlisted(["actor/pg_los", "tools/search/cals", "loss"]) == ["actor/pg_los", "loss", "tools/search/cals"]
